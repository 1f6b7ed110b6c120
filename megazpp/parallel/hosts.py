"""The launchers of a job on several hosts: how they find each other, and how they end together.

    pretrain_gpt.py --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 ...         the same command on each host

The launcher of node 0 holds the job's store, a TCPStore that listens only at --master-addr. Each launcher connects to
the store, compares its number of ranks with node 0's, and starts its workers when all launchers have joined. The first
launcher whose host fails writes the reason to the store. The others print the reason within seconds, and end their
workers.

A call on the store blocks for as long as the link is down. One thread of each launcher therefore makes all of these
calls, and the main thread waits for this thread with deadlines. If a link is lost during the run, the watchdogs of the
ranks (watchdog.py) end the ranks on each host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch.distributed as dist

from megazpp.base.address import Address, is_loopback
from megazpp.base.program import JobError, say, say_at_terminal
from megazpp.parallel.store import CONNECT_SECONDS, POLL_SECONDS, FirstFailure, RankInfo, wait_until

WAIT_SECONDS = 15.0  # time for the other hosts to start, before a launcher prints what may be wrong
TELL_SECONDS = 20.0  # longest time for which a launcher that fails before it starts workers tries to tell other hosts
# Longest time for which node 0's launcher, at the end of the job, keeps the store open for launchers that have not left
END_SECONDS = 10.0
# Longest time for which a launcher that leaves the job waits until its last message is in the store
LOST_SECONDS = 3.0
KILLED_SECONDS = 0.5  # interval at which node 0 checks whether the processes of another host have been killed
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # environment variables that select the network interface
# Keys in the job's store by which launchers inform each other: JOINED and LEFT count hosts that have joined and left,
# and NOTE is a text to print when a host has received a signal. FAILED is only a key of `Hosts._sent`: the launcher's
# thread writes this text to the record of the job's first failure (`FirstFailure` in store.py).
JOINED, LEFT, NOTE, FAILED = "joined", "left", "note", "failed"


@dataclass(kw_only=True)
class Hosts:
    """The hosts of a job with --nnodes, and the connection of this host's launcher to the other launchers.

    Attributes:
        num_nodes: number of hosts (--nnodes).
        node_rank: index of this host (--node-rank); host 0 holds the store.
        address: name or IP address of host 0 (--master-addr).
        port: TCP port of the store (--master-port).
        ranks_per_node: number of ranks on each host.
        patience_seconds: longest time to wait until all hosts have joined.
        name: name of this host in messages.
        over: reason why the job has ended: the first failure if it has occurred on another host, or a lost connection
            to the store; None while the job runs.
    """

    num_nodes: int
    node_rank: int
    address: str
    port: int
    ranks_per_node: int = 1
    patience_seconds: float = 600.0
    name: str = field(default_factory=socket.gethostname)
    over: str | None = None

    def __post_init__(self) -> None:
        self._obstacle = ""  # reason why the last attempt to connect to host 0's store failed; "" before an attempt
        # Network interface with which this host reaches the store, for gloo and NCCL; None before the connection
        self._interface: str | None = None
        self._own_address = ""  # IP address from which this host has connected to the store; "" on node 0
        self._first = ""  # name of host 0; "" before this host has joined
        self._sent: dict[str, str] = {}  # messages that the launcher's thread must still write to the store, by key
        # The launcher's thread sets `_connected` when it has connected to the store. It sets `_complete` when all hosts
        # have joined the job.
        self._connected, self._complete = threading.Event(), threading.Event()
        self._until = math.inf  # time, on the monotonic clock, after which the thread stops trying to reach the store
        # `end` sets `_leaving` to ask the launcher's thread to leave the job. The thread sets `_done` when it ends
        self._leaving, self._done = threading.Event(), threading.Event()
        # Error in this host's flags, found by the thread that uses the store. `gather` raises it; None without an error
        self._mistake: ValueError | None = None
        # Only node 0 uses the next three attributes. `_others`: name and IP address of each other host by --node-rank.
        # `_seen`: node ranks of the hosts whose connection to the store node 0 has seen since all hosts have joined.
        # `_killed`: node ranks in `_seen` of the hosts that have lost all connections, because their processes were
        # killed
        self._others: dict[int, tuple[str, str]] = {}
        self._seen, self._killed = set[int](), set[int]()

    @property
    def where(self) -> str:
        """The address of the job's store for messages, "ADDRESS:PORT"."""
        return str(Address(self.address, self.port))

    # ---- methods that the launcher's main thread calls ------------------------------------------------------------

    def gather(self) -> dict[str, str]:
        """Wait until all hosts have joined the job, and return the environment variables for this host's workers.

        The variables are the address of the store and, unless the user has set them, the network interfaces of gloo
        and NCCL.

        Raises:
            ValueError: the flags of two hosts differ, the store cannot be opened or reached, or not all hosts have
                joined within `patience_seconds`.
            JobError: another host has failed.
        """
        first, total = self.node_rank * self.ranks_per_node, self.num_nodes * self.ranks_per_node
        ranks = f"rank {first}" if self.ranks_per_node == 1 else f"ranks {first} to {first + self.ranks_per_node - 1}"
        place = f"{self.name}: node {self.node_rank} of {self.num_nodes}, {ranks} of {total}"
        say(f"{place}; {'waiting for the others' if self.node_rank == 0 else 'connecting to node 0'} at {self.where}")
        self._start(join=True)
        started, hinted = time.monotonic(), False
        while not self._complete.wait(POLL_SECONDS):
            seconds = time.monotonic() - started
            if self._mistake is not None:
                raise self._mistake
            if self.over is not None:
                raise JobError(self.over)
            if seconds > WAIT_SECONDS and not hinted:
                hinted = True
                limit = f"{self.name} has waited {seconds:.0f} s and goes on up to {self.patience_seconds:g} s"
                say(f"{limit}: {self._waiting()}")
            if seconds > self.patience_seconds:
                raise ValueError(f"{self._waiting()}; {self.name} has waited {seconds:.0f} s")
        say(f"{place}; all hosts are there" + (f"; {self._first} prints the log" if self.node_rank else ""))
        variables = {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
        if self._interface is not None:
            chosen = {name for name in INTERFACES if name not in os.environ}
            variables |= dict.fromkeys(chosen, self._interface)
        return variables

    def note(self, signal_name: str) -> None:
        """Make the other hosts print that this host has received the signal `signal_name`. This does not block."""
        self._sent[NOTE] = (
            f"{self.name} has received {signal_name}: all hosts end; training finishes its step and saves before"
        )

    def end(self, reason: str, *, seconds: float = LOST_SECONDS) -> None:
        """Leave the job. Host 0, which holds the store, waits up to END_SECONDS until the other hosts have left.

        Args:
            reason: reason for which this host has failed; "" if it has not failed. The other hosts print this reason,
                unless the store already has a first failure, for example from a rank of this host with more details.
            seconds: longest time to connect to the store and to write `reason`.
        """
        if reason:
            self._sent[FAILED] = f"{self.name}: {reason}"
        self._until = time.monotonic() + seconds
        self._leaving.set()
        self._done.wait(max(seconds, END_SECONDS) if self.node_rank == 0 else seconds)

    def tell(self, reason: str) -> None:
        """Tell the launchers of the other hosts that this host has failed before its workers were started.

        `reason` is the text that these launchers print. The method tries for at most TELL_SECONDS to reach the store.
        """
        say_at_terminal(f"{self.name}: telling the other hosts, for at most {TELL_SECONDS:g} s; Ctrl-C ends this")
        self._start(join=False)
        with contextlib.suppress(KeyboardInterrupt):
            self.end(reason, seconds=TELL_SECONDS)

    def _waiting(self) -> str:
        """Return a text for the user: which hosts this host waits for or cannot reach, and what may be wrong."""
        if self._connected.is_set() or self.node_rank == 0:
            firewall = f"; a firewall here may drop port {self.port}" if self.node_rank == 0 else ""
            return (
                f"--nnodes {self.num_nodes}: not all hosts have connected to {self.where} (start the same command on "
                f"each host, with its own --node-rank{firewall})"
            )
        return (
            f"--master-addr {self.address} --master-port {self.port} cannot be reached: {self._obstacle} (node 0 has "
            "not started, the address is wrong, or a firewall there drops the port)"
        )

    # ---- methods that run in a separate thread, the only one that uses the store ----------------------------------

    def _start(self, *, join: bool) -> None:
        """Start the thread that uses the store. `join` is False on a host that only tells the others of its failure."""
        threading.Thread(target=self._exchange, args=(join,), name="megazpp-hosts", daemon=True).start()

    def _exchange(self, join: bool) -> None:
        """Run this launcher's thread: open the store, join the job, exchange messages until the job ends, and leave.

        `join` is False on a host that only tells the others of its failure.
        """
        try:
            root = self._listen() if self.node_rank == 0 else self._connect()
            store = dist.PrefixStore("megazpp/hosts", root)
            failure = FirstFailure(root, RankInfo(started=False, world_size=self.num_nodes), host=self.name)
            self._connected.set()
            if join:
                self._join(store, failure)
            # `store.add(key, 0)` reads a counter. `printed` is the last NOTE that this launcher has printed or written.
            # `expected` is the number of hosts for which node 0 waits at the end: those that have joined the job or, if
            # node 0 itself does not join, all hosts.
            printed, expected, checked = "", self.num_nodes, 0.0
            while True:
                if self._complete.is_set() and self.node_rank == 0 and time.monotonic() > checked + KILLED_SECONDS:
                    self._find_killed(store)
                    checked = time.monotonic()
                leaving = self._leaving.is_set()
                if NOTE in self._sent:
                    printed = self._sent.pop(NOTE)
                    store.set(NOTE, printed)
                if FAILED in self._sent:
                    text = self._sent.pop(FAILED)
                    if failure.claim():
                        failure.write(text)
                self.over = self.over or failure.elsewhere
                if store.check([NOTE]) and (text := store.get(NOTE).decode()) != printed:
                    printed = text
                    say(text)
                if join and (expected := store.add(JOINED, 0)) == self.num_nodes and self._mistake is None:
                    self._complete.set()
                if leaving:
                    break
                time.sleep(POLL_SECONDS)
            store.set(f"{LEFT}/{self.node_rank}", "")
            store.add(LEFT, 1)
            # The store ends with node 0, so node 0 waits until the other hosts have left. `end` limits this wait.
            wait_until(lambda: self.node_rank != 0 or store.add(LEFT, 0) >= expected - len(self._killed))
        except ValueError as mistake:
            self._mistake = mistake
        except RuntimeError:
            self.over = f"{self.name}: the connection to node 0 ({self._first or self.address}, {self.where}) was lost"
        self._done.set()

    def _find_killed(self, store: dist.Store) -> None:
        """End the job if all connections of a host to the store are closed, although this host has not left the job.

        The kernel closes the connections of killed processes. If only the link is down, the connections stay open, and
        the watchdogs of the ranks end the job later. Node 0 calls this method.
        """
        connected = connected_to(self.port)
        if not self._others:
            found = [json.loads(store.get(f"host/{node}")) for node in range(1, self.num_nodes)]
            self._others = {node: (name, address) for node, (name, *_, address) in enumerate(found, start=1)}
        self._seen |= {node for node, (_, address) in self._others.items() if address in connected}
        lost = {node for node in self._seen if self._others[node][1] not in connected}
        if gone := {node for node in lost if not store.check([f"{LEFT}/{node}"])}:
            self._killed = gone
            names = ", ".join(self._others[node][0] for node in sorted(gone))
            if self.over is None:
                why = "all processes of the job have ended without notice, because they or the host were killed"
                self.over = self._sent[FAILED] = f"{names}: {why}"

    def _listen(self) -> dist.TCPStore:
        """Create the store of the job on this host, which is host 0.

        Raises:
            ValueError: this host does not have the address --master-addr, or the port --master-port is in use.
        """
        family, address = self._resolve()
        try:
            listener = socket.create_server((address, self.port), family=family)
        except OSError as error:
            flag = f"--master-addr {self.address}"
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(
                    f"{flag} is not an address of {self.name}: give --node-rank 0 to the machine with that address "
                    "(`ip -brief address` shows the addresses of a machine)"
                ) from None
            raise ValueError(
                f"{flag} --master-port {self.port}: {self.name} cannot listen there: {os.strerror(error.errno or 0)}; "
                "give another --master-port on all hosts"
            ) from None
        self._interface, self._first = interface_of(address), self.name
        return dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.patience_seconds),
            master_listen_fd=listener.detach(),
        )

    def _connect(self) -> dist.TCPStore:
        """Connect to the store of host 0, and retry until host 0 has created it.

        Raises:
            ValueError: the store has not been reached before the time `_until`.
        """
        _, address = self._resolve()
        while time.monotonic() < self._until:
            try:
                with socket.create_connection((address, self.port), CONNECT_SECONDS) as probe:
                    self._own_address = str(probe.getsockname()[0])
                    self._interface = interface_of(self._own_address)
                timeout = timedelta(seconds=self.patience_seconds)
                return dist.TCPStore(address, self.port, is_master=False, timeout=timeout)
            except OSError as error:
                self._obstacle = error.strerror or "no answer"
            time.sleep(POLL_SECONDS)
        raise ValueError(self._waiting())

    def _resolve(self) -> tuple[socket.AddressFamily, str]:
        """Resolve --master-addr, and return its address family and its IP address.

        Raises:
            ValueError: the name is unknown, or its IP address is a loopback address, which other hosts cannot reach.
        """
        flag = f"--master-addr {self.address}"
        try:
            family, *_, number = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ValueError(f"{flag} cannot be resolved: {error.strerror}; give an IP address") from None
        if is_loopback(str(number[0])) and not is_loopback(self.address):
            raise ValueError(
                f"{flag} is the loopback address {number[0]} on {self.name}, which other hosts cannot reach: give node "
                "0's IP address, which `ip -brief address` shows there"
            )
        return family, str(number[0])

    def _join(self, store: dist.Store, failure: FirstFailure) -> None:
        """Claim this host's --node-rank in the store, and compare --nnodes and --nproc with host 0's.

        This host does not join if these flags differ, which sets `_mistake`, or if another host has failed before host
        0 has joined.

        Raises:
            ValueError: another host already has this --node-rank. The other hosts keep waiting, so that this host can
                be started again with another number.
        """
        mine = [self.name, self.num_nodes, self.ranks_per_node, self._own_address]
        if store.add(f"claims/{self.node_rank}", 1) > 1:
            taken = json.loads(store.get(f"host/{self.node_rank}"))[0]
            raise ValueError(
                f"--node-rank {self.node_rank} is already taken by {taken}: give each host a different number from 0 "
                f"to {self.num_nodes - 1}"
            )
        store.set(f"host/{self.node_rank}", json.dumps(mine))
        # If a host has failed, node 0 may never join. `_exchange` then reads the reason of the failure.
        wait_until(lambda: store.check(["host/0"]) or failure.is_known)
        if not store.check(["host/0"]):
            return
        if self.node_rank != 0:
            self._first, *theirs = json.loads(store.get("host/0"))
            for flag, own, other in zip(("--nnodes", "--nproc"), mine[1:3], theirs, strict=False):
                if own != other:
                    differs = f"{flag} is {own} on {self.name}, but {other} on {self._first}"
                    self._mistake = ValueError(f"{differs}: give the same value on all hosts")
                    return
        store.add(JOINED, 1)


def connected_to(port: int) -> set[str]:
    """Return the IP addresses of the hosts that have an open TCP connection to a port of this process."""
    found = psutil.Process().net_connections("tcp")
    here = [each for each in found if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED]
    return {each.raddr.ip.removeprefix("::ffff:") for each in here}  # a prefix of IPv4 addresses at an IPv6 socket


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine with the given IP address, for example "eth1".

    Returns None for a loopback address, and if no interface has the address.
    """
    if is_loopback(address):
        return None
    # A local IPv6 address ends with "%" and the interface.
    found = ((each.address.partition("%")[0], name) for name, of in psutil.net_if_addrs().items() for each in of)
    return next((name for own, name in found if own == address), None)
