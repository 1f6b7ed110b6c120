"""Test optimizers on shards: parameter groups, rates, and the updates of torch's and apex's optimizers.

A fake class replaces apex's FusedAdam, which needs CUDA.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.sharded import full_state, one_process_model, sharded_model
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.optim import build as optimizers
from megazpp.optim.apex import check_apex
from megazpp.optim.build import build_optimizer
from megazpp.optim.clip import divide_grads_
from megazpp.optim.config import OptimizerConfig
from megazpp.optim.optimizer import parameter_groups, set_rates_, skips_on_device, update_

CPU = torch.device("cpu")


class FakeFusedAdam(torch.optim.AdamW):
    """Fake of apex's FusedAdam: it counts steps in the parameter group and not in the state, and rejects DTensors."""

    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)

    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                assert p.numel() > 0
                assert not any(isinstance(x, DTensor) for x in (p.data, p.grad, *self.state[p].values()))
                self.state[p]["step"] = torch.tensor(float(group["step"]))
            group["step"] += 1
        super().step()


def build(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Build the optimizer `kind` for the model: "adam" or "sgd" of torch, or "apex" (a fake FusedAdam)."""
    name, backend = ("adam", "apex") if kind == "apex" else (kind, "torch")
    constants = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "sgd_momentum": 0.7}
    config = OptimizerConfig(optimizer=name, optimizer_backend=backend, **constants)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=FakeFusedAdam))
        patch.setattr(optimizers, "check_apex", lambda device_type: None)
        return build_optimizer(model, config)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 1) -> None:
    """Prepare an optimizer step: set learning rate and weight decay, and use each parameter's value as its gradient."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    set_rates_(optimizer, learning_rate=0.1 / step, weight_decay=0.1 * step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for step in (1, 2, 3):
        prepare(model, optimizer, step)
        optimizer.step()
    return optimizer


def compare_with_one_process(kind: str, tp: int) -> bool:
    """Train a sharded model and an unsharded one, and compare their weights.

    Return True if a shard of this rank is empty.
    """
    whole, (model, _) = one_process_model(), sharded_model(tp, 1)
    train(whole, build(whole, "sgd" if kind == "sgd" else "adam"))
    optimizer = train(model, build(model, kind))
    assert bool(optimizer.defaults.get("fused")) == (kind == "adam")
    if kind == "apex":
        assert all(isinstance(moment, DTensor) for state in optimizer.state.values() for moment in state.values())
        assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    for name, parameter in whole.named_parameters():
        ours = model.get_parameter(name).detach().full_tensor()
        # torch's fused AdamW may round elements of its vectorized loop and of the remainder differently.
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-6, atol=1e-7)
    return any(parameter.to_local().numel() == 0 for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "tp"), [("adam", 2), ("sgd", 4), ("apex", 1), ("apex", 2)])
def test_optimizer_updates_shards_like_one_process(kind, tp):
    assert any(ranks(4).run(compare_with_one_process, kind, tp)) == (tp < 4)


def compare_with_torch(tp: int, replicas: int) -> None:
    """Compare updates by this project's AdamW and by torch's, before and after the two optimizers exchange states."""
    model, theirs = (sharded_model(tp, replicas)[0] for _ in range(2))
    optimizer, divisor = build(model, "adam"), torch.tensor(3.7)
    groups = parameter_groups(theirs.named_parameters(), 0.1)
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.95), eps=1e-8, fused=True)
    for swaps in (False, True):
        if swaps:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(reference.state_dict())
            reference.load_state_dict(saved)
        prepare(model, optimizer)
        prepare(theirs, reference)
        update_(optimizer, divisor)
        divide_grads_(theirs.parameters(), divisor)
        reference.step()
        torch.testing.assert_close(full_state(model, optimizer), full_state(theirs, reference), rtol=0, atol=0)
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert all(isinstance(moment, DTensor) for moment in moments)


@pytest.mark.parametrize(("tp", "replicas"), [(2, 1), (1, 2)])
def test_fused_adamw_matches_torch_on_divided_gradients(tp, replicas):
    ranks(4).run(compare_with_torch, tp, replicas)


def test_only_fused_adam_skips_without_the_host():
    """Check which optimizer can skip a step by a flag on the device, which the host does not read."""
    adam, sgd = (build(nn.Linear(3, 2), kind) for kind in ("adam", "sgd"))
    assert [skips_on_device(each) for each in (adam, sgd)] == [True, False]
    with pytest.raises(AssertionError, match="cannot skip a step on the device"):
        update_(sgd, torch.tensor(1.0), torch.tensor(0.0))


def test_restored_apex_state_continues_unchanged():
    ends = []
    for resumes in (True, False):
        model = one_process_model()
        optimizer = train(model, build(model, "apex"))
        if resumes:
            saved, optimizer = optimizer.state_dict(), build(model, "apex")
            optimizer.load_state_dict(saved)
        train(model, optimizer)
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_apex_is_refused_where_it_cannot_run(tmp_path, monkeypatch):
    missing = "apex.optimizers.FusedAdam is not installed"
    assert not not_refused([("cpu", "--optimizer-backend apex needs a CUDA device, but this run uses cpu")], check_apex)
    assert not not_refused([("cuda", missing), ("cuda", "or use --optimizer-backend torch")], check_apex)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "apex" / "optimizers").mkdir(parents=True)
    # Make a package like the unrelated `apex` on PyPI. The check must not import it.
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert not not_refused([("cuda", missing)], check_apex)
    (tmp_path / "apex" / "optimizers" / "fused_adam.py").touch()
    assert not not_refused([("cuda", "amp_C is not installed")], check_apex)
    (tmp_path / "amp_C.py").touch()
    check_apex("cuda")


def test_groups_without_weight_decay_equal_megatrons():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3), "embedding": nn.Embedding(4, 3)})
    odd = nn.Parameter(torch.zeros(2, 2))
    decayed, exempt = parameter_groups([*model.named_parameters(), ("odd.bias", odd)], weight_decay=0.3)
    assert {*map(id, decayed["params"])} == {id(model["linear"].weight), id(model["embedding"].weight)}
    assert {*map(id, exempt["params"])} == {*map(id, (model["linear"].bias, *model["norm"].parameters(), odd))}
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.3, 0.0)
    model["linear"].bias.requires_grad_(False)  # frozen parameters and empty parameter groups must be left out
    (only,) = parameter_groups(model["linear"].named_parameters(), weight_decay=0.1)
    assert (only["params"], only["wd_mult"]) == ([model["linear"].weight], 1.0)


def test_rates_are_scaled_by_group_multiples():
    optimizer = build(nn.Linear(3, 2), "adam")
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    optimizer.param_groups[1]["lr_mult"] = 3.0
    set_rates_(optimizer, learning_rate=0.25, weight_decay=0.5)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.25, 0.5), (0.75, 0.0)]


def test_invalid_optimizer_flags_are_refused():
    rows = [
        ({"adam_beta1": -0.1}, "--adam-beta1 -0.1 is not in [0, 1)"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is negative"),
        ({"clip_grad": float("nan")}, "--clip-grad nan is not a number; give 0 or a larger number"),
        ({"optimizer": "sgd", "optimizer_backend": "apex"}, "supports only --optimizer adam, not sgd"),
    ]
    assert not not_refused(rows, lambda config: OptimizerConfig(**config))


@pytest.mark.gpu
def test_fused_optimizer_on_a_gpu_matches_the_cpu():
    on_cpu, on_gpu = one_process_model(), one_process_model().cuda()
    for model in (on_cpu, on_gpu):
        train(model, build(model, "adam"))
    for ours, theirs in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)
