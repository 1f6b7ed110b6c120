"""The timeline of a step: which step, from when on, what is gathered, and how it is summed up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from helpers.chrome_trace import read_chrome_trace
from helpers.context import context
from helpers.ranks import ranks
from helpers.training import Case, build_step

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.timeline import Span, Timeline
from megazpp.topology.cluster import Cluster
from megazpp.training.step_recorder import (
    StepRecorder,
    TimingConfig,
    chrome_trace,
    describe,
    nesting_rows,
    sorted_tracks,
)
from megazpp.zero.config import ZeroConfig


class CountingTimeline(Timeline):
    """Knows how many recordings are open."""

    @property
    def open(self) -> int:
        return len(self._listeners)


class OneRank:
    """What a StepRecorder needs of the dims."""

    def __init__(self) -> None:
        self.timeline, self.world = CountingTimeline(), MeshAxis("world")
        self.layout = SimpleNamespace(cluster=Cluster(num_nodes=1, ranks_per_node=1))


def test_only_the_step_that_was_asked_for_is_recorded_with_what_the_one_before_left_in_flight(tmp_path: Path):
    dims = OneRank()
    run, said = context(dims, tmp_path)
    steps = StepRecorder(TimingConfig(timeline_step=3), run, interval=1)
    go_on, ends = threading.Event(), threading.Event()

    def gather_that_lasts_into_the_next_step() -> None:
        with dims.timeline.span("cross", "gather"):
            ends.set()
            go_on.wait()

    recording = []
    for iteration in range(1, 6):
        with steps.step(iteration):
            recording.append(dims.timeline.open)
            with dims.timeline.span("compute", f"forward {iteration}"):
                if iteration == 2:
                    thread = threading.Thread(target=gather_that_lasts_into_the_next_step)
                    thread.start()
                    ends.wait()
                if iteration == 3:
                    time.sleep(0.01)
                    go_on.set()
                    thread.join()
    assert recording == [0, 1, 1, 0, 0]
    (spans,) = read_chrome_trace(tmp_path / "timeline.json").values()
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"step 3", "forward 3", "gather"}
    assert by_name["gather"].start_seconds == by_name["step 3"].start_seconds  # cut where the step begins
    assert by_name["gather"].seconds >= 0.01
    (text,) = said
    assert text.startswith("timeline of step 3: ")
    assert "100% hidden behind compute" in text


def test_without_the_flag_nothing_is_recorded_and_the_first_step_can_be():
    dims = OneRank()
    run, _ = context(dims)
    with StepRecorder(TimingConfig(), run, interval=1).step(1):
        assert dims.timeline.open == 0
    first = StepRecorder(TimingConfig(timeline_step=1), run, interval=1)
    for iteration, is_open in ((1, 1), (2, 0)):
        with first.step(iteration):
            assert dims.timeline.open == is_open


def test_a_step_is_recorded_once_for_all_who_read_it_and_no_more_after_the_last():
    dims = OneRank()
    run, said = context(dims)
    config = TimingConfig(timing_log_level=1, log_straggler=True, timeline_step=2)
    recorder = StepRecorder(config, run, interval=2)
    for iteration in (1, 2, 3):
        with recorder.step(iteration), dims.timeline.span("compute", "forward"):
            assert dims.timeline.open == 1
    assert [line.split(":")[0] for line in said] == ["compute seconds of iteration 2"]
    assert "forward-backward" in str(recorder.report_timers())
    recorder.close()
    assert dims.timeline.open == 0


def train_with_a_timeline(folder: str) -> tuple[list[str], list[float]]:
    """Four ranks on two nodes, ZeRO++, two micro-batches; what was said on this rank and the losses."""
    case = Case(steps=3, nodes=2, micro_batches=2, zero=ZeroConfig(zeropp=True))
    step, dims = build_step(case)
    run, said = context(dims, folder)
    timeline = StepRecorder(TimingConfig(timeline_step=2), run, interval=1)
    size, losses = case.global_batch // dims.data_size // 2, []
    for index in range(case.steps):
        batches = [case.batch(index, (m * dims.data_size + dims.data_rank) * size, size) for m in range(2)]
        with timeline.step(index + 1):
            losses.append(step(batches, learning_rate=1e-2, weight_decay=0.01).loss)
    return said, losses


def test_a_trained_step_shows_every_rank_s_phases_and_axes_on_one_clock(tmp_path: Path):
    results = ranks(4).run(train_with_a_timeline, str(tmp_path))
    assert [len(said) for said, _ in results] == [1, 0, 0, 0]
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X"}
    by_rank = read_chrome_trace(tmp_path / "timeline.json")
    assert list(by_rank) == ["rank 0, node 0", "rank 1, node 0", "rank 2, node 1", "rank 3, node 1"]
    for spans in by_rank.values():
        phases = [s.name for s in spans if s.track == "compute"]
        assert phases == ["forward", "backward", "forward", "backward", "norm", "optimizer"]
        for track in ("cross", "local"):  # each unit's hops by their names
            names = {s.name for s in spans if s.track == track}
            assert names >= {
                f"{hop} {unit}" for hop in ("all_gather", "all_to_all") for unit in ("layers.0", "the rest")
            }
    whole = [span for spans in by_rank.values() for span in spans if span.track == "step"]
    # a step ends with collectives of all ranks, so none can begin after another has ended
    assert max(s.start_seconds for s in whole) < min(s.end_seconds for s in whole)
    assert min(s.start_seconds for s in whole) > 0  # the barrier before the recording is the zero


def test_the_summary_adds_up_lanes_over_ranks_and_weighs_what_is_hidden_by_its_time():
    first = [Span("step", "step 7", 0, 10, True), Span("compute", "f", 0, 10, True), Span("cross", "x", 0, 6)]
    second = [Span("step", "step 7", 0, 8, True), Span("compute", "f", 0, 4, True), Span("cross", "x", 4, 2, True)]
    second.append(Span("local", "y", 4, 1))
    assert describe("step 7", [first, second]).splitlines() == [
        "timeline of step 7: 10.000 s; busy seconds of each track, mean of 2 ranks:",
        "  compute       7.0000 s",
        "  local         0.5000 s, 0% hidden behind compute, 100% behind compute and other hops",
        "  cross         4.0000 s, 75% hidden behind compute, 88% behind compute and other hops",
    ]


SPANS = [
    [
        Span("step", "step 3", 0.0, 1.0, True),
        Span("cross", "all_gather", 0.25, 0.5),
        Span("wait", "a", 0.5, 0.25, True),
    ],
    [Span("zebra", "x", 0.0, 0.125)],
]


def test_a_trace_has_a_process_per_rank_a_thread_per_lane_and_times_in_microseconds():
    events = chrome_trace(SPANS, ["rank 0", "rank 1"])["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["step", "wait", "cross", "zebra"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {0: "rank 0", 1: "rank 1"}
    (gather,) = (e for e in events if e["name"] == "all_gather")
    assert (gather["ph"], gather["ts"], gather["dur"]) == ("X", 250_000, 500_000)
    assert names[gather["pid"], gather["tid"]] == "cross"


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path):
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(chrome_trace(SPANS, ["rank 0", "rank 1"])))
    read = read_chrome_trace(path)
    assert list(read) == ["rank 0", "rank 1"]
    assert [sorted(spans) for spans in read.values()] == [sorted(spans) for spans in SPANS]


def test_spans_that_cross_get_rows_of_their_own_and_nested_ones_do_not():
    outer, inner, later = Span("cross", "outer", 0, 4), Span("cross", "inner", 1, 3), Span("cross", "later", 4, 1)
    crossing, again = Span("cross", "crossing", 2, 3), Span("cross", "again", 3, 4)
    spans = [again, later, crossing, inner, outer, Span("local", "other track", 0, 9)]
    rows = nesting_rows(spans, "cross")
    assert [[s.name for s in row] for row in rows] == [["outer", "inner", "later"], ["crossing"], ["again"]]


def test_lanes_stand_in_one_order_and_unknown_ones_below():
    tracks = ["shard", "cross", "compute", "wait", "another", "tp", "local", "step"]
    spans = [Span(track, "x", 0.0, 1.0) for track in tracks]
    assert sorted_tracks(spans) == ["step", "compute", "wait", "tp", "local", "cross", "another", "shard"]
