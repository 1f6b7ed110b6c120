"""A layout survives its record; what is no record is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout, plan_layout
from megazpp.topology.record import layout_from_record, layout_record

CYCLIC = plan_layout(
    Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7)), tp=2, replicas=2
)
RACKS = plan_layout(Cluster(num_nodes=4, ranks_per_node=2, domain_size=4), tp=1, replicas=1)


@pytest.mark.parametrize("layout", [CYCLIC, RACKS])
def test_a_layout_comes_back_from_json_as_it_was(layout: Layout):
    assert layout_from_record(json.loads(json.dumps(layout_record(layout)))) == layout


@pytest.mark.parametrize(
    "change",
    [
        {"tp": None},
        {"tp": "2"},
        {"tp": 4},
        {"order": 3},
        {"order": [0] * 8},
        {"order": ["0"]},
        {"domain_size": 3},
        {"num_nodes": 0},
        {"cross": -1},
        {"num_nodes": True},
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any]):
    with pytest.raises(ValueError, match=r"."):
        layout_from_record(layout_record(CYCLIC) | change)
