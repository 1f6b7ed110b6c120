"""The models that a post-training does not train: the reference model, and a trained reward model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.metadata import SCORE_PAD, SHAPE, CheckpointMetadata, shape_of
from megazpp.checkpoint.read import LoadSource, find_weights
from megazpp.checkpoint.safe_reader import WHOLE_WEIGHTS, WeightOpener
from megazpp.data.loader import on_device
from megazpp.lora.layers import adapters_off
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.packed_weights.config import WeightsConfig
from megazpp.packed_weights.load import load_used_model
from megazpp.packed_weights.reader import FrozenPlace
from megazpp.post_training.data import PreferenceDataset, make_pair_batch, row_multiple
from megazpp.post_training.objectives import Logps, TokenHead, scores
from megazpp.training.config import ModelSpec


class FrozenModel:
    """A reference or reward model: it computes log-probabilities or scores without gradients.

    Args:
        model: the reference or reward model; with `is_policy`, the trained policy with adapters.
        temperature: divisor of the logits for log-probabilities.
        is_policy: True if `model` is the trained policy, which is the reference model when its adapters are off. Only
            the policy stays in training mode; any other model is put into evaluation mode.
        score_pad: id of the padding token, if a reward model scores the last token that is not padding; None if it
            scores the last token. See `objectives.scores`.
    """

    def __init__(
        self, model: GPTModel, *, temperature: float = 1.0, is_policy: bool = False, score_pad: int | None = None
    ) -> None:
        self._model, self._temperature = model if is_policy else model.eval(), temperature
        self._score_pad = score_pad

    @torch.no_grad()
    def logps(self, batch: Any) -> torch.Tensor:
        """Compute the reference model's fp32 log-probabilities of a batch's labels: [B, S] for B rows of S tokens.

        If the model is a policy with adapters, its adapters are off, so that the model computes as before training.
        """
        with adapters_off(self._model):
            head = TokenHead(batch.labels, temperature=self._temperature)
            return -self._model(batch.tokens, position_ids=batch.position_ids, head=head).losses

    @torch.no_grad()
    def scores(self, batch: Any) -> torch.Tensor:
        """Compute a reward model's [B] fp32 scores, one for each of the B rows of a batch."""
        return scores(self._model, batch, pad=self._score_pad)


def find_frozen(
    folder: CheckpointFolder, iteration: int | None, opener: WeightOpener, *, scalar_head: bool
) -> tuple[LoadSource, CheckpointMetadata]:
    """Find the checkpoint of a reference or reward model, and read its metadata.

    Args:
        folder: folder of checkpoints.
        iteration: iteration of the checkpoint; None for the latest.
        opener: opener of a checkpoint's weights. LoRA's opener also opens checkpoints that contain only adapters.
        scalar_head: True if the model has to be a reward model.
    Raises:
        ValueError: there is no such checkpoint, or a reward model is required and its checkpoint has no scalar head.
    """
    source, record = find_weights(folder, iteration, opener=opener)
    if scalar_head and not record.is_reward_model:
        raise ValueError(f"{folder.name} is not a reward model, with a scalar head: train one with --objective reward")
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
    """Load a reference or reward model from a checkpoint. All ranks call this.

    Args:
        spec: specification of a model with the policy's architecture. If its `scalar_head` is True, the function loads
            a reward model, and takes the architecture from the reward model's checkpoint instead.
        place: device and process groups for the frozen weights.
        weights: flags for the storage of the weights: packed and sharded, or streamed from host memory or a disk.
        folder: folder of checkpoints.
        iteration: iteration of the checkpoint; None for the latest.
        opener: opener of a checkpoint's weights. LoRA's opener also opens checkpoints that contain only adapters.
        temperature: divisor of the logits for log-probabilities.
    Raises:
        ValueError: there is no such checkpoint, it belongs to another model or tokenizer, or a reward model's
            checkpoint has no scalar head.
    """
    source, record = find_frozen(folder, iteration, opener, scalar_head=spec.scalar_head)
    if spec.scalar_head:
        spec = replace(spec, config=reward_config(spec.config, record), vocab_size=record.vocab_size)
    model, _ = load_used_model(weights, spec, place, source, record)
    return FrozenModel(model, temperature=temperature, score_pad=record.flags.get(SCORE_PAD))


def reward_config(policy: GPTConfig, record: CheckpointMetadata) -> GPTConfig:
    """Return the config of a reward model, which may have another architecture than the policy.

    The architecture comes from the reward model's checkpoint. The flags of execution, such as compile and float8, come
    from the policy's config.
    """
    own = {field.name: getattr(policy, field.name) for field in fields(GPTConfig) if field.name not in SHAPE}
    return GPTConfig(**own | shape_of(record.flags))


@torch.no_grad()
def logps_of_pairs(
    reference: Logps, dataset: PreferenceDataset, place: FrozenPlace, micro_batch_size: int
) -> torch.Tensor:
    """Compute the reference model's log-probabilities of both answers of all pairs. All ranks call this.

    The data ranks divide the pairs, and all of them run the same number of micro-batches.

    Args:
        reference: function that computes the reference model's log-probabilities of a batch's labels.
        dataset: pairs of answers.
        place: device and process groups for the frozen weights.
        micro_batch_size: number of pairs in one forward of a data rank.

    Returns:
        [pairs, 2] fp32 sums of log-probabilities over each answer, on the CPU of every rank.
    """
    dims, count, multiple = place.dims, dataset.num_pairs, row_multiple(place.device, place.dims)
    found, stride = torch.zeros(count, 2), micro_batch_size * dims.data_size
    with dims.counter.paused():  # the log reports the traffic of training steps only
        # Round the number of pairs up to whole micro-batches of all ranks, because all ranks must run equally many
        # forwards. The pairs beyond the end repeat the first pairs, and their results are dropped.
        for first in range(dims.data_rank * micro_batch_size, -(-count // stride) * stride, stride):
            pairs = range(first, first + micro_batch_size)
            samples = np.stack([dataset.pair(pair % count) for pair in pairs])
            batch = on_device(make_pair_batch(torch.from_numpy(samples), multiple=multiple), place.device)
            logps = (reference(batch) * batch.loss_mask).sum(dim=1).view(2, -1).t().cpu()
            for pair, row in zip(pairs, logps, strict=True):
                if pair < count:
                    found[pair] = row
        return dims.sum_over_data_(found.to(place.device)).cpu()
