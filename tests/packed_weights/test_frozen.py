"""Test frozen units.

Models with frozen units compute exactly like models with plain frozen weights, and send weights only inside nodes.
"""

import functools
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.stream_races import simulated_streams
from helpers.tiers import slow
from helpers.training import CPU
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megazpp.packed_weights.format import LoadRows, at_rest, plan_rows
from megazpp.packed_weights.frozen import FrozenUnits, freeze
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig
from megazpp.zero.plan import plan_comm
from megazpp.zero.sharding import shard_model

WIDTH = 101  # rows and columns of each matrix, divisible neither by the number of ranks nor by a block size


class Stack(nn.Module):
    """A model of three layers (a frozen unit each), and a scale, which is in the unit of the whole model."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            # Test both ways: torch may stop the recomputation of layer 0 early, and recomputes the other layers fully
            with set_checkpoint_early_stop(index == 0):
                x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x * self.scale


@functools.cache
def stack_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: 0.2 * torch.randn(p.shape, generator=generator) for name, p in Stack().named_parameters()}


def rows_of_stack(name: str, rows: slice) -> torch.Tensor:
    return stack_weights()[name][rows]


def frozen_stack(
    axis: MeshAxis, *, recompute: bool = False, bits: int | None = None, load: LoadRows = rows_of_stack
) -> tuple[Stack, FrozenUnits]:
    with torch.device("meta"):
        model = Stack(recompute)
    return model, freeze(model, [[layer] for layer in model.layers], axis, load, device=CPU, bits=bits)


def plain_stack(bits: int | None) -> Stack:
    """Return a reference model without frozen units.

    Its matrices have the values that packing in `bits` and unpacking gives.
    """
    model, rows = Stack(), plan_rows(WIDTH, *at_rest(bits, torch.float32))
    model.load_state_dict(stack_weights())
    for layer in model.layers:
        rows.unpack(rows.pack(layer.weight.detach()), layer.weight.data)
    return model


def assert_same(model: Stack, frozen: FrozenUnits, bits: int | None) -> None:
    """Check that a frozen model's outputs and input gradients are bit-identical to `plain_stack`'s.

    Afterwards no unit may have unpacked weights in memory.
    """
    x, found = torch.randn(5, WIDTH, requires_grad=True), []
    for each in (model, plain_stack(bits)):
        y, x.grad = each(x), None
        y.square().sum().backward()
        found.append((y, x.grad))
    assert all(map(torch.equal, *found))
    assert not any(unit.is_unpacked for unit in frozen.units)


def make_dims(nodes: int) -> ParallelDims:
    cluster = Cluster(num_nodes=nodes, ranks_per_node=torch.distributed.get_world_size() // nodes)
    return ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")


def gathers(dims: ParallelDims) -> tuple[int, int]:
    """Return the number of all-gathers of frozen units by this rank so far, and the bytes that they sent."""
    return dims.counter.table()["local", "frozen", "all_gather"]


def use_stack(bits: int | None, recompute: bool) -> None:
    """Check which rows a frozen model on two ranks loads, what it sends, and how much memory it takes.

    The ranks share 101 rows: each has 51, and the second rank's last row is padding. Weights start at multiples of 16
    bytes.
    """
    dims, held = make_dims(2), list[int]()
    load = mock.Mock(side_effect=rows_of_stack)
    model, frozen = frozen_stack(dims.twin("local", "frozen"), bits=bits, recompute=recompute, load=load)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: held.append(sum(u.is_unpacked for u in frozen.units)), prepend=True)

    assert_same(model, frozen, bits)

    assert sorted(call.args[0] for call in load.call_args_list) == sorted(stack_weights())
    assert {rows.stop - rows.start for (_, rows), _ in load.call_args_list} == {51 - dims.local.rank}
    # bytes of a row: 101 fp32 elements, or packed elements + bf16 scales + padding
    row_bytes = {None: 4 * WIDTH, 8: 128 + 2 * 2 + 12, 4: 64 + 4 * 2 + 8}[bits]
    vector = 208  # bytes of a vector: 51 fp32 elements, with padding to a multiple of 16
    message_bytes = 3 * (-(-51 * row_bytes // 16) * 16 + vector) + vector
    assert frozen.kept_bytes == message_bytes
    # 8 gathers: 4 units, each in forward and in backward; each sends the messages to one other rank
    assert gathers(dims) == (8, 2 * message_bytes)
    assert dims.counter.sent_bytes("cross") == 0
    assert max(held) == 2  # while a layer computes, only its unit and the unit of the whole model are unpacked
    assert sum(whole.untyped_storage().nbytes() for unit in frozen.units for _, whole, _ in unit.weights) == 0


@pytest.mark.parametrize(
    ("bits", "recompute"), [(None, False), (8, False), slow(4, False), (None, True)], ids=["16", "8", "4", "again"]
)
def test_use_gathers_each_message_once_per_node_and_frees_the_weights(bits, recompute):
    ranks(4).run(use_stack, bits, recompute)


def generate() -> None:
    dims = make_dims(1)
    model, frozen = frozen_stack(dims.twin("local", "frozen"))
    with torch.inference_mode():
        with frozen.keep_unsharded():
            for _ in range(3):
                model(torch.ones(1, WIDTH))
        assert gathers(dims)[0] == 4
        assert not any(unit.is_unpacked for unit in frozen.units)
        model(torch.ones(1, WIDTH))
    assert gathers(dims)[0] == 8
    assert_same(model, frozen, None)  # after inference mode has ended, forward and backward work as in a new model


def test_kept_weights_are_gathered_once_for_any_number_of_tokens():
    ranks(2).run(generate)


def use_upper_layers() -> None:
    dims = make_dims(1)
    model, _ = frozen_stack(dims.twin("local", "frozen"))
    with torch.no_grad():
        x = model.layers[0](torch.ones(1, WIDTH))
    y = model.layers[2](model.layers[1](x.requires_grad_()))
    before = gathers(dims)[0]
    y.sum().backward()
    dims.world.share_object(None)
    assert gathers(dims)[0] - before == 2


def test_backward_gathers_nothing_below_the_first_gradient():
    ranks(2).run(use_upper_layers)


def test_one_rank_uses_weights_in_place_or_packs_them_in_fewer_bits():
    model, frozen = frozen_stack(MeshAxis("frozen"))
    padding = frozen.kept_bytes - sum(weight.nbytes for weight in stack_weights().values())
    assert 0 <= padding < 7 * 16  # each of 7 weights is padded to a multiple of 16 bytes
    assert_same(model, frozen, None)
    assert_same(*frozen_stack(MeshAxis("frozen"), bits=8), 8)


def gradients_of_two(model: nn.Module, together: bool) -> list[torch.Tensor]:
    """Return the input gradients of two forwards. An evaluation runs after both forwards and before any backward.

    Preference training does this with its chosen and rejected texts. If `together` is True, one backward computes the
    gradients of both losses, otherwise two backwards follow each other.
    """
    inputs = [torch.full((3, WIDTH), value, requires_grad=True) for value in (0.5, -1.0)]
    a, b = model(inputs[0]).sum(), model(inputs[1]).square().sum()
    with torch.no_grad():
        model(inputs[0])
    for loss in [a + b] if together else [a, b]:
        loss.backward()
    return [x.grad for x in inputs]


@pytest.mark.parametrize("together", [False, True])
def test_two_forwards_before_their_backwards_match_plain_weights(together):
    model, frozen = frozen_stack(MeshAxis("frozen"), bits=8)
    assert all(map(torch.equal, gradients_of_two(model, together), gradients_of_two(plain_stack(8), together)))
    assert not any(unit.is_unpacked for unit in frozen.units)


def test_weight_in_two_places_stays_shared():
    with torch.device("meta"):
        model = nn.ModuleDict({"words": nn.Embedding(11, 8), "output": nn.Linear(8, 11, bias=False)})
        model["output"].weight = model["words"].weight
    frozen = freeze(model, [], MeshAxis("frozen"), lambda name, rows: torch.ones(11, 8)[rows], device=CPU)
    assert model["words"].weight is model["output"].weight
    assert frozen.kept_bytes == 4 * 88


def test_rows_of_another_shape_raise_an_error_with_the_name():
    with pytest.raises(ValueError, match=r"scale: rows of shape \(101, 5\) were loaded, but .* expects \(101,\)"):
        frozen_stack(MeshAxis("frozen"), load=lambda name, rows: torch.ones(WIDTH, 5))


# ---- frozen units beside trained weights --------------------------------------------------------------------------


class Adapted(nn.Module):
    """A module that adds the outputs of a frozen layer and a trained layer, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.trained(x))


def train_adapted(zero: ZeroConfig, freezes: bool) -> tuple[list[torch.Tensor], int]:
    """Train three steps of two micro-batches.

    Return the trained weights, and the bytes that this rank sent between nodes. The base is in frozen units if
    `freezes` is True, and in plain weights under FSDP2 otherwise.
    """
    dims = make_dims(2)
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    bases = nn.ModuleList(layer.base for layer in model).requires_grad_(False)
    if freezes:
        weights, axis = {name: p.detach() for name, p in bases.named_parameters()}, dims.twin("local", "frozen")
        freeze(bases, [[base] for base in bases], axis, lambda name, rows: weights[name][rows], device=CPU)
    wire = plan_comm(zero, dims.layout, torch.float32)
    sharding = shard_model(model, [[layer] for layer in model], dims, zero=zero, wire=wire)
    trained = [layer.trained.weight for layer in model]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for step in range(3):
        for micro_batch in range(2):
            sharding.begin_micro_batch(last=micro_batch == 1)
            seed = 100 * step + 10 * micro_batch + dims.data_rank
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
        with sharding.weight_update():
            optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().full_tensor() for weight in trained], dims.counter.sent_bytes("cross")


@pytest.mark.parametrize(("zero", "tolerance"), [slow(ZeroConfig(), 0.0), slow(ZeroConfig(zeropp=True), 0.05)])
def test_adapters_train_equally_on_frozen_units_and_on_plain_weights(zero, tolerance):
    """Compare adapters that were trained beside frozen units and beside plain frozen weights.

    The weights are bit-identical, except with --zeropp, which rounds plain weights to int8 but not frozen units.
    """
    with_units, without = (ranks(4).run(train_adapted, zero, freezes) for freezes in (True, False))
    assert sum(sent for _, sent in with_units) < sum(sent for _, sent in without)
    for (units, _), (parameters, _) in zip(with_units, without, strict=True):
        torch.testing.assert_close(units, parameters, rtol=0.0, atol=tolerance)


def race_alone() -> list[str]:
    """Run a frozen model on simulated CUDA streams, three times; return the races (unordered accesses) that were found.

    The runs are forward, backward, and inference with gathered weights.
    """
    with simulated_streams() as streams:
        model, frozen = frozen_stack(make_dims(2).twin("local", "frozen"), bits=8)
        for _ in range(3):
            model(torch.ones(2, WIDTH).requires_grad_()).sum().backward()
            with torch.inference_mode(), frozen.keep_unsharded():
                for _ in range(2):
                    model(torch.ones(2, WIDTH))
    return streams.found


def race_beside_training() -> list[str]:
    with simulated_streams() as streams:
        train_adapted(ZeroConfig(zeropp=True), True)
    return streams.found


@pytest.mark.parametrize("race", [race_alone, slow(race_beside_training)])
def test_frozen_model_has_no_races_between_streams(race):
    assert ranks(4).run(race) == [[]] * 4
