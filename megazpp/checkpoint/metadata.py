"""The metadata of a checkpoint, stored in run.json: everything except the tensors.

The metadata contains the training progress, the flags, and the identity of the run. Functions of this file compare it
with a run that loads the checkpoint: whether both have the same model, optimizer, learning-rate schedule and data.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from megazpp.base.files import DamagedError, read_small_file
from megazpp.base.flags import shown, wrong_types
from megazpp.base.program import in_words
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, iteration_of
from megazpp.data.identity import data_changes, same_sources, what_follows
from megazpp.model.config import GPTConfig
from megazpp.optim.schedule import Schedule, TrainingProgress

FORMAT = 2  # version of the format of run.json that this program writes and reads
MOST = 2**60  # largest number of samples or training steps that run.json may have; sums then fit in 64 bits


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The metadata of a checkpoint, which is the content of run.json.

    Attributes:
        progress: training progress at the save.
        scaler: state of the loss scaler, from its `state_dict`.
        groups: for each parameter group, values that the optimizer stores in the group, such as apex's step count.
        schedule: learning-rate schedule, as `Schedule.state_dict()`.
        flags: value of every flag by field name, with absolute paths (see `found_from_anywhere`). The dictionary also
            has entries that are not flags: `SAMPLES`, `IMPORTED_FROM` and `SCORE_PAD`.
        vocab_size: number of tokens of the tokenizer, without the padding of the embedding matrix.
        layout: sizes of the mesh axes and of the cluster by name; empty for a converted model.
        tokenizer: identity of the tokenizer, equal for tokenizers that give equal ids; None if it is unknown.
        tokenizer_folder: name of the tokenizer's folder next to the checkpoint (see `write_tokenizer`); None for a
            tokenizer without files.
        guard: state of the detector of loss spikes; {} without a detector.
        has_optimizer: True if the checkpoint has optimizer states.
        has_rng: True if the checkpoint has states of random generators.
        run_dir: run folder, with the logs of the run; None if the run has none.
        wandb_run_id: id of the run in Weights & Biases; None if the run does not log there.
        torch: version of torch that has written the checkpoint.
        format: version of the format of run.json.
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
        """The config of the saved model. Fields that affect neither shapes nor outputs have their defaults."""
        return GPTConfig(**shape_of(self.flags))

    @property
    def is_reward_model(self) -> bool:
        """True if the saved model is a reward model, which scores texts with a scalar head."""
        return self.flags.get("objective") == "reward"

    def check_same_objective(self, objective: str | None, name: str) -> None:
        """Raise a ValueError if a run that would resume this checkpoint trains with another objective.

        The states of the optimizer and the iteration number belong to one objective.

        Args:
            objective: value of the run's --objective; None for pretraining.
            name: flag that names the folder of the checkpoint, with its value, for the message.
        """
        saved = self.flags.get("objective")
        if saved != objective:
            theirs, own = (f"--objective {each}" if each else "pretraining" for each in (saved, objective))
            anew = "another folder by --save" + ("" if objective else " and --finetune")
            raise ValueError(
                f"{name} has checkpoints of a run of {theirs}, which {own} cannot resume: to start a new run with "
                f"their weights, give {anew}"
            )

    def check_predicts_tokens(self, name: str) -> None:
        """Raise a ValueError if the saved model is a reward model, whose output layer is missing or not trained.

        Args:
            name: flag that names the folder of the checkpoint, with its value, for the message.
        """
        if self.is_reward_model:
            raise ValueError(
                f"{name} is a reward model, which scores texts and cannot predict tokens: give a language model, such "
                "as the model with which the training of the reward model began"
            )

    @property
    def adds_special_tokens(self) -> bool:
        """The value of --add-special-tokens in the run that wrote the checkpoint."""
        return bool(self.flags.get("add_special_tokens", True))

    def as_json(self) -> str:
        """Return the metadata as the text of run.json."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(values | {"progress": self.progress._asdict()}, indent=2, default=str) + "\n"


def read_record(checkpoint: Path) -> CheckpointMetadata:
    """Read the metadata of a checkpoint from its run.json, and check the type of every value.

    Args:
        checkpoint: folder of one checkpoint.
    Raises:
        DamagedError: run.json cannot be read, a value has a wrong type, or the iteration in run.json differs from the
            iteration in the folder's name.
        ValueError: run.json has the format of another version of this program.
    """
    # ---- parse run.json
    path = checkpoint / RECORD
    try:
        values = json.loads(read_small_file(path))
        is_readable = int(values["format"]) == FORMAT
        if is_readable:
            record = CheckpointMetadata(**values | {"progress": TrainingProgress(**values["progress"])})
            Schedule(**record.schedule)
    except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read, so the checkpoint cannot be loaded: {in_words(error)}") from error
    if not is_readable:
        raise ValueError(
            f"{path} has format {values['format']}, but this version reads only format {FORMAT}: load the checkpoint "
            "with the version that has written it"
        )
    # ---- check the types and sizes of all values, and compare the iteration with the folder's name
    problems = wrong_types(CheckpointMetadata, vars(record)) or [
        *wrong_types(TrainingProgress, record.progress._asdict()),
        *wrong_types(GPTConfig, record.flags),
        *wrong_types(Schedule, record.schedule),
    ]
    numbers = [(name, x) for name, x in record.progress._asdict().items() if name != "stop_reason" and not problems]
    lowest = {"token_offset": -MOST}  # this number is negative after a resume with a longer --seq-length
    problems += [f"{name} is {shown(x)}" for name, x in numbers if not lowest.get(name, 0) <= x <= MOST]
    if problems:
        raise DamagedError(f"{path}: {'; '.join(problems)}; the checkpoint is damaged, so use another one")
    named = iteration_of(checkpoint)
    if named is not None and named != record.progress.iteration:
        raise DamagedError(
            f"{path} is of iteration {record.progress.iteration}, but the folder's name says {named}: give the folder "
            "of the checkpoint its original name"
        )
    return record


def rows_problem(record: CheckpointMetadata, rows: int) -> str | None:
    """Return why an embedding or output matrix of `rows` rows does not fit a checkpoint's vocabulary; None if it fits.

    A training run may pad these matrices with rows beyond the vocabulary. A converted model, whose metadata has an
    empty `layout`, has exactly one row per token. The text is the end of a message that begins with the matrix's name.
    """
    if rows == record.vocab_size or (record.layout and rows > record.vocab_size):
        return None
    return f"has {rows} rows for {record.vocab_size} tokens"


# SHAPE has the flags that define the model's shape, by field name. The value of an entry is the name of the property of
# GPTConfig that `check_same_model` compares: the field itself, or a property that the program derives from this field
# (`FlagSpec.shape`).
_SPECS = {field.name: field.metadata["flag"] for field in dataclasses.fields(GPTConfig)}
SHAPE = {name: name if spec.shape is True else spec.shape for name, spec in _SPECS.items() if spec.shape}
# Three keys in `CheckpointMetadata.flags` are not flags. Their values are:
SAMPLES = "samples"  # batch size, number of data ranks, and a description of the data (data/identity.py)
IMPORTED_FROM = "imported_from"  # path of the Hugging Face folder from which the model was converted
# Id of the padding token of a converted reward model. The score of a text is the model's output at the last token that
# is not the padding token.
SCORE_PAD = "score_pad"
# Flags that determine the training samples or their order. `data_notes` compares them when a run resumes. PLACES has
# the flags that name the data, and TEXT has the flags that change how a text is tokenized.
PLACES = ("data_path", "text_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data", "split")
TEXT = ("chat_template", "chat_template_kwargs", "system_prompt", "eos_token", "add_special_tokens")
DATA = (
    *("seed", *PLACES, *TEXT, "seq_length", "max_length", "train_iters", "train_samples"),
    *("rampup_batch_size", "eval_iters"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    *("packing", "assistant_only_loss", "completion_only_loss"),
    *("num_generations", "steps_per_generation", "num_iterations", "num_ppo_epochs", "num_mini_batches"),
)


def shape_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that define the checkpoint's model shape, by field name. --use-checkpoint-args copies them."""
    return {name: flags[name] for name in SHAPE if name in flags}


def check_same_model(saved: Mapping[str, Any], model: GPTConfig, where: Path) -> None:
    """Raise ValueError if a run's model has another shape than the checkpoint's. The message names the changed flags.

    Args:
        saved: flags of the checkpoint by field name.
        model: config of the model into which the run loads the checkpoint.
        where: path of the checkpoint, for the message.
    """
    other = GPTConfig(**shape_of(saved))
    names = [name for name, derived in SHAPE.items() if getattr(model, derived) != getattr(other, derived)]
    if names:
        own = dataclasses.asdict(model)
        # The message lists only flags whose own values differ. Other properties in `names` differ only because the
        # program derives them from these flags.
        given = [name for name in names if own[name] != saved.get(name)]
        changes = ", ".join(_changes(given or names, own, saved))
        raise ValueError(
            f"{changes} in {where}; correct the flags, or leave them out to use the checkpoint's values (pretraining "
            "needs --use-checkpoint-args for that)"
        )


def check_same_vocabulary(record: CheckpointMetadata, vocab_size: int, where: Path) -> None:
    """Raise ValueError if the run's tokenizer has another number of tokens than the checkpoint's tokenizer.

    Args:
        record: metadata of the checkpoint.
        vocab_size: number of tokens of the run's tokenizer.
        where: path of the checkpoint, for the message.
    """
    if record.vocab_size != vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, but the tokenizer of {where} had {record.vocab_size}: remove the "
            "tokenizer's flags, or name the checkpoint's tokenizer"
        )


def check_same_optimizer(saved: Mapping[str, Any], flags: Mapping[str, Any], where: Path) -> None:
    """Raise ValueError if this run's optimizer cannot load the checkpoint's optimizer states.

    AdamW and Muon can load each other's checkpoints if --optimizer-backend is the same. Muon updates some parameters
    differently from AdamW, and the moments of these parameters then start at zero.

    Args:
        saved: flags of the checkpoint by field name.
        flags: flags of this run by field name.
        where: path of the checkpoint, for the message.
    """
    pair = {saved.get("optimizer"), flags["optimizer"]}
    if pair == {"adam", "muon"} and saved.get("optimizer_backend") == flags["optimizer_backend"]:
        return
    if names := [name for name in ("optimizer", "optimizer_backend") if saved.get(name) != flags[name]]:
        changes = ", ".join(_changes(names, flags, saved))
        raise ValueError(f"{changes} in {where}; pass --no-load-optim to start with new moments")


def found_from_anywhere(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `flags` in which the paths of data, of tokenizer files and of --save are absolute.

    Checkpoints and run folders store absolute paths, so that another run finds the files from any working directory.
    """

    def absolute(value: Any) -> Any:
        """Return a flag's value as an absolute path, if it is the path of a file or the prefix of a .bin/.idx pair.

        Other values, such as the weights of a blend or the name of a tokenizer, are returned unchanged.
        """
        if isinstance(value, (tuple, list)):
            return type(value)(map(absolute, value))
        if not isinstance(value, str) or value == "":
            return value
        path = Path(value).expanduser()
        return str(path.resolve()) if path.exists() or path.with_name(path.name + ".idx").exists() else value

    ends = ("_path", "_file", "tokenizer_model", "chat_template")
    names = [name for name in flags if name.endswith(ends) or name == "save"]
    return {**flags, **{name: absolute(flags[name]) for name in names}}


def data_notes(
    saved: Mapping[str, Any],
    flags: Mapping[str, Any],
    where: Path,
    *,
    consumed: int = 0,
    batch_sizes: tuple[int | None, int | None] = (None, None),
) -> list[str]:
    """Return a note if a resumed run has other training samples, or another order of samples, than before.

    The note lists the flags, batch sizes and data that have changed. It also says how many samples repeat or are
    skipped.

    Args:
        saved: flags of the checkpoint by field name.
        flags: flags of this run by field name.
        where: path of the checkpoint, for the note.
        consumed: number of training samples that the run had consumed when it wrote the checkpoint.
        batch_sizes: global batch sizes of this run and of the checkpoint's run; None for an unknown one.
    Returns:
        A list with one note, or [] if nothing has changed.
    """
    # ---- compare the data flags with the checkpoint's
    own = _like_json(flags)
    before, now, (size, earlier_size) = saved.get(SAMPLES, {}), own.get(SAMPLES, {}), batch_sizes
    # If both runs read the same tokens, changed paths and text flags do not matter.
    passed_over = (*PLACES, *TEXT) if same_sources(before, now) else ()
    names = [name for name in DATA if name in saved and name not in passed_over and saved[name] != own.get(name)]
    changes = _changes(names, flags, saved)
    # ---- compare the global batch sizes and the contents of the data with the checkpoint's
    if None not in batch_sizes and size != earlier_size:
        by = "" if flags.get("global_batch_size") else f" (--micro-batch-size x {now.get('ranks')} data ranks)"
        changes.append(f"the global batch size is {size}{by}, was {earlier_size}")
    changes += data_changes(before, now, changes)
    return [f"{', '.join(changes)} in {where}: {what_follows(before, now, consumed)}"] if changes else []


def flag_notes(saved: Mapping[str, Any], flags: Mapping[str, Any], names: Iterable[str], where: Path) -> list[str]:
    """Return a note that lists the flags of training whose values in a resumed run differ from the checkpoint's.

    Flags that are compared elsewhere are left out: flags of the model's shape (`check_same_model`), of the samples
    (`data_notes`) and of the schedule (`agreed_schedule`).

    Args:
        saved: flags of the checkpoint by field name.
        flags: flags of this run by field name.
        names: names of the fields whose flags affect the trained weights.
        where: path of the checkpoint, for the note.
    Returns:
        A list with one note, or [] if no value differs.
    """
    own = _like_json(flags)
    names = [name for name in names if name not in {*SHAPE, *DATA, "weight_decay"}]
    changes = _changes([name for name in names if name in saved and saved[name] != own[name]], flags, saved)
    return [f"{', '.join(changes)} in {where}: training continues with the values of this run"] if changes else []


def batch_size_of(record: CheckpointMetadata) -> int | None:
    """Return the global batch size of a checkpoint's run, after any ramp-up; None if it is unknown.

    A converted model, for example, has no batch size.
    """
    return record.flags.get(SAMPLES, {}).get("global_batch_size")


def schedule_ratio(saved: CheckpointMetadata, own: CheckpointMetadata) -> Fraction:
    """Return the factor that converts a position in the checkpoint's learning-rate schedule to this run's schedule.

    With --train-samples, a position is the number of consumed samples. With --train-iters, it is the number of
    completed training steps times the run's global batch size. By this factor, the schedule of a run with --train-iters
    ends with the last training step even if the batch size has changed.

    Args:
        saved: metadata of the checkpoint.
        own: metadata of this run.
    Returns:
        The position of the completed training in this run's schedule, divided by its position in the checkpoint's
        schedule; 1 if one of the two positions is 0 or unknown.
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
    """Return a text with a run's number of ranks and its batch sizes, for the message about different schedules."""
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
    """Return the learning-rate schedule of a resumed run: the checkpoint's schedule, or the schedule of its own flags.

    As in Megatron-LM, two different schedules are an error unless a flag selects one of them.

    Args:
        saved: schedule of the checkpoint, as `Schedule.state_dict()`.
        schedule: schedule of this run's flags.
        config: checkpoint flags. --override-opt_param-scheduler selects this run's schedule, and
            --use-checkpoint-opt_param-scheduler selects the checkpoint's.
        where: path of the checkpoint, for the message.
        ratio: factor from positions in the checkpoint's schedule to positions in this run's; see `schedule_ratio`.
        sizes: line for the message about ranks and batch sizes that have changed; "" if they are the same.
    Raises:
        ValueError: the schedules differ, and no flag selects one of them.
    """
    own = schedule.state_dict()
    if config.override_opt_param_scheduler or (dict(saved) == own and ratio == 1):
        return schedule
    if config.use_checkpoint_opt_param_scheduler:
        return Schedule(**saved).stretched(ratio)
    # ---- no flag selects the run's or the checkpoint's schedule: raise an error that lists their differences
    differ = [name for name in own if own[name] != saved.get(name)]
    lines = [
        f"the schedule's {name.replace('_', ' ').replace('ramp', 'weight-decay ramp')} is {own[name]}, "
        f"in {where} {saved.get(name)}"
        for name in differ
    ]
    if ratio != 1:
        lines.append(f"a step of the schedule has {float(ratio):g} times the samples that it had in {where}")
    raise ValueError(
        "\n".join([*lines, sizes] if sizes else lines) + "\n--override-opt_param-scheduler uses this run's values, "
        "--use-checkpoint-opt_param-scheduler uses the checkpoint's: pass one of them (the first one to train longer "
        "than planned)"
    )


def _like_json(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `flags` in which tuples are lists, as in flags that were read from JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}


def _changes(names: Iterable[str], now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return for each flag in `names` a text with this run's value and the checkpoint's value, for messages."""
    return [f"--{name.replace('_', '-')} is {now[name]}, was {saved.get(name)}" for name in names]
