"""Run a program of ours as a cluster of N nodes x L ranks on one machine, over links that are really slow.

    python tools/emulate_cluster.py --nodes 2 --ranks-per-node 4 --rate 500mbit -- pretrain_gpt.py --zeropp

Each node is a network namespace whose one way out is a veth pair into a bridge, which has a namespace of its own. Both
ends of the pair have a token bucket (`tc tbf`), so `--rate` holds for what a node sends and for what it receives. Ranks
of one node reach each other through their namespace's own loopback, which no rate limits. Needs root and iproute2
(`ip`, `tc`).

    node 0 [lo, eth0] ==tbf== node0 \\
                                     bridge
    node 1 [lo, eth0] ==tbf== node1 /

A namespace is held by a process that the kernel ends with this one, and so are the ranks: however this program ends,
`kill -9` included, nothing stays behind.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Self

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.program import EXIT_USER_ERROR, MEGA, UserError, end_with, exit_on_signals, flags_of, program
from megazpp.parallel.launch import POLL_SECONDS, Workers, describe_failure, first_failure

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNLIMITED = "unlimited"
SMALLEST_BURST, BURST_SECONDS, QUEUE_LATENCY = 128_000, 0.004, "50ms"  # a burst below some packets' size would stall
FIRST_PORT = 29500
LAST_CHARACTERS = 4000  # shown of what a rank wrote
NO_IPV6 = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"  # its neighbour discovery would be traffic of nobody's
HOLD = f"mount -t sysfs sysfs /sys; {NO_IPV6}; ip link set lo up; echo ready; exec sleep infinity"


class UplinkBytes(NamedTuple):
    """The bytes, headers included, that a node's link to the others has carried."""

    sent: int
    received: int


class RankProcesses(Workers):
    """Runs `command` once per rank of several nodes, all on this machine.

    Only rank 0's output is shown; what the others write to stderr is kept, and shown when the job fails.

    Args:
        prefixes: words in front of the command, by node.
        interface: through which ranks reach each other.
        pass_fds: file descriptors that rank 0 inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks_per_node: int,
        *,
        prefixes: Sequence[Sequence[str]],
        interface: str,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(command, ranks_per_node, nodes=len(prefixes))
        self._prefixes, self._interface, self._pass_fds = prefixes, interface, pass_fds
        self._errors: list[IO[bytes]] = []
        self._exit_code: int | None = None

    def start_at(self, address: str, port: int) -> Self:
        """Start the ranks, one thread for each; rank 0 has their store at this address."""
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": self._interface}
        return self.start({**place, "OMP_NUM_THREADS": "1"})

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if rank:
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115  (lives as long as the rank)
        return subprocess.Popen(
            [*self._prefixes[node], *self.command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if rank else None,
            stderr=self._errors[-1] if rank else None,
            pass_fds=() if rank else self._pass_fds,
            preexec_fn=functools.partial(end_with, os.getpid()),
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """The exit code, None while the job runs: that of the rank that failed first, 128 + n after signal n.

        When a rank has failed, the others are ended and the reason is printed.
        """
        if self._exit_code is None:
            failures = self.failures()
            if failures is not None:
                self.stop()
                self._exit_code = self._report(failures) if failures else 0
        return self._exit_code

    def wait(self) -> int:
        """The exit code of the job at its end."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def _report(self, failures: Mapping[int, int]) -> int:
        if EXIT_USER_ERROR in failures.values():  # rank 0 has said what is wrong
            return EXIT_USER_ERROR
        for rank, errors in enumerate(self._errors, start=1):
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            if text:
                print(f"--- rank {rank} wrote:\n{text[-LAST_CHARACTERS:]}", file=sys.stderr)
        print(f"{describe_failure(failures)}; the job is over", file=sys.stderr)
        code = failures[first_failure(failures)]
        return code if code > 0 else 128 - code


def start_on_this_machine(
    command: Sequence[str], *, nodes: int, ranks_per_node: int, pass_fds: Sequence[int] = ()
) -> RankProcesses:
    """Start ranks that all talk through the loopback, as many as `nodes` would have."""
    with socket.socket() as probe:  # a port that nothing listens on
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = RankProcesses(command, ranks_per_node, prefixes=[()] * nodes, interface="lo", pass_fds=pass_fds)
    return job.start_at("127.0.0.1", port)


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
        self.nodes, self.ranks_per_node, self._rate = nodes, ranks_per_node, rate
        self._jobs: list[RankProcesses] = []
        self._holders: list[subprocess.Popen[str]] = []  # of the namespaces: the nodes', then the bridge's

    def __enter__(self) -> EmulatedCluster:
        if os.geteuid() != 0:
            raise UserError("emulating a cluster makes network namespaces, which needs root: run it with sudo")
        missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
        if missing:
            raise UserError(f"emulating a cluster needs iproute2, and {' and '.join(missing)} cannot be found")
        try:
            self._make()
            self.set_rate(self._rate)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self._jobs:
            job.stop()
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def set_rate(self, rate: str) -> None:
        """Limit all uplinks, both directions, from now on; running jobs go on."""
        bits = parse_rate(rate)
        for node in range(self.nodes):
            for where, device in ((node, "eth0"), (self.nodes, f"node{node}")):
                if bits is None:
                    self._run(where, f"tc qdisc del dev {device} root 2>/dev/null || true")
                    continue
                burst = int(max(SMALLEST_BURST, bits / 8 * BURST_SECONDS))
                limit = f"rate {bits:.0f}bit burst {burst} latency {QUEUE_LATENCY}"
                self._run(where, f"tc qdisc replace dev {device} root tbf {limit}")

    def uplink_bytes(self) -> list[UplinkBytes]:
        """The bytes that each node's uplink has carried so far."""
        links = {link["ifname"]: link["stats64"] for link in json.loads(self._run(self.nodes, "ip -json -s link show"))}
        found = [links[f"node{node}"] for node in range(self.nodes)]  # the bridge's ends, which receive what nodes send
        return [UplinkBytes(sent=end["rx"]["bytes"], received=end["tx"]["bytes"]) for end in found]

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> RankProcesses:
        """Start `command` once per rank, in the environment that torchrun would give it."""
        prefixes = [self._inside(node) for node in range(self.nodes)]
        job = RankProcesses(command, self.ranks_per_node, prefixes=prefixes, interface="eth0", pass_fds=pass_fds)
        # a port of its own for each job: the last one's may still be closing
        self._jobs.append(job.start_at(_address(0), FIRST_PORT + len(self._jobs)))
        return job

    def _make(self) -> None:
        lines = [f"127.0.0.1 localhost {socket.gethostname()}"]
        lines += [f"{form}{_address(node)} node{node}" for node in range(self.nodes) for form in ("", "::ffff:")]
        with tempfile.NamedTemporaryFile("w") as hosts:
            hosts.write("\n".join(lines) + "\n")
            hosts.flush()
            hold = f"mount --bind {shlex.quote(hosts.name)} /etc/hosts; {HOLD}"
            for _ in range(self.nodes + 1):
                holder = subprocess.Popen(
                    ["unshare", "--net", "--mount", "sh", "-ec", hold],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=functools.partial(end_with, os.getpid()),
                    start_new_session=True,
                )
                self._holders.append(holder)
            for holder in self._holders:
                assert holder.stdout is not None
                if (line := holder.stdout.readline()) != "ready\n":
                    raise UserError(f"a network namespace cannot be made: {(line + holder.stdout.read()).strip()}")
        self._run(self.nodes, "ip link add name bridge type bridge && ip link set bridge up")
        for node in range(self.nodes):
            ends = f"name node{node} type veth peer name eth0 netns {self._holders[node].pid}"
            self._run(self.nodes, f"ip link add {ends} && ip link set node{node} master bridge up")
            self._run(node, f"ip address add {_address(node)}/24 dev eth0 && ip link set eth0 up")

    def _inside(self, namespace: int) -> tuple[str, ...]:
        """The words that run a command in a node's namespace, or as number `nodes` in the bridge's."""
        return ("nsenter", "--net", "--mount", "--target", str(self._holders[namespace].pid))

    def _run(self, namespace: int, script: str) -> str:
        done = subprocess.run([*self._inside(namespace), "sh", "-c", script], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"`{script}` failed: {done.stderr.strip()}")
        return done.stdout


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


def _address(node: int) -> str:
    return f"10.88.0.{node + 1}"


@program
def main(argv: list[str]) -> int:
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the cluster")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each node")
    parser.add_argument("--rate", default=UNLIMITED, help=f"of each uplink and direction: 500mbit, 1gbit, {UNLIMITED}")
    parser.add_argument("command", nargs="*", help="a Python program of ours and its flags, after --")
    args = parser.parse_args(argv)
    exit_on_signals()
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
