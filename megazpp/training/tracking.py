"""Write the records of a run to files of the run folder, and optionally to wandb and TensorBoard.

Only rank 0 has a `Tracker`. wandb and TensorBoard (sinks.py) receive single steps and log intervals; metrics.jsonl
receives log intervals only. If recording fails (a full disk, a lost network), a warning is printed once, and training
continues. The log line on stdout still has the numbers.
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

# Scalars about GPU memory, with the keys of their values in `torch.cuda.memory_stats`
MEMORY_SCALARS = {
    "mem/reserved": "reserved_bytes.all.current",
    "mem/allocated": "allocated_bytes.all.current",
    "mem/allocations": "allocation.all.current",
}


class Sink(Protocol):
    """A destination for the scalars of a run: wandb or TensorBoard (sinks.py). Its methods may raise any exception."""

    name: str

    def resume(self, progress: TrainingProgress) -> None:
        """Drop the recorded steps after `progress`, from which training resumes, because they will be repeated."""

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Record scalars, by name, at an iteration and at a number of consumed samples."""

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Record the results of the run, numbers and strings by name."""

    def close(self, *, exit_code: int) -> None:
        """Write all pending records, and close the destination. `exit_code` is 1 if the run has failed, otherwise 0."""


@dataclass
class Tracker(AbstractContextManager["Tracker"]):
    """The writer of a run's records on rank 0: files of the run folder, wandb and TensorBoard.

    It is a context manager around the run. At the end it closes wandb and TensorBoard, and unlocks the run folder.

    Args:
        config: flags for logging.
        folder: the run folder.
        sinks: wandb and TensorBoard, as far as `open_sinks` has opened them.
        device: device of this rank, whose memory is recorded if it is a GPU.
    """

    config: TrackingConfig
    folder: RunFolder
    sinks: Sequence[Sink]
    _: KW_ONLY
    device: torch.device

    def __post_init__(self) -> None:
        self._failed = set[str]()  # names of files and sinks whose failure has been reported by a warning

    def resume(self, progress: TrainingProgress) -> None:
        """Make wandb and TensorBoard drop the steps after `progress`, from which training resumes.

        Call this before anything is recorded.
        """
        self._each("resume", progress)

    def step(self, step: StepRecord) -> None:
        """Record a step in wandb and TensorBoard, if its iteration is a multiple of `--tensorboard-log-interval`."""
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
        """Record a log interval: a line of metrics.jsonl, and speed, memory and traffic in wandb and TensorBoard."""
        fields = record.fields
        self._keep("metrics.jsonl", lambda: self.folder.append("metrics.jsonl", fields))
        place = {name: fields[name] for name in ("iteration", "consumed_samples")}
        self._each("write", record.scalars, **place)

    def validation(
        self, loss: float, progress: TrainingProgress, *, metric: str = "lm_loss", has_perplexity: bool = True
    ) -> None:
        """Record the result of a validation in validation.jsonl, wandb and TensorBoard.

        Args:
            loss: result of the validation: the loss in nats per token, or the value of another `metric`.
            progress: progress at the validation.
            metric: name of the result, "lm_loss" or for example "reward".
            has_perplexity: True if the exponential of the loss is a perplexity, which is then recorded too.
        """
        iteration, consumed_samples = progress.iteration, progress.consumed_samples
        row = {"iteration": iteration, "consumed_samples": consumed_samples, metric: loss}
        self._keep("validation.jsonl", lambda: self.folder.append("validation.jsonl", row))
        scalars = {f"eval/{metric.removeprefix('lm_')}": loss}
        if metric == "lm_loss" and has_perplexity:
            scalars["eval/perplexity"] = perplexity(loss)
        self._each("write", scalars, iteration=iteration, consumed_samples=consumed_samples)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Record the results of the run in summary.json, and the numbers and strings among them in all sinks."""
        self._keep("summary.json", lambda: self.folder.write_json("summary.json", values, indent=2))
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        self._each("summarize", scalars, iteration=values["iteration"])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close wandb and TensorBoard, and unlock the run folder. An exception marks the wandb run as failed."""
        self._each("close", exit_code=0 if error is None else 1)
        self.folder.unlock()

    def _keep(self, file: str, write: Callable[[], object]) -> None:
        """Call `write`, which writes `file` in the run folder, and print a warning if it fails for the first time.

        Later records are still written if possible, because the disk may have space again.
        """
        try:
            write()
        except OSError as error:
            self._warn(file, error, "the log has its values")

    def _each(self, method: str, *values: Any, **named: Any) -> None:
        """Call a method of every sink (wandb, TensorBoard). After a sink has failed, only its `close` is called."""
        for sink in self.sinks:
            if sink.name in self._failed and method != "close":
                continue
            try:
                getattr(sink, method)(*values, **named)
            except Exception as error:  # wandb and TensorBoard may raise any exception, and training has to continue
                self._warn(sink.name, error, "it records no more values")

    def _warn(self, what: str, error: Exception, consequence: str) -> None:
        """Print a warning that records could not be written to `what`, a file or a sink; once per file and sink."""
        if what not in self._failed:
            self._failed.add(what)
            print(f"warning: {what}: {error}; {consequence}, and training continues", flush=True)
