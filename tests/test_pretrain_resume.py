"""Resume a run with other flags: test its length, its learning rates, and its notes about the order of samples."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.pretrain import Run
from helpers.program import ROOT, run_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazpp.data.indexed_builder import IndexedDatasetBuilder

pytestmark = pytest.mark.slow

MODEL = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-2 --log-interval 1 --split 90,5,5 --eval-iters 1 "
    "--data-cache-path cache --save saved"
)
OVERRIDE = "--override-opt_param-scheduler"


def write_data(prefix: Path, *, seed: int, documents: int = 300) -> None:
    """Write a dataset of documents with 1 to 79 random token IDs below 256 each."""
    draw = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for size in draw.integers(1, 80, size=documents):
            builder.add_document(draw.integers(0, 256, size=size))
        builder.finalize()


@pytest.fixture
def start(tmp_path):
    """Return a function that runs pretrain_gpt.py on the datasets a and b, in a new run folder each time.

    Every run saves to the same folder, and all runs after the first load that checkpoint.
    """
    for seed, name in enumerate("ab"):
        write_data(tmp_path / name, seed=seed)

    def run(flags: str, data: str = "--data-path a") -> Run:
        known = ["--load", "saved"] if (tmp_path / "saved").exists() else []
        folder = tmp_path / f"run-{len([*tmp_path.glob('run-*')])}"
        given = [*MODEL, *data.split(), *known, "--run-dir", str(folder), *flags.split()]
        code, output = run_forked(str(ROOT / "pretrain_gpt.py"), *given, folder=tmp_path, cwd=tmp_path)
        assert code == 0, output
        return Run(output, folder)

    return run


def test_fork_of_a_run_gets_records_of_its_own(tmp_path):
    """A fork loads a run's checkpoint, but does not save to the run's folder, so the run's records may not change.

    A resumed run that saves to the run's own folder continues the run's records.
    """
    common = [*MODEL[:-2], "--data-path", "a", "--nproc", "1", "--micro-batch-size", "4", "--train-iters", "6"]
    write_data(tmp_path / "a", seed=0)

    def pretrain(flags: str) -> str:
        code, output = run_forked(str(ROOT / "pretrain_gpt.py"), *common, *flags.split(), folder=tmp_path, cwd=tmp_path)
        assert code == 0, output
        return output

    def records() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}

    pretrain("--save saved --run-dir run --save-interval 2 --exit-interval 4")
    before = records()
    for step in (2, 4):
        pretrain(f"--load saved --ckpt-step {step} --save fork-{step} --lr 2e-2 {OVERRIDE}")
    pretrain(f"--load saved {OVERRIDE}")
    assert records() == before
    pretrain("--load saved --save saved")
    assert records()["metrics.jsonl"].count(b"\n") == 6


@pytest.mark.parametrize(
    ("first", "then", "consumed"),
    [
        ("--nproc 1 --exit-interval 3", "--nproc 2", [4, 8, 12, 20, 28, 36]),
        (
            "--nproc 1 --global-batch-size 8 --rampup-batch-size 4 4 8 --exit-interval 4",
            "--nproc 1 --global-batch-size 8",
            [4, 8, 16, 24, 32, 40],
        ),
    ],
)
def test_run_of_samples_resumes_on_other_ranks_and_ends_its_schedule(start, first, then, consumed):
    length = "--train-samples 40 --micro-batch-size 4"
    before, after = start(f"{length} {first}"), start(f"{length} {then}")
    rows = before.metrics + after.metrics
    assert [row["consumed_samples"] for row in rows] == consumed
    sizes = np.diff([0, *consumed])
    expected = [1e-2 * (1 - (end - size) / 40) for end, size in zip(consumed, sizes, strict=True)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected)
    left = 40 - consumed[-1]
    said = f"--train-samples 40: the last {left} are too few for a global batch of 8, and no step takes them"
    assert (said in after.output) == (left > 0)
    again = start(f"{length} {then}")
    assert f"training is complete: {consumed[-1]} of --train-samples 40 are consumed" in again.output


def test_run_of_steps_resumes_with_another_batch_size(start):
    length, blend = "--train-iters 10 --nproc 1 --micro-batch-size 4", "--data-path 0.7 a 0.3 b"
    before = start(f"{length} --global-batch-size 8 --exit-interval 4", blend)
    after = start(f"{length} --global-batch-size 4 {OVERRIDE}", blend)
    rows = before.metrics + after.metrics
    assert [row["iteration"] for row in rows] == [*range(1, 11)]
    assert rows[-1]["consumed_samples"] == 4 * 8 + 6 * 4
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-2 * (1 - step / 10) for step in range(10)])


def test_consumed_tokens_count_each_sample_with_its_own_length(start):
    """The three parts of the run have 4 steps of 4 samples each, with 16, 32 and 8 tokens per sample."""
    length, found = "--train-iters 12 --nproc 1 --micro-batch-size 4", []
    for size, stop in ((16, 4), (32, 8), (8, 12)):
        run = start(f"{length} --seq-length {size} --exit-interval {stop}")
        found += [row["consumed_tokens"] for row in run.metrics]
    tokens = [4 * size for size in (16, 32, 8) for _ in range(4)]
    assert found == np.cumsum(tokens).tolist()


def notes_of(run: Run) -> list[str]:
    """Return the run's notes about changes since its checkpoint, without "note: " and the checkpoint's name."""
    where = " in saved/iter_0000002: "
    lines = [line.removeprefix("note: ") for line in run.output.splitlines() if line.startswith("note: ")]
    return [line.replace(where, ": ") for line in lines if where in line]


SAME_ORDER = "the samples come in the same order: none repeats, and none is skipped"
REORDERED = "from here on samples come in another order: "
BASE = "--micro-batch-size 4 --nproc 1 --seed 5"
AGAIN = f"{BASE} --train-samples 40"


def test_one_note_names_changed_flags_and_their_effect_on_samples(tmp_path, start):
    start(f"{AGAIN} --exit-interval 2", "--data-path 0.5 a 0.5 b")
    shutil.copytree(tmp_path / "saved", tmp_path / "kept")
    shutil.copytree(tmp_path, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("[!ab]*"))
    longer = f"--train-iters 12 {OVERRIDE}"
    rows = [
        (f"{AGAIN} --split 90/5/5 --global-batch-size 4", "5 elsewhere/a 5 elsewhere/b", []),
        (
            f"{AGAIN} --global-batch-size 4 --adam-beta2 0.9 --hidden-dropout 0",
            "0.5 a 0.5 b",
            ["--hidden-dropout is 0.0, was 0.1, --adam-beta2 is 0.9, was 0.999: training continues with the values of"],
        ),
        (
            f"{AGAIN} --nproc 2",
            "0.5 a 0.5 b",
            [
                "the global batch size is 8 (--micro-batch-size x 2 data ranks), was 4: "
                f"{SAME_ORDER}; validation is over 8 samples, was over 4; the test is over 8 samples, was over 4"
            ],
        ),
        (
            f"{AGAIN} --reset-attention-mask",
            "0.5 a 0.5 b",
            [f"--reset-attention-mask is True, was False: {SAME_ORDER}"],
        ),
        (f"{AGAIN} --seq-length 16", "0.5 a 0.5 b", [f"--seq-length is 16, was 32: {REORDERED}about 0 of the 32 "]),
        (
            AGAIN,
            "0.25 a 0.75 b",
            [
                f"--data-path is ('0.25', '{tmp_path}/a', '0.75', '{tmp_path}/b'), was "
                f"['0.5', '{tmp_path}/a', '0.5', '{tmp_path}/b']: {REORDERED}about 2 of the 32 samples to come "
            ],
        ),
        (
            f"{BASE} {longer}",
            "0.5 a 0.5 b",
            [f"--train-iters is 12, was None, --train-samples is None, was 40: {SAME_ORDER}"],
        ),
    ]
    assert find(rows, tmp_path, start) == []
    write_data(tmp_path / "b", seed=7)
    changed = ["the tokens of b (train) are not the same: "]
    assert find([(AGAIN, "0.5 a 0.5 b", changed)], tmp_path, start) == []


def find(rows: list[tuple[str, str, list[str]]], home: Path, start: Callable[[str, str], Run]) -> list[object]:
    """Resume from the checkpoint in `kept` with each row's flags, and return the rows whose notes are unexpected.

    Args:
        rows: (flags, datasets for --data-path, beginning of each expected note).
        home: folder of the runs.
        start: function that starts a run with flags and data.

    Returns:
        (flags, datasets, notes of the run) of each such row.
    """
    wrong: list[object] = []
    for flags, data, expected in rows:
        shutil.rmtree(home / "saved")
        shutil.copytree(home / "kept", home / "saved")
        notes = notes_of(start(flags, f"--data-path {data}"))
        if len(notes) != len(expected) or not all(map(str.startswith, notes, expected)):
            wrong.append((flags, data, notes))
    return wrong


def test_tensorboard_drops_the_steps_of_a_run_that_lost_its_checkpoints(start, tmp_path):
    """A run without its checkpoints starts again at iteration 0, so TensorBoard must drop the steps of the first run.

    No restart count of torchrun announces the restart.
    """
    flags = "--micro-batch-size 4 --nproc 1 --tensorboard-dir events"
    start(f"{flags} --load saved --train-iters 4")
    shutil.rmtree(tmp_path / "saved")
    start(f"{flags} --load saved --train-iters 2")
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("metrics/lm_loss")] == [1, 2]
