"""Part "attention" of tools/gpu_check.py: the kernels among which torch chooses, in the layout of model/attention.py.

torch tries its kernels in an order that depends on the device: cuDNN first on sm_90 and sm_100, else flash. The row of
torch's choice names the order here; whether another would be faster is seen beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from benchmark_kernels import Piece, time_on
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.part import Report, Task, run_part
from megazpp.formatting import TERA
from megazpp.model.attention_kernels import causal_kernels


class Shape(NamedTuple):
    """Of one layer's attention; named after the config."""

    name: str
    batch: int
    seq: int
    heads: int
    head_size: int


SIZES = {
    "gpu": (
        Shape("gpt_125m", 8, 2048, 12, 64),
        Shape("gpt_1b3", 4, 2048, 16, 128),
        Shape("gpt_6b7", 4, 2048, 32, 128),
    ),
    "rehearsal": (Shape("toy", 1, 32, 2, 16),),
}
ROUNDS = {"gpu": 20, "rehearsal": 1}
BACKENDS = {
    "torch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measure(task: Task, report: Report) -> None:
    """One row per shape and kernel: forward and backward, causal."""
    for shape in SIZES[task.sizes]:
        run = layer(shape, task.device)
        flops = 7 * shape.batch * shape.heads * shape.seq**2 * shape.head_size  # 2 products forward, 5 backward, half
        for name, backend in BACKENDS.items():
            if backend is None:
                name += f" ({', '.join(causal_kernels(torch.device(task.device)))})"
            with only(backend):
                try:
                    run()
                except RuntimeError as error:
                    report.row(shape=shape.name, kernel=name, ms="", TFLOP_per_s=str(error).splitlines()[0][:60])
                    continue
                seconds = time_on(task.device, [Piece(name, 0, 0, run)], ROUNDS[task.sizes])[0]
            report.row(
                shape=shape.name,
                kernel=name,
                ms=round(seconds * 1e3, 3),
                TFLOP_per_s=round(flops / seconds / TERA, 1),
            )


def only(backend: SDPBackend | None) -> AbstractContextManager[None]:
    return nullcontext() if backend is None else sdpa_kernel(backend)


def layer(shape: Shape, device: str) -> Callable[[], None]:
    """Forward and backward of one layer's attention."""
    sizes = (shape.seq, shape.batch, shape.heads, 3, shape.head_size)
    fused = torch.randn(sizes, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(shape.batch, shape.heads, shape.seq, shape.head_size, device=device, dtype=torch.bfloat16)

    def run() -> None:
        q, k, v = (part.squeeze(3).permute(1, 2, 0, 3) for part in fused.split(1, dim=3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(upstream)
        fused.grad = None

    return run


if __name__ == "__main__":
    sys.exit(run_part(measure))
