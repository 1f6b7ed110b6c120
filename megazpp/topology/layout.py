"""Who gets which rank: pure integers, from a cluster and the parallel degrees to mesh coordinates.

Ranks are numbered node by node, so consecutive ranks share the fast wire. The layout gives the innermost ranks to
tensor parallelism, the rest of a node to the local axis, nodes to the cross axis, and groups of nodes to replicas:

    rank = ((replica * cross + node in replica) * local + local index) * tp + tp index

    2 nodes x 4 ranks, tp 2:   node 0: [0 1] [2 3]    node 1: [4 5] [6 7]
        tp groups     {0 1} {2 3} {4 5} {6 7}
        shard groups  {0 2 4 6} {1 3 5 7}        (shard = cross x local)
"""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.topology.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Mesh sizes, outermost first; a rank's coordinates follow from its number."""

    cluster: Cluster
    replicate: int
    cross: int
    local: int
    tp: int

    @property
    def shard(self) -> int:
        """Ranks that the parameters, gradients and moments of one model copy are spread over."""
        return self.cross * self.local

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    def axis_ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """The global ranks of the group of `axis` that `rank` belongs to, in axis order.

        Args:
            axis: "tp", "local", "cross", "shard" (cross x local) or "replicate".
        """
        stride, size = {
            "tp": (1, self.tp),
            "local": (self.tp, self.local),
            "cross": (self.tp * self.local, self.cross),
            "shard": (self.tp, self.shard),
            "replicate": (self.tp * self.shard, self.replicate),
        }[axis]
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def wire(self, axis: str, rank: int) -> str:
        """The wire between `rank` and its successor in the ring of `axis`: "tp", "local" or "cross"."""
        ranks = self.axis_ranks(axis, rank)
        successor = ranks[(ranks.index(rank) + 1) % len(ranks)]
        if self.cluster.node_of(rank) != self.cluster.node_of(successor):
            return "cross"
        return "tp" if axis == "tp" else "local"

    def describe(self) -> str:
        """One line for the log."""
        c = self.cluster
        return (
            f"{c.num_nodes} node(s) x {c.ranks_per_node} rank(s): tensor parallel {self.tp}, "
            f"shards {self.shard} ({self.cross} across nodes x {self.local} inside), replicas {self.replicate}"
        )


def plan_layout(cluster: Cluster, *, tp: int, replicas: int) -> Layout:
    """Fit the degrees onto the cluster.

    Args:
        cluster: nodes of equal size.
        tp: tensor-parallel degree; has to fit inside a node.
        replicas: copies of the sharded model (HSDP); the world's data ranks for unsharded data parallelism.
    Raises:
        ValueError: a degree does not divide what it splits; the message names the flag.
    """
    if tp < 1 or cluster.ranks_per_node % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the {cluster.ranks_per_node} ranks of a node "
            f"({cluster.num_nodes} node(s), {cluster.world_size} ranks)"
        )
    per_node = cluster.ranks_per_node // tp
    data = cluster.num_nodes * per_node
    if replicas < 1 or data % replicas:
        raise ValueError(f"--num-distributed-optimizer-instances {replicas} does not divide the {data} data ranks")
    shard = data // replicas
    local = min(shard, per_node)
    if shard % local or per_node % local:
        raise ValueError(
            f"--num-distributed-optimizer-instances {replicas} gives shards over {shard} data ranks, which are "
            f"neither whole nodes nor an even part of a node ({per_node} data ranks each)"
        )
    return Layout(cluster=cluster, replicate=replicas, cross=shard // local, local=local, tp=tp)
