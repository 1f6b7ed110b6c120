"""Run the training loop with fake steps, to test the loop without a model."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers.metrics import meter

from megazpp.optim.config import ScheduleConfig
from megazpp.optim.schedule import TrainingProgress, build_schedule
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.timeline import Timeline
from megazpp.topology.cluster import Cluster
from megazpp.training.anomalies import NotFiniteError
from megazpp.training.batches import BatchConfig, plan_batches
from megazpp.training.config import StopConfig, TrackingConfig
from megazpp.training.context import Console, RunContext
from megazpp.training.loop import AfterStep, StopConditions, train
from megazpp.training.metrics import StepRecord
from megazpp.training.metrics_logger import MetricsRecorder, Tracker

CPU = torch.device("cpu")


class FakeDims:
    """Fake mesh of one rank on the first of two nodes, with a counter to which the fake step adds bytes."""

    def __init__(self) -> None:
        self.counter, self.timeline = TrafficCounter(), Timeline()
        self.world = self.tp = self.shard = self.replicate = self.replica_group = MeshAxis("world")
        self.layout = SimpleNamespace(cluster=Cluster(num_nodes=2, ranks_per_node=1))
        self.mesh = SimpleNamespace(device_type="cpu")


@dataclass
class FakeStep:
    """Fake of `TrainStep`: each call counts 100 sent bytes and reports the next of the given losses.

    A NaN among the losses means a skipped step. Like `TrainStep`, a call reads the numbers of the previous step, unless
    the loop has already read them by `check` or `wait`. Reading the numbers of step `bad` raises NotFiniteError.
    """

    dims: Any
    losses: list[float]
    norms: list[float] | None = None
    bad: int | None = None
    calls: list[dict[str, float]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def launch(self, micro_batches: Any, *, learning_rate: float, weight_decay: float, iteration: int) -> Any:
        index = len(self.calls)
        loss, norm = self.losses[index], 1.0 if self.norms is None else self.norms[index]
        self.calls.append({"learning_rate": learning_rate, "batch": micro_batches})
        self.dims.counter.add("cross", "shard", "all_gather", 100)
        self.events.append(f"launch {iteration}")
        if index:
            self._read(iteration - 1)
        values = {"learning_rate": learning_rate, "skipped": loss != loss}
        record = StepRecord(iteration=iteration, loss=loss, grad_norm=norm, **values)
        check = functools.partial(self._read, iteration)
        return SimpleNamespace(skipped=record.skipped, record=record, check=check, wait=lambda: check() or record)

    def _read(self, iteration: int) -> None:
        if f"read {iteration}" not in self.events:
            self.events.append(f"read {iteration}")
            if iteration == self.bad:
                raise NotFiniteError(f"iteration {iteration}")


class FakeLoader:
    """Fake data loader of the first of two data-parallel ranks, which gets half of each batch."""

    wait_seconds = 0.0

    def step(self, consumed_samples: int, global_batch_size: int) -> Any:
        self.wait_seconds += 1e-6
        return [SimpleNamespace(tokens=torch.zeros(global_batch_size // 2, 4), first=consumed_samples)]


class FakeTracker(Tracker):
    """Tracker that keeps the rows of metrics.jsonl, and iteration and loss of each row of validation.jsonl."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []
        self.validations: list[tuple[int, float]] = []

    def record(self, name: str, row: Any) -> None:
        if name == "metrics":
            self.records.append(row)
        else:
            self.validations.append((row["iteration"], row["lm_loss"]))


class Run:
    """One training by the real loop with fake steps, which records observed steps, evaluations and saves.

    Args:
        losses: loss that each step reports.
        norms: gradient norm of each step; None for 1.0.
        log_interval: --log-interval.
        eval_interval: iterations between two evaluations.
        tracker: writer of the run's records; None for a `FakeTracker`.
        start: progress from which the training resumes.
        bad: iteration whose numbers are not finite; None for no such iteration.
        events: list to which the launch of each step, the reading of its result and each save are appended, in order;
            None for a new list.
        length: --train-iters or --train-samples by field name; None for as many steps as there are losses.
        loop: fields of StopConfig.

    A save is due at every third step and at the end.
    """

    def __init__(
        self,
        losses: list[float],
        *,
        norms: list[float] | None = None,
        log_interval: int = 2,
        eval_interval: int = 3,
        tracker: Tracker | None = None,
        start: TrainingProgress = TrainingProgress(),  # noqa: B008, immutable, so that all calls may share it
        bad: int | None = None,
        events: list[str] | None = None,
        length: dict[str, int] | None = None,
        **loop: Any,
    ) -> None:
        steps, events = len(losses), [] if events is None else events
        self.dims, self.out = FakeDims(), io.StringIO()
        self.fake = FakeStep(self.dims, losses, norms, bad, events=events)
        self.observed: list[tuple[int, int]] = []
        self.tracker = tracker or FakeTracker()
        self.recorder = MetricsRecorder(
            TrackingConfig(log_interval=log_interval),
            RunContext(dims=self.dims, device=CPU, console=Console(enabled=True, out=self.out)),
            meter(total_iterations=steps, total_samples=2 * steps, seq_length=4, world_size=1, flops_per_token=1),
            sharding=SimpleNamespace(model=torch.nn.Module()),
            tracker=self.tracker,
            validation=self.evaluate,
        )
        batches = BatchConfig(micro_batch_size=1, global_batch_size=2, **(length or {"train_iters": steps}))
        self.plan = plan_batches(batches, data_parallel_size=2).resumed_at(start)
        rates = ScheduleConfig(lr=1.0, lr_decay_style="constant", lr_warmup_iters=4, lr_decay_iters=100)
        samples = {"train_iters": steps, "train_samples": None, "global_batch_size": 2}
        stops = StopConditions(StopConfig(**loop))
        # a real collection would scan the objects of all earlier tests, which takes 0.3 s
        with mock.patch("gc.collect"):
            self.progress = train(
                self.fake,
                FakeLoader(),
                self.plan,
                build_schedule(rates, weight_decay=0.0, **samples),
                self.recorder,
                stops,
                [self.step],  # a context around each step, which profilers use in a real run
                start=start,
                after=[
                    AfterStep(self.save, 3, at_end=True),
                    AfterStep(self.recorder.validate, eval_interval),
                ],
            )

    def save(self, progress: TrainingProgress) -> None:
        self.fake.events.append(f"save {progress.iteration}")

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        before = len(self.fake.calls)
        yield
        self.observed.append((iteration, len(self.fake.calls) - before))

    def evaluate(self, between_batches: Callable[[], None]) -> float:
        # the real Evaluator pauses the counter too, so these bytes must not appear in the metrics
        with self.dims.counter.paused():
            self.dims.counter.add("cross", "shard", "all_gather", 10_000)
        return 7.0
