"""Test computations with timeline spans: hidden fractions of communication, and the alignment of clocks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.parallel.timeline import Span
from megazpp.training.timers import align, clip, hidden_shares, intersection, total, track_seconds, union


def span(track: str, start: float, end: float, *, blocking: bool = False) -> Span:
    return Span(track, "x", start, end - start, blocking)


STEP = [
    span("step", 0, 10, blocking=True),
    span("compute", 0, 10, blocking=True),  # forward and backward take 0 to 10 s and contain all spans below
    span("cross", 1, 5),  # a cross hop of 4 s; compute waits for it during its last second
    span("wait", 4, 6, blocking=True),
    span("cross", 7, 9),  # a cross hop of 2 s; from 8 to 8.5 s a local hop blocks compute meanwhile
    span("local", 8, 8.5, blocking=True),
    span("local", 9, 9.5),  # a local hop on another thread, so it does not block compute
]
HOPS = [span("cross", 0, 10), span("wait", 2, 8), span("local", 3, 5), span("local", 4, 6)]
HELD = [span("compute", 0, 4, blocking=True), span("cross", 1, 3, blocking=True)]
SHARED = [span("cross", 0, 4), span("cross", 1, 3), span("cross", 3, 6), *[span("wait", 3, 4)] * 2]
# spans, track, and two fractions of the track's time: hidden behind compute, which neither waits nor runs a blocking
# collective at that time; and hidden behind compute or another hop
HIDDEN = [
    (STEP, "cross", (1 - 1.5 / 6, 1 - 1 / 6)),
    (STEP, "local", (0.5, 1.0)),
    (HOPS, "cross", (0.4, 0.7)),  # compute waits for 6 s, of which 3 s overlap a local hop
    (HOPS, "local", (0.0, 1.0)),
    ([*HOPS, span("step", 0, 10), span("compute", 0, 10)], "cross", (0.4, 0.7)),
    (HELD, "cross", (0.0, 0.0)),  # the cross hop runs on the computing thread and blocks it, so nothing is hidden
    ([one._replace(blocking=False) for one in HELD], "cross", (1.0, 1.0)),
    (SHARED, "cross", (5 / 6, 5 / 6)),  # seconds that two spans of the track share count once
]


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def moments(intervals: list[tuple[float, float]]) -> set[int]:
    """Return the set of whole seconds that the intervals cover, as a slow reference.

    Bounds of intervals are integers.
    """
    return {slot for start, end in intervals for slot in range(int(start), int(end))}


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
    # Ranks 0 and 1 share a host's clock and left the barrier at 10 and 10.5 s on it. Rank 2's host reads 106 s when
    # rank 2 leaves the barrier.
    aligned = align(spans, ["a", "a", "b"], [10, 10.5, 106])
    assert [[s.start_seconds for s in of_rank] for of_rank in aligned] == [[1], [3], [1]]


@settings(max_examples=50)
@given(INTERVALS, INTERVALS)
def test_union_and_intersection_match_sets_of_unit_slots(a, b):
    merged, other = union(a), union(b)
    shared = intersection(merged, other)
    for result, expected in ((merged, moments(a)), (shared, moments(a) & moments(b))):
        assert moments(result) == expected
        assert total(result) == len(expected)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(merged))
