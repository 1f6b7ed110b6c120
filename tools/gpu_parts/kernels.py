"""Part "kernels" of tools/gpu_check.py: each quantization kernel against a copy of the same bytes, and all of a pass.

Bytes are what a kernel must read and write. A copy of the same process is the measure: what it reaches is what the
memory gives. "permuted" is the order in which the hops send: segments of one peer lie together. Between two runs of a
kernel all others pass over data of their own, so nothing is read from the L2 cache; what is written may end in it,
which makes the smallest size look faster, the copy too.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from benchmark_kernels import Piece, build_pieces, time_on

from gpu_parts.part import Report, Task
from kernels import block_quant
from kernels.formats import BlockFormat
from megazpp.zero.config import GRADIENT_BLOCK, WEIGHT_BLOCK
from megazpp.zero.layout import Segment, plan_message
from megazpp.zero.wire import Codec

NODES, RANKS_PER_NODE = 2, 8
GOALS = {"quantize": "90%", "dequantize": "90%", "sum": "80%"}  # of the copy's rate, from and to int8
WHOLE_PASS, PASS_GOAL = "pass: all of it", "1300 us for 1e9"


def measure(task: Task, report: Report) -> None:
    """The pass, then one row per kernel and size; medians of rounds."""
    rounds, device = task.size(20, 1), task.device
    if task.rehearse:
        use_interpreter(report)
    whole_pass(device, task.size(10**9, 16 * 1024), rounds, report)
    for elements in task.size((2**28, 2**30, 2**26), (2**12,)):
        for block in task.size((GRADIENT_BLOCK, WEIGHT_BLOCK), (GRADIENT_BLOCK,)):
            pieces = build_pieces(elements, block, RANKS_PER_NODE, device) + permuted(elements, block, device)
            pieces = [piece for piece in pieces if block == GRADIENT_BLOCK or "sum" not in piece.name]
            add_rows(pieces, time_on(device, pieces, rounds), f"block {block}", report)
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
        name, rate = piece.name, piece.num_bytes / taken
        counts = "int8" in name and not any(word in name for word in ("int4", "feedback", "base"))
        report.row(
            kernel=name,
            of=what,
            elements=piece.elements,
            us=round(taken * 1e6, 1),
            GB_per_s=round(rate / 1e9, 1),
            of_copy=f"{rate / copied:.0%}",
            goal=PASS_GOAL if name == WHOLE_PASS else GOALS.get(name.split()[0], "") if counts else "",
        )


def permuted(n: int, block: int, device: str) -> list[Piece]:
    """bf16 [nodes, ranks, S] to messages by rank of a node, and back."""
    fmt = BlockFormat(8, block)
    codec = one_segment(n // (NODES * RANKS_PER_NODE), fmt, torch.bfloat16)
    x = torch.randn(NODES, RANKS_PER_NODE, codec.layout.size, device=device).to(torch.bfloat16)
    messages = codec.empty(RANKS_PER_NODE, NODES, device=x.device)
    moved = x.numel() * (2 + fmt.bits_per_element(codec.layout.size) / 8)
    return [
        Piece("quantize bf16 to int8, permuted", x.numel(), moved, partial(codec.pack, x.transpose(0, 1), messages)),
        Piece(
            "dequantize int8 to bf16, permuted", x.numel(), moved, partial(codec.unpack, messages, x.transpose(0, 1))
        ),
    ]


def whole_pass(device: str, n: int, rounds: int, report: Report) -> None:
    """Everything that qgZ computes for n bf16 gradients on one rank, as zero/reduce.py does it."""
    size = n // (NODES * RANKS_PER_NODE)
    sums = NODES * size
    inside = one_segment(size, BlockFormat(8, GRADIENT_BLOCK), torch.bfloat16)
    across = one_segment(size, BlockFormat(4, GRADIENT_BLOCK), torch.float32)
    gradients = torch.randn(NODES, RANKS_PER_NODE, size, device=device, dtype=torch.bfloat16)
    sent = inside.empty(RANKS_PER_NODE, NODES, device=gradients.device)
    partial_sums, result = torch.empty(NODES, size, device=device), torch.empty(1, size, device=device)
    crossing = across.empty(NODES, device=gradients.device)
    errors = across.new_errors(NODES, device=gradients.device)
    wire8, wire4 = (codec.layout.message_bytes / size for codec in (inside, across))
    source, target = (torch.randn(min(n, 2**28), device=device) for _ in range(2))
    sum_inside = partial(inside.unpack_sum, sent, partial_sums, accumulate=False)
    sum_across = partial(across.unpack_sum, crossing.unsqueeze(1), result, accumulate=False)
    pack_across, kept = partial(across.pack, partial_sums, crossing, errors=errors), 2 * (1 + 2 / GRADIENT_BLOCK)
    pieces = [
        Piece("memcpy fp32", source.numel(), 8 * source.numel(), lambda: target.copy_(source)),
        Piece("pass: pack int8", n, n * (2 + wire8), partial(inside.pack, gradients.transpose(0, 1), sent)),
        Piece(f"pass: sum of {RANKS_PER_NODE}", n, n * wire8 + 4 * sums, sum_inside),
        Piece("pass: pack int4, feedback", sums, sums * (4 + wire4 + kept), pack_across),
        Piece(f"pass: sum of {NODES}", sums, sums * wire4 + 4 * size, sum_across),
    ]
    seconds = time_on(device, pieces, rounds)
    whole = Piece(WHOLE_PASS, n, sum(piece.num_bytes for piece in pieces[1:]), lambda: None)
    add_rows([*pieces, whole], [*seconds, sum(seconds[1:])], f"{NODES} x {RANKS_PER_NODE} ranks", report)


def one_segment(size: int, fmt: BlockFormat, dtype: torch.dtype) -> Codec:
    """Messages of one weight matrix of `size` elements per rank."""
    segments = (Segment(name="weight", start=0, size=size, exact=False),)
    return Codec(plan_message(segments, fmt, exact_itemsize=dtype.itemsize), dtype)
