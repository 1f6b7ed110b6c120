"""Pretraining's loss by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazpp.training.objective import LanguageModelLoss


def batch_of(loss_mask: list[float]) -> Any:
    return SimpleNamespace(
        tokens=None, labels=None, position_ids=None, document_starts=None, loss_mask=torch.tensor([loss_mask])
    )


@pytest.mark.parametrize(
    ("masks", "loss"),
    [
        (([1.0, 1.0, 0.0], [0.0, 0.0, 1.0]), (2.0 + 3.0 + 5.0) / 3),
        (([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), 0.0),  # no token of the global batch counts
    ],
)
def test_the_shares_of_micro_batches_add_up_to_the_mean_over_the_tokens_that_count(
    masks: tuple[list[float], ...], loss: float
):
    one_rank: Any = SimpleNamespace(sum_over_data_=lambda x: x)
    model: Any = lambda tokens, labels, **_: torch.tensor([[2.0, 3.0, 5.0]])  # noqa: E731
    objective, batches = LanguageModelLoss(one_rank), [batch_of(mask) for mask in masks]
    objective.begin_step(batches)
    assert sum(objective.loss(model, batch).item() for batch in batches) == pytest.approx(loss)
