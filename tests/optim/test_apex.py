"""The apex back end: refused where it cannot run, and its bridge to DTensors, with a stand-in for the kernels."""

import contextlib
import sys
import types
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.sharded import one_process_model, sharded_model
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

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
            rates = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            for p in (p for p in group["params"] if p.grad is not None):
                tensors = (p.data, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"])
                assert all(x.numel() > 0 and not isinstance(x, DTensor) for x in tensors)
                before = torch.tensor(group["step"] - 1.0)
                settings = {"amsgrad": False, "maximize": False, "beta1": beta1, "beta2": beta2, **rates}
                adamw(*([x] for x in tensors), [], [before], **settings)


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


def apex_adam(model: torch.nn.Module) -> ApexAdam:
    return ApexAdam(parameter_groups(model.named_parameters(), 0.1), betas=(0.9, 0.999), eps=1e-8)


def train_sharded(tp: int) -> dict[str, torch.Tensor]:
    with fake_apex():
        model, _ = sharded_model(tp, 1)
        optimizer = apex_adam(model)
        train(model, optimizer)
    assert all(isinstance(moment, DTensor) for state in optimizer.state.values() for moment in state.values())
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bridge_lends_apex_plain_shards_and_gets_the_update_of_torch(tp):
    model = one_process_model()
    groups = parameter_groups(model.named_parameters(), 0.1)
    train(model, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8))
    for result in ranks(4).run(train_sharded, tp):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_saved_state_continues_where_it_was():
    ends = []
    for resumes in (True, False):
        with fake_apex():
            model = one_process_model()
            optimizer = apex_adam(model)
            train(model, optimizer)
            if resumes:
                saved, optimizer = optimizer.state_dict(), apex_adam(model)
                optimizer.load_state_dict(saved)
            train(model, optimizer)
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_apex_is_refused_where_it_cannot_run(tmp_path, monkeypatch):
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
