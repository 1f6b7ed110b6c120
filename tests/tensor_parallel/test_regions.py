"""Each region against its formula over all ranks, forward and backward.

Values are small integers, so sums are exact in any order and every comparison is bitwise.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, tp_axis

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel import regions
from megazpp.tensor_parallel.regions import enter_region, leave_region

REGIONS = ["copy_to_region", "reduce_from_region_", "gather_sequence", "reduce_scatter_sequence"]
SHAPES = [(8, 3, 5), (4, 1, 1), (12, 7)]  # [S, ...]: S is a multiple of 4 ranks, the rest is odd


def integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_region(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], strided: bool) -> dict[str, Any]:
    """Forward of this rank's input and backward of this rank's output gradient."""
    tp = tp_axis()
    x, grad = integers(tp.rank, *in_shape), integers(100 + tp.rank, *out_shape)
    if strided:  # the same values in memory of another order
        x, grad = x.mT.contiguous().mT, grad.mT.contiguous().mT
    x.requires_grad_()
    given = x.clone(memory_format=torch.contiguous_format) if name.endswith("_") else x
    y, forward = counted(tp, lambda: getattr(regions, name)(given, tp))
    _, backward = counted(tp, lambda: y.backward(grad))
    unchanged = torch.equal(x.detach(), integers(tp.rank, *in_shape))
    unchanged &= torch.equal(grad, integers(100 + tp.rank, *out_shape))
    return {"y": y.detach(), "x_grad": x.grad, "calls": (forward, backward), "unchanged": unchanged}


def expect(
    name: str, xs: list[torch.Tensor], grads: list[torch.Tensor], rank: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[dict[str, int], dict[str, int]]]:
    size = len(xs)
    match name:
        case "copy_to_region":
            return xs[rank], sum(grads), ({}, {"all_reduce": 1})
        case "reduce_from_region_":
            return sum(xs), grads[rank], ({"all_reduce": 1}, {})
        case "gather_sequence":
            return torch.cat(xs), sum(grads).chunk(size)[rank], ({"all_gather": 1}, {"reduce_scatter": 1})
        case "reduce_scatter_sequence":
            return sum(xs).chunk(size)[rank], torch.cat(grads), ({"reduce_scatter": 1}, {"all_gather": 1})
    raise AssertionError(name)


@pytest.mark.parametrize("size", [2, 4])
def test_a_region_does_what_its_row_of_the_table_says(size):
    for name, shape, strided in itertools.product(REGIONS, SHAPES, (False, True)):
        row, slice_shape = (name, shape, strided), (shape[0] // size, *shape[1:])
        in_shape = slice_shape if name == "gather_sequence" else shape
        out_shape = slice_shape if name == "reduce_scatter_sequence" else shape
        xs = [integers(rank, *in_shape) for rank in range(size)]
        grads = [integers(100 + rank, *out_shape) for rank in range(size)]
        for rank, result in enumerate(ranks(size).run(run_region, name, in_shape, out_shape, strided)):
            y, x_grad, calls = expect(name, xs, grads, rank)
            assert torch.equal(result["y"], y), row
            assert torch.equal(result["x_grad"], x_grad), row
            assert result["calls"] == calls, row
            assert result["unchanged"], row


def run_in_two_branches(name: str) -> dict[str, torch.Tensor]:
    """`a` goes through the region and beside it, `b` beside it, and autograd hands one gradient tensor to all."""
    tp = tp_axis()
    a, b = (integers(first + tp.rank, 8, 3).requires_grad_() for first in (0, 10))
    grad = integers(20 + tp.rank, 8, 3)
    through = getattr(regions, name)(2 * a, tp)
    y = a + through + b
    y.backward(grad)
    return {"y": y.detach(), "a": a.grad, "b": b.grad, "given": grad}


@pytest.mark.parametrize("name", ["copy_to_region", "reduce_from_region_"])
def test_inputs_and_gradients_that_another_branch_shares_are_left_alone(name):
    """An all-reduce in place must not reach the gradient of the other branch, nor what it reads."""
    summed = name == "reduce_from_region_"
    for rank, result in enumerate(ranks(2).run(run_in_two_branches, name)):
        x, own = integers(rank, 8, 3), integers(20 + rank, 8, 3)
        through = 2 * (integers(0, 8, 3) + integers(1, 8, 3)) if summed else 2 * x
        assert torch.equal(result["y"], x + through + integers(10 + rank, 8, 3))
        assert torch.equal(result["b"], own)
        assert torch.equal(result["given"], own)
        assert torch.equal(result["a"], own + 2 * (own if summed else integers(20, 8, 3) + integers(21, 8, 3)))


def check_ways_in_and_out() -> None:
    tp = tp_axis()
    for split, ways in ((False, ({}, {"all_reduce": 1})), (True, ({"all_gather": 1}, {"reduce_scatter": 1}))):
        x = integers(0, 8 // tp.size if split else 8, 3)
        enter, leave = (functools.partial(way, tp=tp, sequence_parallel=split) for way in (enter_region, leave_region))
        inside, calls_in = counted(tp, functools.partial(enter, x))
        outside, calls_out = counted(tp, functools.partial(leave, inside))
        if tp.size > 1:
            assert (calls_in, calls_out) == ways
            assert (inside.shape, outside.shape) == ((8, 3), x.shape)
        else:
            assert inside is outside is x


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_parallelism_gathers_on_the_way_in_and_scatters_on_the_way_out_and_one_rank_does_neither(size):
    ranks(size).run(check_ways_in_and_out)


def test_on_an_axis_of_one_rank_a_region_returns_its_argument():
    alone, x = MeshAxis("tp"), integers(0, 8, 3)
    for name in REGIONS:
        assert torch.equal(getattr(regions, name)(x, alone), x)
    assert not alone.counter.table()
