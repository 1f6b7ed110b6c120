"""The sinks of a run's records: wandb and TensorBoard.

The package of a sink is imported only if the sink's flag is given, because TensorBoard is an optional package, and the
import of wandb is slow.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megazpp.base.files import make_writable
from megazpp.topology.layout import Layout
from megazpp.training.config import TrackingConfig
from megazpp.training.context import RunFolder
from megazpp.training.metrics_logger import Sink


def open_sinks(
    config: TrackingConfig,
    folder: RunFolder,
    flags: Mapping[str, Any],
    tags: Sequence[str] = (),
    *,
    first: int | None = None,
) -> list[Sink]:
    """Open each of the sinks wandb and TensorBoard that the flags request, and return the open sinks.

    If a sink cannot be opened, a warning is printed, and the sink is left out.

    Args:
        config: flags for logging.
        folder: the run folder.
        flags: values of all flags by name, which wandb stores with the run.
        tags: tags of the wandb run.
        first: first iteration of a resumed run, which repeats recorded iterations from there on; None for a new run.
    Raises:
        ValueError: --wandb-save-dir or --tensorboard-dir is not a writable folder.
    """
    # ---- collect the constructors of the requested sinks, by the sink's flag
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
        wanted[f"--tensorboard-dir {config.tensorboard_dir}"] = functools.partial(TensorBoardSink, events, first=first)
    # ---- open the sinks
    sinks = []
    for given, make in wanted.items():
        try:
            sinks.append(make())
        except Exception as error:  # wandb and TensorBoard may raise any exception, and training has to continue
            print(f"warning: {given}: {error}; nothing is recorded there, and training continues", flush=True)
    return sinks


def run_tags(layout: Layout, *, zero_stage: int, zeropp: bool) -> list[str]:
    """Return the tags of a run for wandb, for example ["zeropp", "2 nodes x 4 ranks", "tp2", "replicas2"].

    Parallel degrees of 1 are left out.
    """
    cluster = layout.cluster
    tags = ["zeropp" if zeropp else f"zero{zero_stage}", f"{cluster.num_nodes} nodes x {cluster.ranks_per_node} ranks"]
    degrees = {"tp": layout.tp, "cp": layout.cp, "replicas": layout.replicate, "replica_groups": layout.replica_group}
    return tags + [f"{name}{size}" for name, size in degrees.items() if size > 1]


class WandbSink:
    """A wandb run that receives the records. If a wandb run with the same ID exists, it is continued.

    wandb never prompts for credentials here. Without credentials, or if the server cannot be reached, the run is
    recorded offline; `wandb sync` uploads it later. Tags from the environment variable WANDB_TAGS are added.

    Args:
        tags: tags of the wandb run.
        settings: arguments of `wandb.init`.
    """

    name = "wandb"

    def __init__(self, tags: Sequence[str], **settings: Any) -> None:
        wandb = importlib.import_module("wandb")
        own_tags = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]
        settings |= {"tags": [*dict.fromkeys([*tags, *own_tags])], "resume": "allow"}
        try:
            self._run = wandb.init(**settings, mode=wandb_mode())
        except wandb.errors.Error as error:
            print(f"wandb: recording offline, because the server did not accept the run: {error}", flush=True)
            wandb.teardown(exit_code=1)
            self._run = wandb.init(**settings, mode="offline")
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        self._step: int = self._run.starting_step  # lowest step for which wandb accepts values

    def write(self, scalars: Mapping[str, float], *, iteration: int) -> None:
        """Record scalars, by name, at an iteration."""
        # wandb drops values of a step below its last step. So an iteration that the run repeats, because it has resumed
        # an earlier checkpoint, is recorded as the step after the last one. Curves show all values by iteration.
        self._step = iteration if iteration >= self._step else self._step + 1
        self._run.log({**scalars, "iteration": iteration}, step=self._step)

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Add the results of the run, by name, to the summary of the wandb run."""
        self._run.summary.update(dict(values))

    def close(self, *, exit_code: int) -> None:
        """Finish the wandb run, which counts as failed if `exit_code` is not 0."""
        self._run.finish(exit_code=exit_code)


class TensorBoardSink:
    """TensorBoard events, with each scalar against the iteration.

    Args:
        folder: folder of the event files.
        first: first iteration of a resumed run. TensorBoard then ignores later points of earlier event files. None for
            a new run.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, *, first: int | None = None) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(log_dir=str(folder), max_queue=1000, purge_step=first)

    def write(self, scalars: Mapping[str, float], *, iteration: int) -> None:
        """Record scalars, by name, in TensorBoard's events."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)

    def summarize(self, values: Mapping[str, Any], *, iteration: int) -> None:
        """Write the results of the run as a text table to TensorBoard's events."""
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        self._writer.add_text("summary", "\n".join(["| | value |", "| --- | --- |", *rows]), iteration)

    def close(self, *, exit_code: int) -> None:
        """Flush and close TensorBoard's event file. `exit_code` is ignored, because the file has no status of a run."""
        self._writer.close()


def wandb_mode() -> Literal["online", "offline", "disabled"]:
    """Return the argument `mode` of `wandb.init`: "online" only with credentials, so that wandb does not prompt.

    If the environment variable WANDB_MODE is "offline" or "disabled", it decides. Credentials are WANDB_API_KEY,
    WANDB_IDENTITY_TOKEN_FILE, or an entry in the netrc file for the server (WANDB_BASE_URL).
    """
    wanted = os.environ.get("WANDB_MODE", "online")
    if wanted == "disabled":
        return "disabled"
    if wanted in ("offline", "dryrun"):
        return "offline"
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    # Read the netrc file as wandb does, by the package requests, which is installed because wandb requires it.
    netrc = importlib.import_module("requests.utils")
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    return "offline" if netrc.get_netrc_auth(server) is None else "online"
