"""The check for silent data corruption on the wire: it compares the gathered weights of all ranks.

All ranks that share a tensor-parallel index gather the same weights, bit for bit: what arrives is what the owner of a
shard has sent, quantized or not. So between a backward and its update each rank gathers once more what that backward
has used (with hpZ: out of the secondary partition) and adds up the bits of every shard of every unit. Sums that differ
say which unit, which shard, and on which ranks. Any single wrong word is found; several could cancel. Resident weights
of which a node sends a quantized form (--zero-weight-bits 8 4) join the sums as they are: the next difference is added
to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megazpp.base.flags import check_positive, flag
from megazpp.base.program import JobError
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.secondary import WORDS
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit

SHOWN = 8  # differences that the message names


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Silent data corruption."""

    zero_verify_interval: int | None = flag(
        None,
        "every this many steps, before the update, compare checksums of the gathered weights across ranks; if they "
        "differ the job ends and names unit and ranks (costs one more gather of all weights)",
    )

    def __post_init__(self) -> None:
        check_positive(self, "zero_verify_interval")


class CorruptWeightsError(JobError):
    """Ranks have gathered different weights."""


class Sums(NamedTuple):
    """One rank's sums of bits of the shards on which ranks differ, by unit and the owner's index along shard."""

    tp_rank: int
    shard_rank: int
    sums: dict[tuple[str, int], int]


def verify_weights(sharding: Sharding, dims: ParallelDims) -> None:
    """Compare the gathered weights of all units; call on all ranks, while no forward or backward is running.

    Raises:
        CorruptWeightsError: the same on all ranks.
    """
    units = sharding.units
    with torch.no_grad(), dims.counter.paused():
        residents = sharding.sums_of_residents()
        sums = torch.stack([_sums_of_shards(unit, dims.shard.size) for unit in units])  # [units, shards]
        for index, unit in enumerate(units):
            if unit.key in residents:  # [N] of what this rank keeps -> [N, L] of what all ranks of the node keep
                of_node = sums.new_zeros(dims.cross.size, dims.local.size)
                of_node[:, dims.local.rank] = residents[unit.key]
                sums[index] += dims.local.all_reduce_(of_node).view(-1)
        largest, smallest = (dims.replicate.max_(dims.shard.max_(s * sums)) for s in (1, -1))
        differs = largest != -smallest
        if not int(dims.world.max_(differs.any().int())):
            return
    mine = {(units[u].name, shard): int(sums[u, shard]) for u, shard in differs.nonzero().tolist()}
    found = dims.world.gather_objects(Sums(dims.tp.rank, dims.shard.rank, mine))
    raise CorruptWeightsError(dims.world.share_object(describe(found) if found else None))


def describe(found: Sequence[Sums]) -> str:
    """The message that names the ranks whose weights differ from most ranks', in a tie from the shard owner's.

    Args:
        found: the sums of each rank, by rank.
    """
    lines = []
    for tp_rank, key in dict.fromkeys((each.tp_rank, key) for each in found for key in each.sums):
        unit, shard = key
        values = {rank: each.sums[key] for rank, each in enumerate(found) if each.tp_rank == tp_rank}
        owners = [rank for rank in values if found[rank].shard_rank == shard]
        counts, owned = Counter(values.values()), {values[rank] for rank in owners}
        right = max(counts, key=lambda value: (counts[value], value in owned))
        wrong = ", ".join(str(rank) for rank, value in values.items() if value != right)
        lines.append(f"{unit}, shard of rank {', '.join(map(str, owners))}: other weights on rank {wrong}")
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    head = "gathered weights differ between ranks: a wire or a memory is broken; the job ends before the update"
    return "\n".join([head, *lines[:SHOWN], *more])


def _sums_of_shards(unit: Unit, num_shards: int) -> torch.Tensor:
    """[num_shards] int64: the sum over the bits of each rank's part of the unit's gathered parameters."""
    for module in unit.modules:
        module.unshard()
    parts = [_sums_of_rows(getattr(p.module, p.attribute), num_shards) for p in unit.parameters]
    for module in unit.modules:
        module.reshard()
    return torch.stack(parts).sum(0)


def _sums_of_rows(parameter: Any, num_shards: int) -> torch.Tensor:
    """[rows, ...] -> [num_shards]; FSDP2 gives each rank ceil(rows / num_shards) rows, the last ones fewer or none."""
    local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().contiguous()
    words = local.view(WORDS[local.element_size()]).view(local.shape[0], -1)
    rows = words.sum(1, dtype=torch.int64)
    per_shard = -(-len(rows) // num_shards)
    padded = rows.new_zeros(num_shards * per_shard)
    padded[: len(rows)] = rows
    return padded.view(num_shards, per_shard).sum(1)
