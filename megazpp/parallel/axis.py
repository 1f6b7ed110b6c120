"""One process group as an axis of the mesh: the one file, of more than 300 lines, that calls collectives.

Everything that communicates is handed a `MeshAxis`. An axis of size 1 is the identity and needs no process group, so
layers and collectives run (and are tested) in one process. Each call counts the bytes this rank sends, by what a
bandwidth-optimal ring sends: (n-1)/n of the buffer for a gather or a scatter, twice that for an all-reduce.

A graph of torch.compile names an axis by its `key` and calls these methods from operators of its own (`megazpp::...`),
when it runs, so bytes and spans are counted there too; eager code does not go through them.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megazpp.parallel.comm_queue import CommQueue, StreamQueue, ThreadQueue
from megazpp.parallel.timeline import Timeline


class Traffic(NamedTuple):
    """Calls and bytes sent by this rank."""

    calls: int
    sent_bytes: int


class TrafficCounter:
    """Bytes this rank has sent, by (wire, axis, collective); shared by all axes of a job."""

    def __init__(self) -> None:
        self._traffic: dict[tuple[str, str, str], Traffic] = defaultdict(lambda: Traffic(0, 0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is sent, or submitted to a queue, inside: evaluations, samples, the counting itself."""
        before = _paused.set((*_paused.get(), self))
        try:
            yield
        finally:
            _paused.reset(before)

    @property
    def is_paused(self) -> bool:
        return self in _paused.get()

    def add(self, wire: str, axis: str, collective: str, sent_bytes: int) -> None:
        if self.is_paused:
            return
        calls, total = self._traffic[wire, axis, collective]
        self._traffic[wire, axis, collective] = Traffic(calls + 1, total + sent_bytes)

    def sent_bytes(self, wire: str) -> int:
        """Bytes sent so far on one wire: "tp", "local" or "cross"."""
        return sum(t.sent_bytes for (w, _, _), t in self._traffic.items() if w == wire)

    def sent_on_axis(self, axis: str) -> int:
        """Bytes sent so far along one axis, whatever the wire."""
        return sum(t.sent_bytes for (_, a, _), t in self._traffic.items() if a == axis)

    def table(self) -> dict[tuple[str, str, str], Traffic]:
        return dict(self._traffic)


# Counters that do not count now. A queue's task has the context in which it was submitted.
_paused: ContextVar[tuple[TrafficCounter, ...]] = ContextVar("paused", default=())


class MeshAxis:
    """The ranks that differ from this one in a single mesh coordinate, and the collectives among them.

    Args:
        name: "tp", "shard", "replicate", ...; the track of its collectives in the timeline.
        ranks: global ranks along the axis, in axis order.
        rank: this rank's index in `ranks`.
        group: the process group of exactly these ranks; None if and only if there is one rank.
        wire: the wire under this rank's link to its successor: "tp", "local" (inside a node) or "cross".
        queue: where its collectives run beside the compute; None: in a thread (CPU) or on a stream (CUDA), made on use.
        shares_queue: whether all axes of this group have one queue, as they must where models share process groups.
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
        timeline: Timeline | None = None,
        queue: CommQueue | None = None,
        shares_queue: bool = False,
    ) -> None:
        assert (group is None) == (len(ranks) == 1), f"axis {name}: ranks {ranks}, group {group}"
        self.name, self.ranks, self.rank, self.group, self.wire = name, ranks, rank, group, wire
        self.size = len(ranks)
        self.counter = counter or TrafficCounter()
        self.timeline, self._queue, self._shares_queue = timeline or Timeline(), queue, shares_queue
        self.key = f"{name} {next(_numbers)}"
        _axes[self.key] = self

    @property
    def queue(self) -> CommQueue:
        """The axis's communication queue; while tasks are pending in it, nothing else may use the axis's group."""
        if self._queue is None and self._shares_queue and self.group is not None:
            self._queue = _queues.get(self.group)
        if self._queue is None:
            if self.timeline.device_type == "cuda":
                self._queue = StreamQueue(priority=0 if self.wire == "cross" else -1)  # slow hops have the whole step
            else:
                self._queue = ThreadQueue(self.name, self.timeline)
            if self._shares_queue and self.group is not None:
                _queues[self.group] = self._queue
        return self._queue

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` in place over the axis and return it."""
        if torch.compiler.is_compiling() and self.size > 1:
            _all_reduce_operator(x, self.key)
            return x
        return self._all_reduce_(x, dist.ReduceOp.SUM)

    def max_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` in place by its elementwise maximum over the axis and return it."""
        return self._all_reduce_(x, dist.ReduceOp.MAX)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """[n, ...] on each rank -> [size * n, ...], in axis order; `of` names the tensor's owner in the span.

        `out` may alias `x` in this rank's slot.
        """
        if self.size == 1:
            return x if out is None else out.copy_(x)
        if torch.compiler.is_compiling():
            assert out is None, "a compiled all-gather has an output of its own"
            return _all_gather_operator(x, self.key)
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self._span("all_gather", of):
            _all_gather_single(out, x.contiguous(), group=self.group)
        self.count("all_gather", self.ring_bytes(out))
        return out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """[size * n, ...] on each rank -> [n, ...], the sum over the axis of this rank's slice; `of` as above."""
        if self.size == 1:
            return x if out is None else out.copy_(x)
        if torch.compiler.is_compiling():
            assert out is None, "a compiled reduce-scatter has an output of its own"
            return _reduce_scatter_operator(x, self.key)
        if out is None:
            out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        with self._span("reduce_scatter", of):
            _reduce_scatter_single(out, x.contiguous(), group=self.group)
        self.count("reduce_scatter", self.ring_bytes(x))
        return out

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        """[size, ...] -> [size, ...]: slice i goes to rank i, slice i of the result came from rank i; `of` as above."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return _all_to_all_operator(x, self.key)
        x = x.contiguous()
        out = torch.empty_like(x)
        with self._span("all_to_all", of):
            dist.all_to_all_single(out, x, group=self.group)
        self.count("all_to_all", self.ring_bytes(x))
        return out

    def exchange(self, x: torch.Tensor, send: list[int], receive: list[int], *, of: str = "") -> torch.Tensor:
        """An all-to-all of unequal parts: `send` elements of x [n] to each rank, `receive` from each; `of` as above."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(receive))
        with self._span("all_to_all", of):
            dist.all_to_all_single(out, x, receive, send, group=self.group)
        self.count("all_to_all", (x.numel() - send[self.rank]) * x.element_size())
        return out

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` in place by that of the axis's first rank and return it."""
        if self.size > 1:
            with self.timeline.span(self.name, "broadcast"):
                dist.broadcast(x, src=self.ranks[0], group=self.group)
            self.count("broadcast", self.ring_bytes(x))
        return x

    def gather_objects(self, value: object) -> list[Any]:
        """The picklable `value` of every rank on the axis's first rank, in axis order; elsewhere nothing."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        with self.timeline.span(self.name, "gather_objects"):
            dist.gather_object(value, values or None, dst=self.ranks[0], group=self.group)
        return values

    def share_object(self, value: object) -> Any:
        """The picklable `value` of the axis's first rank, on every rank."""
        values = [value]
        if self.size > 1:
            with self.timeline.span(self.name, "share_object"):
                dist.broadcast_object_list(values, src=self.ranks[0], group=self.group)
        return values[0]

    def _all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size > 1:
            with self.timeline.span(self.name, "all_reduce"):
                dist.all_reduce(x, op=op, group=self.group)
            self.count("all_reduce", 2 * self.ring_bytes(x))
        return x

    def _span(self, collective: str, of: str) -> AbstractContextManager[object]:
        return self.timeline.span(self.name, f"{collective} {of}" if of else collective)

    def ring_bytes(self, full: torch.Tensor) -> int:
        """Bytes one rank sends when a ring gathers or scatters the buffer `full`."""
        return full.numel() * full.element_size() * (self.size - 1) // self.size

    def count(self, collective: str, sent_bytes: int) -> None:
        self.counter.add(self.wire, self.name, collective, sent_bytes)


_numbers = itertools.count()
# An operator's arguments are tensors and plain values, so compiled code names its axis by a string, as torch does its
# process groups. Read by these operators alone, and it keeps no axis alive.
_axes: weakref.WeakValueDictionary[str, MeshAxis] = weakref.WeakValueDictionary()
# The queues of groups that several models share: a group has at most one queue. They live as long as their groups.
_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, CommQueue] = weakref.WeakKeyDictionary()


def axis_of_key(key: str) -> MeshAxis:
    """The axis that an operator in a compiled graph was given by its `key`."""
    return _axes[key]


def define_operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the operator megazpp::`schema`, which calls `function` on tensors of any device, and return it.

    `torch.library.custom_op` puts seven Python frames and checks of aliases around each call of an operator, which
    take more host time than a collective. An operator of this function has no gradient: a compiled graph, where it
    stands, has its backward already.

    Args:
        schema: name, arguments and results in torch's syntax; an argument that is written to is marked as such.
        fake: returns results of the right shapes for tensors without memory.
    """
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megazpp::{name}", fake)
    operator: Callable[..., Any] = getattr(torch.ops.megazpp, name).default
    return operator


def _all_reduce_in_graph(x: torch.Tensor, axis: str) -> None:
    axis_of_key(axis).all_reduce_(x)


_library = torch.library.Library("megazpp", "DEF")
_all_reduce_operator = define_operator(
    "all_reduce_(Tensor(a!) x, str axis) -> ()",
    _all_reduce_in_graph,
    lambda x, axis: None,
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


def make_group(
    partition: Sequence[tuple[int, ...]],
    name: str,
    options: Any = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """This rank's group of a partition of all ranks; rank i of a group is the i-th rank of its part.

    Every rank calls this with the same parts in the same order. Parts that do not ascend need torch 2.13's new_group.

    Args:
        options: the back end's, for the one group that this rank is in.
        backend: another one than the first group's.
        timeout: of the groups' collectives; None: the back end's default, whatever the first group has.
    """
    mine = next(ranks for ranks in partition if dist.get_rank() in ranks)
    ascending = all(list(ranks) == sorted(ranks) for ranks in partition)
    world, nccl = dist.group.WORLD, dist.get_backend() == "nccl"
    assert world is not None
    if options is backend is None and mine == tuple(range(dist.get_world_size())):
        return world
    if len(mine) == 1:
        own = "gloo" if nccl else None  # not a communicator that nobody talks through; only this rank knows of it
        return dist.new_group(list(mine), timeout=timeout, backend=own, group_desc=name, use_local_synchronization=True)
    if backend is None and ascending and nccl and world.bound_device_id is not None:
        # into all parts at once: splitting one off takes all ranks, and one by one a thousand would take a minute
        parts = [list(ranks) for ranks in partition]
        group = dist.split_group(split_ranks=parts, timeout=timeout, pg_options=options, group_desc=name)
        assert group is not None, "this rank is in a part"
        return group
    settings: dict[str, Any] = {"backend": backend, "timeout": timeout, "pg_options": options, "group_desc": name}
    settings |= {} if ascending else {"sort_ranks": False}
    return [dist.new_group(list(ranks), **settings) for ranks in partition][partition.index(mine)]


def find_group(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup | None:
    """Return the process group of exactly these ranks, in this order, that `make_group` has made under this name."""
    groups = dist.distributed_c10d._world.pg_map
    mine = (group for group in groups if isinstance(group, dist.ProcessGroup))  # others are -100
    named = (group for group in mine if group.group_desc == name)
    return next((group for group in named if tuple(dist.get_process_group_ranks(group)) == ranks), None)


def first_group_timeout(device_type: str) -> timedelta | None:
    """Return the timeout that `init_process_group` was given for collectives of this device; None if unknown."""
    world = dist.group.WORLD
    assert world is not None
    options = getattr(world._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def can_order_groups() -> bool:
    """True if this torch can number a group's ranks in any order; older ones sort them."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


# torch 2.13 renamed these two; 2.11 and 2.12 have only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
