"""Test `shard_model` on a model that is no GPT: frozen and unused parameters, freeing of weights, quantization."""

from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from torch import nn
from torch.distributed.tensor import DTensor
from zero.test_launches import Launches

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig
from megazpp.zero.plan import plan_comm
from megazpp.zero.sharding import Sharding, shard_model

EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
QUANTIZED, LOSSLESS = ZeroConfig(zeropp=True), ZeroConfig(zeropp=True, zero_weight_delta="lossless")
STEPS, SAMPLES = 3, 12

Weights = dict[str, torch.Tensor]


class Block(nn.Module):
    """A layer with a branch that some micro-batches do not take, so that its parameters then get no gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.branch, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, take_branch: bool) -> torch.Tensor:
        x = x + torch.tanh(self.main(self.norm(x)))
        return x + torch.tanh(self.branch(x)) if take_branch else x


class Partly(nn.Module):
    """A model with trained, partly frozen and frozen sharding units, and a layer that no forward uses.

    Its width of 37 is a prime, so shards of all layers need padding.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.trained, self.partly, self.frozen, self.last = (Block(37) for _ in range(4))
        self.head, self.unused = nn.Linear(37, 5), nn.Linear(3, 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.15, generator=generator)
        self.partly.main.requires_grad_(False)
        self.partly.norm.weight.requires_grad_(False)
        self.frozen.requires_grad_(False)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return self.trained, self.partly, self.frozen, self.last

    def forward(self, x: torch.Tensor, take_branch: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, take_branch)
        return self.head(x).square().sum() * (1 / (SAMPLES * 5))


def samples(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 37, generator=torch.Generator().manual_seed(step))


def build(
    zero: ZeroConfig, *, nodes: int = 2, replicas: int = 1, wire: CommPlan | None = None, bf16: bool = False
) -> tuple[Partly, Sharding, ParallelDims]:
    cluster = Cluster(num_nodes=nodes, ranks_per_node=torch.distributed.get_world_size() // nodes)
    config = ParallelConfig(num_distributed_optimizer_instances=replicas)
    dims = ParallelDims(plan_dims(config, cluster, zero_stage=zero.stage), device_type="cpu")
    model, precision = Partly(), PrecisionConfig(bf16=bf16)
    units = [[block] for block in model.blocks]
    wire = plan_comm(zero, dims.layout, precision.param_dtype) if wire is None else wire
    return model, shard_model(model, units, dims, zero=zero, precision=precision, wire=wire), dims


def train(zero: ZeroConfig | None, micro_batches: int, nodes: int = 2) -> Weights:
    """Train with ZeRO, or in one process if `zero` is None; return the final unsharded weights by name."""
    bf16 = zero is not None and zero.zero_weight_delta == "lossless"
    model, sharding, dims = build(zero, nodes=nodes, bf16=bf16) if zero else (Partly(), None, None)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    for step in range(STEPS):
        for index, part in enumerate(samples(step).chunk(micro_batches)):
            last, mine = index == micro_batches - 1, part
            if zero:
                sharding.begin_micro_batch(last=last)
                mine = part.chunk(dims.data_size)[dims.data_rank]
            take_branch = step % 2 == 0 if micro_batches == 1 else not last
            model(mine.bfloat16() if bf16 else mine, take_branch).backward()
        with sharding.weight_update() if zero else nullcontext():
            optimizer.step()
        # keeps gradients of zero, so that the momentum of an unused parameter decays
        optimizer.zero_grad(set_to_none=False)
    return {name: p.detach().full_tensor() if zero else p.detach() for name, p in model.named_parameters()}


def assert_trained_alike(found: list[Weights], expected: Weights) -> None:
    """Assert that each rank's weights equal the weights of a training in one process.

    Sums over ranks and samples in another order change weights by up to 1e-5 over 3 steps in fp32.
    """
    torch.testing.assert_close(found, [expected] * len(found), rtol=1e-5, atol=1e-5)


def train_in_all_stages() -> list[Weights]:
    return [train(ZeroConfig(zero_stage=stage), 2, nodes=1) for stage in range(4)]


@pytest.mark.parametrize("world_size", [2, slow(1)])
def test_with_fsdp2_s_own_collectives_training_is_that_of_one_process(world_size):
    for of_stages in ranks(world_size).run(train_in_all_stages):
        assert_trained_alike(of_stages, train(None, 2))


@pytest.mark.parametrize("micro_batches", [slow(1), 3])
def test_with_exact_hops_training_is_that_of_one_process(micro_batches):
    assert_trained_alike(ranks(4).run(train, EXACT, micro_batches), train(None, micro_batches))


@pytest.mark.parametrize("zero", [QUANTIZED, slow(LOSSLESS)], ids=["quantized", "lossless"])
def test_quantized_gradients_leave_frozen_parameters_alone_and_move_the_others_alike(zero):
    """Quantization moves weights away from the exactly trained ones, by at most 15 % of their change in training."""
    start, expected = dict(Partly().named_parameters()), train(None, 3)
    assert sum(not p.requires_grad for p in start.values()) == 3 + 6
    for weights in ranks(4).run(train, zero, 3):
        for name, weight in weights.items():
            # distance by which the exact training has moved the weights; 0 for a frozen parameter
            way = (expected[name] - start[name]).norm()
            assert (weight - expected[name]).norm() <= 0.15 * way, name


def times_that_each_unit_crosses(zero: ZeroConfig) -> Counter[str]:
    with mock.patch.object(MeshAxis, "all_gather", autospec=True, side_effect=MeshAxis.all_gather) as gathers:
        train(zero, 1)
    return Counter(call.kwargs["of"] for call in gathers.call_args_list if call.args[0].name == "cross")


def test_with_differences_a_frozen_unit_sends_once_and_the_others_once_per_step():
    """Count the messages between nodes with lossless deltas, by sharding unit.

    A frozen unit, whose weights no optimizer step changes, must send nothing after its first message.
    """
    expected = {**dict.fromkeys(["trained", "partly", "last", "the rest"], STEPS), "frozen": 1}
    assert ranks(4).run(times_that_each_unit_crosses, LOSSLESS) == [expected] * 4


def freed_after_evaluation() -> None:
    """Evaluate, double the shards, and check that the next forward has the doubled weights and no old ones."""
    for stage in (1, 2, 3):
        model, sharding, _ = build(ZeroConfig(zero_stage=stage), nodes=1)
        with torch.no_grad():
            with sharding.keep_unsharded():
                model(samples(0), True)
                assert not isinstance(model.last.main.weight, DTensor)
            model(samples(0), True)
            # stage 3 frees the unsharded weights after each use
            assert isinstance(model.last.main.weight, DTensor) == (stage == 3)
            sharding.reshard()
            torch._foreach_mul_([parameter.to_local() for parameter in model.parameters()], 2.0)
            doubled = Partly()
            torch._foreach_mul_(list(doubled.parameters()), 2.0)
            expected = doubled(samples(0), True).item()
            assert model(samples(0), True).item() == pytest.approx(expected, rel=1e-5)


def test_after_an_evaluation_the_next_forward_reads_the_shards():
    ranks(2).run(freed_after_evaluation)


def one_step(replicas: int) -> None:
    """Run three bf16 micro-batches with ZeRO-3 in replicas of one rank each, and count casts and divisions."""
    model, sharding, _ = build(ZeroConfig(), nodes=1, replicas=replicas, bf16=True)
    batches = samples(0).bfloat16().chunk(3)
    with Launches() as launches:
        for index, batch in enumerate(batches):
            sharding.begin_micro_batch(last=index == 2)
            model(batch, True).backward()
    # the last backward has resharded the weights, because the optimizer updates the shards
    assert isinstance(model.last.main.weight, DTensor)
    assert launches.found["_to_copy.default torch.bfloat16"] == len(list(model.parameters()))
    assert replicas > 1 or not any("div" in name for name in launches.found)


def test_copies_of_one_rank_cast_their_weights_once_per_step_and_one_alone_divides_by_nothing():
    """Count casts of weights and divisions of gradients in a step of three micro-batches.

    A cast in each micro-batch, or a division of gradients by 1, would change no result, but would take time.
    """
    for replicas in (1, 2):
        ranks(replicas).run(one_step, replicas)


def num_two_hop_gathers(wire: CommPlan | None) -> int:
    return len(build(QUANTIZED, wire=wire)[1]._gathers)


def test_the_wire_plan_that_was_shown_is_the_one_that_is_used():
    """`shard_model` uses the given communication plan instead of the flags: an empty plan keeps FSDP2's collectives."""
    for wire, found in ((None, 5), (CommPlan(), 0)):
        assert ranks(2).run(num_two_hop_gathers, wire) == [found] * 2
