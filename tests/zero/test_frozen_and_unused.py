"""Quantized reduction where not every parameter of a unit has a gradient: it trains as FSDP2 does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.torch_versions import needs_unused_parameters
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig
from megazpp.zero.sharding import shard_model

EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
QUANTIZED = ZeroConfig(zeropp=True)
STEPS, SAMPLES = 4, 12

Weights = dict[str, torch.Tensor]


class Block(nn.Module):
    """A layer with a branch that some micro-batches do not take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.branch, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, take_branch: bool) -> torch.Tensor:
        x = x + torch.tanh(self.main(self.norm(x)))
        return x + torch.tanh(self.branch(x)) if take_branch else x


class Partly(nn.Module):
    """Trained, partly frozen and wholly frozen units; 37 rows divide nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.trained, self.partly, self.frozen, self.last = (Block(37) for _ in range(4))
        self.head = nn.Linear(37, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        self.partly.main.requires_grad_(False)
        self.partly.norm.weight.requires_grad_(False)
        self.frozen.requires_grad_(False)

    @property
    def units(self) -> list[list[nn.Module]]:
        return [[self.trained], [self.partly], [self.frozen], [self.last]]

    def forward(self, x: torch.Tensor, take_branch: bool) -> torch.Tensor:
        for block in (self.trained, self.partly, self.frozen, self.last):
            x = block(x, take_branch)
        return self.head(x).square().sum() / (SAMPLES * 5)


def samples(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 37, generator=torch.Generator().manual_seed(step))


def takes_branch(step: int, micro_batch: int, micro_batches: int) -> bool:
    """Every second step if there is one micro-batch, all but the last micro-batch otherwise."""
    return step % 2 == 0 if micro_batches == 1 else micro_batch < micro_batches - 1


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)


def train_plain(micro_batches: int) -> Weights:
    model = Partly()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for index, part in enumerate(samples(step).chunk(micro_batches)):
            model(part, takes_branch(step, index, micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # no gradient is a gradient of zero to the momentum
    return {name: p.detach() for name, p in model.named_parameters()}


def train_sharded(zero: ZeroConfig, micro_batches: int) -> Weights:
    cluster = Cluster(num_nodes=2, ranks_per_node=2)
    dims = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")
    model = Partly()
    sharding = shard_model(model, model.units, dims, zero=zero)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for index, part in enumerate(samples(step).chunk(micro_batches)):
            sharding.begin_micro_batch(last=index == micro_batches - 1)
            mine = part.chunk(dims.data_size)[dims.data_rank]
            model(mine, takes_branch(step, index, micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@needs_unused_parameters
@pytest.mark.parametrize("micro_batches", [slow(1), 3])
def test_frozen_and_unused_parameters_train_as_in_one_process(micro_batches: int):
    """fp32 sums in another order over 4 steps: 1e-5. With FSDP2's own collectives test_sharding.py shows it."""
    expected = train_plain(micro_batches)
    for weights in ranks(4).run(train_sharded, EXACT, micro_batches):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@needs_unused_parameters
@pytest.mark.parametrize(("micro_batches", "bits"), [slow(1, (8, 8)), (3, (8, 8)), (3, (16, 4)), slow(1, (8, 4))])
def test_quantized_gradients_leave_frozen_parameters_alone_and_move_the_others_alike(
    micro_batches: int, bits: tuple[int, int]
):
    """8-bit weights and 8/4-bit gradients, whose errors come back over five steps: near the way of 4 steps."""
    start, expected = dict(Partly().named_parameters()), train_plain(micro_batches)
    frozen = {name for name, p in start.items() if not p.requires_grad}
    assert len(frozen) == 3 + 6
    for weights in ranks(4).run(train_sharded, dataclasses.replace(QUANTIZED, zero_weight_bits=bits), micro_batches):
        for name, weight in weights.items():
            if name in frozen:
                assert torch.equal(weight, start[name])
                continue
            way = (expected[name] - start[name]).norm()
            assert (weight - expected[name]).norm() < 0.15 * way, name


def cross_bytes(zero: ZeroConfig) -> list[dict[str, int]]:
    """What each step sends between nodes, by unit."""
    sent: list[dict[str, int]] = [{}]
    original = MeshAxis.all_gather

    def counted(axis: MeshAxis, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if axis.name == "cross":
            sent[-1][of] = sent[-1].get(of, 0) + x.nbytes
        return original(axis, x, out=out, of=of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshAxis, "all_gather", counted)
        after_steps = register_optimizer_step_post_hook(lambda *_: sent.append({}))
        train_sharded(zero, 1)
        after_steps.remove()
    return sent[:STEPS]


@needs_unused_parameters
def test_with_differences_a_frozen_unit_sends_once_and_the_others_once_per_step():
    first, *rest = ranks(4).run(cross_bytes, ZeroConfig(zeropp=True, zero_weight_bits=(16, 4)))[0]
    assert {*first} == {"trained", "partly", "frozen", "last", "the rest"}
    for sent in rest:
        assert {*sent} == {*first} - {"frozen"}
        assert all(sent[unit] < first[unit] for unit in ("trained", "partly", "last"))
        assert sent == rest[0]


def train_without_switch() -> None:
    said = "last: gradients of 400 elements per rank, planned 780: a parameter got no gradient.*torch 2.13"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_reduce_scatter_unused_params", None, raising=False)
        with pytest.raises(RuntimeError, match=said):
            train_sharded(QUANTIZED, 1)


def test_where_torch_cannot_reduce_them_a_parameter_without_a_gradient_is_refused():
    ranks(4).run(train_without_switch)
