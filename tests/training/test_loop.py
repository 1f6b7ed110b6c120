"""The loop's bookkeeping, with a step that only pretends: what is asked of whom, when, and when it ends."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from megazpp.optim.schedule import ScheduleConfig, build_schedule
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.timeline import Timeline
from megazpp.topology.cluster import Cluster
from megazpp.training.batches import BatchConfig, plan_batches
from megazpp.training.console import Console
from megazpp.training.loop import Progress, Recorder, train
from megazpp.training.metrics import Meter, RunShape
from megazpp.training.step import StepResult
from megazpp.training.stopping import StopConditions, StopConfig
from megazpp.training.tracking import TrackingConfig

CPU = torch.device("cpu")


class FakeDims:
    """One rank of one of two nodes, with a counter that the pretended step adds to."""

    def __init__(self) -> None:
        self.counter, self.timeline = TrafficCounter(), Timeline()
        self.world = self.tp = self.shard = MeshAxis("world")
        self.layout = SimpleNamespace(cluster=Cluster(num_nodes=2, ranks_per_node=1))
        self.mesh = SimpleNamespace(device_type="cpu")


@dataclass
class FakeStep:
    """Sends 100 bytes a step and reports the losses it was given; a NaN is a skipped step."""

    dims: Any
    losses: list[float]
    calls: list[dict[str, float]] = field(default_factory=list)
    scaler: Any = field(default_factory=lambda: SimpleNamespace(scale=1.0))

    def __call__(self, micro_batches: Any, *, learning_rate: float, weight_decay: float, iteration: int) -> StepResult:
        loss = self.losses[len(self.calls)]
        self.calls.append({"learning_rate": learning_rate, "batch": micro_batches})
        self.dims.counter.add("cross", "shard", "all_gather", 100)
        return StepResult(loss, 1.0, 8, skipped=loss != loss)


class FakeLoader:
    def step(self, consumed_samples: int, global_batch_size: int) -> Any:
        return (consumed_samples, global_batch_size)


class Run:
    def __init__(
        self,
        losses: list[float],
        *,
        log_interval: int = 2,
        eval_interval: int = 3,
        start: Progress = Progress(),  # noqa: B008, immutable
        **loop: Any,
    ) -> None:
        self.dims = FakeDims()
        self.fake = FakeStep(self.dims, losses)
        self.observed: list[tuple[int, int]] = []
        batches = BatchConfig(micro_batch_size=2, global_batch_size=2, train_iters=len(losses))
        self.plan = plan_batches(batches, data_parallel_size=1)
        schedule = build_schedule(
            ScheduleConfig(lr=1.0, lr_decay_style="constant", lr_warmup_iters=4, lr_decay_iters=100),
            weight_decay=0.0,
            train_iters=len(losses),
            train_samples=None,
            global_batch_size=2,
        )
        self.out = io.StringIO()
        shape = RunShape(
            total_iterations=len(losses), total_samples=2 * len(losses), seq_length=4, world_size=1, flops_per_token=1
        )
        tracker = SimpleNamespace(records=[], validations=[])
        tracker.step = lambda record: None
        tracker.interval = lambda record: tracker.records.append(record.as_json())
        tracker.validation = lambda loss, **where: tracker.validations.append((where["iteration"], loss))
        self.tracker = tracker
        recorder = Recorder(
            Meter(shape),
            Console(enabled=True, out=self.out),
            tracker,
            self.dims,
            TrackingConfig(log_interval=log_interval),
            CPU,
        )
        self.recorder = recorder
        self.progress = train(
            self.fake,
            FakeLoader(),
            self.plan,
            schedule,
            recorder,
            StopConditions(StopConfig(**loop)),
            [self],  # observes
            eval_interval=eval_interval,
            evaluate=self.evaluate,
            start=start,
        )

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        before = len(self.fake.calls)
        yield
        self.observed.append((iteration, len(self.fake.calls) - before))

    def evaluate(self) -> float:
        with self.dims.counter.paused():  # as Evaluator does
            self.dims.counter.add("cross", "shard", "all_gather", 10_000)
        return 7.0


def test_each_step_gets_the_next_samples_and_a_line_is_logged_every_interval_and_at_the_end():
    run = Run([5.0, 4.0, 3.0, 2.0, 1.0])
    assert [call["batch"] for call in run.fake.calls] == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 2)]
    assert run.progress == Progress(iteration=5, consumed_samples=10, scheduled_samples=10, micro_batches=5)
    assert [(r["iteration"], r["lm_loss"]) for r in run.tracker.records] == [(2, 4.5), (4, 2.5), (5, 1.0)]
    assert run.out.getvalue().count(" consumed samples: ") == 3
    assert run.tracker.validations == [(3, 7.0)]


def test_bytes_are_those_of_training_steps_per_node_and_not_of_evaluations():
    run = Run([1.0] * 6)
    # 100 bytes a step over 2 nodes; the evaluation at 3 falls inside the second interval
    assert [r["cross_bytes"] for r in run.tracker.records] == [50, 50, 50]


def test_a_skipped_step_consumes_samples_but_does_not_move_the_schedule():
    nan = float("nan")
    run = Run([1.0, nan, 1.0, 1.0])
    assert [call["learning_rate"] for call in run.fake.calls] == [0.0, 0.25, 0.25, 0.5]
    assert run.progress == Progress(iteration=4, consumed_samples=8, scheduled_samples=6, micro_batches=4)
    assert "number of skipped iterations:   1 |" in run.out.getvalue()


def test_a_loss_that_is_not_a_number_is_printed():
    assert "lm loss: NAN" in Run([float("nan")] * 2).out.getvalue()


def test_exit_interval_ends_the_run_after_a_multiple_and_logs_the_last_step():
    run = Run([1.0] * 9, log_interval=100, exit_interval=4)
    assert run.progress.iteration == 4
    assert run.progress.stop_reason == "--exit-interval 4"
    assert [r["iteration"] for r in run.tracker.records] == [4]


def test_the_closing_lines_and_the_summary_say_what_the_run_came_to():
    run = Run([3.0, 2.0, 1.0])
    summaries: list[dict[str, Any]] = []
    run.tracker.summary = lambda values, rows: summaries.append(values)
    run.recorder.finish(
        run.progress, run.evaluate, lambda: 8.0, unigram_entropy=6.0, wait_share=0.25, zero3=lambda k: None
    )
    (summary,) = summaries
    assert summary["validation_loss"] == 7.0
    assert summary["unigram_entropy"] == 6.0
    assert summary["final_loss"] == 1.0
    assert summary["test_loss"] == 8.0
    assert summary["cross_bytes_per_step"] == 50
    assert summary["cpu_seconds_per_token"] >= 0.0
    assert run.tracker.validations == [(3, 7.0)]  # evaluated at the last iteration already, not again
    text = run.out.getvalue()
    assert "25.0% of the time waiting for data" in text
    assert "validation loss: 7.0000; unigram entropy of the validation text: 6.0000 nats per token" in text
    assert "validation loss at iteration 3 on test set | lm loss value: 8.0" in text


def test_observers_stand_around_every_step():
    assert Run([1.0, 2.0, 3.0]).observed == [(1, 1), (2, 1), (3, 1)]


def test_a_continued_run_is_compared_with_what_zero_3_would_have_sent_for_the_same_steps():
    run = Run([3.0, 2.0, 1.0], start=Progress(iteration=1, consumed_samples=2, micro_batches=50))
    run.tracker.summary = lambda values, rows: None
    asked: list[int] = []
    run.recorder.finish(run.progress, None, None, unigram_entropy=6.0, wait_share=0.0, zero3=asked.append)
    assert asked == [2]  # steps 2 and 3, of one micro-batch each
