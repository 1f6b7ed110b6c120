"""Part "streams" of tools/gpu_check.py: does what runs on side streams wait for what it needs, and keep what it uses?

Four ranks share the GPU over NCCL as two nodes of two. The same training runs twice, step by step in turn: without
overlap and undisturbed; and with overlap, under delays and an allocator that hands freed memory out at once, full of
NaN (streams_rank.py). The bits must be the same. Other jobs, on the CPU's gloo, say what NCCL's numbers should be, to
the rounding of bf16; they run beside the first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from gpu_parts.part import Report, Task, run_part
from gpu_parts.ranks import ON_ONE_GPU, ON_THE_CPU, running, side_by_side, wait_for

NODES, RANKS_PER_NODE = 2, 2
BF16_ROUNDING = 2e-2  # of a loss: products rounded to 8 bits, and int4 gradients on the other side of a step
REFERENCE_STEPS = 4
LAST_STEP_SECONDS = 12.0  # of a job: a step that has begun, and the end


class StreamSettings(NamedTuple):
    """What the ranks of one job do.

    Attributes:
        backend: nccl or gloo.
        tp: tensor-parallel degree.
        flags: of the model.
        steps: at most.
        until: the time of day (Unix) after which no further step begins; the first one does.
        disturbed: run the overlapped, disturbed training too, and compare.
        result: file that rank 0 writes.
    """

    backend: str
    tp: int
    flags: tuple[str, ...]
    steps: int
    until: float
    disturbed: bool
    result: str


class StreamSizes(NamedTuple):
    """Tensor-parallel degrees, steps, and flags that make the model."""

    degrees: tuple[int, ...]
    steps: int
    shape: tuple[str, ...]


SIZES = {
    "gpu": StreamSizes((1, 2), 50, ("--num-layers", "4", "--hidden-size", "512", "--seq-length", "256")),
    "rehearsal": StreamSizes((2,), 3, ("--num-layers", "2", "--hidden-size", "64", "--seq-length", "16")),
}
COMMON = (
    *("--num-attention-heads", "4", "--max-position-embeddings", "256"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--micro-batch-size", "2", "--bf16", "--zeropp"),
)


def measure(task: Task, report: Report) -> None:
    """One row per tensor-parallel degree."""
    with ExitStack() as stack:
        mps = stack.enter_context(side_by_side())
        if not task.rehearse:
            report.note(f"ranks share the GPU {'through MPS' if mps else 'by turns (no MPS)'}")
        env = ON_THE_CPU if task.rehearse else {**ON_ONE_GPU, **mps, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        end = time.monotonic() + task.seconds - report.elapsed()
        references = {}
        degrees = SIZES[task.sizes].degrees
        for tp in degrees:
            settings = plan(task, "gloo", tp, end, disturbed=False)
            references[tp] = settings, stack.enter_context(running(words(settings), NODES * RANKS_PER_NODE, ON_THE_CPU))
        for index, tp in enumerate(degrees):
            last = time.monotonic() + (end - time.monotonic()) / (len(degrees) - index)
            settings = plan(task, "gloo" if task.rehearse else "nccl", tp, last, disturbed=True)
            with running(words(settings), NODES * RANKS_PER_NODE, env) as ranks:
                found = result_of(settings, wait_for(ranks, last), report)
            reference, ranks = references[tp]
            expected = result_of(reference, wait_for(ranks, last), report)
            if found and expected:
                compare(settings, found, expected["losses"], report)


def plan(task: Task, backend: str, tp: int, end: float, *, disturbed: bool) -> StreamSettings:
    """A job that is to be over at `end`, by the monotonic clock."""
    sizes = SIZES[task.sizes]
    until = time.time() + end - time.monotonic() - LAST_STEP_SECONDS
    flags = (*sizes.shape, *COMMON, *(["--sequence-parallel"] if tp > 1 else []))
    result = task.folder / f"{backend}-tp{tp}-{'disturbed' if disturbed else 'calm'}.json"
    steps = sizes.steps if disturbed else min(REFERENCE_STEPS, sizes.steps)
    return StreamSettings(backend, tp, flags, steps, until, disturbed, str(result))


def words(settings: StreamSettings) -> list[str]:
    return [sys.executable, "-m", "gpu_parts.streams_rank", json.dumps(settings._asdict())]


def result_of(settings: StreamSettings, code: int | None, report: Report) -> Mapping[str, Any]:
    """What the job has written; {} if that is nothing."""
    if code != 0:
        reason = f"ended with exit code {code}" if code is not None else "was not done in time"
        report.fail(f"TP {settings.tp}, {settings.backend}: the job {reason}")
    file = Path(settings.result)
    return json.loads(file.read_text()) if file.exists() else {}


def compare(settings: StreamSettings, found: Mapping[str, Any], expected: list[float], report: Report) -> None:
    """The row of one degree, and what is wrong."""
    tp, losses, unequal = settings.tp, found["losses"], found["unequal"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False))
    report.row(
        TP=tp,
        steps_compared=len(losses),
        of=settings.steps,
        delays=found["delays"],
        overlap_on_equals_off="every bit" if not unequal else f"not in steps {unequal[:5]}",
        loss_beside_gloo=f"{apart:.1e} apart (most {BF16_ROUNDING})",
        seconds_per_step_off=round(found["seconds"][0], 3),
        seconds_per_step_on_disturbed=round(found["seconds"][1], 3),
    )
    if unequal:
        report.fail(f"TP {tp}: with overlap other bits than without in steps {unequal[:20]}")
    if not apart <= BF16_ROUNDING:
        report.fail(f"TP {tp}: losses {losses[:4]} beside gloo's {expected[:4]}")


if __name__ == "__main__":
    sys.exit(run_part(measure))
