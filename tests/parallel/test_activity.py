"""Open spans are seen while they are open."""

from __future__ import annotations

import threading
import time

import pytest

from megazpp.parallel.activity import Activity
from megazpp.parallel.timeline import Timeline


def test_the_innermost_open_span_of_each_thread_is_seen_and_nothing_afterwards():
    timeline = Timeline()
    timeline.activity = activity = Activity()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with timeline.span("cross", "all_gather"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with timeline.span("step", "step 1"), timeline.span("compute", "forward"):
        thread.start()
        inside.wait()
        assert {(d.lane, d.name, d.number) for d in activity.now()} == {
            ("compute", "forward", 1),
            ("cross", "all_gather", 1),
        }
    leave.set()
    thread.join()
    assert activity.now() == []
    assert activity.entered == {"step": 1, "compute": 1, "cross": 1}


def test_a_thread_that_opens_or_closes_a_span_has_moved():
    activity = Activity()
    timeline = Timeline()
    timeline.activity = activity
    with timeline.span("step", "step 1"):
        time.sleep(0.2)
        (before,) = activity.now()
        with timeline.span("tp", "all_reduce"):
            pass
        (after,) = activity.now()
        assert (after.lane, after.name) == ("step", "step 1")
        assert after.seconds < 0.2 <= before.seconds


def test_an_error_closes_the_span_and_spans_are_recorded_as_without():
    timeline = Timeline()
    timeline.activity = activity = Activity()
    recording = timeline.start()
    with pytest.raises(RuntimeError), timeline.span("tp", "all_reduce"):
        raise RuntimeError
    assert [s.name for s in timeline.stop(recording)] == ["all_reduce"]
    assert activity.now() == []
