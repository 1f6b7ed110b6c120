"""Train the same model over the same samples with each kind of error feedback; print losses beside ZeRO-3's.

python tools/benchmarks/compare_error_feedback.py --seeds 1 2 3 --out runs/feedback -- --train-iters 400 --lr 1e-3

One process stands for nodes of one rank each: it takes the ranks' gradients in turn, each rank's own reduction packs
them, and what all have sent is summed. So no run waits for another process, and weights are not quantized: what differs
is the feedback alone. What stands after `--` goes to pretrain_gpt.py's parser (default: the tiny
config). Runs that are in --out already are not repeated, so an interrupted study goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tools_path  # noqa: F401
import torch
from compare_wire_formats import mean_and_error
from entry import leave_with
from torch import nn
from torch.nn import functional

from megazpp.arguments import parse_run_config
from megazpp.checks import check_run_config
from megazpp.data.batch import MicroBatch, make_micro_batch
from megazpp.data.dataset import batch_options, build_tokenizer
from megazpp.data.loader import BatchLoader
from megazpp.model.gpt import GPTModel
from megazpp.optim.clip import clip_grads_, global_grad_norm
from megazpp.optim.optimizer import build_optimizer, set_rates_
from megazpp.parallel.axis import MeshAxis
from megazpp.planner.paper import paper_unit
from megazpp.tensor_parallel.parameters import initialize_parameters_
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.training.setup import open_datasets
from megazpp.zero.comm_factory import CommFactory
from megazpp.zero.config import ZeroConfig, plan_wire
from megazpp.zero.layout import plan_message
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.reduce import TwoHopReduce
from megazpp.zero.sharding import Sharding
from megazpp.zero.wire import Codec

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


class FeedbackKind(NamedTuple):
    """One kind of error feedback.

    Attributes:
        zero: fields of ZeroConfig; None: gradients are summed in fp32, as ZeRO-3 does.
        rescaled: whether what is fed back is clipped and skipped with the gradients that it was lost from.
    """

    zero: dict[str, Any] | None
    rescaled: bool = True


VARIANTS = {
    "ZeRO-3": FeedbackKind(None),
    "none": FeedbackKind({"zero_error_feedback": False}),
    "at full size": FeedbackKind({"zero_error_feedback": True, "zero_error_feedback_beta": 0.0}, rescaled=False),
    "clipped with its gradients": FeedbackKind({"zero_error_feedback": True, "zero_error_feedback_beta": 0.0}),
    "moving average": FeedbackKind({"zero_error_feedback": True, "zero_error_feedback_beta": 0.8}),
}


class Losses(NamedTuple):
    """The training loss and the gradient norm before clipping of every step, and the validation loss at the end."""

    train: list[float]
    norm: list[float]
    valid: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of weights and data order")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="which to run")
    parser.add_argument("--nodes", type=int, default=2, help="nodes of one rank each that the process stands for")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs' losses")
    parser.add_argument("flags", nargs="*", help="flags for pretrain_gpt.py, after --")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Losses]] = {name: [] for name in args.variants}
    for seed in args.seeds:  # seeds outside, so that an interrupted study has whole rows
        for name in args.variants:
            file = args.out / f"{name.replace(' ', '-')}-seed{seed}.json"
            if not file.exists():
                run = train([*args.flags, "--seed", str(seed)], VARIANTS[name], args.nodes)
                file.write_text(json.dumps(run._asdict()))
                print(f"{file.stem}: {run.train[-1]:.4f}, validation {run.valid:.4f}", file=sys.stderr, flush=True)
            results[name].append(Losses(**json.loads(file.read_text())))
    print(table(results))


def train(flags: list[str], variant: FeedbackKind, num_nodes: int) -> Losses:
    """One run; `num_nodes` ranks have their shares of each global batch."""
    parsed = parse_run_config(flags, ROOT)
    config = parsed.config
    plan = check_run_config(config, Cluster(num_nodes=num_nodes, ranks_per_node=1), device_type=CPU.type)
    tokenizer = build_tokenizer(config.tokenizer, config.data, announce=_say_nothing)
    seed, size = config.launch.seed, plan.batches.global_batch_size
    datasets = open_datasets(config.data, tokenizer, plan.batches, config.evaluation, seed=seed, announce=_say_nothing)
    assert datasets.train is not None
    assert datasets.valid is not None
    model = GPTModel(config.model, vocab_size=tokenizer.vocab_size, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=seed, draw_device=CPU)
    named = list(model.named_parameters())
    parameters = [p for _, p in named]
    optimizer, summed = build_optimizer(named, config.optimizer, CPU), SummedGradients(model, variant, plan.layout)
    axes, losses, norms = (MeshAxis("tp"), MeshAxis("shard")), [], []
    loader = functools.partial(
        BatchLoader, micro_batch_size=size // num_nodes, data_rank=0, data_size=1, device=CPU, num_workers=0,
        make_batch=functools.partial(make_micro_batch, **batch_options(config.data, tokenizer)),
    )  # fmt: skip
    with loader(datasets.train) as samples:
        for consumed in range(0, plan.batches.total_samples, size):
            batches = samples.step(consumed, size)
            losses.append(summed.backward(batches))
            norm = global_grad_norm(named, *axes)
            norms.append(norm.item())
            kept = clip_grads_(parameters, norm, config.optimizer.clip_grad)
            rate, decay = plan.schedule.learning_rate(consumed), plan.schedule.weight_decay(consumed)
            set_rates_(optimizer, learning_rate=rate, weight_decay=decay)
            optimizer.step()
            optimizer.zero_grad()
            if variant.rescaled:
                summed.sharding.end_step(kept, iteration=len(losses))
    with loader(datasets.valid) as samples, torch.no_grad():
        starts = range(0, config.evaluation.eval_iters * size, size)
        held_out = [_loss(model, batch).item() for start in starts for batch in samples.step(start, size)]
    return Losses(losses, norms, statistics.mean(held_out))


class SummedGradients:
    """The ranks' gradients, summed as `variant` does."""

    def __init__(self, model: nn.Module, variant: FeedbackKind, layout: Layout) -> None:
        self._num_nodes = num_nodes = layout.cross
        self._model, self._parameters = model, list(model.parameters())
        parameters = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        self._unit = paper_unit(parameters, num_nodes)  # blocks do not span parameters, so one unit does for all
        self._reduces: list[TwoHopReduce] = []
        self._axes = [SendingAxis(rank, num_nodes) for rank in range(num_nodes)]
        if variant.zero is not None:
            zero = ZeroConfig(zero_quantized_gradients=True, overlap_grad_reduce=False, **variant.zero)
            wire = plan_wire(zero, layout)
            assert wire.reduce is not None
            message = plan_message(self._unit.segments, wire.reduce.cross, exact_itemsize=4)
            self._codec = Codec(message, torch.float32)
            for axis in self._axes:
                factory = CommFactory(
                    cross=axis,
                    local=MeshAxis("local"),
                    shard=MeshAxis("shard"),
                    plan=wire,
                    zero=zero,
                    precision=PrecisionConfig(),
                )
                reduce = factory.comms(self._unit)[1]
                assert isinstance(reduce, TwoHopReduce)
                self._reduces.append(reduce)
        self.sharding = Sharding(model, [], stage=3, reduces=self._reduces)

    def backward(self, batches: Sequence[MicroBatch]) -> float:
        """Set the gradients of the mean loss of `batches`, a rank's each, and return it."""
        gradients, total = [], 0.0
        for batch in batches:
            loss = _loss(self._model, batch) / len(batches)
            gradients.append(torch.autograd.grad(loss, self._parameters))
            total += loss.item()
        self.sum(gradients)
        return total

    def sum(self, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """Set the parameters' gradients to the sums of the ranks'."""
        if not self._reduces:
            for parameter, parts in zip(self._parameters, zip(*gradients, strict=True), strict=True):
                parameter.grad = torch.stack(parts).sum(0)
            return
        shards = self._reduce([self._flat(parts) for parts in gradients])
        for parameter, segment in zip(self._parameters, self._unit.segments, strict=True):
            rows = shards[:, segment.start : segment.stop].reshape(-1, *parameter.shape[1:])
            parameter.grad = rows[: parameter.shape[0]].contiguous()

    def _reduce(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Each rank's [W S] -> [W, S], summed over ranks."""
        shards = torch.empty(self._num_nodes, self._unit.size)
        for reduce, own, shard in zip(self._reduces, gradients, shards, strict=True):
            reduce.start(own, shard)
        sent = torch.stack([axis.sent for axis in self._axes])  # [from, to, M]
        self._codec.unpack_sum(sent, shards, accumulate=False)
        return shards

    def _flat(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """[W S], rank by rank, as FSDP2 lays them out."""
        rows = []
        for gradient, segment in zip(gradients, self._unit.segments, strict=True):
            missing = self._num_nodes * segment.size - gradient.numel()
            rows.append(functional.pad(gradient.flatten(), (0, missing)).view(self._num_nodes, -1))
        return torch.cat(rows, dim=1).flatten()


class SendingAxis(MeshAxis):
    """The cross axis of one rank, which only takes note of what it would send."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("cross", wire="cross")
        self.rank, self.size, self.sent = rank, size, torch.empty(0)

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        self.sent = x
        return x


def table(results: dict[str, list[Losses]]) -> str:
    """Markdown; differences are paired by seed, with the standard error of their mean."""
    baseline = next(iter(results.values()))
    lines = [
        "| error feedback | training, all steps | difference | mean distance of a step | validation | difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        pairs = list(zip(runs, baseline, strict=True))
        distances = [statistics.mean(map(_distance, run.train, base.train)) for run, base in pairs]
        columns = (
            f"{statistics.mean(statistics.mean(run.train) for run in runs):.4f}",
            mean_and_error([statistics.mean(run.train) - statistics.mean(base.train) for run, base in pairs]),
            mean_and_error(distances).lstrip("+"),
            f"{statistics.mean(run.valid for run in runs):.4f}",
            mean_and_error([run.valid - base.valid for run, base in pairs]),
        )
        lines.append(f"| {' | '.join((name, *columns))} |")
    norms = torch.tensor([run.norm for run in baseline])
    clipped = f"{norms.median():.2f}, at most {norms.max():.1f}; {100 * (norms > 1).float().mean():.0f} % above 1"
    return "\n".join([*lines, "", f"Gradient norms of {next(iter(results))}: median {clipped}."])


def _distance(a: float, b: float) -> float:
    return abs(a - b)


def _loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    losses = model(batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts)
    return (losses * batch.loss_mask).sum() / batch.loss_mask.sum()


def _say_nothing(line: str) -> None:
    """In place of what pretrain_gpt.py announces."""


if __name__ == "__main__":
    leave_with(main)
