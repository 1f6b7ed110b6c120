"""Axes, units and codecs that exist on paper: the hops of zero/ run on them with meta tensors.

An axis on paper counts what it would send as a real one does, and takes as long as the link would; a codec on paper
takes as long as a pass over the memory it touches. Nothing is allocated and no process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from kernels.block_quant import Feedback
from kernels.formats import MessageLayout
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.comm_queue import CommQueue
from megazpp.stored.freeze import FrozenBytes
from megazpp.topology.layout import Layout
from megazpp.zero.comms import CommContext, CountedGather, SummingReduce
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.layout import own_rows, plan_segments
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.sharding import make_comms
from megazpp.zero.units import Fingerprint, Unit, UnitParameter
from megazpp.zero.wire import Codec

Parameters = Sequence[tuple[str, tuple[int, ...]]]  # name and shape on one tensor-parallel rank
META = torch.device("meta")
_NOWHERE = nn.Module()


class PaperAxis(MeshAxis):
    """An axis without a process group, at any rank of a layout.

    Args:
        rank: the global rank whose axis it is.
        cost: told of each collective and the bytes that this rank sends.
        queue: where its collectives run beside the compute.
    """

    def __init__(
        self,
        layout: Layout,
        name: str,
        *,
        rank: int,
        counter: TrafficCounter,
        cost: Callable[[str, int], None],
        queue: CommQueue | None = None,
    ) -> None:
        super().__init__(name, counter=counter, wire=layout.wire(name, rank), queue=queue)
        self.ranks = layout.axis_ranks(name, rank)
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self._cost = cost

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size > 1:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if out is None else out
            self.count("all_gather", self.ring_bytes(out))
        return x if out is None else out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size > 1:
            self.count("reduce_scatter", self.ring_bytes(x))
            out = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out
        return x if out is None else out

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x
        self.count("all_to_all", self.ring_bytes(x))
        return torch.empty_like(x)

    def _all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            self.count("all_reduce", 2 * self.ring_bytes(x))
        return x

    def count(self, collective: str, sent_bytes: int) -> None:
        super().count(collective, sent_bytes)
        self._cost(collective, sent_bytes)


class PaperUnit(Unit):
    """A unit whose shards are described and not there; FSDP2's state of it; and its comms.

    Args:
        parameters: names and shapes, not sharded.
        num_ranks, rank: over how many they are, and whose shards these are.

    Attributes:
        size: elements of one rank's shard.
        elements: of its parameters, without padding.
        shapes: of this rank's shard of each parameter, without padding.
        version: stands for the contents of its weights.
        gathered: whether its parameters are there; `ready` is when those on the way will be.
        gather_buffer, reduce_buffer, cross_buffer: bytes of messages that the gather, the local hop and the cross hop
            of the reduction hold while they last.
        frozen: bytes of its parameters that are not trained.
        secondary_bytes, partial_bytes, feedback_bytes: of kept weights (hpZ), of sums that wait for the cross hop
            (qgZ) and of the error feedback.
    """

    is_sharded = True
    is_frozen = False
    gather: TwoHopGather | CountedGather | None = None
    reduce: SummingReduce | None = None
    in_last_backward, gradient_divide_factor = True, 1.0
    frozen = FrozenBytes(0, 0, 0)
    gather_buffer = reduce_buffer = cross_buffer = secondary_bytes = partial_bytes = feedback_bytes = 0

    def __init__(self, parameters: Parameters, num_ranks: int, rank: int = 0) -> None:
        segments = plan_segments(parameters, num_ranks)
        found = tuple(
            UnitParameter(name=name, module=_NOWHERE, attribute="", shape=shape, mesh_dims=1, requires_grad=True)
            for name, shape in parameters
        )
        super().__init__(modules=(), parameters=found, segments=segments, trained_segments=segments)
        self.size = segments[-1].stop if segments else 0  # of nothing, where all of a unit is frozen
        self.elements = sum(math.prod(shape) for _, shape in parameters)
        self.shapes = tuple(own_shapes(parameters, num_ranks, rank))
        self.version, self.gathered = 0, False
        self.ready: float | None = None

    def connect(self, context: CommContext) -> None:
        """Make its comms, and note the bytes that they hold."""
        if not self.size:
            return
        self.gather, self.reduce = make_comms(self, context)
        nodes, peers, wire = context.cross.size, context.local.size, context.plan
        if isinstance(self.gather, TwoHopGather) and wire.gather is not None:
            received = nodes * self.gather.message_bytes
            self.secondary_bytes = self.gather.secondary.kept_bytes if wire.gather.keep else 0
            self.gather_buffer = (peers * received if peers > 1 else 0) + (0 if wire.gather.keep else received)
        if isinstance(self.reduce, TwoHopReduce):
            inside, across = self.reduce.message_bytes
            self.reduce_buffer = (2 if peers > 1 else 1) * peers * nodes * inside  # sent and received
            self.cross_buffer = 2 * nodes * across
            self.partial_bytes = nodes * self.size * (2 if context.zero.zero_accumulate_in_bf16 else 4)
            errors = self.reduce.errors(META)
            self.feedback_bytes = 0 if errors is None else errors.messages.nbytes

    def fingerprint(self) -> Fingerprint:
        return (self.version,)

    def shards(self) -> list[torch.Tensor]:
        return [torch.empty(shape, device=META) for shape in self.shapes]

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        return (lambda: torch.empty(self.size, dtype=dtype, device=META)) if self.is_sharded else None

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Nothing to compare."""

    def add_to_gradients(self, reduced: torch.Tensor) -> None:
        """Costs little beside the rest."""

    def refuse_gradient_hooks(self) -> None:
        """There are none."""


def own_shapes(parameters: Parameters, num_ranks: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Shapes of this rank's shards without padding."""
    for _, shape in parameters:
        yield own_rows(shape[0] if shape else 1, num_ranks, rank), *shape[1:]


class PaperCodec(Codec):
    """Touches no memory; `touch` is told the bytes that each pass over it would read and write."""

    def __init__(self, layout: MessageLayout, dtype: torch.dtype, touch: Callable[[int], None]) -> None:
        super().__init__(layout, dtype)
        self._touch = touch

    def pack(
        self,
        shards: torch.Tensor,
        messages: torch.Tensor,
        *,
        errors: Feedback | None = None,
        beta: float = 0.0,
        base: torch.Tensor | None = None,
    ) -> None:
        fed_back = 0 if errors is None else 2 * errors.messages.nbytes
        beside = fed_back if base is None else base.nbytes
        self._touch(shards.nbytes + messages.nbytes + beside)

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        self._touch(messages.nbytes + shards.nbytes)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        self._touch(messages.nbytes + 2 * base.nbytes)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        self._touch(messages.nbytes + (2 if accumulate else 1) * out.nbytes)
