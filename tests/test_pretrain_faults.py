"""Inject faults of a cluster into runs, such as killed ranks: only the steps since the last checkpoint are lost."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.fork_python import forked_python
from helpers.pretrain import TOY
from helpers.program import ROOT, Program, run_forked
from helpers.tiers import nightly

pytestmark = pytest.mark.slow

SEED = 20
SECONDS_TO_START = 2.0  # approximate time from the start of the program to its first step
FLAGS = [str(ROOT / "pretrain_gpt.py"), *TOY, "--eval-iters", "0", "--zeropp", "--emulate-nodes", "2"]
OURS = ["--nproc", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*command: str, folder: Path, cwd: Path = ROOT) -> Program:
    return Program(*command, folder=folder, cwd=cwd, python=str(forked_python()))


class Runs:
    """Commands that run pretrain_gpt.py with a common run folder and a common checkpoint folder.

    Args:
        path: folder in which both folders are.
        named: False if no flag names the two folders. The run folder's name then contains the time of the first start,
            and the checkpoints are in the run folder.
    """

    def __init__(self, path: Path, *, named: bool = True) -> None:
        self.path, self.named = path, named
        places = {"run-dir": "run", "save": "checkpoints", "load": "checkpoints"} if named else {}
        places |= {"data-cache-path": "cache"}
        self.command = [*FLAGS, *(f"--{flag}={path / name}" for flag, name in places.items())]
        self.command += [] if named else ["--save-to-run-dir"]

    @property
    def folder(self) -> Path:
        (folder,) = [self.path / "run"] if self.named else (self.path / "runs").iterdir()
        return folder

    def losses(self) -> dict[int, set[tuple[float, float]]]:
        """Return the logged pairs (loss, gradient norm) of each iteration.

        An iteration that was repeated after a restart has one pair if both times gave the same numbers.
        """
        found: defaultdict[int, set[tuple[float, float]]] = defaultdict(set)
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # rank 0 was killed while it wrote this line
                row = json.loads(line)
                found[row["iteration"]].add((row["lm_loss"], row["grad_norm"]))
        return found

    @property
    def saved(self) -> int:
        checkpoints = (self.path if self.named else self.folder) / "checkpoints"
        return int((checkpoints / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize(
    ("kills", "diloco"), [(2, ""), nightly(1, "--diloco-steps 4 --diloco-fragment-sync-delay 2")]
)  # few kills, so that the test is short
def test_killed_ranks_lose_only_the_steps_since_the_last_checkpoint(tmp_path, kills, diloco):
    """A random rank is killed `kills` times, each time at a random moment: during the start, a step or a save.

    The losses of all iterations must equal the losses of a run without faults. All restarts use the first start's run
    folder, although no flag names it.
    """
    calm, runs, length = Runs(tmp_path / "calm"), Runs(tmp_path, named=False), 20 * kills
    flags = (*OURS, *diloco.split(), "--train-iters", str(length))
    code, output = run_forked(*calm.command, *flags, folder=tmp_path)
    assert code == 0, output
    saving = ("--save-interval", "3", "--keep-last", "2", "--max-restarts", str(kills))
    program = start(*runs.command, *flags, *saving, folder=tmp_path, cwd=tmp_path)
    kill_at_random_moments(program, kills)
    output = program.finish()
    assert program.process.returncode == 0, output
    assert "Traceback" not in output
    assert output.count(" was killed by SIGKILL; restart ") == kills
    assert runs.losses() == calm.losses()
    assert sorted(runs.losses()) == list(range(1, length + 1))
    assert runs.saved == length


def kill_at_random_moments(program: Program, kills: int) -> None:
    """Kill a random rank `kills` times: during the start, in a step, or in a save.

    After each kill the function waits until the restarted job has run a step.
    """
    chance, seen = random.Random(SEED), 0

    def count(beginning: str) -> int:
        return program.output()[seen:].count(f"\n{beginning}")

    for kill in range(1, kills + 1):
        moment, began = chance.choice(("start", "step", "save")), time.monotonic()
        program.wait_until(lambda: len(program.workers()) == 2)
        workers = program.workers()  # looks for them before the moment, because this takes longer than some steps
        if moment == "start":
            until = began + chance.uniform(0.0, SECONDS_TO_START)
            program.wait_until(lambda: time.monotonic() > until or count(" iteration ") > 0)  # noqa: B023
        else:
            text, times = (" iteration ", chance.randint(1, 8)) if moment == "step" else ("saving checkpoint", 1)
            program.wait_until(lambda: count(text) >= times)  # noqa: B023
            time.sleep(chance.uniform(0.0, 0.05))
        os.kill(chance.choice(workers), signal.SIGKILL)
        program.wait_for(f"restart {kill} of {kills}")
        seen = len(program.output())
        program.wait_until(lambda: count(" iteration ") > 0)


def test_stop_signal_in_any_phase_saves_and_exits_with_0(tmp_path):
    """The stop signal comes during a step, a save and an evaluation, and each run resumes the previous one.

    torchrun passes SIGTERM on to its workers, and then exits with an error because a signal has stopped them. So only
    the exit codes of the other runs are checked.
    """
    flags = shlex.split("--train-iters 3000 --save-interval 4 --eval-interval 5 --split 90,5,5 --eval-iters")
    runs, last = Runs(tmp_path), 0
    for before, after, phase, signum, eval_iters in (
        (TORCHRUN, [], r"^ iteration +3/", signal.SIGTERM, "1"),
        ([], OURS, r"^saving checkpoint at iteration", signal.SIGUSR1, "1"),
        # The evaluation would take minutes for its 5000 iterations, so the signal arrives during the evaluation
        ([], OURS, r"^ iteration +\d*[05]/", signal.SIGTERM, "5000"),
    ):
        program = start(*before, *runs.command, *flags, eval_iters, *after, folder=tmp_path)
        program.wait_until(lambda: re.search(phase, program.output(), re.MULTILINE) is not None)  # noqa: B023
        program.process.send_signal(signum)
        output = program.finish()
        assert before or (program.process.returncode == 0 and "Traceback" not in output), output
        assert f"stopped by {signum.name}\n" in output
        assert (f"the evaluation ends without a result because of {signum.name}\n" in output) == (eval_iters == "5000")
        iterations = [int(n) for n in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)]
        assert iterations[0] == last + 1
        assert runs.saved == iterations[-1]
        last = iterations[-1]
    assert all(len(values) == 1 for values in runs.losses().values())


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["start", "loading checkpoint", " iteration ", "saving checkpoint", "validation"])
def test_rank_that_stops_in_any_phase_ends_the_job_and_is_named(tmp_path, phase, rank):
    """The rank's process gets SIGSTOP, as if its machine or its file system had stopped."""
    runs, flags = Runs(tmp_path), [*OURS, "--split", "90,5,5", "--save-interval", "2", "--eval-interval", "3"]
    flags += ["--train-iters", "3000", "--eval-iters", "20"]
    code, output = run_forked(*runs.command, *flags, "--exit-interval", "1", folder=tmp_path)
    assert code == 0, output
    program = start(*runs.command, *flags, "--distributed-timeout-minutes", "0.2", folder=tmp_path)
    program.wait_until(lambda: len(program.workers()) == 2)
    if phase != "start":
        program.wait_for(phase)
    os.kill(program.workers()[rank], signal.SIGSTOP)
    began = time.monotonic()
    output = program.finish()
    assert time.monotonic() - began < 60.0
    assert "watchdog: the job has made no progress for " in output
    assert f"rank {rank} did not a" in output  # the message says "did not arrive" or "did not answer"
    assert runs.saved >= 1
