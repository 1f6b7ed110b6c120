"""A step's spans: Megatron's timers, slow ranks, the timeline of one step."""

import re
import threading
import time
from types import SimpleNamespace

import torch
from helpers.chrome_trace import read_chrome_trace
from helpers.context import context
from helpers.ranks import ranks
from helpers.training import Case, build_step

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.timeline import COMPUTE, Span, Timeline
from megazpp.topology.cluster import Cluster
from megazpp.training.step_recorder import (
    MAIN_TIMERS,
    OTHER_TIMERS,
    StepRecorder,
    TimingConfig,
    chrome_trace,
    describe,
    describe_ranks,
    nesting_rows,
    seconds_by_timer,
    timer_lines,
)
from megazpp.zero.config import ZeroConfig


class OneRank:
    """What a StepRecorder needs of the dims."""

    def __init__(self) -> None:
        self.timeline, self.world = Timeline(), MeshAxis("world")
        self.layout = SimpleNamespace(cluster=Cluster(num_nodes=1, ranks_per_node=1))

    @property
    def open(self) -> int:
        """How many recordings there are."""
        return len(self.timeline._listeners)


def test_only_the_step_that_was_asked_for_is_recorded_with_what_the_one_before_left_in_flight(tmp_path):
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
            recording.append(dims.open)
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


def test_a_step_is_recorded_once_for_all_who_read_it_and_not_where_nobody_does():
    everyone = TimingConfig(timing_log_level=1, log_straggler=True, timeline_step=2)
    for config, recordings, lines, timers in (
        (TimingConfig(), [0, 0, 0], [], []),
        (TimingConfig(timeline_step=1), [1, 0, 0], [], []),
        (everyone, [1, 1, 1], ["compute seconds of iteration 2"], ["forward-backward", "optimizer"]),
    ):
        dims, found = OneRank(), []
        run, said = context(dims)
        recorder = StepRecorder(config, run, interval=2)
        for iteration in (1, 2, 3):
            with recorder.step(iteration), dims.timeline.span(COMPUTE, "forward"):
                found.append(dims.open)
                with dims.timeline.span(COMPUTE, "norm"):
                    time.sleep(0.001)
        assert found == recordings, config
        assert [line.split(":")[0] for line in said] == lines, config
        assert timers_of(recorder.report_timers()) == timers, config
        recorder.close()
        assert dims.open == 0, config


def timers_of(report: str | None) -> list[str]:
    return [line.split()[0] for line in (report or "").splitlines()[1:]]


def train_recorded(folder: str) -> tuple[list[str], str | None, str | None]:
    """ZeRO++ on two nodes of two, with two micro-batches: what was said on this rank, and two reports."""
    case = Case(steps=3, nodes=2, micro_batches=2, zero=ZeroConfig(zeropp=True))
    step, dims = build_step(case)
    run, said = context(dims, folder)
    recorder = StepRecorder(TimingConfig(timing_log_level=2, timeline_step=2), run, interval=1)
    for index in range(case.steps):
        with recorder.step(index + 1):
            step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.01)
    return said, recorder.report_timers(), recorder.report_timers()


def test_real_steps_show_every_rank_s_phases_and_axes_on_one_clock_and_in_timers_that_are_the_same_on_all(tmp_path):
    results = ranks(4).run(train_recorded, str(tmp_path))
    assert [len(said) for said, *_ in results] == [1, 0, 0, 0]
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
    ((report, again),) = {result[1:] for result in results}
    assert again is None  # nothing since
    used = {name for name in OTHER_TIMERS if "-shard" not in name and name != "batch-generator"}
    assert set(timers_of(report)) == {*MAIN_TIMERS, *used}
    times = re.findall(r"\((\S+), (\S+)\)$", report, re.MULTILINE)
    assert len(times) == len(timers_of(report))
    assert all(0 < float(least) <= float(most) for least, most in times)


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


def test_a_trace_has_a_process_per_rank_a_thread_per_track_in_one_order_and_times_in_microseconds():
    first = [Span("step", "step 3", 0.0, 1.0, True), Span("cross", "all_gather", 0.25, 0.5)]
    tracks = ["zebra", "cross", "compute", "wait", "another", "tp", "local", "step"]
    events = chrome_trace([first, [Span(track, "x", 0.0, 0.125) for track in tracks]], ["rank 0", "rank 1"])
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events["traceEvents"] if e["name"] == "thread_name"}
    below = ["step", "compute", "wait", "tp", "local", "cross", "another", "zebra"]
    assert list(names.values()) == ["step", "cross", *below]
    processes = [e for e in events["traceEvents"] if e["name"] == "process_name"]
    assert {e["pid"]: e["args"]["name"] for e in processes} == {0: "rank 0", 1: "rank 1"}
    (gather,) = (e for e in events["traceEvents"] if e["name"] == "all_gather")
    assert (gather["ph"], gather["ts"], gather["dur"]) == ("X", 250_000, 500_000)
    assert names[gather["pid"], gather["tid"]] == "cross"


def test_spans_that_cross_get_rows_of_their_own_and_nested_ones_do_not():
    outer, inner, later = Span("cross", "outer", 0, 4), Span("cross", "inner", 1, 3), Span("cross", "later", 4, 1)
    crossing, again = Span("cross", "crossing", 2, 3), Span("cross", "again", 3, 4)
    spans = [again, later, crossing, inner, outer, Span("local", "other track", 0, 9)]
    rows = nesting_rows(spans, "cross")
    assert [[s.name for s in row] for row in rows] == [["outer", "inner", "later"], ["crossing"], ["again"]]


def test_a_step_s_spans_add_up_and_collectives_at_the_same_time_count_once():
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


def test_the_lines_are_megatron_s_and_leave_out_what_nobody_used():
    names, by_rank = ("forward-backward", "optimizer", "batch-generator"), [[12.344, 0.0, 0.0], [15.0, 1.5, 0.0]]
    assert timer_lines(names, by_rank) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (12.34, 15.00)\n"
        "    optimizer ......................................: (0.00, 1.50)"
    )
    assert timer_lines(names, [[0.0] * 3] * 2) is None


def steps_with_a_slow_rank(slow_rank: int) -> list[str]:
    """Four steps, in every second of which one rank computes 0.3 s, and the others wait for it."""
    cluster = Cluster(num_nodes=1, ranks_per_node=4)
    dims = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")
    run, said = context(dims)
    recorder = StepRecorder(TimingConfig(log_straggler=True), run, interval=2)
    for iteration in range(1, 5):
        with recorder.step(iteration), dims.timeline.span(COMPUTE, "forward"):
            time.sleep(0.3 if dims.world.rank == slow_rank and iteration % 2 == 0 else 0.01)
            dims.shard.all_reduce_(torch.ones(1))
    return said


def test_a_slow_rank_is_named_every_interval_and_those_that_wait_for_it_are_not():
    (said, *_) = ranks(4).run(steps_with_a_slow_rank, 2)
    assert [line.split(":")[0] for line in said] == ["compute seconds of iteration 2", "compute seconds of iteration 4"]
    for line in said:
        assert "(rank 2); slow: rank 2 " in line
        assert float(line.split("median ")[1].split(",")[0]) < 0.2  # the waiting is not in it


def test_equal_ranks_are_not_called_slow_and_many_slow_ones_are_cut():
    assert describe_ranks(10, [1.0, 1.1, 1.05]).endswith(
        "median 1.0500, fastest 1.0000 (rank 0), slowest 1.1000 (rank 1); no slow rank"
    )
    assert describe_ranks(10, [1.0] * 30 + [2.0] * 10).endswith("rank 37 2.00 x and 2 more")
