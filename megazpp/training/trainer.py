"""The parts of a training run: named once, built in the order in which they need each other, and run together.

tokenizer, data     what is learned
model               in shards, with its optimizer and loss scale
checkpoints         before the guard, which can go back to one
guard, step         the step with what must not get into the weights
recorder            the numbers of steps
evaluators          validation and test
observers           what looks at each step
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from megazpp.base.arguments import ParsedRun
from megazpp.base.checks import RunPlan
from megazpp.base.errors import user_errors
from megazpp.checkpoint.read import LoadSource, Resumed
from megazpp.checkpoint.record import TrainingProgress
from megazpp.checkpoint.state import ExtraState, TrainState
from megazpp.data.dataset import Splits, build_tokenizer, unigram_entropy
from megazpp.inference.text import continue_texts
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.optim.schedule import Schedule
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker
from megazpp.training.anomalies import Guard, LossHistory, NotFinite
from megazpp.training.context import RunContext
from megazpp.training.evaluate import Evaluator
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops
from megazpp.training.local_steps import LocalSteps
from megazpp.training.loop import Loader, Observer, StopConditions, train
from megazpp.training.metrics import RunShape
from megazpp.training.objective import LanguageModelLoss, Objective
from megazpp.training.profiler import Profiler
from megazpp.training.recorder import MetricsRecorder, Validation, zero3_traffic
from megazpp.training.setup import (
    Built,
    ModelSpec,
    build_model,
    check_island_holds,
    open_checkpoints,
    open_datasets,
    open_loader,
)
from megazpp.training.step import TrainStep
from megazpp.training.step_recorder import StepRecorder, StepTimeline, Straggler, Timers
from megazpp.training.tracking import Tracker
from megazpp.zero.diloco import DiLoCo
from megazpp.zero.diloco_config import CHOSEN
from megazpp.zero.verify import verify_weights


class ObjectiveSetup(NamedTuple):
    """The objective (None: the language model's loss), its state, a model that changes beside, and who sees steps."""

    objective: Objective | None = None
    extra: ExtraState | None = None
    reference: Built | None = None
    observers: tuple[Observer, ...] = ()


class Trainer:
    """Builds the parts of a run on this rank, each from its own config and from those above it.

    What other trainings than pretraining do otherwise are the methods from `open_data` on.

    Args:
        parsed: the flags.
        plan: what follows from them.
        run: what every part needs.
        tracker: writes down the numbers; None on all ranks but the first.
    Raises:
        UserError: data or tokenizer cannot be used.
    """

    generates = True  # the model continues texts

    def __init__(self, parsed: ParsedRun, plan: RunPlan, run: RunContext, tracker: Tracker | None) -> None:
        config, dims, seed = parsed.config, run.dims, parsed.config.launch.seed
        self.parsed, self.config, self.plan, self.run = parsed, config, plan, run
        self.profiler = Profiler(config.profiler, run)  # first: it remembers allocations
        with user_errors():
            self.tokenizer = build_tokenizer(config.tokenizer, config.data, log=run.log)
            self.datasets = self.open_data()
            if plan.diloco is not None:
                check_island_holds(self.model_spec(), dims, run.device, plan.diloco)
            self.built = self.open_model()
        self.optimizer = build_optimizer(list(self.built.model.named_parameters()), config.optimizer, run.device)
        self.scaler = build_loss_scaler(config.loss_scale, fp16=config.precision.fp16)
        self.losses = LossHistory()
        self.diloco: DiLoCo | None = None
        if plan.diloco is not None:
            self.diloco = DiLoCo(self.built.sharding, dims, plan.diloco, config.precision)
        with user_errors():
            setup = self.open_objective()
        self.observers = setup.observers
        state = TrainState(
            *self.built,
            self.optimizer,
            self.scaler,
            dims,
            seed=seed,
            guard=self.losses,
            extra=setup.extra,
            reference=setup.reference,
            diloco=self.diloco,
        )
        self.checkpoints = open_checkpoints(
            config.checkpoint, state, run, flags=self.flags(), schedule=plan.schedule, tokenizer=self.tokenizer
        )
        guard, objective = self._guard(), setup.objective or LanguageModelLoss(dims)
        self.step = TrainStep(
            *self.built,
            self.optimizer,
            self.scaler,
            dims,
            clip_grad=config.optimizer.clip_grad,
            guard=guard,
            count_zeros=config.tracking.log_num_zeros_in_grad,
            objective=objective,
        )
        self.islands: LocalSteps | None = None
        if self.diloco is not None:
            assert isinstance(objective, LanguageModelLoss), "others are refused by check_post_training"
            self.islands = LocalSteps(self.diloco, objective, guard, dims)

        self.timers = Timers(config.timing, dims)
        shape = self._shape()
        zero3 = functools.partial(zero3_traffic, self.built.sharding.shard_elements, dims, config.precision)
        self.recorder = MetricsRecorder(
            config.tracking, run, shape, model=self.built.model, zero3=zero3, tracker=tracker, timers=self.timers
        )
        self.validation, self.test = (
            None if dataset is None else self._of_outer_weights(self.open_evaluator(dataset))
            for dataset in (self.datasets.valid, self.datasets.test)
        )
        straggler = Straggler(config.timing, run, interval=config.tracking.log_interval)
        readers = (self.timers, straggler, StepTimeline(config.timing, run))
        self.step_recorder = StepRecorder(dims.timeline, readers)

    def load(self, source: LoadSource | None) -> Resumed | None:
        """Take the folder of --save, and continue from a checkpoint of `source` if it has one.

        Raises:
            UserError: one of them cannot be used.
        """
        with user_errors():
            self.checkpoints.open()
            return None if source is None else self.checkpoints.load(source, self.plan.schedule)

    def train(
        self, start: TrainingProgress, schedule: Schedule, stops: StopConditions, worker: Worker
    ) -> TrainingProgress:
        """Take the run's steps; there are none without training data or with --skip-train."""
        if self.datasets.train is None or self.config.stop.skip_train:
            return start
        folder = None if self.run.folder is None else self.run.folder.path
        watchdog = Watchdog(worker, self.run.dims, self.config.launch, folder)
        if self.run.device.type == "cuda":  # elsewhere they are compiled already
            self.built.sharding.compile_kernels(self.run.device)
            if self.diloco is not None:
                self.diloco.compile_kernels(self.run.device)
        with self.open_batches(self.datasets.train, ramp_up=True) as batches, watchdog, self.profiler:
            progress = train(
                self.step,
                batches,
                self.plan.batches,
                schedule,
                self.recorder,
                stops,
                (*self.observers, self.profiler, self.step_recorder),
                eval_interval=self.config.evaluation.eval_interval,
                evaluate=self.validation,
                start=start,
                checkpoints=self.checkpoints,
                islands=self.islands,
            )
            if self.diloco is not None:
                self.diloco.wait()
            self.step_recorder.close()
            self.checkpoints.finish()
        return progress

    def finish(self, progress: TrainingProgress, *, evaluate: bool) -> None:
        """Log and write down what the run came to, with the last losses on held-out data if `evaluate`."""
        validation, test = (self.validation, self.test) if evaluate else (None, None)
        self.recorder.finish(progress, validation, test, unigram_entropy=self.held_out_entropy())

    def write_sample(self) -> None:
        """Let the model continue the prompts, if --sample-tokens asks for it."""
        config, longest = self.config.sample, self.config.data.seq_length
        if config.sample_tokens == 0:
            return
        assert longest is not None
        prompts, seed = config.sample_prompt or ("",), self.config.launch.seed
        with self.diloco.outer_weights() if self.diloco is not None else contextlib.nullcontext():
            texts, _ = continue_texts(
                *self.built, self.run.dims, self.tokenizer, prompts, config, max_length=longest, seed=seed
            )
        for prompt, text in zip(prompts, texts, strict=True):
            self.run.log(f"a sample of text:\n{prompt}{text}")

    def _shape(self) -> RunShape:
        """The constants behind tokens per second, TFLOP/s and the time left."""
        model, plan, seq_length = self.config.model, self.plan, self.config.data.seq_length
        assert seq_length is not None
        padded = model.padded_vocab_size(self.tokenizer.vocab_size, plan.layout.tp)
        return RunShape(
            total_iterations=plan.batches.total_iterations,
            total_samples=plan.batches.total_samples,
            seq_length=seq_length,
            world_size=plan.layout.cluster.world_size,
            flops_per_token=model_flops_per_token(model, padded_vocab_size=padded, seq_length=seq_length),
            peak_flops=peak_flops(device_name(self.run.device), self.config.precision.param_dtype),
        )

    def _of_outer_weights(self, evaluate: Validation) -> Validation:
        """The same question about the weights that all islands share."""
        diloco = self.diloco
        if diloco is None:
            return evaluate

        def ask() -> float:
            with diloco.outer_weights():
                return evaluate()

        return ask

    def _guard(self) -> Guard:
        config, sharding, dims, checkpoints = self.config, self.built.sharding, self.run.dims, self.checkpoints
        rewinds = config.anomalies.loss_spike_action == "rewind"
        return Guard(
            config.anomalies,
            NotFinite(sharding, dims, self.plan.batches, self.run.folder),
            self.losses,
            dynamic_scale=config.precision.fp16 and config.loss_scale.loss_scale is None,
            log=self.run.log,
            rewind=(lambda: checkpoints.rewind().iteration) if rewinds else None,
            verify=functools.partial(verify_weights, sharding, dims),
            verify_interval=config.verify.zero_verify_interval,
            islands=self.plan.diloco is not None,
        )

    # ---- what makes it pretraining ----------------------------------------------------------------------------

    def open_data(self) -> Splits[Any]:
        """The data of the run; raises ValueError if it cannot be used."""
        config, plan, seed = self.config, self.plan.batches, self.config.launch.seed
        return open_datasets(config.data, self.tokenizer, plan, config.evaluation, seed=seed, log=self.run.log)

    def model_spec(self) -> ModelSpec:
        """The model that is trained."""
        return self.config.model_spec(self.tokenizer.vocab_size, self.plan.wire)

    def open_model(self) -> Built:
        """The model, in shards."""
        return build_model(self.model_spec(), self.run.dims, self.run.device)

    def flags(self) -> dict[str, Any]:
        """The flags that checkpoints say of the run; of the outer optimizer what was chosen for it, too."""
        plan = self.plan.diloco
        chosen = {} if plan is None else {name: getattr(plan, name.removeprefix("diloco_")) for name in CHOSEN}
        return self.parsed.values() | chosen

    def open_objective(self) -> ObjectiveSetup:
        """Set up what it is trained towards; called when data, model and optimizer are there."""
        return ObjectiveSetup()

    def open_batches(self, dataset: Any, *, ramp_up: bool) -> AbstractContextManager[Loader]:
        """This rank's batches of `dataset`."""
        plan, run = self.plan.batches, self.run
        return open_loader(dataset, self.config.data, self.tokenizer, plan, run.dims, run.device, ramp_up=ramp_up)

    def open_evaluator(self, dataset: Any) -> Validation:
        """Open what is asked of held-out data."""
        loader = open_loader(
            dataset,
            self.config.data,
            self.tokenizer,
            self.plan.batches,
            self.run.dims,
            self.run.device,
            ramp_up=False,
        )
        iterations, batch_size = self.config.evaluation.eval_iters, self.plan.batches.global_batch_size
        return Evaluator(*self.built, loader, self.run.dims, iterations=iterations, batch_size=batch_size)

    def held_out_entropy(self) -> float | None:
        """Nats per token of the validation text to a model blind to context; None if there is none."""
        held_out = self.datasets.valid
        return None if held_out is None else unigram_entropy(held_out, self.tokenizer.vocab_size)
