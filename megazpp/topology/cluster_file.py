"""`--cluster-file FILE.yaml`: the description of a cluster, read and written. An example with all keys follows.

nodes: 2                  # number of hosts
ranks_per_node: 4         # number of ranks on each node
fast_domain: 2            # optional: number of ranks that the fastest links connect, an equal part of a node or several
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
                          # if `source` begins with "measured", --plan takes the bandwidths as achievable, not as peaks
device:                   # optional: the device of each rank; --plan needs it
  name: H100
  teraflops: 989          # dense 16-bit peak rate, in 1e12 floating-point operations per second
  gigabytes: 80           # memory size, in 1e9 bytes
  gigabytes_per_second: 3350  # memory bandwidth
  calibration: h100       # optional: type of device whose published runs tell --plan which fractions of these peaks are
                          #   achievable (v100, a100, h100, h100_500w, h800); measured: --measure-links wrote these
                          #   figures; without a calibration --plan warns
  price_per_hour: 2.5     # optional: price of one device in any currency, from which --plan computes costs
                          # --measure-links adds encode_gigabytes_per_second and decode_gigabytes_per_second for CPU
                          #   ranks: the rates at which lossless deltas encode and update 16-bit weights
  source: NVIDIA H100 Tensor Core GPU data sheet
host:                     # optional: host memory of each node, for --optimizer-cpu-offload
  gigabytes: 500          # host memory that is available to the job, in 1e9 bytes
  gigabytes_per_second: 20  # bandwidth between host memory and each device, per direction, while all devices copy
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
from megazpp.base.flags import Config, flag, shown
from megazpp.base.launcher import env_number, find_launcher
from megazpp.base.program import in_words
from megazpp.topology.cluster import CALIBRATION_NAMES, LINK_KINDS, Cluster, Device, Host, Link, Links, nested_sizes

T = TypeVar("T", Device, Host)
KEYS = ("nodes", "ranks_per_node", "fast_domain", "rank_order", "links", "device", "host")
TEXTS = ("name", "source", "calibration")  # keys of devices and hosts whose values are text; all others are numbers
# Keys of the rates at which a CPU rank encodes and decodes lossless deltas; a device has both keys or neither
CODER_RATES = {"encode_gigabytes_per_second", "decode_gigabytes_per_second"}
LINK_KEYS = ("gigabytes_per_second", "gigabits_per_second", "microseconds", "source")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Config):
    """Cluster.

    A description of nodes and links that replaces or completes the discovery by the ranks.

    Attributes:
        cluster_file: YAML file that describes nodes, links and devices, for --plan and the placement of ranks.
        emulate_nodes: group the ranks of one machine into this many equal nodes, and count traffic accordingly; auto: 2
            if a flag distinguishes nodes (--zeropp, --hsdp, --diloco-steps) and the ranks divide into two nodes of
            whole tensor-parallel groups, otherwise 1.
        measure_links: measure bandwidth and latency of each axis at start-up with all-gathers, and the device's speed;
            the run folder's cluster.yaml stores the result for --cluster-file.
    """

    cluster_file: str | None = flag(None)
    emulate_nodes: int | Literal["auto"] | None = flag(None)
    measure_links: bool = flag(False)


def detect_cluster(
    world_size: int,
    config: ClusterConfig,
    env: Mapping[str, str] = os.environ,
    *,
    tp: int = 1,
    distinguishes_nodes: bool = True,
) -> Cluster:
    """Return the cluster that --cluster-file describes, or otherwise --emulate-nodes, or the launcher's environment.

    Args:
        world_size: number of ranks in the job.
        config: flags that describe the cluster.
        env: environment of the process. LOCAL_WORLD_SIZE (from torchrun or MegaZ++'s launcher) or another launcher's
            variables give the number of ranks per node. Without such a variable the job is one node.
        tp: tensor-parallel degree. --emulate-nodes auto never splits a tensor-parallel group.
        distinguishes_nodes: True if a flag such as --zeropp treats links inside and between nodes differently. Only
            then does --emulate-nodes auto divide one machine into two nodes.
    Raises:
        ValueError: the ranks do not divide into equal nodes, or the cluster file has another number of ranks.
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

    # --emulate-nodes N: divide the ranks into N equal nodes.
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            fitting = ", ".join(map(str, nested_sizes(world_size, world_size)))
            raise ValueError(
                f"--emulate-nodes {nodes} does not divide the {world_size} ranks of this job; use "
                f"{' or '.join(fitting.rsplit(', ', 1))}, or change --nproc"
            )
        return Cluster(num_nodes=nodes, ranks_per_node=world_size // nodes)

    # The launcher's environment gives the number of ranks per node.
    name, given = "LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE")
    launched = None if given else find_launcher(env)
    if launched is not None and launched.local_size is not None:
        name, local = f"{launched.launcher}'s environment", launched.local_size
    else:
        name = name if given else "SLURM_NTASKS_PER_NODE"
        local = env_number(name, env, default=world_size, least=1)
    if world_size % local:
        raise ValueError(
            f"{world_size} ranks do not divide into nodes of {local} ({name}); start the same number of ranks on every "
            f"node, for instance {local} on each of {max(world_size // local, 1)} node(s)"
        )

    # --emulate-nodes auto: divide the ranks of a single machine into two nodes, if the flags treat links inside and
    # between nodes differently.
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
        raise ValueError(
            f"--cluster-file {path}: its brackets are nested too deeply; no key needs more than three levels"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"--cluster-file {path} is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"--cluster-file {path}: {in_words(error)}") from None


def cluster_text(cluster: Cluster) -> str:
    """Return the description of `cluster` as YAML text, which `read_cluster` reads.

    Bandwidths and latencies are rounded to six significant digits. `Cluster.notices`, the messages for the user about
    the cluster, are left out.
    """
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
            if link.microseconds:  # a latency that is unknown (None), or too short to be measured (0), is left out
                figures["microseconds"] = float(f"{link.microseconds:.6g}")
            content["links"][kind] = figures | {"source": link.source}
    if cluster.device is not None:
        content["device"] = {key: value for key, value in cluster.device._asdict().items() if value is not None}
    if cluster.host is not None:
        content["host"] = cluster.host._asdict()
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def cyclic_order(nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the rank at each position (see `Cluster.order`) if consecutive ranks are on consecutive nodes, in turn.

    `srun -m cyclic` numbers ranks in this way. For 2 nodes with 2 ranks each, the result is (0, 2, 1, 3): node 0 has
    ranks 0 and 2, node 1 has ranks 1 and 3.
    """
    return tuple(index * nodes + node for node in range(nodes) for index in range(ranks_per_node))


class _Loader(yaml.SafeLoader):
    """A YAML loader for cluster files that rejects repeated keys. PyYAML's loader would use the last value silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Convert a YAML mapping to a dict, and raise a ConstructorError if a key is repeated."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value} is given twice, remove one of them", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _cluster(content: Any, *, source: str) -> Cluster:
    """Check the content of a cluster file, and convert it to a `Cluster`.

    Args:
        content: the file's content as `yaml.load` returns it.
        source: value of the key `source` for each link, the device and the host that lack this key.
    Raises:
        ValueError: a key is missing or unknown, or a value is invalid.
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
        raise ValueError(
            f"rank_order {shown(order)} is not block, cyclic or a list of ranks per node: give one of these"
        )
    if len(order) != nodes:
        raise ValueError(f"rank_order has lists for {len(order)} node(s), but nodes is {nodes}; give a list per node")
    for node, ranks in enumerate(order):
        if len(ranks) != per_node or any(type(rank) is not int for rank in ranks):
            raise ValueError(
                f"rank_order {shown(ranks)} of node {node} is not a list of {per_node} ranks (ranks_per_node): "
                "give the numbers of this node's ranks"
            )
    return dataclasses.replace(cluster, order=tuple(rank for ranks in order for rank in ranks))


def _link(where: str, value: Any, source: str) -> Link:
    """Check the description of a link in a cluster file, and convert it to a `Link`.

    Args:
        where: key of the description, for instance "links.network", for error messages.
        value: the description, a mapping with the keys `LINK_KEYS`.
        source: origin of bandwidth and latency, if the description has no key `source`.
    """
    given = _mapping(where, value, LINK_KEYS)
    speeds = [key for key in ("gigabytes_per_second", "gigabits_per_second") if key in given]
    if len(speeds) != 1:
        raise ValueError(f"{where} {shown(given)} needs exactly one of gigabytes_per_second and gigabits_per_second")
    speed = _number(f"{where}.{speeds[0]}", given[speeds[0]])
    latency = _number(f"{where}.microseconds", given["microseconds"]) if "microseconds" in given else None
    source = given.get("source", source)
    if not isinstance(source, str):
        raise ValueError(f"{where}.source {shown(source)} is not text: put it in quotation marks")
    return Link(speed / 8 if speeds[0] == "gigabits_per_second" else speed, latency, source)


def _figures(where: str, value: Any, kind: type[T], source: str) -> T:
    """Check the description of the device or the host memory in a cluster file, and return it as a `Device` or `Host`.

    Args:
        where: key of the description, "device" or "host", for error messages.
        value: the description, a mapping with the fields of `kind` as keys.
        kind: class of the result, `Device` or `Host`.
        source: origin of the values (a data sheet, a file), if the description has no key `source`.
    """
    needed = [key for key in kind._fields if key not in kind._field_defaults]
    given = {"source": source} | _mapping(where, value, kind._fields, needed=needed)
    if "calibration" in given and str(given["calibration"]) not in CALIBRATION_NAMES:
        known = ", ".join(CALIBRATION_NAMES)
        raise ValueError(f"{where}.calibration {shown(given['calibration'])} is not one of the calibrations {known}")
    if len(given.keys() & CODER_RATES) == 1:
        raise ValueError(
            f"{where} needs both {' and '.join(sorted(CODER_RATES, reverse=True))}, or neither of the two keys: "
            "add the missing key, or remove the other one"
        )
    read: Any = {key: str(x) if key in TEXTS else _number(f"{where}.{key}", x) for key, x in given.items()}
    return kind(**read)


def _mapping(where: str, value: Any, keys: Collection[str], *, needed: Collection[str] = ()) -> dict[str, Any]:
    """Check that a value of a cluster file is a mapping with valid keys, and return the value.

    Args:
        where: key of the value, for error messages; "the file" for the top level.
        value: the value as `yaml.load` returns it.
        keys: all keys that are allowed.
        needed: keys that are required.
    """
    if not isinstance(value, dict):
        given = "(empty)" if value is None else shown(value)
        raise ValueError(f"{where} {given} is not a mapping of keys to values: write lines like `key: value`")
    for key in value:
        if key not in keys:
            raise ValueError(
                f"{where}: unknown key {key} (value {shown(value[key])}); known keys are {', '.join(keys)}"
            )
    for key in needed:
        if key not in value:
            raise ValueError(f"key {key if where == 'the file' else f'{where}.{key}'} is missing, but required: add it")
    return value


def _number(key: str, value: Any, kind: type[int] | type[float] = float) -> Any:
    """Check that the value of a key in a cluster file is a positive, finite number, and return the number.

    Args:
        key: key of the value, for instance "links.network.microseconds", for the error message.
        value: the value as `yaml.load` returns it.
        kind: int requires a whole number; float also converts a whole number to a float.
    """
    if type(value) not in (int, kind) or not 0 < value < math.inf:
        raise ValueError(f"{key} {shown(value)} is not a positive {'whole ' if kind is int else ''}number")
    return kind(value)
