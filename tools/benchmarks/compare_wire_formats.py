"""Train one model on the same samples with several wire formats, optimizers and seeds, and compare the losses.

python tools/benchmarks/compare_wire_formats.py --seeds 1 2 3 --out runs/wire_formats -- --train-iters 300 --bf16

Flags after `--` are passed to pretrain_gpt.py (default: the tiny config on two emulated nodes). With --eval-interval
the table also shows how many steps each variant takes to reach the final validation loss of the first variant. Each run
writes to its own folder in the --out folder. A run whose summary.json exists is not repeated, so the same command
resumes an interrupted study.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.program import flags_of, markdown, program

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
LAST_STEPS = 50  # number of steps at the end of training whose losses are averaged

LOCAL_STEPS = "--diloco-steps 10 --diloco-outer-momentum 0.9 --diloco-outer-lr"
# --zero-weight-delta none, because by default 16-bit weights cross nodes as lossless deltas, not in int8
INT8 = "--zeropp --zero-weight-delta none"
VARIANTS = {
    "ZeRO-3": "",
    "ZeRO-1": "--zero-stage 1",
    "+qwZ": "--zero-quantized-weights",
    "+qwZ +hpZ": "--zero-quantized-weights --zero-hpz-partition-size auto",
    "+qgZ 8/8": "--zero-quantized-gradients --zero-gradient-bits 8 8",
    "+qgZ 8/4": "--zero-quantized-gradients",
    "+qgZ 8/4, no error feedback": "--zero-quantized-gradients --no-zero-error-feedback",
    "+qgZ 8/4, errors fed back whole": "--zero-quantized-gradients --zero-error-feedback-beta 0",
    "+qgZ 4/4": "--zero-quantized-gradients --zero-gradient-bits 4 4",
    "all (--zeropp)": INT8,
    "--zeropp, 16-bit weights": "--zeropp --zero-weight-bits 16",
    "--zeropp, 8/8 gradients": "--zeropp --zero-gradient-bits 8 8",
    "--zeropp, lossless": "--zeropp --zero-weight-delta lossless",
    "local steps, H = 10": "--diloco-steps 10",
    "local steps, H = 10, delay 2": "--diloco-steps 10 --diloco-fragment-sync-delay 2",
    "local steps, H = 30": "--diloco-steps 30",
    "local steps, H = 10, outer 0.7 0.9": f"{LOCAL_STEPS} 0.7",
    "local steps, H = 10, outer 0.4 0.9": f"{LOCAL_STEPS} 0.4",
    "local steps, H = 1, 16 bits": "--diloco-steps 1 --diloco-outer-lr 1 --diloco-outer-momentum 0 "
    "--diloco-weight-bits 16 --diloco-gradient-bits 16",
    "Muon, whole": "--optimizer muon --emulate-nodes 1",
    "Muon, 2 nodes": "--optimizer muon",
    "Muon, 2 nodes, P = 5": "--optimizer muon --muon-full-interval 5",
    "Muon, 2 nodes, --zeropp": f"--optimizer muon {INT8}",
    "Muon, 4 nodes": "--optimizer muon --nproc 4 --emulate-nodes 4",
    "Muon, 4 nodes, P = 5": "--optimizer muon --nproc 4 --emulate-nodes 4 --muon-full-interval 5",
}


@program
def main(argv: list[str]) -> None:
    """Train every variant and seed that has no summary.json, and print the table."""
    parser = flags_of(__doc__)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the initial weights and the order of samples"
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="variants to run")
    parser.add_argument("--out", type=Path, required=True, help="folder in which each run gets its own folder")
    parser.add_argument("flags", nargs="*", help="flags of pretrain_gpt.py, after --")
    args = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.variants}
    # Seeds are the outer loop, so that an interrupted study has all variants of its first seeds.
    for seed in args.seeds:
        for name in args.variants:
            folder = args.out / f"{name.replace(' ', '').replace('/', '-').replace(',', '-')}-seed{seed}"
            if not (folder / "summary.json").exists():
                train(folder, [*args.flags, *VARIANTS[name].split(), "--seed", str(seed)])
            results[name].append(read(folder))
    print(table(results))


def train(folder: Path, flags: list[str]) -> None:
    """Run pretrain_gpt.py with `flags` and the run folder `folder`. If it fails, exit with its stderr."""
    command = [sys.executable, str(PROGRAM), "--emulate-nodes", "2", *flags, "--run-dir", str(folder)]
    done = subprocess.run([*command, "--log-interval", "1", "--sample-tokens", "0"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    print(f"{folder.name}: validation loss {read(folder)['valid']}", file=sys.stderr, flush=True)


def read(folder: Path) -> dict[str, Any]:
    """Return a run's losses, and the MB that it sent between nodes per step, from the files of its run folder.

    Training losses of runs with local steps are None, because they belong to the weights of a single replica group.
    """
    summary = json.loads((folder / "summary.json").read_text())
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = list({row["iteration"]: row["lm_loss"] for row in rows}.values())  # an interrupted run repeats iterations
    evaluations = folder / "validation.jsonl"
    found = map(json.loads, evaluations.read_text().splitlines() if evaluations.exists() else ())
    return {
        "train": None if "synchronizations" in summary else losses,
        "valid": summary["validation_loss"],
        "cross": summary["cross_bytes_per_step"] / 1e6,
        "evaluations": {each["iteration"]: each["lm_loss"] for each in found},
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown table of all variants. The first variant is the baseline.

    Differences of losses are paired by seed and shown with the standard error of their mean.

    Args:
        results: runs of each variant, in the same order of seeds; see `read`.
    """
    # ---- make a row of the table for each variant
    baseline, rows = next(iter(results.values())), []
    for name, runs in results.items():
        differences = [run["valid"] - base["valid"] for run, base in zip(runs, baseline, strict=True)]
        valid = statistics.mean(run["valid"] for run in runs)
        train = distance = "-"
        if runs[0]["train"] is not None:
            train = f"{statistics.mean(loss for run in runs for loss in run['train'][-LAST_STEPS:]):.4f}"
            pairs = [zip(run["train"], base["train"], strict=True) for run, base in zip(runs, baseline, strict=True)]
            distance = f"{statistics.mean(abs(loss - other) for pair in pairs for loss, other in pair):.4f}"
        difference = f"{mean_and_error(differences)} ({100 * statistics.mean(differences) / valid:+.2f} %)"
        cross = f"{statistics.mean(run['cross'] for run in runs):.3f}"
        rows.append([name, train, distance, f"{valid:.4f}", difference, cross, steps_to(runs, baseline)])
    # ---- add the header, and a line about the spread between seeds
    losses = (f"train, last {LAST_STEPS}", "mean distance of a step's loss", "validation", "difference of validation")
    lines = markdown(["wire", *losses, "MB between nodes per step", "steps to the first's loss"], rows)
    spread = statistics.stdev(run["valid"] for run in baseline) if len(baseline) > 1 else float("nan")
    lines += ["", f"Seed to seed, {next(iter(results))}'s validation loss has standard deviation {spread:.4f}."]
    return "\n".join(lines)


def steps_to(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> str:
    """Return how many steps the runs need on average to reach the baseline's final validation loss, as text.

    Each run is compared with the baseline's run of the same seed. If a run does not reach the loss, the text is "-".
    """
    reached = [
        min((step for step, loss in run["evaluations"].items() if loss <= base["valid"]), default=None)
        for run, base in zip(runs, baseline, strict=True)
    ]
    return "-" if None in reached else f"{statistics.mean(step for step in reached if step is not None):.0f}"


def mean_and_error(differences: list[float]) -> str:
    """Return the mean of the values and the standard error of the mean as text, for example "+0.0123 ± 0.0045"."""
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return f"{statistics.mean(differences):+.4f} ± {error:.4f}"


if __name__ == "__main__":
    raise SystemExit(main())
