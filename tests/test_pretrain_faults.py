"""What clusters do to runs, done to the program: nothing is lost but the steps since the last checkpoint."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.pretrain import TOY
from helpers.program import Program, run_forked

pytestmark = pytest.mark.slow

SEED = 20
SECONDS_TO_START = 8.0  # about, until the first step
FLAGS = ["pretrain_gpt.py", *TOY, "--eval-iters", "0", "--zeropp", "--emulate-nodes", "2"]
OURS = ["--nproc", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Runs:
    """Programs that share a run folder and a folder of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, *flags: str) -> list[str]:
        places = {"--run-dir": "run", "--save": "checkpoints", "--load": "checkpoints", "--data-cache-path": "cache"}
        return [*FLAGS, *(word for flag, name in places.items() for word in (flag, str(self.path / name))), *flags]

    def losses(self) -> dict[int, set[tuple[float, float]]]:
        """Loss and gradient norm of every iteration, as often as it was logged."""
        found: dict[int, set[tuple[float, float]]] = {}
        for line in (self.path / "run" / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # rank 0 was killed while it wrote
                row = json.loads(line)
                found.setdefault(row["iteration"], set()).add((row["lm_loss"], row["grad_norm"]))
        return found

    @property
    def saved(self) -> int:
        return int((self.path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize(("kills", "islands"), [(2, ""), (1, "--diloco-steps 4 --diloco-delay 2")])  # 30 were done once
def test_ranks_killed_at_random_moments_cost_nothing_but_the_steps_since_the_last_checkpoint(tmp_path, kills, islands):
    """While starting and loading, in steps and in saves; every loss ever logged is that of a run without faults."""
    calm, runs, length = Runs(tmp_path / "calm"), Runs(tmp_path / "runs"), 20 * kills
    flags = (*OURS, *islands.split(), "--train-iters", str(length))
    code, output = run_forked(*calm.command(*flags), folder=tmp_path)
    assert code == 0, output
    saving = ("--save-interval", "3", "--keep-last", "2", "--max-restarts", str(kills))
    program = Program(*runs.command(*flags, *saving), folder=tmp_path)
    kill_at_random_moments(program, kills)
    output = program.finish()
    assert program.process.returncode == 0, output
    assert "Traceback" not in output
    assert output.count(" was killed by SIGKILL; restart ") == kills
    assert runs.losses() == calm.losses()
    assert sorted(runs.losses()) == list(range(1, length + 1))
    assert runs.saved == length


def kill_at_random_moments(program: Program, kills: int) -> None:
    """Kill a random rank so many times, each time once a step was done again."""
    chance, seen = random.Random(SEED), 0
    for kill in range(1, kills + 1):
        moment = chance.choice(("start", "step", "save"))
        if moment == "start":
            until = time.monotonic() + chance.uniform(0.0, SECONDS_TO_START)
            wait(program, lambda output: time.monotonic() > until or " iteration " in output[seen:])  # noqa: B023
        else:
            text, times = (r"^ iteration ", chance.randint(1, 8)) if moment == "step" else (r"^saving checkpoint", 1)
            wait(program, lambda output: len(re.findall(text, output[seen:], re.MULTILINE)) >= times)  # noqa: B023
            time.sleep(chance.uniform(0.0, 0.05))
        wait(program, lambda output: len(workers(program)) == 2)
        os.kill(chance.choice(workers(program)), signal.SIGKILL)
        wait(program, lambda output: f"restart {kill} of {kills}" in output)  # noqa: B023
        seen = len(program.output())
        wait(program, lambda output: " iteration " in output[seen:])  # noqa: B023


def workers(program: Program) -> list[int]:
    """The processes of the ranks, which are children of the launcher."""
    found = []
    for pid in program.left_behind():
        status, environ = Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/environ")
        with contextlib.suppress(OSError):  # gone
            if f"PPid:\t{program.process.pid}\n" in status.read_text() and b"\0RANK=" in environ.read_bytes():
                found.append(pid)
    return found


def test_a_stop_signal_in_any_phase_saves_and_exits_with_0(tmp_path):
    """During a step, a save, an evaluation: each run goes on where the one before has stopped.

    torchrun passes SIGTERM on too; it ends with an error itself, because its workers had to be stopped.
    """
    flags = ("--train-iters", "100000", "--save-interval", "4", "--eval-interval", "5", "--split", "90,5,5")
    runs, last = Runs(tmp_path), 0
    for torchrun, phase, signum, eval_iters in (
        (True, r"^ iteration +3/", signal.SIGTERM, "1"),
        (False, r"^saving checkpoint at iteration", signal.SIGUSR1, "1"),
        (False, r"^ iteration +\d*[05]/", signal.SIGTERM, "20"),
    ):
        command = runs.command(*flags, "--eval-iters", eval_iters)
        program = Program(*(TORCHRUN if torchrun else []), *command, *([] if torchrun else OURS), folder=tmp_path)
        wait(program, lambda output: re.search(phase, output, re.MULTILINE) is not None)  # noqa: B023
        os.kill(program.process.pid, signum)
        output = program.finish()
        assert torchrun or program.process.returncode == 0, output
        assert torchrun or "Traceback" not in output
        assert f"stopped by {signum.name}\n" in output
        iterations = [int(n) for n in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)]
        assert iterations[0] == last + 1
        assert runs.saved == iterations[-1]
        last = iterations[-1]
    assert all(len(values) == 1 for values in runs.losses().values())


def wait(program: Program, condition: Callable[[str], bool]) -> None:
    while not condition(program.output()):
        assert program.process.poll() is None, program.output()
        time.sleep(0.005)
