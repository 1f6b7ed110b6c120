"""Packing and unpacking: exact where exact, within half a block step elsewhere, sums in order."""

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


def test_views_in_another_order_of_peers_give_the_same_messages():
    """The hops' permutation [N, L, S] -> [L, N, M] is strides alone."""
    wire = codec(BlockFormat(8, 32))
    gradients = shards(wire.layout.size, 2, 3)
    straight, turned = wire.empty(2, 3, device=CPU), wire.empty(3, 2, device=CPU)
    wire.pack(gradients, straight)
    wire.pack(gradients.transpose(0, 1), turned)
    assert torch.equal(straight.transpose(0, 1), turned)


@pytest.mark.parametrize("fmt", [None, BlockFormat(8, 32), BlockFormat(4, 32)])
def test_sums_over_peers_equal_the_sum_of_what_each_peer_unpacks_to(fmt: BlockFormat | None):
    wire = codec(fmt)
    messages = wire.empty(PEERS, 2, device=CPU)
    wire.pack(shards(wire.layout.size, PEERS, 2), messages)
    each = torch.empty(PEERS, 2, wire.layout.size)
    wire.unpack(messages, each)
    out = torch.full((2, wire.layout.size), float("nan"))
    wire.unpack_sum(messages, out, accumulate=False)
    expected = each[0].clone()
    for part in each[1:]:
        expected += part
    assert torch.equal(out, expected)
    wire.unpack_sum(messages, out, accumulate=True)
    for part in each:
        expected += part
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("beta", "share"), [(0.0, 0.2), (0.8, 0.25)])
def test_error_feedback_makes_the_sum_of_many_messages_right(beta: float, share: float):
    """What one message loses later ones bring: the error of the sum stays that of a few messages."""
    wire = codec(BlockFormat(4, 32))
    value, errors = shards(wire.layout.size, PEERS), wire.new_errors(PEERS, device=CPU)
    messages, out = wire.empty(PEERS, device=CPU), torch.empty(PEERS, wire.layout.size)
    kept, plain = torch.zeros_like(out), torch.zeros_like(out)
    for _ in range(64 if beta else 16):
        for total, how in ((kept, {"errors": errors, "beta": beta}), (plain, {})):
            wire.pack(value, messages, **how)
            wire.unpack(messages, out)
            total += out - value
    assert kept.norm() < share * plain.norm()
