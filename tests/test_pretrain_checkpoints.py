"""Interrupt and resume a run like a user: the run continues in the same run folder with the same records."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.pretrain import TOY, Run
from helpers.program import ROOT, run_forked
from helpers.wandb_files import offline_runs

import pretrain_gpt

pytestmark = pytest.mark.slow

FLAGS = TOY + shlex.split(
    "--train-iters 6 --global-batch-size 8 --eval-iters 1 --eval-interval 3 --nproc 2 --data-cache-path cache "
    "--zeropp --cluster-file two_nodes.yaml --fp16 --initial-loss-scale 65536"
)
SAVE = ["--save", "saved"]
WANDB = ["--wandb-project", "p"]


def pretrain(home: Path, *flags: str) -> Run:
    """Run pretrain_gpt.py without --run-dir, assert success, and return the run in the folder that it has chosen."""
    code, output = run_forked(str(ROOT / "pretrain_gpt.py"), *FLAGS, *flags, folder=home, cwd=home)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("records of this run: ")]
    return Run(output, home / line.removeprefix("records of this run: "))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder with a cluster file of two nodes.

    The file names no link speeds, and with such a file no run measures the links.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "two_nodes.yaml").write_text("nodes: 2\nranks_per_node: 1\n")
    return folder


@pytest.fixture(scope="module")
def interrupted(home) -> Run:
    return pretrain(home, *SAVE, "--load", "saved", *WANDB, "--exit-interval", "3")


@pytest.fixture(scope="module")
def continued(home, interrupted) -> Run:
    flags = ["--load", "saved", "--async-save", "--save-interval", "2", "--keep-last", "2"]
    return pretrain(home, *SAVE, *WANDB, *flags)


def test_resumed_run_has_the_losses_of_an_uninterrupted_one(home, interrupted, continued):
    straight = pretrain(home)
    assert continued.folder == interrupted.folder != straight.folder
    for key in ("iteration", "lm_loss", "grad_norm", "learning_rate"):
        assert continued.values(key) == straight.values(key), key
    assert continued.values("iteration") == [1, 2, 3, 4, 5, 6]
    validation = [line for line in straight.output.splitlines() if line.startswith(" validation loss at iteration 6")]
    assert len(validation) == 2
    assert all(line in continued.output for line in validation)


def test_resumed_run_keeps_its_weight_format_and_the_checkpoint_records_it(home, interrupted, continued):
    chosen = "note: --zero-weight-delta auto: weights cross nodes as lossless deltas, because the speed of the links is"
    kept = "weights cross nodes as lossless deltas, because the checkpoint of --load saved has this format\n"
    assert (interrupted.output.count(chosen), interrupted.output.count(kept)) == (1, 0)
    assert (continued.output.count(chosen), continued.output.count(kept)) == (0, 1)
    for run in (interrupted, continued):
        assert "not quantized inside nodes, lossless deltas across" in run.output
    flags = json.loads((home / "saved" / "iter_0000006" / "run.json").read_text())["flags"]
    assert flags["zero_weight_delta"] == "lossless"


def test_weight_format_follows_measured_links_which_a_resumed_run_does_not_measure_again(tmp_path):
    measured = (
        r"weights cross nodes as (lossless deltas|int8 blocks), because a step is estimated to take .*; measured: "
    )
    measured += r"[\d.e+-]+ Gbit/s between nodes, [\d.]+ and [\d.]+ GB/s of weights to encode and decode deltas\n"
    flags = ["--cluster-file", "none", "--emulate-nodes", "2", *SAVE, "--load", "saved", "--exit-interval"]
    first = pretrain(tmp_path, *flags, "3")
    (found,) = re.findall(f"note: --zero-weight-delta auto: {measured}", first.output)
    assert "\nlinks: " not in first.output, "the plan of the run does not use measured links"
    again = pretrain(tmp_path, *flags, "6")
    assert f"cross nodes as {found}, because the checkpoint of --load saved has this format\n" in again.output
    assert "measured: " not in again.output


def test_log_has_megatrons_checkpoint_lines(home, interrupted, continued):
    for run, line in (
        (interrupted, "saving checkpoint at iteration       3 to saved"),
        (interrupted, "  successfully saved checkpoint at"),
        (continued, " loading checkpoint from saved at iteration 3"),
        (continued, "  successfully loaded checkpoint from saved at iteration 3 | "),
        (continued, "  scheduled an async checkpoint save at iteration       4 to saved | training waited "),
        (continued, "  successfully saved checkpoint at iteration       6 to saved | "),
    ):
        assert run.output.count(f"\n{line}") == 1, run.output
    assert (home / "saved" / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert sorted(path.name for path in (home / "saved").glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_missing_checkpoint_is_noted_at_the_start_and_the_end(interrupted, continued):
    lines = interrupted.output.splitlines()
    anew = "note: --load saved has no checkpoint; this run starts from random weights"
    assert lines.index(anew) < lines.index("------------------------ arguments ------------------------")
    last = "note: --load saved had no checkpoint; this run started from random weights"
    assert lines[lines.index(last) + 1].startswith("records of this run: ")
    assert "no checkpoint" not in continued.output


def test_complete_run_says_so_and_takes_its_shape_from_the_checkpoint(home, continued):
    flags = ["--load", "saved", "--use-checkpoint-args", "--hidden-size", "24", "--run-dir", "again", "--no-fp16"]
    run = pretrain(home, *flags, *WANDB)
    assert "note: --hidden-size 24 gives way to the checkpoint's 16\n" in run.output
    assert "training is complete: iteration 6 of 6\n" in run.output
    assert " validation loss at iteration 6 " in run.output
    # a run that loads without --save is a fork, so it must have its own wandb run
    own, other = ({kept.run.run_id for kept in offline_runs(each.folder)} for each in (run, continued))
    assert own.isdisjoint(other)


def test_resumed_run_continues_the_same_wandb_run(continued):
    """Check that both parts of the run have the same wandb id, and that steps continue. wandb is in offline mode."""
    before, after = offline_runs(continued.folder)
    assert before.run.run_id == after.run.run_id
    assert [[row["_step"] for row in kept.history] for kept in (before, after)] == [[1, 2, 3], [4, 5, 6]]
    assert [kept.summary["iteration"] for kept in (before, after)] == [3, 6]
    assert [row["metrics/grad_norm"] for row in after.history] == pytest.approx(continued.values("grad_norm")[3:])
    assert [row["_step"] for row in after.history if "validation/lm_loss" in row] == [6]
    assert after.config == json.loads((continued.folder / "args.json").read_text()) | {"_wandb": after.config["_wandb"]}
    assert list(after.run.tags) == ["zeropp", "2 nodes x 1 ranks"]


def test_flags_that_contradict_checkpoints_are_rejected_before_the_start(home, continued, run_main, monkeypatch):
    monkeypatch.chdir(home)
    Path("empty").mkdir()
    for flags, said in (
        ("--save saved", "--save saved holds checkpoints already (up to iteration 6): pass --load saved to resume"),
        ("--load saved --hidden-size 24", "--hidden-size is 24, was 16 in saved"),
        ("--load empty --use-checkpoint-args", "--use-checkpoint-args: --load empty has no checkpoint"),
    ):
        code, _, err = run_main(pretrain_gpt.main, *FLAGS, *flags.split())
        assert (code, err.startswith(f"pretrain_gpt.py: error: {said}")) == (2, True), err
