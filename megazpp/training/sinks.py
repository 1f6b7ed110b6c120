"""The sinks of a run's records: wandb and TensorBoard.

Their packages are imported only if their flag is given, because TensorBoard is optional and importing wandb is slow.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megazpp.optim.schedule import TrainingProgress
from megazpp.topology.layout import Layout
from megazpp.training.config import TrackingConfig
from megazpp.training.context import RunFolder, make_writable
from megazpp.training.tracking import Sink

SAMPLES = " vs samples"  # suffix of scalars that are plotted against consumed samples


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
