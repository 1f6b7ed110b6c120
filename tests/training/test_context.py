"""Test the console on a pseudo-terminal, and the run folder.

The run folder keeps all complete records if a run dies while it writes one.
"""

import fcntl
import io
import itertools
import json
import math
import os
import pty
import struct
import termios
from pathlib import Path
from unittest import mock

import pytest
from helpers.disks import make_read_only, small_disk

from megazpp.base.files import make_writable
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.training.context import Console, RunFolder


def run_three_steps(console: Console) -> None:
    console.log("before")
    console.start_bar(6, 3)  # like a run of 6 steps that resumes after step 3
    for index in range(3):
        console.advance(float(10 - index))
        console.log(f" iteration {index + 4}/6 | lm loss: {10 - index} |")
    console.stop_bar()
    console.log("after")


LINES = ["before", *(f" iteration {n}/6 | lm loss: {14 - n} |" for n in (4, 5, 6)), "after"]


def on_a_terminal(*, enabled: bool = True) -> str:
    """Return the characters that a console writes to a pseudo-terminal of 80 columns during three training steps."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(writer, "w") as out:
        run_three_steps(Console(enabled=enabled, out=out))
        out.write("\0")
        out.flush()
        received = b""
        while not received.endswith(b"\0"):
            received += os.read(reader, 65536)
    os.close(reader)
    return received[:-1].decode()


def on_screen(received: str) -> list[str]:
    """Return the lines that a terminal shows after it has received all characters.

    A carriage return moves to the start of the line, and later characters overwrite earlier ones.
    """
    lines = []
    for line in received.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_terminal_shows_log_lines_above_a_bar_with_the_time_left():
    received = on_a_terminal()
    assert " 67%|" in received
    assert "<00:0" in received  # the bar shows less than 10 seconds left, in the form of tqdm
    assert "loss 9.0000" in received
    shown = [line for line in on_screen(received) if line]
    assert [line for line in shown if "%|" not in line] == LINES
    (bar,) = (line for line in shown if "%|" in line)
    assert "6/6" in bar
    # only the last state of the progress bar remains, followed by the log line that was written after it
    assert shown.index(bar) == len(shown) - 2


def test_terminal_wraps_long_lines_but_not_commands_and_the_file_gets_them_whole(tmp_path):
    long = "note: " + "--some-flag of a long line, " * 12
    out = mock.Mock(isatty=lambda: True, write=(written := []).append)
    console = Console(enabled=True, out=out)
    console.keep(tmp_path / "log.txt")
    console.log(f"short\n{long}")
    console.log(long, short=long)
    *wrapped, command, _ = "".join(written).split("\n")
    assert len(wrapped) == 4
    assert max(map(len, wrapped)) <= 120
    assert " ".join(map(str.strip, wrapped)) == f"short {long.strip()}"
    assert not [line for line in wrapped if line.endswith("-")]
    assert command == long
    assert (tmp_path / "log.txt").read_text() == f"short\n{long}\n{long}\n"


def test_console_prints_no_bar_to_a_file_and_nothing_on_other_ranks():
    out = io.StringIO()
    run_three_steps(Console(enabled=True, out=out))
    assert out.getvalue().splitlines() == LINES
    assert on_a_terminal(enabled=False) == ""


def test_unwritable_log_file_is_reported_once_and_ends_nothing():
    out = io.StringIO()
    console = Console(enabled=True, out=out)
    console.keep(Path("/dev/full"))
    console.log("first")
    console.log("second")
    assert out.getvalue().splitlines()[1:] == ["first", "second"]
    assert out.getvalue().startswith("warning: /dev/full: No space left on device; no more lines are written to it")


def test_restart_appends_metrics_after_a_cut_line_and_writes_nan_as_null(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for iteration in (1, 2):
        RunFolder(tmp_path).append(file.name, {"iteration": iteration})
    with file.open("a") as out:
        out.write('{"iterat')
    RunFolder(tmp_path).append(
        file.name, {"lm_loss": math.nan, "grad_norm": math.inf, "by": {"layer": [1.0, -math.inf]}}
    )
    *lines, last = file.read_text().splitlines()
    assert lines == ['{"iteration": 1}', '{"iteration": 2}', '{"iterat']
    assert last == '{"lm_loss": null, "grad_norm": null, "by": {"layer": [1.0, null]}}'
    RunFolder(tmp_path).write_json("summary.json", {"test_loss": math.nan})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"test_loss": None}


def test_file_of_an_earlier_run_that_is_not_utf8_is_kept_under_another_name(tmp_path):
    (tmp_path / "args.txt").write_bytes(b"--save \xff\n")  # a crash has damaged it, or the locale has changed
    RunFolder(tmp_path).write("args.txt", "--save ä\n")
    assert (tmp_path / "args.txt").read_bytes() == "--save ä\n".encode()
    assert (tmp_path / "args.1.txt").read_bytes() == b"--save \xff\n"


def test_run_folder_is_locked_by_one_job_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    # each reading of the clock adds a second, so the patience of 5 s ends after six tries to lock
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.lock()
    # --save and --run-dir may name the same folder, because their locks are separate
    CheckpointFolder(str(tmp_path), "--save").lock()
    with pytest.raises(ValueError, match=rf"--run-dir {tmp_path} is in use by process {os.getpid()} on .*: give each"):
        second.lock()
    first.unlock()
    second.lock()


def test_replaced_files_keep_a_numbered_name(tmp_path):
    for lr in (1, 2, 2, 3):
        folder = RunFolder(tmp_path)
        folder.write_json("args.json", {"lr": lr, "path": Path("x")}, indent=2)
        folder.write("args.txt", f"--lr {lr}\n")
        folder.write_json("summary.json", {"final_loss": lr})
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert json.loads(found["args.json"]) == {"lr": 3, "path": "x"}
    assert [json.loads(found[f"args.{number}.json"])["lr"] for number in (1, 2)] == [1, 2]
    assert (found["args.txt"], found["args.1.txt"]) == ("--lr 3\n", "--lr 1\n")
    assert json.loads(found["summary.2.json"]) == {"final_loss": 2}
    assert len(found) == 9


def test_wandb_run_id_is_stored_once_and_the_environment_overrides_it(tmp_path, monkeypatch):
    def ids() -> list[str]:
        return [RunFolder(tmp_path / name).wandb_run_id() for name in "ab"]

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "wandb_run_id").touch()  # a full disk or a crash may have left it empty
    drawn = RunFolder(tmp_path / "a").wandb_run_id()
    assert len(drawn) == 8
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert ids() == ["mine", "mine"]
    monkeypatch.delenv("WANDB_RUN_ID")
    assert ids() == [drawn, "mine"]


def test_unwritable_folder_raises_an_error_with_flag_path_and_reason(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"--run-dir .*file/below is not a folder .* Not a directory"):
        RunFolder(file / "below")
    with pytest.raises(ValueError, match=r"--run-dir .*file is not a folder .* File exists"):
        RunFolder(file)
    with pytest.raises(ValueError, match="--tensorboard-dir /proc/none"):
        make_writable("/proc/none", "--tensorboard-dir")


def test_full_or_read_only_disk_is_detected_before_the_first_record(tmp_path):
    with small_disk(tmp_path / "full", "64k") as disk:
        with pytest.raises(ValueError, match=f"--run-dir {disk} is not .*No space left on device"):
            RunFolder(disk)
        assert list(disk.iterdir()) == []
    with small_disk(tmp_path / "read_only", "4m") as disk:
        make_read_only(disk)
        with pytest.raises(ValueError, match=r"--run-dir .* is not .*Read-only file system"):
            RunFolder(disk / "run")
