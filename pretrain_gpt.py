"""Pretrain a GPT: the table of contents.

    python pretrain_gpt.py                                      a small model on the shipped text, 4 local workers
    python pretrain_gpt.py @configs/gpt_125m.args --lr 3e-4     flags from a file; what comes later wins
    torchrun --nproc-per-node 8 pretrain_gpt.py @configs/...    workers that torchrun (or srun) has started

Parse and check everything, start the workers, then in each worker: the cluster as it is, axes, tokenizer, data, model,
optimizer, training, evaluation, a sample of text, and where everything went.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from pathlib import Path

from megazpp.arguments import ParsedRun, RunConfig, parse_run_config
from megazpp.checkpoint.config import check_checkpoint
from megazpp.checkpoint.record import RunRecord, TrainingProgress, check_same_model
from megazpp.checkpoint.source import LoadSource, choose_source, peek
from megazpp.checkpoint_flags import with_checkpoint_args, with_checkpoint_tokenizer
from megazpp.checks import RunPlan, check_run_config
from megazpp.data.dataset import build_tokenizer, cache_dir, check_inputs, unigram_entropy
from megazpp.data.tokenizer import Tokenizer
from megazpp.errors import EXIT_ERROR, user_errors
from megazpp.flag_checks import check_positive
from megazpp.inference.text import continue_texts
from megazpp.introduce import introduce, run_shape
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import RESTART_COUNT, device_type, find_place
from megazpp.parallel.measure_links import measure_links
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker, leave, seed_everything
from megazpp.planner.dry_run import dry_run
from megazpp.planner.report import plan_report
from megazpp.run import Job, announced_cluster, found_cluster, planned_cluster, run_on_ranks
from megazpp.training.anomalies import Guard
from megazpp.training.console import Console
from megazpp.training.evaluate import Evaluator
from megazpp.training.flops import device_name, mfu_convention
from megazpp.training.garbage import GarbageCollector
from megazpp.training.loop import train
from megazpp.training.metrics import Meter
from megazpp.training.not_finite import NotFinite
from megazpp.training.profiler import Profiler
from megazpp.training.recorder import Recorder
from megazpp.training.run_folder import RunFolder, default_run_dir
from megazpp.training.setup import Built, build_model, open_checkpoints, open_datasets, open_loader
from megazpp.training.step import TrainStep
from megazpp.training.step_timeline import StepTimeline
from megazpp.training.stopping import StopConditions
from megazpp.training.straggler import Straggler
from megazpp.training.timers import Timers
from megazpp.training.tracking import Tracker, open_sinks, run_tags
from megazpp.training.traffic import zero3_traffic
from megazpp.zero.verify import verify_weights

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
    check_positive(show, "price_per_gpu_hour")
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
    parsed = with_checkpoint_args(parsed, earlier)
    if source is not None and earlier is not None:
        check_same_model(earlier.flags, parsed.config.model, source.folder.path)
        parsed = with_checkpoint_tokenizer(parsed, earlier, source.folder)
    if source is not None and not source.candidates():
        anew = f"{source.folder.name} has no checkpoint: training begins anew, with random weights"
        parsed = parsed._replace(notices=(*parsed.notices, anew))
    config = parsed.config
    place = find_place(config.launch)
    plan = check_run_config(config, announced_cluster(config, place), device_type=device_type())
    check_inputs(config.data, config.tokenizer)
    return Job(place, config.launch, functools.partial(pretrain, parsed, plan, source, earlier))


def find_source(config: RunConfig) -> LoadSource | None:
    """What to begin with: after a restart what this job has saved, else what --load says."""
    check_checkpoint(config.checkpoint)
    return choose_source(config.checkpoint, restarted=int(os.environ.get(RESTART_COUNT, "0")) > 0)


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
        build_and_train(parsed, plan, source, worker, tracker, stops)


def build_and_train(
    parsed: ParsedRun,
    plan: RunPlan,
    source: LoadSource | None,
    worker: Worker,
    tracker: Tracker | None,
    stops: StopConditions,
) -> None:
    """Make every part from its own config, train, evaluate, and show what came out."""
    config, seed, device = parsed.config, parsed.config.launch.seed, worker.device
    console = Console(enabled=worker.rank == 0)
    dims = ParallelDims(plan.layout, device_type=device.type, nccl=config.nccl, timeout=worker.timeout)
    seed_everything(seed, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
    if config.cluster.measure_links:
        plan = plan.with_links(measure_links(dims, device, announce=console.say))
    introduce(console, parsed, plan, worker)
    folder = tracker.folder if tracker else None
    if folder and config.cluster.measure_links:
        folder.write_cluster(plan.layout.cluster)
    profiler = Profiler(config.profiler, dims, folder=folder.path if folder else None, say=console.say)
    with user_errors():
        tokenizer = build_tokenizer(config.tokenizer, config.data, announce=console.say)
        datasets = open_datasets(
            config.data, tokenizer, plan.batches, config.evaluation, seed=seed, announce=console.say
        )

    built = build_model(config.model_spec(tokenizer.vocab_size), dims, device)
    guard = Guard(
        config.anomalies,
        NotFinite(built.sharding, dims, plan.batches, folder),
        dynamic_scale=config.precision.fp16 and config.loss_scale.loss_scale is None,
        say=console.say,
        verify=functools.partial(verify_weights, built.sharding, dims),
        verify_interval=config.verify.zero_verify_interval,
    )
    step = TrainStep(
        *built,
        build_optimizer(list(built.model.named_parameters()), config.optimizer, device),
        build_loss_scaler(config.loss_scale, fp16=config.precision.fp16),
        dims,
        clip_grad=config.optimizer.clip_grad,
        guard=guard,
        count_zeros=config.tracking.log_num_zeros_in_grad,
    )
    checkpoints = open_checkpoints(
        config.checkpoint,
        step,
        flags=parsed.values(),
        schedule=plan.schedule,
        tokenizer=tokenizer,
        seed=seed,
        folder=folder,
        say=console.say,
    )
    if config.anomalies.loss_spike_action == "rewind":
        guard.rewind = lambda: checkpoints.rewind().iteration
    with user_errors():
        checkpoints.open()
        resumed = checkpoints.load(source, plan.schedule) if source is not None else None
    progress, schedule = (
        (TrainingProgress(), plan.schedule) if resumed is None else (resumed.progress, resumed.schedule)
    )
    meter = Meter(run_shape(config, plan, vocab_size=tokenizer.vocab_size, device=device))
    console.say(mfu_convention(meter.shape.flops_per_token, device_name(device), meter.shape.peak_flops))
    timers = Timers(config.timers, dims)
    recorder = Recorder(meter, console, tracker, dims, config.tracking, device, timers)

    load = functools.partial(
        open_loader, config=config.data, tokenizer=tokenizer, plan=plan.batches, dims=dims, device=device
    )
    validate, test = (
        None
        if dataset is None
        else Evaluator(
            *built,
            load(dataset, ramp_up=False),
            dims,
            iterations=config.evaluation.eval_iters,
            batch_size=plan.batches.global_batch_size,
        )
        for dataset in (datasets.valid, datasets.test)
    )
    wait_share = 0.0
    if datasets.train is not None and not config.stop.skip_train:
        watchdog = Watchdog(worker, dims, config.launch, folder.path if folder else None)
        garbage = GarbageCollector(config.garbage)
        built.sharding.compile_kernels(device)
        observers = (
            garbage,
            profiler,
            timers,
            Straggler(config.straggler, dims, interval=config.tracking.log_interval, say=console.say),
            StepTimeline(config.timeline, dims, folder=folder, say=console.say),
        )
        with load(datasets.train, ramp_up=True) as batches, watchdog, profiler, garbage:
            progress = train(
                step,
                batches,
                plan.batches,
                schedule,
                recorder,
                stops,
                observers,
                eval_interval=config.evaluation.eval_interval,
                evaluate=validate,
                start=progress,
                checkpoints=checkpoints,
            )
            wait_share = batches.wait_seconds / meter.totals.seconds if meter.totals.steps else 0.0
            checkpoints.finish()
    entropy = unigram_entropy(datasets.valid, tokenizer.vocab_size) if datasets.valid is not None else None
    zero3 = functools.partial(zero3_traffic, built.sharding.shard_elements, dims, config.precision)
    if stops.hurried:
        validate = test = None
    recorder.finish(progress, validate, test, unigram_entropy=entropy, wait_share=wait_share, zero3=zero3)
    if not stops.hurried:
        write_sample(console, config, tokenizer, built, dims)
    if source is not None and resumed is None:
        console.say(f"note: {source.folder.name} had no checkpoint: this training began anew, with random weights")
    if tracker is not None:
        console.say(f"records of this run: {tracker.folder.path}")
        console.say(f"tokenizer and data indices: {cache_dir(config.data)}")


def open_tracker(parsed: ParsedRun, plan: RunPlan, worker: Worker, continued: RunRecord | None) -> Tracker:
    """The run folder, a continued run's own, with the flags in it, and what else the flags ask to record to."""
    tracking = parsed.config.tracking
    before = continued.run_dir if continued is not None and Path(continued.run_dir or "").is_dir() else None
    folder = RunFolder(tracking.run_dir or before or default_run_dir(parsed.name, datetime.datetime.now()))
    if continued is not None and continued.wandb_run_id is not None:
        folder.keep_wandb_run_id(continued.wandb_run_id)
    folder.write_args(parsed.values(), parsed.report())
    folder.write_topology(plan.layout)
    zero = parsed.config.zero
    tags = run_tags(plan.layout, zero_stage=zero.stage, zeropp=zero.zeropp)
    sinks = open_sinks(tracking, folder, parsed.values(), tags)
    return Tracker(tracking, folder, sinks, world_size=worker.world_size, device=worker.device)


def write_sample(console: Console, config: RunConfig, tokenizer: Tokenizer, built: Built, dims: ParallelDims) -> None:
    """Let the model continue the prompts, if --sample-tokens asks for it."""
    if config.sample.sample_tokens == 0:
        return
    prompts, longest = config.sample.sample_prompt or ("",), config.data.seq_length
    assert longest is not None
    seed = config.launch.seed
    texts, _ = continue_texts(*built, dims, tokenizer, prompts, config.sample, max_length=longest, seed=seed)
    for prompt, text in zip(prompts, texts, strict=True):
        console.say(f"a sample of text:\n{prompt}{text}")


if __name__ == "__main__":
    leave(main())
