"""Frozen units compute what trained weights do whose gradients nobody wants, and send each weight inside nodes only."""

import functools

import pytest
import torch
from helpers.ranks import ranks
from helpers.stream_races import simulated_streams
from helpers.tiers import slow
from helpers.training import CPU
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from zero.test_streams import BREAKAGES

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.stored.format import LoadRows, at_rest, plan_rows
from megazpp.stored.frozen import FrozenUnits, freeze
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig
from megazpp.zero.sharding import shard_model


def rows_of(weights: dict[str, torch.Tensor]) -> LoadRows:
    return lambda name, rows: weights[name][rows]


def make_dims(nodes: int) -> ParallelDims:
    cluster = Cluster(num_nodes=nodes, ranks_per_node=torch.distributed.get_world_size() // nodes)
    return ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")


WIDTH = 101  # divides nothing


def assert_freed(frozen: FrozenUnits) -> None:
    assert not any(unit.is_unpacked for unit in frozen.units)


class Stack(nn.Module):
    """Three layers and a scale of the model's own."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            with set_checkpoint_early_stop(index == 0):  # else the recomputed forward is whole
                x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x * self.scale


def stack_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Stack().named_parameters()}
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def frozen_stack(
    axis: MeshAxis, *, recompute: bool = False, bits: int | None = None, load: LoadRows | None = None
) -> tuple[Stack, FrozenUnits]:
    with torch.device("meta"):
        model = Stack(recompute)
    units = [[layer] for layer in model.layers]
    return model, freeze(model, units, axis, load or rows_of(stack_weights()), device=CPU, bits=bits)


def plain_stack(weights: dict[str, torch.Tensor]) -> Stack:
    model = Stack()
    model.load_state_dict(weights)
    return model


def rounded_to(weights: dict[str, torch.Tensor], bits: int | None) -> dict[str, torch.Tensor]:
    """The weights, of which the matrices have been in packed rows."""
    found = dict(weights)
    for name, weight in weights.items():
        if weight.dim() == 2:
            rows = plan_rows(WIDTH, *at_rest(bits, torch.float32))
            found[name] = rows.unpack(rows.pack(weight), torch.empty_like(weight))
    return found


def message_bytes(bits: int | None) -> int:
    """Bytes of the messages of all weights, of 51 rows of the 101 each."""
    row_bytes = {None: 4 * WIDTH, 8: 144, 4: 80}[bits]  # 128 + 4 and 64 + 8, to a multiple of 16
    vector = 208  # 51 elements of fp32, to a multiple of 16
    return 3 * (-(-51 * row_bytes // 16) * 16 + vector) + vector


def assert_same(model: Stack, plain: Stack, x: torch.Tensor) -> None:
    """Outputs and gradients of inputs, bit for bit."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [each(one) for each, one in zip((model, plain), inputs, strict=True)]
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def use_stack(bits: int | None, recompute: bool) -> None:
    dims, weights, held = make_dims(2), stack_weights(), []
    asked: list[tuple[str, int]] = []

    def load(name: str, rows: slice) -> torch.Tensor:
        asked.append((name, rows.stop - rows.start))
        return weights[name][rows]

    model, frozen = frozen_stack(dims.twin("local", "frozen"), bits=bits, recompute=recompute, load=load)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: held.append(sum(u.is_unpacked for u in frozen.units)), prepend=True)

    assert_same(model, plain_stack(rounded_to(weights, bits)), torch.randn(5, WIDTH))

    assert sorted(name for name, _ in asked) == sorted(weights)
    assert {rows for _, rows in asked} in ({51}, {50})  # of 101, over two ranks
    assert frozen.kept_bytes == message_bytes(bits)
    assert dims.counter.table()["local", "frozen", "all_gather"] == (8, 2 * message_bytes(bits))
    assert dims.counter.sent_bytes("cross") == 0
    assert max(held) == 2  # the layer and the model's own
    assert sum(whole.untyped_storage().nbytes() for unit in frozen.units for _, whole, _ in unit.weights) == 0


@pytest.mark.parametrize(
    ("bits", "recompute"), [(None, False), (8, False), slow(4, False), (None, True)], ids=["16", "8", "4", "again"]
)
def test_a_use_gathers_each_message_inside_the_node_once_and_frees_the_weights(bits, recompute):
    """Four messages forward and again backward: (L - 1) of each from each rank, L = 2."""
    ranks(4).run(use_stack, bits, recompute)


def generate() -> None:
    dims = make_dims(1)
    model, frozen = frozen_stack(dims.twin("local", "frozen"))

    def calls() -> int:
        return dims.counter.table()["local", "frozen", "all_gather"].calls

    with torch.inference_mode():
        with frozen.kept_gathered():
            for _ in range(3):
                model(torch.ones(1, WIDTH))
        assert calls() == 4
        assert_freed(frozen)
        model(torch.ones(1, WIDTH))
    assert calls() == 8
    assert_same(model, plain_stack(stack_weights()), torch.ones(2, WIDTH))  # outside of inference mode


def test_kept_weights_travel_once_for_any_number_of_tokens():
    ranks(2).run(generate)


def use_upper_layers() -> None:
    dims = make_dims(1)
    model, _ = frozen_stack(dims.twin("local", "frozen"))
    with torch.no_grad():
        x = model.layers[0](torch.ones(1, WIDTH))
    y = model.layers[2](model.layers[1](x.requires_grad_()))
    before = dims.counter.table()["local", "frozen", "all_gather"].calls
    y.sum().backward()
    dims.world.share_object(None)
    assert dims.counter.table()["local", "frozen", "all_gather"].calls - before == 2


def test_below_the_first_gradient_nothing_is_gathered_in_backward():
    ranks(2).run(use_upper_layers)


def test_one_rank_holds_the_weights_as_they_are_and_packs_them_where_bits_are_fewer():
    weights, x = stack_weights(), torch.randn(3, WIDTH)
    model, frozen = frozen_stack(MeshAxis("frozen"))
    padding = frozen.kept_bytes - sum(weight.nbytes for weight in weights.values())
    assert 0 <= padding < 7 * 16  # each weight begins at 16 bytes
    assert_same(model, plain_stack(weights), x)
    model, frozen = frozen_stack(MeshAxis("frozen"), bits=8)
    assert_same(model, plain_stack(rounded_to(weights, 8)), x)
    assert_freed(frozen)


def gradients_of_two(model: nn.Module, together: bool) -> list[torch.Tensor]:
    """Of two forwards before their backwards, and one that has none: as of chosen and rejected texts, evaluated too."""
    inputs = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(2)]
    a, b = model(inputs[0]).sum(), model(inputs[1]).square().sum()
    with torch.no_grad():
        model(inputs[0])
    for loss in [a + b] if together else [a, b]:
        loss.backward()
    return [x.grad for x in inputs]


def test_two_forwards_before_their_backwards_and_one_that_has_none():
    model, frozen = frozen_stack(MeshAxis("frozen"), bits=8)
    plain = plain_stack(rounded_to(stack_weights(), 8))
    for together in (False, True):
        assert all(map(torch.equal, gradients_of_two(model, together), gradients_of_two(plain, together)))
        assert_freed(frozen)


def test_a_weight_in_two_places_stays_one():
    with torch.device("meta"):
        model = nn.ModuleDict({"words": nn.Embedding(11, 8), "output": nn.Linear(8, 11, bias=False)})
        model["output"].weight = model["words"].weight
    frozen = freeze(model, [], MeshAxis("frozen"), lambda name, rows: torch.ones(11, 8)[rows], device=CPU)
    assert model["words"].weight is model["output"].weight
    assert frozen.kept_bytes == 4 * 88


def test_rows_of_another_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"scale: rows of shape \(101, 5\) were loaded, not \(101,\)"):
        frozen_stack(MeshAxis("frozen"), load=lambda name, rows: torch.ones(WIDTH, 5))


# ---- beside the training ------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a trained one beside it, in one module, as of LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.trained(x))


def train_adapted(zero: ZeroConfig, freezes: bool) -> tuple[dict[str, torch.Tensor], int]:
    dims = make_dims(2)
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    for layer in model:
        layer.base.requires_grad_(False)
    if freezes:
        bases = nn.ModuleList(layer.base for layer in model)
        weights = {name: p.detach() for name, p in bases.named_parameters()}
        freeze(bases, [[base] for base in bases], dims.twin("local", "frozen"), rows_of(weights), device=CPU)
    sharding = shard_model(model, [[layer] for layer in model], dims, zero=zero)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 3
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for step in range(3):
        for micro_batch in range(2):
            sharding.begin_micro_batch(last=micro_batch == 1)
            seed = 100 * step + 10 * micro_batch + dims.data_rank
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters() if p.requires_grad}
    return found, dims.counter.sent_bytes("cross")


@pytest.mark.parametrize(("zero", "tolerance"), [(ZeroConfig(), 0.0), slow(ZeroConfig(zeropp=True), 0.05)])
def test_trained_weights_beside_frozen_ones_become_the_same_as_beside_weights_without_gradients(zero, tolerance):
    """Bit for bit; with --zeropp the base without frozen units is int8."""
    with_units, without = (ranks(4).run(train_adapted, zero, freezes) for freezes in (True, False))
    assert sum(sent for _, sent in with_units) < sum(sent for _, sent in without)
    for (units, _), (parameters, _) in zip(with_units, without, strict=True):
        torch.testing.assert_close(units, parameters, rtol=0.0, atol=tolerance)


def race_alone(bits: int | None, breakage: str = "") -> list[str]:
    """The races of a frozen model forward and backward, in inference mode, kept for a while, and again."""
    with simulated_streams() as streams, pytest.MonkeyPatch.context() as patch:
        if breakage:
            patch.setattr(*BREAKAGES[breakage])
        model, frozen = frozen_stack(make_dims(2).twin("local", "frozen"), bits=bits)
        for _ in range(3):
            model(torch.ones(2, WIDTH).requires_grad_()).sum().backward()
            with torch.inference_mode(), frozen.kept_gathered():
                for _ in range(2):
                    model(torch.ones(2, WIDTH))
    return streams.found


def race_beside_training() -> list[str]:
    with simulated_streams() as streams:
        train_adapted(ZeroConfig(zeropp=True), True)
    return streams.found


@pytest.mark.parametrize(
    "race", [functools.partial(race_alone, 8), slow(race_beside_training)], ids=["alone", "beside training"]
)
def test_nothing_races_in_a_frozen_model(race):
    assert ranks(4).run(race) == [[]] * 4


@pytest.mark.parametrize("breakage", ["waiting for a work does not wait", slow("a queue does not wait for its caller")])
def test_what_is_broken_is_found(breakage):
    assert all(ranks(4).run(race_alone, None, breakage))
