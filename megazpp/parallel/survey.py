"""The cluster as its ranks find it: each describes its host, the first one puts the answers together.

The launcher's environment is enough to refuse wrong flags before workers start; where the ranks really are, and what
joins their GPUs, only they can say. They say it through the process group's store, which works also while ranks
disagree about devices and back ends; as JSON, because others may reach that store (parallel/launch.py).

Where a GPU sits and what NVLink joins it to, the NVIDIA management library knows. `nvidia-ml-py` is optional: without
it a node counts as one fast domain, and a notice says so.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megazpp.parallel.worker import Worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig, detect_cluster
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, Nic, cluster_from_hosts, describe_hosts, known_links
from megazpp.topology.plain import from_json, to_json

UNKNOWN_LINKS = "which GPUs NVLink joins is not known, so a node counts as one fast domain"
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Answer(NamedTuple):
    """What rank 0 makes of all hosts: a cluster, or what is wrong with them."""

    cluster: Cluster | None = None
    problem: str = ""


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
    store.set(f"host/{rank}", to_json(info))
    if rank == 0:
        try:
            infos = [from_json(HostInfo, store.get(f"host/{other}")) for other in range(world_size)]
            cluster, said = cluster_from_hosts(infos), dict.fromkeys(info.notice for info in infos if info.notice)
            links, notices = known_links(infos, cluster), (describe_hosts(infos), *said)
            answer = Answer(cluster=dataclasses.replace(cluster, links=links, notices=notices))
        except ValueError as error:
            answer = Answer(problem=str(error))
        store.set("cluster", to_json(answer))
    answer = from_json(Answer, store.get("cluster"))
    if answer.cluster is None:
        raise ValueError(answer.problem)
    return answer.cluster


def describe_host(
    local_rank: int, device: torch.device, *, uses_gpu: bool | None = None, root: Path = Path("/")
) -> HostInfo:
    """This process's machine; the GPU only where collectives use it (over gloo no byte takes NVLink).

    Args:
        uses_gpu: whether they do; None: as the process group does.
        root: where /proc and /sys are.
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
        gpu=None if gpu is None else gpu._replace(numa_node=_numa_node(root, gpu.pci)),
        nics=find_nics(root),
        notice=notice,
    )


def find_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """The network adapters that are up and sit on the PCI bus; one that is both InfiniBand and Ethernet counts once."""
    found: dict[str, Nic] = {}
    for entry in sorted(root.glob("sys/class/infiniband/*")):
        state, rate = (_read(entry / "ports/1" / name) for name in ("state", "rate"))  # "4: ACTIVE", "400 Gb/sec (...)"
        if "ACTIVE" in state:
            _add_nic(found, root, entry, float((rate.split() or ["0"])[0]))
    for entry in sorted(root.glob("sys/class/net/*")):
        if _read(entry / "operstate") == "up":
            _add_nic(found, root, entry, max(0.0, float(_read(entry / "speed") or 0)) / 1e3)  # Mbit/s, -1: unknown
    return tuple(found.values())


def _add_nic(found: dict[str, Nic], root: Path, entry: Path, gigabits_per_second: float) -> None:
    addresses = PCI_ADDRESS.findall(str((entry / "device").resolve())) if (entry / "device").exists() else []
    if addresses and addresses[-1] not in found:
        numa_node = _numa_node(root, addresses[-1])
        found[addresses[-1]] = Nic(entry.name, addresses[-1], numa_node, gigabits_per_second)


def _numa_node(root: Path, pci: str) -> int:
    return int(_read(root / "sys/bus/pci/devices" / pci / "numa_node") or -1) if pci else -1


def _read(path: Path) -> str:
    """The text of a file of the kernel's; empty where there is none or it has no answer (a link that is down)."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def describe_gpu(device: torch.device) -> tuple[Gpu, str]:
    """The GPU behind a CUDA device, whatever CUDA_VISIBLE_DEVICES leaves of the host's.

    Returns:
        The GPU, and a line for the user where something about it could not be found out.
    """
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
    """Ask `nvml`, the module pynvml, about one GPU; what a driver or GPU does not know stays empty.

    Args:
        uuid: as CUDA gives it, without "GPU-".
    Raises:
        nvml.NVMLError: no such GPU.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def ask(function: str, *args: Any, default: Any = None) -> Any:
        try:
            return getattr(nvml, function)(handle, *args)
        except (nvml.NVMLError, AttributeError):  # not of this GPU, driver or version of the package
            return default

    peers = {*_ends_of_links(nvml, ask), *_nvlink_neighbours(nvml, ask)}
    return Gpu(
        uuid=uuid,
        name=name,
        pci=_address(nvml.nvmlDeviceGetPciInfo(handle)),
        fabric=_fabric(nvml, ask),
        nvlink_peers=tuple(sorted(peers)),
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", default=0),
        pcie_lanes=ask("nvmlDeviceGetMaxPcieLinkWidth", default=0),
    )


def _fabric(nvml: Any, ask: Callable[..., Any]) -> str:
    """Cluster and clique of a multi-node NVLink fabric; one node's NVSwitches report the cluster 0."""
    make_info = getattr(nvml, "c_nvmlGpuFabricInfoV_t", None)
    if make_info is None:
        return ""
    info = make_info()
    if ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is None:
        return ""
    cluster = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return ""
    return f"{cluster.hex()}/{info.cliqueId}"


def _ends_of_links(nvml: Any, ask: Callable[..., Any]) -> Iterator[str]:
    """What the GPU's own links say; it knows peers that this process may not see."""
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
    """As the kernel writes it: 0000:1b:00.0 for NVML's 00000000:1B:00.0."""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
