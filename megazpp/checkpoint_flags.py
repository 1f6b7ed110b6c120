"""Flags that a checkpoint answers: the model's shape for a training, nearly all for a program that only uses it."""

from __future__ import annotations

import dataclasses
from typing import Any

from megazpp.arguments import ParsedRun
from megazpp.checkpoint.record import RunRecord, shape_of
from megazpp.flag_checks import spelling

# What a model is and was trained on. Where it runs now, and how it is spread there, is for this program to say.
TAKEN = ("model", "batches", "data", "tokenizer", "precision", "evaluation")


def with_checkpoint_flags(parsed: ParsedRun, record: RunRecord) -> ParsedRun:
    """`parsed` with the checkpoint's flags about model, data, tokenizer, precision, evaluation and seed."""
    saved = {name: tuple(value) if isinstance(value, list) else value for name, value in record.flags.items()}
    free = {name: saved[name] for name in saved if name not in parsed.origins}
    config = parsed.config
    parts: dict[str, Any] = {name: _updated(getattr(config, name), free) for name in TAKEN}
    parts["launch"] = _updated(config.launch, {name: free[name] for name in ("seed",) if name in free})
    names = {f.name for name in TAKEN for f in dataclasses.fields(parts[name])} & free.keys()
    return parsed._replace(
        config=dataclasses.replace(config, **parts), origins=parsed.origins | dict.fromkeys(names, "checkpoint")
    )


def with_checkpoint_args(parsed: ParsedRun, record: RunRecord | None) -> ParsedRun:
    """`parsed` with the model's shape from the checkpoint, if --use-checkpoint-args asks for it.

    Args:
        record: of the checkpoint that will be loaded; None if there is none.
    Raises:
        ValueError: there is none.
    """
    config = parsed.config
    if not config.checkpoint.use_checkpoint_args:
        return parsed
    if record is None:
        raise ValueError(f"--use-checkpoint-args: --load {config.checkpoint.load} has no checkpoint")
    shape, own = shape_of(record.flags), parsed.values()
    notices = [
        f"{spelling(config.model, name)} {own[name]} gives way to the checkpoint's {shape[name]}"
        for name in shape
        if name in parsed.origins and shape[name] != own[name]
    ]
    return parsed._replace(
        config=dataclasses.replace(config, model=dataclasses.replace(config.model, **shape)),
        origins=parsed.origins | dict.fromkeys(shape, "checkpoint"),
        notices=(*parsed.notices, *notices),
    )


def _updated(part: Any, values: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{name: value for name, value in values.items() if name in names})
