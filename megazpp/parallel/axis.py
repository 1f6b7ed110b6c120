"""`MeshAxis`: one process group as an axis of the device mesh, with its collectives.

Only this file calls torch.distributed's collectives, except for the barrier in worker.py. This rule is the reason why
the file has more than 300 lines.

Code that communicates receives a `MeshAxis` as an argument. On an axis of one rank every collective is the identity and
needs no process group. Parallel layers therefore run, and are tested, in a single process as well.

Each collective counts the bytes that this rank sends. The count assumes a bandwidth-optimal ring over n ranks: a gather
or a scatter sends (n-1)/n of the full buffer to the rank's successor, an all-reduce sends twice as much. An all-to-all
sends (n-1)/n of its buffer in equal parts to all other ranks, so its bytes may count under several wires.

In a graph of torch.compile a collective becomes a custom operator (`megazpp::...`). When the graph runs, the operator
looks up the axis by `MeshAxis.key` and calls the same method as eager code. Compiled code therefore counts bytes and
records timeline spans too. Collectives ask `is_dynamo_compiling`, which is True only in code that is being traced. In
contrast, `is_compiling` is True for the whole process, also in communication threads, while one thread compiles.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megazpp.parallel.comm_queue import CommQueue, StreamQueue, ThreadQueue
from megazpp.parallel.timeline import Timeline


class Traffic(NamedTuple):
    """The number of calls of one collective, and the bytes that this rank sent in them."""

    calls: int
    sent_bytes: int


class TrafficCounter:
    """A counter of the calls of collectives and of the bytes that this rank has sent, by (wire, axis, collective).

    All axes of a `ParallelDims` share one counter, except the axis `world`, which has a separate one. A wire is a class
    of traffic: "tp", "local" (intra-node), "cross" (inter-node), "world" (logging, barriers), or "pcie" (copies between
    device and host memory).
    """

    def __init__(self) -> None:
        self._traffic: dict[tuple[str, str, str], Traffic] = defaultdict(lambda: Traffic(0, 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which this counter ignores all traffic, for evaluations and link measurements.

        Collectives that are submitted to a communication queue inside the context stay uncounted, even if they run
        after the end of the context.
        """
        before = _paused.set((*_paused.get(), self))
        try:
            yield
        finally:
            _paused.reset(before)

    @property
    def is_paused(self) -> bool:
        """True inside the context of `paused`, in which this counter ignores all traffic."""
        return self in _paused.get()

    def add(self, wire: str, axis: str, collective: str, sent_bytes: int, *, calls: int = 1) -> None:
        """Count `calls` calls of a collective on one wire and axis, and the bytes that this rank sent in all of them.

        While the counter is paused, nothing is counted.
        """
        if self.is_paused:
            return
        before, total = self._traffic[wire, axis, collective]
        self._traffic[wire, axis, collective] = Traffic(before + calls, total + sent_bytes)

    def sent_bytes(self, wire: str) -> int:
        """Return the bytes that this rank has sent so far on one wire (a class of traffic, such as "cross")."""
        return sum(t.sent_bytes for (w, _, _), t in self._traffic.items() if w == wire)

    def sent_on_axis(self, axis: str) -> int:
        """Return the bytes that this rank has sent so far along the axis named `axis`, summed over all wires."""
        return sum(t.sent_bytes for (_, a, _), t in self._traffic.items() if a == axis)

    def table(self) -> dict[tuple[str, str, str], Traffic]:
        """Return a copy of all counts of this counter: calls and sent bytes by (wire, axis, collective)."""
        return dict(self._traffic)


# The traffic counters that are paused. This is a context variable because a communication queue runs each task in a
# copy of the submitter's context. A task that was submitted during a pause therefore stays uncounted, even if it runs
# after the end of the pause.
_paused: ContextVar[tuple[TrafficCounter, ...]] = ContextVar("paused", default=())


class MeshAxis:
    """The group of ranks along one mesh axis that contains this rank, and the collectives of this group.

    Args:
        name: name of the axis ("tp", "shard", "replicate", ...), and of the timeline track that shows its collectives.
        ranks: global ranks along the axis, in axis order.
        rank: this rank's index in `ranks`.
        group: process group of exactly these ranks; None if and only if there is one rank.
        counter: counter of the bytes that this rank sends; None creates a new one.
        wire: wire (see `TrafficCounter`) under which the bytes of all collectives except all-to-alls count: "tp",
            "local", "cross" or "world".
        wires: for all-to-alls, the wire from this rank to each rank of the axis, in axis order; None uses `wire` for
            all ranks.
        timeline: timeline that gets a span for each collective; None creates a new one.
        queue: communication queue in which the axis's collectives overlap with compute. None creates one on first use,
            a separate thread (CPU) or stream (CUDA).
    Attributes:
        size: number of ranks along the axis.
        key: string by which a graph of torch.compile finds this axis, unique in the process.
    """

    def __init__(
        self,
        name: str,
        *,
        ranks: tuple[int, ...] = (0,),
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        counter: TrafficCounter | None = None,
        wire: str = "local",
        wires: tuple[str, ...] | None = None,
        timeline: Timeline | None = None,
        queue: CommQueue | None = None,
    ) -> None:
        assert (group is None) == (len(ranks) == 1), f"axis {name}: ranks {ranks}, group {group}"
        self.name, self.ranks, self.rank, self.group, self.wire = name, ranks, rank, group, wire
        self.size = len(ranks)
        self.wires = wires or (wire,) * self.size
        self.counter = counter or TrafficCounter()
        self.timeline, self._queue = timeline or Timeline(), queue
        self.key = f"{name} {next(_numbers)}"
        _axes[self.key] = self

    @property
    def queue(self) -> CommQueue:
        """The axis's communication queue, created on first use.

        While the queue has pending tasks, no other code may call collectives on the axis's process group.
        """
        if self._queue is None:
            if self.timeline.device_type == "cuda":
                # -1 is CUDA's high stream priority. Intra-node collectives get it, because the next layer waits for
                # them. Inter-node hops may take until the end of the optimizer step.
                self._queue = StreamQueue(priority=0 if self.wire == "cross" else -1)
            else:
                self._queue = ThreadQueue(self.name, self.timeline)
        return self._queue

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` in place over the ranks of the axis, and return `x`."""
        if torch.compiler.is_dynamo_compiling() and self.size > 1:
            _all_reduce_operator(x, self.key)
            return x
        return self._all_reduce_(x, dist.ReduceOp.SUM)

    def max_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` in place by its elementwise maximum over the ranks of the axis, and return `x`."""
        return self._all_reduce_(x, dist.ReduceOp.MAX)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """Gather the tensors `x`, [n, ...], of all ranks of the axis, and return them as [size * n, ...] in axis order.

        Args:
            x: this rank's tensor of n rows; it has the same shape on all ranks.
            out: optional [size * n, ...] buffer for the result. `x` may be this rank's slice of `out`.
            of: name of the gathered tensor in the timeline, for instance the name of a layer.
        """
        if self.size == 1:
            return x if out is None else out.copy_(x)
        if torch.compiler.is_dynamo_compiling():
            assert out is None, "a compiled all-gather allocates its result and cannot write to `out`"
            return _all_gather_operator(x, self.key)
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self._span("all_gather", of):
            _all_gather_single(out, x.contiguous(), group=self.group)
        self.count("all_gather", self.ring_bytes(out))
        return out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """Sum `x`, [size * n, ...], over all ranks of the axis, and return this rank's slice of the sum, [n, ...].

        Args:
            x: this rank's contribution to the slices of all ranks, in axis order, n rows each.
            out: optional [n, ...] buffer for the result.
            of: name of the reduced tensor in the timeline.
        """
        if self.size == 1:
            return x if out is None else out.copy_(x)
        if torch.compiler.is_dynamo_compiling():
            assert out is None, "a compiled reduce-scatter allocates its result and cannot write to `out`"
            return _reduce_scatter_operator(x, self.key)
        if out is None:
            out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        with self._span("reduce_scatter", of):
            if x.is_cpu and dist.get_backend(self.group) == "gloo":
                self._ring_reduce_scatter(x.contiguous(), out)
            else:
                _reduce_scatter_single(out, x.contiguous(), group=self.group)
        self.count("reduce_scatter", self.ring_bytes(x))
        return out

    def own_slice(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of `x`, [size * n, ...], as a view [n, ...]; no rank communicates."""
        return x.chunk(self.size)[self.rank]

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        """Send slice i of `x`, [size, ...], to rank i of the axis. Return [size, ...] with rank i's slice at index i.

        `of` is the name of the tensor in the timeline.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_dynamo_compiling():
            return _all_to_all_operator(x, self.key)
        x = x.contiguous()
        out = torch.empty_like(x)
        with self._span("all_to_all", of):
            dist.all_to_all_single(out, x, group=self.group)
        self.count("all_to_all", self.ring_bytes(x))
        return out

    def exchange(self, x: torch.Tensor, send: list[int], receive: list[int], *, of: str = "") -> torch.Tensor:
        """Exchange segments of unequal lengths between all ranks of the axis (an all-to-all).

        Args:
            x: [sum(send)], the segment for rank 0, followed by the segment for rank 1, and so on.
            send: number of elements that this rank sends to each rank.
            receive: number of elements that each rank sends to this rank.
            of: name of the tensor in the timeline.
        Returns:
            The received segments, [sum(receive)], in rank order.
        """
        if self.size == 1:
            return x
        out = x.new_empty(sum(receive))
        with self._span("all_to_all", of):
            dist.all_to_all_single(out, x, receive, send, group=self.group)
        self.count("all_to_all", (x.numel() - send[self.rank]) * x.element_size())
        return out

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` on every rank of the axis with the `x` of the axis's first rank, and return `x`."""
        if self.size > 1:
            with self.timeline.span(self.name, "broadcast"):
                dist.broadcast(x, src=self.ranks[0], group=self.group)
            self.count("broadcast", self.ring_bytes(x))
        return x

    def gather_objects(self, value: object) -> list[Any]:
        """Collect the picklable `value` of every rank on the axis's first rank.

        Returns:
            On the first rank, all values in axis order. On the other ranks, an empty list.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        with self.timeline.span(self.name, "gather_objects"):
            dist.gather_object(value, values or None, dst=self.ranks[0], group=self.group)
        return values

    def share_object(self, value: object) -> Any:
        """Broadcast the picklable `value` of the axis's first rank, and return it on every rank.

        The `value` of the other ranks is ignored.
        """
        values = [value]
        if self.size > 1:
            with self.timeline.span(self.name, "share_object"):
                dist.broadcast_object_list(values, src=self.ranks[0], group=self.group)
        return values[0]

    def _ring_reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Sum `x` over the axis by a ring of sends and receives, and write this rank's slice of the sum to `out`.

        gloo implements a reduce-scatter as an all-reduce, which sends twice as many bytes. Measured with 4 ranks and
        4 MB to 16 MB on a CPU, this ring takes 0.5 to 0.65 of the CPU time of gloo's reduce-scatter.
        """
        slices = x.view(self.size, *out.shape)
        successor, predecessor = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        partial = slices[self.rank - 1]
        # The partial sum of each slice goes around the ring, and every rank adds its contribution. The partial sum ends
        # at the rank that owns the slice.
        for hop in range(2, self.size + 1):
            incoming = torch.empty_like(partial)
            received = dist.irecv(incoming, predecessor, group=self.group)
            for request in (received, dist.isend(partial, successor, group=self.group)):
                assert request is not None
                request.wait()
            partial = incoming.add_(slices[self.rank - hop])
        out.copy_(partial)

    def _all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce `x` in place over the axis with the operation `op` (SUM or MAX), and return `x`."""
        if self.size > 1:
            with self.timeline.span(self.name, "all_reduce"):
                dist.all_reduce(x, op=op, group=self.group)
            self.count("all_reduce", 2 * self.ring_bytes(x))
        return x

    def _span(self, collective: str, of: str) -> AbstractContextManager[object]:
        """Return a context that records a timeline span of a collective on the tensor named `of` ("" if unnamed)."""
        return self.timeline.span(self.name, f"{collective} {of}" if of else collective)

    def ring_bytes(self, full: torch.Tensor) -> int:
        """Return the bytes that one rank sends when a ring all-gathers or reduce-scatters the buffer `full`."""
        return full.numel() * full.element_size() * (self.size - 1) // self.size

    def count(self, collective: str, sent_bytes: int, *, calls: int = 1) -> None:
        """Count `calls` calls of a collective along this axis, and the bytes that this rank sent in all of them."""
        for wire, part in self.by_wire(collective, sent_bytes).items():
            self.counter.add(wire, self.name, collective, part, calls=calls)

    def by_wire(self, collective: str, sent_bytes: int) -> dict[str, int]:
        """Divide the bytes that this rank sends in a collective among the wires, and return the bytes of each wire.

        An all-to-all sends equal parts to all other ranks. Other collectives send all bytes to the rank's successor.
        """
        if collective != "all_to_all":
            return {self.wire: sent_bytes}
        return {wire: sent_bytes * number // (self.size - 1) for wire, number in self._wires_to_others.items()}

    @functools.cached_property
    def _wires_to_others(self) -> Counter[str]:
        """The number of other ranks of the axis that this rank reaches over each wire, by wire; cached."""
        return Counter(self.wires[: self.rank] + self.wires[self.rank + 1 :])


_numbers = itertools.count()
# All live axes by `MeshAxis.key`. An operator of torch takes only tensors and plain values, so compiled code passes the
# axis as a string, as torch does with process groups. The weak references do not keep an axis alive.
_axes: weakref.WeakValueDictionary[str, MeshAxis] = weakref.WeakValueDictionary()


def axis_of_key(key: str) -> MeshAxis:
    """Return the mesh axis with the given `MeshAxis.key`, for a custom operator in a graph of torch.compile.

    Raises:
        KeyError: the axis has been garbage-collected.
    """
    return _axes[key]


def define_operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `function` as a torch operator in the namespace `megazpp`, and return the operator.

    This replaces `torch.library.custom_op`, whose seven Python frames and alias checks per call take more host time
    than the launch of a collective. The operator has no autograd formula, because it appears only in compiled graphs
    whose backward has already been traced.

    Args:
        schema: operator name, arguments and results in torch's schema syntax. An argument that `function` changes in
            place is written `Tensor(a!)`.
        function: implementation for tensors on any device.
        fake: implementation for tracing by torch.compile. It takes tensors without data, and returns tensors of the
            same shapes and dtypes as `function`.
    """
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megazpp::{name}", fake)
    return getattr(torch.ops.megazpp, name).default


def _all_reduce_in_graph(x: torch.Tensor, axis: str) -> None:
    """All-reduce `x` in place over the axis with the key `axis`: the operator megazpp::all_reduce_ of compiled code."""
    axis_of_key(axis).all_reduce_(x)


_library = torch.library.Library("megazpp", "DEF")
_all_reduce_operator = define_operator(
    "all_reduce_(Tensor(a!) x, str axis) -> ()", _all_reduce_in_graph, lambda x, axis: None
)
_all_gather_operator = define_operator(
    "all_gather(Tensor x, str axis) -> Tensor",
    lambda x, axis: axis_of_key(axis).all_gather(x),
    lambda x, axis: x.new_empty((axis_of_key(axis).size * x.shape[0], *x.shape[1:])),
)
_reduce_scatter_operator = define_operator(
    "reduce_scatter(Tensor x, str axis) -> Tensor",
    lambda x, axis: axis_of_key(axis).reduce_scatter(x),
    lambda x, axis: x.new_empty((x.shape[0] // axis_of_key(axis).size, *x.shape[1:])),
)
_all_to_all_operator = define_operator(
    "all_to_all(Tensor x, str axis) -> Tensor",
    lambda x, axis: axis_of_key(axis).all_to_all(x),
    lambda x, axis: x.new_empty(x.shape),
)


# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor. torch 2.11 and 2.12 have only these old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
