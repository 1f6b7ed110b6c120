"""`shard_model` on a model that is not ours: odd sizes, frozen and unused parameters, what is freed when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import PrecisionConfig, WirePlan, ZeroConfig
from megazpp.zero.sharding import Sharding, shard_model

RATE = 0.1


class Odd(nn.Module):
    """Sizes that divide nothing (1, 5, 7), a frozen layer, and a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.frozen, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.unused = nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x))))).sum()


def samples(step: int, first: int, count: int) -> torch.Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[first : first + count]


def plain_weights() -> dict[str, torch.Tensor]:
    model = Odd()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for step in range(3):
        model(samples(step, 0, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def build(
    stage: int, replicas: int = 1, precision: PrecisionConfig | None = None
) -> tuple[Odd, Sharding, ParallelDims]:
    cluster = Cluster(num_nodes=1, ranks_per_node=torch.distributed.get_world_size())
    config = ParallelConfig(num_distributed_optimizer_instances=replicas)
    dims = ParallelDims(plan_dims(config, cluster, zero_stage=stage), device_type="cpu")
    model = Odd()
    units = [[model.first], [model.frozen, model.last]]
    return model, shard_model(model, units, dims, zero=ZeroConfig(zero_stage=stage), precision=precision), dims


def train(stage: int, micro_batches: int) -> dict[str, torch.Tensor]:
    model, sharding, dims = build(stage)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    size = 12 // dims.data_size // micro_batches
    for step in range(3):
        for index in range(micro_batches):
            sharding.begin_micro_batch(last=index == micro_batches - 1)
            model(samples(step, (index * dims.data_size + dims.data_rank) * size, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_odd_frozen_and_unused_parameters_train_as_in_one_process(world_size: int, stage: int):
    """The sum over ranks of sums over samples is the sum over all samples: fp32 rounding only."""
    expected = plain_weights()
    for weights in ranks(world_size).run(train, stage, 3):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def freed_after_evaluation(stage: int) -> tuple[bool, float]:
    """Whether weights stay gathered after an evaluation; the output after all shards have been doubled."""
    model, sharding, _ = build(stage)
    with torch.no_grad():
        model(samples(0, 0, 4))
        gathered = not isinstance(model.first.weight, DTensor)
        sharding.free_gathered()
        torch._foreach_mul_([parameter.to_local() for parameter in model.parameters()], 2.0)
        return gathered, model(samples(0, 0, 4)).item()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_an_evaluation_the_next_forward_reads_the_shards(stage: int):
    doubled = Odd()
    with torch.no_grad():
        torch._foreach_mul_(list(doubled.parameters()), 2.0)
    expected = doubled(samples(0, 0, 4)).item()
    for gathered, seen in ranks(2).run(freed_after_evaluation, stage):
        assert gathered is (stage < 3)  # stage 3 frees after each use by itself
        assert seen == pytest.approx(expected, rel=1e-6)


class Counted(TorchDispatchMode):
    """How often an operation with a tensor result ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name == "aten::_to_copy" and isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
            name = "to bf16"
        self.counts[name] += 1
        return result


def one_step(replicas: int) -> Counter[str]:
    """Operations of a step of three micro-batches in bf16 under stage 3."""
    model, sharding, _ = build(3, replicas, precision=PrecisionConfig(bf16=True))
    batches = [samples(0, index * 4, 4).bfloat16() for index in range(3)]
    with Counted() as ran:
        for index, batch in enumerate(batches):
            sharding.begin_micro_batch(last=index == 2)
            model(batch).backward()
    assert isinstance(model.first.weight, DTensor)  # after the last one the update finds the shards
    return ran.counts


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_one_rank_cast_their_weights_once_per_step_and_one_alone_divides_by_nothing(replicas: int):
    for counts in ranks(replicas).run(one_step, replicas):
        assert counts["to bf16"] == 8  # parameters, of which two are used by nobody
        assert replicas > 1 or not any("div" in name for name in counts)


def test_the_stage_follows_from_the_flags_and_is_at_most_two_on_one_rank():
    assert [ZeroConfig(zero_stage=stage).stage_over(1) for stage in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert [ZeroConfig(zero_stage=stage).stage_over(2) for stage in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert (ZeroConfig().stage, ZeroConfig(use_distributed_optimizer=True).stage) == (3, 1)
    assert ZeroConfig(zero_stage=2, use_distributed_optimizer=True).stage == 2


def num_two_hop_gathers(wire: WirePlan | None) -> int:
    cluster = Cluster(num_nodes=2, ranks_per_node=1)
    dims = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")
    model, zero = Odd(), ZeroConfig(zeropp=True)
    return len(shard_model(model, [[model.first], [model.frozen, model.last]], dims, zero=zero, wire=wire)._gathers)


def test_the_wire_plan_that_was_shown_is_the_one_that_is_used():
    """It is not made a second time out of the flags: an empty plan leaves FSDP2's collectives, whatever they say."""
    assert ranks(2).run(num_two_hop_gathers, None) == [3, 3]
    assert ranks(2).run(num_two_hop_gathers, WirePlan()) == [0, 0]
