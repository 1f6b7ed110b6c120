"""Set up a post-training run before workers start: flags from the checkpoint, the objective's defaults, and checks.

--load PRETRAINED --save MINE    starts from the weights of any checkpoint
--load MINE --save MINE          resumes an interrupted run with bit-identical results
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from megazpp.base.files import errors_as
from megazpp.base.flags import COMMAND_LINE, DEFAULT, in_use, spelling
from megazpp.base.program import Problems
from megazpp.checkpoint.folder import CheckpointFolder, iteration_of
from megazpp.checkpoint.metadata import CheckpointMetadata, check_same_model
from megazpp.checkpoint.read import LoadSource, choose_source, peek, saves_where_it_loads
from megazpp.convert.native import open_tokenizer
from megazpp.data.cache import check_cache_dir
from megazpp.data.dataset import build_tokenizer, cache_dir
from megazpp.data.documents import missing_file
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig
from megazpp.inference.config import SampleConfig
from megazpp.lora.checks import check_adapters, with_adapters
from megazpp.lora.feature import adapter_opener
from megazpp.model.backends import check_products
from megazpp.post_training.chat import load_chat_template
from megazpp.post_training.config import (
    DEFAULT_RATE,
    TAKEN,
    DataFormatConfig,
    PostConfigs,
    PostTrainingConfig,
    post_configs,
)
from megazpp.post_training.formatting import read_examples, read_prompts
from megazpp.post_training.reference import find_frozen, reward_config
from megazpp.post_training.rewards import check_reward_functions
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.run.checkpoint_flags import with_checkpoint_flags, with_resumed_weight_delta
from megazpp.run.flag_checks import check_model
from megazpp.run.start import own_checkpoints
from megazpp.training.batches import BatchPlan

CHECK_SECONDS = 1.0  # time limit for checking lines of data before workers start
# Default of --max-length, as in TRL. A model with fewer positions has the number of its positions as the default.
LONGEST = 1024


def find_start(parsed: ParsedRun, *, restarted: bool) -> tuple[ParsedRun, LoadSource, CheckpointMetadata]:
    """Find the checkpoint that training begins with, and complete the flags from it and with the objective's defaults.

    Args:
        parsed: the flags that the user has given.
        restarted: True if a fault has ended an earlier attempt of this job.
    Returns:
        the completed flags, the checkpoint, and the checkpoint's metadata.
    Raises:
        ValueError: --objective or --load is missing, there is no checkpoint, or flags contradict the checkpoint. Or the
            checkpoint to resume belongs to a run with another --objective, or --load names a reward model although
            --objective is not reward.
    """
    given, objective = parsed.config.checkpoint, post_configs(parsed).training.objective
    # If --save is another folder than --load, take only weights from --load, as with --finetune. `choose_source` makes
    # an exception for a job that is restarted, or queued again: it resumes from its own checkpoints in --save.
    if not saves_where_it_loads(given):
        given = dataclasses.replace(given, finetune=True)
    own = own_checkpoints(given, parsed.config.tracking, restarted=restarted)
    source = choose_source(own, restarted=restarted, opener=adapter_opener(parsed.config.sections))
    earlier = peek(source)
    if source is None or earlier is None:
        assert given.load is not None
        raise ValueError(CheckpointFolder(given.load, "--load").without_checkpoint())
    if source.continues:
        earlier.check_same_objective(objective, source.folder.name)
    if objective != "reward":
        earlier.check_predicts_tokens(source.folder.name)
    parsed = parsed._replace(config=dataclasses.replace(parsed.config, checkpoint=given))
    parsed = with_checkpoint_flags(parsed, earlier, source.folder, TAKEN)
    check_same_model(earlier.flags, parsed.config.model, source.folder.path)
    if source.continues:
        parsed = with_resumed_weight_delta(parsed, earlier, source.folder)
    parsed = _completed(parsed, source, earlier)
    parsed.check_needs()
    return parsed, source, earlier


def check_post_training(config: RunConfig, configs: PostConfigs, plan: BatchPlan) -> None:
    """Raise a ValueError if the flags of post-training contradict each other or the other flags of the run.

    Args:
        config: configs of the run.
        configs: configs of post-training.
        plan: batch sizes of the run.
    """
    post, form = configs.training, configs.form
    ep = config.parallel.expert_model_parallel_size
    if config.model.num_experts is not None and ep > 1 and post.draws:
        raise ValueError(
            f"--expert-model-parallel-size {ep} with --objective {post.objective}: data ranks end their completions at "
            "different times, but experts on other ranks need all of them; use --expert-model-parallel-size 1"
        )
    if (rate := config.model.moe_router_bias_update_rate) and configs.lora.lora_r is not None:
        raise ValueError(
            f"--moe-router-bias-update-rate {rate}: --lora-r {configs.lora.lora_r} freezes the model with its routing "
            "biases; leave one of these flags out"
        )
    if config.data.mock_data or config.data.text_path:
        raise ValueError("--text-path and --mock-data are for pretraining: give JSON lines or Parquet by --data-path")
    if form.packing and post.objective != "sft":
        raise ValueError(f"--packing is for --objective sft, not {post.objective}: leave it out")
    streams, lora = configs.weights.packs and not post.reward_load, configs.lora.lora_r is not None
    check_adapters(configs.lora, config)
    if config.values().get("save_weight_patches") is not None and (lora or post.objective == "reward"):
        asked = f"--lora-r {configs.lora.lora_r}" if lora else "--objective reward"
        raise ValueError(
            f"--save-weight-patches with {asked}: weight patches need a policy whose weights are all trained; leave "
            "one of these flags out"
        )
    if config.zero.optimizer_cpu_offload and lora:
        raise ValueError(
            f"--optimizer-cpu-offload does not support --lora-r {configs.lora.lora_r}: leave one of them out"
        )
    if streams and (lora or not post.needs_reference):
        bits = f"--weight-bits {configs.weights.weight_bits}"
        given = (
            bits if configs.weights.weights_device == "device" else f"--weights-device {configs.weights.weights_device}"
        )
        raise ValueError(
            f"{given} is for the weights of a reference or reward model that is loaded beside the policy, but this run "
            "loads none: leave the flag out (with --lora-r the reference is the base)"
        )
    if not post.draws:
        return
    if not (configs.rewards.reward_funcs or post.reward_load):
        raise ValueError(f"--objective {post.objective} needs --reward-funcs or --reward-load, which give the rewards")
    if config.batches.rampup_batch_size is not None:
        raise ValueError(f"--rampup-batch-size is not supported by --objective {post.objective}: leave it out")
    if config.section(SampleConfig).sample_temperature == 0.0:
        raise ValueError("--sample-temperature 0.0: all completions of a prompt would be equal; give a positive one")
    if not post.max_completion_length < form.max_length:
        raise ValueError(
            f"--max-completion-length {post.max_completion_length} leaves no room for a prompt within the "
            f"{form.max_length} tokens of --max-length (by default at most --max-position-embeddings): give a smaller "
            "--max-completion-length or a larger --max-length"
        )
    size = plan.global_batch_size
    batch = in_use(config.batches, "global_batch_size", size)
    if size * post.slices % post.group_size:
        raise ValueError(
            f"{batch} x --steps-per-generation {post.slices} is not divisible by --num-generations {post.group_size}: "
            "a generation must have all completions of each of its prompts; change one of these flags"
        )


def check_files(parsed: ParsedRun, earlier: CheckpointMetadata) -> None:
    """Check before workers start that all files that the flags name can be used; read data for about a second.

    `check_inputs` in data/dataset.py does the same for pretraining.

    Args:
        parsed: the flags, completed by `find_start`.
        earlier: metadata of the checkpoint that training begins with.
    Raises:
        ValueError: a checkpoint, tokenizer, chat template, reward function or line of data is missing or unsuitable.
    """
    config, (post, form, rewards, lora, _), problems = parsed.config, post_configs(parsed), Problems()
    gives_reference = not parsed.origins["ref_load"].startswith(DEFAULT)  # True if the user has given --ref-load
    # True if --ref-load names a checkpoint to check: of the reference model, or with --lora-r of the frozen base model
    asked = lora.lora_r is not None or post.needs_reference or gives_reference
    with problems:
        check_reward_functions(rewards)
    with problems:
        check_cache_dir(cache_dir(config.data))
    with problems:
        tokenizer = parsed.tokenizer or build_tokenizer(config.tokenizer, config.data, log=lambda line: None)
        with problems:
            if asked:
                folder, opener = reference_folder(post), adapter_opener(config.sections)
                source, record = find_frozen(folder, post.ref_ckpt_step, opener, scalar_head=False)
                if post.needs_reference:
                    record.check_predicts_tokens(folder.name)
                check_same_model(record.flags, config.model, source.checkpoint)
                if record.vocab_size != earlier.vocab_size:
                    sizes = f"{record.vocab_size} tokens, but the policy's has {earlier.vocab_size}"
                    remedy = "give a reference model with the policy's tokenizer"
                    raise ValueError(f"{folder.name}: the reference model's tokenizer has {sizes}; {remedy}")
                if gives_reference:
                    check_same_tokens(folder, record, tokenizer)
        with problems:
            if post.reward_load is not None:
                check_reward_model(config, post.reward_load, tokenizer)
        _check_data(config, post, form, tokenizer)
    problems.raise_all()


def _check_data(config: RunConfig, post: PostTrainingConfig, form: DataFormatConfig, tokenizer: Tokenizer) -> None:
    """Raise a ValueError if the chat template or the first lines of the data cannot be used.

    Args:
        config: configs of the run, with the paths of the data.
        post: flags of the objective.
        form: flags of the data format.
        tokenizer: tokenizer of the policy.
    """
    problems = Problems()
    with problems:
        template = load_chat_template(form, tokenizer)
    uses = [paths for paths in (train_paths(config), config.data.valid_data_path, config.data.test_data_path) if paths]
    for paths in uses:
        files, seconds = [Path(path).expanduser() for path in paths], CHECK_SECONDS / len(uses)
        with problems, contextlib.suppress(TimeoutError):
            if missing := [missing_file(file) for file in files if not file.exists()]:
                raise ValueError("\n".join(missing))
            if problems:  # without a template, or after errors in other data, check only that the files exist
                continue
            if post.draws:
                longest = form.max_length - post.max_completion_length
                read_prompts(files, tokenizer, template, max_prompt_length=longest, seconds=seconds)
            else:
                kinds: dict[str, Any] = {"pairs": post.objective != "sft", "margins": post.objective == "reward"}
                read_examples(files, tokenizer, template, form, **kinds, cache_dir=None, seconds=seconds)
    problems.raise_all()


def check_reward_model(config: RunConfig, load: str, tokenizer: Tokenizer) -> None:
    """Raise a ValueError if a reward model cannot score the policy's token ids on the ranks of this run.

    Args:
        config: configs of the run.
        load: value of --reward-load, the folder of the reward model's checkpoints.
        tokenizer: the policy's tokenizer.
    """
    folder, parallel = CheckpointFolder(load, "--reward-load"), config.parallel
    _, record = find_frozen(folder, None, adapter_opener(config.sections), scalar_head=True)
    own = check_same_tokens(folder, record, tokenizer)
    # A reward model may have more tokens than the policy. If its checkpoint has no tokenizer to compare, the numbers of
    # tokens must be equal: this is then the only sign that both models have the same tokens.
    if record.vocab_size < (drawn := tokenizer.vocab_size) or (own is None and record.vocab_size != drawn):
        raise ValueError(
            f"{folder.name}: the reward model has {record.vocab_size} tokens, but the policy's tokenizer has {drawn}; "
            "give a reward model that was trained with the policy's tokenizer"
        )
    with errors_as(folder.name):
        model, tp = reward_config(config.model, record), parallel.tensor_model_parallel_size
        check_model(model, parallel, config.data.seq_length or 1)
        check_products(model, tp, "cpu", bf16=config.precision.bf16)


def check_same_tokens(folder: CheckpointFolder, record: CheckpointMetadata, tokenizer: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer in a reference or reward model's checkpoint, after a comparison with the policy's tokenizer.

    The result is None if the checkpoint has no tokenizer, so that nothing can be compared.

    Args:
        folder: folder of the model's checkpoints.
        record: metadata of the checkpoint.
        tokenizer: the policy's tokenizer.
    Raises:
        ValueError: a token id has another text than in the policy's tokenizer, or texts are split into other tokens.
    """
    remedy = "give a model that was trained with the policy's tokenizer"
    own = open_tokenizer(folder.path, record, TokenizerConfig(), lambda line: None)
    if own is not None and own.identity != tokenizer.identity:
        for token in range(min(own.vocab_size, tokenizer.vocab_size)):
            if (there := own.decode_with_specials([token])) != (here := tokenizer.decode_with_specials([token])):
                pieces = f"token {token} is {there!r}, and {here!r} in the policy's"
                raise ValueError(f"{folder.name}: its tokenizer is not the policy's: {pieces}; {remedy}")
        if type(own) is type(tokenizer) and own.rules != tokenizer.rules:
            rules = "its tokens are the policy's, but its tokenizer splits texts by other merges or rules"
            raise ValueError(f"{folder.name}: {rules}; {remedy}")
    return own


def train_paths(config: RunConfig) -> tuple[str, ...]:
    """Return the paths of the training data: --train-data-path if it is given, otherwise --data-path."""
    return config.data.train_data_path or config.data.data_path


def _completed(parsed: ParsedRun, source: LoadSource, earlier: CheckpointMetadata) -> ParsedRun:
    """Complete the flags of a post-training run: add the objective's defaults, and the reference model's checkpoint.

    With --lora-r, the reference model's checkpoint is the checkpoint of the frozen base model.

    Args:
        parsed: the flags, with the architecture of the checkpoint.
        source: the checkpoint that training begins with.
        earlier: metadata of this checkpoint.

    Raises:
        ValueError: a given flag contradicts the objective or the checkpoint.
    """
    config, (post, form, _, lora, _) = parsed.config, post_configs(parsed)
    assert post.objective is not None
    lora = with_adapters(lora, parsed, earlier.flags if source.continues else None, source.folder.name)
    if source.continues and not post.needs_reference:
        lora = dataclasses.replace(lora, lora_load=None)
    if post.objective != "sft" and lora.lora_dropout > 0.0:
        if "lora_dropout" in parsed.origins:
            raise ValueError(
                f"--lora-dropout {lora.lora_dropout}: --objective {post.objective} does not use dropout; leave it out"
            )
        # The user has not given --lora-dropout: the value comes from the settings of the loaded adapters
        lora = dataclasses.replace(lora, lora_dropout=0.0)
    if (steps := config.values().get("diloco_steps")) is not None:
        raise ValueError(f"--diloco-steps {steps} is for pretraining, not --objective {post.objective}: leave it out")
    if "seq_length" in parsed.origins:
        raise ValueError(f"--seq-length {config.data.seq_length}: post-training uses --max-length instead")
    for name in ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        # Refuse these flags only on the command line: the file args.txt of a pretraining run, from which a user may
        # take flags, has a line for every flag
        if parsed.origins.get(name) == COMMAND_LINE:
            raise ValueError(
                f"--{name.replace('_', '-')} is for pretraining: in post-training each sample is a document; leave "
                "the flag out"
            )
    if "max_length" not in parsed.origins:
        form = dataclasses.replace(form, max_length=min(LONGEST, config.model.max_position_embeddings or LONGEST))
    longest = config.model.max_position_embeddings
    if longest is not None and form.max_length > longest:
        raise ValueError(
            f"--max-length {form.max_length} is longer than --max-position-embeddings {longest}: give at most that"
        )
    # The value that each of these flags gets if the user has not given it
    free = {
        "lr": DEFAULT_RATE[post.objective],
        "ref_load": str(source.folder.path.resolve()),
        "ref_ckpt_step": earlier.progress.iteration,
    }
    if source.continues:  # a resumed run keeps the reference model of its first start
        names = ("ref_load", "ref_ckpt_step", "ref_checksum")
        free |= {name: earlier.flags[name] for name in names if name in earlier.flags}
        # If the checkpoint has only adapters, the reference model is their base. Its folder is the recorded one, or
        # the folder of --lora-base in which the base was found.
        if bases := source.opener.find_bases(source.folder.path, earlier):
            free |= {"ref_load": str(bases[0].parent.resolve()), "ref_ckpt_step": iteration_of(bases[0])}
    if post.ref_load is not None:
        if not post.needs_reference:
            raise ValueError(
                f"--ref-load {post.ref_load}: the loss of --objective {post.objective} uses no reference; leave "
                "--ref-load out"
            )
        if lora.lora_r is not None:
            raise ValueError(
                f"--ref-load {post.ref_load}: with --lora-r the reference is the model of --load, with the adapters of "
                "--lora-load; leave --ref-load out"
            )
        # The iteration in `free` belongs to another folder. The default for the folder of --ref-load is the latest.
        free.pop("ref_ckpt_step")
    values: dict[str, Any] = {name: value for name, value in free.items() if name not in parsed.origins}
    origins = parsed.origins | dict.fromkeys(values, f"{DEFAULT} of {post.objective}")
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(config.model, name)
        if value != 0.0 and parsed.origins.get(name) == COMMAND_LINE:
            raise ValueError(
                f"{spelling(config.model, name)} {value}: post-training does not use dropout; leave it out"
            )
    values |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "seq_length": form.max_length}
    # The routing biases of experts stay constant, as in transformers, unless the command line gives the rate
    if parsed.origins.get("moe_router_bias_update_rate") != COMMAND_LINE:
        values["moe_router_bias_update_rate"] = 0.0

    def filled(part: Any) -> Any:
        """Return a copy of a config. Each field with a key in `values` has the value from `values` in this copy."""
        names = {field.name for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **{name: value for name, value in values.items() if name in names})

    changed = {name: filled(getattr(config, name)) for name in ("schedule", "optimizer", "model", "data")}
    config = dataclasses.replace(config, **changed).with_section(filled(config.section(SampleConfig)))
    configs = post_configs(parsed)._replace(training=filled(post), form=form, lora=lora)
    return parsed._replace(config=config, extra=tuple(configs), origins=origins)


def reference_folder(post: PostTrainingConfig) -> CheckpointFolder:
    """Return the folder of the reference model's checkpoints, which `find_start` has set if the user has not."""
    assert post.ref_load is not None
    return CheckpointFolder(post.ref_load, "--ref-load")
