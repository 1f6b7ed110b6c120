"""Time block quantization against a plain copy of the same bytes, in the same process and the same rounds.

python tools/benchmarks/benchmark_kernels.py --elements 16777216 --block-size 128 --threads 1

Bytes are what a function must read and write (each once); "of memcpy" is its bytes per second over those of copying a
buffer of fp32. Medians of rounds in which everything is timed once. On the CPU with one thread the clock is that
thread's CPU time, so that neighbours on a shared machine count for less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import tools_path  # noqa: F401
import torch
from entry import leave_with

from kernels.block_quant import (
    Feedback,
    backend,
    dequantize_blockwise,
    dequantize_sum,
    quantize_blockwise,
)
from kernels.formats import BlockFormat

BUSY_CYCLES = 1_000_000  # half a millisecond: more than the host takes to launch a piece
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Piece(NamedTuple):
    """One function call to time: its name, the elements of data it produces or consumes, and the bytes it moves."""

    name: str
    elements: int
    num_bytes: float
    run: Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 24, help="elements of the data")
    parser.add_argument("--block-size", type=int, default=128, help="elements of a block")
    parser.add_argument("--peers", type=int, default=8, help="segments that are summed")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of which the median counts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {args.threads} thread(s): {backend(args.device).implementation}")
    pieces = build_pieces(args.elements, args.block_size, args.peers, args.device)
    report(pieces, time_on(args.device, pieces, args.rounds, args.threads))


def build_pieces(n: int, block_size: int, peers: int, device: str) -> list[Piece]:
    """The copy first, then every function on every format and dtype."""
    source, target = (torch.randn(n, device=device) for _ in range(2))
    pieces = [Piece("memcpy fp32", n, 8 * n, lambda: target.copy_(source))]
    base = torch.randn(n, device=device).to(torch.bfloat16)
    for fmt in (BlockFormat(8, block_size), BlockFormat(4, block_size), BlockFormat(2, block_size)):
        bits = fmt.bits
        wire = fmt.bits_per_element(n) / 8
        for name, dtype in DTYPES.items():
            x = torch.randn(n, device=device).to(dtype)
            payload, scales = quantized((), n, fmt, device)
            data = x.element_size()
            pieces += [
                Piece(f"quantize {name} to int{bits}", n, n * (data + wire), quantize(x, fmt, payload, scales)),
                Piece(f"dequantize int{bits} to {name}", n, n * (wire + data), dequantize(x, fmt, payload, scales)),
            ]
            difference = quantize(x, fmt, payload, scales, base=base)
            pieces += [
                Piece(f"quantize {name} to int{bits}, base bf16", n, n * (data + 2 + wire), difference),
                Piece(f"add int{bits} to {name}", n, n * (wire + 2 * data), add(x, fmt, payload, scales)),
            ]
        feedback, kept = Feedback.zeros((), n, fmt, device), 2 * (1 + 2 / block_size)
        with_feedback = quantize(x, fmt, payload, scales, feedback=feedback)
        pieces.append(Piece(f"quantize {name} to int{bits}, feedback", n, n * (data + wire + kept), with_feedback))
        pieces.append(sum_of(peers, n // peers, fmt, device))
    return pieces


def sum_of(peers: int, n: int, fmt: BlockFormat, device: str) -> Piece:
    """The sum of `peers` segments of n elements to fp32."""
    payload, scales = quantized((peers,), n, fmt, device)
    quantize_blockwise(torch.randn(peers, n, device=device), fmt, payload=payload, scales=scales)
    out, received = torch.empty(n, device=device), peers * fmt.bits_per_element(n) / 8
    return Piece(
        f"sum {peers} int{fmt.bits} to fp32",
        n,
        n * (received + 4),
        lambda: dequantize_sum(payload, scales, fmt, out=out),
    )


def quantized(lead: tuple[int, ...], n: int, fmt: BlockFormat, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.zeros(*lead, fmt.payload_bytes(n), dtype=torch.uint8, device=device)
    return payload, torch.zeros(*lead, fmt.num_blocks(n), dtype=torch.bfloat16, device=device)


def quantize(
    x: torch.Tensor,
    fmt: BlockFormat,
    payload: torch.Tensor,
    scales: torch.Tensor,
    *,
    feedback: Feedback | None = None,
    base: torch.Tensor | None = None,
) -> Callable[[], None]:
    return lambda: quantize_blockwise(x, fmt, payload=payload, scales=scales, feedback=feedback, base=base)


def dequantize(x: torch.Tensor, fmt: BlockFormat, payload: torch.Tensor, scales: torch.Tensor) -> Callable[[], None]:
    return lambda: dequantize_blockwise(payload, scales, fmt, out=x)


def add(x: torch.Tensor, fmt: BlockFormat, payload: torch.Tensor, scales: torch.Tensor) -> Callable[[], None]:
    return lambda: dequantize_sum(payload[None], scales[None], fmt, out=x, accumulate=True)


def time_on(device: str, pieces: list[Piece], rounds: int, threads: int = 1) -> list[float]:
    """Median seconds of every piece; the first round (page faults, compilation) does not count."""
    if device == "cuda":
        return time_on_gpu(pieces, rounds)
    return time_pieces(pieces, rounds, time.thread_time if threads == 1 else time.perf_counter)


def time_on_gpu(pieces: list[Piece], rounds: int) -> list[float]:
    """Between two events on the GPU, which is kept busy until the host has launched the piece and both of them."""
    seconds: list[list[float]] = [[] for _ in pieces]
    for index in range(rounds + 1):
        for piece, times in zip(pieces, seconds, strict=True):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            before.record()
            piece.run()
            after.record()
            after.synchronize()
            if index > 0:
                times.append(before.elapsed_time(after) * 1e-3)
    return [statistics.median(times) for times in seconds]


def time_pieces(pieces: list[Piece], rounds: int, now: Callable[[], float]) -> list[float]:
    """The same by a clock."""
    seconds: list[list[float]] = [[] for _ in pieces]
    for index in range(rounds + 1):
        for piece, times in zip(pieces, seconds, strict=True):
            started = now()
            piece.run()
            if index > 0:
                times.append(now() - started)
    return [statistics.median(times) for times in seconds]


def report(pieces: list[Piece], seconds: list[float]) -> None:
    copied = pieces[0].num_bytes / seconds[0]
    print(f"{'':32s} {'ms':>9s} {'Gelement/s':>11s} {'GB/s':>8s} {'of memcpy':>10s}")
    for piece, time_taken in zip(pieces, seconds, strict=True):
        rate = piece.num_bytes / time_taken
        print(
            f"{piece.name:32s} {time_taken * 1e3:9.3f} {piece.elements / time_taken / 1e9:11.2f} {rate / 1e9:8.1f}"
            f" {rate / copied:10.0%}"
        )


if __name__ == "__main__":
    leave_with(main)
