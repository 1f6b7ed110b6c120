"""Test the timeline: which spans are recorded, on which thread, and the share of communication that is hidden."""

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.parallel import timeline as timeline_module
from megazpp.parallel.timeline import (
    Activity,
    Doing,
    Span,
    Timeline,
    align,
    clip,
    hidden_shares,
    intersection,
    total,
    track_seconds,
    union,
)


def test_span_without_listeners_creates_no_object():
    timeline = Timeline()
    assert timeline.span("cross", "all_gather") is timeline.span("compute", "forward")


def test_spans_begun_during_a_recording_are_kept_in_monotonic_time():
    timeline = Timeline()
    with timeline.span("compute", "too early"):
        recording = timeline.start()
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    with timeline.span("compute", "outer"):
        with timeline.span("wait", "inner"):
            time.sleep(0.001)
        with pytest.raises(RuntimeError), timeline.span("compute", "failed"):
            raise RuntimeError
        timeline.detach(recording)
        with timeline.span("compute", "too late"):
            pass
    after = time.clock_gettime(time.CLOCK_MONOTONIC)
    outer, inner, failed = recording.spans()
    assert [s.name for s in (outer, inner, failed)] == ["outer", "inner", "failed"]
    assert inner.seconds >= 0.001
    assert before <= outer.start_seconds <= inner.start_seconds
    assert inner.end_seconds <= failed.start_seconds <= failed.end_seconds <= outer.end_seconds <= after


def test_spans_of_all_threads_are_kept_and_only_the_main_ones_block():
    timeline, each = Timeline(), 100
    recording = timeline.start()

    def work(track):
        for _ in range(each):
            with timeline.span(track, "work"):
                pass

    threads = [threading.Thread(target=work, args=(f"track {index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    work("compute")
    for thread in threads:
        thread.join()
    spans = recording.spans()
    assert len(spans) == each * 5
    assert {s.track for s in spans if s.blocking} == {"compute"}
    assert [s.start_seconds for s in spans] == sorted(s.start_seconds for s in spans)


@pytest.mark.gpu
def test_cuda_span_lasts_as_long_as_the_work_on_its_stream():
    timeline, side = Timeline("cuda"), torch.cuda.Stream()
    cycles = 100_000_000  # tens of milliseconds, far more than a launch takes
    torch.cuda.synchronize()
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    recording = timeline.start()
    with torch.cuda.stream(side), timeline.span("cross", "on the side"):
        torch.cuda._sleep(cycles)
    with timeline.span("compute", "forward"):
        torch.cuda._sleep(cycles)
    with timeline.span("wait", "for the side"):
        torch.cuda.current_stream().wait_stream(side)
    spans = {s.track: s for s in recording.spans()}
    after = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert [spans[track].blocking for track in ("cross", "compute", "wait")] == [False, True, True]
    for span in spans.values():
        assert before - 1e-3 <= span.start_seconds <= span.end_seconds <= after + 1e-3
    assert min(spans["cross"].seconds, spans["compute"].seconds) > 0.01
    assert spans["wait"].start_seconds == pytest.approx(spans["compute"].end_seconds, abs=1e-3)


def test_cuda_times_are_tied_to_the_clock_by_one_event(monkeypatch):
    now, stream, synchronized = [5000.0], ["compute"], []

    def event(*, enable_timing):
        """Fake an event of a device whose clock is `now`, in milliseconds."""
        assert enable_timing
        made = SimpleNamespace(synchronize=int)
        made.record = lambda: setattr(made, "at", now[-1])
        made.elapsed_time = lambda later: later.at - made.at
        return made

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(now[-1]))
    timeline = Timeline("cuda")
    recording = timeline.start()
    started = time.perf_counter()
    now.append(5100.0)
    with timeline.span("compute", "forward"):
        stream.append("side")
        with timeline.span("cross", "all_gather"):
            now.append(5130.0)
        stream.pop()
        now.append(5150.0)
    forward, gather = recording.spans()
    assert synchronized == [5000.0, 5150.0]  # synchronized only at both ends of the recording
    assert (forward.name, forward.blocking, gather.name, gather.blocking) == ("forward", True, "all_gather", False)
    assert (forward.seconds, gather.seconds) == pytest.approx((0.05, 0.03))
    assert gather.start_seconds == forward.start_seconds == pytest.approx(started + 0.1, abs=0.05)


def test_overlapping_recordings_and_listeners_see_the_same_spans():
    timeline, activity = Timeline(), Activity()
    timeline.attach(activity)
    recording = timeline.start()
    with timeline.span("cross", "all_gather layers.3"):
        second = timeline.start()
    with timeline.span("compute", "forward"):
        timeline.detach(activity)
    with timeline.span("compute", "backward"):
        pass
    assert [span.name for span in second.spans()] == ["forward", "backward"]
    assert [span.name for span in recording.spans()] == ["all_gather layers.3", "forward", "backward"]
    assert activity.entered == {"cross": 1, "compute": 1}


def test_activity_shows_each_threads_innermost_open_span(monkeypatch):
    timeline, activity, now = Timeline(), Activity(), [100.0]
    monkeypatch.setattr(timeline_module.time, "monotonic", lambda: now[-1])
    timeline.attach(activity)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with timeline.span("cross", "all_gather"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other, daemon=True)
    with timeline.span("step", "step 1"), timeline.span("compute", "forward"):
        thread.start()
        inside.wait()
        now.append(107.0)
        with contextlib.suppress(ValueError), timeline.span("tp", "all_reduce"):
            now.append(108.0)
            raise ValueError  # closing its span counts as progress of this thread
        now.append(109.0)
        assert activity.now() == [Doing("cross", "all_gather", 1, 9.0), Doing("compute", "forward", 1, 1.0)]
    leave.set()
    thread.join()
    assert activity.now() == []
    assert activity.entered == {"step": 1, "compute": 1, "cross": 1, "tp": 1}


# ---- arithmetic of spans: busy time, hidden time, and clocks of several hosts ----------------------------------------


def span(track: str, start: float, end: float, *, blocking: bool = False) -> Span:
    return Span(track, "x", start, end - start, blocking)


STEP = [
    span("step", 0, 10, blocking=True),
    span("compute", 0, 10, blocking=True),  # forward and backward, which contain all spans below
    span("cross", 1, 5),  # 4 s, of which the last one is waited for
    span("wait", 4, 6, blocking=True),
    span("cross", 7, 9),  # 2 s, of which 8 to 8.5 lie under a blocking local hop
    span("local", 8, 8.5, blocking=True),
    span("local", 9, 9.5),  # on another thread, so it blocks nothing
]
HOPS = [span("cross", 0, 10), span("wait", 2, 8), span("local", 3, 5), span("local", 4, 6)]
HELD = [span("compute", 0, 4, blocking=True), span("cross", 1, 3, blocking=True)]
SHARED = [span("cross", 0, 4), span("cross", 1, 3), span("cross", 3, 6), *[span("wait", 3, 4)] * 2]
HIDDEN = [  # spans, track, shares hidden behind compute (no wait, no blocking collective) and behind any work
    (STEP, "cross", (1 - 1.5 / 6, 1 - 1 / 6)),
    (STEP, "local", (0.5, 1.0)),
    (HOPS, "cross", (0.4, 0.7)),  # 3 of the 6 s of waiting overlap another hop
    (HOPS, "local", (0.0, 1.0)),
    ([*HOPS, span("step", 0, 10), span("compute", 0, 10)], "cross", (0.4, 0.7)),
    (HELD, "cross", (0.0, 0.0)),  # on the computing thread
    ([one._replace(blocking=False) for one in HELD], "cross", (1.0, 1.0)),
    (SHARED, "cross", (5 / 6, 5 / 6)),  # time that two spans share counts once
]


def test_hidden_shares_behind_compute_and_behind_any_work():
    for spans, track, expected in HIDDEN:
        assert hidden_shares(spans, track) == pytest.approx(expected), (spans, track)
    assert hidden_shares(STEP, "tp") is None
    assert hidden_shares([*STEP, span("tp", 5, 5)], "tp") is None


def test_track_seconds_exclude_waits_and_count_overlaps_once():
    busy = {"step": 10, "compute": 7.5, "cross": 6, "wait": 2, "local": 1}
    assert track_seconds(STEP) == pytest.approx(busy)
    assert track_seconds(SHARED) == pytest.approx({"cross": 6, "wait": 1})


def test_clipping_keeps_the_part_inside():
    spans = [span("cross", 0, 2), span("cross", 1, 9), span("cross", 5, 6), span("cross", 8, 9)]
    assert clip(spans, 1.5, 6) == [span("cross", 1.5, 2), span("cross", 1.5, 6), span("cross", 5, 6)]
    assert clip(spans, 2, 2) == []


def test_alignment_uses_the_barrier_and_keeps_distances_on_a_host():
    spans = [[span("cross", 11, 12)], [span("cross", 13, 14)], [span("cross", 107, 108)]]
    # ranks 0 and 1 share a clock and left the barrier at 10 and 10.5; rank 2's host reads 106 at that moment
    aligned = align(spans, ["a", "a", "b"], [10, 10.5, 106])
    assert [[s.start_seconds for s in of_rank] for of_rank in aligned] == [[1], [3], [1]]


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def moments(intervals: list[tuple[float, float]]) -> set[int]:
    """Return the unit slots that integer intervals cover, as the reference."""
    return {slot for start, end in intervals for slot in range(int(start), int(end))}


@settings(max_examples=100)
@given(INTERVALS, INTERVALS)
def test_union_and_intersection_match_sets_of_unit_slots(a, b):
    merged, other = union(a), union(b)
    shared = intersection(merged, other)
    for result, expected in ((merged, moments(a)), (shared, moments(a) & moments(b))):
        assert moments(result) == expected
        assert total(result) == len(expected)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(merged))
