"""Test that recomputing activations gives bit-identical losses and gradients, also with dropout."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import SEQ, build_gpt, counted, packed, sample, saved_tensors, step, tp_axis
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_on_ranks

from megazpp.model.config import GPTConfig

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
STYLES = {
    "gpt2": dataclasses.replace(GPT2_STYLE, num_layers=3, **DROPOUT),
    "llama": dataclasses.replace(LLAMA_STYLE, **DROPOUT),
}
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "full": {"recompute_granularity": "full"},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
    "activations": {"recompute_activations": True},
    "core": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
}


def two_steps(model: GPTConfig, sequence_parallel: bool, documents: bool) -> dict[str, Any]:
    """Return the losses and accumulated gradients of two micro-batches.

    The final state of torch's random generator is under "default".
    """
    gpt = build_gpt(model, sequence_parallel=sequence_parallel)
    (first, _), (second, gradients) = (step(gpt, packed() if documents else None) for _ in range(2))
    return {"first": first, "second": second, **gradients, "default": torch.get_rng_state()}


def differences() -> list[str]:
    """Return descriptions of all tensors that differ from a run without recomputation, for each kind of recomputation.

    The list is empty if all are bit-identical. Runs are with and without documents.
    """
    found = []
    for documents, style in itertools.product((False, True), STYLES):
        sequence_parallel = documents and tp_axis().size > 1
        plain = two_steps(STYLES[style], sequence_parallel, documents)
        assert not torch.equal(plain["first"], plain["second"])
        for number, kind in enumerate(("full", "block", "selective", "core", "norms")):
            if (number + documents) % 2 == (style == "llama"):
                model = dataclasses.replace(STYLES[style], **KINDS[kind])
                ours = two_steps(model, sequence_parallel, documents)
                assert ours.keys() == plain.keys()
                changed = [name for name in plain if not torch.equal(ours[name], plain[name])]
                found += [f"{kind}, {style}, documents {documents}: {name}" for name in changed]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_recomputation_with_dropout_changes_no_bit(size):
    """Check that recomputation with dropout changes no bit.

    Random generators end in the same state too, so the next step's masks are equal.
    """
    assert ranks(size).run(differences) == [[]] * size


@pytest.mark.slow
def test_sharded_run_is_bit_identical_with_recomputation():
    """Check that recomputation under FSDP2 changes no bit of losses and norms.

    For the recomputation of a layer, FSDP2 gathers the layer's weights again.
    """
    case = Case(model=STYLES["gpt2"], tp=2, sequence_parallel=True, micro_batches=2, steps=2)
    expected = ranks(4).run(train_on_ranks, case)
    recomputed = dataclasses.replace(case, model=dataclasses.replace(case.model, **KINDS["full"]))
    for ours, plain in zip(ranks(4).run(train_on_ranks, recomputed), expected, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (plain["loss"], plain["grad_norm"])


def calls_of_a_step(model: GPTConfig, training: bool) -> list[Any]:
    """Return the number of calls of each tp collective in forward and in backward, and how often each MLP ran."""
    gpt, ran = build_gpt(model).train(training), list[int]()
    for index, layer in enumerate(gpt.layers):
        layer.mlp.register_forward_pre_hook(lambda module, args, index=index: ran.append(index))
    losses, forward = counted(gpt.tp, gpt, *sample())
    _, backward = counted(gpt.tp, losses.mean().backward)
    return [forward, backward, [ran.count(index) for index in range(len(gpt.layers))]]


def test_chosen_layers_run_twice_with_their_forward_collectives():
    """Check which layers run twice, and how many of their forward collectives run again in backward.

    A recomputation ends before the last all-reduce of a layer, because backward needs nothing that follows it.
    """
    for kind, runs, repeated in (("full", [2, 2, 2], 6), ("block", [2, 1, 1], 2), ("selective", [1, 1, 1], 0)):
        model = dataclasses.replace(STYLES["gpt2"], **KINDS[kind])
        for forward, backward, ran in ranks(2).run(calls_of_a_step, model, True):
            assert ran == runs, kind
            assert forward == {"all_reduce": 2 * 3 + 1 + 2}
            assert 7 + repeated // 2 <= backward["all_reduce"] <= 7 + repeated, kind
        for _, backward, ran in ranks(2).run(calls_of_a_step, model, False):
            assert ran == [1, 1, 1]  # layers run once, because a model in evaluation mode does not recompute
            assert backward == {"all_reduce": 7}


def saved_bytes(model: GPTConfig) -> int:
    """Return the bytes of activations that autograd saves from forward to backward; weights are left out."""
    gpt = build_gpt(model)
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    with saved_tensors() as saved:
        gpt(*sample())
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def test_recomputation_keeps_fewer_bytes():
    """Check that more recomputation saves fewer bytes for backward.

    The order is full < block < none, and norms and activations < norms only < none.
    """
    plain = saved_bytes(STYLES["gpt2"])
    kept = {kind: saved_bytes(dataclasses.replace(STYLES["gpt2"], **KINDS[kind])) for kind in KINDS}
    assert kept["full"] == kept["uniform"] < kept["block"] < plain
    assert kept["selective"] == kept["activations"] < kept["norms"] < plain
    assert kept["core"] < plain
    gpt2 = STYLES["gpt2"]
    tensor = 4 * 3 * SEQ * gpt2.hidden  # bytes of the output of one norm for all tokens
    assert plain - kept["norms"] >= gpt2.layers * 2 * tensor
    assert kept["norms"] - kept["selective"] >= gpt2.layers * tensor * gpt2.ffn_size // gpt2.hidden
    assert kept["full"] < plain / 2
