"""Write the records of a run: files of its folder, and optionally wandb and TensorBoard.

Only rank 0 has a `Tracker`. wandb and TensorBoard receive single steps and log intervals; metrics.jsonl receives log
intervals only. If recording fails (a full disk, a lost network), a warning is printed once and training continues. The
log line on stdout still has the values. The wandb and TensorBoard packages are imported only if their flag is given,
because TensorBoard is optional and importing wandb is slow.

This file is longer than 300 lines, because both sinks share the tracker's rules but handle a resumed run differently.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megazpp.base.flags import check_positive, flag
from megazpp.checkpoint.metadata import TrainingProgress
from megazpp.topology.layout import Layout
from megazpp.training.context import RunFolder, make_writable
from megazpp.training.metrics import IntervalRecord, StepRecord, perplexity

MEMORY_SCALARS = {
    "mem/reserved": "reserved_bytes.all.current",
    "mem/allocated": "allocated_bytes.all.current",
    "mem/allocations": "allocation.all.current",
}


SAMPLES = " vs samples"  # suffix of scalars that are plotted against consumed samples


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Logging.

    The metrics that are recorded, how often, and where: log, Weights & Biases, TensorBoard.
    """

    run_dir: str | None = flag(None, "folder for the run's records (default: runs/<time>-<config name>)")
    log_interval: int = flag(100, "iterations between two log lines")
    log_params_norm: bool = flag(False, "log the L2 norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "log the number of gradient elements that are zero")
    wandb_project: str = flag("", "Weights & Biases project; an empty name disables wandb", common=True)
    wandb_entity: str = flag("", "Weights & Biases entity: user or team (default: wandb's)")
    wandb_exp_name: str = flag("", "name of the wandb run (default: the run folder's name)")
    wandb_save_dir: str = flag("", "folder for wandb's local files (default: the run folder)")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard events; not given: no events are written")
    tensorboard_log_interval: int = flag(1, "iterations between two records to wandb and TensorBoard")

    def __post_init__(self) -> None:
        check_positive(self, "log_interval", "tensorboard_log_interval")
        if self.wandb_project and not is_installed("wandb"):
            raise ValueError(f"--wandb-project {self.wandb_project}: wandb is not installed (pip install wandb)")
        if self.tensorboard_dir is not None and not is_installed("tensorboard"):
            where = f"--tensorboard-dir {self.tensorboard_dir}"
            raise ValueError(f"{where}: tensorboard is not installed (pip install tensorboard)")


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


def open_sinks(
    config: TrackingConfig, folder: RunFolder, flags: Mapping[str, Any], tags: Sequence[str] = ()
) -> list[Sink]:
    """Open the sinks that the flags request; a sink that fails to open prints a warning and is left out.

    Args:
        config: the logging flags.
        folder: the run folder.
        flags: values of all flags, which wandb stores with the run.
        tags: tags of the wandb run.
    Raises:
        ValueError: --wandb-save-dir or --tensorboard-dir is not a writable folder.
    """
    # settings of the requested sinks
    wanted: dict[str, Callable[[], Sink]] = {}
    if config.wandb_project:
        own_folder = make_writable(config.wandb_save_dir, "--wandb-save-dir") if config.wandb_save_dir else folder.path
        settings = {
            "project": config.wandb_project,
            "entity": config.wandb_entity or None,  # None selects wandb's default entity
            "name": config.wandb_exp_name or folder.path.resolve().name,
            "dir": str(own_folder),
            "id": folder.wandb_run_id(),
            "config": dict(flags),
        }
        wanted[f"--wandb-project {config.wandb_project}"] = functools.partial(WandbSink, tags, **settings)
    if config.tensorboard_dir is not None:
        events = make_writable(config.tensorboard_dir, "--tensorboard-dir")
        wanted[f"--tensorboard-dir {config.tensorboard_dir}"] = functools.partial(TensorBoardSink, events)
    # open them
    sinks = []
    for given, make in wanted.items():
        try:
            sinks.append(make())
        except Exception as error:  # the sink's package may raise anything
            print(f"warning: {given}: {error}; nothing is recorded there, and training continues", flush=True)
    return sinks


def run_tags(layout: Layout, *, zero_stage: int, zeropp: bool) -> list[str]:
    """Return the tags of a run, for example ["zeropp", "2 nodes x 4 ranks", "tp2", "replicas2"].

    Degrees of 1 are omitted.
    """
    cluster = layout.cluster
    tags = ["zeropp" if zeropp else f"zero{zero_stage}", f"{cluster.num_nodes} nodes x {cluster.ranks_per_node} ranks"]
    degrees = {"tp": layout.tp, "cp": layout.cp, "replicas": layout.replicate, "replica_groups": layout.replica_group}
    return tags + [f"{name}{size}" for name, size in degrees.items() if size > 1]


class WandbSink:
    """A wandb run; a run with the same id is continued.

    It never prompts. Without credentials, or if the server cannot be reached, the run is recorded offline; `wandb sync`
    uploads it later. Tags from WANDB_TAGS are added.

    wandb ignores steps below the last one that it has stored. If training resumes from an earlier step, the run is
    therefore rewound (`resume_from`), which servers offer as a preview. If a server refuses, it keeps the lost steps,
    and the steps that repeat them are not recorded.

    Args:
        tags: tags of the run.
        settings: arguments of `wandb.init`.
    """

    name = "wandb"

    def __init__(self, tags: Sequence[str], **settings: Any) -> None:
        wandb = importlib.import_module("wandb")
        own_tags = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]
        self._wandb, self._first = wandb, 0  # steps before `_first` are not recorded
        self._settings = settings | {"tags": [*dict.fromkeys([*tags, *own_tags])]}
        self._open(resume="allow")

    def resume(self, progress: TrainingProgress) -> None:
        """Rewind the run if the server has later steps; an offline run starts a separate recording."""
        first = self._run.starting_step
        if first <= progress.iteration + 1:
            return
        self._run.finish()
        try:
            self._open(resume_from=f"{self._settings['id']}?_step={progress.iteration}", offline=False)
        except self._wandb.errors.Error as error:
            print(
                f"wandb: the server did not rewind the run: {error}; it keeps the lost iterations "
                f"{progress.iteration + 1} to {first - 1}, and does not record the iterations that repeat them",
                flush=True,
            )
            self._open(resume="allow")
            self._first = first

    def _open(self, *, offline: bool = True, **resume: str) -> None:
        """Start recording.

        Args:
            offline: whether to record offline if the server refuses the run. False: its error is raised.
            resume: arguments of `wandb.init` that select the run to continue.
        """
        wandb, settings = self._wandb, self._settings | resume
        try:
            self._run = wandb.init(**settings, mode=wandb_mode())
        except wandb.errors.Error as error:
            if not offline:
                raise
            print(f"wandb: recording offline, because the server did not accept the run: {error}", flush=True)
            wandb.teardown(exit_code=1)
            self._run = wandb.init(**settings, mode="offline")
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Record scalars at an iteration, unless the server already has that iteration."""
        if iteration < self._first:
            return
        self._run.log({**scalars, "iteration": iteration, "samples": consumed_samples}, step=iteration)

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Add values to the summary of the wandb run."""
        self._run.summary.update(dict(values))

    def close(self, *, exit_code: int) -> None:
        """Finish the wandb run."""
        self._run.finish(exit_code=exit_code)


class TensorBoardSink:
    """TensorBoard events: each scalar against the iteration, and as "<name> vs samples" against consumed samples."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge_step: int | None = None
        self._tensorboard = importlib.import_module("torch.utils.tensorboard")

    def resume(self, progress: TrainingProgress) -> None:
        """Purge the steps after `progress` from earlier event files, if there are any.

        TensorBoard purges every point from one step number on, also for scalars that are plotted against samples. Their
        points before `progress` may have a larger number than the iteration. These are purged too, and written again.
        """
        if not self._folder.is_dir():
            return
        reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = reader.EventAccumulator(str(self._folder), size_guidance={reader.SCALARS: 0}).Reload()
        points = {tag: events.Scalars(tag) for tag in events.Tags()[reader.SCALARS]}
        ends = {tag: progress.consumed_samples if tag.endswith(SAMPLES) else progress.iteration for tag in points}
        if not any(point.step > ends[tag] for tag, found in points.items() for point in found):
            return
        self._purge_step = progress.iteration + 1
        for tag, found in points.items():
            for point in found:
                if self._purge_step <= point.step <= ends[tag]:
                    self._writer.add_scalar(tag, point.value, point.step, walltime=point.wall_time)

    @functools.cached_property
    def _writer(self) -> Any:
        """The writer of events, opened at the first use because `resume` sets its purge step."""
        return self._tensorboard.SummaryWriter(log_dir=str(self._folder), max_queue=1000, purge_step=self._purge_step)

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Record scalars against the iteration and against the consumed samples."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            self._writer.add_scalar(f"{name}{SAMPLES}", value, consumed_samples)

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Write the results of the run as a text table."""
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        self._writer.add_text("summary", "\n".join(["| | value |", "| --- | --- |", *rows]), iteration)

    def close(self, *, exit_code: int) -> None:
        """Flush and close the event file."""
        self._writer.close()


# A destination of named scalars. Both kinds have the same methods, which may raise any error of their packages.
Sink = WandbSink | TensorBoardSink


def wandb_mode() -> Literal["online", "offline", "disabled"]:
    """Return wandb's mode: "online" only with credentials, so that wandb does not prompt.

    WANDB_MODE takes precedence if it is offline or disabled. Credentials are WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE,
    or an entry for the server (WANDB_BASE_URL) in the netrc file.
    """
    wanted = os.environ.get("WANDB_MODE", "online")
    if wanted == "disabled":
        return "disabled"
    if wanted in ("offline", "dryrun"):
        return "offline"
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    netrc = importlib.import_module("requests.utils")  # installed, because wandb depends on it
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    return "offline" if netrc.get_netrc_auth(server) is None else "online"


def is_installed(package: str) -> bool:
    """Return True if a top-level package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
