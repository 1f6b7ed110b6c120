"""Split layers against torch's whole ones: outputs, every gradient, and the collectives their docstrings promise.

fp64, tolerance 1e-12: the partial sums of at most 4 ranks are added in another order, nothing else differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, draw, part, tp_axis

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
)
from megazpp.tensor_parallel.parameters import sum_partial_gradients_

S, B, NARROW, WIDE = 8, 3, 7, 12  # S and WIDE are split over 2 and 4 ranks, B and NARROW are not
EXACT = {"rtol": 1e-12, "atol": 1e-12}
Calls = tuple[dict[str, int], dict[str, int]]
REDUCED = pytest.mark.parametrize(("sequence_parallel", "calls"), [
    (False, ({"all_reduce": 1}, {})),
    (True, ({"reduce_scatter": 1}, {"all_gather": 1})),
])  # fmt: skip


def whole_linear(inputs: int, outputs: int, bias: bool) -> dict[str, torch.Tensor]:
    """One process: output and gradients of x W^T + b under a random output gradient."""
    values = {"x": draw(1, S, B, inputs), "weight": draw(2, outputs, inputs)}
    if bias:
        values["bias"] = draw(3, outputs)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    y = F.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    y.backward(draw(4, S, B, outputs))
    grads = {f"{name}_grad": leaf.grad for name, leaf in leaves.items()}
    return {**values, "y": y.detach(), "y_grad": draw(4, S, B, outputs), **grads}


def set_parameter(layer: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    assert getattr(layer, name).shape == value.shape
    setattr(layer, name, torch.nn.Parameter(value.clone()))


def sequence_part(x: torch.Tensor, tp: MeshAxis, sequence_parallel: bool) -> torch.Tensor:
    return part(x, 0, tp) if sequence_parallel else x


def run_columns(widths: list[int], bias: bool, sequence_parallel: bool, freeze: bool) -> tuple[Calls, int]:
    """Layers of one input under one sum, and the bytes that autograd keeps beside the weights."""
    tp, wholes = tp_axis(), [whole_linear(NARROW, width, bias) for width in widths]
    layers, kept, names = [], set(), ["weight", "bias"] if bias else ["weight"]
    for width, whole in zip(widths, wholes, strict=True):
        layer = ColumnParallelLinear(NARROW, width, tp=tp, std=1.0, bias=bias, sequence_parallel=sequence_parallel)
        for name in names:
            set_parameter(layer, name, part(whole[name], 0, tp))
            getattr(layer, name).requires_grad_(not freeze)
        layers.append(layer)
    x = sequence_part(wholes[0]["x"], tp, sequence_parallel).clone().requires_grad_()
    weights = {layer.weight.data_ptr() for layer in layers}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept.add((tensor.data_ptr(), tensor.nbytes))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        one = len(layers) == 1
        outputs, forward = counted(tp, lambda: [layers[0](x)] if one else column_parallel(x, layers))
    grads = [part(whole["y_grad"], -1, tp) for whole in wholes]
    _, backward = counted(tp, lambda: torch.autograd.backward(outputs, grads))
    for layer, whole, y in zip(layers, wholes, outputs, strict=True):
        torch.testing.assert_close(y, part(whole["y"], -1, tp), **EXACT)
        for name in names:
            expected = None if freeze else part(whole[f"{name}_grad"], 0, tp)
            torch.testing.assert_close(getattr(layer, name).grad, expected, **EXACT)
    total = sum(whole["x_grad"] for whole in wholes)
    torch.testing.assert_close(x.grad, sequence_part(total, tp, sequence_parallel), **EXACT)
    return (forward, backward), sum(size for _, size in kept)


@pytest.mark.parametrize("widths", [[WIDE], [WIDE, 2 * WIDE]], ids=["one", "two"])
@pytest.mark.parametrize(("size", "bias"), [(2, True), (2, False), (4, True)])
@pytest.mark.parametrize(("sequence_parallel", "freeze", "calls"), [
    (False, False, ({}, {"all_reduce": 1})),
    (True, False, ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1})),
    (True, True, ({"all_gather": 1}, {"reduce_scatter": 1})),
])  # fmt: skip
def test_column_parallel_layers_of_one_input_are_slices_enter_once_and_keep_their_slice_of_it(
    widths: list[int], size: int, bias: bool, sequence_parallel: bool, freeze: bool, calls: Calls
):
    kept = 8 * S * B * NARROW // (size if sequence_parallel else 1)
    assert ranks(size).run(run_columns, widths, bias, sequence_parallel, freeze) == [(calls, kept)] * size


def run_row(bias: bool, sequence_parallel: bool) -> Calls:
    tp, whole = tp_axis(), whole_linear(WIDE, NARROW, bias)
    layer = RowParallelLinear(WIDE, NARROW, tp=tp, std=1.0, bias=bias, sequence_parallel=sequence_parallel)
    set_parameter(layer, "weight", part(whole["weight"], 1, tp))
    if bias:
        set_parameter(layer, "bias", whole["bias"])
    x = part(whole["x"], -1, tp).requires_grad_()
    y, forward = counted(tp, lambda: layer(x))
    torch.testing.assert_close(y, sequence_part(whole["y"], tp, sequence_parallel), **EXACT)
    _, backward = counted(tp, lambda: y.backward(sequence_part(whole["y_grad"], tp, sequence_parallel)))
    torch.testing.assert_close(layer.weight.grad, part(whole["weight_grad"], 1, tp), **EXACT)
    torch.testing.assert_close(x.grad, part(whole["x_grad"], -1, tp), **EXACT)
    if bias:
        assert layer.specs["bias"].partial == sequence_parallel
        sum_partial_gradients_([layer.bias] if sequence_parallel else [], tp)
        torch.testing.assert_close(layer.bias.grad, whole["bias_grad"], **EXACT)
    return forward, backward


@pytest.mark.parametrize("bias", [False, True])
@REDUCED
@pytest.mark.parametrize("size", [2, 4])
def test_row_parallel_linear_sums_to_the_whole_one(size: int, sequence_parallel: bool, calls: Calls, bias: bool):
    assert ranks(size).run(run_row, bias, sequence_parallel) == [calls] * size


ROWS, VOCAB = 16, 11  # on 4 ranks: 4 + 4 + 3 tokens and a rank of padding


def run_embedding(sequence_parallel: bool) -> Calls:
    """The first row is infinite, which nothing of another rank's lookup may show: it is looked up once."""
    tp = tp_axis()
    tokens = torch.cat([torch.arange(VOCAB), torch.tensor([10, 10, 3, 3, 7])]).view(8, 2)  # all of them, some twice
    table = draw(5, ROWS, NARROW)
    table[0] = float("inf")
    table.requires_grad_()
    y_grad = draw(6, 8, 2, NARROW)
    whole = F.embedding(tokens, table)
    whole.backward(y_grad)
    layer = VocabParallelEmbedding(ROWS, NARROW, vocab_size=VOCAB, tp=tp, std=1.0, sequence_parallel=sequence_parallel)
    set_parameter(layer, "weight", part(table.detach(), 0, tp))
    y, forward = counted(tp, lambda: layer(tokens))
    assert torch.equal(y, sequence_part(whole.detach(), tp, sequence_parallel))  # one term and zeros: exact
    _, backward = counted(tp, lambda: y.backward(sequence_part(y_grad, tp, sequence_parallel)))
    torch.testing.assert_close(layer.weight.grad, part(table.grad, 0, tp), **EXACT)
    return forward, backward


@REDUCED
@pytest.mark.parametrize("size", [2, 4])
def test_vocab_parallel_embedding_looks_up_the_whole_table(size: int, sequence_parallel: bool, calls: Calls):
    assert ranks(size).run(run_embedding, sequence_parallel) == [calls] * size


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_on_one_rank_are_torch_s_own(sequence_parallel: bool):
    alone = MeshAxis("tp")
    kinds: list[tuple[Any, int, int]] = [(ColumnParallelLinear, NARROW, WIDE), (RowParallelLinear, WIDE, NARROW)]
    for kind, inputs, outputs in kinds:
        whole = whole_linear(inputs, outputs, bias=True)
        layer = kind(inputs, outputs, tp=alone, std=1.0, bias=True, sequence_parallel=sequence_parallel)
        set_parameter(layer, "weight", whole["weight"])
        set_parameter(layer, "bias", whole["bias"])
        x = whole["x"].clone().requires_grad_()
        y = layer(x)
        y.backward(whole["y_grad"])
        assert torch.equal(y, whole["y"])
        assert torch.equal(x.grad, whole["x_grad"])
        assert torch.equal(layer.bias.grad, whole["bias_grad"])
    assert not alone.counter.table()
