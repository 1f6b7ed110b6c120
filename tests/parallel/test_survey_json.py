"""Records as JSON: what was written comes back, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from megazpp.parallel.survey import Answer, from_json
from megazpp.topology.cluster import Cluster
from megazpp.topology.hosts import Gpu, HostInfo

HOST = HostInfo(
    host="a",
    local_rank=3,
    gpu=Gpu(uuid="u", nvlink_peers=("x", "switch")),
    adapters=("ib0 400 Gbit/s", "eth0"),
    notice="ä",
)
CLUSTER = Cluster(
    num_nodes=2,
    ranks_per_node=2,
    order=(0, 2, 1, 3),
    notices=("one", "two"),
)


def to_json(record: Any) -> bytes:
    return json.dumps(asdict(record)).encode()


@pytest.mark.parametrize("record", [HOST, HostInfo(host="b"), CLUSTER, Answer(CLUSTER), Answer(problem="p")])
def test_a_record_comes_back_as_it_was(record: Any):
    found = from_json(type(record), to_json(record))
    assert found == record
    assert vars(found) == vars(record)  # notices are not compared


def changed(**fields: object) -> bytes:
    return json.dumps(json.loads(to_json(CLUSTER)) | fields).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"1",
        b"null",
        b"{",
        changed(num_nodes="2"),
        changed(num_nodes=True),
        changed(num_nodes=2.0),
        changed(order=[0, 2, 1]),
        changed(order="0213"),
        changed(links=[1, 2]),
        changed(links={}),
        changed(device=["H100", 1.0, 1.0, 1.0]),
        changed(notices=["one", 2]),
        changed(num_nodes=0),
        changed(ranks_per_node=0, order=None),
        changed(domain_size=3),
        b'"\xff"',
        b"[" * 100_000,
        to_json(HOST),
        changed(more=1),
        b"{}",
    ],
)
def test_anything_else_is_refused(text: bytes):
    with pytest.raises(ValueError, match="is no Cluster"):
        from_json(Cluster, text)


@pytest.mark.parametrize(
    "text",
    [
        to_json(HOST).replace(b'"u"', b"7"),
        to_json(HOST).replace(b'"x"', b"null"),
        to_json(HOST).replace(b'"uuid"', b'"id"'),
        to_json(replace(HOST, gpu=None)).replace(b'"gpu": null', b'"gpu": []'),
    ],
)
def test_a_host_with_anything_else_for_a_gpu_is_refused(text: bytes):
    with pytest.raises(ValueError, match="is no HostInfo"):
        from_json(HostInfo, text)
