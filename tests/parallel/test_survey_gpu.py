"""What NVML's answers come to, on a made-up library: the same calls, structures and ways to fail."""

# ruff: noqa: N802  (the library's names)

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazpp.parallel.survey import describe_gpu, query_gpu
from megazpp.topology.hosts import SWITCH


class NVMLError(Exception):
    pass


class FabricInfo(ctypes.Structure):
    _fields_ = (("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint8))


class Nvml:
    """A host with GPUs 0 to 3 under the bus addresses 0x1b to 0x4b; a handle is the GPU's index.

    Args:
        ends: of the GPUs' first NVLinks: the index of a GPU, or "switch"; the other links are down.
        reachable: pairs of GPUs that the driver says NVLink joins.
        fabric: (cluster byte, clique, state).
        without: functions that this driver does not have.
    """

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_GPU_FABRIC_STATE_COMPLETED = 3
    c_nvmlGpuFabricInfoV_t = FabricInfo  # noqa: N815

    def __init__(
        self,
        ends: tuple[Any, ...] = (),
        reachable: tuple[tuple[int, int], ...] = (),
        fabric: tuple[int, int, int] | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self.ends, self.reachable, self.fabric, self.without = ends, reachable, fabric, without

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.without:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("GPU-uuid"):
            raise NVMLError("not found")
        return int(uuid[-1])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 2:
            raise NVMLError("no permission")  # another job's
        return index

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 1}B:00.0")

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self.ends:
            raise NVMLError("not supported")
        return int(link < len(self.ends))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.ends[link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{self.ends[link] + 1}B:00.0".encode())  # bytes in older packages

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        if one == other:
            raise NVMLError("invalid argument")
        return 0 if (one, other) in self.reachable else 5

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, pointer: Any) -> int:
        if self.fabric is None:
            raise NVMLError("not supported")
        info = pointer._obj
        info.clusterUuid[15], info.cliqueId, info.state = self.fabric
        return 0


# what NVLink leads to
PEERS: list[tuple[Nvml, str, tuple[str, ...]]] = [
    (Nvml(ends=("switch",) * 18), "uuid0", (SWITCH,)),
    (Nvml(ends=(3, 3)), "uuid0", ("0000:4b:00.0",)),  # a bridge to a GPU that this process may not see
    (  # where links do not say where they lead, the driver's paths count
        Nvml(ends=(1,), reachable=((0, 1), (0, 3)), without=("nvmlDeviceGetNvLinkRemoteDeviceType",)),
        "uuid0",
        ("0000:2b:00.0", "0000:4b:00.0"),
    ),
    (Nvml(), "uuid1", ()),
]


def test_the_peers_over_nvlink():
    for nvml, uuid, peers in PEERS:
        gpu = query_gpu(nvml, uuid, "A40")
        assert (gpu.uuid, gpu.name, gpu.pci) == (uuid, "A40", f"0000:{int(uuid[-1]) + 1}b:00.0")
        assert gpu.nvlink_peers == peers


def test_only_a_working_fabric_of_several_nodes_has_a_name():
    for fabric, name in (
        ((7, 2, 3), "00" * 15 + "07/2"),
        ((0, 2, 3), ""),  # inside one node
        ((7, 2, 1), ""),  # not started
        (None, ""),
    ):
        assert query_gpu(Nvml(fabric=fabric), "uuid0", "GB200").fabric == name, fabric


def fail() -> None:
    raise NVMLError("driver not loaded")


def test_without_the_library_the_gpu_keeps_its_name_and_the_user_reads_why(monkeypatch):
    properties = SimpleNamespace(uuid="uuid0", name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    broken = SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail)
    for module, said in ((None, "pip install nvidia-ml-py"), (broken, "driver not loaded")):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        gpu, notice = describe_gpu(torch.device("cuda", 0))
        assert (gpu.uuid, gpu.name, gpu.pci, gpu.nvlink_peers) == ("uuid0", "H100", "", ())
        assert said in notice


@pytest.mark.gpu
def test_this_machine_s_gpu_is_described():
    pytest.importorskip("pynvml")
    gpu, notice = describe_gpu(torch.device("cuda", 0))
    assert notice == ""
    assert gpu.pci.count(":") == 2
