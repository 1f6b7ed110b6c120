"""Frozen models beside the policy: the reference, and a trained reward model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.parts import weights_bytes
from megazpp.checkpoint.read import LoadSource, find_weights
from megazpp.checkpoint.record import RunRecord
from megazpp.checkpoint.state import Saved, StatePart
from megazpp.model.gpt import GPTModel, TokenOutputs
from megazpp.post_training.objectives import scores_of
from megazpp.stored.load import FrozenPlace, WeightsConfig, load_frozen_model, load_streamed_model
from megazpp.tensor_parallel.lora import adapters_off
from megazpp.tensor_parallel.parameters import local
from megazpp.training.setup import Built, ModelSpec


class BaseModel:
    """The reference of a policy with adapters: the policy without them; arguments as for `FrozenModel`."""

    def __init__(self, policy: GPTModel, *, temperature: float = 1.0) -> None:
        self._policy, self._temperature = policy, temperature

    @torch.no_grad()
    def logps(self, batch: Any) -> torch.Tensor:
        """[B, S] fp32 log-probabilities of the labels of a batch."""
        with adapters_off(self._policy):
            return -self._policy(
                batch.tokens, batch.labels, position_ids=batch.position_ids, temperature=self._temperature
            )


class FrozenModel:
    """A model that is asked and never changed.

    Args:
        temperature: of its log-probabilities.
    """

    def __init__(self, model: GPTModel, *, temperature: float = 1.0) -> None:
        self._model, self._temperature = model.eval(), temperature

    @torch.no_grad()
    def logps(self, batch: Any) -> torch.Tensor:
        """[B, S] fp32 log-probabilities of the labels of a batch."""
        return -self._model(batch.tokens, batch.labels, position_ids=batch.position_ids, temperature=self._temperature)

    @torch.no_grad()
    def scores(self, batch: Any) -> torch.Tensor:
        """[B] fp32: what the scalar head makes of each row."""
        outputs: TokenOutputs = self._model(batch.tokens, position_ids=batch.position_ids, with_values=True)
        assert outputs.values is not None
        return scores_of(outputs.values, batch.loss_mask)


class SyncedModel(FrozenModel, StatePart):
    """A reference that takes a share `alpha` of the policy after `every` steps (TR-DPO, Gorbatovski et al. 2024).

    Both are alike in shape and shards, so that no rank sends anything for it. Checkpoints keep it, sharded like the
    policy.
    """

    prefix = "reference."

    def __init__(self, reference: Built, policy: Built, *, alpha: float, every: int, temperature: float = 1.0) -> None:
        super().__init__(reference.model, temperature=temperature)
        self.built, self._policy, self._alpha, self._every = reference, policy, alpha, every

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        yield
        if iteration % self._every == 0:
            self.take(self._alpha)

    def tensors(self) -> dict[str, torch.Tensor]:
        self.built.sharding.free_gathered()
        return {name: parameter.detach() for name, parameter in self.built.model.named_parameters()}

    def targets(self, saved: Saved) -> dict[str, torch.Tensor]:
        return self.tensors()

    def estimate_bytes(self) -> int:
        return weights_bytes(self.built.model)

    def take(self, alpha: float) -> None:
        """Mix the policy's weights in."""
        for each in (self.built, self._policy):
            each.sharding.free_gathered()  # parameters are shards from here on
        mix_(self.built.model.parameters(), self._policy.model.parameters(), alpha)


@torch.no_grad()
def mix_(reference: Iterable[torch.Tensor], policy: Iterable[torch.Tensor], alpha: float) -> None:
    """Make each tensor of `reference` 1 - alpha of itself and alpha of the policy's."""
    for own, new in zip(reference, policy, strict=True):
        local(own).mul_(1.0 - alpha).add_(local(new), alpha=alpha)


def find_frozen(
    folder: CheckpointFolder, iteration: int | None, *, scalar_head: bool, lora_base: tuple[str, ...] = ()
) -> tuple[LoadSource, RunRecord]:
    """Find the checkpoint of a frozen model and its record; raise ValueError if there is none, or no scalar head."""
    source, record = find_weights(folder, iteration, lora_base=lora_base)
    if scalar_head and record.flags.get("objective") != "reward":
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
        spec: of the policy; `scalar_head` says whether it has to have one.
        iteration: None for the latest.
    Raises:
        ValueError: there is no checkpoint, or it is another model's or tokenizer's, or has no scalar head.
    """
    source, record = find_frozen(folder, iteration, scalar_head=spec.scalar_head, lora_base=lora_base)
    if spec.scalar_head:
        untied = record.flags.get("untie_embeddings_and_output_weights", False)  # an imported one has no output layer
        spec = replace(spec, config=replace(spec.config, untie_embeddings_and_output_weights=untied))
    if weights.packs:
        model, _ = load_streamed_model(weights, spec, place, source, record)
    else:
        model = load_frozen_model(spec, place, source, record).model
    return FrozenModel(model, temperature=temperature)
