"""`gpu_check_sides streams` of a product that does not wait: backwards end before the hops that are on their way."""

from typing import Any

import gpu_check_sides

import pretrain_gpt
from megazpp.parallel import comm_queue
from megazpp.zero import schedule


def end_backward(self: Any) -> None:
    self._backward = -1
    finishing, self._finishing = self._finishing, []
    for work, add in finishing:
        work.wait()
        if not isinstance(work, comm_queue._ThreadWork):
            add()


if __name__ == "__main__":
    schedule.ReduceSchedule.end_backward = end_backward  # type: ignore[method-assign]
    pretrain_gpt.leave(gpu_check_sides.streams())
