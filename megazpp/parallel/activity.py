"""What the threads of this process are doing: the spans of the timeline that are open now.

The watchdog reads it. A span costs about three microseconds more (3.4 in all on a busy machine).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple


class Doing(NamedTuple):
    """An open span.

    Attributes:
        lane, name: as in the timeline.
        number: of the lane's spans so far, this one included. Ranks of an axis call its collectives in the same order,
            so equal numbers mean the same collective.
        seconds: since its thread last opened or closed a span.
    """

    lane: str
    name: str
    number: int
    seconds: float = 0.0


class Activity:
    """Keeps the open spans of each thread.

    Attributes:
        entered: how many spans each lane has had.
    """

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()  # one thread writes to a lane
        self._open: dict[int, list[Doing]] = {}
        self._moved: dict[int, float] = {}

    @contextmanager
    def span(self, lane: str, name: str, recorded: AbstractContextManager[object]) -> Iterator[None]:
        """Around what happens, and around its recording."""
        thread = threading.get_ident()
        self.entered[lane] += 1
        open_spans = self._open.setdefault(thread, [])
        open_spans.append(Doing(lane, name, self.entered[lane]))
        self._moved[thread] = time.monotonic()
        try:
            with recorded:
                yield
        finally:
            open_spans.pop()
            self._moved[thread] = time.monotonic()

    def now(self) -> list[Doing]:
        """The innermost open span of every thread that has one, the one without movement for longest first."""
        now = time.monotonic()
        innermost = [
            spans[-1]._replace(seconds=now - self._moved[thread]) for thread, spans in list(self._open.items()) if spans
        ]
        return sorted(innermost, key=lambda doing: -doing.seconds)
