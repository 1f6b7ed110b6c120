"""Every layout reads what any layout has written."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from helpers.checkpoints import Attempt, Job, run_all
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_plain

from megazpp.optim.optimizer import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

ROUNDING = 1e-5  # relative: fp32 sums in another order over 7 steps
# (tp, cross, local): ZeRO stage. The vocabulary of 101 is padded to 101, 102 and 104.
LAYOUTS = {(1, 2, 2): 3, (2, 1, 2): 2, (2, 2, 1): 3, (4, 1, 1): 0, (1, 1, 1): 1, (1, 3, 1): 3}
BEFORE, AFTER = 2, 5


def case(layout: tuple[int, int, int]) -> Case:
    tp, cross, _ = layout
    shape = dataclasses.replace(GPT2_STYLE, num_layers=1)
    return Case(model=shape, tp=tp, nodes=cross, stage=LAYOUTS[layout], global_batch=12, steps=BEFORE + AFTER)


def size(layout: tuple[int, int, int]) -> int:
    tp, cross, local = layout
    return tp * cross * local


class Grid:
    """Checkpoints of every layout, and what each layout makes of them; each is made at its first use."""

    def __init__(self, home: Path) -> None:
        self._home, self._written, self._read = home, {}, {}

    def written(self, layout: tuple) -> dict:
        """The state of a run that has saved it."""
        if layout not in self._written:
            job = Job(case=case(layout), steps=BEFORE, flags={"save": self._save(layout)})
            self._written[layout] = ranks(size(layout)).run(run_all, [job])[0][0]["end"]
        return self._written[layout]

    def read(self, origin: tuple, to: tuple) -> dict:
        """The state as it was read, and the losses after that."""
        self.written(origin)
        if (origin, to) not in self._read:
            job = Job(case=case(to), steps=BEFORE + AFTER, flags={"load": self._save(origin)})
            self._read[origin, to] = ranks(size(to)).run(run_all, [job])[0][0]
        return self._read[origin, to]

    def _save(self, layout: tuple) -> str:
        return str(self._home / str(layout))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return Grid(tmp_path_factory.mktemp("grid"))


# To and from one layout: states are compared bit for bit, so every other pair follows.
COMMON = (1, 2, 2)
PAIRS = [(COMMON, to) if to == (2, 2, 1) else slow(COMMON, to) for to in LAYOUTS]
PAIRS += [(to, COMMON) if to == (2, 1, 2) else slow(to, COMMON) for to in LAYOUTS if to != COMMON]


@functools.cache
def uninterrupted() -> list[float]:
    return train_plain(case((1, 1, 1)))["loss"]


@pytest.mark.parametrize(("origin", "to"), PAIRS)
def test_every_layout_reads_each_bit_trains_on_as_if_uninterrupted_and_says_what_begins_anew(
    grid: Grid, origin: tuple, to: tuple
):
    found = grid.read(origin, to)
    assert found["whole"] == grid.written(origin)
    assert sum(".exp_avg_sq" in key for key in found["whole"]) > 10
    assert found["losses"] == pytest.approx(uninterrupted()[BEFORE:], rel=ROUNDING)
    seeded = "note: random generators are seeded anew: the checkpoint has no states of this layout"
    data = {layout: layout[1] * layout[2] for layout in (origin, to)}
    assert (seeded in found["lines"]) == ((data[origin], origin[0]) != (data[to], to[0]))


@pytest.mark.parametrize("to", [(1, 3), slow((2, 2)), slow((1, 1))])
def test_the_weights_that_nodes_keep_go_to_other_layouts_bit_for_bit(tmp_path: Path, to: tuple[int, int]):
    """And back again. On one node nobody keeps any."""
    differences, (tp, nodes) = ZeroConfig(zeropp=True, zero_weight_delta="lossless"), to
    shape, world = dataclasses.replace(GPT2_STYLE, num_layers=1), (3 if nodes == 3 else 4)
    first, second = (
        Case(model=shape, tp=tp, nodes=nodes, zero=differences, global_batch=12, precision=PrecisionConfig(bf16=True))
        for tp, nodes in ((1, 2), (tp, nodes))
    )
    a, b, note = str(tmp_path / "a"), str(tmp_path / "b"), "note: weights cross nodes whole at first"
    [one] = ranks(4).run(run_all, [Job(case=first, steps=2, flags={"save": a})])[0]
    [two] = ranks(world).run(run_all, [Job(case=second, steps=4, flags={"load": a, "save": b})])[0]
    [three] = ranks(4).run(run_all, [Job(case=first, steps=5, flags={"load": b})])[0]
    assert sum(key.startswith("secondary.") for key in one["end"]) > 12
    for before, after in ((one["end"], two["whole"]), (two["end"], three["whole"])):
        assert after.items() - before.items() == set() if nodes > 1 else note in three["lines"][-2]
    assert any(note in line for line in three["lines"]) == (nodes == 1)


@pytest.mark.slow
def test_muon_s_momentum_goes_to_another_layout_bit_for_bit_and_back(tmp_path: Path):
    muon, a, b = OptimizerConfig(optimizer="muon"), str(tmp_path / "a"), str(tmp_path / "b")
    first, second = (dataclasses.replace(case(layout), optimizer=muon) for layout in (COMMON, (2, 2, 1)))
    [one] = ranks(4).run(run_all, [Job(case=first, steps=2, flags={"save": a})])[0]
    [two] = ranks(4).run(run_all, [Job(case=second, steps=4, flags={"load": a, "save": b})])[0]
    [three] = ranks(4).run(run_all, [Job(case=first, steps=5, flags={"load": b})])[0]
    assert sum(key.endswith("momentum_buffer") for key in one["end"]) == 4
    assert (two["whole"], three["whole"]) == (one["end"], two["end"])


@pytest.mark.slow
def test_zeropp_goes_to_other_nodes_with_its_error_feedback_at_zero(tmp_path: Path):
    """A Llama this time; and back again to the first layout."""
    zeropp, shape = ZeroConfig(zeropp=True), dataclasses.replace(LLAMA_STYLE, make_vocab_size_divisible_by=3)
    first = Case(model=shape, tp=2, nodes=2, zero=zeropp)
    second = Case(model=shape, nodes=2, zero=zeropp)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    jobs = [
        Job(case=first, steps=2, flags={"save": a}),
        Job(case=second, steps=3, flags={"load": a, "save": b}),
        Job(case=first, steps=4, flags={"load": b}),
    ]
    one, two, three = ranks(4).run(run_all, jobs)[0]
    note = "note: error feedback begins at zero: the checkpoint has none of this layout"
    assert [note in result["lines"] for result in (one, two, three)] == [False, True, True]
    assert (one["end"], two["end"]) == (two["whole"], three["whole"])


def load_move_and_rewind(job: Job) -> list[dict[str, str]]:
    """The state as loaded, a step later, and after going back."""
    attempt = Attempt(job)
    states, progress = [], attempt.load()
    states.append(attempt.fingerprint())
    attempt.job = dataclasses.replace(job, steps=progress.iteration + 1)
    attempt.checkpoints.after_step = lambda progress, *, last: None
    finish, attempt.checkpoints.finish = attempt.checkpoints.finish, lambda: None
    attempt.train(progress)
    states.append(attempt.fingerprint())
    attempt.checkpoints.rewind()
    states.append(attempt.fingerprint())
    finish()
    return states


def test_going_back_to_another_layout_s_checkpoint_begins_anew_what_it_lacks_as_the_first_time(tmp_path: Path):
    """Error feedback is zero again, not a later step's; random generators are other ones at each iteration."""
    case, save = Case(tp=2, nodes=2, zero=ZeroConfig(zeropp=True)), {"save": str(tmp_path), "save_interval": 1}
    ranks(4).run(run_all, [Job(case=case, steps=2, flags=save)])
    other, generators = dataclasses.replace(case, tp=1), []
    for iteration in (1, 2):
        job = Job(case=other, steps=0, flags=save | {"load": str(tmp_path), "ckpt_step": iteration})
        for loaded, moved, back in ranks(4).run(load_move_and_rewind, job):
            assert back == loaded
            feedback = [key for key in loaded if key.startswith("feedback.")]
            assert any(moved[key] != loaded[key] for key in feedback)
            generators += [loaded[key] for key in loaded if key.startswith("rng.") and key.endswith(".torch")]
    assert len(set(generators)) == len(generators) == 8
