"""The data flags of a training run: sources of tokens, --split, and how documents are cut into samples."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from megazpp.base.flags import Config, flag
from megazpp.data.indexed_dataset import pair_paths

T = TypeVar("T")

SOURCES = ("--data-path", "--text-path", "--train-data-path, --valid-data-path or --test-data-path", "--mock-data")
_ONE_SOURCE = f"exactly one source of data is needed: {'; '.join(SOURCES)}; {{}}"
_TAKEN_BACK = " (a flag that is repeated without a value removes its earlier value)"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Data.

    Sources of tokens for training, validation and test, and how their documents are cut into samples.

    Attributes:
        data_path: prefixes of .bin/.idx files, with weights to blend: 0.3 A 0.7 B.
        text_path: text or JSON lines files to tokenize, or builtin:moby_dick.
        train_data_path: as --data-path, for training only.
        valid_data_path: as --data-path, for validation only.
        test_data_path: as --data-path, for the test only.
        split: train, validation and test proportions (8,1,1 or 8/1/1), by document (by token if documents are few).
        data_cache_path: directory for indices and trained tokenizers (default: megazpp in the user's cache directory).
        mock_data: use generated documents instead of files.
        num_workers: threads that prepare the samples of the next steps; 0 prepares a step when it begins.
        seq_length: tokens of a sample.
        reset_position_ids: count positions from the start of the document.
        reset_attention_mask: attend within a document only.
        eod_mask_loss: no loss on the prediction of the token after an end-of-document token.
    """

    data_path: tuple[str, ...] = flag((), nargs="*", common=True)
    text_path: tuple[str, ...] = flag((), nargs="*", common=True)
    train_data_path: tuple[str, ...] = flag((), nargs="*")
    valid_data_path: tuple[str, ...] = flag((), nargs="*")
    test_data_path: tuple[str, ...] = flag((), nargs="*")
    split: str = flag("969, 30, 1")
    data_cache_path: str | None = flag(None)
    mock_data: bool = flag(False)
    num_workers: int = flag(2, must_be="not negative", per_host=True)
    seq_length: int | None = flag(None, common=True, must_be="positive")
    reset_position_ids: bool = flag(False)
    reset_attention_mask: bool = flag(False)
    eod_mask_loss: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sources) > 1:
            raise ValueError(_ONE_SOURCE.format(f"{' and '.join(self.sources)} are given") + _TAKEN_BACK)
        parse_split(self.split)
        for flag_name, values in {"--data-path": self.data_path, **paths_by_use(self)}.items():
            parse_blend(values, flag_name=flag_name)

    @property
    def sources(self) -> list[str]:
        """The given flags that select a source of tokens, such as ["--data-path"]. A valid run gives exactly one."""
        given = (self.data_path, self.text_path, any(paths_by_use(self).values()), self.mock_data)
        return list(itertools.compress(SOURCES, given))


class Splits(NamedTuple, Generic[T]):
    """One value of the type T for each split of the data: training, validation and test."""

    train: T
    valid: T
    test: T


def parse_split(split: str) -> Splits[tuple[float, float]]:
    """Return the start and the end of the training, validation and test split, as fractions of all documents in [0, 1].

    Args:
        split: value of --split: up to three proportions, such as `969, 30, 1`. As in Megatron-LM, `/` separates
            them too. Missing proportions count as 0.
    Raises:
        ValueError: `split` is not one to three numbers with `,` or `/` between them.
    """
    try:
        parts = [float(part) for part in re.split(r"[,/]", split)]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(0 <= part < math.inf for part in parts) or sum(parts) == 0:
        raise ValueError(
            f"--split {split!r} is not one to three proportions with , or / between: give a value like '969, 30, 1'"
        )
    shares = [part / sum(parts) for part in (*parts, 0.0, 0.0)[:3]]
    edges = [0.0, *itertools.accumulate(shares)]
    return Splits(*itertools.pairwise(edges))


def paths_by_use(config: DataConfig) -> dict[str, tuple[str, ...]]:
    """Return the values of --train-data-path, --valid-data-path and --test-data-path by flag; () for a missing flag."""
    return {f"--{use}-data-path": getattr(config, f"{use}_data_path") for use in Splits._fields}


def require_source(config: DataConfig) -> None:
    if not config.sources:
        raise ValueError(_ONE_SOURCE.format("none is given"))


def parse_blend(values: Sequence[str], *, flag_name: str) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Split the values of a flag like --data-path into prefixes of .bin/.idx pairs and blend weights.

    Args:
        values: `A B C`, or with weights `0.3 A 0.7 B`. As in Megatron, the values contain weights if the first, third,
            fifth, ... value is a number.
        flag_name: name of the flag, for messages.
    Returns:
        The prefixes, and one weight per prefix; None instead of weights if the values contain none.
    Raises:
        ValueError: a weight is not positive, only some datasets have weights, or each weight is also the name of an
            existing dataset.
    """
    numbers = list(map(_number, values))
    weights = tuple(number for number in numbers[::2] if number is not None)
    if values and len(values) == 2 * len(weights):
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"{flag_name} {' '.join(values)}: weights must be positive numbers")
        called = [value for value in values[::2] if any(path.exists() for path in pair_paths(Path(value)))]
        if len(called) == len(weights):  # each weight is also the name of a dataset, which the user may mean instead
            also = f"the weight {called[0]} is also the name of a dataset"
            raise ValueError(f"{flag_name} {' '.join(values)}: {also}{_as_dataset(called[0])}")
        return tuple(values[1::2]), weights
    if called := [value for value, number in zip(values, numbers, strict=True) if number is not None]:
        rule = "give a weight before every dataset, or before none"
        raise ValueError(f"{flag_name} {' '.join(values)}: {rule}{_as_dataset(called[0])}")
    return tuple(values), None


def _as_dataset(number: str) -> str:
    """Return the end of an error message about --data-path, which says how to give a dataset whose name is a number."""
    return f"; a number is read as a weight, so a dataset with the name {number} has to be given as ./{number}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
