"""What enters the first layer: words, and learned positions where the model has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.model.dropout import Dropout, SharedGenerator
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import VocabParallelEmbedding
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import sum_gradients


class Embedding(nn.Module):
    """Words plus learned positions, then dropout: tokens [B, S] -> [S, B, H] ([S/T, B, H] with sequence parallelism).

    Collectives on tp: those of VocabParallelEmbedding; with sequence parallelism the position table's gradient is
    summed in one more backward all-reduce.
    """

    def __init__(
        self,
        config: GPTConfig,
        vocab_size: int,
        padded_vocab_size: int,
        tp: MeshAxis,
        sequence_parallel: bool,
        shared: SharedGenerator | None,
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            padded_vocab_size,
            config.hidden,
            vocab_size=vocab_size,
            tp=tp,
            std=config.init_method_std,
            sequence_parallel=sequence_parallel,
        )
        self.position = (
            PositionEmbedding(config, tp, sequence_parallel) if config.positions == "learned_absolute" else None
        )
        self.dropout = Dropout(config.hidden_dropout, shared)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens.t())
        if self.position is not None:
            x = x + self.position(position_ids.t())
        return self.dropout(x)


class PositionEmbedding(nn.Module):
    """A learned table of positions: position_ids [S, B] -> [S, B, H] ([S/T, B, H] with sequence parallelism)."""

    def __init__(self, config: GPTConfig, tp: MeshAxis, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        assert config.max_position_embeddings is not None
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std)}

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        if self.sequence_parallel:
            position_ids = position_ids.chunk(self.tp.size)[self.tp.rank]
            (weight,) = sum_gradients(self.tp, weight)
        return F.embedding(position_ids, weight)
