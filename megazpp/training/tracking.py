"""Write the records of a run: files of its folder, and optionally wandb and TensorBoard.

Only rank 0 has a `Tracker`. wandb and TensorBoard (sinks.py) receive single steps and log intervals; metrics.jsonl
receives log intervals only. If recording fails (a full disk, a lost network), a warning is printed once and training
continues. The log line on stdout still has the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import torch

from megazpp.optim.schedule import TrainingProgress
from megazpp.training.config import TrackingConfig
from megazpp.training.context import RunFolder
from megazpp.training.metrics import IntervalRecord, StepRecord, perplexity

MEMORY_SCALARS = {
    "mem/reserved": "reserved_bytes.all.current",
    "mem/allocated": "allocated_bytes.all.current",
    "mem/allocations": "allocation.all.current",
}


class Sink(Protocol):
    """A destination of named scalars, whose methods may raise any error; sinks.py has the implementations."""

    name: str

    def resume(self, progress: TrainingProgress) -> None:
        """Drop the steps after `progress`, which a crash has lost."""

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Record scalars at an iteration."""

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Record the results of the run."""

    def close(self, *, exit_code: int) -> None:
        """Write what is still pending, and close the destination."""


@dataclass
class Tracker(AbstractContextManager["Tracker"]):
    """Records one run to its folder and to the sinks.

    Args:
        config: the logging flags.
        folder: the run folder.
        sinks: destinations of scalars, see `open_sinks`.
        device: device whose memory is recorded.
    """

    config: TrackingConfig
    folder: RunFolder
    sinks: Sequence[Sink]
    _: KW_ONLY
    device: torch.device

    def __post_init__(self) -> None:
        self._failed = set[str]()  # files and sinks whose failure has been reported

    def resume(self, progress: TrainingProgress) -> None:
        """Make the sinks drop the steps after `progress`, which a crash has lost; call before anything is recorded."""
        self._each("resume", progress)

    def step(self, step: StepRecord) -> None:
        """Record a step's scalars; does so every `--tensorboard-log-interval` iterations."""
        if not self.sinks or step.iteration % self.config.tensorboard_log_interval:
            return
        found = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "batch_size": step.global_batch_size,
            "loss_scale": step.loss_scale,
            "num_zeros": step.num_zeros,
            "params_norm": step.params_norm,
            **step.metrics,
        }
        scalars = {f"train/{name}": value for name, value in found.items() if value is not None}
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            scalars |= {name: stats[key] for name, key in MEMORY_SCALARS.items()}
        self._each("write", scalars, iteration=step.iteration, consumed_samples=step.consumed_samples)

    def interval(self, record: IntervalRecord) -> None:
        """Record a log interval: a line of metrics.jsonl, and scalars of speed, memory and traffic for the sinks."""
        fields = record.fields
        self._keep("metrics.jsonl", lambda: self.folder.append("metrics.jsonl", fields))
        place = {name: fields[name] for name in ("iteration", "consumed_samples")}
        self._each("write", record.scalars, **place)

    def validation(
        self, loss: float, progress: TrainingProgress, *, metric: str = "lm_loss", has_perplexity: bool = True
    ) -> None:
        """Record the result of a validation.

        Args:
            loss: the loss in nats per token, or the value of another `metric`.
            progress: progress at the validation.
            metric: name of the value.
            has_perplexity: whether the exponential of the loss is a perplexity, which is then recorded too.
        """
        iteration, consumed_samples = progress.iteration, progress.consumed_samples
        row = {"iteration": iteration, "consumed_samples": consumed_samples, metric: loss}
        self._keep("validation.jsonl", lambda: self.folder.append("validation.jsonl", row))
        scalars = {f"eval/{metric.removeprefix('lm_')}": loss}
        if metric == "lm_loss" and has_perplexity:
            scalars["eval/perplexity"] = perplexity(loss)
        self._each("write", scalars, iteration=iteration, consumed_samples=consumed_samples)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Record the results of the run; sinks receive the values that are single numbers or strings."""
        self._keep("summary.json", lambda: self.folder.write_json("summary.json", values, indent=2))
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        self._each("summarize", scalars, iteration=values["iteration"])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Flush all sinks and unlock the folder; an exception marks the run as failed."""
        self._each("close", exit_code=0 if error is None else 1)
        self.folder.unlock()

    def _keep(self, file: str, write: Callable[[], object]) -> None:
        """Write to the run folder, and warn about a failure.

        The next record is tried again, because the disk may have space by then.
        """
        try:
            write()
        except OSError as error:
            self._warn(file, error, "the log has its values")

    def _each(self, method: str, *values: Any, **named: Any) -> None:
        """Call a method of every sink; only `close` is called on a sink that has failed."""
        for sink in self.sinks:
            if sink.name in self._failed and method != "close":
                continue
            try:
                getattr(sink, method)(*values, **named)
            except Exception as error:  # the sink's package may raise anything
                self._warn(sink.name, error, "it records no more values")

    def _warn(self, what: str, error: Exception, consequence: str) -> None:
        """Print one warning per file or sink."""
        if what not in self._failed:
            self._failed.add(what)
            print(f"warning: {what}: {error}; {consequence}, and training continues", flush=True)
