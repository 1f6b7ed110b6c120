"""The loss that training minimizes and evaluation measures: the objective's part of a step, and validation.

Every loss is a sum over the whole global batch. Before the first micro-batch, an objective computes its denominators
from all micro-batches of all data ranks. Each micro-batch then contributes its share. The result therefore depends
neither on the number of ranks nor on the size of micro-batches.

Perplexities are comparable only between models with the same tokenizer. Bits per byte of text do not depend on it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megazpp.base.flags import check_not_negative, check_positive, flag
from megazpp.data.blend import DataSource
from megazpp.data.dataset import DataConfig, batch_options, cache_dir, check_special_tokens, missing_ends
from megazpp.data.gpt_dataset import PADDING, WholeText
from megazpp.data.indexed_dataset import IndexedDataset, pair_paths
from megazpp.data.loader import BatchLoader, Dataset, MicroBatch, make_padded_batch
from megazpp.data.text import cached_indexed_dataset, check_texts, read_documents, resolve_text_paths
from megazpp.data.token_bytes import TokenBytes
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.training.metrics import validation_lines
from megazpp.zero.sharding import WeightHandle


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation.

    Frequency and size of the evaluations.
    """

    eval_iters: int = flag(100, "number of global batches in one evaluation; 0 disables evaluation")
    eval_interval: int = flag(1000, "training steps between two evaluations")

    def __post_init__(self) -> None:
        check_not_negative(self, "eval_iters")
        check_positive(self, "eval_interval")


class Objective(Protocol):
    """The methods of an objective that `TrainStep` calls; every rank calls every method."""

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Prepare a step from this rank's micro-batches of one global batch; called before the first forward."""

    def loss(self, model: GPTModel, batch: Any) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss, a scalar.

        The shares of all micro-batches and data ranks add up to the loss of the global batch.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return further numbers of the step, equal on all ranks; may wait for the device."""


def token_losses(model: GPTModel, batch: MicroBatch, **flags: Any) -> torch.Tensor:
    """Return [micro-batch, sequence] losses of each token in nats; 0 where the loss mask excludes the token.

    Args:
        model: the model.
        batch: tokens, labels and loss mask.
        flags: further arguments of the model's forward, as from `router_flags`.
    """
    starts = {"position_ids": batch.position_ids, "document_starts": batch.document_starts}
    return model(batch.tokens, batch.labels, **starts, **flags) * batch.loss_mask


def router_flags(model: GPTModel, loss_mask: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a training forward for routers; {} without experts.

    The losses and the counted choices of routers include the tokens up to the last one of each row that the loss mask
    includes. They leave out padding after it, so that they do not depend on the length to which rows are padded.

    Args:
        model: the model.
        loss_mask: [B, S] fp32, 0 for excluded tokens.
    """
    if not model.training or model.config.num_experts is None:
        return {}
    places = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last = torch.where(loss_mask > 0, places, -1).amax(dim=1, keepdim=True)
    return {"counted": places <= last} | ({"with_router_loss": True} if model.config.has_router_loss else {})


def router_gradient(outputs: Any, num_rows: torch.Tensor | float) -> torch.Tensor | float:
    """Return 0 with the gradient of the losses of routers, as a mean over the rows of the global batch.

    Args:
        outputs: result of a forward with `router_flags`.
        num_rows: rows of the global batch.
    """
    found: torch.Tensor | None = getattr(outputs, "router_loss", None)
    if found is None:
        return 0.0
    mean = found.sum() / num_rows
    return mean - mean.detach()


class LanguageModelLoss:
    """Negative log-likelihood of the next token, averaged over the tokens of the global batch that count.

    A token counts unless the loss mask excludes it. With DiLoCo the mean is over the tokens of this rank's replica
    group.
    The losses of routers, each the mean over all sequences of the global batch, add to the gradients, but not to the
    value of the loss.

    Args:
        dims: parallel layout.
        pads: True if rows may end with padding, which the losses of routers leave out (`router_flags`).

    Attributes:
        tokens: number of tokens that count in the last step, an fp64 scalar.
    """

    def __init__(self, dims: ParallelDims, *, pads: bool = False) -> None:
        self._dims, self._pads = dims, pads
        self.tokens = torch.zeros((), dtype=torch.float64)
        self._per_token = torch.tensor(1.0)
        self._batches: Sequence[MicroBatch] = ()

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Count the tokens of the global batch that the loss mask includes: one all-reduce."""
        own = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
        self.tokens = self._dims.sum_over_data_(own)
        self._per_token = (1.0 / self.tokens.clamp(min=1.0)).float()
        self._batches = batches

    def loss(self, model: GPTModel, batch: MicroBatch) -> torch.Tensor:
        """Return this micro-batch's share of the mean loss over the global batch."""
        asked = router_flags(model, batch.loss_mask) if self._pads else {}
        if not model.config.has_router_loss:
            return token_losses(model, batch, **asked).sum() * self._per_token
        asked["with_router_loss"] = True
        starts = {"position_ids": batch.position_ids, "document_starts": batch.document_starts}
        found = model(batch.tokens, batch.labels, **starts, **asked)
        sequences = (
            sum(len(each.tokens) for each in self._batches) * self._dims.data_size // self._dims.replica_group.size
        )
        # The result has the value of the first loss and the gradients of both.
        return (found.losses * batch.loss_mask).sum() * self._per_token + router_gradient(found, sequences)

    def metrics(self) -> Mapping[str, float]:
        """Return no further numbers."""
        return {}


@dataclass
class Evaluator:
    """Computes the mean loss over the first batches of a dataset.

    Every call uses the same batches, so that losses are comparable.

    Args:
        model: the model, which may be in training.
        sharding: handle to the model's weights.
        loader: loader of the held-out data.
        dims: mesh axes of the job.
        iterations: number of global batches.
        batch_size: samples of a global batch.
    """

    model: GPTModel
    sharding: WeightHandle
    loader: BatchLoader
    dims: ParallelDims
    _: KW_ONLY
    iterations: int
    batch_size: int

    @torch.no_grad()
    def __call__(self) -> float:
        """Return the mean loss, equal on all ranks.

        Afterwards the model is in training mode, and its next forward gathers its weights from the shards again.
        """
        self.model.eval()
        with self.dims.counter.paused():  # the log reports the traffic of training steps only
            starts = range(0, self.iterations * self.batch_size, self.batch_size)
            loss = self.mean_loss(self.loader.step(start, self.batch_size) for start in starts)
        self.sharding.reshard()
        self.model.train()
        return loss

    def mean_loss(self, steps: Iterable[Sequence[Any]]) -> float:
        """Return the mean loss in nats per token over all ranks; NaN if the loss masks exclude all tokens.

        Args:
            steps: this rank's micro-batches of each global batch.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.model.embedding.word.weight.device)  # loss, tokens
        for batch in itertools.chain.from_iterable(steps):
            totals += torch.stack((token_losses(self.model, batch).sum(), batch.loss_mask.sum()))
        loss, tokens = self.dims.sum_over_replica_groups_(totals).tolist()
        return loss / tokens if tokens else math.nan


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
    check_special_tokens([sequences], tokenizer, f"--input {path}")
    if warning := missing_ends([DataSource(sequences, f"--input {path}", None)], data, tokenizer):
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
