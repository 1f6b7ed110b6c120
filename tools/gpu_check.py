"""Everything that wants a GPU, in one command: is the CUDA path correct, and how fast is it?

    python tools/gpu_check.py --out runs/gpu --budget-minutes 8
    python tools/gpu_check.py --out runs/gpu --parts loss --corpus text.txt --budget-minutes 20
    python tools/gpu_check.py --out runs/rehearsal                            without a GPU: everything at toy size

Runs from a checkout, installed or with PYTHONPATH at its root. Each part (gpu_parts/) is a process of its own with a
time limit; what one of them breaks does not concern the others. They run in the order of the table below while there is
time. After each, results.json and table.md are written; the parts' logs are in folders beside them. Ends with exit code
1 if a part that ran has failed, or has not ended in its time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_parts.part import Task, last_line, start

from megazpp.files import write_whole
from megazpp.program import exit_on_signals, flags_of, program

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
MODULE = "gpu_parts.{}"  # a part's
RUN_PART = "import sys; from gpu_parts.part import run_part; sys.exit(run_part(*sys.argv[1:]))"
SPARE_SECONDS = 5.0  # of a limit, for what a part does after its time
CLOCKS = "clocks.sm,power.draw,temperature.gpu,utilization.gpu"
BUSY_PERCENT = 50


class Part(NamedTuple):
    """One module tools/gpu_parts/<name>.py.

    Attributes:
        title: of its table.
        weight: its limit is its share of the time that is left, by the weights of those that are still to run; they are
            seconds out of 510.
        least: seconds without which it is not begun, and which it gets in any case.
        needs: modules.
    """

    name: str
    title: str
    weight: float
    least: float
    needs: tuple[str, ...] = ()


PROGRAMS = ("yaml", "sentencepiece", "tqdm")  # what the flags and configs of a run need
PARTS = (
    Part("correct", "Kernels and the rest on the GPU against their references", 85, 30, ("pytest", "yaml")),
    Part("streams", "Overlap on side streams: the same bits", 105, 60, PROGRAMS),
    Part("kernels", "Kernels beside a copy of the same bytes", 45, 25),
    Part("training", "Training on one GPU beside plain PyTorch", 160, 60, PROGRAMS),
    Part("overhead", "What quantization costs a step", 65, 20, PROGRAMS),
    Part("sanitizer", "compute-sanitizer", 15, 40),
    Part("attention", "Attention kernels that torch can choose from", 10, 15),
    Part("loss", "Loss, ZeRO-3 and --zeropp on emulated nodes", 25, 90, PROGRAMS),
)
REHEARSAL = "REHEARSAL: no GPU, toy sizes, figures mean nothing"
REHEARSAL_ENV = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@program
def main(argv: list[str]) -> int:
    """Run the parts, then print the table; returns the exit code."""
    exit_on_signals()
    args = parse_flags(argv)
    rehearse = not torch.cuda.is_available()
    args.out.mkdir(parents=True, exist_ok=True)
    results = introduce(rehearse, args)
    began = time.monotonic()
    try:
        chosen = [part for part in PARTS if part.name in args.parts]
        for index, part in enumerate(chosen):
            left = 60 * args.budget_minutes - (time.monotonic() - began)
            limit = max(part.least, left * part.weight / sum(other.weight for other in chosen[index:]))
            print(f"{part.name}: at most {limit:.0f} of {left:.0f} s", flush=True)
            results["parts"].append(run(part, args, limit, rehearse=rehearse, enough=left >= part.least))
            save(results, args.out)
    finally:
        save(results, args.out)
        print((args.out / "table.md").read_text())
    return 1 if any(part["status"] == "failed" for part in results["parts"]) else 0


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """The flags, checked.

    Raises:
        ValueError: naming the flag and its value.
    """
    parser = flags_of(__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and the logs")
    parser.add_argument("--budget-minutes", type=float, default=8, help="for all parts together")
    parser.add_argument("--parts", nargs="+", default=names, choices=names, help="which ones")
    parser.add_argument("--corpus", help="text to train on in the part loss (default: the text that is shipped)")
    args = parser.parse_args(argv)
    if not args.budget_minutes > 0:
        raise ValueError(f"--budget-minutes {args.budget_minutes} is not positive")
    if args.corpus is not None and not Path(args.corpus).is_file():
        raise ValueError(f"--corpus {args.corpus} is no file")
    if (args.out / "results.json").exists():
        raise ValueError(f"--out {args.out} holds the results of another run")
    return args


def introduce(rehearse: bool, args: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    known = shutil.which("git") is not None
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if known else ""
    triton = importlib.util.find_spec("triton")
    return {
        "heading": REHEARSAL if rehearse else f"{torch.cuda.get_device_name()}, {args.budget_minutes:g} minutes",
        "rehearsal": rehearse,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.import_module("triton").__version__ if triton else None,
        "commit": commit or "unknown",
        "parts": [],
    }


def run(part: Part, args: argparse.Namespace, limit: float, *, rehearse: bool, enough: bool) -> dict[str, Any]:
    """Run one part if there is `enough` time; returns what is to be said of it."""
    outcome: dict[str, Any] = {"name": part.name, "title": part.title, "status": "skipped", "seconds": 0.0}
    outcome |= {"rows": [], "notes": [], "failures": []}
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        outcome["notes"] = [f"not run: it needs {', '.join(missing)}, which is not installed"]
        return outcome
    if not enough:
        outcome["notes"] = [f"not run: less than the {part.least:g} s that it needs are left"]
        return outcome
    folder = (args.out / part.name).resolve()
    folder.mkdir(exist_ok=True)
    corpus = str(Path(args.corpus).resolve()) if args.corpus else None
    task = Task(folder, rehearse, limit - min(SPARE_SECONDS, limit / 10), corpus)
    began = time.monotonic()
    with record_clocks(folder / "clocks.csv", rehearse=rehearse):
        command = [
            sys.executable,
            "-u",
            "-c",
            RUN_PART,
            MODULE.format(part.name),
            json.dumps(task._asdict(), default=str),
        ]
        code = watch(command, folder / "log.txt", limit, rehearse=rehearse)
    if (folder / "report.json").exists():
        outcome |= json.loads((folder / "report.json").read_text())
    outcome["notes"] += describe_clocks(folder / "clocks.csv")
    if code is None:
        outcome["failures"].append(f"was not done in {limit:.0f} s; what it had found is above")
    elif code and not outcome["failures"]:
        outcome["failures"].append(f"ended with exit code {code}: {last_line(folder / 'log.txt')}")
    status = "failed" if outcome["failures"] else "passed"
    return {**outcome, "status": status, "seconds": round(time.monotonic() - began, 1)}


def watch(command: list[str], log: Path, limit: float, *, rehearse: bool) -> int | None:
    """The exit code of a part; None if it was ended because its time was over."""
    # modules are found in the checkout, whether or not it is installed
    folders = (str(ROOT), str(TOOLS), str(TOOLS / "benchmarks"), os.environ.get("PYTHONPATH"))
    env = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONUNBUFFERED": "1"}
    process = start(command, log, {**env, **(REHEARSAL_ENV if rehearse else {})})
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def record_clocks(file: Path, *, rehearse: bool) -> Iterator[None]:
    """Write a line of CLOCKS to `file` twice a second; nothing where nvidia-smi is not there."""
    nvidia_smi = shutil.which("nvidia-smi")
    if rehearse or nvidia_smi is None:
        yield
        return
    process = start([nvidia_smi, f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits", "-lms", "500"], file)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def describe_clocks(file: Path) -> list[str]:
    """A sentence on the moments in which the GPU was busy; none where there were not any."""
    busy = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # "[N/A]", or a last line that is not whole
            clock, power, temperature, load = map(float, line.split(","))
            if load >= BUSY_PERCENT:
                busy.append((clock, power, temperature))
    if not busy:
        return []
    clocks, powers, temperatures = zip(*busy, strict=True)
    return [
        f"while busy, SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz, at most {max(powers):.0f} W and "
        f"{max(temperatures):.0f} C ({len(busy)} samples)"
    ]


def save(results: dict[str, Any], out: Path) -> None:
    write_whole(out / "results.json", json.dumps(results, indent=1).encode())
    write_whole(out / "table.md", describe(results).encode())


def describe(results: dict[str, Any]) -> str:
    """Markdown: a heading, tables with remarks for each part, and which parts came to what."""
    versions = "torch {torch}, CUDA {cuda}, Triton {triton}, commit {commit}".format_map(results)
    lines = [f"# {results['heading']}", "", versions]
    for part in results["parts"]:
        lines += ["", f"## {part['name']}: {part['title']} ({part['status']}, {part['seconds']} s)", ""]
        lines += table(part["rows"])
        lines += [f"- {note}" for note in part["notes"]]
        lines += [f"- FAILED: {failure}" for failure in part["failures"]]
    words = [f"{part['name']} {part['status']}" for part in results["parts"]]
    return "\n".join([*lines, "", ", ".join(words) or "no part has run", results["heading"]]) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One per set of headings, in the order in which they come."""
    lines: list[str] = []
    headings: list[str] | None = None
    for row in rows:
        if list(row) != headings:
            headings = list(row)
            lines += [*([""] if lines else []), f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        lines.append(f"| {' | '.join(str(cell) for cell in row.values())} |")
    return [*lines, ""] if lines else []


if __name__ == "__main__":
    raise SystemExit(main())
