"""Test checkpoints of DiLoCo's replica groups, loaded with other numbers of groups or without DiLoCo."""

import dataclasses
import functools

import pytest
import torch
from helpers.checkpoints import Attempt, run
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import chosen
from helpers.training import Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.state import under
from megazpp.diloco.config import DilocoConfig


def islands(number: int, *, fragments: int = 1, **case: int) -> Case:
    rule = {"diloco_steps": 2, "diloco_outer_lr": 0.7, "diloco_outer_momentum": 0.9, "diloco_fragment_sync_delay": 1}
    config = DilocoConfig(diloco_islands=number, diloco_fragments=fragments, **rule)
    return Case(**{"nodes": 4, "diloco": config} | case)


NONE, TWO, FOUR, FRAGMENTS = Case(nodes=4), islands(2), islands(4), islands(2, fragments=2)
WIDE = islands(2, tp=2, nodes=2)  # replica groups of one node each
NONE_1, TWO_1, FOUR_1 = (dataclasses.replace(case, stage=1) for case in (NONE, TWO, FOUR))
BEGIN = "note: replica groups start at the outer weights, because the checkpoint "
OTHERS = [f"{BEGIN}has another number of groups"]
MODEL = {"model.": "model."}
BEGUN = MODEL | {"diloco.common.": "model.", "island.I.inner.": "model."}
KEPT = BEGUN | {"diloco.momentum.": "diloco.momentum."}
ALL = MODEL | {name: name for name in ("diloco.", "island.I.inner.", "island.I.counts")}
# Saved case, loading case, {prefix of loaded keys: prefix of the saved keys with equal values}, notes. I is the index
# of the replica group.
CASES = {
    "four from two": (TWO, FOUR, KEPT, OTHERS),
    "two from four": (FOUR_1, TWO_1, KEPT, OTHERS),
    "none from two": (TWO, NONE, MODEL, []),
    "none from two, zero 1": (TWO_1, NONE_1, MODEL, []),
    "two from none": (NONE, TWO, BEGUN, OTHERS),
    "two from none, zero 1": (NONE_1, TWO_1, BEGUN, OTHERS),
    "fragments": (TWO, FRAGMENTS, KEPT, [f"{BEGIN}has other --diloco-fragments"]),
    "wide from narrow": (TWO, WIDE, ALL, []),
    "narrow from wide": (WIDE, TWO, ALL, []),
}
DEFAULT = ("four from two", "none from two", "two from none", "fragments", "wide from narrow")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that trains a case for 4 steps and saves it, once per case, with a message in flight.

    The function returns the folder, and the final state of each replica group.
    """

    @functools.cache
    def save(case: Case) -> tuple[str, dict[int, dict[str, str]]]:
        folder = str(tmp_path_factory.mktemp("islands"))
        results = ranks(4).run(run, case, 4, whole=True, save=folder)
        return folder, {result.island: result.state for result in results}

    return save


def moments(state: dict[str, str], island: int) -> dict[str, str]:
    return under(f"island.{island}.optimizer.state." if island else "optimizer.state.", state)


@pytest.mark.parametrize("case", chosen(CASES, *DEFAULT))
def test_checkpoint_of_islands_resumes_with_other_numbers_and_shapes(saved, case):
    before, after, same, notes = case
    folder, of_island = saved(before)
    for result in ranks(4).run(run, after, 5, whole=True, load=folder):
        island, source = result.island, result.island % before.islands
        for ours, theirs in same.items():
            expected = under(theirs.replace("I", str(island)), of_island[source])
            assert under(ours.replace("I", str(island)), result.loaded) == expected != {}, ours
        assert moments(result.loaded, island) == moments(of_island[source], source) != {}
        assert any(key.startswith(("island.", "diloco.")) for key in result.loaded) == (after.islands > 1)
        assert result.state != result.loaded
        assert [line for line in result.lines if BEGIN in line] == notes


def test_islands_differ_when_they_are_saved(saved):
    """Otherwise the comparisons above would prove nothing."""
    _, of_island = saved(TWO)
    assert under("diloco.common.", of_island[0]) != under("model.", of_island[0])
    assert moments(of_island[0], 0) != moments(of_island[1], 1)


def accepted(case: Case) -> list[str]:
    """Return descriptions of incomplete or damaged checkpoints of replica groups that are not rejected."""
    attempt = Attempt(case)
    attempt.train(1)
    there, own = attempt.state.tensors(optimizer=True, rng=False), f"island.{attempt.dims.island.rank}."
    missing = ("diloco.common.final_norm.weight", f"{own}inner.final_norm.weight", f"{own}values")
    without = {gone: {key: x for key, x in there.items() if key != gone} for gone in missing}
    rows = [(rest, f"the DiLoCo checkpoint has no {gone}") for gone, rest in without.items()]
    cut = there | {f"{own}values": there[f"{own}values"][:-3]}
    rows.append((cut, f"{own}values: loss scale, losses or groups are damaged"))

    def accept(tensors: dict[str, torch.Tensor]) -> None:
        attempt.state.accept(tensors, optimizer=True, rng=False, iteration=1)

    return not_refused(rows, accept, DamagedError)


def test_missing_or_damaged_part_of_an_island_is_named():
    assert ranks(2).run(accepted, islands(2, nodes=2)) == [[], []]
