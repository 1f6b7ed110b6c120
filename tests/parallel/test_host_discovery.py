"""Test host discovery: each rank describes its host and GPU, and the descriptions of all ranks form the cluster."""

import ctypes
import os
import pickle
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.host_discovery import describe_gpu, describe_host, query_gpu, resolve_cluster, share_survey
from megazpp.parallel.store import RankInfo
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, spread_notices

CPU = torch.device("cpu")


def survey(hosts: str, gpus: Sequence[Gpu | None] = (None,) * 4) -> list[Cluster | str]:
    """Run host discovery with one thread per rank, and return each rank's cluster or error message.

    Args:
        hosts: one letter per rank, which names its host.
        gpus: GPU of each rank; None for a rank on the CPU.
    """
    store = dist.HashStore()

    def share(rank, host, gpu):
        place = {"host": host, "boot_id": host, "local_rank": hosts[:rank].count(host)}
        try:
            return share_survey(store, rank, len(hosts), HostInfo(**place, gpu=gpu, notice=f"{host} is odd"))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(share, range(len(hosts)), hosts, gpus))


def test_all_ranks_get_the_cluster_of_a_cyclic_launcher():
    found = survey("abab")
    assert found == [Cluster(num_nodes=2, ranks_per_node=2, order=(0, 2, 1, 3))] * 4
    hosts = "hosts: a (rank 0 2), b (rank 1 3); no GPU"
    assert found[3].notices == (hosts, "a is odd", "b is odd")  # the notice of each host appears only once


def test_invalid_host_raises_the_same_error_on_every_rank():
    found = survey("aaab")
    assert "1 on b (rank 3)" in found[0]
    assert found == found[:1] * 4


def worker(rank: int, world_size: int, store: dist.Store) -> Worker:
    place = RankInfo(started=True, world_size=world_size, rank=rank, local_rank=rank)
    # the test does not start the watchdog, because no rank can hang here
    watchdog = Watchdog(store, place, LaunchConfig())
    return Worker(**vars(place), device=CPU, store=store, watchdog=watchdog)


def never() -> Cluster:
    raise AssertionError("the emulated cluster was requested, but only --emulate-nodes auto may use it")


def test_survey_overrides_the_launcher_but_not_the_flags():
    """The survey (host discovery) replaces the cluster of the launcher's variables, unless flags describe a cluster."""
    announced = Cluster(num_nodes=4, ranks_per_node=1)
    for config in (ClusterConfig(emulate_nodes=2), ClusterConfig(cluster_file="cluster.yaml")):
        found = resolve_cluster(worker(1, 4, dist.HashStore()), config, announced, on_one_machine=never)
        assert found == announced
        assert not found.notices
    found = resolve_cluster(worker(0, 1, dist.HashStore()), ClusterConfig(), announced, on_one_machine=never)
    assert found == Cluster(num_nodes=1, ranks_per_node=1)
    assert found.notices[0].startswith("hosts: ")
    store, auto = dist.HashStore(), ClusterConfig(emulate_nodes="auto")
    emulated = Cluster(num_nodes=2, ranks_per_node=2)

    def resolve(rank: int) -> Cluster:
        return resolve_cluster(worker(rank, 4, store), auto, announced, on_one_machine=lambda: emulated)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(resolve, range(4))) == [emulated] * 4


@pytest.mark.parametrize(
    ("hosts", "described", "spread"),
    [
        ("aabb", Cluster(num_nodes=2, ranks_per_node=2), ""),
        ("aaaa", Cluster(num_nodes=4, ranks_per_node=1), ""),
        ("abab", Cluster(num_nodes=2, ranks_per_node=2, order=(0, 2, 1, 3)), ""),
        ("abab", Cluster(num_nodes=2, ranks_per_node=2), "node 0 .* has a \\(rank 0\\), b \\(rank 1\\): the messages"),
        ("aabc", Cluster(num_nodes=2, ranks_per_node=2), "node 1 .* has b \\(rank 2\\), c \\(rank 3\\): the messages"),
    ],
)
def test_node_of_a_described_cluster_that_spans_hosts_is_reported(hosts, described, spread):
    notices = spread_notices([HostInfo(host=host, boot_id=host) for host in hosts], described)
    assert len(notices) == bool(spread)
    assert re.search(spread, "".join(notices))


def test_gpus_joined_by_nvlink_form_a_domain():
    gpus = [Gpu(f"u{index}", "A40", pci=f"{index}", nvlink_peers=(f"{index ^ 1}",)) for index in range(4)]
    assert survey("aaaa", gpus) == [Cluster(num_nodes=1, ranks_per_node=4, domain_size=2)] * 4


class Evil:
    """An object that creates a folder when it is unpickled, so that the test notices unpickling of foreign data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


OTHER_TEXTS = ["", "1", "{", "{}", "[]", '"text"', "[" * 100_000, '{"gpu": []}', '{"gpu": "u"}', '{"gpu": {"id": "u"}}']
OTHER_TEXTS += ['{"gpu": null, "host": 7}', '{"gpu": {"uuid": 7}, "host": "a"}', '{"num_nodes": "2"}']


def test_invalid_text_in_the_store_is_rejected_and_never_unpickled(tmp_path):
    for key, rank, kind in (("host/1", 0, "HostInfo"), ("cluster", 1, "Cluster")):
        for text in (*OTHER_TEXTS, pickle.dumps(Evil(tmp_path / "ran"))):
            store = dist.HashStore()
            dist.PrefixStore("megazpp/survey", store).set(key, text)
            with pytest.raises(ValueError, match=f"is not a {kind}"):
                share_survey(store, rank, 2, HostInfo(host="a"))
    assert not (tmp_path / "ran").exists()


def test_rank_that_does_not_describe_its_host_is_named():
    for rank, message in ((0, "rank 1 has not written its host's description"), (1, "rank 0 has not written")):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=1))
        with pytest.raises(ValueError, match=f"{message}.* within 1 s"):
            share_survey(store, rank, 2, HostInfo(host="a"))


# ---- the description of one host --------------------------------------------------------------------------------


def test_host_description_holds_boot_id_and_network_namespace_if_known(tmp_path):
    here = describe_host(0, CPU)
    assert len(here.boot_id) == 36
    assert here.network_namespace == Path("/proc/self/ns/net").stat().st_ino
    assert here.gpu is None
    assert describe_host(3, CPU, root=tmp_path) == HostInfo(host=here.host, local_rank=3)


class NVMLError(Exception):
    pass


class FabricInfo(ctypes.Structure):
    _fields_ = (("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint8))


def nvml(ends: Any = (), reachable: Any = (), fabric: Any = None, without: str = "") -> SimpleNamespace:
    """Return a fake pynvml on a host with GPUs 0 to 3 at the bus addresses 0x1b to 0x4b.

    A handle of a GPU is its index.

    Args:
        ends: index of the GPU at the other end of each NVLink, or "switch"; further links are down.
        reachable: pairs of GPUs that the driver reports as joined by NVLink.
        fabric: (last byte of the cluster's UUID, clique, state) of an NVLink fabric; None for a driver without fabrics.
        without: name of a function that the driver lacks, without its prefix "nvmlDeviceGet".
    """

    def answer(value, supported):
        if not supported:
            raise NVMLError
        return value

    def describe_fabric(handle, pointer):
        info = pointer._obj
        info.clusterUuid[15], info.cliqueId, info.state = answer(fabric, fabric is not None)
        return 0

    functions = {
        "HandleByUUID": lambda uuid: answer(int(uuid[-1]), uuid.startswith("GPU-uuid")),
        # GPU 2 belongs to another job, so this process may not query it
        "HandleByIndex": lambda index: answer(index, index != 2),
        "Count": lambda: 4,
        "PciInfo": lambda handle: SimpleNamespace(busId=f"00000000:{handle + 1}B:00.0"),
        "NvLinkState": lambda handle, link: answer(int(link < len(ends)), ends),
        "NvLinkRemoteDeviceType": lambda handle, link: 2 if ends[link] == "switch" else 0,
        "NvLinkRemotePciInfo": lambda handle, link: SimpleNamespace(busId=b"00000000:%dB:00.0" % (ends[link] + 1)),
        "P2PStatus": lambda one, other, kind: answer(0 if (one, other) in reachable else 5, one != other),
        "GpuFabricInfoV": describe_fabric,
    }
    functions.pop(without, None)
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_NVLINK_DEVICE_TYPE_GPU=0,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        c_nvmlGpuFabricInfoV_t=FabricInfo,
        **{f"nvmlDeviceGet{name}": function for name, function in functions.items()},
    )


PEERS = [
    (nvml(ends=("switch",) * 18), 0, (SWITCH,)),
    (nvml(ends=(3, 3)), 0, ("0000:4b:00.0",)),  # both links lead to GPU 3, which may be hidden from this process
    (  # links do not report their other end, so the peer paths of the driver are used
        nvml(ends=(1,), reachable=((0, 1), (0, 3)), without="NvLinkRemoteDeviceType"),
        0,
        ("0000:2b:00.0", "0000:4b:00.0"),
    ),
    (nvml(), 1, ()),
]
FABRICS = [
    ((7, 2, 3), "00" * 15 + "07/2"),
    ((0, 2, 3), ""),  # the cluster's UUID is 0, so the fabric is inside one node
    ((7, 2, 1), ""),  # the fabric has not started
    (None, ""),
]


def test_query_gpu_finds_nvlink_peers_and_active_fabric():
    for library, index, peers in PEERS:
        expected = Gpu(f"uuid{index}", "A40", f"0000:{index + 1}b:00.0", nvlink_peers=peers)
        assert query_gpu(library, f"uuid{index}", "A40") == expected
    for fabric, name in FABRICS:
        assert query_gpu(nvml(fabric=fabric), "uuid0", "GB200").fabric == name, fabric


def test_missing_pynvml_keeps_the_gpu_name_and_gives_a_notice(monkeypatch):
    def fail():
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="uuid0", name="H100"))
    broken = SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail)
    for module, said in ((None, "pip install nvidia-ml-py"), (broken, "driver not loaded")):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        gpu, notice = describe_gpu(torch.device("cuda", 0))
        assert gpu == Gpu("uuid0", "H100")
        assert said in notice


@pytest.mark.parametrize(
    ("backends", "known"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_gpu_is_described_if_collectives_run_on_it(monkeypatch, backends, known):
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr("megazpp.parallel.host_discovery.describe_gpu", lambda device: (Gpu("uuid", "name"), ""))
    assert (describe_host(0, torch.device("cuda", 0)).gpu is not None) == known
    assert describe_host(0, CPU).gpu is None


@pytest.mark.gpu
def test_gpu_of_this_machine_is_described():
    pytest.importorskip("pynvml")
    gpu, notice = describe_gpu(torch.device("cuda", 0))
    assert notice == ""
    assert gpu.pci.count(":") == 2
