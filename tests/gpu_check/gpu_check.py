"""Check the correctness and the speed of the CUDA code on a GPU, and write a table of results.

    python tests/gpu_check/gpu_check.py --out runs/gpu --budget-minutes 8
    python tests/gpu_check/gpu_check.py --out runs/more --budget-minutes 30 --parts training checkpoint
    python tests/gpu_check/gpu_check.py --out runs/rehearsal --device cpu          every part at toy size, without a GPU

The program runs from a checkout, installed or not, and needs neither wandb nor torchao.

The check consists of parts (gpu_check_parts.py), which run in the order of PARTS, the most important part first. Each
part runs programs in separate processes with time limits, so a part that fails does not affect the others. Budgets of
20 minutes or more have more parts and more cases.

The output folder receives results.json, table.md (Markdown) and a folder of logs for each part. Both files are updated
after each result, so a run that is killed keeps its results. The exit code is 1 if a part has failed.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = [str(ROOT), str(ROOT / "tools/benchmarks"), str(ROOT / "configs/post_training")]
sys.path[1:1] = PATHS  # lets a checkout that is not installed find its modules

import gpu_check_parts as parts
import torch
from gpu_check_parts import Check

from megazpp.base.files import write_whole
from megazpp.base.program import exit_on_signals, flags_of, program


class Part(NamedTuple):
    """A part of the GPU check, such as its tests or its speed measurements.

    Attributes:
        name: name for --parts.
        title: title in the results.
        run: function that runs the part and adds its results to a `Check`.
        seconds: seconds that the part gets of a budget of 8 minutes and of 30 minutes; other budgets are divided in
            proportion. 0 means that the part runs only if --parts names it.
        least: shortest useful time in seconds; the part is skipped if less time is left in the budget.
    """

    name: str
    title: str
    run: Callable[[Check], None]
    seconds: tuple[float, float]
    least: float


PARTS = (
    Part("correct", "Tests that need a GPU", parts.correct, (80, 200), 30),
    Part("programs", "Toy programs: saves, post-training, generation", parts.programs, (90, 150), 40),
    Part("optimizers", "Optimizers and fp16, compared with the CPU", parts.optimizers, (40, 50), 15),
    Part("streams", "Sharding configurations on four ranks of one GPU", parts.streams, (110, 500), 60),
    Part("training", "Steps on one GPU, compared with a baseline", parts.training, (130, 550), 60),
    Part("kernels", "Quantization, compared with a copy", parts.kernels, (30, 100), 20),
    Part("checkpoint", "Saves, and generation from them", parts.checkpoint, (0, 250), 90),
)
LONG_MINUTES = 20  # budgets of this many minutes or more run more parts and cases
REHEARSAL = "REHEARSAL: no GPU, toy sizes, figures are meaningless"
REHEARSAL_ENV = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@program
def main(argv: list[str]) -> int:
    """Run the parts of the GPU check and print the table of results; return 1 if a part has failed, or else 0."""
    # Set the environment of all programs that the parts start.
    exit_on_signals()
    args = parse_flags(argv)
    os.chdir(ROOT)
    paths = (*PATHS, str(HERE), os.environ.get("PYTHONPATH"))
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    os.environ |= REHEARSAL_ENV if args.device == "cpu" else {}

    # Choose the parts, and divide the time among them.
    long, checks = args.budget_minutes >= LONG_MINUTES, list[Check]()
    chosen = [part for part in PARTS if (part.name in args.parts if args.parts else part.seconds[long])]
    shares = [part.seconds[long] or part.seconds[True] for part in chosen]
    heading, end = introduce(args), time.monotonic() + 60 * args.budget_minutes
    keep = partial(save, heading, checks, args.out)

    # A part that fails or raises does not stop the other parts. The results are saved in any case.
    try:
        for index, part in enumerate(chosen):
            left = end - time.monotonic()
            limit = max(part.least, left * shares[index] / sum(shares[index:]))
            print(f"{part.name}: at most {limit:.0f} of {left:.0f} s", flush=True)
            check = Check(args.out / part.name, part.title, args.device, limit, long, keep)
            checks.append(check)
            if left < part.least:
                check.found["status"] = "skipped"
                check.note(f"not run: it needs {part.least:g} s, but less time is left")
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
    """Parse and check the flags of the GPU check, and create the output folder.

    Raises:
        ValueError: a flag has an invalid value, or --out already holds results.
    """
    parser = flags_of(__doc__)
    names, found = [part.name for part in PARTS], "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md and the logs")
    parser.add_argument("--budget-minutes", type=float, default=8, help="minutes for all parts together (default: 8)")
    parser.add_argument("--parts", nargs="+", choices=names, help="parts to run (default: depends on the budget)")
    parser.add_argument(
        "--device",
        default=found,
        choices=("cuda", "cpu"),
        help="cuda, or cpu for a rehearsal at toy size (default: cuda if there is a GPU)",
    )
    args = parser.parse_args(argv)
    if not args.budget_minutes > 0:
        raise ValueError(f"--budget-minutes {args.budget_minutes} is not positive: give minutes for all parts")
    if args.device == "cuda" != found:
        raise ValueError("--device cuda: torch finds no GPU; use --device cpu for a rehearsal")
    if (args.out / "results.json").exists():
        raise ValueError(f"--out {args.out} holds the results of another run; choose another folder")
    args.out = args.out.resolve()
    if len(str(args.out).split()) > 1:  # the parts split their command lines at white space
        raise ValueError(f"--out {args.out} has blanks in its path, which are not supported; choose another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def introduce(args: argparse.Namespace) -> tuple[str, str]:
    """Return the heading of the results (GPU and budget), and a line with the versions of the software."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "unknown"
    triton = importlib.import_module("triton").__version__ if find_spec("triton") else None
    heading = REHEARSAL if args.device == "cpu" else f"{torch.cuda.get_device_name()}, {args.budget_minutes:g} minutes"
    return heading, f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton}, commit {commit}"


def save(heading: tuple[str, str], checks: Sequence[Check], out: Path) -> None:
    """Write the results of the GPU check so far to results.json and table.md.

    table.md has tables for each part, followed by notes and failures. Rows with other columns begin a new table.

    Args:
        heading: (heading, line with the versions of the software).
        checks: results of the parts that have been started.
        out: output folder of the check.
    """
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
