"""The training loop: fetch, step, record, save, evaluate, stop when it is time.

A run stops before its end after an iteration, after a time, or at a signal, with the same answer on all ranks. SIGTERM
(schedulers, container runtimes, `kill`), SIGUSR1 (Slurm's --signal) and Ctrl-C end a run in good order, whichever of
its processes they reach: the step that is running is finished (with several GPUs the next one too), a checkpoint is
saved where --save asks for one, the last evaluation and the sample are left out, and the program exits with 0. A second
Ctrl-C ends the run at once; another signal changes nothing more.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch

from megazpp.base.flags import check_positive, flag
from megazpp.checkpoint.metadata import TrainingProgress
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import STOP_SIGNALS
from megazpp.parallel.timeline import WAIT
from megazpp.training.batches import BatchPlan
from megazpp.training.metrics_logger import MetricsRecorder
from megazpp.training.step import HostCopy, LaunchedStep, TrainStep

GARBAGE_INTERVAL = 50  # iterations
Observer = Callable[[int], AbstractContextManager[None]]  # around an iteration, data included; the same on all ranks


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Early stop.

    Conditions that end the run before its last iteration.
    """

    exit_interval: int | None = flag(None, "stop after an iteration that this divides")
    exit_duration_in_mins: int | None = flag(None, "stop after this many minutes since the program's start")
    skip_train: bool = flag(False, "only evaluate")

    def __post_init__(self) -> None:
        check_positive(self, "exit_interval", "exit_duration_in_mins")


class Loader(Protocol):
    """The source of steps' micro-batches: a `BatchLoader`, or what draws them from the model."""

    wait_seconds: float

    def step(self, consumed_samples: int, global_batch_size: int) -> Sequence[Any]:
        """This rank's micro-batches of the step that begins at `consumed_samples`, on the device."""


class AfterStep(Protocol):
    """Something that follows some of the steps: a save, an evaluation. Every rank calls every method."""

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return whether it follows the step of `iteration`, so that the host waits for the step's numbers first."""

    def after_step(self, progress: TrainingProgress, *, last: bool) -> None:
        """Do it if it is due; called after every step, `last` after the run's last one."""


def train(
    step: TrainStep,
    loader: Loader,
    plan: BatchPlan,
    schedule: Schedule,
    recorder: MetricsRecorder,
    stops: StopConditions,
    observers: Sequence[Observer] = (),
    *,
    start: TrainingProgress,
    after: Sequence[AfterStep] = (),
    synchronize: Callable[[LaunchedStep, int, bool], bool] | None = None,
) -> TrainingProgress:
    """Train until `plan` is fulfilled or `stops` says so.

    Args:
        observers: entered around each step, in this order.
        after: what follows steps, in this order.
        synchronize: lets models that train apart meet, which skip steps on their own, but share a schedule. Called with
            a step, its iteration and True for the run's last one; returns whether all have waited for each other.
    """
    progress = start
    if plan.is_complete(progress):
        recorder.run.log(f"training is complete: {_length_of(plan, progress)}")
    recorder.run.console.start_bar(plan.total_iterations, progress.iteration)
    before: LaunchedStep | None = None  # a step that nobody has waited for yet
    with collect_garbage_between_steps() as collect_garbage:
        while not plan.is_complete(progress) and progress.stop_reason is None:
            iteration, batch_size = progress.iteration + 1, plan.batch_size_at(progress.consumed_samples)
            began, cpu_began, waited = time.perf_counter(), time.process_time(), loader.wait_seconds
            with ExitStack() as around:
                for observer in observers:
                    around.enter_context(observer(iteration))
                with step.dims.timeline.span(WAIT, "data"):
                    batches = loader.step(progress.consumed_samples, batch_size)
                launched = step.launch(
                    batches,
                    learning_rate=schedule.learning_rate(progress.scheduled_samples),
                    weight_decay=schedule.weight_decay(progress.scheduled_samples),
                    iteration=iteration,
                )
                after_it = progress._replace(
                    iteration=iteration, consumed_samples=progress.consumed_samples + batch_size
                )
                final = plan.is_complete(after_it)
                met = synchronize is None or synchronize(launched, iteration, final)
            collect_garbage(iteration)
            micro_batches = plan.num_micro_batches_at(progress.consumed_samples)
            progress = after_it._replace(
                scheduled_samples=progress.scheduled_samples
                + (0 if synchronize is None and launched.skipped else batch_size),
                micro_batches=progress.micro_batches + micro_batches,
                stop_reason=stops.reason(iteration, step.dims, agree=met, at_once=synchronize is not None),
            )
            last = progress.stop_reason is not None or final
            at_once = last or recorder.logs(iteration) or any(each.due(iteration, last=last) for each in after)
            if at_once:
                launched.check()
            record = launched.record
            record.consumed_samples, record.global_batch_size = progress.consumed_samples, batch_size
            record.tokens = None if recorder.meter.whole_samples else sum(batch.tokens.numel() for batch in batches)
            record.micro_batches = micro_batches
            record.seconds, record.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
            record.wait_seconds = loader.wait_seconds - waited
            if before is not None:
                recorder.step(before.wait(), last=False)
            if at_once:
                recorder.step(launched.wait(), last=last)
            before = None if at_once else launched
            for each in after:
                each.after_step(progress, last=last)
    recorder.run.console.stop_bar()
    return progress


def _length_of(plan: BatchPlan, progress: TrainingProgress) -> str:
    """Describe the progress of a complete run, and the samples that are too few for another step."""
    if plan.train_samples is None:
        return f"iteration {progress.iteration} of {plan.train_iters}"
    left = plan.train_samples - progress.consumed_samples
    rest = f"; the other {left} are too few for a global batch of {plan.batch_size_at(progress.consumed_samples)}"
    return f"{progress.consumed_samples} of --train-samples {plan.train_samples} are consumed{rest if left > 0 else ''}"


@dataclass
class Evaluations:
    """A validation every `interval` iterations, unless a signal ends the run."""

    recorder: MetricsRecorder
    interval: int
    stops: StopConditions

    def due(self, iteration: int, *, last: bool) -> bool:
        return iteration % self.interval == 0 and not self.stops.hurried

    def after_step(self, progress: TrainingProgress, *, last: bool) -> None:
        if self.due(progress.iteration, last=last):
            self.recorder.validate(progress)


class StopConditions:
    """Catches the signals while it is entered, and says after each step whether to stop.

    Args:
        config: the flags.
        answers: whether this rank says that it has understood Ctrl-C.
    Attributes:
        hurried: a signal has ended the training, so what is not needed is left out.
    """

    def __init__(self, config: StopConfig, *, answers: bool = False) -> None:
        self._config, self._began, self._caught, self._answers = config, time.monotonic(), 0, answers
        self._before: dict[signal.Signals, Any] = {}
        self._agreed: HostCopy | None = None
        self.hurried = False

    def __enter__(self) -> StopConditions:
        self._before = {signum: signal.signal(signum, self._catch) for signum in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def reason(self, iteration: int, dims: ParallelDims, *, agree: bool = True, at_once: bool = False) -> str | None:
        """Why to stop after `iteration`, or None. One all-reduce of two integers over all ranks.

        Signals may reach one rank only, and clocks differ: what one rank knows holds for all. Several ranks on CUDA
        stop one step later: they look at what they agreed on a step ago, for which no device has to stand still.

        Args:
            agree: whether ranks ask each other; what only some of them know waits until they do.
            at_once: whether CUDA waits for the answer.
        """
        config, minutes = self._config, self._config.exit_duration_in_mins
        over = minutes is not None and time.monotonic() - self._began > 60 * minutes
        mine = [self._caught, int(over)]
        caught, some_over = self._agree(mine, dims, at_once=at_once) if agree else (0, 0)
        if caught:
            self.hurried = True
            return signal.Signals(caught).name
        if config.exit_interval is not None and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        return f"--exit-duration-in-mins {minutes}" if some_over else None

    def _agree(self, mine: list[int], dims: ParallelDims, *, at_once: bool) -> list[int]:
        """The largest of each number over all ranks; on CUDA, if not `at_once`, of those of the last call."""
        if dims.world.size == 1:
            return mine
        if at_once or dims.mesh.device_type != "cuda":
            return dims.world.max_(torch.tensor(mine, dtype=torch.int32, device=dims.mesh.device_type)).tolist()
        largest = dims.world.max_(torch.tensor(mine, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True))
        before, self._agreed = self._agreed, HostCopy(largest)
        return [0] * len(mine) if before is None else [int(number) for number in before.wait()]

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._caught = signum
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second one must not wait for a blocked collective
            if self._answers:
                print("\nfinishing this step; press Ctrl-C again to stop now", file=sys.stderr)


@contextmanager
def collect_garbage_between_steps() -> Iterator[Callable[[int], None]]:
    """Yield what has to be called after each iteration; Python's garbage collector runs then only.

    Left alone it runs on each rank when that rank's counters say so, and every other rank waits in its next collective.
    Nearly all it looks through was made at start-up and stays (310,000 objects for a model of two layers on the CPU,
    0.4 to 1.1 s on a busy core), so the first call freezes what is there; a collection then takes less than 0.1 ms.
    """
    enabled, frozen = gc.isenabled(), False

    def after_step(iteration: int) -> None:
        nonlocal frozen
        if not frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            frozen = True
        elif iteration % GARBAGE_INTERVAL == 0:
            gc.collect()

    try:
        yield after_step
    finally:
        if frozen:
            gc.unfreeze()
            if enabled:
                gc.enable()
