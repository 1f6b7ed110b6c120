"""Gathered weights are compared across ranks: a broken bit names the unit and the ranks, a good run is left alone."""

from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import LLAMA_STYLE, Case, build_step

from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.verify import CorruptWeightsError, VerifyConfig, describe, verify_weights

ZEROPP = ZeroConfig(zeropp=True)


def steps(case: Case, verify: bool) -> list[float]:
    step, dims = build_step(case)
    losses = []
    for index in range(3):
        losses.append(step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.0).loss)
        if verify:
            verify_weights(step.sharding, dims)
    return losses


GOOD: dict[str, dict[str, Any]] = {
    "zeropp, tp, bf16": {"nodes": 2, "tp": 2, "zero": ZEROPP, "precision": PrecisionConfig(bf16=True)},
    "copies": {"nodes": 2, "replicas": 2},
    "stage 0, tp": {"stage": 0, "tp": 2, "model": LLAMA_STYLE},
}


@pytest.mark.parametrize("case", chosen(GOOD, "zeropp, tp, bf16"))
def test_a_good_run_passes_and_its_losses_do_not_change(case):
    assert ranks(4).run(steps, Case(**case), True) == ranks(4).run(steps, Case(**case), False)


def corrupt(case: Case, rank: int, slot: int) -> tuple[str, str]:
    """Flip one bit of the secondary partition that `rank` keeps of layers.0, in the part that came from node `slot`."""
    step, dims = build_step(case)
    step._forward_backward(case.batches(0, dims))
    if dims.world.rank == rank:
        step.sharding._gathers[1].secondary.messages[slot, 7] ^= 16
    broken = _error(step, dims)
    step.optimizer.step()  # after which all secondary partitions are new
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
        (4, 1, 3, "layers.0, shard of rank 1: other weights on rank 2, 3"),  # of node 1; local rank 1 keeps rank 1's
        slow(8, 2, 6, "layers.0, shard of rank 2: other weights on rank 4, 6"),  # only ranks of one index are compared
    ],
)
def test_a_flipped_bit_in_the_secondary_partition_of_one_rank_names_the_unit_and_the_ranks_that_got_it(
    world, tp, rank, said
):
    """The rank keeps what one of node 0 has sent, and hands it to its whole node; all ranks learn of it."""
    for broken, afterwards in ranks(world).run(corrupt, Case(nodes=2, tp=tp, zero=ZEROPP), rank, 0):
        assert broken.splitlines()[1:] == [said]
        assert afterwards == "no error"


def write_past_one_replica(case: Case) -> str:
    step, dims = build_step(case)
    if dims.world.rank == 2:
        with torch.no_grad():
            next(step.model.layers[0].parameters()).to_local().view(-1)[0] += 1e-6
    return _error(step, dims)


def test_copies_of_the_model_are_compared_too():
    """Rank 2 holds the same shard as rank 0, and gathers together with rank 3."""
    answers = ranks(4).run(write_past_one_replica, Case(nodes=2, replicas=2))
    assert answers[0].splitlines()[1].startswith("layers.0, shard of rank 0, 2: other weights on rank ")
    assert answers[0].splitlines()[1][-4:] in ("0, 1", "2, 3")


def test_most_ranks_are_right_and_the_owner_where_it_is_even():
    minority = [(0, rank, {("layers.3", 0): 5 + (rank == 2)}) for rank in range(4)]
    assert describe(minority).splitlines()[1] == "layers.3, shard of rank 0: other weights on rank 2"
    even = [(0, rank, {("layers.3", 2): 5 + (rank in (0, 1))}) for rank in range(4)]
    assert describe(even).splitlines()[1] == "layers.3, shard of rank 2: other weights on rank 0, 1"


def test_an_interval_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="--zero-verify-interval 0 is not positive"):
        VerifyConfig(zero_verify_interval=0)
