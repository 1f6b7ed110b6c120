"""The cluster as its ranks find it: each describes its host, the first one puts the answers together.

The launcher's environment is enough to refuse wrong flags before workers start; only the ranks know where they really
are and what joins their GPUs. They use the process group's store, which works also while ranks disagree about devices
and back ends, and JSON, because others may reach that store (launch.py). What NVLink joins a GPU to comes from NVIDIA's
management library; without the optional `nvidia-ml-py` a node counts as one fast domain, and a notice says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megazpp.base.flags import wrong_types
from megazpp.parallel.worker import Worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, cluster_from_hosts, describe_hosts

T = TypeVar("T")
UNKNOWN_LINKS = "which GPUs NVLink joins is not known, so a node counts as one fast domain"


def resolve_cluster(
    worker: Worker, config: ClusterConfig, announced: Cluster, *, on_one_machine: Callable[[], Cluster]
) -> Cluster:
    """The cluster to plan for: as the flags describe it, else as the ranks find it; all ranks return the same.

    Args:
        announced: what `detect_cluster` made of flags and the launcher's environment.
        on_one_machine: returns the cluster for --emulate-nodes auto where all ranks are on one machine.
    Raises:
        ValueError: on all ranks, what is wrong with a host.
    """
    if config.cluster_file is not None or isinstance(config.emulate_nodes, int):
        return announced
    info = describe_host(worker.local_rank, worker.device)
    found = share_survey(worker.store, worker.rank, worker.world_size, info)
    if config.emulate_nodes == "auto" and found.num_nodes == 1:
        return on_one_machine()
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
            infos = [_read(store.get(f"host/{other}"), "HostInfo", _host_info) for other in range(world_size)]
            notices = dict.fromkeys((describe_hosts(infos), *(info.notice for info in infos if info.notice)))
            answer = dataclasses.asdict(cluster_from_hosts(infos)) | {"notices": list(notices)}
        except ValueError as error:
            answer = {"problem": str(error)}
        store.set("cluster", json.dumps(answer))
    found = _read(store.get("cluster"), "Cluster", _cluster)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _read(text: bytes, name: str, make: Callable[[Any], T]) -> T:
    """Read what another rank wrote; nothing is constructed but three records, of fields of their types.

    Raises:
        ValueError: it is something else.
    """
    try:
        return make(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no {name}: {error}") from None


def _cluster(answer: Any) -> Cluster | str:
    """Rank 0's answer: the cluster, or what is wrong with the hosts."""
    return str(answer["problem"]) if "problem" in answer else _make(Cluster, answer)


def _host_info(answer: Any) -> HostInfo:
    return _make(HostInfo, answer | {"gpu": answer["gpu"] and _make(Gpu, answer["gpu"])})


def _make(kind: type[T], fields: dict[str, Any]) -> T:
    for problem in wrong_types(kind, fields):
        raise ValueError(problem)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def describe_host(
    local_rank: int, device: torch.device, *, uses_gpu: bool | None = None, root: Path = Path("/")
) -> HostInfo:
    """This process's machine, from the /proc of `root`; the GPU only where collectives use it.

    Over gloo no byte takes NVLink. `uses_gpu` None: as the process group does.
    """
    if uses_gpu is None:
        uses_gpu = device.type == "cuda" and dist.get_backend() == "nccl"
    gpu, notice = describe_gpu(device) if uses_gpu else (None, "")
    boot_id, namespace = root / "proc/sys/kernel/random/boot_id", root / "proc/self/ns/net"
    return HostInfo(
        host=socket.gethostname(),
        boot_id=boot_id.read_text(encoding="utf-8").strip() if boot_id.exists() else "",
        network_namespace=namespace.stat().st_ino if namespace.exists() else 0,
        local_rank=local_rank,
        gpu=gpu,
        notice=notice,
    )


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

    peers: set[str] = set()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):  # links know peers that this process may not see
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) if ask("nvmlDeviceGetNvLinkState", link) == 1 else None
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            peers.add(SWITCH)
        elif kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
            peers |= {_address(remote)} if remote is not None else set()
    for index in range(nvml.nvmlDeviceGetCount()):  # the driver's paths, where a virtual machine hides the ends
        with contextlib.suppress(nvml.NVMLError):  # a GPU of somebody else's
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            if ask("nvmlDeviceGetP2PStatus", other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
                peers.add(_address(nvml.nvmlDeviceGetPciInfo(other)))
    fabric = ""
    if hasattr(nvml, "c_nvmlGpuFabricInfoV_t"):
        info = nvml.c_nvmlGpuFabricInfoV_t()
        answered = ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is not None
        cluster = bytes(info.clusterUuid)
        # the NVSwitches of one node report the cluster 0
        if answered and info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster):
            fabric = f"{cluster.hex()}/{info.cliqueId}"
    return Gpu(uuid, name, _address(nvml.nvmlDeviceGetPciInfo(handle)), fabric, tuple(sorted(peers)))


def _address(pci: Any) -> str:
    """Write an address as the kernel does: 0000:1b:00.0 for NVML's 00000000:1B:00.0."""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
