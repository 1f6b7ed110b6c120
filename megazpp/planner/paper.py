"""Axes, units and codecs that exist on paper: the hops of zero/ run on them with meta tensors.

An axis on paper counts what it would send exactly as a real one does, and takes as long as the wire would; a codec on
paper takes as long as a pass over the memory it touches. Nothing is allocated and no process group exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.comm_queue import CommQueue
from megazpp.topology.layout import Layout
from megazpp.zero.layout import MessageLayout, plan_segments
from megazpp.zero.units import Fingerprint, Unit, UnitParameter
from megazpp.zero.wire import Codec, Errors

Cost = Callable[[str, int], None]  # (what, bytes sent or touched): lets time pass
_NOWHERE = nn.Module()


def no_cost(_: str, __: int) -> None:
    """No time passes."""


class PaperAxis(MeshAxis):
    """An axis without a process group, at any rank of a layout.

    Args:
        layout: who is where.
        name: the axis.
        rank: the global rank whose axis it is.
        counter: where bytes are counted.
        cost: told of each collective.
        queue: where its collectives run beside the compute.
    """

    def __init__(
        self,
        layout: Layout,
        name: str,
        *,
        rank: int,
        counter: TrafficCounter,
        cost: Cost = no_cost,
        queue: CommQueue | None = None,
    ) -> None:
        super().__init__(name, counter=counter, wire=layout.wire(name, rank), queue=queue)
        self.ranks = layout.axis_ranks(name, rank)
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self._cost = cost

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x if out is None else out
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.count("all_gather", self.ring_bytes(out))
        return out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x if out is None else out
        self.count("reduce_scatter", self.ring_bytes(x))
        return x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x
        self.count("all_to_all", self.ring_bytes(x))
        return torch.empty_like(x)

    def _all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            self.count("all_reduce", 2 * self.ring_bytes(x))
        return x

    def observe(self, cost: Cost) -> None:
        """Tell `cost` of each collective from now on."""
        self._cost = cost

    def count(self, collective: str, sent_bytes: int) -> None:
        super().count(collective, sent_bytes)
        self._cost(collective, sent_bytes)


@dataclass
class UnitState:
    """What the simulated FSDP2 says of a unit: `version` stands for the contents of its weights."""

    version: int = 0
    is_sharded: bool = True


@dataclass(frozen=True, kw_only=True)
class PaperUnit(Unit):
    """A unit whose shards are described and not there."""

    state: UnitState = field(default_factory=UnitState)

    @property
    def size(self) -> int:
        """Elements of one rank's shard."""
        return self.segments[-1].stop

    @property
    def is_sharded(self) -> bool:
        return self.state.is_sharded

    def fingerprint(self) -> Fingerprint:
        return (self.state.version,)

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        return (lambda: torch.empty(self.size, dtype=dtype, device="meta")) if self.is_sharded else None

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Nothing to compare."""

    def add_to_gradients(self, reduced: torch.Tensor) -> None:
        """Costs little beside the rest."""

    def refuse_gradient_hooks(self) -> None:
        """There are none."""


def paper_unit(parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int) -> PaperUnit:
    """A unit of parameters, by name and shape on one tensor-parallel rank, over `num_ranks` shards."""
    found = tuple(
        UnitParameter(name=name, module=_NOWHERE, attribute="", shape=shape, requires_grad=True)
        for name, shape in parameters
    )
    segments = plan_segments(parameters, num_ranks)
    return PaperUnit(modules=(_NOWHERE,), parameters=found, segments=segments, trained_segments=segments)


class PaperCodec(Codec):
    """Touches no memory.

    Args:
        touch: told of each pass over memory: what for, and the bytes it reads and writes.
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype, touch: Cost = no_cost) -> None:
        super().__init__(layout, dtype)
        self._touch = touch

    def pack(
        self, shards: torch.Tensor, messages: torch.Tensor, *, errors: Errors | None = None, beta: float = 0.0
    ) -> None:
        fed_back = sum(2 * part.nbytes for error in errors or () for part in error)
        self._touch("quantize", shards.nbytes + messages.nbytes + fed_back)

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        self._touch("dequantize", messages.nbytes + shards.nbytes)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        self._touch("dequantize", messages.nbytes + (2 if accumulate else 1) * out.nbytes)
