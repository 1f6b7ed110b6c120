"""Discovery of the cluster by its ranks: each rank describes its host, and rank 0 combines the descriptions.

The variables that a launcher sets are enough to reject wrong flags before workers start. Only the ranks themselves can
find out which host they are on and how their GPUs are connected.

Ranks exchange their descriptions through the rendezvous store, which works even if they disagree about devices or back
ends. The format is JSON and not pickle, which can execute code when it is read: other processes may be able to write to
the store (store.py).

NVLink connections come from NVIDIA's management library (NVML). Without the optional package `nvidia-ml-py` each node
counts as one fast domain, and a notice says so.
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
from megazpp.parallel.store import kernel_of
from megazpp.parallel.worker import Worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, cluster_from_hosts, describe_hosts, spread_notices

T = TypeVar("T")
SURVEY = "megazpp/survey"  # prefix of the keys in the job's store under which ranks describe their hosts
UNKNOWN_LINKS = "the NVLink connections are unknown, so each node counts as one fast domain"


def resolve_cluster(
    worker: Worker, config: ClusterConfig, announced: Cluster, *, on_one_machine: Callable[[], Cluster]
) -> Cluster:
    """Return the cluster for the layout of the ranks: the cluster that flags describe, or else the discovered cluster.

    All ranks call this and return equal clusters. If flags describe a node whose ranks are on several hosts, rank 0's
    cluster has a warning about it in `notices`.

    Args:
        worker: this rank.
        config: flags that may describe the cluster (--cluster-file, --emulate-nodes).
        announced: the cluster that `detect_cluster` derived from flags and the launcher's environment. It is the result
            if flags describe the cluster.
        on_one_machine: function that returns the cluster for --emulate-nodes auto if all ranks are on one machine.
    Raises:
        ValueError: the discovered hosts do not form a usable cluster; all ranks raise it with the same message. If
            flags describe the cluster: rank 0 has not received a valid host description of each rank; only rank 0
            raises it.
    """
    info = describe_host(worker.local_rank, worker.device)
    if config.cluster_file is not None or isinstance(config.emulate_nodes, int):
        store = dist.PrefixStore(SURVEY, worker.store)
        notices = spread_notices(_gather_infos(store, worker.rank, worker.world_size, info), announced)
        return dataclasses.replace(announced, notices=(*announced.notices, *notices))
    found = share_survey(worker.store, worker.rank, worker.world_size, info)
    if config.emulate_nodes == "auto" and found.num_nodes == 1:
        return on_one_machine()
    return found


def share_survey(store: dist.Store, rank: int, world_size: int, info: HostInfo) -> Cluster:
    """Exchange all ranks' host descriptions through the store, and return the cluster that rank 0 derives from them.

    Args:
        store: rendezvous store of the job.
        rank: this rank.
        world_size: number of ranks.
        info: description of this rank's host.
    Raises:
        ValueError: the hosts do not form a usable cluster, or a rank's entry is malformed. All ranks raise it with the
            same message.
    """
    store = dist.PrefixStore(SURVEY, store)
    if rank > 0:
        _gather_infos(store, rank, world_size, info)
    else:
        try:
            infos = _gather_infos(store, rank, world_size, info)
            notices = dict.fromkeys((describe_hosts(infos), *(info.notice for info in infos if info.notice)))
            answer = dataclasses.asdict(cluster_from_hosts(infos)) | {"notices": list(notices)}
        except ValueError as error:
            answer = {"problem": str(error)}
        store.set("cluster", json.dumps(answer))
    found = _read(_wait_for(store, "cluster", 0), "Cluster", _cluster)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _gather_infos(store: dist.Store, rank: int, world_size: int, info: HostInfo) -> list[HostInfo]:
    """Write the description of this rank's host to the store, and return all ranks' descriptions on rank 0.

    Returns:
        On rank 0, the descriptions of all ranks by rank. On all other ranks an empty list.
    Raises:
        ValueError: on rank 0, if a rank has not written its description within the store's timeout, or if a description
            is malformed.
    """
    store.set(f"host/{rank}", json.dumps(dataclasses.asdict(info)))
    if rank > 0:
        return []
    return [_read(_wait_for(store, f"host/{other}", other), "HostInfo", _host_info) for other in range(world_size)]


def _wait_for(store: dist.Store, key: str, rank: int) -> bytes:
    """Wait for the value that `rank` writes to the store under `key`, and return it.

    Raises:
        ValueError: the rank has not written the value within the store's timeout. The message names the rank.
    """
    try:
        return bytes(store.get(key))
    except dist.DistStoreError as error:
        seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stub lacks the property
        missing = "its host's description" if key != "cluster" else "the cluster, for which it needs all ranks,"
        raise ValueError(
            f"rank {rank} has not written {missing} within {seconds:.0f} s, so the hosts stay "
            f"unknown: a rank has ended, hangs, or cannot reach the store ({str(error)[:80]}); see the ranks' output"
        ) from None


def _read(text: bytes, name: str, make: Callable[[Any], T]) -> T:
    """Parse the JSON text that another rank wrote to the rendezvous store, and return `make` of the parsed JSON.

    The store may hold data from an attacker. `make` therefore constructs only plain records whose field types have
    been checked.

    Args:
        text: JSON text from the store.
        name: name of the expected record, for the error message.
        make: function that converts the parsed JSON to a record, and raises an error if it cannot.
    Raises:
        ValueError: `text` is not JSON, or `make` cannot convert it.
    """
    try:
        return make(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"a rank wrote {text[:80]!r} to the store, which is not a {name}: {error}; start all ranks with the same "
            "version of MegaZ++, and keep other programs away from the store's port"
        ) from None


def _cluster(answer: Any) -> Cluster | str:
    """Convert the JSON that rank 0 wrote about the discovery of the cluster.

    Returns:
        The discovered cluster, or the message that says why the hosts form no usable cluster.
    """
    return str(answer["problem"]) if "problem" in answer else _make(Cluster, answer)


def _host_info(answer: Any) -> HostInfo:
    """Convert the JSON object of a rank's host description to a `HostInfo`."""
    return _make(HostInfo, answer | {"gpu": answer["gpu"] and _make(Gpu, answer["gpu"])})


def _make(kind: type[T], fields: dict[str, Any]) -> T:
    """Construct an instance of the dataclass `kind` from JSON values that another rank wrote to the store.

    The type of each value is checked first. Lists become tuples.

    Args:
        kind: dataclass of the instance, for instance `HostInfo` or `Gpu`.
        fields: values of the dataclass's fields, by name.
    Raises:
        ValueError: a field has a wrong type.
    """
    for problem in wrong_types(kind, fields):
        raise ValueError(problem)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def describe_host(
    local_rank: int, device: torch.device, *, uses_gpu: bool | None = None, root: Path = Path("/")
) -> HostInfo:
    """Describe the machine of this process, and its GPU if collectives run on it.

    Args:
        local_rank: index of this rank on its node, from the launcher.
        device: device on which this rank computes.
        uses_gpu: True if collectives run on the GPU, so that NVLink matters. False for gloo. None asks the default
            process group.
        root: parent folder of `proc`; tests pass a substitute.
    """
    if uses_gpu is None:
        # Collectives run on the GPU only with NCCL. The default group may have a back end for each type of device (for
        # example torch's own default "cpu:gloo,cuda:nccl"), so look for the back end of "cuda".
        uses_gpu = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()
    gpu, notice = describe_gpu(device) if uses_gpu else (None, "")
    boot_id, network_namespace = kernel_of(root)
    return HostInfo(
        host=socket.gethostname(),
        boot_id=boot_id,
        network_namespace=network_namespace,
        local_rank=local_rank,
        gpu=gpu,
        notice=notice,
    )


def describe_gpu(device: torch.device) -> tuple[Gpu, str]:
    """Describe the GPU of a CUDA device with its NVLink connections.

    Returns:
        The description, and a notice for the user if the connections are unknown, otherwise "".
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
        return Gpu(uuid, name), f"NVML cannot describe {name} {uuid} ({error}): {UNKNOWN_LINKS}"


def query_gpu(nvml: Any, uuid: str, name: str) -> Gpu:
    """Query NVML for the PCI address, the NVLink peers and the NVLink fabric of a GPU, and return its description.

    Fields of the description stay empty if NVML does not know their values.

    Args:
        nvml: the module pynvml; tests pass a substitute.
        uuid: the GPU's UUID as CUDA reports it, without the prefix "GPU-".
        name: the GPU's product name.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def ask(function: str, *args: Any) -> Any:
        """Return the result of the NVML function with this name for this GPU; None if the query is not supported."""
        try:
            return getattr(nvml, function)(handle, *args)
        except (nvml.NVMLError, AttributeError):  # this GPU, driver or package version does not support the query
            return None

    # The GPUs and switches at the other ends of this GPU's NVLinks, including GPUs that this process cannot see.
    peers: set[str] = set()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) if ask("nvmlDeviceGetNvLinkState", link) == 1 else None
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            peers.add(SWITCH)
        elif kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
            peers |= {_address(remote)} if remote is not None else set()

    # A virtual machine may hide the other ends of NVLinks. The driver still reports to which GPUs an NVLink path leads.
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # skip a GPU that this process is not allowed to use
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            if ask("nvmlDeviceGetP2PStatus", other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
                peers.add(_address(nvml.nvmlDeviceGetPciInfo(other)))

    # The ID of the multi-node NVLink fabric (an NVLink rack). In a single node with NVSwitches the cluster UUID is
    # zero. The ID then stays empty, because the fabric connects no other node.
    fabric = ""
    if hasattr(nvml, "c_nvmlGpuFabricInfoV_t"):
        info = nvml.c_nvmlGpuFabricInfoV_t()
        answered = ask("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is not None
        cluster = bytes(info.clusterUuid)
        if answered and info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(cluster):
            fabric = f"{cluster.hex()}/{info.cliqueId}"
    return Gpu(uuid, name, _address(nvml.nvmlDeviceGetPciInfo(handle)), fabric, tuple(sorted(peers)))


def _address(pci: Any) -> str:
    """Convert NVML's PCI address (00000000:1B:00.0) to the Linux kernel's notation (0000:1b:00.0)."""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
