"""Test calls of `megazpp.zeropp`: repeated calls for a model, wrong calls, process groups, and frozen weights."""

import copy
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.tiers import slow
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

import megazpp
from megazpp.drop_in import api
from megazpp.drop_in.api import RANKS_PER_NODE
from megazpp.drop_in.units import find_program_units


def blocks(*, frozen: str = "", width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    return model


def wrapped(**how: Any) -> nn.Module:
    model = blocks(**how)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def config(**fields: Any) -> megazpp.ZeroConfig:
    return megazpp.ZeroConfig(zeropp=True, zero_error_feedback=False, **fields)


def call_again() -> None:
    model = wrapped()
    handle = megazpp.zeropp(model, ranks_per_node=2, config=config(zero_weight_bits=16))
    model(torch.ones(2, 16)).sum().backward()
    assert megazpp.zeropp(model, ranks_per_node=2, config=config(zero_weight_bits=16)) is handle
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANKS_PER_NODE, "2")
        assert megazpp.zeropp(model, config=config(zero_weight_bits=16)) is handle
    as_list = config(zero_weight_bits=16, zero_gradient_bits=[8, 4])
    assert megazpp.zeropp(model, ranks_per_node=2, config=as_list) is handle
    for name, arguments in {
        "ranks_per_node was 2, now 1": {"ranks_per_node": 1, "config": config(zero_weight_bits=16)},
        "ranks_per_node was 2, now None": {"config": config(zero_weight_bits=16)},
        "config.zero_weight_bits was": {"ranks_per_node": 2},
        "config.overlap_grad_reduce was None, now False": {
            "ranks_per_node": 2,
            "config": config(zero_weight_bits=16, overlap_grad_reduce=False),
        },
        "mp_policy was None": {
            "ranks_per_node": 2,
            "config": config(zero_weight_bits=16),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16),
        },
    }.items():
        with pytest.raises(ValueError, match=name):
            megazpp.zeropp(model, **arguments)
    with pytest.raises(ValueError, match="outermost module"):
        megazpp.zeropp(model[0], ranks_per_node=2)
    with pytest.raises(ValueError, match="outermost module"):
        megazpp.zeropp(nn.ModuleList([model, nn.Linear(2, 2)]), ranks_per_node=2)

    # ---- a model that `zeropp` has wrapped
    model, policy = blocks(), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    handle = megazpp.zeropp(model, ranks_per_node=2, **policy)
    assert megazpp.zeropp(model, ranks_per_node=2, **copy.deepcopy(policy)) is handle
    with pytest.raises(ValueError, match="mp_policy was"):
        megazpp.zeropp(model, ranks_per_node=2)


def test_second_call_returns_the_handle_or_names_the_difference():
    ranks(4).run(call_again)


PLACES: dict[str, tuple[str, Callable[[nn.Module, Any], Any]]] = {
    "the root": ("forward", lambda model, call: model.register_forward_pre_hook(call)),
    "a block": ("forward", lambda model, call: model[1].register_forward_pre_hook(call)),
    "after a layer": ("forward", lambda model, call: model[0][1].register_forward_hook(call)),
    "a block's backward": ("backward", lambda model, call: model[1].register_full_backward_hook(call)),
}


def call_in_a_pass(place: str) -> None:
    """Call `zeropp` inside a forward or backward: it raises, the pass still completes, and a later call succeeds."""
    exact = config(zero_weight_bits=16, zero_gradient_bits=(16, 16))
    model, (where, register), refused = wrapped(), PLACES[place], []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides

    def call(*_: Any) -> None:
        with pytest.raises(ValueError, match=f"was called inside a {where}: call it between steps"):
            megazpp.zeropp(model, ranks_per_node=2, config=exact)
        refused.append(where)

    handle = register(model, call)
    model(torch.ones(2, 16, requires_grad=True)).sum().backward()
    handle.remove()
    assert refused == [where]
    expected = model[0][0].weight.grad.full_tensor()
    # after an error, FSDP2 keeps the state of the unfinished forward, which a later call of `zeropp` must tolerate
    with pytest.raises(ArithmeticError), fails(model[1]):
        model(torch.ones(2, 16))
    megazpp.zeropp(model, ranks_per_node=2, config=exact)
    model.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    torch.testing.assert_close(model[0][0].weight.grad.full_tensor(), expected)


def set_own_collectives() -> None:
    """Set a custom collective on a block before the call of `zeropp`, or after the call and a first backward.

    `zeropp` rejects a collective that was set before, and the next forward rejects one that was set after.
    """
    for setter, made, name in (
        ("set_custom_all_gather", DefaultAllGather, "all-gathers"),
        ("set_custom_reduce_scatter", DefaultReduceScatter, "reduce-scatters"),
    ):
        own = type("Own", (made,), {})()
        model = wrapped()
        getattr(model[1], setter)(own)
        with pytest.raises(ValueError, match=f"1 uses Own for its {name}, which ZeRO"):
            megazpp.zeropp(model, ranks_per_node=2, config=config())
        model = wrapped()
        megazpp.zeropp(model, ranks_per_node=2, config=config())
        model(torch.ones(2, 16)).sum().backward()
        getattr(model[1], setter)(own)
        with pytest.raises(RuntimeError, match=f"1 uses Own for its {name}. This class was installed after"):
            model(torch.ones(2, 16))


def test_own_collectives_are_rejected():
    ranks(4).run(set_own_collectives)


def use_settings_of_torch_2_15() -> None:
    """Imitate three settings that only FSDP2 of torch 2.15 has, by the changes that they make inside of FSDP2.

    `param_dtype_override_fn` gives each parameter a policy of its own, which ZeRO++ uses. `grad_dtype` may differ
    between the parameters of a unit, which ZeRO++ refuses. `set_manual_backward_finalization` lets the program reduce
    gradients outside of a backward, which ZeRO++ refuses as well.
    """
    exact = config(zero_weight_bits=16, zero_gradient_bits=(16, 16))
    model = wrapped()
    unit = find_program_units(model)[0]
    unit._group.fsdp_params[1].mp_policy = MixedPrecisionPolicy(torch.bfloat16)
    assert unit.gather_dtypes == (torch.float32, torch.bfloat16, torch.float32, torch.float32)
    for index, p in enumerate(unit._group.fsdp_params):
        p.sharded_grad_dtype = (torch.float32, torch.bfloat16)[index % 2]
    with pytest.raises(ValueError, match="set the same grad_dtype for all of them"):
        megazpp.zeropp(model, ranks_per_node=1, config=exact)
    model = wrapped()
    megazpp.zeropp(model, ranks_per_node=1, config=exact)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 16)).sum().backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="remove the call of set_manual_backward_finalization"):
        find_program_units(model)[0]._group.post_backward()


def test_settings_of_torch_2_15_are_used_or_rejected():
    ranks(2).run(use_settings_of_torch_2_15)


def cast_after_the_call() -> None:
    """Cast weights to fp64 after the call of `zeropp`, in a model that trains them and in a frozen model.

    Only the cast of trained weights is rejected.
    """
    exact = config(zero_weight_bits=16, zero_gradient_bits=(16, 16))
    kept, cast, frozen = models = [wrapped() for _ in range(3)]
    for model in models:
        megazpp.zeropp(model, ranks_per_node=2, config=exact)
    cast.double()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"in torch.float64, but.*call model.float\(\)"):
            cast(torch.ones(2, 16, dtype=torch.float64))
    frozen.double().requires_grad_(False)  # frozen weights are gathered and never reduced, so any dtype works
    found = frozen(torch.ones(2, 16, dtype=torch.float64))
    torch.testing.assert_close(found.float(), kept(torch.ones(2, 16)))


def test_fp64_cast_after_the_call_is_rejected_if_trained():
    ranks(4).run(cast_after_the_call)


@contextmanager
def fails(module: nn.Module) -> Iterator[None]:
    """Make every forward of `module` inside the context raise ArithmeticError."""

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("place", ["a block", "a block's backward", slow("the root"), slow("after a layer")])
def test_call_inside_a_forward_or_backward_is_rejected(place):
    ranks(4).run(call_in_a_pass, place)


def groups_of() -> dict[str, float]:
    """Train two models in turn, and return the timeouts in seconds of the process groups of `zeropp`, by group name."""
    first = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    pairs = []
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(2):
        model = wrapped()
        megazpp.zeropp(model, ranks_per_node=2, config=config())
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    made = len(dist.distributed_c10d._world.pg_map) - before
    for _ in range(2):
        loss = sum(model(torch.ones(2, 16)).square().mean() for model, _ in pairs)
        dist.all_reduce(loss.detach().clone())
        loss.backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    names = {group.group_desc: group for group in dist.distributed_c10d._world.pg_map}
    found = {n: g._get_backend(torch.device("cpu")).options._timeout for n, g in names.items() if "megazpp" in n}
    assert made <= len(found)
    assert set(found.values()) == {first} != {timedelta(minutes=30)}
    return {name: timeout.total_seconds() for name, timeout in found.items()}


def test_models_share_groups_with_the_first_groups_timeout():
    expected = {f"megazpp {name}" for axis in ("local", "cross") for name in (axis, f"hosts of {axis}")}
    # Start new workers, because other tests change the timeout of the shared workers' first group
    workers = ranks.__wrapped__(4)
    try:
        for found in workers.run(groups_of):
            assert expected <= set(found)
    finally:
        workers.stop()


class Balanced(torch.autograd.Function):
    """Subtract the mean over all ranks, by all-reduces of the default process group in forward and backward.

    Each rank delays its backward at random. If ZeRO++ used the default group as well, ranks would thus call these
    all-reduces and ZeRO++'s collectives in different orders.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - mean_of_ranks(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 * random.Random(dist.get_rank()).random())
        return gradient - mean_of_ranks(gradient)


def mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total := x.clone())
    return total / dist.get_world_size()


def train_balanced(zeropp: bool) -> list[torch.Tensor]:
    """Train on one node while the program calls collectives of the default group inside forward and backward."""
    model = wrapped()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    if zeropp:
        handle = megazpp.zeropp(model, ranks_per_node=dist.get_world_size(), config=config())
        assert all(reduce.axis.group is not dist.group.WORLD for reduce in handle._watchable)
    for block in model:
        block.register_forward_hook(lambda module, given, output: Balanced.apply(output))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


def test_collectives_of_the_program_on_the_default_group_do_not_collide():
    for found, expected in zip(ranks(2).run(train_balanced, True), ranks(2).run(train_balanced, False), strict=True):
        torch.testing.assert_close(found, expected)


def two_meshes() -> None:
    """Train two models whose device meshes compare equal, but have different process groups.

    torch may give the parameters of the second model the first model's mesh. ZeRO++ must use the process
    groups of the second model's own mesh.
    """
    for seed in range(2):
        mesh = DeviceMesh.from_group(dist.new_group(range(2)), "cpu")
        model = blocks()
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        assert api._meshes_of(model)[0].get_group() is mesh.get_group()
        megazpp.zeropp(model, ranks_per_node=2, config=config())
        model(torch.ones(2, 16) * seed).sum().backward()


def test_second_model_may_have_an_equal_mesh_over_other_groups():
    ranks(2).run(two_meshes)


def gradient_divided_by(factor: float) -> list[torch.Tensor]:
    found = []
    for zeropp in (False, True):
        model = wrapped()
        for module in (*model, model):
            module.set_gradient_divide_factor(factor)
        if zeropp:
            megazpp.zeropp(model)
        model(torch.ones(2, 16)).sum().backward()
        found.append(model[0][0].weight.grad.full_tensor())
    return found


def test_gradients_of_one_rank_are_divided_once():
    ((expected, found),) = ranks(1).run(gradient_divided_by, 4.0)
    assert torch.equal(found, expected)


# ---- frozen weights -------------------------------------------------------------------------------------------------


def bytes_per_step(frozen: str, *, width: int = 16, bits: int = 16) -> list[int]:
    """Return the weight bytes that this rank sends to other nodes in each of two AdamW steps.

    Args:
        frozen: part of the names of frozen parameters; "" freezes none.
        width: width of the model's layers.
        bits: --zero-weight-bits.
    """
    model = wrapped(frozen=frozen, width=width)
    handle = megazpp.zeropp(model, ranks_per_node=1, config=config(zero_weight_bits=bits))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1) if trained else None
    # a step of an optimizer that has no parameters of the model must not make the model's weights cross nodes again
    own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    sent, key = [], ("cross", "cross", "all_gather")
    for _ in range(2):
        before = handle.counter.table()[key].sent_bytes if sent else 0
        x = torch.ones(2, width, requires_grad=True)
        model(x).square().mean().backward()
        for each in filter(None, (optimizer, own)):
            each.step()
            each.zero_grad()
        sent.append(handle.counter.table()[key].sent_bytes - before)
    return sent


def test_frozen_weights_cross_nodes_only_once():
    """Each rank has half of the parameters, and sends 4 bytes per element of them to the only other node.

    In the second step, a rank may send only its trained parameters.
    """
    matrix, bias = 4 * 16 * 16 // 2, 4 * 16 // 2
    whole = 4 * (matrix + bias)
    for frozen, trained in {
        "": whole,
        ".0.": whole // 2,  # half of each unit is trained
        "0.": matrix + bias,  # the first unit is frozen, and half of the second one
        "weight": 4 * bias,
        "bias": 4 * matrix,
        ".": 0,
    }.items():
        assert ranks(2).run(bytes_per_step, frozen) == [[whole, trained]] * 2


def bytes_after_freezing(optimizer: str, **how: Any) -> list[int]:
    """Return the weight bytes that this rank sends across nodes in each of five steps.

    The first unit is frozen after two steps. Its gradients then stay zero, but the optimizer still updates it.
    """
    model = wrapped()
    handle = megazpp.zeropp(model, ranks_per_node=1, config=config(zero_weight_bits=16))
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **how)
    sent, key = [0], ("cross", "cross", "all_gather")
    for step in range(5):
        if step == 2:
            model[0].requires_grad_(False)
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        sent.append(handle.counter.table()[key].sent_bytes)
    return [after - before for before, after in itertools.pairwise(sent)]


def test_weights_frozen_with_zero_gradients_cross_nodes_while_they_change():
    whole = 4 * (4 * 16 * 16 // 2 + 4 * 16 // 2)
    for foreach in (False, True):
        for found in ranks(2).run(bytes_after_freezing, "SGD", foreach=foreach):
            assert found == [whole, whole, whole, whole // 2, whole // 2]
    # with zero gradients, AdamW's weight decay still changes the weights in every step
    for found in ranks(2).run(bytes_after_freezing, "AdamW"):
        assert found == [whole] * 5


def test_only_the_trained_part_of_quantized_weights_crosses_nodes():
    """After the first step, only the trained half of each unit is sent.

    An 8-bit block of 256 elements is sent with a 2-byte scale, and biases are sent as 4 bytes per element.
    """
    for sent in ranks(2).run(bytes_per_step, ".0.", width=64, bits=8):
        matrix, bias = 64 * 64 // 2 // 256 * (256 + 2), 4 * 64 // 2
        assert sent[1] == 2 * (matrix + bias)
        assert sent[0] >= 2 * sent[1]


class Lists(nn.Module):
    """A model with a list of two linear layers, and a longer list of three blocks, which `zeropp` should wrap.

    The first and the last block are the same module.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        first, second = (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2))
        self.layers = nn.ModuleList([first, second, first])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.inputs[1](x)


class Nested(nn.Module):
    """A model whose `_no_split_modules` names the model itself, its layers, and modules inside of the layers.

    Hugging Face's libraries read the classes to wrap from this attribute. The head shares its weight with the last
    layer, so neither of them can be a unit.
    """

    _no_split_modules = ("Nested", "Sequential", "Linear")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.head.weight = self.layers[2][0].weight


def wrap_blocks() -> None:
    """Check which blocks `zeropp` wraps in models to which FSDP2 was not applied: a list of blocks, and nested blocks.

    A block that the model uses twice must train as in plain FSDP2.
    """
    results = []
    for zeropp in (False, True):
        model = Lists()
        if zeropp:
            exact = config(zero_weight_bits=16, zero_gradient_bits=(16, 16))
            megazpp.zeropp(model, ranks_per_node=1, config=exact)
        else:
            for block in list(model.layers)[:2]:
                fully_shard(block).set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
            fully_shard(model).set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
        assert [name for name, each in model.named_modules() if isinstance(each, FSDPModule)] == [
            *("", "layers.0", "layers.1")
        ]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor() for parameter in model.parameters()])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    megazpp.zeropp(nested := Nested(), ranks_per_node=1, config=config())
    wrapped_modules = [name for name, each in nested.named_modules() if isinstance(each, FSDPModule)]
    assert wrapped_modules == ["", "layers.0", "layers.0.0", "layers.1", "layers.1.0"]


def test_each_block_is_wrapped_once_and_inner_blocks_first():
    ranks(2).run(wrap_blocks)


def test_nodes_are_discovered_by_the_current_gpu(monkeypatch):
    """Some launchers show each process only one GPU, which is cuda:0 for every local rank.

    So the device to describe must be CUDA's current device and not the device with the number LOCAL_RANK.
    """
    found = list[torch.device]()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, answer in {"get_world_size": 4, "get_rank": 3}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(api, "_get_default_store", lambda: None)
    monkeypatch.setattr(api, "share_survey", lambda *_: None)
    monkeypatch.setattr(api, "describe_host", lambda local_rank, device: found.append(device))
    api._find_cluster(Mock(device_type="cuda", size=lambda: 4), None)
    assert found == [torch.device("cuda", 0)]


def sharded_after_a_forward(evaluations: int) -> list[bool]:
    """Return whether a forward frees the parameters of three units, after evaluations inside `keep_unsharded`.

    The units are wrapped with `reshard_after_forward=False`, with the default, and as the root with the default.
    """
    model = blocks()
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model[1][0])
    fully_shard(model)
    handle = megazpp.zeropp(model, ranks_per_node=1, config=config())
    with torch.no_grad():
        for _ in range(evaluations):
            with handle.keep_unsharded():
                model(torch.ones(1, 16))
        model(torch.ones(1, 16))
    return [isinstance(layer.weight, DTensor) for layer in (model[0][0], model[1][0], model[1][1])]


def test_keep_unsharded_restores_what_a_forward_frees():
    for evaluations in (0, 2):
        assert ranks(2).run(sharded_after_a_forward, evaluations) == [[False, True, False]] * 2


def step_with_replaced_parameters() -> None:
    """Check that an optimizer made before `zeropp` wrapped the model is rejected, and one made after it is not.

    `zeropp` replaces the parameters, so that the earlier optimizer would update tensors that the model no longer has.
    """
    ignored = {next((model := blocks()).parameters())}
    early, of_ignored = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(list(ignored), lr=0.1)
    elsewhere = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    megazpp.zeropp(model, ranks_per_node=1, config=config(), ignored_params=ignored)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"holds the parameter 0\.0\.bias from before megazpp\.zeropp wrapped"):
        early.step()
    for optimizer in (elsewhere, of_ignored, late, late):
        optimizer.step()


def test_optimizer_of_the_unwrapped_model_is_rejected():
    ranks(2).run(step_with_replaced_parameters)


def pass_own_settings() -> None:
    """Pass other settings on rank 1 than on rank 0; both ranks must raise an error that names the difference."""
    first = dist.get_rank() == 0
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "ranks_per_node must be equal on all ranks, but is 1 on .*, None on .*",
            {"ranks_per_node": 1 if first else None},
        ),
        (
            "config.zero_weight_bits must be equal on all ranks, but is None on .*, 16 on .*",
            {"config": config(zero_weight_bits=None if first else 16)},
        ),
    ]
    for words, arguments in cases:
        with pytest.raises(ValueError, match=rf"different settings of megazpp.zeropp: {words}\."):
            megazpp.zeropp(blocks(), **arguments)


def test_settings_that_differ_between_ranks_are_named_on_all_ranks():
    ranks(2).run(pass_own_settings)


def refuse_arguments() -> None:
    """Call `zeropp` with unusable arguments, and check that it rejects them before it wraps the model."""
    sixteen_bits = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    two_dims = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("ranks_per_node 3 does not divide", {"ranks_per_node": 3}),
        ("ranks_per_node is '2', a str", {"ranks_per_node": "2"}),
        ("config is a dict", {"config": {"zeropp": True}}),
        ("ZeroConfig(zero_stage=1)", {"config": megazpp.ZeroConfig(zero_stage=1)}),
        ("use_distributed_optimizer=True", {"config": megazpp.ZeroConfig(use_distributed_optimizer=True)}),
        ("requires --bf16 or --fp16", {"ranks_per_node": 1, "config": config(zero_weight_delta="lossless")}),
        ("has 2 dims", {"ranks_per_node": 1, "mesh": two_dims}),
        ("mesh is a str", {"ranks_per_node": 1, "mesh": "cpu"}),
    ]
    for message, arguments in cases:
        model = blocks()
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            megazpp.zeropp(model, **arguments)
        assert not any(isinstance(each, FSDPModule) for each in model.modules()), message
    megazpp.zeropp(model, ranks_per_node=1, mp_policy=sixteen_bits, config=config(zero_weight_delta="lossless"))
    for other, name in (([model], "a list"), (nn.Linear, "the class Linear")):
        with pytest.raises(TypeError, match=f"requires an nn.Module as its first argument, not {name}"):
            megazpp.zeropp(other)  # type: ignore[arg-type]


def test_unusable_arguments_are_rejected_before_the_model_is_wrapped():
    ranks(2).run(refuse_arguments)


@pytest.mark.slow
def test_trainer_makes_the_callback_from_the_bare_name():
    """Pass `megazpp.trainer_callback` to the Trainer without calling it. The Trainer must then make the callback."""
    transformers = pytest.importorskip("transformers")
    handler = transformers.trainer_callback.CallbackHandler([megazpp.trainer_callback], None, None, None, None)
    (callback,) = handler.callbacks
    assert isinstance(callback, transformers.TrainerCallback)
    handler.on_init_end(None, None, None)


def train_begin() -> None:
    """Let the Trainer's event "train begin" call `zeropp`: with a model that has no FSDP2, and twice with one that has.

    Then check that a misspelled argument of the callback is rejected.
    """
    pytest.importorskip("transformers")
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    callback = megazpp.trainer_callback(ranks_per_node=1, config=config(zero_weight_delta="lossless"))
    state = Mock(global_step=0)
    with pytest.raises(TypeError, match="trains a Sequential, but ZeRO"):
        callback.on_train_begin(None, state, None, model=model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    callback.on_train_begin(None, state, None, model=model)
    callback.on_train_begin(None, state, None, model=model)
    assert callback.sharding is megazpp.zeropp(model, ranks_per_node=1, config=config(zero_weight_delta="lossless"))
    with pytest.raises(ValueError, match="rank_per_node is not an argument"):
        megazpp.trainer_callback(rank_per_node=1).on_train_begin(None, state, None, model=wrapped())


@pytest.mark.slow
def test_trainer_callback_has_the_handle():
    pytest.importorskip("transformers")
    ranks(2).run(train_begin)
