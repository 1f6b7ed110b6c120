"""Test the watchdog: it names a hanging rank, prints its stack and the waiting collectives, and ends the job."""

import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from helpers.fork_python import forked_python
from helpers.program import Program

from megazpp.parallel.timeline import Doing
from megazpp.parallel.watchdog import RankState, describe_hang
from megazpp.topology.cluster import Cluster
from megazpp.topology.plan import plan_layout

JOB = str(Path(__file__).parents[1] / "helpers" / "job.py")


@pytest.mark.slow
def test_hanging_ranks_are_named_with_waiting_collectives_and_job_ends(tmp_path):
    """Ranks 0 and 1, and 2 and 3, share tp groups; ranks 0 and 2, and 1 and 3, share shard groups.

    Rank 1 sleeps and rank 2 is stopped. So rank 0 waits for rank 2, and rank 3 waits for rank 1.
    """
    program = Program(JOB, "hang", "4", folder=tmp_path, cwd=tmp_path, python=str(forked_python()))
    output = program.finish()
    assert program.process.returncode == 1
    assert "watchdog: the job has made no progress for 1.5 s\n" in output
    assert "  all_reduce number 3 on axis shard: rank 3 waiting, rank 1 did not arrive\n" in output
    assert "  all_reduce number 3 on axis shard: rank 0 waiting, rank 2 did not arrive\n" in output
    assert "  rank 2 did not answer: stopped, ended, or stuck outside Python\n" in output
    assert f"  rank 1 on {socket.gethostname()}: step step 3 for " in output
    assert output.count("in hang\n") == 1
    assert output.splitlines()[-1] == "the job hung, see the watchdog's report; the job is over"
    (file,) = tmp_path.glob("hang-*.txt")
    stacks = file.read_text()
    assert [f"==== rank {rank}\n" in stacks for rank in range(4)] == [True, True, False, True]
    assert "in hang\n" in stacks.split("==== rank 1\n")[1].split("==== rank 3\n")[0]


def start(kind: str, folder: Path, *, minutes: float) -> Program:
    """Start the job `kind` of helpers/job.py on two ranks; the watchdog reports a hang after this many minutes."""
    return Program(JOB, kind, "2", "0", str(minutes), folder=folder, cwd=folder, python=str(forked_python()))


@pytest.mark.slow
def test_rank_that_stops_outside_of_all_spans_is_named_and_the_job_ends(tmp_path):
    """The other rank waits in a collective outside of the timeline, as in torch's own code for checkpoints."""
    program = start("stop-on-0", tmp_path, minutes=0.05)
    output = program.finish()
    assert "watchdog: the job has made no progress for 3 s\n" in output
    assert "  rank 0 did not answer: stopped, ended, or stuck outside Python\n" in output
    assert output.splitlines()[-1] == "the job hung, see the watchdog's report; the job is over"


@pytest.mark.slow
def test_job_that_was_suspended_as_a_whole_continues(tmp_path):
    program = start("pause", tmp_path, minutes=0.05)
    program.wait_for("rank 0 at work")
    pids = program.workers()
    assert len(pids) == 2
    # the suspension lasts twice the watchdog's limit
    for signum, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, signum)
        time.sleep(seconds)
    output = program.finish()
    assert program.process.returncode == 0, output
    assert "watchdog" not in output


@pytest.mark.slow
def test_ranks_end_by_themselves_if_the_store_does_not_answer(tmp_path):
    """The launcher hosts the store. While the launcher is stopped, no rank can read the watchdog's alarm."""
    program = start("sleep-on-1", tmp_path, minutes=0.05)
    program.wait_for("sum 2")
    ranks = [psutil.Process(pid) for pid in program.workers()]
    assert len(ranks) == 2
    launcher = ranks[0].parent()
    launcher.suspend()
    program.wait_until(lambda: all(rank.status() == psutil.STATUS_ZOMBIE for rank in ranks))
    launcher.resume()
    output = program.finish()
    assert "watchdog: the store of rank 0 has not answered for 3 s (127.0.0.1:" in output


# ---- the report about a hang ---------------------------------------------------------------------------------------


def report(*ranks: tuple[tuple[str, str, int], dict[str, int]]) -> str:
    """Return the watchdog's report about a hang on two nodes of two ranks.

    Args:
        ranks: for each rank, its open span as (track, name, number), and the number of spans that it has begun per
            track.
    """
    # The local groups are 0 1 and 2 3, and the cross groups are 0 2 and 1 3
    layout = plan_layout(Cluster(num_nodes=2, ranks_per_node=2), tp=1, replicas=1)
    states = {
        rank: RankState("a", [Doing(*doing, 9.0)], entered, "thread MainThread:\n  a stack\n")
        for rank, (doing, entered) in enumerate(ranks)
    }
    return describe_hang(states, layout, 60.0, world_size=4)


def test_only_ranks_that_wait_for_no_other_are_named_as_the_cause():
    text = report(
        (("local", "all_gather", 5), {"local": 5, "cross": 7}),
        (("cross", "all_to_all", 8), {"local": 4, "cross": 8}),
        (("local", "all_gather", 5), {"local": 5, "cross": 7}),
        (("compute", "forward", 2), {"local": 4, "cross": 7}),
    )
    assert "all_gather number 5 on axis local: rank 0 waiting, rank 1 did not arrive\n" in text
    assert "all_gather number 5 on axis local: rank 2 waiting, rank 3 did not arrive\n" in text
    assert "all_to_all number 8 on axis cross: rank 1 waiting, rank 3 did not arrive\n" in text
    assert [line for line in text.splitlines() if line.startswith("  rank ")] == [
        "  rank 3 on a: compute forward for 9 s"
    ]


def test_collective_entered_by_all_ranks_is_blamed_on_the_network():
    text = report(*[(("shard", "reduce_scatter", 3), {"shard": 3})] * 4)
    assert "axis shard: ranks 0, 1, 2, 3 waiting, all ranks are in it, but it does not finish" in text


def test_rank_that_launched_less_is_named_if_hosts_wait_for_devices():
    text = report(*[(("compute", "norm", 4), {"shard": 40 - (rank == 2), "step": 4}) for rank in range(4)])
    assert "  shard: rank 2 started fewer than the others' 40\n" in text
