"""Every layout reads what any layout has written."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from helpers.checkpoints import Job, run_all
from helpers.ranks import ranks
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_plain

from megazpp.zero.config import ZeroConfig

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


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, dict]:
    """(from, to): {state as it was written, state as it was read, losses after that}."""
    home = tmp_path_factory.mktemp("grid")
    written = {}
    for layout in LAYOUTS:
        flags = {"save": str(home / str(layout))}
        written[layout] = ranks(size(layout)).run(run_all, [Job(case=case(layout), steps=BEFORE, flags=flags)])[0][0]
    found = {}
    for to in LAYOUTS:
        jobs = [Job(case=case(to), steps=BEFORE + AFTER, flags={"load": str(home / str(origin))}) for origin in LAYOUTS]
        for origin, result in zip(LAYOUTS, ranks(size(to)).run(run_all, jobs)[0], strict=True):
            found[origin, to] = result | {"written": written[origin]["end"]}
    return found


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("origin", LAYOUTS)
def test_weights_and_moments_are_read_bit_for_bit_by_every_layout(grid: dict, origin: tuple, to: tuple):
    result = grid[origin, to]
    assert result["whole"] == result["written"]
    assert sum(".exp_avg_sq" in key for key in result["whole"]) > 10


@functools.cache
def uninterrupted() -> list[float]:
    return train_plain(case((1, 1, 1)))["loss"]


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("origin", LAYOUTS)
def test_five_steps_in_another_layout_have_the_losses_of_an_uninterrupted_run(grid: dict, origin: tuple, to: tuple):
    assert grid[origin, to]["losses"] == pytest.approx(uninterrupted()[BEFORE:], rel=ROUNDING)


def test_another_layout_says_what_begins_anew(grid: dict):
    seeded = "note: random generators are seeded anew: the checkpoint has no states of this layout"
    for (origin, to), result in grid.items():
        data = {layout: layout[1] * layout[2] for layout in (origin, to)}
        assert (seeded in result["lines"]) == ((data[origin], origin[0]) != (data[to], to[0]))


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
