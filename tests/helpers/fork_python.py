"""A `python` command that starts in milliseconds: a server that has already imported torch forks for each program.

The fork has the caller's arguments, working directory, environment and open files. Workers that the program starts by
`sys.executable` are forks too. Signals and process groups reach only the client process that the caller has started,
so tests of how jobs end use the real Python.

    command: python tools/x.py --flag     (a small client, below)
        connects and sends its files   --> server: forks; the child becomes the program
        waits for the exit code        <-- server: waits in a thread for the child; kills the child if the client ends
"""

import atexit
import contextlib
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
from pathlib import Path

from megazpp.base.program import LAUNCHER_PID

ROOT = Path(__file__).resolve().parents[2]
CLIENT = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1].startswith("-") and sys.argv[1] != "-m":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    sys.exit(int(server.recv(8) or b"1"))
"""


@functools.cache
def forked_python() -> Path:
    """Return the path of the command that forks. Its server starts at the first call and ends with the tests."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    client, address = Path(folder.name) / "python", f"{folder.name}/socket"
    client.write_text(CLIENT.format(python=sys.executable, address=address))
    client.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, __file__, address], subprocess.PIPE
    server = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, start_new_session=True)
    assert server.stdout.read(1), "the server has ended"
    return client


def end_with_tests() -> None:
    """Wait until the tests have ended, then kill the process group of this server.

    The pytest process holds the other end of standard input, so that the read returns when that process ends.
    """
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def serve(address: str) -> None:
    """Import the slow modules once, then fork for every client that connects to the Unix socket at `address`."""
    threading.Thread(target=end_with_tests, daemon=True).start()
    sys.path.remove(str(Path(__file__).parent))
    gc.disable()
    for name in ("pretrain_gpt", "torch._dynamo", "transformers", "sentencepiece"):
        __import__(name)
    # garbage collection in a fork then skips these objects, so the fork shares their memory pages with the server
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"!")  # tell `forked_python` that the server accepts connections
        while True:
            connection, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile() as request:
                words, cwd, env = json.loads(request.readline())
            child = os.fork()
            if child == 0:
                listener.close()
                connection.close()
                sys.executable = str(Path(address).with_name("python"))
                become(words, cwd, env, files)
            for file in files:
                os.close(file)
            threading.Thread(target=answer, args=(child, connection)).start()


def answer(child: int, connection: socket.socket) -> None:
    """Send the exit code of the forked child to its client, as a shell reports it.

    If the client disconnects first, kill the child, because the caller has ended the program.
    """
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with connection, contextlib.suppress(BrokenPipeError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())


def become(words: list[str], cwd: str, env: dict[str, str], files: list[int]) -> None:
    """Turn this forked process into the program that `python words...` would run; never return.

    Args:
        words: path of the program or "-m" and a module, then the program's arguments.
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
        # a worker ends when this process ends; the parent of a fork is the server
        os.environ[LAUNCHER_PID] = str(os.getppid())
    tempfile.tempdir = None  # forget the server's folder for temporary files, so that the client's TMPDIR applies
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
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
    serve(sys.argv[1])
