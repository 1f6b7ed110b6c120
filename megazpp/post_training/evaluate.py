"""Validation: the objective on held-out data where it has a loss, else the reward of drawn completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megazpp.post_training.data import PromptDataset
from megazpp.post_training.rollouts import RolloutLoader
from megazpp.training.objective import Evaluator, Objective


@dataclass
class ObjectiveEvaluator(Evaluator):
    """Mean loss over the first global batches of a dataset, the same at every call; the metrics are logged.

    Args:
        objective: whose denominators span a global batch.
        log: told the metrics.
    """

    objective: Objective
    log: Callable[[str], None]

    def mean_loss(self, steps: Iterable[Sequence[Any]]) -> float:
        """The mean over the steps."""
        total = torch.zeros((), dtype=torch.float64, device=self.model.embedding.word.weight.device)
        sums: dict[str, float] = {}
        for batches in steps:
            self.objective.begin_step(batches)
            for batch in batches:
                total += self.objective.loss(self.model, batch)
            for name, value in self.objective.metrics().items():
                sums[name] = sums.get(name, 0.0) + value / self.iterations
        if sums:
            self.log(" validation | " + " | ".join(f"{name}: {value:.4g}" for name, value in sums.items()) + " |")
        return float(self.dims.sum_over_data_(total)) / self.iterations


@dataclass
class RewardEvaluator:
    """Mean reward of drawn completions of held-out prompts, the same prompts and numbers at every call.

    Args:
        loader: of the training, whose sampler and reward model are used.
        prompts: the held-out data.
        count: of prompts, over all ranks.
    """

    loader: RolloutLoader
    prompts: PromptDataset
    count: int

    def __call__(self) -> float:
        """The same number on all ranks."""
        loader, sampler = self.loader, self.loader.sampler
        dims = sampler.dims
        rows = range(dims.data_rank, self.count, dims.data_size)
        with dims.counter.paused():
            prompts = [self.prompts[row] for row in rows]
            drawn, texts = sampler.draw(prompts, [f"validation prompt {row}" for row in rows])
            total = loader.totals(loader.judged(prompts, drawn, texts))
            reward, count = loader.summed(torch.stack((total.nansum(), (~total.isnan()).sum().double()))).tolist()
        return reward / count if count else math.nan
