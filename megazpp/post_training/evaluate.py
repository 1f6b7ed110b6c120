"""Validation of what has a loss: the objective itself on held-out data."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from megazpp.data.loader import BatchLoader
from megazpp.model.gpt import GPTModel
from megazpp.training.context import RunContext
from megazpp.training.objective import Objective
from megazpp.zero.sharding import Sharding


@dataclass
class ObjectiveEvaluator:
    """Mean loss over the first global batches of a dataset, the same at every call; the metrics are logged.

    Args:
        model, sharding: the model in training and its handle.
        loader: batches of the held-out data.
        iterations, batch_size: how many global batches of how many samples.
    """

    model: GPTModel
    sharding: Sharding
    objective: Objective
    loader: BatchLoader
    run: RunContext
    _: KW_ONLY
    iterations: int
    batch_size: int

    @torch.no_grad()
    def __call__(self) -> float:
        """The same number on all ranks; the model is in training mode afterwards and reads its shards anew."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.run.device)
        sums: dict[str, float] = {}
        with self.run.dims.counter.paused():
            for start in range(0, self.iterations * self.batch_size, self.batch_size):
                batches = self.loader.step(start, self.batch_size)
                self.objective.begin_step(batches)
                for batch in batches:
                    total += self.objective.loss(self.model, batch)
                for name, value in self.objective.metrics().items():
                    sums[name] = sums.get(name, 0.0) + value / self.iterations
            self.run.dims.sum_over_data_(total)
        self.sharding.free_gathered()
        self.model.train()
        if sums:
            self.run.log(" validation | " + " | ".join(f"{name}: {value:.4g}" for name, value in sums.items()) + " |")
        return float(total) / self.iterations
