"""Flags that a program takes from a checkpoint instead of the command line.

A training run takes only the model's shape (--use-checkpoint-args). A program that loads a trained model, such as
tools/generate.py, takes nearly all flags that describe the model and its data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazpp.base.files import DamagedError
from megazpp.base.flags import asks, spelling, wrong_types
from megazpp.checkpoint.folder import RECORD, CheckpointFolder, read_tokenizer
from megazpp.checkpoint.metadata import CheckpointMetadata, shape_of
from megazpp.data.tokenizer import load_tokenizer, names_tokenizer
from megazpp.run.arguments import MUTUALLY_EXCLUSIVE, OF_THE_DEVICE, TAKEN, ParsedRun
from megazpp.zero.plan import WeightDelta, default_weight_delta


def with_checkpoint_flags(
    parsed: ParsedRun, record: CheckpointMetadata, folder: CheckpointFolder, parts_taken: Sequence[str] = TAKEN
) -> ParsedRun:
    """Return the command line with the checkpoint's flags about model, data, tokenizer, precision, evaluation and seed.

    A flag that the user has set keeps its value. Flags of the checkpoint that exclude a flag of the user
    (`MUTUALLY_EXCLUSIVE`) are not taken.

    Args:
        parsed: command line of a program that loads a trained model.
        record: metadata of the checkpoint, with the flags of its run.
        folder: folder that contains the checkpoint.
        parts_taken: names of the fields of `RunConfig` whose flags are taken.

    Raises:
        DamagedError: a recorded value has the wrong type, or the tokenizer's files are damaged.
    """
    # ---- select the checkpoint's flags that the user has not set, that no flag of the user excludes, and that do not
    # depend on the device (`OF_THE_DEVICE`)
    parsed = with_checkpoint_tokenizer(parsed, record, folder)
    config = parsed.config
    taken = [name for name in parts_taken if name != "tokenizer" or not names_tokenizer(config.tokenizer)]
    given = {name: value for name, value in parsed.values().items() if name in parsed.origins}
    others = {other for name, other in MUTUALLY_EXCLUSIVE if asks(given.get(name))}
    free = {name: value for name, value in record.flags.items() if name not in {*given, *others, *OF_THE_DEVICE}}

    # ---- copy the selected flags of the checkpoint into the configs
    where = folder.of(record.progress.iteration) / RECORD
    parts: dict[str, Any] = {name: _updated(getattr(config, name), free, where) for name in taken}
    names = {f.name for name in taken for f in dataclasses.fields(parts[name])} & free.keys()
    parts["launch"] = _updated(config.launch, {name: free[name] for name in {"seed"} & free.keys()}, where)
    return parsed.with_checkpoint(names, **parts)


def with_checkpoint_args(parsed: ParsedRun, record: CheckpointMetadata | None) -> ParsedRun:
    """Return the command line with the checkpoint's flags about the model's shape, if --use-checkpoint-args is set.

    A notice reports each flag of the user that the checkpoint overrides.

    Args:
        parsed: command line of a training run.
        record: metadata of the checkpoint in --load; None if the folder has no checkpoint.

    Raises:
        ValueError: --use-checkpoint-args is set, and `record` is None.
    """
    config = parsed.config
    if not config.checkpoint.use_checkpoint_args:
        return parsed
    if record is None:
        raise ValueError(
            f"--use-checkpoint-args: --load {config.checkpoint.load} has no checkpoint to take the model's shape from; "
            "correct --load, or set the flags of the model instead"
        )
    shape, own = shape_of(record.flags), parsed.values()
    notices = [
        f"{spelling(config.model, name)} {own[name]} gives way to the checkpoint's {shape[name]}"
        for name in shape
        if name in parsed.origins and shape[name] != own[name]
    ]
    parsed = parsed.with_checkpoint(shape, notices, model=dataclasses.replace(config.model, **shape))
    parsed.check_needs()
    return parsed


def with_resumed_features(parsed: ParsedRun, record: CheckpointMetadata, folder: CheckpointFolder) -> ParsedRun:
    """Return the command line of a resumed run with the checkpoint's values of the features' `resumed_fields`.

    Defaults of these fields depend on the length of the run. A resumed run with another length must keep the values
    with which the run started. Flags that the user has set are not changed.

    Args:
        parsed: command line of the resumed run.
        record: metadata of the checkpoint.
        folder: folder that contains the checkpoint.
    """
    where = folder.of(record.progress.iteration) / RECORD
    for section in parsed.config.sections:
        names = [name for name in section.resumed_fields if name not in parsed.origins]
        taken = {name: record.flags[name] for name in names if record.flags.get(name) is not None}
        config = parsed.config.with_section(_updated(section, taken, where))
        parsed = parsed.with_checkpoint(taken)._replace(config=config)
    return parsed


def with_resumed_weight_delta(parsed: ParsedRun, record: CheckpointMetadata, folder: CheckpointFolder) -> ParsedRun:
    """Return the command line of a resumed run with the checkpoint's format of weights for --zero-weight-delta auto.

    The checkpoint's format is the format in which the checkpoint's run sent weights between nodes. The command line is
    unchanged in three cases: other flags set the format, the checkpoint's run has chosen no format, or the format is
    lossless deltas and the resumed run computes in fp32, for which there are no lossless deltas.

    Args:
        parsed: command line of the resumed run.
        record: metadata of the checkpoint.
        folder: folder that contains the checkpoint.
    """
    zero = parsed.config.zero
    kept = record.flags.get("zero_weight_delta", "auto")
    if not zero.chooses_weight_delta or not record.flags.get("zeropp") or kept == "auto":
        return parsed
    if kept == "lossless" and not default_weight_delta(parsed.config.precision.param_dtype).lossless:
        return parsed
    where = folder.of(record.progress.iteration) / RECORD
    notice = WeightDelta(kept == "lossless", f"the checkpoint of {folder.name} has this format").describe()
    taken = _updated(zero, {"zero_weight_delta": kept}, where)
    return parsed.with_checkpoint(["zero_weight_delta"], [notice], zero=taken)


def with_checkpoint_tokenizer(parsed: ParsedRun, record: CheckpointMetadata, folder: CheckpointFolder) -> ParsedRun:
    """Return the command line with the flags of a checkpoint's tokenizer.

    If no flag names a tokenizer, the result names the tokenizer that is stored in the checkpoint folder. If flags name
    a tokenizer that is identical with the checkpoint's, this tokenizer gets the checkpoint's settings. If flags name
    another tokenizer, the command line is unchanged.

    The settings are the vocabulary size, and whether texts get special tokens. The flags --add-special-tokens and
    --no-add-special-tokens override the checkpoint's setting of special tokens.

    Args:
        parsed: command line of a program that loads the checkpoint.
        record: metadata of the checkpoint.
        folder: folder that contains the checkpoint.
    """
    # ---- find the tokenizer: the one that flags name, or else the one in the checkpoint folder
    given = found = parsed.config.tokenizer
    notices, names, named = list[str](), {"add_special_tokens"}, names_tokenizer(given)
    if record.tokenizer_folder is not None and not named:
        found = read_tokenizer(folder.path, record.tokenizer_folder)
        names |= {f.name for f in dataclasses.fields(found)} - {"model_vocab_size"}
        notices.append(f"using the tokenizer of {folder.name}: {record.tokenizer_folder}")
        if given.vocab_size not in (None, record.vocab_size):
            notices.append(f"--vocab-size {given.vocab_size} gives way to the checkpoint's {record.vocab_size}")

    # ---- load the tokenizer with the checkpoint's settings, and compare it with the checkpoint's tokenizer
    adds = record.adds_special_tokens
    found = dataclasses.replace(found, add_special_tokens=adds, model_vocab_size=given.model_vocab_size, eos_token=None)
    opened, tokenizer = found, load_tokenizer(found) if names_tokenizer(found) else None
    if named and (tokenizer is None or tokenizer.identity != record.tokenizer):
        return parsed  # the user's flags name another tokenizer than the checkpoint's, so nothing is taken
    if tokenizer is not None and tokenizer.vocab_size != record.vocab_size and given.model_vocab_size is None:
        found = dataclasses.replace(found, model_vocab_size=record.vocab_size)
        names.add("model_vocab_size")

    # ---- use the user's flags about special tokens instead of the checkpoint's values
    if "add_special_tokens" in parsed.origins:
        found = dataclasses.replace(found, add_special_tokens=given.add_special_tokens)
        names.remove("add_special_tokens")
    if given.eos_token is not None:
        found = dataclasses.replace(found, eos_token=given.eos_token)
        names.discard("eos_token")
    parsed = parsed.with_checkpoint(names, notices, tokenizer=found)
    # `tokenizer` was loaded with the settings `opened`. If the final settings differ, the program must load it again.
    return parsed._replace(tokenizer=tokenizer if found == opened else None)


def _updated(part: Any, values: dict[str, Any], where: Path) -> Any:
    """Return a copy of a config with values of a checkpoint.

    Args:
        part: config dataclass.
        values: values decoded from JSON, by field name. Names that are not fields of `part` are ignored.
        where: file of the checkpoint that has the values, for the error message.

    Raises:
        DamagedError: a value has the wrong type.
    """
    names = {field.name for field in dataclasses.fields(part)}
    values = {name: value for name, value in values.items() if name in names}
    if problems := wrong_types(type(part), values):
        raise DamagedError(f"{where}: {'; '.join(problems)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return dataclasses.replace(part, **values)
