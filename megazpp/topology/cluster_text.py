"""A cluster as the YAML that `--cluster-file` reads: what a run has found out and measured, for the next plan."""

from __future__ import annotations

from typing import Any

import yaml

from megazpp.topology.cluster import Cluster
from megazpp.topology.links import LINK_KINDS, Link

NO_DEVICE = "# --plan needs a device too: copy one from configs/clusters\n"


def cluster_text(cluster: Cluster) -> str:
    """What megazpp/topology/cluster_file.py reads back as the same cluster, to six digits; notices are left out."""
    content: dict[str, Any] = {"nodes": cluster.num_nodes, "ranks_per_node": cluster.ranks_per_node}
    if cluster.domain_size is not None:
        content["fast_domain"] = cluster.domain_size
    if cluster.order is not None:
        per_node = cluster.ranks_per_node
        starts = range(0, cluster.world_size, per_node)
        content["rank_order"] = [list(cluster.order[start : start + per_node]) for start in starts]
    if cluster.links is not None:
        known = {kind: link for kind in LINK_KINDS if (link := cluster.links.get(kind)) is not None}
        content |= {"links": {kind: _link(link) for kind, link in known.items()}} if known else {}
    if cluster.device is not None:
        content["device"] = {key: value for key, value in cluster.device._asdict().items() if value is not None}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    return text if cluster.device is not None else text + NO_DEVICE


def _link(link: Link) -> dict[str, Any]:
    figures: dict[str, Any] = {"gigabytes_per_second": float(f"{link.gigabytes_per_second:.6g}")}
    if link.microseconds:  # none measured, or too short to tell
        figures["microseconds"] = float(f"{link.microseconds:.6g}")
    return figures | {"source": link.source}
