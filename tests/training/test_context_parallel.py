"""Context parallelism gives the losses and gradient norms of one plain process, whatever it is combined with.

Tolerance 1e-6 relative for losses, 2e-6 for norms: fp32 sums in another order over 5 steps of AdamW at a high rate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen, pairwise
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_step, dims_on_ranks, train_on_ranks, train_plain

from megazpp.islands.config import IslandsConfig
from megazpp.model.attention import heads_for_tokens, tokens_for_heads
from megazpp.model.config import GPTConfig
from megazpp.optim.optimizer import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}
ZEROPP_16 = ZeroConfig(zeropp=True, zero_weight_bits=(16, 16), zero_gradient_bits=(16, 16))


@functools.cache
def plain(model: GPTConfig, documents: bool) -> dict[str, list[float]]:
    return train_plain(Case(model=model, documents=documents))


def assert_equal_to_plain(case: Case, world_size: int = 4) -> None:
    model = dataclasses.replace(case.model, recompute_granularity=None, recompute_modules=None)
    expected = plain(model, case.documents)
    for result in ranks(world_size).run(train_on_ranks, case):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)
    assert expected["loss"][-1] < 0.9 * expected["loss"][0]  # it did learn, so equality says something


GRID = [
    (spread, stage, 1 + 3 * ((number + stage) % 2), (number + stage // 2) % 2 == 1, style)
    for number, spread in enumerate([(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True)])
    for stage in range(4)
    for style in STYLES
]


@pytest.mark.parametrize(("spread", "stage", "micro_batches", "documents", "style"), pairwise(GRID))
def test_losses_and_norms_equal_one_process(
    spread: tuple[int, int, bool], stage: int, micro_batches: int, documents: bool, style: str
):
    cp, tp, split = spread
    layout: dict[str, Any] = {"cp": cp, "tp": tp, "sequence_parallel": split, "stage": stage}
    assert_equal_to_plain(Case(model=STYLES[style], **layout, micro_batches=micro_batches, documents=documents))


def llama(**fields: Any) -> GPTConfig:
    return dataclasses.replace(LLAMA_STYLE, **fields)


SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
ALONE = {
    "zeropp, 16 bits": Case(cp=2, nodes=2, zero=ZEROPP_16, micro_batches=2, documents=True),
    "zeropp, 16 bits, tp": Case(model=LLAMA_STYLE, cp=2, tp=2, nodes=2, zero=ZEROPP_16, sequence_parallel=True),
    "across nodes": Case(model=LLAMA_STYLE, cp=4, nodes=2),
    "across copies of a node": Case(cp=4, replicas=2),
    "one key for 4 ranks": Case(model=llama(num_query_groups=1), cp=4),
    "2 groups for 4 ranks": Case(model=llama(num_query_groups=2), cp=4, documents=True),
    "3 groups for 2 ranks": Case(model=llama(num_attention_heads=6, num_query_groups=3), cp=2, stage=2),
    "norms of heads": Case(model=llama(qk_layernorm=True, use_rope_scaling=True), cp=2, tp=2, sequence_parallel=True),
    "norms recomputed": Case(model=dataclasses.replace(GPT2_STYLE, **SELECTIVE), cp=2),
    "attention recomputed": Case(model=llama(**SELECTIVE, recompute_modules=("core_attn",)), cp=2, tp=2),
    "all recomputed": Case(model=llama(recompute_granularity="full"), cp=4, documents=True),
}


@pytest.mark.parametrize(
    "case", chosen(ALONE, "zeropp, 16 bits", "across nodes", "2 groups for 4 ranks", "attention recomputed")
)
def test_it_equals_one_process_beside(case: Case):
    assert_equal_to_plain(case)


@pytest.mark.slow
def test_8_ranks_with_less_than_a_group_each_equal_one_process():
    assert_equal_to_plain(Case(model=LLAMA_STYLE, cp=4, tp=2, sequence_parallel=True), world_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    Case(model=LLAMA_STYLE, nodes=2, precision=PrecisionConfig(bf16=True), learning_rate=1e-3),
    Case(nodes=2, diloco=IslandsConfig(diloco_steps=2)),
    Case(model=LLAMA_STYLE, nodes=2, optimizer=OptimizerConfig(optimizer="muon"), learning_rate=1e-3),
], ids=["bf16", "islands", "muon"])  # fmt: skip
def test_it_equals_the_same_ranks_without_it(case: Case):
    """bf16 to its rounding; islands have the samples that they have without it."""
    expected, found = (ranks(4).run(train_on_ranks, dataclasses.replace(case, cp=cp)) for cp in (1, 2))
    rounding = 2e-3 if case.precision.bf16 else 1e-6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=rounding)


def exchanged(shape: tuple[int, int, int, int], groups: int) -> dict[str, Any]:
    """Heads for tokens and back, by a function of heads that also sums keys and values of the same head."""
    dims = dims_on_ranks(Case(cp=4))
    seq, batch, heads, channels = shape
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(seq, batch, heads, channels, generator=generator)
    k, v = (torch.randn(seq, batch, groups, channels, generator=generator) for _ in range(2))
    whole = [x.requires_grad_() for x in (q, k, v)]
    mine = [x.detach().chunk(4)[dims.cp.rank].clone().requires_grad_() for x in whole]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return (q.cumsum(0) * k + v.cumsum(0)).flatten(2)

    expected = attend(*whole)
    weight = torch.randn(expected.shape, generator=generator)
    (expected * weight).sum().backward()
    before = dims.counter.sent_on_axis("cp")
    found = tokens_for_heads(attend(*heads_for_tokens(*mine, dims.cp)), dims.cp)
    sent = dims.counter.sent_on_axis("cp") - before
    (found * weight.chunk(4)[dims.cp.rank]).sum().backward()
    pairs = [(found, expected.chunk(4)[dims.cp.rank])]
    pairs += [(own.grad, x.grad.chunk(4)[dims.cp.rank]) for own, x in zip(mine, whole, strict=True)]
    return {
        "off": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "sent": sent,
        "back": dims.counter.sent_on_axis("cp") - before - sent,
    }


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 4), (8, 2), (12, 6), (12, 3), (4, 1)])
def test_an_exchange_brings_every_head_of_every_token_and_sends_the_least_of_keys(heads: int, groups: int):
    seq, batch, channels = 20, 3, 5
    for found in ranks(4).run(exchanged, (seq, batch, heads, channels), groups):
        assert found["off"] < 1e-5
        keys = groups // math.gcd(groups, 4)  # that a rank needs of each token; gathered, they would be all groups
        per_token = 4 * batch * channels * (2 * heads / 4 + 2 * keys)
        assert found["sent"] == found["back"] == 3 * seq // 4 * per_token


def dropped(case: Case) -> list[bool]:
    """Where a dropout layer of this rank kept ones."""
    step, _ = build_step(case)
    step.model.train()
    return step.model.layers[0].dropout(torch.ones(64)).bool().tolist()


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_with_other_tokens_drop_other_things_and_tp_ranks_the_same(tp: int):
    case = Case(model=dataclasses.replace(GPT2_STYLE, hidden_dropout=0.5), cp=2, tp=tp)
    assert len({tuple(kept) for kept in ranks(4).run(dropped, case)}) == 4 // tp
