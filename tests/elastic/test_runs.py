"""Run several jobs and a coordinator of elastic DiLoCo.

Without faults, results equal the results of fixed replica groups. A fault loses nothing but the work of the group
that it hits.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.fork_python import forked_python
from helpers.pretrain import TOY, Home
from helpers.program import Program
from helpers.small_run import parse
from helpers.tiers import nightly

from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import as_one_job
from megazpp.topology.cluster import Cluster

pytestmark = pytest.mark.slow

BATCH = 24
OUTER = ("--diloco-steps", "5", "--diloco-outer-momentum", "0.6", "--diloco-outer-lr", "0.7")
SIZES = ("--global-batch-size", str(BATCH))


class Site:
    """A coordinator of elastic DiLoCo, and groups that are jobs of `nproc` ranks each."""

    def __init__(
        self, path: Path, *flags: str, groups: int = 2, nproc: int = 1, outer: tuple[str, ...] = OUTER
    ) -> None:
        self.path, self.flags, self.groups, self.nproc, self.outer = path, flags, groups, nproc, outer
        (path / "home").mkdir()
        self.programs: list[Program] = []
        self.coordinator = self.coordinate("127.0.0.1:0")
        self.coordinator.wait_for("listens on")
        self.address = re.findall(r"listens on (\S+)", self.coordinator.output())[-1]

    @property
    def common_flags(self) -> tuple[str, ...]:
        rows = str(BATCH // self.groups // self.nproc // 2)  # two micro-batches per step
        return (*self.outer, *SIZES, "--diloco-replica-groups", str(self.groups), "--micro-batch-size", rows)

    def coordinate(self, address: str, *flags: str) -> Program:
        command = ("tools/coordinate.py", "--folder", str(self.path / "journal"), "--listen", address, *flags)
        return self._start(command)

    def start(self, name: str, *flags: str) -> Program:
        given = ("--diloco-coordinator", self.address, "--diloco-group", name, "--nproc", str(self.nproc))
        places = ("--run-dir", str(self.path / name), "--data-cache-path", str(self.path / "cache"))
        command = ("pretrain_gpt.py", *TOY, *self.common_flags, *given, *places, *self.flags, *flags)
        return self._start(command)

    def _start(self, command: tuple[str, ...]) -> Program:
        self.programs.append(Program(*command, folder=self.path / "home", python=str(forked_python())))
        return self.programs[-1]

    def version(self) -> int:
        return len(re.findall(r"version \d+: ", self.coordinator.output()))

    def wait_for_version(self, version: int, *groups: Program) -> None:
        self.coordinator.wait_until(lambda: self.version() >= version or any(g.process.poll() for g in groups))
        assert self.version() >= version, "\n".join(group.output() for group in groups)

    def commits(self) -> list[dict]:
        newest = max((self.path / "journal" / "coordinator").iterdir(), key=lambda path: int(path.stem.split("-")[1]))
        found: list[dict] = []
        for record in map(json.loads, newest.read_text().splitlines()):
            if "begin" in record:  # the groups have started from this version, so later versions have been given up
                found = [commit for commit in found if commit["commit"] <= record["begin"]]
            elif "commit" in record:
                found.append(record)
        return found

    def check_all_merged_once(self, iterations: int) -> None:
        cells = [cell for commit in self.commits() for entry in commit["set"] for cell in entry["cells"]]
        steps = [(column, step) for column, first, stop in cells for step in range(first, stop)]
        assert len(steps) == len(set(steps)) == iterations * self.groups


@pytest.fixture
def new_site(tmp_path):
    """Return a function that makes a `Site`, whose processes all end with the test."""
    sites: list[Site] = []

    def make(*flags: str, **settings: Any) -> Site:
        sites.append(Site(tmp_path, *flags, **settings))
        return sites[-1]

    yield make
    for program in (program for site in sites for program in site.programs):
        kill(program)


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def finish(*programs: Program) -> None:
    for program in programs:
        output = program.finish()
        assert program.process.returncode == 0, output


def kill(program: Program) -> None:
    """Kill all processes of a job at once."""
    program.kill()
    program.process.wait()


def planned_bytes(flags: tuple[str, ...]) -> int:
    """Return the bytes that a job of two ranks sends to the other job for one version of each fragment, as planned."""
    config, cluster = as_one_job(parse(shlex.join(flags)).config, Cluster(num_nodes=1, ranks_per_node=2))
    return Estimator(cluster, device_type="cpu", elastic=True).estimate(config).node_replica_group_bytes


def validation(path: Path) -> float:
    return json.loads((path / "summary.json").read_text())["validation_loss"]


VOCABULARY = ("--vocab-size", "257")  # 256 tokens and the end of a document, which the tokenizer adds
FRAGMENTS = "--num-layers 3 --diloco-steps 6 --diloco-fragments 2"


@pytest.mark.parametrize(
    ("flags", "iterations", "steps"),
    [
        nightly("--diloco-fragment-sync-delay 2 --diloco-fragment-update-alpha 0.4", 12, (5, 5, 2)),
        nightly("--optimizer muon", 12, (5, 5, 2)),
        nightly("--tensor-model-parallel-size 2", 12, (5, 5, 2)),
        nightly(FRAGMENTS, 15, (3, 3, 3, 3, 3, 0)),
        (f"{FRAGMENTS} --diloco-fragment-sync-delay 2 --tensor-model-parallel-size 2", 14, (3, 3, 3, 3, 2, 0)),
    ],
)
def test_run_without_faults_has_the_bits_of_fixed_replica_groups(tmp_path, new_site, flags, iterations, steps):
    """Compare elastic DiLoCo without faults with DiLoCo of fixed groups: outer weights, momentum and R have equal bits.

    A group has two ranks. R is the copy of the outer weights to which all groups apply the same rounded 4-bit steps.
    """
    common = (*flags.split(), "--train-iters", str(iterations), "--save")
    site = new_site(*common, str(tmp_path / "elastic"), "--diloco-wait-for-all", nproc=2)
    groups = [site.start(name) for name in ("a", "b")]
    finish(*groups)
    fixed = (*TOY, *site.common_flags, "--emulate-nodes", "2", *common, str(tmp_path / "fixed"))
    Home(tmp_path).pretrain(*fixed, run="fixed-run", nproc=4)
    elastic, fixed = (read_tensors(tmp_path / name / f"iter_{iterations:07d}") for name in ("elastic", "fixed"))
    prefixes = ("model.", "diloco.momentum.", "diloco.common.")
    for prefix in prefixes:
        names = [name for name in fixed if name.startswith(prefix)]
        assert len(names) > 5
        for name in names:
            assert torch.equal(elastic[name], fixed[name]), name
    assert validation(tmp_path / "a") == validation(tmp_path / "b") == validation(tmp_path / "fixed-run")
    planned = planned_bytes((*TOY, *site.common_flags, *common[:-1], "--diloco-coordinator", site.address, *VOCABULARY))
    for name in ("a", "b"):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        (counted,) = (row for row in summary["traffic"] if row["axis"] == "replica_group")
        assert (counted["wire"], counted["calls"]) == ("cross", len(steps))
        assert counted["sent_bytes"] == 3 * planned > 0  # three versions of the whole model, or six of half of it
    rows = [json.loads(line) for line in (tmp_path / "journal" / "rounds.jsonl").read_text().splitlines()]
    assert [[group["steps"] for group in row["groups"]] for row in rows] == [[n, n] for n in steps]
    site.check_all_merged_once(iterations)


def test_killed_group_is_out_at_once_and_a_new_one_joins(tmp_path, new_site):
    """Kill group b, and start it again later. It must then fetch the outer weights and the loss scale from a member."""
    site = new_site("--train-iters", "150", "--fp16", groups=3)
    a, b, c = (site.start(name) for name in "abc")
    site.wait_for_version(3, a, b, c)
    kill(b)
    site.coordinator.wait_for("group b is out: connection lost")
    before = site.version()
    site.wait_for_version(before + 2, a, c)
    again = site.start("b")
    site.coordinator.wait_for("group b joins")
    finish(a, again, c)
    assert "state of version" in again.output()
    scales = [float(scale) for scale in re.findall(r"loss scale: (\S+)", again.output())]
    assert scales[0] < 2**32  # the new group has taken a member's loss scale; the initial one is 2**32
    site.check_all_merged_once(150)
    assert "ERROR" not in site.coordinator.output()
    assert validation(tmp_path / "a") == validation(tmp_path / "b") == validation(tmp_path / "c")


def test_coordinator_that_is_killed_and_started_again_ends_no_group(tmp_path, new_site):
    """Kill the coordinator, and start it again. The groups must wait for it, and end with equal outer weights.

    Each group saves into its own run folder.
    """
    site = new_site("--train-iters", "40", "--save-to-run-dir")
    a, b = site.start("a"), site.start("b")
    site.wait_for_version(3, a, b)
    kill(site.coordinator)
    for group in (a, b):
        group.wait_for("lost the coordinator")
    site.coordinator = site.coordinate(site.address)
    finish(a, b)
    for group in (a, b):
        assert "the coordinator is back" in group.output()
    site.check_all_merged_once(40)
    assert validation(tmp_path / "a") == validation(tmp_path / "b")
    saved = [read_tensors(tmp_path / name / "checkpoints/iter_0000040") for name in "ab"]
    names = [name for name in saved[0] if name.startswith("model.")]
    assert len(names) > 5
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in names)


def test_stopped_group_is_not_waited_for_and_its_return_is_refused(new_site):
    """Suspend the processes of group b. The two other groups hold each other's messages, so they train on.

    With only one other group, a version would have to wait until group b is out.
    """
    site = new_site("--train-iters", "3000", "--diloco-grace", "0.5", groups=3)
    a, b, c = (site.start(name) for name in "abc")
    site.wait_for_version(3, a, b, c)
    workers = [psutil.Process(pid) for pid in b.left_behind()]
    for worker in workers:
        worker.suspend()
    site.coordinator.wait_for("does not wait for b")
    site.coordinator.wait_for("group b is out: no heartbeat")
    for worker in workers:
        worker.resume()
    b.process.wait(timeout=60)
    assert b.process.returncode != 0
    # the last state that reached the stopped group may already have a version whose messages nobody keeps
    refusals = ("declared group b out", "group b is out", "other groups do not keep the messages")
    assert any(refusal in b.output() for refusal in refusals)


def test_all_groups_start_again_from_the_newest_checkpoint(tmp_path, new_site):
    folder = str(tmp_path / "saved")
    flags = ("--train-iters", "80", "--save", folder, "--load", folder, "--save-interval", "20")
    # Without flags, the outer learning rate and momentum depend on the length of the run, so checkpoints record them
    site = new_site(*flags, outer=OUTER[:2])
    a, b = site.start("a"), site.start("b")
    a.wait_until(lambda: "successfully saved" in a.output() + b.output())
    kill(a)
    kill(b)
    kill(site.coordinator)
    site.coordinator = site.coordinate(site.address)
    a, b = site.start("a"), site.start("b")
    finish(a, b)
    assert "loaded checkpoint" in a.output()
    site.check_all_merged_once(80)
    assert sorted(path.name for path in Path(folder).glob("iter_*"))[-1] == "iter_0000080"
    assert validation(tmp_path / "a") == validation(tmp_path / "b")


def test_signal_ends_one_group_and_the_others_train_its_samples(new_site):
    site = new_site("--train-iters", "60")
    a, b = site.start("a"), site.start("b")
    site.wait_for_version(3, a, b)
    b.process.terminate()
    finish(b)
    site.coordinator.wait_for("group b is out: it has left")
    finish(a)
    site.check_all_merged_once(60)


def test_signals_to_all_groups_save_the_newest_outer_weights(tmp_path, new_site):
    """Stop all groups by a signal. No group is left to save at the next interval, so the groups must save as they end.

    Groups that start again continue from this checkpoint.
    """
    folder = str(tmp_path / "saved")
    site = new_site("--train-iters", "3000", "--save", folder, "--load", folder, outer=OUTER[:2])
    a, b = site.start("a"), site.start("b")
    site.wait_for_version(3, a, b)
    for group in (a, b):
        group.process.terminate()
    finish(a, b)
    merged = site.commits()[-1]["merged"]
    assert [path.name for path in Path(folder).glob("iter_*")] == [f"iter_{merged // 2:07d}"]
    a, b = site.start("a"), site.start("b")
    site.coordinator.wait_for(f"the run starts at version {len(site.commits())} with groups a, b")
    for group in (a, b):
        group.process.terminate()
    finish(a, b)
    # ---- a group that still waits for the coordinator ends in the same way
    kill(site.coordinator)
    a = site.start("a")
    a.wait_for("waiting for the coordinator")
    a.process.terminate()
    finish(a)
    assert "stopped by a stop signal before this group had reached the coordinator" in a.output()


def test_group_with_other_flags_or_another_secret_is_refused_by_flag(tmp_path, new_site):
    site = new_site("--train-iters", "150")
    a = site.start("a")
    a.wait_for("model FLOPs")
    b = site.start("b", "--seed", "77")
    b.process.wait(timeout=120)
    assert b.process.returncode != 0
    assert "--seed is '77' in group b, and '1234' in the other groups" in b.output()
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    secret.chmod(0o600)
    c = site.start("c", "--diloco-secret-file", str(secret))
    c.process.wait(timeout=60)
    assert c.process.returncode != 0
    assert "cannot be used: the peer does not know the secret of this run: give all groups" in c.output()
    assert "does not know the secret" in site.coordinator.output()
    kill(a)


def test_groups_that_start_from_different_checkpoints_merge_nothing_of_each_other(tmp_path, new_site):
    for seed in ("1", "2"):
        flags = ("--train-iters", "1", "--save", str(tmp_path / seed), "--seed", seed, "--global-batch-size", "2")
        Home(tmp_path).pretrain(*TOY, *flags, run=f"base-{seed}", nproc=1)
    site = new_site("--train-iters", "10", "--seed", "3", "--finetune")
    groups = [site.start(name, "--load", str(tmp_path / name)) for name in ("1", "2")]
    codes = [group.process.wait(timeout=120) for group in groups]
    assert sorted(codes) == [0, 1], site.coordinator.output()
    out = groups[codes.index(1)].output()
    assert "has another outer state of version 0 than others: start all groups from the same weights (--load)" in out
    assert all(len(commit["set"]) == 1 for commit in site.commits())
    # with --no-finetune a group would continue at the checkpoint's iteration, which no version of an elastic run has
    group = site.start("3", "--load", str(tmp_path / "1"), "--no-finetune", "--override-opt_param-scheduler")
    group.process.wait(timeout=60)
    assert "iteration 1 has no version of the outer weights, so no elastic run can continue it" in group.output()
