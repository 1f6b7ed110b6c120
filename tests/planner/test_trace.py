"""What the traced model does is what the whole model would do, and as much as its formula says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.planner.trace import BACKWARD, FORWARD, Trace, trace_model
from megazpp.training.flops import model_flops_per_token

VOCAB, SEQ, SAMPLES = 64, 16, 3


def trace(config: GPTConfig, *, tp: int = 1, samples: int = SAMPLES, **documents: Any) -> Trace:
    return trace_model(
        config,
        vocab_size=VOCAB,
        seq_length=SEQ,
        micro_batch_size=samples,
        tp=tp,
        sequence_parallel=False,
        dtype=torch.bfloat16,
        **documents,
    )


def flops(found: Trace) -> float:
    return sum(2 * w.m * w.n * w.k * w.batch for segment in found.segments.values() for w in segment.operations)


def like(config: GPTConfig, **changes: Any) -> GPTConfig:
    return dataclasses.replace(config, num_layers=5, **changes)


@pytest.mark.parametrize("config", [GPT2_STYLE, LLAMA_STYLE], ids=["gpt", "llama"])
@pytest.mark.parametrize("tp", [1, 2])
def test_products_come_to_the_model_s_flops(config: GPTConfig, tp: int):
    padded = config.padded_vocab_size(VOCAB, tp)
    per_token = model_flops_per_token(like(config), padded_vocab_size=padded, seq_length=SEQ)
    assert tp * flops(trace(like(config), tp=tp)) == pytest.approx(SAMPLES * SEQ * per_token, rel=0.08)


def test_recomputation_adds_the_layers_forward_and_keeps_less():
    plain, full = trace(like(GPT2_STYLE)), trace(like(GPT2_STYLE, recompute_granularity="full"))
    layers = [(FORWARD, layer) for layer in range(1, 6)]
    again = flops(plain._replace(segments={key: part for key, part in plain.segments.items() if key in layers}))
    last = 2 * SAMPLES * SEQ * 20 * 44  # the layer's last product, whose result nothing else needs, is not run again
    assert flops(full) == flops(plain) + again - 5 * last
    assert full.segments[FORWARD, 3].kept < plain.segments[FORWARD, 3].kept / 4


def test_recomputing_norms_and_activation_adds_no_product_and_keeps_less():
    for config in (GPT2_STYLE, LLAMA_STYLE):
        plain, selective = trace(like(config)), trace(like(config, recompute_granularity="selective"))
        assert flops(selective) == flops(plain)
        assert selective.segments[FORWARD, 3].kept < 0.8 * plain.segments[FORWARD, 3].kept


def test_with_sequence_parallelism_a_column_layer_keeps_its_slice_of_the_input_and_all_of_it_with_float8():
    """Bytes of a GPT layer in units of tokens x hidden at T = 8: 34 / 8 and a little (Korthikanti et al. 2022)."""
    config = dataclasses.replace(GPT2_STYLE, hidden_size=512, num_attention_heads=8, ffn_hidden_size=None, num_layers=2)
    for changes, most in (({}, 4.5), ({"recompute_granularity": "selective"}, 3.0), ({"fp8_format": "hybrid"}, 8.0)):
        found = trace_model(
            dataclasses.replace(config, **changes),
            vocab_size=VOCAB,
            seq_length=64,
            micro_batch_size=1,
            tp=8,
            sequence_parallel=True,
            dtype=torch.bfloat16,
        )
        assert most - 1.0 < found.segments[FORWARD, 1].kept / (64 * 512) < most


@pytest.mark.parametrize("again", [None, slow("full")])
def test_rmsnorm_keeps_its_input_and_a_scale_per_row_as_the_kernel_of_cuda_does(again: str | None):
    """Of LayerNorm the kernel keeps one more fp32 per row, the mean, and its bias's gradient comes at the end."""
    kept = {
        kind: trace(dataclasses.replace(LLAMA_STYLE, normalization=kind, recompute_granularity=again)).segments
        for kind in ("LayerNorm", "RMSNorm")
    }
    layer, mean = (FORWARD, 1), 2 * SAMPLES * SEQ * 4  # two norms
    assert kept["LayerNorm"][layer].kept - kept["RMSNorm"][layer].kept == (mean if again is None else 0)


def test_of_a_block_only_the_first_layers_are_run_again():
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    found = trace(like(GPT2_STYLE, **block))
    kept = [found.segments[FORWARD, layer].kept for layer in range(1, 6)]
    assert kept[0] == kept[1] < kept[2] == kept[3] == kept[4]


@pytest.mark.parametrize(
    "config",
    [GPT2_STYLE, LLAMA_STYLE, dataclasses.replace(LLAMA_STYLE, qk_layernorm=True, add_qkv_bias=True)],
    ids=["tied", "untied", "head norms and biases"],
)
def test_units_hold_every_parameter_once_under_its_name(config: GPTConfig):
    found = trace(like(config))
    with torch.device("meta"):
        model = GPTModel(like(config), vocab_size=VOCAB, tp=MeshAxis("tp"))
    named = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    units = [entry for unit in found.units for entry in unit]
    assert len(units) == len(named)
    assert dict(units) == named
    assert found.tied == config.tied


def test_what_a_forward_keeps_its_backward_frees():
    found = trace(like(GPT2_STYLE))
    kept = sum(segment.kept for segment in found.segments.values())
    gradients = sum(segment.gradients for segment in found.segments.values())
    assert found.num_segments == 7
    assert {phase for phase, _ in found.segments} == {FORWARD, BACKWARD}
    assert 0 <= kept - gradients < 4096  # the loss, positions


def kept_by_a_layer(found: Trace) -> int:
    return found.segments[FORWARD, 2].kept


@pytest.mark.parametrize("config", [GPT2_STYLE, LLAMA_STYLE], ids=["gpt", "llama"])
def test_documents_by_offsets_cost_as_much_as_plain_causal_attention_and_several_rows_a_copy(config: GPTConfig):
    """The output layer keeps the kernel's output, which lies row by row, as the layer lies; nothing of S x S is."""
    for samples in (1, SAMPLES):
        plain, documents = (trace(like(config), samples=samples, documents=how) for how in (None, "kernel"))
        copy = 2 * samples * SEQ * config.heads * config.head_size if samples > 1 else 0
        more = kept_by_a_layer(documents) - kept_by_a_layer(plain)
        assert more == 0 if samples == 1 else more <= copy
        assert flops(documents) == flops(plain)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("config", [GPT2_STYLE, LLAMA_STYLE], ids=["gpt", "llama"])
def test_a_mask_is_kept_by_every_layer_and_on_cuda_repeated_groups_are_too(config: GPTConfig, on_cpu: bool):
    plain, documents = trace(like(config)), trace(like(config), documents="CPU's mask" if on_cpu else "mask")
    mask = 2 * SAMPLES * SEQ**2
    group = 2 * SAMPLES * SEQ * config.head_size  # of keys or values
    extra = mask
    if not on_cpu and config.heads > config.query_groups:
        groups = config.query_groups  # keys, and the fused projection of which values were a part, are not needed then
        extra += (2 * config.heads - groups - (config.heads + 2 * groups)) * group
    assert kept_by_a_layer(documents) - kept_by_a_layer(plain) == extra
    assert flops(documents) > flops(plain)  # the half above the diagonal is computed too
