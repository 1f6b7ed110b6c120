"""Part "loss" of tools/gpu_check.py: `pretrain_gpt.py` with ZeRO-3, --zeropp and local steps on two emulated nodes.

The four ranks share the GPU, so the time says nothing. Text is read as bytes, which needs no tokenizer. Each run
is ended when its share of the time is over, and the steps that all have taken are compared: ZeRO-3 with --zeropp.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu_parts.part import Report, Task
from gpu_parts.ranks import ON_ONE_GPU, ON_THE_CPU, running, side_by_side, wait_for

ROOT = Path(__file__).resolve().parents[2]
NATS_APART = 0.02  # of the last steps' mean: several times what one seed differs from the next
MODEL = "--seq-length 1024 --micro-batch-size 4"
TOY = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4"
COMMON = (
    "--tokenizer-type NullTokenizer --vocab-size 256 --split 100,0,0 --emulate-nodes 2 --lr-decay-style constant "
    "--eval-iters 0 --log-interval 1"
)
RUNS: dict[str, tuple[str, ...]] = {
    "ZeRO-3": (),
    "--zeropp": ("--zeropp",),
    "--diloco-steps 10": (
        "--diloco-steps",
        "10",
        "--diloco-delay",
        "2",
    ),  # that it runs is what counts
}
BATCH, WARM_UP_STEPS = 16, 20


def measure(task: Task, report: Report) -> None:
    """One row per run, and whether they agree."""
    logged: dict[str, list[dict[str, Any]]] = {}
    with side_by_side() as mps:
        env = ON_THE_CPU if task.rehearse else {**ON_ONE_GPU, **mps}
        for index, (name, flags) in enumerate(RUNS.items()):
            limit = (task.seconds - report.elapsed()) / (len(RUNS) - index)
            logged[name] = train(task, task.folder / name.strip("-").replace(" ", "-"), flags, env, limit)
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
    steps = task.size(2000, 3)
    samples = f"--global-batch-size {BATCH} --train-samples {BATCH * steps} --lr-decay-samples {BATCH * steps}"
    warm_up = f"--lr-warmup-samples {BATCH * min(WARM_UP_STEPS, steps - 1)}"
    words = f"@configs/gpt_125m.args {task.size(MODEL, TOY)} {samples} {warm_up} {COMMON}".split()
    paths = ["--text-path", task.corpus or "builtin:moby_dick", "--data-cache-path", str(task.folder / "cache")]
    program = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    with running([*program, *words, *paths, "--run-dir", str(folder), *flags], 4, env) as ranks:
        wait_for(ranks, time.monotonic() + limit)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [line for line in lines if "lm_loss" in line]
