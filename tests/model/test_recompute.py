"""Recomputation gives the loss and the gradients of a run without it, to the bit, also with dropout."""

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
    """Losses and accumulated gradients of two micro-batches, and the state the generators are left in."""
    gpt = build_gpt(model, sequence_parallel=sequence_parallel)
    (first, _), (second, gradients) = (step(gpt, packed() if documents else None) for _ in range(2))
    return {"first": first, "second": second, **gradients, "default": torch.get_rng_state()}


def differences() -> list[str]:
    """What is not the same with recomputation, each kind with and without documents, in one style each."""
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


@pytest.mark.parametrize("size", [1, 2])
def test_recomputation_with_dropout_changes_no_bit(size):
    """Nor the generators' states, so the next step's masks are the same too."""
    assert ranks(size).run(differences) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp", "sequence_parallel"), [("selective", 1, False), ("full", 2, True)])
def test_a_sharded_run_is_the_same_with_recomputation(kind, tp, sequence_parallel):
    """Through FSDP2, which gathers a layer's weights again for the recomputation; bitwise."""
    case = Case(model=STYLES["gpt2"], tp=tp, sequence_parallel=sequence_parallel, micro_batches=2, steps=2)
    expected = ranks(4).run(train_on_ranks, case)
    recomputed = dataclasses.replace(case, model=dataclasses.replace(case.model, **KINDS[kind]))
    for ours, plain in zip(ranks(4).run(train_on_ranks, recomputed), expected, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (plain["loss"], plain["grad_norm"])


def calls_of_a_step(model: GPTConfig, training: bool) -> list[Any]:
    """What forward and backward call on tp, and how often each layer's MLP ran."""
    gpt, ran = build_gpt(model).train(training), list[int]()
    for index, layer in enumerate(gpt.layers):
        layer.mlp.register_forward_pre_hook(lambda module, args, index=index: ran.append(index))
    losses, forward = counted(gpt.tp, gpt, *sample())
    _, backward = counted(gpt.tp, losses.mean().backward)
    return [forward, backward, [ran.count(index) for index in range(len(gpt.layers))]]


def test_the_chosen_layers_run_twice_with_their_forward_collectives():
    """A layer's last all-reduce is not repeated where nothing after it is needed again."""
    for kind, runs, repeated in (("full", [2, 2, 2], 6), ("block", [2, 1, 1], 2), ("selective", [1, 1, 1], 0)):
        model = dataclasses.replace(STYLES["gpt2"], **KINDS[kind])
        for forward, backward, ran in ranks(2).run(calls_of_a_step, model, True):
            assert ran == runs, kind
            assert forward == {"all_reduce": 2 * 3 + 1 + 2}
            assert 7 + repeated // 2 <= backward["all_reduce"] <= 7 + repeated, kind
        for _, backward, ran in ranks(2).run(calls_of_a_step, model, False):
            assert ran == [1, 1, 1]  # nothing is recomputed in evaluation mode
            assert backward == {"all_reduce": 7}


def saved_bytes(model: GPTConfig) -> int:
    """Bytes that autograd keeps between forward and backward."""
    gpt = build_gpt(model)
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    with saved_tensors() as saved:
        gpt(*sample())
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def test_recomputation_keeps_less():
    """What it is for: full < block < none, and selective, where norms and activation are, < norms alone < none."""
    plain = saved_bytes(STYLES["gpt2"])
    kept = {kind: saved_bytes(dataclasses.replace(STYLES["gpt2"], **KINDS[kind])) for kind in KINDS}
    assert kept["full"] == kept["uniform"] < kept["block"] < plain
    assert kept["selective"] == kept["activations"] < kept["norms"] < plain
    assert kept["core"] < plain
    gpt2 = STYLES["gpt2"]
    tensor = 4 * 3 * SEQ * gpt2.hidden  # bytes of what a norm gives
    assert plain - kept["norms"] >= gpt2.layers * 2 * tensor
    assert kept["norms"] - kept["selective"] >= gpt2.layers * tensor * gpt2.ffn_size // gpt2.hidden
    assert kept["full"] < plain / 2
