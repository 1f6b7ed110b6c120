"""Test packed matrices: matrix products and embedding lookups give the unpacked matrix's results."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megazpp.packed_weights.format import Placed, RowFormat, plan_rows
from megazpp.packed_weights.streamed import PackedMatrix, PackedWeight

CPU = torch.device("cpu")


def matrix_of(weight: torch.Tensor, rows: RowFormat, parts: int = 1, dtype: Any = torch.float32) -> PackedMatrix:
    part_rows = -(-len(weight) // parts)
    padded = torch.zeros(parts * part_rows, weight.shape[1])
    padded[: len(weight)] = weight
    matrix = PackedMatrix(Placed("weight", tuple(weight.shape), rows, part_rows, 0), dtype, CPU)
    matrix.take(rows.pack(padded).view(parts, -1))
    return matrix


def unpacked_rows(matrix: PackedMatrix) -> torch.Tensor:
    return matrix.lookup(torch.arange(matrix.num_rows))


@pytest.mark.parametrize(("bits", "error"), [(16, 0.003), (8, 0.01), (4, 0.1)])
def test_products_and_lookups_match_the_unpacked_matrix(monkeypatch, bits, error):
    for columns, parts, piece in itertools.product([1, 37, 64, 257], [1, 3], [1, 5, 1000]):
        monkeypatch.setattr("megazpp.packed_weights.streamed._CPU_PIECE", piece * columns)
        torch.manual_seed(0)
        weight, bias, x = torch.randn(31, columns), torch.randn(31), torch.randn(2, 3, columns)

        matrix = matrix_of(weight, plan_rows(columns, bits), parts)
        packed, unpacked = PackedWeight(matrix), unpacked_rows(matrix)

        assert unpacked.shape == packed.shape == weight.shape
        assert (unpacked - weight).norm() < error * weight.norm()
        for with_bias in (None, bias):
            expected = F.linear(x.double(), unpacked.double(), None if with_bias is None else with_bias.double())
            # the tolerance allows the rounding of fp32 sums of 257 products
            assert torch.allclose(F.linear(x, packed, with_bias).double(), expected, atol=1e-4)
        for rows in (slice(0, 29), slice(9, 10), slice(10, None)):
            assert torch.allclose(F.linear(x, packed[rows]), F.linear(x, unpacked[rows]), atol=1e-4)
            assert torch.allclose(F.linear(x, packed[rows][1:]), F.linear(x, unpacked[rows][1:]), atol=1e-4)
        ids = torch.tensor([[0, 30, 7], [30, 11, 0]])
        assert torch.equal(F.embedding(ids, packed), F.embedding(ids, unpacked))


def test_16_bit_weights_in_the_compute_dtype_are_used_in_place():
    for dtype in (torch.bfloat16, torch.float16):
        weight, x = torch.randn(31, 37).to(dtype), torch.randn(3, 37).to(dtype)
        matrix = matrix_of(weight.float(), plan_rows(37, 16, dtype), dtype=dtype)
        assert torch.equal(unpacked_rows(matrix), weight)
        assert torch.allclose(F.linear(x, PackedWeight(matrix)), F.linear(x, weight), atol=0.1)


def test_int4_scales_are_never_worse_than_scales_of_the_peak_element():
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * 0.02
    blocks = weight.view(-1, 32)
    peak = blocks.abs().amax(1, keepdim=True)
    scale = torch.where(blocks.amin(1, keepdim=True) == -peak, peak, -peak).div(8).bfloat16().float()
    plain = ((blocks / scale).round().clamp(-8, 7) * scale - blocks).square().sum(1)

    rows = plan_rows(256, 4)
    found = rows.unpack(rows.pack(weight), torch.empty_like(weight))

    error = (found - weight).view(-1, 32).square().sum(1)
    assert rows.row_bytes * 8 / 256 == 4.5
    assert (error <= plain * 1.0001).all()
    # the packer tries several scales per block; with only the scale of the largest element, the error would be 0.086
    assert error.sum().sqrt() < 0.083 * weight.norm()


def test_int8_error_is_at_most_half_a_step_of_its_block():
    weight = torch.randn(5, 320) * torch.logspace(-4, 4, 5).repeat_interleave(64)

    rows = plan_rows(320, 8)
    found = rows.unpack(rows.pack(weight), torch.empty_like(weight))

    step = weight.view(5, 5, 64).abs().amax(-1, keepdim=True) / 127
    # The bound is slightly above half a step, because a scale is rounded up to bf16.
    assert ((found - weight).view(5, 5, 64).abs() <= 0.505 * step).all()


def test_non_finite_values_and_zeros_are_preserved():
    for bits in (8, 4):
        weight = torch.randn(4, 128)
        weight[1, 70], weight[2] = torch.inf, 0.0
        rows = plan_rows(128, bits)  # type: ignore[arg-type]
        found = rows.unpack(rows.pack(weight), torch.empty_like(weight))
        assert found[1, 64:96].isnan().all()
        assert found[1, :64].isfinite().all()
        assert torch.equal(found[2], weight[2])


def test_missing_weight_or_unsupported_use_raises_an_error():
    layer, matrix = nn.Linear(64, 8, bias=False), matrix_of(torch.randn(8, 64), plan_rows(64, 8))
    del layer.weight
    layer.weight = PackedWeight(matrix)  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="packed weights"):
        layer.weight + 1
    matrix.parts = None
    with pytest.raises(RuntimeError, match="weight is not in memory"):
        layer(torch.zeros(1, 64))
