"""Frozen units compute what trained weights do whose gradients nobody wants, and send each weight inside nodes only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.stream_races import simulated_streams
from helpers.tiers import slow
from helpers.training import CPU, LLAMA_STYLE, Case, build_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from zero.test_streams import break_something

from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.stored.freeze import LoadRows, freeze, frozen_axis
from megazpp.stored.frozen import FrozenUnits
from megazpp.stored.packed import Bits, at_rest, plan_rows
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.sharding import shard_model

BF16 = PrecisionConfig(bf16=True)


def rows_of(weights: dict[str, torch.Tensor]) -> LoadRows:
    return lambda name, rows: weights[name][rows]


def make_dims(nodes: int, *, tp: int = 1, threads: bool = True) -> ParallelDims:
    world = torch.distributed.get_world_size()
    cluster = Cluster(num_nodes=nodes, ranks_per_node=world // nodes)
    layout = plan_dims(ParallelConfig(tensor_model_parallel_size=tp), cluster, zero_stage=3)
    return ParallelDims(layout, device_type="cpu", threads=threads)


# ---- a GPT, over tensor-parallel and data ranks ------------------------------------------------------------------


def losses_and_gradient(model: GPTModel, case: Case, dims: ParallelDims) -> list[torch.Tensor]:
    """Two batches' losses and the gradient of what comes out of the embedding, which nothing is trained below."""
    found: list[torch.Tensor] = []

    def cut(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1]

    hook = model.embedding.register_forward_hook(cut)
    size = case.global_batch // dims.data_size
    results = []
    for step in range(2):
        batch = case.batch(step, dims.data_rank * size, size)
        losses = model(batch.tokens, batch.labels, position_ids=batch.position_ids)
        losses.sum().backward()
        results += [losses.detach(), found[-1].grad]
    hook.remove()
    return results


def compare_gpt(case: Case) -> tuple[bool, dict[str, int], int]:
    """Whether every bit is equal, what the frozen model's two batches sent inside and between nodes, what it keeps."""
    model, _, dims = build_on_ranks(case)
    weights = {name: tp_part(parameter) for name, parameter in model.named_parameters()}
    expected = losses_and_gradient(model, case, dims)
    with torch.device("meta"):
        settings = {"tp": dims.tp, "sequence_parallel": case.sequence_parallel, "product": case.product}
        twin = GPTModel(case.model, vocab_size=case.vocab_size, **settings)
    axis = frozen_axis(dims)
    frozen = freeze(twin, twin.sharding_units(), axis, rows_of(weights), device=CPU, dtype=case.precision.param_dtype)
    assert list(twin.parameters()) == []
    before = {wire: dims.counter.sent_bytes(wire) for wire in ("local", "cross")}
    results = losses_and_gradient(twin, case, dims)
    sent = {wire: dims.counter.sent_bytes(wire) - before[wire] for wire in before}
    assert all(unit.is_unpacked == (unit.message is None) for unit in frozen.units)
    equal = all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    return equal, sent, frozen.kept_bytes


def tp_part(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded parameter, as far as tensor parallelism leaves it whole."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names
    full = parameter.detach().full_tensor()
    if "tp" in names:
        tp = names.index("tp")
        placement = parameter.placements[tp]
        if not placement.is_replicate():
            return full.chunk(parameter.device_mesh.size(tp), placement.dim)[parameter.device_mesh.get_local_rank(tp)]
    return full


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, {"nodes": 2, "model": LLAMA_STYLE, "precision": BF16}),
        (4, {"nodes": 1, "tp": 2, "sequence_parallel": True}),
        slow(4, {"nodes": 2}),
        slow(4, {"nodes": 2, "tp": 2, "model": LLAMA_STYLE}),
        slow(8, {"nodes": 2, "tp": 2, "model": LLAMA_STYLE, "precision": BF16}),
        slow(4, {"nodes": 2, "tp": 2, "model": LLAMA_STYLE, "float8": "hybrid"}),
        slow(8, {"nodes": 2, "replicas": 2}),
        slow(1, {}),
    ],
    ids=["llama-bf16", "tp-sequence", "nodes", "tp-nodes", "tp-data-nodes", "float8", "copies", "one"],
)
def test_in_16_bits_every_bit_is_that_of_a_trained_model_whose_gradients_are_dropped(world: int, case: dict[str, Any]):
    case = Case(**case)
    if case.float8 is not None:
        pytest.importorskip("torchao")
    for equal, sent, kept in ranks(world).run(compare_gpt, case):
        assert equal
        assert sent["cross"] == 0
        local = world // case.nodes // case.tp
        assert (sent["local"] > 0) == (local > 1)
        assert kept > 0


# ---- a stack of layers: what is kept, sent and freed --------------------------------------------------------------

WIDTH = 101  # divides nothing


class Stack(nn.Module):
    """Three layers and a scale of the model's own."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x * self.scale


def stack_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Stack().named_parameters()}
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def frozen_stack(
    axis: MeshAxis, *, recompute: bool = False, bits: Bits | None = None, load: LoadRows | None = None
) -> tuple[Stack, FrozenUnits]:
    with torch.device("meta"):
        model = Stack(recompute)
    units = [[layer] for layer in model.layers]
    return model, freeze(model, units, axis, load or rows_of(stack_weights()), device=CPU, bits=bits)


def plain_stack(weights: dict[str, torch.Tensor]) -> Stack:
    model = Stack()
    model.load_state_dict(weights)
    return model


def rounded_to(weights: dict[str, torch.Tensor], bits: Bits | None) -> dict[str, torch.Tensor]:
    """The weights, of which the matrices have been in packed rows."""
    found = dict(weights)
    for name, weight in weights.items():
        if weight.dim() == 2:
            rows = plan_rows(WIDTH, *at_rest(bits, torch.float32))
            found[name] = rows.unpack(rows.pack(weight), torch.empty_like(weight))
    return found


def message_bytes(bits: Bits | None) -> int:
    """Bytes of the messages of all weights, of 51 rows of the 101 each."""
    row_bytes = {None: 4 * WIDTH, 8: 144, 4: 80}[bits]  # 128 + 4 and 64 + 8, to a multiple of 16
    vector = 208  # 51 elements of fp32, to a multiple of 16
    return 3 * (-(-51 * row_bytes // 16) * 16 + vector) + vector


def use_stack(bits: Bits | None, recompute: bool) -> dict[str, Any]:
    dims = make_dims(2)
    asked: list[tuple[str, int]] = []
    weights = stack_weights()

    def load(name: str, rows: slice) -> torch.Tensor:
        asked.append((name, rows.stop - rows.start))
        return weights[name][rows]

    model, frozen = frozen_stack(frozen_axis(dims), bits=bits, recompute=recompute, load=load)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(dims.data_rank)).requires_grad_()
    held: list[int] = []

    def count(*_: Any) -> None:
        held.append(sum(unit.is_unpacked for unit in frozen.units))

    for layer in model.layers:
        layer.register_forward_hook(count, prepend=True)
    y = model(x)
    forward = dims.counter.table()["local", "frozen", "all_gather"]
    y.sum().backward()
    both = dims.counter.table()["local", "frozen", "all_gather"]
    rounded = rounded_to(weights, bits)
    mine = plain_stack(rounded)
    twin = x.detach().requires_grad_()
    expected = mine(twin)
    expected.sum().backward()
    return {
        "equal": torch.equal(y, expected) and torch.equal(x.grad, twin.grad),
        "asked": asked,
        "forward": forward,
        "both": both,
        "cross": dims.counter.sent_bytes("cross"),
        "message": message_bytes(bits),
        "kept": frozen.kept_bytes,
        "held": held,
        "left": [unit.name for unit in frozen.units if unit.is_unpacked],
        "memory": sum(w.whole.untyped_storage().nbytes() for unit in frozen.units for w in unit.weights),
    }


@pytest.mark.parametrize(
    ("bits", "recompute"), [(None, False), (8, False), slow(4, False), (None, True)], ids=["16", "8", "4", "again"]
)
def test_a_use_gathers_each_message_inside_the_node_once_and_frees_the_weights(bits: Bits | None, recompute: bool):
    """Four layers' worth of messages forward and again backward: (L - 1) of them from each rank, L = 2."""
    for found in ranks(4).run(use_stack, bits, recompute):
        assert found["equal"]
        assert sorted(name for name, _ in found["asked"]) == sorted(stack_weights())
        assert {rows for _, rows in found["asked"]} in ({51}, {50})  # of 101, over two ranks
        assert found["kept"] == found["message"]
        assert found["forward"] == (4, found["message"])
        assert found["both"] == (8, 2 * found["message"])
        assert found["cross"] == 0
        assert max(found["held"]) == 2  # the layer and the model's own
        assert found["left"] == []
        assert found["memory"] == 0


def generate(kept: bool) -> tuple[int, int, list[str]]:
    dims = make_dims(1)
    model, frozen = frozen_stack(frozen_axis(dims))
    x = torch.ones(1, WIDTH)
    with torch.inference_mode():
        if kept:
            with frozen.kept_gathered():
                for _ in range(3):
                    x = model(x)
        else:
            for _ in range(3):
                x = model(x)
    held = [unit.name for unit in frozen.units if unit.is_unpacked]
    trained = torch.ones(2, WIDTH).requires_grad_()
    model(trained).sum().backward()  # what was made in inference mode is of use outside
    return dims.counter.table()["local", "frozen", "all_gather"].calls, frozen.kept_bytes, held


def test_kept_weights_travel_once_for_any_number_of_tokens():
    assert {calls - 8 for calls, _, held in ranks(2).run(generate, False) if held == []} == {3 * 4}
    assert {calls - 8 for calls, _, held in ranks(2).run(generate, True) if held == []} == {4}


def test_one_rank_holds_the_weights_as_they_are_and_packs_them_where_bits_are_fewer():
    weights = stack_weights()
    model, frozen = frozen_stack(MeshAxis("frozen"))
    assert frozen.kept_bytes == sum(weight.nbytes for weight in weights.values())
    x = torch.randn(3, WIDTH)
    assert torch.equal(model(x), plain_stack(weights)(x))
    model, frozen = frozen_stack(MeshAxis("frozen"), bits=8)
    assert torch.equal(model(x), plain_stack(rounded_to(weights, 8))(x))
    assert all(unit.is_unpacked == (unit.message is None) for unit in frozen.units)


def test_two_forwards_before_their_backwards_and_one_that_has_none():
    """As of chosen and rejected texts, and of an evaluation in between."""
    weights = stack_weights()
    model, frozen = frozen_stack(MeshAxis("frozen"), bits=8)
    plain = plain_stack(rounded_to(weights, 8))
    first, second = (torch.randn(3, WIDTH).requires_grad_() for _ in range(2))
    twins = [x.detach().clone().requires_grad_() for x in (first, second)]
    a, b = model(first), model(second)
    with torch.no_grad():
        model(first)
    a.sum().backward()
    b.square().sum().backward()
    plain(twins[0]).sum().backward()
    plain(twins[1]).square().sum().backward()
    assert torch.equal(first.grad, twins[0].grad)
    assert torch.equal(second.grad, twins[1].grad)
    assert all(unit.is_unpacked == (unit.message is None) for unit in frozen.units)
    # in one backward too
    first.grad = None
    (model(first).sum() + model(second).sum()).backward()
    assert torch.equal(first.grad, twins[0].grad)
    assert all(unit.is_unpacked == (unit.message is None) for unit in frozen.units)


def test_a_weight_in_two_places_stays_one():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.output = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
            self.output.weight = self.words.weight

    with torch.device("meta"):
        model = Tied()
    frozen = freeze(model, [], MeshAxis("frozen"), lambda name, rows: torch.ones(11, 8)[rows], device=CPU)
    assert model.words.weight is model.output.weight
    assert frozen.kept_bytes == 4 * 88


def test_rows_of_another_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"layers\.0\.weight: rows of shape \(101, 5\) were loaded, not \(101, 101\)"):
        frozen_stack(MeshAxis("frozen"), load=lambda name, rows: torch.ones(WIDTH, 5))


# ---- beside the training ------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a trained one beside it, in one module, as of LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.trained(x))


def train_adapted(zero: ZeroConfig, freezes: bool, nodes: int) -> tuple[dict[str, torch.Tensor], int]:
    dims = make_dims(nodes)
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    for layer in model:
        layer.base.requires_grad_(False)
    if freezes:
        bases = nn.ModuleList(layer.base for layer in model)
        weights = {name: p.detach() for name, p in bases.named_parameters()}
        freeze(bases, [[base] for base in bases], frozen_axis(dims), rows_of(weights), device=CPU)
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


@pytest.mark.parametrize(("zero", "nodes"), [(ZeroConfig(), 2), slow(ZeroConfig(zeropp=True), 2)], ids=["", "++"])
def test_trained_weights_beside_frozen_ones_become_the_same_as_beside_weights_without_gradients(
    zero: ZeroConfig, nodes: int
):
    with_units = ranks(4).run(train_adapted, zero, True, nodes)
    without = ranks(4).run(train_adapted, zero, False, nodes)
    less, more = (sum(sent for _, sent in results) for results in (with_units, without))
    assert less < more or nodes == 1
    for (units, _), (parameters, _) in zip(with_units, without, strict=True):
        assert units.keys() == parameters.keys()
        if zero.zeropp and nodes > 1:
            for name, weight in units.items():  # base weights are int8 there
                torch.testing.assert_close(weight, parameters[name], rtol=0.0, atol=0.05)
        else:
            assert all(torch.equal(weight, parameters[name]) for name, weight in units.items())


def race_alone(bits: Bits | None, breakage: str = "") -> list[str]:
    """The races of a frozen model forward and backward, in inference mode, kept for a while, and again."""
    with simulated_streams() as streams, pytest.MonkeyPatch.context() as patch:
        if breakage:
            break_something(breakage, patch)
        model, frozen = frozen_stack(frozen_axis(make_dims(2)), bits=bits)
        for _ in range(3):
            model(torch.ones(2, WIDTH).requires_grad_()).sum().backward()
            with torch.inference_mode(), frozen.kept_gathered():
                for _ in range(2):
                    model(torch.ones(2, WIDTH))
    return streams.found


def race_beside_training(zero: ZeroConfig) -> list[str]:
    with simulated_streams() as streams:
        train_adapted(zero, True, 2)
    return streams.found


def test_nothing_races_in_a_frozen_model():
    assert ranks(4).run(race_alone, 8) == [[]] * 4


@pytest.mark.parametrize("breakage", ["waiting for a work does not wait", slow("a queue does not wait for its caller")])
def test_what_is_broken_is_found(breakage: str):
    assert all(ranks(4).run(race_alone, None, breakage))


@pytest.mark.slow
def test_nothing_races_beside_the_training():
    assert ranks(4).run(race_beside_training, ZeroConfig(zeropp=True)) == [[]] * 4
