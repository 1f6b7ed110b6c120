"""When training stops before its end: an iteration, the clock, or a signal; the same answer on all ranks.

SIGTERM (schedulers, container runtimes, `kill`) and SIGUSR1 (Slurm's --signal) end a run in good order, whichever of
its processes they reach: the step that is running is finished (with several GPUs the next one too), a checkpoint is
saved where --save asks for one, and the program exits with 0. That takes as long as those steps (or one evaluation, if
that is running) and one save; what would follow a finished run, the last evaluation and the sample, is left out. A
second signal changes nothing.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from megazpp.flags import check_positive, flag
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import STOP_SIGNALS
from megazpp.training.host_copy import HostCopy


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Early stop: after an iteration, or after a time."""

    exit_interval: int | None = flag(None, "stop after an iteration that this divides")
    exit_duration_in_mins: int | None = flag(None, "stop after this many minutes since the program's start")
    skip_train: bool = flag(False, "only evaluate")

    def __post_init__(self) -> None:
        check_positive(self, "exit_interval", "exit_duration_in_mins")


class StopConditions:
    """Catches the signals while it is entered, and says after each step whether to stop.

    Attributes:
        hurried: a signal has ended the training, so what is not needed is left out.
    """

    def __init__(self, config: StopConfig) -> None:
        self._config, self._began, self._caught = config, time.monotonic(), 0
        self._before: dict[signal.Signals, Any] = {}
        self._agreed: HostCopy | None = None
        self.hurried = False

    def __enter__(self) -> StopConditions:
        self._before = {signum: signal.signal(signum, self._catch) for signum in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def reason(self, iteration: int, dims: ParallelDims, *, agree: bool = True, at_once: bool = False) -> str | None:
        """Why to stop after `iteration`, or None. One all-reduce of two integers over all ranks.

        Signals may reach one rank only, and clocks differ: what one rank knows holds for all. Several ranks on CUDA
        stop one step later: they look at what they agreed on a step ago, for which no device has to stand still.

        Args:
            agree: whether ranks ask each other; what only some of them know waits until they do.
            at_once: whether CUDA waits for the answer.
        """
        config, minutes = self._config, self._config.exit_duration_in_mins
        over = minutes is not None and time.monotonic() - self._began > 60 * minutes
        mine = [self._caught, int(over)]
        caught, some_over = self._agree(mine, dims, at_once=at_once) if agree else (0, 0)
        if caught:
            self.hurried = True
            return signal.Signals(caught).name
        if config.exit_interval is not None and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        return f"--exit-duration-in-mins {minutes}" if some_over else None

    def _agree(self, mine: list[int], dims: ParallelDims, *, at_once: bool) -> list[int]:
        """The largest of each number over all ranks; on CUDA, if not `at_once`, of those of the last call."""
        if dims.world.size == 1:
            return mine
        if at_once or dims.mesh.device_type != "cuda":
            return dims.world.max_(torch.tensor(mine, dtype=torch.int32, device=dims.mesh.device_type)).tolist()
        largest = dims.world.max_(torch.tensor(mine, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True))
        before, self._agreed = self._agreed, HostCopy(largest)
        return [0] * len(mine) if before is None else [int(number) for number in before.wait()]

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._caught = signum
