"""How programs end, above all where nobody reads on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.program import ROOT
from helpers.trained import Trained

from megazpp.base.errors import JobError
from megazpp.base.program import program


@pytest.mark.parametrize("returned", [0, None, 2])
def test_a_program_ends_with_the_status_of_its_main(returned: int | None):
    assert program(lambda argv: returned)([]) == (returned or 0)


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("no"), 2), (OSError(2, "no"), 2), (JobError("no"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_mistake_and_an_interrupt_are_one_line(error: BaseException, status: int, capsys: pytest.CaptureFixture[str]):
    @program
    def main(argv: list[str]) -> None:
        raise error

    assert main([]) == status
    line = capsys.readouterr().err
    assert line.startswith("test_program.py: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--to", "/proc/x"], "--to /proc/x: "),
        (["--to=/proc/x/y"], "--to /proc/x/y: "),
        (["--many", "a", "/proc", "--to", "b"], "--many /proc: "),
        (["--to", "b"], ""),
    ],
)
def test_a_file_that_cannot_be_made_is_named_with_its_flag(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
):
    @program
    def main(argv: list[str]) -> None:
        Path("/proc/x").mkdir()

    assert main(flags) == 2
    assert capsys.readouterr().err == f"test_program.py: error: {named}/proc/x: No such file or directory\n"


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
