"""Time block quantization kernels, and compare their memory bandwidth with a plain copy.

python tools/benchmarks/benchmark_kernels.py --elements 16777216 --block-size 128 --threads 1

The bytes of a kernel are the bytes that it must read and write, each counted once. "of memcpy" is its rate in bytes per
second, relative to a copy of an fp32 buffer in the same rounds. Each round times every kernel once, and the median over
rounds is printed. On the CPU with one thread, the clock is the thread's CPU time, which other processes affect less.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import flags_of, program
from megazpp.kernels.block_quant import Feedback, backend, pack, range_table, unpack, unpack_onto, unpack_sum
from megazpp.kernels.formats import BlockFormat, plan_row

BUSY_CYCLES = 1_000_000  # about half a millisecond, longer than the host needs to launch a kernel
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Piece(NamedTuple):
    """A function call to time.

    Attributes:
        name: name in the table.
        elements: number of elements that the call produces or consumes.
        num_bytes: number of bytes that it must read and write.
        run: the call.
    """

    name: str
    elements: int
    num_bytes: float
    run: Callable[[], object]


@program
def main(argv: list[str]) -> None:
    """Time all kernels and print the table."""
    parser = flags_of(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24, help="number of elements (default: 16777216)")
    parser.add_argument("--block-size", type=int, default=128, help="number of elements per block (default: 128)")
    parser.add_argument("--peers", type=int, default=8, help="number of segments that `sum` adds (default: 8)")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads of torch (default: 1)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: cuda if there is a GPU)",
    )
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {args.threads} thread(s): {backend(args.device)[1]}")
    pieces = build_pieces(args.elements, args.block_size, args.peers, args.device)
    show(pieces, time_on(args.device, pieces, args.rounds, args.threads))


def build_pieces(n: int, block_size: int, peers: int, device: str) -> list[Piece]:
    """Return the calls to time: the copy first, then each kernel for each format and dtype.

    Args:
        n: number of elements.
        block_size: number of elements per block.
        peers: number of segments that the sum adds.
        device: device of the data.
    """
    source, target = (torch.randn(n, device=device) for _ in range(2))
    pieces = [Piece("memcpy fp32", n, 8 * n, lambda: target.copy_(source))]
    base = torch.randn(n, device=device).to(torch.bfloat16)
    for fmt in (BlockFormat(8, block_size), BlockFormat(4, block_size)):
        bits = fmt.bits
        wire, table = fmt.bits_per_element(n) / 8, range_table(plan_row(n, fmt), torch.float32)
        for name, dtype in DTYPES.items():
            x = torch.randn(n, device=device).to(dtype)
            messages = torch.zeros(table.layout.message_bytes, dtype=torch.uint8, device=device)
            moved = n * (x.element_size() + wire)
            quantize = partial(pack, x, table, messages=messages)
            dequantize = partial(unpack, messages, table, out=x)
            pieces.append(Piece(f"quantize {name} to int{bits}", n, moved, quantize))
            pieces.append(Piece(f"dequantize int{bits} to {name}", n, moved, dequantize))
            difference = partial(quantize, base=base)
            add = partial(unpack_onto, messages, table, out=x)
            pieces.append(Piece(f"quantize {name} to int{bits}, base bf16", n, moved + 2 * n, difference))
            pieces.append(Piece(f"add int{bits} to {name}", n, moved + n * x.element_size(), add))
        errors, kept = Feedback.zeros((), table, device), 2 * n * (1 + 2 / block_size)
        with_feedback = partial(quantize, errors=errors)
        pieces.append(Piece(f"quantize {name} to int{bits}, feedback", n, moved + kept, with_feedback))

        table = range_table(plan_row(n // peers, fmt), torch.float32)
        received = torch.zeros(peers, table.layout.message_bytes, dtype=torch.uint8, device=device)
        pack(torch.randn(peers, n // peers, device=device), table, messages=received)
        add = partial(unpack_sum, received, table, out=torch.empty(n // peers, device=device))
        moved = n // peers * (peers * fmt.bits_per_element(n // peers) / 8 + 4)
        pieces.append(Piece(f"sum {peers} int{bits} to fp32", n // peers, moved, add))
    return pieces


def time_on(device: str, pieces: list[Piece], rounds: int, threads: int = 1) -> list[float]:
    """Return the median seconds of each call.

    An additional first round, with page faults and compilation, is dropped.

    Args:
        device: "cuda" or "cpu".
        pieces: calls to time.
        rounds: number of rounds.
        threads: CPU threads of torch. With one thread its CPU time is measured, otherwise wall time.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds = [
        [gpu_seconds(piece.run) if device == "cuda" else host_seconds(piece.run, clock) for piece in pieces]
        for _ in range(rounds + 1)
    ]
    return [statistics.median(times) for times in zip(*seconds[1:], strict=True)]


def gpu_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a call on the GPU, between two events.

    The GPU is kept busy until the host has launched the call and both events, so that launch times are not included.
    """
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e-3


def host_seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of a call by the given clock."""
    started = clock()
    run()
    return clock() - started


def show(pieces: list[Piece], seconds: list[float]) -> None:
    """Print the table of all calls. The first one is the copy with which the others are compared."""
    copied = pieces[0].num_bytes / seconds[0]
    print(f"{'':32s} {'ms':>9s} {'Gelement/s':>11s} {'GB/s':>8s} {'of memcpy':>10s}")
    for piece, time_taken in zip(pieces, seconds, strict=True):
        rate = piece.num_bytes / time_taken
        print(
            f"{piece.name:32s} {time_taken * 1e3:9.3f} {piece.elements / time_taken / 1e9:11.2f} {rate / 1e9:8.1f}"
            f" {rate / copied:10.0%}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
