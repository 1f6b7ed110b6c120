"""Dropout that is right under tensor parallelism.

Where tp ranks hold different activations (heads of attention, slices of the sequence) their masks must differ, and come
from torch's default generator, seeded differently on each rank. Where they hold the same activations (the residual
stream without sequence parallelism) the masks must agree, and come from a `SharedGenerator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.tensor_parallel.parameters import seed_for


class SharedGenerator:
    """A generator whose state is the same on all tp ranks of a data rank; each data rank draws masks of its own."""

    def __init__(self, device: torch.device, *, seed: int, data_rank: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for `torch.utils.checkpoint(context_fn=...)`: the recomputation draws what the forward drew."""
        state = self.generator.get_state()

        @contextmanager
        def replay() -> Iterator[None]:
            now = self.generator.get_state()
            self.generator.set_state(state)
            try:
                yield
            finally:
                self.generator.set_state(now)

        return nullcontext(), replay()


class Dropout(nn.Module):
    """Zero a share `rate` of the elements in training and scale the rest by 1 / (1 - rate).

    Args:
        shared: draw from this generator (tp ranks agree); None for torch's default generator (tp ranks differ).
    """

    def __init__(self, rate: float, shared: SharedGenerator | None) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`mask`: what `draw` gave for it before; None draws one here."""
        if not self._agrees():
            return F.dropout(x, self.rate, self.training)
        return x * (_draw(x, self.rate, self.shared) if mask is None else mask)

    def draw(self, like: torch.Tensor) -> torch.Tensor | None:
        """The next mask for a tensor such as `like`, outside of compiled code; None where torch's generator draws."""
        return _draw(like, self.rate, self.shared) if self._agrees() else None

    def _agrees(self) -> bool:
        return self.shared is not None and self.rate > 0.0 and self.training


@torch.compiler.disable
def _draw(like: torch.Tensor, rate: float, shared: SharedGenerator | None) -> torch.Tensor:
    assert shared is not None
    return torch.empty_like(like).bernoulli_(1.0 - rate, generator=shared.generator).div_(1.0 - rate)
