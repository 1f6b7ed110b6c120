"""Recomputing what stands before a matrix product, but not the product.

Backward of a product needs its input. Where that input is cheap to compute (a norm, an activation) and the product is
not, the two are checkpointed together: autograd keeps what the cheap part was made of, and backward computes again as
far as the product's input, where non-reentrant checkpointing stops, because nothing after it was kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def recomputed(function: Callable[..., T], *args: object, when: bool, draws: bool = False) -> T:
    """`function(*args)`; with `when`, backward computes again what it needs of it, except where nothing is kept anyway.

    Args:
        draws: whether it draws random numbers from torch's default generator, which then has to be wound back.
    """
    if not (when and torch.is_grad_enabled()):
        return function(*args)
    result: T = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)
    return result
