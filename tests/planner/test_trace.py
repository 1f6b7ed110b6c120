"""Test the trace of a model. Its operations and memory equal the complete model's, and agree with formulas."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from helpers.training import GPT2_STYLE, LLAMA_STYLE, MIXTURE_STYLE

from megazpp.model.attention import VARLEN_ARGUMENTS
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.planner import trace as module
from megazpp.planner.trace import BACKWARD, FORWARD, Trace, TraceInputs, record_segments, trace_model
from megazpp.training.flops import keys_per_token, model_flops_per_token

VOCAB, SEQ, SAMPLES = 64, 16, 3
STYLES = (GPT2_STYLE, LLAMA_STYLE)
INPUTS = TraceInputs(VOCAB, SEQ, SAMPLES, torch.bfloat16)


def trace(config: GPTConfig, **changes: Any) -> Trace:
    return trace_model(config, INPUTS._replace(**changes))


def like(config: GPTConfig, **changes: Any) -> GPTConfig:
    return dataclasses.replace(config, num_layers=5, **changes)


def flops(found: Trace) -> float:
    return sum(2 * w.m * w.n * w.k * w.batch for segment in found.segments.values() for w in segment.operations)


def kept(found: Trace, layer: int = 2) -> int:
    return found.segments[FORWARD, layer].kept


def test_traced_products_equal_the_models_flops():
    for config, tp in itertools.product(STYLES, (1, 2)):
        padded = config.padded_vocab_size(VOCAB, tp)
        per_token = model_flops_per_token(like(config), padded_vocab_size=padded, seq_length=SEQ)
        assert tp * flops(trace(like(config), tp=tp)) == pytest.approx(SAMPLES * SEQ * per_token, rel=0.08)


def test_products_and_memory_of_experts_grow_with_their_load():
    """Trace experts with an even load and with 1.5 times that load on this rank.

    With ep 1 a rank has all experts, so the load does not matter.
    """
    even, busy = (trace(like(MIXTURE_STYLE), ep=2, expert_load=load) for load in (1.0, 1.5))
    # expert rows of a rank with an even load; matrix products per expert layer: 3 in forward and 6 in backward
    rows, products = SAMPLES * SEQ * MIXTURE_STYLE.moe_router_topk, 9
    assert flops(busy) - flops(even) == 5 * products * 2 * rows // 2 * 24 * 20
    assert kept(busy) > kept(even)
    alone, loaded = (trace(like(MIXTURE_STYLE), expert_load=load) for load in (1.0, 1.5))
    assert (flops(alone), kept(alone)) == (flops(loaded), kept(loaded))


def test_full_recomputation_adds_a_forward_and_keeps_less():
    plain, full = trace(like(GPT2_STYLE)), trace(like(GPT2_STYLE, recompute_granularity="full"))
    again = flops(plain._replace(segments={layer: plain.segments[FORWARD, layer] for layer in range(1, 6)}))
    # The last matrix product of a layer is not recomputed, because nothing in backward needs its result.
    last = 2 * SAMPLES * SEQ * 20 * 44
    assert flops(full) == flops(plain) + again - 5 * last
    assert kept(full) < kept(plain) / 4


def test_selective_recomputation_adds_no_products_and_keeps_less():
    for config in STYLES:
        plain, selective = trace(like(config)), trace(like(config, recompute_granularity="selective"))
        assert flops(selective) == flops(plain)
        assert kept(selective) < 0.8 * kept(plain)


def test_column_layer_keeps_a_slice_but_the_whole_input_with_float8():
    """Compare the memory that a layer saves for backward with the formula of Korthikanti et al. 2022.

    With 8 tensor-parallel ranks, the formula gives 34 / 8 bytes per token and channel. With float8, column-parallel
    layers save their unsharded input.
    """
    config = dataclasses.replace(GPT2_STYLE, hidden_size=512, num_attention_heads=8, ffn_hidden_size=None)
    for changes, most in (({}, 4.5), ({"recompute_granularity": "selective"}, 3.0), ({"fp8_format": "hybrid"}, 8.0)):
        changed = dataclasses.replace(config, **changes)
        found = trace(changed, seq_length=64, micro_batch_size=1, tp=8, sequence_parallel=True)
        assert most - 1.0 < kept(found, 1) / (64 * 512) < most


def test_rmsnorm_keeps_its_input_and_one_scale_per_row():
    """Compare what LayerNorm and RMSNorm save for backward.

    LayerNorm's kernel saves one more fp32 number per row, the mean.
    """
    # two norms in each layer; with full recomputation neither saves anything
    for again, means in ((None, 2 * SAMPLES * SEQ * 4), ("full", 0)):
        config = dataclasses.replace(LLAMA_STYLE, recompute_granularity=again)
        layer_norm = trace(dataclasses.replace(config, normalization="LayerNorm"))
        assert kept(layer_norm, 1) - kept(trace(config), 1) == means


def test_block_recomputation_covers_only_the_first_layers():
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    found = trace(like(GPT2_STYLE, **block))
    first, second, *others = (kept(found, layer) for layer in range(1, 6))
    assert first == second < others[0] == others[1] == others[2]


def test_units_hold_every_parameter_once_by_name():
    for config in (*STYLES, dataclasses.replace(LLAMA_STYLE, qk_layernorm=True, add_qkv_bias=True)):
        found = trace(like(config))
        with torch.device("meta"):
            model = GPTModel(like(config), vocab_size=VOCAB)
        named = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
        assert sorted(entry for unit in found.units for entry in unit) == sorted(named)
        assert found.tied == config.tied


def test_document_kernel_costs_the_same_plus_a_copy_of_rows():
    """Compare the FLOPs and the saved memory of the attention kernel for documents with the causal kernel's.

    The kernel saves no S x S tensor. With several rows, the output projection saves a copy of the kernel's output in
    another memory layout.
    """
    for config, samples in itertools.product(STYLES, (1, SAMPLES)):
        plain, documents = (trace(like(config), micro_batch_size=samples, documents=how) for how in (None, "kernel"))
        copy = 2 * samples * SEQ * config.heads * config.head_size if samples > 1 else 0
        # torch 2.11 lacks enable_gqa in its kernel
        if config.query_groups != config.heads and "enable_gqa" not in VARLEN_ARGUMENTS:
            # bytes of keys and values that are repeated for every query head
            copy += 4 * samples * SEQ * config.heads * config.head_size
        more = kept(documents) - kept(plain)
        assert more <= copy if copy else more == 0
        assert flops(documents) == flops(plain)


def test_window_kernel_computes_only_keys_inside_the_window():
    window = SEQ // 4
    config = dataclasses.replace(LLAMA_STYLE, window_size=f"{window - 1},0", window_attn_skip_freq="2")
    plain, windows = (trace(like(each), documents="kernel") for each in (LLAMA_STYLE, config))
    assert kept(windows) == kept(plain)
    inside = window - window * (window - 1) / (2 * SEQ)
    # number of keys per token, averaged over two layers without a window and three with it
    keys = 2 / 5 * SEQ / 2 + 3 / 5 * inside
    above = SAMPLES * config.heads * SEQ * (SEQ / 2 - keys) * 2 * config.head_size
    assert flops(plain) - flops(windows) == pytest.approx(like(config).layers * (2 + 5) * above, rel=1e-9)


def test_every_layer_keeps_the_mask_and_on_cuda_repeated_heads():
    for config, how in itertools.product(STYLES, ("CPU's mask", "mask")):
        plain, documents = trace(like(config)), trace(like(config), documents=how)
        extra, heads, groups = 2 * SAMPLES * SEQ**2, config.heads, config.query_groups
        if how == "mask" and heads > groups:
            # with grouped heads, keys and values are saved for each query head instead of each group
            extra += 2 * (heads - groups) * 2 * SAMPLES * SEQ * config.head_size
        assert kept(documents) - kept(plain) == extra
        # FLOPs of the half of a matrix product that is above the diagonal, which a causal kernel leaves out
        above = SAMPLES * heads * SEQ**2 * config.head_size
        # five layers with 2 matrix products of attention in forward, and 5 in backward
        assert flops(documents) - flops(plain) == 5 * (2 + 5) * above


RECOMPUTED = {
    "selective": like(LLAMA_STYLE, recompute_granularity="selective"),
    "full": like(GPT2_STYLE, recompute_granularity="full"),
    "block": like(LLAMA_STYLE, recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "experts": like(MIXTURE_STYLE, recompute_granularity="full"),
}


@pytest.mark.parametrize("config", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize("changes", [{}, {"tp": 2, "sequence_parallel": True}, {"with_entropy": True, "ep": 2}])
def test_layers_and_head_traced_apart_equal_a_trace_of_both_together(config, changes, monkeypatch):
    """Compare layers and head that are traced apart with a trace of two layers and the head together.

    The trace of both together uses no cache of operations' shapes.
    """
    inputs = INPUTS._replace(**changes)
    apart = trace_model(config, inputs).segments
    monkeypatch.setattr(module, "_described", lambda value: object())
    share = keys_per_token(SEQ, config.attention_span[0]) / SEQ
    together, model = record_segments(dataclasses.replace(config, num_layers=2), inputs, share, with_head=True)
    assert len(model.layers) == 2
    for phase, (index, same) in itertools.product((FORWARD, BACKWARD), {0: 0, 1: 1, 6: 3}.items()):
        assert apart[phase, index] == together[phase, same], (phase, index)
