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
import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.base.arguments import ParsedRun, parse_run_config
from megazpp.base.checks import RunPlan, check_run_config
from megazpp.base.program import flags_of, program
from megazpp.base.run import Job, run_on_ranks
from megazpp.data.dataset import build_tokenizer
from megazpp.data.loader import BatchLoader, MicroBatch
from megazpp.model.gpt import GPTModel
from megazpp.optim.optimizer import build_optimizer, set_rates_
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker
from megazpp.tensor_parallel.parameters import initialize_parameters_, partial_parameters, sum_partial_gradients_
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import open_datasets, open_loader
from megazpp.zero import PrecisionConfig, ZeroConfig, shard_model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


class WireFormat(NamedTuple):
    """Bits of a gradient inside a node and across nodes; 16 is bf16. `beta` is the moving average's, of feedback."""

    local_bits: int
    cross_bits: int
    feedback: bool = False
    beta: float = 0.0

    def __str__(self) -> str:
        averaged = f", moving average {self.beta:g}" if self.beta else ""
        return f"{self.local_bits}/{self.cross_bits}{f', error feedback{averaged}' if self.feedback else ''}"


FORMATS = [
    WireFormat(16, 16),
    *(WireFormat(*bits, on) for bits in ((8, 8), (8, 4), (4, 4)) for on in (False, True)),
    WireFormat(8, 4, True, beta=0.8),
]


class Ratios(NamedTuple):
    """Signal-to-noise ratios in dB: of one step (noise averaged over the steps) and of the sum of all steps."""

    one_step: float
    sum_of_steps: float


class Recording(NamedTuple):
    """Gradients of some steps; the ranks' sum is the mean over the global batch.

    Attributes:
        units: shapes of the parameters, unit by unit; the last unit is what the model's root keeps.
        steps: this rank's gradients, parameter by parameter in that order.
        exact: [n] fp64, their sums over all ranks, the same everywhere.
        minibatch: signal to minibatch noise of those sums, in dB, from how the ranks differ.
    """

    units: list[list[torch.Size]]
    steps: list[list[torch.Tensor]]
    exact: list[torch.Tensor]
    minibatch: float


@program
def main(argv: list[str]) -> int:
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="nodes that the workers stand for, 2 or more")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="workers of each")
    parser.add_argument("--train-steps", type=int, default=100, help="steps before the gradients are taken")
    parser.add_argument("--steps", type=int, default=12, help="steps whose gradients are measured and summed")
    parser.add_argument("flags", nargs="*", help="flags for pretrain_gpt.py, after --")
    args = parser.parse_args(argv)
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


def record_gradients(
    parsed: ParsedRun, plan: RunPlan, dims: ParallelDims, *, train_steps: int, steps: int
) -> Recording:
    """Train a whole copy of the model on each rank, all-reducing its gradients; then record without training on."""
    with open_training(parsed, plan, dims) as training:
        for _ in range(train_steps):
            training.update_(training.next_gradients())
        recorded = [training.next_gradients() for _ in range(steps)]
    exact = [dims.world.all_reduce_(flat(gradients).double()) for gradients in recorded]
    minibatch = _minibatch_ratio(recorded, exact, dims)
    return Recording([[p.shape for p in unit] for unit in training.units], recorded, exact, minibatch)


class Training:
    """A whole copy of a model on each rank; gradients are all-reduced.

    Attributes:
        units: its parameters, unit by unit; the last unit is what the model's root keeps.
    """

    def __init__(self, parsed: ParsedRun, plan: RunPlan, dims: ParallelDims, model: GPTModel, loader: BatchLoader):
        self.clip_grad, self.plan, self.dims = parsed.config.optimizer.clip_grad, plan, dims
        self.model, self.loader, self.consumed = model, loader, 0
        self.optimizer = build_optimizer(list(model.named_parameters()), parsed.config.optimizer, CPU)
        self.units = _parameters_by_unit(model)
        self.parameters = [p for unit in self.units for p in unit]

    def next_gradients(self) -> list[torch.Tensor]:
        """This rank's gradients of the mean loss over the next global batch."""
        size = self.plan.batches.global_batch_size
        batches, self.consumed = self.loader.step(self.consumed, size), self.consumed + size
        return _gradients(self.model, self.parameters, batches, self.dims)

    def update_(self, gradients: list[torch.Tensor]) -> None:
        """One optimizer step with what `next_gradients` returned."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = self.dims.world.all_reduce_(gradient)
        nn.utils.clip_grad_norm_(self.parameters, self.clip_grad)
        before = self.consumed - self.plan.batches.global_batch_size
        rate, decay = self.plan.schedule.learning_rate(before), self.plan.schedule.weight_decay(before)
        set_rates_(self.optimizer, learning_rate=rate, weight_decay=decay)
        self.optimizer.step()


@contextlib.contextmanager
def open_training(parsed: ParsedRun, plan: RunPlan, dims: ParallelDims) -> Iterator[Training]:
    """The model of `parsed` with its first weights, and its data."""
    config, seed = parsed.config, parsed.config.launch.seed
    tokenizer = build_tokenizer(config.tokenizer, config.data, log=_say_nothing)
    datasets = open_datasets(config.data, tokenizer, plan.batches, config.evaluation, seed=seed, log=_say_nothing)
    assert datasets.train is not None
    model = GPTModel(config.model, vocab_size=tokenizer.vocab_size, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=seed, draw_device=CPU)
    with open_loader(datasets.train, config.data, tokenizer, plan.batches, dims, CPU, ramp_up=False) as loader:
        yield Training(parsed, plan, dims, model, loader)


def _say_nothing(line: str) -> None:
    """In place of what pretrain_gpt.py announces."""


def _gradients(
    model: GPTModel, parameters: list[nn.Parameter], batches: Sequence[MicroBatch], dims: ParallelDims
) -> list[torch.Tensor]:
    """This rank's gradients of the mean loss over the global batch."""
    tokens = dims.sum_over_data_(torch.stack([batch.loss_mask.sum() for batch in batches]).sum())
    for batch in batches:
        losses = model(
            batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
        )
        ((losses * batch.loss_mask).sum() / tokens).backward()
    partial = partial_parameters(model)
    sum_partial_gradients_((p for name, p in model.named_parameters() if name in partial), dims.tp)
    gradients = [p.grad for p in parameters if p.grad is not None]
    model.zero_grad()
    return gradients


def _parameters_by_unit(model: GPTModel) -> list[list[nn.Parameter]]:
    """Each parameter once; the last unit is what `sharding_units` leaves to the model."""
    units: list[list[nn.Parameter]] = []
    seen: set[nn.Parameter] = set()
    groups: list[list[nn.Module]] = [*model.sharding_units(), [model]]
    for modules in groups:
        found = [p for module in modules for p in module.parameters() if p not in seen]
        seen.update(found)
        units.append(found)
    return units


def _minibatch_ratio(recorded: list[list[torch.Tensor]], exact: list[torch.Tensor], dims: ParallelDims) -> float:
    """The variance of a mean of W ranks, from the W ranks' distances to it."""
    ranks = dims.data_size
    distances = sum(power(ranks * flat(g).double() - e) for g, e in zip(recorded, exact, strict=True))
    spread = dims.world.all_reduce_(torch.tensor(distances, dtype=torch.float64)).item()
    return decibels(sum(map(power, exact)), spread / (ranks * (ranks - 1)))


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def power(x: torch.Tensor) -> float:
    return float(x.square().sum())


def decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf


def measure(recording: Recording, wire: WireFormat, dims: ParallelDims) -> Ratios:
    """Send the recorded gradients through the reduction of `wire`; the same result on all ranks."""
    model = StandIn(recording.units)
    zero = ZeroConfig(
        zero_quantized_gradients=True,
        zero_gradient_bits=(wire.local_bits, wire.cross_bits),
        zero_error_feedback=wire.feedback,
        zero_error_feedback_beta=wire.beta,
        zero_accumulate_in_bf16=wire.cross_bits == 16,
    )
    precision = PrecisionConfig(bf16=wire.local_bits == 16, grad_reduce_in_bf16=wire.local_bits == 16)
    sharding = shard_model(model, model.units, dims, zero=zero, precision=precision)
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
    raise SystemExit(main())
