"""Reports about a training run at its start and end: run folder, description in the log, and commands to run next."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import megazpp
from megazpp.base.files import errors_as, read_small_file
from megazpp.base.flags import render_arguments_block
from megazpp.base.launcher import find_launcher
from megazpp.base.program import LAUNCHER_PID, aligned
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.metadata import found_from_anywhere
from megazpp.checkpoint.read import Verified, same_folder, saves_where_it_loads
from megazpp.data.dataset import cache_dir
from megazpp.data.text import BUILTIN
from megazpp.model.backends import model_backends
from megazpp.optim.build import optimizer_backends
from megazpp.optim.schedule import TrainingProgress
from megazpp.run.arguments import ParsedRun
from megazpp.run.checks import RunPlan, wire_backends
from megazpp.run.start import RUN_DIR, default_run_dir
from megazpp.topology.show import topology_text
from megazpp.training.context import FLAGS, RunContext, RunFolder
from megazpp.training.metrics_logger import Tracker
from megazpp.training.sinks import open_sinks, run_tags


class Records(NamedTuple):
    """The records of an earlier run that a resumed run continues.

    Attributes:
        run_dir: run folder to which the resumed run appends; None if the earlier run's folder is not found.
        wandb_run_id: id of the wandb run that the resumed run continues; None if it starts a new wandb run.
        is_copy: True if the earlier run's checkpoints were copied, and the resumed run uses the copy. The original run
            may continue too, with its own run folder and wandb run.
    """

    run_dir: Path | None
    wandb_run_id: str | None
    is_copy: bool


def records_to_continue(verified: Verified | None, config: CheckpointConfig, *, jobs: int) -> Records | None:
    """Return the records that a run continues; None if the run starts records of its own.

    A run continues the records of its checkpoint only if it saves to the folder that it loads from. A run that resumes
    and saves elsewhere, or not at all, is a fork, whose metrics and flags must not mix with the original run's.

    If the folder of checkpoints has been moved or copied, the run folder is expected at the same path relative to the
    folder of checkpoints as before. A run with copies of both folders thus continues in the copied run folder. A run
    with a copy of the checkpoints alone gets a new run folder. A run folder is continued only if its args.json names
    this folder of checkpoints. Otherwise another run has used the run folder since.

    Args:
        verified: checkpoint that the run loads; None for a run that starts from random weights.
        config: checkpoint flags of the run.
        jobs: number of jobs that train the run's model. With several jobs and --save, the result is None: another job
            may have saved the checkpoint to the shared folder, and may still write to the checkpoint's run folder.
    """
    if verified is None or not verified.source.continues or (jobs > 1 and config.save is not None):
        return None
    here, flags = verified.source.folder.path.resolve(), verified.record.flags
    origin = Path(saved) if isinstance(saved := flags.get("save"), str) else here
    at_origin = not origin.is_absolute() or (origin.is_dir() and origin.samefile(here))
    is_copy = not at_origin and origin.is_dir()
    places = []
    if verified.record.run_dir is not None:
        original = Path(verified.record.run_dir)
        moved = original if at_origin else Path(os.path.normpath(here / os.path.relpath(original, origin)))
        places = [place for place in (moved, original) if not (is_copy and place == original)]
    run_dir = next((place for place in places if _checkpoints_of(place) in (origin, here)), None)
    save = config.save
    if save is None and config.save_to_run_dir and run_dir is not None:
        save = str(run_dir / "checkpoints")
    if save is None or not same_folder(save, here):
        return None
    return Records(run_dir, None if is_copy else verified.record.wandb_run_id, is_copy)


def _checkpoints_of(run_dir: Path) -> Path | None:
    """Return the folder of checkpoints of the last run that used a run folder, from the flags in its args.json.

    This is the value of --save or, without --save, the subfolder `checkpoints`. The result is None if args.json is
    missing or damaged.
    """
    try:
        save = json.loads(read_small_file(run_dir / FLAGS))["save"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return Path(save if isinstance(save, str) else run_dir / "checkpoints").resolve()


def open_tracker(parsed: ParsedRun, plan: RunPlan, continued: Records | None, *, first: int | None = None) -> Tracker:
    """Open the run folder and other sinks of records, such as wandb, and write flags and layout to the folder.

    Only rank 0 calls this.

    Args:
        parsed: command line of the run. Its --run-dir has precedence over the run folder of `continued`.
        plan: plan of the run, whose layout is recorded.
        continued: records that the run continues; None for new records.
        first: first iteration of a resumed run; None for a new run.
    """
    tracking, before = parsed.config.tracking, None if continued is None else continued.run_dir
    held = os.environ.get(RUN_DIR)  # folder that the launching process chose; restarts do not change it
    folder = RunFolder(tracking.run_dir or before or held or default_run_dir(parsed.name, datetime.datetime.now()))
    flags = found_from_anywhere(parsed.values())
    with errors_as(f"--run-dir {folder.path} cannot be used", OSError, remedy="choose another folder"):
        if continued is not None and continued.wandb_run_id is not None:
            folder.keep_wandb_run_id(continued.wandb_run_id)
        folder.lock()
        if continued is not None and continued.is_copy and continued.run_dir == folder.path.resolve():
            folder.forget_wandb_run_id()
        folder.write_json(FLAGS, flags, indent=2)
        folder.write("args.txt", parsed.report())
        folder.write("topology.txt", f"{topology_text(plan.layout)}\n")
    zero = parsed.config.zero
    tags = run_tags(plan.layout, zero_stage=zero.stage, zeropp=zero.zeropp)
    return Tracker(folder, open_sinks(tracking, folder, flags, tags, first=first))


def introduce(parsed: ParsedRun, plan: RunPlan, run: RunContext) -> None:
    """Log the description of a run: sizes, notices, flags, layout, communication, and the implementation of each part.

    Args:
        parsed: command line of the run.
        plan: plan of the run.
        run: log, run folder and device.

    Raises:
        ValueError: an implementation that the flags request is not available.
    """
    # ---- log the parallel sizes in the words of Megatron-LM's log
    layout, config = plan.layout, parsed.config
    run.log(
        f"using world size: {layout.cluster.world_size}, data-parallel size: {layout.data}, "
        + (f"context-parallel size: {layout.cp}, " if layout.cp > 1 else "")
        + f"tensor-model-parallel size: {layout.tp}, pipeline-model-parallel size: 1"
    )

    # ---- log the notices, and the flags that differ from their defaults
    for notice in (*parsed.notices, *plan.notices):
        run.log(f"note: {notice}")
    where = "" if run.folder is None else f", all in {run.folder.path / 'args.txt'}"
    run.log(render_arguments_block(parsed.parts, parsed.origins), short=f"{len(parsed.origins)} flags are set{where}")

    # ---- log the layout of the ranks, the links, the wire formats and the features' plans
    run.log(f"{layout.describe()}; ZeRO stage {config.zero.stage}")
    if layout.cluster.links is not None:
        run.log(layout.cluster.links.describe())
    run.log(plan.wire.describe(), short=None if plan.wire.gather or plan.wire.reduce else "")
    for feature in plan.features:
        run.log(feature.describe())

    # ---- log a table of the implementations that this run uses
    device_type = run.device.type
    model = model_backends(
        config.model, device=run.device, dtype=config.precision.param_dtype, documents=config.data.reset_attention_mask
    )
    rows = [*optimizer_backends(config.optimizer, device_type), *model, *wire_backends(plan.wire, device_type)]
    run.log("\n".join(aligned([("piece", "implementation", "why"), *rows])), short="")


def conclude(
    parsed: ParsedRun,
    run: RunContext,
    progress: TrainingProgress,
    *,
    loaded: bool,
    generate_flags: str | None,
    split: bool,
) -> None:
    """Log at the end of a run where its records are, and which commands the user can run next.

    Args:
        parsed: command line of the run.
        run: log and run folder.
        progress: progress at the end of the run.
        loaded: True if the run has loaded a checkpoint.
        generate_flags: flags of tools/generate.py to suggest, as shell words; None if the model cannot generate text.
        split: True if hosts without a shared folder each have only a part of the run's checkpoints.
    """
    config = parsed.config
    if config.checkpoint.load is not None and not loaded:
        run.log(f"note: --load {config.checkpoint.load} had no checkpoint; this run started from random weights")
    if run.folder is not None:
        run.log(f"records of this run: {run.folder.path}")
        run.log(f"tokenizer and data indices: {cache_dir(config.data)}", short="")
        stopped = progress.stop_reason is not None
        commands = what_next(parsed, run.folder.path, stopped=stopped, generate_flags=generate_flags, split=split)
        run.log(commands, short=commands)  # a terminal does not wrap `short`, so users can paste the commands


def what_next(
    parsed: ParsedRun, folder: Path, *, stopped: bool, generate_flags: str | None, split: bool = False
) -> str:
    """Return lines with commands that the user can run after a training run.

    For a run that ended early, the only command resumes the run. For a complete run, the commands show its curves,
    generate text, and train on other text.

    Args:
        parsed: command line of the run.
        folder: run folder.
        stopped: True if the run ended early.
        generate_flags: flags of tools/generate.py to suggest, as shell words; None if the model cannot generate text.
        split: True if hosts without a shared folder each have only a part of the run's checkpoints.
    """
    # ---- if the run ended early, return the command that resumes it
    save, home = parsed.config.checkpoint.save, Path(megazpp.__file__).parents[1]

    def tool(name: str) -> str:
        """Return the shell command that runs the program tools/NAME.py of this checkout or of the installed package."""
        script = home / "tools" / f"{name}.py"
        return f"python {os.path.relpath(script)}" if script.exists() else f"python -m megazpp.tools.{name}"

    if stopped and save is None:
        return "nothing was saved: only a run with --save FOLDER can be resumed"
    if stopped:
        program, *flags = sys.argv
        # If the command already has --load, the shown command keeps it, because a run that is started again resumes
        # from the checkpoints in --save (`choose_source`). If --ckpt-step has selected one of these checkpoints,
        # "--ckpt-step none" selects the latest one instead.
        back = parsed.config.checkpoint.ckpt_step is not None and saves_where_it_loads(parsed.config.checkpoint)
        latest = " --ckpt-step none" if back else ""
        there = f" --load {shlex.quote(save)}" if save is not None and parsed.config.checkpoint.load is None else ""
        to = f" --save {shlex.quote(save)}" if save is not None and "save" not in parsed.origins else ""
        launched = None if LAUNCHER_PID in os.environ else find_launcher()
        # The launcher's flags may differ between hosts, so the shown command has "..." in their place.
        start = "python" if launched is None else f"{launched.launcher} ..."
        command = f"to resume: {start} {shlex.join([program, *flags])}{to}{there}{latest}"
        if parsed.config.launch.num_nodes > 1:
            return f"{command}\nstart it on each host, with its own --node-rank"
        if launched is None or launched.launcher != "torchrun" or launched.local_size == launched.world_size:
            return command
        return f"{command}\ntorchrun may wait minutes for a node that was interrupted; Ctrl-C ends it, nothing is lost"

    # ---- if the run is complete, return commands that use its model
    lines = [f"see its curves: {tool('report')} {shlex.quote(str(folder))}"]
    if split:
        lines.append(
            "each host has only a part of the checkpoint: before you use the model, copy the files of the checkpoint's "
            "iter_... folder from the other hosts into the same folder of this host"
        )
    if save is not None and generate_flags is not None:
        lines.append(f"generate text: {tool('generate')} --load {shlex.quote(save)} {generate_flags}")
    if any(path.startswith(BUILTIN) for path in parsed.config.data.text_path) and "save" not in parsed.origins:
        start = f"python {sys.argv[0]}" if (home / "pretrain_gpt.py").exists() else "megazpp"
        lines.append(f"train it on your text: {start} --text-path your_text.txt --save your_model/")
    return "\n".join(lines)
