"""Count the floating-point operations of a training step, and look up a device's peak rate.

Model FLOPs follow Megatron-LM (arXiv 2104.04473, appendix), with only the causal half of the attention matrix. They
count one forward and one backward, so recomputation does not make a run look faster. The peak of a device is its dense
16-bit tensor rate from the vendor's data sheet. If the table has no entry for the device, no MFU is reported.
"""

from __future__ import annotations

import re

import torch

from megazpp.base.program import TERA
from megazpp.model.config import GPTConfig

# Peak dense bf16 (V100: fp16) rates of tensor cores in TFLOP/s. A device has the rate of the first entry whose words
# occur in the device's name.
PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("V100-SXM2", 125.0),
    ("V100-PCIE", 112.0),
)


def model_flops_per_token(model: GPTConfig, *, padded_vocab_size: int, seq_length: int) -> int:
    """Return the floating-point operations per token of a GPT model's forward and backward together.

    The backward computes two matrix products for each matrix product of the forward, so the total is three times the
    forward. A multiply-add counts as two operations. In a mixture of experts, the router, the shared MLP and the
    experts to which a token is sent count.

    Args:
        model: shape of the model.
        padded_vocab_size: vocabulary size of the output layer, with padding.
        seq_length: tokens of a sample.
    """
    query_size = model.heads * model.head_size
    dense = model.hidden * model.ffn_size * (3 if model.swiglu else 2)
    experts, inner = len(model.expert_layers), model.moe_router_topk * model.expert_ffn_size
    mixture = 3 * model.hidden * (inner + (model.moe_shared_expert_intermediate_size or 0))
    mixture += model.hidden * ((model.num_experts or 0) + model.moe_shared_expert_gate)
    mlps = (model.layers - experts) * dense + experts * mixture
    projections = 2 * model.hidden * model.head_size * (model.heads + model.query_groups)
    spans = [keys_per_token(seq_length, span) for span in model.attention_span]
    # Multiply-adds per token in all layers: one product for the attention scores, one for the weighted sum of values
    attention = round(2 * query_size * sum(spans))
    return 6 * (mlps + model.layers * projections + attention + model.hidden * padded_vocab_size)


def keys_per_token(seq_length: int, window: int | None) -> float:
    """Return the mean number of keys to which a token attends in causal attention.

    Without a sliding window the result is half of the sequence length, by Megatron-LM's convention. With a sliding
    window the result is the exact mean.

    Args:
        seq_length: tokens of a sample.
        window: size of the sliding window in tokens; None for full causal attention.
    """
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window * (window - 1) / (2 * seq_length)


def device_name(device: torch.device) -> str:
    """Return the product name of a CUDA device, for example "NVIDIA H200", or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device for dense matrix products, or None if the peak is not known.

    Args:
        name: name of the device from `device_name`. The peak of a MIG slice of a GPU is not known.
        dtype: compute dtype. The table has peaks only for bf16 and fp16.
    """
    if dtype not in (torch.bfloat16, torch.float16) or "MIG" in name:
        return None
    if dtype is torch.bfloat16 and "V100" in name:
        return None
    return next((tflops * TERA for part, tflops in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)


def mfu_convention(flops_per_token: int, name: str, peak: float | None) -> str:
    """Return the log line that defines FLOP/s and MFU. It is printed once per run.

    Args:
        flops_per_token: model FLOPs per token, see `model_flops_per_token`.
        name: name of the device from `device_name`.
        peak: peak FLOP/s of the device; None if the peak is not known, so that the log has no MFU.
    """
    model = f"model FLOPs: {flops_per_token:.4E} per token (forward + backward, causal half, no recomputation)"
    if peak is None:
        return f"{model}; no MFU: the peak of {name} in this precision is not known"
    return f"{model}; MFU = model FLOP/s / {peak / TERA:.0f} TFLOP/s, the dense 16-bit peak of {name}"
