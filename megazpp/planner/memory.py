"""Memory of a rank, by kind: what is there all the time, and a ledger of what comes and goes within a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megazpp.topology.cluster import Device

PARAMETERS = "parameters"
MOMENTS = "moments"
GRADIENTS = "gradients"
SECONDARY = "secondary partition"
PARTIAL_SUMS = "partial sums"
FEEDBACK = "error feedback"
GATHERED = "gathered weights"
WHOLE_GRADIENTS = "whole gradients"
BUFFERS = "communication buffers"
ACTIVATIONS = "activations"
KINDS = (
    PARAMETERS,
    MOMENTS,
    GRADIENTS,
    SECONDARY,
    PARTIAL_SUMS,
    FEEDBACK,
    GATHERED,
    WHOLE_GRADIENTS,
    BUFFERS,
    ACTIVATIONS,
)
USABLE_MEMORY = 0.9  # assumed: the rest is for CUDA's context, NCCL's buffers and what the allocator cannot use
MASTER_BYTES = 4  # parameters, their gradients and moments are fp32


class MemoryPlan(NamedTuple):
    """Bytes of a rank at the moment of a step at which they are most, by kind (logits are among the activations)."""

    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def usable_gigabytes(device: Device | None) -> float | None:
    """What tensors may take on a rank; None where the device is not known."""
    return None if device is None else USABLE_MEMORY * device.gigabytes


class Ledger:
    """What lives, by kind, and the fullest moment so far."""

    def __init__(self) -> None:
        self._now: dict[str, int] = defaultdict(int)
        self._total = 0
        self.fullest = MemoryPlan({})
        self._most = 0

    def set(self, kind: str, size: int) -> None:
        self.add(kind, size - self._now[kind])

    def add(self, kind: str, size: int) -> None:
        """`size` bytes come, or go if it is negative."""
        self._now[kind] += size
        self._total += size
        if self._total > self._most:
            self._most, self.fullest = self._total, MemoryPlan({k: self._now[k] for k in KINDS if self._now[k]})

    def pass_through(self, kind: str, size: int) -> None:
        """`size` bytes come and go."""
        self.add(kind, size)
        self.add(kind, -size)


def own_elements(parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int, rank: int) -> int:
    """Elements of this shard that are not padding: of dim 0, rows rank x c to (rank + 1) x c, c the most of any."""
    total = 0
    for _, shape in parameters:
        rows, per_row = (shape[0] if shape else 1), 1
        for size in shape[1:]:
            per_row *= size
        chunk = -(-rows // num_ranks)
        total += max(min(chunk, rows - rank * chunk), 0) * per_row
    return total
