"""Dropout that is right under tensor parallelism.

Where tp ranks hold different activations (heads of attention, slices of the sequence) their masks must differ:
torch's default generator, seeded differently on each rank, does that. Where they hold the same activations (the
residual stream without sequence parallelism) the masks must agree: `Dropout` draws from a generator that is
seeded alike on all tp ranks of a data rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.tensor_parallel.parameters import seed_for


class SharedGenerator:
    """A generator whose state is the same on all tp ranks of a data rank.

    Args:
        device: where masks are drawn.
        seed: the run's seed.
        data_rank: data ranks see different samples and draw different masks.
    """

    def __init__(self, device: torch.device, *, seed: int, data_rank: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint(context_fn=...)`: the recomputation draws what the forward drew."""
        return nullcontext(), self._replay(self.generator.get_state())

    @contextmanager
    def _replay(self, state: torch.Tensor) -> Iterator[None]:
        now = self.generator.get_state()
        self.generator.set_state(state)
        try:
            yield
        finally:
            self.generator.set_state(now)


class Dropout(nn.Module):
    """Zero a share `rate` of the elements in training and scale the rest by 1 / (1 - rate).

    Args:
        shared: draw from this generator (tp ranks agree); None for torch's default generator (tp ranks differ).
    """

    def __init__(self, rate: float, shared: SharedGenerator | None) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shared is None or self.rate == 0.0 or not self.training:
            return F.dropout(x, self.rate, self.training)
        return _shared_dropout(x, self.rate, self.shared.generator)


@torch.compiler.disable
def _shared_dropout(x: torch.Tensor, rate: float, generator: torch.Generator) -> torch.Tensor:
    keep = torch.empty_like(x).bernoulli_(1.0 - rate, generator=generator)
    return x * keep.div_(1.0 - rate)
