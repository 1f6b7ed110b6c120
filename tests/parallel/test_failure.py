"""Test the start of a job: ranks compare flags and versions, and tell the ranks of other hosts of the first failure."""

import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from megazpp.base.address import Address, listen
from megazpp.base.launcher import LOOPBACK
from megazpp.base.program import EXIT_SECONDARY, EXIT_USER_ERROR, LAUNCHER_PID, JobError, UserError
from megazpp.parallel import failure, worker
from megazpp.parallel.agreement import call_roll
from megazpp.parallel.failure import tell
from megazpp.parallel.store import FirstFailure, RankInfo, loopback_store, wait_until

HOSTS = ("alpha", "alpha", "beta", "beta")
EQUAL = {"--lr": "0.001", "the version of torch": "2.13"}
Answer = Callable[[dist.Store, RankInfo, str], Any]


def answer(facts: dict[str, str], store: dist.Store, place: RankInfo, host: str) -> str | None:
    """Compare this rank's facts with all ranks' facts, and end like a worker if they differ or a rank has failed.

    Args:
        facts: flags and versions of this rank, by name.
        store: store of the job.
        place: this rank's place in the job.
        host: name of this rank's host.
    Returns:
        The error of this rank; None without an error.
    """
    failure = FirstFailure(store, place, host=host)
    try:
        call_roll(store, place, facts, failure)
    except JobError as raised:
        error = raised
    else:
        return None
    # All ranks end with the code of a wrong flag, by which scripts do not start the job again.
    assert worker._report_once(error, place, failure) == EXIT_USER_ERROR
    failure.let_others_read()
    return str(error)


def fail(text: str, store: dist.Store, place: RankInfo, host: str) -> None:
    """Tell all ranks that this rank has failed, after printing the error if this rank is the first one of its host."""
    if place.local_rank == 0:
        UserError(text).show()
    tell(FirstFailure(store, place, host=host), place, UserError(text))


def on_ranks(*work: Answer) -> list[Any]:
    """Run one function per rank in a thread with its own connection to the store, and return the results in rank order.

    Each function gets the store, the place of its rank, and the name of its host. No function begins before all ranks
    have connected.
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
    return [line for line in capfd.readouterr().err.splitlines() if line]


def test_equal_facts_are_no_problem_and_print_nothing(capfd):
    assert on_ranks(*(partial(answer, dict(EQUAL)) for _ in HOSTS)) == [None] * 4
    assert printed(capfd) == []
    place = RankInfo(started=True, world_size=1)
    call_roll(dist.HashStore(), place, EQUAL, FirstFailure(dist.HashStore(), place))


def test_each_different_fact_is_named_with_values_hosts_and_ranks(capfd):
    """Rank 0 prints the lines about all differences, and the first rank of the other host prints them too."""
    others = {"--lr": "0.1", "the version of torch": "2.13", "--new": "3"}
    found = on_ranks(*(partial(answer, EQUAL if host == "alpha" else others) for host in HOSTS))
    lines = [
        "--lr must be equal on all ranks, but is 0.001 on alpha (ranks 0 to 1), 0.1 on beta (ranks 2 to 3)",
        "--new must be equal on all ranks, but is not known on alpha (ranks 0 to 1), 3 on beta (ranks 2 to 3)",
    ]
    assert found == ["\n".join(lines), *["another rank has failed"] * 3]
    shown = printed(capfd)
    assert sorted(line.partition("error: ")[2] for line in shown if "error: " in line) == lines
    assert [line for line in shown if "error: " not in line] == [
        f"rank 2 on beta ends: rank 0 on alpha: {lines[0]}",
        lines[1],
    ]


def test_long_lists_of_differences_are_cut():
    two = [{f"--flag-{number}": str(rank) for number in range(14)} for rank in range(2)]
    problem, _ = on_ranks(*(partial(answer, facts) for facts in two))
    assert len(problem.splitlines()) == 11
    assert problem.endswith("and 4 more differences")


@pytest.mark.parametrize("wrong", [{3}, {2, 3}, {0, 1, 2, 3}])
def test_failed_ranks_error_is_printed_once_on_each_host(wrong, capfd, monkeypatch):
    """The other ranks do not wait for the facts of a failed rank. They get the rank's error, with the host's name."""
    monkeypatch.setattr("megazpp.parallel.store.ANSWER_SECONDS", 60.0)
    began = time.monotonic()
    found = on_ranks(
        *(partial(fail, "--lr 0x is wrong") if rank in wrong else partial(answer, EQUAL) for rank in range(4))
    )
    assert time.monotonic() - began < 60  # no rank waits for a rank that has ended
    assert found == [None if rank in wrong else "another rank has failed" for rank in range(4)]
    own, other = sorted(printed(capfd), key=lambda line: "ends: " in line)
    assert own.endswith(": error: --lr 0x is wrong")
    if wrong == {0, 1, 2, 3}:
        assert other == own
    else:
        assert re.fullmatch(r"rank 0 on alpha ends: rank [23] on beta: --lr 0x is wrong", other)


def test_rank_that_waits_for_connections_ends_if_another_has_failed(monkeypatch, capfd):
    """While a rank waits in C++ code, another thread of its process must read the failure's record and end the rank."""
    store, left = dist.HashStore(), list[int]()

    def leave(code: int) -> NoReturn:
        left.append(code)
        raise dist.DistError  # ends the thread

    monkeypatch.setattr("megazpp.parallel.store.leave", leave)
    first, waiting = (
        FirstFailure(store, RankInfo(started=True, world_size=2, rank=rank), host=host)
        for rank, host in enumerate(("alpha", "beta"))
    )
    with waiting.ends_this_rank():
        first.write("rank 0 on alpha: no such interface")
        assert wait_until(lambda: bool(left), 20)
    assert left == [EXIT_SECONDARY]
    assert printed(capfd) == ["rank 1 on beta ends: rank 0 on alpha: no such interface"]


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
    told: list[str] = []
    monkeypatch.setattr(failure, "tell", lambda record, place, error: told.append(str(error)))
    monkeypatch.setattr(failure, "open_store", lambda place, timeout: dist.HashStore())
    monkeypatch.setattr(failure, "leave", lambda code: None)
    # report_tracebacks replaces this hook, and monkeypatch restores it
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    failure.report_tracebacks()
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
