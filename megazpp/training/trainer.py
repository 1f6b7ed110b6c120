"""The run of a training on this rank: its parts, built in the order in which they need each other, and run together.

the training's own     model in shards, objective, batches, evaluations: `TrainingParts`
optimizer, loss scale
islands                where models train apart
state, checkpoints     before the guard, which can go back to one
guard, step            the step with what must not get into the weights
recorder               the numbers of steps
observers              what looks at each step

Features enter by three lists: configs (base/arguments.py), parts of the state with keys of their own
(checkpoint/state.py), and what follows a step (`AfterStep` of loop.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megazpp.base.arguments import ParsedRun
from megazpp.base.checks import RunPlan
from megazpp.base.program import user_errors
from megazpp.checkpoint.parts import training_parts
from megazpp.checkpoint.read import LoadSource, Resumed
from megazpp.checkpoint.record import TrainingProgress
from megazpp.checkpoint.state import RunValues, TrainState
from megazpp.inference.text import continue_texts
from megazpp.islands.loop import LocalSteps
from megazpp.islands.outer import Islands
from megazpp.islands.state import island_parts
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.optim.schedule import Schedule
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker
from megazpp.training.anomalies import Guard, LossHistory, NotFinite
from megazpp.training.context import RunContext
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops
from megazpp.training.loop import AfterStep, Evaluations, StopConditions, train
from megazpp.training.metrics import RunShape
from megazpp.training.profiler import Profiler
from megazpp.training.recorder import MetricsRecorder, Validation, zero3_traffic
from megazpp.training.setup import TrainingParts, open_checkpoints
from megazpp.training.step import TrainStep
from megazpp.training.step_recorder import StepRecorder, StepTimeline, Straggler, Timers
from megazpp.training.tracking import Tracker
from megazpp.zero.verify import verify_weights

BuildParts = Callable[[ParsedRun, RunPlan, RunContext], TrainingParts]


class Trainer:
    """Builds the parts of a run on this rank, each from its own config and from those above it.

    Args:
        build_parts: makes what is this training's own.
        parsed: the flags.
        plan: what follows from them.
        run: what every part needs.
        tracker: writes down the numbers; None on all ranks but the first.
    Raises:
        UserError: data or tokenizer cannot be used.
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
        optimizer = build_optimizer(list(model.named_parameters()), config.optimizer, run.device)
        scaler = build_loss_scaler(config.loss_scale, fp16=config.precision.fp16)
        losses, flags = LossHistory(), parsed.values()
        values = RunValues(optimizer, scaler, losses)
        states = training_parts(model, sharding, optimizer, dims, values, seed=config.launch.seed)
        self.islands: Islands | None = None
        if plan.islands is not None:
            self.islands = Islands(sharding, dims, plan.islands, config.precision)
            states, flags = island_parts(states, self.islands, model, values), flags | plan.islands.chosen_flags()
        self.checkpoints = open_checkpoints(
            config.checkpoint,
            TrainState(model, sharding, values, [*states, *parts.states]),
            run,
            flags={**flags, **parts.flags},
            schedule=plan.schedule,
            tokenizer=parts.tokenizer,
        )
        guard = self._guard(losses)
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
        self.local_steps = None if self.islands is None else LocalSteps(self.islands, parts.objective, guard, dims)
        self.timers = Timers(config.timing, dims)
        self.recorder = MetricsRecorder(
            config.tracking,
            run,
            self._shape(),
            model=model,
            zero3=functools.partial(zero3_traffic, sharding.shard_elements, dims, config.precision),
            tracker=tracker,
            timers=self.timers,
            validation_metric=parts.validation_metric,
        )
        self.validation, self.test = (
            None if evaluate is None else functools.partial(self._evaluate, evaluate)
            for evaluate in (parts.validation, parts.test)
        )
        straggler = Straggler(config.timing, run, interval=config.tracking.log_interval)
        self.step_recorder = StepRecorder(dims.timeline, (self.timers, straggler, StepTimeline(config.timing, run)))

    def load(self, source: LoadSource | None) -> Resumed | None:
        """Take the folder of --save, and continue from a checkpoint of `source` if it has one.

        Raises:
            UserError: one of them cannot be used.
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

    def train(
        self, start: TrainingProgress, schedule: Schedule, stops: StopConditions, worker: Worker
    ) -> TrainingProgress:
        """Take the run's steps; there are none without training data or with --skip-train."""
        if self.parts.evaluates_first and start.iteration == 0 and self.validation is not None:
            self.recorder.validate(self.validation, start)
        if self.parts.batches is None or self.config.stop.skip_train:
            return start
        folder = None if self.run.folder is None else self.run.folder.path
        watchdog = Watchdog(worker, self.run.dims, self.config.launch, folder)
        if self.run.device.type == "cuda":  # elsewhere they are compiled already
            self.built.sharding.compile_kernels(self.run.device)
            if self.islands is not None:
                self.islands.compile_kernels(self.run.device)
        after: list[AfterStep] = [self.checkpoints]
        if self.validation is not None:
            interval = self.config.evaluation.eval_interval
            after.append(Evaluations(self.recorder, self.validation, interval, stops))
        with self.parts.batches as batches, watchdog, self.profiler:
            progress = train(
                self.step,
                batches,
                self.plan.batches,
                schedule,
                self.recorder,
                stops,
                (*self.parts.observers, self.profiler, self.step_recorder),
                start=start,
                after=after,
                synchronize=None if self.local_steps is None else self.local_steps.after_step,
            )
            if self.islands is not None:
                self.islands.wait()
            self.step_recorder.close()
            self.checkpoints.finish()
        return progress

    def finish(self, progress: TrainingProgress, *, evaluate: bool) -> None:
        """Log and write down what the run came to, with the last losses on held-out data if `evaluate`."""
        validation, test = (self.validation, self.test) if evaluate else (None, None)
        self.recorder.finish(progress, validation, test, unigram_entropy=self.parts.held_out_entropy())
        self.parts.finish()

    def write_sample(self) -> None:
        """Let the model continue the prompts, if --sample-tokens asks for it."""
        config, longest = self.config.sample, self.config.data.seq_length
        if config.sample_tokens == 0:
            return
        assert longest is not None
        prompts, seed, tokenizer = config.sample_prompt or ("",), self.config.launch.seed, self.parts.tokenizer
        with self.weights_for_evaluation():
            texts, _ = continue_texts(
                *self.built, self.run.dims, tokenizer, prompts, config, max_length=longest, seed=seed
            )
        for prompt, text in zip(prompts, texts, strict=True):
            self.run.log(f"a sample of text:\n{prompt}{text}")

    def weights_for_evaluation(self) -> AbstractContextManager[None]:
        """With islands, the weights that all of them share are in the model; else those that are trained."""
        return nullcontext() if self.islands is None else self.islands.outer_weights()

    def _evaluate(self, evaluate: Validation) -> float:
        with self.weights_for_evaluation():
            return evaluate()

    def _shape(self) -> RunShape:
        """The constants behind tokens per second, TFLOP/s and the time left."""
        model, plan, seq_length = self.config.model, self.plan, self.config.data.seq_length
        assert seq_length is not None
        padded = model.padded_vocab_size(self.parts.tokenizer.vocab_size, plan.layout.tp)
        return RunShape(
            total_iterations=plan.batches.total_iterations,
            total_samples=plan.batches.total_samples,
            seq_length=seq_length,
            world_size=plan.layout.cluster.world_size,
            flops_per_token=model_flops_per_token(model, padded_vocab_size=padded, seq_length=seq_length),
            peak_flops=peak_flops(device_name(self.run.device), self.config.precision.param_dtype),
        )

    def _guard(self, losses: LossHistory) -> Guard:
        config, sharding, dims, checkpoints = self.config, self.built.sharding, self.run.dims, self.checkpoints
        rewinds = config.anomalies.loss_spike_action == "rewind"
        return Guard(
            config.anomalies,
            NotFinite(sharding, dims, self.plan.batches, self.run.folder),
            losses,
            dynamic_scale=config.precision.fp16 and config.loss_scale.loss_scale is None,
            log=self.run.log,
            rewind=(lambda: checkpoints.rewind().iteration) if rewinds else None,
            verify=functools.partial(verify_weights, sharding, dims),
            verify_interval=config.verify.zero_verify_interval,
            islands=self.plan.islands is not None,
        )
