"""Part "attention" of tools/gpu_check.py: the kernels among which torch chooses, in the layout of model/attention.py.

torch tries its kernels in an order that depends on the device: cuDNN first on sm_90 and sm_100, else flash. The row of
torch's choice names the order here; whether another would be faster is seen beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from benchmark_kernels import Piece, time_on
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.part import Report, Task
from megazpp.formatting import TERA
from megazpp.model.attention_kernels import causal_kernels

# One layer's attention, named after the config: batch, sequence, heads, head size.
SHAPES = {"gpt_125m": (8, 2048, 12, 64), "gpt_1b3": (4, 2048, 16, 128), "gpt_6b7": (4, 2048, 32, 128)}
TOY = {"toy": (1, 32, 2, 16)}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measure(task: Task, report: Report) -> None:
    """One row per shape and kernel: forward and backward, causal."""
    choice = f"torch's choice ({', '.join(causal_kernels(torch.device(task.device)))})"
    for shape, (batch, seq, heads, head_size) in task.size(SHAPES, TOY).items():
        run = layer(batch, seq, heads, head_size, task.device)
        flops = 7 * batch * heads * seq**2 * head_size  # 2 products forward, 5 backward, half
        for name, backend in {choice: None, **BACKENDS}.items():
            with nullcontext() if backend is None else sdpa_kernel(backend):
                try:
                    run()
                except RuntimeError as error:
                    report.row(shape=shape, kernel=name, ms="", TFLOP_per_s=str(error).splitlines()[0][:60])
                    continue
                [seconds] = time_on(task.device, [Piece(name, 0, 0, run)], task.size(20, 1))
            rate = round(flops / seconds / TERA, 1)
            report.row(shape=shape, kernel=name, ms=round(seconds * 1e3, 3), TFLOP_per_s=rate)


def layer(batch: int, seq: int, heads: int, head_size: int, device: str) -> Callable[[], None]:
    """Forward and backward of one layer's attention."""
    fused = torch.randn(seq, batch, heads, 3, head_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(batch, heads, seq, head_size, device=device, dtype=torch.bfloat16)

    def run() -> None:
        q, k, v = (part.squeeze(3).permute(1, 2, 0, 3) for part in fused.split(1, dim=3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(upstream)
        fused.grad = None

    return run
