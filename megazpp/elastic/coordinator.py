"""The coordinator of elastic DiLoCo: serves the state machine `Rounds` to all ranks, with a journal on disk; no torch.

Each start of a coordinator is a term with a number. The journal of term N is the file coordinator/journal-N.jsonl in
the run's folder. A starting coordinator creates the journal of the next term exclusively and copies the records of the
previous term into it. The coordinator syncs each new record to disk, looks for a higher term, and only then sends the
new state of the run to the ranks. If a higher term exists, the coordinator ends without sending. So of two
coordinators with the same folder only the newer one decides, and it has read every record that a rank could know.
The file rounds.jsonl has one row for each commit (outer step of all groups), for people and for the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from megazpp.base.address import Address
from megazpp.base.files import DamagedError, append_line, errors_as, lock_for_this_job, write_whole
from megazpp.elastic.rounds import HEARTBEAT_SECONDS, RefusedError, Rounds
from megazpp.elastic.wire import AuthenticatedListener, Channel

TICK_SECONDS = 0.02  # interval at which the coordinator calls `Rounds.tick`, which makes the decisions
LATE_SECONDS = 2.0  # if two ticks are further apart than this, the process counts as suspended between them
PUSH_SECONDS = 0.25  # interval at which the coordinator sends the run's state to all ranks if nothing has changed


class SupersededError(RuntimeError):
    """The error that ends this coordinator because a newer one, which makes all decisions, uses the run's folder."""


class Journal:
    """The coordinator's journal on disk: one JSON line for each decision about the run.

    The key "checksum" of each line has the CRC-32 of all records up to this line.

    Args:
        folder: folder of the run, which must exist.
    Attributes:
        term: number of this coordinator's start, from 1 on.
        records: records of all earlier terms, as the newest earlier journal has them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "coordinator"
        self._folder.mkdir(exist_ok=True)
        while True:
            self.term = self._newest() + 1
            path = self._path(self.term)
            try:
                path.touch(exist_ok=False)
                break
            except FileExistsError:
                continue  # another coordinator was faster and has created this term's journal, so take the next term
        self.records = self._read(self.term - 1)
        # Replace the empty journal by the complete copy in one step. If a full disk or a kill left only a part of the
        # copy, the coordinator of the next term would take this part for all records.
        self._checksum = 0  # CRC-32 of the records that this term's journal has
        copy = "".join(map(self._line, self.records)).encode()
        with _errors_named(self._path(self.term)):
            write_whole(path, copy)
        self._file = path.open("a")
        self.append([])  # raises SupersededError if another coordinator has started a later term meanwhile

    def append(self, records: list[dict]) -> None:
        """Append records to the journal, and return when they are synced to disk.

        Raises:
            SupersededError: a journal of a later term exists. No rank may then get a state that has these records.
        """
        with _errors_named(self._path(self.term)):
            for record in records:
                self._file.write(self._line(record))
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._newest() != self.term:
            raise SupersededError(
                f"term {self._newest()} of another coordinator has replaced term {self.term} of this coordinator, "
                "which ends now"
            )

    def _read(self, term: int) -> list[dict]:
        """Return the records of the newest journal that is not empty, among the journals of the terms 1 to `term`.

        An incomplete last line is left out. The result is [] if all journals are empty. A coordinator leaves an empty
        journal if it ends before it has copied the records of the earlier term.

        Raises:
            DamagedError: a line is not a JSON object, or was changed, removed, repeated or moved.
        """
        paths = (self._path(number) for number in range(term, 0, -1))
        path = next((path for path in paths if path.exists() and path.stat().st_size), None)
        if path is None:
            return []
        records, checksum = list[dict](), 0
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                record = json.loads(line)
                stated = record.pop("checksum")
                checksum = _checksum_after(checksum, record)
                is_sound = stated == checksum
            except (ValueError, KeyError, TypeError, AttributeError):
                is_sound = False
            if not is_sound:
                raise DamagedError(
                    f"line {number} of {path} is damaged, or lines before it are missing, or another version of "
                    "MegaZ++ has written it: restore this file from a backup, or start a new run in another --folder"
                )
            records.append(record)
        return records

    def _line(self, record: dict) -> str:
        """Return the journal's line for a record, with its checksum, and add the record to the running checksum."""
        self._checksum = _checksum_after(self._checksum, record)
        return json.dumps(record | {"checksum": self._checksum}) + "\n"

    def _newest(self) -> int:
        """Return the newest term whose journal is in the folder; 0 if there is no journal."""
        names = (path.stem.removeprefix("journal-") for path in self._folder.glob("journal-*.jsonl"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _path(self, term: int) -> Path:
        return self._folder / f"journal-{term}.jsonl"


def _errors_named(path: Path) -> AbstractContextManager[None]:
    """Return a context that replaces an OSError of a write to `path` by a ValueError with the path and a remedy."""
    again = "start the coordinator again with the same command: the groups wait for it"
    return errors_as(f"{path} cannot be written", OSError, remedy=f"free space or repair the disk, and {again}")


def _checksum_after(checksum: int, record: dict) -> int:
    """Return the CRC-32 of a journal's records up to `record`, from `checksum`, the CRC-32 of the records before it."""
    return zlib.crc32(json.dumps(record).encode(), checksum)


class Coordinator:
    """A running coordinator of elastic DiLoCo, which serves ranks in threads until it ends.

    Args:
        folder: folder for the journal, the lock and rounds.jsonl of the run; created if it does not exist.
        address: address to listen on for the ranks of all groups; port 0 chooses a free port.
        secret: secret that all groups of the run share.
        say: function that prints a log line.
        take_over: True to start although another coordinator holds the folder's lock, for example because its host
            cannot be reached.
    Attributes:
        address: the address on which the coordinator listens, with the chosen port.
        ended: event that is set once the coordinator has ended.
        why: reason why the coordinator has ended; "" while it runs.

    Raises:
        ValueError: another coordinator holds the folder's lock, the journal is damaged or cannot be written, or this
            machine cannot listen on `address`.
    """

    def __init__(
        self,
        folder: Path,
        address: Address,
        secret: bytes,
        *,
        say: Callable[[str], None] = print,
        take_over: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not take_over:
            self._held = lock_for_this_job(folder / "coordinator.lock", f"--folder {folder}")
        self._say, self._journal, self._rows = say, Journal(folder), folder / "rounds.jsonl"
        self._rounds = Rounds(self._journal.records, now=time.monotonic())
        # A thread holds this lock while it uses `_rounds`. `_advance` notifies the threads of `_keep_sending` when the
        # journal on disk has all decisions, which these threads may then send to the ranks.
        self._changed = threading.Condition()
        self._channels: dict[Channel, tuple[str, int]] = {}  # group and rank at the other end of each open connection
        self._ticked_at, self.ended, self.why = time.monotonic(), threading.Event(), ""
        # Recorded times are this offset plus the monotonic clock. If the system's clock is set during the run, the
        # differences of recorded times therefore stay correct.
        self._time_offset = time.time() - self._ticked_at
        self._listener = AuthenticatedListener(address, secret, self._serve, say)
        self.address = self._listener.address
        say(f"term {self._journal.term} at version {self._rounds.version} listens on {self.address}")
        threading.Thread(target=self._tick, daemon=True).start()

    def close(self, why: str = "closed") -> None:
        """End the coordinator for the reason `why`. Groups finish their interval, then wait for a new coordinator."""
        self.why = self.why or why
        self.ended.set()
        self._listener.close()
        for channel in list(self._channels):
            channel.close()

    def _tick(self) -> None:
        """Call `_advance` every TICK_SECONDS until the coordinator ends. An error of `_advance` ends the coordinator.

        This is the body of a thread.
        """
        try:
            while not self.ended.is_set():
                time.sleep(TICK_SECONDS)
                with self._changed:
                    self._advance()
        except Exception as error:
            self.close(str(error) or repr(error))

    def _advance(self) -> None:
        """Let `Rounds` decide, write its new records to the journal, and then let the threads send the run's state."""
        now = time.monotonic()
        # A late tick means that this process was suspended or has waited for the disk. No report was handled meanwhile,
        # and no group may be removed for these missing reports.
        if now > self._ticked_at + LATE_SECONDS:
            self._rounds.wake(now)
        self._ticked_at = now
        self._rounds.tick(now)
        records, lines, rows = self._rounds.take_news()
        stamp = {"time": round(self._time_offset + now, 3)}
        if records:
            self._journal.append([record | stamp for record in records])
        for row in rows:
            with _errors_named(self._rows):
                append_line(self._rows, json.dumps(row | stamp))
        for line in lines:
            self._say(line)
        if records:
            self._changed.notify_all()

    def _keep_sending(self, channel: Channel, name: str, rank: int) -> None:
        """Send the run's state to a rank after each decision, and every PUSH_SECONDS, until the rank's group is out.

        Each rank has a thread for this, so a rank with a slow or lost link delays neither the decisions of the
        coordinator nor other ranks. When the link is free again, the rank gets the newest state.
        """
        known = None
        with contextlib.suppress(OSError):
            while not self.ended.is_set():
                with self._changed:
                    self._changed.wait(PUSH_SECONDS)
                    if self._rounds.news.records:
                        continue  # the journal does not have these decisions yet, so no rank may know them
                    state = self._rounds.state(name, rank, time.monotonic(), known=known)
                    known = self._rounds.id_of(self._rounds.version)
                channel.send(state)
                if state["status"] == "out":
                    break
        channel.close()

    def _serve(self, channel: Channel) -> None:
        """Register the rank at the other end of `channel`, and receive its reports until the connection ends.

        Return early if the rank is refused, after a message with the reason, or if its group's job was started again.
        A rank that sends no report for HEARTBEAT_SECONDS is disconnected.
        """
        hello = channel.receive()
        name, rank, incarnation = hello["group"], hello["rank"], hello["incarnation"]
        try:
            with self._changed:
                self._rounds.connect(name, rank, hello, time.monotonic())
                self._channels[channel] = name, rank
        except RefusedError as error:
            channel.send({"refused": str(error), "passes": error.passes})
            self._say(f"refused group {name}: {error}")
            return
        channel.set_timeout(HEARTBEAT_SECONDS)
        threading.Thread(target=self._keep_sending, args=(channel, name, rank), daemon=True).start()
        why = "connection lost"
        try:
            while True:
                report = channel.receive()
                with self._changed:
                    if self._rounds.groups[name].incarnation != incarnation:
                        return  # the group's job was started again, and this rank is of the earlier start
                    self._rounds.report(name, rank, report, time.monotonic())
        except TimeoutError:
            why = f"no heartbeat for {HEARTBEAT_SECONDS:g} s"
        finally:
            channel.close()
            with self._changed:
                del self._channels[channel]
                if (name, rank) not in self._channels.values():  # otherwise the rank has a newer connection
                    self._rounds.disconnect(name, incarnation, rank, time.monotonic(), why)


def serve_until_ended(coordinator: Coordinator) -> int:
    """Wait until the coordinator has ended, print the reason, and return 1, the exit status of the program."""
    coordinator.ended.wait()
    print(f"the coordinator has ended: {coordinator.why}", file=sys.stderr, flush=True)
    return 1
