"""Make a `Layout` from a cluster and the parallel degrees, and check that the degrees fit the cluster."""

from __future__ import annotations

from megazpp.topology.cluster import Cluster, nested_sizes
from megazpp.topology.layout import Layout, local_domains


def plan_layout(
    cluster: Cluster,
    *,
    tp: int,
    replicas: int,
    num_replica_groups: int = 1,
    cp: int = 1,
    cp_across: bool = False,
    ep: int = 1,
) -> Layout:
    """Return the layout with the given parallel degrees on a cluster.

    A local domain is a node or a fast domain, whichever is larger.

    Args:
        cluster: nodes and placement of ranks.
        tp: tensor-parallel degree, a divisor or a multiple of the number of ranks in a local domain.
        replicas: number of copies of the sharded model in a replica group (HSDP). Without sharding (ZeRO stage 0) this
            is the number of data ranks.
        num_replica_groups: number of DiLoCo's replica groups, which must divide the number of local domains.
        cp: context-parallel degree, a divisor of the number of data ranks in a local domain.
        cp_across: True also allows multiples of the number of data ranks in a local domain as `cp`.
        ep: expert-parallel degree, a divisor of the number of ranks in a local domain that share a copy of the model.
    Raises:
        ValueError: a degree does not fit the cluster. The message names the flag and the values that would fit.
    """
    # Check that tensor parallelism uses equal parts of a local domain, or several whole local domains.
    domain, world = cluster.local_domain_size, cluster.world_size
    domains = cluster.num_local_domains
    assert domains % num_replica_groups == 0, f"{num_replica_groups} groups of {domains} local domains"
    group_size = world // num_replica_groups  # number of ranks in a replica group of DiLoCo
    if tp < 1 or (domain % tp and (tp % domain or group_size % tp)):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} must divide the {domain} ranks of a {local_domains(cluster)[:-1]} or "
            f"span several whole ones ({cluster.num_nodes} node(s) x {cluster.ranks_per_node} ranks"
            + (f", {num_replica_groups} replica groups" if num_replica_groups > 1 else "")
            + f"); {numbers(nested_sizes(domain, group_size))} would fit"
            + (f", or a multiple of {tp} ranks on each node (--nproc)" if tp > 1 else "")
        )

    # Check that context parallelism stays inside a local domain, or uses several whole ones if that is allowed.
    per_domain = max(domain // tp, 1)  # number of data ranks in a local domain
    data = group_size // tp
    inside, beyond = nested_sizes(per_domain, per_domain), nested_sizes(per_domain, data)
    if cp not in (beyond if cp_across else inside):
        more = [size for size in beyond if size not in inside]
        raise ValueError(
            f"--context-parallel-size {cp} does not divide the {per_domain} ranks of a {local_domains(cluster)[:-1]} "
            f"that --tensor-model-parallel-size {tp} leaves; {numbers(inside)} would fit"
            + (f", and {numbers(more)} with --allow-cp-across-nodes" if more and not cp_across else "")
        )

    # Check that each copy of the sharded model is an equal part of a local domain, or several whole local domains.
    fitting = [data // size for size in reversed(nested_sizes(per_domain, data))]
    if replicas not in fitting:
        raise ValueError(
            f"--num-distributed-optimizer-instances {replicas} does not divide the {data} data ranks into equal copies "
            f"of whole {local_domains(cluster)} or equal parts of one ({per_domain} data ranks each); "
            f"{numbers(fitting)} would fit"
        )

    # Each copy of the model is sharded over local x cross ranks. Expert parallelism stays inside a local domain.
    local = min(data // replicas, per_domain)
    cross = data // replicas // local
    if ep not in (fitting := nested_sizes(min(tp * local, domain), min(tp * local, domain))):
        raise ValueError(
            f"--expert-model-parallel-size {ep} does not divide the {min(tp * local, domain)} ranks of a "
            f"{local_domains(cluster)[:-1]} that share a copy of the model; {numbers(fitting)} would fit"
        )
    return Layout(
        cluster=cluster,
        replicate=replicas,
        cross=cross,
        local=local,
        tp=tp,
        replica_group=num_replica_groups,
        cp=cp,
        ep=ep,
    )


def numbers(values: list[int]) -> str:
    """Return the numbers as text, separated by commas, for error messages."""
    return ", ".join(map(str, values))
