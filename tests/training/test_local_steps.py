"""Test that DiLoCo's replica groups communicate at synchronizations only, and stop or end the job together there."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from helpers.faults import guarded, launch, poison_gradient, state
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import Case, build_diloco, build_step

from megazpp.diloco import loop
from megazpp.diloco.config import DilocoConfig
from megazpp.diloco.loop import EarlyStop, LocalSteps
from megazpp.optim.schedule import TrainingProgress
from megazpp.training.anomalies import NotFiniteError
from megazpp.training.config import StopConfig
from megazpp.training.loop import StopConditions
from megazpp.zero.config import ZeroConfig


def train(
    case: Case, folder: Path, poisoned: int | None = None, signalled: int | None = None, *, stops_early: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """Train with DiLoCo; return a dict per step of this rank, and the error that ended the training.

    The error is "" if training ended normally. In step 2, rank `poisoned` gets a NaN gradient, and rank `signalled`
    catches a signal. Either is None if no rank does. With `stops_early`, a signal moves the next synchronization
    forward (`EarlyStop`), and the training ends there.

    The dict of a step has these entries:
        "met": True if all groups waited for each other after the step.
        "stopped": reason to stop, or None.
        "asked": number of collectives that this rank called over several replica groups.
        "busy": True if the step sends or merges outer weights; otherwise "asked" must be 0.
        "loss": loss of the step.
        "inner": logged mean loss of all groups since they last waited for each other; None for other steps.
        "weights": hashes of the state by name.
    """
    step, dims = build_step(case)
    guarded(step, case, folder, has_replica_groups=True)
    diloco, stops, rows = build_diloco(case, step, dims), StopConditions(StopConfig()), []
    store, rank, size = dist.distributed_c10d._get_default_store(), dims.world.rank, dims.world.size
    worker: Any = SimpleNamespace(store=store, rank=rank, world_size=size, restarts=folder)
    early = EarlyStop(stops, worker)
    if stops_early:
        with mock.patch.object(loop, "STOP_POLL_SECONDS", 0.01):
            early.begin(TrainingProgress(0))
    local_steps = LocalSteps(diloco, step._objective, step.guard, dims, early)
    for iteration in range(1, case.steps + 1):
        if (iteration, dims.world.rank) == (2, poisoned):
            poison_gradient(step.model.final_norm)
        if (iteration, dims.world.rank) == (2, signalled):
            stops.caught = 15
        with mock.patch.object(dims.replica_group, "count") as groups, mock.patch.object(dims.world, "count") as world:
            launched = launch(step, case, iteration - 1)
            try:
                _, met = local_steps.after_step(launched, TrainingProgress(iteration), iteration == case.steps)
            except NotFiniteError as error:
                return rows, str(error)
            row = {"met": met, "stopped": stops.reason(iteration, dims, agree=met, at_once=True)}
        row["asked"] = groups.call_count + world.call_count
        row["busy"] = met or diloco.plan.sends_at(iteration) is not None or any(diloco.merge_at)
        record = launched.wait()
        rows.append(row | {"loss": record.loss, "inner": record.metrics.get("inner_loss"), "weights": state(step)})
        if stops_early and row["stopped"]:
            break
    return rows, ""


LATE = Case(nodes=2, steps=8, diloco=DilocoConfig(diloco_steps=3, diloco_fragment_sync_delay=2))
LARGE = Case(
    nodes=4, steps=8, zero=ZeroConfig(zeropp=True), diloco=DilocoConfig(diloco_steps=3, diloco_replica_groups=2)
)


@pytest.mark.parametrize(("case", "meetings"), [(LATE, [5, 8]), slow(LARGE, [3, 6, 8])])
def test_replica_groups_communicate_only_where_a_merge_is_due(case, meetings, tmp_path):
    results = ranks(4).run(train, case, tmp_path)
    for rows, error in results:
        assert ([n for n, row in enumerate(rows, 1) if row["met"]], error) == (meetings, "")
        assert {row["stopped"] for row in rows} == {None}
        assert {row["asked"] for row in rows if not row["busy"]} == {0}
    first, last = results[0][0], results[-1][0]
    for before, meeting in zip([0, *meetings], meetings, strict=False):
        own = [sum(row["loss"] for row in rows[before:meeting]) / (meeting - before) for rows in (first, last)]
        assert own[0] != own[1]
        for rows, _ in results:
            assert rows[meeting - 1]["inner"] == pytest.approx(sum(own) / 2, rel=1e-6)


def test_nan_in_one_replica_group_ends_the_job_at_the_next_merge(tmp_path):
    meeting = 5
    for rank, (rows, error) in enumerate(ranks(4).run(train, LATE, tmp_path, poisoned=3)):
        assert "iteration 2: loss" in error
        assert "from rank 3" in error
        assert len(rows) == meeting - 1
        moved = [rows[n]["weights"] != rows[n - 1]["weights"] for n in range(1, meeting - 1)]
        # the group of ranks 0 and 1 trained on; the group with rank 3, which had the NaN, took no update
        assert moved == [rank < 2] * (meeting - 2)
    assert (tmp_path / "not-finite-2.json").exists()


@pytest.mark.slow
def test_signal_on_one_rank_stops_all_ranks_at_the_next_merge(tmp_path):
    for rows, _ in ranks(4).run(train, LATE, tmp_path, signalled=1):
        assert [row["stopped"] for row in rows[:5]] == [None] * 4 + ["SIGTERM"]


@pytest.mark.slow
def test_signal_between_synchronizations_stops_all_ranks_at_one_step(tmp_path):
    steps = 400
    case = dataclasses.replace(LATE, steps=steps, diloco=dataclasses.replace(LATE.diloco, diloco_steps=steps // 2))
    results = ranks(4).run(train, case, tmp_path, signalled=1, stops_early=True)
    (stopped,) = {len(rows) for rows, _ in results}
    assert stopped < steps // 2
    for rows, _ in results:
        assert [(row["met"], row["stopped"]) for row in rows[-2:]] == [(False, None), (True, "SIGTERM")]


def test_exit_interval_stops_without_communication():
    stops = StopConditions(StopConfig(exit_interval=4))
    dims: Any = None  # any communication would use `dims`, and raise an error on None
    assert [stops.reason(i, dims, agree=False) for i in (3, 4)] == [None, "--exit-interval 4"]
