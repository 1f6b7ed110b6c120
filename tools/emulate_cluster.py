"""Run a program of ours as a cluster of N nodes x L ranks on one machine, over links that are really slow.

    python tools/emulate_cluster.py --nodes 2 --ranks-per-node 4 --rate 500mbit -- pretrain_gpt.py --zeropp

Each node is a network namespace whose one way out is a veth pair into a common bridge. Both ends of the pair have a
token bucket (`tc tbf`), so `--rate` holds for what a node sends and for what it receives. Ranks of one node reach each
other through their namespace's own loopback, which no rate limits. Needs root and iproute2 (`ip`, `tc`).

    node 0 [lo, mz<pid>v0] ==tbf== mz<pid>b0 \\
                                              bridge mz<pid>br
    node 1 [lo, mz<pid>v1] ==tbf== mz<pid>b1 /

Everything that is made has this process's id in its name. It is removed at the end and after Ctrl-C; what a process
that was killed has left is removed by the next run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rank_processes import RankProcesses, RankSite, master_variables

from megazpp.base.errors import UserError
from megazpp.base.formatting import MEGA
from megazpp.base.program import exit_on_signals, flags_of, program

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNLIMITED = "unlimited"
SMALLEST_BURST, BURST_SECONDS, QUEUE_LATENCY = 128_000, 0.004, "50ms"  # a burst below some packets' size would stall
OWN_NAMES = re.compile(r"mz(\d+)(br|n\d+|b\d+)")
SYS_CLASS_NET = Path("/sys/class/net")
ETC_NETNS = Path("/etc/netns")  # `ip netns exec` puts a namespace's files here over those in /etc
FIRST_PORT = 29500


class UplinkBytes(NamedTuple):
    """The bytes that a node's link to the others has carried, headers included, from its interface's counters."""

    sent: int
    received: int


class EmulatedCluster:
    """The namespaces, the bridge and the rates, as a context manager.

    Args:
        nodes, ranks_per_node: the cluster's shape.
        rate: of each uplink in both directions, as `parse_rate` reads it.
    Raises:
        UserError: no root, no iproute2, or the kernel refuses; nothing is left behind then.
        ValueError: a shape or rate that means nothing.
    """

    def __init__(self, *, nodes: int, ranks_per_node: int, rate: str = UNLIMITED) -> None:
        for flag, value in (("--nodes", nodes), ("--ranks-per-node", ranks_per_node)):
            if value < 1 or value > 250:
                raise ValueError(f"{flag} {value} is not between 1 and 250")
        parse_rate(rate)
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self._rate, self._prefix = rate, f"mz{os.getpid()}"
        self._jobs: list[RankProcesses] = []

    def __enter__(self) -> EmulatedCluster:
        check_machine()
        remove_leftovers()
        try:
            self._make()
            self.set_rate(self._rate)
        except BaseException:
            with undisturbed():
                remove_network(self._prefix)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with undisturbed():
            for job in self._jobs:
                job.stop()
            remove_network(self._prefix)

    def set_rate(self, rate: str) -> None:
        """Limit all uplinks, both directions, from now on; running jobs go on."""
        bits = parse_rate(rate)
        for node in range(self.nodes):
            for place in (["-n", f"{self._prefix}n{node}"], []):
                device = f"{self._prefix}{'v' if place else 'b'}{node}"
                if bits is None:
                    _run("tc", *place, "qdisc", "del", "dev", device, "root", may_fail=True)
                    continue
                burst = int(max(SMALLEST_BURST, bits / 8 * BURST_SECONDS))
                limit = ("rate", f"{bits:.0f}bit", "burst", str(burst), "latency", QUEUE_LATENCY)
                _run("tc", *place, "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def uplink_bytes(self) -> list[UplinkBytes]:
        """The bytes that each node's uplink has carried so far."""
        found = []
        for node in range(self.nodes):  # the counters are of the bridge's end: it receives what the node sends
            counters = SYS_CLASS_NET / f"{self._prefix}b{node}" / "statistics"
            sent, received = (int((counters / f"{name}_bytes").read_text()) for name in ("rx", "tx"))
            found.append(UplinkBytes(sent, received))
        return found

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> RankProcesses:
        """Start `command` once per rank, in the environment that torchrun would give it.

        Args:
            command: the program and its arguments.
            pass_fds: file descriptors that rank 0 inherits.
        """
        name = self._prefix
        sites = [
            RankSite(prefix=("ip", "netns", "exec", f"{name}n{node}"), env={"GLOO_SOCKET_IFNAME": f"{name}v{node}"})
            for node in range(self.nodes)
        ]
        # a port of its own for each job: the last one's may still be closing
        master = master_variables(_address(0), FIRST_PORT + len(self._jobs))
        job = RankProcesses(command, self.ranks_per_node, sites=sites, pass_fds=pass_fds)
        self._jobs.append(job.start(master))
        return job

    def _make(self) -> None:
        bridge = f"{self._prefix}br"
        names = [f"127.0.0.1 localhost {socket.gethostname()}"]
        names += [f"{form}{_address(node)} node{node}" for node in range(self.nodes) for form in ("", "::ffff:")]
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for node in range(self.nodes):
            space, inner, outer = (f"{self._prefix}{kind}{node}" for kind in "nvb")
            _run("ip", "netns", "add", space)
            (ETC_NETNS / space).mkdir(parents=True)
            (ETC_NETNS / space / "hosts").write_text("\n".join(names) + "\n")
            _run("ip", "link", "add", inner, "netns", space, "type", "veth", "peer", "name", outer)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            # no IPv6: its neighbour discovery would be traffic of nobody's
            _run("ip", "netns", "exec", space, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "address", "add", f"{_address(node)}/24", "dev", inner)
            _run("ip", "-n", space, "link", "set", inner, "up")


def parse_rate(rate: str) -> float | None:
    """Bits per second of "500mbit", "1.5gbit", ...; None for "unlimited".

    Raises:
        ValueError: something else.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--rate {rate} is neither a rate like 500mbit or 1gbit nor {UNLIMITED}")
    return float(match[1]) * RATE_UNITS[match[2]]


def check_machine() -> None:
    """Raise a UserError if this process cannot make network namespaces; makes nothing."""
    if os.geteuid() != 0:
        raise UserError("emulating a cluster makes network namespaces, which needs root: run it with sudo")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise UserError(f"emulating a cluster needs iproute2, and {' and '.join(missing)} cannot be found")


def remove_leftovers() -> list[str]:
    """Remove what processes that are gone have left; returns the prefixes of their names."""
    present = [name for kind in ("netns", "link") for name in _own_names(kind)]
    pids = {int(match[1]) for match in map(OWN_NAMES.fullmatch, present) if match}
    gone = [f"mz{pid}" for pid in sorted(pids) if not Path(f"/proc/{pid}").exists()]
    for prefix in gone:
        remove_network(prefix)
    return gone


def remove_network(prefix: str) -> None:
    """End what still runs in the namespaces of `prefix` and remove them, the links and the bridge."""
    spaces = [name for name in _own_names("netns") if name.startswith(f"{prefix}n")]
    for space in spaces:
        for pid in _run("ip", "netns", "pids", space, may_fail=True).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for link in _own_names("link"):
        if re.fullmatch(rf"{prefix}(b\d+|br)", link):
            _run("ip", "link", "del", link, may_fail=True)  # with it goes the end inside the namespace
    for space in spaces:
        _run("ip", "netns", "del", space, may_fail=True)
        shutil.rmtree(ETC_NETNS / space, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody else's files are in it, or it never was
        ETC_NETNS.rmdir()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Clean up without being interrupted; the commands it runs inherit that."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_names(kind: str) -> list[str]:
    lines = _run("ip", "netns", "list") if kind == "netns" else "\n".join(p.name for p in SYS_CLASS_NET.iterdir())
    return [line.split()[0] for line in lines.splitlines() if line and OWN_NAMES.fullmatch(line.split()[0])]


def _address(node: int) -> str:
    return f"10.88.0.{node + 1}"


def _run(*command: str, may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise UserError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


@program
def main(argv: list[str]) -> int:
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the cluster")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each node")
    parser.add_argument("--rate", default=UNLIMITED, help=f"of each uplink and direction: 500mbit, 1gbit, {UNLIMITED}")
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs have left")
    parser.add_argument("command", nargs="*", help="a Python program of ours and its flags, after --")
    args = parser.parse_args(argv)
    exit_on_signals()
    if args.clean:
        check_machine()
        print("removed: " + (", ".join(remove_leftovers()) or "nothing was left"))
        return 0
    if not args.command or not Path(args.command[0]).is_file():
        raise UserError("give a Python program that exists after --, like -- pretrain_gpt.py --zeropp")
    with EmulatedCluster(nodes=args.nodes, ranks_per_node=args.ranks_per_node, rate=args.rate) as cluster:
        started = time.monotonic()
        code = cluster.start([sys.executable, *args.command]).wait()
        seconds = time.monotonic() - started
        for node, carried in enumerate(cluster.uplink_bytes()):
            sent, received = carried.sent / MEGA, carried.received / MEGA
            print(f"uplink of node {node}: sent {sent:.3f} MB, received {received:.3f} MB in {seconds:.1f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
