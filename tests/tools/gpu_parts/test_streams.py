"""The part "streams" of tools/gpu_check.py on the CPU's queues: what is right passes, what does not wait is found."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_parts.streams import COMMON, StreamSettings, serve
from helpers.ranks import ranks

from megazpp.parallel import comm_queue
from megazpp.parallel.worker import Worker
from megazpp.zero import schedule

pytestmark = pytest.mark.slow


def train(settings: StreamSettings, impatient: bool) -> None:
    """One rank; `impatient`: at the end of a backward the hops that are on their way have brought nothing yet."""
    worker = Worker(
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        store=dist.HashStore(),
        timeout=timedelta(minutes=3),
    )
    with pytest.MonkeyPatch.context() as patch:
        if impatient:

            def finish(self: Any) -> None:
                self._backward = -1
                finishing, self._finishing = self._finishing, []
                for work, add in finishing:
                    work.wait()
                    if not isinstance(work, comm_queue._ThreadWork):
                        add()

            patch.setattr(schedule.ReduceSchedule, "end_backward", finish)
        try:
            serve(settings, worker)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("tp", "impatient"), [(1, False), (2, False), (1, True)])
def test_disturbances_change_no_bit_unless_something_does_not_wait(tmp_path: Path, tp: int, impatient: bool):
    result = tmp_path / "result.json"
    flags = f"--num-layers 2 --hidden-size 32 --seq-length 8 {COMMON}"
    ranks(4).run(train, StreamSettings("gloo", tp, flags, 2, time.time() + 120, True, str(result)), impatient)
    found = json.loads(result.read_text())
    assert len(found["losses"]) == 2
    assert found["delays"] > 10
    assert bool(found["unequal"]) == impatient
