"""Test checkpoints of hosts without a shared file system. Two ranks with different folders stand for two hosts."""

import dataclasses
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from helpers.checkpoints import Attempt, run
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import GPT2_STYLE, Case

from megazpp.base.program import UserError
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.zero.config import ZeroConfig

PLAIN = Case(model=dataclasses.replace(GPT2_STYLE, num_layers=1), nodes=2, global_batch=12)
CASES = {
    "sharded": PLAIN,
    "zeropp": dataclasses.replace(PLAIN, zero=ZeroConfig(zeropp=True)),
    # ZeRO stage 0: every rank has complete weights, and each tensor is written by one rank only
    "a copy on each host": dataclasses.replace(PLAIN, nodes=1, stage=0),
}
MISSING = "No such file or directory (if the hosts that saved it had no shared folder: resume on the same hosts"


def host(home: Path, *, swapped: bool = False) -> str:
    return str(home / ("alpha", "beta")[(dist.get_rank() + swapped) % 2])


def open_attempt(case: Case, home: Path, *, swapped: bool = False, **flags) -> Attempt:
    folder = host(home, swapped=swapped)
    attempt = Attempt(case, save=folder, load=folder, **{"save_interval": 2} | flags)
    # As in a real run, run.json differs between ranks: there only rank 0 knows the run folder, which run.json names.
    own = dataclasses.replace(attempt.checkpoints._record, run_dir=f"run {dist.get_rank()}")
    attempt.checkpoints._record = own
    return attempt


def train_to(case: Case, home: Path, steps: int, **flags) -> tuple[int, list, dict[str, str], list[str]]:
    """Train up to step `steps`, from the checkpoint if there is one.

    Return the iteration at the start, the results of the steps, the hashes of the final state by key, and the log
    lines.
    """
    attempt = open_attempt(case, home, **flags)
    try:
        start, results = attempt.load().iteration, attempt.train(steps)
        attempt.checkpoints.finish()
    finally:
        attempt.folder.unlock()  # otherwise a failed attempt keeps the lock until Python collects its reference cycles
    return start, results, attempt.fingerprint(), attempt.lines


@pytest.mark.parametrize("case", chosen(CASES, "a copy on each host", slow=("sharded", "zeropp")))
def test_run_resumes_bit_exactly_where_each_host_keeps_its_own_files(tmp_path, case):
    whole = ranks(2).run(train_to, case, tmp_path / "whole", 4)
    ranks(2).run(train_to, case, tmp_path / "parts", 2)
    files = {path.name for path in tmp_path.glob("parts/*/iter_0000002/*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}
    assert not (tmp_path / "parts/alpha/iter_0000002/__1_0.distcp").exists()
    for before, (start, steps, state, lines) in zip(
        whole, ranks(2).run(train_to, case, tmp_path / "parts", 4), strict=True
    ):
        assert start == 2
        assert steps == before[1][2:]
        assert state == before[2]
        assert any("WARNING: --save" in line and "is a separate folder on" in line for line in lines)


def test_files_of_all_hosts_in_one_folder_are_a_whole_checkpoint(tmp_path):
    (_, _, expected, _), _ = ranks(2).run(train_to, PLAIN, tmp_path, 2)
    shutil.copytree(tmp_path / "beta", tmp_path / "alpha", dirs_exist_ok=True)
    one = dataclasses.replace(PLAIN, nodes=1)
    (outcome,) = ranks(1).run(run, one, 2, load=str(tmp_path / "alpha"), whole=True)
    assert outcome.start.iteration == 2
    assert outcome.loaded.keys() > {key for key in expected if key.startswith("model.")}


def problem(case: Case, home: Path, **flags) -> str:
    try:
        train_to(case, home, 3, **flags)
    except (ValueError, UserError) as error:
        return str(error)
    return ""


def test_wrong_files_on_a_host_are_an_error_on_all_hosts(tmp_path):
    ranks(2).run(train_to, PLAIN, tmp_path / "one", 2)
    ranks(2).run(train_to, dataclasses.replace(PLAIN, seed=7), tmp_path / "other", 2)
    for found in ranks(2).run(problem, PLAIN, tmp_path / "one", swapped=True):
        assert found.count(MISSING) == 2
    shutil.rmtree(tmp_path / "one/beta")
    assert set(ranks(2).run(problem, PLAIN, tmp_path / "one")) == {
        f"{tmp_path}/one/beta/iter_0000002/checksums.txt cannot be read: No such file or directory; "
        "copy it again, or use another checkpoint"
    }
    shutil.rmtree(tmp_path / "one/beta", ignore_errors=True)
    shutil.copytree(tmp_path / "other/beta", tmp_path / "one/beta")
    for found in ranks(2).run(problem, PLAIN, tmp_path / "one"):
        assert "one/beta/iter_0000002 on " in found or "one/alpha/iter_0000002 on " in found
        assert "is not part of the same checkpoint as on" in found


def fail_at_the_end(case: Case, home: Path) -> str:
    """Save step 2, and then step 4. The save of step 4 fails on rank 0, after rank 1 has completed its own folder.

    Return the error.
    """
    attempt = open_attempt(case, home, keep_last=1)
    attempt.load()
    attempt.train(2)
    with mock.patch.object(CheckpointFolder, "complete", complete_except_on_rank_0):
        try:
            attempt.train(4)
        except UserError as error:
            return str(error)
    return ""


complete = CheckpointFolder.complete


def complete_except_on_rank_0(folder: CheckpointFolder, iteration: int) -> list[Path]:
    if dist.get_rank() == 0:
        raise OSError("injected")
    return complete(folder, iteration)


@pytest.mark.slow
def test_save_that_fails_on_the_first_host_loses_no_checkpoint(tmp_path):
    whole = ranks(2).run(train_to, PLAIN, tmp_path / "whole", 4)
    assert all("injected" in found for found in ranks(2).run(fail_at_the_end, PLAIN, tmp_path / "parts"))
    assert {path.parent.name + "/" + path.name for path in tmp_path.glob("parts/*/iter_*")} == {
        "alpha/iter_0000002",
        "beta/iter_0000002",
        "beta/iter_0000004",
    }
    for before, (start, steps, state, _) in zip(
        whole, ranks(2).run(train_to, PLAIN, tmp_path / "parts", 4, keep_last=1), strict=True
    ):
        assert (start, steps, state) == (2, before[1][2:], before[2])
