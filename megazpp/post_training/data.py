"""Data sets of post-training: examples, pairs and prompts by the number of the sample.

Each epoch is a permutation of its own, which follows from the seed and the number of the epoch; sample i is example
i mod N of it. So what a step trains on follows from the samples consumed so far, whatever the number of ranks.

Samples are [rows, S + 1] int64 with S = --max-length, padded on the right, so that all are of one size and BatchLoader
takes them as it takes windows of documents:

    supervised    tokens, mask, positions
    pairs         preferred tokens, mask, rejected tokens, mask; the last row begins with the number of the pair

Batches made of them are cut to their longest row, rounded up (`shortened`).

A mask is 1 where the token is to be predicted. With --packing a row holds several examples, each with positions from
0: the best fit in the order of falling length (as TRL's `bfd`), once for all epochs.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megazpp.data.cache import cache_key
from megazpp.data.identity import Source
from megazpp.data.loader import MicroBatch
from megazpp.post_training.batch import PairBatch, shortened
from megazpp.post_training.formatting import Examples, Prompt


class EpochOrder:
    """The order in which N things come as samples; a data set has one of its own.

    Args:
        size: N.
        num_samples: how many will be asked for; None for one epoch.
        seed: of the permutations; None keeps the order.
    """

    def __init__(self, size: int, *, num_samples: int | None, seed: int | None) -> None:
        self._size, self._seed = size, seed
        self._num_samples = size if num_samples is None else num_samples
        self._permutation = functools.lru_cache(maxsize=4)(self._permute)

    def __len__(self) -> int:
        return self._num_samples

    def place(self, index: int) -> int:
        """The number of the thing that is sample `index`."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        epoch, place = divmod(index, self._size)
        return place if self._seed is None else int(self._permutation(epoch)[place])

    def digest(self) -> str:
        """Return a name for the things."""
        raise NotImplementedError

    def order(self) -> str:
        """Return a name for the samples in their order; see data/identity.py."""
        return cache_key(digest=self._digest, size=self._size, seed=self._seed)

    def sources(self) -> list[Source]:
        """Return the one source; see data/identity.py."""
        return [Source("the examples", self._digest, 1.0, self._size, self.order())]

    @functools.cached_property
    def _digest(self) -> str:
        return self.digest()

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        assert self._seed is not None
        return np.random.default_rng((self._seed, epoch)).permutation(self._size)


class SupervisedDataset(EpochOrder):
    """Samples of supervised training: [3, max_length + 1] int64, to be batched by `make_supervised_batch`.

    Args:
        num_samples, seed: see `EpochOrder`.
        max_length: S.
        pad: the id that stands after an example.
        packing: several examples to a sample.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        num_samples: int | None,
        seed: int | None,
        max_length: int,
        pad: int,
        packing: bool = False,
    ) -> None:
        self._examples, self._max_length, self._pad, self._packed = examples, max_length, pad, packing
        lengths = np.diff(examples.starts)
        self._rows = pack(lengths, max_length) if packing else [[number] for number in range(len(lengths))]
        self.samples_per_epoch = len(self._rows)
        super().__init__(len(self._rows), num_samples=num_samples, seed=seed)

    def digest(self) -> str:
        """Return a name for the tokens and masks of all rows."""
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
    """Pairs: [5, max_length + 1] int64, to be batched by `make_pair_batch`; arguments as for `SupervisedDataset`.

    Attributes:
        ref_logps: [pairs, 2] fp32, the reference's log-probabilities of both answers of each; None: they are not known.
    """

    def __init__(
        self, examples: Examples, *, num_samples: int | None, seed: int | None, max_length: int, pad: int
    ) -> None:
        self._examples, self._max_length, self._pad = examples, max_length, pad
        self.num_pairs = (len(examples.starts) - 1) // 2
        self.ref_logps: torch.Tensor | None = None
        super().__init__(self.num_pairs, num_samples=num_samples, seed=seed)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.pair(self.place(index))

    def pair(self, number: int) -> npt.NDArray[np.int64]:
        """Pair `number` of the files, as a sample."""
        sample = np.zeros((5, self._max_length + 1), dtype=np.int64)
        sample[0] = sample[2] = self._pad
        for row in (0, 1):
            tokens, mask = self._examples.row(2 * number + row)
            sample[2 * row : 2 * row + 2, : len(tokens)] = tokens, mask
        sample[4, 0] = number
        return sample

    def digest(self) -> str:
        """Names the tokens and masks of all pairs."""
        return digest_of(self._examples)


class PromptDataset(EpochOrder):
    """Prompts in the order of the samples."""

    def __init__(self, prompts: Sequence[Prompt], *, num_samples: int | None, seed: int | None) -> None:
        self._prompts = prompts
        super().__init__(len(prompts), num_samples=num_samples, seed=seed)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[self.place(index)]

    def digest(self) -> str:
        """Return a name for the tokens and columns of all prompts."""
        found = hashlib.blake2b(digest_size=16)
        for prompt in self._prompts:
            found.update(cache_key(tokens=prompt.tokens, columns=prompt.columns).encode())
        return found.hexdigest()


def digest_of(examples: Examples) -> str:
    """Return a name for the tokens and masks of examples."""
    found = hashlib.blake2b(digest_size=16)
    for array in (examples.tokens, examples.mask, examples.starts):
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def make_supervised_batch(samples: torch.Tensor, *, multiple: int = 1, packing: bool = False) -> MicroBatch:
    """A micro-batch of [B, 3, S + 1] samples of a `SupervisedDataset`; with packing, attention stays in examples.

    Args:
        multiple: see `shortened`.
    """
    tokens, mask, positions = samples.unbind(dim=1)
    batch = shortened(MicroBatch(*_inputs(tokens, mask), positions[:, :-1], None), multiple)
    if not packing:
        return batch
    offsets = (batch.position_ids == 0).flatten().nonzero().flatten()
    starts = torch.cat([offsets, offsets.new_tensor([batch.tokens.numel()])]).to(torch.int32)
    return batch._replace(document_starts=starts)


def make_pair_batch(samples: torch.Tensor, *, multiple: int = 1, ref_logps: torch.Tensor | None = None) -> PairBatch:
    """The pairs of [B, 5, S + 1] samples of a `PreferenceDataset`.

    Args:
        multiple: see `shortened`.
        ref_logps: [pairs of the data set, 2] the reference model's log-probabilities of preferred and rejected answers.
    """
    tokens = torch.cat((samples[:, 0], samples[:, 2]))
    mask = torch.cat((samples[:, 1], samples[:, 3]))
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
    known = None if ref_logps is None else ref_logps[samples[:, 4, 0]].float().t().flatten()
    return shortened(PairBatch(*_inputs(tokens, mask), positions, None, known), multiple)


def pack(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of examples that fit into `capacity` tokens each: the longest first, each into the fullest row it fits."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
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
    """Tokens, labels and the mask of the labels."""
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask[:, 1:].float().contiguous()
