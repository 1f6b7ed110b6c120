"""Test log lines and records of a run, and the bytes that its steps sent.

Also compare the formula for ZeRO-3's bytes with counted bytes.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.metrics import meter, step
from helpers.pretended_run import FakeTracker, Run
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import LLAMA_STYLE, Case, build_step

from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.topology.plan import plan_layout
from megazpp.training.config import TrackingConfig
from megazpp.training.context import Console, RunContext
from megazpp.training.metrics_logger import MetricsRecorder
from megazpp.training.results import (
    TrafficRow,
    Zero3Traffic,
    collect_traffic,
    record_results,
    traffic_table,
    zero3_traffic,
)
from megazpp.zero.config import PrecisionConfig


def test_bytes_per_node_count_training_steps_and_no_evaluations():
    run = Run([1.0] * 6)
    # Each step sends 100 bytes, which are 50 per node. The evaluation after step 3 falls into the second log interval,
    # but its bytes are not counted.
    assert [r["cross_bytes"] for r in run.tracker.records] == [50, 50, 50]


def test_replica_group_scales_its_own_bytes_to_all_groups():
    run = Run([1.0] * 2)
    dims: Any = run.dims
    dims.replica_group = SimpleNamespace(size=4)  # four replica groups with one rank each, two groups per node
    dims.counter.add("cross", "shard", "all_gather", 100)
    run.recorder.step(step(4), last=True)
    assert run.tracker.records[-1]["cross_bytes"] == 4 * 100 // 2


def test_closing_lines_and_summary_report_the_results_of_the_run():
    run = Run([3.0, 2.0, 1.0])
    summaries: list[dict[str, Any]] = []
    run.tracker.summary = lambda values: summaries.append(values)
    entropy: Any = {"unigram_entropy": 6.0, "zero3": lambda count: None}
    record_results(run.recorder, run.progress, evaluate=True, test=lambda _: 8.0, **entropy)
    (summary,) = summaries
    assert summary["validation_loss"] == 7.0
    assert summary["unigram_entropy"] == 6.0
    assert summary["final_loss"] == 1.0
    assert summary["test_loss"] == 8.0
    assert summary["cross_bytes_per_step"] == 50
    assert summary["tokens"] == 3 * 2 * 4
    row = {"collective": "all_gather", "axis": "shard", "wire": "cross", "calls": 3, "sent_bytes": 150}
    assert (summary["traffic"], summary["zero3"]) == ([row], None)
    assert summary["cpu_seconds_per_token"] >= 0.0
    # the run does not validate again at its end, because it has just evaluated iteration 3
    assert run.tracker.validations == [(3, 7.0)]
    text = run.out.getvalue()
    assert 0.0 < summary["data_wait_share"] < 1.0
    assert f"{summary['data_wait_share']:.1%} of the time waiting for data" in text
    assert "training loss of the last log interval: 1.0000 nats per token\n" in text
    assert "validation loss: 7.0000; unigram entropy of the validation text: 6.0000 nats per token" in text
    assert "validation loss at iteration 3 on test set | lm loss value: 8.0" in text


def test_resumed_run_is_compared_with_zero3_for_the_same_steps():
    run = Run([3.0, 2.0, 1.0], start=TrainingProgress(iteration=1, consumed_samples=2, micro_batches=50))
    run.tracker.summary = lambda values: None
    asked: list[int] = []
    record_results(run.recorder, run.progress, evaluate=False, unigram_entropy=6.0, zero3=asked.append)
    assert asked == [2]  # the run resumed after step 1, so ZeRO-3's formula gets the 2 micro-batches of steps 2 and 3


def test_gradient_norm_above_ten_medians_is_logged():
    for norm, named in ((11.0, True), (9.5, False)):
        text = Run([1.0] * 15, norms=[1.0] * 14 + [norm]).out.getvalue()
        note = "note: iteration 15: grad norm 11.000 is 11 x the median of the 14 steps before it, 1.000"
        assert (note in text, "note: " in text) == (named, named), norm


def test_gradient_norm_after_a_median_of_zero_is_not_logged():
    for norms in ([0.0] * 14 + [5.0], [0.0] * 8 + [1.0] * 6 + [5.0], [0.0] * 15):
        assert "note: " not in Run([1.0] * 15, norms=norms).out.getvalue()


CPU = torch.device("cpu")


def record_uneven_rows() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Record the metrics of three training steps in two log intervals, of two steps and of one step.

    Data rank r counts r + 1 times 10, 100 and 7 tokens.
    Return the fields of both log records, and the summary of the run.
    """
    cluster = Cluster(num_nodes=1, ranks_per_node=4)
    dims = ParallelDims(
        plan_dims(ParallelConfig(tensor_model_parallel_size=2), cluster, zero_stage=3), device_type="cpu"
    )
    run = RunContext(dims=dims, device=CPU, console=Console(enabled=False))
    filled, tracker = meter(whole_samples=False), FakeTracker()
    sharding: Any = SimpleNamespace(model=torch.nn.Module())
    recorder = MetricsRecorder(TrackingConfig(log_interval=2), run, filled, sharding=sharding, tracker=tracker)
    for iteration, tokens in enumerate((10, 100, 7), start=1):
        recorder.step(step(iteration, tokens=(dims.data_rank + 1) * tokens), last=iteration == 3)
    assert dims.counter.table() == {}
    return tracker.records, filled.summary(cpu_seconds=0.0)


def test_tokens_of_rows_of_any_length_are_summed_over_data_ranks():
    for records, summary in ranks(4).run(record_uneven_rows):
        # Both records sum the tokens of two data ranks. Two ranks of a tensor-parallel group have the same tokens,
        # which count once.
        assert [record["tokens"] for record in records] == [
            3 * 110,
            3 * 7,
        ]
        assert [record["tokens_per_second"] for record in records] == [3 * 110 / 1.0, 3 * 7 / 0.5]
        assert all("consumed_tokens" not in record for record in records)
        assert (summary["tokens"], summary["tokens_per_second"]) == (3 * 117, 3 * 107 / 1.0)


def send_some() -> list[TrafficRow]:
    """Let rank 0 send more than others inside its node, and let only rank 0 and its peer send over the cross axis.

    Return the traffic table.
    """
    cluster = Cluster(num_nodes=2, ranks_per_node=2)
    dims = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")
    dims.local.all_gather(torch.zeros(8, dtype=torch.uint8))
    # all ranks create the cross axis's process group here, because creating a group is a collective call
    cross = dims.cross
    if dims.local.rank == 0:
        cross.all_to_all(torch.zeros(2, 50, dtype=torch.uint8))
        cross.all_to_all(torch.zeros(2, 50, dtype=torch.uint8))
    if dims.world.rank == 0:
        dims.local.count("all_gather", 100)
    return collect_traffic(dims, CPU)


def test_traffic_rows_have_maximum_calls_and_mean_bytes_on_every_rank():
    local = TrafficRow("all_gather", "local", "local", 2, (4 * 8 + 100) // 2)
    cross = TrafficRow("all_to_all", "cross", "cross", 2, 2 * 2 * 50 // 2)
    assert ranks(4).run(send_some) == [[local, cross]] * 4


def zero3_steps(case: Case) -> tuple[int, Any]:
    """Train two steps of ZeRO-3.

    Return the bytes that its all-gathers and reduce-scatters sent between nodes, per node, and the result of
    `zero3_traffic` for these steps.
    """
    train_step, dims = build_step(case)
    for index in range(2):
        train_step(case.batches(index, dims), learning_rate=1e-3, weight_decay=0.0)
    rows = collect_traffic(dims, CPU)
    shards = sum(
        row.sent_bytes
        for row in rows
        if row.wire == "cross" and row.axis == "shard" and row.collective in ("all_gather", "reduce_scatter")
    )
    return shards, zero3_traffic(train_step.sharding.shard_elements, dims, case.precision, 2 * case.micro_batches)


@pytest.mark.parametrize(("tp", "bf16"), [(1, False), slow(2, True)])
def test_zero3_formula_matches_the_counted_bytes_of_a_zero3_run(tp, bf16):
    """Compare within 64 bytes, because a ring's share (W - 1) / W of a tensor is rounded down in each collective."""
    case = Case(nodes=2, tp=tp, micro_batches=2, model=LLAMA_STYLE, precision=PrecisionConfig(bf16=bf16))
    for counted, formula in ranks(4).run(zero3_steps, case):
        assert counted == pytest.approx(formula.cross_bytes, abs=64)
        assert counted > 100_000


def test_zero3_bytes_match_the_rings_of_the_layout():
    """Compare ZeRO-3's formula with ring transfers counted by hand.

    Each rank has a shard of 12 elements, with 2 bytes as a weight and 4 as a gradient. A step has 3 micro-batches.
    """
    found = []
    for cluster, tp, replicas in (
        (Cluster(num_nodes=2, ranks_per_node=4), 2, 1),
        (Cluster(num_nodes=4, ranks_per_node=4), 2, 2),
        (Cluster(num_nodes=6, ranks_per_node=2, domain_size=6), 2, 1),  # an NVLink domain (rack) contains three nodes
        (Cluster(num_nodes=4, ranks_per_node=2), 4, 1),  # tensor parallelism of 4 spans two nodes
        # One node sends nothing between nodes, so the function returns None instead of a comparison.
        (Cluster(num_nodes=1, ranks_per_node=4), 1, 1),
        (Cluster(num_nodes=2, ranks_per_node=4), 1, 2),
    ):
        dims: Any = SimpleNamespace(layout=plan_layout(cluster, tp=tp, replicas=replicas))
        leaving = [rank for rank in range(cluster.world_size) if dims.layout.wire("shard", rank) == "cross"]
        # a ring of W ranks sends W - 1 shards per collective; each micro-batch gathers weights twice and reduces
        # gradients once
        per_rank = 3 * (2 * 2 + 4) * 12 * (dims.layout.shard - 1)
        found.append(zero3_traffic(12, dims, PrecisionConfig(bf16=True), 3))
        sent = None if found[-1] is None else found[-1].cross_bytes
        assert sent == (len(leaving) * per_rank // cluster.num_nodes or None), cluster
    # 12 elements on each of 8 ranks are 96 elements; with tensor parallelism of 2, rings have 4 data ranks
    first = found[0]
    assert first == (192, 384, 3, 3 * (2 * 192 + 384) * 3 // 4, first.formula)
    assert first.formula == (
        "in each of 3 micro-batches it gathers 0.000 MB of weights twice and reduces 0.000 MB of gradients; "
        "a ring of 4 ranks sends 3/4 of them over an uplink"
    )


def test_traffic_table_is_aligned_and_ends_with_the_comparison():
    rows = [
        TrafficRow("all_gather", "local", "local", 24, 1_500_000),
        TrafficRow("all_gather", "cross", "cross", 6, 300_000),
        TrafficRow("all_to_all", "cross", "cross", 6, 200_000),
    ]
    zero3 = Zero3Traffic(400, 800, 12, 6_000_000, "a formula")
    lines = [
        "collective  axis   wire        calls  MB sent per node",
        "all_gather  local  intra-node  24     1.500",
        "all_gather  cross  inter-node  6      0.300",
        "all_to_all  cross  inter-node  6      0.200",
    ]
    assert traffic_table(rows, None).splitlines() == lines
    more = (
        "between nodes in training steps: 0.500 MB per node; ZeRO-3 would have sent 6.000 MB, 12.0 times as much: "
        "a formula"
    )
    assert traffic_table(rows, zero3).splitlines() == [*lines, more]
    alone = "between nodes in training steps: 0.000 MB per node; ZeRO-3 would have sent 6.000 MB: a formula"
    assert traffic_table(rows[:1], zero3).splitlines() == [*lines[:2], alone]
