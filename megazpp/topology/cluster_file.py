"""`--cluster-file FILE.yaml`: the description of a cluster, read and written. An example with all keys follows.

nodes: 2                  # number of hosts
ranks_per_node: 4         # number of ranks on each node
fast_domain: 2            # optional: number of ranks that are connected by the fastest links: equal parts of a node, or
                          #   whole nodes (2: NVLink pairs; 72: an NVLink rack); default: the ranks of a node
rank_order: cyclic        # optional: block (default): node 0 has ranks 0 to 3, node 1 has 4 to 7
                          #   cyclic: node 0 has ranks 0 2 4 6, node 1 has 1 3 5 7
                          #   or a list for each node, domain by domain: [[0, 2, 4, 6], [1, 3, 5, 7]]
links:                    # optional, as is each kind of link; bandwidths hold for one direction
  domain:                 # between ranks of a fast domain: bandwidth of one rank
    gigabytes_per_second: 56.25
    source: GA102 whitepaper
  node:                   # between fast domains of a node: bandwidth of one rank
    gigabytes_per_second: 31.5
  network:                # between nodes: bandwidth of one node with all its adapters
    gigabits_per_second: 100
    microseconds: 5       # optional: latency of a small message
                          # if `source` begins with "measured", --plan takes the bandwidth as achievable, not as a peak
device:                   # optional: the device of each rank; --plan needs it
  name: H100
  teraflops: 989          # dense 16-bit peak
  gigabytes: 80           # memory size
  gigabytes_per_second: 3350
  calibration: h100       # optional: calibration with the shares of these peaks that published runs have reached
                          #   (v100, a100, h100, h100_500w, h800); measured: --measure-links wrote these figures;
                          #   without a calibration --plan warns
  price_per_hour: 2.5     # optional: price of one device in any currency, from which --plan computes costs
                          # --measure-links adds encode_gigabytes_per_second and decode_gigabytes_per_second for CPU
                          #   ranks: 16-bit weights that lossless deltas encode, and to which they are applied
  source: NVIDIA H100 Tensor Core GPU data sheet
host:                     # optional: memory of each node, for --optimizer-cpu-offload
  gigabytes: 500          # memory that is available to the job
  gigabytes_per_second: 20  # rate of copies between it and each device, each way, if all devices copy at once
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from megazpp.base.files import cause, find_file, read_small_file
from megazpp.base.flags import check_words, flag, shown
from megazpp.base.launcher import find_launcher
from megazpp.base.program import in_words
from megazpp.topology.cluster import CALIBRATION_NAMES, LINK_KINDS, Cluster, Device, Host, Link, Links, nested_sizes

T = TypeVar("T", Device, Host)
KEYS = ("nodes", "ranks_per_node", "fast_domain", "rank_order", "links", "device", "host")
TEXTS = ("name", "source", "calibration")  # keys of devices and hosts that are not numbers
CODER_RATES = {"encode_gigabytes_per_second", "decode_gigabytes_per_second"}
LINK_KEYS = ("gigabytes_per_second", "gigabits_per_second", "microseconds", "source")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Cluster.

    A description of nodes and links that replaces or completes the discovery by the ranks.
    """

    cluster_file: str | None = flag(
        None, "YAML file that describes nodes, links and devices, for --plan and the placement of ranks"
    )
    emulate_nodes: int | Literal["auto"] | None = flag(
        None,
        "group the ranks of one machine into this many equal nodes, and count traffic accordingly; auto: 2 if a flag "
        "distinguishes nodes (--zeropp, --hsdp, --diloco-steps) and the ranks divide into two nodes of whole "
        "tensor-parallel groups, otherwise 1",
    )
    measure_links: bool = flag(
        False,
        "measure bandwidth and latency of each axis at start-up with all-gathers, and the device's speed; the run "
        "folder's cluster.yaml stores the result for --cluster-file",
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
    """Return the cluster of --cluster-file, of --emulate-nodes, or of the launcher's environment, in this order.

    Args:
        world_size: number of ranks in the job.
        config: the flags.
        env: environment of the process. LOCAL_WORLD_SIZE (torchrun, our launcher) or another launcher's variables give
            the number of ranks per node. Without them the job is one node.
        tp: tensor-parallel degree. --emulate-nodes auto never splits a tensor-parallel group.
        distinguishes_nodes: True if a flag such as --zeropp makes a difference between nodes. Only then does
            --emulate-nodes auto divide one machine into two nodes.
    Raises:
        ValueError: the ranks do not divide into equal nodes, or their number differs from the file's.
    """
    # --cluster-file describes the nodes.
    path, nodes = config.cluster_file, config.emulate_nodes
    if path is not None:
        if isinstance(nodes, int):
            raise ValueError(
                f"--cluster-file {path} and --emulate-nodes {nodes} both define the nodes; give only one of them"
            )
        cluster = read_cluster(path)
        if cluster.world_size != world_size:
            raise ValueError(
                f"--cluster-file {path}: nodes {cluster.num_nodes} x ranks_per_node {cluster.ranks_per_node} are "
                f"{cluster.world_size} ranks, but the job has {world_size} (to start them on one machine: --nproc "
                f"{cluster.world_size})"
            )
        return cluster

    # A given number of emulated nodes.
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            fitting = ", ".join(map(str, nested_sizes(world_size, world_size)))
            raise ValueError(
                f"--emulate-nodes {nodes} does not divide the {world_size} ranks of this job; use "
                f"{' or '.join(fitting.rsplit(', ', 1))}, or change --nproc"
            )
        return Cluster(num_nodes=nodes, ranks_per_node=world_size // nodes)

    # The nodes that the launcher's environment describes.
    name, given = "LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE")
    launched = None if given else find_launcher(env)
    if launched is not None and launched.local_size is not None:
        name, local = f"{launched.launcher}'s environment", launched.local_size
    else:
        name = name if given else "SLURM_NTASKS_PER_NODE"
        local = int(env.get(name) or world_size)
    if world_size % local:
        raise ValueError(
            f"{world_size} ranks do not divide into nodes of {local} ({name}); start the same number of ranks on every "
            f"node, for instance {local} on each of {max(world_size // local, 1)} node(s)"
        )

    # One machine may be divided into two emulated nodes.
    if nodes != "auto" or world_size != local or not distinguishes_nodes:
        return Cluster(num_nodes=world_size // local, ranks_per_node=local)
    if tp < 1 or world_size % (2 * tp):
        notice = (
            f"--emulate-nodes auto: {world_size} rank(s) on one machine stay one node, because they are not a multiple "
            f"of 2 x tp {tp}"
        )
        return Cluster(num_nodes=1, ranks_per_node=world_size, notices=(notice,))
    notice = f"--emulate-nodes auto: {world_size} ranks on one machine are treated as 2 nodes"
    return Cluster(num_nodes=2, ranks_per_node=world_size // 2, notices=(notice,))


def read_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a YAML file describes.

    Raises:
        ValueError: the file cannot be read, or a key is missing, unknown, repeated or has an invalid value. The
            message names the file, the key and the value.
    """
    try:
        return _cluster(yaml.load(read_small_file(find_file(path)).decode(), _Loader), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--cluster-file {path} cannot be read: {cause(error)}") from None
    except RecursionError:
        raise ValueError(f"--cluster-file {path}: its brackets are nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--cluster-file {path} is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"--cluster-file {path}: {in_words(error)}") from None


def cluster_text(cluster: Cluster) -> str:
    """Return the cluster as YAML for `read_cluster`. Figures of links keep six digits; notices are left out."""
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
            if link.microseconds:  # not None (unknown) and not 0 (too short to measure)
                figures["microseconds"] = float(f"{link.microseconds:.6g}")
            content["links"][kind] = figures | {"source": link.source}
    if cluster.device is not None:
        content["device"] = {key: value for key, value in cluster.device._asdict().items() if value is not None}
    if cluster.host is not None:
        content["host"] = cluster.host._asdict()
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def cyclic_order(nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the rank at each position if consecutive ranks are on consecutive nodes, as with `srun -m cyclic`."""
    return tuple(index * nodes + node for node in range(nodes) for index in range(ranks_per_node))


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects repeated keys. The standard loader would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Convert a YAML mapping to a dict, and raise a ConstructorError if a key is repeated."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _cluster(content: Any, *, source: str) -> Cluster:
    """Convert the parsed YAML to a cluster.

    Args:
        content: the parsed YAML.
        source: source of the links and the device that name none themselves.
    """
    top = _mapping("the file", content, KEYS, needed=("nodes", "ranks_per_node"))
    whole = {key: _number(key, top[key], int) for key in ("nodes", "ranks_per_node", "fast_domain") if key in top}
    links = None
    if "links" in top:
        given = _mapping("links", top["links"], LINK_KINDS)
        links = Links(**{kind: _link(f"links.{kind}", given[kind], source) for kind in given})
    nodes, per_node, domain = whole["nodes"], whole["ranks_per_node"], whole.get("fast_domain")
    device = _figures("device", top["device"], Device, source) if "device" in top else None
    host = _figures("host", top["host"], Host, source) if "host" in top else None
    cluster = Cluster(
        num_nodes=nodes, ranks_per_node=per_node, domain_size=domain, links=links, device=device, host=host
    )
    order = top.get("rank_order", "block")
    if order == "block":
        return cluster
    if order == "cyclic":
        return dataclasses.replace(cluster, order=cyclic_order(nodes, per_node))
    if not isinstance(order, list) or not all(isinstance(ranks, list) for ranks in order):
        raise ValueError(f"rank_order {shown(order)} is not block, cyclic or one list of ranks for each node")
    if len(order) != nodes:
        raise ValueError(f"rank_order has lists for {len(order)} node(s), but nodes is {nodes}")
    for node, ranks in enumerate(order):
        if len(ranks) != per_node or any(type(rank) is not int for rank in ranks):
            raise ValueError(
                f"rank_order {shown(ranks)} of node {node} is not a list of {per_node} ranks (ranks_per_node)"
            )
    return dataclasses.replace(cluster, order=tuple(rank for ranks in order for rank in ranks))


def _link(where: str, value: Any, source: str) -> Link:
    """Convert the mapping under the key `where`, for instance links.network."""
    given = _mapping(where, value, LINK_KEYS)
    speeds = [key for key in ("gigabytes_per_second", "gigabits_per_second") if key in given]
    if len(speeds) != 1:
        raise ValueError(f"{where} {shown(given)} needs exactly one of gigabytes_per_second and gigabits_per_second")
    speed = _number(f"{where}.{speeds[0]}", given[speeds[0]])
    latency = _number(f"{where}.microseconds", given["microseconds"]) if "microseconds" in given else None
    source = given.get("source", source)
    if not isinstance(source, str):
        raise ValueError(f"{where}.source {shown(source)} is not text")
    return Link(speed / 8 if speeds[0] == "gigabits_per_second" else speed, latency, source)


def _figures(where: str, value: Any, kind: type[T], source: str) -> T:
    """Convert the mapping under the key `where` to a `Device` or a `Host`; all keys but `TEXTS` are numbers."""
    needed = [key for key in kind._fields if key not in kind._field_defaults]
    given = {"source": source} | _mapping(where, value, kind._fields, needed=needed)
    if "calibration" in given and str(given["calibration"]) not in CALIBRATION_NAMES:
        known = f"is not one of {', '.join(CALIBRATION_NAMES)}"
        raise ValueError(f"{where}.calibration {shown(given['calibration'])} {known}")
    if len(given.keys() & CODER_RATES) == 1:
        raise ValueError(f"{where}: {' and '.join(sorted(CODER_RATES, reverse=True))} are only given together")
    read: Any = {key: str(x) if key in TEXTS else _number(f"{where}.{key}", x) for key, x in given.items()}
    return kind(**read)


def _mapping(where: str, value: Any, keys: Collection[str], *, needed: Collection[str] = ()) -> dict[str, Any]:
    """Return `value` after checking that it is a mapping with only these keys and all the needed ones.

    `where` names the mapping in error messages.
    """
    if not isinstance(value, dict):
        given = "(empty)" if value is None else shown(value)
        raise ValueError(f"{where} {given} is not a mapping of keys to values")
    for key in value:
        if key not in keys:
            raise ValueError(
                f"{where}: unknown key {key} (value {shown(value[key])}); known keys are {', '.join(keys)}"
            )
    for key in needed:
        if key not in value:
            raise ValueError(f"key {key if where == 'the file' else f'{where}.{key}'} is missing")
    return value


def _number(key: str, value: Any, kind: type[int] | type[float] = float) -> Any:
    """Return `value` as a `kind` after checking that it is a positive, finite number."""
    if type(value) not in (int, kind) or not 0 < value < math.inf:
        raise ValueError(f"{key} {shown(value)} is not a positive {'whole ' if kind is int else ''}number")
    return kind(value)
