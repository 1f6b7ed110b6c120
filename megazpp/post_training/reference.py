"""Frozen models of a post-training: the reference model and a trained reward model.

With --precompute-ref-log-probs, the reference's log-probabilities of all pairs of a dataset are computed once and
cached. The cache key contains the tokens and masks of the pairs (and so text, template, tokenizer and --max-length),
the reference's checkpoint, and the precision of the computation. A later run with the same key never opens the
reference. Rank 0 reads and writes the cache.
"""

from __future__ import annotations

import contextlib
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
from megazpp.checkpoint.weights import WHOLE_WEIGHTS, WeightOpener
from megazpp.data.cache import cache_key, check_cache_dir, load_or_save_arrays
from megazpp.data.loader import on_device
from megazpp.lora.layers import adapters_off
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.config import WeightsConfig
from megazpp.packed_weights.load import load_used_model
from megazpp.packed_weights.reader import FrozenPlace
from megazpp.parallel.dims import raise_on_all_ranks
from megazpp.post_training.batch import row_multiple
from megazpp.post_training.data import PreferenceDataset, make_pair_batch
from megazpp.post_training.objectives import Logps, TokenHead, scores
from megazpp.tensor_parallel.parameters import local, model_state
from megazpp.training.config import ModelSpec
from megazpp.training.setup import ShardedModel


class FrozenModel:
    """A model that is never trained.

    Args:
        model: the model.
        temperature: divisor of the logits for log-probabilities.
        is_policy: True if `model` is the trained policy, which serves as the reference with its adapters off.
        score_pad: padding token of `objectives.scores`.
    """

    def __init__(
        self, model: GPTModel, *, temperature: float = 1.0, is_policy: bool = False, score_pad: int | None = None
    ) -> None:
        self._model, self._temperature = model if is_policy else model.eval(), temperature
        self._score_pad = score_pad

    @torch.no_grad()
    def logps(self, batch: Any) -> torch.Tensor:
        """Return the [B, S] fp32 log-probabilities of a batch's labels."""
        with adapters_off(self._model):
            head = TokenHead(batch.labels, temperature=self._temperature)
            return -self._model(batch.tokens, position_ids=batch.position_ids, head=head).losses

    @torch.no_grad()
    def scores(self, batch: Any) -> torch.Tensor:
        """Return the [B] fp32 scores of a batch's rows."""
        return scores(self._model, batch, pad=self._score_pad)


class SyncedModel(FrozenModel, StatePart):
    """A reference into which a share of the policy is mixed at intervals (TR-DPO, Gorbatovski et al. 2024).

    Reference and policy have equal shapes and shards, so mixing needs no communication. Checkpoints contain the
    reference, sharded like the policy.

    Args:
        reference: the reference model.
        policy: the trained policy.
        alpha: share of the policy in the mixture.
        every: optimizer steps between two mixtures.
        temperature: divisor of the logits for log-probabilities.
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
        return {name: tensor.detach() for name, tensor in model_state(self.built.model).items()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        return self.tensors()

    def take(self, alpha: float) -> None:
        """Mix a share `alpha` of the policy's weights into the reference."""
        for each in (self.built, self._policy):
            each.sharding.reshard()  # so that the parameters are shards
        own, new = (model_state(each.model).values() for each in (self.built, self._policy))
        mix_(own, new, alpha)


@torch.no_grad()
def mix_(reference: Iterable[torch.Tensor], policy: Iterable[torch.Tensor], alpha: float) -> None:
    """Replace each tensor of `reference` by (1 - alpha) of itself plus alpha of the policy's."""
    for own, new in zip(reference, policy, strict=True):
        local(own).mul_(1.0 - alpha).add_(local(new), alpha=alpha)


def find_frozen(
    folder: CheckpointFolder, iteration: int | None, opener: WeightOpener, *, scalar_head: bool
) -> tuple[LoadSource, CheckpointMetadata]:
    """Return the checkpoint of a frozen model and its metadata.

    Args:
        folder: folder of checkpoints.
        iteration: iteration to find; None for the latest.
        opener: opener of the weights.
        scalar_head: True if the model has to be a reward model.
    Raises:
        ValueError: there is no checkpoint, or it has no scalar head.
    """
    source, record = find_weights(folder, iteration, opener=opener)
    if scalar_head and not record.is_reward_model:
        raise ValueError(f"{folder.name} is no reward model: it has no scalar head (--objective reward trains one)")
    return source, record


def load_frozen(
    spec: ModelSpec,
    place: FrozenPlace,
    weights: WeightsConfig,
    folder: CheckpointFolder,
    iteration: int | None,
    opener: WeightOpener = WHOLE_WEIGHTS,
    *,
    temperature: float = 1.0,
) -> FrozenModel:
    """Load the model of a checkpoint, on all ranks together.

    Args:
        spec: specification of the policy, with `scalar_head` for a reward model, which has its own architecture.
        place: device and groups for the frozen weights.
        weights: flags for the storage of the weights: in frozen units, or streamed from the host or a disk.
        folder: folder of checkpoints.
        iteration: iteration to load; None for the latest.
        opener: opener of the weights.
        temperature: divisor of the logits for log-probabilities.
    Raises:
        ValueError: there is no checkpoint, it belongs to another model or tokenizer, or it has no scalar head.
    """
    source, record = find_frozen(folder, iteration, opener, scalar_head=spec.scalar_head)
    if spec.scalar_head:
        spec = replace(spec, config=reward_config(spec.config, record), vocab_size=record.vocab_size)
    model, _ = load_used_model(weights, spec, place, source, record)
    return FrozenModel(model, temperature=temperature, score_pad=record.flags.get(SCORE_PAD))


def reward_config(policy: GPTConfig, record: CheckpointMetadata) -> GPTConfig:
    """Return the architecture of a reward model's checkpoint, with the policy's execution flags (compile, float8)."""
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
    """Return the reference's log-probabilities of both answers of all pairs, from the cache where possible.

    Args:
        dataset: pairs.
        open_reference: function that opens the reference; it is called on all ranks if the cache has no values.
        place: device and groups for the frozen weights.
        reference: description of the reference and its precision, for the cache key.
        folder: cache folder of the values.
        micro_batch_size: pairs of one forward.
    Returns:
        [pairs, 2] fp32, on the CPU of every rank.
    Raises:
        ValueError: the values cannot be read or written; raised on every rank.
    """
    files, total = place.files, dataset.num_pairs
    path = folder / cache_key(kind="reference log-probabilities 4", data=dataset.digest(), reference=reference)

    def find() -> torch.Tensor | None:
        if files.rank > 0:
            return None
        check_cache_dir(folder)
        return torch.from_numpy(np.array(*load_or_save_arrays(path, list))) if path.exists() else None

    known: torch.Tensor | None = files.share_object(raise_on_all_ranks(files, find))
    place.say(
        f"the reference's log-probabilities of {total:,} pairs: {total if known is not None else 0:,} are in {folder}"
    )
    if known is not None:
        return known
    found = _compute_logps(open_reference(), dataset, place, micro_batch_size)

    def write() -> None:
        if files.rank == 0:
            load_or_save_arrays(path, lambda: [found.numpy()])

    raise_on_all_ranks(files, write)
    return found


@torch.no_grad()
def _compute_logps(
    reference: Logps, dataset: PreferenceDataset, place: FrozenPlace, micro_batch_size: int
) -> torch.Tensor:
    """Compute [pairs, 2] log-probabilities; data ranks take turns and all run the same number of micro-batches."""
    dims, count, multiple = place.dims, dataset.num_pairs, row_multiple(place.device, place.dims)
    found, stride = torch.zeros(count, 2), micro_batch_size * dims.data_size
    with dims.counter.paused():  # this traffic belongs to no step
        for first in range(dims.data_rank * micro_batch_size, -(-count // stride) * stride, stride):
            pairs = range(first, first + micro_batch_size)
            samples = np.stack([dataset.pair(pair % count) for pair in pairs])
            batch = on_device(make_pair_batch(torch.from_numpy(samples), multiple=multiple), place.device)
            logps = (reference(batch) * batch.loss_mask).sum(dim=1).view(2, -1).t().cpu()
            for pair, row in zip(pairs, logps, strict=True):
                if pair < count:
                    found[pair] = row
        return dims.sum_over_data_(found.to(place.device)).cpu()
