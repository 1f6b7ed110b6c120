"""The tool as a user runs it: the training's own validation again, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import evaluate
import pytest
from helpers.program import run_forked
from helpers.trained import Trained

from megazpp import run
from megazpp.run import Job


@pytest.mark.slow
def test_the_numbers_are_those_that_the_training_ended_with(trained: Trained):
    same = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--nproc", "2"]
    code, output = run_forked("tools/evaluate.py", "--load", str(trained.load), *same, folder=trained.home)
    assert code == 0, output
    lines = [line for line in trained.output.splitlines() if line.startswith(" validation loss at iteration 12")]
    assert len(lines) == 2
    assert "on test set" in lines[1]
    for line in lines:
        assert output.count(line) == 1, f"{line!r} in\n{output}"
    assert output.count(" bits per byte: ") == 2


def test_a_cpu_has_one_process_per_tensor_parallel_rank_unless_nproc_says_more(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
):
    jobs: list[Job] = []
    monkeypatch.setattr(run, "run_on_ranks", lambda prepare: jobs.append(prepare()))
    monkeypatch.setattr(run, "device_type", lambda: "cpu")
    for flags in ([], ["--tensor-model-parallel-size", "2"], ["--nproc", "3"]):
        evaluate.main(["--load", str(trained.load), *flags])
    assert [job.place.world_size for job in jobs] == [1, 2, 3]


def refused(capfd: pytest.CaptureFixture[str], *argv: object) -> str:
    assert evaluate.main([str(word) for word in argv]) == 2
    return capfd.readouterr().err


def test_what_cannot_be_is_refused_in_one_line(trained: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    junk = tmp_path / "junk.idx"
    junk.write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for flags, message in (
        (("--load", trained.load, "--input", tmp_path / "empty.txt"), "--input empty.txt holds no text"),
        (("--load", trained.load, "--input", tmp_path / "binary.jsonl"), "binary.jsonl, line 1: not UTF-8"),
        ((), "--load is missing: the folder of checkpoints"),
        (("--load", tmp_path), f"--load {tmp_path} has no checkpoint"),
        (("--load", trained.load, "--ckpt-step", 5), "--ckpt-step 5: "),
        (("--load", trained.load, "--input", "nowhere"), "--input nowhere is neither a text nor the prefix of"),
        (("--load", trained.load, "--input", tmp_path / "junk"), "junk.bin"),
        (("--load", trained.load, "--eval-iters", 0), "--eval-iters 0: nothing would be evaluated"),
        (("--load", trained.load, "--num-layers", 0), "--num-layers 0 is not positive"),
    ):
        error = refused(capfd, *flags)
        assert message in error
        assert error.count("\n") == 1, error
        assert "--text-path" not in error
