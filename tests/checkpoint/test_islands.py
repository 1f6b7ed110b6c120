"""Checkpoints of islands that take local steps, read by others: other numbers of islands, and none."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from helpers.checkpoints import Attempt, Job, run_all
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.state import under
from megazpp.islands.config import IslandsConfig

TWO = Case(
    nodes=4,
    diloco=IslandsConfig(
        diloco_steps=2, diloco_islands=2, diloco_outer_lr=0.7, diloco_outer_momentum=0.9, diloco_delay=1
    ),
)
FOUR = dataclasses.replace(TWO, diloco=dataclasses.replace(TWO.diloco, diloco_islands=4))
FRAGMENTS = dataclasses.replace(TWO, diloco=dataclasses.replace(TWO.diloco, diloco_fragments=2))
NONE = Case(nodes=4)
WIDE = dataclasses.replace(TWO, tp=2, nodes=2)  # islands of one node each
BEGIN = "note: islands begin at the outer weights: "
Results = list[dict[str, Any]]  # of every rank


def with_stage(case: Case, stage: int) -> Case:
    return dataclasses.replace(case, stage=stage)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[Case], tuple[str, Results]]:
    """Saves 4 steps of a case once, with a message under way; the folder and the results."""

    @functools.cache
    def save(case: Case) -> tuple[str, Results]:
        folder = str(tmp_path_factory.mktemp("islands"))
        return folder, run(case, steps=4, save=folder)

    return save


def run(case: Case, *, steps: int, **flags: Any) -> Results:
    return [result for [result] in ranks(4).run(run_all, [Job(case=case, steps=steps, flags=flags)])]


def moments(state: dict[str, str], island: int) -> dict[str, str]:
    return under(f"island.{island}.optimizer.state." if island else "optimizer.state.", state)


OTHERS = f"{BEGIN}the checkpoint has other islands' own, or none"
KEPT = {"model.": "model.", "diloco.momentum.": "diloco.momentum."}
BEGUN = {"diloco.common.": "model.", "island.I.inner.": "model."}
ALL = {name: name for name in ("model.", "diloco.", "island.I.inner.", "island.I.counts")}
# before, after; which keys of the latter have which values of the former (I: of this island); what is said
CASES: dict[str, tuple[Case, Case, dict[str, str], str | None]] = {
    "four from two": (TWO, FOUR, KEPT | BEGUN, OTHERS),
    "two from four": (with_stage(FOUR, 1), with_stage(TWO, 1), KEPT | BEGUN, OTHERS),
    "none from two": (TWO, NONE, {"model.": "model."}, None),
    "none from two, zero 1": (with_stage(TWO, 1), with_stage(NONE, 1), {"model.": "model."}, None),
    "two from none": (NONE, TWO, {"model.": "model."} | BEGUN, OTHERS),
    "two from none, zero 1": (with_stage(NONE, 1), with_stage(TWO, 1), {"model.": "model."} | BEGUN, OTHERS),
    "fragments": (TWO, FRAGMENTS, KEPT | BEGUN, f"{BEGIN}the checkpoint is of another --diloco-fragments"),
    "wide from narrow": (TWO, WIDE, ALL, None),
    "narrow from wide": (WIDE, TWO, ALL, None),
}
DEFAULT = ("four from two", "none from two", "two from none", "fragments", "wide from narrow")


@pytest.mark.parametrize("case", chosen(CASES, *DEFAULT))
def test_a_checkpoint_goes_on_with_what_islands_of_other_numbers_and_shapes_can_use(saved, case):
    before, after, same, note = case
    folder, first = saved(before)
    of_island = {result["island"]: result["end"] for result in first}
    for result in run(after, steps=5, load=folder):
        loaded, island = result["loaded"], result["island"]
        source = island % before.islands
        for ours, theirs in same.items():
            expected = under(theirs.replace("I", str(island)), of_island[source])
            assert under(ours.replace("I", str(island)), loaded) == expected != {}, ours
        assert moments(loaded, island) == moments(of_island[source], source) != {}
        assert any(key.startswith(("island.", "diloco.")) for key in loaded) == (after.islands > 1)
        assert result["end"] != loaded
        assert [line for line in result["lines"] if BEGIN in line] == ([] if note is None else [note])


def test_islands_have_moved_apart_when_they_are_saved(saved):
    """So the comparisons above mean something."""
    _, first = saved(TWO)
    of_island = {result["island"]: result["end"] for result in first}
    assert under("diloco.common.", of_island[0]) != under("model.", of_island[0])
    assert moments(of_island[0], 0) != moments(of_island[1], 1)


def accept_without(case: Case, absent: list[str]) -> dict[str, str]:
    """The errors about a checkpoint of islands that misses one of these tensors, or whose values are damaged ("")."""
    attempt = Attempt(Job(case=case, steps=1, flags={}))
    attempt.train(attempt.load())
    found, errors = attempt.state.tensors(optimizer=True, rng=False), {}
    own = f"island.{attempt.dims.island.rank}."
    for gone in absent:
        if gone:
            there = {key: x for key, x in found.items() if key != gone.replace("island.", own)}
        else:
            there = found | {f"{own}values": found[f"{own}values"][:-3]}
        try:
            attempt.state.accept(there, optimizer=True, rng=False, iteration=1)
        except DamagedError as error:
            errors[gone] = str(error).replace(own, "island.")
    return errors


def test_a_part_that_is_missing_or_damaged_is_named():
    absent = ["diloco.common.final_norm.weight", "island.inner.final_norm.weight", "island.values"]
    case = dataclasses.replace(TWO, nodes=2)
    for errors in ranks(2).run(accept_without, case, [*absent, ""]):
        assert errors.pop("").startswith("island.values: loss scale, losses or groups are damaged")
        assert errors == {gone: f"the checkpoint of islands has no {gone}" for gone in absent}
