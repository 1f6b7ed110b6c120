"""The complete training run of one worker.

`run_training` finds the actual cluster, opens the run folder and the process groups, builds the trainer, loads a
checkpoint, trains, and reports the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import shlex
import sys
from pathlib import Path

import torch

import megazpp
from megazpp.base.flags import render_arguments_block
from megazpp.base.program import GIGA, UserError, aligned, user_errors
from megazpp.checkpoint.metadata import CheckpointMetadata, TrainingProgress
from megazpp.checkpoint.read import LoadSource, start_of
from megazpp.data.dataset import cache_dir
from megazpp.data.text import BUILTIN
from megazpp.model.backends import find_product, model_backends
from megazpp.optim.optimizer import optimizer_backends
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.host_discovery import resolve_cluster
from megazpp.parallel.launch import RESTART_COUNT
from megazpp.parallel.measure_links import measure_links
from megazpp.parallel.worker import Worker, seed_everything
from megazpp.run.arguments import ParsedRun
from megazpp.run.checks import RunPlan, check_run_config
from megazpp.run.ranks import RUN_DIR
from megazpp.run.trainer import BuildParts, Trainer
from megazpp.topology.cluster_file import cluster_text
from megazpp.topology.layout import layout_record
from megazpp.training.context import Console, RunContext, RunFolder, default_run_dir
from megazpp.training.flops import device_name, mfu_convention
from megazpp.training.loop import StopConditions
from megazpp.training.tracking import Tracker, open_sinks, run_tags
from megazpp.zero.config import default_weight_delta, wire_backends


def run_training(
    build_parts: BuildParts,
    parsed: ParsedRun,
    plan: RunPlan,
    source: LoadSource | None,
    earlier: CheckpointMetadata | None,
    worker: Worker,
) -> None:
    """Run one worker's part of a training run. Rank 0 writes the records.

    Args:
        build_parts: builds the model, the data and the objective.
        parsed: command line of the run.
        plan: plan that was made before workers started.
        source: checkpoint to load weights from (--finetune) or to resume from; None to start from random weights.
        earlier: metadata of that checkpoint; None if there is none. A resumed run continues its run folder.
        worker: this process.

    Raises:
        UserError: flags or files cannot be used.
    """
    # ---- find the cluster, and plan again if flags and launcher did not describe it
    with user_errors():
        config = parsed.config
        on_one_machine = functools.partial(config.detect_cluster, worker.world_size, {})
        cluster = resolve_cluster(worker, config.cluster, plan.layout.cluster, on_one_machine=on_one_machine)
        known = plan.layout.cluster
        if (cluster, cluster.notices) != (known, known.notices):  # the environment did not say which ranks share a node
            start = start_of(source, earlier)
            plan = check_run_config(config, cluster, device_type=worker.device.type, start=start)
        find_product(config.model, worker.device)  # checks that the device supports --fp8-format
        continued = earlier if source is not None and source.continues else None
        tracker = open_tracker(parsed, plan, worker, continued) if worker.rank == 0 else None
    with tracker or contextlib.nullcontext(), StopConditions(config.stop, answers=worker.rank == 0) as stops:
        # ---- create the console, the process groups and the context that every part of the run uses
        console, folder = Console(enabled=worker.rank == 0), tracker.folder if tracker else None
        if folder is not None:
            console.keep(folder.path / "log.txt")
        dims = ParallelDims(plan.layout, device_type=worker.device.type, nccl=config.nccl, timeout=worker.timeout)
        worker.watchdog.watch(dims, None if folder is None else folder.path)
        seed_everything(config.launch.seed, data_rank=dims.dropout_rank, tp_rank=dims.tp.rank)
        if config.cluster.measure_links:
            links, lines = measure_links(dims, worker.device)
            for line in lines:
                console.log(line)
            plan = plan.with_links(links)
            if folder is not None:
                folder.write("cluster.yaml", cluster_text(plan.layout.cluster))
        run = RunContext(dims=dims, device=worker.device, console=console, folder=folder)
        with user_errors():
            plan = choose_weight_delta(parsed, plan, run, start_of(source, earlier))

        # ---- build the trainer
        checkpoint = config.checkpoint
        if checkpoint.save_to_run_dir and checkpoint.save is None:
            save = dims.world.share_object(None if folder is None else str(folder.path / "checkpoints"))
            checkpoint = dataclasses.replace(checkpoint, save=save)
            parsed = parsed._replace(config=dataclasses.replace(config, checkpoint=checkpoint))
        introduce(run, parsed, plan)
        trainer = Trainer(build_parts, parsed, plan, run, tracker)

        # ---- load the checkpoint
        resumed = trainer.load(source)
        if resumed is not None:
            # With --load-fallback this may be an older checkpoint than the one for which `plan` was made.
            planned, batches = plan.batches, plan.batches.resumed_at(resumed.progress)
            if (batches.total_iterations, batches.total_samples) != (planned.total_iterations, planned.total_samples):
                raise UserError(
                    f"--load-fallback: {resumed.checkpoint} has another global batch size than the newer checkpoint "
                    f"for which the data was prepared; --ckpt-step {resumed.progress.iteration} resumes from it"
                )
            trainer.plan = plan._replace(batches=batches)
        progress, schedule = (resumed.progress, resumed.schedule) if resumed else (TrainingProgress(), plan.schedule)
        checkpoint = config.checkpoint  # --load without a checkpoint: the run may have stopped before its first one
        restarted = int(os.environ.get(RESTART_COUNT, "0")) > 0 or (checkpoint.load and not checkpoint.finetune)
        if tracker is not None and (progress.iteration > 0 or restarted):
            tracker.resume(progress)

        # ---- train and evaluate
        meter = trainer.recorder.meter
        run.log(mfu_convention(meter.flops_per_token, device_name(run.device), meter.peak_flops), short="")
        progress = trainer.train(progress, schedule, stops)
        trainer.finish(progress, evaluate=not stops.hurried)

        # ---- report
        if source is not None and resumed is None:
            run.log(f"note: {source.folder.name} had no checkpoint; this run started from random weights")
        if folder is not None:
            run.log(f"records of this run: {folder.path}")
            run.log(f"tokenizer and data indices: {cache_dir(config.data)}", short="")
            stopped = progress.stop_reason is not None
            run.log(what_next(parsed, folder.path, stopped=stopped, generates=trainer.parts.generates))


def choose_weight_delta(parsed: ParsedRun, plan: RunPlan, run: RunContext, start: TrainingProgress) -> RunPlan:
    """Return the plan with the weight format that rank 0 chooses for --zero-weight-delta auto.

    The plan is returned unchanged if there is nothing to choose.

    Args:
        parsed: command line of the run.
        plan: plan of the run, with the measured links if --measure-links is set.
        run: process groups and device.
        start: progress from which the run resumes.

    Raises:
        ValueError: a feature does not support the chosen format.
    """
    config, device = parsed.config, run.device
    choices = config.zero.chooses_weight_delta and plan.wire.gather is not None
    if not choices or not default_weight_delta(config.precision.param_dtype).lossless:
        return plan
    choice, cluster = None, plan.layout.cluster
    if run.dims.world.rank == 0:
        gigabytes = torch.cuda.get_device_properties(device).total_memory / GIGA if device.type == "cuda" else None
        estimates = (
            feature.choose_weight_delta(config, cluster, device_type=device.type, gigabytes=gigabytes)
            for feature in config.features
        )
        choice = next((estimate for estimate in estimates if estimate is not None), None)
    choice = run.dims.world.share_object(choice)
    return check_run_config(config, cluster, device_type=device.type, start=start, weight_delta=choice)


def what_next(parsed: ParsedRun, folder: Path, *, stopped: bool, generates: bool) -> str:
    """Return lines with commands for the user to run next.

    Args:
        parsed: command line of the run.
        folder: run folder.
        stopped: whether the run ended early. The command then resumes it.
        generates: whether the trained model can generate text.
    """
    # ---- an interrupted run
    save, home = parsed.config.checkpoint.save, Path(megazpp.__file__).parents[1]

    def tool(name: str) -> str:
        """Return the command that runs a tool, in a checkout or with an installed package."""
        script = home / "tools" / f"{name}.py"
        return f"python {os.path.relpath(script)}" if script.exists() else f"python -m megazpp.tools.{name}"

    if stopped and save is None:
        return "nothing was saved: only a run with --save FOLDER can be resumed"
    if stopped:
        program, *flags = sys.argv
        there = f" --load {shlex.quote(save)}" if save is not None and parsed.config.checkpoint.load != save else ""
        to = f" --save {shlex.quote(save)}" if save is not None and "save" not in parsed.origins else ""
        return f"to resume: python {shlex.join([program, *flags])}{to}{there}"

    # ---- a complete run
    lines = [f"see its curves: {tool('report')} {folder}"]
    if save is not None and generates:
        lines.append(f"generate text: {tool('generate')} --load {shlex.quote(save)} --prompt 'Call me'")
    if any(path.startswith(BUILTIN) for path in parsed.config.data.text_path) and "save" not in parsed.origins:
        program = sys.argv[0] if Path(sys.argv[0]).suffix == ".py" else Path(sys.argv[0]).name
        python = "python " if program.endswith(".py") else ""
        lines.append(f"train it on your text: {python}{program} --text-path your_text.txt --save your_model/")
    return "\n".join(lines)


def introduce(run: RunContext, parsed: ParsedRun, plan: RunPlan) -> None:
    """Log the description of a run: sizes, notices, flags, layout, communication, and the back end of each part.

    Raises:
        UserError: a back end that the flags request is not available.
    """
    # ---- sizes, in Megatron-LM's words
    layout, config = plan.layout, parsed.config
    run.log(
        f"using world size: {layout.cluster.world_size}, data-parallel size: {layout.data}, "
        + (f"context-parallel size: {layout.cp}, " if layout.cp > 1 else "")
        + f"tensor-model-parallel size: {layout.tp}, pipeline-model-parallel size: 1"
    )

    # ---- notices and flags
    for notice in (*parsed.notices, *plan.notices):
        run.log(f"note: {notice}")
    where = "" if run.folder is None else f", all in {run.folder.path / 'args.txt'}"
    run.log(render_arguments_block(parsed.parts, parsed.origins), short=f"{len(parsed.origins)} flags are set{where}")

    # ---- layout and communication
    run.log(f"{layout.describe()}; ZeRO stage {config.zero.stage}")
    if layout.cluster.links is not None:
        run.log(layout.cluster.links.describe())
    run.log(plan.wire.describe(), short=None if plan.wire.gather or plan.wire.reduce else "")
    for feature in plan.features:
        run.log(feature.describe())

    # ---- back ends
    device_type = run.device.type
    with user_errors():
        model = model_backends(
            config.model,
            device=run.device,
            dtype=config.precision.param_dtype,
            documents=config.data.reset_attention_mask,
        )
    rows = [*optimizer_backends(config.optimizer, device_type), *model, *wire_backends(plan.wire, device_type)]
    run.log("\n".join(aligned([("piece", "implementation", "why"), *rows])), short="")


def open_tracker(parsed: ParsedRun, plan: RunPlan, worker: Worker, continued: CheckpointMetadata | None) -> Tracker:
    """Open the run folder and the other sinks for records, such as wandb; write flags and layout to the folder.

    Only rank 0 calls this. A resumed run continues the wandb run named in `continued`, the metadata of its checkpoint.
    It also continues that run's folder, unless --run-dir names another folder.
    """
    tracking = parsed.config.tracking
    before = continued.run_dir if continued is not None and Path(continued.run_dir or "").is_dir() else None
    held = os.environ.get(RUN_DIR)  # the launcher's choice, which stays the same after a restart
    folder = RunFolder(tracking.run_dir or before or held or default_run_dir(parsed.name, datetime.datetime.now()))
    if continued is not None and continued.wandb_run_id is not None:
        folder.keep_wandb_run_id(continued.wandb_run_id)
    folder.write_json("args.json", parsed.values(), indent=2)
    folder.write("args.txt", parsed.report())
    folder.write_json("topology.json", layout_record(plan.layout))
    zero = parsed.config.zero
    tags = run_tags(plan.layout, zero_stage=zero.stage, zeropp=zero.zeropp)
    sinks = open_sinks(tracking, folder, parsed.values(), tags)
    return Tracker(tracking, folder, sinks, device=worker.device)
