"""Planned memory against the bytes of the tensors that live in real steps, and the pure integers behind it."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
from helpers.live import CountLive
from helpers.ranks import ranks
from helpers.training import LLAMA_STYLE, Case, build_step
from planner.test_step import plan

from megazpp.model.config import GPTConfig
from megazpp.planner.memory import Ledger, own_elements
from megazpp.zero.config import ZeroConfig
from megazpp.zero.precision import PrecisionConfig

# CountLive does not see what lanes allocate in their threads, so nothing overlaps here
ALL = ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False)
GPT = GPTConfig(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=64,
)
FULL = dataclasses.replace(GPT, recompute_granularity="full")
LLAMA = dataclasses.replace(
    LLAMA_STYLE,
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=128,
    max_position_embeddings=64,
)
SHAPE: dict[str, Any] = {"nodes": 2, "vocab_size": 512, "seq_length": 64, "global_batch": 8}
BF16: dict[str, Any] = {"precision": PrecisionConfig(bf16=True), **SHAPE}
CASES = {
    "ZeRO-3": Case(model=GPT, **BF16),
    "ZeRO-3, fp32": Case(model=GPT, **SHAPE),
    "ZeRO-3, recompute, k = 2": Case(model=FULL, micro_batches=2, **BF16),
    "zeropp": Case(model=GPT, zero=ALL, **BF16),
    "zeropp, k = 2": Case(model=GPT, zero=ALL, micro_batches=2, **BF16),
    "zeropp, llama": Case(model=LLAMA, zero=ALL, **BF16),
    "tp": Case(model=GPT, tp=2, **BF16),
    "HSDP": Case(model=GPT, replicas=2, **BF16),
    "stage 1, k = 2": Case(model=GPT, stage=1, micro_batches=2, **BF16),
    "stage 0": Case(model=GPT, stage=0, **BF16),
}


def live_bytes(case: Case) -> tuple[int, int]:
    """After the third step, and the most within it."""
    gc.collect()
    with CountLive() as live:
        step, dims = build_step(case)
        size = case.global_batch // dims.data_size // case.micro_batches
        for index in range(3):
            batches = [
                case.batch(index, (m * dims.data_size + dims.data_rank) * size, size) for m in range(case.micro_batches)
            ]
            live.mark()
            step(batches, learning_rate=1e-3, weight_decay=0.0)
    return live.now, live.peak


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_planned_memory_is_within_5_percent_of_the_tensors_that_live(case: Case):
    _, peak = ranks(4).run(live_bytes, case)[0]
    step = plan(case, 4)
    step.run(case.micro_batches)
    assert step.ledger.fullest.total == pytest.approx(peak, rel=0.05)


def test_own_elements_leave_the_padding_out():
    shapes = [("a", (5, 3)), ("b", (2,))]  # chunks of 2 rows and of 1
    assert [own_elements(shapes, 3, rank) for rank in range(3)] == [2 * 3 + 1, 2 * 3 + 1, 3]
    assert own_elements(shapes, 1, 0) == 17


def test_the_ledger_remembers_its_fullest_moment_by_kind():
    ledger = Ledger()
    ledger.add("parameters", 10)
    ledger.pass_through("activations", 5)
    ledger.add("gradients", 3)
    assert ledger.fullest.kinds == {"parameters": 10, "activations": 5}
    assert ledger.fullest.total == 15
