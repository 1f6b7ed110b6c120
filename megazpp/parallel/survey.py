"""The cluster as its ranks find it: each describes its host, the first one puts the answers together.

The launcher's environment is enough to refuse wrong flags before workers start; only the ranks know where they really
are and what joins their GPUs. They use the process group's store, which works also while ranks disagree about devices
and back ends, and JSON, because others may reach that store (launch.py). What NVLink joins a GPU to comes from NVIDIA's
management library; without the optional `nvidia-ml-py` a node counts as one fast domain, and a notice says so.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megazpp.base.flags import wrong_types
from megazpp.parallel.worker import Worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig, detect_cluster
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, cluster_from_hosts, describe_hosts

T = TypeVar("T")
UNKNOWN_LINKS = "which GPUs NVLink joins is not known, so a node counts as one fast domain"
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Answer:
    """Rank 0's answer to all hosts: a cluster, or what is wrong with them."""

    cluster: Cluster | None = None
    problem: str = ""


RECORDS: tuple[type[Any], ...] = (Gpu, HostInfo, Cluster, Answer)  # that the store may hold


def settle_cluster(worker: Worker, config: ClusterConfig, announced: Cluster, *, tp: int) -> Cluster:
    """The cluster to plan for: as the flags describe it, else as the ranks find it; all ranks return the same.

    Args:
        announced: what `detect_cluster` made of flags and the launcher's environment.
        tp: the tensor-parallel degree, for --emulate-nodes auto.
    Raises:
        ValueError: on all ranks, what is wrong with a host.
    """
    if config.cluster_file is not None or isinstance(config.emulate_nodes, int):
        return announced
    info = describe_host(worker.local_rank, worker.device)
    found = share_survey(worker.store, worker.rank, worker.world_size, info)
    if config.emulate_nodes == "auto" and found.num_nodes == 1:
        return detect_cluster(worker.world_size, config, {}, tp=tp)
    return found


def share_survey(store: dist.Store, rank: int, world_size: int, info: HostInfo) -> Cluster:
    """Every rank brings its `info` and gets the cluster that rank 0 makes of all of them.

    Raises:
        ValueError: on all ranks, with the same words.
    """
    store = dist.PrefixStore("megazpp/survey", store)
    store.set(f"host/{rank}", json.dumps(dataclasses.asdict(info)))
    if rank == 0:
        try:
            infos = [from_json(HostInfo, store.get(f"host/{other}")) for other in range(world_size)]
            notices = dict.fromkeys((describe_hosts(infos), *(info.notice for info in infos if info.notice)))
            answer = Answer(cluster=dataclasses.replace(cluster_from_hosts(infos), notices=tuple(notices)))
        except ValueError as error:
            answer = Answer(problem=str(error))
        store.set("cluster", json.dumps(dataclasses.asdict(answer)))
    answer = from_json(Answer, store.get("cluster"))
    if answer.cluster is None:
        raise ValueError(answer.problem)
    return answer.cluster


def from_json(kind: type[T], text: bytes) -> T:
    """The record of type `kind` that was written as JSON of `dataclasses.asdict`.

    Nothing is constructed but the survey's records, of exactly their fields, each of its annotation's type.

    Raises:
        ValueError: it is something else.
    """
    try:
        record = json.loads(text, object_hook=_construct)
        if not isinstance(record, kind):
            raise ValueError("other fields or types")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{text[:80]!r} is no {kind.__name__}: {error}") from None
    return record


def _construct(fields: dict[str, Any]) -> object:
    for kind in RECORDS:
        if fields.keys() == {field.name for field in dataclasses.fields(kind)} and not wrong_types(kind, fields):
            return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    return fields


def describe_host(
    local_rank: int, device: torch.device, *, uses_gpu: bool | None = None, root: Path = Path("/")
) -> HostInfo:
    """This process's machine; the GPU only where collectives use it (over gloo no byte takes NVLink).

    Args:
        uses_gpu: None: as the process group does.
        root: of /proc and /sys.
    """
    if uses_gpu is None:
        uses_gpu = device.type == "cuda" and dist.get_backend() == "nccl"
    gpu, notice = describe_gpu(device) if uses_gpu else (None, "")
    namespace = root / "proc/self/ns/net"
    return HostInfo(
        host=socket.gethostname(),
        boot_id=_read(root / "proc/sys/kernel/random/boot_id"),
        network_namespace=namespace.stat().st_ino if namespace.exists() else 0,
        local_rank=local_rank,
        gpu=gpu,
        adapters=find_adapters(root),
        notice=notice,
    )


def find_adapters(root: Path = Path("/")) -> tuple[str, ...]:
    """Name and rate of each network adapter that is up and on the PCI bus; InfiniBand's come before Ethernet's.

    One that is both counts once. An adapter that does not give its rate is its name alone.
    """
    found: dict[str, str] = {}  # by PCI address

    def add(entry: Path, gigabits_per_second: float) -> None:
        device = entry / "device"
        for address in PCI_ADDRESS.findall(str(device.resolve()))[-1:] if device.exists() else ():
            rate = f" {gigabits_per_second:g} Gbit/s" if gigabits_per_second > 0 else ""
            found.setdefault(address, entry.name + rate)

    for entry in sorted(root.glob("sys/class/infiniband/*")):
        state, rate = (_read(entry / "ports/1" / name) for name in ("state", "rate"))  # "4: ACTIVE", "400 Gb/sec (...)"
        if "ACTIVE" in state:
            add(entry, float((rate.split() or ["0"])[0]))
    for entry in sorted(root.glob("sys/class/net/*")):
        if _read(entry / "operstate") == "up":
            add(entry, float(_read(entry / "speed") or 0) / 1e3)  # Mbit/s, -1: unknown
    return tuple(found.values())


def _read(path: Path) -> str:
    """The text of a file of the kernel's; empty where there is none or it has no answer (a link that is down)."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def describe_gpu(device: torch.device) -> tuple[Gpu, str]:
    """The GPU behind a CUDA device, and a line for the user where something about it could not be found out."""
    properties = torch.cuda.get_device_properties(device)
    uuid, name = str(properties.uuid), properties.name
    try:
        import pynvml
    except ImportError:
        return Gpu(uuid, name), f"nvidia-ml-py is not installed (pip install nvidia-ml-py): {UNKNOWN_LINKS}"
    try:
        pynvml.nvmlInit()
        return query_gpu(pynvml, uuid, name), ""
    except pynvml.NVMLError as error:
        return Gpu(uuid, name), f"NVML does not describe {name} {uuid} ({error}): {UNKNOWN_LINKS}"


def query_gpu(nvml: Any, uuid: str, name: str) -> Gpu:
    """Ask `nvml`, the module pynvml, about the GPU that CUDA calls `uuid`; what it does not know stays empty."""
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def ask(function: str, *args: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *args)
        except (nvml.NVMLError, AttributeError):  # not of this GPU, driver or version of the package
            return None

    peers = {*_ends_of_links(nvml, ask), *_nvlink_neighbours(nvml, ask)}
    pci = _address(nvml.nvmlDeviceGetPciInfo(handle))
    return Gpu(uuid, name, pci, _fabric(nvml, ask), tuple(sorted(peers)))


def _fabric(nvml: Any, ask: Callable[..., Any]) -> str:
    """Cluster and clique of a multi-node NVLink fabric; one node's NVSwitches report the cluster 0."""
    if not hasattr(nvml, "c_nvmlGpuFabricInfoV_t"):
        return ""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is None:
        return ""
    cluster = bytes(info.clusterUuid)
    working = info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster)
    return f"{cluster.hex()}/{info.cliqueId}" if working else ""


def _ends_of_links(nvml: Any, ask: Callable[..., Any]) -> Iterator[str]:
    """Peers that the GPU's own links name; it knows peers that this process may not see."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if ask("nvmlDeviceGetNvLinkState", link) != 1:
            continue
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            yield SWITCH
        elif kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
            if remote is not None:
                yield _address(remote)


def _nvlink_neighbours(nvml: Any, ask: Callable[..., Any]) -> Iterator[str]:
    """Visible GPUs that the driver reaches over NVLink; where a virtual machine hides the ends of links."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            other = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:  # a GPU of somebody else's
            continue
        status = ask("nvmlDeviceGetP2PStatus", other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == nvml.NVML_P2P_STATUS_OK:
            yield _address(nvml.nvmlDeviceGetPciInfo(other))


def _address(pci: Any) -> str:
    """Write an address as the kernel does: 0000:1b:00.0 for NVML's 00000000:1B:00.0."""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
