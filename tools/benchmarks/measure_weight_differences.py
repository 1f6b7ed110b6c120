"""Errors of weights that were sent as differences, per wire format, along a real run.

python tools/benchmarks/measure_weight_differences.py -- --train-iters 300 --lr 1e-3 --min-lr 1e-4

Trains a model (default: the tiny one on the text that ships with the program) in one process. Every row of the table is
a copy R of its matrices that starts as their bf16 and, after each optimizer step, receives what changed:

    R = round(R + dequantize(quantize(bf16(w) - R)))

The error is that of R against the optimizer's fp32 weights, |R - w| / |w| over all matrices. What stands after
`--` goes to pretrain_gpt.py's parser; one process, no tensor parallelism.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import tools_path  # noqa: F401
import torch
from measure_gradient_noise import CPU, open_training, power
from torch import Tensor

from kernels.block_quant import RangeTable, pack, range_table, unpack, unpack_onto
from kernels.formats import BlockFormat, plan_row
from megazpp.arguments import ParsedRun, parse_run_config
from megazpp.checks import RunPlan, check_run_config
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker
from megazpp.program import flags_of, program
from megazpp.run import Job, run_on_ranks
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import WEIGHT_BLOCK

ROOT = Path(__file__).resolve().parents[2]
ALONE = Cluster(num_nodes=1, ranks_per_node=1)
SETTLED = 20  # steps, those of the steepest warm-up, that the mean leaves out

Receive = Callable[[Tensor, Tensor], object]  # (weights bf16 [n], R [n], which changes)


@program
def main(argv: list[str]) -> int:
    parser = flags_of(__doc__)
    parser.add_argument("--block-size", type=int, default=128, help="elements of a block of differences")
    parser.add_argument("flags", nargs="*", help="flags for pretrain_gpt.py, after --")
    args = parser.parse_args(argv)
    launch = LaunchConfig(nproc=1)

    def prepare() -> Job:
        parsed = parse_run_config(args.flags, ROOT)
        plan = check_run_config(parsed.config, ALONE, device_type=CPU.type)
        return Job(find_place(launch), launch, functools.partial(report, args.block_size, parsed, plan))

    return run_on_ranks(prepare)


def report(block_size: int, parsed: ParsedRun, plan: RunPlan, worker: Worker) -> None:
    dims = ParallelDims(plan_dims(ParallelConfig(), ALONE, zero_stage=0), device_type=CPU.type)
    print(table(measure(parsed, plan, dims, rows(block_size))))


def rows(block_size: int) -> dict[str, tuple[Receive, torch.dtype]]:
    """Name -> how its copy receives weights, and the dtype of the copy."""
    found: dict[str, tuple[Receive, torch.dtype]] = {
        "bf16 weights": (lambda w, r: r.copy_(w), torch.bfloat16),
        f"int8 weights, blocks of {WEIGHT_BLOCK}": (_weights(BlockFormat(8, WEIGHT_BLOCK)), torch.bfloat16),
    }
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        found[f"int4 differences, R in {name}"] = _differences(BlockFormat(4, block_size)), dtype
    return found


def measure(
    parsed: ParsedRun, plan: RunPlan, dims: ParallelDims, receivers: dict[str, tuple[Receive, torch.dtype]]
) -> dict[str, list[float]]:
    """Name -> the error after each step of training."""
    errors: dict[str, list[float]] = {name: [] for name in receivers}
    with open_training(parsed, plan, dims) as training:
        weights = [p.detach().view(-1) for p in training.parameters if p.ndim > 1]
        copies = {name: [w.bfloat16().to(dtype) for w in weights] for name, (_, dtype) in receivers.items()}
        for _ in range(plan.batches.total_iterations):
            training.update_(training.next_gradients())
            signal = sum(map(power, weights))
            for name, (receive, _) in receivers.items():
                noise = 0.0
                for weight, copy in zip(weights, copies[name], strict=True):
                    receive(weight.bfloat16(), copy)
                    noise += power(copy - weight)
                errors[name].append((noise / signal) ** 0.5)
    return errors


def table(errors: dict[str, list[float]]) -> str:
    """Markdown."""
    lines = [f"| what is sent | mean after step {SETTLED} | worst | last |", "|---|---|---|---|"]
    for name, found in errors.items():
        mean = statistics.mean(found[SETTLED:] or found)
        lines.append(f"| {name} | {mean:.5f} | {max(found):.5f} | {found[-1]:.5f} |")
    return "\n".join(lines)


def _differences(fmt: BlockFormat) -> Receive:
    def receive(w: Tensor, r: Tensor) -> None:
        messages, table = _message(fmt, w)
        pack(w, table, messages=messages, base=r)
        unpack_onto(messages, table, out=r)

    return receive


def _weights(fmt: BlockFormat) -> Receive:
    def receive(w: Tensor, r: Tensor) -> None:
        messages, table = _message(fmt, w)
        pack(w, table, messages=messages)
        unpack(messages, table, out=r)

    return receive


def _message(fmt: BlockFormat, w: Tensor) -> tuple[Tensor, RangeTable]:
    table = range_table(plan_row(w.numel(), fmt), w.dtype)
    return torch.empty(table.layout.message_bytes, dtype=torch.uint8), table


if __name__ == "__main__":
    raise SystemExit(main())
