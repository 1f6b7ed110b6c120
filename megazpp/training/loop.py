"""The training loop: load a batch, run the step, record, save, evaluate, and stop when a condition is met.

A run stops early after a given iteration, after a given time, or because of a signal. All ranks stop after the same
step. The stop signals are Ctrl-C, SIGTERM (schedulers, container runtimes, `kill`), SIGHUP (a closed terminal) and the
signals by which batch systems announce a time limit (SIGUSR1, SIGUSR2, SIGXCPU). They stop a run cleanly, even if a
signal reaches only one of the run's processes. A rank whose output has lost its reader stops the run like SIGHUP. A run
that nohup has started ignores both SIGHUP and a lost reader.

After the first stop signal:

- The current step is finished. With several GPUs, the next step is finished too, because the ranks read their agreement
  to stop one step later, without waiting for the device (`StopConditions.reason`).
- A checkpoint is saved if --save is given. The last evaluation and the last sample are skipped.
- The program exits with status 0.

A second Ctrl-C ends the run immediately. Other repeated signals have no further effect.
"""

from __future__ import annotations

import functools
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from megazpp.base.program import handling, lasting_output, say
from megazpp.optim.schedule import Schedule, TrainingProgress
from megazpp.parallel.comm_queue import HostCopy
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import STOP_SIGNALS
from megazpp.parallel.timeline import STEP, WAIT
from megazpp.training.batches import BatchPlan
from megazpp.training.config import StopConfig
from megazpp.training.metrics_logger import MetricsRecorder
from megazpp.training.objective import StopRequested
from megazpp.training.step import LaunchedStep, TrainStep

GARBAGE_INTERVAL = 50  # iterations between two runs of Python's garbage collector
# A function of the iteration that returns a context manager, which the loop enters around the iteration and its data
# loading. All ranks have the same observers.
Observer = Callable[[int], AbstractContextManager[None]]
# A function that the loop calls after each step, to synchronize DiLoCo's replica groups if that is due. Its arguments
# are the step, whose work is queued on the device; the progress of this rank's group after the step; and True after
# the last step of the run. Groups skip steps independently, but share one learning rate schedule. The function
# therefore returns the common progress, from which training continues. It also returns True if the ranks of all groups
# are at the same step, so that they can communicate and decide together to stop.
Synchronize = Callable[[LaunchedStep, TrainingProgress, bool], tuple[TrainingProgress, bool]]


class Loader(Protocol):
    """The source of each step's micro-batches: a `BatchLoader`, or a loader of an optional feature.

    A feature's loader may generate samples with the model, or wait until samples are assigned to this job. If a stop
    signal arrives meanwhile, or the run ends, the loader raises StopRequested on all ranks.

    Attributes:
        wait_seconds: seconds that all calls of `step` together have waited for data.
    """

    wait_seconds: float

    def step(self, consumed_samples: int, global_batch_size: int) -> Sequence[Any]:
        """Return this rank's micro-batches of one training step, on the rank's device.

        Args:
            consumed_samples: number of samples that all earlier steps have consumed.
            global_batch_size: samples of the step over all ranks.
        """


class AfterStep(NamedTuple):
    """An action that all ranks run after some steps, for example a save or an evaluation.

    Attributes:
        run: function that takes the progress after the step. Before the call, the host waits for the step's results.
        interval: the action follows each step whose iteration is a multiple of this number; None for no such step.
        at_end: True if the action also follows the last step of the run, whatever the iteration is.
    """

    run: Callable[[TrainingProgress], None]
    interval: int | None
    at_end: bool = False

    def due(self, iteration: int, *, last: bool) -> bool:
        """Return True if this action, for example a save, follows the step of `iteration`.

        `last` is True for the last step of the run.
        """
        return (last and self.at_end) or (self.interval is not None and iteration % self.interval == 0)


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
    synchronize: Synchronize | None = None,
) -> TrainingProgress:
    """Train until `plan` is complete or `stops` ends the run.

    Args:
        step: optimizer step that is run for each global batch.
        loader: source of micro-batches.
        plan: batch sizes and length of the run.
        schedule: learning rate and weight decay, as functions of the consumed samples.
        recorder: recorder that receives the record of each step.
        stops: conditions for an early stop.
        observers: functions whose context managers surround each step. The context manager of the first function is
            the outermost.
        start: progress from which the run starts or resumes.
        after: actions after some steps, such as saves and evaluations, run in this order.
        synchronize: function that synchronizes DiLoCo's replica groups; None without DiLoCo.
    Returns:
        The progress at the end of the run. Its `stop_reason` is None if the run is complete.
    """
    progress, timeline = start, step.dims.timeline
    if plan.is_complete(progress):
        recorder.run.log(f"training is complete: {_length_of(plan, progress)}")
    recorder.run.console.start_bar(plan.total_iterations, progress.iteration)
    before: LaunchedStep | None = None  # the previous step, as long as its results have not been recorded
    with collect_garbage_between_steps() as collect_garbage:
        while not plan.is_complete(progress) and progress.stop_reason is None:
            iteration, batch_size = progress.iteration + 1, plan.batch_size_at(progress.consumed_samples)
            began, cpu_began, waited = time.perf_counter(), time.process_time(), loader.wait_seconds

            # ---- load this rank's micro-batches, and launch the training step
            with ExitStack() as around:
                for observer in observers:
                    around.enter_context(observer(iteration))
                # The span covers all of the step, so the watchdog notices a hang outside of collectives too.
                around.enter_context(timeline.span(STEP, f"step {iteration}"))
                try:
                    with timeline.span(WAIT, "data"):
                        batches = loader.step(progress.consumed_samples, batch_size)
                except StopRequested as stop:  # the loader has no samples, see `Loader`: end without this step
                    progress = progress._replace(stop_reason=str(stop))
                    if before is not None:
                        recorder.step(before.wait(), last=True)
                    # Run the actions for the end of the run, except those that have already run after the last step.
                    for action in after if progress.iteration > start.iteration else ():
                        if action.at_end and not action.due(progress.iteration, last=False):
                            action.run(progress)
                    break
                launched = step.launch(
                    batches,
                    learning_rate=schedule.learning_rate(progress.scheduled_samples),
                    weight_decay=schedule.weight_decay(progress.scheduled_samples),
                    iteration=iteration,
                )
                after_it = progress._replace(
                    iteration=iteration,
                    consumed_samples=progress.consumed_samples + batch_size,
                    scheduled_samples=progress.scheduled_samples + batch_size,
                )
                met, final = True, plan.is_complete(after_it)
                if synchronize is not None:
                    after_it, met = synchronize(launched, after_it, final)
                    final = plan.is_complete(after_it)
            collect_garbage(iteration)

            # ---- advance the progress of the run, and decide whether to stop
            micro_batches = plan.num_micro_batches_at(progress.consumed_samples)
            # A skipped step does not advance the learning rate schedule. With DiLoCo, `synchronize` sets the position
            # in the schedule, because all replica groups share one schedule.
            progress = after_it._replace(
                scheduled_samples=after_it.scheduled_samples
                - (batch_size if synchronize is None and launched.skipped else 0),
                micro_batches=progress.micro_batches + micro_batches,
                stop_reason=stops.reason(iteration, step.dims, agree=met, at_once=synchronize is not None),
            )
            if final:
                progress = progress._replace(stop_reason=None)
            last = progress.stop_reason is not None or final
            due = [action for action in after if action.due(iteration, last=last)]
            at_once = last or recorder.logs(iteration) or bool(due)
            if at_once:
                launched.check()

            # ---- complete the step's record. Record the step at once if a log line or an action follows it, or if it
            # is the last step; otherwise one step later, so that the host need not wait for the results
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

            # ---- run the actions that follow this step, such as saves and evaluations
            for action in due:
                action.run(progress)
    recorder.run.console.stop_bar()
    return progress


def _length_of(plan: BatchPlan, progress: TrainingProgress) -> str:
    """Return the progress of a complete run in words for the log.

    If samples remain that are too few for another step, the text gives their number.
    """
    if plan.train_samples is None:
        return f"iteration {progress.iteration} of {plan.train_iters}"
    left = plan.train_samples - progress.consumed_samples
    rest = f"; the remaining {left} are too few for a global batch of {plan.batch_size_at(progress.consumed_samples)}"
    return f"{progress.consumed_samples} of --train-samples {plan.train_samples} are consumed{rest if left > 0 else ''}"


class StopConditions:
    """The conditions for an early stop of the run: an iteration, a time limit, or a stop signal.

    Args:
        config: flags for an early stop.
        began: value of `time.monotonic()` at the start of the job, from which --exit-duration-in-mins counts; None for
            the value at the construction of this object.
    Attributes:
        caught: number of the last stop signal that this rank has caught; 0 without a signal.
        hurried: True once a signal has ended the training. The last evaluation and the generation of a sample text are
            then skipped.
    """

    def __init__(self, config: StopConfig, *, began: float | None = None) -> None:
        self._config, self._began = config, time.monotonic() if began is None else began
        self._agreed: HostCopy | None = None
        self.caught, self.hurried = 0, False

    def reason(self, iteration: int, dims: ParallelDims, *, agree: bool = True, at_once: bool = False) -> str | None:
        """Return the reason to stop after `iteration`, equal on all ranks, or None to continue.

        A signal may reach only one rank, and clocks differ, so the ranks combine their conditions by one all-reduce of
        two integers. With several ranks on CUDA the run stops one step later. Each rank then reads the result of the
        previous step's all-reduce, so that no rank has to wait for its device.

        Args:
            iteration: iteration of the step that has just been taken.
            dims: mesh axes of the job.
            agree: True if all ranks of the job call this after the same step, so that they can communicate. False
                ignores signals and the time limit until the next call with True.
            at_once: True makes CUDA ranks wait for the result of this step's all-reduce.
        """
        config = self._config
        mine = [self.caught, int(self._is_over)]
        caught, some_over = self._agree(mine, dims, at_once=at_once) if agree else (0, 0)
        if caught:
            self.hurried = True
            return signal.Signals(caught).name
        if config.exit_interval is not None and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        return f"--exit-duration-in-mins {config.exit_duration_in_mins}" if some_over else None

    @property
    def wants_to_stop(self) -> bool:
        """True if this rank has caught a stop signal, or if the time limit of the run is over."""
        return self.caught > 0 or self._is_over

    @property
    def _is_over(self) -> bool:
        """True if the time limit --exit-duration-in-mins is set and has passed since the start of the job."""
        minutes = self._config.exit_duration_in_mins
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def give_up(self, dims: ParallelDims) -> None:
        """Raise StopRequested on all ranks if any rank has caught a stop signal. All ranks wait for one all-reduce.

        All ranks call this during long work that the run can do without, for example between two batches of an
        evaluation.
        """
        (caught,) = self._agree([self.caught], dims, at_once=True)
        if caught:
            self.hurried = True
            raise StopRequested(signal.Signals(caught).name)

    def _agree(self, mine: list[int], dims: ParallelDims, *, at_once: bool) -> list[int]:
        """Return the maximum of each integer in `mine` over all ranks.

        The first integer in `mine` is the number of this rank's stop signal, 0 for none. In calls by `reason` a second
        one follows: 1 if the time limit is over, otherwise 0. On CUDA with `at_once` False, return the maxima of the
        previous call instead, so that the host does not wait for the device. The first call then returns zeros.
        """
        if dims.world.size == 1:
            return mine
        if at_once or dims.mesh.device_type != "cuda":
            return dims.world.max_(torch.tensor(mine, dtype=torch.int32, device=dims.mesh.device_type)).tolist()
        largest = dims.world.max_(torch.tensor(mine, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True))
        before, self._agreed = self._agreed, HostCopy(largest)
        return [0] * len(mine) if before is None else [int(number) for number in before.wait()]


@contextmanager
def catching_signals(stops: StopConditions, *, answers: bool = False) -> Iterator[None]:
    """Return a context in which a stop signal sets `stops.caught` instead of ending the process.

    A print to a closed terminal, to a pipe whose reader has exited, or to a file on a full disk acts like SIGHUP.

    Args:
        stops: conditions for an early stop.
        answers: True on the rank that prints a confirmation of Ctrl-C.
    """

    def catch(signum: int, frame: FrameType | None) -> None:
        """Handle a stop signal: store its number, so that the training loop stops after a step.

        After SIGINT, a second SIGINT ends the process.
        """
        stops.caught = signum
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process even in a blocked collective
            if answers:
                say("\nfinishing this step; press Ctrl-C again to stop now")

    with handling(STOP_SIGNALS, catch), lasting_output(functools.partial(signal.raise_signal, signal.SIGHUP)):
        yield


@contextmanager
def collect_garbage_between_steps() -> Iterator[Callable[[int], None]]:
    """Return a context in which Python's garbage collector runs only between steps.

    The context yields a function, which the training loop calls with the iteration after each step. Without the
    context, the collector runs on each rank at a different time, and the other ranks wait in their next collective.

    Nearly all Python objects are created at start-up and stay. A model of two layers on the CPU has 310,000 of them,
    and a collection then takes 0.4 to 1.1 s on a busy core. The first call of the function therefore excludes these
    objects from later collections by `gc.freeze`, so that a collection takes less than 0.1 ms. `gc.unfreeze` at the end
    of the context undoes this for all frozen objects of the process. So if other code has frozen objects before, the
    function freezes none.
    """
    enabled, freezes, started = gc.isenabled(), gc.get_freeze_count() == 0, False

    def after_step(iteration: int) -> None:
        """Collect garbage after the first step and after every `GARBAGE_INTERVAL` iterations."""
        nonlocal started
        if not started:
            gc.collect()
            if freezes:
                gc.freeze()
            gc.disable()
            started = True
        elif iteration % GARBAGE_INTERVAL == 0:
            gc.collect()

    try:
        yield after_step
    finally:
        if started and freezes:
            gc.unfreeze()
        if started and enabled:
            gc.enable()
