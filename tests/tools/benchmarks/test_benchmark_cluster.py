"""Test benchmark_cluster.py: speedups, tables of estimates and measured steps, and the bytes of each variant."""

import json
from typing import Any

import pytest
from benchmark_cluster import DILOCO, LOCAL, SHAPE, VARIANTS, Results, Sample, speedup, tables
from helpers.program import ROOT, run_program

pytestmark = pytest.mark.slow

TOOL = str(ROOT / "tools/benchmarks/benchmark_cluster.py")
FLAT = [name for name, flags in VARIANTS.items() if DILOCO not in flags]
SHAPE_OF_TWO = dict.fromkeys(SHAPE, 2) | {"seq_length": 50, "micro_batch_size": 1}


def sample(variant: str, seconds: float, *, rate: str = "100mbit", index: int = 0, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {"loss": 4.0, "estimate": 1.0, "uplink_bytes": [], "cross_bytes": [0, 0]}
    return Sample(**{**defaults, **fields}, variant=variant, seconds=seconds, rate=rate, round=index)


def test_speedup_compares_samples_of_one_round_and_rate():
    # The machine was four times as slow in round 1. The speedup must be the median of ratios within rounds, and not the
    # ratio of overall medians, 8 / 2.5.
    samples = [sample("zero3", 2.0), sample("zeropp", 1.0)]
    samples += [sample("zero3", 8.0, index=1), sample("zeropp", 4.0, index=1)]
    samples += [sample("zero3", 8.0, index=2)]
    assert speedup(samples, "zeropp") == 2.0
    assert speedup(samples, "hsdp") is None
    apart = [sample("zero3", 6.0), sample("zeropp", 2.0, rate="1gbit"), sample("zeropp", 3.0, index=1)]
    assert speedup(apart, "zeropp") is None


def test_tables_show_medians_slowest_link_first_and_counted_bytes():
    samples = [sample("zeropp", 1.0, rate="1gbit"), sample("zero3", 1.5, rate="1gbit")]
    samples += [sample(name, seconds, index=i) for name, times in {"zero3": (9, 10, 12), "zeropp": (2, 4, 3)}.items()
                for i, seconds in enumerate(times)]  # fmt: skip
    samples.append(sample("hsdp", 1.0, rate="1gbit", uplink_bytes=[5100, 5150], cross_bytes=[5000, 5000]))
    samples += [sample(name, 1.0, rate=LOCAL) for name in ("zero3", "zeropp")]
    lines = tables(samples, SHAPE_OF_TWO, 1000).splitlines()
    start = lines.index("| uplink | zero3 | hsdp | zeropp | rounds |")
    assert lines[start + 2 : start + 5] == [
        "| 100mbit | 10.00 s (1.00x) | - | 3.00 s (4.00x) | 3 |",
        "| 1gbit | 1.50 s (1.00x) | 1.00 s (1.50x) | 1.00 s (1.50x) | 1 |",
        "| local | 1.00 s (1.00x) | - | 1.00 s (1.00x) | 1 |",
    ]
    assert "| hsdp | 0.005 | 2.562 | 0.005 | +2.50 % |" in lines


def test_tables_compare_estimates_and_limits_with_measured_steps():
    """Compare the planner's estimates and the times on the wire with measured steps.

    The link of 100 Mbit/s carries 12.5 MB per second.
    """
    samples = [
        sample("zeropp-overlap", 2.5, estimate=2.0, uplink_bytes=[25_000_000] * 2),
        sample("lossless", 2.0, estimate=2.2, uplink_bytes=[12_500_000] * 2),
        sample("zeropp-overlap", 1.0, estimate=1.1, rate="10gbit", uplink_bytes=[25_000_000] * 2),
        sample("lossless", 1.6, estimate=1.6, rate="10gbit", uplink_bytes=[12_500_000] * 2),
    ]
    text = tables(samples, SHAPE_OF_TWO, 1000)
    assert "| 100mbit | 2.00 s (0.80) | 2.20 s (1.10) | zeropp-overlap | 1.25 |" in text
    assert "| 10gbit | 1.10 s (1.10) | 1.60 s (1.00) | zeropp-overlap | 1.00 |" in text
    assert "| 100mbit | 1.25 (wire 2.00 s) | 1.25 (wire 1.00 s) |" in text
    assert "| 10gbit | 1.00 (wire 0.02 s) | 1.00 (wire 0.01 s) |" in text


def test_interrupted_benchmark_resumes_with_missing_samples_of_its_model(tmp_path):
    path = tmp_path / "out" / "samples.json"
    results = Results(path, SHAPE_OF_TWO)
    assert results.missing("1gbit", 0, ["zero3", "zeropp"]) == ["zero3", "zeropp"]
    results.samples.append(sample("zero3", 1.25, rate="1gbit", uplink_bytes=[1, 2]))
    results.parameters = 7
    results.write()
    again = Results(path, SHAPE_OF_TWO)
    assert (again.samples, again.parameters) == (results.samples, 7)
    assert again.missing("1gbit", 0, ["zero3", "zeropp"]) == ["zeropp"]
    assert again.missing("1gbit", 1, ["zero3"]) == ["zero3"]
    assert again.missing("2gbit", 0, ["zero3"]) == ["zero3"]
    problem = r"--out .* holds samples of .*'num_layers': 2.* the flags give .*'num_layers': 3"
    with pytest.raises(ValueError, match=problem):
        Results(path, SHAPE_OF_TWO | {"num_layers": 3})


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[list[Sample], int, str]:
    """Measure all variants twice with a small model on 2 x 2 local ranks.

    Return the samples, the number of parameters, and the text of the table.
    """
    folder = tmp_path_factory.mktemp("measured")
    small = "--local --nodes 2 --ranks-per-node 2 --hidden-size 64 --num-layers 1 --vocab-size 64 --seq-length 8"
    names = [*FLAT, "diloco-10", "diloco-10-delay"]
    flags = [*small.split(), "--samples", "2", "--micro-batches", "2", "--variants", *names]
    code, output = run_program(TOOL, "--out", str(folder / "out"), *flags, folder=folder)
    assert code == 0, output
    results = json.loads((folder / "out" / "samples.json").read_text())
    samples = [Sample(**fields) for fields in results["samples"]]
    assert [s.variant for s in samples] == [*names, *names[1:], names[0]]  # the order rotates from round to round
    return samples, results["parameters"], (folder / "out" / "table.md").read_text()


@pytest.mark.nightly
def test_all_variants_reach_similar_losses_on_emulated_nodes(measured):
    samples, _, table = measured
    flat = [s for s in samples if s.variant in FLAT and s.round == 0]
    losses = {s.variant: s.loss for s in flat}
    # All variants start from equal weights and have trained a few steps. bf16 and 4-bit gradients change the loss by
    # less than one step does.
    assert max(losses.values()) - min(losses.values()) < 3e-3, losses
    cross = {s.variant: s.cross_bytes[0] for s in flat}
    assert cross["zeropp"] == cross["zeropp-overlap"] < cross["hsdp"] < cross["qgz"] < cross["zero3"]
    assert " zeropp |" in table


@pytest.mark.nightly
def test_local_steps_are_measured_per_cycle_with_or_without_delay(measured):
    samples, parameters, _ = measured
    local = [s for s in samples if s.variant not in FLAT]
    # A cycle of 10 steps sends one complete synchronization, and leaves no messages to the next cycle.
    ((sent, _),) = {tuple(s.cross_bytes) for s in local}
    # In a synchronization, each node sends half of the parameters twice to the other replica group: as 4-bit outer
    # gradients, and as 4-bit changes of the outer weights. 4 bits are 1/2 byte.
    message = parameters / 2 * (1 / 2 + 1 / 2)
    # the measured bytes also include scales, and norms and biases in 16 and 32 bits
    assert message < 10 * sent < 1.5 * message
    last = {s.variant: s.loss for s in samples}
    # these variants have taken 30 steps, and zero3 only 3, so their losses are lower
    assert max(last["diloco-10"], last["diloco-10-delay"]) < last["zero3"] - 0.1


@pytest.mark.nightly
def test_flags_after_the_dashes_reach_every_variant(tmp_path):
    small = "--local --nodes 2 --ranks-per-node 2 --hidden-size 64 --num-layers 1 --vocab-size 64 --seq-length 8"
    experts = "--num-experts 4 --moe-ffn-hidden-size 256 --expert-model-parallel-size 2 --swiglu --disable-bias-linear"
    command = f"{small} --samples 1 --variants zero3 lossless -- {experts}".split()
    code, output = run_program(TOOL, "--out", str(tmp_path / "out"), *command, folder=tmp_path)
    assert code == 0, output
    results = json.loads((tmp_path / "out/samples.json").read_text())
    assert results["shape"]["flags"] == experts.split()
    experts_parameters = 4 * 3 * 64 * 256  # four experts with three matrices of hidden size x FFN hidden size
    assert experts_parameters < results["parameters"] < 1.25 * experts_parameters
    zero3, lossless = [Sample(**fields) for fields in results["samples"]]
    # the losses differ slightly, because gradients of the variant lossless cross nodes in 4 bits
    assert lossless.loss == pytest.approx(zero3.loss, abs=5e-3)
    assert lossless.cross_bytes[0] < zero3.cross_bytes[0]
