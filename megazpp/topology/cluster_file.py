"""`--cluster-file FILE.yaml`: a cluster in words; every mistake is an error that names file, key and value.

nodes: 2                  # hosts
ranks_per_node: 4         # ranks that the job has on each of them
fast_domain: 2            # optional: ranks that share the fastest wire, counted inside a node or over whole nodes
                          #   (2: NVLink pairs; 72: an NVLink rack); default: the ranks of a node
rank_order: cyclic        # optional: block (default): node 0 has ranks 0 to 3, node 1 has 4 to 7
                          #   cyclic: node 0 has ranks 0 2 4 6, node 1 has 1 3 5 7
                          #   or a list for each node, domain by domain: [[0, 2, 4, 6], [1, 3, 5, 7]]
links:                    # optional, each of them; figures hold for one direction
  domain:                 # between ranks of a domain, what one rank can send
    gigabytes_per_second: 56.25
    source: GA102 whitepaper
  node:                   # between domains of a node, what one rank can send
    gigabytes_per_second: 31.5
  network:                # between nodes, what one node can send with all its adapters
    gigabits_per_second: 100
    microseconds: 5       # optional: until a small message has arrived
                          # a source that begins with "measured" makes the rate what programs reach, for --plan
device:                   # optional, all of it: what one rank computes with; --plan needs it
  name: H100
  teraflops: 989          # dense 16-bit peak
  gigabytes: 80           # memory
  gigabytes_per_second: 3350
  shares: h100            # optional: what published runs have reached of all these figures (v100, a100, h100, h800:
                          # megazpp/topology/shares.py); without it --plan gives times as a range
  source: NVIDIA H100 Tensor Core GPU data sheet
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from megazpp.topology.device import Device
from megazpp.topology.links import LINK_KINDS, Link, Links
from megazpp.topology.shares import CALIBRATIONS

KEYS = ("nodes", "ranks_per_node", "fast_domain", "rank_order", "links", "device")
DEVICE_FIGURES = ("teraflops", "gigabytes", "gigabytes_per_second")
LINK_KEYS = ("gigabytes_per_second", "gigabits_per_second", "microseconds", "source")
NO_DEVICE = "# --plan needs a device too: copy one from configs/clusters\n"


class ClusterFile(NamedTuple):
    """What the file says; `rank_order` is the rank at each position, node by node, None for block order."""

    nodes: int
    ranks_per_node: int
    fast_domain: int | None
    rank_order: tuple[int, ...] | None
    links: Links | None
    device: Device | None


def read_cluster_file(path: str | Path) -> ClusterFile:
    """Read the file and check what each key says; how the values fit together is the Cluster's to check.

    Raises:
        ValueError: the file cannot be read, or a key is missing, unknown, doubled or has a value that means nothing.
    """
    try:
        return _Reader(str(path)).read(yaml.load(Path(path).read_text(encoding="utf-8"), _Loader))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--cluster-file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--cluster-file {path} is not YAML: {' '.join(str(error).split())}") from None


def cluster_file_text(cluster: ClusterFile) -> str:
    """The YAML that `read_cluster_file` reads back as `cluster`, to six digits."""
    content: dict[str, Any] = {"nodes": cluster.nodes, "ranks_per_node": cluster.ranks_per_node}
    if cluster.fast_domain is not None:
        content["fast_domain"] = cluster.fast_domain
    if cluster.rank_order is not None:
        order, size = cluster.rank_order, cluster.ranks_per_node
        content["rank_order"] = [list(order[start : start + size]) for start in range(0, len(order), size)]
    if cluster.links is not None:
        known = {kind: link for kind in LINK_KINDS if (link := cluster.links.get(kind)) is not None}
        content |= {"links": {kind: _figures(link) for kind, link in known.items()}} if known else {}
    if cluster.device is not None:
        content["device"] = {key: value for key, value in cluster.device._asdict().items() if value is not None}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    return text if cluster.device is not None else text + NO_DEVICE


def cyclic_order(nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    """The rank at each position when ranks were dealt out to the nodes one by one, as `srun -m cyclic` does."""
    return tuple(index * nodes + node for node in range(nodes) for index in range(ranks_per_node))


def _figures(link: Link) -> dict[str, Any]:
    figures: dict[str, Any] = {"gigabytes_per_second": float(f"{link.gigabytes_per_second:.6g}")}
    if link.microseconds:  # none measured, or too short to tell
        figures["microseconds"] = float(f"{link.microseconds:.6g}")
    return figures | {"source": link.source}


class _Loader(yaml.SafeLoader):
    """YAML whose keys may not be doubled: the plain loader would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"key {key.value} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Reader:
    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, content: Any) -> ClusterFile:
        top = self._mapping("the file", content, KEYS)
        for key in ("nodes", "ranks_per_node"):
            if key not in top:
                self._fail(f"key {key} is missing")
        nodes, ranks_per_node = (self._count(key, top[key]) for key in ("nodes", "ranks_per_node"))
        return ClusterFile(
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            fast_domain=self._count("fast_domain", top["fast_domain"]) if "fast_domain" in top else None,
            rank_order=self._rank_order(top.get("rank_order", "block"), nodes, ranks_per_node),
            links=self._links(top["links"]) if "links" in top else None,
            device=self._device(top["device"]) if "device" in top else None,
        )

    def _rank_order(self, value: Any, nodes: int, ranks_per_node: int) -> tuple[int, ...] | None:
        if value == "block":
            return None
        if value == "cyclic":
            return cyclic_order(nodes, ranks_per_node)
        if not isinstance(value, list) or not all(isinstance(ranks, list) for ranks in value):
            self._fail(f"rank_order {value!r} is not block, cyclic or one list of ranks for each node")
        if len(value) != nodes:
            self._fail(f"rank_order has lists for {len(value)} node(s), nodes is {nodes}")
        for node, ranks in enumerate(value):
            if len(ranks) != ranks_per_node:
                self._fail(f"rank_order {ranks} of node {node}: {len(ranks)} ranks, ranks_per_node is {ranks_per_node}")
            for rank in ranks:
                if not _is_integer(rank):
                    self._fail(f"rank_order {ranks} of node {node}: {rank!r} is not a rank")
        return tuple(rank for ranks in value for rank in ranks)

    def _links(self, value: Any) -> Links:
        given = self._mapping("links", value, LINK_KINDS)
        return Links(**{kind: self._link(f"links.{kind}", link) for kind, link in given.items()})

    def _link(self, where: str, value: Any) -> Link:
        given = self._mapping(where, value, LINK_KEYS)
        speeds = [key for key in ("gigabytes_per_second", "gigabits_per_second") if key in given]
        if len(speeds) != 1:
            self._fail(f"{where} {given} needs one of gigabytes_per_second and gigabits_per_second")
        speed = self._positive(f"{where}.{speeds[0]}", given[speeds[0]])
        latency = self._positive(f"{where}.microseconds", given["microseconds"]) if "microseconds" in given else None
        source = given.get("source", self._path)
        if not isinstance(source, str):
            self._fail(f"{where}.source {source!r} is not text")
        return Link(speed / 8 if speeds[0] == "gigabits_per_second" else speed, latency, source)

    def _device(self, value: Any) -> Device:
        given = self._mapping("device", value, ("name", *DEVICE_FIGURES, "shares", "source"))
        for key in ("name", *DEVICE_FIGURES):
            if key not in given:
                self._fail(f"key device.{key} is missing")
        figures = {key: self._positive(f"device.{key}", given[key]) for key in DEVICE_FIGURES}
        shares = given.get("shares")
        if shares is not None and str(shares) not in CALIBRATIONS:
            self._fail(f"device.shares {shares!r} is not one of {', '.join(CALIBRATIONS)}")
        return Device(str(given["name"]), **figures, source=str(given.get("source", self._path)), shares=shares)

    def _mapping(self, where: str, value: Any, keys: Collection[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(f"{where} {value!r} is not a list of key: value")
        for key in value:
            if key not in keys:
                self._fail(f"{where}: unknown key {key} (value {value[key]!r}); known are {', '.join(keys)}")
        return value

    def _count(self, key: str, value: Any) -> int:
        if not _is_integer(value) or value < 1:
            self._fail(f"{key} {value!r} is not a positive whole number")
        return int(value)

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self._fail(f"{key} {value!r} is not a positive number")
        return float(value)

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"--cluster-file {self._path}: {problem}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
