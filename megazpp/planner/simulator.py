"""Simulated streams, communication queues, memory, mesh axes, sharding units and codecs of one rank, for the planner.

The communication code of megazpp/zero runs unchanged on these classes with meta tensors, which have shapes but no
memory. This code calls `CommQueue.submit`, `Work.wait` and collectives as in training. The classes are in one file,
because all of them pass the bytes or seconds of their work to one `Simulation`.

A clock holds the simulated time of one worker that executes tasks in order: the compute stream, another CUDA stream, or
a communication queue. A queue runs its tasks in the order of submission, so the simulation needs no list of events. A
task starts as soon as three conditions hold: the queue is free, the submitting clock has reached the submission, and
the works that the task waits for are done. The task ends after the seconds of its collectives and passes over memory.
A collective of a simulated axis counts its bytes as in training, and advances the clock of the queue that runs it by
the seconds that the cost model gives. A simulated codec advances the clock by the seconds of a pass over the memory
that the real codec would read and write.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

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
from megazpp.topology.layout import AXES, EXPERT_AXES, NODE, Layout
from megazpp.zero.comms import CommContext
from megazpp.zero.gather import CountedGather, TwoHopGather
from megazpp.zero.reduce import SummingReduce, TwoHopReduce
from megazpp.zero.sharding import make_comms
from megazpp.zero.units import Fingerprint, Unit, UnitParameter
from megazpp.zero.wire import ROOM, Codec, LosslessCodec, Segment, own_rows, plan_segments

T = TypeVar("T")
Parameters = Sequence[tuple[str, tuple[int, ...]]]  # names and shapes of parameters on one tensor-parallel rank
META = torch.device("meta")
_plan_segments = functools.cache(plan_segments)
_NOWHERE = nn.Module()  # a module for all simulated parameters, which belong to no real module


class Clock:
    """Simulated time of a CUDA stream, a communication queue or a CPU process, which runs one task after another.

    Attributes:
        now: simulated time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def wait_until(self, moment: float) -> None:
        """Advance this clock to the time `moment`, in seconds, if that is later than the clock's time."""
        if moment > self.now:  # faster than max(), and called a million times per plan
            self.now = moment


class KernelSeries(NamedTuple):
    """Total duration of successive kernels and collectives on the compute stream.

    The planner simulates the whole series in one call, because simulating each kernel would be too slow.

    Attributes:
        seconds: seconds of all kernels and collectives together.
        launch_seconds: seconds that the host takes to launch all kernels and collectives.
        after_launch: earliest end of the last kernel, in seconds after the start of the first launch. No kernel starts
            before its launch has ended. So `after_launch` is the maximum over all kernels of this sum: the end of the
            kernel's launch, plus the seconds of the kernel and of all later kernels. It is minus infinity if launches
            take no time.
        busy: seconds of collectives by axis, and for the key "compute" the seconds of the kernels.
    """

    seconds: float
    launch_seconds: float
    after_launch: float
    busy: dict[str, float]

    @classmethod
    def of(cls, seconds: Sequence[tuple[str, float]], launch: float) -> KernelSeries:
        """Return the series of kernels and collectives that the host launches one after another.

        Args:
            seconds: in launch order, ("compute", seconds) for a kernel and (axis, seconds) for a collective.
            launch: seconds that the host needs for each launch.
        """
        left, after_launch, busy = 0.0, -math.inf, defaultdict[str, float](float)
        for number in range(len(seconds), 0, -1):
            key, duration = seconds[number - 1]
            left += duration
            busy[key] += duration
            after_launch = max(after_launch, number * launch + left)
        return cls(left, len(seconds) * launch, after_launch if launch else -math.inf, busy)


class Simulation:
    """All clocks of the rank that the planner simulates. Each kernel or collective advances the running clock.

    The host launches kernels and collectives one after another and does not wait for them. A kernel starts after its
    launch, so a device with little work per launch waits for the host.

    Args:
        costs: cost model that gives the seconds of kernels and collectives.

    Attributes:
        compute: clock of the compute stream, which runs the model's kernels; on a CPU, clock of the process.
        running: clock that kernels and collectives advance: `compute`, or in a context of `on` the clock that `on` got.
        busy: seconds of collectives since `begin_step` by axis, for the key "compute" the seconds of kernels, and for
            the key "host" the seconds of all launches.
    """

    def __init__(self, costs: Costs) -> None:
        self.compute = self.running = Clock()
        self._host = Clock()
        self._costs, self._clocks = costs, [self.compute, self._host]
        # By axis, a clock with the time at which the last collective on the axis has ended
        self._links = {axis: self.new_clock() for axis in (*AXES, NODE, *EXPERT_AXES)}
        self.busy: dict[str, float] = defaultdict(float)

    def new_clock(self) -> Clock:
        """Return a new clock for a stream or a queue, which `begin_step` sets to the same time as all other clocks."""
        self._clocks.append(Clock())
        return self._clocks[-1]

    def begin_step(self) -> float:
        """Set all clocks to the latest time of any clock, clear `busy`, and return this time in seconds.

        The clocks are not reset to 0, because a `SimulatedWork` of the previous step keeps its end time, for which this
        step may wait.
        """
        moment = max(clock.now for clock in self._clocks)
        for clock in self._clocks:
            clock.now = moment
        self.busy = defaultdict(float)
        return moment

    def repeat(self, times: int, began: float, busy: dict[str, float]) -> None:
        """Advance the clocks of compute and host as if all their work since a moment came `times` more times.

        A host that launches more slowly than the device computes can start with a lead, for example after a wait for
        the network. The repetitions use up this lead. Then the next simulated work waits for the host.

        Args:
            times: number of repetitions. No stream or queue may be ahead of the compute stream when a repetition begins
                or ends, as at the end of a backward.
            began: time of the compute clock at the moment, in seconds.
            busy: copy of `busy` at the moment.
        """
        assert max(clock.now for clock in self._clocks) == self.compute.now, "a stream or queue has pending work"
        self.compute.now += times * (self.compute.now - began)
        self._host.now += times * (self.busy["host"] - busy.get("host", 0.0))
        for key, seconds in self.busy.items():
            self.busy[key] = seconds + times * (seconds - busy.get(key, 0.0))

    @contextmanager
    def on(self, clock: Clock) -> Iterator[None]:
        """Make `clock` the running clock inside the context, so that kernels, collectives and waits advance `clock`."""
        before, self.running = self.running, clock
        try:
            yield
        finally:
            self.running = before

    def spend(self, seconds: float, *, axis: str | None = None, taken: float = 0.0) -> None:
        """Simulate a kernel or a collective: launch it on the host's clock, and advance the running clock.

        Args:
            seconds: duration of the kernel or collective.
            axis: axis of the collective; None for a kernel.
            taken: seconds by which the compute clock is delayed if another clock is running, because the kernel or
                collective occupies some of a GPU's multiprocessors, or cores of a CPU.
        """
        clock, launch = self.running, self._costs.launch
        if launch:
            self._host.now += launch
            self.busy["host"] += launch
            clock.wait_until(self._host.now)
        clock.now += seconds
        if axis or clock is self.compute:
            self.busy[axis or "compute"] += seconds
        if clock is not self.compute and taken:
            self.compute.now += taken
            self.busy["compute"] += taken

    def compute_series(self, series: KernelSeries) -> None:
        """Advance the clocks as if `spend` were called for each kernel and collective of a series of the model.

        The collectives of a series are on the axes of the model's own forward and backward (tp, cp, ep). No
        communication queue uses these axes meanwhile, so no collective waits for a link.
        """
        started = self._host.now
        self._host.now += series.launch_seconds
        self.busy["host"] += series.launch_seconds
        self.compute.now = max(self.compute.now + series.seconds, started + series.after_launch)
        for key, seconds in series.busy.items():
            self.busy[key] += seconds

    def send(self, axis: str, collective: str, sent_bytes: int) -> None:
        """Simulate a collective on the running clock. It starts when the previous collective on its axis has ended.

        Args:
            axis: name of the axis.
            collective: name of the collective, such as "all_gather".
            sent_bytes: bytes that this rank sends.
        """
        link, seconds = self._links[axis], self._costs.collective(axis, collective, sent_bytes)
        self.running.wait_until(link.now)
        self.spend(seconds, axis=axis, taken=self._costs.beside(axis) * seconds)
        link.now = self.running.now


class SimulatedQueue(CommQueue):
    """Communication queue of the planner's simulation. Its tasks run at once, and take time on the clock of the queue.

    Args:
        simulation: clocks of the simulated rank.
        name: name of the queue.
        blocks_host: True if waiting for a task blocks the host, as on a CPU; False if it blocks only a CUDA stream.
    """

    def __init__(self, simulation: Simulation, name: str, *, blocks_host: bool = True) -> None:
        self.name, self._simulation, self._clock = name, simulation, simulation.new_clock()
        self.blocks_host = blocks_host

    def record_event(self) -> Moment:
        """Return the simulated time of the running clock in seconds, as an event for `submit`."""
        return self._simulation.running.now

    def submit(self, task: Callable[[], T], *, after: Sequence[Work[Any]] = (), since: Moment = None) -> Work[T]:
        """Run `task` at once, and let its simulated time start when a real queue would start the task.

        Args:
            task: function whose collectives and kernels advance this queue's clock.
            after: works that must be done before the task starts.
            since: event of `record_event` from which on the task may start; None for the time of the running clock.
        """
        simulation, clock = self._simulation, self._clock
        before, simulation.running = simulation.running, clock  # as by `on`, but twice as fast
        clock.wait_until(before.now if since is None else since)
        for work in after:
            work.join()
        done = SimulatedWork(task(), clock, simulation)
        simulation.running = before
        return done


class SimulatedWork(Work[T]):
    """Handle of a task that a simulated queue has run, with the task's result and the simulated time of its end."""

    def __init__(self, result: T, clock: Clock, simulation: Simulation) -> None:
        super().__init__(result)
        self._done, self._simulation = clock.now, simulation

    def join(self) -> T:
        """Advance the running clock to the simulated end of the task, and return the result of the task."""
        self._simulation.running.wait_until(self._done)
        return self._result


class Memory(StrEnum):
    """Kinds of device memory by use. The values are the names in the report of --plan.

    Attributes:
        PARAMETERS: fp32 shards of the trained weights.
        MOMENTS: moments of the optimizer.
        GRADIENTS: shards of the reduced gradients.
        SECONDARY: secondary partition of hpZ.
        WORKING: with --optimizer-cpu-offload, shards of the weights in the dtype of gathers.
        STAGING: with --optimizer-cpu-offload, slots for states that are uploaded from host memory.
        PARTIAL_SUMS: gradients of earlier micro-batches that wait for the cross hop.
        FEEDBACK: error feedback of gradients.
        COMMON: R, the copy of DiLoCo's outer weights that is equal in all replica groups.
        OUTER: DiLoCo's outer weights and outer momentum.
        OUTER_FEEDBACK: error feedback of DiLoCo's outer gradients.
        OUTER_MESSAGES: DiLoCo's messages in flight.
        GATHERED: unsharded parameters.
        WHOLE_GRADIENTS: unsharded gradients.
        BUFFERS: buffers of gathers, reductions and other collectives.
        ACTIVATIONS: activations, with all temporary tensors of forward and backward.
        FROZEN: shards of frozen weights in their stored form, such as the packed base of LoRA adapters.
        UNPACKED: frozen weights that are gathered or unpacked for use.
        REFERENCE: reference model of post-training.
        REWARD: reward model of post-training.
        KEYS_AND_VALUES: cache of attention's keys and values while completions are sampled.
    """

    PARAMETERS = "parameters"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    SECONDARY = "secondary partition"
    WORKING = "working weights"
    STAGING = "staging of host states"
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
    """Account of the device memory that the simulated rank has allocated, in bytes by kind of memory.

    Attributes:
        peak: bytes by kind at the moment of the largest total.
    """

    def __init__(self) -> None:
        self._now: Counter[Memory] = Counter()
        self.peak: Counter[Memory] = Counter()
        self._total = self._most = 0  # bytes of all kinds together, now and at the peak

    def add(self, kind: Memory, size: int) -> None:
        """Count an allocation of `size` bytes of the kind `kind`; a negative `size` counts freed memory."""
        self._now[kind] += size
        self._total += size
        if self._total > self._most:
            self.peak, self._most = self._now.copy(), self._total

    def free(self, kind: Memory) -> None:
        """Count all memory of the kind `kind` as freed."""
        self.add(kind, -self._now[kind])

    def pass_through(self, kind: Memory, size: int) -> None:
        """Count a temporary buffer of `size` bytes, which may raise the peak and is freed at once."""
        if self._total + size > self._most:
            self.add(kind, size)
            self.add(kind, -size)


class SimulatedAxis(MeshAxis):
    """Mesh axis without a process group: collectives count bytes and return meta tensors of the right shape.

    Args:
        layout: sizes and links of the parallel axes.
        name: name of the axis.
        rank: global rank that is simulated.
        counter: counter of the collectives' calls and bytes, as in training.
        cost: function that is called with the name and the sent bytes of each collective. It advances the simulated
            time, or records the collective in a trace of the model.
        queue: communication queue of the axis; None for an axis of the model's forward and backward.
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
        self.wires = layout.wires(name, rank)
        # A trace of the model uses axes without a queue, and counts the memory of each result. So these axes return new
        # tensors. Axes with a queue return one shared tensor for all results of a shape, which is faster.
        self._cost, self._empty = cost, _empty if queue is None else _shared

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size > 1:
            out = self._empty(self.size * x.shape[0], *x.shape[1:], dtype=x.dtype) if out is None else out
            self.count("all_gather", self.ring_bytes(out))
        return x if out is None else out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size > 1:
            self.count("reduce_scatter", self.ring_bytes(x))
            out = self._empty(x.shape[0] // self.size, *x.shape[1:], dtype=x.dtype) if out is None else out
        return x if out is None else out

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x
        self.count("all_to_all", self.ring_bytes(x))
        return self._empty(*x.shape, dtype=x.dtype)

    def exchange(self, x: torch.Tensor, send: list[int], receive: list[int], *, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return x
        self.count("all_to_all", (x.numel() - send[self.rank]) * x.element_size())
        return self._empty(sum(receive), dtype=x.dtype)

    def _all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            self.count("all_reduce", 2 * self.ring_bytes(x))
        return x

    def count(self, collective: str, sent_bytes: int, *, calls: int = 1) -> None:
        """Count a collective's calls and sent bytes, and pass its name and bytes to the function `cost`."""
        super().count(collective, sent_bytes, calls=calls)
        self._cost(collective, sent_bytes)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor. `new_empty` and `empty_like` are slower: torch runs them in Python for meta tensors."""
    return torch.empty(shape, dtype=dtype, device=META)


_shared = functools.cache(_empty)  # meta tensors have no values, so one tensor serves all messages of a shape


class SimulatedUnit(Unit):
    """Simulated sharding unit (FSDP2's parameter group), with sizes and flags of its state instead of tensors.

    Args:
        parameters: names and shapes of the trained parameters on one tensor-parallel rank.
        axis: axis over which the parameters are sharded, as the simulated rank sees it.
        exact: names of parameters that are never quantized.

    Attributes:
        size: number of elements of the simulated rank's shard, with padding.
        elements: number of elements of all parameters of the unit, without padding.
        shapes: shapes of the simulated rank's shards, without padding.
        axis: axis over whose ranks the parameters are sharded.
        version: number of simulated optimizer steps, by which gathers detect that the weights have changed.
        reduced: True once a reduction of this step has put the rank's shard of the gradients into memory.
        gathered: True while the unsharded parameters are in memory, from FSDP2's copy out of a gather to its reshard.
        shard: meta tensor with the size of the rank's shard of the parameters, in the dtype of gathers.
        whole: meta tensor with the size of the gathered parameters.
        gradients: meta tensor with the size of the unsharded gradients, in the dtype of reductions.
        sum: meta tensor with the size of the rank's shard of the reduced gradients.
        ready: simulated time in seconds at which the gather in flight ends; None if no gather is in flight.
        gather_buffer: bytes of messages in memory while a gather runs.
        reduce_buffer: bytes of messages in memory while the local hop of a reduction runs.
        cross_buffer: bytes of messages in memory while the cross hop of a reduction runs.
        frozen: bytes of the unit's frozen parameters: as stored, as received by a gather, and unpacked.
        secondary_bytes: bytes of hpZ's secondary partition; 0 without hpZ.
        partial_bytes: bytes of the partial sums that wait for qgZ's cross hop; 0 without qgZ.
        feedback_bytes: bytes of the error feedback; 0 without error feedback.
        read: function that is called before each read of the shard for a gather. With hpZ and training states in host
            memory, the function simulates the upload of the shard; otherwise it does nothing.
        updated: simulated time in seconds at which the last update of a shard in host memory ends.
    """

    # `Unit` is a frozen dataclass, which forbids assignments. Simulated units change their state by assignments.
    __setattr__ = object.__setattr__
    is_sharded = True
    is_frozen = False
    gather: TwoHopGather | CountedGather | None = None
    reduce: SummingReduce | None = None
    frozen = FrozenBytes(0, 0, 0)
    gather_buffer = reduce_buffer = cross_buffer = secondary_bytes = partial_bytes = feedback_bytes = 0

    def __init__(self, parameters: Parameters, axis: MeshAxis, *, exact: Collection[str] = ()) -> None:
        num_ranks = axis.size
        # The parameters are renamed by their index, so that layers of equal shapes have equal arguments of the cached
        # functions, which run once for all these layers.
        numbered = tuple((str(i), shape) for i, (_, shape) in enumerate(parameters))
        exact = frozenset(str(i) for i, (name, _) in enumerate(parameters) if name in exact)
        segments = _plan_segments(numbered, num_ranks, exact=exact)
        super().__init__(modules=(), parameters=_listed(numbered), segments=segments, num_shards=num_ranks)
        self.size = segments[-1].stop if segments else 0  # there are no segments if all parameters are frozen
        self.elements = _num_elements(numbered)
        self.axis, self.shapes = axis, _own_shapes(numbered, num_ranks, axis.rank)
        self.version, self.gathered, self.reduced = 0, False, False
        self.ready: float | None = None
        self.read: Callable[[], None] = lambda: None
        self.updated = 0.0

    def connect(self, context: CommContext) -> None:
        """Create the unit's gather and reduction as in training, and compute the bytes of their buffers.

        A unit without trained parameters gets none.

        Args:
            context: axes, wire formats and codecs of the run's gathers and reductions.
        """
        if not self.size:
            return
        dtypes = context.precision.param_dtype, context.precision.reduce_dtype  # dtypes of gathers and of reductions
        self.shard, self.sum = (_shared(self.size, dtype=dtype) for dtype in dtypes)
        self.whole, self.gradients = (_shared(self.size * self.axis.size, dtype=dtype) for dtype in dtypes)
        self.gather, self.reduce = make_comms(self, context)
        nodes, peers, wire = context.cross.size, context.local.size, context.plan
        if isinstance(self.gather, TwoHopGather) and wire.gather is not None:
            received = nodes * self.gather.message_bytes
            self.secondary_bytes = self.gather.secondary.kept_bytes if wire.gather.keep else 0
            # The local hop receives the messages of all peers; a local domain of one rank has no local hop. The cross
            # hop receives messages into this buffer, or with hpZ into the secondary partition, which is counted above.
            self.gather_buffer = (peers * received if peers > 1 else 0) + (0 if wire.gather.keep else received)
        if isinstance(self.reduce, TwoHopReduce):
            inside, across = self.reduce.message_bytes
            # The local hop's buffers hold the messages to send and the received messages. With one rank in the local
            # domain, these are the same messages.
            self.reduce_buffer = (2 if peers > 1 else 1) * peers * nodes * inside
            self.cross_buffer = 2 * nodes * across
            self.partial_bytes = nodes * self.size * (2 if context.zero.zero_accumulate_in_bf16 else 4)
            errors = self.reduce.errors(META)
            self.feedback_bytes = 0 if errors is None else errors.messages.nbytes

    def fingerprint(self) -> Fingerprint:
        """Return a value that changes with each optimizer step, by which gathers detect changed weights."""
        return (self.version,)

    def shards(self) -> list[torch.Tensor]:
        return [torch.empty(shape, device=META) for shape in self.shapes]

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        return self._read if self.is_sharded else None

    def input_reader(self, given: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._read

    def _read(self) -> torch.Tensor:
        self.read()
        return self.shard

    def check_shard_reader(self, expected: torch.Tensor) -> None: ...

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(range(len(self.parameters)))

    def segments_of(self, indices: Sequence[int]) -> tuple[Segment, ...]:
        return self.segments  # a simulated backward computes gradients for all parameters

    def has_gradients(self, indices: Sequence[int]) -> bool:
        return self.reduced

    def add_to_gradients(
        self, reduced: torch.Tensor, indices: Sequence[int], gradients: Sequence[Any] | None = None
    ) -> None: ...


def own_shapes(parameters: Parameters, num_ranks: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a rank's shard of each parameter, without padding.

    FSDP2 splits the first dimension.

    Args:
        parameters: names and unsharded shapes.
        num_ranks: number of ranks over which FSDP2 shards.
        rank: index of the rank among these ranks.
    """
    return tuple((own_rows(shape[0] if shape else 1, num_ranks, rank), *shape[1:]) for _, shape in parameters)


_own_shapes = functools.cache(own_shapes)


@functools.cache
def _listed(parameters: Parameters) -> tuple[UnitParameter, ...]:
    """Return the fields of each parameter of a simulated unit, which belongs to no module."""
    return tuple(UnitParameter(name=name, module=_NOWHERE, attribute="", shape=shape) for name, shape in parameters)


@functools.cache
def _num_elements(parameters: Parameters) -> int:
    """Return the number of elements of all parameters together."""
    return sum(math.prod(shape) for _, shape in parameters)


class SimulatedCodec(Codec):
    """Simulated codec of quantized messages, which computes nothing.

    Args:
        layout: positions of values and scales in a message.
        dtype: dtype of the unquantized values.
        touch: function that is called with the bytes that each packing or unpacking reads and writes.
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype, touch: Callable[[int], None]) -> None:
        super().__init__(layout, dtype)
        self._touch = touch

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        return _shared(*peers, self.message_bytes, dtype=torch.uint8)

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


# Bytes of lossless weight deltas as a fraction of the bytes of the bf16 weights, by the learning rate of AdamW.
# Measured with a small model after 200 steps, see docs/concepts/lossless_deltas.md. Weights of larger models change
# less.
LOSSLESS_SHARES = {1e-6: 0.016, 1e-5: 0.060, 1e-4: 0.131, 3e-4: 0.184, 1e-3: 0.289, 3e-3: 0.413}


def lossless_share(learning_rate: float | None) -> float:
    """Return the expected size of lossless weight deltas, as a fraction of the 16-bit weights.

    The fraction is interpolated from `LOSSLESS_SHARES`, in the logarithm of the learning rate. It is 1 if the learning
    rate is None or 0.
    """
    if not learning_rate:
        return 1.0
    rates = [math.log(rate) for rate in LOSSLESS_SHARES]
    return float(np.interp(math.log(learning_rate), rates, list(LOSSLESS_SHARES.values())))


class SimulatedLosslessCodec(LosslessCodec):
    """Simulated codec of lossless weight deltas, which computes nothing.

    Args:
        size: number of elements of a shard.
        share: expected size of a delta, as a fraction of the 16-bit weights.
        costs: cost model that gives the seconds to encode and decode a delta.
        spend: function that is called with these seconds for each delta.
    """

    def __init__(self, size: int, *, share: float, costs: Costs, spend: Callable[[float], None]) -> None:
        super().__init__(size)
        # Bytes for the delta in a message: the expected size and the margin ROOM, but at most 2 bytes per weight
        self._capacity, self._costs, self._spend = min(int(2 * size * share * (1 + ROOM)), 2 * size), costs, spend

    @property
    def message_bytes(self) -> int:
        return message_bytes(self.size, self._capacity)

    def pack(self, shard: torch.Tensor, message: torch.Tensor, *, base: torch.Tensor) -> None:
        self._spend(self._costs.encode(shard.nbytes, message.nbytes))

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        self._spend(self._costs.decode(base.nbytes, messages.nbytes))

    def learn(self, messages: torch.Tensor) -> None:
        """Do nothing. The real codec reads size counters from received messages; simulated messages have no content."""
