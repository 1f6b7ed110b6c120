"""Part "streams" of tools/gpu_check.py: does what runs on side streams wait for what it needs, and keep what it uses?

Four ranks share the GPU over NCCL as two nodes of two. The same training runs twice, step by step in turn: without
overlap and undisturbed; and with overlap, under delays and an allocator that hands freed memory out at once, full of
NaN (gpu_check_streams_rank.py). The bits must be the same. A second job on the CPU's gloo says what NCCL's numbers
should be, to the rounding of bf16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from gpu_check_part import Report, Task, run_part
from gpu_check_ranks import ON_ONE_GPU, ON_THE_CPU, run_ranks, side_by_side

HERE = Path(__file__).resolve().parent
NODES, RANKS_PER_NODE = 2, 2
BF16_ROUNDING = 2e-2  # of a loss: products rounded to 8 bits, and int4 gradients on the other side of a step
REFERENCE_STEPS = 4


class Settings(NamedTuple):
    """What the ranks of one job do.

    Attributes:
        backend: nccl or gloo.
        tp: tensor-parallel degree.
        steps: at most; 0 of them are compared if not `disturbed`.
        seconds: after which no further step begins.
        disturbed: run the overlapped, disturbed training too.
        result: file that rank 0 writes.
    """

    backend: str
    tp: int
    steps: int
    seconds: float
    disturbed: bool
    hidden_size: int
    num_layers: int
    seq_length: int
    result: str


class Sizes(NamedTuple):
    steps: int
    hidden_size: int
    num_layers: int
    seq_length: int


SIZES = {"gpu": Sizes(50, 512, 4, 256), "rehearsal": Sizes(3, 64, 2, 16)}
DEGREES = (1, 2)


def measure(task: Task, report: Report) -> None:
    """One row per tensor-parallel degree."""
    with side_by_side() as mps:
        if not task.rehearse:
            report.note(f"ranks share the GPU {'through MPS' if mps else 'by turns (no MPS)'}")
        for index, tp in enumerate(DEGREES):
            seconds = (task.seconds - report.elapsed()) / (len(DEGREES) - index)
            env = ON_THE_CPU if task.rehearse else {**ON_ONE_GPU, **mps, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            check_degree(task, report, tp, env, seconds)


def check_degree(task: Task, report: Report, tp: int, env: dict[str, str], seconds: float) -> None:
    """Both jobs of one degree."""
    sizes = SIZES[task.sizes]

    def job(backend: str, steps: int, disturbed: bool, env: dict[str, str], limit: float) -> dict[str, list[float]]:
        result = task.folder / f"{backend}-tp{tp}-{'disturbed' if disturbed else 'calm'}.json"
        settings = Settings(backend, tp, steps, 0.5 * limit, disturbed, *sizes[1:], str(result))
        command = [sys.executable, str(HERE / "gpu_check_streams_rank.py"), json.dumps(settings)]
        code = run_ranks(command, NODES * RANKS_PER_NODE, env, limit)
        if code != 0:
            reason = f"ended with exit code {code}" if code is not None else f"was not done in {limit:.0f} s"
            report.fail(f"TP {tp}, {backend}: the job {reason}")
        return json.loads(result.read_text()) if result.exists() else {}

    reference = job("gloo", min(REFERENCE_STEPS, sizes.steps), False, ON_THE_CPU, 0.4 * seconds)
    found = job("gloo" if task.rehearse else "nccl", sizes.steps, True, env, 0.6 * seconds)
    if not found or not reference:
        return
    unequal, losses, expected = found["unequal"], found["losses"], reference["losses"]
    apart = max((abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False)), default=float("nan"))
    report.row(
        TP=tp,
        steps_compared=len(losses),
        of=sizes.steps,
        delays=int(found["delays"][0]),
        overlap_on_equals_off="every bit" if not unequal else f"not in steps {unequal[:5]}",
        loss_beside_gloo=f"{apart:.1e} apart (most {BF16_ROUNDING})",
        seconds_per_step_off=round(found["seconds"][0], 3),
        seconds_per_step_on_disturbed=round(found["seconds"][1], 3),
    )
    if unequal:
        report.fail(f"TP {tp}: with overlap other bits than without in steps {unequal[:20]}")
    if not apart <= BF16_ROUNDING:
        report.fail(f"TP {tp}: losses {losses[:4]} beside gloo's {expected[:4]}")
    if not losses:
        report.fail(f"TP {tp}: no step was done in time")


if __name__ == "__main__":
    sys.exit(run_part(measure))
