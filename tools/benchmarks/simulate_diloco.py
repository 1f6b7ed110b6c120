"""Local steps of islands in one process, and what they do to the loss of a tiny model.

python tools/benchmarks/simulate_diloco.py --out runs/local_steps

An island is ordinary data parallel on its share of every global batch; islands send each other differences of weights
from time to time (DiLoCo, arXiv 2311.08105), one fragment of the model after the other and, if wanted, while the next
steps run (Streaming DiLoCo, arXiv 2501.18512). `Islands` is the rule in plain torch on one model per island, without
communication: what a program on ranks has to agree with. Legend: H iterations between two sends of a fragment, F
fragments, R the islands' common copy of the outer weights, x an island's own weights.

After the optimizer step of iteration t, counted from 1, for each fragment:

    merge   if it was sent `delay` iterations ago:        x = alpha x + (1 - alpha) R
    send    if t % H == ((fragment + 1) * H // F) % H:    sum over islands of share * Q(R - x + error) -> difference
                momentum = outer_momentum * momentum + difference
                outer = outer - outer_lr * (difference + outer_momentum * momentum)        (Nesterov)
                R = R + Q'(outer - R)
    merge   at once if the delay is 0

An island's share is that of the tokens since the fragment was sent last. Q and Q' are block quantization or nothing;
one-dimensional parameters always travel whole. After the last iteration all is sent, and x = R everywhere.

The command line trains every row of the study with every seed, on equal samples for equal seeds. Results are kept in
--out and not computed again, so that an interrupted study goes on and several processes can share one (--seeds).
"""

from __future__ import annotations

import copy
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from compare_wire_formats import mean_and_error
from torch import Tensor, nn

from kernels.block_quant import Feedback, RangeTable, pack, range_table, unpack, unpack_onto
from kernels.formats import BlockFormat, plan_row
from megazpp.data.text import read_documents, resolve_text_paths
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer, set_rates_
from megazpp.optim.schedule import ScheduleConfig, build_schedule
from megazpp.parallel.axis import MeshAxis
from megazpp.program import flags_of, program, say
from megazpp.tensor_parallel.parameters import initialize_parameters_

Bits = Literal[4, 8, 16]
BLOCK = 128  # elements of a block of quantization


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """How islands exchange their weights.

    Attributes:
        steps: H, iterations between two sends of a fragment; a multiple of the fragments.
        delay: iterations between a send and its merge, less than `steps`.
        merge_alpha: share of its own weights that an island keeps at a merge.
        outer_lr, outer_momentum: of the outer optimizer, SGD with Nesterov momentum; 1 and 0 average the islands.
        gradient_bits: 4 or 8 for what islands send; 16 does not quantize.
        weight_bits: 4 or 8 for what R receives; 16 does not quantize.
        feedback_beta: share of its earlier error that an island keeps where the rest is the newest (0: the newest, and
            all of it); None does not feed errors back.
    """

    steps: int = 10
    delay: int = 0
    merge_alpha: float = 0.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    gradient_bits: Bits = 16
    weight_bits: Bits = 16
    feedback_beta: float | None = 0.0

    def sends(self, fragment: int, fragments: int, iteration: int) -> bool:
        return iteration % self.steps == (fragment + 1) * self.steps // fragments % self.steps


class Islands:
    """Models that train by themselves and meet in `after_step`; loops and optimizers stay outside.

    Args:
        models: one per island, with equal weights; `after_step` writes into their parameters.
        fragments: the names of all parameters, each in one fragment.
        settings: when and how fragments are sent.

    Attributes:
        common: R by the parameter's name: the weights to evaluate.
        outer, momentum: what the outer optimizer holds, by the parameter's name.
    """

    def __init__(self, models: Sequence[nn.Module], fragments: Sequence[Sequence[str]], settings: OuterRule) -> None:
        if settings.steps % len(fragments) or not 0 <= settings.delay < settings.steps:
            raise ValueError(f"{len(fragments)} fragments do not fit {settings}")
        self.settings, self.fragments = settings, fragments
        self._weights = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
        first = self._weights[0]
        if sorted(name for fragment in fragments for name in fragment) != sorted(first):
            raise ValueError("the fragments do not have every parameter once")
        if not all(torch.equal(weights[name], first[name]) for weights in self._weights for name in first):
            raise ValueError("islands begin with different weights")
        self.common = {name: weight.clone() for name, weight in first.items()}
        self.outer = {name: weight.clone() for name, weight in first.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in first.items()}
        self._errors: list[dict[str, Feedback]] = [{} for _ in models]
        self._tokens = [[0.0] * len(models) for _ in fragments]  # since the fragment was sent
        self._merge_at: list[int | None] = [None for _ in fragments]

    def after_step(self, iteration: int, tokens: Sequence[float], *, last: bool = False) -> list[int]:
        """Do what is due after an optimizer step.

        Args:
            iteration: of that step, from 1.
            tokens: that each island has trained on in it.
            last: of the training.
        Returns:
            The fragments that were sent.
        """
        settings, sent = self.settings, []
        for index, counted in enumerate(self._tokens):
            self._tokens[index] = [before + new for before, new in zip(counted, tokens, strict=True)]
            due = self._merge_at[index]
            if due is not None and (last or due == iteration):
                self._merge(index, settings.merge_alpha)
            if last or settings.sends(index, len(self.fragments), iteration):
                self._send(index)
                sent.append(index)
                self._merge_at[index] = iteration + settings.delay
                if last or settings.delay == 0:
                    self._merge(index, 0.0 if last else settings.merge_alpha)
        return sent

    def continued_by(self, models: Sequence[nn.Module]) -> Islands:
        """Another number of islands from a checkpoint: the outer optimizer goes on, the models begin at R."""
        for model in models:
            for name, p in model.named_parameters():
                p.detach().copy_(self.common[name])
        islands = Islands(models, self.fragments, self.settings)
        islands.outer, islands.momentum = self.outer, self.momentum
        return islands

    def _merge(self, fragment: int, alpha: float) -> None:
        for name in self.fragments[fragment]:
            for weights in self._weights:
                weights[name].copy_(alpha * weights[name] + (1 - alpha) * self.common[name])
        self._merge_at[fragment] = None

    def _send(self, fragment: int) -> None:
        eta, mu = self.settings.outer_lr, self.settings.outer_momentum
        total = sum(self._tokens[fragment])
        shares = [tokens / total for tokens in self._tokens[fragment]]
        for name in self.fragments[fragment]:
            difference = torch.zeros_like(self.common[name])
            for island, share in enumerate(shares):
                difference += share * self._difference(island, name)
            self.momentum[name] = mu * self.momentum[name] + difference
            self.outer[name] -= eta * (difference + mu * self.momentum[name])
            self._receive(name)
        self._tokens[fragment] = [0.0] * len(shares)

    def _difference(self, island: int, name: str) -> Tensor:
        """R - x of an island, as the others receive it."""
        difference = self.common[name] - self._weights[island][name]
        table, beta = _table(difference, self.settings.gradient_bits), self.settings.feedback_beta
        if table is None:
            return difference
        errors = None
        if beta is not None:
            errors = self._errors[island].setdefault(name, Feedback.zeros((), table))
        messages = _message(table)
        pack(difference.view(-1), table, messages=messages, errors=errors, beta=beta or 0.0)
        unpack(messages, table, out=difference.view(-1))
        return difference

    def _receive(self, name: str) -> None:
        common, outer = self.common[name], self.outer[name]
        table = _table(outer, self.settings.weight_bits)
        if table is None:
            common.copy_(outer)
            return
        messages = _message(table)
        pack(outer.view(-1), table, messages=messages, base=common.view(-1))
        unpack_onto(messages, table, out=common.view(-1))


def strided_fragments(model: GPTModel, count: int) -> list[list[str]]:
    """Names of the parameters of `count` fragments; sharding unit u, in the order of use, belongs to u % count."""
    units = [[p for module in unit for p in module.parameters()] for unit in model.sharding_units()]
    unit_of = {p: index for index, unit in enumerate(units) for p in unit}
    fragments: list[list[str]] = [[] for _ in range(count)]
    for name, p in model.named_parameters():
        fragments[unit_of.get(p, len(units)) % count].append(name)
    return fragments


def _table(x: Tensor, bits: Bits) -> RangeTable | None:
    """How `x` is quantized; None: not at all."""
    return None if bits == 16 or x.ndim == 1 else range_table(plan_row(x.numel(), BlockFormat(bits, BLOCK)), x.dtype)


def _message(table: RangeTable) -> Tensor:
    return torch.empty(table.layout.message_bytes, dtype=torch.uint8)


# The study

SEQ_LENGTH = 64
MODEL = GPTConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=3,
    max_position_embeddings=SEQ_LENGTH,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
BYTES = 256
GLOBAL_BATCH = 16
VALIDATION_SAMPLES = 512
OPTIMIZER = OptimizerConfig(weight_decay=0.1, adam_beta2=0.95)
CPU = torch.device("cpu")

Moments = Literal["of one island", "mean", "zero"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)


class Recipe(NamedTuple):
    """Steps, and the peak rate of the inner optimizer: what a row shares with its data-parallel baseline."""

    steps: int = 1000
    lr: float = 4e-3

    @property
    def name(self) -> str:
        return f"{self.steps} steps" + (f", lr {self.lr}" if self.lr != Recipe().lr else "")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A way to train. One island has no local steps: it is data parallel.

    Attributes:
        resumed: islands of the second half of the steps, and where their optimizers' moments come from.
    """

    islands: int = 2
    fragments: int = 1
    settings: OuterRule = field(default_factory=OuterRule)
    resumed: tuple[int, Moments] | None = None
    run: Recipe = field(default_factory=Recipe)


def local(interval: int = 10, *, islands: int = 2, fragments: int = 1, **settings: Any) -> Experiment:
    return Experiment(islands=islands, fragments=fragments, settings=OuterRule(steps=interval, **settings))


FEEDBACK = {"not fed back": None, "fed back whole": 0.0, "moving average": 0.8}
MOMENTUM = ((0.7, 0.5), (0.7, 0.9), (0.4, 0.9))


def momentum(interval: int, run: Recipe) -> dict[str, Experiment]:
    name = f"{run.name}, H {interval}" if run != Recipe() else f"H {interval}"
    rows = {name: local(interval)}
    rows |= {f"{name}, eta {eta}, mu {mu}": local(interval, outer_lr=eta, outer_momentum=mu) for eta, mu in MOMENTUM}
    return {name: replace(row, run=run) for name, row in rows.items()}


def resume(before: int, after: int) -> dict[str, Experiment]:
    name = f"H 10, {before} -> {after} islands, moments"
    return {f"{name}: {moments}": Experiment(islands=before, resumed=(after, moments)) for moments in MOMENTS}


# the first row of a study is what the others are compared with
STUDIES: dict[str, dict[str, Experiment]] = {
    "interval": {f"H {interval}": local(interval) for interval in (1, 2, 5, 10, 30, 100)},
    "bits": {"H 10": local()}
    | {
        f"H 10, {bits[0]} {bits[1]} bits, errors {name}": local(
            gradient_bits=bits[0], weight_bits=bits[1], feedback_beta=beta
        )
        for bits in ((8, 16), (4, 16), (4, 4))
        for name, beta in FEEDBACK.items()
    },
    **{
        f"momentum-{run.steps}-{interval}-{run.lr}": momentum(interval, run)
        for run, intervals in (
            (Recipe(), (2, 5, 30)),
            (Recipe(lr=2e-3), (30,)),
            (Recipe(lr=1e-3), (5, 30)),
            (Recipe(steps=4000), (10,)),
        )
        for interval in intervals
    },
    "islands-10": {"H 10": local(), "H 10, 4 islands": local(islands=4)},
    "islands-30": {"H 30": local(30), "H 30, 4 islands": local(30, islands=4)},
    "fragments": {f"H 20, fragments {count}": local(20, fragments=count) for count in (1, 2, 4)},
    "delay": {"H 10": local()}
    | {
        f"H 10, delay {delay}, alpha {alpha}": local(delay=delay, merge_alpha=alpha)
        for alpha in (0.5, 0.0)
        for delay in (2, 5)
    },
    "grow": resume(2, 4),
    "shrink": resume(4, 2),
}


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of weights and samples")
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES), help="which to run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    args = parser.parse_args(argv)
    text = read_text()
    args.out.mkdir(parents=True, exist_ok=True)

    def losses(name: str, row: Experiment) -> list[float]:
        return [kept_loss(args.out, name, row, seed, text) for seed in args.seeds]

    lines = ["| | validation loss | difference to data parallel | to the first row of the study |", "|---|---|---|---|"]
    for study in args.studies:
        run = next(iter(STUDIES[study].values())).run
        baseline = f"{run.name}, data parallel"
        together = losses(baseline, Experiment(islands=1, run=run))
        found = {name: losses(name, row) for name, row in STUDIES[study].items()}
        first = next(iter(found.values()))
        lines.append(f"| {baseline} | {statistics.mean(together):.4f} | | |")
        for name, row in found.items():
            to_first = "" if row is first else paired(row, first)
            lines.append(f"| {name} | {statistics.mean(row):.4f} | {paired(row, together)} | {to_first} |")
    print("\n".join(lines))


def paired(losses: list[float], baseline: list[float]) -> str:
    """The mean difference of the same seeds, and its standard error."""
    return mean_and_error([loss - base for loss, base in zip(losses, baseline, strict=True)])


def kept_loss(folder: Path, name: str, row: Experiment, seed: int, text: Text) -> float:
    """The validation loss of a run, trained now if its file is not there."""
    path = folder / f"{re.sub('[^a-z0-9.]+', '-', name.lower())}-seed{seed}.json"
    if not path.exists():
        started = time.process_time()
        loss = train(row, seed, text)
        say(f"{name}, seed {seed}: {loss:.4f} ({time.process_time() - started:.0f} s)")
        path.write_text(json.dumps({"row": asdict(row), "seed": seed, "validation_loss": loss}) + "\n")
    return float(json.loads(path.read_text())["validation_loss"])


class Text(NamedTuple):
    """Bytes [n] int64 of the text to train on and of the rest."""

    train: Tensor
    valid: Tensor


def read_text() -> Text:
    """The text that ships with the program; its last tenth is for validation."""
    (path,) = resolve_text_paths(["builtin:moby_dick"])
    data = torch.tensor(list("\n".join(read_documents(path)).encode()))
    return Text(*data.tensor_split([len(data) * 9 // 10]))


def train(row: Experiment, seed: int, text: Text) -> float:
    """Validation loss of R after the run's global batches, which depend on nothing but the seed."""
    steps = row.run.steps
    schedule = build_schedule(
        ScheduleConfig(lr=row.run.lr, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_fraction=0.06),
        weight_decay=OPTIMIZER.weight_decay,
        train_iters=steps,
        train_samples=None,
        global_batch_size=1,
    )
    generator = torch.Generator().manual_seed(seed)
    models = [new_model(seed) for _ in range(row.islands)]
    optimizers = [new_optimizer(model) for model in models]
    islands = Islands(models, strided_fragments(models[0], row.fragments), row.settings)
    for iteration in range(1, steps + 1):
        batches = draw(text.train, GLOBAL_BATCH, generator).chunk(len(models))
        for model, optimizer, samples in zip(models, optimizers, batches, strict=True):
            set_rates_(
                optimizer,
                learning_rate=schedule.learning_rate(iteration - 1),
                weight_decay=schedule.weight_decay(iteration - 1),
            )
            mean_loss(model, samples).backward()
            nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
        if len(models) > 1:
            islands.after_step(
                iteration, [float(samples[:, 1:].numel()) for samples in batches], last=iteration == steps
            )
        if row.resumed is not None and iteration == steps // 2:
            count, moments = row.resumed
            models = [copy.deepcopy(models[0]) for _ in range(count)]
            islands = islands.continued_by(models)
            optimizers = [resumed_optimizer(model, index, optimizers, moments) for index, model in enumerate(models)]
    return validation_loss(models[0], text.valid)


def new_model(seed: int) -> GPTModel:
    model = GPTModel(MODEL, vocab_size=BYTES, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=seed, draw_device=CPU)
    return model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(list(model.named_parameters()), OPTIMIZER, CPU)


def resumed_optimizer(
    model: nn.Module, island: int, earlier: Sequence[torch.optim.Optimizer], moments: Moments
) -> torch.optim.Optimizer:
    """The optimizer of an island after their number has changed."""
    optimizer = new_optimizer(model)
    if moments == "zero":
        return optimizer
    states = [other.state_dict() for other in earlier]
    found = copy.deepcopy(states[island % len(states)])
    if moments == "mean":
        for index, state in found["state"].items():
            for name in state:
                state[name] = torch.stack([other["state"][index][name] for other in states]).mean(0)
    optimizer.load_state_dict(found)
    return optimizer


def draw(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count, S + 1] samples from anywhere."""
    return _windows(data, torch.randint(len(data) - SEQ_LENGTH, (count,), generator=generator))


def _windows(data: Tensor, starts: Tensor) -> Tensor:
    return data[starts.unsqueeze(1) + torch.arange(SEQ_LENGTH + 1)]


def mean_loss(model: nn.Module, samples: Tensor) -> Tensor:
    losses: Tensor = model(samples[:, :-1].contiguous(), samples[:, 1:].contiguous())
    return losses.mean()


@torch.no_grad()
def validation_loss(model: nn.Module, data: Tensor) -> float:
    """Of samples at equal distances."""
    starts = torch.linspace(0, len(data) - SEQ_LENGTH - 1, VALIDATION_SAMPLES).long()
    return mean_loss(model, _windows(data, starts)).item()


if __name__ == "__main__":
    raise SystemExit(main())
