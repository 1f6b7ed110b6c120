"""ZeRO++ in training: what is exact is equal, what is kept is never stale, what is counted is what is sent."""

import copy
import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, FixedBatches, build_step, train_on_ranks

from megazpp.training.objective import Evaluator
from megazpp.zero import wire
from megazpp.zero.config import PrecisionConfig, ZeroConfig

EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
ALL = ZeroConfig(zeropp=True)


def run(world: int, **case: Any) -> dict[str, Any]:
    results = ranks(world).run(train_on_ranks, Case(**case))
    assert all(r["loss"] == results[0]["loss"] for r in results)
    return results[0]


# ---- exactness ----------------------------------------------------------------------------------------------------

RECOMPUTE = dataclasses.replace(GPT2_STYLE, recompute_granularity="full")
LLAMA = {"model": LLAMA_STYLE, "micro_batches": 1}
EXACT_CASES: dict[str, dict[str, Any]] = {  # 1, 2, 3 and 5 nodes; 1, 2, 3 and 4 data ranks per node; tp 1, 2, 4
    "2 x 2, tp 2": {"nodes": 2, "ranks": 4, "tp": 2, **LLAMA},
    "1 x 4": {"nodes": 1, "ranks": 4},
    "3 x 2": {"nodes": 3, "ranks": 6, "global_batch": 24},
    "2 x 3": {"nodes": 2, "ranks": 6, "global_batch": 12, **LLAMA},
    "5 x 1": {"nodes": 5, "ranks": 5, "global_batch": 20},
    "2 x 4, tp 2": {"nodes": 2, "ranks": 8, "tp": 2},
    "2 x 4, tp 4": {"nodes": 2, "ranks": 8, "tp": 4, **LLAMA},
    "sequence parallel": {"nodes": 2, "ranks": 4, "tp": 2, "sequence_parallel": True},
    "documents, recompute": {"nodes": 2, "ranks": 4, "documents": True, "model": RECOMPUTE},
    "bf16": {"nodes": 2, "ranks": 4, "precision": PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)},
    "fp16": {"nodes": 2, "ranks": 4, "precision": PrecisionConfig(fp16=True)},
    "copies over 2 nodes each": {"nodes": 4, "ranks": 8, "replicas": 2},
}


@pytest.mark.parametrize("case", chosen(EXACT_CASES, "2 x 2, tp 2", "1 x 4", "sequence parallel"))
def test_without_quantization_two_hops_equal_plain_fsdp2(case):
    """The same sums in another order, at a rate at which AdamW does not blow up their rounding.

    1e-5 over 4 steps in fp32, 1 % in 16-bit formats.
    """
    case, rel = {"micro_batches": 2, "steps": 4, "learning_rate": 1e-3, **case}, 1e-2 if "precision" in case else 1e-5
    world = case.pop("ranks")
    plain, two_hops = (run(world, zero=zero, **case) for zero in (None, EXACT))
    assert two_hops["loss"] == pytest.approx(plain["loss"], rel=rel)
    assert two_hops["grad_norm"] == pytest.approx(plain["grad_norm"], rel=rel)
    assert two_hops["skipped"] == plain["skipped"] == 0


@pytest.mark.parametrize(("nodes", "per_node", "tp", "classic"), [(2, 2, 2, True), slow(3, 2, 1, False)])
def test_quantized_training_follows_the_exact_one(nodes, per_node, tp, classic):
    """8-bit weights and 8/4-bit gradients move the loss of a tiny model by less than 1 % in 4 steps."""
    case = {"nodes": nodes, "tp": tp, "micro_batches": 2, "learning_rate": 1e-3, "steps": 4}
    case["global_batch"] = nodes * per_node // tp * 4
    plain = run(nodes * per_node, **case)
    quantized = run(nodes * per_node, zero=ZeroConfig(zeropp=True, zero_cross_every_microbatch=classic), **case)
    assert quantized["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert quantized["loss"] != plain["loss"]


def test_copies_of_the_model_talk_once_per_optimizer_step():
    """HSDP: what crosses nodes is the all-reduce of shards, whose number is the same for 1 and 4 micro-batches."""
    once, four = (run(4, nodes=2, replicas=2, steps=1, micro_batches=k)["sent"]["cross"] for k in (1, 4))
    assert once == four > 0


# ---- hpZ changes nothing ------------------------------------------------------------------------------------------


def train_with_evaluation_and_load(case: Case) -> list[float]:
    """8 steps with an evaluation after the 3rd and the weights of after the 2nd loaded after the 6th."""
    step, dims = build_step(case)
    losses = []
    for index in range(8):
        batches = case.batches(index, dims)
        losses.append(step(batches, learning_rate=case.learning_rate, weight_decay=0.01).loss)
        if index == 1:
            saved = copy.deepcopy(step.model.state_dict())
        if index == 2:
            evaluator = Evaluator(step.model, step.sharding, FixedBatches(batches), dims, iterations=1, batch_size=1)
            losses.append(evaluator())
        if index == 5:
            step.model.load_state_dict(saved)
    return losses


@pytest.mark.parametrize(("quantized", "micro_batches"), [(True, 1), slow(False, 4)])
def test_hpz_is_bit_identical_to_no_hpz(quantized, micro_batches):
    zero = ZeroConfig(zero_quantized_weights=quantized, zero_hpz_partition_size="auto")
    case = Case(nodes=2, micro_batches=micro_batches, model=LLAMA_STYLE, zero=zero)
    without = dataclasses.replace(case, zero=ZeroConfig(zero_quantized_weights=quantized))
    found, expected = (ranks(4).run(train_with_evaluation_and_load, each)[0] for each in (case, without))
    assert found == expected
    assert expected[7] > expected[5]  # the load did take the weights back


# ---- bytes --------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    by: dict[tuple[str, str], int]  # axis and collective -> bytes
    planned: tuple[int, int, int]  # of all units' messages: weights, gradients inside and across nodes
    elements: int  # of the model, padded


def bytes_of_one_step(case: Case) -> Sent:
    step, dims = build_step(case)
    step(case.batches(0, dims), learning_rate=1e-3, weight_decay=0.0)
    table, sharding = dims.counter.table(), step.sharding
    assert all(wire == "cross" for wire, axis, _ in table if axis == "cross")
    inside, across = zip(*(reduce.message_bytes for reduce in sharding._reduces), strict=True)
    sent = {
        (axis, collective): t.sent_bytes for (_, axis, collective), t in table.items() if axis not in ("shard", "tp")
    }
    weights = sum(gather.message_bytes for gather in sharding._gathers)
    elements = sharding.shard_elements * dims.shard.size * dims.tp.size
    return Sent(sent, (weights, sum(inside), sum(across)), elements)


@pytest.mark.slow  # the next test is the default tier's
@pytest.mark.parametrize(("nodes", "tp", "micro_batches"), [(2, 1, 8), (2, 2, 1), (4, 1, 1), (4, 2, 8)])
def test_bytes_are_a_function_of_the_layout_and_on_the_cross_axis_not_of_the_micro_batches(nodes, tp, micro_batches):
    case = Case(nodes=nodes, tp=tp, micro_batches=micro_batches, zero=ALL, model=LLAMA_STYLE, global_batch=64)
    others = 8 // nodes // tp - 1  # data ranks of the node
    for sent in ranks(8).run(bytes_of_one_step, case):
        weights, inside, across = sent.planned
        expected = {("cross", "all_gather"): (nodes - 1) * weights, ("cross", "all_to_all"): (nodes - 1) * across}
        if others:  # every use of the weights, and every micro-batch's gradients
            expected["local", "all_gather"] = 2 * micro_batches * others * nodes * weights
            expected["local", "all_to_all"] = micro_batches * others * nodes * inside
        assert sent.by == expected


def test_a_large_enough_model_moves_three_quarters_of_its_16_bit_bytes_between_nodes():
    """0.5 M + 0.25 M and the scales, times (N - 1) / N, whatever k; the padding of a tiny model comes on top."""
    wide = dataclasses.replace(LLAMA_STYLE, hidden_size=256, ffn_hidden_size=512, kv_channels=32)
    results = ranks(4).run(bytes_of_one_step, Case(nodes=2, micro_batches=4, zero=ALL, model=wide, vocab_size=512))
    of_a_node = sum(sent for result in results for (axis, _), sent in result.by.items() if axis == "cross") / 2
    share = of_a_node / (2 * results[0].elements)
    assert share / (1 / 2) == pytest.approx(0.766, abs=0.012)  # (8.0625 + 4.125) / 16, 1-D exact


def test_flags_of_the_cross_hop_change_its_bytes():
    """Not quantized, of two micro-batches: crossing with each doubles the gradients' bytes, bf16 halves them."""

    def sent(**flags: Any) -> int:
        case = Case(nodes=2, micro_batches=2, zero=dataclasses.replace(EXACT, **flags))
        return ranks(2).run(bytes_of_one_step, case)[0].by["cross", "all_to_all"]

    once = sent()
    assert sent(zero_cross_every_microbatch=True) == 2 * once
    assert sent(zero_accumulate_in_bf16=True) == pytest.approx(once / 2, rel=0.01)  # padding to 16 bytes


# ---- kernels that are compiled ahead --------------------------------------------------------------------------------


def traits(x: Any) -> Any:
    """What decides which kernel is compiled: types, strides, alignment, switches."""
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), x.stride(), x.storage_offset() * x.element_size() % 16
    return repr([traits(part) for part in x]) if isinstance(x, tuple) else repr(x)


def compiled(case: Case) -> tuple[bool, set[Any]]:
    """Whether kernels compiled before each of two steps change nothing, and calls of kernels that were not foreseen."""
    calls: set[Any] = set()

    def noted(kernel: Any) -> Any:
        def call(*tensors: Any, **others: Any) -> None:
            calls.add((kernel.__name__, *map(traits, [*tensors, *others.values()])))
            kernel(*tensors, **others)

        return call

    results = []
    kernels = {name: noted(getattr(wire, name)) for name in ("pack", "unpack", "unpack_onto", "unpack_sum")}
    with mock.patch.multiple(wire, **kernels):
        for ahead in (False, True):
            step, dims = build_step(case)
            losses, foreseen = [], set[Any]()
            for index in range(2):
                calls.clear()
                if ahead:
                    step.sharding.compile_kernels(torch.device("cpu"))
                    foreseen = calls.copy()
                losses.append(step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.0).loss)
            feedback = {name: buffer.tolist() for name, buffer in step.sharding.rank_state().items()}
            results.append((losses, feedback, dims.counter.table()))
    assert calls
    return results[0] == results[1], calls - foreseen


@pytest.mark.parametrize("delta", ["none", "lossless"])
def test_every_kernel_of_a_step_is_compiled_ahead_which_sends_nothing_and_changes_nothing(delta):
    zero, bf16 = ZeroConfig(zeropp=True, zero_weight_delta=delta), PrecisionConfig(bf16=delta == "lossless")
    case = Case(nodes=2, micro_batches=2, zero=zero, precision=bf16)
    assert ranks(4).run(compiled, case) == [(True, set())] * 4
