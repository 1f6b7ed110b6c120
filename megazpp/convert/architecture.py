"""What a model of another format is to us: its settings both ways, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megazpp.convert.settings import Settings
from megazpp.convert.tensors import ForeignTensors
from megazpp.model.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A kind of Hugging Face model.

    Attributes:
        model_type: in config.json.
        class_name: of the model with its output layer.
        read: settings to the fields of GPTConfig; a ValueError names the key of what we do not have.
        write: the other way round; a ValueError names the flags of what it cannot hold.
        pieces: what our tensors are called there.
        their_name: of a tensor in a file; None for one that holds no weight.
    """

    model_type: str
    class_name: str
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[GPTConfig], dict[str, Any]]
    pieces: Callable[[GPTConfig], dict[str, ForeignTensors]]
    their_name: Callable[[str], str | None]


def refuse(class_name: str, problems: Mapping[str, bool]) -> None:
    """Raises ValueError naming the flags whose problem is there."""
    found = [flag for flag, there in problems.items() if there]
    if found:
        raise ValueError(f"{class_name} cannot hold a model with {', '.join(found)}")
