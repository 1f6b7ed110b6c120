"""Pretrain a GPT: the table of contents.

    python pretrain_gpt.py                                      a small model on the shipped text, 4 local workers
    python pretrain_gpt.py @configs/gpt_125m.args --lr 3e-4     flags from a file; what comes later wins
    torchrun --nproc-per-node 8 pretrain_gpt.py @configs/...    workers that torchrun (or srun) has started

Parse and check everything, start the workers, then in each worker: the cluster as it is, the axes, the parts of the
run (megazpp/trainer.py), training, evaluation, a sample of text, and where everything went.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from pathlib import Path

from megazpp.arguments import ParsedRun, RunConfig, parse_run_config
from megazpp.checkpoint.read import LoadSource, choose_source, peek
from megazpp.checkpoint.record import RunRecord, TrainingProgress, check_same_model
from megazpp.checkpoint_flags import with_checkpoint_args, with_checkpoint_tokenizer
from megazpp.checks import RunPlan, check_run_config
from megazpp.data.dataset import cache_dir, check_inputs
from megazpp.errors import EXIT_ERROR, user_errors
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import RESTART_COUNT, device_type, find_place
from megazpp.parallel.measure_links import measure_links
from megazpp.parallel.worker import Worker, leave, seed_everything
from megazpp.planner.dry_run import dry_run
from megazpp.planner.report import plan_report
from megazpp.run import Job, announced_cluster, found_cluster, planned_cluster, run_on_ranks
from megazpp.topology.cluster_file import cluster_text
from megazpp.topology.layout import layout_record
from megazpp.trainer import Trainer, introduce
from megazpp.training.context import Console, RunContext
from megazpp.training.flops import device_name, mfu_convention
from megazpp.training.run_folder import RunFolder, default_run_dir
from megazpp.training.stopping import StopConditions
from megazpp.training.tracking import Tracker, open_sinks, run_tags

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Parse, check, and become a worker or start the workers."""
    return run_on_ranks(prepare)


def prepare() -> Job | int:
    """Everything that can be known before workers start.

    Raises:
        ValueError: what cannot be, by flag and value.
    """
    parsed = parse_run_config(sys.argv[1:], HERE)
    show = parsed.show
    if show.print_config:
        print(parsed.report())
        return 0
    if show.plan:
        cluster, price = planned_cluster(parsed.config), show.price_per_gpu_hour
        print(plan_report(parsed.config, cluster, device_type=device_type(), price=price))
        return 0
    if show.dry_run:
        dry = dry_run(parsed.config, planned_cluster(parsed.config), rank=show.dry_run_rank)
        print(dry.describe())
        return 0 if dry.agrees else EXIT_ERROR
    source = find_source(parsed.config)
    earlier = peek(source)
    parsed = with_checkpoint(parsed, source, earlier)
    config = parsed.config
    place = find_place(config.launch)
    plan = check_run_config(config, announced_cluster(config, place), device_type=device_type())
    check_inputs(config.data, config.tokenizer)
    return Job(place, config.launch, functools.partial(pretrain, parsed, plan, source, earlier))


def find_source(config: RunConfig) -> LoadSource | None:
    """What to begin with: after a restart what this job has saved, else what --load says."""
    return choose_source(config.checkpoint, restarted=int(os.environ.get(RESTART_COUNT, "0")) > 0)


def with_checkpoint(parsed: ParsedRun, source: LoadSource | None, earlier: RunRecord | None) -> ParsedRun:
    """`parsed` with what the checkpoint decides (`earlier` is its record), and a notice if there is none to load.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    parsed = with_checkpoint_args(parsed, earlier)
    if source is not None and earlier is not None:
        check_same_model(earlier.flags, parsed.config.model, source.folder.path)
        parsed = with_checkpoint_tokenizer(parsed, earlier, source.folder)
    if source is not None and not source.candidates():
        anew = f"{source.folder.name} has no checkpoint: training begins anew, with random weights"
        parsed = parsed._replace(notices=(*parsed.notices, anew))
    return parsed


def pretrain(
    parsed: ParsedRun, plan: RunPlan, source: LoadSource | None, earlier: RunRecord | None, worker: Worker
) -> None:
    """One worker's whole run; rank 0 records it, where the run that it continues was recorded."""
    with user_errors():
        cluster = found_cluster(parsed.config, plan.layout.cluster, worker)
        plan = check_run_config(parsed.config, cluster, device_type=worker.device.type)
        continued = earlier if source is not None and source.continues else None
        tracker = open_tracker(parsed, plan, worker, continued) if worker.rank == 0 else None
    with tracker or contextlib.nullcontext(), StopConditions(parsed.config.stop) as stops:
        run, plan = open_context(parsed, plan, worker, tracker)
        introduce(run, parsed, plan)
        trainer = Trainer(parsed, plan, run, tracker)
        resumed = trainer.load(source)
        progress, schedule = (resumed.progress, resumed.schedule) if resumed else (TrainingProgress(), plan.schedule)
        shape = trainer.recorder.meter.shape
        run.log(mfu_convention(shape.flops_per_token, device_name(run.device), shape.peak_flops))

        progress = trainer.train(progress, schedule, stops, worker)
        trainer.finish(progress, evaluate=not stops.hurried)
        if not stops.hurried:
            trainer.write_sample()
        if source is not None and resumed is None:
            run.log(f"note: {source.folder.name} had no checkpoint: this training began anew, with random weights")
        if run.folder is not None:
            run.log(f"records of this run: {run.folder.path}")
            run.log(f"tokenizer and data indices: {cache_dir(parsed.config.data)}")


def open_tracker(parsed: ParsedRun, plan: RunPlan, worker: Worker, continued: RunRecord | None) -> Tracker:
    """The run folder, a continued run's own, with the flags in it, and what else the flags ask to record to."""
    tracking = parsed.config.tracking
    before = continued.run_dir if continued is not None and Path(continued.run_dir or "").is_dir() else None
    folder = RunFolder(tracking.run_dir or before or default_run_dir(parsed.name, datetime.datetime.now()))
    if continued is not None and continued.wandb_run_id is not None:
        folder.keep_wandb_run_id(continued.wandb_run_id)
    folder.write_json("args.json", parsed.values(), indent=2)
    folder.write("args.txt", parsed.report())
    folder.write_json("topology.json", layout_record(plan.layout))
    zero = parsed.config.zero
    tags = run_tags(plan.layout, zero_stage=zero.stage, zeropp=zero.zeropp)
    sinks = open_sinks(tracking, folder, parsed.values(), tags)
    return Tracker(tracking, folder, sinks, world_size=worker.world_size, device=worker.device)


def open_context(
    parsed: ParsedRun, plan: RunPlan, worker: Worker, tracker: Tracker | None
) -> tuple[RunContext, RunPlan]:
    """The axes, the console and the folder that every part needs; the plan with the links, if they are measured."""
    config, console, folder = parsed.config, Console(enabled=worker.rank == 0), tracker.folder if tracker else None
    dims = ParallelDims(plan.layout, device_type=worker.device.type, nccl=config.nccl, timeout=worker.timeout)
    seed_everything(config.launch.seed, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
    if config.cluster.measure_links:
        links, lines = measure_links(dims, worker.device)
        for line in lines:
            console.log(line)
        plan = plan.with_links(links)
        if folder is not None:
            folder.write("cluster.yaml", cluster_text(plan.layout.cluster))
    return RunContext(dims=dims, device=worker.device, console=console, folder=folder), plan


if __name__ == "__main__":
    leave(main())
