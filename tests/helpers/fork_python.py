"""A `python` command that starts in milliseconds by forking a process that has already imported torch.

The fork has the caller's arguments, folder, environment and open files. Workers that the program starts by
`sys.executable` are forks too. Signals and process groups reach only the client, so tests of how jobs end use the
real Python.

    command: python tools/x.py --flag     (a small client, below)
        connects and sends its files   --> server: forks; the child becomes the program
        waits for the exit code        <-- server: waits in a thread for the child, which ends with its client
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
    """Return the path of the command. Its server starts at first use and ends with the tests."""
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
    """Kill this process group when the tests have ended, which closes the other end of standard input."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def serve(address: str) -> None:
    """Import the modules, then fork for every connection."""
    threading.Thread(target=end_with_tests, daemon=True).start()
    sys.path.remove(str(Path(__file__).parent))
    gc.disable()
    for name in ("pretrain_gpt", "torch._dynamo", "transformers", "sentencepiece"):
        __import__(name)
    gc.freeze()  # garbage collection in a fork then skips these objects, so their pages stay shared
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"!")  # the server is ready
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
    """Send the exit code, as a shell reports it. If the client has disconnected, kill its program."""
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with connection, contextlib.suppress(BrokenPipeError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())


def become(words: list[str], cwd: str, env: dict[str, str], files: list[int]) -> None:
    """Turn this process into the program that `python words...` would run; never return."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if LAUNCHER_PID in env:
        os.environ[LAUNCHER_PID] = str(os.getppid())  # a worker ends with its parent, here the server
    tempfile.tempdir = None  # forget the server's
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
    os._exit(code)  # a normal exit with torch takes a second


if __name__ == "__main__":
    serve(sys.argv[1])
