"""Packing and unpacking of planned messages: exact where exact, within half a block step elsewhere.

Sums, differences, errors that are fed back and other orders of peers are the kernels': tests/kernels.
"""

from __future__ import annotations

import pytest
import torch

from kernels.formats import BlockFormat
from megazpp.zero.layout import plan_message, plan_segments
from megazpp.zero.wire import Codec

SHAPES = [("norm", (10,)), ("weight", (12, 33)), ("bias", (7,)), ("head", (5, 129)), ("scalar", ())]
RANKS, PEERS = 3, 4
CPU = torch.device("cpu")


def codec(fmt: BlockFormat | None, dtype: torch.dtype = torch.float32) -> Codec:
    return Codec(plan_message(plan_segments(SHAPES, RANKS), fmt, exact_itemsize=dtype.itemsize), dtype)


def shards(size: int, *peers: int) -> torch.Tensor:
    return torch.randn(*peers, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_format_the_message_is_exact(dtype: torch.dtype):
    wire = codec(None, dtype)
    sent = shards(wire.layout.size, 2, PEERS).to(dtype)
    messages = wire.empty(2, PEERS, device=CPU)
    wire.pack(sent, messages)
    out = torch.full_like(sent, float("nan"))
    wire.unpack(messages, out)
    assert torch.equal(out, sent)
    assert torch.equal(wire.elements(messages), sent)
    assert wire.new_errors(PEERS, device=CPU) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_runs_are_within_a_step_and_the_rest_is_exact(bits: int):
    wire = codec(BlockFormat(bits, 32))
    sent = shards(wire.layout.size, PEERS)
    messages = wire.empty(PEERS, device=CPU)
    wire.pack(sent, messages)
    out = torch.full_like(sent, float("nan"))
    wire.unpack(messages, out)
    step = sent.abs().max() / (127 if bits == 8 else 7)  # no block has a larger step than this
    assert (out - sent).abs().max() <= step * 1.02
    for part in wire.layout.ranges:
        if part.scales is None:
            assert torch.equal(out[:, part.start : part.stop], sent[:, part.start : part.stop])
