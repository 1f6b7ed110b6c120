"""Parameter groups, the update on sharded parameters, and what is refused."""

import pytest
import torch
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.sharded import full_state, one_process_model, sharded_model
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.optim.clip import divide_grads_
from megazpp.optim.optimizer import (
    OptimizerConfig,
    build_optimizer,
    parameter_groups,
    set_rates_,
    skips_on_device,
    update_,
)

CPU = torch.device("cpu")
STEPS = 3


def train(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Three steps whose gradient is the parameter itself."""
    config = OptimizerConfig(optimizer=kind, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, sgd_momentum=0.7)
    optimizer = build_optimizer(model.named_parameters(), config, CPU)
    for step in range(1, STEPS + 1):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        set_rates_(optimizer, learning_rate=0.1 / step, weight_decay=0.1 * step)
        optimizer.step()
    return optimizer


def compare_with_one_process(kind: str, tp: int, replicas: int) -> bool:
    """Train the sharded model and the whole one; returns True if a shard of this rank is empty."""
    whole, (model, _) = one_process_model(), sharded_model(tp, replicas)
    train(whole, kind)
    assert bool(train(model, kind).defaults["fused"]) == (kind == "adam")
    for name, parameter in whole.named_parameters():
        ours = model.get_parameter(name).detach().full_tensor()
        # vector and scalar tails of the fused kernel may round differently
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-6, atol=1e-7)
    return any(parameter.to_local().numel() == 0 for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "tp", "replicas"), [("adam", 2, 1), ("sgd", 4, 1), ("adam", 1, 2), ("sgd", 1, 1)])
def test_the_optimizer_updates_shards_empty_ones_too_like_one_process(kind, tp, replicas):
    assert any(ranks(4).run(compare_with_one_process, kind, tp, replicas)) == (tp < 4)


def compare_with_torch(tp: int, replicas: int) -> None:
    """Both load what the other has saved, too; ours runs on local tensors and divides gradients inside the step."""
    model, theirs = (sharded_model(tp, replicas)[0] for _ in range(2))
    config = OptimizerConfig(weight_decay=0.1)
    optimizer = build_optimizer(model.named_parameters(), config, CPU)
    groups = parameter_groups(theirs.named_parameters(), 0.1)
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for swaps in (False, True):
        if swaps:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(reference.state_dict())
            reference.load_state_dict(saved)
        for each, step in ((model, optimizer), (theirs, reference)):
            for parameter in each.parameters():
                parameter.grad = parameter.detach().clone()
            set_rates_(step, learning_rate=0.1, weight_decay=0.1)
        update_(optimizer, torch.tensor(3.7))
        divide_grads_(theirs.parameters(), torch.tensor(3.7))
        reference.step()
        torch.testing.assert_close(full_state(model, optimizer), full_state(theirs, reference), rtol=0, atol=0)
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert all(isinstance(moment, DTensor) for moment in moments)


@pytest.mark.parametrize(("tp", "replicas"), [(2, 1), (1, 2)])
def test_torch_s_update_of_divided_gradients_has_the_same_bits_and_the_same_state(tp, replicas):
    ranks(4).run(compare_with_torch, tp, replicas)


def skip_a_step() -> None:
    """A step with found_inf changes nothing, and the next one goes on as if there had been none."""
    ends = []
    for skips in (True, False):
        model, _ = sharded_model(2, 1)
        optimizer = train(model, "adam")
        before = full_state(model, optimizer)
        if skips:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
            update_(optimizer, torch.tensor(float("nan")), torch.tensor(1.0))
            torch.testing.assert_close(full_state(model, optimizer), before, rtol=0, atol=0)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        update_(optimizer, torch.tensor(1.0), torch.tensor(0.0))
        ends.append(full_state(model, optimizer))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_with_found_inf_weights_moments_and_the_step_count_stay_as_they_are():
    ranks(4).run(skip_a_step)


def linear_optimizer(kind: str) -> torch.optim.Optimizer:
    return build_optimizer(nn.Linear(3, 2).named_parameters(), OptimizerConfig(optimizer=kind), CPU)


def test_only_the_fused_adam_skips_without_the_host():
    adam, sgd = map(linear_optimizer, ("adam", "sgd"))
    assert [skips_on_device(each) for each in (adam, sgd)] == [True, False]
    with pytest.raises(AssertionError, match="cannot skip a step by itself"):
        update_(sgd, torch.tensor(1.0), torch.tensor(0.0))


def test_the_groups_are_megatrons_biases_and_one_dimensional_parameters_do_not_decay():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3), "embedding": nn.Embedding(4, 3)})
    odd = nn.Parameter(torch.zeros(2, 2))
    decayed, exempt = parameter_groups([*model.named_parameters(), ("odd.bias", odd)], weight_decay=0.3)
    assert {id(p) for p in decayed["params"]} == {id(model["linear"].weight), id(model["embedding"].weight)}
    rest = (model["linear"].bias, model["norm"].weight, model["norm"].bias, odd)
    assert {id(p) for p in exempt["params"]} == set(map(id, rest))
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.3, 0.0)
    model["linear"].bias.requires_grad_(False)  # frozen parameters and empty groups are left out
    (only,) = parameter_groups(model["linear"].named_parameters(), weight_decay=0.1)
    assert (only["params"], only["wd_mult"]) == ([model["linear"].weight], 1.0)


def test_rates_are_scaled_by_the_groups_multiples():
    optimizer = linear_optimizer("adam")
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    optimizer.param_groups[1]["lr_mult"] = 3.0
    set_rates_(optimizer, learning_rate=0.25, weight_decay=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.75]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_values_that_cannot_work_are_refused():
    rows = [
        ({"adam_beta1": -0.1}, "--adam-beta1 -0.1 is not in [0, 1)"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is negative"),
        ({"clip_grad": float("nan")}, "--clip-grad nan is negative"),
        ({"optimizer": "sgd", "optimizer_backend": "apex"}, "--optimizer sgd"),
    ]
    assert not not_refused(rows, lambda config: OptimizerConfig(**config))


@pytest.mark.gpu
def test_the_fused_optimizer_on_a_gpu_agrees_with_the_cpu():
    on_cpu, on_gpu = one_process_model(), one_process_model().cuda()
    train(on_cpu, "adam")
    train(on_gpu, "adam")
    for ours, theirs in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)
