"""Checkpoints of islands that take local steps, read by others: other numbers of islands, and none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import Attempt, Job, digest
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import Case
from torch.distributed.tensor import DTensor

from megazpp.base.files import DamagedError
from megazpp.islands.config import IslandsConfig

TWO = IslandsConfig(diloco_steps=2, diloco_islands=2, diloco_outer_lr=0.7, diloco_outer_momentum=0.9, diloco_delay=1)
FOUR = dataclasses.replace(TWO, diloco_islands=4)
NONE = IslandsConfig()
BEGIN = "note: islands begin at the outer weights: the checkpoint has other islands' own, or none"


def train_and_tell(job: Job) -> dict[str, Any]:
    """What a job has loaded and what it came to: digests of everything in full, by key, and the lines it said."""
    attempt = Attempt(job)
    progress = attempt.load()
    loaded = in_full(attempt)
    attempt.train(progress)
    island = attempt.dims.island.rank
    return {"island": island, "loaded": loaded, "end": in_full(attempt), "lines": attempt.lines}


def in_full(attempt: Attempt) -> dict[str, str]:
    rows = attempt.job.case.vocab_size  # the rest is padding
    tensors = attempt.state.tensors(optimizer=True, rng=False)
    padded = attempt.state.padded(tensors)
    full = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in tensors.items()}
    return {key: digest(x[:rows] if key in padded else x) for key, x in full.items()}


def part(found: dict[str, str], prefix: str) -> dict[str, str]:
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


def run(case: Case, diloco: IslandsConfig, steps: int, **flags: Any) -> list[dict[str, Any]]:
    return ranks(4).run(train_and_tell, Job(case=dataclasses.replace(case, diloco=diloco), steps=steps, flags=flags))


def moments(found: dict[str, str], island: int) -> dict[str, str]:
    return part(found, f"island.{island}.optimizer.state." if island else "optimizer.state.")


CASES = [Case(nodes=4), slow(Case(nodes=4, stage=1))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("before", "after"), [(TWO, FOUR), slow(FOUR, TWO)])
def test_another_number_of_islands_keeps_the_outer_weights_and_their_momentum(
    tmp_path: Path, case: Case, before: IslandsConfig, after: IslandsConfig
):
    first = run(case, before, 4, save=str(tmp_path))  # a message is under way
    second = run(case, after, 4, load=str(tmp_path))
    assert before.diloco_islands is not None
    of_island = {result["island"]: result["end"] for result in first}
    for result in second:
        loaded, island = result["loaded"], result["island"]
        for prefix in ("model.", "diloco.momentum."):
            assert part(loaded, prefix) == part(first[0]["end"], prefix) != {}
        assert part(loaded, "diloco.common.") == part(loaded, "model.")
        assert part(loaded, f"island.{island}.inner.") == part(loaded, "model.")
        source = island % before.diloco_islands
        assert moments(loaded, island) == moments(of_island[source], source) != {}
        assert BEGIN in second[0]["lines"]
    assert part(first[0]["end"], "diloco.common.") != part(first[0]["end"], "model.")
    assert moments(of_island[0], 0) != moments(of_island[1], 1)


@pytest.mark.parametrize("case", CASES)
def test_without_islands_the_outer_weights_go_on_with_the_first_island_s_moments(tmp_path: Path, case: Case):
    first = run(case, TWO, 4, save=str(tmp_path))
    second = run(case, NONE, 5, load=str(tmp_path))
    for result in second:
        assert part(result["loaded"], "model.") == part(first[0]["end"], "model.")
        assert moments(result["loaded"], 0) == moments(first[0]["end"], 0)
        assert not any(key.startswith(("island.", "diloco.")) for key in result["loaded"])
        assert part(result["end"], "model.") != part(result["loaded"], "model.")


@pytest.mark.parametrize("case", CASES)
def test_islands_begin_at_the_weights_and_with_the_moments_of_a_run_without(tmp_path: Path, case: Case):
    first = run(case, NONE, 2, save=str(tmp_path))
    second = run(case, TWO, 3, load=str(tmp_path))
    for result in second:
        loaded, island = result["loaded"], result["island"]
        for prefix in ("model.", "diloco.common.", f"island.{island}.inner."):
            assert part(loaded, prefix) == part(first[0]["end"], "model.")
        assert moments(loaded, island) == moments(first[0]["end"], 0)
    assert BEGIN in second[0]["lines"]


def test_other_fragments_begin_at_the_outer_weights(tmp_path: Path):
    case = Case(nodes=4)
    first = run(case, TWO, 4, save=str(tmp_path))
    second = run(case, dataclasses.replace(TWO, diloco_fragments=2), 5, load=str(tmp_path))
    for result in second:
        loaded = result["loaded"]
        assert part(loaded, "model.") == part(first[0]["end"], "model.")
        assert part(loaded, f"island.{result['island']}.inner.") == part(loaded, "model.")
    line = "note: islands begin at the outer weights: the checkpoint is of another --diloco-fragments"
    assert line in second[0]["lines"]


@pytest.mark.parametrize(("before", "after"), [({}, {"tp": 2, "nodes": 2}), slow({"tp": 2, "nodes": 2}, {})])
def test_as_many_islands_of_other_shapes_go_on_with_all_they_had(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
):
    case, flags = Case(nodes=4), {"save": str(tmp_path)}
    first = run(dataclasses.replace(case, **before), TWO, 4, **flags)
    second = run(dataclasses.replace(case, **after), TWO, 4, load=str(tmp_path))
    of_island = {result["island"]: result["end"] for result in first}
    for result in second:
        loaded, island = result["loaded"], result["island"]
        for prefix in ("model.", "diloco.", f"island.{island}.inner.", f"island.{island}.counts"):
            assert part(loaded, prefix) == part(of_island[island], prefix) != {}
        assert moments(loaded, island) == moments(of_island[island], island)
    notes = [line for line in second[0]["lines"] if "note:" in line]
    assert len(notes) == 2  # error feedback and random generators are of a layout


def accept_without(case: Case, gone: str | None) -> str:
    """The error about a checkpoint of islands that misses a tensor, or whose values are another tensor's."""
    attempt = Attempt(Job(case=case, steps=1, flags={}))
    attempt.train(attempt.load())
    assert attempt.diloco is not None
    found = attempt.state.tensors(optimizer=True, rng=False)
    own = f"island.{attempt.dims.island.rank}."
    if gone is None:
        found[f"{own}values"] = found[f"{own}values"][:-3]
    else:
        del found[gone.replace("island.", own)]
    try:
        attempt.state.accept(found, optimizer=True, rng=False, iteration=1)
    except DamagedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "gone", ["diloco.common.final_norm.weight", "island.inner.final_norm.weight", "island.values", None]
)
def test_a_part_that_is_missing_or_damaged_is_named(gone: str | None):
    for rank, message in enumerate(ranks(2).run(accept_without, Case(nodes=2, diloco=TWO), gone)):
        if gone is None:
            assert message.startswith(f"island.{rank}.values: loss scale, losses or groups are damaged")
        else:
            assert message == f"the checkpoint of islands has no {gone.replace('island.', f'island.{rank}.')}"
