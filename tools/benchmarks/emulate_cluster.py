"""Run a program on one machine as an emulated cluster of N nodes x L ranks, with rate-limited links between the nodes.

    python tools/benchmarks/emulate_cluster.py --nodes 2 --ranks-per-node 4 --rate 500mbit -- pretrain_gpt.py --zeropp

Each node is a network namespace with its own host name. A veth pair connects it to a bridge, which is in a separate
namespace. Both ends of the pair have a token bucket filter (`tc tbf`), so --rate limits a node's sent and received
traffic. Ranks of the same node communicate over the loopback of their namespace, which is not limited. Needs root and
iproute2 (`ip`, `tc`).

    node 0 [lo, eth0] ==tbf== node0 \\
                                     bridge
    node 1 [lo, eth0] ==tbf== node1 /

Each namespace has a process that keeps it alive. The kernel kills these processes and all ranks when this program ends,
so nothing is left behind, even after `kill -9`.
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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.program import EXIT_USER_ERROR, MEGA, UserError, end_with, exit_on_signals, flags_of, program
from megazpp.parallel.launch import Workers, describe_failure, first_failure
from megazpp.parallel.store import POLL_SECONDS

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNLIMITED = "unlimited"
# A limited link may send the bytes of BURST_SECONDS at once, but at least SMALLEST_BURST bytes, because it would stall
# with a burst of less than a few packets. Packets that would wait for longer than QUEUE_LATENCY are dropped.
SMALLEST_BURST, BURST_SECONDS, QUEUE_LATENCY = 128_000, 0.004, "50ms"
FIRST_PORT = 29500
LAST_CHARACTERS = 4000  # number of characters shown from the end of a rank's stderr
NO_IPV6 = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"  # else IPv6 neighbor discovery counts as traffic
NAME = "echo > /proc/sys/kernel/hostname "  # command of a shell that sets the host name
# Shell script of the process that keeps a namespace alive. It prints "ready" when the namespace can be used.
HOLD = f"mount -t sysfs sysfs /sys; {NO_IPV6}; ip link set lo up; echo ready; exec sleep infinity"


class UplinkBytes(NamedTuple):
    """The bytes, headers included, that a node has sent to and received from other nodes."""

    sent: int
    received: int


class RankProcesses(Workers):
    """The processes of a command that runs once per rank of several emulated nodes.

    Only rank 0's output is shown. The stderr of the other ranks is stored and shown if the job fails.

    Args:
        command: program and arguments of each rank.
        ranks_per_node: number of ranks per node.
        prefixes: words in front of the command for each node, for instance to enter its namespace.
        interface: network interface through which ranks communicate.
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
        """Start the ranks, each limited to one thread, with the store of rank 0 at this address and port."""
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": self._interface}
        return self.start({**place, "OMP_NUM_THREADS": "1"})

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the process of one rank on an emulated node, with the environment variables `env`."""
        if rank:
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115  (it must live as long as the rank)
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
        """Check the job once without blocking, and return its exit code, or None while it runs.

        If a rank has failed, the other ranks are killed and the reason is printed. The job's exit code is then the code
        with which the first failed rank ended, or 128 + n if signal n killed that rank.
        """
        if self._exit_code is None:
            failures = self.failures()
            if failures is not None:
                self.stop()
                self._exit_code = self._report(failures) if failures else 0
        return self._exit_code

    def wait(self) -> int:
        """Wait for the end of the job, and return its exit code as `poll` does."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def _report(self, failures: Mapping[int, int]) -> int:
        """Print why the job failed, unless rank 0 has printed it, and return the exit code.

        `failures` are nonzero exit codes by rank.
        """
        if EXIT_USER_ERROR in failures.values():  # rank 0 has already printed the message
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
    """Start the ranks of several nodes without namespaces, so that all of them communicate over the loopback.

    Args:
        command: program and arguments of each rank.
        nodes: number of nodes.
        ranks_per_node: number of ranks per node.
        pass_fds: file descriptors that rank 0 inherits.
    """
    with socket.socket() as probe:  # lets the kernel choose a free port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = RankProcesses(command, ranks_per_node, prefixes=[()] * nodes, interface="lo", pass_fds=pass_fds)
    return job.start_at("127.0.0.1", port)


class EmulatedCluster:
    """A context manager that creates the namespaces, the bridge and the rate limits, and removes them at the end.

    Args:
        nodes: number of nodes, at most 250.
        ranks_per_node: number of ranks per node, at most 250.
        rate: limit of each node's traffic, separately for both directions, in the format of `parse_rate`.
    Raises:
        UserError: root or iproute2 is missing, or the kernel rejects a command. Nothing is left behind.
        ValueError: a size or the rate is invalid.
    """

    def __init__(self, *, nodes: int, ranks_per_node: int, rate: str = UNLIMITED) -> None:
        for flag, value in (("--nodes", nodes), ("--ranks-per-node", ranks_per_node)):
            if value < 1 or value > 250:
                raise ValueError(f"{flag} {value} is not between 1 and 250")
        parse_rate(rate)
        self.nodes, self.ranks_per_node, self._rate = nodes, ranks_per_node, rate
        self._jobs: list[RankProcesses] = []
        self._holders: list[subprocess.Popen[str]] = []  # a process per namespace: first the nodes', then the bridge's

    def __enter__(self) -> EmulatedCluster:
        if os.geteuid() != 0:
            raise UserError("emulating a cluster creates network namespaces, which needs root: run it with sudo")
        missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
        if missing:
            raise UserError(f"emulating a cluster needs iproute2, but {' and '.join(missing)} cannot be found")
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
        """Change the rate limit of the link between each node and the bridge, for both directions of the link.

        Jobs may be running meanwhile. `rate` has the format of `parse_rate`; UNLIMITED removes the limit.
        """
        bits = parse_rate(rate)
        for node in range(self.nodes):
            # A filter limits only what a device sends, so both ends of a veth pair get one.
            for where, device in ((node, "eth0"), (self.nodes, f"node{node}")):
                if bits is None:
                    self.run(where, f"tc qdisc del dev {device} root 2>/dev/null || true")
                    continue
                burst = int(max(SMALLEST_BURST, bits / 8 * BURST_SECONDS))
                limit = f"rate {bits:.0f}bit burst {burst} latency {QUEUE_LATENCY}"
                self.run(where, f"tc qdisc replace dev {device} root tbf {limit}")

    def uplink_bytes(self) -> list[UplinkBytes]:
        """Return the bytes that each node has exchanged with other nodes so far."""
        links = {link["ifname"]: link["stats64"] for link in json.loads(self.run(self.nodes, "ip -json -s link show"))}
        # The bridge's ends of the links receive the bytes that a node has sent.
        found = [links[f"node{node}"] for node in range(self.nodes)]
        return [UplinkBytes(sent=end["rx"]["bytes"], received=end["tx"]["bytes"]) for end in found]

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> RankProcesses:
        """Start `command` once per rank, with the environment variables that torchrun would set.

        Args:
            command: program and arguments.
            pass_fds: file descriptors that rank 0 inherits.
        """
        prefixes = [self.inside(node) for node in range(self.nodes)]
        job = RankProcesses(command, self.ranks_per_node, prefixes=prefixes, interface="eth0", pass_fds=pass_fds)
        # Each job gets a different port, because the previous job's port may still be closing.
        self._jobs.append(job.start_at(_address(0), FIRST_PORT + len(self._jobs)))
        return job

    def _make(self) -> None:
        """Create the namespaces, then the bridge and the veth pairs, and give the nodes addresses and host names.

        Raises:
            UserError: a namespace cannot be created, or a command of `ip` fails.
        """
        lines = [f"127.0.0.1 localhost {socket.gethostname()}"]
        # The file names each address in two forms, because IPv6 sockets report an IPv4 address a as ::ffff:a.
        lines += [f"{form}{_address(node)} node{node}" for node in range(self.nodes) for form in ("", "::ffff:")]
        with tempfile.NamedTemporaryFile("w") as hosts:
            hosts.write("\n".join(lines) + "\n")
            hosts.flush()
            hold = f"mount --bind {shlex.quote(hosts.name)} /etc/hosts; {HOLD}"
            for number in range(self.nodes + 1):
                holder = subprocess.Popen(
                    ["unshare", "--net", "--mount", "--uts", "sh", "-ec", f"{NAME}node{number}; {hold}"],
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
                    raise UserError(f"cannot create a network namespace: {(line + holder.stdout.read()).strip()}")
        self.run(self.nodes, "ip link add name bridge type bridge && ip link set bridge up")
        for node in range(self.nodes):
            ends = f"name node{node} type veth peer name eth0 netns {self._holders[node].pid}"
            self.run(self.nodes, f"ip link add {ends} && ip link set node{node} master bridge up")
            self.run(node, f"ip address add {_address(node)}/24 dev eth0 && ip link set eth0 up")

    def inside(self, namespace: int) -> tuple[str, ...]:
        """Return the words in front of a command that make it run in a namespace.

        `namespace` is the index of a node, or the number of nodes for the bridge's namespace. The command starts in
        the current folder. Without `--wd` it would start in /, where relative paths are wrong.
        """
        target = str(self._holders[namespace].pid)
        return ("nsenter", "--net", "--mount", "--uts", f"--wd={os.getcwd()}", "--target", target)

    def run(self, namespace: int, script: str) -> str:
        """Run a shell script in a namespace, as numbered by `inside`, and return its stdout; UserError if it fails."""
        done = subprocess.run([*self.inside(namespace), "sh", "-c", script], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"`{script}` failed: {done.stderr.strip()}")
        return done.stdout


def parse_rate(rate: str) -> float | None:
    """Convert a rate such as "500mbit" or "1.5gbit" to bits per second, and "unlimited" to None.

    Raises:
        ValueError: the text has a different format, or the rate is zero.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--rate {rate} is neither a rate like 500mbit or 1gbit nor {UNLIMITED}")
    return float(match[1]) * RATE_UNITS[match[2]]


def _address(node: int) -> str:
    """Return the IP address of a node of the emulated cluster, for example "10.88.0.1" for node 0."""
    return f"10.88.0.{node + 1}"


@program
def main(argv: list[str]) -> int:
    """Run the command on an emulated cluster, print each node's traffic, and return the command's exit code."""
    parser = flags_of(__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="number of ranks on each node (default: 4)")
    parser.add_argument(
        "--rate", default=UNLIMITED, help=f"limit per node and direction: 500mbit, 1gbit, ... (default: {UNLIMITED})"
    )
    parser.add_argument("command", nargs="*", help="Python program and its flags, after --")
    args = parser.parse_args(argv)
    exit_on_signals()
    if not args.command or not Path(args.command[0]).is_file():
        raise UserError("give a Python program that exists after --, for example: -- pretrain_gpt.py --zeropp")
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
