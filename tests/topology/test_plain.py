"""Records as JSON: what was written comes back, and nothing else does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megazpp.topology.cluster import Cluster, Link, Links
from megazpp.topology.hosts import Gpu, HostInfo, Nic
from megazpp.topology.plain import from_json, to_json

HOST = HostInfo(
    host="a",
    local_rank=3,
    gpu=Gpu(uuid="u", nvlink_peers=("x", "switch"), numa_node=1),
    nics=(Nic("ib0", "0000:1b:00.0", 0, 400.0), Nic("eth0", "")),
    notice="ä",
)
CLUSTER = Cluster(
    num_nodes=2,
    ranks_per_node=2,
    order=(0, 2, 1, 3),
    links=Links(node=Link(12, None, "PCIe"), network=Link(50.0, 2.5)),
    notices=("one", "two"),
)


@pytest.mark.parametrize("record", [HOST, HostInfo(host="b"), CLUSTER, Cluster(num_nodes=1, ranks_per_node=1)])
def test_a_record_comes_back_as_it_was(record: Any):
    found = from_json(type(record), to_json(record))
    assert found == record
    assert vars(found) == vars(record)  # notices are not compared


def changed(**fields: object) -> str:
    return json.dumps(json.loads(to_json(CLUSTER)) | fields)


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "null",
        "{",
        changed(num_nodes="2"),
        changed(num_nodes=True),
        changed(num_nodes=2.0),
        changed(order=[0, 2, 1]),
        changed(order="0213"),
        changed(links=[1, 2]),
        changed(more=1),
        "{}",
    ],
)
def test_anything_else_is_refused(text: str):
    with pytest.raises(ValueError, match="is no Cluster"):
        from_json(Cluster, text)
