"""Every flag with its value and where that came from, for --print-config, the run folder and the log.

The report is itself a flag file: `--lr 0.0003   # configs/gpt_125m.args:4`, so a run is repeated with `@`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megazpp.flags import as_words, config_title, flag_name

DEFAULT = "default"


def render_flags(configs: Sequence[Any], origins: Mapping[str, str]) -> str:
    """One line per flag, `--name value  # origin`, aligned and grouped by config; reads back as a flag file.

    Args:
        configs: config dataclass instances.
        origins: field name -> "command line" or "file:line"; fields that are not in it have their default.
    """
    groups = []
    for config in configs:
        lines = [(_written(config, f), origins.get(f.name, DEFAULT)) for f in dataclasses.fields(config)]
        groups.append((config_title(type(config)), lines))
    width = max((len(text) for _, lines in groups for text, _ in lines), default=0)
    blocks = [
        "\n".join([f"# {title}", *(f"{text:<{width}}  # {origin}" for text, origin in lines)])
        for title, lines in groups
    ]
    return "\n\n".join(blocks) + "\n"


def _written(config: Any, field: dataclasses.Field[Any]) -> str:
    name, value = flag_name(field), getattr(config, field.name)
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    if isinstance(value, tuple):
        return " ".join([name, *(shlex.quote(str(item)) for item in value)])
    word = as_words(value)
    return f"{name}{'=' if word.startswith(('-', '@')) else ' '}{shlex.quote(word)}"


def render_arguments_block(configs: Sequence[Any]) -> str:
    """All values as Megatron prints them: `  name .... value`, sorted, between two dashed lines."""
    values = {f.name: getattr(config, f.name) for config in configs for f in dataclasses.fields(config)}
    lines = [f"  {name} {'.' * (48 - len(name))} {values[name]}" for name in sorted(values, key=str.lower)]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *lines,
            "-------------------- end of arguments ---------------------",
        ]
    )
