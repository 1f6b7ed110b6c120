"""Run `gpu_check_workers streams` with an injected error: each backward ends before its last hops have finished.

A test uses this program to show that the check of streams detects a missing wait.
"""

import gpu_check_workers

from megazpp.base.program import leave
from megazpp.parallel.comm_queue import _ThreadWork
from megazpp.zero.comms import ReduceSchedule

end_backward = ReduceSchedule.end_backward


def end_too_early(self: ReduceSchedule) -> None:
    self._finishing = [each for each in self._finishing if not isinstance(each[0], _ThreadWork)]
    end_backward(self)


if __name__ == "__main__":
    ReduceSchedule.end_backward = end_too_early  # type: ignore[method-assign]
    leave(gpu_check_workers.streams())
