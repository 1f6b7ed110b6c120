"""Test the layouts of messages: every element is in one range, sizes follow the formats, and errors are bounded.

tests/kernels has the tests of sums, differences, error feedback and the order of ranks.
"""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megazpp.kernels.formats import ALIGNMENT, BlockFormat, MessageLayout
from megazpp.zero.wire import Codec, own_rows, plan_message, plan_segments

shapes = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)
formats = st.sampled_from([None, BlockFormat(8, 32), BlockFormat(4, 32), BlockFormat(8, 256), BlockFormat(4, 128)])


def plan(shapes: list[tuple[int, ...]], ranks: int, fmt: BlockFormat | None, itemsize: int) -> MessageLayout:
    segments = plan_segments([(str(i), shape) for i, shape in enumerate(shapes)], ranks)
    return plan_message(segments, fmt, exact_itemsize=itemsize)


@given(shapes, st.integers(1, 7), formats, st.sampled_from([2, 4]))
def test_every_element_is_in_one_range_and_ranges_share_no_byte(shapes, ranks, fmt, itemsize):
    layout = plan(shapes, ranks, fmt, itemsize)
    elements = sorted((p.start, p.stop) for p in layout.ranges)
    assert sum(stop - start for start, stop in elements) == layout.size
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(elements))
    spans = sorted(span for p in layout.ranges for span in (p.payload, p.scales) if span is not None)
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert all(first + length <= layout.message_bytes for first, length in spans)
    assert layout.message_bytes % ALIGNMENT == 0
    assert layout.message_bytes <= plan(shapes, ranks, None, itemsize).message_bytes + 6 * ALIGNMENT
    for part in layout.ranges:
        assert part.payload[0] % ALIGNMENT == 0
        n = part.stop - part.start
        if part.scales is None:
            assert part.payload[1] == n * itemsize
        else:
            assert fmt is not None
            assert (part.payload[1], part.scales[1]) == (fmt.payload_bytes(n), fmt.scale_bytes(n))
            assert part.scales[0] % 2 == 0


def test_wire_docstring_example():
    segments = plan_segments([("norm", (6,)), ("weight", (6, 100))], 4)
    assert [(s.start, s.size, s.exact) for s in segments] == [(0, 2, True), (2, 200, False)]
    layout = plan_message(segments, BlockFormat(8, 128), exact_itemsize=2)
    weight, norm = layout.ranges
    assert (weight.payload, weight.scales) == ((0, 256), (256, 4))
    assert (norm.payload, norm.scales) == ((272, 4), None)
    assert layout.message_bytes == 288


def test_ranks_beyond_the_last_row_own_no_rows():
    assert [own_rows(5, 4, rank) for rank in range(4)] == [2, 2, 1, 0]
    assert [own_rows(2, 5, rank) for rank in range(5)] == [1, 1, 0, 0, 0]


def test_1d_and_tiny_parameters_are_sent_unquantized():
    layout = plan([(4096,), (4, 8), (64, 64)], 1, BlockFormat(8, 256), 2)
    exact = [(p.start, p.stop) for p in layout.ranges if p.scales is None]
    assert exact == [(0, 4096 + 32)]  # adjacent exact segments are sent as one range


# ---- packing and unpacking by `Codec` ----

SHAPES = [("norm", (10,)), ("weight", (12, 33)), ("bias", (7,)), ("head", (5, 129)), ("scalar", ())]


def there_and_back(fmt: BlockFormat | None, dtype: torch.dtype) -> tuple[Codec, Tensor, Tensor, Tensor]:
    """Pack random data into messages and unpack them again.

    Returns:
        (codec, data [2, 4, elements], messages, unpacked data [2, 4, elements]).
    """
    wire = Codec(plan_message(plan_segments(SHAPES, 3), fmt, exact_itemsize=dtype.itemsize), dtype)
    sent = torch.randn(2, 4, wire.layout.size, generator=torch.Generator().manual_seed(1)).to(dtype)
    messages, out = wire.empty(2, 4, device=sent.device), torch.full_like(sent, torch.nan)
    wire.pack(sent, messages)
    wire.unpack(messages, out)
    return wire, sent, messages, out


def test_message_without_a_format_is_exact():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wire, sent, messages, out = there_and_back(None, dtype)
        assert torch.equal(out, sent), dtype
        assert torch.equal(wire.elements(messages), sent), dtype
        assert wire.new_errors(4, device=sent.device) is None


def test_quantized_ranges_have_bounded_error_and_others_are_exact():
    for fmt in (BlockFormat(8, 32), BlockFormat(4, 32)):
        wire, sent, _, out = there_and_back(fmt, torch.float32)
        step = sent.abs().max() / (127 if fmt.bits == 8 else 7)  # the largest quantization step that any block can have
        assert (out - sent).abs().max() <= step * 1.02, fmt
        exact = [slice(part.start, part.stop) for part in wire.layout.ranges if part.scales is None]
        assert exact
        assert all(torch.equal(out[..., part], sent[..., part]) for part in exact), fmt
