"""Checkpoints of islands that take local steps, read by others: other numbers of islands, and none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from helpers.checkpoints import Attempt, Job, run_all
from helpers.ranks import ranks
from helpers.tiers import slow
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
WIDE = {"tp": 2, "nodes": 2}  # islands of one node each
BEGIN = "note: islands begin at the outer weights: "
Results = list[dict[str, Any]]  # of every rank


def with_stage(case: Case, stage: int) -> Case:
    return dataclasses.replace(case, stage=stage)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[str, Results]]:
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


@pytest.mark.parametrize(("before", "after"), [(TWO, FOUR), slow(with_stage(FOUR, 1), with_stage(TWO, 1))])
def test_another_number_of_islands_keeps_the_outer_weights_and_their_momentum(saved: Any, before: Case, after: Case):
    folder, first = saved(before)
    of_island = {result["island"]: result["end"] for result in first}
    for result in run(after, steps=4, load=folder):
        loaded, island = result["loaded"], result["island"]
        for prefix in ("model.", "diloco.momentum."):
            assert under(prefix, loaded) == under(prefix, first[0]["end"]) != {}
        assert under("diloco.common.", loaded) == under("model.", loaded)
        assert under(f"island.{island}.inner.", loaded) == under("model.", loaded)
        source = island % before.islands
        assert moments(loaded, island) == moments(of_island[source], source) != {}
        assert f"{BEGIN}the checkpoint has other islands' own, or none" in result["lines"]
    assert under("diloco.common.", first[0]["end"]) != under("model.", first[0]["end"])
    assert moments(of_island[0], 0) != moments(of_island[1], 1)


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_without_islands_the_outer_weights_go_on_with_the_first_island_s_moments(saved: Any, stage: int):
    folder, first = saved(with_stage(TWO, stage))
    for result in run(with_stage(NONE, stage), steps=5, load=folder):
        assert under("model.", result["loaded"]) == under("model.", first[0]["end"])
        assert moments(result["loaded"], 0) == moments(first[0]["end"], 0)
        assert not any(key.startswith(("island.", "diloco.")) for key in result["loaded"])
        assert under("model.", result["end"]) != under("model.", result["loaded"])


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_islands_begin_at_the_weights_and_with_the_moments_of_a_run_without(saved: Any, stage: int):
    folder, first = saved(with_stage(NONE, stage))
    for result in run(with_stage(TWO, stage), steps=5, load=folder):
        loaded, island = result["loaded"], result["island"]
        for prefix in ("model.", "diloco.common.", f"island.{island}.inner."):
            assert under(prefix, loaded) == under("model.", first[0]["end"])
        assert moments(loaded, island) == moments(first[0]["end"], 0)
        assert f"{BEGIN}the checkpoint has other islands' own, or none" in result["lines"]


def test_other_fragments_begin_at_the_outer_weights(saved: Any):
    folder, first = saved(TWO)
    for result in run(FRAGMENTS, steps=5, load=folder):
        loaded = result["loaded"]
        assert under("model.", loaded) == under("model.", first[0]["end"])
        assert under(f"island.{result['island']}.inner.", loaded) == under("model.", loaded)
        assert f"{BEGIN}the checkpoint is of another --diloco-fragments" in result["lines"]


@pytest.mark.parametrize(("before", "after"), [({}, WIDE), slow(WIDE, {})])
def test_as_many_islands_of_other_shapes_go_on_with_all_they_had(
    saved: Any, before: dict[str, int], after: dict[str, int]
):
    folder, first = saved(dataclasses.replace(TWO, **before))
    second = run(dataclasses.replace(TWO, **after), steps=4, load=folder)
    of_island = {result["island"]: result["end"] for result in first}
    for result in second:
        loaded, island = result["loaded"], result["island"]
        for prefix in ("model.", "diloco.", f"island.{island}.inner.", f"island.{island}.counts"):
            assert under(prefix, loaded) == under(prefix, of_island[island]) != {}
        assert moments(loaded, island) == moments(of_island[island], island)
    notes = [line for line in second[0]["lines"] if "note:" in line]
    assert len(notes) == 2  # error feedback and random generators are of a layout


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
