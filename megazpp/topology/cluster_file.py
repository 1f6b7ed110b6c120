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
  calibration: h100       # optional: what published runs have reached of all these figures (v100, a100, h100, h800);
                          # without it --plan warns
  price_per_hour: 2.5     # optional: of one device, in any currency; --plan adds it up
  source: NVIDIA H100 Tensor Core GPU data sheet
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megazpp.base.flags import check_words, flag
from megazpp.base.launcher import find_launcher
from megazpp.base.program import in_words
from megazpp.topology.cluster import CALIBRATION_NAMES, LINK_KINDS, Cluster, Device, Link, Links, nested_sizes

KEYS = ("nodes", "ranks_per_node", "fast_domain", "rank_order", "links", "device")
DEVICE_FIGURES = ("teraflops", "gigabytes", "gigabytes_per_second")
LINK_KEYS = ("gigabytes_per_second", "gigabits_per_second", "microseconds", "source")
NO_DEVICE = "# --plan needs links (--measure-links writes them) and a device: copy them from configs/clusters\n"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Cluster.

    A description of nodes and links that replaces or completes what the ranks find.
    """

    cluster_file: str | None = flag(None, "YAML file with nodes, links and devices, for --plan and placement")
    emulate_nodes: int | Literal["auto"] | None = flag(
        None,
        "treat the ranks of one machine as this many nodes of equal size, and count traffic accordingly; auto: 2 if a "
        "flag distinguishes nodes (--zeropp, --hsdp, --diloco-steps) and the ranks of one machine divide into two "
        "nodes of whole tensor-parallel groups, else the machine is one node",
    )
    measure_links: bool = flag(
        False,
        "time all-gathers over each axis at start-up and show what its wire does: a few seconds on slow wires; the run "
        "folder's cluster.yaml keeps it for --cluster-file",
    )

    def __post_init__(self) -> None:
        check_words(self)


def detect_cluster(
    world_size: int,
    config: ClusterConfig,
    env: Mapping[str, str] = os.environ,
    *,
    tp: int = 1,
    distinguishes_nodes: bool = True,
) -> Cluster:
    """The cluster of a file, an emulated one, or the one that a launcher's environment describes.

    Args:
        world_size: ranks of the job.
        env: LOCAL_WORLD_SIZE (torchrun, our launcher) or another launcher's variables give the ranks per node; without
            them the job is one node.
        tp: the tensor-parallel degree, whose groups `emulate_nodes` "auto" keeps whole.
        distinguishes_nodes: whether a flag treats ranks of one node otherwise than those of another; only then does
            `emulate_nodes` "auto" make two nodes of one machine.
    Raises:
        ValueError: the ranks do not divide into equal nodes, or are not those of the file.
    """
    path, nodes = config.cluster_file, config.emulate_nodes
    if path is not None:
        if isinstance(nodes, int):
            raise ValueError(f"--cluster-file {path} and --emulate-nodes {nodes} both say what the nodes are: give one")
        cluster = read_cluster(path)
        if cluster.world_size != world_size:
            raise ValueError(
                f"--cluster-file {path}: nodes {cluster.num_nodes} x ranks_per_node {cluster.ranks_per_node} are "
                f"{cluster.world_size} ranks, the job has {world_size} (on one machine: --nproc {cluster.world_size})"
            )
        return cluster
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            fitting = ", ".join(map(str, nested_sizes(world_size, world_size)))
            raise ValueError(
                f"--emulate-nodes {nodes} does not divide the {world_size} ranks of this job: a number of nodes that "
                f"would fit is {' or '.join(fitting.rsplit(', ', 1))}; or change --nproc"
            )
        return Cluster(num_nodes=nodes, ranks_per_node=world_size // nodes)
    name, given = "LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE")
    launched = None if given else find_launcher(env)
    if launched is not None and launched.local_size is not None:
        name, local = f"{launched.launcher}'s environment", launched.local_size
    else:
        name = name if given else "SLURM_NTASKS_PER_NODE"
        local = int(env.get(name) or world_size)
    if world_size % local:
        raise ValueError(
            f"{world_size} ranks do not divide into nodes of {local} ({name}): nodes have to hold equally many ranks, "
            f"for instance {local} on each of {max(world_size // local, 1)} node(s)"
        )
    if nodes != "auto" or world_size != local or not distinguishes_nodes:
        return Cluster(num_nodes=world_size // local, ranks_per_node=local)
    if tp < 1 or world_size % (2 * tp):
        notice = f"--emulate-nodes auto: {world_size} rank(s) on one machine stay one node (not 2 x tp {tp})"
        return Cluster(num_nodes=1, ranks_per_node=world_size, notices=(notice,))
    notice = f"--emulate-nodes auto: {world_size} ranks on one machine are treated as 2 nodes"
    return Cluster(num_nodes=2, ranks_per_node=world_size // 2, notices=(notice,))


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
        ValueError: the file cannot be read, or a key or its value is missing, unknown or wrong; the message names them.
    """
    try:
        return _cluster(yaml.safe_load(Path(path).read_text(encoding="utf-8")), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--cluster-file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--cluster-file {path} is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"--cluster-file {path}: {in_words(error)}") from None


def cluster_text(cluster: Cluster) -> str:
    """The YAML that `read_cluster` reads back as the same cluster, to six digits and without notices."""
    content: dict[str, Any] = {"nodes": cluster.num_nodes, "ranks_per_node": cluster.ranks_per_node}
    if cluster.domain_size is not None:
        content["fast_domain"] = cluster.domain_size
    if cluster.order is not None:
        size = cluster.ranks_per_node
        content["rank_order"] = [list(cluster.order[at : at + size]) for at in range(0, cluster.world_size, size)]
    if cluster.links is not None and cluster.links.known:
        content["links"] = {}
        for kind, link in cluster.links.known.items():
            figures: dict[str, Any] = {"gigabytes_per_second": float(f"{link.gigabytes_per_second:.6g}")}
            if link.microseconds:  # none measured, or too short to tell
                figures["microseconds"] = float(f"{link.microseconds:.6g}")
            content["links"][kind] = figures | {"source": link.source}
    if cluster.device is not None:
        content["device"] = {key: value for key, value in cluster.device._asdict().items() if value is not None}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    return text if cluster.device is not None else text + NO_DEVICE


def cyclic_order(nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    """The rank at each position when ranks were dealt out to the nodes one by one, as `srun -m cyclic` does."""
    return tuple(index * nodes + node for node in range(nodes) for index in range(ranks_per_node))


def _cluster(content: Any, *, source: str) -> Cluster:
    """`source` is that of figures that name none."""
    top = _mapping("the file", content, KEYS, needed=("nodes", "ranks_per_node"))
    whole = {key: _number(key, top[key], int) for key in ("nodes", "ranks_per_node", "fast_domain") if key in top}
    links = None
    if "links" in top:
        given = _mapping("links", top["links"], LINK_KINDS)
        links = Links(**{kind: _link(f"links.{kind}", given[kind], source) for kind in given})
    nodes, per_node, domain = whole["nodes"], whole["ranks_per_node"], whole.get("fast_domain")
    device = _device(top["device"], source) if "device" in top else None
    cluster = Cluster(num_nodes=nodes, ranks_per_node=per_node, domain_size=domain, links=links, device=device)
    order = top.get("rank_order", "block")
    if order == "block":
        return cluster
    if order == "cyclic":
        return dataclasses.replace(cluster, order=cyclic_order(nodes, per_node))
    lists = order if isinstance(order, list) and all(isinstance(ranks, list) for ranks in order) else []
    if [len(ranks) for ranks in lists] != [per_node] * nodes:
        lists_wanted = f"one list of {per_node} ranks for each of {nodes} node(s)"
        raise ValueError(f"rank_order {order!r} is not block, cyclic or {lists_wanted}")
    return dataclasses.replace(cluster, order=tuple(rank for ranks in lists for rank in ranks))


def _link(where: str, value: Any, source: str) -> Link:
    given = _mapping(where, value, LINK_KEYS)
    speeds = [key for key in ("gigabytes_per_second", "gigabits_per_second") if key in given]
    if len(speeds) != 1:
        raise ValueError(f"{where} {given} needs one of gigabytes_per_second and gigabits_per_second")
    speed = _number(f"{where}.{speeds[0]}", given[speeds[0]])
    latency = _number(f"{where}.microseconds", given["microseconds"]) if "microseconds" in given else None
    speed = speed / 8 if speeds[0] == "gigabits_per_second" else speed
    return Link(speed, latency, str(given.get("source", source)))


def _device(value: Any, source: str) -> Device:
    needed = ("name", *DEVICE_FIGURES)
    given = _mapping("device", value, (*needed, "calibration", "shares", "price_per_hour", "source"), needed=needed)
    keys = (*DEVICE_FIGURES, "price_per_hour")
    figures = {key: _number(f"device.{key}", given[key]) for key in keys if key in given}
    calibration = given.get("calibration", given.get("shares"))  # `shares` is the key's former name
    if calibration is not None and str(calibration) not in CALIBRATION_NAMES:
        raise ValueError(f"device.calibration {calibration!r} is not one of {', '.join(CALIBRATION_NAMES)}")
    return Device(str(given["name"]), **figures, source=str(given.get("source", source)), calibration=calibration)


def _mapping(where: str, value: Any, keys: Collection[str], *, needed: Collection[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        given = "(empty)" if value is None else repr(value)
        raise ValueError(f"{where} {given} is not a list of key: value")
    for key in value:
        if key not in keys:
            raise ValueError(f"{where}: unknown key {key} (value {value[key]!r}); known are {', '.join(keys)}")
    for key in needed:
        if key not in value:
            raise ValueError(f"key {key if where == 'the file' else f'{where}.{key}'} is missing")
    return value


def _number(key: str, value: Any, kind: type[int] | type[float] = float) -> Any:
    if type(value) not in (int, kind) or not 0 < value < math.inf:
        raise ValueError(f"{key} {value!r} is not a positive {'whole ' if kind is int else ''}number")
    return kind(value)
