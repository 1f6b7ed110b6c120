"""Check a GPU in one command: is the CUDA path correct, and how fast is it?

    python tools/gpu_check.py --out runs/gpu --budget-minutes 8
    python tools/gpu_check.py --out runs/more --budget-minutes 30 --parts training checkpoint
    python tools/gpu_check.py --out runs/rehearsal --device cpu               every part at toy size, without a GPU

Runs from a checkout, installed or not, and needs neither wandb nor torchao. The parts (gpu_check_parts.py) run programs
in processes of their own, with time limits: a part that fails leaves the others alone. They run in the order of PARTS,
the one that would be missed most first; budgets from 20 minutes on have more of them, and more cases. results.json and
table.md (Markdown) are written again whenever a part has found something, so a run that is killed keeps it; logs are in
folders beside them. The exit code is 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
sys.path.insert(1, str(ROOT))  # for a checkout without installation

import gpu_check_parts as parts
import torch
from gpu_check_parts import Check

from megazpp.base.files import write_whole
from megazpp.base.program import exit_on_signals, flags_of, program


class Part(NamedTuple):
    """`seconds` of 8 and of 30 minutes (0: only where it is asked for); not begun with less than the `least`."""

    name: str
    title: str
    run: Callable[[Check], None]
    seconds: tuple[float, float]
    least: float


PARTS = (
    Part("correct", "Tests that need a GPU", parts.correct, (85, 200), 30),
    Part("programs", "Toy programs: saves, post-training, generation", parts.programs, (90, 150), 40),
    Part("optimizers", "Optimizers and fp16 beside the CPU", parts.optimizers, (35, 50), 15),
    Part("streams", "Several ways on four ranks of one GPU", parts.streams, (90, 400), 60),
    Part("training", "Steps on one GPU beside a baseline", parts.training, (150, 650), 60),
    Part("kernels", "Quantization beside a copy", parts.kernels, (30, 100), 20),
    Part("checkpoint", "Saves, and generation from them", parts.checkpoint, (0, 250), 90),
)
LONG_MINUTES = 20
REHEARSAL = "REHEARSAL: no GPU, toy sizes, figures mean nothing"
REHEARSAL_ENV = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@program
def main(argv: list[str]) -> int:
    """Run the parts, then print the table; returns the exit code."""
    exit_on_signals()
    args = parse_flags(argv)
    os.chdir(ROOT)
    paths = (str(ROOT), str(TOOLS), str(TOOLS / "benchmarks"), os.environ.get("PYTHONPATH"))
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    os.environ |= REHEARSAL_ENV if args.device == "cpu" else {}
    long, checks = args.budget_minutes >= LONG_MINUTES, list[Check]()
    chosen = [part for part in PARTS if (part.name in args.parts if args.parts else part.seconds[long])]
    shares = [part.seconds[long] or part.seconds[True] for part in chosen]
    heading, end = introduce(args), time.monotonic() + 60 * args.budget_minutes
    keep = partial(save, heading, checks, args.out)
    try:
        for index, part in enumerate(chosen):
            left = end - time.monotonic()
            limit = max(part.least, left * shares[index] / sum(shares[index:]))
            print(f"{part.name}: at most {limit:.0f} of {left:.0f} s", flush=True)
            check = Check(args.out / part.name, part.title, args.device, limit, long, keep)
            checks.append(check)
            if left < part.least:
                check.found["status"] = "skipped"
                check.note(f"not run: less than the {part.least:g} s that it needs are left")
                continue
            try:
                part.run(check)
            except Exception as error:
                traceback.print_exc()
                check.fail(f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
            check.found["status"] = "failed" if check.found["failures"] else "passed"
    finally:
        keep()
        print((args.out / "table.md").read_text())
    return 1 if any(check.found["failures"] for check in checks) else 0


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """The flags; a ValueError names the one that is wrong."""
    parser = flags_of(__doc__)
    names, found = [part.name for part in PARTS], "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and the logs")
    parser.add_argument("--budget-minutes", type=float, default=8, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=names, help="which ones (default: those of the budget's program)")
    parser.add_argument("--device", default=found, choices=("cuda", "cpu"), help="cpu: a rehearsal")
    args = parser.parse_args(argv)
    if not args.budget_minutes > 0:
        raise ValueError(f"--budget-minutes {args.budget_minutes} is not positive")
    if args.device == "cuda" != found:
        raise ValueError("--device cuda: torch finds no GPU here")
    if (args.out / "results.json").exists():
        raise ValueError(f"--out {args.out} holds the results of another run")
    args.out = args.out.resolve()
    if len(str(args.out).split()) > 1:  # the words of programs are split at them
        raise ValueError(f"--out {args.out} has blanks in its path")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def introduce(args: argparse.Namespace) -> tuple[str, str]:
    """The heading of the results, and the versions that the figures are of."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "unknown"
    triton = importlib.import_module("triton").__version__ if find_spec("triton") else None
    heading = REHEARSAL if args.device == "cpu" else f"{torch.cuda.get_device_name()}, {args.budget_minutes:g} minutes"
    return heading, f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton}, commit {commit}"


def save(heading: tuple[str, str], checks: Sequence[Check], out: Path) -> None:
    """Write results.json, and table.md: for each part tables, one per set of headings, with remarks."""
    parts, lines = [check.found for check in checks], [f"# {heading[0]}", "", heading[1]]
    for part in parts:
        lines += ["", "## {name}: {title} ({status}, {seconds} s)".format_map(part), ""]
        headings: list[str] = []
        for row in part["rows"]:
            if list(row) != headings:
                gap, headings = [""] if headings else [], list(row)
                lines += [*gap, f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
            lines.append(f"| {' | '.join(map(str, row.values()))} |")
        lines += [""] if headings else []
        lines += [f"- {note}" for note in part["notes"]] + [f"- FAILED: {failure}" for failure in part["failures"]]
    lines += ["", ", ".join("{name} {status}".format_map(part) for part in parts) or "no part has run", heading[0], ""]
    found = {"heading": heading[0], "versions": heading[1], "parts": parts}
    write_whole(out / "results.json", json.dumps(found, indent=1).encode())
    write_whole(out / "table.md", "\n".join(lines).encode())


if __name__ == "__main__":
    raise SystemExit(main())
