"""The check for silent data corruption on the wire: it compares the gathered weights of all ranks.

All ranks that share a tensor-parallel index gather the same weights, bit for bit: what arrives is what the owner of a
shard has sent, quantized or not. So between a backward and its update each rank gathers once more what that backward
has used (with hpZ: out of the secondary partition) and adds up the bits of every shard of every unit. Sums that differ
say which unit, which shard, and on which ranks. Any single wrong word is found; several could cancel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from megazpp.base.flags import check_positive, flag
from megazpp.base.program import JobError
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import Sharding
from megazpp.zero.units import Unit

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
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


def verify_weights(sharding: Sharding, dims: ParallelDims) -> None:
    """Compare the gathered weights of all units; call on all ranks, while no forward or backward is running.

    Raises:
        CorruptWeightsError: the same on all ranks.
    """
    units = sharding.units
    with torch.no_grad(), dims.counter.paused():
        sums = torch.stack([_sums_of_shards(unit, dims.shard.size) for unit in units])  # [units, shards]
        largest = dims.replicate.max_(dims.shard.max_(sums.clone()))
        smallest = -dims.replicate.max_(dims.shard.max_(-sums))
        differs = largest != smallest
        if not int(dims.world.max_(differs.any().int())):
            return
    mine = {(units[u].name, shard): int(sums[u, shard]) for u, shard in differs.nonzero().tolist()}
    found = dims.world.gather_objects((dims.tp.rank, dims.shard.rank, mine))
    raise CorruptWeightsError(dims.world.share_object(describe(found) if found else None))


def describe(found: Sequence[tuple[int, int, Mapping[tuple[str, int], int]]]) -> str:
    """The message that names the ranks whose weights differ from most ranks', in a tie from the shard owner's.

    Args:
        found: of each rank its tensor-parallel and its shard rank, and by unit and owner's shard rank the sums of the
            bits of the shards on which ranks differ.
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
    head = "gathered weights differ between ranks (faulty memory or link); the job stops before the update"
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
    rows = _sums_of_bits(local.view(local.shape[0], -1))
    per_shard = -(-len(rows) // num_shards)
    return F.pad(rows, (0, num_shards * per_shard - len(rows))).view(num_shards, per_shard).sum(1)


def _sums_of_bits(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [...] int64"""
    return x.view(WORDS[x.element_size()]).sum(-1, dtype=torch.int64)
