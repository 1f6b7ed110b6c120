"""Axes, units and codecs on paper: shapes, bytes and costs without memory and without a process group."""

from __future__ import annotations

import pytest
import torch

from kernels.formats import BlockFormat
from megazpp.parallel.axis import Traffic, TrafficCounter
from megazpp.planner.paper import PaperAxis, PaperCodec, PaperUnit
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import plan_layout
from megazpp.zero.layout import plan_message

Told = list[tuple[str, int]]
LAYOUT = plan_layout(Cluster(num_nodes=2, ranks_per_node=4), tp=1, replicas=1)


def axis(name: str, *, rank: int = 0) -> tuple[PaperAxis, TrafficCounter, Told]:
    counter, told = TrafficCounter(), Told()
    made = PaperAxis(LAYOUT, name, rank=rank, counter=counter, cost=lambda what, size: told.append((what, size)))
    return made, counter, told


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def test_collectives_have_a_ring_s_bytes_and_the_shapes_of_real_ones():
    local, counter, told = axis("local")
    assert local.all_gather(meta(3, 5)).shape == (12, 5)
    assert local.reduce_scatter(meta(12, 5)).shape == (3, 5)
    assert local.all_to_all(meta(4, 15)).shape == (4, 15)
    local.all_reduce_(meta(60))
    part = 60 * 2 * 3 // 4
    expected = [("all_gather", part), ("reduce_scatter", part), ("all_to_all", part), ("all_reduce", 2 * part)]
    assert told == expected
    assert counter.table() == {("local", "local", what): Traffic(1, size) for what, size in expected}


def test_an_axis_of_one_rank_sends_nothing():
    tp, counter, told = axis("tp")
    x = meta(4)
    assert tp.all_gather(x) is tp.reduce_scatter(x) is tp.all_to_all(x) is x
    tp.all_reduce_(x)
    assert not told
    assert not counter.table()


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_s_place_on_an_axis_is_the_layout_s(rank: int):
    for name in ("tp", "local", "cross", "shard"):
        made, _, _ = axis(name, rank=rank)
        assert made.ranks == LAYOUT.axis_ranks(name, rank)
        assert made.ranks[made.rank] == rank


def test_a_unit_s_shard_is_padded_to_the_same_rows_on_every_rank():
    unit = PaperUnit([("norm", (6,)), ("weight", (6, 100))], 4)
    assert unit.size == 2 + 2 * 100
    reader = unit.shard_reader(torch.bfloat16)
    assert reader is not None
    assert (reader().shape, reader().device.type) == ((202,), "meta")
    unit.is_sharded = False
    assert unit.shard_reader(torch.bfloat16) is None


def test_a_unit_s_fingerprint_changes_with_its_version_and_its_states_are_its_own():
    unit, other = (PaperUnit([("weight", (8, 8))], 2) for _ in range(2))
    before = unit.fingerprint()
    unit.version += 1
    assert unit.fingerprint() != before == other.fingerprint()


def test_a_codec_tells_what_its_passes_read_and_write():
    unit = PaperUnit([("norm", (6,)), ("weight", (6, 100))], 4)
    told: list[int] = []
    layout = plan_message(unit.segments, BlockFormat(8, 128), exact_itemsize=2)
    codec = PaperCodec(layout, torch.bfloat16, told.append)
    shards, messages, out = meta(3, 202), codec.empty(3, device=torch.device("meta")), meta(202).float()
    codec.pack(shards, messages)
    codec.unpack(messages, shards)
    codec.unpack_sum(messages, out, accumulate=False)
    codec.unpack_sum(messages, out, accumulate=True)
    whole, sent, summed = 3 * 202 * 2, 3 * layout.message_bytes, 202 * 4
    assert told == [whole + sent, whole + sent, sent + summed, sent + 2 * summed]
    errors = codec.new_errors(3, device=torch.device("meta"))
    codec.pack(shards, messages, errors=errors)
    assert errors is not None
    fed_back = errors.messages.nbytes
    assert fed_back > 0
    assert told[-1] == whole + sent + 2 * fed_back  # read and written
