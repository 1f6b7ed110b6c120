"""`pretrain_gpt.py` with deterministic kernels; with --disturbed under delays and NaN on its side streams.

Disturbed on every queue (parallel/comm_queue.py) and on the streams that submit to it:

- random waits before and after a task: a result that is read too early shows what was there before;
- random waits of the compute before layers: what overwrites memory that the compute still reads, is early now;
- memory of random sizes is allocated, filled with NaN and freed, so that a buffer which was freed while another stream
  still used it is NaN.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import pretrain_gpt
from megazpp.model.gpt import TransformerLayer
from megazpp.parallel.comm_queue import StreamQueue, ThreadQueue, Work

MOST_SECONDS, CYCLES_PER_SECOND = 1e-3, 1.5e9  # of a delay
POISON_ELEMENTS = (1 << 8, 1 << 12, 1 << 18, 3 << 18, 1 << 20, 3 << 20)  # torch keeps blocks above 1 MB apart
RANDOM = random.Random(int(os.environ.get("RANK", "0")))


def disturb() -> None:
    """Now and then keep the current stream (on the CPU: the thread) waiting; fill memory that it frees with NaN."""
    cuda, seconds = torch.cuda.is_available(), RANDOM.choice((0.0, RANDOM.random())) * MOST_SECONDS
    if cuda:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
    else:
        time.sleep(seconds)
    torch.full((RANDOM.choice(POISON_ELEMENTS),), float("nan"), device="cuda" if cuda else "cpu")


def disturbed(submit: Callable[..., Work[Any]]) -> Callable[..., Work[Any]]:
    """A queue's `submit` that disturbs its caller and its task."""

    def submit_disturbed(queue: object, task: Callable[[], Any], **when: Any) -> Work[Any]:
        def around() -> Any:
            disturb()
            result = task()
            disturb()
            return result

        disturb()
        return submit(queue, around, **when)

    return submit_disturbed


def main() -> int:
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward adds in any order otherwise
    if "--disturbed" in sys.argv:
        sys.argv.remove("--disturbed")
        for kind in (StreamQueue, ThreadQueue):
            kind.submit = disturbed(kind.submit)  # type: ignore[method-assign]
        register_module_forward_pre_hook(lambda module, _: disturb() if isinstance(module, TransformerLayer) else None)
    return pretrain_gpt.main()


if __name__ == "__main__":
    pretrain_gpt.leave(main())
