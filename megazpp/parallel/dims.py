"""The layout of ranks, its device mesh, and this rank's mesh axes with their process groups.

`plan_dims` makes the layout from the flags of parallelism and the cluster. `ParallelDims` is the mesh of a layout.

This file decides which process groups exist. For models of programs that use `megazpp.zeropp`, drop_in/dims.py does.

| axis          | the ranks along the axis                      | data communicated                         |
|---------------|-----------------------------------------------|-------------------------------------------|
| tp            | split one layer's matrices                    | activations, several times per layer      |
| cp            | split one sample's tokens: a part of shard    | queries, keys, values, outputs, per layer |
| shard         | split one model copy's parameters and moments | weights and gradients, once per use       |
| local         | are the intra-node part of shard              | ZeRO++: the intra-node hop, once per use  |
| cross         | are the inter-node part of shard              | ZeRO++: the inter-node hop, once per step |
| replicate     | hold equal copies (HSDP, ZeRO-0)              | reduced gradients, once per step          |
| replica_group | hold equal shards in other replica groups     | outer gradients, once per synchronization |
| node          | are tp x local; created only for Muon         | rows of matrices, once per step           |
| ep            | hold different experts: a part of tp x local  | tokens, to their experts and back         |

Parameters of experts are sharded over the same ranks as all other parameters, but along other axes
(`ParallelDims.experts`): ep replaces tp, `expert shard` and `expert local` replace shard and local. Experts and all
other parameters use the same `MeshAxis` for each of the remaining axes.

A step is an optimizer step. A rank's index along shard is (cross index) x (local size) + (local index).

Each rank is in at most one process group per axis; an axis of one rank has no group. All ranks create each group once,
in the same order. If the shard axis spans all ranks, it uses the default process group. The groups of local, cross and
node are created on first use, because only two-hop communication needs local and cross, and only Muon needs node.

The groups of NCCL have these options:

| group         | priority | channels  | reason                                                                       |
|---------------|----------|-----------|------------------------------------------------------------------------------|
| tp, cp        | high     | NCCL's    | the next matmul waits for each collective, several times per layer           |
| local         | high     | NCCL's    | the next layer waits for the hop. The same holds for shard inside one node   |
| cross         | normal   | from flag | a hop has a whole step to finish, and should leave SMs to the matmuls        |
| replica_group | normal   | from flag | the same as cross, with several steps to finish                              |
| others        | normal   | NCCL's    | ZeRO's ring over all data ranks, all-reduces between copies                  |

"From flag" is --nccl-cross-max-ctas. Since torch 2.8 a blocking collective runs on the current stream. For a hop this
is the stream of its communication queue, which `MeshAxis.queue` creates with high priority inside a node and normal
priority across nodes. The process group's internal stream, which has the priority of the table, runs only asynchronous
collectives, and a training step has none.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.comm_queue import CommQueue
from megazpp.parallel.config import NcclConfig, ParallelConfig
from megazpp.parallel.environment import check_connections
from megazpp.parallel.timeline import Timeline
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import AXES, EXPERT_AXES, NODE, Layout
from megazpp.topology.plan import plan_layout

# Names of the axes that are dimensions of the device mesh, outermost first; names of the axes of ZeRO++'s two hops
MESH_AXES, HOPS = ("replica_group", "replicate", "shard", "tp"), ("local", "cross")
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"  # environment variable, see `order_launches`
# By name of an axis in the layout, the name under which the log shows this axis of experts' parameters
EXPERT_NAMES = dict(zip(("tp", "local", "shard"), EXPERT_AXES, strict=True))


class ParallelDims:
    """The device mesh of a job, and this rank's axis along each of its dimensions.

    Args:
        layout: sizes of the axes and placement of the ranks.
        device_type: "cuda" or "cpu".
        nccl: options of the NCCL process groups; None uses the defaults.
        threads: True runs the hops of CPU tensors in threads, where they overlap with compute. False runs each hop in
            the thread that submits it.
        mesh: existing mesh [shard] or [shard, tp] of a program that calls `megazpp.zeropp`, under any dimension names;
            None creates a mesh.
        dense: None for the axes of a whole model. For the axes of experts' parameters (`experts`), the axes of all
            other parameters: both use one counter and one timeline, and share all axes except tp, local and shard.
    Attributes:
        layout: sizes of the axes and placement of the ranks.
        mesh: DeviceMesh [replica_group, replicate, shard, tp] without the dimensions of size 1, except shard.
        tp, cp, shard, replicate, replica_group: this rank's axes.
        counter: counter of the bytes that this rank sends along all axes except `world`.
        timeline: timeline with the spans of the collectives of all axes.
        world: axis of all ranks, for logging and barriers, with a counter that the log does not show.
        data_size: number of equal parts into which the samples of each global batch are split, over all replica groups.
    """

    _axis_class = MeshAxis  # class of the axes; `GuestDims` (drop_in/dims.py) replaces it for `megazpp.zeropp`

    def __init__(
        self,
        layout: Layout,
        *,
        device_type: str,
        nccl: NcclConfig | None = None,
        threads: bool = True,
        mesh: DeviceMesh | None = None,
        dense: ParallelDims | None = None,
    ) -> None:
        if device_type == "cuda":
            order_launches(layout)
        self.layout, self._nccl, self._threads, self._dense = layout, nccl or NcclConfig(), threads, dense
        if dense is None:
            self.counter, self.timeline = TrafficCounter(), Timeline(device_type)
        else:
            self.counter, self.timeline = dense.counter, dense.timeline
        # FSDP2 needs a shard dimension, even if its size is 1. FSDP2 reads a rank's shard index from the process group,
        # so each group has its ranks in axis order.
        self._mesh_axes = names = tuple(axis for axis in MESH_AXES if axis == "shard" or layout.axis_size(axis) > 1)
        if mesh is None:
            sizes = [layout.axis_size(axis) for axis in names]
            ranks = torch.tensor(layout.mesh_ranks(), device="cpu").view(sizes)
            # Messages between DiLoCo's replica groups stay pending for many steps. Other collectives run on the default
            # process group meanwhile, so the axis `replica_group` needs process groups that only it uses.
            groups = [self._make_group(axis, axis, own=axis == "replica_group") for axis in names]
            mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(map(self._name, names)))
        self.mesh = mesh
        self.tp, self.cp, self.shard, self.replicate, self.replica_group = [
            self._axis(name, self._name(name), self._group(name)) for name in AXES if name not in HOPS
        ]
        self.data_size = layout.data
        world = tuple(range(layout.cluster.world_size))
        group = dist.group.WORLD if len(world) > 1 else None
        self.world = MeshAxis(
            "world", ranks=world, rank=dist.get_rank(), group=group, wire="world", timeline=self.timeline
        )

    @functools.cached_property
    def experts(self) -> ParallelDims:
        """The mesh and axes of experts' parameters, on the same ranks; `self` if all parameters use the same axes.

        Process groups are created on first use, so all ranks must make the first use together.
        """
        if not self.layout.has_expert_axes:
            return self
        settings: dict[str, Any] = {"nccl": self._nccl, "threads": self._threads, "dense": self}
        return ParallelDims(self.layout.for_experts(), device_type=self.timeline.device_type, **settings)

    def twin(self, axis: str, name: str) -> MeshAxis:
        """Return another `MeshAxis` over the ranks of `axis`, with a separate process group and queue.

        Collectives of the new axis may run while collectives of `axis` are pending. All ranks must call this.

        Args:
            axis: name of an existing axis, for instance "shard".
            name: name of the new axis in the timeline and the byte counts.
        """
        group = self._make_group(axis, name, own=True) if self.layout.axis_size(axis) > 1 else None
        return self._axis(axis, name, group)

    @functools.cached_property
    def local(self) -> MeshAxis:
        """The intra-node part of the shard axis.

        Its process group is created on first use, so all ranks must make the first use together.
        """
        return self._axis("local", self._name("local"), self._group("local"))

    @property
    def own_shard(self) -> MeshAxis:
        """The shard axis for collectives in one hop: the axis `shard` itself.

        For `megazpp.zeropp` on the CPU, `GuestDims` returns an axis over a separate process group, because the program
        may call collectives of its own group at the same time.
        """
        return self.shard

    @functools.cached_property
    def cross(self) -> MeshAxis:
        """The inter-node part of the shard axis.

        Its process group is created on first use, so all ranks must make the first use together.
        """
        return self._axis("cross", "cross", self._group("cross"))

    @functools.cached_property
    def node(self) -> MeshAxis:
        """The axis tp x local, for Muon: the ranks of this node that share a model copy.

        These ranks are ordered by the local index, and then by the tp index.

        Its process group is created on first use, so all ranks must make the first use together.
        """
        return self.twin(NODE, NODE)

    def _name(self, axis: str) -> str:
        """Return the name under which the log and the timeline show the layout's axis `axis`.

        The result is `axis` itself, except for the experts' mesh, whose axes tp, local and shard are shown as "ep",
        "expert local" and "expert shard".
        """
        return axis if self._dense is None else EXPERT_NAMES.get(axis, axis)

    def _is_shared(self, axis: str) -> bool:
        """Return True if the experts' parameters and all other parameters use the same `MeshAxis` for the axis `axis`.

        Return False for every axis if this object has the axes of a whole model.
        """
        return self._dense is not None and axis not in EXPERT_NAMES

    def _axis(self, axis: str, name: str, group: dist.ProcessGroup | None) -> MeshAxis:
        """Return this rank's `MeshAxis` for the layout's axis `axis`.

        Args:
            axis: name of the axis in the layout.
            name: name of the result in the log and the timeline.
            group: process group of the ranks along the axis; None for one rank.
        """
        if self._is_shared(axis):
            return getattr(self._dense, axis)
        rank = dist.get_rank()
        ranks = self.layout.axis_ranks(axis, rank)
        # In the layout of experts, the axis ep has the name tp (`Layout.for_experts`). So `Layout.wire` would count
        # ep's traffic as tensor-parallel; here it is counted as intra-node ("local").
        return self._axis_class(
            name,
            ranks=ranks,
            rank=ranks.index(rank),
            group=group,
            counter=self.counter,
            wire="local" if name == "ep" else self.layout.wire(axis, rank),
            wires=None if name == "ep" else self.layout.wires(axis, rank),
            timeline=self.timeline,
            queue=None if self._threads else CommQueue(),
        )

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        """Return this rank's process group along `axis`, None for an axis of one rank.

        Axes of the device mesh use the mesh's groups. The axis local uses shard's group if all shards of a model copy
        are in one node. Otherwise, and for all other axes, a new group is created.
        """
        if self.layout.axis_size(axis) == 1:
            return None
        of_mesh = axis if axis in MESH_AXES else "shard" if axis == "local" and self.layout.cross == 1 else None
        if of_mesh is None:
            return self._make_group(axis, axis)
        return self.mesh.get_group(self._mesh_axes.index(of_mesh))

    def _make_group(self, axis: str, name: str, *, own: bool = False) -> dist.ProcessGroup:
        """Create the process groups of `axis` on all ranks, and return the group that contains this rank.

        Args:
            axis: name of an axis of the layout.
            name: description of the groups, `group_desc` in torch.
            own: True always creates a new group. False may return the default process group if it has the same ranks.
        """
        if self._is_shared(axis):
            return getattr(self._dense, axis).group
        options = axis_options(axis, self.layout, self._nccl)
        if axis == "shard" and not own and self.layout.shard == self.layout.cluster.world_size:
            # Without NCCL options `make_group` returns the default process group, which saves an NCCL communicator. The
            # options would only raise the priority of the group's internal stream, which no training step uses.
            options = None
        # With an explicit back end, `make_group` creates a new group even if the default group has the same ranks.
        backend = dist.get_backend() if own and options is None else None
        return make_group(list(self.layout.axis_groups(axis)), name, options, backend=backend)

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`, within a replica group: [shard], or [replicate, shard] with several copies."""
        shard = self._name("shard")
        return self.mesh["replicate", shard] if self.layout.replicate > 1 else self.mesh[shard]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The mesh [tp], or [ep] in the experts' mesh, for DTensors of split parameters; None if it has one rank."""
        return self.mesh[self._name("tp")] if self.layout.tp > 1 else None

    @property
    def data_rank(self) -> int:
        """The index, 0 to data_size - 1, of the part of each global batch's samples that this rank computes.

        All ranks of a context-parallel group have the same index, because they split the tokens of the same samples.
        """
        return self.dropout_rank // self.cp.size

    @property
    def dropout_rank(self) -> int:
        """The index of this rank along replica_group x replicate x shard, from which the seed of dropout follows.

        Two ranks have different indices if they compute different samples, or different tokens of a sample (cp).
        Tensor-parallel ranks have equal indices.
        """
        return (self.replica_group.rank * self.replicate.size + self.replicate.rank) * self.shard.size + self.shard.rank

    def sum_over_data_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` in place over the data-parallel ranks of this rank's DiLoCo replica group, and return `x`.

        Without DiLoCo these are all data-parallel ranks. All ranks of a context-parallel group must hold the same `x`,
        which is added once.
        """
        if self.cp.rank > 0:
            x.zero_()
        return self.replicate.all_reduce_(self.shard.all_reduce_(x))

    def sum_over_replica_groups_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` in place over the data-parallel ranks of all DiLoCo replica groups, and return `x`.

        All ranks of a context-parallel group must hold the same `x`, which is added once.
        """
        return self.replica_group.all_reduce_(self.sum_over_data_(x))


def plan_dims(config: ParallelConfig, cluster: Cluster, *, zero_stage: int, num_replica_groups: int = 1) -> Layout:
    """Return the layout of ranks that the flags of parallelism request on `cluster`.

    Args:
        config: flags with the parallel degrees and the number of model copies.
        cluster: nodes and ranks of the job.
        zero_stage: ZeRO stage, 0 to 3. Stage 0 shards nothing, so every data rank is a replica.
        num_replica_groups: number of DiLoCo's replica groups, which each train a copy of the model.
    Raises:
        ValueError: flags do not fit the cluster or each other, or this torch cannot create process groups for the order
            of the ranks.
    """
    # Each replica group of DiLoCo has one sharded copy of the model, so flags for several copies conflict with DiLoCo.
    instances, tp = config.num_distributed_optimizer_instances, config.tensor_model_parallel_size
    copies = "--hsdp" if config.hsdp else f"--num-distributed-optimizer-instances {instances}"
    if num_replica_groups > 1 and (config.hsdp or instances > 1 or zero_stage == 0):
        asked = copies if config.hsdp or instances > 1 else "--zero-stage 0"
        raise ValueError(
            f"{asked} cannot be combined with --diloco-steps: a replica group has one copy of the model, sharded "
            "over its ranks; remove one of the flags"
        )

    # --hsdp means one model copy per node (per local domain), which must agree with the other flags.
    if config.hsdp and instances not in (1, cluster.num_local_domains):
        raise ValueError(
            f"--hsdp makes one copy per node ({cluster.num_local_domains} copies), but "
            f"--num-distributed-optimizer-instances asks for {instances}; give one of the two flags"
        )
    if config.hsdp and tp > cluster.local_domain_size:
        raise ValueError(
            f"--hsdp makes one copy per node of {cluster.local_domain_size} ranks, but --tensor-model-parallel-size "
            f"{tp} spreads a copy over several nodes; lower it, or remove --hsdp"
        )

    # Number of copies of the model: with HSDP one per local domain, with ZeRO stage 0 one per data-parallel rank.
    replicas = cluster.num_local_domains if config.hsdp else instances
    if zero_stage == 0:
        if replicas != 1:
            raise ValueError(
                f"{copies} needs --zero-stage 1 or higher, because stage 0 shards nothing and gives each data rank a "
                "copy anyway: raise --zero-stage, or remove the flag"
            )
        replicas = cluster.world_size // max(tp, 1)

    # Place the parallel degrees on the cluster, and check that this torch can create the layout's process groups.
    layout = plan_layout(
        cluster,
        tp=tp,
        replicas=max(replicas, 1),
        num_replica_groups=num_replica_groups,
        cp=config.context_parallel_size,
        cp_across=config.allow_cp_across_nodes,
        ep=config.expert_model_parallel_size,
    )
    if not can_order_groups() and not layout.groups_ascend:
        raise ValueError(
            f"torch {torch.__version__} cannot create process groups for this placement of ranks (its new_group has no "
            "sort_ranks); use torch 2.13 or newer, or let the launcher number the ranks node by node"
        )
    return layout


def order_launches(layout: Layout, env: MutableMapping[str, str] = os.environ) -> None:
    """Set NCCL_LAUNCH_ORDER_IMPLICIT=1 if several axes have more than one rank. Call before the first collective.

    NCCL then starts collectives of different groups in the host's launch order, so these collectives cannot deadlock.

    Args:
        layout: sizes of the axes.
        env: environment variables, changed in place. An existing NCCL_LAUNCH_ORDER_IMPLICIT is kept.
    Raises:
        ValueError: CUDA is already initialized with CUDA_DEVICE_MAX_CONNECTIONS=1.
    """
    check_connections(env)
    # Several replica groups need NCCL_LAUNCH_ORDER_IMPLICIT=1 even if no other axis has several ranks: DiLoCo's
    # messages between the groups run at the same time as collectives of the default process group.
    if layout.replica_group > 1 or sum(layout.axis_size(axis) > 1 for axis in AXES) > 1:
        env.setdefault(LAUNCH_ORDER, "1")


def make_group(
    partition: Sequence[tuple[int, ...]], name: str, options: Any = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Create one process group for each set of ranks in `partition`, and return the group that contains this rank.

    Collectives of the groups have the timeout of the default process group. Every rank calls this function with the
    same `partition`. If the ranks of a set do not ascend, torch's `new_group` needs the argument `sort_ranks` of torch
    2.13, see `can_order_groups`.

    Args:
        partition: disjoint sets of ranks that cover all ranks. Rank i of a group is the i-th rank of its set.
        name: description of the groups, `group_desc` in torch.
        options: the back end's options for this rank's group, for instance ProcessGroupNCCL.Options.
        backend: back end of the groups; None uses the default process group's.
    Returns:
        A new group, or the default group if this rank's set is all ranks in ascending order and neither `options` nor
        `backend` is given.
    """
    mine = next(ranks for ranks in partition if dist.get_rank() in ranks)
    ascending = all(list(ranks) == sorted(ranks) for ranks in partition)
    world, nccl = dist.group.WORLD, uses_nccl()
    assert world is not None
    if options is backend is None and mine == tuple(range(dist.get_world_size())):
        return world
    timeout = default_timeout(world)
    if options is not None and timeout is not None:
        options._timeout = timeout
    if len(mine) == 1:
        # A group of one rank sends nothing, so it needs no NCCL communicator, and only this rank creates the group.
        own = "gloo" if nccl else None
        return dist.new_group(list(mine), timeout=timeout, backend=own, group_desc=name, use_local_synchronization=True)
    if backend is None and ascending and nccl and world.bound_device_id is not None:
        # One call of `split_group` creates all groups. Each split is a collective over all ranks, so a thousand
        # separate splits would take about a minute.
        parts = [list(ranks) for ranks in partition]
        group = dist.split_group(split_ranks=parts, timeout=timeout, pg_options=options, group_desc=name)
        assert group is not None, "split_group returned no group, although this rank is in one of the given sets"
        return group
    settings: dict[str, Any] = {"backend": backend, "timeout": timeout, "pg_options": options, "group_desc": name}
    settings |= {} if ascending else {"sort_ranks": False}
    return [dist.new_group(list(ranks), **settings) for ranks in partition][partition.index(mine)]


def default_timeout(world: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of collectives of `world`, the default process group; None if no back end has a timeout.

    torch does not pass this timeout on to new groups, so `make_group` sets it for each group that it creates.
    """
    options = (getattr(world._get_backend(device), "options", None) for device in world._device_types)
    return next((each._timeout for each in options if each is not None), None)


def can_order_groups() -> bool:
    """Return True if this torch can create process groups whose ranks do not ascend (2.13 and newer).

    The `new_group` of older versions sorts the ranks of a group.
    """
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def axis_options(axis: str, layout: Layout, config: NcclConfig) -> Any:
    """Return NCCL's options (`pg_options`) for one process group of `axis`; None with gloo and for an axis of one rank.

    The process group keeps and modifies the options object, so each group needs a separate object.

    Args:
        axis: name of an axis of the layout, on which stream priority and number of channels depend.
        layout: sizes of the axes.
        config: the flags of NCCL.
    """
    if not uses_nccl() or layout.axis_size(axis) == 1:
        return None
    inside = axis in ("tp", "cp", "local") or (axis == "shard" and layout.cross == 1)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=inside and config.nccl_high_priority)
    if axis in ("cross", "replica_group") and config.nccl_cross_max_ctas is not None:
        options.config.max_ctas = config.nccl_cross_max_ctas
    return options


def uses_nccl() -> bool:
    """Return True if the default process group's back end is NCCL, so that its groups take ProcessGroupNCCL.Options.

    The back end's name is "nccl", or in torch 2.15 also "nccl2", "nccl-lazy" or "nccl-legacy".
    """
    return dist.get_backend().startswith("nccl")


def open_axis(dims: ParallelDims) -> MeshAxis:
    """Return an axis over all ranks with a separate process group of gloo, for reading and writing checkpoints.

    The back end is gloo because checkpoints are read and written on the CPU. The group is separate so that a save can
    communicate in the background while training uses the other groups.
    """
    world = dims.world
    group = make_group([world.ranks], "checkpoint", backend="gloo") if world.size > 1 else None
    return MeshAxis(
        "checkpoint", ranks=world.ranks, rank=world.rank, group=group, wire="world", timeline=world.timeline
    )
