"""Test the report of --plan: tables, reasons and verdicts, on clusters for which they are obvious."""

import functools
import re

import pytest
from helpers.small_run import parse

from megazpp.planner.config import PlanConfig
from megazpp.planner.estimate import Estimator
from megazpp.planner.feature import FEATURE
from megazpp.planner.report import _verdict, report_parts
from megazpp.planner.variants import INT8, LOSSLESS
from megazpp.topology.cluster import Cluster, Device, Link, Links

SLOW = Links(domain=Link(100.0), network=Link(0.1))
FAST = Links(domain=Link(100.0), network=Link(100000.0, microseconds=0.1))
SMALL = Device("a small GPU", teraflops=10.0, gigabytes=0.1, gigabytes_per_second=100.0)
TINY = SMALL._replace(gigabytes=0.001)


@pytest.mark.slow
def test_memory_at_the_load_of_the_busiest_expert_is_printed_and_searched():
    cluster = Cluster(num_nodes=1, ranks_per_node=2, links=SLOW, device=SMALL)
    flags = "@configs/moe_tiny.args --bf16 --expert-model-parallel-size 2 --num-layers 1"
    flags += " --global-batch-size 16 --micro-batch-size 8"
    even, loaded = (
        "\n\n".join(report_parts(parse(flags).config, cluster, device_type="cpu", expert_load=load))
        for load in (None, 2.0)
    )
    row = re.compile(r"^(\S+) times the mean +([\d.]+) ", re.MULTILINE)
    ((one, size),) = row.findall(even)
    assert "pass --plan-expert-load with the largest max_expert_load in metrics.jsonl" in even
    ((first, same), (second, larger)) = row.findall(loaded)
    assert (one, first, second) == ("1", "1", "2")
    assert float(size) == float(same) < float(larger)
    assert "--plan-expert-load" not in loaded
    assert re.search(r"^fastest candidates, .*\n  .*: \d+ tokens/s$", loaded, re.MULTILINE)


def test_load_below_the_mean_or_without_experts_is_refused():
    with pytest.raises(ValueError, match="--plan-expert-load 2 is about mixtures of experts"):
        FEATURE.command(parse("@configs/gpt_tiny.args --plan --plan-expert-load 2"))
    with pytest.raises(ValueError, match=r"--plan-expert-load 0\.5: the busiest expert has at least the mean load"):
        PlanConfig(plan_expert_load=0.5)


@functools.cache
def report(flags: str = "", *, links: Links | None = SLOW, device: Device | None = SMALL) -> str:
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)
    config = parse(f"@configs/gpt_tiny.args --bf16 {flags}").config
    return "\n\n".join(report_parts(config, cluster, device_type="cpu"))


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_groups_that_are_jobs_are_planned_on_the_nodes_of_all_jobs():
    """Plan elastic DiLoCo with three groups that are separate jobs, and compare with fixed replica groups.

    Each job sends its message to two others. A fixed group sends two thirds of a message in each of two hops, so jobs
    send 1.5 times as much.
    """
    local = "--global-batch-size 96 --micro-batch-size 8 --diloco-steps 10 --diloco-replica-groups"
    elastic = report(f"{local} 3 --diloco-coordinator 127.0.0.1:29700")
    assert "3 jobs of 4 rank(s), each of which computes the whole outer step: a group that joins fetches 0.0" in elastic
    ((sent, seconds),) = re.findall(r"(\S+) MB every 10 steps(?:.*\n)*?.*delays training by (\S+) s", elastic)
    own = parse(f"@configs/gpt_tiny.args --bf16 {local} 3").config
    six = Cluster(num_nodes=6, ranks_per_node=2, links=SLOW, device=SMALL)
    fixed = Estimator(six, device_type="cpu").estimate(own)
    assert float(sent) == pytest.approx(1.5 * fixed.node_replica_group_bytes / 1e6, rel=0.03)
    assert float(seconds) == pytest.approx(1.5 * fixed.held_up, rel=0.1)
    with pytest.raises(ValueError, match="does not support --exit-interval 2"):
        report(f"{local} 3 --diloco-coordinator 127.0.0.1:29700 --exit-interval 2")


def test_zeropp_pays_on_a_slow_network_and_tables_are_complete():
    text = report("--zeropp")
    assert "ZeRO++ pays:" in text
    schemes = {"ZeRO-3", "ZeRO-1", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp (auto: lossless)", INT8, LOSSLESS}
    kinds = {"parameters", "moments", "secondary partition", "error feedback", "activations"}
    assert {line.split("  ")[0] for line in text.splitlines()} >= schemes | kinds
    assert "fastest candidates, by the flags to append to the given ones:\n  " in text
    assert len(re.findall(r"^  (--|the given flags alone)", text, re.MULTILINE)) == 10
    assert re.search(r"tokens/s, [\d.]+ % slower$", text, re.MULTILINE)
    (choice,) = lines(
        text, "note: --zero-weight-delta auto: weights cross nodes as lossless deltas, because a step is "
    )
    assert re.search(r"estimated to take [\d.]+ s with lossless deltas and [\d.]+ s with int8 blocks$", choice)
    assert re.search(r"  and \d+ more that are slower, too large or cannot run$", text)


def test_muon_line_names_matrices_work_and_bytes():
    flags = "--optimizer muon --muon-full-interval 4 --hidden-size 8 --num-attention-heads 2 --global-batch-size 10"
    config = parse(f"@configs/gpt_tiny.args --num-layers 1 {flags}").config
    said = Estimator(Cluster(num_nodes=5, ranks_per_node=2), device_type="cpu").estimate(config).muon
    assert said.startswith("Muon: 6 matrices, in the rows of each of 5 nodes, 0.000 GFLOP per step on the busiest rank")
    assert re.search(r"; the last node holds no rows of .*layers\.0\.attention\.proj\.weight, .*fc2\.weight; ", said)
    assert re.search(
        r"a rank sends 0\.00\d MB inside its node; in one of 4 steps a node sends 0\.00\d MB to other nodes", said
    )


@pytest.mark.parametrize(
    ("speed", "said"), [(1.1, "pays: 1.10"), (1.005, "no difference here: it is 1.00"), (0.9, "not pay")]
)
def test_verdict_compares_zeropp_with_the_fastest_other_scheme(speed, said):
    assert said in _verdict({"--zeropp": speed, "ZeRO-3": 0.5, "HSDP": 1.0})


@pytest.mark.slow
def test_zeropp_does_not_pay_on_a_fast_network():
    assert "ZeRO++ does not pay here" in report("--zeropp", links=FAST)


@pytest.mark.slow
def test_run_too_large_names_its_needs_and_flags_that_help():
    text = report("--zeropp", device=TINY)
    assert "no candidate fits into memory" in text
    assert "GB, a rank has 0.0" in text
    assert "flags that save memory: --no-zero-error-feedback, --zero-accumulate-in-bf16" in text
    assert "--zeropp does not fit into memory with these flags; nor does any other scheme" in text
    assert "pay" not in text
    assert "does not fit" in lines(text, "usable: ")[0]
    assert "(does not fit)" in lines(text, "--diloco-steps 30  ")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("calibration", "warns"), [(None, True), ("h100", True), ("h800", False)])
def test_calibration_warns_about_unchecked_devices_and_few_tokens(calibration, warns):
    text = report("--micro-batch-size 1", device=SMALL._replace(calibration=calibration))
    assert f"calibration of times: {calibration or 'shares of the data sheet'}" in text
    assert ("so take the times as lower bounds" in text) == warns
    assert (f"warning: the planner was compared with no run on {SMALL.name}" in text) == (calibration is None)


@pytest.mark.slow
def test_longer_contexts_fit_on_more_context_parallel_ranks():
    text = report("--context-parallel-size 2 --micro-batch-size 1 --zeropp")
    head, *rows = (lines(text, start)[0].split("  ") for start in ("--context-parallel-size  ", "1  ", "2  "))
    assert head[-1] == "longest context"
    (one, *_, short), (two, *_, long) = ([float(cell) for cell in row[1:] if cell] for row in rows)
    assert one == 0 < two  # MB that a rank exchanges for context parallelism: 0 with one rank
    assert 0 < short < long
    assert "exchanged" not in report("--zeropp")


@pytest.mark.slow
def test_days_and_cost_cover_all_samples_and_mfu_is_explained():
    text = report("--train-iters 100000", device=SMALL._replace(calibration="h800", price_per_hour=2.5))
    (step,) = re.findall(r"a step takes ([\d.]+) s, of which", text)
    ((days, money),) = re.findall(r"800,000 samples take ([\d.]+) days on 4 GPU\(s\), ([\d,]+) at 2.5 a GPU-hour", text)
    expected = float(step) * 100000 / 86400
    assert float(days) == pytest.approx(expected, abs=0.2)
    assert float(money.replace(",", "")) == pytest.approx(24 * 4 * 2.5 * expected, rel=0.1)
    assert "no recomputation; MFU is their share of 10 TFLOP/s" in text


def test_local_steps_have_a_row_but_no_verdict_or_candidates():
    text = report()
    assert "(does not fit)" not in lines(text, "--diloco-steps 30  ")[0]
    assert "\n--diloco-steps 30 is another algorithm, not the same training faster:" in text
    assert "(--diloco-steps 30: a synchronization's bytes take at most 5 % of the time)" in text
    assert "diloco" not in lines(text, "ZeRO++")[0]
    assert "replica groups" not in lines(text, "rank 0 sends")[0]
    assert not any("--diloco" in line for line in lines(text, "  "))


def test_report_of_local_steps_has_means_and_candidates_keep_them():
    text = report("--diloco-steps 10 --diloco-fragment-sync-delay 2")
    sent = r"a node sends to other replica groups: ([\d.]+) MB every 10 steps, ([\d.]+) MB per step"
    ((each, mean),) = re.findall(sent, text)
    assert float(mean) == pytest.approx(float(each) / 10, abs=1e-3)
    assert f"; a node sends {mean} MB to other nodes" in text
    assert "\nreplica groups synchronize every 10 steps, merged 2 steps later with alpha 0.5: " in text
    hidden = r"every 10 steps delays training by [\d.]+ s; its bytes overlap with .* with at least [\d.e+]+ Gbit/s"
    assert re.search(hidden, text)
    for kind in ("outer weights, common copy", "outer weights and momentum", "outer feedback", "outer messages"):
        assert f"\n{kind} " in text
    assert "by the flags to append to the given ones:" in text
    assert not any("--zeropp" in line for line in lines(text, "  "))


def test_report_without_links_and_device_has_no_times():
    text = report("--zeropp", links=None, device=None)
    assert "no times: they need a --cluster-file that describes the device and the links that the run uses" in text
    assert "rank 0 sends per optimizer step" in text


@pytest.mark.slow
def test_float8_is_estimated_at_the_16_bit_peak():
    plain, float8 = (report(f"--hidden-size 64 {more}") for more in ("", "--fp8-format hybrid --compile"))
    line = "--fp8-format hybrid: matrix products are estimated at the device's 16-bit peak, and casts are left out"
    assert line in float8
    assert line not in plain
    step = re.compile(r"a step takes .* compute")
    assert step.findall(plain) == step.findall(float8)
