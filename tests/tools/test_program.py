"""Test how programs end: exit codes, one-line errors, a closed output pipe, and a launcher that was killed."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fork_python import forked_python
from helpers.program import ROOT, Program, run_program

from megazpp.base.program import LAUNCHER_PID, JobError, exit_on_signals, in_words, lasting_output, program, say
from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis

# Benchmarks start these two files as ranks.
STARTED_AS_RANKS = {"benchmark_cluster_ranks", "benchmark_elastic_job"}
MISSING = OSError(2, "no", "/proc/x")
# each entry: flags, value that `main` returns or exception that it raises, exit code, text on stderr
ENDS: list[tuple[str, Any, int, str]] = [
    ("", None, 0, ""),
    ("", 2, 2, ""),
    ("", ValueError("no"), 2, "error: no"),
    ("", JobError("no"), 1, "error: no"),
    ("", KeyboardInterrupt(), 130, "interrupted"),
    # if a file cannot be created, the error must name the flag that gave its path
    ("--to /proc/x", MISSING, 2, "error: --to /proc/x: /proc/x: no"),
    ("--to=/proc/x/y", MISSING, 2, "error: --to /proc/x/y: /proc/x: no"),
    ("--many a /proc --to b", MISSING, 2, "error: --many /proc: /proc/x: no"),
    ("--to b", MISSING, 2, "error: /proc/x: no"),
]


def test_program_ends_with_mains_status_or_a_one_line_error(capsys):
    @program
    def main(argv: list[str]) -> int | None:
        if isinstance(end, BaseException):
            raise end
        return end

    for flags, end, status, said in ENDS:
        assert main(flags.split()) == status, (flags, end)
        assert capsys.readouterr().err == (f"test_program.py: {said}\n" if said else "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_another_encoding_escapes_its_missing_characters(monkeypatch, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    text = "Caf\u00e9 \u20ac, and a path with a byte that is not UTF-8: \udcff"
    assert program(lambda argv: print(text))([]) == 0
    assert out.buffer.getvalue().decode(encoding).strip() == text.encode(encoding, "backslashreplace").decode(encoding)


def unread(*command: object, folder: Path) -> tuple[int, str]:
    """Run a program whose stdout is a pipe without a reader. Return (exit code, text on stderr)."""
    reads, writes = os.pipe()
    os.close(reads)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    words = [str(forked_python()), *map(str, command)]
    done = subprocess.run(words, cwd=ROOT, env=env, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writes)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_program_with_a_closed_output_pipe_ends_silently(converted, tmp_path):
    assert unread("tools/show_topology.py", "--nodes", 2, "--ranks-per-node", 4, folder=tmp_path) == (141, "")
    flags = ["--load", converted / "ours", "--prompt", "Call me", "--sample-tokens", 30, "--nproc", 2]
    code, error = unread("tools/generate.py", *flags, folder=tmp_path)
    assert code == 141
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


def test_every_tool_finds_the_checkout_begins_first_and_is_a_program():
    """Check how each program's file begins: with the lines by which Ctrl-C during the imports ends it with one message.

    These lines must also work in a checkout that is not installed.
    """
    paths = [ROOT / "pretrain_gpt.py", *(ROOT / "tools").glob("**/*.py")]
    texts = {path.stem: path.read_text() for path in paths if "examples" not in path.parts}
    tools = {name: text for name, text in texts.items() if '__name__ == "__main__"' in text}
    assert len(tools) > 15
    assert tools.keys() >= STARTED_AS_RANKS
    for name in tools.keys() - STARTED_AS_RANKS:
        before, begun, after = tools[name].partition("from megazpp.base.program import begin\n\nbegin(__name__)")
        assert begun, name
        assert not re.search(r"^(from|import) (torch|numpy|megazpp)", before, re.M), name
        assert "\nsys.path." in before or name == "pretrain_gpt", name
        assert re.search(r"^@(distributed_program$|program(_of\(|$))", after, re.M), name


IMPORTING = """
import time
from megazpp.base.program import begin
begin(__name__)
print("begun", flush=True)
time.sleep(60)
"""
# A mutex that is locked twice blocks in C, as SentencePiece's training does, and a signal does not end the wait.
IN_C = """
import ctypes, signal
from megazpp.base.program import handling
libc, mutex = ctypes.CDLL(None), (ctypes.c_char * 64)()
libc.pthread_mutex_lock(mutex)
with handling([signal.SIGINT], signal.SIG_DFL):
    print("begun", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("text", "said", "code"), [(IMPORTING, "-c: interrupted\n", 130), (IN_C, "", -signal.SIGINT)])
def test_ctrl_c_in_imports_or_in_c_code_ends_the_program_without_traceback(tmp_path, text, said, code):
    program = Program("-c", text, folder=tmp_path)
    program.wait_for("begun")
    program.process.send_signal(signal.SIGINT)
    assert program.finish() == f"begun\n{said}"
    assert program.process.returncode == code


def test_worker_ends_on_ctrl_c_in_its_imports_though_the_launcher_has_blocked_it(tmp_path, monkeypatch):
    """Start a worker with SIGINT blocked, as the launcher does, and send it SIGINT during its imports.

    The worker must end, but print nothing about it, because its launcher prints that the job was interrupted.
    """
    monkeypatch.setenv(LAUNCHER_PID, str(os.getpid()))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as the launcher does
    try:
        worker = Program("-c", IMPORTING, folder=tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    worker.wait_for("begun")
    worker.process.send_signal(signal.SIGINT)
    assert worker.finish() == "begun\n"
    assert worker.process.returncode == 130


def test_ctrl_c_runs_final_blocks_once_the_program_works(tmp_path):
    text = (
        "import time; from megazpp.base.program import begin, program; begin(__name__)\n"
        "def main(argv):\n"
        "    try: print('begun', flush=True); time.sleep(60)\n"
        "    finally: print('cleaned up')\n"
        "main.__module__ = '__main__'\n"
        "raise SystemExit(program(main)([]))\n"
    )
    (tmp_path / "tool.py").write_text(text)
    tool = Program(str(tmp_path / "tool.py"), folder=tmp_path)
    tool.wait_for("begun")
    tool.process.send_signal(signal.SIGINT)
    assert sorted(tool.finish().splitlines()) == ["begun", "cleaned up", "tool.py: interrupted"]
    assert tool.process.returncode == 130


STREAMS = """
import os, socket, sys
from megazpp.base.program import begin, program, say
begin(__name__)
def main(argv):
    say("to stderr")
    print("to stdout", sys.stdin.read(), flush=True)
    print(socket.socket().fileno(), file=open(argv[0], "w"))
main.__module__ = "__main__"
raise SystemExit(program(main)())
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_replaced_before_a_socket_gets_their_numbers(tmp_path, closed):
    """Start a program whose standard streams are closed, and let it open a socket.

    The socket must get a file number above 2. Otherwise printed text would go to the socket.
    """
    (tmp_path / "tool.py").write_text(STREAMS)
    line = f"exec {sys.executable} {tmp_path / 'tool.py'} {tmp_path / 'number'} {closed}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", line], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert int((tmp_path / "number").read_text()) > 2


def test_full_disk_at_stdout_is_named_or_drops_text_like_a_closed_terminal(monkeypatch, capsys):
    lost: list[str] = []

    def work(argv: list[str]) -> int:
        with lasting_output(lambda: lost.append("lost")) if argv else contextlib.nullcontext():
            print("to the full disk", flush=True)
        return 7

    for argv, code in ((["trains"], 7), ([], 2)):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert program(work)(argv) == code
    assert lost == ["lost"]
    assert "/dev/full: No space left on device; free disk space" in capsys.readouterr().err


def test_closed_terminal_does_not_end_a_program(monkeypatch):
    near, far = os.openpty()
    os.close(near)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, os.fdopen(os.dup(far), "w"))

    def work(argv: list[str]) -> int:
        print("to the closed terminal", flush=True)
        say("and to stderr")
        return 7

    assert program(work)([]) == 7


def test_data_tools_start_without_torch(tmp_path):
    """Check that the data tools do not import torch at their start.

    Their worker processes import the same modules, and torch would make the start ten times as long.
    """
    tools = "preprocess_data, train_tokenizer, merge_datasets, inspect_dataset, report"
    program = f"import sys; sys.path.append('tools'); import {tools}; sys.exit('torch' in sys.modules)"
    assert run_program("-c", program, folder=tmp_path) == (0, "")


def test_errors_are_put_in_words_and_raised_on_all_ranks():
    for fails, said in (
        (lambda: "a\ud800".encode(), r"'\ud800' is half of a surrogate pair, which is not valid text"),
        (lambda: Path("/proc/x/y").read_text(), "/proc/x/y: No such file or directory"),
        (lambda: int("x"), "invalid literal for int() with base 10: 'x'"),
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            fails()
        assert in_words(caught.value, ["--sample-prompt", "~no.such.user"]) == said
        with pytest.raises(ValueError, match=re.escape(said) + "$"):
            raise_on_all_ranks(MeshAxis("checkpoint"), fails)


def test_program_started_by_nohup_goes_on_after_sighup():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        exit_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


CHILD = "import os, time; from megazpp.base.program import end_with; end_with(os.getppid()); print('runs', flush=True)"
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD + '; time.sleep(60)'!r}])"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux ends a child with its launcher")
def test_child_ends_when_its_launcher_is_killed(tmp_path):
    launcher = Program("-c", LAUNCHER, folder=tmp_path)
    launcher.wait_for("runs")
    assert len(launcher.left_behind()) == 2
    launcher.process.kill()
    assert launcher.all_end()


def test_child_ends_at_once_if_its_launcher_is_already_gone(tmp_path):
    program = "from megazpp.base.program import end_with; end_with(1 << 30); print('still here')"
    assert run_program("-c", program, folder=tmp_path) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["tools/inspect_dataset.py", "tests/gpu_check/gpu_check.py"])
def test_tool_runs_from_a_checkout_that_is_not_installed(tmp_path, monkeypatch, tool):
    for absent in ("wandb", "torchao"):
        (tmp_path / f"{absent}.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(torch.__file__).parents[1]}")
    # Python's -S disables .pth files, so none of them can make an uninstalled checkout importable.
    command = [sys.executable, "-S", tool, "--help"]
    assert "usage:" in subprocess.check_output(command, cwd=ROOT, text=True)
