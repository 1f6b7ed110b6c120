"""A NaN on one rank ends the job on all, before the update, with the rank, the parameter and the samples named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.context import context
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import Case, build_step
from torch.utils.hooks import RemovableHandle

from megazpp.training.anomalies import (
    AnomalyConfig,
    Guard,
    LossHistory,
    NotFiniteError,
    StepReport,
    describe,
)
from megazpp.training.batches import BatchConfig, plan_batches
from megazpp.training.step import TrainStep
from megazpp.zero.config import ZeroConfig

ZEROPP = ZeroConfig(zeropp=True)


def guarded(
    step: TrainStep, case: Case, folder: Path | None, *, dynamic_scale: bool = False, islands: bool = False
) -> None:
    batches = BatchConfig(
        micro_batch_size=case.global_batch // step.dims.data_size // case.micro_batches,
        global_batch_size=case.global_batch,
        train_iters=10,
    )
    plan = plan_batches(batches, data_parallel_size=step.dims.data_size)
    run, _ = context(step.dims, folder)
    settings = {"dynamic_scale": dynamic_scale, "islands": islands}
    step.guard = Guard(AnomalyConfig(), step.sharding, run, plan, LossHistory(), **settings)


def poison_gradient(module: torch.nn.Module) -> RemovableHandle:
    """Make one element of the gradient of its weight NaN."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.view(-1)[5] = float("nan")
        return gradient

    return module.register_forward_pre_hook(lambda m, inputs: m.weight.register_hook(poison) and None)


def poison_output(module: torch.nn.Module, when: int) -> RemovableHandle:
    """Make the `when`th output NaN."""
    calls: list[int] = []

    def poison(m: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * float("nan") if len(calls) == when else output

    return module.register_forward_hook(poison)


def train_with_a_fault(case: Case, where: str, rank: int, folder: Path) -> tuple[str, bool, bool]:
    """The message, whether the weights stayed, and whether the good steps before were taken."""
    step, dims = build_step(case)
    guarded(step, case, folder)
    size = case.global_batch // dims.data_size // case.micro_batches

    def batches(index: int) -> list[Any]:
        starts = [(m * dims.data_size + dims.data_rank) * size for m in range(case.micro_batches)]
        return [case.batch(index, start, size) for start in starts]

    good = [not step(batches(i), learning_rate=1e-3, weight_decay=0.0, iteration=i + 1).skipped for i in range(2)]
    if dims.world.rank == rank:
        if where == "gradient":
            poison_gradient(step.model.layers[1].mlp.fc2)
        else:
            poison_output(step.model.final_norm, when=2)
    before = [p.detach().to_local().clone() for p in step.model.parameters()]
    try:
        step(batches(2), learning_rate=1e-3, weight_decay=0.0, iteration=3)
        message = "no error"
    except NotFiniteError as error:
        message = str(error)
    unchanged = all(torch.equal(a, p.detach().to_local()) for a, p in zip(before, step.model.parameters(), strict=True))
    return message, unchanged, all(good)


@pytest.mark.parametrize(
    ("case", "rank"),
    [
        slow({"nodes": 2, "zero": ZEROPP}, 3),
        ({"nodes": 2, "zero": ZEROPP, "tp": 2}, 1),
        slow({"stage": 3}, 2),
        ({"stage": 1}, 0),
    ],
    ids=["zeropp", "zeropp-tp", "stage3", "stage1"],
)
def test_a_nan_in_one_gradient_of_one_rank_names_the_parameter_and_the_rank(
    case: dict[str, Any], rank: int, tmp_path: Path
):
    answers = ranks(4).run(train_with_a_fault, Case(micro_batches=2, **case), "gradient", rank, tmp_path)
    assert [answer[1:] for answer in answers] == [(True, True)] * 4
    assert len({answer[0] for answer in answers}) == 1
    first, *lines = answers[0][0].splitlines()
    assert first.startswith("iteration 3: loss ")
    assert first.endswith(", gradient norm nan; the job ends before the update, the weights are those of iteration 2")
    assert len(lines) == 2
    assert lines[0] == f"layers.1.mlp.fc2.weight: the norm of the gradient is nan, from rank {rank}"
    file = tmp_path / "not-finite-3.json"
    assert lines[1] == f"samples, losses and norms: {file}"
    record = json.loads(file.read_text())
    assert (record["first_sample"], record["samples"]) == (32, 16)
    assert record["grad_norms"]["layers.1.mlp.fc2.weight"] != record["grad_norms"]["layers.1.mlp.fc2.weight"]  # NaN
    assert 0 < record["grad_norms"]["layers.0.mlp.fc2.weight"] < 100
    assert len(record["ranks"]) == 4


def test_a_nan_in_the_loss_names_the_micro_batch_and_its_samples(tmp_path: Path):
    """4 data ranks, 2 micro-batches of 2: the second one of rank 2 in the third step is samples 32 + (4 + 2) * 2."""
    answers = ranks(4).run(train_with_a_fault, Case(micro_batches=2, nodes=2, zero=ZEROPP), "output", 2, tmp_path)
    assert [answer[1:] for answer in answers] == [(True, True)] * 4
    lines = answers[0][0].splitlines()
    assert lines[1] == "the loss of micro-batch 1 (samples 44 to 45) is not finite on rank 2"
    assert all(line.endswith("from rank 2") for line in lines[2:-2])


def test_where_whole_copies_are_summed_the_parameter_is_named_and_the_rank_is_said_to_be_unknown(tmp_path: Path):
    answers = ranks(4).run(train_with_a_fault, Case(stage=0, micro_batches=2), "gradient", 1, tmp_path)
    assert [answer[1:] for answer in answers] == [(True, True)] * 4
    line = answers[0][0].splitlines()[1]
    assert line.startswith("layers.1.mlp.fc2.weight: the norm of the gradient is nan, from a rank that is not known")


def test_long_lists_are_cut_and_the_rest_counted():
    norms = {f"p{i}": float("inf") for i in range(10)}
    reports = [StepReport(rank, 5, 1.0, float("nan"), [float("nan")], [], norms) for rank in range(12)]
    lines = describe(reports[0], reports, first_sample=0, micro_batch_size=1).splitlines()
    assert len(lines) == 1 + 8 + 8 + 1
    assert lines[9] == "p0: the norm of the gradient is inf, every rank's own gradient was finite"
    assert lines[-1] == "and 6 more"
