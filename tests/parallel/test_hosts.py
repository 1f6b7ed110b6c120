"""Test how the launchers of --nnodes find each other, and end together. A thread stands for the launcher of a host."""

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ports import free_port
from helpers.refusals import not_refused

from megazpp.base.address import Address, listen
from megazpp.base.program import JobError
from megazpp.parallel import failure, hosts
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.hosts import Hosts
from megazpp.parallel.launch import detect_rank_info, hosts_of
from megazpp.parallel.store import FirstFailure, RankInfo, wait_until

NAMES = ("alpha", "beta", "gamma")
TWO = {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1"}


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def host(number: int, port: int, *, name: str = "", **fields) -> Hosts:
    settings = {"num_nodes": 2, "address": "127.0.0.1", "port": port, "patience_seconds": 120.0} | fields
    return Hosts(node_rank=number, name=name or NAMES[number], **settings)


def outcome(here: Hosts) -> str:
    """Connect to the launchers of the other hosts and end the job.

    Returns:
        The error as the launcher would print it; "" without an error.
    """
    try:
        here.gather()
    except (ValueError, JobError) as error:
        here.end(str(error))
        return str(error)
    here.end("")
    return ""


def together(*all_hosts: Hosts) -> list[str]:
    with ThreadPoolExecutor(len(all_hosts)) as pool:
        return list(pool.map(outcome, all_hosts))


@contextmanager
def connected_hosts(count: int = 2) -> Iterator[Any]:
    """Yield the launchers of `count` hosts that have found each other, and a pool of threads, one for each of them."""
    port = free_port()
    found = [host(number, port, num_nodes=count) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(Hosts.gather, found))
        yield *found, pool


def test_hosts_find_each_other_and_say_which_ranks_they_have(capsys):
    port = free_port()
    settings = {"num_nodes": 3, "ranks_per_node": 2}
    assert together(*(host(number, port, **settings) for number in (2, 0, 1))) == ["", "", ""]
    lines = capsys.readouterr().err.splitlines()
    assert f"alpha: node 0 of 3, ranks 0 to 1 of 6; waiting for the others at 127.0.0.1:{port}" in lines
    assert f"gamma: node 2 of 3, ranks 4 to 5 of 6; connecting to node 0 at 127.0.0.1:{port}" in lines
    assert "beta: node 1 of 3, ranks 2 to 3 of 6; all hosts are there; alpha prints the log" in lines


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_hosts_find_each_other_at_an_ipv6_address(capsys):
    port = free_port()
    assert together(host(0, port, address="::1"), host(1, port, address="::1")) == ["", ""]
    assert f"beta: node 1 of 2, rank 1 of 2; connecting to node 0 at [::1]:{port}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_nodes": 3}, "--nnodes is 3 on beta, but 2 on alpha"),
        ({"ranks_per_node": 4}, "--nproc is 4 on beta, but 1 on"),
    ],
)
def test_different_flags_end_both_hosts_with_the_values(fields, problem):
    port = free_port()
    first, second = together(host(0, port), host(1, port, **fields))
    assert second.startswith(problem)
    assert first == f"beta: {second}"


def test_second_host_with_the_same_node_rank_ends_alone():
    port = free_port()
    here, there, late = (host(number, port, name=name) for number, name in ((0, "alpha"), (1, "beta"), (1, "gamma")))
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(here.gather), pool.submit(there.gather)]
        for each in waiting:
            each.result()
        problem = "--node-rank 1 is already taken by beta: give each host a different number from 0 to 1"
        assert outcome(late) == problem
        assert here.over is there.over is None
        ends = [pool.submit(each.end, "") for each in (here, there)]
        for each in ends:
            each.result()


def test_reason_reaches_the_other_hosts():
    with connected_hosts() as (here, there, pool):
        pool.submit(there.end, "rank 1 was killed by SIGKILL")
        wait_until(lambda: here.over is not None, 60)
        assert here.over == "beta: rank 1 was killed by SIGKILL"
        here.end("")


def test_failure_of_a_rank_ends_the_other_hosts_but_not_its_own():
    """The launcher of the failed rank's own host lets the rank print its error and end by itself.

    So only the launchers of other hosts may take the failure as the end of the job.
    """
    with connected_hosts() as (here, there, pool):
        store = dist.TCPStore("127.0.0.1", here.port, is_master=False)
        rank = FirstFailure(store, RankInfo(started=True, world_size=2, rank=1), host="beta")
        assert rank.claim()
        rank.write("rank 1 on beta: a fault")
        wait_until(lambda: here.over is not None, 10)
        ended = pool.submit(there.end, "rank 1 ended with exit code 1")
        here.end("")
        ended.result()
        assert (here.over, there.over) == ("rank 1 on beta: a fault", None)


def test_killed_host_ends_the_job_with_its_name(monkeypatch):
    """Let the second host lose its connection to the store, and check that both launchers name this host.

    The kernel closes the connections of killed processes, so the first launcher sees the same when a host is killed.
    """
    connected = {"127.0.0.1"}
    monkeypatch.setattr(hosts, "connected_to", lambda port: connected)
    with connected_hosts() as (here, there, _):
        wait_until(lambda: here._seen == {1}, 60)
        time.sleep(2 * hosts.KILLED_SECONDS)
        assert here.over is None
        connected.clear()
        for each in (here, there):
            wait_until(lambda each=each: each.over is not None, 60)
            assert each.over.startswith("beta: all processes of the job have ended without notice")
        here.end("")
        assert here._done.is_set()  # it has not waited in vain for the killed host
        there.end("")


def test_only_hosts_that_have_not_left_are_taken_for_killed(monkeypatch):
    """When all connections are gone, the error must name host gamma, and not host beta, which has ended its job."""
    connected = {"127.0.0.1"}
    monkeypatch.setattr(hosts, "connected_to", lambda port: connected)
    with connected_hosts(3) as (here, left, killed, _):
        wait_until(lambda: here._seen == {1, 2}, 60)
        left.end("")
        connected.clear()
        for each in (here, killed):
            wait_until(lambda each=each: each.over is not None, 60)
            assert each.over.startswith("gamma: all processes of the job have ended without notice")
        here.end("")
        killed.end("")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connected_hosts_are_listed_as_long_as_a_connection_is_open(address):
    if address == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(Address(address, 0)) as server:
        port = server.getsockname()[1]
        assert hosts.connected_to(port) == set()
        with socket.create_connection((address, port)), server.accept()[0]:
            assert hosts.connected_to(port) == {address}
        assert hosts.connected_to(port) == set()


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_before_the_start_is_told_to_a_host_that_waits(failing):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(outcome, host(1 - failing, port))
        host(failing, port).tell("--lr 0x is wrong")
        assert other.result() == f"{NAMES[failing]}: --lr 0x is wrong"


@pytest.mark.slow
def test_unreachable_host_is_named_with_the_reason_and_the_time(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "WAIT_SECONDS", 0.5)
    port = free_port()
    problem = outcome(host(1, port, patience_seconds=1.0))
    assert problem.startswith(f"--master-addr 127.0.0.1 --master-port {port} cannot be reached: Connection refused (")
    assert re.search(r"drops the port\); beta has waited [1-9]\d* s$", problem)
    assert "Connection refused" in capsys.readouterr().err
    problem = outcome(host(0, port, patience_seconds=1.0))
    assert problem.startswith(f"--nnodes 2: not all hosts have connected to 127.0.0.1:{port} (")


def test_address_of_another_machine_or_a_taken_port_is_refused():
    port = free_port()
    assert outcome(host(0, port, address="192.0.2.1")).startswith(
        "--master-addr 192.0.2.1 is not an address of alpha: "
    )
    with socket.create_server(("127.0.0.1", port)):
        where = f"--master-addr 127.0.0.1 --master-port {port}"
        problem = f"{where}: alpha cannot listen there: Address already in use; give another --master-port on all hosts"
        assert outcome(host(0, port)) == problem


def test_name_that_is_unknown_or_means_only_this_machine_is_refused(monkeypatch):
    def asked(*_, **__):
        return [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 1))]

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    assert outcome(host(0, 1, address="alpha")).startswith(
        "--master-addr alpha is the loopback address 127.0.1.1 on alpha, which other hosts "
    )

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    why = "cannot be resolved: Name or service not known; give an IP address"
    assert outcome(host(1, 1, address="alpah")) == f"--master-addr alpah {why}"


REFUSED = [
    ({**TWO, "node_rank": 2}, "--node-rank 2 is not a number from 0 to 1: with --nnodes 2, hosts are numbered from 0"),
    ({"nnodes": 0}, "--nnodes 0 is not positive"),
    ({**TWO, "master_addr": "alpha:29500"}, "--master-addr alpha:29500 is not the name or the IP address of a host"),
    ({**TWO, "max_restarts": 1}, "--max-restarts 1 is not supported with --nnodes 2"),
    ({"nnodes": 2}, "--nnodes 2 needs --node-rank and --master-addr"),
    ({"nnodes": 2, "node_rank": 0}, "--nnodes 2 needs --master-addr"),
]


def test_flags_that_do_not_fit_are_refused_by_name():
    assert not_refused(REFUSED, lambda flags: hosts_of(LaunchConfig(**flags))) == []
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match="--nnodes 2 conflicts with torchrun"):
        detect_rank_info(LaunchConfig(**TWO), torchrun)
    assert detect_rank_info(LaunchConfig(**TWO, nproc=3), {}) == RankInfo(started=False, world_size=6, launched_size=3)
    assert hosts_of(LaunchConfig(nnodes=1, node_rank=0, master_addr="a")) is None
    assert hosts_of(LaunchConfig(**TWO | {"master_addr": "[fd00::1]"})).where == "[fd00::1]:29500"


def test_hosts_are_found_on_a_command_line_with_mistakes(tmp_path):
    flags = tmp_path / "flags.args"
    flags.write_text("--nnodes 2 --master-addr alpha\n--lr 0x\n")
    found = failure.hosts_in([f"@{flags}", "--node-rank", "1", "--lrr", "3", "--no-such"])
    assert (found.num_nodes, found.node_rank, found.address, found.port) == (2, 1, "alpha", 29500)
    for words in ([], ["--nnodes", "2", "--node-rank", "7", "--master-addr", "a"], ["--nnodes", "x"], ["@nowhere"]):
        assert failure.hosts_in(words) is None


def test_interface_is_found_by_its_address():
    assert hosts.interface_of("127.0.0.1") is None
    assert hosts.interface_of("192.0.2.1") is None
