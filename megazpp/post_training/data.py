"""Datasets of post-training, and the micro-batches that are made of their samples or of sampled completions.

A sample of a dataset is a supervised example (with --packing several supervised examples), a pair of answers, or a
prompt. N is the number of samples in one epoch.

In training, each epoch is a separate permutation of these N samples, which depends on the seed and the number of the
epoch. Sample i of the run is number i mod N in the permutation of epoch i // N. Held-out datasets keep the order of the
files. The samples of a step therefore depend on the number of consumed samples, and not on the number of ranks.

Samples of examples and pairs are [rows, S + 1] int64 arrays with S = --max-length, padded on the right. All samples of
a dataset have the same size, so `BatchLoader` handles them like pretraining's samples. Their rows are:

    supervised    tokens, mask, positions
    pairs         preferred tokens, mask, rejected tokens, mask; the last row begins with the number of the pair and the
                  bits of its fp32 margin

A mask is 1 where the token is to be predicted. Sampled completions are also laid out in rows of S inputs. `shortened`
then cuts each micro-batch after its longest answer, rounded up as `row_multiple` says.

With --packing a sample holds several examples, each with positions from 0. The examples are packed once for all epochs,
by best fit in the order of decreasing length (TRL's `bfd`).

Supervised training uses pretraining's `MicroBatch`. The other batches begin with the fields of a `MicroBatch`, so the
model is called with each of them in the same way. At index t of a row are the input `tokens[:, t]` and the token after
it, `labels[:, t]`. `loss_mask[:, t]` is 1 where this label is a token of the answer. A log-probability at t is the
label's. A value at t estimates the reward that follows the tokens up to and including `tokens[:, t]`.

Legend: B pairs or completions of a micro-batch, S tokens of a row.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megazpp.data.cache import cache_key
from megazpp.data.gpt_dataset import Source
from megazpp.data.loader import Batch, MicroBatch, mapped
from megazpp.inference.generate import Drawn
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.formatting import Examples, Prompt


class EpochOrder:
    """Base class of the datasets of post-training, which decides the order of their samples.

    With a seed, each epoch has its own permutation of the samples.

    Args:
        size: N, the number of samples in an epoch.
        num_samples: number of samples of the dataset over all epochs; None for one epoch.
        seed: seed for the permutations of the epochs; None keeps the order of the files in every epoch.
    """

    def __init__(self, size: int, *, num_samples: int | None, seed: int | None) -> None:
        self._size, self._seed = size, seed
        self._num_samples = size if num_samples is None else num_samples
        self._permutation = functools.lru_cache(maxsize=4)(self._permute)

    def __len__(self) -> int:
        return self._num_samples

    def place(self, index: int) -> int:
        """Return which of the N samples of an epoch, counted in the order of the files, becomes sample `index`."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples} does not exist: indices begin with 0")
        epoch, place = divmod(index, self._size)
        return place if self._seed is None else int(self._permutation(epoch)[place])

    def digest(self) -> str:
        """Return a digest of the contents of all examples, which changes if the data changes."""
        raise NotImplementedError

    def order(self) -> str:
        """Return a digest of the dataset's samples in their order, with which a resumed run detects changed data."""
        return cache_key(digest=self._digest, size=self._size, seed=self._seed)

    def sources(self) -> list[Source]:
        """Return a description of the dataset's contents, with which a resumed run detects changed data."""
        return [Source("the examples", self._digest, 1.0, self._size, self.order())]

    @functools.cached_property
    def _digest(self) -> str:
        return self.digest()

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        assert self._seed is not None
        return np.random.default_rng((self._seed, epoch)).permutation(self._size)


class SupervisedDataset(EpochOrder):
    """Dataset of supervised training. Its samples are [3, S + 1] int64, for `make_supervised_batch`.

    The three rows of a sample are token ids, loss mask, and positions of the tokens in their examples.

    Args:
        examples: tokens and loss masks of all examples.
        max_length: S, the largest number of tokens in a sample, without padding.
        pad: token id that fills the rest of a sample.
        packing: True to put several examples into each sample.
        **order: `num_samples` and `seed` of `EpochOrder`.
    """

    def __init__(self, examples: Examples, *, max_length: int, pad: int, packing: bool = False, **order: Any) -> None:
        self._examples, self._max_length, self._pad, self._packed = examples, max_length, pad, packing
        lengths = np.diff(examples.starts)
        self._rows = pack(lengths, max_length) if packing else [[number] for number in range(len(lengths))]
        super().__init__(len(self._rows), **order)

    def digest(self) -> str:
        """Return a digest of the tokens and loss masks of all examples, and of how they are packed."""
        return cache_key(examples=digest_of(self._examples), rows=self._packed, max_length=self._max_length)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        sample, end = np.zeros((3, self._max_length + 1), dtype=np.int64), 0
        sample[0] = self._pad
        for number in self._rows[self.place(index)]:
            tokens, mask = self._examples.row(number)
            start, end = end, end + len(tokens)
            sample[:, start:end] = tokens, mask, np.arange(len(tokens))
        sample[2, end:] = np.arange(sample.shape[1] - end)
        return sample


class PreferenceDataset(EpochOrder):
    """Dataset of pairs of a preferred and a rejected answer. Its samples are [5, S + 1] int64, for `make_pair_batch`.

    The rows of a sample are:

        0, 1    tokens and loss mask of the prompt and the preferred answer
        2, 3    tokens and loss mask of the prompt and the rejected answer
        4       the number of the pair, the bits of its fp32 margin, and zeros

    The arguments are the same as for `SupervisedDataset`, except that there is no `packing`. S is `max_length`.

    Attributes:
        num_pairs: number of pairs in the files.
        ref_logps: [pairs, 2] fp32 log-probabilities of both answers under the reference model; None if they were not
            computed before training.
    """

    def __init__(self, examples: Examples, *, max_length: int, pad: int, **order: Any) -> None:
        self._examples, self._max_length, self._pad = examples, max_length, pad
        self.num_pairs = (len(examples.starts) - 1) // 2
        self.ref_logps: torch.Tensor | None = None
        super().__init__(self.num_pairs, **order)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.pair(self.place(index))

    def pair(self, number: int) -> npt.NDArray[np.int64]:
        """Return pair `number`, counted in the order of the files, as a sample of [5, max_length + 1] int64."""
        sample = np.zeros((5, self._max_length + 1), dtype=np.int64)
        sample[0] = sample[2] = self._pad
        for row in (0, 1):
            tokens, mask = self._examples.row(2 * number + row)
            sample[2 * row : 2 * row + 2, : len(tokens)] = tokens, mask
        sample[4, 0] = number
        if len(self._examples.margins):
            sample[4, 1] = self._examples.margins[number].view(np.int32)
        return sample

    def digest(self) -> str:
        """Return a digest of the tokens, loss masks and margins of all pairs."""
        found, margins = digest_of(self._examples), self._examples.margins
        return cache_key(pairs=found, margins=margins.tolist()) if margins.any() else found


class PromptDataset(EpochOrder):
    """Dataset of prompts for which completions are sampled. Its samples are `Prompt` objects."""

    def __init__(self, prompts: Sequence[Prompt], **order: Any) -> None:
        self._prompts = prompts
        super().__init__(len(prompts), **order)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[self.place(index)]

    @property
    def columns(self) -> set[str]:
        """The names of all columns of the data other than `prompt`, which reward functions get as arguments."""
        return {name for prompt in self._prompts for name in prompt.columns}

    def digest(self) -> str:
        """Return a digest of the token ids and the other columns of all prompts."""
        found = hashlib.blake2b(digest_size=16)
        for prompt in self._prompts:
            found.update(cache_key(tokens=prompt.tokens, columns=prompt.columns).encode())
        return found.hexdigest()


def digest_of(examples: Examples) -> str:
    """Return a digest of the tokens, loss masks and lengths of all examples, as hexadecimal digits."""
    found = hashlib.blake2b(digest_size=16)
    for array in (examples.tokens, examples.mask, examples.starts):
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def make_supervised_batch(samples: torch.Tensor, *, multiple: int = 1, packing: bool = False) -> MicroBatch:
    """Make a micro-batch for supervised training, cut to its longest row.

    Args:
        samples: [B, 3, S + 1] int64, B samples of a `SupervisedDataset`. Each has S + 1 tokens, their loss mask and
            their positions.
        multiple: divisor of the row length after the cut, see `shortened`.
        packing: True if samples hold several examples; the batch then keeps attention inside each example.
    """
    tokens, mask, positions = samples.unbind(dim=1)
    batch = shortened(MicroBatch(*_inputs(tokens, mask), positions[:, :-1], None), multiple)
    if not packing:
        return batch
    offsets = (batch.position_ids == 0).flatten().nonzero().flatten()
    starts = torch.cat([offsets, offsets.new_tensor([batch.tokens.numel()])]).to(torch.int32)
    return batch._replace(document_starts=starts)


def make_pair_batch(samples: torch.Tensor, *, multiple: int = 1, ref_logps: torch.Tensor | None = None) -> PairBatch:
    """Make a micro-batch of pairs of answers, cut to its longest row.

    Args:
        samples: [B, 5, S + 1] int64, B samples of a `PreferenceDataset`, each with rows of S + 1 tokens.
        multiple: divisor of the row length after the cut, see `shortened`.
        ref_logps: [pairs of the dataset, 2] log-probabilities of both answers under the reference model; None if they
            were not computed before training.
    """
    tokens = torch.cat((samples[:, 0], samples[:, 2]))
    mask = torch.cat((samples[:, 1], samples[:, 3]))
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    known = None if ref_logps is None else ref_logps[samples[:, 4, 0]].float().t().flatten()
    margins = samples[:, 4, 1].to(torch.int32).view(torch.float32)
    return shortened(PairBatch(*_inputs(tokens, mask), positions, None, known, margins), multiple)


def pack(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack examples into rows by best fit: the longest example first, each into the fullest row with space for it.

    Args:
        lengths: [N] number of tokens of each example.
        capacity: largest number of tokens of a row.

    Returns:
        the numbers of the examples in each row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # sorted pairs (number of free tokens, index of the row) for rows with free tokens
    for number in np.argsort(-lengths, kind="stable").tolist():
        place = bisect.bisect_left(free, (int(lengths[number]), 0))
        left, row = free.pop(place) if place < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left > lengths[number]:
            bisect.insort(free, (left - int(lengths[number]), row))
    return rows


def _inputs(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split B rows of S + 1 tokens and their loss masks, both [B, S + 1], into inputs, labels and the labels' mask.

    Returns:
        [B, S] inputs, [B, S] labels, and [B, S] fp32 loss mask of the labels.
    """
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask[:, 1:].float().contiguous()


class PairBatch(NamedTuple):
    """Micro-batch of B pairs of answers: rows 0 to B - 1 have the preferred answers, rows B to 2B - 1 the rejected.

    A row has S tokens: prompt, answer and padding.

    Attributes:
        tokens: [2B, S] int64 tokens of prompt and answer, which are the inputs of the model.
        labels: [2B, S] int64 token that follows each input token.
        loss_mask: [2B, S] fp32, 1 where the label is a token of the answer.
        position_ids: [2B, S] int64 position of each token in its row.
        document_starts: None, because a row has only one document, followed by padding.
        ref_logps: [2B] fp32 sums of the reference model's log-probabilities over each answer; None without a reference
            model, or if the objective computes these sums itself.
        margins: [B] fp32 numbers by which the scores of preferred answers should be higher, for the objective reward;
            None for 0.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    margins: torch.Tensor | None = None


class RolloutBatch(NamedTuple):
    """Sampled completions of the policy: a micro-batch on a device, or all of a data rank's completions on the CPU.

    There are B completions, each in a row of S tokens.

    Attributes:
        tokens: [B, S] int64 prompt, completion and padding, which are the inputs of the model.
        labels: [B, S] int64 token that follows each input token.
        loss_mask: [B, S] fp32, 1 where the label is a token of the completion that is trained on.
        position_ids: [B, S] int64 position of each token in its row.
        document_starts: None, because a row has only one document, followed by padding.
        advantages: fp32 advantages, [B] for completions (GRPO, RLOO) or [B, S] for tokens (PPO); None before the
            rewards are known.
        old_logps: [B, S] fp32 log-probabilities of the labels before the first update with these completions; None if
            the policy has not changed since sampling, so that the loss uses the detached log-probabilities of its own
            forward.
        ref_logps: [B, S] fp32 log-probabilities of the labels under the reference model; None without a reference.
        sampling_logps: [B, S] fp32 log-probabilities at which the tokens were sampled, only for logging.
        values: [B, S] fp32 outputs of the value head before the first update with these completions (PPO).
        returns: [B, S] fp32 targets for the value head (PPO).
        value_mask: [B, S] fp32, 1 where the value head is trained (PPO, see `losses.value_mask`).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampling_logps: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    value_mask: torch.Tensor | None = None

    def part(self, first: int, last: int) -> RolloutBatch:
        """Return a batch of only the completions in rows `first` to `last` - 1."""
        return mapped(self, lambda t: t[first:last])


def make_rollout_batch(tokens: torch.Tensor, mask: torch.Tensor, **known: torch.Tensor) -> RolloutBatch:
    """Make a batch of completions from rows of tokens: split them into inputs and labels, and add positions.

    Args:
        tokens: [B, S + 1] int64 prompt, completion and padding, for B completions and rows with S inputs.
        mask: [B, S] fp32, 1 where the label is trained on. The label at index t is the token at t + 1.
        **known: values of further fields of `RolloutBatch`, such as `advantages`.
    """
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    return RolloutBatch(tokens[:, :-1], tokens[:, 1:], mask, positions, **known)


def lay_out_rollouts(prompts: Sequence[Sequence[int]], drawn: Drawn, *, max_length: int, pad: int) -> RolloutBatch:
    """Make a batch of prompts and their sampled completions, with one row per prompt.

    Args:
        prompts: token ids of each prompt.
        drawn: one completion for each prompt, with the log-probabilities at which its tokens were sampled.
        max_length: S, the number of inputs in each row of the batch.
        pad: token id that fills the rows after the completions.
    """
    tokens = torch.full((len(prompts), max_length + 1), pad)
    mask, logps = (torch.zeros(len(prompts), max_length) for _ in range(2))
    for row, (prompt, length) in enumerate(zip(prompts, drawn.lengths.tolist(), strict=True)):
        start = len(prompt)
        tokens[row, :start] = torch.tensor(prompt)
        tokens[row, start : start + length] = drawn.tokens[row, :length]
        mask[row, start - 1 : start - 1 + length] = 1.0
        logps[row, start - 1 : start - 1 + length] = drawn.logps[row, :length]
    return make_rollout_batch(tokens, mask, sampling_logps=logps)


def shortened(batch: Batch, multiple: int) -> Batch:
    """Cut the padding from a batch of B rows: cut its [B, S] tensors after the last position that any row needs.

    A row needs the positions of its loss, and one more for a reward model's score or PPO's last value. The results do
    not change, because attention is causal.

    Args:
        batch: batch to cut.
        multiple: divisor of the new row length S, see `row_multiple`; S never grows.
    """
    mask: torch.Tensor = batch.loss_mask  # type: ignore[attr-defined]
    counts = mask.any(dim=0).nonzero()
    # The last label at index t is input t + 1. Keep this input, because its output is a reward model's score or PPO's
    # last value. So the row length is t + 2.
    size = int(counts[-1]) + 2 if len(counts) else 1
    size = -(-size // multiple) * multiple
    return mapped(batch, lambda t: t[:, :size].contiguous() if t.dim() == 2 else t)


def row_multiple(device: torch.device, dims: ParallelDims) -> int:
    """Return the multiple to which the row lengths of micro-batches are rounded up, in tokens.

    The rounding keeps the number of tensor shapes on a GPU small, and gives equal chunks to the tp and cp ranks that
    split a row. Data ranks may have rows of different lengths, because none of their collectives depends on the length.
    """
    return math.lcm(64 if device.type == "cuda" else 8, dims.tp.size * dims.cp.size)
