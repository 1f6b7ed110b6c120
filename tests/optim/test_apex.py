"""The apex back end: refused where it cannot run, and its bridge to DTensors, with a stand-in for the kernels."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.sharded import one_process_model, sharded_model
from torch.distributed.tensor import DTensor

from megazpp.optim.apex import ApexAdam, check_apex
from megazpp.optim.optimizer import parameter_groups, set_rates_


class FakeFusedAdam(torch.optim.Optimizer):
    """apex's interface (step count in the group, moments in the state), and like its kernels no DTensors."""

    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                for tensor in (p.data, p.grad, m, v):
                    assert not isinstance(tensor, DTensor)
                    assert tensor.numel() > 0
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (v / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.addcdiv_(m / (1 - beta1 ** group["step"]), root, value=-group["lr"])


@contextlib.contextmanager
def fake_apex() -> Iterator[None]:
    module = types.ModuleType("apex.optimizers")
    module.FusedAdam = FakeFusedAdam
    with mock.patch.dict(sys.modules, {"apex.optimizers": module}):
        yield


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(1, 4):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        set_rates_(optimizer, learning_rate=0.1 / step, weight_decay=0.1)
        optimizer.step()


def train_sharded(tp: int) -> dict[str, torch.Tensor]:
    with fake_apex():
        model, _ = sharded_model(tp, 1)
        optimizer = ApexAdam(parameter_groups(model.named_parameters(), 0.1), betas=(0.9, 0.999), eps=1e-8)
        train(model, optimizer)
    assert all(isinstance(moment, DTensor) for state in optimizer.state.values() for moment in state.values())
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bridge_lends_apex_plain_shards_and_gets_the_update_of_torch(tp: int):
    model = one_process_model()
    groups = parameter_groups(model.named_parameters(), 0.1)
    train(model, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8))
    for result in ranks(4).run(train_sharded, tp):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_saved_state_continues_where_it_was():
    with fake_apex():
        once, twice = one_process_model(), one_process_model()
        options = {"betas": (0.9, 0.999), "eps": 1e-8}
        first = ApexAdam(parameter_groups(twice.named_parameters(), 0.1), **options)
        train(twice, first)
        second = ApexAdam(parameter_groups(twice.named_parameters(), 0.1), **options)
        second.load_state_dict(first.state_dict())
        train(twice, second)
        straight = ApexAdam(parameter_groups(once.named_parameters(), 0.1), **options)
        train(once, straight)
        train(once, straight)
    for resumed, expected in zip(twice.parameters(), once.parameters(), strict=True):
        assert torch.equal(resumed, expected)


def test_apex_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = "apex.optimizers.FusedAdam is not importable"
    assert not not_refused([("cpu", "--optimizer-backend apex needs a CUDA device, this run is on cpu")], check_apex)
    assert not not_refused([("cuda", missing), ("cuda", "or use --optimizer-backend torch")], check_apex)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "apex" / "optimizers").mkdir(parents=True)
    # the package of that name on PyPI, which must not be imported
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert not not_refused([("cuda", missing)], check_apex)
    (tmp_path / "apex" / "optimizers" / "fused_adam.py").touch()
    assert not not_refused([("cuda", "amp_C is not installed")], check_apex)
    (tmp_path / "amp_C.py").touch()
    check_apex("cuda")
