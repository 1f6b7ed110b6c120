from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_cluster import SHAPE, BenchmarkCase, Results, parse_flags
from benchmark_cluster_ranks import VARIANTS, RingAxis, use_ring_
from benchmark_cluster_report import LOCAL, Sample, paired_ratio, tables
from helpers.program import ROOT, run_program
from helpers.ranks import ranks

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster

pytestmark = pytest.mark.slow

TOOL = str(ROOT / "tools/benchmarks/benchmark_cluster.py")
LABELS = {"fsdp2": "FSDP2", "zero3": "ZeRO-3", "zeropp": "--zeropp"}
SHAPE_OF_TWO = dict.fromkeys(SHAPE, 2) | {"seq_length": 50, "micro_batch_size": 1}


def sample(variant: str, seconds: float, *, rate: str = "100mbit", index: int = 0, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {"tp": 1, "micro_batches": 1, "cpu_seconds": 1.0, "loss": 4.0}
    defaults |= {"uplink_bytes": [], "cross_bytes": [0, 0]}
    return Sample(**{**defaults, **fields}, variant=variant, seconds=seconds, rate=rate, round=index)


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_does_not_count():
    # the machine was four times as slow in round 1; medians of all seconds would say 8 / 2.5
    samples = [sample("zero3", 2.0), sample("zeropp", 1.0)]
    samples += [sample("zero3", 8.0, index=1), sample("zeropp", 4.0, index=1)]
    samples += [sample("zero3", 8.0, index=2)]
    assert paired_ratio(samples, "zero3", "zeropp", "seconds") == 2.0
    assert paired_ratio(samples, "zero3", "hsdp", "seconds") is None


def test_a_ratio_pairs_only_what_ran_at_the_same_rate_and_number_of_micro_batches():
    samples = [sample("zero3", 6.0), sample("zeropp", 2.0, rate="1gbit"), sample("zeropp", 3.0, micro_batches=8)]
    assert paired_ratio(samples, "zero3", "zeropp", "seconds") is None


def test_the_table_shows_medians_and_the_slowest_link_first():
    samples = [sample("zeropp", 1.0, rate="1gbit"), sample("zero3", 1.5, rate="1gbit")]
    samples += [sample(name, seconds, index=i) for name, times in {"zero3": (9, 10, 12), "zeropp": (2, 4, 3)}.items()
                for i, seconds in enumerate(times)]  # fmt: skip
    lines = tables(samples, SHAPE_OF_TWO, 1000, LABELS).splitlines()
    start = lines.index("| uplink | ZeRO-3 | --zeropp | rounds |")
    assert lines[start + 2 : start + 4] == [
        "| 100mbit | 10.00 s (1.00x) | 3.00 s (4.00x) | 3 |",
        "| 1gbit | 1.50 s (1.00x) | 1.00 s (1.50x) | 1 |",
    ]


def test_the_table_compares_interface_bytes_with_our_counters():
    samples = [
        sample("zero3", 1.0, uplink_bytes=[5100, 5150], cross_bytes=[5000, 5000]),
        sample("fsdp2", 1.0, uplink_bytes=[7000, 7000], cross_bytes=[16, 16]),
    ]
    lines = tables(samples, SHAPE_OF_TWO, 1000, LABELS).splitlines()
    assert "| ZeRO-3 | 0.005 | 2.562 | 0.005 | +2.50 % |" in lines
    assert "| FSDP2 | 0.007 | 3.500 | - | - |" in lines  # our counters do not see FSDP2's own collectives


def test_the_table_shows_what_links_leave_of_the_speed_without_a_limit():
    rounds = {"zero3": ((4.0, 1.0), (9.0, 3.0), (5.0, 1.0)), "zeropp": ((2.0, 1.5), (4.0, 3.0), (8.0, 6.4))}
    samples = [
        sample(name, seconds, rate=rate, index=index)
        for name, pairs in rounds.items()
        for index, pair in enumerate(pairs)
        for rate, seconds in zip(("20mbit", "unlimited"), pair, strict=True)
    ]
    samples.append(sample("fsdp2", 1.0, rate="20mbit"))
    lines = tables(samples, SHAPE_OF_TWO, 1000, LABELS).splitlines()
    start = lines.index("Share of the tokens per second without a limit, median over rounds:")
    assert lines[start + 2 : start + 6] == [
        "| uplink | FSDP2 | ZeRO-3 | --zeropp |",
        "| --- | --- | --- | --- |",
        "| 20mbit | - | 0.250 | 0.750 |",
        "",
    ]


def test_cpu_time_is_per_token_of_all_ranks_and_shown_where_no_link_is_waited_for():
    samples = [sample(name, 1.0, rate=LOCAL, cpu_seconds=cpu) for name, cpu in (("zero3", 2.0), ("zeropp", 2.4))]
    lines = tables(samples, SHAPE_OF_TWO, 1000, LABELS).splitlines()
    assert "| --zeropp | 12.000 | 1.20x | - |" in lines  # 2.4 s for 4 ranks x 50 tokens
    limited = [s._replace(rate="100mbit") for s in samples]
    assert "CPU" not in tables(limited, SHAPE_OF_TWO, 1000, LABELS)


def test_an_interrupted_benchmark_goes_on_with_what_is_missing(tmp_path: Path):
    case, path = BenchmarkCase(1, 8, "1gbit"), tmp_path / "out" / "samples.json"
    results = Results(path, SHAPE_OF_TWO)
    assert results.missing(case, 0, ["zero3", "zeropp"]) == ["zero3", "zeropp"]
    results.samples.append(sample("zero3", 1.25, rate="1gbit", micro_batches=8, uplink_bytes=[1, 2]))
    results.parameters = 7
    results.write()
    again = Results(path, SHAPE_OF_TWO)
    assert again.samples == results.samples
    assert again.parameters == 7
    assert again.missing(case, 0, ["zero3", "zeropp"]) == ["zeropp"]
    assert again.missing(case, 1, ["zero3"]) == ["zero3"]
    assert again.missing(case._replace(tp=2), 0, ["zero3"]) == ["zero3"]


def test_samples_of_another_model_are_not_mixed_in(tmp_path: Path):
    Results(tmp_path / "samples.json", SHAPE_OF_TWO).write()
    with pytest.raises(ValueError, match=r"--out .* holds samples of .*'num_layers': 2.* not of .*'num_layers': 3"):
        Results(tmp_path / "samples.json", SHAPE_OF_TWO | {"num_layers": 3})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rates fast", "--rate fast is neither"),
        ("--tp 3", "--tp 3 does not divide --ranks-per-node 4"),
        ("--samples 0", "--samples 0 is not positive"),
        ("--micro-batches 1 0", "--micro-batches 0 is not positive"),
        (
            "--rollout-tokens 4 --variants zero3 diloco-10",
            "--rollout-tokens 4 is of single steps: leave out diloco-10",
        ),
        ("--nodes 1 --variants zero3 diloco-10", "--nodes 1 has no islands: leave out diloco-10"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_flags(["--out", "x", *flags.split()])


def ring_case() -> tuple[bool, bool, tuple[int, int]]:
    dims = ParallelDims(
        plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2), zero_stage=3), device_type="cpu"
    )
    plain = copy.copy(dims.shard)
    use_ring_(dims)
    assert isinstance(dims.shard, RingAxis)
    x = torch.randint(-50, 50, (4 * 63,), generator=torch.Generator().manual_seed(plain.rank)).bfloat16()
    poisoned = torch.full((63,), torch.nan, dtype=torch.bfloat16)
    before = dims.counter.sent_bytes(plain.wire)
    expected = plain.reduce_scatter(x)
    between = dims.counter.sent_bytes(plain.wire)
    mine = dims.shard.reduce_scatter(x, out=poisoned)
    counted = (between - before, dims.counter.sent_bytes(plain.wire) - between)
    return mine is poisoned, torch.equal(mine, expected), counted


def test_the_ring_sums_like_gloos_reduce_scatter_and_is_counted_the_same():
    for wrote_in_place, equal, counted in ranks(4).run(ring_case):  # integers below 256: bf16 sums are exact
        assert wrote_in_place
        assert equal
        assert counted == (3 * 63 * 2, 3 * 63 * 2)


def test_all_variants_train_alike_on_emulated_nodes_of_one_machine(tmp_path: Path):
    flags = "--local --nodes 2 --ranks-per-node 2 --hidden-size 64 --num-layers 1 --vocab-size 64 --seq-length 8"
    command = [TOOL, "--out", str(tmp_path / "out"), *flags.split(), "--samples", "1", "--micro-batches", "2"]
    code, output = run_program(*command, folder=tmp_path)
    assert code == 0, output
    samples = [Sample(**s) for s in json.loads((tmp_path / "out" / "samples.json").read_text())["samples"]]
    assert [s.variant for s in samples] == [name for name, variant in VARIANTS.items() if variant.steps == 1]
    losses = {s.variant: s.loss for s in samples}
    # every variant has made one step before; bf16 and 4-bit gradients move the second loss by less than a step does
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    cross = {s.variant: s.cross_bytes[0] for s in samples}
    assert cross["zeropp"] == cross["zeropp-overlap"] < cross["hsdp"] < cross["qgz"] < cross["zero3"]
    assert "| --zeropp |" in (tmp_path / "out" / "table.md").read_text()


def test_local_steps_are_measured_by_the_cycle_with_or_without_a_delay(tmp_path: Path):
    flags = "--local --nodes 2 --ranks-per-node 2 --hidden-size 64 --num-layers 1 --vocab-size 64 --seq-length 8"
    names = ["zero3", "diloco-10", "diloco-10-delay"]
    out = tmp_path / "out"
    command = [TOOL, "--out", str(out), *flags.split(), "--samples", "2", "--variants", *names]
    code, output = run_program(*command, folder=tmp_path)
    assert code == 0, output
    results = json.loads((out / "samples.json").read_text())
    samples = [Sample(**s) for s in results["samples"]]
    assert [s.variant for s in samples] == [*names, *names]
    cross = {(s.variant, s.round): s.cross_bytes for s in samples}
    # a cycle sends all that a synchronization does, and nothing of it is left to the next one's
    assert len({tuple(sent) for (name, _), sent in cross.items() if name != "zero3"}) == 1
    message = results["parameters"] / 2 * (1 / 2 + 1 / 2)  # 4 bits, half of them to the other island, and back
    assert message < 10 * cross["diloco-10", 0][0] < 1.5 * message  # scales, and norms and biases in 16 and 32 bits
    last = {s.variant: s.loss for s in samples}
    assert max(last["diloco-10"], last["diloco-10-delay"]) < last["zero3"] - 0.1  # 30 steps have been taken, not 3


def test_what_a_rollout_sends_depends_on_its_length_only_where_weights_are_gathered_per_token(tmp_path: Path):
    flags = "--local --nodes 2 --ranks-per-node 2 --hidden-size 64 --num-layers 1 --vocab-size 64 --seq-length 8"
    names = ["zero3-per-token", "zero3", "zeropp-overlap"]
    sent: dict[int, dict[str, int]] = {}
    for tokens in (2, 4):
        out = tmp_path / f"out{tokens}"
        command = [TOOL, "--out", str(out), *flags.split(), "--samples", "1", "--rollout-tokens", str(tokens)]
        code, output = run_program(*command, "--variants", *names, folder=tmp_path)
        assert code == 0, output
        samples = [Sample(**s) for s in json.loads((out / "samples.json").read_text())["samples"]]
        assert all(s.rollout_seconds > 0 for s in samples)
        sent[tokens] = {s.variant: s.rollout_cross_bytes[0] for s in samples}
    assert sent[4]["zero3-per-token"] == 2 * sent[2]["zero3-per-token"] == 4 * sent[2]["zero3"]
    assert sent[4]["zero3"] == sent[2]["zero3"]
    assert 0 < sent[4]["zeropp-overlap"] == sent[2]["zeropp-overlap"] < 0.5 * sent[2]["zero3"]
    assert "| rollout | MB per node by our counters |" in (tmp_path / "out4" / "table.md").read_text()
