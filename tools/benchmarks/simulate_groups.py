"""Train the replica groups of elastic DiLoCo in one process, to compare validation losses at equal merged tokens.

    python tools/benchmarks/simulate_groups.py late     one group's contributions always arrive one version late
    python tools/benchmarks/simulate_groups.py muon     Muon and AdamW inside, with 2 and 4 groups and H = 10, 30, 100

All variants train the same samples: the bytes of the text that ships with the program, in an order that depends only on
the seed. The model has two layers of width 64. Each group trains its own copy of the model, and `WholeOuter` packs and
applies the contributions. Each printed line is a variant: its validation loss for each seed, and the mean difference
from the first variant of its block.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

import torch
from compare_wire_formats import mean_and_error

from megazpp.base.program import flags_of, leave, program, say
from megazpp.data.loader import MicroBatch, make_micro_batch
from megazpp.data.text import read_documents, resolve_text_paths
from megazpp.diloco.config import DilocoConfig, plan_diloco
from megazpp.elastic.outer import WholeOuter
from megazpp.features import FEATURES
from megazpp.optim.build import build_optimizer
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import RankInfo
from megazpp.parallel.worker import worker_process
from megazpp.run.arguments import parse_run_config
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep

# Tokens per sample; samples per step of all groups together; fraction of the text that is held out for validation;
# fraction of the steps that warm up the learning rate
LENGTH, BATCH, HELD_OUT, WARM_UP = 64, 12, 0.1, 0.1
MODEL = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    "--vocab-size 256 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --hidden-dropout 0 "
    "--attention-dropout 0 --adam-beta2 0.95"
)
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """The settings of one simulated DiLoCo run.

    Attributes:
        groups: number of replica groups; each step's batch is divided among them.
        steps: number of training steps between two synchronizations (H).
        iterations: number of training steps of the run.
        outer: learning rate and momentum of the outer optimizer.
        late_factor: weight of the last group's contributions, which arrive one version late; None if they are in time.
        optimizer: name of the inner optimizer, "adam" or "muon".
        lr: largest learning rate of the inner optimizer.
    """

    groups: int
    steps: int
    iterations: int
    outer: tuple[float, float]
    late_factor: float | None = None
    optimizer: str = "adam"
    lr: float = 3e-3


class Groups:
    """The models and outer optimizer states of all replica groups of a simulated run."""

    def __init__(self, variant: Variant, dims: ParallelDims, seed: int) -> None:
        self.variant, self._seed = variant, seed
        config = parse_run_config(
            [*MODEL.split(), "--seed", str(seed), "--optimizer", variant.optimizer], Path(), features=FEATURES
        ).config
        plan = plan_run(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu")
        flags = DilocoConfig(
            diloco_steps=variant.steps, diloco_outer_lr=variant.outer[0], diloco_outer_momentum=variant.outer[1]
        )
        size = BATCH // variant.groups
        sizes: dict[str, Any] = {"iterations": variant.iterations, "num_layers": 2, "tokens_per_step": size * LENGTH}
        diloco = plan_diloco(flags, config.zero, **sizes)
        assert diloco is not None
        self.models, self.outers, self._size = list[TrainStep](), list[WholeOuter](), size
        for _ in range(variant.groups):
            built = build_model(config.model_spec(256, plan.wire), dims, CPU)
            optimizer = build_optimizer(built.model, config.optimizer, dims=dims)
            scaler = LossScaler(config.loss_scale, fp16=False)
            self.models.append(TrainStep(*built, optimizer, scaler, dims, clip_grad=1.0))
            factor = 1.0 if variant.late_factor is None else variant.late_factor
            given: dict[str, Any] = {"num_groups": variant.groups, "late_factor": factor}
            self.outers.append(WholeOuter(built.sharding, diloco, config.precision, **given))
        text = "\n".join(read_documents(*resolve_text_paths(["builtin:moby_dick"]))).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        cut = round((1 - HELD_OUT) * len(tokens))
        self._train, self._held_out = tokens[:cut], tokens[cut:]

    def train(self) -> float:
        """Train all groups, and return the validation loss of the outer weights."""
        variant, late = self.variant, list[tuple[dict[str, float], bytes]]()
        for version in range(variant.iterations // variant.steps):
            fresh = []
            for group, step in enumerate(self.models):
                for index in range(version * variant.steps, (version + 1) * variant.steps):
                    settings = {"learning_rate": self._rate(index), "weight_decay": 0.1, "iteration": index}
                    step([self._batch(index, group)], **settings)
                tokens = float(variant.steps * self._size * LENGTH)
                fresh.append(({"base": version, "tokens": tokens}, self.outers[group].pack(tokens)))
            before, late = late, [fresh.pop()] if variant.late_factor is not None else []
            self._commit([*fresh, *before], version)
        if late:  # the last outer step merges only the contribution that is late
            self._commit(late, variant.iterations // variant.steps)
        return self._evaluate()

    def _commit(self, merged: Sequence[tuple[dict[str, float], bytes]], version: int) -> None:
        for outer in self.outers:
            outer.apply([entry for entry, _ in merged], [data for _, data in merged], version)
            outer.merge(0.0)

    def _rate(self, index: int) -> float:
        """Return the inner learning rate of a step: linear warm-up, then a cosine decay to a tenth."""
        share = index / self.variant.iterations
        rate = 0.55 + 0.45 * math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP))
        return self.variant.lr * (min((share + 1e-3) / WARM_UP, 1.0) if share < WARM_UP else rate)

    def _batch(self, index: int, group: int) -> MicroBatch:
        """Return a group's part of a step's batch, which depends only on the step and the seed, not on the variant."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + index)
        starts = torch.randint(len(self._train) - LENGTH - 1, (BATCH,), generator=generator)
        own = starts[group * self._size : (group + 1) * self._size].tolist()
        return make_micro_batch(torch.stack([self._train[s : s + LENGTH + 1] for s in own]), eod=None)

    @torch.no_grad()
    def _evaluate(self) -> float:
        starts = torch.linspace(0, len(self._held_out) - LENGTH - 1, 512).long().tolist()
        losses = []
        for first in range(0, len(starts), 64):
            samples = torch.stack([self._held_out[s : s + LENGTH + 1] for s in starts[first : first + 64]])
            losses.append(self.models[0].model(samples[:, :-1], samples[:, 1:]).float().mean().item())
        return statistics.mean(losses)


def compare(title: str, variants: dict[str, Variant], dims: ParallelDims, seeds: Iterable[int]) -> None:
    """Train every variant with every seed; print its losses, and their mean difference from the first variant's."""
    say(title)
    found: dict[str, list[float]] = {}
    for name, variant in variants.items():
        found[name] = [Groups(variant, dims, seed).train() for seed in seeds]
        losses = " ".join(f"{loss:.4f}" for loss in found[name])
        differences = [a - b for a, b in zip(found[name], next(iter(found.values())), strict=True)]
        say(f"  {name:40} {losses}   {mean_and_error(differences)}")


def compare_late(dims: ParallelDims, seeds: Sequence[int]) -> None:
    """Compare factors F for contributions that arrive one version late, without and with outer momentum.

    A late contribution enters the merge with F times the weight that it would have had in time.
    """
    for outer in ((1.0, 0.0), (0.4, 0.9)):
        common: dict[str, Any] = {"groups": 3, "steps": 10, "iterations": 400, "outer": outer}
        variants = {"all in time": Variant(**common)}
        for factor in (0.0, 0.5, 0.7, 1.0):
            variants[f"third group a version late, F = {factor:g}"] = Variant(**common, late_factor=factor)
        compare(f"outer learning rate {outer[0]:g}, momentum {outer[1]:g}", variants, dims, seeds)


def compare_muon(dims: ParallelDims, seeds: Sequence[int]) -> None:
    """Compare Muon and AdamW as DiLoCo's inner optimizer, for 1, 2 and 4 groups and intervals H of 10, 30 and 100."""
    rates = {"adam": 3e-3, "muon": 1.2e-2}
    for steps in (10, 30, 100):
        for optimizer, lr in rates.items():
            common: dict[str, Any] = {"iterations": 300, "outer": (1.0, 0.0), "optimizer": optimizer, "lr": lr}
            variants = {f"{groups} groups": Variant(groups=groups, steps=steps, **common) for groups in (1, 2, 4)}
            compare(f"{optimizer}, H = {steps}", variants, dims, seeds)


@program
def main(argv: list[str]) -> int:
    """Parse the command line, and run the chosen comparison on one rank."""
    parser = flags_of(__doc__)
    parser.add_argument("comparison", choices=["late", "muon"], help="what to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds (default: 1 2 3)")
    args = parser.parse_args(argv)
    place = RankInfo(started=True, world_size=1)
    with worker_process(place, LaunchConfig(distributed_backend="gloo")):
        config = parse_run_config(MODEL.split(), Path(), features=FEATURES).config
        layout = plan_run(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu").layout
        dims = ParallelDims(layout, device_type="cpu")
        {"late": compare_late, "muon": compare_muon}[args.comparison](dims, args.seeds)
    leave(0)


if __name__ == "__main__":
    raise SystemExit(main())
