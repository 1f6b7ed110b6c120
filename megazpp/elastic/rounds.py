"""Decisions of elastic DiLoCo as a state machine: members, rounds, and leases of data; no sockets, clock or weights.

`Rounds` takes events, each with the time at which it happened, and `tick` makes the decisions that are due. Every fact
that must survive the coordinator is a record: `_decide` appends it to `records`, and `_apply` changes the state by it.
The coordinator writes new records to its journal before any rank sees the new state. A coordinator that starts again
applies the records of the journal, so it needs no other recovery.

This is one file of more than 300 lines, because each decision depends on all parts of the state.

Version v is the number of committed outer steps. Version v + 1 changes fragment v modulo P, where P is the number of
fragments. A contribution is a group's outer gradient since version `base`, made of some steps of some cells. The
samples of a run are a table: block b (H / P steps) times column c (G columns). A cell [b, c, first, stop] is a range of
steps of one block in one column. It is free, leased to a group, part of a published contribution, or merged by a
commit, and only records move it from one to another. So no step is merged twice.

A group is joining (it has no state of the current version yet), a member, or out. Out is final for an incarnation,
which is one start of the group's job. A member is live while all of its ranks are connected.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Cell = list[int]  # block, column, first step, step after the last one
Record = dict[str, Any]

BLIP_SECONDS = 0.5  # a connection that is lost for longer ends the membership of its group
HEARTBEAT_SECONDS = 10.0  # so does a rank that is silent for longer
HANGING_STEPS = 20  # so does a group that takes no step for as long as this many steps, and HEARTBEAT_SECONDS
ASSEMBLY_SECONDS = 60.0  # wait for the ranks of a new group, and at the start of a run for the other groups
# Commits to each fragment whose messages all groups keep, so that a slow or a new group can apply them
KEPT_VERSIONS = 8
WHOLE = 0.8  # share of an interval's steps from which a contribution counts for the quorum
NO_COMMIT = "0" * 16  # id of version 0, the initial weights


class RefusedError(ValueError):
    """A group cannot take part; the text says why.

    Attributes:
        passes: True if the reason may pass within seconds, so that the group should try again.
    """

    def __init__(self, text: str, *, passes: bool = False) -> None:
        super().__init__(text)
        self.passes = passes


class Rules(NamedTuple):
    """The rules of a run, from the flags that all groups have in common."""

    groups: int  # G: nominal number of groups, and columns of the table of samples
    interval: int  # steps between two synchronizations: H / P
    fragments: int  # P: parts of the model that synchronize in turn
    iterations: int  # steps of the run if all groups take part from its start to its end
    ranks: int  # number of ranks per group
    quorum: int | None  # whole intervals that have to arrive before the grace begins; None: half of the live groups
    grace: float | None  # seconds of waiting after the quorum; None: 3 % of an interval, at least 1 s
    min_groups: int  # fewer live groups wait instead of training on
    save_interval: int | None  # merged iterations between two checkpoints
    eval_interval: int | None  # merged iterations between two evaluations


@dataclass
class Group:
    """One incarnation of a group. Only the first four values are durable."""

    slot: int
    incarnation: str
    status: str = "joining"  # or "member" or "out"
    granted: int = 0  # cells that it has been given
    cell: Cell | None = None  # the last of them
    version: int | None = None  # version of the outer weights with which it connected; None if of another run
    saves: bool = False  # whether it can write checkpoints
    since: float = 0.0  # time of its first connection
    deadline: float = math.inf  # time at which a group that has lost its connection is declared out
    was_whole: bool = False
    moved: tuple[Any, float] = (None, 0.0)  # state of its training loop, and the time of its last change
    leaves: bool = False  # whether a rank has caught a stop signal, or the run is over
    addresses: dict[int, Any] = field(default_factory=dict)  # address of each connected rank
    reports: dict[int, Record] = field(default_factory=dict)  # last report of each connected rank
    heard: dict[int, float] = field(default_factory=dict)  # time of each rank's last report


class News(NamedTuple):
    """News about a run: records for the journal, lines for the log, and rows of rounds.jsonl, one for each commit."""

    records: list[Record]
    lines: list[str]
    rows: list[Record]


class Rounds:
    """The state of a run's groups, commits and samples.

    Args:
        records: records of the journal, from the start of the run.
        now: current time in seconds, of the clock that all events use.
    Attributes:
        news: records, lines and rows since the last `take_news`.
        closed: the contributions that the next commit will have, and when they were chosen.
    """

    def __init__(self, records: Iterable[Record] = (), *, now: float = 0.0) -> None:
        self.facts: dict[str, str] | None = None
        self.rules: Rules  # set together with `facts`
        self.groups: dict[str, Group] = {}
        self.commits: list[Record] = []
        self.pool: dict[str, Record] = {}  # published contributions that are not merged, by id
        self.leases: dict[str, list[Cell]] = {}
        self.free: list[Cell] = []
        self.opened_blocks = 0
        self.waited_for: set[str] = set()  # groups for which the current round waits
        self.news = News([], [], [])
        self.closed: list[str] | None = None
        self._published: set[str] = set()
        self._quorum_at: float | None = None
        self._held_at: float | None = None  # when a quorum held all that is to be committed
        self._assembled_at: float | None = None
        self._fingerprints: dict[tuple[int, int], int] = {}  # by version and rank
        self._published_at: dict[str, float] = {}  # by contribution, for the row
        self._events: list[str] = []  # lines since the last commit
        self._returned = 0  # steps since the last commit that will be trained again
        for record in records:
            self._apply(record)
        self._hold_until = now + HEARTBEAT_SECONDS if self.members else now
        for group in self.groups.values():
            group.deadline = self._hold_until

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of committed outer steps."""
        return len(self.commits)

    @property
    def members(self) -> set[str]:
        """The names of the members."""
        return {name for name, group in self.groups.items() if group.status == "member"}

    @property
    def live(self) -> set[str]:
        """The names of the members of which all ranks are connected."""
        return {name for name in self.members if self._is_whole(self.groups[name])}

    @property
    def merged_steps(self) -> int:
        """Steps of cells that the commits have merged."""
        return self.commits[-1]["merged"] if self.commits else 0

    @property
    def done(self) -> bool:
        """True if all samples of the run are merged, into all fragments."""
        return self._ends(self.commits)

    @property
    def closing(self) -> bool:
        """True if all samples of the run are merged, but not into all fragments."""
        return self.merged_steps == self._all_steps and not self.done

    @property
    def exhausted(self) -> bool:
        """True if no cell is free."""
        return not self.free and not self._cells_of(self.opened_blocks)

    def id_of(self, version: int) -> str:
        """Return the id of a version, a digest over all commits up to it; two branches have different ids."""
        return self.commits[version - 1]["id"] if version else NO_COMMIT

    def state(self, name: str, rank: int, now: float) -> Record:
        """Return the state that a rank of a group needs to know; it replaces all earlier ones."""
        group = self.groups[name]
        kept = range(max(1, self.version - self._num_kept + 1), self.version + 1)
        return {
            "version": self.version,
            "status": group.status,
            "slot": group.slot,
            "granted": group.granted,
            "cell": group.cell,
            "exhausted": self.exhausted,
            "done": self.done,
            "live": len(self.live),
            "oldest": min((self.groups[other].reports[0]["version"] for other in self.live), default=self.version),
            "leaves": group.leaves,
            "quorum_in": self._seconds_to_quorum(now),
            "grace": self._grace(),
            "pool": {cid: self._for_rank(entry, rank) for cid, entry in self.pool.items()},
            "commits": {
                str(version): self.commits[version - 1]
                | {"set": [self._for_rank(entry, rank) for entry in self.commits[version - 1]["set"]]}
                for version in kept
            },
            "peers": {
                other: {"member": peer.status == "member", "address": peer.addresses.get(rank)}
                for other, peer in self.groups.items()
                if other != name and peer.status != "out"
            },
        }

    def take_news(self) -> News:
        """Return the records, lines and rows since the last call."""
        taken, self.news = self.news, News([], [], [])
        return taken

    # ---- events -----------------------------------------------------------------------------------------------------

    def connect(self, name: str, rank: int, hello: Record, now: float) -> None:
        """Take in the connection of a rank.

        Args:
            name: name of the group.
            rank: index of the rank in its group.
            hello: incarnation and address, flags and rules of the run, version and id of the rank's state.
            now: current time.
        Raises:
            RefusedError: the group cannot take part, or not yet.
        """
        facts, rules = hello["facts"], Rules(*hello["rules"])
        if self.facts is None:
            self._decide({"run": facts, "rules": list(rules)})
        elif differing := [flag for flag in {**self.facts, **facts} if self.facts.get(flag) != facts.get(flag)]:
            flag = differing[0]
            raise RefusedError(
                f"{flag} is {facts.get(flag)!r} in group {name}, and {self.facts.get(flag)!r} in the other groups of "
                "this run: start all groups with the same flags"
            )
        version, group = hello["version"], self.groups.get(name)
        known = version <= self.version and self.id_of(version) == hello["id"]
        if group is None or group.incarnation != hello["incarnation"]:
            if group is not None and group.status != "out":
                if self._is_whole(group):
                    raise RefusedError(f"--diloco-group {name} is in use by another job of this run", passes=True)
                self._end(name, "it was started again")
            taken = {other.slot for other in self.groups.values() if other.status != "out"}
            free = group is not None and group.slot not in taken
            slot = group.slot if group is not None and free else min(set(range(len(taken) + 1)) - taken)
            self._decide({"join": name, "slot": slot, "incarnation": hello["incarnation"]})
            group = self.groups[name]
        elif group.status == "out":
            raise RefusedError(f"group {name} is out: start it again")
        elif not known and group.status == "member":
            raise RefusedError(f"version {version} of group {name} is not a version of this run: start it again")
        if not group.addresses:
            group.since = now
        group.version, group.saves = version if known else None, hello["saves"]
        group.addresses[rank], group.heard[rank] = hello["address"], now

    def disconnect(self, name: str, incarnation: str, rank: int, now: float) -> None:
        """Take in that the connection of a rank has ended."""
        group = self.groups[name]
        if group.incarnation == incarnation:
            for found in (group.addresses, group.reports, group.heard):
                found.pop(rank, None)
            group.deadline = now + BLIP_SECONDS

    def report(self, name: str, rank: int, report: Record, now: float) -> None:
        """Take in a rank's report, which replaces its earlier ones; see `Agent.report` for its content."""
        group = self.groups[name]
        group.reports[rank], group.heard[rank] = report, now
        group.leaves = group.leaves or report["leaves"]
        group.was_whole = group.was_whole or self._is_whole(group)
        done = report["trains"], report["version"], report["steps"], report["wants"]
        if rank == 0 and done != group.moved[0]:
            group.moved = done, now
        if group.status == "member" and report["fingerprint"] is not None:
            version, number = report["fingerprint"]
            if self._fingerprints.setdefault((version, rank), number) != number:
                self._end(name, f"ERROR: the outer state of version {version} on its rank {rank} differs from others")

    def tick(self, now: float) -> None:
        """Close rounds, commit versions, and declare silent or hanging groups out, as far as their times have come."""
        if self.facts is None:
            return
        self._end_lost_groups(now)
        if now < self._hold_until and self.live != self.members:
            return  # after a restart of the coordinator, groups need time to connect again
        if not self.members:
            self._begin_if_assembled(now)
        for name, group in self.groups.items():
            if group.status == "joining" and self._is_whole(group) and all(r["joined"] for r in group.reports.values()):
                self._decide({"members": [name]})
                self._say(f"group {name} joins at version {self.version}, {now - group.since:.1f} s after it connected")
        for name in sorted(self.live):
            self._take_contributions(name, now)
        self._end_if_state_is_lost()
        self._drop_lost()
        if len(self.live) >= self.rules.min_groups and not self.done:
            for name in sorted(self.live, key=lambda name: self.groups[name].slot):
                self._grant(name)
            self._close_round(now)
            if self.closed is not None:
                self._commit_if_held(now)

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _end_lost_groups(self, now: float) -> None:
        """Declare groups out that have lost a rank or are silent."""
        for name, group in list(self.groups.items()):
            if group.status == "out":
                continue
            silent = now - min(group.heard.values(), default=now)
            if silent > HEARTBEAT_SECONDS:
                self._end(name, f"no heartbeat for {silent:.0f} s")
            elif self._hangs(group, now):
                self._end(name, f"no step for {now - group.moved[1]:.0f} s")
            elif not self._is_whole(group):
                limit = (
                    group.deadline if group.was_whole or group.status == "member" else group.since + ASSEMBLY_SECONDS
                )
                if now > limit:
                    self._end(name, "connection lost")

    def _hangs(self, group: Group, now: float) -> bool:
        """Return True if a group that has samples takes no steps although its ranks are connected."""
        report = group.reports.get(0)
        if report is None or report["seconds"] is None or not report["trains"] or report["wants"] > group.granted:
            return False
        return now > group.moved[1] + HEARTBEAT_SECONDS + HANGING_STEPS * report["seconds"]

    def _end(self, name: str, why: str) -> None:
        """Declare a group out, and return its leases."""
        steps = sum(stop - first for _, _, first, stop in self.leases.get(name, []))
        self._decide({"out": name})
        why = "it has left" if self.groups[name].leaves else why
        returned = f"; {steps} steps of its leases are free again" if steps else ""
        self._say(f"group {name} is out: {why}{returned}", returned=steps)

    def _begin_if_assembled(self, now: float) -> None:
        """Start the run, or start it again from the newest state that a group has, when no member is left."""
        whole = {name: group for name, group in self.groups.items() if group.status == "joining" and group.was_whole}
        starts = {name: group.version for name, group in whole.items() if group.version is not None}
        if not starts:
            return
        if self._assembled_at is None:
            self._assembled_at = now
        if len(whole) < self.rules.groups and now < self._assembled_at + ASSEMBLY_SECONDS:
            return
        newest = max(starts.values())
        steps = self.merged_steps - (self.commits[newest - 1]["merged"] if newest else 0)
        if steps:
            line = f"goes back from version {self.version} to {newest}: {steps} steps will be trained again"
            self._say(line, returned=steps)
        names = sorted(name for name, version in starts.items() if version == newest)
        self._decide({"begin": newest})
        self._decide({"members": names})
        self.waited_for = set(names)
        self._say(f"starts at version {newest} with groups {', '.join(names)}")

    def _take_contributions(self, name: str, now: float) -> None:
        """Publish the contributions that all ranks of a group have packed."""
        by_rank = self.groups[name].reports
        for cid, entry in by_rank[0]["published"].items():
            if cid not in self._published and all(cid in report["published"] for report in by_rank.values()):
                digests = [by_rank[rank]["published"][cid]["digest"] for rank in sorted(by_rank)]
                slot, self._published_at[cid] = self.groups[name].slot, now
                self._decide({"publish": entry | {"cid": cid, "group": name, "slot": slot, "digest": digests}})

    def _grant(self, name: str) -> None:
        """Lease a cell to a group that asks for one: the oldest block first, in it the group's own column first.

        If all groups are waited for, each keeps its column, so that results do not depend on their speed.
        """
        group, others = self.groups[name], set[int]()
        if group.reports[0]["wants"] <= group.granted or self.exhausted:
            return
        if math.isinf(self._grace()):
            others = {self.groups[other].slot for other in self.members if other != name}
        cells = [cell for cell in [*self.free, *self._cells_of(self.opened_blocks)] if cell[1] not in others]
        if cells:
            cell = min(cells, key=lambda cell: (cell[0], cell[1] != group.slot, cell))
            self._decide({"lease": cell, "group": name})

    def _end_if_state_is_lost(self) -> None:
        """Declare all members out if none of them has, or can compute, the state of the current version.

        That happens if the groups that held a commit's messages died before any other group had fetched them.
        """
        live = self.live
        newest = max((self.groups[name].reports[0]["version"] for name in live), default=self.version)
        if live != self.members or newest == self.version:
            return
        cids = [entry["cid"] for entry in self.commits[newest]["set"]]
        if not any(all(self._holds(name, cid) for cid in cids) for name in live):
            for name in sorted(live):
                self._end(name, f"the messages of version {newest + 1} died with other groups")

    def _drop_lost(self) -> None:
        """Drop contributions that died with their groups before any other group had fetched them."""
        lost = [] if self.live != self.members else [e for e in self.pool.values() if not self._can_be_fetched(e)]
        if lost:
            self._decide({"drop": [entry["cid"] for entry in lost]})
            names, steps = ", ".join(entry["group"] for entry in lost), sum(entry["steps"] for entry in lost)
            line = f"contributions of {names} are lost: {steps} steps of their samples will be trained again"
            self._say(line, returned=steps)

    def _close_round(self, now: float) -> None:
        """Choose the contributions of the next commit, unless the round still waits for the contribution of a group."""
        if self.closed is not None or not (self.pool or self.closing):
            return
        safe = [entry for entry in self.pool.values() if self._is_safe(entry)]
        fresh = [entry for entry in safe if entry["base"] == self.version]
        arrived = {entry["group"] for entry in fresh}
        whole = {entry["group"] for entry in fresh if entry["steps"] >= WHOLE * self.rules.interval}
        if len(whole) >= self._quorum() and self._quorum_at is None:
            self._quorum_at = now
        whole |= arrived if self.closing else set()
        missing = {name for name in self.waited_for & self.members if not self._is_idle(name)} - arrived
        if missing and (self._quorum_at is None or now < self._quorum_at + self._grace()):
            return
        if safe or self.closing:  # without contributions to this fragment, the version changes nothing
            safe.sort(key=lambda entry: (entry["slot"], entry["base"], entry["cid"]))  # the order of the sum
            self.closed = [e["cid"] for e in safe if (self.version - e["base"]) % self.rules.fragments == 0]
            if missing:
                self._say(f"version {self.version + 1} does not wait for {', '.join(sorted(missing))}")

    def _commit_if_held(self, now: float) -> None:
        """Commit the chosen contributions when the live groups hold them, or a quorum does and the grace is over."""
        assert self.closed is not None
        live = self.live
        chosen = [cid for cid in self.closed if cid in self.pool]
        if self.closed and not chosen:
            self.closed = None
            return
        holders = {name for name in live if all(self._holds(name, cid) for cid in chosen)}
        if len(holders) >= min(self._quorum(), len(live)) and self._held_at is None:
            self._held_at = now
        if holders and (holders == live or (self._held_at is not None and now >= self._held_at + self._grace())):
            self._commit([self.pool[cid] for cid in chosen], now)

    def _commit(self, entries: Sequence[Record], now: float) -> None:
        """Commit a version, and name the groups that save and evaluate it."""
        rules, before = self.rules, self.merged_steps
        merged = before + sum(entry["steps"] for entry in entries)
        cids = ",".join(entry["cid"] for entry in entries)
        digest = hashlib.sha256(f"{self.id_of(self.version)} {cids}".encode()).hexdigest()[:16]
        by_slot = sorted(self.live, key=lambda name: self.groups[name].slot)
        writers = [name for name in by_slot if self.groups[name].saves]
        at_end = self._ends([*self.commits, {"merged": merged}])

        def passes(interval: int | None) -> bool:
            done, now_done = before // rules.groups, merged // rules.groups
            return interval is not None and done // interval != now_done // interval

        self._decide(
            {
                "commit": self.version + 1,
                "id": digest,
                "set": list(entries),
                "merged": merged,
                "saves": writers[0] if writers and (at_end or passes(rules.save_interval)) else None,
                "evaluates": by_slot[-1] if passes(rules.eval_interval) and not at_end else None,
            }
        )
        self._tell(entries, merged, now)

    def _tell(self, entries: Sequence[Record], merged: int, now: float) -> None:
        """Add the line and the row about a commit."""
        groups, parts = [], []
        for entry in entries:
            waited = now - self._published_at.pop(entry["cid"], now)
            late = (self.version - 1 - entry["base"]) // self.rules.fragments
            row = {name: entry[name] for name in ("group", "steps", "tokens")}
            groups.append(row | {"late": late, "waited": 0.0 if late else round(waited, 3)})
            note = f" ({late} versions late)" if late else " (called early)" * (entry["steps"] < self.rules.interval)
            parts.append(f"{entry['group']} {entry['steps']} steps{note}")
        sent = {name: sum(r["sent"] for r in self.groups[name].reports.values()) for name in sorted(self.live)}
        row = {"version": self.version, "merged": merged, "returned": self._returned, "events": self._events}
        self.news.rows.append(row | {"groups": groups, "sent_bytes": sent})
        longest = max((group["waited"] for group in groups), default=0.0)
        self.news.lines.append(f"version {self.version}: {', '.join(parts)}; {longest:.1f} s of waiting at most")
        self._events, self._returned = [], 0

    # ---- state changes by records -----------------------------------------------------------------------------------

    def _decide(self, record: Record) -> None:
        self._apply(record)
        self.news.records.append(record)

    def _apply(self, record: Record) -> None:
        """Change the state by a record."""
        match record:
            case {"run": facts, "rules": rules}:
                self.facts, self.rules = facts, Rules(*rules)
            case {"join": name, "slot": slot, "incarnation": incarnation}:
                self.groups[name] = Group(slot, incarnation)
                self.leases[name] = []
            case {"members": names}:
                for name in names:
                    self.groups[name].status = "member"
            case {"out": name}:
                self.groups[name].status = "out"
                self._release(self.leases.pop(name, []))
            case {"begin": version}:
                for commit in self.commits[version:]:
                    for entry in commit["set"]:
                        self._release(entry["cells"])
                for entry in self.pool.values():
                    self._release(entry["cells"])
                del self.commits[version:]
                self.pool = {}
                self._start_round()
                self._fingerprints = {}
            case {"lease": cell, "group": name}:
                while self.opened_blocks <= cell[0]:
                    self._release(self._cells_of(self.opened_blocks))
                    self.opened_blocks += 1
                self.free.remove(cell)
                self.leases[name].append(cell)
                self.groups[name].granted += 1
                self.groups[name].cell = cell
            case {"publish": entry}:
                self.pool[entry["cid"]] = entry
                self._published.add(entry["cid"])
                for cell in entry["cells"]:
                    self._take_from_lease(entry["group"], cell)
            case {"drop": cids}:
                for cid in cids:
                    self._release(self.pool.pop(cid)["cells"])
            case {"commit": version}:
                assert version == self.version + 1, (version, self.version)
                for entry in record["set"]:
                    del self.pool[entry["cid"]]
                self.commits.append(record)
                self._start_round()
                self.waited_for = self.members
                oldest = self.version - self._num_kept + 1
                self._fingerprints = {key: number for key, number in self._fingerprints.items() if key[0] >= oldest}
            case _:
                raise ValueError(f"unknown record {record}")

    def _start_round(self) -> None:
        self.closed = self._quorum_at = self._held_at = self._assembled_at = None

    def _release(self, cells: Iterable[Cell]) -> None:
        self.free = sorted([*self.free, *(cell for cell in cells if cell[2] < cell[3])])

    def _take_from_lease(self, name: str, part: Cell) -> None:
        """Shorten the lease that begins with the steps of `part`."""
        leases = self.leases[name]
        (index,) = (index for index, cell in enumerate(leases) if cell[:3] == part[:3])
        block, column, _, stop = leases.pop(index)
        assert part[3] <= stop, (part, stop)
        if part[3] < stop:
            leases.append([block, column, part[3], stop])

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _is_whole(self, group: Group) -> bool:
        """Return True if all ranks of the group are connected and have reported."""
        return len(group.reports) == self.rules.ranks

    @property
    def _num_kept(self) -> int:
        return KEPT_VERSIONS * self.rules.fragments

    @property
    def _all_steps(self) -> int:
        """Steps of all cells of the run."""
        return self.rules.iterations * self.rules.groups

    def _ends(self, commits: Sequence[Record]) -> bool:
        """Return True if a run with these commits is over: each fragment has a version after the last sample."""
        last = commits[-self.rules.fragments :]
        return len(last) == self.rules.fragments and last[0]["merged"] == self._all_steps

    def _cells_of(self, block: int) -> list[Cell]:
        """Return the whole cells of a block; the last block may have fewer steps."""
        steps = min(self.rules.interval, self.rules.iterations - block * self.rules.interval)
        return [[block, column, 0, steps] for column in range(self.rules.groups) if steps > 0]

    def _quorum(self) -> int:
        return self.rules.quorum or max(1, (len(self.live) + 1) // 2)

    def _grace(self) -> float:
        """Return the seconds to wait after the quorum."""
        if self.rules.grace is not None:
            return self.rules.grace
        seconds = [group.reports[0]["seconds"] or 0.0 for group in (self.groups[name] for name in self.live)]
        return max(1.0, 0.03 * self.rules.interval * min(seconds, default=0.0))

    def _holds(self, name: str, cid: str) -> bool:
        return all(cid in report["have"] for report in self.groups[name].reports.values())

    def _is_safe(self, entry: Record) -> bool:
        """Return True if a live group other than the contribution's own holds it, or there is no other live group."""
        others = self.live - {entry["group"]}
        return any(self._holds(name, entry["cid"]) for name in others or self.live)

    def _can_be_fetched(self, entry: Record) -> bool:
        """Return True if a live group holds the contribution, or a member that may come back."""
        origin = self.groups[entry["group"]]
        alive = origin.status == "member" and entry["cid"].startswith(origin.incarnation)
        return alive or any(self._holds(name, entry["cid"]) for name in self.live)

    def _is_idle(self, name: str) -> bool:
        """Return True for a live group without samples or unpublished steps, for which there is no cell."""
        report = self.groups[name].reports.get(0)
        if report is None or report["version"] != self.version:
            return False
        if any(entry["base"] == self.version for entry in report["published"].values()):
            return False  # not all of its ranks have packed the contribution
        return self.exhausted and report["wants"] > self.groups[name].granted and not report["unsent"]

    def _seconds_to_quorum(self, now: float) -> float | None:
        """Return the seconds until the quorum of this round is expected; None if that is unknown."""
        if self.closed is not None:
            return 0.0
        found, sent = [], {entry["group"] for entry in self.pool.values() if entry["base"] == self.version}
        for name in self.live:
            report, heard = self.groups[name].reports[0], self.groups[name].heard[0]
            if name in sent:
                found.append(0.0)
            elif report["seconds"] is not None and not self._is_idle(name):
                steps = report["steps"] if report["version"] == self.version else 0
                found.append(max(0.0, (self.rules.interval - steps) * report["seconds"] - (now - heard)))
        quorum = self._quorum()
        return sorted(found)[quorum - 1] if len(found) >= quorum else None

    def _for_rank(self, entry: Record, rank: int) -> Record:
        return entry | {"digest": entry["digest"][rank]}

    def _say(self, line: str, *, returned: int = 0) -> None:
        self.news.lines.append(line)
        self._events.append(line)
        self._returned += returned
