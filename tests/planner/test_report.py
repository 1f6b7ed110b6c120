"""`--plan`: the tables, the reasons and the verdicts, on clusters where they are plain."""

import functools
import re

import pytest
from helpers.small_run import parse

from megazpp.planner.estimate import Estimator
from megazpp.planner.report import plan_report
from megazpp.topology.cluster import Cluster, Device, Link, Links

SLOW = Links(domain=Link(100.0), network=Link(0.1))
FAST = Links(domain=Link(100.0), network=Link(100000.0, microseconds=0.1))
SMALL = Device("a small GPU", teraflops=10.0, gigabytes=0.1, gigabytes_per_second=100.0)
TINY = SMALL._replace(gigabytes=0.001)


@functools.cache
def report(flags: str = "", *, links: Links | None = SLOW, device: Device | None = SMALL) -> str:
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)
    return plan_report(parse(f"@configs/gpt_tiny.args --bf16 {flags}").config, cluster, device_type="cpu")


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_on_a_slow_network_zeropp_pays_and_everything_is_in_the_tables():
    text = report("--zeropp")
    assert "ZeRO++ pays:" in text
    schemes = {"ZeRO-3", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp"}
    kinds = {"parameters", "moments", "secondary partition", "error feedback", "activations"}
    assert {line.split("  ")[0] for line in text.splitlines()} >= schemes | kinds
    assert "best with these flags otherwise: --zeropp, tp" in text
    assert len(re.findall(r"^  [\w+-]+, tp ", text, re.MULTILINE)) == 10
    assert "slower than the best" in text
    assert re.search(r"  and \d+ more that are slower, too large or cannot run$", text)


def test_muon_s_matrices_work_and_bytes_are_said():
    flags = "--optimizer muon --muon-full-interval 4 --hidden-size 8 --num-attention-heads 2 --global-batch-size 10"
    config = parse(f"@configs/gpt_tiny.args --num-layers 1 {flags}").config
    said = Estimator(Cluster(num_nodes=5, ranks_per_node=2), device_type="cpu").estimate(config).muon
    assert said.startswith("Muon: 6 matrices, by the rows of each of 5 nodes, 0.000 GFLOP on the rank that has most")
    assert re.search(r"; the last node has no row of .*layers\.0\.attention\.proj\.weight, .*fc2\.weight; ", said)
    assert re.search(r"a rank sends 0\.00\d MB inside its node; in one of 4 steps a node sends 0\.00\d MB more", said)


@pytest.mark.slow
def test_on_a_fast_network_zeropp_does_not_pay_and_that_is_said():
    assert "ZeRO++ does not pay here" in report("--zeropp", links=FAST)


@pytest.mark.slow
def test_what_does_not_fit_says_what_it_needs_and_what_would_help_and_nothing_pays():
    text = report("--zeropp", device=TINY)
    assert "nothing that was tried fits" in text
    assert "GB, a rank has 0.0" in text
    assert "less memory: --no-zero-error-feedback, --zero-accumulate-in-bf16" in text
    assert "--zeropp does not fit into memory as it is; no scheme does" in text
    assert "pay" not in text
    assert "does not fit" in lines(text, "into ")[0]
    assert "(too much)" in lines(text, "--diloco-steps 30  ")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("calibration", "warns"), [(None, True), ("h100", True), ("h800", False)])
def test_times_rest_on_shares_and_those_that_were_not_checked_for_so_few_tokens_come_with_a_warning(calibration, warns):
    text = report("--micro-batch-size 1", device=SMALL._replace(calibration=calibration))
    assert f"times rest on {calibration or 'shares of the data sheet'}" in text
    assert ("warning: that was not checked for this device or so few tokens" in text) == warns


@pytest.mark.slow
def test_longer_contexts_fit_on_more_ranks_that_split_them():
    text = report("--context-parallel-size 2 --micro-batch-size 1 --zeropp")
    head, *rows = (lines(text, start)[0].split("  ") for start in ("--context-parallel-size  ", "1  ", "2  "))
    assert head[-1] == "longest context"
    (one, *_, short), (two, *_, long) = ([float(cell) for cell in row[1:] if cell] for row in rows)
    assert one == 0 < two  # MB exchanged
    assert 0 < short < long
    assert "exchanged" not in report("--zeropp")


@pytest.mark.slow
def test_days_and_money_are_those_of_all_samples_and_mfu_says_what_it_counts():
    text = report("--train-iters 100000", device=SMALL._replace(calibration="h800", price_per_hour=2.5))
    (step,) = re.findall(r"a step takes ([\d.]+) s, of which", text)
    ((days, money),) = re.findall(r"800,000 samples take ([\d.]+) days on 4 GPU\(s\), ([\d,]+) at 2.5 a GPU-hour", text)
    expected = float(step) * 100000 / 86400
    assert float(days) == pytest.approx(expected, abs=0.2)
    assert float(money.replace(",", "")) == pytest.approx(24 * 4 * 2.5 * expected, rel=0.1)
    assert "no recomputation; MFU is their share of 10 TFLOP/s" in text


def test_local_steps_stand_beside_the_schemes_as_another_algorithm_and_no_verdict_is_about_them():
    text = report()
    assert "(too much)" not in lines(text, "--diloco-steps 30  ")[0]
    assert "\n--diloco-steps 30 is another algorithm, not the same training faster:" in text
    assert "(--diloco-steps 30: a synchronization's bytes take at most 5 % of the time)" in text
    assert "diloco" not in lines(text, "ZeRO++")[0]
    assert "islands" not in lines(text, "a rank sends")[0]
    assert not any("--diloco" in line for line in lines(text, "  "))


def test_a_run_with_local_steps_has_its_means_and_its_candidates_keep_them():
    text = report("--diloco-steps 10 --diloco-fragment-sync-delay 2")
    sent = r"a node sends to other islands: ([\d.]+) MB every 10 steps, ([\d.]+) MB per step"
    ((each, mean),) = re.findall(sent, text)
    assert float(mean) == pytest.approx(float(each) / 10, abs=1e-3)
    assert f"; a node to others {mean} MB" in text
    assert "\nislands synchronize every 10 steps, merged 2 steps later with alpha 0.5: " in text
    hidden = r"holds every 10 steps up by [\d.]+ s; its bytes hide under the steps of its delay from [\d.e+]+ Gbit/s"
    assert re.search(hidden, text)
    for kind in ("outer weights, common copy", "outer weights and momentum", "outer feedback", "outer messages"):
        assert f"\n{kind} " in text
    candidates = [line for line in lines(text, "  ") if ", tp " in line]
    assert candidates
    assert all(", --diloco-steps 10, tp " in line for line in candidates)


def test_without_links_and_device_there_are_bytes_and_memory_and_no_times():
    text = report("--zeropp", links=None, device=None)
    assert "no times: the cluster file names no links or no device" in text
    assert "a rank sends per optimizer step" in text


@pytest.mark.slow
def test_float8_is_planned_on_any_device_and_its_products_are_priced_in_16_bits():
    plain, float8 = (report(f"--hidden-size 64 {more}") for more in ("", "--fp8-format hybrid --compile"))
    line = "--fp8-format hybrid: products are counted at the device's 16-bit peak and casts not at all"
    assert line in float8
    assert line not in plain
    step = re.compile(r"a step takes .* compute")
    assert step.findall(plain) == step.findall(float8)
