"""ZeRO++ against plain FSDP2: what is exact is equal, what is kept is never stale, what is counted is what is sent."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.ranks import ranks
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_on_ranks

from megazpp.zero.config import ZeroConfig

EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))


def run(world: int, **case: Any) -> dict[str, Any]:
    return ranks(world).run(train_on_ranks, Case(**case))[0]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("world", "nodes", "tp"), [(4, 2, 1), (4, 2, 2), (8, 2, 2), (8, 4, 1), (6, 3, 1), (2, 2, 1)])
@pytest.mark.parametrize("model", [GPT2_STYLE, LLAMA_STYLE])
def test_without_quantization_two_hops_equal_plain_fsdp2(model, world: int, nodes: int, tp: int, micro_batches: int):
    case = {"model": model, "nodes": nodes, "tp": tp, "micro_batches": micro_batches, "global_batch": 24}
    plain = run(world, **case)
    two_hops = run(world, zero=EXACT, **case)
    assert two_hops["loss"] == pytest.approx(plain["loss"], rel=1e-5)  # sums in another order
    assert two_hops["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
