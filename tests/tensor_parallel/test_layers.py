"""Split layers against torch's whole ones: outputs, every gradient, and the collectives their docstrings promise.

fp64, tolerance 1e-12: the partial sums of at most 4 ranks are added in another order, nothing else differs.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import assert_near, counted, draw, part, tp_axis

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
)
from megazpp.tensor_parallel.parameters import sum_partial_gradients_

S, B, NARROW, WIDE = 8, 3, 7, 12  # S and WIDE are split over 2 and 4 ranks, B and NARROW are not
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
Calls = tuple[dict[str, int], dict[str, int]]


def reduced(tp: MeshAxis, sequence_parallel: bool) -> Calls:
    """Calls forward and backward of a layer that ends a tensor-parallel region."""
    if tp.size == 1:
        return {}, {}
    return ({"reduce_scatter": 1}, {"all_gather": 1}) if sequence_parallel else ({"all_reduce": 1}, {})


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
        assert_near("y", y, part(whole["y"], -1, tp), **EXACT)
        for name in names:
            expected = None if freeze else part(whole[f"{name}_grad"], 0, tp)
            assert_near(name, getattr(layer, name).grad, expected, **EXACT)
    total = sum(whole["x_grad"] for whole in wholes)
    assert_near("x", x.grad, sequence_part(total, tp, sequence_parallel), **EXACT)
    return (forward, backward), sum(size for _, size in kept)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_layers_of_one_input_are_slices_enter_once_and_keep_their_slice_of_it(size):
    for sequence_parallel, freeze, calls in (
        (False, False, ({}, {"all_reduce": 1})),
        (True, False, ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1})),
        (True, True, ({"all_gather": 1}, {"reduce_scatter": 1})),
    ):
        for widths, bias in itertools.product(([WIDE], [WIDE, 2 * WIDE]), (False, True)):
            row = (widths, bias, sequence_parallel, freeze)
            for found, kept in ranks(size).run(run_columns, *row):
                assert found == (calls if size > 1 else ({}, {})), row
                assert kept == 8 * S * B * NARROW // (size if sequence_parallel else 1) or size == 1, row


def check_row_parallel() -> None:
    tp = tp_axis()
    for bias, sequence_parallel in itertools.product((False, True), (False, True)):
        whole, row = whole_linear(WIDE, NARROW, bias), f"bias {bias}, sequence {sequence_parallel}"
        layer = RowParallelLinear(WIDE, NARROW, tp=tp, std=1.0, bias=bias, sequence_parallel=sequence_parallel)
        set_parameter(layer, "weight", part(whole["weight"], 1, tp))
        if bias:
            set_parameter(layer, "bias", whole["bias"])
        x, y_grad = part(whole["x"], -1, tp).requires_grad_(), sequence_part(whole["y_grad"], tp, sequence_parallel)
        y, forward = counted(tp, functools.partial(layer, x))
        assert_near(row, y, sequence_part(whole["y"], tp, sequence_parallel), **EXACT)
        _, backward = counted(tp, functools.partial(y.backward, y_grad))
        assert_near(row, layer.weight.grad, part(whole["weight_grad"], 1, tp), **EXACT)
        assert_near(row, x.grad, part(whole["x_grad"], -1, tp), **EXACT)
        assert (forward, backward) == reduced(tp, sequence_parallel), row
        if bias:
            assert layer.specs["bias"].partial == sequence_parallel
            sum_partial_gradients_([layer.bias] if sequence_parallel else [], tp)
            assert_near(row, layer.bias.grad, whole["bias_grad"], **EXACT)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_linear_sums_to_the_whole_one(size):
    ranks(size).run(check_row_parallel)


ROWS, VOCAB = 16, 11  # on 4 ranks: 4 + 4 + 3 tokens and a rank of padding


def check_embedding() -> None:
    """The first row is infinite, which nothing of another rank's lookup may show: it is looked up once."""
    tp = tp_axis()
    tokens = torch.cat([torch.arange(VOCAB), torch.tensor([10, 10, 3, 3, 7])]).view(8, 2)  # all of them, some twice
    table = draw(5, ROWS, NARROW)
    table[0] = float("inf")
    table.requires_grad_()
    y_grad = draw(6, 8, 2, NARROW)
    whole = F.embedding(tokens, table)
    whole.backward(y_grad)
    for split in (False, True):
        layer = VocabParallelEmbedding(ROWS, NARROW, vocab_size=VOCAB, tp=tp, std=1.0, sequence_parallel=split)
        set_parameter(layer, "weight", part(table.detach(), 0, tp))
        y, forward = counted(tp, functools.partial(layer, tokens))
        assert torch.equal(y, sequence_part(whole.detach(), tp, split))  # one term and zeros: exact
        _, backward = counted(tp, functools.partial(y.backward, sequence_part(y_grad, tp, split)))
        assert_near(split, layer.weight.grad, part(table.grad, 0, tp), **EXACT)
        assert (forward, backward) == reduced(tp, split)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocab_parallel_embedding_looks_up_the_whole_table(size):
    ranks(size).run(check_embedding)
