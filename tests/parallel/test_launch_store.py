"""The store of a job on one machine cannot be reached from elsewhere; of what lies in a store nothing is run."""

import dataclasses
import json
import os
import pickle
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megazpp.parallel import launch
from megazpp.parallel.launch import AGENT_STORE, Place, is_on_one_machine, loopback_store, open_store
from megazpp.parallel.survey import share_survey
from megazpp.topology.hosts import Gpu, HostInfo

LISTEN = "0A"  # in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
TIMEOUT = timedelta(seconds=10)


def addresses_of(port: int) -> set[str]:
    """On which of this machine's addresses somebody listens, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if int(number, 16) == port and line.split()[3] == LISTEN:
                found.add(address)
    return found


def own_address() -> str:
    """An address of this machine that is not the loopback's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def test_the_launchers_store_cannot_be_reached_from_the_network():
    store = loopback_store()
    found = addresses_of(store.port)
    assert found
    assert found <= LOOPBACK
    with pytest.raises(OSError, match=r"refused|timed out"):
        socket.create_connection((own_address(), store.port), timeout=5)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_workers_of_the_launcher_find_its_store(monkeypatch):
    store = loopback_store()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), AGENT_STORE: "True"}.items():
        monkeypatch.setenv(name, value)
    opened, rank, size = open_store(Place(started=True, world_size=2, rank=1), TIMEOUT)
    opened.set("key", "value")
    assert (store.get("key"), rank, size) == (b"value", 1, 2)
    assert is_on_one_machine(Place(started=True, world_size=2, rank=1))


def test_srun_on_one_node_meets_on_the_loopback(monkeypatch):
    for hosts, address in (("host0\n", "127.0.0.1"), ("host0\nhost1\n", "host0")):
        answer = SimpleNamespace(stdout=hosts)
        monkeypatch.setattr(launch.subprocess, "run", lambda *args, answer=answer, **kwargs: answer)
        env = {"SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_ID": "20007"}
        launch._set_missing_address(env)
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (address, "20007")
        assert is_on_one_machine(Place(started=True, world_size=4, rank=1), env) == (address == "127.0.0.1")


def test_rank_0_that_has_to_open_the_store_at_the_loopback_listens_there_only_and_one_process_nowhere():
    assert isinstance(open_store(Place(started=True, world_size=1), TIMEOUT, {})[0], dist.HashStore)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store, _, _ = open_store(Place(started=True, world_size=2, rank=0), TIMEOUT, env)
    assert isinstance(store, dist.TCPStore)
    assert addresses_of(port) <= LOOPBACK


HOST = HostInfo(host="a", local_rank=3, gpu=Gpu(uuid="u", nvlink_peers=("x", "switch")), notice="ä")


def test_answers_in_the_store_come_back_as_they_were():
    store = dist.HashStore()
    other = dataclasses.replace(HOST, host="b", gpu=None)
    dist.PrefixStore("megazpp/survey", store).set("host/1", json.dumps(dataclasses.asdict(other)))
    with pytest.raises(ValueError, match=r"a GPU on a .*; none on b "):
        share_survey(store, 0, 2, HOST)


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


OTHER_TEXTS = ["", "1", "{", "{}", "[]", '"text"', "[" * 100_000, '{"gpu": []}', '{"gpu": "u"}', '{"gpu": {"id": "u"}}']
OTHER_TEXTS += ['{"gpu": null, "host": 7}', '{"gpu": {"uuid": 7}, "host": "a"}', '{"num_nodes": "2"}']


def test_anything_else_in_the_store_is_refused_and_a_pickle_not_run(tmp_path):
    for key, rank, kind in (("host/1", 0, "HostInfo"), ("cluster", 1, "Cluster")):
        for text in (*OTHER_TEXTS, pickle.dumps(Evil(tmp_path / "ran"))):
            store = dist.HashStore()
            dist.PrefixStore("megazpp/survey", store).set(key, text)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"is no {kind}"):
                share_survey(store, rank, 2, HostInfo(host="a"))
    assert not (tmp_path / "ran").exists()
