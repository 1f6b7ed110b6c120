"""Mesh axes over the device mesh of a program that uses `megazpp.zeropp`; several models may share the mesh."""

from __future__ import annotations

import functools
import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import CommQueue
from megazpp.parallel.config import NcclConfig
from megazpp.parallel.dims import ParallelDims, axis_options, make_group
from megazpp.topology.layout import Layout


class GuestAxis(MeshAxis):
    """A mesh axis whose process group the axes of other models may use too.

    A process group may have at most one communication queue (parallel/comm_queue.py), so all axes over one group share
    a queue.
    """

    @property
    def queue(self) -> CommQueue:
        """The communication queue of the axis's process group, the same one for all axes over this group."""
        if self.group is None:
            return super().queue
        if self.group not in _queues:
            _queues[self.group] = super().queue
        return _queues[self.group]


# The communication queue of each process group. A queue lives as long as its group.
_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, CommQueue] = weakref.WeakKeyDictionary()


class GuestDims(ParallelDims):
    """The mesh axes over a program's own device mesh.

    The axes use the mesh's process groups without changing them. Groups for further axes are created, or reused if they
    were created for an earlier model. Such a group is never the default group, because the program may use the default
    group while hops are pending. The groups for further axes have the timeout of the default group.

    Args:
        layout: sizes of the axes and placement of the ranks.
        mesh: the program's mesh, [shard] or [shard, tp], with any dimension names.
        expert_mesh: mesh of experts' parameters, [expert shard, ep]; None if experts use the groups of `mesh`.
        dense: if this object has the axes of experts' parameters, the axes of all other parameters; otherwise None.
    """

    _axis_class = GuestAxis

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None = None,
        *,
        dense: ParallelDims | None = None,
    ) -> None:
        self._expert_mesh = expert_mesh
        super().__init__(layout, device_type=mesh.device_type, mesh=mesh, dense=dense)

    @functools.cached_property
    def experts(self) -> GuestDims:
        """The mesh axes of experts' parameters, over the experts' own mesh; this object if there is no such mesh."""
        if self._expert_mesh is None:
            return self
        return GuestDims(self.layout.for_experts(), self._expert_mesh, dense=self)

    @functools.cached_property
    def own_shard(self) -> MeshAxis:
        """The shard axis for collectives in one hop; on the CPU, over a process group that only ZeRO++ uses.

        On the CPU these collectives run in a thread, while the program may call collectives of its own group. On CUDA
        this is the axis `shard` itself, because collectives of one group start in the order of the host's calls.
        """
        return self.shard if self.timeline.device_type == "cuda" else self.twin("shard", self._name("shard"))

    def host_axes(self, *axes: str) -> list[MeshAxis]:
        """Return for each given axis another axis over the same ranks, with a gloo process group on the CPU.

        ZeRO++ exchanges votes, small messages from CPU to CPU, along the returned axes. All ranks must call this
        method. The bytes count under the wire "world".

        Args:
            axes: names of axes of the layout, such as "local".
        """
        rank, found = dist.get_rank(), list[MeshAxis]()
        for axis in axes:
            name, ranks = f"hosts of {axis}", self.layout.axis_ranks(axis, rank)
            group = self._make_group(axis, name, backend="gloo") if len(ranks) > 1 else None
            axis_of_hosts = GuestAxis(
                name, ranks=ranks, rank=ranks.index(rank), group=group, counter=self.counter, wire="world"
            )
            found.append(axis_of_hosts)
        return found

    def _make_group(self, axis: str, name: str, *, own: bool = True, backend: str | None = None) -> dist.ProcessGroup:
        """Find or create the process groups of an axis, and return this rank's group; see `ParallelDims._make_group`.

        Args:
            axis: name of the axis in the layout.
            name: description of the groups, by which a later call finds them.
            own: ignored; the groups are always other groups than the default group.
            backend: back end of the groups, such as "gloo"; None uses the back end of the default group.
        """
        name, ranks = f"megazpp {name}", self.layout.axis_ranks(axis, dist.get_rank())
        if (found := find_group(ranks, name)) is not None:
            return found
        options = None if backend else axis_options(axis, self.layout, NcclConfig())
        if options is None:
            # Name a back end: with neither back end nor options, `make_group` would return the default group for an
            # axis of all ranks of the job. The program may use the default group while hops are pending.
            backend = backend or dist.get_backend()
        return make_group(list(self.layout.axis_groups(axis)), name, options, backend=backend)


def find_group(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup | None:
    """Return the existing process group of exactly these ranks, in this order, with the description `name`.

    Returns None if there is no such group.
    """
    groups = dist.distributed_c10d._world.pg_map
    # torch lists the integer -100 in place of a group that this rank does not belong to.
    mine = (group for group in groups if isinstance(group, dist.ProcessGroup))
    named = (group for group in mine if group.group_desc == name)
    return next((group for group in named if tuple(dist.get_process_group_ranks(group)) == ranks), None)
