"""Frozen models beside the policy: the reference, and a trained reward model.

With --precompute-ref-log-probs the reference's log-probabilities of all pairs of a data set are computed once, and kept
beside the tokens, an array for every CHUNK pairs: a run that was stopped is taken up there. Their names follow from the
tokens and masks of the pairs (so from text, template, tokenizer and --max-length), the reference's checkpoint, and the
precision it computes in; the next run that has the same never opens the reference. Rank 0 reads and writes. Beside an
array is its CRC-32: a damaged one is an error.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import SCORE_PAD, SHAPE, CheckpointMetadata, shape_of
from megazpp.checkpoint.read import LoadSource, find_weights
from megazpp.checkpoint.state import Saved, StatePart
from megazpp.checkpoint.weights import FrozenPlace
from megazpp.data.cache import cache_key, check_cache_dir, load_or_save_arrays
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.load import WeightsConfig, load_used_model
from megazpp.parallel.dims import raise_on_all_ranks
from megazpp.post_training.batch import row_multiple
from megazpp.post_training.data import PreferenceDataset, make_pair_batch
from megazpp.post_training.objectives import Logps, scores
from megazpp.tensor_parallel.lora import adapters_off
from megazpp.tensor_parallel.parameters import local
from megazpp.training.setup import ModelSpec, ShardedModel

CHUNK = 2048  # pairs between two writes


class FrozenModel:
    """A model that is asked and never changed.

    Args:
        temperature: of its log-probabilities.
        is_policy: it is the policy in training, without its adapters.
        score_pad: token that no score is at (`objectives.scores`).
    """

    def __init__(
        self, model: GPTModel, *, temperature: float = 1.0, is_policy: bool = False, score_pad: int | None = None
    ) -> None:
        self._model, self._temperature = model if is_policy else model.eval(), temperature
        self._score_pad = score_pad

    @torch.no_grad()
    def logps(self, batch: Any) -> torch.Tensor:
        """[B, S] fp32 log-probabilities of the labels of a batch."""
        with adapters_off(self._model):
            return -self._model(
                batch.tokens, batch.labels, position_ids=batch.position_ids, temperature=self._temperature
            )

    @torch.no_grad()
    def scores(self, batch: Any) -> torch.Tensor:
        """[B] fp32: what the scalar head makes of each row."""
        return scores(self._model, batch, pad=self._score_pad)


class SyncedModel(FrozenModel, StatePart):
    """A reference that takes a share `alpha` of the policy after `every` steps (TR-DPO, Gorbatovski et al. 2024).

    Both are alike in shape and shards, so that no rank sends anything for it. Checkpoints keep it, sharded like the
    policy.
    """

    prefix = "reference."

    def __init__(
        self, reference: ShardedModel, policy: ShardedModel, *, alpha: float, every: int, temperature: float = 1.0
    ) -> None:
        super().__init__(reference.model, temperature=temperature)
        self.built, self._policy, self._alpha, self._every = reference, policy, alpha, every

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        yield
        if iteration % self._every == 0:
            self.take(self._alpha)

    def tensors(self) -> dict[str, torch.Tensor]:
        self.built.sharding.reshard()
        return {name: parameter.detach() for name, parameter in self.built.model.named_parameters()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        return self.tensors()

    def take(self, alpha: float) -> None:
        """Mix the policy's weights in."""
        for each in (self.built, self._policy):
            each.sharding.reshard()  # parameters are shards from here on
        mix_(self.built.model.parameters(), self._policy.model.parameters(), alpha)


@torch.no_grad()
def mix_(reference: Iterable[torch.Tensor], policy: Iterable[torch.Tensor], alpha: float) -> None:
    """Make each tensor of `reference` 1 - alpha of itself and alpha of the policy's."""
    for own, new in zip(reference, policy, strict=True):
        local(own).mul_(1.0 - alpha).add_(local(new), alpha=alpha)


def find_frozen(
    folder: CheckpointFolder, iteration: int | None, *, scalar_head: bool, lora_base: tuple[str, ...] = ()
) -> tuple[LoadSource, CheckpointMetadata]:
    """Find the checkpoint of a frozen model and its record; raise ValueError if there is none, or no scalar head."""
    source, record = find_weights(folder, iteration, lora_base=lora_base)
    if scalar_head and not record.is_reward_model:
        raise ValueError(f"{folder.name} is no reward model: it has no scalar head (--objective reward trains one)")
    return source, record


def load_frozen(
    spec: ModelSpec,
    place: FrozenPlace,
    weights: WeightsConfig,
    folder: CheckpointFolder,
    iteration: int | None,
    *,
    temperature: float = 1.0,
    lora_base: tuple[str, ...] = (),
) -> FrozenModel:
    """The model of a checkpoint, on all ranks together: in frozen units, or streamed from where `weights` says.

    Args:
        spec: of the policy; `scalar_head` says whether it has to have one. A reward model has a shape of its own.
        iteration: None for the latest.
    Raises:
        ValueError: there is no checkpoint, or it is another model's or tokenizer's, or has no scalar head.
    """
    source, record = find_frozen(folder, iteration, scalar_head=spec.scalar_head, lora_base=lora_base)
    if spec.scalar_head:
        spec = replace(spec, config=reward_config(spec.config, record), vocab_size=record.vocab_size)
    model, _ = load_used_model(weights, spec, place, source, record)
    return FrozenModel(model, temperature=temperature, score_pad=record.flags.get(SCORE_PAD))


def reward_config(policy: GPTConfig, record: CheckpointMetadata) -> GPTConfig:
    """Return the shape of a reward model's checkpoint, computed as the policy is (compilation, float8)."""
    own = {field.name: getattr(policy, field.name) for field in fields(GPTConfig) if field.name not in SHAPE}
    return GPTConfig(**own | shape_of(record.flags))


def cached_logps(
    dataset: PreferenceDataset,
    open_reference: Callable[[], Logps],
    place: FrozenPlace,
    *,
    reference: str,
    folder: Path,
    micro_batch_size: int,
) -> torch.Tensor:
    """[pairs, 2] fp32 log-probabilities of both answers of all pairs of the files, on the CPU of every rank.

    Args:
        open_reference: called on all ranks where not all of them are on disk.
        reference: names it and how it computes.
        folder: of the arrays.
    Raises:
        ValueError: an array cannot be read or written; on every rank.
    """
    files, total = place.files, dataset.num_pairs

    def find() -> dict[Path, torch.Tensor | None]:
        if files.rank > 0:
            return {}
        check_cache_dir(folder)
        key = cache_key(kind="reference log-probabilities 3", data=dataset.digest(), reference=reference)
        paths = [folder / f"{key}-{first}" for first in range(0, total, CHUNK)]
        return {path: _load(path) if path.exists() else None for path in paths}

    def write(path: Path, logps: torch.Tensor) -> None:
        if files.rank == 0:
            load_or_save_arrays(path, lambda: [logps.numpy(), _crc(logps.numpy())])

    chunks: dict[Path, torch.Tensor | None] = files.share_object(raise_on_all_ranks(files, find))
    known = sum(len(chunk) for chunk in chunks.values() if chunk is not None)
    place.say(f"the reference's log-probabilities of {total:,} pairs: {known:,} are in {folder}")
    found = []
    for first, (path, chunk) in zip(range(0, total, CHUNK), chunks.items(), strict=True):
        if chunk is None:
            pairs = range(first, min(first + CHUNK, total))
            chunk = _compute_logps(open_reference(), dataset, pairs, place, micro_batch_size)
            raise_on_all_ranks(files, functools.partial(write, path, chunk))
        found.append(chunk)
    return torch.cat(found)


def _load(path: Path) -> torch.Tensor:
    """Raises ValueError if they are not as they were written."""
    logps, *crcs = [np.array(array) for array in load_or_save_arrays(path, list)] or [np.zeros(0)]
    if crcs != [_crc(logps)]:
        raise ValueError(f"--data-cache-path: {path} is damaged; delete it to rebuild it")
    return torch.from_numpy(logps)


def _crc(array: np.ndarray) -> np.ndarray:
    return np.array(zlib.crc32(array.astype("<f4").tobytes()))


@torch.no_grad()
def _compute_logps(
    reference: Logps, dataset: PreferenceDataset, pairs: range, place: FrozenPlace, micro_batch_size: int
) -> torch.Tensor:
    """[len(pairs), 2] on the CPU of every rank; micro-batches go to data ranks in turn, all run equally many."""
    dims, found, multiple = place.dims, torch.zeros(len(pairs), 2), row_multiple(place.device, place.dims)
    stride = micro_batch_size * dims.data_size
    with dims.counter.paused():  # no step sends this
        for first in range(dims.data_rank * micro_batch_size, -(-len(pairs) // stride) * stride, stride):
            places = range(first, first + micro_batch_size)
            samples = np.stack([dataset.pair(pairs[each % len(pairs)]) for each in places])
            batch = make_pair_batch(torch.from_numpy(samples), multiple=multiple).to(place.device)
            logps = (reference(batch) * batch.loss_mask).sum(dim=1).view(2, -1).t().cpu()
            for each, row in zip(places, logps, strict=True):
                if each < len(pairs):
                    found[each] = row
        return dims.sum_over_data_(found.to(place.device)).cpu()
