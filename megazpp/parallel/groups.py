"""The process groups of the mesh axes, and the options of NCCL's groups.

| group         | priority | channels  | reason                                                                       |
|---------------|----------|-----------|------------------------------------------------------------------------------|
| tp, cp        | high     | NCCL's    | the next matmul waits for it, several times per layer                        |
| local         | high     | NCCL's    | the next layer waits for it. The same holds for shard inside one node        |
| cross         | normal   | from flag | it has a whole step to finish, and should leave SMs to the matmuls meanwhile |
| replica_group | normal   | from flag | the same as cross, with several steps to finish                              |
| others        | normal   | NCCL's    | ZeRO's ring over all data ranks, all-reduces between copies                  |

"From flag" is --nccl-cross-max-ctas. Since torch 2.8 a blocking collective runs on the caller's stream. A hop's caller
is its communication queue, whose stream has the same priority (comm_queue.py). The process group's own stream runs only
asynchronous collectives, and a training step has none.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megazpp.parallel.config import NcclConfig
from megazpp.parallel.environment import check_connections
from megazpp.topology.layout import AXES, Layout

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def order_launches(layout: Layout, env: MutableMapping[str, str] = os.environ) -> None:
    """Set NCCL_LAUNCH_ORDER_IMPLICIT=1 if several axes have more than one rank. Call before the first collective.

    NCCL then starts collectives of different groups in the host's launch order, so they cannot deadlock.

    Args:
        layout: sizes of the axes.
        env: environment to change. An existing value is kept.
    Raises:
        ValueError: CUDA is already initialized with CUDA_DEVICE_MAX_CONNECTIONS=1.
    """
    check_connections(env)
    # The axis over replica groups counts as well: its messages run at the same time as collectives of all ranks.
    if layout.replica_group > 1 or sum(layout.axis_size(axis) > 1 for axis in AXES) > 1:
        env.setdefault(LAUNCH_ORDER, "1")


def make_group(
    partition: Sequence[tuple[int, ...]], name: str, options: Any = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group for each part of a partition of all ranks, and return the group of this rank's part.

    Collectives of the groups have the timeout of the default process group. Every rank calls this function with the
    same parts in the same order. Parts whose ranks do not ascend need a torch whose `new_group` has the argument
    `sort_ranks` (2.13), see `can_order_groups`.

    Args:
        partition: disjoint parts that cover all ranks. Rank i of a group is the i-th rank of its part.
        name: description of the groups, `group_desc` in torch.
        options: the back end's options for this rank's group, for instance ProcessGroupNCCL.Options.
        backend: back end of the groups; None uses the default process group's.
    Returns:
        A new group, or the default group if this rank's part is all ranks in ascending order and neither `options` nor
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
        # A group of one rank sends nothing, so it needs no NCCL communicator. The other ranks need not take part.
        own = "gloo" if nccl else None
        return dist.new_group(list(mine), timeout=timeout, backend=own, group_desc=name, use_local_synchronization=True)
    if backend is None and ascending and nccl and world.bound_device_id is not None:
        # Split into all parts in one call. Each split is a collective over all ranks, so a thousand separate ones would
        # take about a minute.
        parts = [list(ranks) for ranks in partition]
        group = dist.split_group(split_ranks=parts, timeout=timeout, pg_options=options, group_desc=name)
        assert group is not None, "split_group returned no group, although this rank is in one of the parts"
        return group
    settings: dict[str, Any] = {"backend": backend, "timeout": timeout, "pg_options": options, "group_desc": name}
    settings |= {} if ascending else {"sort_ranks": False}
    return [dist.new_group(list(ranks), **settings) for ranks in partition][partition.index(mine)]


def default_timeout(world: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of the default process group's collectives, which no new group inherits; None if unknown."""
    options = (getattr(world._get_backend(device), "options", None) for device in world._device_types)
    return next((each._timeout for each in options if each is not None), None)


def can_order_groups() -> bool:
    """Return True if torch can create groups whose ranks are in any order. Versions before 2.13 sort the ranks."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def axis_options(axis: str, layout: Layout, config: NcclConfig) -> Any:
    """Return new `pg_options` for one group of `axis`, None with gloo and for an axis of one rank.

    The group keeps and modifies the object, so each group needs a separate one.
    """
    if not uses_nccl() or layout.axis_size(axis) == 1:
        return None
    inside = axis in ("tp", "cp", "local") or (axis == "shard" and layout.cross == 1)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=inside and config.nccl_high_priority)
    if axis in ("cross", "replica_group") and config.nccl_cross_max_ctas is not None:
        options.config.max_ctas = config.nccl_cross_max_ctas
    return options


def uses_nccl() -> bool:
    """Return True if the default process group uses NCCL: "nccl", or torch 2.15's "nccl2", "nccl-lazy", "nccl-legacy".

    All of them take ProcessGroupNCCL.Options.
    """
    return dist.get_backend().startswith("nccl")
