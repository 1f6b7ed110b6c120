"""What islands that take local steps tell each other, and that they tell each other nothing in between."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.faults import guarded, poison_gradient
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import CPU, Case, build_diloco, build_step, diloco_plan, dims_on_ranks, spec_of

from megazpp.islands import loop
from megazpp.islands.config import IslandsConfig
from megazpp.islands.loop import LocalSteps, check_island_holds
from megazpp.parallel.axis import MeshAxis
from megazpp.training.anomalies import NotFiniteError
from megazpp.training.loop import StopConditions, StopConfig
from megazpp.training.objective import LanguageModelLoss
from megazpp.zero.config import ZeroConfig


class Met(NamedTuple):
    """What one rank saw of a training on islands.

    Attributes:
        met: the steps after which islands had waited for each other.
        inner_losses: that the step records of these say.
        losses: of its own island.
        asked: calls between islands or over all ranks, in steps with nothing under way after which they did not meet.
        weights: a number for the weights of this island after each step.
        error: that ended it.
        stopped: why training stopped, by step.
    """

    met: list[int]
    inner_losses: list[float]
    losses: list[float]
    asked: list[int]
    weights: list[float]
    error: str
    stopped: dict[int, str]


def train(case: Case, folder: Path, poisoned: int | None = None, signalled: int | None = None) -> Met:
    """Steps of islands; one rank's gradient is NaN in step 2, or one rank catches a signal in it."""
    step, dims = build_step(case)
    guarded(step, case, folder, islands=True)
    diloco, objective = build_diloco(case, step, dims), LanguageModelLoss(dims)
    assert diloco is not None
    assert step.guard is not None
    step._objective = objective
    islands, stops = LocalSteps(diloco, objective, step.guard, dims), StopConditions(StopConfig())
    found = Met([], [], [], [], [], "", {})
    try:
        for index in range(case.steps):
            iteration = index + 1
            if (iteration, dims.world.rank) == (2, poisoned):
                poison_gradient(step.model.final_norm)
            if (iteration, dims.world.rank) == (2, signalled):
                stops._caught = 15
            with count_calls(dims.island, dims.world) as asked:
                batches = case.batches(index, dims)
                launched = step.launch(batches, learning_rate=1e-2, weight_decay=0.0, iteration=iteration)
                met = islands.after_step(launched, iteration, last=iteration == case.steps)
                reason = stops.reason(iteration, dims, agree=met, at_once=True)
            found.losses.append(launched.wait().loss)
            if reason is not None:
                found.stopped[iteration] = reason
            if met:
                found.met.append(iteration)
                found.inner_losses.append(launched.wait().metrics["inner_loss"])
            elif diloco.plan.sends_at(iteration) is None and not any(diloco.merge_at):
                found.asked.append(len(asked))
            found.weights.append(float(sum(shard.double().norm() for u in diloco.units for shard in u.unit.shards())))
    except NotFiniteError as error:
        return found._replace(error=str(error))
    return found


@contextlib.contextmanager
def count_calls(*axes: MeshAxis) -> Iterator[list[str]]:
    """The collectives along axes, whether they are counted as traffic or not."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for axis in axes:
            patch.setattr(axis, "count", lambda collective, sent_bytes: calls.append(collective))
        yield calls


PLAIN = Case(nodes=2, steps=8, diloco=IslandsConfig(diloco_steps=3))
LATE = Case(nodes=2, steps=8, diloco=IslandsConfig(diloco_steps=3, diloco_delay=2))
LARGE = Case(nodes=4, steps=8, zero=ZeroConfig(zeropp=True), diloco=IslandsConfig(diloco_steps=3, diloco_islands=2))


@pytest.mark.parametrize(("case", "met"), [(PLAIN, [3, 6, 8]), (LATE, [5, 8]), slow(LARGE, [3, 6, 8])])
def test_islands_meet_where_a_merge_is_due_and_say_nothing_in_between(case, met, tmp_path):
    results = ranks(4).run(train, case, tmp_path)
    first, last = results[0], results[-1]
    for result in results:
        assert (result.met, result.error, result.stopped) == (met, "", {})
        assert result.asked
        assert set(result.asked) == {0}
        assert result.inner_losses == first.inner_losses
    before = 0
    for iteration, inner in zip(met, first.inner_losses, strict=True):
        own = [sum(result.losses[before:iteration]) / (iteration - before) for result in (first, last)]
        assert own[0] != own[1]
        assert inner == pytest.approx(sum(own) / 2, rel=1e-6)
        before = iteration


@pytest.mark.parametrize("case", [PLAIN, slow(LATE)])
def test_a_nan_on_one_island_ends_the_job_on_all_when_they_meet(case, tmp_path):
    results = ranks(4).run(train, case, tmp_path, poisoned=3)
    meeting = 5 if case.diloco.diloco_delay else 3
    for rank, result in enumerate(results):
        assert "iteration 2: loss" in result.error
        assert "from rank 3" in result.error
        assert len(result.weights) == meeting - 1
        moved = [a != b for a, b in zip(result.weights, result.weights[1:], strict=False)]
        assert moved == [rank < 2] * (meeting - 2)  # the other island has gone on
    assert (tmp_path / "not-finite-2.json").exists()


@pytest.mark.parametrize("case", [PLAIN, slow(LATE)])
def test_a_signal_that_reaches_one_rank_stops_all_when_they_meet(case, tmp_path):
    results = ranks(4).run(train, case, tmp_path, signalled=1)
    meeting = 5 if case.diloco.diloco_delay else 3
    for result in results:
        assert min(result.stopped) == meeting
        assert result.stopped[meeting] == "SIGTERM"


def test_what_every_rank_knows_stops_at_once():
    stops = StopConditions(StopConfig(exit_interval=4))
    dims: Any = None  # nobody is asked
    assert [stops.reason(i, dims, agree=False) for i in (3, 4)] == [None, "--exit-interval 4"]


def check_against(available: int) -> str:
    case = Case(nodes=2, tp=2, diloco=IslandsConfig(diloco_steps=2, diloco_outer_momentum=0.9))
    plan, dims = diloco_plan(case), dims_on_ranks(case)
    assert plan is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "device_bytes", lambda device: available)
        try:
            check_island_holds(spec_of(case), dims, CPU, plan)
        except ValueError as error:
            return str(error)
    return ""


def test_a_model_whose_states_do_not_fit_an_island_is_refused():
    enough = 12 << 10 << 10
    assert set(ranks(4).run(check_against, enough)) == {""}
    (message,) = set(ranks(4).run(check_against, enough // 100))
    assert message.startswith("--diloco-steps 2: each of the 2 islands has a whole model on its 2 ranks, whose states")
