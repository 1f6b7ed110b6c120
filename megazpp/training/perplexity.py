"""Measuring how well a model predicts a text, in units that compare: perplexity per token, and bits per byte of text.

A perplexity says something beside others of the same tokenizer only; bits per byte do not depend on it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megazpp.data.dataset import DataConfig, batch_options, cache_dir, check_marks
from megazpp.data.gpt_dataset import WholeText
from megazpp.data.indexed_dataset import IndexedDataset, pair_paths
from megazpp.data.loader import BatchLoader, Dataset, make_padded_batch
from megazpp.data.text import cached_indexed_dataset, check_texts, read_documents, resolve_text_paths
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.training.metrics import validation_lines
from megazpp.training.objective import Evaluator
from megazpp.zero.sharding import WeightHandle


class Amount(NamedTuple):
    """The amount of text that was predicted."""

    tokens: int
    text_bytes: int


class Score(NamedTuple):
    """The result; `loss` is nats per token."""

    loss: float
    amount: Amount

    @property
    def bits_per_byte(self) -> float:
        """Ends of documents count as tokens that cost bits, and have no bytes."""
        tokens, text_bytes = self.amount
        return self.loss / math.log(2.0) * tokens / text_bytes if text_bytes else math.nan

    def lines(self, where: str) -> list[str]:
        """Megatron's lines of a validation, with one more."""
        rule, line, _ = validation_lines(where, self.loss)
        tokens, text_bytes = self.amount
        more = f" bits per byte: {self.bits_per_byte:.6f} | {tokens:,} tokens, {text_bytes:,} bytes of text"
        return [rule, line, more, rule]


def count_samples(dataset: Dataset, num_samples: int, tokenizer: Tokenizer, dims: ParallelDims) -> Amount:
    """Labels of the first samples, and the bytes of their text; each rank looks at some of them."""

    def sizes(sample: np.ndarray) -> tuple[int, int]:
        before = _text_bytes(sample[:1], tokenizer)  # an input only
        return len(sample) - 1, _text_bytes(sample, tokenizer) - before

    return _sum_over_ranks((sizes(dataset[i]) for i in _share(num_samples, dims)), dims)


def check_input(path: str) -> None:
    """Raises ValueError if `path` is neither a .bin/.idx pair nor a text, or holds no text."""
    if _is_pair(path):
        IndexedDataset(Path(path).expanduser())
        return
    try:
        files = resolve_text_paths([path])
    except ValueError as error:
        raise ValueError(f"--input {path} is neither a text nor the prefix of a .bin/.idx pair") from error
    check_texts(files, flag_name="--input")


def score_whole(
    built: tuple[GPTModel, WeightHandle],
    dims: ParallelDims,
    tokenizer: Tokenizer,
    path: str,
    data: DataConfig,
    *,
    micro_batch_size: int,
    device: torch.device,
    say: Callable[[str], None],
) -> Score:
    """Predict every token of a .bin/.idx pair or of a text once.

    Args:
        path: a prefix, or a file as --text-path takes it.
        data: sequence length and masks.
    """
    assert data.seq_length is not None
    if _is_pair(path):
        files, prefix = None, Path(path).expanduser()
    else:
        files = resolve_text_paths([path])
        prefix = cached_indexed_dataset(files, tokenizer, cache_dir=cache_dir(data), log=say, flag_name="--input")
    sequences = IndexedDataset(prefix)
    check_marks([sequences], tokenizer, f"--input {path}")
    start = None if tokenizer.marks.used and tokenizer.marks.before else tokenizer.eod  # a text begins with its mark
    text = WholeText(sequences, seq_length=data.seq_length, eod=start, vocab_size=tokenizer.vocab_size, name=path)
    batch_size = micro_batch_size * dims.data_size
    with BatchLoader(
        text,
        micro_batch_size=micro_batch_size,
        data_rank=dims.data_rank,
        data_size=dims.data_size,
        make_batch=functools.partial(make_padded_batch, **batch_options(data, tokenizer)),
        device=device,
        num_workers=data.num_workers,
    ) as loader:
        evaluator = Evaluator(*built, loader, dims, iterations=-(-len(text) // batch_size), batch_size=batch_size)
        loss = evaluator()  # first, because it checks the ids
    if files is None:
        texts: Iterator[str] = (
            tokenizer.decode(sequences.get(index).tolist()) for index in _share(len(sequences), dims)
        )
    else:  # the text itself: a tokenizer may lose some of it
        documents = (document for file in files for document in read_documents(file, flag_name="--input"))
        texts = itertools.islice(documents, dims.world.rank, None, dims.world.size)
    amount = _sum_over_ranks(((0, len(document.encode())) for document in texts), dims)
    return Score(loss, amount._replace(tokens=text.num_tokens))


def _is_pair(path: str) -> bool:
    return any(file.exists() for file in pair_paths(Path(path).expanduser()))


def _text_bytes(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    return len(tokenizer.decode(ids.tolist()).encode())


def _share(count: int, dims: ParallelDims) -> range:
    return range(dims.world.rank, count, dims.world.size)


def _sum_over_ranks(sizes: Iterable[tuple[int, int]], dims: ParallelDims) -> Amount:
    totals = np.sum([(0, 0), *sizes], axis=0, dtype=np.int64)
    device = "cuda" if dims.timeline.device_type == "cuda" else "cpu"
    return Amount(*dims.world.all_reduce_(torch.from_numpy(totals).to(device)).tolist())
