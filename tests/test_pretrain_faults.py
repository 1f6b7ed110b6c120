"""What clusters do to runs, done to the program: nothing is lost but the steps since the last checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers.program import Program

pytestmark = pytest.mark.slow

KILLS = 2  # 30 were done once, see the README
SEED = 20

# fmt: off
TOY = [
    "pretrain_gpt.py", "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "32",
    "--max-position-embeddings", "32", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256",
    "--lr", "1e-3", "--micro-batch-size", "2", "--log-interval", "1", "--eval-iters", "0", "--zeropp",
    "--emulate-nodes", "2",
]
OURS = ["--nproc", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# fmt: on


class Runs:
    """Programs that share a run folder and a folder of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, *flags: str, launcher: Sequence[str] = ()) -> Program:
        places = {"--run-dir": "run", "--save": "checkpoints", "--load": "checkpoints", "--data-cache-path": "cache"}
        words = [word for flag, name in places.items() for word in (flag, str(self.path / name))]
        return Program(*launcher, *TOY, *words, *flags, folder=self.path)

    def losses(self) -> dict[int, set[tuple[float, float]]]:
        """Loss and gradient norm of every iteration, as often as it was logged."""
        found: dict[int, set[tuple[float, float]]] = {}
        for line in (self.path / "run" / "metrics.jsonl").read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # rank 0 was killed while it wrote
                continue
            found.setdefault(row["iteration"], set()).add((row["lm_loss"], row["grad_norm"]))
        return found

    @property
    def saved(self) -> int:
        return int((self.path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize("islands", [(), ("--diloco-steps", "4", "--diloco-delay", "2")])
def test_ranks_killed_at_random_moments_cost_nothing_but_the_steps_since_the_last_checkpoint(
    runs: Runs, tmp_path_factory: pytest.TempPathFactory, islands: tuple[str, ...]
):
    """While starting and loading, in steps and in saves; every loss ever logged is that of a run without faults."""
    length = (*OURS, *islands, "--train-iters", str(20 * KILLS))
    calm = Runs(tmp_path_factory.mktemp("calm"))
    reference = calm.start(*length)
    reference.wait_for(" iteration        1/")
    start_seconds = time.monotonic() - reference.started
    output = reference.finish()
    assert reference.process.returncode == 0, output

    program = runs.start(*length, "--save-interval", "3", "--keep-last", "2", "--max-restarts", str(KILLS))
    seconds = kill_at_random_moments(program, start_seconds)
    output = program.finish()
    assert program.process.returncode == 0, output
    assert "Traceback" not in output
    assert output.count(" was killed by SIGKILL; restart ") == KILLS
    assert runs.losses() == calm.losses()
    assert sorted(runs.losses()) == list(range(1, 20 * KILLS + 1))
    assert runs.saved == 20 * KILLS
    print(f"seconds until a kill was seen, and until the next step was done: {seconds}")


def kill_at_random_moments(program: Program, start_seconds: float) -> list[tuple[float, float]]:
    """Kill a random rank KILLS times; the seconds until the launcher said so, and until a step was done again."""
    chance, seconds, seen = random.Random(SEED), [], 0
    for kill in range(1, KILLS + 1):
        moment = chance.choice(("start", "step", "save"))
        if moment == "start":
            until = time.monotonic() + chance.uniform(0.0, start_seconds)
            wait(program, lambda output: time.monotonic() > until or " iteration " in output[seen:])  # noqa: B023
        else:
            text, times = (r"^ iteration ", chance.randint(1, 8)) if moment == "step" else (r"^saving checkpoint", 1)
            wait(program, lambda output: len(re.findall(text, output[seen:], re.MULTILINE)) >= times)  # noqa: B023
            time.sleep(chance.uniform(0.0, 0.05))
        wait(program, lambda output: len(workers(program)) == 2)
        killed = time.monotonic()
        os.kill(chance.choice(workers(program)), signal.SIGKILL)
        wait(program, lambda output: f"restart {kill} of {KILLS}" in output)  # noqa: B023
        known, seen = time.monotonic() - killed, len(program.output())
        wait(program, lambda output: " iteration " in output[seen:])  # noqa: B023
        seconds.append((round(known, 2), round(time.monotonic() - killed, 2)))
    return seconds


def workers(program: Program) -> list[int]:
    """The processes of the ranks, which are children of the launcher."""
    found = []
    for pid in program.left_behind():
        status, environ = Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/environ")
        with contextlib.suppress(OSError):  # gone
            if f"PPid:\t{program.process.pid}\n" in status.read_text() and b"\0RANK=" in environ.read_bytes():
                found.append(pid)
    return found


def test_a_stop_signal_in_any_phase_saves_and_exits_with_0(runs: Runs):
    """During a step, a save, an evaluation: each run goes on where the one before has stopped.

    torchrun passes SIGTERM on too; it ends with an error itself, because its workers had to be stopped.
    """
    flags = ("--train-iters", "100000", "--save-interval", "4", "--eval-interval", "6", "--split", "90,5,5")
    last = 0
    for phase, signum in ((in_a_step, signal.SIGTERM), (in_a_save, signal.SIGUSR1), (in_an_evaluation, signal.SIGTERM)):
        torchrun = phase is in_a_step
        own = ("--eval-iters", "20" if phase is in_an_evaluation else "1", *([] if torchrun else OURS))
        program = runs.start(*flags, *own, launcher=TORCHRUN if torchrun else ())
        phase(program)
        sent = time.monotonic()
        os.kill(program.process.pid, signum)
        output = program.finish()
        print(f"{phase.__name__}: {time.monotonic() - sent:.2f} s")
        assert torchrun or program.process.returncode == 0, output
        assert torchrun or "Traceback" not in output
        assert f"stopped by {signum.name}\n" in output
        iterations = [int(n) for n in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)]
        assert iterations[0] == last + 1
        assert runs.saved == iterations[-1]
        last = iterations[-1]
    assert all(len(values) == 1 for values in runs.losses().values())


def in_a_step(program: Program) -> None:
    program.wait_for(" iteration        3/")


def in_a_save(program: Program) -> None:
    program.wait_for("saving checkpoint at iteration")


def in_an_evaluation(program: Program) -> None:
    wait(program, lambda output: any(int(n) % 6 == 0 for n in re.findall(r"^ iteration +(\d+)/", output, re.MULTILINE)))


def wait(program: Program, condition: Callable[[str], bool]) -> None:
    while not condition(program.output()):
        assert program.process.poll() is None, program.output()
        time.sleep(0.005)
