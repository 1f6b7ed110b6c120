"""A model that trains on real data step by step, and its gradients with their exact sums.

measure_gradient_noise.py sends the gradients, measure_weight_differences.py what they change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megazpp.arguments import ParsedRun
from megazpp.checks import RunPlan
from megazpp.data.batch import MicroBatch
from megazpp.data.dataset import build_tokenizer
from megazpp.data.loader import BatchLoader
from megazpp.model.gpt import GPTModel
from megazpp.optim.optimizer import build_optimizer, set_rates_
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import initialize_parameters_
from megazpp.training.setup import open_datasets, open_loader

CPU = torch.device("cpu")


class Recording(NamedTuple):
    """Gradients of some steps; the ranks' sum is the mean over the global batch.

    Attributes:
        units: shapes of the parameters, unit by unit; the last unit is what the model's root keeps.
        steps: this rank's gradients, parameter by parameter in that order.
        exact: [n] fp64, their sums over all ranks, the same everywhere.
        minibatch: signal to minibatch noise of those sums, in dB, from how the ranks differ.
    """

    units: list[list[torch.Size]]
    steps: list[list[torch.Tensor]]
    exact: list[torch.Tensor]
    minibatch: float


def record_gradients(
    parsed: ParsedRun, plan: RunPlan, dims: ParallelDims, *, train_steps: int, steps: int
) -> Recording:
    """Train a whole copy of the model on each rank, all-reducing its gradients; then record without training on."""
    with open_training(parsed, plan, dims) as training:
        for _ in range(train_steps):
            training.update_(training.next_gradients())
        recorded = [training.next_gradients() for _ in range(steps)]
    exact = [dims.world.all_reduce_(flat(gradients).double()) for gradients in recorded]
    minibatch = _minibatch_ratio(recorded, exact, dims)
    return Recording([[p.shape for p in unit] for unit in training.units], recorded, exact, minibatch)


class Training:
    """A whole copy of a model on each rank; gradients are all-reduced.

    Attributes:
        units: its parameters, unit by unit; the last unit is what the model's root keeps.
    """

    def __init__(self, parsed: ParsedRun, plan: RunPlan, dims: ParallelDims, model: GPTModel, loader: BatchLoader):
        self.clip_grad, self.plan, self.dims = parsed.config.optimizer.clip_grad, plan, dims
        self.model, self.loader, self.consumed = model, loader, 0
        self.optimizer = build_optimizer(list(model.named_parameters()), parsed.config.optimizer, CPU)
        self.units = _parameters_by_unit(model)
        self.parameters = [p for unit in self.units for p in unit]

    def next_gradients(self) -> list[torch.Tensor]:
        """This rank's gradients of the mean loss over the next global batch."""
        size = self.plan.batches.global_batch_size
        batches, self.consumed = self.loader.step(self.consumed, size), self.consumed + size
        return _gradients(self.model, self.parameters, batches, self.dims)

    def update_(self, gradients: list[torch.Tensor]) -> None:
        """One optimizer step with what `next_gradients` returned."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = self.dims.world.all_reduce_(gradient)
        nn.utils.clip_grad_norm_(self.parameters, self.clip_grad)
        before = self.consumed - self.plan.batches.global_batch_size
        rate, decay = self.plan.schedule.learning_rate(before), self.plan.schedule.weight_decay(before)
        set_rates_(self.optimizer, learning_rate=rate, weight_decay=decay)
        self.optimizer.step()


@contextlib.contextmanager
def open_training(parsed: ParsedRun, plan: RunPlan, dims: ParallelDims) -> Iterator[Training]:
    """The model of `parsed` with its first weights, and its data."""
    config, seed = parsed.config, parsed.config.launch.seed
    tokenizer = build_tokenizer(config.tokenizer, config.data, announce=_say_nothing)
    datasets = open_datasets(config.data, tokenizer, plan.batches, config.evaluation, seed=seed, announce=_say_nothing)
    assert datasets.train is not None
    model = GPTModel(config.model, vocab_size=tokenizer.vocab_size, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=seed, draw_device=CPU)
    with open_loader(datasets.train, config.data, tokenizer, plan.batches, dims, CPU, ramp_up=False) as loader:
        yield Training(parsed, plan, dims, model, loader)


def _gradients(
    model: GPTModel, parameters: list[nn.Parameter], batches: Sequence[MicroBatch], dims: ParallelDims
) -> list[torch.Tensor]:
    """This rank's gradients of the mean loss over the global batch."""
    tokens = dims.sum_over_data_(torch.stack([batch.loss_mask.sum() for batch in batches]).sum())
    for batch in batches:
        losses = model(
            batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
        )
        ((losses * batch.loss_mask).sum() / tokens).backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    model.zero_grad()
    return gradients


def _parameters_by_unit(model: GPTModel) -> list[list[nn.Parameter]]:
    """Each parameter once; the last unit is what `sharding_units` leaves to the model."""
    units: list[list[nn.Parameter]] = []
    seen: set[nn.Parameter] = set()
    groups: list[list[nn.Module]] = [*model.sharding_units(), [model]]
    for modules in groups:
        found = [p for module in modules for p in module.parameters() if p not in seen]
        seen.update(found)
        units.append(found)
    return units


def _minibatch_ratio(recorded: list[list[torch.Tensor]], exact: list[torch.Tensor], dims: ParallelDims) -> float:
    """The variance of a mean of W ranks, from the W ranks' distances to it."""
    ranks = dims.data_size
    distances = sum(power(ranks * flat(g).double() - e) for g, e in zip(recorded, exact, strict=True))
    spread = dims.world.all_reduce_(torch.tensor(distances, dtype=torch.float64)).item()
    return decibels(sum(map(power, exact)), spread / (ranks * (ranks - 1)))


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def power(x: torch.Tensor) -> float:
    return float(x.square().sum())


def decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf


def _say_nothing(line: str) -> None:
    """In place of what pretrain_gpt.py announces."""
