"""Model FLOPs against a count of the real matrix products; peaks; the printed convention."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megazpp.model.config import GPTConfig
from megazpp.training.flops import mfu_convention, model_flops_per_token, peak_flops

SHAPE = {
    "num_layers": 3,
    "hidden_size": 48,
    "ffn_hidden_size": 112,
    "num_attention_heads": 6,
    "kv_channels": 10,
    "num_query_groups": 2,
    "padded_vocab_size": 256,
    "seq_length": 16,
}


def counted_flops(swiglu: bool) -> int:
    """Forward and backward of the matrix products of a GPT, per token, as torch counts them."""
    hidden_size, ffn, tokens = SHAPE["hidden_size"], SHAPE["ffn_hidden_size"], SHAPE["seq_length"]
    heads, groups, channels = SHAPE["num_attention_heads"], SHAPE["num_query_groups"], SHAPE["kv_channels"]

    def linear(rows: int, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.randn(x.shape[-1], rows, requires_grad=True)

    def keys_or_values(x: torch.Tensor) -> torch.Tensor:
        split = linear(groups * channels, x).view(tokens, groups, channels).transpose(0, 1)
        return split.repeat_interleave(heads // groups, dim=0)

    with FlopCounterMode(display=False) as counter:
        x = torch.randn(tokens, hidden_size, requires_grad=True)
        for _ in range(SHAPE["num_layers"]):
            query = linear(heads * channels, x).view(tokens, heads, channels).transpose(0, 1)
            mixed = query @ keys_or_values(x).transpose(1, 2) @ keys_or_values(x)
            x = linear(hidden_size, mixed.transpose(0, 1).reshape(tokens, -1))
            inner = linear(ffn, x) * linear(ffn, x) if swiglu else linear(ffn, x)
            x = linear(hidden_size, inner)
        linear(SHAPE["padded_vocab_size"], x).sum().backward()
    products = 2 * 3  # scores and weighted sum, forward and twice that in backward
    full_attention = products * 2 * heads * channels * tokens * SHAPE["num_layers"]
    return counter.get_total_flops() // tokens - full_attention // 2


def test_the_formula_counts_the_matrix_products_with_half_of_the_attention():
    of_run = {name: SHAPE[name] for name in ("padded_vocab_size", "seq_length")}
    of_model = {name: value for name, value in SHAPE.items() if name not in of_run}
    for swiglu in (False, True):
        model = GPTConfig(**of_model, group_query_attention=True, swiglu=swiglu)
        assert model_flops_per_token(model, **of_run) == counted_flops(swiglu)


def test_gpt3_175b_is_megatrons_figure():
    # 72 B s l h^2 (1 + s / 6h + V / 12lh), arXiv 2104.04473, less half of the attention term
    layers, h, s, vocab = 96, 12288, 2048, 51200
    model = GPTConfig(num_layers=layers, hidden_size=h, num_attention_heads=96)
    ours = model_flops_per_token(model, padded_vocab_size=vocab, seq_length=s)
    assert ours == pytest.approx(72 * layers * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h)), rel=1e-12)


def test_the_peak_is_that_of_the_named_device_or_none_where_it_is_not_known_for_sure():
    bf16, fp16 = torch.bfloat16, torch.float16
    for name, dtype, tflops in (
        ("NVIDIA A100 80GB PCIe", bf16, 312),
        ("NVIDIA H100 80GB HBM3", bf16, 989),
        ("NVIDIA H100 PCIe", fp16, 756),
        ("NVIDIA H200 NVL", bf16, 835),
        ("NVIDIA GH200 480GB", bf16, 989),
        ("Tesla V100-SXM2-16GB", fp16, 125),
        ("cpu", bf16, None),
        ("NVIDIA GB200", bf16, None),
        ("NVIDIA A1000 Laptop GPU", bf16, None),
        ("NVIDIA L40", bf16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", bf16, None),
        ("NVIDIA A100-SXM4-80GB", torch.float32, None),
        ("Tesla V100-SXM2-16GB", bf16, None),
    ):
        assert peak_flops(name, dtype) == (None if tflops is None else tflops * 1e12), (name, dtype)


def test_the_convention_says_what_mfu_means_or_why_there_is_none():
    known, unknown = (mfu_convention(6_000_000, *of) for of in (("NVIDIA H200", 989e12), ("cpu", None)))
    assert "6.0000E+06 per token" in known
    assert "MFU = model FLOP/s / 989 TFLOP/s, the dense 16-bit peak of NVIDIA H200" in known
    assert "no MFU: the peak of cpu" in unknown
