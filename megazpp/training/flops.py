"""The floating-point operations that a training step needs, what a device can do at best, and its memory in use.

Model FLOPs are Megatron's (arXiv 2104.04473, appendix, with the attention matrix counted by its causal half):
what forward and backward need once, so recomputation does not make a run look faster. The peak of a device is
its dense 16-bit tensor rate from the vendor's data sheet; a device that is not in the table has no MFU.
"""

from __future__ import annotations

import re
import resource
import sys

import torch

from megazpp.base.program import TERA
from megazpp.model.config import GPTConfig

MEBI = 1024 * 1024
# Dense bf16 (V100: fp16) tensor rate in TFLOP/s, by words of the device's name; the first match counts.
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
    """Floating-point operations of forward and backward per token of a GPT.

    Three times the forward pass (backward computes two products for each of the forward's), and two operations per
    multiply-add. The output matrix has `padded_vocab_size` rows. A mixture of experts counts with its router, its
    shared MLP and the experts that a token is sent to.
    """
    query_size = model.heads * model.head_size
    dense = model.hidden * model.ffn_size * (3 if model.swiglu else 2)
    experts, inner = len(model.expert_layers), model.moe_router_topk * model.expert_ffn_size
    mixture = 3 * model.hidden * (inner + (model.moe_shared_expert_intermediate_size or 0))
    mixture += model.hidden * ((model.num_experts or 0) + model.moe_shared_expert_gate)
    mlps = (model.layers - experts) * dense + experts * mixture
    projections = 2 * model.hidden * model.head_size * (model.heads + model.query_groups)
    spans = [keys_per_token(seq_length, span) for span in model.attention_span]
    attention = round(2 * query_size * sum(spans))  # scores and weighted sum
    return 6 * (mlps + model.layers * projections + attention + model.hidden * padded_vocab_size)


def keys_per_token(seq_length: int, window: int | None) -> float:
    """Keys that a token attends to on average: half of a sequence by Megatron's convention, or what a window leaves."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window * (window - 1) / (2 * seq_length)


def device_name(device: torch.device) -> str:
    """The vendor's name of the device; "CPU" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device, or None where it is not known for sure.

    Args:
        name: see `device_name`; a slice of a device (MIG) has no known peak.
        dtype: compute dtype; only the 16-bit ones have a peak here.
    """
    if dtype not in (torch.bfloat16, torch.float16) or "MIG" in name:
        return None
    if dtype is torch.bfloat16 and "V100" in name:
        return None
    return next((tflops * TERA for part, tflops in PEAK_TFLOPS if re.search(rf"\b{part}\b", name)), None)


def mfu_convention(flops_per_token: int, name: str, peak: float | None) -> str:
    """One line that says what the printed FLOP/s and MFU mean; printed once per run."""
    model = f"model FLOPs: {flops_per_token:.4E} per token (forward + backward, causal half, no recomputation)"
    if peak is None:
        return f"{model}; no MFU: the peak of {name} in this precision is not known"
    return f"{model}; MFU = model FLOP/s / {peak / TERA:.0f} TFLOP/s, the dense 16-bit peak of {name}"


def memory_line(rank: int, iteration: int, device: torch.device) -> str | None:
    """Megatron's memory line, printed once after the first log interval; None without a CUDA device."""
    if device.type != "cuda":
        return None
    sizes = {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }
    line = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    return line + "".join(f" | {name}: {size / MEBI:.2f}" for name, size in sizes.items())


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a CUDA device; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
