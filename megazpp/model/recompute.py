"""Recomputing what stands before a matrix product, but not the product.

A norm or an activation is checkpointed together with the product after it: autograd keeps the norm's input, and
backward computes again as far as the product's input, where non-reentrant checkpointing stops, because nothing after it
was kept. torch.compile computes again whatever a checkpoint holds, so there the product stands outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(
    cheap: Callable[..., Any],
    *args: object,
    then: Callable[..., Any] | None = None,
    when: bool,
    draws: bool = False,
    in_graph: bool = True,
) -> Any:
    """`then(cheap(*args))`; with `when`, backward computes again what it needs of that up to the input of `then`.

    Args:
        then: the product, which is not computed again; None for nothing more.
        draws: `cheap` draws random numbers from torch's default generator, which then has to be wound back.
        in_graph: torch.compile may take `cheap` into its graph. Attention may not where parameters are DTensors: to
            compute it again, torch 2.13 hands the generator's state on, and takes a DeviceMesh for it.
    """

    def both(*args: object) -> Any:
        found = cheap(*args)
        return found if then is None else then(found)

    if not (when and torch.is_grad_enabled()):
        return both(*args)
    if torch.compiler.is_compiling():
        found = (_checkpointed if in_graph else _outside)(cheap, *args, draws=draws)
        return found if then is None else then(found)
    return _checkpointed(both, *args, draws=draws)


def _checkpointed(function: Callable[..., Any], *args: object, draws: bool) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)


_outside = torch.compiler.disable(_checkpointed)
