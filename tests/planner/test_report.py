"""`--plan`: the tables, the reasons and the verdicts, on clusters where they are plain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megazpp.arguments import parse_run_config
from megazpp.planner.report import plan_report
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
SLOW = Links(domain=Link(100.0), network=Link(0.1))
FAST = Links(domain=Link(100.0), network=Link(100000.0, microseconds=0.1))
SMALL = Device("a small GPU", teraflops=10.0, gigabytes=0.1, gigabytes_per_second=100.0)
TINY = Device("a tiny GPU", teraflops=10.0, gigabytes=0.001, gigabytes_per_second=100.0)


def report(*flags: str, links: Links | None = SLOW, device: Device | None = SMALL, price: float | None = None) -> str:
    config = parse_run_config(["@configs/gpt_tiny.args", "--bf16", "--num-layers", "2", *flags], ROOT).config
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)
    return plan_report(config, cluster, device_type="cpu", price=price)


def test_on_a_slow_network_zeropp_pays_and_everything_is_in_the_tables():
    text = report("--zeropp")
    assert "ZeRO++ pays:" in text
    for name in ("ZeRO-3", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp"):
        assert any(line.startswith(name + " ") for line in text.splitlines()), name
    for kind in ("parameters", "moments", "secondary partition", "error feedback", "activations"):
        assert f"\n{kind} " in text, kind
    assert "best with these flags otherwise: --zeropp, tp" in text
    assert "slower than the best" in text


@pytest.mark.slow
def test_on_a_fast_network_zeropp_does_not_pay_and_that_is_said():
    assert "ZeRO++ does not pay here" in report("--zeropp", links=FAST)


@pytest.mark.slow
def test_what_does_not_fit_says_what_it_needs_and_what_would_help_and_nothing_pays():
    text = report("--zeropp", device=TINY)
    assert "nothing that was tried fits" in text
    assert "GB, a rank has 0.0" in text
    assert "with --no-zero-error-feedback --zero-accumulate-in-bf16 --no-overlap-grad-reduce: 0.0 GB, which" in text
    assert "--zeropp does not fit into memory as it is; no scheme does" in text
    assert "pay" not in text


@pytest.mark.slow
def test_a_device_without_measured_shares_has_ranges_and_another_one_figure_and_both_say_what_it_rests_on():
    text = report("--micro-batch-size", "1")
    seconds = re.search(r"a step takes ([\d.]+) to ([\d.]+) s", text)
    assert seconds is not None
    assert float(seconds[1]) < float(seconds[2])
    assert "which was not checked for this device" in text
    text = report("--micro-batch-size", "1", device=SMALL._replace(shares="h800"))
    assert re.search(r"a step takes [\d.]+ s, of which", text)
    assert "times rest on h800: fitted to" in text
    assert "times are a range" not in text


@pytest.mark.slow
def test_days_and_money_are_those_of_all_samples_and_mfu_says_what_it_counts():
    text = report("--train-iters", "100000", device=SMALL._replace(shares="h800"), price=2.5)
    step = re.search(r"a step takes ([\d.]+) s", text)
    run = re.search(r"1,600,000 samples take ([\d.]+) days on 4 GPU\(s\), ([\d,]+) at 2.5 a GPU-hour", text)
    assert step is not None
    assert run is not None
    days = float(step[1]) * 100000 / 86400
    assert float(run[1]) == pytest.approx(days, abs=0.2)
    assert float(run[2].replace(",", "")) == pytest.approx(24 * 4 * 2.5 * days, rel=0.1)
    assert "no recomputation; MFU is their share of 10 TFLOP/s" in text


@pytest.mark.slow
def test_at_most_ten_candidates_are_shown_and_a_run_that_does_not_fit_is_planned_as_the_nearest():
    text = report("--tensor-model-parallel-size", "8", "--micro-batch-size", "3")
    assert text.startswith("note: --tensor-model-parallel-size 8 does not fit this cluster: planned with 4\n")
    candidates = [line for line in text.splitlines() if re.match(r"  [\w-]+[\w+-]*, tp ", line)]
    assert len(candidates) == 10
    assert re.search(r"  and \d+ more that are slower, too large or cannot run$", text)


def test_without_links_and_device_there_are_bytes_and_memory_and_no_times():
    text = report("--zeropp", links=None, device=None)
    assert "no times: the cluster file names no links or no device" in text
    assert "a rank sends per optimizer step" in text


def test_a_plan_wants_to_know_the_vocabulary():
    config = parse_run_config(["@configs/gpt_125m.args", "--vocab-size", "none"], ROOT).config
    with pytest.raises(ValueError, match="--plan needs --vocab-size"):
        plan_report(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu")


@pytest.mark.parametrize("path", sorted((ROOT / "configs/clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_clusters_name_their_devices_with_sources(path: Path):
    cluster = read_cluster(path)
    assert cluster.device is not None
    assert cluster.device.source != str(path)
    assert cluster.links is not None
    assert cluster.links.network is not None
