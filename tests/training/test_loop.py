"""Test the training loop: the order of its calls, and the conditions that end it, on which all ranks must agree."""

import functools
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.pretended_run import FakeLoader, Run
from helpers.ranks import ranks
from helpers.training import Case, dims_on_ranks

from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.axis import MeshAxis
from megazpp.training import loop
from megazpp.training.anomalies import NotFiniteError
from megazpp.training.config import StopConfig
from megazpp.training.context import Console
from megazpp.training.loop import StopConditions, catching_signals
from megazpp.training.objective import StopRequested


def test_steps_get_consecutive_samples_and_logs_follow_the_interval():
    run = Run([5.0, 4.0, 3.0, 2.0, 1.0])
    batches = [batch for call in run.fake.calls for batch in call["batch"]]
    samples = [(batch.first, len(batch.tokens)) for batch in batches]
    # a global batch has two samples; this rank, one of two data ranks, takes the first sample of each
    assert samples == [(first, 1) for first in (0, 2, 4, 6, 8)]
    assert run.progress == TrainingProgress(iteration=5, consumed_samples=10, scheduled_samples=10, micro_batches=5)
    assert [(r["iteration"], r["lm_loss"]) for r in run.tracker.records] == [(2, 4.5), (4, 2.5), (5, 1.0)]
    assert run.out.getvalue().count(" consumed samples: ") == 3
    assert run.tracker.validations == [(3, 7.0)]


def test_skipped_step_consumes_samples_and_keeps_the_schedule():
    nan = float("nan")
    run = Run([1.0, nan, 1.0, 1.0])
    assert [call["learning_rate"] for call in run.fake.calls] == [0.0, 0.25, 0.25, 0.5]
    assert run.progress == TrainingProgress(iteration=4, consumed_samples=8, scheduled_samples=6, micro_batches=4)
    assert "number of skipped iterations:   1 |" in run.out.getvalue()


def test_loop_reads_late_but_before_logs_saves_evaluations_and_the_end():
    """Check the order in which the loop launches steps and reads their numbers.

    The loop reads a step's numbers after it has launched the next step. Before a log line, a save, an evaluation and
    the end of the run, it reads them at once.
    """
    run = Run([1.0] * 8, log_interval=5, eval_interval=4)
    assert run.fake.events == [
        *("launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3", "save 3"),
        *("launch 4", "read 4", "launch 5", "read 5", "launch 6", "read 6", "save 6"),
        *("launch 7", "launch 8", "read 7", "read 8", "save 8"),
    ]
    # each log record has the number of its steps; the records of 5 and of 3 steps contain all 8 steps of the run
    assert [(r["iteration"], r["steps"]) for r in run.tracker.records] == [(5, 5), (8, 3)]


def test_step_that_is_not_finite_is_never_saved():
    for bad in (2, 3, 6, 8):
        events: list[str] = []
        with pytest.raises(NotFiniteError, match=f"iteration {bad}"):
            Run([1.0] * 8, bad=bad, events=events, log_interval=100, eval_interval=100)
        assert [event for event in events if event.startswith("save")] == [f"save {n}" for n in (3, 6, 8) if n < bad]
        assert events[-1] == f"read {bad}"


def test_exit_interval_logs_the_last_step_and_observers_see_all_steps():
    run = Run([1.0] * 9, log_interval=100, exit_interval=4)
    assert (run.progress.iteration, run.progress.stop_reason) == (4, "--exit-interval 4")
    assert [r["iteration"] for r in run.tracker.records] == [4]
    assert run.observed == [(1, 1), (2, 1), (3, 1), (4, 1)]
    complete = Run([1.0] * 8, log_interval=100, exit_interval=4, start=TrainingProgress(4, 8, 8, 4)).progress
    assert (complete.iteration, complete.stop_reason) == (8, None)


def test_step_whose_samples_are_given_up_is_not_taken_and_the_one_before_is_saved(monkeypatch):
    """Raise StopRequested when the loop asks for the samples of step `at`, as when a signal stops a wait for samples.

    The loop must not count this step, and must save the step before it, if there is one.
    """
    load = FakeLoader.step
    for at, saved in ((1, []), (2, [1]), (5, [3, 4])):

        def step(loader: Any, consumed: int, size: int, at: int = at) -> Any:
            if consumed == 2 * (at - 1):
                raise StopRequested("SIGTERM")
            return load(loader, consumed, size)

        monkeypatch.setattr(FakeLoader, "step", step)
        events: list[str] = []
        run = Run([1.0] * 8, events=events, log_interval=100, eval_interval=100)
        assert (run.progress.iteration, run.progress.stop_reason) == (at - 1, "SIGTERM")
        assert [event for event in events if event.startswith("save")] == [f"save {number}" for number in saved]
        assert [record["iteration"] for record in run.tracker.records] == [at - 1] * (at > 1)


@pytest.mark.parametrize(("consumed", "steps"), [(6, 2), (7, 1), (8, 1), (9, 0), (10, 0), (12, 0)])
def test_resumed_run_of_samples_with_another_batch_size_consumes_all(consumed, steps):
    start = TrainingProgress(iteration=40, consumed_samples=consumed, scheduled_samples=consumed)
    run = Run([1.0] * steps, start=start, length={"train_samples": 10}, log_interval=100)
    assert (run.progress.iteration, run.progress.consumed_samples) == (40 + steps, consumed + 2 * steps)
    assert run.plan.total_iterations == 40 + steps
    left = "; the remaining 1 are too few for a global batch of 2" if consumed == 9 else ""
    complete = f"training is complete: {consumed} of --train-samples 10 are consumed{left}\n"
    assert (complete in run.out.getvalue()) == (steps == 0)
    # the loop saves a checkpoint after its last step, and saves nothing if it took no step
    assert run.fake.events[-1:] == ([f"save {40 + steps}"] if steps else [])


def test_resumed_run_of_steps_with_another_batch_size_takes_all_steps():
    start = TrainingProgress(iteration=3, consumed_samples=100, scheduled_samples=6)
    run = Run([1.0] * 2, start=start, length={"train_iters": 5})
    assert (run.progress.iteration, run.progress.consumed_samples) == (5, 104)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [0, 7])
def test_garbage_is_collected_after_the_first_step_and_at_intervals(monkeypatch, frozen, enabled):
    """Python's garbage collector runs after the first step and at intervals, and never inside later steps.

    Objects that the caller has frozen (`gc.freeze`) stay frozen, and a collector that was disabled stays disabled.
    """
    calls: list[Any] = []
    names = ("collect", "freeze", "unfreeze", "disable", "enable")
    recorder = {name: functools.partial(calls.append, name) for name in names}
    state = {"isenabled": lambda: enabled, "get_freeze_count": lambda: frozen}
    monkeypatch.setattr(loop, "GARBAGE_INTERVAL", 4)
    monkeypatch.setattr(loop, "gc", SimpleNamespace(**recorder, **state))
    with loop.collect_garbage_between_steps() as collect_garbage:
        for iteration in range(6, 14):
            calls.append(iteration)
            collect_garbage(iteration)
    first = ["collect", *["freeze"] * (not frozen), "disable"]
    last = [*["unfreeze"] * (not frozen), *["enable"] * enabled]
    assert calls == [6, *first, 7, 8, "collect", 9, 10, 11, 12, "collect", 13, *last]


ALONE: Any = SimpleNamespace(world=MeshAxis("world"), mesh=SimpleNamespace(device_type="cpu"))


def test_signal_stops_after_the_step_and_sets_hurried():
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        before = signal.getsignal(signum)
        stops = StopConditions(StopConfig())
        with catching_signals(stops):
            assert stops.reason(1, ALONE) is None
            os.kill(os.getpid(), signum)
            assert not stops.hurried  # until the loop asks for a reason to stop, the current step continues
            assert stops.reason(2, ALONE) == signum.name
            assert stops.hurried
            # while the run stops, a second signal neither ends the process nor raises an error
            os.kill(os.getpid(), signum)
        assert signal.getsignal(signum) is before


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
@pytest.mark.parametrize("nohup", [False, True])
def test_output_that_nobody_reads_stops_the_run_unless_nohup_started_it(monkeypatch, kind, nohup):
    reads, writes = os.openpty() if kind == "terminal" else os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writes, "w"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        stops = StopConditions(StopConfig())
        console = Console(enabled=True)
        with catching_signals(stops):
            console.log("first")
            console.log("second")
            assert stops.reason(1, ALONE) == (None if nohup else "SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)


def reasons(signalled_rank: int) -> list[str | None]:
    dims = dims_on_ranks(Case(tp=2))
    stops = StopConditions(StopConfig())
    with catching_signals(stops):
        first = stops.reason(1, dims)
        if dims.world.rank == signalled_rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return [first, stops.reason(2, dims)]


def test_signal_on_one_rank_stops_all_ranks_after_the_same_step():
    assert ranks(4).run(reasons, 3) == [[None, "SIGUSR1"]] * 4


def test_exit_duration_stops_after_the_given_minutes(monkeypatch):
    # the clock advances by 50 seconds per reading, so 120 seconds have passed at the third reading
    clock = iter(range(0, 1000, 50))
    monkeypatch.setattr("megazpp.training.loop.time.monotonic", lambda: float(next(clock)))
    stops = StopConditions(StopConfig(exit_duration_in_mins=2))
    assert [stops.reason(i, ALONE) for i in (1, 2, 3)] == [None, None, "--exit-duration-in-mins 2"]
    # the launching process began 100 seconds before this process, at time 200
    stops = StopConditions(StopConfig(exit_duration_in_mins=2), began=100.0)
    assert [stops.reason(i, ALONE) for i in (1, 2)] == [None, "--exit-duration-in-mins 2"]


@pytest.mark.gpu
def test_cuda_ranks_stop_one_step_later_without_waiting_for_the_device():
    world = SimpleNamespace(size=2, max_=lambda numbers: numbers)
    dims: Any = SimpleNamespace(world=world, mesh=SimpleNamespace(device_type="cuda"))
    found = []
    stops = StopConditions(StopConfig())
    with catching_signals(stops):
        for iteration in (1, 2, 3):
            if iteration == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            torch.cuda.set_sync_debug_mode("error")
            try:
                found.append(stops.reason(iteration, dims))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()  # a real step waits for the device here, because it reads its loss
    assert found == [None, None, "SIGUSR1"]
