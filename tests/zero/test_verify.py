"""Test the verification of gathered weights.

A wrong bit is reported with its unit and its ranks. In a run without errors, the verification changes no loss.
"""

from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import LLAMA_STYLE, Case, build_step

from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.verify import CorruptWeightsError, describe, verify_weights

ZEROPP = ZeroConfig(zeropp=True)


def steps(case: Case, verify: bool) -> list[float]:
    step, dims = build_step(case)
    losses = []
    for index in range(2):
        losses.append(step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.0).loss)
        if verify:
            verify_weights(step.sharding, dims)
    return losses


GOOD: dict[str, dict[str, Any]] = {
    "zeropp, tp, bf16": {"nodes": 2, "tp": 2, "zero": ZEROPP, "precision": PrecisionConfig(bf16=True)},
    "copies": {"nodes": 2, "replicas": 2},
    "stage 0, tp": {"stage": 0, "tp": 2, "model": LLAMA_STYLE},
}


@pytest.mark.parametrize("case", chosen(GOOD))
def test_verification_passes_and_changes_no_loss(case):
    assert ranks(4).run(steps, Case(**case), True) == ranks(4).run(steps, Case(**case), False)


def corrupt(case: Case, rank: int, slot: int) -> tuple[str, str]:
    """Flip a bit in one rank's secondary partition after a backward, and verify the weights twice.

    The first verification is before the optimizer step, the second after it. The step replaces the partitions.

    Args:
        case: training run.
        rank: global rank whose secondary partition is corrupted.
        slot: index of the node that has sent the corrupted message, which belongs to the unit layers.0.

    Returns:
        (error message before the step, error message after it); "no error" if the verification passes.
    """
    step, dims = build_step(case)
    step._forward_backward(case.batches(0, dims))
    if dims.world.rank == rank:
        step.sharding._gathers[1].secondary.messages[slot, 7] ^= 16
    broken = _error(step, dims)
    with step.sharding.weight_update():  # after an update, new messages replace all secondary partitions
        step.optimizer.step()
    return broken, _error(step, dims)


def _error(step: Any, dims: Any) -> str:
    try:
        verify_weights(step.sharding, dims)
    except CorruptWeightsError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("world", "tp", "rank", "said"),
    [
        # rank 3 on node 1 has local index 1, so the corrupted message is the shard of rank 1
        (4, 1, 3, "layers.0, shard of rank 1: other weights on rank 2, 3"),
        # the verification compares only ranks with the same tp index
        slow(4, 2, 2, "layers.0, shard of rank 0: other weights on rank 2"),
    ],
)
def test_flipped_bit_in_secondary_partition_is_reported_by_unit_and_ranks(world, tp, rank, said):
    """Flip a bit in one rank's copy, and check the error on all ranks of the job.

    The error names all ranks of this rank's node, because they all gather the corrupted copy.
    """
    for broken, afterwards in ranks(world).run(corrupt, Case(nodes=2, tp=tp, zero=ZEROPP), rank, 0):
        assert broken.splitlines()[1:] == [said]
        assert afterwards == "no error"


def write_past_one_replica(case: Case) -> str:
    step, dims = build_step(case)
    if dims.world.rank == 2:
        with torch.no_grad():
            next(step.model.layers[0].parameters()).to_local().view(-1)[0] += 1e-6
    return _error(step, dims)


def test_replicas_are_compared_by_verification():
    """Rank 2 changes a weight of its shard. Ranks 2 and 3 are one replica, which must equal the one of ranks 0 and 1.

    Two replicas have no majority, so the error may name the ranks of either one.
    """
    answers = ranks(4).run(write_past_one_replica, Case(nodes=2, replicas=2))
    assert answers[0].splitlines()[1].startswith("layers.0, shard of rank 0, 2: other weights on rank ")
    assert answers[0].splitlines()[1][-4:] in ("0, 1", "2, 3")


def test_minority_is_blamed_or_non_owners_if_ranks_split_evenly():
    """Check which ranks the error names: the ranks with the rarer checksum of a shard.

    If both checksums are equally frequent, the error names the ranks that differ from the shard's owner.
    """
    minority = [(0, rank, {("layers.3", 0): 5 + (rank == 2)}) for rank in range(4)]
    assert describe(minority).splitlines()[1] == "layers.3, shard of rank 0: other weights on rank 2"
    even = [(0, rank, {("layers.3", 2): 5 + (rank in (0, 1))}) for rank in range(4)]
    assert describe(even).splitlines()[1] == "layers.3, shard of rank 2: other weights on rank 0, 1"


def test_non_positive_verify_interval_is_rejected():
    with pytest.raises(ValueError, match="--zero-verify-interval 0 is not positive"):
        ZeroConfig(zero_verify_interval=0)
