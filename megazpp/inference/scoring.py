"""Score a model on a text or a dataset: mean loss per token, perplexity, and bits per byte of text.

Losses and perplexities are comparable only between models with the same tokenizer. Bits per byte are comparable between
all models.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megazpp.data.blend import DataSource
from megazpp.data.config import DataConfig
from megazpp.data.dataset import batch_options, cache_dir, check_special_tokens, missing_ends
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.loader import BatchLoader, Dataset
from megazpp.data.text import cached_indexed_dataset, is_pair, read_documents, resolve_text_paths
from megazpp.data.token_bytes import TokenBytes
from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.whole_text import PADDING, WholeText, make_padded_batch
from megazpp.model.gpt import GPTModel
from megazpp.parallel.agreement import check_equal_on_all_ranks
from megazpp.parallel.dims import ParallelDims
from megazpp.training.metrics import validation_lines
from megazpp.training.objective import Evaluator
from megazpp.zero.sharding import WeightHandle


class Score(NamedTuple):
    """A model's score on a text.

    Attributes:
        loss: mean loss in nats per token that the loss mask includes.
        tokens: number of tokens that the loss mask includes.
        text_bytes: number of UTF-8 bytes of the text of these tokens.
    """

    loss: float
    tokens: int
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """The total loss in bits, divided by the bytes of text; NaN if there are no bytes.

        Only the tokens that the loss mask includes count, for the loss and for the bytes. The end-of-document token has
        a loss, but no bytes.
        """
        return self.loss / math.log(2.0) * self.tokens / self.text_bytes if self.text_bytes else math.nan

    def lines(self, where: str) -> list[str]:
        """Return the lines of the log about this score: Megatron-LM's lines of a validation, and the bits per byte.

        Args:
            where: description of the evaluated data, for the first line.
        """
        rule, line, _ = validation_lines(where, self.loss)
        amount = f"{self.tokens:,} tokens, {self.text_bytes:,} bytes of text"
        return [rule, line, f" bits per byte: {self.bits_per_byte:.6f} | {amount}", rule]


class LabelCounts(NamedTuple):
    """Numbers of labels and of the bytes of their text.

    Attributes:
        tokens: number of labels that the loss mask includes.
        text_bytes: UTF-8 bytes of the text of these labels.
        left_out_bytes: UTF-8 bytes of the text of the labels that the loss mask leaves out.
    """

    tokens: int
    text_bytes: int
    left_out_bytes: int


def count_labels(
    samples: Dataset, num_samples: int, tokenizer: Tokenizer, data: DataConfig, dims: ParallelDims
) -> LabelCounts:
    """Count the labels of the first samples of a dataset, and the bytes of their text. All ranks call this.

    The labels of a sample are all of its token ids but the first. Padding at the end of a sample does not count. Each
    rank reads a part of the samples.

    Args:
        samples: dataset of token ids.
        num_samples: number of samples to read.
        tokenizer: tokenizer that made the token ids.
        data: config with the flags that leave labels out of the loss, such as --eod-mask-loss.
        dims: mesh axes of the job.
    Returns:
        the counts over all ranks, equal on all ranks.
    """
    sizes, options, counts = TokenBytes(tokenizer), batch_options(data, tokenizer), np.zeros(3, dtype=np.int64)
    for index in range(dims.world.rank, num_samples, dims.world.size):
        ids = np.asarray(samples[index], dtype=np.int64)
        mask = make_padded_batch(torch.from_numpy(ids).unsqueeze(0), **options).loss_mask[0].bool().numpy()
        counts += mask.sum(), sizes.count(ids, mask), sizes.count(ids, ~mask & (ids[1:] != PADDING))
    return LabelCounts(*(_sum_over_ranks(count, dims) for count in counts.tolist()))


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
    """Predict every token of a text once, and return the model's score. All ranks call this.

    Args:
        built: the model and the handle to its weights.
        dims: mesh axes of the job.
        tokenizer: tokenizer of the model.
        path: prefix of a .bin/.idx pair of files, or a text file as --text-path accepts.
        data: config with the sequence length and the flags that leave labels out of the loss.
        micro_batch_size: number of samples in one forward of a data-parallel rank.
        device: device of the model.
        say: function that prints a note for the user.
    Returns:
        the mean loss in nats per token, with the numbers of tokens and bytes; the same on all ranks.
    Raises:
        ValueError: the text cannot be read, or its token ids are not of this tokenizer.
    """
    assert data.seq_length is not None
    # ---- open or tokenize the text that --input names
    if is_pair(path):
        files, prefix = None, Path(path).expanduser()
    else:
        files = resolve_text_paths([path])
        prefix = cached_indexed_dataset(files, tokenizer, cache_dir=cache_dir(data), log=say, flag_name="--input")
    sequences = IndexedDataset(prefix)
    check_equal_on_all_ranks(dims.world, f"--input {path}", sequences.digest())
    check_special_tokens([sequences], tokenizer, f"--input {path}")
    if warning := missing_ends([DataSource(sequences, f"--input {path}")], data, tokenizer):
        say(warning)
    # The first id of the dataset is never predicted. If the tokenizer puts special tokens before a text, this id is the
    # first of them. Otherwise put the end-of-document token before the text, if the tokenizer has one, so that all ids
    # of the text are predicted.
    start = None if tokenizer.special_tokens.used and tokenizer.special_tokens.before else tokenizer.eod
    text = WholeText(sequences, seq_length=data.seq_length, eod=start, vocab_size=tokenizer.vocab_size, name=path)
    # ---- compute the mean loss of all tokens of the text; a batch is not larger than the text
    micro_batch_size = min(micro_batch_size, -(-len(text) // dims.data_size))
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
        # Run this before `count_labels`: only the loader raises an error for wrong token ids, `count_labels` does not.
        loss = evaluator()
    # ---- count the bytes of the text, for bits per byte
    tokens, text_bytes, left_out_bytes = count_labels(text, len(text), tokenizer, data, dims)
    if files is not None:  # count the bytes of the files, because a tokenizer may lose some of their text
        documents = (document for file in files for document in read_documents(file, flag_name="--input"))
        own = itertools.islice(documents, dims.world.rank, None, dims.world.size)
        text_bytes = _sum_over_ranks(sum(len(document.encode()) for document in own), dims) - left_out_bytes
        if start is None:  # the first id is not a label, so its bytes are not predicted
            text_bytes -= TokenBytes(tokenizer).size(int(text[0][0]), first=True)
    return Score(loss, tokens, text_bytes)


def _sum_over_ranks(count: int, dims: ParallelDims) -> int:
    """Return the sum of a count over all ranks of the job. All ranks call this."""
    device = "cuda" if dims.timeline.device_type == "cuda" else "cpu"
    return int(dims.world.all_reduce_(torch.tensor(count, dtype=torch.int64, device=device)))
