"""Train the same model over the same samples with other wire formats, optimizers and seeds; print losses with errors.

python tools/benchmarks/compare_wire_formats.py --seeds 1 2 3 --out runs/wire_formats -- --train-iters 300 --bf16

What stands after `--` goes to pretrain_gpt.py (default: the tiny config on two emulated nodes). With
--eval-interval the table has the steps to the validation loss with which the first variant ends. Each run has its own
folder under --out; runs whose summary.json is there already are not repeated, so an interrupted study goes on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from megazpp.base.program import flags_of, program

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
LAST_STEPS = 50

LOCAL_STEPS = "--diloco-steps 10 --diloco-outer-momentum 0.9 --diloco-outer-lr"
VARIANTS = {
    "ZeRO-3": "",
    "+qwZ": "--zero-quantized-weights",
    "+qwZ +hpZ": "--zero-quantized-weights --zero-hpz-partition-size auto",
    "+qgZ 8/8": "--zero-quantized-gradients --zero-gradient-bits 8 8",
    "+qgZ 8/4": "--zero-quantized-gradients",
    "+qgZ 8/4, no error feedback": "--zero-quantized-gradients --no-zero-error-feedback",
    "+qgZ 8/4, errors fed back whole": "--zero-quantized-gradients --zero-error-feedback-beta 0",
    "+qgZ 4/4": "--zero-quantized-gradients --zero-gradient-bits 4 4",
    "all (--zeropp)": "--zeropp",
    "--zeropp, 16-bit weights": "--zeropp --zero-weight-bits 16",
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
    "Muon, 2 nodes, --zeropp": "--optimizer muon --zeropp",
    "Muon, 4 nodes": "--optimizer muon --nproc 4 --emulate-nodes 4",
    "Muon, 4 nodes, P = 5": "--optimizer muon --nproc 4 --emulate-nodes 4 --muon-full-interval 5",
}


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of weights and data order")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="which to run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("flags", nargs="*", help="flags for pretrain_gpt.py, after --")
    args = parser.parse_args(argv)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.variants}
    for seed in args.seeds:  # seeds outside, so that an interrupted study has whole rows
        for name in args.variants:
            folder = args.out / f"{name.replace(' ', '').replace('/', '-').replace(',', '-')}-seed{seed}"
            if not (folder / "summary.json").exists():
                train(folder, [*args.flags, *VARIANTS[name].split(), "--seed", str(seed)])
            results[name].append(read(folder))
    print(table(results))


def train(folder: Path, flags: list[str]) -> None:
    command = [sys.executable, str(PROGRAM), "--emulate-nodes", "2", *flags, "--run-dir", str(folder)]
    done = subprocess.run([*command, "--log-interval", "1", "--sample-tokens", "0"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    print(f"{folder.name}: {done.stdout.splitlines()[-3]}", file=sys.stderr, flush=True)


def read(folder: Path) -> dict[str, Any]:
    """Losses and MB between nodes per step; of local steps no training losses: they are of one island's own weights."""
    summary = json.loads((folder / "summary.json").read_text())
    losses = [json.loads(line)["lm_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = folder / "validation.jsonl"
    found = map(json.loads, evaluations.read_text().splitlines() if evaluations.exists() else ())
    return {
        "train": None if "synchronizations" in summary else losses,
        "valid": summary["validation_loss"],
        "cross": summary["cross_bytes_per_step"] / 1e6,
        "evaluations": {each["iteration"]: each["lm_loss"] for each in found},
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A markdown table; differences are paired by seed, with the standard error of their mean."""
    baseline = next(iter(results.values()))
    head = (
        f"| wire | train, last {LAST_STEPS} | mean distance of a step's loss | validation | difference of validation "
    )
    lines = [f"{head}| MB between nodes per step | steps to the first's loss |", "|---|---|---|---|---|---|---|"]
    for name, runs in results.items():
        differences = [run["valid"] - base["valid"] for run, base in zip(runs, baseline, strict=True)]
        valid = statistics.mean(run["valid"] for run in runs)
        train = distance = "-"
        if runs[0]["train"] is not None:
            train = f"{statistics.mean(loss for run in runs for loss in run['train'][-LAST_STEPS:]):.4f}"
            pairs = [zip(run["train"], base["train"], strict=True) for run, base in zip(runs, baseline, strict=True)]
            distance = f"{statistics.mean(abs(loss - other) for pair in pairs for loss, other in pair):.4f}"
        lines.append(
            f"| {name} | {train} | {distance} | {valid:.4f} "
            f"| {mean_and_error(differences)} ({100 * statistics.mean(differences) / valid:+.2f} %) "
            f"| {statistics.mean(run['cross'] for run in runs):.3f} | {steps_to(runs, baseline)} |"
        )
    spread = statistics.stdev(run["valid"] for run in baseline) if len(baseline) > 1 else float("nan")
    lines += ["", f"Seed to seed, {next(iter(results))}'s validation loss has standard deviation {spread:.4f}."]
    return "\n".join(lines)


def steps_to(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> str:
    """The mean of steps until a validation is as good as the last one of the baseline's run of that seed."""
    reached = [
        min((step for step, loss in run["evaluations"].items() if loss <= base["valid"]), default=None)
        for run, base in zip(runs, baseline, strict=True)
    ]
    return "-" if None in reached else f"{statistics.mean(step for step in reached if step is not None):.0f}"


def mean_and_error(differences: list[float]) -> str:
    """The mean with its sign, and its standard error."""
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return f"{statistics.mean(differences):+.4f} ± {error:.4f}"


if __name__ == "__main__":
    raise SystemExit(main())
