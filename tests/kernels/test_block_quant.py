"""Test the public functions of block quantization.

The tests are about error messages, the choice of the implementation, and calls by several threads.
"""

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.block_quant import layout_of
from helpers.refusals import not_refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megazpp.kernels import block_quant
from megazpp.kernels.block_quant import (
    Feedback,
    backend,
    native,
    pack,
    range_table,
    reference,
    unpack,
    unpack_onto,
    unpack_sum,
)
from megazpp.kernels.block_quant.range_table import RangeTable
from megazpp.kernels.c_library import CLibrary
from megazpp.kernels.formats import BlockFormat, plan_row

SIZES = (0, 1, 63, 257)


def table_of(n: int, bits: int = 8) -> RangeTable:
    return range_table(plan_row(n, BlockFormat(bits, 32)), torch.float32)


def empty(*lead: int, table: RangeTable) -> Tensor:
    return torch.zeros(*lead, table.layout.message_bytes, dtype=torch.uint8)


def largest_step(messages: Tensor, table: RangeTable) -> float:
    return float(Feedback(messages, table).scales.float().abs().max()) if messages.numel() else 0.0


def test_segments_of_any_length_and_leading_dims_round_trip():
    for lead, n in itertools.product([(), (3,), (2, 3), (0,)], SIZES):
        x, table = torch.randn(*lead, n), table_of(n)
        messages, out, total = empty(*lead, table=table), torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        pack(x, table, messages=messages, errors=Feedback.zeros(lead, table))
        unpack(messages, table, out=out)
        torch.testing.assert_close(out, x, rtol=0, atol=largest_step(messages, table))
        many = messages.expand(3, *messages.shape).contiguous()
        unpack_sum(many, table, out=total)
        assert torch.equal(total, out + out + out), (lead, n)
        unpack_sum(many, table, out=total, accumulate=True)
        assert torch.equal(total, out + out + out + out + out + out), (lead, n)


def test_base_follows_the_sent_values_over_many_differences():
    """Send a changing tensor as quantized differences to a base, which sender and receiver update with each message.

    Both bases stay identical, and each message corrects the rounding error of the one before.
    """
    for lead, n, bits in itertools.product([(), (2, 3)], SIZES, (8, 4)):
        table, generator = table_of(n, bits), torch.Generator().manual_seed(n)
        x = torch.randn(*lead, n, generator=generator)
        base = x.bfloat16()
        received, messages = base.clone(), empty(*lead, table=table)
        for _ in range(10):
            x += 0.1 * torch.randn(*lead, n, generator=generator)
            pack(x, table, messages=messages, base=base)
            for copy in (base, received):
                unpack_onto(messages, table, out=copy)
        assert torch.equal(base, received), (lead, n, bits)
        rounding = 2**-8 * float(base.abs().max()) if n else 0.0
        torch.testing.assert_close(base.float(), x, rtol=0, atol=1.032 * largest_step(messages, table) + rounding)


def test_exact_elements_are_replaced_by_differences_and_added_by_sums():
    table = range_table(layout_of([(40, True), (7, False)], BlockFormat(8, 32)), torch.float32)
    x, base, total = torch.randn(47), torch.randn(47), torch.ones(47)
    messages = empty(table=table)
    pack(x, table, messages=messages, base=base)
    unpack_onto(messages, table, out=base)
    assert torch.equal(base[40:], x[40:])
    unpack_sum(messages.expand(2, -1), table, out=total, accumulate=True)
    assert torch.equal(total[40:], 1 + x[40:] + x[40:])


X = torch.zeros(2, 40)
SENT = torch.zeros(2, 80, dtype=torch.uint8)


def test_invalid_tensors_are_rejected_by_name():
    def ask(x: Tensor, how: dict[str, Any]) -> None:
        pack(x, table_of(40), **{"messages": SENT, **how})

    wrong = [
        (X.double(), {}, "x is torch.float64"),
        (torch.zeros(2, 65), {}, "x (2, 65) has rows of the wrong size; expected 40 elements"),
        (X, {"messages": SENT.view(torch.int8)}, "messages is (torch.int8, "),
        (X, {"messages": SENT[:1]}, "messages is (torch.uint8, torch.Size([1, 80])"),
        (X, {"messages": torch.zeros(200, dtype=torch.uint8).as_strided((2, 80), (81, 1))}, "multiples of 4 bytes"),
        (torch.zeros(40, 2).t(), {}, "has stride 2 in its last dim"),
        (torch.zeros(1, 1, 2, 40), {}, "4 dims"),
        (X, {"errors": Feedback.zeros((3,), table_of(40))}, "errors is (torch.uint8"),
        (X, {"errors": Feedback.zeros((2,), table_of(41))}, "another layout"),
        (X, {"base": torch.zeros(2, 40, device="meta")}, "base is (torch.Size([2, 40]), device(type='meta'))"),
        (X, {"base": X.double()}, "base is torch.float64"),
        (X, {"base": X, "errors": Feedback.zeros((2,), table_of(40))}, "both errors and base"),
    ]
    assert not_refused(wrong, ask, AssertionError) == []
    for none in (SENT[0], SENT[None, :0].transpose(0, 1)):
        with pytest.raises(AssertionError, match="cannot be summed"):
            unpack_sum(none, table_of(40), out=X[0])


def test_device_without_an_implementation_is_an_error_and_no_slow_fallback():
    with pytest.raises(ValueError, match="no implementation for meta"):
        pack(X.to("meta"), table_of(40), messages=SENT)


def test_fake_tensors_are_checked_but_not_computed():
    table = table_of(70)
    with FakeTensorMode():
        x, messages = torch.empty(3, 70), torch.empty(3, table.layout.message_bytes, dtype=torch.uint8)
        pack(x, table, messages=messages, errors=Feedback.zeros((3,), table, x.device))
        unpack(messages, table, out=x)
        unpack_sum(messages, table, out=x[0])
        with pytest.raises(AssertionError, match="messages is"):
            pack(x, table, messages=messages[:, :2])


def test_backend_names_the_implementation_or_raises_without_one(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: CLibrary(ctypes.CDLL(None), "gcc 12.2.0"))
    assert backend("cpu")[1] == "C, compiled by gcc 12.2.0"
    with pytest.raises(ValueError, match="no implementation for mps"):
        backend("mps")
    monkeypatch.setattr(block_quant, "TRITON", None)
    with pytest.raises(ValueError, match="requires Triton"):
        backend("cuda")


def test_without_c_compiler_reference_runs_and_backend_says_why(monkeypatch):
    x, table = torch.randn(257), table_of(257)
    expected, got = empty(table=table), empty(table=table)
    reference.pack(x, table, expected)
    monkeypatch.setattr(native, "library", lambda: CLibrary(missing="no C compiler found"))
    monkeypatch.delattr(native, "pack")
    row = ("block quantization", "the reference in torch", "no C compiler found; compiled C is 3 to 11 times as fast")
    assert backend("cpu") == row
    pack(x, table, messages=got)
    assert torch.equal(got, expected)


def test_only_equal_triton_launches_are_repeated_and_checks_still_run(monkeypatch):
    """Check that a prepared launch is repeated for another address, but not for another kind of tensor.

    A tensor with another shape, other strides, another dtype or another alignment needs a launch of its own.
    """
    launched, repeated = [], []

    def launch(x: Tensor, *others: object) -> Any:
        launched.append(x)
        return lambda *pointers: repeated.append(pointers)

    fake = SimpleNamespace(pack=launch, unpack_sum=lambda messages, table, out, **onto: launch(out))
    monkeypatch.setattr(block_quant, "TRITON", fake)
    monkeypatch.setattr(block_quant, "_implementation", lambda tensor: fake)
    table, room = table_of(40), torch.zeros(400)
    monkeypatch.setattr(table, "repeats", {})
    x, sent = room[:80].view(2, 40), empty(2, table=table)
    errors = Feedback.zeros((2,), table)
    calls = [
        lambda x: pack(x, table, messages=sent),
        lambda x: pack(x, table, messages=sent, base=x),
        lambda x: pack(x, table, messages=sent, errors=errors),
        lambda x: pack(x, table, messages=sent, errors=errors, beta=0.5),
        lambda x: unpack(sent, table, out=x),
        lambda x: unpack_onto(sent, table, out=x),
        lambda x: unpack_sum(sent[None], table, out=x, accumulate=True),
    ]
    # the second tensor has another address with the same alignment, so the prepared launch must take the new address
    for same in (x, room[80:160].view(2, 40)):
        for call in calls:
            call(same)
    assert len(launched) == len(calls) == len(repeated)
    assert [pointers[0] for pointers in repeated[:4]] == [room[80:].data_ptr()] * 4
    assert repeated[2][1:] == (sent.data_ptr(), errors.messages.data_ptr())
    others = [room[1:81].view(2, 40), room[:160].view(2, 80)[:, :40], x.bfloat16(), room[:120].view(3, 40)[:2, :40][1:]]
    for number, other in enumerate(others):
        rows = sent[: len(other)]
        pack(other, table, messages=rows)
        assert len(launched) == len(calls) + number + 1
    with pytest.raises(AssertionError, match="messages is"):
        pack(x, table, messages=sent[:1])
    with pytest.raises(AssertionError, match="another layout"):
        pack(x, table, messages=sent, errors=Feedback.zeros((2,), table_of(41)))


def test_threads_may_pack_concurrently():
    """Pack 32 tensors in four threads, and compare with packing in one thread: calls share no state."""
    rows, table = torch.randn(32, 50_000), table_of(50_000)

    def packed(row: Tensor) -> Tensor:
        messages = empty(table=table)
        pack(row, table, messages=messages)
        return messages

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(packed, rows))
    assert all(map(torch.equal, together, map(packed, rows)))
