"""A run on a cluster that its flags do not divide: the nearest tensor parallelism and batch for which there is room.

Only plans do this. A run is refused instead, for its batch is part of what it computes.
"""

from __future__ import annotations

import dataclasses
import math

from megazpp.arguments import RunConfig
from megazpp.checks import check_run_config
from megazpp.topology.cluster import Cluster, nested_sizes


def nearest_run(config: RunConfig, cluster: Cluster, *, device_type: str) -> tuple[RunConfig, tuple[str, ...]]:
    """The run itself, or the nearest one that `cluster` can do, and a line for each flag that is another.

    Raises:
        ValueError: what is wrong with the run as it is, where no other size would help.
    """
    try:
        check_run_config(config, cluster, device_type=device_type)
    except ValueError as error:
        problem = error
    else:
        return config, ()
    asked = config.parallel.tensor_model_parallel_size
    sizes = {asked, *nested_sizes(cluster.island_size, cluster.world_size)} if asked > 0 else set()
    for tp in sorted(sizes, key=lambda size: (abs(math.log(size / asked)), size)):
        candidate = with_batch(config if tp == asked else with_tp(config, tp), cluster)
        try:
            check_run_config(candidate, cluster, device_type=device_type)
        except ValueError:
            continue
        return candidate, _changes(config, candidate)
    raise problem


def with_tp(config: RunConfig, tp: int) -> RunConfig:
    """The same run with another tensor parallelism, and sequence parallelism where there is any."""
    parallel = dataclasses.replace(config.parallel, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    return dataclasses.replace(config, parallel=parallel)


def with_batch(config: RunConfig, cluster: Cluster) -> RunConfig:
    """The same run with the nearest batch of whole micro-batches on every rank, smaller ones where it has too few."""
    batches, data = config.batches, cluster.world_size // config.parallel.tensor_model_parallel_size
    size, total = batches.micro_batch_size, batches.global_batch_size
    if size is None or total is None or data < 1 or size < 1 or total < 1:
        return config
    size = min(size, max(total // data, 1))
    nearest = max(round(total / (size * data)), 1) * size * data
    ramp = batches.rampup_batch_size
    if ramp is not None and (nearest != total or any(part % (size * data) for part in ramp[:2])):
        ramp = None
    changed = dataclasses.replace(batches, micro_batch_size=size, global_batch_size=nearest, rampup_batch_size=ramp)
    return dataclasses.replace(config, batches=changed)


def _changes(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    flags = {
        "--tensor-model-parallel-size": lambda run: run.parallel.tensor_model_parallel_size,
        "--micro-batch-size": lambda run: run.batches.micro_batch_size,
        "--global-batch-size": lambda run: run.batches.global_batch_size,
        "--rampup-batch-size": lambda run: run.batches.rampup_batch_size,
    }
    return tuple(
        f"{flag} {value(before)} does not fit this cluster: planned with {value(after)}"
        for flag, value in flags.items()
        if value(before) != value(after)
    )
