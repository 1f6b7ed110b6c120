"""What the NVIDIA management library says of the GPU that this process uses: where it sits and what NVLink joins it to.

`nvidia-ml-py` is optional: without it a node counts as one fast domain, and a notice says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megazpp.topology.hosts import SWITCH, Gpu

UNKNOWN_LINKS = "which GPUs NVLink joins is not known, so a node counts as one fast domain"


class Described(NamedTuple):
    """A GPU, and a line for the user where something about it could not be found out."""

    gpu: Gpu
    notice: str = ""


def describe_gpu(device: torch.device) -> Described:
    """The GPU behind a CUDA device, whatever CUDA_VISIBLE_DEVICES leaves of the host's."""
    properties = torch.cuda.get_device_properties(device)
    uuid, name = str(properties.uuid), properties.name
    try:
        import pynvml
    except ImportError:
        return Described(Gpu(uuid, name), f"nvidia-ml-py is not installed (pip install nvidia-ml-py): {UNKNOWN_LINKS}")
    try:
        pynvml.nvmlInit()
        return Described(query_gpu(pynvml, uuid, name))
    except pynvml.NVMLError as error:
        return Described(Gpu(uuid, name), f"NVML does not describe {name} {uuid} ({error}): {UNKNOWN_LINKS}")


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
