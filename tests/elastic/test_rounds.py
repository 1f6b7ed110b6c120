"""Play random schedules on the coordinator of elastic DiLoCo: steps, fetches, deaths, lost connections, restarts."""

import itertools
import math
from typing import Any

import pytest
from helpers.tiers import nightly, slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megazpp.elastic.rounds import NO_COMMIT, RefusedError, Rounds, Rules

RULES = Rules(
    groups=3,
    interval=4,
    fragments=1,
    iterations=10,
    ranks=2,
    quorum=None,
    grace=1.0,
    min_groups=1,
    save_interval=3,
    eval_interval=None,
)
FACTS = {"--seed": "1"}


class Group:
    """A simulated job of one group of elastic DiLoCo, which follows the protocol of agent.py and loop.py.

    It trains no model: numbers stand for weights and contributions.
    """

    def __init__(self, name: str, incarnation: str, version: int, version_id: str, rules: Rules) -> None:
        self.name, self.incarnation, self.rules = name, incarnation, rules
        self.facts = FACTS
        self.fingerprint: list[int] | None = None  # [version, fingerprint] of the group's outer weights
        self.folder = ""  # identifier of the folder into which the group saves checkpoints
        self.unsent = [0] * rules.fragments  # steps that the group has trained but not published, by fragment
        # ids of the contributions that each rank has packed
        self.packed: list[set[str]] = [set() for _ in range(RULES.ranks)]
        self.start = version, version_id
        self.connected = [False] * RULES.ranks
        # ids of the contributions whose messages each rank has
        self.have: list[set[str]] = [set() for _ in range(RULES.ranks)]
        self.version, self.id, self.joined = version, version_id, False
        self.published: dict[str, dict[str, Any]] = {}
        # steps of the current interval, and the numbers of cells asked for, of cells received, and of contributions
        self.steps, self.wants, self.granted, self.numbers = 0, 0, 0, 0
        self.cell: list[int] | None = None
        # True if the group tells the coordinator that it trains, so that missing steps count as a hang
        self.trains = False
        self.leaves = False  # True once the group's job has caught a stop signal
        self.unreached: set[str] = set()  # groups to which this group cannot connect

    @property
    def fragment(self) -> int:
        return self.version % self.rules.fragments

    def hello(self) -> dict[str, Any]:
        return {
            "incarnation": self.incarnation,
            "facts": self.facts,
            "rules": list(self.rules),
            "version": self.version,
            "id": self.id,
            "saves": self.folder,
            "joined": self.joined,
        }

    def report(self, rank: int) -> dict[str, Any]:
        packed = self.published.keys() & self.packed[rank]
        entries = {cid: self.published[cid] | {"digest": f"{cid}/{rank}"} for cid in packed}
        return {
            "published": entries,
            "have": sorted(self.have[rank]),
            "version": self.version,
            "fingerprint": self.fingerprint,
            "steps": self.steps,
            "unsent": self.unsent[self.fragment] > 0,
            "seconds": 0.3,
            "trains": self.trains and self.cell is not None,
            "wants": self.wants,
            "joined": self.joined,
            "leaves": self.leaves,
            "sent_bytes": 0,
            "unreached": dict.fromkeys(self.unreached, "host:1: timed out"),
            "address": ["host", 1],
        }


class World:
    """A coordinator of elastic DiLoCo and its groups, whose events a test chooses.

    Attributes:
        rules: rules of the run.
        now: time in seconds, which only `wait` advances.
        journal: records that the coordinator has written, from which a new coordinator continues.
        rounds: the coordinator's state.
        groups: running groups by index.
        saved: (version, its id) of the last checkpoint, with which a new group starts.
        ids: id of each version.
        rows: rows of rounds.jsonl that the coordinator has written, one for each version.
        lines: log lines of the coordinator.
    """

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules = rules
        self.now, self.journal, self.incarnations = 0.0, [], itertools.count()
        self.rounds = Rounds(now=0.0)
        self.groups: dict[int, Group] = {}
        self.saved = (0, NO_COMMIT)
        self.ids: dict[int, str] = {0: NO_COMMIT}
        self.rows, self.lines = list[dict[str, Any]](), list[str]()

    # ---- events that a schedule plays

    def start(self, index: int, folder: str = "f") -> None:
        if index not in self.groups:
            self.groups[index] = Group(f"g{index}", f"i{next(self.incarnations)}", *self.saved, self.rules)
            self.groups[index].folder = folder  # identifier of the folder of the group's checkpoints
            self.connect(index)

    def kill(self, index: int) -> None:
        group = self.groups.pop(index, None)
        for rank in range(RULES.ranks if group else 0):
            if group.connected[rank]:
                self.rounds.disconnect(group.name, group.incarnation, rank, self.now)

    def connect(self, index: int) -> None:
        group = self.groups.get(index)
        for rank in range(RULES.ranks if group else 0):
            if not group.connected[rank]:
                try:
                    self.rounds.connect(group.name, rank, group.hello(), self.now)
                    group.connected[rank] = True
                except RefusedError as error:
                    if not error.passes:
                        self.kill(index)
                    return

    def cut(self, index: int) -> None:
        group = self.groups.get(index)
        if group and group.connected[0]:
            group.connected[0] = False
            self.rounds.disconnect(group.name, group.incarnation, 0, self.now)

    def restart_coordinator(self) -> None:
        self.rounds = Rounds(self.journal, now=self.now)
        for group in self.groups.values():
            group.connected = [False] * RULES.ranks

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.settle()

    def fetch(self, index: int, rank: int) -> None:
        """Pack a group's own contributions on one rank, and fetch all messages that this rank needs and can get.

        The messages come from the ranks with the same index in other groups.
        """
        group = self.groups.get(index)
        self.pack(index, rank)
        state = self.state(index)
        if state is None:
            return
        named = set(state["pool"]) | {e["cid"] for commit in state["commits"].values() for e in commit["set"]}
        there = set().union(*(other.have[rank] for other in self.groups.values()))
        group.have[rank] |= named & there

    def pack(self, index: int, rank: int) -> None:
        """Let one rank of a group pack its messages of the group's contributions, so that others can fetch them."""
        if (group := self.groups.get(index)) is not None:
            group.packed[rank] |= group.published.keys()
            group.have[rank] |= group.published.keys()

    def work(self, index: int) -> None:
        """Take the next action of a group's training loop: join, merge a version, publish, ask for a cell, or train."""
        group, state = self.groups.get(index), self.state(index)
        if state is None:
            return
        if state["status"] != "member":
            donors = [g for i, g in self.groups.items() if (s := self.state(i)) is not None and s["status"] == "member"]
            if donors and not group.joined:
                group.version, group.id, group.joined = donors[0].version, donors[0].id, True
            return
        group.joined = True
        published_here = self.has_published(group)
        if published_here or (group.steps == 0 and state["version"] > group.version):
            commit = state["commits"].get(str(group.version + 1))
            if commit and all(e["cid"] in have for e in commit["set"] for have in group.have):
                group.version, group.id = group.version + 1, commit["id"]
                merged = {e["cid"] for e in commit["set"]}
                group.published = {cid: e for cid, e in group.published.items() if cid not in merged}
                if group.name in commit["saves"]:
                    self.saved = group.version, group.id
                if published_here:
                    group.steps = 0
        elif group.steps == RULES.interval or (
            group.cell is None
            and state["exhausted"]
            and state["granted"] == group.granted
            and group.unsent[group.fragment]
        ):
            group.wants += state["exhausted"]  # if no cell is left, the group asks for one in vain before it publishes
            self.publish(index)
        elif group.cell is None:
            group.wants = group.granted + 1
            if state["granted"] >= group.wants:
                group.granted, group.cell = group.wants, list(state["cell"])
        else:
            column, step, stop = group.cell
            group.cell = [column, step + 1, stop] if step + 1 < stop else None
            group.steps += 1
            group.unsent = [steps + 1 for steps in group.unsent]

    def has_published(self, group: Group) -> bool:
        return any(entry["base"] == group.version for entry in group.published.values())

    def go(self, times: int) -> None:
        """Let each group fetch messages and take one action, and let 0.5 s pass. Do this `times` times."""
        for _ in range(times):
            for index in list(self.groups):
                self.fetch(index, 0)
                self.fetch(index, 1)
                self.work(index)
            self.wait(0.5)

    def publish(self, index: int) -> None:
        """Publish the steps of a group since its last contribution as a contribution, even before the interval ends."""
        group = self.groups.get(index)
        if group and group.unsent[group.fragment] and not self.has_published(group):
            cid = f"{group.incarnation}.{group.numbers}"
            group.numbers += 1
            entry = {"base": group.version, "tokens": 1.0, "steps": group.steps}
            group.published[cid] = entry
            group.unsent[group.fragment] = 0
            self.pack(index, 0)  # rank 1 packs the contribution later, before its next fetch

    # ---- the coordinator's decisions, and their checks

    def state(self, index: int) -> dict[str, Any] | None:
        """Return what the coordinator of elastic DiLoCo tells a group; None if a rank of the group is not connected."""
        group = self.groups.get(index)
        if group is None or not all(group.connected):
            return None
        return self.rounds.state(group.name, 0, self.now)

    def settle(self) -> None:
        """Deliver the reports of all groups, let the coordinator of elastic DiLoCo decide, and check its decisions.

        A group that the coordinator has declared out ends.
        """
        for group in self.groups.values():
            for rank, connected in enumerate(group.connected):
                if connected and self.rounds.groups[group.name].incarnation == group.incarnation:
                    self.rounds.report(group.name, rank, group.report(rank), self.now)
        self.rounds.tick(self.now)
        news = self.rounds.take_news()
        self.rows += news.rows
        self.lines += news.lines
        for record in news.records:
            self.journal.append(record)
            if "begin" in record:
                self.ids = {version: text for version, text in self.ids.items() if version <= record["begin"]}
            if "commit" in record:
                assert self.ids.setdefault(record["commit"], record["id"]) == record["id"], "two branches"
                self.check_held(record)
        self.check_cells()
        for index, group in list(self.groups.items()):
            found = self.rounds.groups[group.name]
            ended = found.incarnation != group.incarnation or found.status == "out"
            if ended or (all(group.connected) and self.rounds.version < group.version):
                self.kill(index)  # the job ends, and its supervisor may start it again

    def check_held(self, commit: dict[str, Any]) -> None:
        """Check that some connected group holds the messages of all contributions that a new version merges."""
        cids = {entry["cid"] for entry in commit["set"]}
        assert any(all(cids <= have for have in g.have) and all(g.connected) for g in self.groups.values())

    def check_cells(self) -> None:
        """Check that each step of the run is in exactly one place: free, leased, in the pool, or merged."""
        rounds = self.rounds
        merged = [cell for commit in rounds.commits for entry in commit["set"] for cell in entry["cells"]]
        pool = [cell for entry in rounds.pool.values() for cell in entry["cells"]]
        leased = [cell for group in rounds.groups.values() for cell in group.leases]
        cells = [*merged, *pool, *leased, *rounds.free]
        steps = [(column, step) for column, first, stop in cells for step in range(first, stop)]
        assert len(steps) == len(set(steps)) == rounds.rules.iterations * rounds.rules.groups
        assert rounds.merged_steps == sum(stop - first for _, first, stop in merged)


INDEX = st.integers(0, 3)  # index of a group; there may be one group more than the nominal number
EVENTS = st.one_of(
    st.tuples(st.just("go"), st.integers(1, 4)),
    st.tuples(st.just("work"), INDEX),
    st.tuples(st.just("fetch"), INDEX, st.integers(0, 1)),
    st.tuples(st.sampled_from(("start", "kill", "connect", "cut", "publish")), INDEX),
    st.tuples(st.just("wait"), st.sampled_from((0.5, 1.0, 12.0))),
    st.tuples(st.just("restart_coordinator")),
)


def play(events: list[tuple], rules: Rules = RULES) -> World:
    """Play events on a coordinator and three groups, then finish the run without faults; return this `World`."""
    world = World(rules)
    for index in range(3):
        world.start(index)
    world.settle()
    for name, *arguments in events:
        getattr(world, name)(*arguments)
        world.settle()
    for _ in range(400):
        if world.rounds.done:
            return world
        for index in {0, 1, 2, *world.groups}:
            world.start(index)
            world.connect(index)
        world.go(1)
    raise AssertionError(f"the run has not ended in 400 turns without faults: {world.lines}")


def check_random_schedules(examples: int, rules: Rules) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(EVENTS, min_size=20, max_size=120))
    def check(events):
        world = play(events, rules)
        for commit in world.rounds.commits:
            assert all((commit["commit"] - 1 - entry["base"]) % rules.fragments == 0 for entry in commit["set"])
        assert world.rounds.merged_steps == RULES.iterations * RULES.groups
        # a new coordinator that reads the journal must have the same versions, contributions and free samples
        again = Rounds(world.journal, now=world.now)
        assert (again.commits, again.pool, again.free) == (world.rounds.commits, world.rounds.pool, world.rounds.free)

    check()


@pytest.mark.parametrize(("examples", "fragments"), [(10, 1), (10, 2), slow(50, 3), nightly(1500, 3)])
def test_random_schedules_merge_every_sample_once_in_one_chain(examples, fragments):
    check_random_schedules(examples, RULES._replace(fragments=fragments))


@pytest.mark.parametrize(("grace", "columns"), [(1.0, {0, 1}), (math.inf, {0})])
def test_fast_group_takes_cells_of_others_unless_it_waits_for_all(grace, columns):
    """Group 0 finishes its cell of the run's only block, which has two steps, before group 1 has asked for a cell.

    A block is the steps between two synchronizations. Group 0 may then lease group 1's cell too, unless rounds wait for
    all groups (an infinite grace).
    """
    world = World(RULES._replace(groups=2, iterations=2, grace=grace))
    world.start(0)
    world.start(1)
    world.wait(1)
    for _ in range(8):
        world.work(0)
        world.settle()
    assert {cell[0] for cell in world.rounds.groups["g0"].leases} == columns


def test_each_fragment_has_a_version_after_the_last_sample():
    """Three versions with samples change the fragments 0, 1 and 0. A version without samples follows for fragment 1."""
    world = play([], RULES._replace(fragments=2))
    steps = [[entry["steps"] for entry in commit["set"]] for commit in world.rounds.commits]
    assert steps == [[4] * 3, [4] * 3, [2] * 3, [0] * 3]
    assert [commit["saves"] for commit in world.rounds.commits] == [["g0"]] * 4
    assert not any(any(group.unsent) for group in world.groups.values())


def test_calm_run_merges_whole_intervals_in_the_order_of_slots():
    """Without faults, three versions merge 4, 4 and 2 steps of each group: 10 iterations in intervals of 4 steps."""
    world = play([])
    commits = world.rounds.commits
    assert [[entry["slot"] for entry in commit["set"]] for commit in commits] == [[0, 1, 2]] * 3
    assert [[entry["steps"] for entry in commit["set"]] for commit in commits] == [[4] * 3, [4] * 3, [2] * 3]
    assert all(cell[0] == entry["slot"] for commit in commits for entry in commit["set"] for cell in entry["cells"])
    assert [commit["saves"] for commit in commits] == [["g0"]] * 3


def test_first_group_of_each_folder_saves_and_groups_without_one_do_not():
    """Group 0 saves nothing, groups 1 and 3 save into folder a, and group 2 saves into folder b."""
    world = World()
    for index, folder in enumerate(("", "a", "b", "a")):
        world.start(index, folder)
    while not world.rounds.done:
        world.go(1)
    assert [commit["saves"] for commit in world.rounds.commits] == [["g1", "g2"]] * len(world.rounds.commits)


def test_last_group_of_each_folder_that_leaves_saves():
    """Groups 0 and 1 save into one folder. While one of them stays, the other one leaves without a save.

    If both leave, the group that leaves last saves, and the other one as well if its weights are newer.
    """
    world = World()
    for index, folder in enumerate(("f", "f", "g")):
        world.start(index, folder)
    world.wait(1)

    def savers() -> list[int]:
        return [index for index in range(3) if world.state(index)["saves_last"]]

    assert not savers()
    for leaving, expected in ((1, []), (0, [0]), (2, [0, 2])):
        world.groups[leaving].leaves = True
        world.wait(0.5)
        assert savers() == expected
    world.rounds.groups["g1"].reports[0]["version"] = 1
    assert world.rounds.state("g1", 0, world.now)["saves_last"]  # its weights are newer than group 0's


def test_group_waits_at_the_end_of_the_run_for_the_save_of_another():
    world = play([])
    world.groups[1].leaves = True
    world.wait(0.5)
    assert world.state(1)["saves_last"] is None  # groups 0 and 2 have the same folder, and do not leave yet
    world.kill(0)
    world.kill(2)
    world.wait(2)
    assert world.state(1)["saves_last"] is True


def test_joining_group_outlives_a_restart_of_the_coordinator():
    world = World()
    world.now = 1000.0
    world.start(0)
    world.start(1)
    world.wait(1)
    world.restart_coordinator()
    world.wait(5)
    world.connect(0)
    world.wait(10)
    assert [world.rounds.groups[name].status for name in ("g0", "g1")] == ["joining", "out"]


def test_row_of_a_version_has_steps_lateness_waiting_and_what_happened_since():
    """Group 0 publishes 2.5 s before group 1. Group 2 is killed while it has four steps on lease."""
    world = world_with_contributions(3, publish=[0])
    world.wait(3)
    world.publish(1)
    world.pack(1, 1)
    world.kill(2)
    for _ in range(3):
        world.settle()
        for index, rank in itertools.product((0, 1), (0, 1)):
            world.fetch(index, rank)
        world.wait(0.5)
    (row,) = world.rows
    assert [group["group"] for group in row["groups"]] == ["g0", "g1"]
    assert [(group["steps"], group["late"]) for group in row["groups"]] == [(4, 0), (4, 0)]
    first, second = (group["waited"] for group in row["groups"])
    assert first == second + 2.5
    assert row["returned"] == 4
    assert any("group g2 is out" in line for line in row["events"])
    assert row["sent_bytes"] == {"g0": 0, "g1": 0}
    assert (row["version"], row["merged"]) == (1, 8)


def world_with_contributions(count: int, publish: list[int]) -> World:
    """Return a world whose groups have trained an interval, which only the groups in `publish` have published.

    No other group has fetched the published contributions.
    """
    world = World()
    for index in range(count):
        world.start(index)
    world.wait(61)
    for _ in range(12):
        for index in range(count):
            if world.groups[index].steps < RULES.interval:
                world.work(index)
                world.settle()
    for index in publish:
        world.publish(index)
        world.pack(index, 1)
    return world


def test_group_that_takes_no_step_although_its_ranks_report_is_out():
    """Groups need 0.3 s per step here. A group that holds samples and takes no step for over 16 s is out.

    The 16 s are HEARTBEAT_SECONDS + HANGING_STEPS * 0.3 s. Other groups then get the samples.
    """
    world = world_with_contributions(2, publish=[])
    world.groups[1].steps, world.groups[1].cell = 2, [1, 2, 4]
    for group in world.groups.values():
        group.trains = True
    world.wait(15)
    assert world.rounds.members == {"g0", "g1"}
    world.groups[0].steps, world.groups[0].cell = 3, [0, 3, 4]
    world.wait(15)
    assert world.rounds.members == {"g0"}
    assert any("group g1 is out: no step for 16 s" in line for line in world.lines)
    assert [1, 0, 4] in world.rounds.free


def test_group_to_which_no_other_can_connect_is_out_and_reads_why():
    world = world_with_contributions(3, publish=[0, 1])
    world.groups[1].unreached = {"g0"}
    world.wait(35)
    assert len(world.rounds.members) == 3  # g2 may still fetch g0's message, and serve it to g1
    world.groups[2].unreached = {"g0"}
    world.wait(1)
    assert world.rounds.members == {"g1", "g2"}
    why = "no other group can connect to it (host:1: timed out): give --diloco-listen and --diloco-advertise an"
    assert any(f"group g0 is out: {why}" in line for line in world.lines)
    assert Rounds(world.journal).groups["g0"].why.startswith(why)
    assert [0, 0, 4] in world.rounds.free


def test_groups_outlive_a_suspended_coordinator_even_if_connections_have_ended():
    world = world_with_contributions(2, publish=[])
    world.now += 60
    world.rounds.wake(world.now)
    world.cut(0)
    world.wait(5)
    world.connect(0)
    world.wait(10)
    assert world.rounds.members == {"g0", "g1"}


def test_flags_of_groups_that_have_left_before_the_first_commit_do_not_bind():
    """Group 0 publishes a contribution, and leaves before the first commit. Then group 1 comes with other flags.

    The run must begin anew with the flags of group 1, from the first sample. A group with the old flags is refused.
    """
    world = world_with_contributions(1, publish=[0])
    world.kill(0)
    world.wait(2)
    world.rules = RULES._replace(interval=2)
    right = Group("g1", "again", 0, NO_COMMIT, world.rules)
    right.facts = {"--seed": "2"}
    world.groups[1] = right
    world.connect(1)
    with pytest.raises(RefusedError, match="--seed is '1' in group g2, and '2' in the other groups"):
        world.rounds.connect("g2", 0, Group("g2", "i", 0, NO_COMMIT, RULES).hello(), world.now)
    world.wait(62)
    assert world.rounds.members == {"g1"}
    right.wants = 1
    world.wait(1)
    for rounds in (world.rounds, Rounds(world.journal)):
        assert rounds.groups["g1"].leases == [[0, 0, 2]]  # the new flags' two steps, from the first sample
        assert not rounds.pool


@pytest.mark.parametrize(
    ("facts", "iterations", "refused"),
    [
        ({"--seed": "2"}, 11, None),
        ({"--seed": "1", "--diloco-steps": "4"}, 11, "--diloco-steps is '4'"),
        ({"--seed": "1", "the training data": "x"}, 10, "the training data is 'x'"),
        ({"--seed": "1"}, 9, "--train-iters is"),
    ],
)
def test_only_flags_of_the_samples_bind_after_all_groups_have_left(facts, iterations, refused):
    """Kill all groups, and let group 0 come back with other flags, data or iterations.

    Flags such as --seed may differ then. Changes to the table of samples are refused: another --diloco-steps, other
    data, or fewer --train-iters.
    """
    world = World()
    for index in range(RULES.groups):
        world.start(index)
    while not any(group.leases and group.leases[-1][2] == 10 for group in world.rounds.groups.values()):
        world.go(1)  # until a group has a lease of the last, short block
    merged = world.rounds.merged_steps
    assert merged > 0
    world.saved = world.rounds.version, world.rounds.id_of(world.rounds.version)
    for index in range(RULES.groups):
        world.kill(index)
    world.wait(2)
    world.rules = RULES._replace(iterations=iterations)
    again = Group("g0", "again", *world.saved, world.rules)
    again.facts = facts
    if refused:
        with pytest.raises(RefusedError, match=f"{refused}.* in group g0, and .* in the other groups"):
            world.rounds.connect("g0", 0, again.hello(), world.now)
        return
    world.groups[0] = again
    world.connect(0)
    world.wait(62)
    for rounds in (world.rounds, Rounds(world.journal)):
        assert rounds.members == {"g0"}
        unmerged = [*rounds.free, *rounds.groups["g0"].leases]
        assert merged + sum(stop - first for _, first, stop in unmerged) == 3 * iterations


def test_group_that_starts_from_other_weights_is_out_before_it_trains():
    world = World()
    for index in range(RULES.groups):
        world.start(index)
        world.groups[index].fingerprint = [0, 7 + index // 2]
    world.wait(2)
    assert world.rounds.members == {"g0", "g1"}
    assert any("another outer state of version 0 than others: start all groups from" in line for line in world.lines)


def test_groups_with_checkpoints_of_another_run_are_out():
    world = World()
    world.ids[1], world.saved = "of another run", (1, "of another run")
    for index in range(RULES.groups):
        world.start(index)
    world.wait(2)
    assert not world.rounds.members
    assert any(
        "group g0 is out: its checkpoint is of an elastic run, or of a version, that is not" in line
        for line in world.lines
    )


@pytest.mark.parametrize(
    ("other_version", "version_id"),
    [(0, "of another run"), (2, "of another run"), (1, "0")],  # the last journal is older than the group's leases
)
def test_group_is_refused_when_it_reconnects_to_a_coordinator_with_another_folder(other_version, version_id):
    stray = Group("g7", "i7", 1, version_id, RULES)
    stray.joined = True
    rounds = Rounds([{"run": FACTS, "rules": list(RULES)}])
    rounds.commits = [{"id": str(version), "set": [], "merged": 0} for version in range(other_version)]
    with pytest.raises(RefusedError, match=r"g7 has outer weights of version 1 that are not of this run: .*--folder"):
        rounds.connect("g7", 0, stray.hello(), 0.0)
    assert "g7" not in rounds.groups


def test_contribution_that_only_its_own_group_holds_is_not_committed():
    world = world_with_contributions(2, publish=[0])
    world.wait(5)
    assert world.rounds.version == 0
    world.fetch(1, 0)
    world.fetch(1, 1)
    world.wait(5)
    assert world.rounds.version == 1


def test_time_to_the_quorum_is_negative_during_the_grace():
    """The coordinator reports the time to a quorum that has been reached as a negative number.

    `ElasticLoop._is_called` lets a group publish early if one more step would end after half of the grace. The number
    counts from the quorum, so this rule also holds for a group whose steps are shorter than half of the grace.
    """
    world = world_with_contributions(3, publish=[0, 1])
    world.groups[2].steps = 1
    for index, rank in itertools.product((0, 1), (0, 1)):
        world.settle()
        world.fetch(index, rank)
    world.wait(0.5)
    began = world.now
    world.wait(0.5)
    assert world.rounds.version == 0
    assert world.state(2)["quorum_in"] == began - world.now == -0.5


def test_version_waits_for_all_fetches_during_the_grace_then_merges_what_one_group_has():
    """Each group has fetched the message of one other group, so no group has all three messages."""
    world = world_with_contributions(3, publish=[0, 1, 2])
    for index, group in world.groups.items():
        for have in group.have:
            have.update(world.groups[(index + 1) % 3].published)
    world.wait(1.0)
    assert world.rounds.version == 0
    world.wait(0.5)
    assert [entry["group"] for entry in world.rounds.commits[0]["set"]] == ["g0", "g1"]
    assert [entry["group"] for entry in world.rounds.pool.values()] == ["g2"]


def test_group_with_a_slow_uplink_gets_no_samples_until_its_contributions_are_fetched():
    """Other groups cannot fetch the contributions of group 2 for a while, and train on without it."""
    world = World(RULES._replace(iterations=200))
    fetch, slow = world.fetch, [True]

    def fetch_slowly(index: int, rank: int) -> None:
        fetch(index, rank)
        if slow[0] and index != 2:
            world.groups[index].have[rank] -= world.groups[2].published.keys()

    world.fetch = fetch_slowly
    for index in range(3):
        world.start(index)
    world.go(60)
    assert world.rounds.version > 4
    assert [entry["group"] for entry in world.rounds.pool.values()] == ["g2", "g2"]
    slow[0] = False
    world.go(20)
    late = [world.rounds.version - entry["base"] for entry in world.rounds.pool.values() if entry["group"] == "g2"]
    assert all(age < 2 for age in late)
    assert world.rounds.groups["g2"].granted > 3


def test_restarted_coordinator_waits_for_the_same_groups_in_the_first_round():
    world = World(RULES._replace(grace=math.inf))
    for index in range(2):
        world.start(index)
    world.wait(61)
    world.restart_coordinator()
    for index in range(2):
        world.connect(index)
    world.settle()
    assert world.rounds.waited_for == {"g0", "g1"}
    world.start(2)
    world.go(1)
    assert world.rounds.members == {"g0", "g1", "g2"}
    assert world.rounds.waited_for == Rounds(world.journal).waited_for == {"g0", "g1"}


def test_start_waits_anew_if_the_group_that_began_the_wait_has_left():
    """A run starts without its third group after 60 s (ASSEMBLY_SECONDS).

    The 60 s must count from the start of group 1, because group 0, which started first, has been killed.
    """
    world = World()
    world.start(0)
    world.wait(20)
    world.kill(0)
    world.wait(100)
    world.start(1)
    world.wait(55)
    assert not world.rounds.members
    world.start(2)
    world.wait(10)
    assert world.rounds.members == world.rounds.waited_for == {"g1", "g2"}


def test_version_whose_holders_died_during_the_grace_is_not_committed():
    world = world_with_contributions(3, publish=[0, 1])
    for index, rank in itertools.product((0, 1), (0, 1)):
        world.settle()
        world.fetch(index, rank)
    world.wait(0.5)  # half of the grace after the quorum, in which group 2 has sent nothing
    world.kill(0)
    world.kill(1)
    world.wait(5)
    assert world.rounds.version == 0
    assert world.rounds.pool == {}


def test_contribution_takes_the_steps_of_two_leases_in_the_order_in_which_they_were_granted():
    """Group a leased four steps, and had published two of them before it was lost. Group b leases all four steps.

    The steps that group a had not published are a separate lease, which group b gets first. So the three steps that
    group b publishes are the last two of the four, and then the first one.
    """

    def published(group: str, steps: int) -> dict[str, Any]:
        return {"publish": {"cid": group, "group": group, "steps": steps}}

    joined = [{"join": name, "slot": slot, "incarnation": name} for slot, name in enumerate("ab")]
    leased = {"lease": [0, 0, 4], "group": "a"}, published("a", 2), {"out": "a"}, {"drop": ["a"]}
    again = {"lease": [0, 2, 4], "group": "b"}, {"lease": [0, 0, 2], "group": "b"}
    rounds = Rounds([{"run": FACTS, "rules": list(RULES)}, *joined, {"members": ["a", "b"]}, *leased, *again])
    rounds._apply(published("b", 3))
    assert rounds.pool["b"]["cells"] == [[0, 2, 4], [0, 0, 1]]
    assert rounds.groups["b"].leases == [[0, 1, 2]]
    assert not [cell for cell in rounds.free if cell[0] == 0 and cell[1] < 4]


def test_group_beyond_the_nominal_number_does_not_stop_a_run_that_waits_for_all():
    world = World(RULES._replace(groups=2, grace=math.inf))
    for index in range(3):
        world.start(index)
    world.go(40)
    assert len(world.rounds.members) == 3
    assert world.rounds.merged_steps > 2 * RULES.interval


def test_group_whose_name_another_job_takes_reads_the_flag():
    """Neither job is complete: a rank of each has connected, as if two hosts with the same name start together."""
    rounds = Rounds()
    for incarnation in ("first", "second"):
        rounds.connect("ubuntu", 0, Group("ubuntu", incarnation, 0, NO_COMMIT, RULES).hello(), 0.0)
    assert any("another job also has --diloco-group ubuntu" in line for line in rounds.take_news().lines)
