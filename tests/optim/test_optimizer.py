"""Parameter groups, the update on sharded parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.sharded import one_process_model, sharded_model
from torch import nn

from megazpp.optim.optimizer import (
    OptimizerConfig,
    build_optimizer,
    optimizer_backends,
    parameter_groups,
    set_rates_,
)

CPU = torch.device("cpu")
STEPS = 3


def train(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Three steps whose gradient is the parameter itself."""
    config = OptimizerConfig(optimizer=kind, weight_decay=0.1)
    optimizer = build_optimizer(model.named_parameters(), config, CPU)
    for step in range(1, STEPS + 1):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        set_rates_(optimizer, learning_rate=0.1 / step, weight_decay=0.1 * step)
        optimizer.step()
    return optimizer


def train_sharded(tp: int, replicas: int, kind: str) -> tuple[dict[str, torch.Tensor], int]:
    """The full parameters after training, and how many of this rank's shards are empty."""
    model, _ = sharded_model(tp, replicas)
    optimizer = train(model, kind)
    assert bool(optimizer.defaults["fused"]) == (kind == "adam")
    num_empty = sum(parameter.to_local().numel() == 0 for parameter in model.parameters())
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}, num_empty


def adamw_by_hand(value: torch.Tensor, decays: bool) -> torch.Tensor:
    """The published update in fp64, with the schedule of `train`."""
    value, m, v = value.double(), 0.0, 0.0
    for step in range(1, STEPS + 1):
        grad, rate, decay = value.clone(), 0.1 / step, 0.1 * step * decays
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        value = value * (1 - rate * decay)
        value = value - rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return value.float()


def test_one_process_adamw_is_the_published_update_and_decays_only_matrices():
    model = one_process_model()
    expected = {name: adamw_by_hand(p.detach(), decays=p.ndim > 1) for name, p in model.named_parameters()}
    train(model, "adam")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("tp", "replicas"), [(2, 1), (1, 1), (4, 1), (1, 2)])
def test_the_optimizer_updates_shards_empty_ones_too_like_one_process(tp: int, replicas: int, kind: str):
    model = one_process_model()
    train(model, kind)
    results = ranks(4).run(train_sharded, tp, replicas, kind)
    assert any(num_empty for _, num_empty in results) == (tp < 4)
    for result, _ in results:
        for name, parameter in model.named_parameters():
            # vector and scalar tails of the fused kernel may round differently
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-6, atol=1e-7)


def test_the_groups_are_megatrons_biases_and_one_dimensional_parameters_do_not_decay():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3), "embedding": nn.Embedding(4, 3)})
    odd = nn.Parameter(torch.zeros(2, 2))
    named = [*model.named_parameters(), ("odd.bias", odd)]
    decayed, exempt = parameter_groups(named, weight_decay=0.3)
    assert {id(p) for p in decayed["params"]} == {id(model["linear"].weight), id(model["embedding"].weight)}
    assert {id(p) for p in exempt["params"]} == {
        id(model["linear"].bias),
        id(model["norm"].weight),
        id(model["norm"].bias),
        id(odd),
    }
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.3, 0.0)


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    (only,) = parameter_groups(model.named_parameters(), weight_decay=0.1)
    assert only["params"] == [model.weight]
    assert only["wd_mult"] == 1.0


def test_rates_are_scaled_by_the_groups_multiples():
    optimizer = build_optimizer(nn.Linear(3, 2).named_parameters(), OptimizerConfig(), CPU)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    set_rates_(optimizer, learning_rate=0.2, weight_decay=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_the_defaults_are_megatrons():
    config = OptimizerConfig()
    assert (config.optimizer, config.weight_decay, config.clip_grad, config.sgd_momentum) == ("adam", 0.01, 1.0, 0.9)
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.9, 0.999, 1e-8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"adam_beta2": 1.0}, r"--adam-beta2 1.0 is not in \[0, 1\)"),
        ({"adam_beta1": -0.1}, r"--adam-beta1 -0.1 is not in \[0, 1\)"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is negative"),
        ({"clip_grad": -1.0}, "--clip-grad -1.0 is negative"),
        ({"clip_grad": float("nan")}, "--clip-grad nan is negative"),
        ({"optimizer": "sgd", "optimizer_backend": "apex"}, "--optimizer sgd"),
    ],
)
def test_values_that_cannot_work_are_refused(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**config)


@pytest.mark.gpu
def test_the_fused_optimizer_on_a_gpu_agrees_with_the_cpu():
    on_cpu, on_gpu = one_process_model(), one_process_model().cuda()
    train(on_cpu, "adam")
    train(on_gpu, "adam")
    for ours, theirs in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "implementation"), [("adam", "torch.optim.AdamW(fused=True)"), ("sgd", "torch.optim.SGD(foreach=True)")]
)
def test_the_row_names_the_class_and_the_path_that_is_built(kind: str, implementation: str):
    config = OptimizerConfig(optimizer=kind)
    (_, found, _), *_ = optimizer_backends(config, "cpu")
    optimizer = build_optimizer(nn.Linear(2, 2).named_parameters(), config, torch.device("cpu"))
    path = next(name for name in ("fused", "foreach") if optimizer.defaults[name])
    assert found == f"torch.optim.{type(optimizer).__name__}({path}=True)" == implementation


def test_a_device_without_fused_kernels_says_so():
    row, *_ = optimizer_backends(OptimizerConfig(), "xpu")
    assert row == ("optimizer", "torch.optim.AdamW(foreach=True)", "torch has no fused kernel on xpu")


def test_apex_is_named_when_asked_for():
    row, *_ = optimizer_backends(OptimizerConfig(optimizer_backend="apex"), "cuda")
    assert row[1] == "apex.optimizers.FusedAdam"
