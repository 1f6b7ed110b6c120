"""Test the roll call: before a run starts, ranks compare flags and versions, and tell each other of errors."""

import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from megazpp.base.address import Address, listen
from megazpp.base.launcher import LOOPBACK
from megazpp.base.program import LAUNCHER_PID, UserError
from megazpp.parallel import roll_call, worker
from megazpp.parallel.hosts import wait_until
from megazpp.parallel.launch import RankInfo, loopback_store
from megazpp.parallel.roll_call import call_roll, show_once, tell

HOSTS = ("alpha", "alpha", "beta", "beta")
EQUAL = {"--lr": "0.001", "the version of torch": "2.13"}
Answer = Callable[[dist.Store, RankInfo, str], Any]


def answer(facts: dict[str, str], store: dist.Store, place: RankInfo, host: str) -> str | None:
    """Compare this rank's facts with all ranks' facts, print a problem as a worker does, and return it or None.

    Args:
        facts: flags and versions of this rank, by name.
        store: store of the job.
        place: this rank's place in the job.
        host: name of this rank's host.
    """
    problem = call_roll(store, place, facts, host=host)
    if problem is not None:
        show_once(store, UserError(f"[{host}] {problem}"), host=host)
    return problem


def fail(text: str, store: dist.Store, place: RankInfo, host: str) -> None:
    """Tell all ranks that this rank has failed; the first rank of a host has printed the error before."""
    if place.local_rank == 0:
        UserError(f"[{host}] {text}").show()
    tell(store, place, UserError(f"[{host}] {text}" if place.local_rank else text), host=host)


def on_ranks(*work: Answer) -> list[Any]:
    """Run one function per rank in a thread with its own connection to the store, and return the results in rank order.

    Each function gets the store, the place of its rank, and the name of its host. All begin once all have connected.
    """
    server, connected = loopback_store(listen(Address(LOOPBACK, 0))), threading.Barrier(len(work), timeout=60)

    def run(rank: int) -> Any:
        store = dist.TCPStore(LOOPBACK, server.port, is_master=False)
        place = RankInfo(started=True, world_size=len(work), rank=rank, local_rank=rank % 2)
        connected.wait()
        return work[rank](store, place, HOSTS[rank])

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, range(len(work))))


def printed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return sorted(line.partition("error: ")[2] for line in capfd.readouterr().err.splitlines())


def test_equal_facts_are_no_problem_and_print_nothing(capfd):
    assert on_ranks(*(partial(answer, dict(EQUAL)) for _ in HOSTS)) == [None] * 4
    assert printed(capfd) == []
    assert call_roll(dist.HashStore(), RankInfo(started=True, world_size=1), EQUAL) is None


def test_each_different_fact_is_named_with_values_hosts_and_ranks(capfd):
    """One rank of each host prints the lines about all differences; the other rank prints nothing."""
    others = {"--lr": "0.1", "the version of torch": "2.13", "--new": "3"}
    found = on_ranks(*(partial(answer, EQUAL if host == "alpha" else others) for host in HOSTS))
    lines = [
        "--lr must be equal on all ranks, but is 0.001 on alpha (ranks 0 to 1), 0.1 on beta (ranks 2 to 3)",
        "--new must be equal on all ranks, but is not known on alpha (ranks 0 to 1), 3 on beta (ranks 2 to 3)",
    ]
    assert found == ["\n".join(lines)] * 4
    assert printed(capfd) == sorted([lines[1], lines[1], f"[alpha] {lines[0]}", f"[beta] {lines[0]}"])


def test_long_lists_of_differences_are_cut():
    two = [{f"--flag-{number}": str(rank) for number in range(14)} for rank in range(2)]
    problem, _ = on_ranks(*(partial(answer, facts) for facts in two))
    assert len(problem.splitlines()) == 11
    assert problem.endswith("and 4 more differences")


@pytest.mark.parametrize("wrong", [{3}, {2, 3}, {0, 1, 2, 3}])
def test_failed_ranks_error_is_printed_once_on_each_host(wrong, capfd, monkeypatch):
    """The other ranks do not wait for the facts of a failed rank. They get its error, with the name of its host."""
    monkeypatch.setattr(roll_call, "CLAIM_SECONDS", 0.3)
    work = [partial(fail, "--lr 0x is wrong") if rank in wrong else partial(answer, EQUAL) for rank in range(4)]
    found = on_ranks(*work)
    told = {problem for rank, problem in enumerate(found) if rank not in wrong}
    assert len(told) <= 1
    for problem in told:
        assert problem.startswith(("rank 2 on beta: ", "rank 3 on beta: "))
        assert problem.endswith("--lr 0x is wrong")
    lines = printed(capfd)
    assert len(lines) == 2
    assert lines[0].startswith("[alpha] ")
    assert lines[1].startswith("[beta] ")
    assert all(line.endswith("--lr 0x is wrong") for line in lines)


def test_first_rank_of_a_host_says_whom_it_waits_for_and_where(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(worker, "say", said.append)
    monkeypatch.setattr(worker, "WAIT_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    for rank, expected in (
        (0, "s for the other 3 rank(s) to connect to alpha:29500 and goes on waiting."),
        (2, "s for rank 0 at alpha:29500 and goes on waiting."),
    ):
        with worker._say_whom_it_waits_for(RankInfo(started=True, world_size=4, rank=rank)):
            wait_until(lambda: bool(said), 20)
        assert said[0].startswith(f"rank {rank} on {socket.gethostname()} has waited 0.2 {expected}")
        said.clear()
    with worker._say_whom_it_waits_for(RankInfo(started=True, world_size=4, rank=2)):
        pass  # the rendezvous ends at once
    with worker._say_whom_it_waits_for(RankInfo(started=True, world_size=4, rank=3, local_rank=1)):
        time.sleep(0.3)
    monkeypatch.setenv(LAUNCHER_PID, "1")  # started by this project's launcher, so all ranks are on one machine
    with worker._say_whom_it_waits_for(RankInfo(started=True, world_size=4)):
        time.sleep(0.3)
    assert said == []


def test_exception_before_the_start_is_told_to_the_other_hosts(monkeypatch, capsys):
    told: list[tuple[RankInfo, str]] = []
    monkeypatch.setattr(roll_call, "report_failure", lambda place, error: told.append((place, str(error))))
    # report_tracebacks replaces this hook, and monkeypatch restores it
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    roll_call.report_tracebacks()
    two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    missing = ModuleNotFoundError("No module named 'sentencepiece'")
    for error, env, count in (
        (missing, two, 1),
        (KeyError("x"), two, 1),
        (KeyboardInterrupt(), two, 0),
        (missing, {**two, "WORLD_SIZE": "1", "RANK": "0"}, 0),
        (missing, {**two, LAUNCHER_PID: "1"}, 0),
    ):
        told.clear()
        with monkeypatch.context() as own:
            own.delenv(LAUNCHER_PID, raising=False)
            for name, value in env.items():
                own.setenv(name, value)
            sys.excepthook(type(error), error, None)
        assert type(error).__name__ in capsys.readouterr().err
        assert len(told) == count
