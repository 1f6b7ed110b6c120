"""Part "loss" of tools/gpu_check.py: `pretrain_gpt.py` with ZeRO-3 and with --zeropp on two emulated nodes.

The four ranks share the GPU, so the time says nothing. Text is read as bytes, which needs no tokenizer. Each run
is ended when its half of the time is over, and the steps that both have taken are compared.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu_parts.part import Report, Task, run_part
from gpu_parts.ranks import ON_ONE_GPU, ON_THE_CPU, running, side_by_side, wait_for

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
SHIPPED = "builtin:moby_dick"
NATS_APART = 0.02  # of the last steps' mean: several times what one seed differs from the next


class LossSizes(NamedTuple):
    """
    Attributes:
        flags: of the model and the micro-batch.
        steps: at most.
    """

    flags: tuple[str, ...]
    steps: int


TOY = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32")
SIZES = {
    "gpu": LossSizes(("--seq-length", "1024", "--micro-batch-size", "4"), 2000),
    "rehearsal": LossSizes((*TOY, "--micro-batch-size", "4"), 3),
}
COMMON = ("--tokenizer-type", "NullTokenizer", "--split", "100,0,0", "--emulate-nodes", "2")
RUNS = {"ZeRO-3": (), "--zeropp": ("--zeropp",)}
BATCH, WARM_UP_STEPS = 16, 20


def measure(task: Task, report: Report) -> None:
    """One row per run, and whether they agree."""
    logged: dict[str, list[dict[str, Any]]] = {}
    with side_by_side() as mps:
        env = ON_THE_CPU if task.rehearse else {**ON_ONE_GPU, **mps}
        for index, (name, flags) in enumerate(RUNS.items()):
            limit = (task.seconds - report.elapsed()) / (len(RUNS) - index)
            logged[name] = train(task, task.folder / name.strip("-"), flags, env, limit)
            if not logged[name]:
                report.fail(f"{name}: no step was logged in {limit:.0f} s")
                return
    steps = min(lines[-1]["iteration"] for lines in logged.values())
    means = {}
    for name, lines in logged.items():
        tail = [line["lm_loss"] for line in lines if steps - max(1, steps // 5) < line["iteration"] <= steps]
        means[name] = sum(tail) / len(tail)
        report.row(
            run=name,
            steps=steps,
            first_loss=round(lines[0]["lm_loss"], 4),
            mean_loss_of_last_fifth=round(means[name], 4),
            MB_between_nodes_per_step=round(lines[-1]["cross_bytes"] / lines[-1]["steps"] / 1e6, 2),
        )
    apart = means["--zeropp"] - means["ZeRO-3"]
    report.note(f"--zeropp ends {apart:+.4f} nats from ZeRO-3 ({apart / means['ZeRO-3']:+.2%}) after {steps} steps")
    if not abs(apart) <= NATS_APART:
        report.fail(f"the losses differ by {apart:+.4f} nats, more than {NATS_APART}")


def train(task: Task, folder: Path, flags: tuple[str, ...], env: dict[str, str], limit: float) -> list[dict[str, Any]]:
    """Run the program until it has taken its steps or the time is over; returns what it has logged, one line a step."""
    sizes = SIZES[task.sizes]
    ours = {
        "--text-path": task.corpus or SHIPPED,
        "--data-cache-path": str(task.folder / "cache"),
        "--vocab-size": "256",
        "--run-dir": str(folder),
        "--global-batch-size": str(BATCH),
        "--train-samples": str(BATCH * sizes.steps),
        "--lr-warmup-samples": str(BATCH * min(WARM_UP_STEPS, sizes.steps - 1)),
        "--lr-decay-style": "constant",
        "--lr-decay-samples": str(BATCH * sizes.steps),
        "--eval-iters": "0",
        "--log-interval": "1",
    }
    words = [word for pair in ours.items() for word in pair]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "@configs/gpt_125m.args", *sizes.flags, *words]
    with running([*command, *COMMON, *flags], RANKS, env) as ranks:
        wait_for(ranks, time.monotonic() + limit)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [line for line in lines if "lm_loss" in line]


if __name__ == "__main__":
    sys.exit(run_part(measure))
