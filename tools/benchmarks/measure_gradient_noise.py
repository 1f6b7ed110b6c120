"""Signal-to-noise ratio of the reduced gradient, per wire format, on real gradients.

python tools/benchmarks/measure_gradient_noise.py --nodes 2 --ranks-per-node 4 -- @configs/gpt_tiny.args

Trains a model (default: the tiny one on the text that ships with the program), then takes every rank's gradients of
consecutive global batches at fixed weights, and sends these same gradients through the real reduction in each format:
a stand-in model with the same units, whose backward yields them, wrapped by `shard_model`. Noise is the difference to
the sum in fp64; the sum of several steps shows what error feedback is for. What stands after `--` goes to
pretrain_gpt.py's parser; tensor parallelism is not used.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import NamedTuple

import tools_path  # noqa: F401
import torch
from entry import leave_with
from gradient_recording import CPU, Recording, decibels, flat, power, record_gradients
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.arguments import ParsedRun, parse_run_config
from megazpp.checks import RunPlan, check_run_config
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker
from megazpp.run import Job, run_on_ranks
from megazpp.topology.cluster import Cluster
from megazpp.zero import PrecisionConfig, ZeroConfig, shard_model

ROOT = Path(__file__).resolve().parents[2]


class WireFormat(NamedTuple):
    """Bits of a gradient inside a node and across nodes; 16 is bf16. `beta` is the moving average's, of feedback."""

    local_bits: int
    cross_bits: int
    feedback: bool = False
    beta: float = 0.0

    def __str__(self) -> str:
        bits = f"{self.local_bits}/{self.cross_bits}"
        averaged = f", moving average {self.beta:g}" if self.beta else ""
        return f"{bits}, error feedback{averaged}" if self.feedback else bits

    @property
    def zero(self) -> ZeroConfig:
        return ZeroConfig(
            zero_quantized_gradients=True,
            zero_gradient_bits=(self.local_bits, self.cross_bits),
            zero_error_feedback=self.feedback,
            zero_error_feedback_beta=self.beta,
            zero_accumulate_in_bf16=self.cross_bits == 16,
        )

    @property
    def precision(self) -> PrecisionConfig:
        in_bf16 = self.local_bits == 16
        return PrecisionConfig(bf16=in_bf16, grad_reduce_in_bf16=in_bf16)


FORMATS = [
    WireFormat(16, 16),
    *(WireFormat(*bits, on) for bits in ((8, 8), (8, 4), (4, 4)) for on in (False, True)),
    WireFormat(8, 4, True, beta=0.8),
]


class Ratios(NamedTuple):
    """Signal-to-noise ratios in dB: of one step (noise averaged over the steps) and of the sum of all steps."""

    one_step: float
    sum_of_steps: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="nodes that the workers stand for, 2 or more")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="workers of each")
    parser.add_argument("--train-steps", type=int, default=100, help="steps before the gradients are taken")
    parser.add_argument("--steps", type=int, default=12, help="steps whose gradients are measured and summed")
    parser.add_argument("flags", nargs="*", help="flags for pretrain_gpt.py, after --")
    args = parser.parse_args()
    cluster = Cluster(num_nodes=args.nodes, ranks_per_node=args.ranks_per_node)
    launch = LaunchConfig(nproc=cluster.world_size)

    def prepare() -> Job:
        if args.nodes < 2 or args.ranks_per_node < 1:
            raise ValueError(f"--nodes {args.nodes} --ranks-per-node {args.ranks_per_node}: no two nodes")
        parsed = parse_run_config(args.flags, ROOT)
        plan = check_run_config(parsed.config, cluster, device_type=CPU.type)
        return Job(find_place(launch), launch, functools.partial(report, args, parsed, plan))

    return run_on_ranks(prepare)


def report(args: argparse.Namespace, parsed: ParsedRun, plan: RunPlan, worker: Worker) -> None:
    """One worker: train, record, measure; rank 0 prints."""
    dims = ParallelDims(plan_dims(ParallelConfig(), plan.layout.cluster, zero_stage=3), device_type=CPU.type)
    recording = record_gradients(parsed, plan, dims, train_steps=args.train_steps, steps=args.steps)
    ratios = {str(wire): measure(recording, wire, dims) for wire in FORMATS}
    if worker.rank == 0:
        print(table(ratios, recording, args.steps))


def measure(recording: Recording, wire: WireFormat, dims: ParallelDims) -> Ratios:
    """Send the recorded gradients through the reduction of `wire`; the same result on all ranks."""
    model = StandIn(recording.units)
    sharding = shard_model(model, model.units, dims, zero=wire.zero, precision=wire.precision)
    signal, noise = 0.0, 0.0
    total, exact_total = torch.zeros_like(recording.exact[0]), torch.zeros_like(recording.exact[0])
    for gradients, exact in zip(recording.steps, recording.exact, strict=True):
        sharding.begin_micro_batch(last=True)
        model(gradients).backward()
        reduced = model.take_gradients().double()
        signal, noise = signal + power(exact), noise + power(reduced - exact)
        total += reduced
        exact_total += exact
    return Ratios(decibels(signal, noise), decibels(power(exact_total), power(total - exact_total)))


def table(ratios: dict[str, Ratios], recording: Recording, steps: int) -> str:
    """Markdown."""
    lines = [f"| bits inside / across nodes | one step, dB | sum of {steps} steps, dB |", "|---|---|---|"]
    lines += [f"| {name} | {r.one_step:.1f} | {r.sum_of_steps:.1f} |" for name, r in ratios.items()]
    return "\n".join([*lines, "", f"The minibatch's own noise is at {recording.minibatch:.1f} dB."])


class StandIn(nn.Module):
    """Parameters of given shapes in units of their own, and a loss whose gradients are what it is given."""

    def __init__(self, shapes: list[list[torch.Size]]) -> None:
        super().__init__()
        *units, root = [_StandInUnit(unit) for unit in shapes]
        self.inner, self.root = nn.ModuleList(units), root

    @property
    def units(self) -> list[list[nn.Module]]:
        """For `shard_model`: the root's unit is what is left."""
        return [[unit] for unit in self.inner]

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        loss, left = torch.zeros((), requires_grad=True), list(gradients)
        for unit in (*self.inner, self.root):
            count = len(unit.weights)
            loss, left = unit(loss, left[:count]), left[count:]
        return loss

    def take_gradients(self) -> torch.Tensor:
        """[n] the gradients, whole, in the order they were given; they are cleared."""
        parameters = [p for unit in (*self.inner, self.root) for p in unit.parameters()]
        whole = [p.grad.full_tensor() for p in parameters if isinstance(p.grad, DTensor)]
        self.zero_grad()
        return flat(whole)


class _StandInUnit(nn.Module):
    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, loss: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        for weight, gradient in zip(self.weights.parameters(), gradients, strict=True):
            loss = loss + (weight * gradient).sum()
        return loss


if __name__ == "__main__":
    leave_with(main)
