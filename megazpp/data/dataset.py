"""From flags to the three datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from megazpp.data.tokenizer import Tokenizer
from megazpp.flags import flag

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from and how they are cut into samples."""

    data_path: tuple[str, ...] = flag(
        (), "prefixes of .bin/.idx pairs, each optionally preceded by its weight: 0.3 A 0.7 B", nargs="*"
    )
    text_path: tuple[str, ...] = flag(
        (),
        "text files or JSON lines to tokenize (cached), or builtin:moby_dick, instead of --data-path",
        nargs="*",
    )
    train_data_path: tuple[str, ...] = flag((), "as --data-path, for training alone", nargs="*")
    valid_data_path: tuple[str, ...] = flag((), "as --data-path, for validation alone", nargs="*")
    test_data_path: tuple[str, ...] = flag((), "as --data-path, for the test alone", nargs="*")
    split: str = flag("969, 30, 1", "proportions of the documents for training, validation and test")
    data_cache_path: str | None = flag(
        None, "directory for indices and trained tokenizers (default: megazpp in the user's cache directory)"
    )
    mock_data: bool = flag(False, "made-up documents instead of files")
    num_workers: int = flag(2, "threads that prepare the next steps' samples; 0 prepares them when asked")
    dataloader_type: Literal["single", "cyclic", "external"] | None = flag(
        None, "only single: the indices already repeat and reshuffle the data for as long as training lasts"
    )
    seq_length: int | None = flag(None, "tokens of a sample")
    reset_position_ids: bool = flag(False, "count positions from the start of the document")
    reset_attention_mask: bool = flag(False, "attend within a document only")
    eod_mask_loss: bool = flag(False, "no loss on predicting what follows an end-of-document token")


class Splits(NamedTuple, Generic[T]):
    """One thing for each use of the data."""

    train: T
    valid: T
    test: T


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`: [seq_length + 1] int64."""
        ...


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    num_samples: Splits[int],
    seed: int,
    announce: Callable[[str], None],
) -> Splits[Dataset | None]:
    """The training, validation and test data; None where nothing was asked for or --split leaves nothing."""
    raise NotImplementedError
