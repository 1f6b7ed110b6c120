"""Build the parts of a post-training run on a rank: data, policy, frozen models, objective and evaluators."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from megazpp.base.flags import DEFAULT
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights
from megazpp.data.config import Splits
from megazpp.data.dataset import build_tokenizer, cache_dir
from megazpp.data.identity import describe_samples
from megazpp.data.loader import BatchLoader
from megazpp.inference.config import SampleConfig
from megazpp.lora.feature import adapter_opener
from megazpp.lora.policy import AdaptedPolicy, load_adapted, save_adapter
from megazpp.packed_weights.reader import FrozenPlace, open_frozen_place
from megazpp.parallel.agreement import check_equal_on_all_ranks
from megazpp.post_training.chat import load_chat_template
from megazpp.post_training.config import post_configs
from megazpp.post_training.data import (
    PreferenceDataset,
    PromptDataset,
    SupervisedDataset,
    make_pair_batch,
    make_supervised_batch,
    row_multiple,
)
from megazpp.post_training.formatting import read_examples, read_prompts
from megazpp.post_training.objectives import Logps, ObjectiveEvaluator, PolicyLoss, PreferenceLoss
from megazpp.post_training.reference import FrozenModel, load_frozen, logps_of_pairs
from megazpp.post_training.rewards import check_arguments, digest_of_sources, load_reward_functions
from megazpp.post_training.rollouts import PolicySampler, RewardEvaluator, RolloutLoader
from megazpp.post_training.setup import reference_folder, train_paths
from megazpp.run.trainer import OpenRun, TrainingParts
from megazpp.training.config import ModelSpec
from megazpp.training.metrics_logger import Validation
from megazpp.training.objective import Evaluator, LanguageModelLoss, Objective
from megazpp.training.setup import ShardedModel, build_model, open_loader


class PostTraining:
    """Builder of the parts of a post-training run, for all objectives. setup.py has completed the flags.

    The constructor builds the tokenizer, the datasets and the policy, because the other parts need them.

    Args:
        run: the opened run on this rank: flags, plan, process groups, device, log.
    Attributes:
        built: the policy and its sharding handle.
        rollouts: loader of sampled completions; None for objectives without sampling, and until `parts` has built it.

    Raises:
        ValueError: the data, the tokenizer, or a model cannot be used.
    """

    def __init__(self, run: OpenRun) -> None:
        self.parsed, self.config, self.plan, self.run = run.parsed, run.config, run.plan, run.context
        self._stops, self._start = run.stops, run.checkpoint
        self.post, self.form, self.rewards, self.lora, self.weights = post_configs(run.parsed)
        self._opener = adapter_opener(self.config.sections)
        self._temperature = self.config.section(SampleConfig).sample_temperature if self.post.draws else 1.0
        self._adapted: AdaptedPolicy | None = None
        self.rollouts: RolloutLoader | None = None
        self.tokenizer = run.parsed.tokenizer or build_tokenizer(
            self.config.tokenizer, self.config.data, log=self.run.log
        )
        self.datasets = self._open_data()
        self._samples = self._describe_samples() if run.needs_samples else {}
        run.compare_data(self.tokenizer, self._samples)
        self.built = self._open_model()

    def parts(self) -> TrainingParts:
        """Build the objective, the frozen models that it needs, loaders and evaluators; return the trainer's parts."""
        objective = self._open_objective()
        train, valid, test = self.datasets
        rollouts = self.rollouts
        batches: Any = None
        if train is not None:
            batches = self._open_loader(train, ramp_up=True) if rollouts is None else contextlib.nullcontext(rollouts)
        return TrainingParts(
            tokenizer=self.tokenizer,
            built=self.built,
            objective=objective,
            batches=batches,
            validation=self._open_evaluator(valid, objective),
            test=self._open_evaluator(test, objective),
            validation_metric="reward" if self.post.draws else "lm_loss",
            has_perplexity=self.post.objective == "sft",
            whole_samples=False,
            flags=self._recorded_flags(),
            states=() if rollouts is None else (rollouts,),
            generate_flags=None if self.post.objective == "reward" else self._generate_flags,
            # `_open_model` has loaded base and adapters of a policy with adapters, so a new run loads nothing more
            has_weights=self._adapted is not None,
            evaluates_first=self.post.eval_on_start,
            samples=self._samples,
        )

    def _recorded_flags(self) -> dict[str, Any]:
        """Return the flags that checkpoints record in addition to the command line's values or in place of them.

        generate.py and exports take the model's context length from the flag --seq-length of a checkpoint. A short
        --max-length must not shorten this context. So the recorded value is the larger of --max-length and the
        --seq-length of the checkpoint from which this run starts.
        """
        assert self._start is not None, "post-training begins with a checkpoint"
        longest = max(self.form.max_length, self._start.record.flags.get("seq_length") or 0)
        checksum = {} if self._adapted is None else {"ref_checksum": self._adapted.settings.checksum}
        return {"seq_length": longest, **checksum}

    def save_adapter(self) -> None:
        """Save the adapters of a LoRA run in PEFT's format to the folder adapter/ of --save.

        Without --lora-r or without --save, nothing is written.
        """
        if self._adapted is not None and self.config.checkpoint.save is not None:
            folder = Path(self.config.checkpoint.save).expanduser() / "adapter"
            save_adapter(self._adapted, folder, self.run.dims, with_head=self.post.objective == "reward")
            self.run.log(f"adapters in PEFT's format: {folder}")

    def _describe_samples(self) -> dict[str, Any]:
        """Return a description of the training and held-out samples, with which a resumed run detects changed data."""
        per_prompt = self.post.passes * self.post.group_size if self.post.draws else 1
        return describe_samples(self.datasets, self._counts, per_prompt=per_prompt)

    def _open_data(self) -> Splits[Any]:
        """Read the training, validation and test data, and return their datasets.

        A dataset is None if its files are not given, or if the run takes no samples of it.
        """
        data, plan = self.config.data, self.plan.batches
        template = load_chat_template(self.form, self.tokenizer)
        held_out, wanted = self.config.evaluation.eval_iters * plan.global_batch_size, plan.dataset_samples
        # With sampled completions, a sample of the dataset is a prompt. The run needs the prompts of all generations up
        # to the one with its last step. Of this last generation it needs all prompts, also if the run ends within it.
        if self.post.draws:
            steps, group = self.post.slices * self.post.passes, self.post.group_size
            consumed = plan.consumed_samples_at((plan.total_iterations - 1) // steps * steps)
            wanted = max(0, consumed) // self.post.passes // group + self.post.slices * plan.global_batch_size // group
        files = (train_paths(self.config), data.valid_data_path, data.test_data_path)
        self._counts = Splits(wanted, held_out, held_out)
        opened = zip(Splits._fields, files, self._counts, strict=True)
        found = Splits(*(self._open(paths, template, n, use) if paths and n else None for use, paths, n in opened))
        self.tokenizer.files = template.files(self.tokenizer.files)  # checkpoints save these files
        # At its end, a run logs a command of tools/generate.py with these flags. A model that has learned from
        # conversations answers only prompts in its chat template, so the command then needs --chat.
        self._generate_flags = "--chat --prompt 'Who are you?'" if template.used else "--prompt 'Call me'"
        return found

    def _spec(self, *, scalar_head: bool | None = None) -> ModelSpec:
        """Return the specification of a model with the policy's architecture.

        Args:
            scalar_head: True for a model with a scalar head, False for one without; None for the scalar head of this
                objective's policy, which exists with reward and ppo.
        """
        spec = self.config.model_spec(self.tokenizer.vocab_size, self.plan.wire)
        headed = self.post.objective in ("reward", "ppo") if scalar_head is None else scalar_head
        # Row lengths vary, because `shortened` in data.py cuts each micro-batch to its longest row
        return dataclasses.replace(spec, scalar_head=headed, varying_sizes=True)

    def _open_model(self) -> ShardedModel:
        """Build the policy; with --lora-r, load its frozen base and add adapters.

        Raises:
            ValueError: the base weights have another checksum than --ref-checksum.
        """
        if self.lora.lora_r is None:
            return build_model(self._spec(), self.run.dims, self.run.device)
        source, record = find_weights(reference_folder(self.post), self.post.ref_ckpt_step, opener=self._opener)
        self._adapted = load_adapted(
            self._spec(),
            self.lora,
            self._frozen_place,
            source,
            record,
            trained=lambda name: name.startswith("scalar_head."),
            keep_reference=self.post.needs_reference,
        )
        found, wanted = self._adapted.settings.checksum, self.post.ref_checksum
        if wanted not in (None, found):
            by_hand = not self.parsed.origins["ref_checksum"].startswith(DEFAULT)
            whose = f"--ref-checksum says {wanted}" if by_hand else f"the adapters were trained on {wanted}"
            where = "; correct --ref-checksum or --load" if by_hand else "; name the right base's folder by --lora-base"
            raise ValueError(f"the base weights in {source.folder.path} have checksum {found}, but {whose}{where}")
        return self._adapted.built

    def _open_objective(self) -> Objective:
        """Build the objective, and the frozen models and the sampler that it needs."""
        post, dims = self.post, self.run.dims
        if post.objective == "sft":
            return LanguageModelLoss(dims, pads=True)
        if post.precompute_ref_log_probs:
            self._precompute_reference()
            return PreferenceLoss(post, dims)
        reference = self._open_reference() if post.needs_reference else None
        if not post.draws:
            return PreferenceLoss(post, dims, reference)
        self.rollouts = self._open_rollouts(reference)
        return PolicyLoss(post, dims, temperature=self._temperature, rollout_metrics=self.rollouts.metrics)

    def _open_evaluator(self, dataset: Any, objective: Objective) -> Validation | None:
        """Return the evaluator of a held-out dataset; None if `dataset` is None."""
        iterations, size = self.config.evaluation.eval_iters, self.plan.batches.global_batch_size
        if dataset is None:
            return None
        if self.rollouts is not None:
            return RewardEvaluator(self.rollouts, dataset, iterations * size)
        parts = (*self.built, self._open_loader(dataset, ramp_up=False), self.run.dims)
        if self.post.objective == "sft":  # average over tokens, because batches have different numbers of tokens
            return Evaluator(*parts, iterations=iterations, batch_size=size)
        return ObjectiveEvaluator(*parts, objective, self.run.log, iterations=iterations, batch_size=size)

    def _open(self, paths: tuple[str, ...], template: Any, count: int, use: str) -> Any:
        """Read one split of the data, and return its dataset, whose class depends on the objective.

        Args:
            paths: files of the split.
            template: chat template of the run.
            count: number of samples of the dataset.
            use: name of the split: "train", "valid" or "test".
        """
        files, log = [Path(path).expanduser() for path in paths], self.run.log
        seed = self.config.launch.seed if use == "train" else None  # held-out samples keep the order of the files
        if self.post.draws:
            longest = self.form.max_length - self.post.max_completion_length
            prompts = read_prompts(files, self.tokenizer, template, max_prompt_length=longest)
            log(f"{use}: {len(prompts):,} prompts")
            return PromptDataset(prompts, num_samples=count, seed=seed)
        pairs, kept = self.post.objective != "sft", cache_dir(self.config.data)
        kinds: dict[str, Any] = {"pairs": pairs, "margins": self.post.objective == "reward"}
        examples = read_examples(files, self.tokenizer, template, self.form, **kinds, cache_dir=kept, log=log)
        make: Any = PreferenceDataset if pairs else functools.partial(SupervisedDataset, packing=self.form.packing)
        pad, max_length = self.tokenizer.eod or 0, self.form.max_length
        return make(examples, num_samples=count, seed=seed, max_length=max_length, pad=pad)

    def _open_loader(self, dataset: Any, *, ramp_up: bool) -> BatchLoader:
        """Return a loader of micro-batches from a dataset of examples or pairs; for objectives without sampling."""
        dims, device = self.run.dims, self.run.device
        make: Callable[..., Any] = functools.partial(make_supervised_batch, packing=self.form.packing)
        if self.post.objective != "sft":
            make = functools.partial(make_pair_batch, ref_logps=dataset.ref_logps)
        make = functools.partial(make, multiple=row_multiple(device, dims))
        parts = (dataset, self.config.data, self.tokenizer, self.plan.batches, dims, device)
        return open_loader(*parts, ramp_up=ramp_up, make_batch=make)

    def _open_rollouts(self, reference: Logps | None) -> RolloutLoader:
        """Return the loader of sampled completions, with reward functions and reward model.

        Args:
            reference: function that computes the reference model's log-probabilities; None without a reference model.
        """
        post, plan, functions = self.post, self.plan.batches, load_reward_functions(self.rewards)
        named = f"--reward-funcs {' '.join(self.rewards.reward_funcs)}"
        check_equal_on_all_ranks(self.run.dims.world, named, digest_of_sources(functions))
        for prompts in (each for each in self.datasets if each is not None):
            check_arguments(functions, prompts.columns)
        reward_model = None
        if post.reward_load is not None:
            reward_model = self._frozen(CheckpointFolder(post.reward_load, "--reward-load"), None, "reward")
        sampler = PolicySampler(
            *self.built,
            self.run.dims,
            self.tokenizer,
            config=dataclasses.replace(self.config.section(SampleConfig), sample_tokens=post.max_completion_length),
            functions=functions,
            seed=self.config.launch.seed,
            at_once=post.rollouts_at_once,
            stopped=lambda: self._stops.caught != 0,
            give_up=functools.partial(self._stops.give_up, self.run.dims),
            base=None if self._adapted is None else self._adapted.base,
        )
        return RolloutLoader(
            sampler,
            self.datasets.train,
            post,
            reward_weights=self.rewards.reward_weights,
            reference=reference,
            reward_model=reward_model,
            max_length=self.form.max_length,
            global_batch_size=plan.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            show=self._show,
            start=(plan.start_iteration, plan.start_samples),
        )

    def _open_reference(self) -> Logps:
        """Build the reference model, and return the function that computes its log-probabilities."""
        if self._adapted is not None:
            return FrozenModel(self.built.model, temperature=self._temperature, is_policy=True).logps
        return self._frozen(reference_folder(self.post), self.post.ref_ckpt_step, "reference").logps

    def _frozen(
        self, folder: CheckpointFolder, iteration: int | None, role: Literal["reference", "reward"]
    ) -> FrozenModel:
        """Load the reference or reward model from a folder of checkpoints.

        Args:
            folder: folder of checkpoints.
            iteration: iteration of the checkpoint; None for the latest.
            role: "reference" or "reward": which of the two models the checkpoint contains.
        """
        weights, store = self.weights, self.weights.weight_store
        if store is not None:  # a folder of --weight-store has one model's files, so each role has its own
            weights = dataclasses.replace(weights, weight_store=str(Path(store) / role))
        return load_frozen(
            self._spec(scalar_head=role == "reward"),
            self._frozen_place,
            weights,
            folder,
            iteration,
            self._opener,
            temperature=self._temperature,
        )

    @functools.cached_property
    def _frozen_place(self) -> FrozenPlace:
        """The device and the process groups for frozen weights, which all frozen models share."""
        return open_frozen_place(self.run.dims, self.run.device, say=self.run.log)

    def _precompute_reference(self) -> None:
        """Compute the reference model's log-probabilities of each dataset of pairs. Then free the reference model."""
        reference = self._open_reference()
        for dataset in (each for each in self.datasets if each is not None):
            self.run.log(f"computing the reference's log-probabilities of {dataset.num_pairs:,} pairs")
            size = self.plan.batches.micro_batch_size
            dataset.ref_logps = logps_of_pairs(reference, dataset, self._frozen_place, size)
        del reference
        gc.collect()  # frees the reference model, whose hooks create reference cycles

    def _show(self, iteration: int, completions: list[dict[str, Any]]) -> None:
        """Write sampled completions to completions.jsonl of the run folder.

        In iterations that have a log line, also write one completion of each prompt to the log.

        Args:
            iteration: iteration of the training step that samples them.
            completions: prompt, text and rewards of all completions of some prompts.
        """
        if self.run.folder is not None:
            for shown in completions:
                rewards = {name: None if math.isnan(x) else x for name, x in shown["rewards"].items()}
                self.run.folder.append("completions.jsonl", {"iteration": iteration, **shown, "rewards": rewards})
        if iteration % self.config.tracking.log_interval == 0 or iteration == 1:
            for prompt, completion, found in (each.values() for each in completions[:: self.post.group_size]):
                given = ", ".join(f"{name} {x:g}" for name, x in found.items())
                self.run.log(f"completion at iteration {iteration} ({given}): {prompt!r} -> {completion!r}")
