"""Time the kernels of block quantization and of weight deltas, and compare their bytes per second with a plain copy.

python tools/benchmarks/benchmark_kernels.py --elements 16777216 --block-size 128 --threads 1

The table counts the bytes that a function must read and write, each once. The column "of memcpy" is the ratio of these
bytes per second to the bytes per second of a plain copy of an fp32 buffer, which the same process times. A round times
every function once, and the table has medians over rounds. The column "first ms" has the time of the first call, which
compiles kernels on a GPU. On a CPU with one thread, the clock is the thread's CPU time, which other load on the machine
affects less.

A lossless weight delta encodes how the 20th AdamW step with the given learning rate changes bf16 weights, at most 2^28
of them. For a delta, the column Gelement/s counts weights of 2 bytes. Twice this column is the rate in GB of weights
per second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

import torch

from megazpp.base.program import flags_of, program
from megazpp.kernels.block_quant import Feedback, backend, pack, range_table, unpack, unpack_onto, unpack_sum
from megazpp.kernels.formats import BlockFormat, align, plan_row
from megazpp.kernels.weight_delta import decode, encode, message_bytes, numbers

BUSY_CYCLES = 1_000_000  # GPU cycles, about half a millisecond: longer than the host takes to launch a kernel
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATES = (3e-3, 3e-4, 1e-5, 1e-6)  # at 3e-3 nearly all bf16 weights change in a step, at 1e-6 few
DELTA_ELEMENTS = 1 << 28  # largest number of weights of a timed delta, more than a sharding unit usually has
DIFFERENT = 1 << 20  # number of different weights; larger tensors repeat them


class Piece(NamedTuple):
    """A function call to time.

    Attributes:
        name: name in the table.
        elements: number of elements that the call produces or consumes.
        num_bytes: bytes that the call must read and write.
        run: function without arguments that makes the call.
    """

    name: str
    elements: int
    num_bytes: float
    run: Callable[[], object]


@program
def main(argv: list[str]) -> None:
    """Parse the command line, time all functions and print the table."""
    parser = flags_of(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24, help="number of elements to quantize")
    parser.add_argument("--block-size", type=int, default=128, help="number of elements per block")
    parser.add_argument("--peers", type=int, default=8, help="number of messages that the sum adds up")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds whose median is printed")
    parser.add_argument("--threads", type=int, default=1, help="number of torch's CPU threads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {args.threads} thread(s): {backend(args.device)[1]}")
    pieces = build_pieces(args.elements, args.block_size, args.peers, args.device)
    show(pieces, *time_on(args.device, pieces, args.rounds, args.threads))


def build_pieces(n: int, block_size: int, peers: int, device: str) -> list[Piece]:
    """Return the calls that the benchmark times.

    The first call is a plain copy of an fp32 tensor, the baseline. The others quantize, dequantize and sum tensors, for
    every wire format and dtype, and encode and decode weight deltas.

    Args:
        n: number of elements.
        block_size: number of elements per block.
        peers: number of quantized messages that the timed sum adds up.
        device: "cpu" or "cuda".
    """
    source, target = (torch.randn(n, device=device) for _ in range(2))
    pieces = [Piece("memcpy fp32", n, 8 * n, lambda: target.copy_(source))]
    base = torch.randn(n, device=device).to(torch.bfloat16)
    for fmt in (BlockFormat(8, block_size), BlockFormat(4, block_size)):
        bits = fmt.bits
        wire, table = fmt.bits_per_element(n) / 8, range_table(plan_row(n, fmt), torch.float32)
        # ---- add calls that pack values into a message and unpack a message, also as differences from a base
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
        # ---- add a call that packs values with error feedback; it also reads and writes the stored errors
        errors, kept = Feedback.zeros((), table, device), 2 * n * (1 + 2 / block_size)
        with_feedback = partial(quantize, errors=errors)
        pieces.append(Piece(f"quantize {name} to int{bits}, feedback", n, moved + kept, with_feedback))

        # ---- add a call that unpacks and sums the messages of all peers
        table = range_table(plan_row(n // peers, fmt), torch.float32)
        received = torch.zeros(peers, table.layout.message_bytes, dtype=torch.uint8, device=device)
        pack(torch.randn(peers, n // peers, device=device), table, messages=received)
        add = partial(unpack_sum, received, table, out=torch.empty(n // peers, device=device))
        moved = n // peers * (peers * fmt.bits_per_element(n // peers) / 8 + 4)
        pieces.append(Piece(f"sum {peers} int{bits} to fp32", n // peers, moved, add))
    return pieces + [piece for lr in LEARNING_RATES for piece in delta_pieces(min(n, DELTA_ELEMENTS), lr, device)]


def delta_pieces(n: int, lr: float, device: str) -> list[Piece]:
    """Return the calls that encode and decode a lossless weight delta.

    Decoding works in place. The call therefore decodes two deltas, to the new weights and back to the old ones.

    Args:
        n: number of weights.
        lr: learning rate of the AdamW step between old and new weights.
        device: "cpu" or "cuda".
    """
    new, old = (weights.to(device) for weights in weights_after_and_before_step(n, lr))
    message = torch.zeros(message_bytes(n), dtype=torch.uint8, device=device)
    encode(new, old, message)
    needed = int(numbers(message.unsqueeze(0))[0, 0])
    capacity = align(needed + needed // 8)  # with a margin of an eighth, as in training
    forth, back = torch.zeros(2, message_bytes(n, capacity), dtype=torch.uint8, device=device)
    encode(old, new, back)
    weights = old.clone().unsqueeze(0)

    def decode_both() -> None:
        decode(forth.unsqueeze(0), weights)
        decode(back.unsqueeze(0), weights)

    encode(new, old, forth)
    return [
        Piece(f"encode delta, lr {lr:g}", n, 4 * n + needed, partial(encode, new, old, forth)),
        Piece(f"decode delta, lr {lr:g}", 2 * n, 2 * (4 * n + needed), decode_both),
    ]


def weights_after_and_before_step(n: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 weights [n] after and before the 20th AdamW step.

    The gradient of a weight is a constant plus noise in each step. The constants differ between weights, with a
    standard deviation of 0.5, and the noise has a standard deviation of 1.
    """
    generator = torch.Generator().manual_seed(1)
    weights = torch.nn.Parameter(0.02 * torch.randn(min(n, DIFFERENT), generator=generator))
    optimizer = torch.optim.AdamW([weights], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    mean = 0.5 * torch.randn(len(weights), generator=generator)
    for _ in range(20):
        old = weights.detach().to(torch.bfloat16)
        weights.grad = mean + torch.randn(len(weights), generator=generator)
        optimizer.step()
    new, old = (x.repeat(-(-n // len(x)))[:n] for x in (weights.detach().to(torch.bfloat16), old))
    return new, old


def time_on(device: str, pieces: list[Piece], rounds: int, threads: int = 1) -> tuple[list[float], list[float]]:
    """Call each function once, and then `rounds` more times, and time every call.

    Args:
        device: "cpu" or "cuda".
        pieces: functions to call.
        rounds: number of calls of each function after the first.
        threads: number of CPU threads. On a CPU with one thread, the clock is the CPU time of the thread.

    Returns:
        for each function the median seconds of the calls after the first, and the seconds of the first call, which
        compiles kernels on a GPU.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds = [
        [gpu_seconds(piece.run) if device == "cuda" else host_seconds(piece.run, clock) for piece in pieces]
        for _ in range(rounds + 1)
    ]
    return [statistics.median(times) for times in zip(*seconds[1:], strict=True)], seconds[0]


def gpu_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of `run` on the GPU, between two events.

    The GPU is kept busy until the host has launched both events and the call, so that launch latency does not count.
    """
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e-3


def host_seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of `run` on the CPU, by the given clock."""
    started = clock()
    run()
    return clock() - started


def show(pieces: list[Piece], seconds: list[float], first: list[float]) -> None:
    """Print the table; the first of `pieces` is the copy that all others are compared with."""
    copied = pieces[0].num_bytes / seconds[0]
    print(f"{'':32s} {'ms':>9s} {'first ms':>9s} {'Gelement/s':>11s} {'GB/s':>8s} {'of memcpy':>10s}")
    for piece, time_taken, first_time in zip(pieces, seconds, first, strict=True):
        rate = piece.num_bytes / time_taken
        print(
            f"{piece.name:32s} {time_taken * 1e3:9.3f} {first_time * 1e3:9.1f}"
            f" {piece.elements / time_taken / 1e9:11.2f} {rate / 1e9:8.1f} {rate / copied:10.0%}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
