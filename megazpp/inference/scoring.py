"""Scores of a text or a dataset: mean loss per token, and bits per byte of text, which do not depend on the tokenizer.

Perplexities are comparable only between models with the same tokenizer.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megazpp.data.blend import DataSource
from megazpp.data.config import DataConfig
from megazpp.data.dataset import batch_options, cache_dir, check_special_tokens, missing_ends
from megazpp.data.indexed_dataset import IndexedDataset, pair_paths
from megazpp.data.loader import BatchLoader, Dataset
from megazpp.data.text import cached_indexed_dataset, check_texts, read_documents, resolve_text_paths
from megazpp.data.token_bytes import TokenBytes
from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.whole_text import PADDING, WholeText, make_padded_batch
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims, check_equal_on_all_ranks
from megazpp.training.metrics import validation_lines
from megazpp.training.objective import Evaluator
from megazpp.zero.sharding import WeightHandle


class Score(NamedTuple):
    """Mean loss in nats per included token, the number of included tokens, and the bytes of their text."""

    loss: float
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text; NaN without text.

        An end of a document counts as a token with a loss, but has no bytes.
        """
        return self.loss / math.log(2.0) * self.tokens / self.text_bytes if self.text_bytes else math.nan

    def lines(self, where: str) -> list[str]:
        """Return Megatron-LM's lines about a validation, with one line about bits per byte added."""
        rule, line, _ = validation_lines(where, self.loss)
        amount = f"{self.tokens:,} tokens, {self.text_bytes:,} bytes of text"
        return [rule, line, f" bits per byte: {self.bits_per_byte:.6f} | {amount}", rule]


class LabelCounts(NamedTuple):
    """Number of labels that the loss mask includes, the bytes of their text, and the bytes of excluded labels."""

    tokens: int
    text_bytes: int
    left_out_bytes: int


def count_labels(
    samples: Dataset, num_samples: int, tokenizer: Tokenizer, data: DataConfig, dims: ParallelDims
) -> LabelCounts:
    """Count the labels of the first samples over all ranks; each rank reads a part of the samples.

    The first id of a sample is not a label. Padding at the end of a sample is ignored.

    Args:
        samples: dataset of token ids.
        num_samples: number of samples to read.
        tokenizer: tokenizer that made the ids.
        data: config that says which labels have no loss (--eod-mask-loss).
        dims: mesh axes of the job.
    """
    sizes, options, counts = TokenBytes(tokenizer), batch_options(data, tokenizer), LabelCounts(0, 0, 0)
    for index in range(dims.world.rank, num_samples, dims.world.size):
        ids = np.asarray(samples[index], dtype=np.int64)
        mask = make_padded_batch(torch.from_numpy(ids).unsqueeze(0), **options).loss_mask[0].bool().numpy()
        found = int(mask.sum()), sizes.count(ids, mask), sizes.count(ids, ~mask & (ids[1:] != PADDING))
        counts = LabelCounts(*map(operator.add, counts, found))
    return LabelCounts(*(_sum_over_ranks(count, dims) for count in counts))


def check_input(path: str) -> None:
    """Check that `path` is a text with content, or the prefix of a .bin/.idx pair.

    Raises:
        ValueError: `path` is neither, or holds no text.
    """
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
    """Predict every token of a .bin/.idx pair or of a text once, and return the score.

    Args:
        built: the model and its handle.
        dims: mesh axes of the job.
        tokenizer: tokenizer of the model.
        path: prefix of a .bin/.idx pair, or a text file as --text-path accepts.
        data: sequence length and loss masks.
        micro_batch_size: samples per forward and data rank.
        device: device of the model.
        say: function that prints a note.
    Raises:
        ValueError: the input or its token ids do not fit the tokenizer.
    """
    assert data.seq_length is not None
    # token ids of the input
    if _is_pair(path):
        files, prefix = None, Path(path).expanduser()
    else:
        files = resolve_text_paths([path])
        prefix = cached_indexed_dataset(files, tokenizer, cache_dir=cache_dir(data), log=say, flag_name="--input")
    sequences = IndexedDataset(prefix)
    check_equal_on_all_ranks(dims.world, f"--input {path}", sequences.digest())
    check_special_tokens([sequences], tokenizer, f"--input {path}")
    if warning := missing_ends([DataSource(sequences, f"--input {path}")], data, tokenizer):
        say(warning)
    # The id before the first token predicts it: the tokenizer's special token at the start of a text, or else eod.
    start = None if tokenizer.special_tokens.used and tokenizer.special_tokens.before else tokenizer.eod
    text = WholeText(sequences, seq_length=data.seq_length, eod=start, vocab_size=tokenizer.vocab_size, name=path)
    # loss of all tokens
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
        loss = evaluator()  # before counting, because the loader checks the ids
    # bytes of the text
    tokens, text_bytes, left_out_bytes = count_labels(text, len(text), tokenizer, data, dims)
    if files is not None:  # count the bytes in the text itself, because a tokenizer may lose some of it
        documents = (document for file in files for document in read_documents(file, flag_name="--input"))
        own = itertools.islice(documents, dims.world.rank, None, dims.world.size)
        text_bytes = _sum_over_ranks(sum(len(document.encode()) for document in own), dims) - left_out_bytes
        if start is None:  # the first id is not a label, so its bytes are not predicted
            text_bytes -= TokenBytes(tokenizer).size(int(text[0][0]), first=True)
    return Score(loss, tokens, text_bytes)


def _is_pair(path: str) -> bool:
    """Return True if a .bin or .idx file with this prefix exists."""
    return any(file.exists() for file in pair_paths(Path(path).expanduser()))


def _sum_over_ranks(count: int, dims: ParallelDims) -> int:
    """Return the sum of an integer over all ranks."""
    device = "cuda" if dims.timeline.device_type == "cuda" else "cpu"
    return int(dims.world.all_reduce_(torch.tensor(count, dtype=torch.int64, device=device)))
