"""How programs end, above all where nobody reads on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.program import ROOT
from helpers.trained import Trained

from megazpp.base.program import JobError, program


@pytest.mark.parametrize(
    ("argv", "end", "status", "said"),
    [
        ([], None, 0, ""),
        ([], 2, 2, ""),
        ([], ValueError("no"), 2, "error: no"),
        ([], JobError("no"), 1, "error: no"),
        ([], KeyboardInterrupt(), 130, "interrupted"),
        # a file that cannot be made is named with its flag
        (["--to", "/proc/x"], OSError(2, "no", "/proc/x"), 2, "error: --to /proc/x: /proc/x: no"),
        (["--to=/proc/x/y"], OSError(2, "no", "/proc/x"), 2, "error: --to /proc/x/y: /proc/x: no"),
        (["--many", "a", "/proc", "--to", "b"], OSError(2, "no", "/proc/x"), 2, "error: --many /proc: /proc/x: no"),
        (["--to", "b"], OSError(2, "no", "/proc/x"), 2, "error: /proc/x: no"),
    ],
)
def test_a_program_ends_with_the_status_of_its_main_and_a_mistake_or_an_interrupt_is_one_line(
    argv: list[str], end: Any, status: int, said: str, capsys: pytest.CaptureFixture[str]
):
    @program
    def main(argv: list[str]) -> int | None:
        if isinstance(end, BaseException):
            raise end
        return end

    assert main(argv) == status
    assert capsys.readouterr().err == (f"test_program.py: {said}\n" if said else "")


def unread(*command: str, folder: Path) -> tuple[int, str]:
    """(exit code, stderr) of a program whose stdout is a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        command = (sys.executable, *command)
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120)
        return done.returncode, done.stderr
    finally:
        os.close(writes)


@pytest.mark.slow
def test_a_tool_whose_reader_has_gone_ends_without_a_word(tmp_path: Path):
    flags = ["--nodes", "2", "--ranks-per-node", "4"]
    assert unread("tools/show_topology.py", *flags, folder=tmp_path) == (141, "")


@pytest.mark.slow
def test_workers_whose_reader_has_gone_end_without_a_word(trained: Trained):
    flags = ["--load", str(trained.load), "--prompt", "The cat", "--sample-tokens", "30", "--nproc", "2"]
    code, error = unread("tools/generate.py", *flags, folder=trained.home)
    assert code == 141
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


def test_every_tool_ends_that_way():
    programs = [*(ROOT / "tools").glob("*.py"), *(ROOT / "tools/benchmarks").glob("*.py")]
    tools = [path for path in programs if 'if __name__ == "__main__":' in path.read_text()]
    assert len(tools) > 15
    others = [path.name for path in tools if not re.search(r"^@program", path.read_text(), re.MULTILINE)]
    assert others == ["benchmark_cluster_ranks.py"]


def test_tools_for_data_start_without_torch():
    """Every worker process of theirs begins with the same imports, which torch would make ten times as long."""
    tools = "preprocess_data, train_tokenizer, merge_datasets, inspect_dataset, report"
    program = f"import sys; import {tools}; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT / "tools", env=env).returncode == 0
