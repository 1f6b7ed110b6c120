"""The connections of one rank in elastic DiLoCo: to the coordinator, and to ranks of other groups. No torch.

Threads keep a connection to the coordinator, fetch contributions (packed outer gradients) of other groups, and serve
contributions and snapshots of the outer state. A contribution consists of one message per rank, which has the outer
gradient of the rank's shards. A rank exchanges messages and snapshots only with the ranks of the same index in other
groups. The training loop publishes a contribution, waits for commits, and reads the messages of a commit.

A lost connection to the coordinator loses nothing. Each report to the coordinator is complete, and so is the first
state of the run that arrives on a new connection. Later states may leave out the commits, if these have not changed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megazpp.base.address import WILDCARDS, Address, parse_address
from megazpp.base.program import JobError, user_errors
from megazpp.elastic.rounds import HEARTBEAT_SECONDS, Record
from megazpp.elastic.wire import RETRY_SECONDS, AuthenticatedListener, Channel, WireError, connect

if TYPE_CHECKING:
    from megazpp.elastic.config import ElasticConfig

# Attributes of `Agent` that its reports to the coordinator contain
REPORTED = ("version", "fingerprint", "steps", "seconds", "trains", "unsent", "wants", "joined", "leaves", "sent_bytes")
REPORT_SECONDS = 0.25  # interval between two reports to the coordinator
FETCH_SECONDS = 10.0  # limit for each read and write of a connection between two groups
SNAPSHOT_SECONDS = 120.0  # limit for each read of a snapshot, which the peer first copies to its host memory


class OutError(JobError):
    """The error that ends this job because its group cannot start or continue to train in the elastic run.

    The text of the error says why. For example, the coordinator cannot be reached at the start, or has refused or
    removed the group.
    """


class Agent:
    """The connections of one rank to the coordinator of elastic DiLoCo and to ranks of other groups.

    Args:
        flags: flags of elastic DiLoCo, with the addresses and the secret of the run.
        hello: first message to the coordinator: name of the group, index of the rank, and the entries that
            `Rounds.connect` lists.
        most_bytes: largest number of bytes to accept from another group, which is the size of a snapshot.
        snapshot: function that returns a snapshot of this rank's outer state for another group: a record (version, id,
            merged steps and loss scale), and the bytes of the state. The agent calls the function in a thread.
        stopped: function that returns True once this rank has caught a stop signal. The agent then gives up its first
            connection to the coordinator.
        say: function that prints a log line.
    Attributes:
        state: last state of the run that the coordinator has sent, see `Rounds.state`; None before the first state.
        version, id: number and id of the version of this rank's outer state. The training loop sets these two and the
            next attributes up to `trains`, and the agent sends them to the coordinator.
        fingerprint: version and fingerprint of this rank's outer state; None before this rank has outer weights of the
            run.
        steps: number of training steps since the group's last published contribution.
        seconds: smoothed seconds per training step; None before the first step.
        wants: number of cells of samples for which the group has asked so far.
        joined: True once the group has outer weights of the run and can take part.
        leaves: True once the group leaves the run.
        unsent: True if the group has trained since its last contribution to the fragment of the model that the next
            version changes.
        trains: True while the training loop takes steps; the coordinator then expects steps from this group.
        sent, sent_bytes: number and bytes of the contributions and snapshots that this rank has sent to other groups.
    """

    def __init__(
        self,
        flags: ElasticConfig,
        hello: Record,
        *,
        most_bytes: int,
        snapshot: Callable[[], tuple[Record, bytes]],
        stopped: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        assert flags.diloco_coordinator is not None
        self._coordinator = parse_address(flags.diloco_coordinator, "--diloco-coordinator")
        self.group, self._flags, self._secret, self._hello = hello["group"], flags, flags.secret, hello
        self._most_bytes, self._snapshot, self._say = most_bytes, snapshot, say
        self._changed, self._state_at = threading.Condition(), 0.0
        self._channel: Channel | None = None
        self.state: Record | None = None
        # By id of a contribution: the contribution's message for ranks of this index. This rank has made the message if
        # the contribution is of this group; otherwise it has fetched the message from another group
        self._messages: dict[str, bytes] = {}
        # By id: description of each contribution of this group that no commit has merged yet
        self._published: dict[str, Record] = {}
        self._flying: set[str] = set()  # ids of the contributions that threads are fetching
        # By name of a group to which this rank's last connection failed: text with the group's address and the error
        self._unreached: dict[str, str] = {}
        self._failure: Exception | None = None
        self._closed = False
        self.version, self.id = hello["version"], hello["id"]
        self.steps, self.wants, self.joined, self.leaves, self.trains = 0, 0, False, False, False
        self.seconds: float | None = None
        self.unsent = False
        self.fingerprint: tuple[int, int] | None = None
        self._numbers, self.sent, self.sent_bytes = 0, 0, 0
        # Give up the first connection after one minute: the coordinator may start a little later than the groups.
        deadline = time.monotonic() + 6 * HEARTBEAT_SECONDS
        # A WireError means a wrong secret or another protocol, which a new attempt cannot correct: give up at once
        first = self._connect(lambda error: isinstance(error, WireError) or stopped() or time.monotonic() > deadline)
        with user_errors():
            host = Address(flags.host("diloco_listen") or first.local_host, 0)
            self._listener = AuthenticatedListener(host, self._secret, self._serve, flag="--diloco-listen")
        listens = self._listener.address
        own = first.local_host if listens.host in WILDCARDS else listens.host
        self._address = Address(flags.host("diloco_advertise") or own, listens.port)
        first.close()
        for work in (self._keep_connection, self._keep_reporting, self._keep_fetching):
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    # ---- methods that the training loop calls -------------------------------------------------------------------

    def wait(self, ready: Callable[[Record], Any], seconds: float | None = None) -> Any:
        """Wait until a state from the coordinator fulfills a condition.

        Args:
            ready: function of the state of the run; a true result ends the wait.
            seconds: limit of the wait; None waits without a limit.

        Returns:
            the true result of `ready`; None when `seconds` are over.

        Raises:
            OutError: this group cannot continue, for example because the coordinator has refused or removed it.
            Exception: the error that has ended a thread of this agent.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                found = None if self.state is None else ready(self.state)
                if found or (deadline is not None and time.monotonic() > deadline):
                    return found or None
                self._changed.wait(0.1)

    def tell(self, **values: Any) -> None:
        """Set attributes of this agent that its reports contain, and send a report to the coordinator at once."""
        with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
        self._report()

    def publish(self, data: bytes, *, tokens: float, steps: int) -> str:
        """Offer a contribution to the next outer step: report it to the coordinator, and serve it to other groups.

        Args:
            data: this rank's message of the contribution.
            tokens: tokens that the group has trained since its last contribution to this fragment.
            steps: training steps since the group's last contribution.

        Returns:
            the id of the contribution, which is the same on all ranks of the group.
        """
        digest = hashlib.sha256(data).hexdigest()  # before the lock: this may take seconds, and reports need the lock
        with self._changed:
            cid = f"{self._hello['incarnation']}.{self._numbers}"
            self._numbers += 1
            self._messages[cid] = data
            self._published[cid] = {"base": self.version, "tokens": tokens, "steps": steps, "digest": digest}
        self._report()
        return cid

    def messages_of(self, version: int) -> tuple[Record, list[bytes]] | None:
        """Return (record of the commit that made a version, messages of the contributions that the commit merged).

        The messages are in the order in which all ranks sum them. The result is None if the commit is not made yet, or
        this rank has not fetched all messages of the commit. Call this only after the first state has arrived.

        Raises:
            OutError: the other groups do not keep these messages any more.
        """
        assert self.state is not None
        commit, newest = self.state["commits"].get(str(version)), self.state["version"]
        if commit is None and version <= newest:
            raise OutError(
                f"this group has version {version - 1}, and the run has version {newest}: other groups do not keep the "
                f"messages of version {version} any more; start this group's job again"
            )
        if commit is None or any(entry["cid"] not in self._messages for entry in commit["set"]):
            return None
        return commit, [self._messages[entry["cid"]] for entry in commit["set"]]

    def fetch_snapshot(self, address: Address) -> tuple[Record, bytearray]:
        """Fetch a snapshot of the outer state from the rank at `address`, which is a rank of another group.

        Returns:
            a record with version, id, merged steps and loss scale of the snapshot, and the snapshot's bytes.
        """
        return self._fetch(address, {"wants": "snapshot"}, seconds=SNAPSHOT_SECONDS)

    def seconds_to_quorum(self) -> float | None:
        """Return the seconds until the coordinator expects the quorum of this rank's round.

        None if the coordinator has no estimate of this time, if this rank is not connected to the coordinator, or if
        the run has a newer version than this rank.
        """
        state = self.state
        if state is None or self._channel is None or state["version"] != self.version or state["quorum_in"] is None:
            return None
        return state["quorum_in"] - (time.monotonic() - self._state_at)

    def close(self) -> None:
        """End all connections of this rank to the coordinator and to other groups."""
        self._closed = True
        self._listener.close()
        if self._channel is not None:
            self._channel.close()

    # ---- threads: connection to the coordinator, reports, fetches, and answers to other groups ------------------

    def _run(self, work: Callable[[], None]) -> None:
        """Call `work`, the function of a thread, and store its exception, which `wait` raises in the training loop."""
        try:
            work()
        except Exception as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _connect(self, gives_up: Callable[[OSError], bool]) -> Channel:
        """Connect to the coordinator, with new attempts until `gives_up` returns True for the error of an attempt.

        If a group that starts has to wait for the coordinator, a line in its log says so.

        Raises:
            OutError: `gives_up` returned True before the coordinator could be reached.
        """
        has_said = self.state is not None
        while True:
            try:
                return connect(self._coordinator, self._secret, seconds=HEARTBEAT_SECONDS)
            except OSError as error:
                if gives_up(error):
                    remedy = "start tools/coordinate.py there, or check the address and the firewall"
                    raise OutError(
                        f"--diloco-coordinator {self._coordinator} cannot be used: {error}"
                        + ("" if isinstance(error, WireError) else f"; {remedy}")
                    ) from error
                if not has_said:
                    self._say(f"waiting for the coordinator at {self._coordinator}, which cannot be reached: {error}")
                    has_said = True
                time.sleep(RETRY_SECONDS)

    def _keep_connection(self) -> None:
        """Receive states of the run from the coordinator, and connect again when the connection is lost.

        Raises:
            OutError: the coordinator has removed this group, has refused it for good, or still refuses it after
                3 * HEARTBEAT_SECONDS.
        """
        # Until this time, a refusal that may pass is followed by another attempt. The coordinator refuses the name of a
        # group whose earlier job has died, until it has removed that job.
        refused_until, lost = time.monotonic() + 3 * HEARTBEAT_SECONDS, False
        while not self._closed:
            channel = self._connect(lambda error: False)
            try:
                about = {"version": self.version, "id": self.id, "joined": self.joined}
                channel.send(self._hello | about)
                with self._changed:
                    self._channel = channel
                self._report()
                while True:
                    state = channel.receive()
                    if "refused" in state:
                        if state["passes"] and time.monotonic() < refused_until:
                            break
                        raise OutError(f"the coordinator has refused this group: {state['refused']}")
                    if lost:
                        self._say("the coordinator is back")
                        lost = False
                    self._take_in(state)
            except OSError as error:
                if self.state is not None and not self._closed and not lost:
                    self._say(f"lost the coordinator ({error}); training continues until the next synchronization")
                    lost = True
            finally:
                channel.close()
                with self._changed:
                    self._channel = None
            time.sleep(RETRY_SECONDS)

    def _take_in(self, state: Record) -> None:
        """Store a new state of the run from the coordinator, and drop the messages that no group needs.

        If the commits have not changed since the previous state, the coordinator leaves them out of the new state. The
        commits of the previous state are then kept.

        Raises:
            OutError: the coordinator has removed this group from the run, or the run has gone back to a version before
                this group's.
        """
        with self._changed:
            state = (self.state or {}) | state
            if state["status"] == "out":
                raise OutError(
                    f"the coordinator has declared group {self.group} out: {state['why']}; start its job again"
                )
            if state["version"] < self.version:
                raise OutError(
                    f"the run is at version {state['version']}, but this group has version {self.version}: start its "
                    "job again, unless the version is of its checkpoint; then start tools/coordinate.py with the "
                    "--folder of the checkpoint's run, load an earlier checkpoint with --ckpt-step if that folder was "
                    "restored from a backup, or start a new run with --finetune"
                )
            self.state, self._state_at = state, time.monotonic()
            merged = {entry["cid"] for commit in state["commits"].values() for entry in commit["set"]}
            self._published = {cid: entry for cid, entry in self._published.items() if cid not in merged}
            needed = merged | state["pool"].keys() | self._published.keys()
            self._messages = {cid: data for cid, data in self._messages.items() if cid in needed}
            self._changed.notify_all()

    def _keep_reporting(self) -> None:
        """Send a report to the coordinator every REPORT_SECONDS, until this agent is closed."""
        while not self._closed:
            time.sleep(REPORT_SECONDS)
            self._report()

    def _report(self) -> None:
        """Send a complete report of this rank to the coordinator, if this rank is connected to it.

        The report has the attributes REPORTED, which `Agent` describes, and these entries:

            published    descriptions of this group's contributions that no commit has merged yet, by id
            have         ids of the contributions of which this rank has its message
            unreached    by name of a group: why this rank's last connection to this group failed
            address      address at which this rank serves messages to other groups
        """
        with self._changed:
            channel = self._channel
            report = {name: getattr(self, name) for name in REPORTED}
            report |= {"published": self._published, "have": sorted(self._messages), "unreached": self._unreached}
            report["address"] = self._address
        if channel is not None:
            try:
                channel.send(report)
            except OSError:
                channel.close()  # `_keep_connection`, whose `receive` fails now, connects again

    def _keep_fetching(self) -> None:
        """Fetch the messages of contributions that this rank needs and does not have. This is the body of a thread.

        A rank needs one message of each contribution that no commit has merged yet, and of each contribution that a
        recent commit has merged. Each fetch has its own thread, so that a slow group delays no other fetch.
        """
        while not self._closed:
            with self._changed:
                self._changed.wait(0.1)
                if self.state is None:
                    continue
                entries = list(self.state["pool"].values())
                entries += [entry for commit in self.state["commits"].values() for entry in commit["set"]]
                wanted = {e["cid"]: e for e in entries if e["cid"] not in self._messages.keys() | self._flying}
                self._flying |= wanted.keys()
            for entry in wanted.values():
                threading.Thread(target=self._run, args=(lambda e=entry: self._fetch_entry(e),), daemon=True).start()

    def _fetch_entry(self, entry: Record) -> None:
        """Fetch this rank's message of a contribution: ask the group that made it first, then all other groups in turn.

        If no group gives a valid message, return after RETRY_SECONDS; `_keep_fetching` then starts another attempt.
        `entry` describes the contribution, as the coordinator's state lists it.
        """
        assert self.state is not None
        peers = sorted(self.state["peers"].items(), key=lambda item: item[0] != entry["group"])
        try:
            for name, peer in peers:
                if peer["address"] is None:
                    continue
                try:
                    _, data = self._fetch(Address(*peer["address"]), {"wants": "contribution", "cid": entry["cid"]})
                    self._unreached = {each: why for each, why in self._unreached.items() if each != name}
                except OSError as error:
                    if name not in self._unreached:
                        where = Address(*peer["address"])
                        self._say(f"could not fetch a message from group {name} at {where}: {error}")
                        self._unreached = self._unreached | {name: f"{where}: {error}"}
                    continue
                except (ValueError, KeyError):  # the answer is not a valid message: ask the next group
                    continue
                if hashlib.sha256(data).hexdigest() == entry["digest"]:
                    with self._changed:
                        self._messages[entry["cid"]] = bytes(data)
                        self._changed.notify_all()
                    self._report()
                    return
            time.sleep(RETRY_SECONDS)
        finally:
            with self._changed:
                self._flying.discard(entry["cid"])

    def _fetch(self, address: Address, request: Record, *, seconds: float = FETCH_SECONDS) -> tuple[Record, bytearray]:
        """Send a request to the rank at `address` of another group; return (JSON object of the answer, bulk data).

        `seconds` is the limit for connecting and for each read.
        """
        channel = connect(address, self._secret, seconds=seconds)
        try:
            channel.send(request)
            return channel.receive_data(self._most_bytes)
        finally:
            channel.close()

    def _serve(self, channel: Channel) -> None:
        """Receive a request of a rank of another group, and answer with a message of a contribution or with a snapshot.

        If this rank does not have the message, the connection closes without an answer.
        """
        channel.set_timeout(FETCH_SECONDS)
        request = channel.receive()
        if request["wants"] == "snapshot":
            about, data = self._snapshot()
        elif (found := self._messages.get(request["cid"])) is not None:
            about, data = {}, found
        else:
            return
        channel.send_data(about, data)
        with self._changed:
            self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + len(data)
