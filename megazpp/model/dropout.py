"""Dropout under tensor parallelism.

Tensor-parallel (tp) ranks hold different attention heads and, with sequence parallelism, different slices of the
sequence. Their dropout masks must differ there. The masks come from torch's default generator, which has another seed
on each rank. Without sequence parallelism tp ranks hold the same residual stream, so their masks must be equal there.
These masks come from a `SharedGenerator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.tensor_parallel.parameters import seed_for


class SharedGenerator:
    """Random generator with the same state on all tp ranks of a data rank, and a different state on each data rank.

    Args:
        device: device of the masks.
        seed: seed of the run.
        data_rank: data-parallel rank of this process.
    """

    def __init__(self, device: torch.device, *, seed: int, data_rank: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the two contexts that `torch.utils.checkpoint` expects from its argument `context_fn`.

        They make the recomputation sample the same masks as the forward, and restore the generator's state after it.
        """
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
    """Dropout: in training, set each element to zero with probability `rate` and scale the others by 1 / (1 - rate).

    Args:
        rate: probability that an element is set to zero.
        shared: generator that gives all tp ranks the same masks; None for torch's default generator, with which the
            masks of tp ranks differ.
    """

    def __init__(self, rate: float, shared: SharedGenerator | None) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply dropout to x, with `mask` (a result of `draw`) or, if it is None, with a newly sampled mask."""
        if not self._agrees():
            return F.dropout(x, self.rate, self.training)
        return x * (_draw(x, self.rate, self.shared) if mask is None else mask)

    def draw(self, like: torch.Tensor) -> torch.Tensor | None:
        """Sample the mask for a tensor that is shaped like `like`.

        A compiled layer cannot use the shared generator, so its caller samples the mask beforehand and passes it to
        `forward`. Returns None if no shared generator is used; `forward` then calls torch's dropout.
        """
        return _draw(like, self.rate, self.shared) if self._agrees() else None

    def _agrees(self) -> bool:
        """Return True if dropout is active and its masks come from the shared generator."""
        return self.shared is not None and self.rate > 0.0 and self.training


@torch.compiler.disable
def _draw(like: torch.Tensor, rate: float, shared: SharedGenerator | None) -> torch.Tensor:
    """Sample a mask of 0 and 1 / (1 - rate), with the shape and dtype of `like`."""
    assert shared is not None
    return torch.empty_like(like).bernoulli_(1.0 - rate, generator=shared.generator).div_(1.0 - rate)
