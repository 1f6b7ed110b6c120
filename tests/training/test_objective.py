"""Test the loss of language modeling against sums that are written out."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megazpp.training.objective import LanguageModelLoss


def test_micro_batch_shares_add_up_to_the_mean_over_counted_tokens():
    one_rank: Any = SimpleNamespace(data_size=1, replica_group=SimpleNamespace(size=1), sum_over_data_=lambda x: x)
    model = mock.Mock(return_value=(torch.tensor([[2.0, 3.0, 5.0]]), None))
    for masks, loss in (
        (([1.0, 1.0, 0.0], [0.0, 0.0, 1.0]), (2.0 + 3.0 + 5.0) / 3),
        (([0.0, 0.0, 0.0], [0.0, 1.0, 0.0]), 3.0),
        (([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), 0.0),  # the loss is 0 if the masks exclude all tokens of the global batch
    ):
        objective, batches = (
            LanguageModelLoss(one_rank),
            [mock.Mock(tokens=[0], loss_mask=torch.tensor([mask])) for mask in masks],
        )
        objective.begin_step(batches)
        assert sum(objective.loss(model, batch).item() for batch in batches) == pytest.approx(loss), masks
