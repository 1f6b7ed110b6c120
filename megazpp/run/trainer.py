"""The training run of one worker, in one file and in the order in which a program such as pretrain_gpt.py calls it.

`open_run`    detects the cluster, verifies the checkpoint to load, chooses wire formats, makes the plan, opens records
`Trainer`     builds optimizer, guard, features, checkpoints, step and recorders around the program's `TrainingParts`
  .load       loads the checkpoint into the model and the optimizer
  .train      runs the training steps
  .finish     evaluates held-out data and logs the results

Between `open_run` and `Trainer`, the program builds its own parts, such as the model and the data (`TrainingParts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megazpp.base.files import errors_as
from megazpp.base.program import GIGA, user_errors
from megazpp.checkpoint.checkpoints import Checkpoints, take_folder
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import SAMPLES, CheckpointMetadata, flag_notes, found_from_anywhere
from megazpp.checkpoint.read import LoadSource, Resumed, Verified, check_still_chosen, verify
from megazpp.checkpoint.state import RunValues, StatePart, TrainState, training_parts
from megazpp.data.tokenizer import Tokenizer
from megazpp.kernels.weight_delta import missing
from megazpp.model.backends import find_product
from megazpp.optim.build import build_optimizer
from megazpp.optim.optimizer import LossScaler
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.agreement import check_equal_on_all_ranks, raise_on_all_ranks
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, open_axis
from megazpp.parallel.host_discovery import resolve_cluster
from megazpp.parallel.measure_links import measure_device, measure_links
from megazpp.parallel.worker import Worker, seed_everything
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.run.checks import RunPlan, lay_out, plan_run
from megazpp.run.report import conclude, introduce, open_tracker, records_to_continue
from megazpp.run.start import check_kernels, facts_of_data, own_checkpoints
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import cluster_text
from megazpp.training.anomalies import Guard, LossHistory
from megazpp.training.context import Console, RunContext
from megazpp.training.flops import device_name, mfu_convention, model_flops_per_token, peak_flops
from megazpp.training.loop import AfterStep, Loader, Observer, StopConditions, catching_signals, train
from megazpp.training.metrics import Meter
from megazpp.training.metrics_logger import MetricsRecorder, Tracker, Validation
from megazpp.training.objective import Objective
from megazpp.training.profiler import Profiler
from megazpp.training.results import record_results, zero3_traffic
from megazpp.training.setup import ShardedModel
from megazpp.training.step import TrainStep
from megazpp.training.timers import StepRecorder
from megazpp.zero.plan import WeightDelta, default_weight_delta
from megazpp.zero.verify import verify_weights


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A training run on this rank before its model is built: flags, plan, process groups, checkpoint and records.

    Attributes:
        parsed: command line. Its --save is the folder of the run's checkpoints, also with --save-to-run-dir.
        plan: layout, wire formats, batch sizes and schedule of the run.
        context: process groups, device, log and run folder.
        checkpoint: verified checkpoint to load; None for a run that starts from random weights.
        save: locked folder of --save; None for a run that saves no checkpoints.
        files: axis over all ranks for the collectives of reading and writing checkpoints.
        tracker: writer of the run's records, which has a run folder on rank 0 only.
        stops: conditions for an early stop. `Trainer.train` begins to catch signals; before that, a signal ends the
            process at once, because no training would be lost.
        opened: contexts that end with the run.
        profiler: recorder of profiled steps and of memory allocations.
        worker: this process, with its rank and device.
    """

    parsed: ParsedRun
    plan: RunPlan
    context: RunContext
    checkpoint: Verified | None
    save: CheckpointFolder | None
    files: MeshAxis
    tracker: Tracker
    stops: StopConditions
    opened: ExitStack
    profiler: Profiler
    worker: Worker

    @property
    def config(self) -> RunConfig:
        """Flags of the run."""
        return self.parsed.config

    @property
    def needs_samples(self) -> bool:
        """True if the run needs a description of its samples: ranks compare it, or a checkpoint has or gets one."""
        several = self.worker.world_size > 1 or self.config.jobs > 1
        return self.save is not None or self.checkpoint is not None or several

    def compare_data(self, tokenizer: Tokenizer, samples: Mapping[str, Any]) -> None:
        """Raise a UserError on all ranks if ranks have different tokenizers, samples or kernels.

        Args:
            tokenizer: tokenizer of this rank's data.
            samples: description of this rank's samples from data/identity.py.
        """
        with user_errors():
            for name, digest in facts_of_data(tokenizer, samples).items():
                check_equal_on_all_ranks(self.context.dims.world, name, digest)
            check_kernels(self.context.dims, self.worker.device)


@contextmanager
def open_run(worker: Worker, parsed: ParsedRun, announced: Cluster, source: LoadSource | None) -> Iterator[OpenRun]:
    """Detect the cluster, verify the checkpoint, plan the run, and open its records until the end of the block.

    All workers call this. They detect the nodes and measure the links, which the launching process cannot do.

    Args:
        worker: this process, with its rank and device.
        parsed: command line of the run.
        announced: nodes and ranks that the flags and the launcher's environment describe.
        source: checkpoint to load weights from (--finetune) or to resume from; None to start from random weights.

    Raises:
        UserError: flags or files cannot be used.
    """
    # ---- detect the cluster, and create this rank's mesh axes
    config, console = parsed.config, Console(enabled=worker.rank == 0)
    with user_errors():
        on_one_machine = functools.partial(config.detect_cluster, worker.world_size, {})
        cluster = resolve_cluster(worker, config.cluster, announced, on_one_machine=on_one_machine)
        find_product(config.model, worker.device)  # called for its ValueError: the device may not support --fp8-format
        layout = lay_out(config, cluster)
    dims = ParallelDims(layout, device_type=worker.device.type, nccl=config.nccl)
    worker.watchdog.watch(dims)
    seed_everything(config.launch.seed, data_rank=dims.dropout_rank, tp_rank=dims.tp.rank)
    if config.cluster.measure_links:
        cluster, lines = measure_cluster(config, cluster, dims, worker.device)
        console.log("\n".join(lines))

    # ---- lock --save, verify the checkpoint, choose the format in which weights cross nodes, and plan the run
    checkpoint, save = own_checkpoints(config.checkpoint, config.tracking, restarted=worker.restarts > 0), None
    files = open_axis(dims) if checkpoint.saves or checkpoint.load is not None else dims.world
    with user_errors():
        if checkpoint.save is not None:
            save = CheckpointFolder(checkpoint.save, "--save")
            take_folder(save, files, console.log, shared=config.jobs > 1)
            if config.jobs == 1:  # with several jobs, another job may have saved a newer checkpoint, which is no error
                check = functools.partial(check_still_chosen, source, checkpoint, restarted=worker.restarts > 0)
                raise_on_all_ranks(files, lambda: check() if worker.rank == 0 else None)
        verified = verify(source, files, console.log)
        start = TrainingProgress() if verified is None else verified.start
        weight_delta = choose_weight_delta(config, cluster, dims, worker.device)
        plan = plan_run(config, cluster, device_type=worker.device.type, start=start, weight_delta=weight_delta)

    # ---- open the records of the run: run folder, log and tracker
    with contextlib.ExitStack() as opened:
        tracker = Tracker()
        if worker.rank == 0:
            with user_errors():
                continued = records_to_continue(verified, config.checkpoint, jobs=config.jobs)
                # A job that the launcher has restarted, or that was started again with --load, may log iterations that
                # its earlier records contain already. This holds at iteration 0 too, because the job may have stopped
                # before its first checkpoint. So `first`, which marks a resumed run, is set in all these cases.
                repeats = start.iteration > 0 or worker.restarts > 0
                repeats |= config.checkpoint.load is not None and not config.checkpoint.finetune
                first = start.iteration + 1 if repeats else None
                tracker = opened.enter_context(open_tracker(parsed, plan, continued, first=first))
        if (folder := tracker.folder) is not None:
            console.keep(folder.path / "log.txt")
            worker.watchdog.write_to(folder.path)
            if config.cluster.measure_links:
                folder.write("cluster.yaml", cluster_text(cluster))
        if checkpoint.save_to_run_dir and save is None:
            path = dims.world.share_object(None if folder is None else str(folder.path / "checkpoints"))
            checkpoint, save = dataclasses.replace(checkpoint, save=path), CheckpointFolder(path, "--save")
            where = f"--save-to-run-dir ({parsed.origins['save_to_run_dir']}; --no-save-to-run-dir saves nothing)"
            with user_errors(), errors_as(where):
                take_folder(save, files, console.log, shared=config.jobs > 1)
        parsed = parsed._replace(config=dataclasses.replace(config, checkpoint=checkpoint))
        context = RunContext(dims=dims, device=worker.device, console=console, folder=folder)
        with user_errors():
            introduce(parsed, plan, context)
        yield OpenRun(
            parsed=parsed,
            plan=plan,
            context=context,
            checkpoint=verified,
            save=save,
            files=files,
            tracker=tracker,
            stops=StopConditions(config.stop, began=worker.began),
            opened=opened,
            profiler=Profiler(config.profiler, context),  # before the model, to record the model's allocations
            worker=worker,
        )


def measure_cluster(
    config: RunConfig, cluster: Cluster, dims: ParallelDims, device: torch.device
) -> tuple[Cluster, list[str]]:
    """Measure the links between ranks, and the device unless a cluster file describes it. All ranks call this.

    Args:
        config: flags of the run, which give the sizes of the measured matrix products.
        cluster: nodes and ranks, with the device of the cluster file if there is one.
        dims: mesh axes of the job.
        device: device of this rank.

    Returns:
        `cluster` with the measured rates of links and device, and lines for the log.
    """
    links, lines = measure_links(dims, device)
    assert config.model.hidden_size is not None
    samples = config.batches.micro_batch_size or (config.batches.global_batch_size or 1) // dims.layout.data or 1
    measured = measure_device(
        dims,
        device,
        config.precision.param_dtype,
        tokens=samples * (config.data.seq_length or 1),
        hidden=config.model.hidden_size,
        lr=config.schedule.lr or 0.0,
        name=device_name(device),
    )
    speed = f"{measured.teraflops:g} TFLOP/s, {measured.gigabytes_per_second:g} GB/s"
    if measured.is_cpu:
        rates = measured.encode_gigabytes_per_second, measured.decode_gigabytes_per_second
        speed += ", deltas encoded at {:g} GB/s and decoded at {:g} GB/s of weights".format(*rates)
    lines.append(f"measured the slowest rank's device: {speed} ({measured.source})")
    return dataclasses.replace(cluster, links=links, device=cluster.device or measured), lines


def choose_weight_delta(
    config: RunConfig, cluster: Cluster, dims: ParallelDims, device: torch.device
) -> WeightDelta | None:
    """Choose the format in which weights cross nodes, for --zero-weight-delta auto. All ranks call this.

    Rank 0 chooses for all ranks. If a rank cannot compute lossless deltas, for example without a C compiler, no rank
    uses them. If neither --cluster-file nor --measure-links is set, all ranks first measure links and device for this
    choice only: the plan of the run does not use these measurements.

    Args:
        config: flags of the run.
        cluster: nodes and ranks, with the measured links if --measure-links is set.
        dims: mesh axes of the job.
        device: device of this rank.

    Returns:
        the chosen format with its reason; None if there is nothing to choose, or no feature can estimate the formats.

    Raises:
        ValueError: flags contradict each other or do not fit the cluster or the device; on all ranks.
    """
    lossless = default_weight_delta(config.precision.param_dtype).lossless
    if not (config.zero.chooses_weight_delta and lossless) or dims.layout.cross == 1:
        return None
    world = dims.world
    if problem := next(filter(None, world.share_object(world.gather_objects(missing(device.type)))), ""):
        return WeightDelta(False, f"lossless deltas cannot be computed: {problem}")
    if config.cluster.cluster_file is None and not config.cluster.measure_links:
        cluster, _ = measure_cluster(config, cluster, dims, device)

    def estimate() -> WeightDelta | None:
        """Return the format of weights that the first feature with an estimate chooses; None if no feature has one.

        The planner is the only feature that can estimate a run.
        """
        gigabytes = torch.cuda.get_device_properties(device).total_memory / GIGA if device.type == "cuda" else None
        found = (
            feature.choose_weight_delta(config, cluster, device_type=device.type, gigabytes=gigabytes)
            for feature in config.features
        )
        return next((choice for choice in found if choice is not None), None)

    return world.share_object(raise_on_all_ranks(world, lambda: estimate() if world.rank == 0 else None))


@dataclass(kw_only=True)
class TrainingParts:
    """Parts of a training run that differ between pretraining and post-training.

    A program builds these parts. `Trainer` builds all other parts of the run from the flags.

    Attributes:
        tokenizer: tokenizer of the trained model.
        built: the trained model and its sharding.
        objective: loss that the run minimizes.
        batches: context that yields the loader of this rank's training batches; None without training data.
        validation: evaluation of the validation data; None without such data.
        test: evaluation of the test data; None without such data.
        validation_metric: metric of both evaluations, "lm_loss" or "reward".
        has_perplexity: True if the metric "lm_loss" is a mean in nats per token, so that its exponential is a
            perplexity.
        whole_samples: True if every sample has --seq-length tokens; False if lengths differ.
        flags: values of flags, by field name, that checkpoints record in addition to the command line's values or in
            their place.
        states: groups of tensors that checkpoints store in addition to model and optimizer.
        generate_flags: flags of tools/generate.py that the log suggests at the end of the run, as shell words; None for
            a model that cannot generate text, such as a reward model.
        has_weights: True if `built` already has the weights of the checkpoint from which the run starts.
        evaluates_first: True to evaluate the validation data before the first step of a new run.
        samples: description of the training and held-out samples, see data/identity.py; {} unless
            `OpenRun.needs_samples`.
    """

    tokenizer: Tokenizer
    built: ShardedModel
    objective: Objective
    batches: AbstractContextManager[Loader] | None
    validation: Validation | None = None
    test: Validation | None = None
    validation_metric: str = "lm_loss"
    has_perplexity: bool = True
    whole_samples: bool = True
    flags: Mapping[str, Any] = field(default_factory=dict)
    states: Sequence[StatePart] = ()
    generate_flags: str | None = "--prompt 'Call me'"
    has_weights: bool = False
    evaluates_first: bool = False
    samples: Mapping[str, Any] = field(default_factory=dict)


class Trainer:
    """Training run on this rank: it builds all parts of the run, loads a checkpoint, trains and evaluates.

    Args:
        run: flags, plan, process groups, checkpoint and records of the run.
        parts: model, data, loss and evaluations, which the program has built.

    Attributes:
        guard: object that decides for each step whether the optimizer may update the weights.
        values: training state that is not stored in tensors, such as the loss scale.
        states: groups of tensors that checkpoints store besides the groups in `TrainingParts.states`. A feature may
            add, wrap or replace elements of this list.
        flags: values of flags that checkpoints record, by field name. A feature may add entries.
        attached: functions of the optional features that the run calls, one element per feature.
        checkpoints: writer and reader of the run's checkpoints.
        step: training step, which runs forward, backward and the optimizer's update for one global batch.
        step_recorder: recorder of timers and timelines of steps.
        recorder: recorder of metrics and evaluations.

    Raises:
        UserError: a feature's files or flags cannot be used, or the folder of --save has too little space.
    """

    def __init__(self, run: OpenRun, parts: TrainingParts) -> None:
        self.run, self.parts = run, parts
        config, plan, context, dims, tokenizer = run.config, run.plan, run.context, run.context.dims, parts.tokenizer
        model, sharding = parts.built

        # ---- build the optimizer, the loss scaler, and the guard that can reject the update of a step
        settings: dict[str, Any] = {"dims": dims, "dtype": config.precision.param_dtype, "adamw": sharding.states.adamw}
        optimizer = build_optimizer(model, config.optimizer, **settings)
        scaler = LossScaler(config.loss_scale, fp16=config.precision.fp16)
        losses = LossHistory()
        self.flags = run.parsed.values() | {"zero_weight_delta": plan.weight_delta(config.zero)}
        self.values = values = RunValues(optimizer, scaler, losses)
        self.states = training_parts(model, sharding, optimizer, dims, values, seed=config.launch.seed)
        self.guard = guard = Guard(
            config.anomalies,
            sharding,
            context,
            plan.batches,
            losses,
            scaler=scaler,
            verify_interval=config.zero.zero_verify_interval,
            verify=functools.partial(verify_weights, sharding, dims),
        )

        # ---- attach the optional features
        with user_errors():
            self.attached = [feature.attach(self) for feature in config.features]

        # ---- prepare checkpoints: the metadata, with the value of every flag, and the training state to save
        samples = {"global_batch_size": plan.batches.global_batch_size, "ranks": plan.layout.data, **parts.samples}
        flags = {**self.flags, **parts.flags, SAMPLES: samples}
        folder = context.folder
        record = CheckpointMetadata(
            progress=TrainingProgress(),
            scaler={},
            groups=[],
            schedule=plan.schedule.state_dict(),
            flags=found_from_anywhere(flags),
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.identity,
            layout={name: dims.layout.axis_size(name) for name in dims.layout.coordinates},
            run_dir=None if folder is None else str(folder.path.resolve()),
            wandb_run_id=folder.wandb_run_id() if folder is not None and flags["wandb_project"] else None,
            torch=torch.__version__,
        )
        state = TrainState(model, sharding, values, [*self.states, *parts.states])
        self.checkpoints = Checkpoints(
            config.checkpoint,
            state,
            record,
            run.files,
            context.log,
            folder=run.save,
            tokenizer=tokenizer.files,
        )
        with user_errors():
            self.checkpoints.check_space()

        # ---- build the training step: forward, backward and optimizer
        self.step = TrainStep(
            model,
            sharding,
            optimizer,
            scaler,
            dims,
            clip_grad=config.optimizer.clip_grad,
            guard=guard,
            count_zeros=config.tracking.log_num_zeros_in_grad,
            objective=parts.objective,
        )

        # ---- build the recorders of timers and metrics, and the meter of speed and remaining time
        seq_length = config.data.seq_length
        assert seq_length is not None
        padded = config.model.padded_vocab_size(tokenizer.vocab_size, plan.layout.tp)
        meter = Meter(
            total_iterations=plan.batches.total_iterations,
            total_samples=plan.batches.total_samples,
            seq_length=seq_length,
            world_size=plan.layout.cluster.world_size * config.jobs,
            whole_samples=parts.whole_samples,
            flops_per_token=model_flops_per_token(config.model, padded_vocab_size=padded, seq_length=seq_length),
            peak_flops=peak_flops(device_name(context.device), config.precision.param_dtype),
        )
        self.step_recorder = StepRecorder(config.timing, context, interval=config.tracking.log_interval)
        self.recorder = MetricsRecorder(
            config.tracking,
            context,
            meter,
            sharding=sharding,
            tracker=run.tracker,
            report_timers=self.step_recorder.report_timers,
            validation=parts.validation,
            metric=parts.validation_metric,
            has_perplexity=parts.has_perplexity,
            give_up=functools.partial(run.stops.give_up, dims),
            weights_for_evaluation=self.weights_for_evaluation,
        )

    def stopped(self) -> bool:
        """Return True once this rank has caught a stop signal."""
        return self.run.stops.caught != 0

    def load(self) -> Resumed:
        """Load the run's checkpoint, if there is one; return the progress and the schedule with which training starts.

        Raises:
            UserError: the checkpoint cannot be loaded.
        """
        run, checkpoint = self.run, self.run.checkpoint
        start = Resumed(TrainingProgress(), run.plan.schedule, None)
        if checkpoint is not None and (checkpoint.source.continues or not self.parts.has_weights):
            with user_errors():
                start = self.checkpoints.load(checkpoint, run.plan.schedule)
            if checkpoint.source.continues:
                flags, names = {**self.flags, **self.parts.flags}, run.parsed.training_fields
                for note in flag_notes(checkpoint.record.flags, flags, names, checkpoint.path):
                    run.context.log(f"note: {note}")
        self.recorder.meter.token_offset = start.progress.token_offset
        return start

    def train(self, start: Resumed) -> TrainingProgress:
        """Run all training steps, and return the progress at their end.

        Without training data or with --skip-train, no step runs, and the result is the progress of `start`.

        Args:
            start: progress from which the run starts or resumes, and schedule of learning rate and weight decay.
        """
        # ---- catch stop signals, and evaluate before the first step if the program requests this
        run, context, meter = self.run, self.run.context, self.recorder.meter
        run.opened.enter_context(catching_signals(run.stops, answers=run.worker.rank == 0))
        context.log(mfu_convention(meter.flops_per_token, device_name(context.device), meter.peak_flops), short="")
        if self.parts.evaluates_first and start.progress.iteration == 0:
            self.recorder.validate(start.progress)
        if self.parts.batches is None or run.config.stop.skip_train:
            return start.progress

        # ---- compile kernels, and collect actions after steps and observers of steps
        if context.device.type == "cuda":  # on the CPU, the kernels are already compiled
            context.log("loading the communication kernels; Triton compiles them once per machine, which takes seconds")
            self.parts.built.sharding.compile_kernels(context.device)
        after, observers = list[AfterStep](), list[Observer]()
        scheduled = not any(attached.schedules_actions for attached in self.attached)
        if run.save is not None and scheduled:
            after.append(AfterStep(self.checkpoints.save, run.config.checkpoint.save_interval, at_end=True))
        if run.config.checkpoint.async_save:
            observers.append(self.checkpoints.watch)
        for attached in self.attached:
            after += attached.after_step
        if self.parts.validation is not None and scheduled:
            after.append(AfterStep(self.validate, run.config.evaluation.eval_interval))
        if run.config.profiler.profile:
            observers.append(run.profiler.step)
        if run.config.timing.records_steps:
            observers.append(self.step_recorder.step)

        # ---- run the training loop
        with self.parts.batches as batches, run.profiler:
            loader: Loader = batches
            progress = start.progress
            for attached in self.attached:
                loader, progress = attached.loader(loader), attached.begin(progress)
            progress = train(
                self.step,
                loader,
                run.plan.batches,
                start.schedule,
                self.recorder,
                run.stops,
                observers,
                start=progress,
                after=after,
                synchronize=next((each.synchronize for each in self.attached if each.synchronize is not None), None),
            )
            for attached in self.attached:
                attached.wait(progress)
            self.step_recorder.close()
            self.checkpoints.finish()
        return progress

    def validate(self, progress: TrainingProgress) -> None:
        """Evaluate the validation data at `progress`, unless a stop signal has ended the training."""
        if not self.run.stops.hurried:
            self.recorder.validate(progress)

    def finish(self, progress: TrainingProgress, *, unigram_entropy: float | None = None) -> None:
        """Evaluate held-out data at the end of a run, record the results, and log commands that the user can run next.

        After a stop signal has ended the training, nothing is evaluated or generated.

        Args:
            progress: progress at the end of training.
            unigram_entropy: entropy of the validation text in nats per token; None if unknown.
        """
        run = self.run
        elements, config = self.parts.built.sharding.shard_elements, run.config
        record_results(
            self.recorder,
            progress,
            evaluate=not run.stops.hurried,
            test=self.parts.test,
            unigram_entropy=unigram_entropy,
            zero3=functools.partial(zero3_traffic, elements, run.context.dims, config.precision),
        )
        if not run.stops.hurried:
            for attached in self.attached:
                attached.finish(self.weights_for_evaluation, progress.iteration)
        conclude(
            run.parsed,
            run.context,
            progress,
            loaded=run.checkpoint is not None,
            generate_flags=self.parts.generate_flags,
            split=run.save is not None and run.save.num_separate > 1,
        )

    @contextmanager
    def weights_for_evaluation(self) -> Iterator[None]:
        """Give the model the weights to evaluate inside the context: the trained weights, or a feature's weights.

        DiLoCo, for example, evaluates its outer weights.
        """
        with ExitStack() as contexts:
            for attached in self.attached:
                contexts.enter_context(attached.evaluation_weights())
            yield
