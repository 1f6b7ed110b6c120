"""The process groups of the mesh axes, and the options of NCCL's groups.

| group         | priority | channels  | reason                                                                       |
|---------------|----------|-----------|------------------------------------------------------------------------------|
| tp, cp        | high     | NCCL's    | the next matmul waits for it, several times per layer                        |
| local         | high     | NCCL's    | the next layer waits for it. The same holds for shard inside one node        |
| cross         | normal   | from flag | it has a whole step to finish, and should leave SMs to the matmuls meanwhile |
| replica_group | normal   | from flag | the same as cross, with several steps to finish                              |
| others        | normal   | NCCL's    | ZeRO's ring over all data ranks, all-reduces between copies                  |

"From flag" is --nccl-cross-max-ctas. Since torch 2.8 a blocking collective runs on the caller's stream. The caller of
a hop is its communication queue, whose stream has the same priority (comm_queue.py). The process group's internal
stream runs only asynchronous collectives, and a training step has none.
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
    """Return the timeout of the collectives of `world`, the default process group; None if its back end has none.

    torch does not pass this timeout on to new groups, so callers set it for each group that they create.
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

    The process group keeps and modifies the object, so each group needs a separate object.

    Args:
        axis: name of an axis of the layout, which decides about stream priority and number of channels.
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
