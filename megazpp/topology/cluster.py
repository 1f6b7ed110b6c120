"""What the machine is: how many nodes there are and how many ranks each holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megazpp.flags import flag


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How the cluster is described when it is not simply what the launcher says."""

    emulate_nodes: int | Literal["auto"] | None = flag(
        None,
        "treat the ranks of one machine as this many nodes of equal size; traffic is then counted as if; auto: 2 where "
        "the ranks of one machine divide into two nodes of whole tensor-parallel groups",
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `ranks_per_node` ranks; ranks are numbered node by node. `notices` are lines to show."""

    num_nodes: int
    ranks_per_node: int
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node


def detect_cluster(
    world_size: int, config: ClusterConfig, env: Mapping[str, str] = os.environ, *, tp: int = 1
) -> Cluster:
    """The cluster that a launcher's environment describes, or the emulated one.

    Args:
        world_size: ranks of the job.
        config: `emulate_nodes` splits one machine into several.
        env: LOCAL_WORLD_SIZE (torchrun, our launcher) or SLURM_NTASKS_PER_NODE give the ranks per node; without
            them the job is one node.
        tp: the tensor-parallel degree, whose groups `emulate_nodes` "auto" keeps whole.
    Raises:
        ValueError: the ranks do not divide into equal nodes.
    """
    if isinstance(config.emulate_nodes, int):
        if config.emulate_nodes < 1 or world_size % config.emulate_nodes:
            raise ValueError(
                f"--emulate-nodes {config.emulate_nodes} does not divide the {world_size} ranks of this job"
            )
        return Cluster(num_nodes=config.emulate_nodes, ranks_per_node=world_size // config.emulate_nodes)
    local = int(env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE") or world_size)
    if world_size % local:
        raise ValueError(f"{world_size} ranks do not divide into nodes of {local} (LOCAL_WORLD_SIZE)")
    if config.emulate_nodes == "auto" and world_size == local:
        return _two_nodes_if_they_fit(world_size, tp)
    return Cluster(num_nodes=world_size // local, ranks_per_node=local)


def _two_nodes_if_they_fit(world_size: int, tp: int) -> Cluster:
    """One machine as two nodes, or as it is where a node would not hold whole tensor-parallel groups."""
    if tp < 1 or world_size % (2 * tp):
        notice = f"--emulate-nodes auto: {world_size} rank(s) on one machine stay one node (not 2 x tp {tp})"
        return Cluster(num_nodes=1, ranks_per_node=world_size, notices=(notice,))
    notice = f"--emulate-nodes auto: {world_size} ranks on one machine are treated as 2 nodes"
    return Cluster(num_nodes=2, ranks_per_node=world_size // 2, notices=(notice,))
