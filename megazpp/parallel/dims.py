"""Degrees in, mesh and axes out: the one place that creates process groups.

| axis      | ranks along it                                | what travels                              |
|-----------|-----------------------------------------------|-------------------------------------------|
| tp        | split one layer's matrices                    | activations, several times per layer      |
| cp        | split one sample's tokens: a part of shard    | queries, keys, values, outputs, per layer |
| shard     | split one model copy's parameters and moments | weights and gradients, once per use       |
| local     | the part of shard inside a node               | the fast hop of weights and gradients     |
| cross     | the part of shard across nodes                | the slow hop, once per optimizer step     |
| replicate | hold equal copies (HSDP, ZeRO-0)              | reduced gradients, once per optimizer step|
| island    | hold the same shards of different models      | diloco/outer.py, once per synchronization  |
| node      | tp x local, made for Muon alone               | rows of matrices, once per optimizer step   |
| ep        | hold different experts: a part of tp x local  | tokens on their way to experts, per layer   |

Parameters of experts are sharded over the same ranks as all others, along other axes (`ParallelDims.experts`): ep
takes the place of tp, `expert shard` and `expert local` the places of shard and local. An axis that has the same ranks
on both is one object.

A rank's index along shard is cross index x local size + local index. Each rank is in at most one group per axis (an
axis of one rank has none), and every group is made once, by all ranks in the same order. Where shard is over all ranks
it takes the group of all ranks. The groups of local, cross and node are made on first use: plain ZeRO has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megazpp.base.files import DamagedError
from megazpp.base.flags import check_positive, flag
from megazpp.base.program import in_words
from megazpp.parallel.axis import (
    MeshAxis,
    TrafficCounter,
    can_order_groups,
    find_group,
    first_group_timeout,
    make_group,
)
from megazpp.parallel.comm_queue import CommQueue
from megazpp.parallel.environment import NcclConfig, axis_options, check_connections, order_launches
from megazpp.parallel.timeline import Timeline
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import AXES, NODE, Layout, plan_layout

T = TypeVar("T")
MESH_AXES, HOPS = ("island", "replicate", "shard", "tp"), ("local", "cross")
EXPERT_NAMES = {"tp": "ep", "shard": "expert shard", "local": "expert local"}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism.

    The degrees of tensor, context and data parallelism.
    """

    tensor_model_parallel_size: int = flag(1, "ranks that split every layer's matrices", common=True)
    pipeline_model_parallel_size: int = flag(1, "only 1 is supported")
    context_parallel_size: int = flag(
        1,
        "ranks of a node that split every sample's tokens; for attention they exchange them for heads (Ulysses, "
        "arXiv 2309.14509). Divides the data-parallel size; parameters are sharded over as many ranks as without",
    )
    allow_cp_across_nodes: bool = flag(False, "let --context-parallel-size leave the node: activations cross nodes")
    expert_model_parallel_size: int = flag(
        1, "ranks of a node that share out the experts of each layer; divides --num-experts"
    )
    sequence_parallel: bool = flag(False, "split activations along the sequence between tensor-parallel regions")
    num_distributed_optimizer_instances: int = flag(
        1, "copies of the sharded model (HSDP): shard inside a copy, all-reduce gradients between copies"
    )
    hsdp: bool = flag(False, "one copy of the sharded model per node (per NVLink domain, where that is larger)")

    def __post_init__(self) -> None:
        if (size := self.pipeline_model_parallel_size) != 1:
            raise ValueError(f"--pipeline-model-parallel-size {size} is not supported: only 1 is")
        check_positive(self, "tensor_model_parallel_size", "context_parallel_size")
        check_positive(self, "num_distributed_optimizer_instances", "expert_model_parallel_size")


def plan_dims(config: ParallelConfig, cluster: Cluster, *, zero_stage: int, islands: int = 1) -> Layout:
    """The layout that the flags ask for on `cluster`; ZeRO stage 0 is one replica per data rank.

    Raises:
        ValueError: naming the flags that do not fit the cluster or each other.
    """
    instances, tp = config.num_distributed_optimizer_instances, config.tensor_model_parallel_size
    copies = "--hsdp" if config.hsdp else f"--num-distributed-optimizer-instances {instances}"
    if islands > 1 and (config.hsdp or instances > 1 or zero_stage == 0):
        asked = copies if config.hsdp or instances > 1 else "--zero-stage 0"
        raise ValueError(f"{asked} with --diloco-steps: an island has one copy of the model, in shards over its ranks")
    if config.hsdp and instances not in (1, cluster.num_local_domains):
        raise ValueError(
            f"--hsdp makes one copy per node ({cluster.num_local_domains}), --num-distributed-optimizer-instances "
            f"asks for {instances}"
        )
    if config.hsdp and tp > cluster.local_domain_size:
        raise ValueError(
            f"--hsdp makes one copy per node of {cluster.local_domain_size} ranks, and --tensor-model-parallel-size "
            f"{tp} spreads a copy over several"
        )
    replicas = cluster.num_local_domains if config.hsdp else instances
    if zero_stage == 0:
        if replicas != 1:
            raise ValueError(f"{copies} needs --zero-stage 1 or more: stage 0 shards nothing")
        replicas = cluster.world_size // max(tp, 1)
    layout = plan_layout(
        cluster,
        tp=tp,
        replicas=max(replicas, 1),
        islands=islands,
        cp=config.context_parallel_size,
        cp_across=config.allow_cp_across_nodes,
        ep=config.expert_model_parallel_size,
    )
    if not can_order_groups() and not layout.groups_ascend:
        raise ValueError(
            f"ranks are placed in an order for which torch {torch.__version__} cannot make process groups (its "
            "new_group has no sort_ranks); use torch 2.13, or have the launcher number the ranks node by node"
        )
    return layout


class ParallelDims:
    """The device mesh of a job and this rank's axes.

    Args:
        timeout: of every collective; None: torch's, 10 minutes on NCCL and 30 on gloo; with `mesh`, the first group's.
        threads: whether the hops of CPU tensors run in threads; False: at once, in the thread that submits them.
        mesh: one that is there already, [shard] or [shard, tp], whose dims may have other names; None: a new one. With
            it, groups with equal members are reused, because they outlive the model, and the mesh's stay as they are.
        dense: the axes of the other parameters, where these are the axes of experts (`experts`); their counter and
            timeline are used, and every axis that has the same ranks.
    Attributes:
        mesh: DeviceMesh [island, replicate, shard, tp], of which only shard is there where it has one rank.
        tp, cp, shard, replicate, island: this rank's axes; they share `counter`, with `local` and `cross`.
        timeline: where all axes record what they do.
        world: the axis of all ranks, for logging and barriers; it counts on the "world" wire.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device_type: str,
        nccl: NcclConfig | None = None,
        timeout: timedelta | None = None,
        threads: bool = True,
        mesh: DeviceMesh | None = None,
        dense: ParallelDims | None = None,
    ) -> None:
        if device_type == "cuda":
            check_connections()
            order_launches(layout)
        self.layout, self._nccl, self._threads, self._is_guest = layout, nccl or NcclConfig(), threads, mesh is not None
        self._timeout = first_group_timeout(device_type) if self._is_guest and timeout is None else timeout
        self._dense = dense
        if dense is None:
            self.counter, self.timeline = TrafficCounter(), Timeline(device_type)
        else:
            self.counter, self.timeline = dense.counter, dense.timeline
        # FSDP2 cannot do without shard; groups number their ranks as the axes do, as it takes shard indices from them
        self._mesh_axes = names = tuple(axis for axis in MESH_AXES if axis == "shard" or layout.axis_size(axis) > 1)
        if mesh is None:
            ranks = torch.tensor(layout.mesh_ranks()).view([layout.axis_size(axis) for axis in names])
            # hops between islands run over many steps, so they never share the group of all ranks
            groups = [self._make_group(axis, axis, own=axis == "island") for axis in names]
            mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(map(self._name, names)))
        self.mesh = mesh
        self.tp, self.cp, self.shard, self.replicate, self.island = [
            self._axis(name, self._name(name), self._group(name)) for name in AXES if name not in HOPS
        ]
        world = tuple(range(layout.cluster.world_size))
        group = dist.group.WORLD if len(world) > 1 else None
        self.world = MeshAxis(
            "world", ranks=world, rank=dist.get_rank(), group=group, wire="world", timeline=self.timeline
        )

    @functools.cached_property
    def experts(self) -> ParallelDims:
        """The axes of experts' parameters on the same ranks; made on first use, on all ranks."""
        layout = self.layout.for_experts()
        if layout == replace(self.layout, cp=1, ep=1):
            return self
        settings: dict[str, Any] = {"nccl": self._nccl, "timeout": self._timeout, "threads": self._threads}
        return ParallelDims(layout, device_type=self.timeline.device_type, dense=self, **settings)

    def twin(self, axis: str, name: str) -> MeshAxis:
        """A further axis `name` of the ranks of `axis`, with a process group and a queue of its own; on all ranks."""
        group = self._make_group(axis, name, own=True) if self.layout.axis_size(axis) > 1 else None
        return self._axis(axis, name, group)

    def host_axes(self, *axes: str) -> list[MeshAxis]:
        """Further axes of the same ranks over gloo groups, for small messages of hosts, on the "world" wire."""
        rank, found = dist.get_rank(), []
        for axis in axes:
            name, ranks = f"hosts of {axis}", self.layout.axis_ranks(axis, rank)
            group = self._make_group(axis, name, backend="gloo") if len(ranks) > 1 else None
            settings: dict[str, Any] = {"counter": self.counter, "wire": "world", "shares_queue": self._is_guest}
            found.append(MeshAxis(name, ranks=ranks, rank=ranks.index(rank), group=group, **settings))
        return found

    @functools.cached_property
    def local(self) -> MeshAxis:
        """The part of shard inside a node; made on first use, on all ranks."""
        return self._axis("local", self._name("local"), self._group("local"))

    @functools.cached_property
    def cross(self) -> MeshAxis:
        """The part of shard across nodes; made on first use, on all ranks."""
        return self._axis("cross", "cross", self._group("cross"))

    @functools.cached_property
    def node(self) -> MeshAxis:
        """The ranks of this node in this copy of the model, tp index innermost; made on first use, on all ranks."""
        return self.twin(NODE, NODE)

    def _name(self, axis: str) -> str:
        """The name of an axis: experts' axes have names of their own where their ranks differ from the dense ones."""
        return axis if self._dense is None else EXPERT_NAMES.get(axis, axis)

    @functools.cached_property
    def _shared_axes(self) -> frozenset[str]:
        """Axes of experts that have the same ranks as the dense axis of that name."""
        if self._dense is None:
            return frozenset()
        theirs = self._dense.layout
        return frozenset(a for a in AXES if [*self.layout.axis_groups(a)] == [*theirs.axis_groups(a)])

    def _axis(self, axis: str, name: str, group: dist.ProcessGroup | None) -> MeshAxis:
        if self._dense is not None and axis in self._shared_axes:
            shared: MeshAxis = getattr(self._dense, axis)
            return shared
        rank = dist.get_rank()
        ranks = self.layout.axis_ranks(axis, rank)
        if group is not None and self._timeout is not None and not self._is_guest:
            _set_pg_timeout(self._timeout, group)  # new groups do not take it from the first one
        return MeshAxis(
            name,
            ranks=ranks,
            rank=ranks.index(rank),
            group=group,
            counter=self.counter,
            wire="local" if name == "ep" else self.layout.wire(axis, rank),
            timeline=self.timeline,
            queue=None if self._threads else CommQueue(),
            shares_queue=self._is_guest,
        )

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        """The mesh's group; cp, local and cross have their own, but in one domain, where local is shard."""
        if self.layout.axis_size(axis) == 1:
            return None
        of_mesh = axis if axis in MESH_AXES else "shard" if axis == "local" and self.layout.cross == 1 else None
        if of_mesh is None:  # the first group is the user's, who may communicate while hops are pending
            return self._make_group(axis, axis, own=self._is_guest)
        return self.mesh.get_group(self._mesh_axes.index(of_mesh))

    def _make_group(self, axis: str, name: str, *, own: bool = False, backend: str | None = None) -> dist.ProcessGroup:
        """Make the groups of `axis` and return this rank's; `own`: even where all ranks have one already."""
        if self._dense is not None and axis in self._shared_axes:
            shared: dist.ProcessGroup = getattr(self._dense, axis).group
            return shared
        options = axis_options(axis, self.layout, self._nccl) if backend is None else None
        if axis == "shard" and not own and self.layout.shard == self.layout.cluster.world_size:
            options = None  # all ranks have a communicator; of a priority, only a stream that no step uses has any
        if own and options is None:
            backend = backend or dist.get_backend()  # named, it is none of those that there are
        if not self._is_guest:
            return make_group(list(self.layout.axis_groups(axis)), name, options, backend=backend)
        name, ranks = f"megazpp {name}", self.layout.axis_ranks(axis, dist.get_rank())
        if options is not None and self._timeout is not None:
            options._timeout = self._timeout
        further: dict[str, Any] = {"backend": backend, "timeout": self._timeout}
        return find_group(ranks, name) or make_group(list(self.layout.axis_groups(axis)), name, options, **further)

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: [shard], or [replicate, shard] when there are copies; of this rank's island."""
        shard = self._name("shard")
        return self.mesh["replicate", shard] if self.layout.replicate > 1 else self.mesh[shard]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The mesh of tensor parallelism, or of expert parallelism in `experts`; None over one rank."""
        return self.mesh[self._name("tp")] if self.layout.tp > 1 else None

    @property
    def data_rank(self) -> int:
        """The index of the slice of the samples that this rank sees, 0 to data_size - 1."""
        return self.dropout_rank // self.cp.size

    @property
    def dropout_rank(self) -> int:
        """The index among ranks with other activations, of other samples or another part of them: data rank, cp."""
        return (self.island.rank * self.replicate.size + self.replicate.rank) * self.shard.size + self.shard.rank

    @property
    def data_size(self) -> int:
        return self.layout.data

    def sum_over_data_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` in place over all data ranks that take a step together: those of this rank's island.

        Ranks of a cp group have the same numbers, which count once.
        """
        if self.cp.rank > 0:
            x.zero_()
        return self.replicate.all_reduce_(self.shard.all_reduce_(x))

    def sum_over_islands_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` in place over all data ranks of all islands."""
        return self.island.all_reduce_(self.sum_over_data_(x))


def open_axis(dims: ParallelDims) -> MeshAxis:
    """All ranks, with a gloo group of their own: files are the CPU's, and a save may run beside the training."""
    world = dims.world
    group = make_group([world.ranks], "checkpoint", backend="gloo") if world.size > 1 else None
    return MeshAxis("checkpoint", ranks=world.ranks, rank=world.rank, group=group, wire="world")


def raise_on_all_ranks(axis: MeshAxis, work: Callable[[], T]) -> T:
    """Do `work` on every rank and return its result, so that no rank waits for one that has given up.

    Raises:
        ValueError: on every rank, if it raised an OSError or a ValueError on any; a DamagedError if all of them are.
    """
    result: T | None = None
    failure: tuple[type[ValueError], str] | None = None
    try:
        result = work()
    except ValueError as error:
        failure = DamagedError if isinstance(error, DamagedError) else ValueError, in_words(error)
    except OSError as error:
        failure = ValueError, f"rank {axis.rank}: {in_words(error)}"
    failures = [f for f in axis.share_object(axis.gather_objects(failure)) if f is not None]
    if failures:
        kinds = {kind for kind, _ in failures}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        raise kind("\n".join(dict.fromkeys(text for _, text in failures)))
    return result  # type: ignore[return-value]
