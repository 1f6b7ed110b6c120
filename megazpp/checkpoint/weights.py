"""The weights of a checkpoint for programs that do not train: to generate, to evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import Reader
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.source import Source, peek
from megazpp.checkpoint.state import TrainState
from megazpp.checkpoint.together import open_axis
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import ConstantLossScale
from megazpp.optim.schedule import Schedule
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import Sharding


def find_weights(
    folder: CheckpointFolder, iteration: int | None, *, fallback: bool = False
) -> tuple[Source, RunRecord]:
    """A checkpoint without its optimizer, and what it says; its files are not verified yet.

    Args:
        iteration: None for what the tracker names.
        fallback: see `Source`.
    Raises:
        ValueError: there is none, or it cannot be read.
    """
    source = Source(folder, iteration, continues=False, optimizer=False, rng=False, fallback=fallback)
    record = peek(source)
    if record is None:
        raise ValueError(f"{folder.name} has no checkpoint")
    return source, record


def load_weights(
    model: GPTModel,
    sharding: Sharding,
    dims: ParallelDims,
    source: Source,
    record: RunRecord,
    *,
    vocab_size: int,
    tokenizer: str | None = None,
    say: Callable[[str], None],
) -> int:
    """Fill the sharded model, on all ranks together; returns the iteration that the checkpoint is of.

    Args:
        record: as `find_weights` has read it.
        vocab_size, tokenizer: number of tokens and identity of the tokenizer in use.
        say: prints a line on rank 0.
    Raises:
        ValueError: the checkpoint is damaged, or another model's or tokenizer's.
    """
    nothing = torch.optim.SGD(model.parameters())  # has no state
    state = TrainState(model, sharding, nothing, ConstantLossScale(1.0), dims, seed=0)
    own = dataclasses.replace(record, vocab_size=vocab_size, tokenizer=tokenizer or record.tokenizer)
    resumed = Reader(CheckpointConfig(), state, own, open_axis(dims), say).read(source, Schedule(**record.schedule))
    if resumed is None:
        raise ValueError(f"{source.folder.name} has no checkpoint")
    return int(resumed.checkpoint.name.removeprefix("iter_"))
