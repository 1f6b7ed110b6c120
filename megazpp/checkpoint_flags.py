"""The flags of programs that use a checkpoint: the checkpoint's own, but for those that are given."""

from __future__ import annotations

import dataclasses
from typing import Any

from megazpp.arguments import ParsedRun
from megazpp.checkpoint.record import RunRecord

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


def _updated(part: Any, values: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{name: value for name, value in values.items() if name in names})
