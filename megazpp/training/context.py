"""The run context: what nearly every part of a run needs, made once when the process groups stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazpp.parallel.dims import ParallelDims
from megazpp.training.console import Console
from megazpp.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a part of a run may use on this rank, beside its own config.

    Attributes:
        dims: the axes of the cluster, and the timeline and the traffic counter that they feed.
        device: what this rank computes on.
        console: prints on rank 0 and is silent on the others.
        folder: where rank 0 keeps the run's records; None on the other ranks.
    """

    dims: ParallelDims
    device: torch.device
    console: Console
    folder: RunFolder | None = None

    def log(self, text: str) -> None:
        """Print lines on rank 0."""
        self.console.log(text)
