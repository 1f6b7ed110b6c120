"""Test the emulation of nodes by network namespaces: rates of links, torchrun's variables, and cleanup."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import emulate_cluster
import pytest
from emulate_cluster import EmulatedCluster, parse_rate
from helpers.fork_python import forked_python
from helpers.program import ROOT, Program
from helpers.refusals import not_refused
from helpers.tiers import nightly, slow

from megazpp.base.program import UserError

CAN_EMULATE = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
needs_root = pytest.mark.skipif(not CAN_EMULATE, reason="needs root and iproute2")

# A job in which node 0 sends a megabyte to node 1 over sockets. Without torch, it takes only tenths of a second.
SEND = """
import os, sys, time
from multiprocessing.connection import Client, Listener
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if "fail" in sys.argv and rank == 1:
    raise RuntimeError("planned")
if rank == 0:
    with Listener(address) as listener, listener.accept() as peer:
        started = time.monotonic()
        peer.send_bytes(bytes(1 << 20))
        peer.recv_bytes()
        print("seconds", time.monotonic() - started, flush=True)
peer = None
while rank == 1 and peer is None:
    try:
        peer = Client(address)
        peer.send_bytes(peer.recv_bytes()[:1])
    except ConnectionRefusedError:
        time.sleep(0.02)
if "stay" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def send(tmp_path) -> str:
    (tmp_path / "send.py").write_text(SEND)
    return str(tmp_path / "send.py")


def seconds_of(output: str) -> float:
    return float(re.findall(r"^seconds (.*)$", output, re.MULTILINE)[0])


@pytest.mark.slow
@needs_root
def test_job_uses_uplinks_at_their_rate_and_host_links_stay_unchanged(send, monkeypatch, capfd):
    monkeypatch.setattr(emulate_cluster, "exit_on_signals", lambda: None)
    links = subprocess.check_output(["ip", "link"], text=True)
    flags = "--nodes 2 --ranks-per-node 1 --rate 10mbit --"
    assert emulate_cluster.main([*flags.split(), send]) == 0
    output = capfd.readouterr().out
    uplinks = re.findall(r"^uplink of node \d: sent (\S+) MB, received (\S+) MB", output, re.MULTILINE)
    (sent, few), (back, received) = ([float(words) for words in uplink] for uplink in uplinks)
    assert 1.048 < sent < 1.048 * 1.05  # MB: 1 MiB of data, plus headers of packets
    assert 0 < back < 0.05
    # what one node sends the other receives, up to rounding and traffic before the job
    assert [received, few] == pytest.approx([sent, back], abs=0.01)
    # Seconds for 8.39 Mbit at 10 Mbit/s, less a burst of 1.02 Mbit that is sent at once, with some margin.
    assert seconds_of(output) > 0.6
    assert subprocess.check_output(["ip", "link"], text=True) == links


@pytest.mark.slow
@needs_root
def test_rate_can_change_during_a_job_and_one_failed_rank_ends_all(send, capfd):
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate="4mbit") as cluster:
        assert cluster.start([sys.executable, send]).wait() == 0
        slow = seconds_of(capfd.readouterr().out)
        cluster.set_rate("unlimited")
        assert cluster.start([sys.executable, send]).wait() == 0
        fast = seconds_of(capfd.readouterr().out)
        assert cluster.uplink_bytes()[1].received > 2 << 20
        assert slow > 1.5 > fast
        job = cluster.start([sys.executable, send, "fail"])
        assert job.wait() == 1
        assert all(process.poll() is not None for process in job.processes)
    errors = capfd.readouterr().err
    for said in ("--- rank 1 wrote:", "RuntimeError: planned", "rank 1 ended with exit code 1; the job is over"):
        assert said in errors


SPLIT = "--context-parallel-size 4 --allow-cp-across-nodes"


@needs_root
@pytest.mark.parametrize(
    "flags", [nightly(""), slow(f"--zeropp {SPLIT}"), slow("--tensor-model-parallel-size 4 --sequence-parallel")]
)
def test_interfaces_carry_the_bytes_that_a_run_prints(tmp_path, monkeypatch, flags):
    """Train 2 and 6 steps on two nodes, and compare the additional bytes of the interfaces and of summary.json.

    The bytes of the start and of the end are equal in both runs. The interfaces also carry headers of packets, which
    are less than 3 % of the bytes.
    """
    monkeypatch.chdir(tmp_path)
    carried, printed = [], []
    with EmulatedCluster(nodes=2, ranks_per_node=2) as cluster:
        for steps in (2, 6):
            run = f"--train-iters {steps} --run-dir {steps} --eval-iters 0 --sample-tokens 0 --no-save-to-run-dir"
            command = f"{ROOT}/pretrain_gpt.py --global-batch-size 8 {run} {flags}"
            before = sum(node.sent for node in cluster.uplink_bytes())
            assert cluster.start([str(forked_python()), *command.split()]).wait() == 0
            carried.append(sum(node.sent for node in cluster.uplink_bytes()) - before)
            rows = json.loads(Path(f"{steps}/summary.json").read_text())["traffic"]
            printed.append(2 * sum(row["sent_bytes"] for row in rows if row["wire"] == "cross"))
    assert carried[1] - carried[0] == pytest.approx(printed[1] - printed[0], rel=0.03)


@needs_root
@pytest.mark.parametrize("number", [slow(signal.SIGINT), nightly(signal.SIGTERM), slow(signal.SIGKILL)])
def test_no_process_or_namespace_is_left_however_a_run_ends(tmp_path, send, number):
    """Stop the tool by a signal, and check that all its processes end.

    A network namespace exists only as long as processes are in it, so none is left either.
    """
    flags = ("--nodes", "2", "--ranks-per-node", "1", "--", send, "stay")
    tool = Program("tools/benchmarks/emulate_cluster.py", *flags, folder=tmp_path)
    tool.wait_for("seconds")
    # processes: the tool, two ranks, and one that keeps each of three namespaces
    assert len(tool.left_behind()) == 1 + 2 + 3
    tool.process.send_signal(number)
    assert tool.process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert tool.all_end()


@pytest.mark.slow
@needs_root
def test_ranks_get_torchruns_variables_hosts_links_and_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    program = (
        "import os, socket\n"
        f"words = [os.environ[name] for name in '{names} GLOO_SOCKET_IFNAME'.split()]\n"
        "words += [socket.gethostbyname('node1'), ','.join(sorted(os.listdir('/sys/class/net')))]\n"
        "open(words[0], 'w').write(' '.join(words))\n"
    )
    with EmulatedCluster(nodes=3, ranks_per_node=2) as cluster:
        assert cluster.start([sys.executable, "-c", program]).wait() == 0
    assert (tmp_path / "5").read_text() == "5 1 6 2 2 10.88.0.1 29500 1 eth0 10.88.0.2 eth0,lo"
    assert (tmp_path / "2").read_text() == "2 0 6 2 1 10.88.0.1 29500 1 eth0 10.88.0.2 eth0,lo"


def test_missing_root_or_iproute2_is_an_error_before_any_change(monkeypatch):
    cluster = EmulatedCluster(nodes=2, ranks_per_node=1)
    monkeypatch.setenv("PATH", "/nowhere")
    for user, said in ((1000, "needs root"), (0, "needs iproute2, but ip and tc cannot be found")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        with pytest.raises(UserError, match=said):
            cluster.__enter__()


def test_rates_are_parsed_as_bits_per_second():
    assert [parse_rate(rate) for rate in ("500mbit", "1.5gbit", "8kbit", "unlimited")] == [5e8, 1.5e9, 8e3, None]
    wrong = ("0mbit", "500", "fast", "-1mbit", "1mbit 2mbit")
    assert not_refused([(rate, f"--rate {rate} is neither") for rate in wrong], parse_rate) == []
