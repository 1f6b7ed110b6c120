"""Flags with their values and where those came from: all for --print-config and the run folder, some for the log.

The report is itself a flag file: `--lr 0.0003   # configs/gpt_125m.args:4`, so a run is repeated with `@`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megazpp.flags import as_words, config_title, flag_name

DEFAULT = "default"
_WIDEST = 60  # of a line in the log, up to the origin


def render_flags(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """One line per flag, `--name value  # origin`, aligned and grouped by config; reads back as a flag file.

    Args:
        configs: config dataclass instances.
        origins: field name -> "command line" or "file:line"; fields that are not in it have their default.
    """
    groups = []
    for config in configs:
        lines = [(as_written(config, f), origins.get(f.name, DEFAULT)) for f in dataclasses.fields(config)]
        groups.append((config_title(type(config)), lines))
    width = max((len(text) for _, lines in groups for text, _ in lines), default=0)
    blocks = [
        "\n".join([f"# {title}", *(f"{text:<{width}}  # {origin}" for text, origin in lines)])
        for title, lines in groups
    ]
    return "\n\n".join(blocks) + "\n"


def render_arguments_block(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """The flags that differ from their defaults, `--name value  # origin`, between Megatron's two dashed lines."""
    fields = [(config, field) for config in configs for field in dataclasses.fields(config)]
    lines = [
        (as_written(config, field), origins.get(field.name, DEFAULT))
        for config, field in fields
        if getattr(config, field.name) != field.default
    ]
    width = min(max((len(text) for text, _ in lines), default=0), _WIDEST)
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *(f"  {text:<{width}}  # {origin}" for text, origin in lines),
            f"  and {len(fields) - len(lines)} flags at their defaults: --print-config shows all",
            "-------------------- end of arguments ---------------------",
        ]
    )


def as_written(config: Any, field: dataclasses.Field[Any]) -> str:
    """The flag of a field with its value, as a flag file has it: `--lr 0.0003`, `--no-bf16`."""
    name, value = flag_name(field), getattr(config, field.name)
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    if isinstance(value, tuple):
        return " ".join([name, *(shlex.quote(str(item)) for item in value)])
    word = as_words(value)
    return f"{name}{'=' if word.startswith(('-', '@')) else ' '}{shlex.quote(word)}"
