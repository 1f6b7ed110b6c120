"""Test messages of sharding units whose parameters have several dtypes."""

import torch

from megazpp.drop_in.codec import ByteCodec, byte_ranges, segments_in_bytes
from megazpp.zero.wire import plan_segments


def test_parameters_of_several_dtypes_are_sent_as_they_are():
    dtypes = (torch.bfloat16, torch.uint8, torch.float32, torch.float64)
    shapes = {"a": (3, 5), "b": (7,), "none": (0, 2), "c": (2, 2)}
    segments = segments_in_bytes(plan_segments(list(shapes.items()), 1), dtypes)
    codec = ByteCodec(segments)
    shards = torch.arange(2 * 101, dtype=torch.uint8).view(2, -1)[:, : 30 + 7 + 32]
    messages, received = codec.empty(2, device=torch.device("cpu")), torch.zeros_like(shards)
    codec.pack(shards, messages)
    codec.unpack(messages, received)
    assert torch.equal(received, shards)
    assert codec.message_bytes % 16 == 0
    assert byte_ranges(codec, [segments[1], segments[3]]) == [(30, 37), (37, 69)]
