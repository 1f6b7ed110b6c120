"""Spans of many ranks as a Chrome trace, which ui.perfetto.dev and chrome://tracing show: a process per rank, a thread
per track. Spans of a track that overlap without nesting (two threads, two streams) get a second thread of its name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazpp.parallel.timeline import COMPUTE, STEP, WAIT, Span

MICRO = 1e6
TRACKS = (STEP, COMPUTE, WAIT, "tp", "local", "cross")  # from the top; others follow by name
SLACK = 1e-9  # seconds: what rounding may move


def chrome_trace(spans_by_rank: Sequence[Sequence[Span]], names: Sequence[str]) -> dict[str, Any]:
    """The trace as JSON values.

    Args:
        spans_by_rank: on one clock.
        names: of the ranks.
    """
    events: list[dict[str, Any]] = []
    for rank, (spans, name) in enumerate(zip(spans_by_rank, names, strict=True)):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        rows = [(track, row) for track in sorted_tracks(spans) for row in rows_without_crossings(spans, track)]
        for thread, (track, row) in enumerate(rows):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": track}})
            index = {"sort_index": thread}
            events.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": index})
            events += [_event(span, rank, thread) for span in row]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def read_chrome_trace(path: Path) -> dict[str, list[Span]]:
    """The spans that `chrome_trace` wrote: rank's name -> spans, in rank order.

    Raises:
        ValueError: the file is not a trace of ours.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        spans: dict[str, list[Span]] = {names[rank]: [] for rank in sorted(names)}
        for e in events:
            if e["ph"] == "X":
                span = Span(e["cat"], e["name"], e["ts"] / MICRO, e["dur"] / MICRO, e["args"]["blocking"])
                spans[names[e["pid"]]].append(span)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a timeline that --timeline-step has written: {error!r}") from error
    if not any(spans.values()):
        raise ValueError(f"{path} is not a timeline that --timeline-step has written: it has no spans")
    return spans


def sorted_tracks(spans: Sequence[Span]) -> list[str]:
    """The tracks of the spans, from the top of a picture to its bottom."""
    tracks = {span.track for span in spans}
    return [track for track in TRACKS if track in tracks] + sorted(tracks - set(TRACKS))


def rows_without_crossings(spans: Sequence[Span], track: str) -> list[list[Span]]:
    """The track's spans in as few rows as needed, each with spans that follow each other or nest."""
    rows: list[_Row] = []
    mine = (span for span in spans if span.track == track)
    for span in sorted(mine, key=lambda span: (span.start_seconds, -span.seconds)):
        if not any(row.take(span) for row in rows):
            rows.append(_Row())
            rows[-1].take(span)
    return [row.spans for row in rows]


class _Row:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open_ends: list[float] = []  # from the outermost span that is not over yet

    def take(self, span: Span) -> bool:
        """Append the span, unless it begins inside another one and ends outside; spans come by their beginning."""
        while self._open_ends and self._open_ends[-1] <= span.start_seconds + SLACK:
            self._open_ends.pop()
        if self._open_ends and span.end_seconds > self._open_ends[-1] + SLACK:
            return False
        self.spans.append(span)
        self._open_ends.append(span.end_seconds)
        return True


def _event(span: Span, rank: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": rank,
        "tid": thread,
        "ts": round(span.start_seconds * MICRO, 3),
        "dur": round(span.seconds * MICRO, 3),
        "args": {"blocking": span.blocking},
    }
