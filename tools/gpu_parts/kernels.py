"""Part "kernels" of tools/gpu_check.py: each quantization kernel against a copy of the same bytes, and all of a pass.

Bytes are what a kernel must read and write. A copy of the same process is the measure: what it reaches is what the
memory gives. "permuted" is the order in which the hops send: segments of one peer lie together. Between two runs of a
kernel all others pass over data of their own, so nothing is read from the L2 cache; what is written may end in it,
which makes the smallest size look faster, the copy too.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch
from benchmark_kernels import Piece, build_pieces, time_on

from gpu_parts.part import Report, Task, run_part
from kernels import block_quant
from kernels.formats import BlockFormat
from megazpp.zero.config import GRADIENT_BLOCK, WEIGHT_BLOCK
from megazpp.zero.layout import Segment, plan_message
from megazpp.zero.wire import Codec


class KernelSizes(NamedTuple):
    """
    Attributes:
        elements, blocks: of the data of single kernels.
        of_pass: elements of the whole pass.
        rounds: of which the median counts.
    """

    elements: tuple[int, ...]
    blocks: tuple[int, ...]
    of_pass: int
    rounds: int


SIZES = {
    "gpu": KernelSizes((2**28, 2**30, 2**26), (GRADIENT_BLOCK, WEIGHT_BLOCK), 10**9, 20),
    "rehearsal": KernelSizes((2**12,), (GRADIENT_BLOCK,), 16 * 1024, 1),
}
PEERS = 8
NODES, RANKS_PER_NODE = 2, 8
GOALS = {"quantize": 0.9, "dequantize": 0.9, "sum": 0.8}  # of the copy's rate, from and to int8
NO_GOAL = ("int4", "feedback", "base")
PASS_GOAL_SECONDS = 1.3e-3


def measure(task: Task, report: Report) -> None:
    """One row per kernel and size, then the pass."""
    sizes = SIZES[task.sizes]
    if task.rehearse:
        use_interpreter(report)
    whole_pass(task.device, sizes, report)
    for elements in sizes.elements:
        for block in sizes.blocks:
            pieces = [
                piece
                for piece in build_pieces(elements, block, PEERS, task.device) + permuted(elements, block, task.device)
                if block == GRADIENT_BLOCK or "sum" not in piece.name
            ]
            add_rows(pieces, time_on(task.device, pieces, sizes.rounds), f"block {block}", report)
            if report.elapsed() > 0.8 * task.seconds:
                report.note(f"no time for more than {elements} elements in blocks of {block}")
                return


def use_interpreter(report: Report) -> None:
    """Run the GPU's kernels on CPU tensors."""
    triton = block_quant.TRITON
    if triton is None or not os.environ.get("TRITON_INTERPRET"):
        report.note("Triton is not here, so the CPU's implementation is rehearsed")
        return
    block_quant._implementation = lambda function, tensor: triton


def add_rows(pieces: list[Piece], seconds: list[float], what: str, report: Report) -> None:
    """The first piece is the copy."""
    copied = pieces[0].num_bytes / seconds[0]
    for piece, taken in zip(pieces, seconds, strict=True):
        goal = GOALS.get(piece.name.split()[0])
        counts = goal is not None and "int8" in piece.name and not any(word in piece.name for word in NO_GOAL)
        report.row(
            kernel=piece.name,
            of=what,
            elements=piece.elements,
            us=round(taken * 1e6, 1),
            GB_per_s=round(piece.num_bytes / taken / 1e9, 1),
            of_copy=f"{piece.num_bytes / taken / copied:.0%}",
            goal=f"{goal:.0%}" if counts else "",
        )


def permuted(n: int, block: int, device: str) -> list[Piece]:
    """bf16 [nodes, ranks, S] to messages by rank of a node, and back."""
    fmt = BlockFormat(8, block)
    codec = one_segment(n // (NODES * PEERS), fmt, torch.bfloat16)
    x = torch.randn(NODES, PEERS, codec.layout.size, device=device).to(torch.bfloat16)
    messages = codec.empty(PEERS, NODES, device=x.device)
    moved = x.numel() * (2 + fmt.bits_per_element(codec.layout.size) / 8)
    return [
        Piece("quantize bf16 to int8, permuted", x.numel(), moved, lambda: codec.pack(x.transpose(0, 1), messages)),
        Piece("dequantize int8 to bf16, permuted", x.numel(), moved, lambda: codec.unpack(messages, x.transpose(0, 1))),
    ]


def whole_pass(device: str, sizes: KernelSizes, report: Report) -> None:
    """Everything that qgZ computes for n bf16 gradients on one rank, as zero/reduce.py does it."""
    n = sizes.of_pass
    size = n // (NODES * RANKS_PER_NODE)
    inside = one_segment(size, BlockFormat(8, GRADIENT_BLOCK), torch.bfloat16)
    across = one_segment(size, BlockFormat(4, GRADIENT_BLOCK), torch.float32)
    gradients = torch.randn(NODES, RANKS_PER_NODE, size, device=device, dtype=torch.bfloat16)
    sent = inside.empty(RANKS_PER_NODE, NODES, device=gradients.device)
    partial_sums, result = torch.empty(NODES, size, device=device), torch.empty(1, size, device=device)
    crossing = across.empty(NODES, device=gradients.device)
    errors = across.new_errors(NODES, device=gradients.device)
    wire8, wire4 = (codec.layout.message_bytes / size for codec in (inside, across))
    source, target = (torch.randn(min(n, 2**28), device=device) for _ in range(2))
    pieces = [
        Piece("memcpy fp32", source.numel(), 8 * source.numel(), lambda: target.copy_(source)),
        Piece("pass: pack int8", n, n * (2 + wire8), lambda: inside.pack(gradients.transpose(0, 1), sent)),
        Piece(
            f"pass: sum of {RANKS_PER_NODE}",
            n,
            n * wire8 + 4 * NODES * size,
            lambda: inside.unpack_sum(sent, partial_sums, accumulate=False),
        ),
        Piece(
            "pass: pack int4, feedback",
            NODES * size,
            NODES * size * (4 + wire4 + 2 * (1 + 2 / GRADIENT_BLOCK)),
            lambda: across.pack(partial_sums, crossing, errors=errors),
        ),
        Piece(
            f"pass: sum of {NODES}",
            NODES * size,
            NODES * size * wire4 + 4 * size,
            lambda: across.unpack_sum(crossing.unsqueeze(1), result, accumulate=False),
        ),
    ]
    seconds = time_on(device, pieces, sizes.rounds)
    add_rows(pieces, seconds, f"{NODES} x {RANKS_PER_NODE} ranks", report)
    total, moved = sum(seconds[1:]), sum(piece.num_bytes for piece in pieces[1:])
    copied = pieces[0].num_bytes / seconds[0]
    report.row(
        kernel="pass: all of it",
        of=f"{NODES} x {RANKS_PER_NODE} ranks",
        elements=n,
        us=round(total * 1e6, 1),
        GB_per_s=round(moved / total / 1e9, 1),
        of_copy=f"{moved / total / copied:.0%}",
        goal=f"{PASS_GOAL_SECONDS * 1e6:.0f} us for 1e9",
    )


def one_segment(size: int, fmt: BlockFormat, dtype: torch.dtype) -> Codec:
    """Messages of one weight matrix of `size` elements per rank."""
    segments = (Segment(name="weight", start=0, size=size, exact=False),)
    return Codec(plan_message(segments, fmt, exact_itemsize=dtype.itemsize), dtype)


if __name__ == "__main__":
    sys.exit(run_part(measure))
