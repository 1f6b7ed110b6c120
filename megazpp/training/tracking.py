"""Where a run is recorded: its folder, and wandb and TensorBoard if asked for, under Megatron's names.

Only rank 0 has a `Tracker`. Steps go to wandb and TensorBoard, intervals (log lines) to metrics.jsonl as
well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from megazpp.flags import flag
from megazpp.training.metrics import IntervalRecord, StepRecord, perplexity
from megazpp.training.run_folder import RunFolder, make_writable
from megazpp.training.sinks import Sink, TensorBoardSink, WandbSink, is_installed


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is recorded, how often, and where."""

    run_dir: str | None = flag(None, "folder of this run's records; default: runs/<time>-<config name>")
    log_interval: int = flag(100, "iterations between two log lines")
    log_throughput: bool = flag(
        False, "with --log-timers-to-tensorboard: record model TFLOP/s per rank to wandb and TensorBoard"
    )
    log_params_norm: bool = flag(False, "log the L2 norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "log how many gradient elements are zero")
    wandb_project: str = flag("", "record to this Weights & Biases project; without it wandb is off")
    wandb_entity: str = flag("", "Weights & Biases entity (user or team)")
    wandb_exp_name: str = flag("", "name of the wandb run; default: the run folder's name")
    wandb_save_dir: str = flag("", "where wandb writes its local files; default: the run folder")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events to this folder")
    tensorboard_log_interval: int = flag(1, "iterations between two records to wandb and TensorBoard")
    tensorboard_queue_size: int = flag(1000, "TensorBoard records that wait before they are written")
    log_timers_to_tensorboard: bool = flag(False, "record the step time to wandb and TensorBoard")
    log_loss_scale_to_tensorboard: bool = flag(True, "record the loss scale to wandb and TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "record the validation perplexity to wandb and TensorBoard")
    log_memory_to_tensorboard: bool = flag(False, "record CUDA memory to wandb and TensorBoard")
    log_world_size_to_tensorboard: bool = flag(False, "record the number of ranks to wandb and TensorBoard")


def check_tracking(config: TrackingConfig) -> None:
    """Refuse intervals below 1, and flags whose package is not installed; nothing is made or imported.

    Raises:
        ValueError: names the flag and its value.
    """
    for name in ("log_interval", "tensorboard_log_interval"):
        value = getattr(config, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not positive")
    if config.wandb_project and not is_installed("wandb"):
        raise ValueError(f"--wandb-project {config.wandb_project}: wandb is not installed (pip install wandb)")
    if config.tensorboard_dir is not None and not is_installed("tensorboard"):
        raise ValueError(
            f"--tensorboard-dir {config.tensorboard_dir}: tensorboard is not installed (pip install tensorboard)"
        )


class Tracker:
    """Records one run.

    Args:
        config: the flags.
        folder: the run folder.
        sinks: where scalars go, see `open_sinks`.
        world_size: ranks of the job.
        device: whose memory is recorded.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: RunFolder,
        sinks: Sequence[Sink],
        *,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.folder = folder
        self._config, self._sinks, self._world_size, self._device = config, sinks, world_size, device

    def step(self, step: StepRecord) -> None:
        """Record a step's scalars, every `--tensorboard-log-interval` iterations."""
        if not self._sinks or step.iteration % self._config.tensorboard_log_interval:
            return
        scalars = {
            "learning-rate": step.learning_rate,
            "batch-size": step.global_batch_size,
            "lm loss": step.lm_loss,
        }
        optional = {"grad-norm": step.grad_norm, "num-zeros": step.num_zeros, "params-norm": step.params_norm}
        scalars |= {name: value for name, value in optional.items() if value is not None}
        if self._config.log_loss_scale_to_tensorboard:
            scalars["loss-scale"] = step.loss_scale
        if self._config.log_world_size_to_tensorboard:
            scalars["world-size"] = self._world_size
        if self._config.log_memory_to_tensorboard:
            scalars |= _memory_scalars(self._device)
        self._write(scalars, step.iteration, step.consumed_samples)

    def interval(self, record: IntervalRecord) -> None:
        """Record a log interval: metrics.jsonl, and its timings if asked for."""
        self.folder.append_metrics(record.as_json())
        if self._config.log_timers_to_tensorboard:
            scalars = {"iteration-time": record.step_seconds}
            if self._config.log_throughput:
                scalars["throughput"] = record.tflops_per_rank
            self._write(scalars, record.last.iteration, record.last.consumed_samples)

    def validation(self, loss: float, *, iteration: int, consumed_samples: int) -> None:
        """Record a validation loss, and its perplexity if asked for."""
        scalars = {"lm loss validation": loss}
        if self._config.log_validation_ppl_to_tensorboard:
            scalars["lm loss validation ppl"] = perplexity(loss)
        self._write(scalars, iteration, consumed_samples)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json."""
        self.folder.write_summary(values)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush everything; an exception marks the run as failed."""
        for sink in self._sinks:
            sink.close(exit_code=0 if error is None else 1)

    def _write(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        for sink in self._sinks:
            sink.write(scalars, iteration=iteration, consumed_samples=consumed_samples)


def open_sinks(config: TrackingConfig, folder: RunFolder, flags: Mapping[str, Any]) -> list[Sink]:
    """The sinks that the flags ask for, each independent of the other; `flags` becomes wandb's config.

    Raises:
        ValueError: a folder cannot be written to.
    """
    sinks: list[Sink] = []
    if config.wandb_project:
        save_dir = config.wandb_save_dir
        sink = WandbSink(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name or folder.path.resolve().name,
            folder=make_writable(save_dir, "--wandb-save-dir") if save_dir else folder.path,
            run_id=folder.wandb_run_id(),
            config=flags,
        )
        sinks.append(sink)
    if config.tensorboard_dir is not None:
        events = make_writable(config.tensorboard_dir, "--tensorboard-dir")
        sinks.append(TensorBoardSink(events, queue_size=config.tensorboard_queue_size))
    return sinks


def _memory_scalars(device: torch.device) -> dict[str, float]:
    """Megatron's names; empty where there is no CUDA device."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
