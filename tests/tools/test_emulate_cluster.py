from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulate_cluster import EmulatedCluster, parse_rate, remove_leftovers
from helpers.program import ROOT, Program

from megazpp.parallel.worker import UserError

TOOL = str(ROOT / "tools" / "emulate_cluster.py")
CAN_EMULATE = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
needs_root = pytest.mark.skipif(not CAN_EMULATE, reason="needs root and iproute2")

# node 0 sends a megabyte to node 1 over plain sockets: no torch, so that a job takes tenths of seconds
SEND = """
import os, socket, sys, time
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if "fail" in sys.argv and rank == 1:
    raise RuntimeError("planned")
if rank == 0:
    listener = socket.create_server(address)
    print("listening", flush=True)
    peer, _ = listener.accept()
    started = time.monotonic()
    for _ in range(16):
        peer.sendall(bytes(1 << 16))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print("seconds", time.monotonic() - started, flush=True)
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    while peer.recv(1 << 16):
        pass
    peer.sendall(b"x")
if "stay" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def send(tmp_path: Path) -> str:
    path = tmp_path / "send.py"
    path.write_text(SEND)
    return str(path)


def network_of(pid: int) -> list[str]:
    """Everything with that process's name on it."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    folders = [p.name for folder in ("/sys/class/net", "/etc/netns") for p in Path(folder).glob("*")]
    return sorted(name for name in [*spaces, *folders] if name.startswith(f"mz{pid}"))


def start(folder: Path, *flags: str) -> Program:
    return Program(TOOL, "--nodes", "2", "--ranks-per-node", "1", *flags, folder=folder)


def seconds_of(output: str) -> float:
    return next(float(line.split()[1]) for line in output.splitlines() if line.startswith("seconds"))


@needs_root
def test_a_job_crosses_the_uplinks_and_leaves_nothing_behind(tmp_path: Path, send: str):
    program = start(tmp_path, "--", send)
    assert program.process.wait(60) == 0, program.output()
    uplinks = [line.split() for line in program.output().splitlines() if line.startswith("uplink of node")]
    sent = [float(words[words.index("sent") + 1]) for words in uplinks]
    received = [float(words[words.index("received") + 1]) for words in uplinks]
    assert 1.048 < sent[0] < 1.048 * 1.05  # 16 x 65536 bytes and their headers
    assert 0 < sent[1] < 0.05
    assert received == pytest.approx(sent[::-1], rel=0.01)
    assert network_of(program.process.pid) == []


@needs_root
def test_the_rate_holds_for_what_is_sent(tmp_path: Path, send: str):
    program = start(tmp_path, "--rate", "10mbit", "--", send)
    assert program.process.wait(60) == 0, program.output()
    # 8.39 Mbit, of which the burst of 1.02 Mbit goes at once, and not much less than that
    assert 0.6 < seconds_of(program.output()) < 3.0


@needs_root
def test_the_rate_changes_under_a_running_cluster(tmp_path: Path, send: str, capfd: pytest.CaptureFixture[str]):
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate="4mbit") as cluster:
        assert cluster.start([sys.executable, send]).wait() == 0
        slow = seconds_of(capfd.readouterr().out)
        cluster.set_rate("unlimited")
        assert cluster.start([sys.executable, send]).wait() == 0
        fast = seconds_of(capfd.readouterr().out)
        assert cluster.uplink_bytes()[1].received > 2 << 20
    assert slow > 1.5 > 0.5 > fast
    assert network_of(os.getpid()) == []


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_leaves_nothing_behind(tmp_path: Path, send: str, number: signal.Signals):
    program = start(tmp_path, "--", send, "stay")
    program.wait_for("seconds")
    assert network_of(program.process.pid) != []
    program.process.send_signal(number)
    assert program.process.wait(30) == 128 + number
    assert network_of(program.process.pid) == []
    assert program.left_behind() == []


@needs_root
def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path: Path, send: str):
    program = start(tmp_path, "--", send, "stay")
    program.wait_for("seconds")
    program.process.kill()
    program.process.wait()
    assert network_of(program.process.pid) != []
    assert f"mz{program.process.pid}" in remove_leftovers()
    assert network_of(program.process.pid) == []
    deadline = time.monotonic() + 10
    while program.left_behind() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert program.left_behind() == []


@needs_root
def test_when_one_rank_fails_all_end_and_its_traceback_is_shown(tmp_path: Path, send: str):
    program = start(tmp_path, "--", send, "fail")
    assert program.process.wait(60) == 1
    assert "--- rank 1 wrote:" in program.output()
    assert "RuntimeError: planned" in program.output()
    assert "rank 1 ended with exit code 1; the job is over" in program.output()
    assert network_of(program.process.pid) == []
    assert program.left_behind() == []


@needs_root
def test_ranks_see_what_torchrun_would_tell_them(tmp_path: Path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    names += ["MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    script = tmp_path / "show.py"
    script.write_text(
        f"import os; open(f'{tmp_path}/' + os.environ['RANK'], 'w').write(' '.join(os.environ[n] for n in {names}))"
    )
    with EmulatedCluster(nodes=3, ranks_per_node=2) as cluster:
        assert cluster.start([sys.executable, str(script)]).wait() == 0
    assert (tmp_path / "5").read_text() == "5 1 6 2 2 10.88.0.1 29500 1"
    assert (tmp_path / "2").read_text() == "2 0 6 2 1 10.88.0.1 29500 1"


def test_without_root_or_iproute2_nothing_is_made_and_the_message_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="needs root"), EmulatedCluster(nodes=2, ranks_per_node=1):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="needs iproute2, and ip and tc cannot be found"):
        EmulatedCluster(nodes=2, ranks_per_node=1).__enter__()


@pytest.mark.parametrize("rate", ["0mbit", "500", "fast", "-1mbit", "1mbit 2mbit"])
def test_a_rate_that_means_nothing_is_refused_with_its_flag(rate: str):
    with pytest.raises(ValueError, match=f"--rate {rate} is neither"):
        parse_rate(rate)


def test_rates_are_bits_per_second():
    assert [parse_rate(rate) for rate in ("500mbit", "1.5gbit", "8kbit", "unlimited")] == [5e8, 1.5e9, 8e3, None]


def test_a_program_that_is_not_there_is_an_error_before_anything_is_made(tmp_path: Path):
    program = start(tmp_path, "--", "no_such_program.py")
    assert program.process.wait(60) == 2
    assert "give a Python program that exists" in program.output()
