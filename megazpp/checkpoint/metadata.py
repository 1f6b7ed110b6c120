"""run.json of a checkpoint: all that is no tensor. Training's progress, the flags, and the run's identity.

Also the questions that a run asks before it goes on from it: is this the same model, the same schedule, the same data?
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from megazpp.base.files import DamagedError
from megazpp.base.flags import wrong_types
from megazpp.base.program import in_words
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, iteration_of
from megazpp.data.identity import data_changes, same_sources, what_follows
from megazpp.model.config import GPTConfig
from megazpp.optim.schedule import Schedule

FORMAT = 2  # 1: without the tokenizer


class TrainingProgress(NamedTuple):
    """Training's progress, which a resumed run continues from.

    Attributes:
        iteration: steps done.
        consumed_samples: samples those steps were given.
        scheduled_samples: samples of the steps that were taken; skipped steps do not move the schedule. In a run of
            --train-iters all steps count with the current global batch size.
        micro_batches: of one rank, over all steps.
        stop_reason: why the loop ended before its last iteration, if it did.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    micro_batches: int = 0
    stop_reason: str | None = None


class SavedAdapters(NamedTuple):
    """The LoRA adapters that a checkpoint holds in place of all weights.

    Attributes:
        rank, alpha, dropout: LoRA's r, alpha, and dropout probability.
        targets: names of the layers that have adapters; None for the default layers.
        base: folder of the checkpoints that the adapters were trained on.
        base_iteration: iteration of the base; None for the latest.
        base_checksum: checksum of the base's weights, see checkpoint/weights.py.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...] | None
    base: str
    base_iteration: int | None
    base_checksum: str


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """A checkpoint's description of its run.

    Attributes:
        groups: the optimizer's values per parameter group.
        guard: the state of what looks for loss spikes.
        schedule: `Schedule.state_dict()`.
        flags: every flag's value by field name, see `found_from_anywhere`; and `SAMPLES`.
        tokenizer: its identity; None in format 1, or if none is known.
        tokenizer_folder: beside the checkpoint, see `write_tokenizer`; None for a tokenizer without files.
        layout: sizes of the axes, and the cluster; empty for a model that was converted.
        run_dir, wandb_run_id: where the run is recorded.
        torch: the version that wrote it.
    """

    progress: TrainingProgress
    scaler: dict[str, Any]
    groups: list[dict[str, Any]]
    schedule: dict[str, Any]
    flags: dict[str, Any]
    vocab_size: int
    layout: dict[str, Any]
    tokenizer: str | None = None
    tokenizer_folder: str | None = None
    guard: dict[str, Any] = field(default_factory=dict)
    has_optimizer: bool = True
    has_rng: bool = True
    run_dir: str | None = None
    wandb_run_id: str | None = None
    torch: str = ""
    format: int = field(default=FORMAT)

    @property
    def model(self) -> GPTConfig:
        """The shape of the saved model; other fields have their defaults."""
        return GPTConfig(**shape_of(self.flags))

    @property
    def adapters(self) -> SavedAdapters | None:
        """The adapters of a LoRA run; None where the checkpoint holds all weights."""
        if self.flags.get("lora_r") is None:
            return None
        names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
        rank, alpha, dropout, targets = (self.flags[name] for name in names)
        base, iteration, checksum = (self.flags[name] for name in ("ref_load", "ref_ckpt_step", "ref_checksum"))
        return SavedAdapters(rank, alpha, dropout, targets and tuple(targets), base, iteration, checksum)

    @property
    def is_reward_model(self) -> bool:
        """True if the model was trained to score texts by its scalar head."""
        return self.flags.get("objective") == "reward"

    @property
    def adds_special_tokens(self) -> bool | None:
        """True if texts got special tokens; None in checkpoints that are older than the flag."""
        return self.flags.get("add_special_tokens")

    def as_json(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(values | {"progress": self.progress._asdict()}, indent=2, default=str) + "\n"


def read_record(checkpoint: Path) -> CheckpointMetadata:
    """Read a checkpoint's description of its run, every value checked for its type.

    Raises:
        DamagedError: it cannot be read, or is not that of the iteration that the checkpoint's name says.
        ValueError: a later version has written it.
    """
    path = checkpoint / RECORD
    try:
        values = json.loads(path.read_bytes())
        if values["format"] <= FORMAT:
            record = CheckpointMetadata(**values | {"progress": TrainingProgress(**values["progress"])})
            Schedule(**record.schedule)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path} cannot be read: {in_words(error)}") from error
    if values["format"] > FORMAT:
        raise ValueError(f"{path} has format {values['format']}, this version knows {FORMAT}")
    problems = wrong_types(CheckpointMetadata, vars(record)) or [
        *wrong_types(TrainingProgress, record.progress._asdict()),
        *wrong_types(GPTConfig, record.flags),
        *wrong_types(Schedule, record.schedule),
    ]
    if problems:
        raise DamagedError(f"{path}: {'; '.join(problems)}")
    named = iteration_of(checkpoint)
    if named is not None and named != record.progress.iteration:
        raise DamagedError(f"{path} is of iteration {record.progress.iteration}, the folder's name says {named}")
    return record


def rows_problem(record: CheckpointMetadata, rows: int) -> str | None:
    """Return what is wrong with so many rows of a vocabulary's matrix, if anything: runs pad it, conversions do not."""
    if rows == record.vocab_size or (record.layout and rows > record.vocab_size):
        return None
    hint = "" if record.layout else "; convert it again: rows decide, and the tokenizer's tokens did when it was made"
    return f"has {rows} rows for {record.vocab_size} tokens{hint}"


# Flags that decide the shapes and the meaning of the weights.
_SHAPE_FLAGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings", "position_embedding_type"),
    *("use_rotary_position_embeddings", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor"),
    *("rope_scaling_original_length", "rotary_seq_len_interpolation_factor", "rope_type", "rotary_scaling_factor"),
    *("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_attention_factor"),
    *("no_rope_freq", "window_size", "window_attn_skip_freq", "qk_layernorm_all_heads", "norm_after_block"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "qk_layernorm"),
    *("normalization", "norm_epsilon", "apply_layernorm_1p", "swiglu", "squared_relu", "openai_gelu"),
    *("untie_embeddings_and_output_weights", "disable_bias_linear", "add_qkv_bias"),
    *("num_experts", "moe_layer_freq", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_router_score_function", "moe_router_pre_softmax"),
    "moe_router_topk_scaling_factor",
)
# The property of GPTConfig that such a flag ends up in, where it has another name.
_PROPERTIES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "dense_ffn_size",
    "moe_layer_freq": "expert_layers",
    "moe_ffn_hidden_size": "expert_ffn_size",
    "num_attention_heads": "heads",
    "kv_channels": "head_size",
    "num_query_groups": "query_groups",
    "position_embedding_type": "positions",
    "use_rotary_position_embeddings": "positions",
    "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling",
    "no_rope_freq": "unrotated",
    "window_size": "attention_span",
    "window_attn_skip_freq": "attention_span",
    "untie_embeddings_and_output_weights": "tied",
    "disable_bias_linear": "linear_bias",
    "add_qkv_bias": "qkv_bias",
}
SHAPE = {name: _PROPERTIES.get(name, name) for name in _SHAPE_FLAGS}
SAMPLES = "samples"  # among the flags: batch size, ranks, and the description of data/identity.py
IMPORTED_FROM = "imported_from"  # among the flags of an import: the Hugging Face folder that has the same weights
SCORE_PAD = "score_pad"  # among the flags of an imported reward model: transformers scores the last token but this one
PLACES = ("data_path", "text_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data", "split")
TEXT = ("chat_template", "chat_template_kwargs", "system_prompt", "eos_token", "add_special_tokens")
DATA = (  # flags that samples follow from
    *("seed", *PLACES, *TEXT, "seq_length", "train_iters", "train_samples", "rampup_batch_size", "eval_iters"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    *("packing", "assistant_only_loss", "completion_only_loss"),
    *("num_generations", "steps_per_generation", "num_iterations", "num_ppo_epochs", "num_mini_batches"),
)


def shape_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of GPTConfig that --use-checkpoint-args takes over."""
    return {name: flags[name] for name in SHAPE if name in flags}


def check_same_model(saved: Mapping[str, Any], model: GPTConfig, where: Path) -> None:
    """Raises ValueError naming the flags in which the model differs from the one that `saved` flags describe."""
    other = GPTConfig(**shape_of(saved))
    names = [name for name, derived in SHAPE.items() if getattr(model, derived) != getattr(other, derived)]
    if names:
        own = dataclasses.asdict(model)
        names = [name for name in names if own[name] != saved.get(name)] or names  # not what follows from another flag
        raise ValueError(
            f"{_differences(names, own, saved, where)}; "
            "--use-checkpoint-args takes the model's shape from the checkpoint"
        )


def check_same_vocabulary(record: CheckpointMetadata, vocab_size: int, where: Path) -> None:
    """Raises ValueError if the tokenizer in use has another number of tokens."""
    if record.vocab_size != vocab_size:
        raise ValueError(f"the tokenizer has {vocab_size} tokens, that of {where} had {record.vocab_size}")


def check_same_optimizer(saved: Mapping[str, Any], flags: Mapping[str, Any], where: Path) -> None:
    """Raises ValueError if the moments are another optimizer's; of AdamW and Muon each takes what it can use."""
    pair = {saved.get("optimizer"), flags["optimizer"]}
    if pair == {"adam", "muon"} and saved.get("optimizer_backend") == flags["optimizer_backend"]:
        return
    if names := [name for name in ("optimizer", "optimizer_backend") if saved.get(name) != flags[name]]:
        raise ValueError(f"{_differences(names, flags, saved, where)}; --no-load-optim begins with new moments")


def found_from_anywhere(flags: Mapping[str, Any]) -> dict[str, Any]:
    """`flags` with absolute paths of data and tokenizer, so that programs in other folders find them."""

    def absolute(value: Any) -> Any:
        """A path, or the .bin and .idx that it is the prefix of; weights and names of what is no file stay."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(absolute, value))
        if not isinstance(value, str) or value == "":
            return value
        path = Path(value).expanduser()
        return str(path.resolve()) if path.exists() or path.with_name(path.name + ".idx").exists() else value

    names = [name for name in flags if name.endswith(("_path", "_file", "tokenizer_model", "chat_template"))]
    return {**flags, **{name: absolute(flags[name]) for name in names}}


def data_notes(
    saved: Mapping[str, Any],
    flags: Mapping[str, Any],
    where: Path,
    *,
    consumed: int = 0,
    batch_sizes: tuple[int | None, int | None] = (None, None),
) -> list[str]:
    """A line if something that samples or their order follow from is not as before; it says what follows.

    Args:
        saved, flags: of the checkpoint and of this run.
        consumed: samples consumed so far.
        batch_sizes: global batch sizes of this run and of the checkpoint's.
    """
    own: dict[str, Any] = {name: list(x) if isinstance(x, tuple) else x for name, x in flags.items()}  # as JSON has it
    before, now, (size, earlier_size) = saved.get(SAMPLES, {}), own.get(SAMPLES, {}), batch_sizes
    # the same tokens, perhaps of files with other names, or of a template that the checkpoint has kept
    passed_over = (*PLACES, *TEXT) if same_sources(before, now) else ()
    names = [name for name in DATA if name in saved and name not in passed_over and saved[name] != own.get(name)]
    changes = _changes(names, flags, saved)
    if None not in batch_sizes and size != earlier_size:
        by = "" if flags.get("global_batch_size") else f" (--micro-batch-size x {now.get('ranks')} data ranks)"
        changes.append(f"the global batch size is {size}{by}, was {earlier_size}")
    changes += data_changes(before, now, changes)
    return [f"{', '.join(changes)} in {where}: {what_follows(before, now, consumed)}"] if changes else []


def batch_size_of(record: CheckpointMetadata) -> int | None:
    """Return the global batch size of a run after any ramp-up; None where nothing says it, as in a converted model."""
    flags, layout = record.flags, record.layout
    size = flags.get(SAMPLES, {}).get("global_batch_size") or flags.get("global_batch_size")
    if size is None and layout and flags.get("micro_batch_size"):  # of a version that did not write it down
        ranks = math.prod(layout.get(axis, 1) for axis in ("island", "replicate", "cross", "local"))
        size = flags["micro_batch_size"] * ranks // flags.get("context_parallel_size", 1)
    return size


def schedule_ratio(saved: CheckpointMetadata, own: CheckpointMetadata) -> Fraction:
    """Return by how much the checkpoint's position on the schedule is multiplied when `own` resumes from it.

    The position of a run of --train-samples is in samples, that of a run of --train-iters in steps times the current
    global batch size. So the schedule of --train-iters ends with the last step, whatever the batch size was before.
    """
    lengths = []
    for record in (own, saved):
        length = saved.progress.consumed_samples
        if record.flags.get("train_iters") is not None:
            length = saved.progress.iteration * (batch_size_of(record) or 0)
        elif record.flags.get("train_samples") is None:
            return Fraction(1)
        lengths.append(length)
    return Fraction(*lengths) if all(lengths) else Fraction(1)


def describe_sizes(record: CheckpointMetadata) -> str:
    """Name the ranks and the batch sizes of a run, from which its schedule counts samples."""
    names = ("micro_batch_size", "global_batch_size")
    sizes = (f"--{name.replace('_', '-')} {record.flags.get(name)}" for name in names)
    return f"{math.prod(record.layout.values())} rank(s), {', '.join(sizes)}"


def agreed_schedule(
    saved: Mapping[str, Any],
    schedule: Schedule,
    config: CheckpointConfig,
    where: Path,
    *,
    ratio: Fraction = Fraction(1),
    sizes: str = "",
) -> Schedule:
    """The schedule to go on with: Megatron's rule; raises ValueError if they differ and no flag says whose counts.

    Args:
        ratio: see `schedule_ratio`.
        sizes: a line on ranks and batch sizes, where they may be why.
    """
    own = schedule.state_dict()
    if config.override_opt_param_scheduler or (dict(saved) == own and ratio == 1):
        return schedule
    if config.use_checkpoint_opt_param_scheduler:
        return Schedule(**saved).stretched(ratio)
    differ = [name for name in own if own[name] != saved.get(name)]
    lines = [f"the schedule's {name.replace('_', ' ')} is {own[name]}, in {where} {saved.get(name)}" for name in differ]
    if ratio != 1:
        lines.append(f"a step of the schedule has {float(ratio):g} times the samples that it had in {where}")
    raise ValueError(
        "\n".join([*lines, sizes] if sizes else lines)
        + "\n--override-opt_param-scheduler goes on with this run's values, "
        "--use-checkpoint-opt_param-scheduler with the checkpoint's"
    )


def _differences(names: Iterable[str], now: Mapping[str, Any], saved: Mapping[str, Any], where: Path) -> str:
    return f"{', '.join(_changes(names, now, saved))} in {where}"


def _changes(names: Iterable[str], now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')} is {now[name]}, was {saved.get(name)}" for name in names]
