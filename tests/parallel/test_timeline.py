"""The timeline: what is recorded, from which thread."""

from __future__ import annotations

import contextlib
import threading
import time
import timeit
from collections.abc import Iterator

import pytest
import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.timeline import Activity, Timeline

OFF_SECONDS = 2e-6  # 0.39 microseconds measured; the rest is for a loaded machine


def test_what_begins_before_start_or_after_detach_is_not_recorded():
    timeline = Timeline()
    with timeline.span("compute", "before"):
        pass
    recording = timeline.start()
    with timeline.span("compute", "during"):
        pass
    with timeline.span("compute", "open at the end"):
        timeline.detach(recording)
    with timeline.span("compute", "after"):
        pass
    assert [s.name for s in recording.spans()] == ["during", "open at the end"]


def test_a_span_that_is_not_recorded_costs_next_to_nothing():
    timeline = Timeline()

    def spans() -> None:
        for _ in range(1000):
            with timeline.span("cross", "all_gather"):
                pass

    assert min(timeit.repeat(spans, number=1, repeat=20)) / 1000 < OFF_SECONDS


def test_a_span_lasts_as_long_as_what_is_inside_and_its_time_is_the_monotonic_clock_s():
    timeline = Timeline()
    recording = timeline.start()
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    with timeline.span("compute", "outer"):
        with timeline.span("wait", "inner"):
            time.sleep(0.02)
        with pytest.raises(RuntimeError), timeline.span("compute", "failed"):
            raise RuntimeError
    after = time.clock_gettime(time.CLOCK_MONOTONIC)
    outer, inner, failed = recording.spans()
    assert [s.name for s in (outer, inner, failed)] == ["outer", "inner", "failed"]  # by their beginning
    assert inner.seconds >= 0.02
    assert before <= outer.start_seconds <= inner.start_seconds
    assert inner.end_seconds <= failed.start_seconds <= failed.end_seconds <= outer.end_seconds <= after


def test_spans_of_all_threads_arrive_and_only_the_starting_thread_s_are_blocking():
    timeline, threads, each = Timeline(), 8, 200
    recording = timeline.start()

    def work(index: int) -> None:
        for _ in range(each):
            with timeline.span(f"track {index}", "work"):
                pass

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    work(threads)
    for worker in workers:
        worker.join()
    spans = recording.spans()
    assert len(spans) == each * (threads + 1)
    assert {s.track for s in spans if s.blocking} == {f"track {threads}"}
    assert [s.start_seconds for s in spans] == sorted(s.start_seconds for s in spans)


@pytest.mark.gpu
def test_on_cuda_a_span_lasts_as_long_as_the_work_on_its_stream():
    timeline, side = Timeline("cuda"), torch.cuda.Stream()
    cycles = 100_000_000  # tens of milliseconds, far more than it takes to launch
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
    assert spans["cross"].seconds > 0.01
    assert spans["compute"].seconds > 0.01
    assert spans["wait"].start_seconds == pytest.approx(spans["compute"].end_seconds, abs=1e-3)


class FakeEvent:
    """A CUDA event of a device whose clock is `now` milliseconds."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at - self.at


def test_times_of_the_device_are_tied_to_the_clock_by_one_event_and_a_stream_of_its_own_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
):
    stream, synchronized = ["compute"], []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(FakeEvent.now))
    FakeEvent.now, timeline = 5000.0, Timeline("cuda")
    recording = timeline.start()
    started = time.perf_counter()
    FakeEvent.now = 5100.0
    with timeline.span("compute", "forward"):
        stream.append("side")
        with timeline.span("cross", "all_gather"):
            FakeEvent.now = 5130.0
        stream.pop()
        FakeEvent.now = 5150.0
    forward, gather = recording.spans()
    assert synchronized == [5000.0, 5150.0]  # before and after, never between
    assert (forward.name, forward.blocking, gather.name, gather.blocking) == ("forward", True, "all_gather", False)
    assert (forward.seconds, gather.seconds) == pytest.approx((0.05, 0.03))
    assert gather.start_seconds == forward.start_seconds == pytest.approx(started + 0.1, abs=0.05)


def test_an_axis_of_one_rank_records_nothing():
    timeline = Timeline()
    recording = timeline.start()
    MeshAxis("tp", timeline=timeline).all_reduce_(torch.ones(2))
    assert recording.spans() == []


def test_recordings_and_listeners_beside_each_other_hear_of_the_same_spans():
    timeline, heard = Timeline(), []

    class Listener:
        @contextlib.contextmanager
        def span(self, track: str, name: str) -> Iterator[None]:
            heard.append(f"{track} {name}")
            yield

    listener = Listener()
    timeline.attach(listener)
    recording = timeline.start()
    with timeline.span("cross", "all_gather layers.3"):
        pass
    second = timeline.start()
    with timeline.span("compute", "forward"):
        pass
    assert [span.name for span in second.spans()] == ["forward"]
    assert [span.name for span in recording.spans()] == ["all_gather layers.3", "forward"]
    timeline.detach(listener)
    with timeline.span("compute", "backward"):
        pass
    assert heard == ["cross all_gather layers.3", "compute forward"]


def test_the_innermost_open_span_of_each_thread_is_seen_and_nothing_afterwards():
    timeline = Timeline()
    timeline.attach(activity := Activity())
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with timeline.span("cross", "all_gather"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with timeline.span("step", "step 1"), timeline.span("compute", "forward"):
        thread.start()
        inside.wait()
        assert {(d.track, d.name, d.number) for d in activity.now()} == {
            ("compute", "forward", 1),
            ("cross", "all_gather", 1),
        }
    leave.set()
    thread.join()
    assert activity.now() == []
    assert activity.entered == {"step": 1, "compute": 1, "cross": 1}


def test_a_thread_that_opens_or_closes_a_span_has_moved():
    timeline = Timeline()
    timeline.attach(activity := Activity())
    with timeline.span("step", "step 1"):
        time.sleep(0.2)
        (before,) = activity.now()
        with timeline.span("tp", "all_reduce"):
            pass
        (after,) = activity.now()
        assert (after.track, after.name) == ("step", "step 1")
        assert after.seconds < 0.2 <= before.seconds


def test_an_error_closes_the_span_and_spans_are_recorded_as_without():
    timeline = Timeline()
    timeline.attach(activity := Activity())
    recording = timeline.start()
    with pytest.raises(RuntimeError), timeline.span("tp", "all_reduce"):
        raise RuntimeError
    assert [s.name for s in recording.spans()] == ["all_reduce"]
    assert activity.now() == []
