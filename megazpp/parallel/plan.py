"""`plan_dims`: check the flags of parallelism against a cluster, and return the layout of ranks that they request."""

from __future__ import annotations

import torch

from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import can_order_groups
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout


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
