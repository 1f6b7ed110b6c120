"""Memory of a rank, by kind: a ledger of what is there all the time, and of what comes and goes within a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

from megazpp.zero.layout import own_rows

MASTER_BYTES = 4  # parameters, their gradients and moments are fp32


class Memory(StrEnum):
    """What memory is taken for."""

    PARAMETERS = "parameters"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    SECONDARY = "secondary partition"
    PARTIAL_SUMS = "partial sums"
    FEEDBACK = "error feedback"
    COMMON = "outer weights, common copy"
    OUTER = "outer weights and momentum"
    OUTER_FEEDBACK = "outer feedback"
    OUTER_MESSAGES = "outer messages"
    GATHERED = "gathered weights"
    WHOLE_GRADIENTS = "whole gradients"
    BUFFERS = "communication buffers"
    ACTIVATIONS = "activations"
    FROZEN = "frozen base"
    UNPACKED = "unpacked frozen weights"
    REFERENCE = "reference model"
    REWARD = "reward model"
    KEYS_AND_VALUES = "keys and values"


class Ledger:
    """What lives, in bytes by kind.

    Attributes:
        fullest: the same at the moment at which it was most.
    """

    def __init__(self) -> None:
        self._now: Counter[Memory] = Counter()
        self.fullest: Counter[Memory] = Counter()

    def add(self, kind: Memory, size: int) -> None:
        """`size` bytes come, or go if it is negative."""
        self._now[kind] += size
        if size > 0 and self._now.total() > self.fullest.total():
            self.fullest = self._now.copy()

    def free(self, kind: Memory) -> None:
        """All bytes of a kind go."""
        self._now[kind] = 0

    def pass_through(self, kind: Memory, size: int) -> None:
        """`size` bytes come and go."""
        self.add(kind, size)
        self.add(kind, -size)


def own_shapes(
    parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int, rank: int
) -> Iterator[tuple[int, ...]]:
    """Shapes of this rank's shards without padding."""
    for _, shape in parameters:
        yield own_rows(shape[0] if shape else 1, num_ranks, rank), *shape[1:]


def own_elements(parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int, rank: int) -> int:
    """Elements of these."""
    return sum(math.prod(shape) for shape in own_shapes(parameters, num_ranks, rank))
