"""Test initial weights, the specs that describe parameters, and the order of FSDP2's flat parameter list."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import CPU, STYLES, VOCAB, tp_mesh
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, MIXTURE_STYLE, Case, build_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.tensor_parallel import initialize
from megazpp.tensor_parallel.initialize import draw_parameter, initialize_parameters_
from megazpp.tensor_parallel.parameters import ParameterSpec, local, local_parameters, owned_parameters, places_of
from megazpp.zero.verify import verify_weights

VOCABULARY = ("embedding.word.weight", "output.weight")


@functools.cache
def one_process_weights(model: GPTConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    built = GPTModel(model, vocab_size=VOCAB)
    for parameter in built.parameters():
        parameter.detach().fill_(float("nan"))
    initialize_parameters_(built, seed=seed, draw_device=CPU)
    return {name: p.detach() for name, p in built.named_parameters()}


def weights_on_ranks(case: Case) -> dict[str, torch.Tensor]:
    model, _, _ = build_on_ranks(case)
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("size", "style", "tp", "stage", "replicas", "blocks"), [
    (4, "gpt2", 2, 2, 1, 64),
    slow(4, "llama", 4, 3, 1, 32),
    slow(4, "gpt2", 1, 3, 2, 1),
    (2, "llama", 1, 0, 1, 8),
    slow(4, "llama", 2, 3, 1, 1),
    slow(4, "gpt2", 1, 1, 1, 8),
])  # fmt: skip
def test_initial_weights_match_one_process(size, style, tp, stage, replicas, blocks):
    """Weights are bit-identical for any tp size, ZeRO stage, number of data-parallel ranks and padding.

    Rows that pad the vocabulary are zero.
    """
    model = dataclasses.replace(STYLES[style], make_vocab_size_divisible_by=blocks)
    expected = one_process_weights(STYLES[style])
    case = Case(model=model, tp=tp, stage=stage, replicas=replicas)
    for weights in ranks(size).run(weights_on_ranks, case):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            rows = VOCAB if name in VOCABULARY else len(weight)
            assert len(weight) == (model.padded_vocab_size(VOCAB, tp) if name in VOCABULARY else rows)
            assert torch.equal(weight[:rows], expected[name][:rows]), name
            assert not weight[rows:].any()


def experts_on_ranks(case: Case) -> tuple[dict[str, torch.Tensor], list[tuple[str, tuple[int, ...]]]]:
    """Return the unsharded weights by name, and the (name, shape) of each expert's matrix that this rank has drawn."""
    with mock.patch.object(initialize, "draw_parameter", side_effect=draw_parameter) as draw:
        weights = weights_on_ranks(case)
    return weights, [call.args[:2] for call in draw.call_args_list if ".experts." in call.args[0]]


@pytest.mark.parametrize(
    ("size", "layout", "num_drawn"),
    [
        (4, {"nodes": 2, "ep": 2}, 1),
        slow(4, {"tp": 2, "ep": 4, "stage": 2}, 1),
        slow(3, {}, 2),
        slow(2, {"stage": 0}, 4),
    ],
)
def test_ranks_draw_only_experts_of_which_they_hold_rows(size, layout, num_drawn):
    """The matrices of the 4 experts have 20 rows each, so each of 3 ranks holds rows of two experts.

    All weights equal the weights that one process draws.
    """
    model = dataclasses.replace(MIXTURE_STYLE, make_vocab_size_divisible_by=1)
    expected = one_process_weights(model)
    for weights, drawn in ranks(size).run(experts_on_ranks, Case(model=model, **layout)):
        assert len(drawn) == 3 * num_drawn
        assert {shape for _, shape in drawn} == {(20, 24)}
        for name, weight in weights.items():
            rows = min(len(weight), len(expected[name]))
            assert torch.equal(weight[:rows], expected[name][:rows]), name
    first, second = expected["layers.0.mlp.experts.gate"].chunk(4)[:2]
    assert not torch.isclose(first, second).all()


def drawn(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if weight.dim() == 2}


def test_weights_depend_on_seed_and_name_not_on_default_generator():
    torch.manual_seed(1)
    model = GPTModel(GPT2_STYLE, vocab_size=VOCAB)
    state = torch.get_rng_state()
    initialize_parameters_(model, seed=5, draw_device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    one, other = one_process_weights(GPT2_STYLE), one_process_weights(GPT2_STYLE, seed=6)
    firsts = [tuple(weight.flatten()[:8].tolist()) for weight in drawn(one).values()]
    # Divide by the first element, so that weights that differ only by a factor would be equal
    scaled = [tuple(round(x / abs(first[0]), 4) for x in first) for first in firsts]
    assert len(set(scaled)) == len(firsts) == 10
    for name, parameter in model.named_parameters():
        assert one[name].isfinite().all()
        assert torch.equal(parameter, one[name])
        changed = (parameter != other[name]).float().mean()
        # constants, such as norms, do not depend on the seed
        assert changed > 0.9 if parameter.dim() == 2 else changed == 0.0, name


@pytest.mark.parametrize(
    "changes", [{}, {"init_method_std": 0.01, "swiglu": True, "untie_embeddings_and_output_weights": True}], ids=str
)
def test_initial_weights_are_normal_with_megatrons_standard_deviation(changes):
    """Megatron-LM scales weights that write to the residual stream of 3 layers by 1/sqrt(2 x 3).

    The tolerances are 5 standard errors.
    """
    inputs = changes.get("init_method_std", 0.02)
    outputs = inputs / math.sqrt(6)
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 192}
    model = GPTConfig(**sizes, max_position_embeddings=48, **changes)
    weights = one_process_weights(model)
    for name, weight in drawn(weights).items():
        values = weight[:VOCAB] if name in VOCABULARY else weight
        std = outputs if name.endswith(("proj.weight", "fc2.weight")) else inputs
        n = values.numel()
        assert float(values.mean()) == pytest.approx(0.0, abs=5 * std / math.sqrt(n)), name
        assert float(values.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
        beyond = float((values.abs() > 2 * std).float().mean())  # for a normal distribution the fraction is 4.55 %
        assert beyond == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / n)), name
    constants = {name: set(weight.tolist()) for name, weight in weights.items() if weight.dim() == 1}
    assert {name for name, value in constants.items() if value == {1.0}} == {
        name for name in constants if name.endswith("norm.weight")
    }
    assert all(value == {0.0} for name, value in constants.items() if name.endswith("bias"))


def test_padding_rows_and_constants_follow_their_spec():
    spec = ParameterSpec(split=0, std=0.5, rows=3)
    wide, narrow = (draw_parameter("w", (rows, 5), spec, seed=1, device=CPU) for rows in (9, 4))
    assert torch.equal(wide[:3], narrow[:3])
    assert wide[:3].all()
    assert not wide[3:].any()
    assert torch.equal(draw_parameter("b", (3,), ParameterSpec(value=2.5), seed=1, device=CPU), torch.full((3,), 2.5))
    assert not torch.equal(wide, draw_parameter("w2", (9, 5), spec, seed=1, device=CPU))


def test_every_parameter_has_a_spec_and_is_on_a_leaf_module():
    """FSDP2 orders parameters like `named_parameters()` only if no parameter is on a module with children."""
    for style in STYLES.values():
        model = GPTModel(style, vocab_size=VOCAB)
        owned = list(owned_parameters(model))
        assert [name for name, *_ in owned] == [name for name, _ in model.named_parameters()]
        for name, module, attribute, spec in owned:
            assert model.get_parameter(name) is getattr(module, attribute)
            assert not list(module.children()), f"{name} is on a module with children"
            assert spec.split is None or spec.split < getattr(module, attribute).dim()
    with pytest.raises(TypeError, match=r"Linear has no ParameterSpec for the parameter 0\.weight"):
        list(owned_parameters(nn.Sequential(nn.Linear(2, 3))))


def units_on_ranks(case: Case) -> list[list[str]]:
    """Return the parameter names of each sharding unit, in the order in which FSDP2 lists them."""
    _, sharding, _ = build_on_ranks(case)
    return [[parameter.name for parameter in unit.parameters] for unit in sharding.units]


@pytest.mark.parametrize(("style", "tp"), [("gpt2", 1), ("llama", 2)])
def test_fsdp2_flat_order_equals_named_parameters(style, tp):
    model = GPTModel(STYLES[style], vocab_size=VOCAB)
    names = {parameter: name for name, parameter in model.named_parameters()}
    units = [[names.pop(p) for module in unit for p in module.parameters()] for unit in model.sharding_units()]
    rest = [[*names.values()]] if names else []
    for found in ranks(2).run(units_on_ranks, Case(model=STYLES[style], tp=tp)):
        assert sorted(found) == sorted(units + rest)


def gradients_through(read: Callable[[DTensor], torch.Tensor]) -> list[tuple[bool, Any, torch.Tensor]]:
    """Run backwards through `read`, which returns the local tensor of a parameter.

    Returns:
        For Shard(0), Shard(1) and Replicate(): (True if the gradient is contiguous, its placements, its local tensor).
    """
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        wrapped = nn.Parameter(DTensor.from_local(torch.arange(6.0).view(2, 3), tp_mesh(), [placement]))
        for _ in range(2):  # in the second pass, gradients are added to the first pass's gradients
            inside = read(wrapped)
            assert not isinstance(inside, DTensor)
            # One gradient is an expanded tensor, the other one a transposed tensor, so neither is contiguous
            (inside.sum() + (inside.t() @ torch.full((2, 3), 4.0)).sum()).backward()
            inside[0].sum().backward()
        found.append((wrapped.grad._local_tensor.is_contiguous(), wrapped.grad.placements, wrapped.grad.to_local()))
        frozen = wrapped.detach()
        assert not read(frozen).requires_grad
        with torch.no_grad():
            assert not read(wrapped).requires_grad
    return found


def registered(parameter: DTensor) -> torch.Tensor:
    """Return a module's parameter inside `local_parameters`, and check that an error restores the DTensor."""
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.bias = None
    module.inner._parameters["weight"] = parameter
    with contextlib.suppress(KeyError), local_parameters(places_of(module)):
        found: torch.Tensor = module.inner.weight
        raise KeyError
    assert module.inner.weight is parameter
    return found


@pytest.mark.parametrize("read", [local, registered])
def test_local_returns_the_local_tensor_with_gradients_of_to_local(read):
    """Compare `local` and `local_parameters` with `DTensor.to_local`: gradients are equal, and also contiguous."""
    assert read(plain := torch.ones(3)) is plain
    ours = ranks(2).run(gradients_through, read)
    assert all(contiguous for found in ours for contiguous, _, _ in found)
    for found, expected in zip(ours, ranks(2).run(gradients_through, DTensor.to_local), strict=True):
        for (_, placements, grad), (_, their_placements, theirs) in zip(found, expected, strict=True):
            assert placements == their_placements
            assert torch.equal(grad, theirs)


def weights_of_another_device_on_each_rank(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, int], bool]:
    """Build weights on ranks whose devices draw different random numbers, and verify the gathered weights.

    Returns:
        (this rank's shards by name, this rank's coordinates on tp and shard, True if verification counted no traffic).
    """

    def draw(name: str, shape: tuple[int, ...], spec: ParameterSpec, *, seed: int, device: torch.device) -> Any:
        return draw_parameter(name, shape, spec, seed=seed + torch.distributed.get_rank(), device=device)

    with mock.patch.object(initialize, "draw_parameter", draw):
        model, sharding, dims = build_on_ranks(case)
    place = {name: getattr(dims, name).rank for name in ("tp", "shard")}
    shards = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    verify_weights(sharding, dims)  # raises an error if the ranks' gathered weights differ
    return shards, place, not dims.counter.table()


SHARING = {
    "stage 0": (2, Case(stage=0, model=GPT2_STYLE)),
    "HSDP": (4, Case(replicas=2, model=GPT2_STYLE)),  # the 101 rows of the vocabulary are sharded over 2 ranks
    "tp": (2, Case(tp=2, model=GPT2_STYLE)),  # learned positions are replicated over the tp ranks
}


@pytest.mark.parametrize(("size", "case"), SHARING.values(), ids=SHARING)
def test_replicas_start_with_equal_weights_if_devices_generate_others(size, case):
    first: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    found = ranks(size).run(weights_of_another_device_on_each_rank, case)
    for shards, place, nothing_counted in found:
        assert nothing_counted
        for name, shard in first.setdefault((place["tp"], place["shard"]), shards).items():
            assert torch.equal(shards[name], shard), name
    if case.tp > 1 and case.model is GPT2_STYLE:
        assert torch.equal(*(shards["embedding.position.weight"] for shards, _, _ in found))
        assert not torch.equal(*(shards["layers.0.mlp.fc1.weight"] for shards, _, _ in found))
