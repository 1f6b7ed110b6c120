"""Part "kernels" of tools/gpu_check.py: products of the head by its width, quantization kernels beside a copy.

Bytes are those that a kernel must read and write, and a copy of the same process is the measure. Between two runs of a
kernel all others pass over data of their own, so nothing is read from the L2 cache.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from benchmark_kernels import Piece, build_pieces, time_on

from kernels import block_quant
from megazpp.base.formatting import TERA
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.cross_entropy import linear_cross_entropy
from megazpp.zero.config import GRADIENT_BLOCK, WEIGHT_BLOCK

VOCAB, ROWS = 50257, 50304  # GPT-2's tokens, and padded
WIDTHS = (VOCAB, 12565, ROWS)  # columns of logits: all, a quarter of them, a multiple of 128
GOALS = {"quantize": "90%", "dequantize": "90%", "sum": "80%"}  # of the copy's rate, from and to int8


def main(device: str, what: str) -> None:
    """Print rows as JSON: of the head, or of the quantization of so many elements; medians of rounds."""
    cuda, triton = device == "cuda", block_quant.TRITON
    rounds = 20 if cuda else 1
    for hidden, tokens in (((768, 16384), (2048, 8192)) if cuda else ((8, 16),)) if what == "head" else ():
        pieces = head(hidden, tokens, device)
        for piece, seconds in zip(pieces, time_on(device, pieces, rounds), strict=True):
            cells = {"head": piece.name, "columns": piece.elements, "tokens": tokens, "channels": hidden}
            rate = round(6 * tokens * hidden * piece.elements / seconds / TERA, 1)
            print(json.dumps(cells | {"ms": round(seconds * 1e3, 3), "TFLOP_per_s": rate}))
    if not cuda and triton is not None and os.environ.get("TRITON_INTERPRET"):
        block_quant._implementation = partial(lambda found, tensor: found, triton)  # the GPU's, interpreted
    for block in (GRADIENT_BLOCK, WEIGHT_BLOCK) if what != "head" else ():
        pieces = build_pieces(int(what), block, 8, device)
        timings = time_on(device, pieces, rounds)
        copied = pieces[0].num_bytes / timings[0]
        for piece, seconds in zip(pieces, timings, strict=True):
            rate, counts = piece.num_bytes / seconds, "int8" in piece.name and "," not in piece.name
            cells = {"kernel": piece.name, "block": block, "elements": piece.elements, "us": round(seconds * 1e6, 1)}
            cells |= {"GB_per_s": round(rate / 1e9, 1), "of_copy": f"{rate / copied:.0%}"}
            print(json.dumps(cells | {"goal": GOALS.get(piece.name.split()[0], "") if counts else ""}))


def head(hidden: int, tokens: int, device: str) -> list[Piece]:
    """The three products of logits with so many columns, and the product's own head, forward and backward."""
    x, weight = (torch.randn(n, hidden, device=device).bfloat16().requires_grad_() for n in (tokens, ROWS))
    labels, grads = torch.randint(VOCAB, (tokens,), device=device), torch.randn(tokens, ROWS, device=device).bfloat16()

    def ours() -> None:
        fuse = device == "cuda"
        losses, _ = linear_cross_entropy(x, weight, labels, tp=MeshAxis("tp"), vocab_size=VOCAB, fuse=fuse)
        losses.mean().backward()

    def products(grad: torch.Tensor) -> Callable[[], object]:
        rows, inputs = weight.detach()[: grad.shape[1]], x.detach()
        return lambda: (F.linear(inputs, rows), grad @ rows, grad.t() @ inputs)

    plain = [Piece("three products", width, 0, products(grads[:, :width].contiguous())) for width in WIDTHS]
    return [*plain, Piece("linear_cross_entropy", VOCAB, 0, ours)]


if __name__ == "__main__":
    main(*sys.argv[1:])
