"""The check for silent data corruption of --zero-verify-interval: it compares the gathered weights of all ranks.

All ranks with the same tensor-parallel index gather the same weights, bit for bit. With quantization the weights are
equal too, because these ranks unpack the same messages. The check runs between a backward and the optimizer's update.
Each rank gathers the weights of that backward once more. With hpZ this gather reads the secondary partition, as the
backward did, so the check also finds errors in the partition. Then each rank reads the bits of every gathered shard of
every unit as integers, and adds up the integers of each shard. If ranks have unequal sums of a shard, the check reports
the unit, the shard and the ranks. It detects any single wrong integer; several errors in a shard could cancel each
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from megazpp.base.program import JobError
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by bytes per weight
SHOWN = 8  # largest number of corrupt shards that the error message lists


class CorruptWeightsError(JobError):
    """The error that ends a job because ranks have gathered different weights."""


def verify_weights(sharding: Sharding, dims: ParallelDims) -> None:
    """Gather the weights of all units, and raise an error on all ranks if two ranks have gathered different weights.

    Call this function on all ranks, while no forward or backward is running.

    Args:
        sharding: handle to the sharded model.
        dims: mesh axes over which the model is sharded and replicated.
    Raises:
        CorruptWeightsError: gathered weights differ between ranks.
    """
    units = sharding.units
    with torch.no_grad(), dims.counter.paused():
        # [number of units, number of shards] checksums of each rank's shard of each unit
        sums = torch.stack([_sums_of_shards(unit, dims.shard.size) for unit in units])
        largest = dims.replicate.max_(dims.shard.max_(sums.clone()))
        smallest = -dims.replicate.max_(dims.shard.max_(-sums))
        differs = largest != smallest
        if not int(dims.world.max_(differs.any().int())):
            return
    mine = {(units[u].name, shard): int(sums[u, shard]) for u, shard in differs.nonzero().tolist()}
    found = dims.world.gather_objects((dims.tp.rank, dims.shard.rank, mine))
    raise CorruptWeightsError(dims.world.share_object(describe(found) if found else None))


def describe(found: Sequence[tuple[int, int, Mapping[tuple[str, int], int]]]) -> str:
    """Return the message of a `CorruptWeightsError`, which names the ranks with other weights than most ranks.

    In a tie, the weights of the shard's owner count as correct. The owner is the rank whose optimizer updates the
    shard. With HSDP each replica has one owner.

    Args:
        found: for each rank, its tensor-parallel rank, its rank on the shard axis, and the checksums that differ
            between ranks. The keys of the checksums are the unit's name and the shard rank of the shard's owner.
    """
    lines = []
    for tp_rank, key in dict.fromkeys((tp_rank, key) for tp_rank, _, sums in found for key in sums):
        unit, shard = key
        values = {rank: sums[key] for rank, (own_tp, _, sums) in enumerate(found) if own_tp == tp_rank}
        owners = [rank for rank in values if found[rank][1] == shard]
        counts, owned = Counter(values.values()), {values[rank] for rank in owners}
        right = max(counts, key=lambda value: (counts[value], value in owned))
        wrong = ", ".join(str(rank) for rank, value in values.items() if value != right)
        lines.append(f"{unit}, shard of rank {', '.join(map(str, owners))}: other weights on rank {wrong}")
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    head = (
        "gathered weights differ between ranks (faulty memory or link); the job stops before the update; resume from "
        "the last checkpoint without the machines of the ranks with other weights:"
    )
    return "\n".join([head, *lines[:SHOWN], *more])


def _sums_of_shards(unit: Unit, num_shards: int) -> torch.Tensor:
    """Gather a sharding unit, and return the checksum of each rank's shard of its weights, [num_shards] int64.

    A checksum is the sum of the shard's bits, read as integers. FSDP2 gives each rank ceil(rows / num_shards) rows of a
    parameter, and the last ranks fewer rows or none.
    """
    sums = []
    with unit.unsharded() as parameters:
        for parameter in parameters:
            local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().contiguous()
            words = local.view(local.shape[0], -1).view(WORDS[local.element_size()])  # the weights' bits as integers
            rows = words.sum(-1, dtype=torch.int64)
            per_shard = -(-len(rows) // num_shards)
            sums.append(F.pad(rows, (0, num_shards * per_shard - len(rows))).view(num_shards, per_shard).sum(1))
    return torch.stack(sums).sum(0)
