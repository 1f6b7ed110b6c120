"""A `python` command that starts in milliseconds: a server that has already imported torch forks for each program.

A process that runs the command (the caller) starts a small client process. For each client, the server forks a process
that becomes the program (the fork). The fork has the client's arguments, working directory, environment, open files,
blocked signals and namespaces. Programs that the fork starts by `sys.executable` are forks too. The client passes
signals on to the fork, and ends with the fork's exit code or signal. Only the client is in the caller's session and
process group, and the fork is no descendant of the client.

    command: python tools/x.py --flag     (a small client, below)
        connects and sends its files   --> server: forks; the child becomes the program
        passes signals on to the child <-- server: sends the process ID of the child
        waits for the exit code        <-- server: waits in a thread for the child; kills the child if the client ends

The test processes of pytest-xdist are forks as well: tests/conftest.py gives pytest-xdist this command in place of
Python, so they are forks of a server that pytest's main process starts. Before a test process runs any code of pytest,
it forks once more. This second fork is the server for the programs that the tests of the test process start. So torch
is imported only once in a test run.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

from megazpp.base.program import LAUNCHER_PID

ROOT = Path(__file__).resolve().parents[2]
OTHERS_MODULES = (
    *("torch._dynamo", "torch.distributed.checkpoint"),
    *("transformers", "transformers.models.auto.tokenization_auto", "sentencepiece"),
)
MODULES = ("pretrain_gpt", "megazpp.post_training.trainer", *OTHERS_MODULES, "wandb")
# Environment variable of a test process: path of the command whose server the test process has forked
PROGRAMS = "MEGAZPP_TEST_PYTHON"
WORKER = "--test-process"  # first argument of the command, by which pytest-xdist starts a test process
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1].startswith("-") and sys.argv[1] not in ("-m", "{worker}"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b" "], [0, 1, 2])
    passed = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    blocked = [*signal.pthread_sigmask(signal.SIG_BLOCK, passed)]  # until it can pass them on
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), blocked, os.getpid()]).encode() + b"\\n")
    answers = server.makefile()
    child = int(answers.readline())
    for signum in passed:
        signal.signal(signum, lambda signum, frame: os.kill(child, signum))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    code = int(answers.readline() or "1")
if code >= 0:
    sys.exit(code)
for signum in passed:
    signal.signal(signum, signal.SIG_DFL)
os.kill(os.getpid(), -code)
"""
_servers: list[subprocess.Popen] = []  # a server ends when this process closes the server's standard input


@functools.cache
def forked_python(*modules: str) -> Path:
    """Return the path of the command that forks. Its server ends with the tests.

    The first call starts the server. In a test process of pytest-xdist, which has a server already, a call without
    `modules` returns the command of that server.

    Args:
        modules: names of the modules that the server imports before it forks; by default those that programs of this
            project import.
    """
    if not modules and PROGRAMS in os.environ:
        return Path(os.environ[PROGRAMS])
    client, listener = make_client()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # The socket listens already, so clients can connect at once, and wait until the server has finished its imports.
    # `with` closes this process's copy of the socket.
    with listener:
        files = {"stdin": subprocess.PIPE, "pass_fds": [listener.fileno()]}
        words = [sys.executable, __file__, str(listener.fileno()), *(modules or MODULES)]
        _servers.append(subprocess.Popen(words, env=env, start_new_session=True, **files))
    return client


def make_client() -> tuple[Path, socket.socket]:
    """Write the client into a temporary folder of this process; return (its path, the socket that it connects to)."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    client, address = Path(folder.name) / "python", f"{folder.name}/socket"
    client.write_text(CLIENT.format(python=sys.executable, address=address, worker=WORKER))
    client.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return client, listener


def end_with_tests() -> None:
    """Wait until the tests have ended, then kill the process group of this server.

    The process that has started this server holds the other end of the pipe that is the server's standard input. The
    read therefore returns when that process ends.
    """
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def serve(file: str, *modules: str) -> None:
    """Import the modules once, then fork for every client that connects to the listening Unix socket `file`."""
    sys.path.remove(str(Path(__file__).parent))
    gc.disable()
    for name in modules:
        __import__(name)
    # garbage collection in a fork then skips these objects, so the fork shares their memory pages with the server
    gc.freeze()
    gc.enable()
    answer_clients(socket.socket(fileno=int(file)))


def answer_clients(listener: socket.socket) -> None:
    """Fork for every client that connects to the listening socket; never return."""
    # Start this thread after the imports. megazpp/parallel/forks.py counts the threads when it is imported, and a
    # launcher forks its workers only if it has as many threads as that. A forked launcher lacks this thread.
    threading.Thread(target=end_with_tests, daemon=True).start()
    with listener:
        python = str(Path(listener.getsockname()).with_name("python"))
        while True:
            connection, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile() as request:
                words, cwd, env, blocked, client = json.loads(request.readline())
            child = os.fork()
            if child == 0:
                listener.close()
                connection.close()
                if words[0] != WORKER:
                    sys.executable = python
                enter_namespaces(client)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                become(words, cwd, env, files)
            for file in files:
                os.close(file)
            threading.Thread(target=answer, args=(child, connection)).start()


def answer(child: int, connection: socket.socket) -> None:
    """Send the process ID of the forked child to its client, and later its exit code, -n if signal n has killed it.

    If the client disconnects first, kill the child, because the caller has ended the program.
    """
    ended = os.pidfd_open(child)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{child}\n".encode())
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    _, status = os.waitpid(child, 0)
    with connection, contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def enter_namespaces(client: int) -> None:
    """Move this forked process into the network, host name and mount namespaces of the process `client`.

    They differ from the server's namespaces if the client runs in an emulated machine.
    """
    for name in ("net", "uts", "mnt"):
        theirs = f"/proc/{client}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            namespace = os.open(theirs, os.O_RDONLY)
            assert ctypes.CDLL(None).setns(namespace, 0) == 0, f"cannot enter {theirs}"
            os.close(namespace)


def fork_programs_server() -> None:
    """Fork the server of the programs that the tests of this process will start, and set PROGRAMS to its command.

    The server ends with this process, which keeps the other end of the pipe that is the server's standard input.
    """
    client, listener = make_client()
    os.environ[PROGRAMS] = str(client)
    ours, theirs = os.pipe()
    if os.fork():
        listener.close()
        os.close(ours)
        return
    os.setsid()
    os.close(theirs)
    os.dup2(ours, 0)
    answer_clients(listener)


def become(words: list[str], cwd: str, env: dict[str, str], files: list[int]) -> None:
    """Turn this forked process into the program that `python words...` would run; never return.

    Args:
        words: path of the program or "-m" and a module, then the program's arguments. After WORKER, they are the
            options of the interpreter with which pytest-xdist starts a test process; the last one is code.
        cwd: working directory of the client.
        env: environment of the client.
        files: descriptors of the client's standard input, output and error.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if LAUNCHER_PID in env:
        # A worker ends when its parent, the process LAUNCHER_PID, ends. The parent of this fork is the server
        os.environ[LAUNCHER_PID] = str(os.getppid())
    tempfile.tempdir = None  # forget the server's folder for temporary files, so that the client's TMPDIR applies
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == WORKER:
            fork_programs_server()
            sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
            exec(words[-1], vars(sys.modules["__main__"]))
            atexit._run_exitfuncs()
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the normal exit, which takes a second once torch is imported


if __name__ == "__main__":
    serve(*sys.argv[1:])
