"""Test the timeline: which spans (named intervals) it records, on which thread, and which of them block."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megazpp.parallel import timeline as timeline_module
from megazpp.parallel.timeline import Activity, Doing, Timeline


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
    cycles = 100_000_000  # clock cycles: tens of milliseconds, far more than the launch of a kernel takes
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
        """Return a fake CUDA event of a device whose clock shows the last number of `now`, in milliseconds."""
        assert enable_timing
        made = SimpleNamespace(synchronize=int)
        made.record = lambda: setattr(made, "at", now[-1])
        made.elapsed_time = lambda later: later.at - made.at
        return made

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(now[-1]))
    timeline = Timeline("cuda")
    before = time.perf_counter()
    recording = timeline.start()
    after = time.perf_counter()
    now.append(5100.0)
    with timeline.span("compute", "forward"):
        stream.append("side")
        with timeline.span("cross", "all_gather"):
            now.append(5130.0)
        stream.pop()
        now.append(5150.0)
    forward, gather = recording.spans()
    # the device is synchronized only at the start and at the end of the recording
    assert synchronized == [5000.0, 5150.0]
    assert (forward.name, forward.blocking, gather.name, gather.blocking) == ("forward", True, "all_gather", False)
    assert (forward.seconds, gather.seconds) == pytest.approx((0.05, 0.03))
    assert gather.start_seconds == forward.start_seconds
    assert before - 1e-6 <= forward.start_seconds - 0.1 <= after + 1e-6  # the fake device began the span after 0.1 s


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
            raise ValueError  # closes the span, which counts as progress of this thread
        now.append(109.0)
        assert activity.now() == [Doing("cross", "all_gather", 1, 9.0), Doing("compute", "forward", 1, 1.0)]
    leave.set()
    thread.join()
    assert activity.now() == []
    assert activity.entered == {"step": 1, "compute": 1, "cross": 1, "tp": 1}
