"""Decisions of elastic DiLoCo's coordinator as a state machine, without sockets, clock or weights.

The decisions are about groups (which groups take part), rounds (which contributions an outer step merges) and leases
(which group trains which samples). `Rounds` receives events, each with the time at which it happened, and `tick` makes
the decisions that are due. Every fact that a restarted coordinator must know is a record: `_decide` passes the record
to `_apply`, which changes the state, and then adds the record to the news, which are the records that are not in the
journal yet. The coordinator writes them to its journal before any rank sees the new state. A coordinator that starts
again applies the records of the journal, so it needs no other recovery.

This is one file of more than 300 lines, because each decision depends on all parts of the state.

Version v of the outer weights is the result of v committed outer steps. The step to version v + 1 changes fragment v
modulo P, where P is the number of fragments. A contribution is a group's outer gradient since version `base`, from the
training steps that the group has taken since its previous contribution. The samples of a run are a table of G columns,
one per nominal group, with a row per training step. A cell [column, first, stop] is a range of steps in one column. At
any time a step is in exactly one of four states: free, leased to a group, part of a published contribution, or merged
by a commit. Only records move a step from one state to another, so no step is merged twice. A lease ends where a block
ends. A block is the rows between two synchronizations: H / P rows, if each fragment synchronizes every H steps. A group
trains its leases in the order in which it got them, so the number of steps of a contribution says which steps it has.

A group is joining (it has no state of the current version yet), a member, or out. Out is final for an incarnation,
which is one start of the group's job. A member is live while all of its ranks are connected.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A range of training steps in the run's table of samples: column, first step, and step after the last one
Cell = list[int]
Record = dict[str, Any]  # a JSON object: a journal record, a rank's report, a state of the run, or a contribution

# The next four numbers say when the coordinator removes a group from the run, so that the group is "out".
BLIP_SECONDS = 0.5  # a group is out if the connection of one of its ranks to the coordinator is lost for this time
HEARTBEAT_SECONDS = 10.0  # the coordinator closes the connection of a rank that sends no report for this time
# A group that has samples is removed from the run if it takes no step for HEARTBEAT_SECONDS plus its usual time for
# this number of steps
HANGING_STEPS = 20
# A group is out if one of its contributions is older than this, and no other group can connect to the group
REACH_SECONDS = 30.0
ASSEMBLY_SECONDS = 60.0  # limit of the wait for all ranks of a new group, and for all groups at the start of a run
# Number of latest commits of each model fragment whose messages all groups keep, so that a slow or new group can fetch
# and apply them
KEPT_VERSIONS = 8
WHOLE = 0.8  # a contribution counts for the quorum of a round if it has at least this fraction of an interval's steps
# Flags and data that decide what the cells and the versions of a run mean. After the first commit they must stay the
# same, even if all groups have left.
OF_THE_SAMPLES = (
    *("--diloco-replica-groups", "--diloco-steps", "--diloco-fragments"),
    *("--global-batch-size", "the training data"),
)
UNKNOWN = (
    "its checkpoint is of an elastic run, or of a version, that is not in the coordinator's folder: start "
    "tools/coordinate.py with the --folder of that run, load an earlier checkpoint with --ckpt-step if the folder was "
    "restored from a backup, or start a new run with --finetune"
)
NO_COMMIT = "0" * 16  # id of version 0, the initial weights


class RefusedError(ValueError):
    """Refusal of a rank's connection: its group cannot take part in the run. The text of the error says why.

    Attributes:
        passes: True if the reason may disappear within seconds, so that the rank should connect again.
    """

    def __init__(self, text: str, *, passes: bool = False) -> None:
        super().__init__(text)
        self.passes = passes


class Rules(NamedTuple):
    """The settings of an elastic run that its coordinator needs, from the flags that all groups have in common."""

    groups: int  # G: nominal number of groups, which is the number of columns of the table of samples
    interval: int  # training steps of a group between two synchronizations: --diloco-steps / --diloco-fragments
    fragments: int  # P: number of fragments of the model, which synchronize in turn
    iterations: int  # steps of the run if all groups take part from its start to its end
    ranks: int  # number of ranks per group
    # number of groups that must have contributed at least WHOLE of an interval before a round's grace begins; None:
    # half of the live groups
    quorum: int | None
    # seconds that a round waits for more contributions after its quorum; None: 3 % of an interval's time, at least 1 s
    grace: float | None
    min_groups: int  # least number of live groups with which the run continues; fewer groups wait
    # number of global batches of merged samples between two checkpoints; None: one checkpoint at the end
    save_interval: int | None
    eval_interval: int | None  # number of global batches of merged samples between two evaluations; None: no evaluation


@dataclass
class Group:
    """The coordinator's knowledge about one incarnation of a group, that is one start of the group's job.

    The fields up to `cell` follow from records, so a restarted coordinator restores them from its journal. The other
    fields follow from connections and reports of ranks, which come again after a restart.
    """

    # Number that no other joining group or member has. It selects the group's preferred column of samples. Ranks sum
    # contributions in the order of their groups' slots.
    slot: int
    incarnation: str  # identifier of this start of the group's job
    status: str = "joining"  # "joining" (fetches the outer weights), "member" (takes part) or "out" (removed for good)
    why: str = "connection lost"  # reason why the group is out, or why the connection of one of its ranks ended
    # cells that are leased to the group, without the steps that it has published in contributions
    leases: list[Cell] = field(default_factory=list)
    granted: int = 0  # number of cells of samples that the coordinator has leased to the group so far
    cell: Cell | None = None  # the cell that was leased to the group last; None before the first lease
    # version of the group's outer weights at the time when it connected; None if they are not of this run
    version: int | None = None
    saves: str = ""  # identifier of the folder into which the group's job saves checkpoints; "" if it saves none
    # time in seconds at which the group's first rank connected, or at which the coordinator continued after a pause
    since: float = 0.0
    # time in seconds at which the group is removed if not all of its ranks are connected then. It is set when a rank of
    # a joining group connects, when a rank's connection is lost, and when the coordinator was restarted or suspended.
    deadline: float = math.inf
    # progress in rank 0's last report, and the time at which this progress last changed, to find a hang
    moved: tuple[Any, float] = (None, 0.0)
    # time in seconds at which a rank first reported that the group leaves, by a stop signal or at the run's end;
    # infinite before
    left_at: float = math.inf
    reports: dict[int, Record] = field(default_factory=dict)  # by connected rank: its last report

    @property
    def leaves(self) -> bool:
        """True once a rank has reported that the group leaves the run."""
        return self.left_at < math.inf


class News(NamedTuple):
    """News about an elastic run since the last call of `take_news`.

    `records` are for the journal, and `lines` for the log. `rows` are for rounds.jsonl, one row for each commit.
    """

    records: list[Record]
    lines: list[str]
    rows: list[Record]


class Rounds:
    """The state machine of an elastic run: its groups, its commits, and the samples that are leased or merged.

    Args:
        records: records of the coordinator's journal, from the start of the run; none for a new run.
        now: current time in seconds, of the same clock as the times of all later events.
    Attributes:
        facts: flags, package versions and data of the run, by name, as the first group that connected has reported
            them. Other groups must have the same facts. None until a rank has connected. A group that connects while no
            other group takes part replaces the facts. After the first commit, such a group must still have the same
            values of OF_THE_SAMPLES, and at least the same --train-iters.
        rules: settings of the run, from the same group as `facts`.
        groups: by name: the newest incarnation of each group that has ever connected.
        commits: the record of each committed outer step; the last one made the current version.
        pool: by id: published contributions that no commit has merged yet.
        free: cells that are neither leased, nor in a published contribution, nor merged.
        waited_for: names of the groups for whose contributions the current round waits: the members at its start.
        news: journal records, log lines, and rows of rounds.jsonl since the last call of `take_news`.
    """

    def __init__(self, records: Iterable[Record] = (), *, now: float = 0.0) -> None:
        self.facts: dict[str, str] | None = None
        self.rules: Rules  # set together with `facts`, when the first rank connects
        self.groups: dict[str, Group] = {}
        self.commits: list[Record] = []
        self.pool: dict[str, Record] = {}
        self.free: list[Cell] = []
        self.waited_for: set[str] = set()
        self.news = News([], [], [])
        # ids of all contributions that were ever published, because ranks report a contribution more than once
        self._published: set[str] = set()
        # time at which the grace of this round began, because the contributions of a quorum of groups (`_quorum`) or of
        # all groups that train had arrived; None before
        self._quorum_at: float | None = None
        # by version and rank: fingerprint of the outer state that a group reported first, to find groups that differ
        self._fingerprints: dict[tuple[int, int], int] = {}
        # by id: time at which a contribution was published, to log how long its group waited for the commit
        self._published_at: dict[str, float] = {}
        self._events: list[str] = []  # lines about groups since the last commit, for the next row of rounds.jsonl
        # number of steps that were lost with groups since the last commit, so that their samples will be trained again
        self._returned = 0
        for record in records:
            self._apply(record)
        # time in seconds until which `tick` waits for members that have not connected again; see `wake`
        self._hold_until = now
        if self.groups:
            self.wake(now)

    # ---- queries: version, members, samples, and the state for a rank -----------------------------------------------

    @property
    def version(self) -> int:
        """The version of the outer weights: the number of committed outer steps."""
        return len(self.commits)

    @property
    def members(self) -> set[str]:
        """The names of the groups that take part in the run: their status is "member"."""
        return {name for name, group in self.groups.items() if group.status == "member"}

    @property
    def live(self) -> set[str]:
        """The names of the members whose ranks are all connected and have reported."""
        return {name for name in self.members if self._is_whole(self.groups[name])}

    @property
    def merged_steps(self) -> int:
        """The number of training steps, summed over all groups, that the commits have merged."""
        return self.commits[-1]["merged"] if self.commits else 0

    @property
    def done(self) -> bool:
        """True if the run is over: all of its samples are merged into all fragments of the model."""
        return self._ends(self.commits)

    @property
    def closing(self) -> bool:
        """True if all samples of the run are merged, but some fragments of the model still need a last commit."""
        return self.merged_steps == self._all_steps and not self.done

    @property
    def exhausted(self) -> bool:
        """True if no cell of samples is free, so that a group that asks for samples gets none for now."""
        return not self.free

    def id_of(self, version: int) -> str:
        """Return the id of a version of the outer weights: a digest over all commits up to this version.

        If a run goes back to an earlier version and continues, the new versions get other ids than the old ones.
        """
        return self.commits[version - 1]["id"] if version else NO_COMMIT

    def state(self, name: str, rank: int, now: float, *, known: str | None = None) -> Record:
        """Return the state of the run that the coordinator sends to rank `rank` of the group `name`.

        The state is a JSON object. Its entries are:

            status, why, slot, granted, cell, leaves    attributes of `Group`, for this group
            version, exhausted, done                    properties of `Rounds`
            live         number of live groups
            saves_last   result of `_saves_last` for this group
            oldest       oldest version of the outer weights that a live group has
            quorum_in    result of `_seconds_to_quorum`: seconds until the quorum of this round is expected, or None
            grace        seconds that a round waits for more groups after its quorum
            pool         contributions that no commit has merged yet, by id
            peers        for each other group that is not out, by name: "member", True if it takes part; and "address",
                         at which its rank `rank` serves messages, None if this rank is not connected
            commits      the commits whose messages all groups keep, by version as text

        The state has no entry "commits" if the run's version has the id `known`, because the rank then has these
        commits from an earlier state. This saves most of the bytes.
        """
        group = self.groups[name]
        own = {key: getattr(group, key) for key in ("status", "why", "slot", "granted", "cell", "leaves")}
        found = own | {
            "version": self.version,
            "exhausted": self.exhausted,
            "done": self.done,
            "live": len(self.live),
            "saves_last": self._saves_last(name),
            "oldest": min((self.groups[other].reports[0]["version"] for other in self.live), default=self.version),
            "quorum_in": self._seconds_to_quorum(now),
            "grace": self._grace(),
            "pool": {cid: self._for_rank(entry, rank) for cid, entry in self.pool.items()},
            "peers": {
                other: {"member": peer.status == "member", "address": peer.reports.get(rank, {}).get("address")}
                for other, peer in self.groups.items()
                if other != name and peer.status != "out"
            },
        }
        return found if self.id_of(self.version) == known else found | {"commits": self._kept_commits(rank)}

    def _kept_commits(self, rank: int) -> dict[str, Record]:
        """Return the commits whose messages all groups keep, by version, with the SHA-256 of the messages of `rank`."""
        kept = self.commits[-self._num_kept :]
        return {str(c["commit"]): c | {"set": [self._for_rank(entry, rank) for entry in c["set"]]} for c in kept}

    def take_news(self) -> News:
        """Return the records of the journal, the log lines and the rows of rounds.jsonl since the last call."""
        taken, self.news = self.news, News([], [], [])
        return taken

    # ---- events: connections and reports of ranks, and the time -----------------------------------------------------

    def connect(self, name: str, rank: int, hello: Record, now: float) -> None:
        """Register the connection of a rank to the coordinator.

        Args:
            name: name of the rank's group.
            rank: index of the rank in its group.
            hello: the rank's first message, a JSON object with these entries:

                incarnation    identifier of this start of the group's job
                facts, rules   flags and data that all groups must share, and the fields of `Rules`
                version, id    version of the group's outer weights, and the id of this version
                joined         True if the group has already taken part in the run with these outer weights
                saves          identifier of the folder into which the group saves checkpoints; "" if it saves none
            now: current time in seconds.
        Raises:
            RefusedError: the group cannot take part in the run, or not yet.
        """
        facts, rules, before = hello["facts"], Rules(*hello["rules"]), self.facts or {}
        # All flags must agree only while another group takes part, so that all groups can end and start again with
        # corrected flags. The flags in OF_THE_SAMPLES may not change after the first commit.
        if any(group.status != "out" for group in self.groups.values()):
            binding: Iterable[str] = {**before, **facts}
        else:
            binding = OF_THE_SAMPLES if self.commits else ()
        differing = [flag for flag in binding if before.get(flag) != facts.get(flag)]
        if self.commits and rules.iterations < self.rules.iterations:
            differing.append("--train-iters")
        if differing:
            flag = differing[0]
            raise RefusedError(
                f"{flag} is {facts.get(flag)!r} in group {name}, and {before.get(flag)!r} in the other groups of "
                "this run: start all groups with the same flags"
            )
        if facts != self.facts:
            self._decide({"run": facts, "rules": list(rules)})
        version, group = hello["version"], self.groups.get(name)
        known = version <= self.version and self.id_of(version) == hello["id"]
        own = group if group is not None and group.incarnation == hello["incarnation"] else None
        if own is not None and own.status == "out":
            raise RefusedError(f"the coordinator has declared group {name} out: {own.why}; start its job again")
        # A group that has taken part trains leased samples. The coordinator knows these leases only if its journal has
        # the record of this start of the group's job.
        if hello["joined"] and (own is None or not known):
            raise RefusedError(
                f"group {name} has outer weights of version {version} that are not of this run: the coordinator was "
                "started with another --folder or journal than before, or the run has gone back to an earlier version, "
                "or the group was started again meanwhile; correct --folder of tools/coordinate.py, and start the "
                "group's job again"
            )
        if own is None:
            if group is not None and group.status != "out":
                if self._is_whole(group):
                    raise RefusedError(
                        f"--diloco-group {name} is in use by another job: choose another name", passes=True
                    )
                self._end(name, f"its job was started again, or another job also has --diloco-group {name}")
            # A group that was started again gets its earlier slot, and so its earlier column of samples, unless another
            # group has this slot. A new group gets the lowest free slot.
            taken = {other.slot for other in self.groups.values() if other.status != "out"}
            kept = None if group is None or group.slot in taken else group.slot
            slot = min(set(range(len(taken) + 1)) - taken) if kept is None else kept
            self._decide({"join": name, "slot": slot, "incarnation": hello["incarnation"]})
            waits = f"; the run starts with {self.rules.groups} groups, or after {ASSEMBLY_SECONDS:.0f} s with fewer"
            self._say(f"group {name} has connected{'' if self.members else waits}")
            own = self.groups[name]
        if not own.reports:
            own.since = now
        if own.status == "joining":
            own.deadline = now + ASSEMBLY_SECONDS
        own.version, own.saves = version if known else None, hello["saves"]

    def disconnect(self, name: str, incarnation: str, rank: int, now: float, why: str = "connection lost") -> None:
        """Register that the connection of a rank to the coordinator has ended, for the reason `why`.

        The rank's group is removed from the run unless the rank connects again within BLIP_SECONDS. After a restart or
        a suspension of the coordinator, the rank has at least the time that `wake` gives.
        """
        group = self.groups[name]
        if group.incarnation == incarnation:
            group.reports.pop(rank, None)
            group.deadline, group.why = max(now + BLIP_SECONDS, self._hold_until), why

    def wake(self, now: float) -> None:
        """Give all groups time to connect and report again, because the coordinator was restarted or suspended."""
        self._hold_until = now + HEARTBEAT_SECONDS
        for group in self.groups.values():
            group.deadline, group.since, group.moved = self._hold_until, now, (group.moved[0], now)

    def report(self, name: str, rank: int, report: Record, now: float) -> None:
        """Store a rank's report, which replaces the rank's earlier reports; see `Agent._report` for its content.

        If the report shows another outer state than an earlier report of the same version, the group is removed.
        """
        group = self.groups[name]
        group.reports[rank] = report
        if report["leaves"]:
            group.left_at = min(group.left_at, now)
        done = report["trains"], report["version"], report["steps"], report["wants"]
        if rank == 0 and done != group.moved[0]:
            group.moved = done, now
        if group.status == "member" and report["fingerprint"] is not None:
            version, number = report["fingerprint"]
            if self._fingerprints.setdefault((version, rank), number) != number:
                remedy = "" if version else ": start all groups from the same weights (--load)"
                self._end(
                    name, f"ERROR: its rank {rank} has another outer state of version {version} than others{remedy}"
                )

    def tick(self, now: float) -> None:
        """Make all decisions that are due at the time `now`: about groups, leases of samples, rounds and commits.

        No decision is due before the first group has connected. After a restart or a suspension, only lost groups are
        removed until all members have connected again, or until the time that `wake` has set.
        """
        if self.facts is None:
            return
        self._end_lost_groups(now)
        if now < self._hold_until and self.live != self.members:
            return  # the coordinator was restarted or suspended: decide nothing until all members have connected again
        if not self.members:
            self._begin_if_assembled(now)
        for name, group in self.groups.items():
            if group.status == "joining" and self._is_whole(group) and all(r["joined"] for r in group.reports.values()):
                self._decide({"members": [name]})
                self._say(f"group {name} joins at version {self.version}, {now - group.since:.1f} s after it connected")
        for name in sorted(self.live):
            self._take_contributions(name, now)
        self._end_unreachable(now)
        if self.live == self.members:
            self._give_up_lost()
        if len(self.live) >= self.rules.min_groups and not self.done:
            for name in sorted(self.live, key=lambda name: self.groups[name].slot):
                self._grant(name)
            self._commit_if_due(now)

    # ---- decisions of `tick` ----------------------------------------------------------------------------------------

    def _end_lost_groups(self, now: float) -> None:
        """Remove from the run each group that lacks a rank after its deadline, or takes no steps for its samples."""
        for name, group in self.groups.items():
            if group.status == "out":
                continue
            if self._hangs(group, now):
                self._end(name, f"no step for {now - group.moved[1]:.0f} s")
            elif not self._is_whole(group) and now > group.deadline:
                self._end(name, group.why)

    def _hangs(self, group: Group, now: float) -> bool:
        """Return True if a connected group hangs: it has leased samples, but takes no training steps.

        A group hangs if its last step ended longer ago than HEARTBEAT_SECONDS plus the usual time of HANGING_STEPS
        steps.
        """
        report = group.reports.get(0)
        if report is None or report["seconds"] is None or not report["trains"] or report["wants"] > group.granted:
            return False
        return now > group.moved[1] + HEARTBEAT_SECONDS + HANGING_STEPS * report["seconds"]

    def _end(self, name: str, why: str) -> None:
        """Remove a group from the run for the reason `why`, so that other groups can train its leased samples.

        If the group has reported that it leaves, this replaces the reason `why`.
        """
        steps = sum(stop - first for _, first, stop in self.groups[name].leases)
        why = "it has left" if self.groups[name].leaves else why
        self._decide({"out": name, "why": why})
        returned = f"; {steps} steps of its leases are free again" if steps else ""
        self._say(f"group {name} is out: {why}{returned}", returned=steps)

    def _end_unreachable(self, now: float) -> None:
        """Remove a group from the run if no other group can fetch its contributions, which no commit could merge.

        This happens REACH_SECONDS after the group has published such a contribution.
        """
        for entry in list(self.pool.values()):
            name, others = entry["group"], self.live - {entry["group"]}
            published_at = self._published_at.setdefault(entry["cid"], now)
            if name not in self.live or not others or now < published_at + REACH_SECONDS or self._is_safe(entry):
                continue
            found = [[r["unreached"].get(name) for r in self.groups[o].reports.values()] for o in sorted(others)]
            if all(any(problems) for problems in found):
                problem = next(filter(None, found[0]))
                self._end(
                    name,
                    f"no other group can connect to it ({problem}): give --diloco-listen and --diloco-advertise an "
                    "address that other groups reach, and open the ports in firewalls",
                )

    def _begin_if_assembled(self, now: float) -> None:
        """Start the run with the groups that have connected; call this while the run has no member.

        A run that all members have left continues from the newest version of the outer weights that a connected group
        has, for example from a checkpoint. The run starts when the nominal number of groups is connected, or at the
        latest when the group that connected first has been connected for ASSEMBLY_SECONDS.
        """
        whole = {
            name: group for name, group in self.groups.items() if group.status == "joining" and self._is_whole(group)
        }
        starts = {name: group.version for name, group in whole.items() if group.version is not None}
        # ASSEMBLY_SECONDS count from the time at which the first of the groups in `whole` connected. A group that has
        # connected earlier and left again is ignored, because its earlier time would shorten the others' wait.
        waited = now > min((group.since for group in whole.values()), default=now) + ASSEMBLY_SECONDS
        if not starts:
            if whole and (len(whole) >= self.rules.groups or waited):
                for name in sorted(whole):
                    self._end(name, UNKNOWN)
            return
        if len(whole) < self.rules.groups and not waited:
            return
        newest = max(starts.values())
        steps = self.merged_steps - (self.commits[newest - 1]["merged"] if newest else 0)
        if steps:
            line = f"the run goes back from version {self.version} to {newest}: {steps} steps will be trained again"
            self._say(line, returned=steps)
        names = sorted(name for name, version in starts.items() if version == newest)
        self._decide({"begin": newest})
        self._decide({"members": names})
        self._say(f"the run starts at version {newest} with groups {', '.join(names)}")

    def _take_contributions(self, name: str, now: float) -> None:
        """Accept the contributions that all ranks of a group have packed: add them to the run's pool for a commit."""
        by_rank = self.groups[name].reports
        for cid, entry in by_rank[0]["published"].items():
            if cid not in self._published and all(cid in report["published"] for report in by_rank.values()):
                digests = [by_rank[rank]["published"][cid]["digest"] for rank in sorted(by_rank)]
                slot, self._published_at[cid] = self.groups[name].slot, now
                self._decide({"publish": entry | {"cid": cid, "group": name, "slot": slot, "digest": digests}})

    def _grant(self, name: str) -> None:
        """Lease a cell of samples to a group that asks for one, unless it has too many contributions in the pool.

        The group gets free steps of the oldest block that has some. The steps are from the group's own column if this
        column has free steps in the block, otherwise from the lowest column with free steps in the block. With
        --diloco-wait-for-all (infinite grace) no group gets a cell of another member's column. Results then do not
        depend on the speed of the groups.
        """
        group, interval, others = self.groups[name], self.rules.interval, set[int]()
        if group.reports[0]["wants"] <= group.granted or self._has_backlog(name):
            return
        if math.isinf(self._grace()):
            others = {self.groups[other].slot for other in self.members if other != name}
        if cells := [cell for cell in self.free if cell[0] not in others]:
            column, first, stop = min(cells, key=lambda cell: (cell[1] // interval, cell[0] != group.slot, cell))
            stop = min(stop, (first // interval + 1) * interval)
            self._decide({"lease": [column, first, stop], "group": name})

    def _give_up_lost(self) -> None:
        """Give up contributions that were lost with groups that died before any other group had fetched their messages.

        Published contributions are dropped, so that other groups train their samples again. If no member has, or can
        compute, the outer weights of the current version, all members are removed. Their jobs have to start again.
        """
        newest = max((self.groups[name].reports[0]["version"] for name in self.live), default=self.version)
        if newest < self.version and not all(map(self._can_be_fetched, self.commits[newest]["set"])):
            for name in sorted(self.live):
                self._end(name, f"the messages of version {newest + 1} died with other groups")
        if lost := [entry for entry in self.pool.values() if not self._can_be_fetched(entry)]:
            self._decide({"drop": [entry["cid"] for entry in lost]})
            names, steps = ", ".join(entry["group"] for entry in lost), sum(entry["steps"] for entry in lost)
            line = f"contributions of {names} are lost: {steps} steps of their samples will be trained again"
            self._say(line, returned=steps)

    def _commit_if_due(self, now: float) -> None:
        """Commit an outer step, unless the round still waits for contributions or for the fetches of their messages.

        A contribution has arrived when another group has fetched it. A round waits for the contributions of all groups
        that train, and until all live groups have fetched them. Once a quorum of groups has each contributed at least
        the fraction WHOLE of an interval, or all groups have contributed, the round waits only during the grace. In the
        last commits of the run (`closing`), contributions of any size count for the quorum.

        The commit then merges the arrived contributions that one live group has: the group that has most of them. If
        any other group dies, the new version can still be computed from the messages of this group.
        """
        safe = [entry for entry in self.pool.values() if self._is_safe(entry)]
        if not safe and not self.closing:  # the run ends after a last commit of each fragment, even without samples
            return
        fresh = [entry for entry in safe if entry["base"] == self.version]
        least = 0 if self.closing else WHOLE * self.rules.interval
        whole = {entry["group"] for entry in fresh if entry["steps"] >= least}
        missing = {name for name in self.waited_for & self.members if not self._is_idle(name)}
        missing -= {entry["group"] for entry in fresh}
        if self._quorum_at is None and (len(whole) >= self._quorum() or not missing):
            self._quorum_at = now
        # Each outer step changes one fragment, so it can merge only contributions to this fragment, fresh or late ones.
        due = [entry for entry in safe if (self.version - entry["base"]) % self.rules.fragments == 0]
        due.sort(key=lambda entry: (entry["slot"], entry["base"], entry["cid"]))  # all ranks sum in this order
        held = [[entry for entry in due if self._holds(name, entry["cid"])] for name in sorted(self.live)]
        waits = missing or any(entries != due for entries in held)
        if waits and (self._quorum_at is None or now < self._quorum_at + self._grace()):
            return
        if missing:
            self._say(f"version {self.version + 1} does not wait for {', '.join(sorted(missing))}")
        self._commit(max(held, key=len), now)

    def _commit(self, entries: Sequence[Record], now: float) -> None:
        """Commit an outer step that merges contributions, and name the groups that save and evaluate the new version.

        Args:
            entries: the contributions, in the order in which all ranks sum them.
            now: current time in seconds.
        """
        rules, before = self.rules, self.merged_steps
        merged = before + sum(entry["steps"] for entry in entries)
        cids = ",".join(entry["cid"] for entry in entries)
        digest = hashlib.sha256(f"{self.id_of(self.version)} {cids}".encode()).hexdigest()[:16]
        by_slot = sorted(self.live, key=lambda name: self.groups[name].slot)
        # By folder of checkpoints: the live group with the lowest slot, because only one group may save into a folder
        writers = {self.groups[name].saves: name for name in reversed(by_slot)}
        writers.pop("", None)
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
                "saves": sorted(writers.values()) if at_end or passes(rules.save_interval) else [],
                "evaluates": by_slot[-1] if passes(rules.eval_interval) and not at_end else None,
            }
        )
        self._tell(entries, merged, now)

    def _tell(self, entries: Sequence[Record], merged: int, now: float) -> None:
        """Add the log line and the row of rounds.jsonl about the commit that has just been made.

        Args:
            entries: contributions that the commit has merged.
            merged: training steps, summed over groups, that all commits together have merged.
            now: current time in seconds.
        """
        groups, parts = [], []
        for entry in entries:
            waited = now - self._published_at.pop(entry["cid"], now)
            late = (self.version - 1 - entry["base"]) // self.rules.fragments
            row = {name: entry[name] for name in ("group", "steps", "tokens")}
            groups.append(row | {"late": late, "waited": 0.0 if late else round(waited, 3)})
            early = " (called early)" if entry["steps"] < self.rules.interval else ""
            note = f" (late by {late} outer step(s))" if late else early
            parts.append(f"{entry['group']} {entry['steps']} steps{note}")
        sent = {name: sum(r["sent_bytes"] for r in self.groups[name].reports.values()) for name in sorted(self.live)}
        row = {"version": self.version, "merged": merged, "returned": self._returned, "events": self._events}
        self.news.rows.append(row | {"groups": groups, "sent_bytes": sent})
        longest = max((group["waited"] for group in groups), default=0.0)
        self.news.lines.append(f"version {self.version}: {', '.join(parts)}; {longest:.1f} s of waiting at most")
        self._events, self._returned = [], 0

    # ---- state changes by records -----------------------------------------------------------------------------------

    def _decide(self, record: Record) -> None:
        """Change the state of the elastic run by a new record, and pass the record on to the coordinator's journal."""
        self._apply(record)
        self.news.records.append(record)

    def _apply(self, record: Record) -> None:
        """Apply a record to the state of the elastic run: a new record, or after a restart one from the journal.

        Raises:
            ValueError: the record is of an unknown kind, because another version of MegaZ++ has written the journal.
        """
        match record:
            case {"run": facts, "rules": rules}:
                # After the first commit, only the steps that a larger --train-iters adds to each column become free.
                before = self.rules.iterations if self.commits else 0
                self.facts, self.rules, self._fingerprints = facts, Rules(*rules), {}
                if not self.commits:  # forget the samples and contributions of earlier groups, which had other rules
                    self.free, self.pool = [], {}
                self._release([column, before, self.rules.iterations] for column in range(self.rules.groups))
            case {"join": name, "slot": slot, "incarnation": incarnation}:
                self.groups[name] = Group(slot, incarnation)
            case {"members": names}:
                for name in names:
                    self.groups[name].status = "member"
                # A group that joins during a round is not waited for, because it has less time for its steps
                self.waited_for = self.waited_for or set(names)
            case {"out": name}:
                group = self.groups[name]
                group.status, group.why = "out", record.get("why", "")
                self._release(group.leases)
                group.leases = []
            case {"begin": version}:
                for commit in self.commits[version:]:
                    for entry in commit["set"]:
                        self._release(entry["cells"])
                for entry in self.pool.values():
                    self._release(entry["cells"])
                del self.commits[version:]
                self.pool, self.waited_for, self._quorum_at, self._fingerprints = {}, set(), None, {}
            case {"lease": cell, "group": name}:
                (cells,) = (free for free in self.free if free[:2] == cell[:2])
                self.free.remove(cells)
                self._release([[cell[0], cell[2], cells[2]]])
                group = self.groups[name]
                group.leases.append(cell)
                group.granted += 1
                group.cell = cell
            case {"publish": entry}:
                self.pool[entry["cid"]] = entry
                self._published.add(entry["cid"])
                group = self.groups[entry["group"]]
                entry["cells"], group.leases = _split(group.leases, entry["steps"])
            case {"drop": cids}:
                for cid in cids:
                    self._release(self.pool.pop(cid)["cells"])
            case {"commit": version}:
                assert version == self.version + 1, (version, self.version)
                for entry in record["set"]:
                    del self.pool[entry["cid"]]
                self.commits.append(record)
                self._quorum_at, self.waited_for = None, self.members
                oldest = self.version - self._num_kept + 1
                self._fingerprints = {key: number for key, number in self._fingerprints.items() if key[0] >= oldest}
            case _:
                raise ValueError(
                    f"the coordinator's journal has a record of an unknown kind, from another version of MegaZ++: "
                    f"{record}; start the version that has written the journal"
                )

    def _release(self, cells: Iterable[Cell]) -> None:
        """Make cells free, so that they can be leased; cells without steps are dropped."""
        self.free = sorted([*self.free, *(cell for cell in cells if cell[1] < cell[2])])

    # ---- questions about groups and contributions, for decisions ----------------------------------------------------

    def _is_whole(self, group: Group) -> bool:
        """Return True if all ranks of the group are connected and have sent a report."""
        return len(group.reports) == self.rules.ranks

    @property
    def _num_kept(self) -> int:
        """The number of latest commits, of all fragments together, whose messages all groups keep."""
        return KEPT_VERSIONS * self.rules.fragments

    @property
    def _all_steps(self) -> int:
        """The number of training steps of the whole run, summed over the replica groups that the flags state."""
        return self.rules.iterations * self.rules.groups

    def _ends(self, commits: Sequence[Record]) -> bool:
        """Return True if an elastic run with these commits is over.

        The run is over when all of its samples are merged after each of the last P commits, where P is the number of
        fragments of the model. Fragments have commits in turn, so each fragment then contains all samples.
        """
        last = commits[-self.rules.fragments :]
        return len(last) == self.rules.fragments and last[0]["merged"] == self._all_steps

    def _quorum(self) -> int:
        """Return how many groups must have contributed at least WHOLE of an interval before a round's grace begins.

        Without --diloco-quorum this is half of the live groups, rounded up.
        """
        return self.rules.quorum or max(1, (len(self.live) + 1) // 2)

    def _grace(self) -> float:
        """Return the seconds that a round waits for more groups after its quorum has arrived.

        Without --diloco-grace it is 3 % of the time that the fastest live group needs for an interval, and at least 1
        second.
        """
        if self.rules.grace is not None:
            return self.rules.grace
        seconds = [group.reports[0]["seconds"] or 0.0 for group in (self.groups[name] for name in self.live)]
        return max(1.0, 0.03 * self.rules.interval * min(seconds, default=0.0))

    def _holds(self, name: str, cid: str) -> bool:
        """Return True if each connected rank of the group `name` has its message of the contribution `cid`."""
        return all(cid in report["have"] for report in self.groups[name].reports.values())

    def _is_safe(self, entry: Record) -> bool:
        """Return True if a contribution would survive the loss of its group, because another live group has fetched it.

        If there is no other live group, it is enough that the contribution's own group has the messages.
        """
        others = self.live - {entry["group"]}
        return any(self._holds(name, entry["cid"]) for name in others or self.live)

    def _can_be_fetched(self, entry: Record) -> bool:
        """Return True if a contribution is not lost: a live group has it, or its own group may connect again."""
        origin = self.groups[entry["group"]]
        alive = origin.status == "member" and entry["cid"].startswith(origin.incarnation)
        return alive or any(self._holds(name, entry["cid"]) for name in self.live)

    def _saves_last(self, name: str) -> bool | None:
        """Return True if the group `name` leaves, and no other live group can save the outer weights into its folder.

        That is the case if each other live group that saves into this folder leaves too, and either has reported this
        no later than the group `name`, or has an older version. So of all groups that leave, at least the group that
        reported this last saves. If another live group with this folder does not leave yet, the result is None (not
        decided) for a group that leaves at the end of the run, and False otherwise.
        """
        group, others = self.groups[name], [self.groups[other] for other in self.live - {name}]
        others = [other for other in others if other.saves == group.saves]
        if not (group.leaves and all(other.leaves for other in others)):
            return None if group.leaves and self.done else False
        own = group.reports[0]["version"] if 0 in group.reports else 0
        return all(other.left_at <= group.left_at or other.reports[0]["version"] < own for other in others)

    def _is_idle(self, name: str) -> bool:
        """Return True if a round need not wait for the group `name`.

        This is so if the group has no steps to publish, and has asked for samples that it has not got.
        """
        report = self.groups[name].reports.get(0)
        if report is None or report["version"] != self.version:
            return False
        if any(entry["base"] == self.version for entry in report["published"].values()):
            return False  # wait: the contribution comes as soon as all ranks of the group have packed their messages
        return report["wants"] > self.groups[name].granted and not report["unsent"]

    def _has_backlog(self, name: str) -> bool:
        """Return True if more contributions of the group `name` wait for a commit than the model has fragments.

        This happens if the other groups fetch the contributions more slowly than the group trains. The group then gets
        no samples (`_grant`). Otherwise more and more fetches would share the group's link, and its contributions would
        become so late that their weight vanishes.
        """
        return sum(entry["group"] == name for entry in self.pool.values()) > self.rules.fragments

    def _seconds_to_quorum(self, now: float) -> float | None:
        """Return the seconds until a quorum of contributions is expected in this round, by the speed of the groups.

        The result is negative once the grace has begun, and None if too few groups have reported their speed.
        """
        if self._quorum_at is not None:
            return self._quorum_at - now
        found, sent = [], {entry["group"] for entry in self.pool.values() if entry["base"] == self.version}
        for name in self.live:
            report, (_, moved_at) = self.groups[name].reports[0], self.groups[name].moved
            if name in sent:
                found.append(0.0)
            elif report["seconds"] is not None and not self._is_idle(name):
                steps = report["steps"] if report["version"] == self.version else 0
                found.append(max(0.0, (self.rules.interval - steps) * report["seconds"] - (now - moved_at)))
        quorum = self._quorum()
        return sorted(found)[quorum - 1] if len(found) >= quorum else None

    def _for_rank(self, entry: Record, rank: int) -> Record:
        """Return a copy of a contribution's description, in which "digest" is the SHA-256 of one rank's message."""
        return entry | {"digest": entry["digest"][rank]}

    def _say(self, line: str, *, returned: int = 0) -> None:
        """Add a line to the log and to the next row of rounds.jsonl; `returned` steps will be trained again."""
        self.news.lines.append(line)
        self._events.append(line)
        self._returned += returned


def _split(cells: Iterable[Cell], steps: int) -> tuple[list[Cell], list[Cell]]:
    """Return (cells with the first `steps` steps of the given cells, cells with the other steps)."""
    taken, rest = [], []
    for column, first, stop in cells:
        cut = min(first + steps, stop)
        steps -= cut - first
        taken += [[column, first, cut]] if first < cut else []
        rest += [[column, cut, stop]] if cut < stop else []
    assert steps == 0, (cells, steps)
    return taken, rest
