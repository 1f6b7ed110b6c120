"""A layout as the integers that it follows from, for a file, and back. Figures of links and devices are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import COORDINATES, Layout

CLUSTER_FIELDS = ("num_nodes", "ranks_per_node", "domain_size", "order")


def layout_record(layout: Layout) -> dict[str, Any]:
    """What `layout_from_record` needs, as JSON has it."""
    cluster = {name: getattr(layout.cluster, name) for name in CLUSTER_FIELDS}
    return cluster | {name: getattr(layout, name) for name in COORDINATES}


def layout_from_record(record: Mapping[str, Any]) -> Layout:
    """The layout that a record was made of.

    Raises:
        ValueError: a field is missing or no integer, or the sizes do not fit each other.
    """
    order = record.get("order")
    optional = [] if record.get("domain_size") is None else [record["domain_size"]]
    needed = [record.get(name) for name in (*CLUSTER_FIELDS[:2], *COORDINATES)]
    numbers = [*needed, *optional, *(order if isinstance(order, list) else [])]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(order, list | None):
        raise ValueError(f"{dict(record)} is no record of a layout")
    cluster = Cluster(
        num_nodes=record["num_nodes"],
        ranks_per_node=record["ranks_per_node"],
        domain_size=record.get("domain_size"),
        order=None if order is None else tuple(order),
    )
    layout = Layout(cluster=cluster, **{name: record[name] for name in COORDINATES})
    if layout.data * layout.tp != cluster.world_size or not cluster.world_size:
        raise ValueError(f"axes of {layout.data} x {layout.tp} ranks are not the {cluster.world_size} of the cluster")
    return layout
