"""Fused rows and their parts, and what is said about tensors that do not fit."""

import pytest
import torch

from megazpp.convert.model import (
    Deferred,
    ForeignTensors,
    check_tensors,
    fuse_qkv,
    join_all,
    same,
    split_qkv,
    transposed,
)


@pytest.mark.parametrize(
    ("groups", "queries", "size", "rest"), [(1, 1, 1, (4,)), (3, 1, 2, ()), (2, 3, 5, (4,)), (1, 7, 3, (4,))]
)
def test_queries_keys_and_values_are_fused_group_by_group(groups, queries, size, rest):
    heads = [groups * queries, groups, groups]
    parts = [torch.randn(count * size, *rest) for count in heads]
    fused = fuse_qkv(parts, groups=groups, head_size=size)
    rows = []
    for group in range(groups):  # written out
        rows += [parts[0][(group * queries + q) * size : (group * queries + q + 1) * size] for q in range(queries)]
        rows += [part[group * size : (group + 1) * size] for part in parts[1:]]
    assert torch.equal(fused, torch.cat(rows))
    for part, again in zip(parts, split_qkv(fused, groups=groups, head_size=size), strict=True):
        assert torch.equal(part, again)


def test_tensors_that_do_not_fit_are_named_and_long_lists_are_short():
    with pytest.raises(ValueError, match=r"^here: a, b are missing; c has no place in this model; d has shape \[2\]"):
        check_tensors({"c": (1,), "d": (2,)}, {"a": (1,), "b": (1,), "d": (3,)}, "here")
    with pytest.raises(ValueError, match=r"^here: 0, 1, 2 and 97 more are missing$"):
        check_tensors({}, {str(i): (1,) for i in range(100)}, "here")
    with pytest.raises(ValueError, match=r"\(and 97 more like that\)$"):
        check_tensors({str(i): (1,) for i in range(100)}, {str(i): (2,) for i in range(100)}, "here")


def test_parts_of_one_tensor_have_one_type():
    parts = {
        name: Deferred((1, 2), dtype, lambda: torch.zeros(1, 2))
        for name, dtype in zip("qkv", (torch.float32, torch.bfloat16, torch.float32), strict=True)
    }
    piece = ForeignTensors(tuple("qkv"), torch.cat, lambda x: x.split(1))
    with pytest.raises(ValueError, match="q, k, v are one tensor here, and have different types"):
        join_all({"qkv": piece}, parts, {"qkv": (3, 2)}, "here")


def test_nothing_is_read_before_it_is_wanted():
    def read() -> torch.Tensor:
        raise AssertionError("read")

    parts = {"a": Deferred((2, 3), torch.float32, read), "b": Deferred((4,), torch.float32, read)}
    joined = join_all({"x": transposed("a"), "y": same("b")}, parts, {"x": (3, 2), "y": (4,)}, "here")
    with pytest.raises(AssertionError, match="read"):
        joined["x"].read()
