"""Test what a run makes of the spans of its steps, and torch's profiler.

From spans a run makes Megatron-LM's timers, the report of slow ranks, and the timeline of one step.
"""

import contextlib
import dataclasses
import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers.chrome_trace import read_chrome_trace
from helpers.context import context
from helpers.faults import launch
from helpers.pretended_run import FakeDims
from helpers.ranks import ranks
from helpers.training import Case, build_step, dims_on_ranks

from megazpp.parallel.timeline import COMPUTE, STEP, Span, Timeline
from megazpp.training.config import ProfilerConfig, TimingConfig
from megazpp.training.profiler import Profiler
from megazpp.training.timers import (
    MAIN_TIMERS,
    OTHER_TIMERS,
    StepRecorder,
    chrome_trace,
    describe,
    describe_ranks,
    nesting_rows,
    seconds_by_timer,
    timer_lines,
)
from megazpp.zero.config import ZeroConfig


def heard(timeline: Timeline) -> bool:
    """Return True if the timeline has a listener.

    Without listeners, `span` of all timelines returns the same object, which does nothing.
    """
    return timeline.span("", "") is not Timeline().span("", "")


@contextlib.contextmanager
def recorded_step(recorder: StepRecorder, dims: Any, iteration: int) -> Iterator[None]:
    """Enter the recorder's context and the span of a step, as the training loop does around each step."""
    with recorder.step(iteration), dims.timeline.span(STEP, f"step {iteration}"):
        yield


def test_timeline_has_the_requested_step_and_spans_in_flight_before_it(tmp_path):
    dims, gather, recorded = FakeDims(), contextlib.ExitStack(), []
    run, said = context(dims, tmp_path)
    recorder = StepRecorder(TimingConfig(timeline_step=3), run, interval=1)
    for iteration in range(1, 6):
        with recorded_step(recorder, dims, iteration), dims.timeline.span(COMPUTE, f"forward {iteration}"):
            recorded.append(heard(dims.timeline))
            if iteration == 2:
                gather.enter_context(dims.timeline.span("cross", "gather"))
            if iteration == 3:
                time.sleep(0.01)
                gather.close()
    assert recorded == [False, True, True, False, False]
    (spans,) = read_chrome_trace(tmp_path / "timeline.json").values()
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"step 3", "forward 3", "gather"}
    assert (
        by_name["gather"].start_seconds == by_name["step 3"].start_seconds
    )  # the gather began before step 3, and the timeline cuts its span at the start of the step
    assert by_name["gather"].seconds >= 0.01
    assert [line.partition(":")[0] for line in said] == ["timeline of step 3"]


def test_step_is_recorded_once_for_all_readers_and_timers_are_means():
    dims = FakeDims()
    run, said = context(dims)
    everyone = TimingConfig(timing_log_level=1, log_straggler=True, timeline_step=2)
    recorder, begin = StepRecorder(everyone, run, interval=2), time.perf_counter()
    with mock.patch.object(dims.timeline, "start", wraps=dims.timeline.start) as start:
        for iteration in (1, 2, 3):
            step = recorded_step(recorder, dims, iteration)
            with step, dims.timeline.span(COMPUTE, "forward"), dims.timeline.span(COMPUTE, "norm"):
                assert start.call_count == iteration
                time.sleep(0.001)
    assert [line.split(":")[0] for line in said] == ["compute seconds of iteration 2"]
    report, seconds = recorder.report_timers(), time.perf_counter() - begin
    assert timers_of(report) == ["forward-backward", "optimizer"]
    assert 1.0 <= float(re.search(r"forward-backward.*\(([\d.]+)", report)[1]) <= 1e3 * seconds / 3
    recorder.close()
    assert not heard(dims.timeline)


def timers_of(report: str | None) -> list[str]:
    return [line.split()[0] for line in (report or "").splitlines()[1:]]


class Recorded(NamedTuple):
    """Results of one rank.

    `heard` says for each step, and for the time after the last step, whether the timeline had a listener. `reports` has
    two timer reports in a row.
    """

    said: list[str]
    heard: list[bool]
    losses: list[float]
    reports: list[str | None]


def train(folder: Path, timing: TimingConfig, profiling: ProfilerConfig, *iterations: int) -> Recorded:
    """Train the given iterations with ZeRO++ on two nodes and two micro-batches. Return the records of this rank."""
    case = Case(nodes=2, micro_batches=2, zero=ZeroConfig(zeropp=True))
    step, dims = build_step(case)
    run, said = context(dims, folder)
    recorder, listened, losses = StepRecorder(timing, run, interval=1), [], []
    with Profiler(profiling, run) as profiler:
        for iteration in iterations:
            with recorded_step(recorder, dims, iteration), profiler.step(iteration):
                listened.append(heard(dims.timeline))
                losses.append(launch(step, case, iteration).wait().loss)
    recorder.close()
    listened.append(heard(dims.timeline))
    return Recorded(said, listened, losses, [recorder.report_timers() for _ in range(2)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[Recorded]]:
    """Train iterations 1 to 3 with timers, the timeline of step 2 and a profiler.

    Return the run folder, and the records of all ranks.
    """
    folder, timing = tmp_path_factory.mktemp("run"), TimingConfig(timing_log_level=2, timeline_step=2)
    profiling = ProfilerConfig(profile=True, profile_step_start=1, profile_step_end=3, profile_ranks=(0, 3))
    return folder, ranks(4).run(train, folder, timing, profiling, 1, 2, 3)


@pytest.mark.slow
def test_recording_changes_no_loss_and_is_off_unless_requested(recorded):
    folder, results = recorded
    plain = ranks(4).run(train, folder, TimingConfig(), ProfilerConfig(), 1, 2, 3)
    assert [each.losses for each in results] == [each.losses for each in plain]
    assert [(each.heard, each.reports) for each in plain] == [([False] * 4, [None] * 2)] * 4
    assert [each.heard for each in results] == [[True, True, True, False]] * 4
    said = [line.partition(":")[0] for line in results[0].said]
    assert said == ["timeline of step 2", "profile of iterations 2 to 3, rank 0 3"]


def test_timeline_shows_phases_and_hops_of_all_ranks_on_one_clock(recorded):
    by_rank = read_chrome_trace(recorded[0] / "timeline.json")
    assert list(by_rank) == ["rank 0, node 0", "rank 1, node 0", "rank 2, node 1", "rank 3, node 1"]
    hops = {f"{hop} {unit}" for hop in ("all_gather", "all_to_all") for unit in ("layers.0", "the rest")}
    for spans in by_rank.values():
        phases = [span.name for span in spans if span.track == COMPUTE]
        assert phases == ["forward", "backward", "forward", "backward", "norm", "optimizer"]
        for track in ("cross", "local"):
            assert {span.name for span in spans if span.track == track} >= hops
    whole = [span for spans in by_rank.values() for span in spans if span.track == "step"]
    # Every step ends with collectives of all ranks. So on a common clock each rank begins step 2 before any rank ends
    # it.
    assert max(span.start_seconds for span in whole) < min(span.end_seconds for span in whole)
    # time 0 is the barrier that all ranks pass before the recording starts, so all spans begin after it
    assert min(span.start_seconds for span in whole) > 0


def test_timers_are_equal_on_all_ranks_and_reset_after_a_report(recorded):
    ((report, again),) = {tuple(each.reports) for each in recorded[1]}
    assert again is None
    used = {name for name in OTHER_TIMERS if "-shard" not in name and name != "batch-generator"}
    assert set(timers_of(report)) == {*MAIN_TIMERS, *used}
    times = re.findall(r"\((\S+), (\S+)\)$", report, re.MULTILINE)
    assert len(times) == len(timers_of(report))
    assert all(0 < float(least) <= float(most) for least, most in times)


def test_profiled_rank_writes_a_trace_with_operators_and_named_hops(recorded):
    files = sorted(recorded[0].glob("profile*"))
    assert [file.name for file in files] == [f"profile-rank{rank}-iterations2-3.json.gz" for rank in (0, 3)]
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event["ph"] == "X"]
        for hop, count in {"cross all_gather": 2, "local all_gather": 8, "local all_to_all": 4}.items():
            # cross hops are in the trace too (one per unit and step), although threads of communication queues run them
            for unit in ("layers.0", "layers.1", "the rest"):
                assert names.count(f"{hop} {unit}") == count
        assert names.count("compute forward") == 4
        assert any(name.startswith("aten::") for name in names)


def test_profiler_of_a_short_or_resumed_run_replaces_no_trace(tmp_path):
    profiling = ProfilerConfig(profile=True, profile_step_start=1, profile_step_end=3)
    other = dataclasses.replace(profiling, profile_ranks=(1,))
    (line,) = ranks(2).run(train, tmp_path / "other", TimingConfig(), other, 3)[0].said
    assert line.startswith("profile of iterations 3 to 3, rank 1")
    for iteration in (3, 3, 4):
        first, _ = ranks(2).run(train, tmp_path, TimingConfig(), profiling, iteration)
    assert first.said == ["--profile: this run took none of iterations 2 to 3, so nothing was recorded"]
    names = sorted(file.name for file in tmp_path.glob("*.gz"))
    assert names == ["profile-rank0-iterations3-3-2.json.gz", "profile-rank0-iterations3-3.json.gz"]


def test_timeline_summary_sums_tracks_and_weights_hidden_time():
    first = [Span("step", "step 7", 0, 10, True), Span("compute", "f", 0, 10, True), Span("cross", "x", 0, 6)]
    second = [Span("step", "step 7", 0, 8, True), Span("compute", "f", 0, 4, True), Span("cross", "x", 4, 2, True)]
    second.append(Span("local", "y", 4, 1))
    assert describe("step 7", [first, second]).splitlines() == [
        "timeline of step 7: 10.000 s; busy seconds of each track, mean of 2 ranks:",
        "  compute       7.0000 s",
        "  local         0.5000 s, 0% hidden behind compute, 100% behind compute and other hops",
        "  cross         4.0000 s, 75% hidden behind compute, 88% behind compute and other hops",
    ]


def test_trace_has_a_process_per_rank_and_an_ordered_thread_per_track():
    first = [Span("step", "step 3", 0.0, 1.0, True), Span("cross", "all_gather", 0.25, 0.5)]
    tracks = ["zebra", "cross", "compute", "wait", "another", "tp", "local", "step"]
    events = chrome_trace([first, [Span(track, "x", 0.0, 0.125) for track in tracks]], ["rank 0", "rank 1"])
    named = [(e["name"], e["pid"], e.get("tid"), e["args"].get("name")) for e in events["traceEvents"]]
    below = ["step", "compute", "wait", "tp", "local", "cross", "another", "zebra"]
    threads = [(0, 0, "step"), (0, 1, "cross"), *((1, index, track) for index, track in enumerate(below))]
    assert [place for name, *place in named if name == "process_name"] == [[0, None, "rank 0"], [1, None, "rank 1"]]
    assert [tuple(place) for name, *place in named if name == "thread_name"] == threads
    (gather,) = (e for e in events["traceEvents"] if e["name"] == "all_gather")
    assert [gather[key] for key in ("ph", "pid", "tid", "ts", "dur")] == ["X", 0, 1, 250_000, 500_000]


def test_crossing_spans_get_separate_rows_and_nested_spans_do_not():
    outer, inner, later = Span("cross", "outer", 0, 4), Span("cross", "inner", 1, 3), Span("cross", "later", 4, 1)
    crossing, again = Span("cross", "crossing", 2, 3), Span("cross", "again", 3, 4)
    spans = [again, later, crossing, inner, outer, Span("local", "other track", 0, 9)]
    rows = nesting_rows(spans, "cross")
    assert [[s.name for s in row] for row in rows] == [["outer", "inner", "later"], ["crossing"], ["again"]]


def test_timers_sum_spans_and_count_overlapping_collectives_once():
    spans = [
        Span("wait", "data", 0.0, 0.5, True),
        Span("wait", "cross", 0.5, 9.0, True),
        Span("compute", "forward", 1.0, 1.0, True),
        Span("compute", "backward", 2.0, 2.0, True),
        Span("compute", "forward", 4.0, 1.0, True),
        Span("compute", "norm", 5.0, 0.25, True),
        Span("compute", "optimizer", 5.5, 0.5, True),
        Span("cross", "all_gather layers.0", 1.0, 2.0),
        Span("local", "all_gather layers.0", 2.0, 2.0),
        Span("local", "all_to_all the rest", 4.0, 1.0),
        Span("shard", "reduce_scatter", 4.5, 1.0),
        Span("shard", "all_reduce", 5.0, 1.0),
        Span("tp", "all_gather", 0.0, 6.0),
    ]
    seconds = seconds_by_timer(spans)
    assert {name: value for name, value in seconds.items() if value} == {
        "forward-backward": 4.0,
        "forward-compute": 2.0,
        "backward-compute": 2.0,
        "batch-generator": 0.5,
        "params-all-gather": 3.0,
        "params-all-gather-local": 2.0,
        "params-all-gather-cross": 2.0,
        "grads-reduce-scatter": 1.5,
        "grads-reduce-scatter-local": 1.0,
        "grads-reduce-scatter-shard": 1.0,
        "optimizer": 0.75,
        "optimizer-clip-main-grad": 0.25,
        "optimizer-inner-step": 0.5,
    }
    assert set(seconds) == {*MAIN_TIMERS, *OTHER_TIMERS}


def test_timer_lines_match_megatron_and_omit_unused_timers():
    names, by_rank = ("forward-backward", "optimizer", "batch-generator"), [[12.344, 0.0, 0.0], [15.0, 1.5, 0.0]]
    assert timer_lines(names, by_rank) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (12.34, 15.00)\n"
        "    optimizer ......................................: (0.00, 1.50)"
    )
    assert timer_lines(names, [[0.0] * 3] * 2) is None


def steps_with_a_slow_rank() -> list[str]:
    """Run four steps, and return this rank's log lines.

    In steps 2 and 4, rank 2 computes for 0.6 s, and the other ranks wait for it.
    """
    dims = dims_on_ranks(Case())
    run, said = context(dims)
    recorder = StepRecorder(TimingConfig(log_straggler=True), run, interval=2)
    for iteration in range(1, 5):
        with recorded_step(recorder, dims, iteration), dims.timeline.span(COMPUTE, "forward"):
            time.sleep(0.6 if dims.world.rank == 2 and iteration % 2 == 0 else 0.01)
            dims.shard.all_reduce_(torch.ones(1))
    return said


def test_slow_rank_is_logged_and_ranks_that_wait_for_it_are_not():
    (said, *_) = ranks(4).run(steps_with_a_slow_rank)
    assert [line.split(":")[0] for line in said] == ["compute seconds of iteration 2", "compute seconds of iteration 4"]
    for line in said:
        assert "(rank 2); slow: rank 2 " in line
        # ranks wait 0.6 s for rank 2, but waits do not count as compute, so the median of compute seconds stays small
        assert float(line.split("median ")[1].split(",")[0]) < 0.4


def test_equal_ranks_are_not_slow_and_a_long_list_is_truncated():
    assert describe_ranks(10, [1.0, 1.1, 1.05]).endswith(
        "median 1.0500, fastest 1.0000 (rank 0), slowest 1.1000 (rank 1); no slow rank"
    )
    assert describe_ranks(10, [1.0] * 30 + [2.0] * 10).endswith("rank 37 2.00 x and 2 more")


def test_ranks_without_compute_time_make_no_other_rank_slow():
    for seconds in ([0.0, 0.0, 0.5], [0.0]):
        assert describe_ranks(10, seconds).endswith("; no slow rank")


def test_track_without_time_has_no_hidden_share():
    spans = [Span("step", "step 1", 0.0, 1.0, True), Span("tp", "all_reduce", 0.5, 0.0, False)]
    assert describe("step 1", [spans]).splitlines()[1:] == ["  tp            0.0000 s"]
