"""Validation of what has a loss: the objective itself on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
