"""A rank on paper: clocks, queues and memory; axes, units and codecs on which the hops of zero/ run.

One file of more than 300 lines: tensors are meta tensors, and all that they would cost is told to one Simulation.

A queue of parallel/comm_queue.py runs tasks in the order of submission, so no list of events is needed: a task starts
when the queue is free, when the submitting clock has come to it, and when the works that it waits for are done; it ends
as many seconds later as its hops and passes over memory cost. An axis counts what it would send as a real one does, and
takes as long as the link would; a codec takes as long as a pass over the memory it touches. Code that calls
`CommQueue.submit`, `Work.wait` and collectives runs here unchanged. A clock stands for whatever keeps an order of its
own: the compute, a stream, a queue.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megazpp.kernels.block_quant import Feedback
from megazpp.kernels.formats import MessageLayout
from megazpp.kernels.weight_delta import message_bytes
from megazpp.packed_weights.frozen import FrozenBytes
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.comm_queue import CommQueue, Moment, Work
from megazpp.planner.cost import Costs
from megazpp.topology.layout import AXES, NODE, Layout
from megazpp.zero.comms import CommContext, CountedGather, SummingReduce
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.sharding import make_comms
from megazpp.zero.units import Fingerprint, Unit, UnitParameter
from megazpp.zero.wire import ROOM, Codec, LosslessCodec, own_rows, plan_segments

T = TypeVar("T")
Parameters = Sequence[tuple[str, tuple[int, ...]]]  # name and shape on one tensor-parallel rank
META = torch.device("meta")
_NOWHERE = nn.Module()


class Clock:
    """One order of events; `now` is seconds since the simulation began."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class Simulation:
    """All clocks of a rank; one of them is running.

    Attributes:
        compute: the clock of the model's kernels (on a CPU, the process's).
        busy: seconds of this step by axis that collectives take, and under "compute" what its clock does beside them.
    """

    def __init__(self, costs: Costs) -> None:
        self.compute = self.running = Clock()
        self._costs, self._clocks = costs, [self.compute]
        self._links = {axis: self.new_clock() for axis in (*AXES, NODE)}
        self.busy: dict[str, float] = defaultdict(float)

    def new_clock(self) -> Clock:
        """A clock that the others meet at the beginning of a step."""
        self._clocks.append(Clock())
        return self._clocks[-1]

    def begin_step(self) -> float:
        """All clocks meet; returns the moment. Time goes on: works may be older than the step."""
        moment = max(clock.now for clock in self._clocks)
        for clock in self._clocks:
            clock.now = moment
        self.busy = defaultdict(float)
        return moment

    @contextmanager
    def on(self, clock: Clock) -> Iterator[None]:
        """Have `clock` run inside."""
        before, self.running = self.running, clock
        try:
            yield
        finally:
            self.running = before

    def spend(self, seconds: float, *, axis: str | None = None, taken: float = 0.0) -> None:
        """Keep the running clock busy.

        Args:
            axis: whose collective it is; None for kernels.
            taken: seconds that go off the compute where that is another clock.
        """
        clock, start = self.running, self.running.now
        clock.now += seconds
        if axis or clock is self.compute:
            self.busy[axis or "compute"] += clock.now - start
        if clock is not self.compute and taken:
            with self.on(self.compute):
                self.spend(taken)

    def send(self, axis: str, collective: str, sent_bytes: int) -> None:
        """A collective on the running clock: those of an axis run one at a time, in the order of their start."""
        link, seconds = self._links[axis], self._costs.collective(axis, collective, sent_bytes)
        self.running.wait_until(link.now)
        self.spend(seconds, axis=axis, taken=self._costs.beside * seconds)
        link.now = self.running.now


class SimulatedQueue(CommQueue):
    """`blocks_host`: waiting holds the host (CPU), not only a stream."""

    def __init__(self, simulation: Simulation, name: str, *, blocks_host: bool = True) -> None:
        self.name, self._simulation, self._clock = name, simulation, simulation.new_clock()
        self.blocks_host = blocks_host

    def record_event(self) -> Moment:
        return self._simulation.running.now

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        self._clock.wait_until(self.record_event() if since is None else since)
        with self._simulation.on(self._clock):
            for work in after:
                work.join()
            return SimulatedWork(task(), self._clock, self._simulation)


class SimulatedWork(Work[T]):
    """Done at the moment to which its queue's clock has come."""

    def __init__(self, result: T, clock: Clock, simulation: Simulation) -> None:
        super().__init__(result)
        self._done, self._simulation = clock.now, simulation

    def join(self) -> T:
        self._simulation.running.wait_until(self._done)
        return self._result


class Memory(StrEnum):
    """Kinds of memory by their use."""

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
    """Bytes that live now, by kind; `peak` has them at the fullest moment."""

    def __init__(self) -> None:
        self._now: Counter[Memory] = Counter()
        self.peak: Counter[Memory] = Counter()

    def add(self, kind: Memory, size: int) -> None:
        self._now[kind] += size
        if size > 0 and self._now.total() > self.peak.total():
            self.peak = self._now.copy()

    def free(self, kind: Memory) -> None:
        self._now[kind] = 0

    def pass_through(self, kind: Memory, size: int) -> None:
        self.add(kind, size)
        self.add(kind, -size)


class SimulatedAxis(MeshAxis):
    """The axis of a global rank, without a process group; `cost` is told of each collective and its bytes."""

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
        return torch.empty_like(x.contiguous())

    def exchange(self, x: torch.Tensor, send: list[int], receive: list[int], *, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x
        self.count("all_to_all", (x.numel() - send[self.rank]) * x.element_size())
        return x.new_empty(sum(receive))

    def _all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            self.count("all_reduce", 2 * self.ring_bytes(x))
        return x

    def count(self, collective: str, sent_bytes: int) -> None:
        super().count(collective, sent_bytes)
        self._cost(collective, sent_bytes)


class SimulatedUnit(Unit):
    """A unit whose shards are described and not there; FSDP2's state of it; and its comms.

    Args:
        num_ranks, rank: over how many `parameters` are sharded, and whose shards these are.

    Attributes:
        size: elements of one rank's shard; `elements` of the parameters, without padding.
        shapes: of this rank's shard of each parameter, without padding.
        version: stands for the contents of its weights.
        gathered: whether its parameters are there; `ready` is when those on the way will be.
        gather_buffer, reduce_buffer, cross_buffer: bytes of messages that the gather, the local hop and the cross hop
            of the reduction hold while they last.
        frozen: bytes of its parameters that are not trained.
        secondary_bytes, partial_bytes, feedback_bytes: of hpZ, of sums that wait for qgZ's cross hop, of the feedback.
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
            UnitParameter(name=name, module=_NOWHERE, attribute="", shape=shape, mesh_dims=1)
            for name, shape in parameters
        )
        super().__init__(modules=(), parameters=found, segments=segments)
        self.size = segments[-1].stop if segments else 0  # of nothing, where all of a unit is frozen
        self.elements = sum(math.prod(shape) for _, shape in parameters)
        self.shapes = tuple(own_shapes(parameters, num_ranks, rank))
        self.version, self.gathered = 0, False
        self.ready: float | None = None

    def connect(self, context: CommContext) -> None:
        """Make its comms, and note the bytes that they hold."""
        if not self.size:
            return
        self._dtype = context.precision.param_dtype
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

    def check_shard_reader(self, expected: torch.Tensor) -> None: ...

    @property
    def gather_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self._dtype,)

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(range(len(self.parameters)))

    def gradient(self, index: int) -> None: ...

    def add_to_gradients(self, reduced: torch.Tensor, indices: Sequence[int], gradients: Sequence[Any]) -> None: ...

    def refuse_gradient_hooks(self) -> None: ...


def own_shapes(parameters: Parameters, num_ranks: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Shapes of this rank's shards without padding."""
    for _, shape in parameters:
        yield own_rows(shape[0] if shape else 1, num_ranks, rank), *shape[1:]


class SimulatedCodec(Codec):
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


# By learning rate of AdamW: bytes of lossless differences of bf16 weights as a share of 2 per weight. Measured: 0.4M
# parameters after 200 steps; docs/benchmarks.md. Large models change less.
LOSSLESS_SHARES = {1e-6: 0.016, 1e-5: 0.060, 1e-4: 0.131, 3e-4: 0.184, 1e-3: 0.289, 3e-3: 0.413}


def lossless_share(learning_rate: float | None) -> float:
    """The expected size of a lossless difference, as a share of the whole 16-bit weights; 1 without a rate."""
    if not learning_rate:
        return 1.0
    rates = [math.log(rate) for rate in LOSSLESS_SHARES]
    return float(np.interp(math.log(learning_rate), rates, list(LOSSLESS_SHARES.values())))


class SimulatedLosslessCodec(LosslessCodec):
    """Has messages of the expected size; `touch` is told the bytes that each pass would read and write."""

    def __init__(self, size: int, *, share: float, touch: Callable[[int], None]) -> None:
        super().__init__(size)
        self._capacity, self._touch = min(int(2 * size * share * (1 + ROOM)), 2 * size), touch

    @property
    def message_bytes(self) -> int:
        return message_bytes(self.size, self._capacity)

    def pack(self, shard: torch.Tensor, message: torch.Tensor, *, base: torch.Tensor) -> None:
        self._touch(2 * (shard.nbytes + base.nbytes) + message.nbytes)  # to measure, and to write

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        self._touch(messages.nbytes + 2 * base.nbytes)

    def learn(self, messages: torch.Tensor) -> None:
        """Nothing arrives on paper."""
