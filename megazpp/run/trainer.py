"""The run of a training on this rank: its parts, built in the order in which they need each other, and run together.

the training's own     sharded model, objective, batches, evaluations: `TrainingParts`
optimizer, loss scale
guard                  decides whether a step is taken
optional features      run/feature.py
state, checkpoints
step, recorder         the training step, and the record of its numbers
observers              called around each step
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
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker
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
    """The parts in which trainings differ; `Trainer` makes the others from the flags.

    Attributes:
        tokenizer, built: of the model that is trained.
        objective: what is minimised.
        batches: this rank's batches of the training data, to be entered; None without training data.
        validation, test: evaluations of held-out data; None without.
        validation_metric: what they measure: "lm_loss", or "reward".
        has_perplexity: the "lm_loss" that they measure is nats per token.
        whole_samples: every sample has --seq-length tokens.
        flags: values that checkpoints keep beside, or in the place of, those of the command line.
        states: more that checkpoints keep.
        observers: look at steps, beside the run's own.
        generates: whether the model continues texts.
        has_weights: where a training begins with a checkpoint's weights, the model has them already.
        weights_taken: called when it has begun so.
        evaluates_first: validate before the first step.
        finish: called after the last evaluation.
        describe_samples: description of the training and held-out samples, see data/identity.py.
        held_out_entropy: nats per token of the validation text to a model blind to context; None if there is no text.
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
    """Builds the parts of a run on this rank, each from its own config and from those above it.

    Raises UserError if data or tokenizer cannot be used. `tracker` is None on all ranks but the first.
    """

    def __init__(
        self, build_parts: BuildParts, parsed: ParsedRun, plan: RunPlan, run: RunContext, tracker: Tracker | None
    ) -> None:
        config, dims = parsed.config, run.dims
        self.config, self.plan, self.run = config, plan, run
        self.profiler = Profiler(config.profiler, run)  # first: it remembers allocations
        with user_errors():
            self.parts = parts = build_parts(parsed, plan, run)
        self.built = model, sharding = parts.built
        matrices = build_orthogonalizer(model, config.optimizer, dims, config.precision.param_dtype)
        named = list(model.named_parameters())
        optimizer = build_optimizer(named, config.optimizer, run.device, orthogonalizer=matrices)
        scaler = build_loss_scaler(config.loss_scale, fp16=config.precision.fp16)
        losses, flags = LossHistory(), parsed.values()
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
            rewind=self._rewind if config.anomalies.loss_spike_action == "rewind" else None,
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

        # ---- state and checkpoints
        state = TrainState(model, sharding, values, [*open_parts.states, *parts.states])
        saves = config.checkpoint.save is not None or config.checkpoint.load is not None
        samples: dict[str, Any] = {"global_batch_size": plan.batches.global_batch_size, "ranks": plan.layout.data}
        if saves and dims.world.rank == 0:  # which writes the record and prints what differs
            samples |= parts.describe_samples()
        record = self._record({**open_parts.flags, **parts.flags, SAMPLES: samples})
        axis = open_axis(dims) if saves else dims.world
        tokenizer_files = parts.tokenizer.files
        self.checkpoints = Checkpoints(config.checkpoint, state, record, axis, run.log, tokenizer=tokenizer_files)

        # ---- step and its records
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
        self.step_recorder = StepRecorder(config.timing, run, interval=config.tracking.log_interval)
        self.recorder = MetricsRecorder(
            config.tracking,
            run,
            self._meter(),
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
        """Take the folder of --save, and continue from a checkpoint of `source` if it has one; else a UserError."""
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

    def train(
        self, start: TrainingProgress, schedule: Schedule, stops: StopConditions, worker: Worker
    ) -> TrainingProgress:
        """Take the run's steps; there are none without training data or with --skip-train."""
        if self.parts.evaluates_first and start.iteration == 0:
            self.recorder.validate(start)
        if self.parts.batches is None or self.config.stop.skip_train:
            return start
        folder = None if self.run.folder is None else self.run.folder.path
        watchdog = Watchdog(worker, self.run.dims, self.config.launch, folder)
        if self.run.device.type == "cuda":  # elsewhere they are compiled already
            self.built.sharding.compile_kernels(self.run.device)
        after: list[AfterStep] = [self.checkpoints]
        for attached in self.attached:
            after += attached.after_step
        if self.parts.validation is not None:
            after.append(Evaluations(self.recorder, self.config.evaluation.eval_interval, stops))
        with self.parts.batches as batches, watchdog, self.profiler:
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
        """Log and write down the run's results.

        Args:
            progress: progress at the end of training.
            evaluate: whether to evaluate held-out data once more, and let the features finish, for example by a
                sample of text.
        """
        self.recorder.finish(progress, evaluate=evaluate, unigram_entropy=self.parts.held_out_entropy())
        self.parts.finish()
        if evaluate:
            for attached in self.attached:
                attached.finish(self.weights_for_evaluation)

    @contextmanager
    def weights_for_evaluation(self) -> Iterator[None]:
        """Enter a context in which the model has the weights to evaluate: the trained ones, or a feature's."""
        with ExitStack() as contexts:
            for attached in self.attached:
                contexts.enter_context(attached.evaluation_weights())
            yield

    def _rewind(self) -> int:
        return self.checkpoints.rewind().iteration

    def _record(self, flags: Mapping[str, Any]) -> CheckpointMetadata:
        """The record that checkpoints keep beside the state; `flags` are all flags' values."""
        run, tokenizer, folder = self.run, self.parts.tokenizer, self.run.folder
        layout = run.dims.layout
        return CheckpointMetadata(
            progress=TrainingProgress(),
            scaler={},
            groups=[],
            schedule=self.plan.schedule.state_dict(),
            flags=found_from_anywhere(flags),
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.identity,
            layout={name: layout.axis_size(name) for name in layout.coordinates},
            run_dir=None if folder is None else str(folder.path.resolve()),
            wandb_run_id=folder.wandb_run_id() if folder is not None and flags["wandb_project"] else None,
            torch=torch.__version__,
        )

    def _meter(self) -> Meter:
        """Turns steps into tokens per second, TFLOP/s and the time left."""
        model, plan, seq_length = self.config.model, self.plan, self.config.data.seq_length
        assert seq_length is not None
        padded = model.padded_vocab_size(self.parts.tokenizer.vocab_size, plan.layout.tp)
        return Meter(
            total_iterations=plan.batches.total_iterations,
            total_samples=plan.batches.total_samples,
            seq_length=seq_length,
            world_size=plan.layout.cluster.world_size,
            whole_samples=self.parts.whole_samples,
            flops_per_token=model_flops_per_token(model, padded_vocab_size=padded, seq_length=seq_length),
            peak_flops=peak_flops(device_name(self.run.device), self.config.precision.param_dtype),
        )
