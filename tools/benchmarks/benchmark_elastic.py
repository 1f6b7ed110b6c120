"""Measure elastic DiLoCo with real jobs on this machine: kills, outages, slow groups and a slow network.

    python tools/benchmarks/benchmark_elastic.py --out runs/elastic kills

| experiment | question |
|---|---|
| kills | How long do the other groups wait when a group is killed, at each of 12 points of a DiLoCo round? |
| coordinator | How long do all groups wait when the coordinator is killed, and starts again after 3 s? |
| slow | Do groups wait for a group that is twice as slow, or whose messages take longer than an interval? |
| goodput | Which fraction of the tokens per second is left if a group is away for one of every ten intervals? |
| network | Which fraction of the speed is left on a network of 100 Mbit/s with a round trip of 100 ms? |

An interval is the time between two synchronizations. Each training step waits until a fixed time has passed, so that
other load on the machine hardly matters. benchmark_elastic_job.py emulates slow steps and links. Times are read from
the coordinator's journal. Every experiment prints one line per measurement, and its last line is the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from benchmark_elastic_job import POINTS, Emulation

from megazpp.base.program import end_with, exit_on_signals, flags_of, program, say
from megazpp.elastic.rounds import BLIP_SECONDS

HERE = Path(__file__).resolve().parent
TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 --train-iters 100000 --micro-batch-size 2 "
    "--diloco-outer-momentum 0.6 --diloco-outer-lr 0.7 --log-interval 1000 --eval-iters 1"
)
# A model of 10.6M parameters, whose messages take long enough on a slow network to delay the groups measurably
WIDE = "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --vocab-size 8192"
# Seconds between two checks of an awaited condition, the longest wait for it, and how long the coordinator is away
POLL_SECONDS, LIMIT_SECONDS, OUTAGE_SECONDS = 0.05, 280.0, 3.0


class Site:
    """The processes of an elastic DiLoCo run: a coordinator, and one job per replica group.

    At the end of the context, all of these processes are killed.

    Args:
        folder: folder of the run; everything in it is deleted first.
        flags: flags of pretrain_gpt.py for all groups.
        groups: number of replica groups.
        steps: number of training steps between two synchronizations.
    """

    def __init__(self, folder: Path, flags: str, *, groups: int, steps: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self._groups, self.steps = folder, groups, steps
        self._flags = [*flags.split(), "--diloco-steps", str(steps), "--diloco-replica-groups", str(groups)]
        self._flags += ["--data-cache-path", str(folder.parent / "cache")]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers, self.address = itertools.count(), "127.0.0.1:0"
        self.coordinate()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            self.kill(process)

    def coordinate(self) -> None:
        """Start the coordinator process, and wait until it accepts connections."""
        command = ["tools/coordinate.py", "--folder", str(self.folder / "journal"), "--listen", self.address]
        self.coordinator, output = self._start(command, "coordinator")
        self.wait(lambda: "listens on" in output.read_text())
        (self.address,) = re.findall(r"listens on (\S+)", output.read_text())

    def start(self, name: str, *flags: str, **emulated: Any) -> subprocess.Popen[bytes]:
        """Start the job of a replica group; keyword arguments are the fields of `Emulation`."""
        emulation = json.dumps(dataclasses.asdict(Emulation(**emulated)))
        command = [str(HERE / "benchmark_elastic_job.py"), emulation, *self._flags, *flags]
        places = ["--run-dir", str(self.folder / f"{name}-{next(self._numbers)}")]
        return self._start([*command, *places, "--diloco-coordinator", self.address, "--diloco-group", name], name)[0]

    def start_and_join(self, name: str, **emulated: Any) -> subprocess.Popen[bytes]:
        """Start the job of a replica group, and wait until the coordinator has admitted it as a member."""
        process, before = self.start(name, **emulated), self._times_joined(name)
        self.wait(lambda: self._times_joined(name) > before)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill `process`, the job of a replica group or the coordinator, with all its child processes."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition()` is true. Raise a TimeoutError if that takes longer than LIMIT_SECONDS."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + LIMIT_SECONDS:
                raise TimeoutError(
                    f"the awaited event of the run did not happen within {LIMIT_SECONDS:g} s; the outputs of the "
                    f"coordinator and the groups in {self.folder} may show why"
                )
            time.sleep(POLL_SECONDS)

    def wait_for_version(self, version: int) -> None:
        """Wait until the coordinator has committed this version of the outer weights."""
        self.wait(lambda: len(self.commits()) >= version)

    def records(self) -> list[dict[str, Any]]:
        """Return all complete records of the newest file of the coordinator's journal."""
        files = (self.folder / "journal" / "coordinator").glob("journal-*.jsonl")
        newest = max(files, key=lambda path: int(path.stem.split("-")[1]))
        *lines, _ = newest.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def commits(self) -> list[dict[str, Any]]:
        """Return the journal's records of committed versions of the outer weights, in order."""
        return [record for record in self.records() if "commit" in record]

    def intervals(self) -> list[float]:
        """Return the seconds between successive commits, one number less than there are commits."""
        return [b["time"] - a["time"] for a, b in itertools.pairwise(self.commits())]

    def _times_joined(self, name: str) -> int:
        """Return how often the coordinator has admitted a group as a member."""
        return sum(name in record["members"] for record in self.records() if "members" in record)

    def check(self) -> None:
        """Assert that all groups had equal outer states at each version, and that no sample was merged twice."""
        said = "".join(path.read_text() for path in sorted(self.folder.glob("coordinator-*.txt")))
        assert "ERROR" not in said, said  # the coordinator prints ERROR if the outer states of two groups differ
        # A cell is a range of steps in the table of samples: its column, first step, and step after the last one
        cells = [cell for commit in self.commits() for entry in commit["set"] for cell in entry["cells"]]
        steps = [(column, step) for column, first, stop in cells for step in range(first, stop)]
        assert len(steps) == len(set(steps))

    def _start(self, command: Sequence[str], name: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a Python program; return its process, and the file that gets its output.

        Args:
            command: path of the program, and its flags.
            name: name of the group, or "coordinator", with which the name of the file begins.
        """
        output = self.folder / f"{name}-{next(self._numbers)}.txt"
        with output.open("wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=HERE.parents[1],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=functools.partial(end_with, os.getpid()),
                )
            )
        return self._processes[-1], output


def measure_kills(out: Path) -> str:
    """Kill one of three groups at each point in POINTS; return a line about the longest wait of the other groups."""
    grace, waits, seconds = 0.5, list[float](), {"step_seconds": 0.2}
    flags = f"{TINY} --global-batch-size 6 --nproc 1 --diloco-grace {grace}"
    with Site(out, flags, groups=3, steps=8) as run:
        for name in "ac":
            run.start(name, **seconds)
        for index, point in enumerate(POINTS, start=1):
            killed = out / f"killed-{index}"
            group = run.start_and_join("b", kill_at=point, killed_file=str(killed), **seconds)
            joined = len(run.commits())
            run.wait(killed.exists)
            run.kill(group)
            moment = float(killed.read_text())
            versions = len(run.commits())
            run.wait_for_version(versions + 3)
            # The wait is the longer of the first two intervals after the kill, minus the usual interval.
            first = next(n for n, commit in enumerate(run.commits()) if commit["time"] > moment)
            intervals = run.intervals()
            usual = statistics.median(intervals[joined : first - 1] or intervals[joined - 3 : joined])
            waits.append(max(intervals[first - 1 : first + 1]) - usual)
            say(f"{index:2} {point}: {waits[-1]:+.2f} s, usual interval {usual:.2f} s")
        run.check()
        versions = len(run.commits())
    return (
        f"the others waited at most {max(waits):.2f} s, of {BLIP_SECONDS + 2 * grace:.2f} s allowed; the states of "
        f"{versions} versions did not differ between groups"
    )


def measure_coordinator(out: Path) -> str:
    """Kill the coordinator at several moments of an interval, and return a line about how long the groups waited.

    The line has the largest difference between two numbers of seconds: by how much an interval was longer than usual,
    and for how long the coordinator was away.
    """
    stalls, flags = list[float](), f"{TINY} --global-batch-size 4 --nproc 1"
    with Site(out, flags, groups=2, steps=8) as run:
        groups = [run.start(name, step_seconds=0.2) for name in "ab"]
        run.wait_for_version(5)
        usual = statistics.median(run.intervals()[1:])
        for share in (0.0, 0.3, 0.6, 0.8, 0.95):
            versions = len(run.commits())
            run.wait_for_version(versions + 1)
            time.sleep(share * usual)
            run.kill(run.coordinator)
            began = time.monotonic()
            time.sleep(OUTAGE_SECONDS)
            run.coordinate()
            outage = time.monotonic() - began
            run.wait_for_version(versions + 4)
            stalls.append(max(run.intervals()[versions : versions + 3]) - usual - outage)
            say(f"killed after {share:g} of an interval, away for {outage:.2f} s: outage {stalls[-1]:+.2f} s")
        assert all(group.poll() is None for group in groups), "a group has ended"
        run.check()
    return f"no group ended; an interval was longer by at most the outage {max(stalls):+.2f} s, of 1 s allowed"


def measure_slow(out: Path) -> str:
    """Return a line about how much longer intervals are if one group trains slowly, or sends its messages slowly."""
    step, steps, count, found = 0.2, 15, 16, dict[str, float]()
    flags = f"{TINY} --global-batch-size 6 --nproc 1 --diloco-grace 0.1"
    cases: dict[str, dict[str, Any]] = {
        "equal group": {"step_seconds": step},
        "twice slower group": {"step_seconds": 2 * step},
        "uplink slower than the interval": {"step_seconds": step, "uplink_seconds": 1.2 * step * steps},
    }
    with Site(out, flags, groups=3, steps=steps) as run:
        for name in "ab":
            run.start(name, step_seconds=step)
        for name, emulated in cases.items():
            group = run.start_and_join("c", **emulated)
            first = len(run.commits()) + 3
            run.wait_for_version(first + count)
            commits = run.commits()[first : first + count]
            found[name] = statistics.median(run.intervals()[first - 1 : first + count - 1])
            own = [e["steps"] for commit in commits for e in commit["set"] if e["group"] == "c"]
            share = found[name] / found["equal group"] - 1
            say(f"{name}: {found[name]:.3f} s, {100 * share:+.1f} %; its steps in a version: {sum(own) / count:.1f}")
            run.kill(group)
        run.check()
    worst = max(found.values()) / found["equal group"] - 1
    return f"the others' median interval is at most {100 * worst:.1f} % longer, of 5 % allowed"


def measure_goodput(out: Path) -> str:
    """Kill one of three groups every ten intervals; return a line about the remaining merged tokens per second."""
    every, kills = 10, 2
    with Site(out, f"{TINY} --global-batch-size 6 --nproc 1", groups=3, steps=10) as run:
        groups = {name: run.start(name, step_seconds=0.6) for name in "abc"}
        run.wait_for_version(2 + every)
        for kill in range(kills):
            time.sleep(3.0)  # until the middle of the interval of 10 steps x 0.6 s
            run.kill(groups["b"])
            groups["b"] = run.start("b", step_seconds=0.6)
            run.wait_for_version(2 + every * (kill + 2))
        commits = run.commits()
        run.check()

    def speed(first: int, last: int) -> float:
        """Return the merged tokens per second from version `first` to version `last` of the outer weights.

        The count includes the contributions that the commits after `first`, up to `last`, have merged.
        """
        tokens = sum(entry["tokens"] for commit in commits[first:last] for entry in commit["set"])
        return tokens / (commits[last - 1]["time"] - commits[first - 1]["time"])

    calm, faulty = speed(2, 2 + every), speed(2 + every, 2 + every * (kills + 1))
    return f"merged tokens per second: {faulty:.1f} with kills, {calm:.1f} without; {faulty / calm:.3f} of them"


def measure_network(out: Path) -> str:
    """Return a line about the speed of two groups of two ranks on a slow emulated network, relative to the loopback."""
    step, steps, count, slow = 1.0, 30, 3, out / "network is slow"
    # Each of a group's two ranks gets half of the rate of 100 Mbit/s.
    network = {"bits_per_second": 100e6 / 2, "round_trip_seconds": 0.1, "network_file": str(slow)}
    with Site(out, f"{TINY} {WIDE} --global-batch-size 8 --nproc 2", groups=2, steps=steps) as run:
        for name in "ab":
            run.start(name, step_seconds=step, **network)
        run.wait_for_version(1 + count)
        slow.touch()
        run.wait_for_version(2 + 2 * count)
        intervals = run.intervals()
        run.check()
        (sent,) = re.findall(r"sent (\S+) MB per rank", next(out.glob("a-*.txt")).read_text())[-1:]
    fast, slowed = statistics.median(intervals[:count]), statistics.median(intervals[count + 1 :])
    return (
        f"interval of {steps} steps of {step:g} s: {fast:.2f} s here, {slowed:.2f} s on the network; "
        f"{fast / slowed:.3f} of the speed, {steps * step / slowed:.3f} of the steps alone; "
        f"each rank sent {sent} MB per version"
    )


EXPERIMENTS = {
    "kills": measure_kills,
    "coordinator": measure_coordinator,
    "slow": measure_slow,
    "goodput": measure_goodput,
    "network": measure_network,
}


@program
def main(argv: list[str]) -> int:
    """Run the chosen experiments one after another, and print their results."""
    parser = flags_of(__doc__)
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("runs/elastic"), help="folder for the runs")
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS, help="experiments to run")
    args = parser.parse_args(argv)
    exit_on_signals()
    for name in args.experiments:
        say(f"{name}: {EXPERIMENTS[name](args.out.resolve() / name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
