"""Compare each tensor-parallel region with its formula over all ranks, in forward and backward.

Values are small integers, so that sums are exact in any order, and every comparison is bitwise.
"""

import itertools

import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import counted, part, tp_axis

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel import regions
from megazpp.tensor_parallel.regions import enter_region, leave_region

# the collective of each region in forward, and in backward, as in the table at the head of regions.py
REGIONS = {
    "copy_to_region": ("identity", "all_reduce"),
    "reduce_from_region_": ("all_reduce", "identity"),
    "gather_sequence": ("all_gather", "reduce_scatter"),
    "reduce_scatter_sequence": ("reduce_scatter", "all_gather"),
}


def integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def formula(collective: str, given: list[torch.Tensor], tp: MeshAxis) -> tuple[torch.Tensor, dict[str, int]]:
    """Return this rank's result of a collective, and the expected number of calls.

    Args:
        collective: "identity", "all_reduce", "all_gather" or "reduce_scatter".
        given: inputs of all ranks, in rank order.
        tp: tensor-parallel axis.
    """
    match collective:
        case "identity":
            return given[tp.rank], {}
        case "all_reduce":
            return sum(given), {collective: 1}
        case "all_gather":
            return torch.cat(given), {collective: 1}
    return part(sum(given), 0, tp), {collective: 1}


def check_regions() -> None:
    tp = tp_axis()
    for name, (first, *rest), strided in itertools.product(REGIONS, [(8, 3, 5), (4, 1, 1), (12, 7)], (False, True)):
        forward, backward = REGIONS[name]
        shape, sliced = (first, *rest), (first // tp.size, *rest)
        xs = [integers(rank, *(sliced if forward == "all_gather" else shape)) for rank in range(tp.size)]
        grads = [integers(100 + rank, *(sliced if backward == "all_gather" else shape)) for rank in range(tp.size)]
        x, grad = xs[tp.rank].clone(), grads[tp.rank].clone()
        if strided:  # x and grad keep their values, but become non-contiguous
            x, grad = x.mT.contiguous().mT, grad.mT.contiguous().mT
        x.requires_grad_()
        given = x.clone(memory_format=torch.contiguous_format) if name.endswith("_") else x
        y, calls = counted(tp, getattr(regions, name), given, tp)
        _, calls_back = counted(tp, y.backward, grad)
        rows = (forward, xs, y, calls), (backward, grads, x.grad, calls_back)
        for collective, of_ranks, result, called in rows:
            expected, call = formula(collective, of_ranks, tp)
            assert torch.equal(result, expected), (name, shape, strided)
            assert called == call, (name, shape, strided)
        assert torch.equal(x, xs[tp.rank])  # a region may not change its input
        assert torch.equal(grad, grads[tp.rank])


def test_region_communicates_as_its_row_in_the_table():
    ranks(4).run(check_regions)


def check_two_branches() -> None:
    """Add `a`, a region of 2 `a`, and `b`, and check the sum and all gradients.

    Autograd passes the same gradient tensor to all three addends, so a region may not change it in place.
    """
    tp = tp_axis()
    for name in ("copy_to_region", "reduce_from_region_"):
        inputs, grads = ([integers(first + rank, 8, 3) for rank in range(2)] for first in (0, 20))
        a, b = inputs[tp.rank].clone().requires_grad_(), integers(10 + tp.rank, 8, 3).requires_grad_()
        own = grads[tp.rank].clone()
        y = a + getattr(regions, name)(2 * a, tp) + b
        y.backward(own)
        through, _ = formula(REGIONS[name][0], inputs, tp)
        back, _ = formula(REGIONS[name][1], grads, tp)
        assert torch.equal(y, inputs[tp.rank] + 2 * through + b)
        assert torch.equal(own, grads[tp.rank])
        assert torch.equal(b.grad, own)
        assert torch.equal(a.grad, own + 2 * back)


def test_region_leaves_inputs_and_gradients_of_other_branches_unchanged():
    """An in-place all-reduce may change neither the gradient of another addend nor the region's input."""
    ranks(2).run(check_two_branches)


def test_region_on_one_rank_returns_its_argument():
    alone, x = MeshAxis("tp"), integers(0, 8, 3)
    for name in REGIONS:
        assert torch.equal(getattr(regions, name)(x, alone), x)
    for split in (False, True):
        assert leave_region(enter_region(x, alone, sequence_parallel=split), alone, sequence_parallel=split) is x
    assert not alone.counter.table()
