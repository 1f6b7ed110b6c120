"""`shard_model` on a model that is not ours: frozen and unused parameters, what is freed when, quantized and not."""

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.torch_versions import needs_unused_parameters
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import PrecisionConfig, WirePlan, ZeroConfig
from megazpp.zero.sharding import Sharding, shard_model

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
    """Trained, partly and wholly frozen units, and a parameter that no output depends on; 37 rows divide nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.trained, self.partly, self.frozen, self.last = (Block(37) for _ in range(4))
        self.head, self.unused = nn.Linear(37, 5), nn.Linear(3, 3)
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
        return self.head(x).square().sum() * (1 / (SAMPLES * 5))


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


def build(
    zero: ZeroConfig, *, nodes: int = 2, replicas: int = 1, wire: WirePlan | None = None, bf16: bool = False
) -> tuple[Partly, Sharding, ParallelDims]:
    cluster = Cluster(num_nodes=nodes, ranks_per_node=torch.distributed.get_world_size() // nodes)
    config = ParallelConfig(num_distributed_optimizer_instances=replicas)
    dims = ParallelDims(plan_dims(config, cluster, zero_stage=zero.stage), device_type="cpu")
    model, precision = Partly(), PrecisionConfig(bf16=bf16)
    return model, shard_model(model, model.units, dims, zero=zero, precision=precision, wire=wire), dims


def train_sharded(zero: ZeroConfig, micro_batches: int, nodes: int = 2) -> Weights:
    bf16 = zero.zero_weight_delta == "lossless"
    model, sharding, dims = build(zero, nodes=nodes, bf16=bf16)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for index, part in enumerate(samples(step).chunk(micro_batches)):
            sharding.begin_micro_batch(last=index == micro_batches - 1)
            mine = part.chunk(dims.data_size)[dims.data_rank]
            model(mine.bfloat16() if bf16 else mine, takes_branch(step, index, micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def assert_trained_alike(found: Weights, expected: Weights) -> None:
    """Sums over ranks and samples in another order, over 4 steps: 1e-5 in fp32."""
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def train_in_all_stages() -> list[Weights]:
    return [train_sharded(ZeroConfig(zero_stage=stage), 3, nodes=1) for stage in range(4)]


@pytest.mark.parametrize("world_size", [1, 4])
def test_with_fsdp2_s_own_collectives_training_is_that_of_one_process(world_size):
    expected = train_plain(3)
    for weights in ranks(world_size).run(train_in_all_stages):
        for of_stage in weights:
            assert_trained_alike(of_stage, expected)


@needs_unused_parameters
@pytest.mark.parametrize("micro_batches", [slow(1), 3])
def test_with_exact_hops_training_is_that_of_one_process(micro_batches):
    expected = train_plain(micro_batches)
    for weights in ranks(4).run(train_sharded, EXACT, micro_batches):
        assert_trained_alike(weights, expected)


@needs_unused_parameters
@pytest.mark.parametrize("delta", ["none", "lossless"])
def test_quantized_gradients_leave_frozen_parameters_alone_and_move_the_others_alike(delta):
    """8-bit weights and 8/4-bit gradients, whose errors come back over five steps: near the way of 4 steps."""
    start, expected = dict(Partly().named_parameters()), train_plain(3)
    frozen = {name for name, p in start.items() if not p.requires_grad}
    assert len(frozen) == 3 + 6
    for weights in ranks(4).run(train_sharded, ZeroConfig(zeropp=True, zero_weight_delta=delta), 3):
        for name, weight in weights.items():
            if name in frozen:
                assert torch.equal(weight, start[name])
                continue
            way = (expected[name] - start[name]).norm()
            assert (weight - expected[name]).norm() <= 0.15 * way, name


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
    first, *rest = ranks(4).run(cross_bytes, ZeroConfig(zeropp=True, zero_weight_delta="lossless"))[0]
    assert {*first} == {"trained", "partly", "frozen", "last", "the rest"}
    assert [{*sent} for sent in rest] == [{*first} - {"frozen"}] * len(rest)


def train_without_switch() -> None:
    said = "the rest: gradients of 76 elements per rank, planned 80: a parameter got no gradient.*torch 2.13"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_reduce_scatter_unused_params", None, raising=False)
        with pytest.raises(RuntimeError, match=said):
            train_sharded(QUANTIZED, 1)


def test_where_torch_cannot_reduce_them_a_parameter_without_a_gradient_is_refused():
    ranks(4).run(train_without_switch)


def freed_after_evaluation() -> list[tuple[bool, bool, float]]:
    """By stage: whether a forward's weights stay gathered, inside `kept_gathered` and after it.

    And the output after all shards have been doubled.
    """
    found = []
    for stage in (1, 2, 3):
        model, sharding, _ = build(ZeroConfig(zero_stage=stage), nodes=1)
        with torch.no_grad():
            with sharding.kept_gathered():
                model(samples(0), True)
                kept = not isinstance(model.last.main.weight, DTensor)
            model(samples(0), True)
            gathered = not isinstance(model.last.main.weight, DTensor)
            sharding.free_gathered()
            torch._foreach_mul_([parameter.to_local() for parameter in model.parameters()], 2.0)
            found.append((kept, gathered, model(samples(0), True).item()))
    return found


def test_after_an_evaluation_the_next_forward_reads_the_shards():
    doubled = Partly()
    with torch.no_grad():
        torch._foreach_mul_(list(doubled.parameters()), 2.0)
        expected = pytest.approx(doubled(samples(0), True).item(), rel=1e-5)
    for found in ranks(2).run(freed_after_evaluation):
        assert found == [(True, stage < 3, expected) for stage in (1, 2, 3)]  # stage 3 frees after each use by itself


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
    model, sharding, _ = build(ZeroConfig(), nodes=1, replicas=replicas, bf16=True)
    batches = [part.bfloat16() for part in samples(0).chunk(3)]
    with Counted() as ran:
        for index, batch in enumerate(batches):
            sharding.begin_micro_batch(last=index == 2)
            model(batch, True).backward()
    assert isinstance(model.last.main.weight, DTensor)  # after the last one the update finds the shards
    return ran.counts


def test_copies_of_one_rank_cast_their_weights_once_per_step_and_one_alone_divides_by_nothing():
    for replicas in (1, 2):
        for counts in ranks(replicas).run(one_step, replicas):
            assert counts["to bf16"] == len(list(Partly().parameters()))
            assert replicas > 1 or not any("div" in name for name in counts)


def num_two_hop_gathers(wire: WirePlan | None) -> int:
    return len(build(QUANTIZED, wire=wire)[1]._gathers)


def test_the_wire_plan_that_was_shown_is_the_one_that_is_used():
    """It is not made a second time out of the flags: an empty plan leaves FSDP2's collectives, whatever they say."""
    assert ranks(2).run(num_two_hop_gathers, None) == [5, 5]
    assert ranks(2).run(num_two_hop_gathers, WirePlan()) == [0, 0]
