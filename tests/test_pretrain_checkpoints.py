"""A run that is interrupted and continued by the program, as a user does it: the same run, in the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.program import ROOT, run_forked
from helpers.wandb_files import offline_runs

pytestmark = pytest.mark.slow

# fmt: off
TOY = [
    "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "32",
    "--max-position-embeddings", "32", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256",
    "--train-iters", "6", "--lr", "1e-3", "--micro-batch-size", "2", "--global-batch-size", "8", "--log-interval", "1",
    "--eval-iters", "1", "--eval-interval", "3", "--nproc", "2", "--data-cache-path", "cache",
    "--zeropp", "--emulate-nodes", "2", "--fp16", "--initial-loss-scale", "65536",
]
# fmt: on
SAVE = ["--save", "saved"]
WANDB = ["--wandb-project", "p"]


class Run(NamedTuple):
    code: int
    output: str

    @property
    def folder(self) -> Path:
        (line,) = [line for line in self.output.splitlines() if line.startswith("records of this run: ")]
        return Path(line.removeprefix("records of this run: "))


def pretrain(home: Path, *flags: str) -> Run:
    return Run(*run_forked(str(ROOT / "pretrain_gpt.py"), *TOY, *flags, folder=home, cwd=home))


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("iteration", "lm_loss", "grad_norm", "learning_rate")} for row in rows]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def straight(home: Path) -> Run:
    run = pretrain(home)
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def interrupted(home: Path) -> Run:
    run = pretrain(home, *SAVE, "--load", "saved", *WANDB, "--exit-interval", "3")
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def continued(home: Path, interrupted: Run) -> Run:
    flags = ["--load", "saved", "--async-save", "--save-interval", "2", "--keep-last", "2"]
    run = pretrain(home, *SAVE, *WANDB, *flags)
    assert run.code == 0, run.output
    return run


def test_the_losses_of_an_interrupted_run_are_those_of_one_that_was_not_in_one_folder(
    home: Path, straight: Run, interrupted: Run, continued: Run
):
    folder = home / interrupted.folder
    assert home / continued.folder == folder != home / straight.folder
    assert metrics(folder) == metrics(home / straight.folder)
    assert [row["iteration"] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    validation = [line for line in straight.output.splitlines() if line.startswith(" validation loss at iteration 6")]
    assert len(validation) == 2
    assert all(line in continued.output for line in validation)


def test_the_log_has_megatrons_lines(home: Path, interrupted: Run, continued: Run):
    for output, lines in (
        (interrupted.output, ["saving checkpoint at iteration       3 to saved", "  successfully saved checkpoint at"]),
        (
            continued.output,
            [
                " loading checkpoint from saved at iteration 3",
                "  successfully loaded checkpoint from saved at iteration 3 | ",
                "  scheduled an async checkpoint save at iteration       4 to saved | training waited ",
                "  successfully saved checkpoint at iteration       6 to saved | ",
            ],
        ),
    ):
        for line in lines:
            assert output.count(f"\n{line}") == 1, f"{line!r} in:\n{output}"
    assert (home / "saved" / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert sorted(path.name for path in (home / "saved").glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_a_run_whose_load_has_no_checkpoint_says_so_at_its_beginning_and_at_its_end(interrupted: Run, continued: Run):
    lines = interrupted.output.splitlines()
    anew = "note: --load saved has no checkpoint: training begins anew, with random weights"
    assert lines.index(anew) < lines.index("------------------------ arguments ------------------------")
    last = "note: --load saved had no checkpoint: this training began anew, with random weights"
    assert lines[lines.index(last) + 1].startswith("records of this run: ")
    assert "no checkpoint" not in continued.output


def test_a_run_that_is_complete_says_so_and_takes_its_shape_from_the_checkpoint(home: Path, continued: Run):
    flags = ["--load", "saved", "--use-checkpoint-args", "--hidden-size", "24", "--run-dir", "again", "--no-fp16"]
    run = pretrain(home, *flags, *WANDB)
    assert run.code == 0, run.output
    assert "note: --hidden-size 24 gives way to the checkpoint's 16\n" in run.output
    assert "training is complete: iteration 6 of 6\n" in run.output
    assert " validation loss at iteration 6 " in run.output
    assert {kept.run.run_id for kept in offline_runs(home / "again")} == {
        kept.run.run_id for kept in offline_runs(home / continued.folder)
    }


def test_a_continued_run_goes_on_as_the_same_wandb_run(home: Path, continued: Run):
    before, after = offline_runs(home / continued.folder)
    assert before.run.run_id == after.run.run_id
    assert [[row["_step"] for row in kept.history] for kept in (before, after)] == [[1, 2, 3], [4, 5, 6]]
    assert [kept.summary["iteration"] for kept in (before, after)] == [3, 6]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (SAVE, "--save saved holds checkpoints already (up to iteration 6): --load saved goes on from there"),
        (["--load", "saved", "--hidden-size", "24"], "--hidden-size is 24, was 16 in saved"),
        (["--load", "missing", "--use-checkpoint-args"], "--use-checkpoint-args: --load missing has no checkpoint"),
    ],
)
def test_what_does_not_fit_the_checkpoints_is_refused_before_workers_start(
    home: Path,
    continued: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
):
    import pretrain_gpt

    def start_nothing(*_: object, **__: object) -> int:
        raise AssertionError("started workers")

    monkeypatch.setattr("megazpp.base.run.launch_workers", start_nothing)
    monkeypatch.setattr("megazpp.base.run.run_worker", start_nothing)
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *TOY, *flags])
    assert pretrain_gpt.main() == 2
    assert capsys.readouterr().err.startswith(f"pretrain_gpt.py: error: {said}")
