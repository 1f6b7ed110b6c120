"""Where training stands."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """Where training stands; what a resumed run continues from.

    Attributes:
        iteration: steps done.
        consumed_samples: samples those steps were given.
        scheduled_samples: samples of the steps that were taken; skipped steps do not move the schedule.
        micro_batches: of one rank, over all steps.
        stop_reason: why the loop ended before its last iteration, if it did.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    micro_batches: int = 0
    stop_reason: str | None = None
