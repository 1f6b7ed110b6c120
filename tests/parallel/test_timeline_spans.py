"""The arithmetic of spans: what was busy, what hides behind what, one clock for all hosts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.parallel.timeline import Span, align, clip, hidden_shares, intersection, total, track_seconds, union


def span(track: str, start: float, end: float, *, blocking: bool = False) -> Span:
    return Span(track, "x", start, end - start, blocking)


def behind_compute(spans: list[Span], track: str) -> float:
    hidden = hidden_shares(spans, track)
    assert hidden is not None
    return hidden[0]


STEP = [
    span("step", 0, 10, blocking=True),
    span("compute", 0, 10, blocking=True),  # forward and backward, with everything below inside
    span("cross", 1, 5),  # 4 s, of which 4 to 5 are waited for
    span("wait", 4, 6, blocking=True),
    span("cross", 7, 9),  # 2 s, of which 8 to 8.5 lie under a blocking local hop
    span("local", 8, 8.5, blocking=True),
    span("local", 9, 9.5),  # on another thread: keeps nobody
]


def test_hidden_behind_compute_is_what_ran_while_the_rank_neither_waited_nor_was_inside_a_blocking_collective():
    assert behind_compute(STEP, "cross") == pytest.approx(1 - 1.5 / 6)
    assert behind_compute(STEP, "local") == pytest.approx(0.5)
    assert hidden_shares(STEP, "tp") is None


def test_a_wait_during_which_another_hop_runs_is_hidden_behind_work():
    spans = [span("cross", 0, 10), span("wait", 2, 8), span("local", 3, 5), span("local", 4, 6)]
    assert hidden_shares(spans, "cross") == pytest.approx((0.4, 0.7))
    assert hidden_shares(spans, "local") == pytest.approx((0.0, 1.0))
    assert hidden_shares([*spans, span("step", 0, 10), span("compute", 0, 10)], "cross") == pytest.approx((0.4, 0.7))


def test_a_collective_on_the_computing_thread_is_not_hidden_at_all():
    spans = [span("compute", 0, 4, blocking=True), span("cross", 1, 3, blocking=True)]
    assert hidden_shares(spans, "cross") == (0.0, 0.0)
    assert hidden_shares([s._replace(blocking=False) for s in spans], "cross") == (1.0, 1.0)


def test_time_that_two_spans_share_counts_once():
    overlapping = [
        span("cross", 0, 4),
        span("cross", 1, 3),
        span("cross", 3, 6),
        span("wait", 3, 4),
        span("wait", 3, 4),
    ]
    assert track_seconds(overlapping) == {"cross": pytest.approx(6), "wait": pytest.approx(1)}
    assert behind_compute(overlapping, "cross") == pytest.approx(5 / 6)


def test_computing_is_counted_without_waits_and_blocking_collectives():
    assert track_seconds(STEP) == pytest.approx({"step": 10, "compute": 7.5, "cross": 6, "wait": 2, "local": 1})


def test_clipping_keeps_the_part_inside():
    spans = [span("cross", 0, 2), span("cross", 1, 9), span("cross", 5, 6), span("cross", 8, 9)]
    assert clip(spans, 1.5, 6) == [span("cross", 1.5, 2), span("cross", 1.5, 6), span("cross", 5, 6)]
    assert clip(spans, 2, 2) == []


def test_hosts_are_aligned_at_the_barrier_and_ranks_of_a_host_keep_their_distances():
    spans = [[span("cross", 11, 12)], [span("cross", 13, 14)], [span("cross", 107, 108)]]
    # ranks 0 and 1 share a clock and left the barrier at 10 and 10.5; rank 2's host reads 106 at that moment
    aligned = align(spans, ["a", "a", "b"], [10, 10.5, 106])
    assert [[s.start_seconds for s in of_rank] for of_rank in aligned] == [[1], [3], [1]]


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def moments(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit slots that integer intervals cover: the reference."""
    return {slot for start, end in intervals for slot in range(int(start), int(end))}


@settings(max_examples=200)
@given(INTERVALS, INTERVALS)
def test_unions_and_intersections_cover_what_sets_of_moments_do(a: list, b: list):
    merged, other = union(a), union(b)
    shared = intersection(merged, other)
    for result, expected in ((merged, moments(a)), (shared, moments(a) & moments(b))):
        assert moments(result) == expected
        assert total(result) == len(expected)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(merged))
