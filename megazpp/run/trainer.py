"""The trainer: builds the parts of a training run on this rank and runs them.

`Trainer` builds the parts in the order of their dependencies:

parts of the program   sharded model, objective, batches, evaluations; see `TrainingParts`
optimizer, loss scale
guard                  decides for each step whether the optimizer may update the weights
optional features      connected through run/feature.py
state, checkpoints
step, recorders        the training step, its metrics and its timings
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megazpp.base.program import user_errors
from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.metadata import SAMPLES, CheckpointMetadata, TrainingProgress, found_from_anywhere
from megazpp.checkpoint.parts import training_parts
from megazpp.checkpoint.read import LoadSource, Resumed
from megazpp.checkpoint.state import RunValues, StatePart, TrainState
from megazpp.data.tokenizer import Tokenizer
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer, build_orthogonalizer
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import open_axis
from megazpp.run.arguments import ParsedRun
from megazpp.run.checks import RunPlan
from megazpp.run.feature import TrainerParts
from megazpp.training.anomalies import Guard, LossHistory
from megazpp.training.context import RunContext
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops
from megazpp.training.loop import AfterStep, Evaluations, Loader, Observer, StopConditions, train
from megazpp.training.metrics import Meter
from megazpp.training.metrics_logger import MetricsRecorder, Validation, zero3_traffic
from megazpp.training.objective import Objective
from megazpp.training.profiler import Profiler
from megazpp.training.setup import ShardedModel
from megazpp.training.step import TrainStep
from megazpp.training.timers import StepRecorder
from megazpp.training.tracking import Tracker


@dataclass(kw_only=True)
class TrainingParts:
    """The parts that differ between pretraining and post-training. `Trainer` builds all others from the flags.

    Attributes:
        tokenizer: tokenizer of the trained model.
        built: the trained model and its sharding.
        objective: loss to minimize.
        batches: context that yields the loader of this rank's batches; None without training data.
        validation: evaluation of the validation data; None without such data.
        test: evaluation of the test data; None without such data.
        validation_metric: metric of both evaluations, "lm_loss" or "reward".
        has_perplexity: whether the metric "lm_loss" is a mean of nats per token.
        whole_samples: whether every sample has --seq-length tokens.
        flags: values that checkpoints record in addition to the command line's flags, or that replace them.
        states: additional parts of a checkpoint's state.
        observers: context managers around each step, entered before the run's own.
        generates: whether the trained model can generate text (a reward model cannot).
        has_weights: whether the model is already built with the weights of the checkpoint that the run starts from.
        weights_taken: called after weights were loaded from a checkpoint without its progress (--finetune).
        evaluates_first: whether to validate before the first step.
        finish: called after the last evaluation.
        describe_samples: returns a description of the training and held-out samples; see data/identity.py.
        held_out_entropy: returns the unigram entropy of the validation text in nats per token; None without such text.
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
    observers: Sequence[Observer] = ()
    generates: bool = True
    has_weights: bool = False
    weights_taken: Callable[[], None] = lambda: None
    evaluates_first: bool = False
    finish: Callable[[], None] = lambda: None
    describe_samples: Callable[[], Mapping[str, Any]] = dict
    held_out_entropy: Callable[[], float | None] = lambda: None


BuildParts = Callable[[ParsedRun, RunPlan, RunContext], TrainingParts]


class Trainer:
    """All parts of a training run on this rank.

    Args:
        build_parts: builds the parts that depend on the program.
        parsed: command line of the run.
        plan: plan that `check_run_config` derived from it.
        run: process groups, device, log and run folder.
        tracker: writes the run's records; None on all ranks except rank 0.

    Raises:
        UserError: the data, the tokenizer or a feature's files cannot be used.
    """

    def __init__(
        self, build_parts: BuildParts, parsed: ParsedRun, plan: RunPlan, run: RunContext, tracker: Tracker | None
    ) -> None:
        # ---- parts of the program
        config, dims = parsed.config, run.dims
        self.config, self.plan, self.run = config, plan, run
        self.profiler = Profiler(config.profiler, run)  # created first, so that it records all allocations
        with user_errors():
            self.parts = parts = build_parts(parsed, plan, run)
        self.built = model, sharding = parts.built

        # ---- optimizer, loss scale, guard
        matrices = build_orthogonalizer(model, config.optimizer, dims, config.precision.param_dtype)
        named = list(model.named_parameters())
        optimizer = build_optimizer(named, config.optimizer, run.device, orthogonalizer=matrices)
        scaler = build_loss_scaler(config.loss_scale, fp16=config.precision.fp16)
        losses, flags = LossHistory(), parsed.values() | {"zero_weight_delta": plan.weight_delta(config.zero)}
        rewinds = config.anomalies.loss_spike_action == "rewind"  # to the last checkpoint
        values = RunValues(optimizer, scaler, losses)
        states = training_parts(model, sharding, optimizer, dims, values, seed=config.launch.seed)
        guard = Guard(
            config.anomalies,
            sharding,
            run,
            plan.batches,
            losses,
            dynamic_scale=config.precision.fp16 and config.loss_scale.loss_scale is None,
            verify_interval=config.verify.zero_verify_interval,
            rewind=(lambda: self.checkpoints.rewind().iteration) if rewinds else None,
        )

        # ---- optional features
        open_parts = TrainerParts(
            config=config,
            plan=plan,
            run=run,
            built=parts.built,
            tokenizer=parts.tokenizer,
            objective=parts.objective,
            guard=guard,
            values=values,
            states=states,
            flags=flags,
        )
        with user_errors():
            self.attached = [feature.attach(open_parts) for feature in config.features]

        # ---- metadata of checkpoints; `flags` has the value of every flag
        saves = config.checkpoint.save is not None or config.checkpoint.load is not None
        samples: dict[str, Any] = {"global_batch_size": plan.batches.global_batch_size, "ranks": plan.layout.data}
        if saves and dims.world.rank == 0:  # only rank 0 writes the metadata and compares it on resume
            samples |= parts.describe_samples()
        flags, tokenizer = {**open_parts.flags, **parts.flags, SAMPLES: samples}, parts.tokenizer
        record = CheckpointMetadata(
            progress=TrainingProgress(),
            scaler={},
            groups=[],
            schedule=plan.schedule.state_dict(),
            flags=found_from_anywhere(flags),
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.identity,
            layout={name: dims.layout.axis_size(name) for name in dims.layout.coordinates},
            run_dir=None if run.folder is None else str(run.folder.path.resolve()),
            wandb_run_id=run.folder.wandb_run_id() if run.folder is not None and flags["wandb_project"] else None,
            torch=torch.__version__,
        )

        # ---- state and checkpoints
        state = TrainState(model, sharding, values, [*open_parts.states, *parts.states])
        axis = open_axis(dims) if saves else dims.world
        self.checkpoints = Checkpoints(config.checkpoint, state, record, axis, run.log, tokenizer=tokenizer.files)

        # ---- step
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

        # ---- records: timers, metrics, and the meter of speed and remaining time
        seq_length = config.data.seq_length
        assert seq_length is not None
        padded = config.model.padded_vocab_size(tokenizer.vocab_size, plan.layout.tp)
        meter = Meter(
            total_iterations=plan.batches.total_iterations,
            total_samples=plan.batches.total_samples,
            seq_length=seq_length,
            world_size=plan.layout.cluster.world_size,
            whole_samples=parts.whole_samples,
            flops_per_token=model_flops_per_token(config.model, padded_vocab_size=padded, seq_length=seq_length),
            peak_flops=peak_flops(device_name(run.device), config.precision.param_dtype),
        )
        self.step_recorder = StepRecorder(config.timing, run, interval=config.tracking.log_interval)
        self.recorder = MetricsRecorder(
            config.tracking,
            run,
            meter,
            model=model,
            zero3=functools.partial(zero3_traffic, sharding.shard_elements, dims, config.precision),
            tracker=tracker,
            timers=self.step_recorder,
            validation=parts.validation,
            test=parts.test,
            metric=parts.validation_metric,
            has_perplexity=parts.has_perplexity,
            weights_for_evaluation=self.weights_for_evaluation,
        )

    def load(self, source: LoadSource | None) -> Resumed | None:
        """Open the folder of --save, and load a checkpoint of `source`.

        Args:
            source: folder to load from, and the parts to load; None for a run that loads nothing.

        Returns:
            the loaded progress and schedule; None if nothing was loaded.

        Raises:
            UserError: the folder cannot be written to, or the checkpoint cannot be loaded.
        """
        with user_errors():
            self.checkpoints.open()
            if source is None:
                return None
            if self.parts.has_weights and not source.continues:
                return Resumed(TrainingProgress(), self.plan.schedule, source.folder.path)
            resumed = self.checkpoints.load(source, self.plan.schedule)
        if not source.continues:
            self.parts.weights_taken()
        return resumed

    def train(self, start: TrainingProgress, schedule: Schedule, stops: StopConditions) -> TrainingProgress:
        """Run all training steps and return the progress at the end.

        Without training data or with --skip-train this runs no step and returns `start`.

        Args:
            start: progress from which the run starts or resumes.
            schedule: schedule of learning rate and weight decay.
            stops: conditions for an early stop.
        """
        # ---- evaluation before the first step
        if self.parts.evaluates_first and start.iteration == 0:
            self.recorder.validate(start)
        if self.parts.batches is None or self.config.stop.skip_train:
            return start

        # ---- kernels, actions after steps
        if self.run.device.type == "cuda":  # the CPU kernels are already compiled
            self.built.sharding.compile_kernels(self.run.device)
        after: list[AfterStep] = [self.checkpoints]
        for attached in self.attached:
            after += attached.after_step
        if self.parts.validation is not None:
            after.append(Evaluations(self.recorder, self.config.evaluation.eval_interval, stops))

        # ---- training loop
        with self.parts.batches as batches, self.profiler:
            progress = train(
                self.step,
                batches,
                self.plan.batches,
                schedule,
                self.recorder,
                stops,
                (*self.parts.observers, self.profiler.step, self.step_recorder.step),
                start=start,
                after=after,
                synchronize=next((each.synchronize for each in self.attached if each.synchronize is not None), None),
            )
            for attached in self.attached:
                attached.wait()
            self.step_recorder.close()
            self.checkpoints.finish()
        return progress

    def finish(self, progress: TrainingProgress, *, evaluate: bool) -> None:
        """Log and record the results of the run.

        Args:
            progress: progress at the end of training.
            evaluate: whether to evaluate held-out data once more and call the features' `finish`, which may for
                example print generated text.
        """
        self.recorder.finish(progress, evaluate=evaluate, unigram_entropy=self.parts.held_out_entropy())
        self.parts.finish()
        if evaluate:
            for attached in self.attached:
                attached.finish(self.weights_for_evaluation)

    @contextmanager
    def weights_for_evaluation(self) -> Iterator[None]:
        """Provide a context in which the model has the weights to evaluate: the trained weights, or a feature's."""
        with ExitStack() as contexts:
            for attached in self.attached:
                contexts.enter_context(attached.evaluation_weights())
            yield
