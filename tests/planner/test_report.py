"""`--plan`: the tables, the reasons and the verdicts, on clusters where they are plain."""

import re
from pathlib import Path

import pytest
from helpers.refusals import not_refused

from megazpp.base.arguments import parse_run_config
from megazpp.planner.estimate import Estimator
from megazpp.planner.report import plan_report
from megazpp.planner.variants import changed
from megazpp.topology.cluster import Cluster, Device, Link, Links

ROOT = Path(__file__).resolve().parents[2]
SLOW = Links(domain=Link(100.0), network=Link(0.1))
FAST = Links(domain=Link(100.0), network=Link(100000.0, microseconds=0.1))
SMALL = Device("a small GPU", teraflops=10.0, gigabytes=0.1, gigabytes_per_second=100.0)
TINY = Device("a tiny GPU", teraflops=10.0, gigabytes=0.001, gigabytes_per_second=100.0)


def report(*flags: str, links: Links | None = SLOW, device: Device | None = SMALL) -> str:
    config = parse_run_config(["@configs/gpt_tiny.args", "--bf16", "--num-layers", "2", *flags], ROOT).config
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)
    return plan_report(config, cluster, device_type="cpu")


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_on_a_slow_network_zeropp_pays_and_everything_is_in_the_tables():
    text = report("--zeropp")
    assert "ZeRO++ pays:" in text
    for name in ("ZeRO-3", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp"):
        assert any(line.startswith(name + " ") for line in text.splitlines()), name
    for kind in ("parameters", "moments", "secondary partition", "error feedback", "activations"):
        assert f"\n{kind} " in text, kind
    assert "best with these flags otherwise: --zeropp, tp" in text
    candidates = [line for line in text.splitlines() if re.match(r"  [\w-]+[\w+-]*, tp ", line)]
    assert len(candidates) == 10
    assert "slower than the best" in text
    assert re.search(r"  and \d+ more that are slower, too large or cannot run$", text)


def test_muon_s_matrices_work_and_bytes_are_said():
    flags = "--optimizer muon --muon-full-interval 4 --hidden-size 8 --num-attention-heads 2 --global-batch-size 10"
    config = parse_run_config(["@configs/gpt_tiny.args", "--num-layers", "1", *flags.split()], ROOT).config
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
    assert "does not fit" in "".join(lines(text, "into "))
    (row,) = lines(text, "--diloco-steps 30  ")
    assert "(too much)" in row


@pytest.mark.slow
def test_times_rest_on_shares_and_those_that_were_not_checked_for_so_few_tokens_come_with_a_warning():
    warning = "warning: that was not checked for this device or so few tokens"
    for shares, warns in ((None, True), ("h100", True), ("h800", False)):
        text = report("--micro-batch-size", "1", device=SMALL._replace(shares=shares))
        assert re.search(r"a step takes [\d.]+ s, of which", text)
        assert f"times rest on {shares or 'shares of the data sheet'}" in text
        assert (warning in text) == warns


@pytest.mark.slow
def test_longer_contexts_fit_on_more_ranks_that_split_them():
    text = report("--context-parallel-size", "2", "--micro-batch-size", "1", "--zeropp")
    head, *rows = lines(text, "--context-parallel-size  ")[0], *lines(text, "1  "), *lines(text, "2  ")
    assert head.split("  ")[-1] == "longest context"
    exchanged, longest = ([float(row.split()[column]) for row in rows] for column in (1, -1))
    assert exchanged[0] == 0 < exchanged[1]
    assert 0 < longest[0] < longest[1]
    assert "exchanged" not in report("--zeropp")


@pytest.mark.slow
def test_days_and_money_are_those_of_all_samples_and_mfu_says_what_it_counts():
    text = report("--train-iters", "100000", device=SMALL._replace(shares="h800", price_per_hour=2.5))
    step = re.search(r"a step takes ([\d.]+) s", text)
    run = re.search(r"800,000 samples take ([\d.]+) days on 4 GPU\(s\), ([\d,]+) at 2.5 a GPU-hour", text)
    assert step is not None
    assert run is not None
    days = float(step[1]) * 100000 / 86400
    assert float(run[1]) == pytest.approx(days, abs=0.2)
    assert float(run[2].replace(",", "")) == pytest.approx(24 * 4 * 2.5 * days, rel=0.1)
    assert "no recomputation; MFU is their share of 10 TFLOP/s" in text


def test_local_steps_stand_beside_the_schemes_as_another_algorithm_and_no_verdict_is_about_them():
    text = report()
    (row,) = lines(text, "--diloco-steps 30  ")
    assert "(too much)" not in row
    assert "\n--diloco-steps 30 is another algorithm, not the same training faster:" in text
    assert "(--diloco-steps 30: a synchronization's bytes take at most 5 % of the time)" in text
    (verdict,) = lines(text, "ZeRO++")
    assert "diloco" not in verdict
    assert "islands" not in "".join(lines(text, "a rank sends"))
    assert not any("--diloco" in line for line in lines(text, "  "))


def test_a_run_with_local_steps_has_its_means_and_its_candidates_keep_them():
    text = report("--diloco-steps", "10", "--diloco-delay", "2")
    sent = re.search(r"a node sends to other islands: ([\d.]+) MB every 10 steps, ([\d.]+) MB per step", text)
    assert sent is not None
    assert float(sent[2]) == pytest.approx(float(sent[1]) / 10, abs=1e-3)
    assert f"; a node to others {sent[2]} MB" in text
    assert "\nislands synchronize every 10 steps, merged 2 steps later with alpha 0.5: " in text
    assert re.search(
        r"holds every 10 steps up by [\d.]+ s; its bytes hide under the steps of its delay from [\d.e+]+ Gbit/s",
        text,
    )
    for kind in ("outer weights, common copy", "outer weights and momentum", "outer feedback", "outer messages"):
        assert f"\n{kind} " in text, kind
    candidates = [line for line in lines(text, "  ") if ", tp " in line]
    assert candidates
    assert all(", --diloco-steps 10, tp " in line for line in candidates)


@pytest.mark.slow
def test_one_node_has_no_islands_and_a_plan_wants_to_know_the_vocabulary():
    run = parse_run_config(["@configs/gpt_tiny.args", "--num-layers", "2"], ROOT).config
    alone = Cluster(num_nodes=1, ranks_per_node=4, links=SLOW, device=SMALL)
    assert "diloco" not in plan_report(run, alone, device_type="cpu")
    rows = [
        (changed(run, islands={"diloco_steps": 4}), "--diloco-steps 4: islands are whole nodes, and there is one node"),
        (changed(run, tokenizer={"vocab_size": None}), "--plan needs --vocab-size"),
    ]
    assert not not_refused(rows, lambda config: plan_report(config, alone, device_type="cpu"))


def test_without_links_and_device_there_are_bytes_and_memory_and_no_times():
    text = report("--zeropp", links=None, device=None)
    assert "no times: the cluster file names no links or no device" in text
    assert "a rank sends per optimizer step" in text


@pytest.mark.slow
def test_float8_is_planned_on_any_device_and_its_products_are_priced_in_16_bits():
    size = ("--hidden-size", "64", "--num-attention-heads", "4")
    plain, float8 = report(*size), report(*size, "--fp8-format", "hybrid", "--compile")
    line = "--fp8-format hybrid: products are counted at the device's 16-bit peak and casts not at all"
    assert line in float8
    assert line not in plain
    step = re.compile(r"a step takes .* compute")
    assert step.findall(plain) == step.findall(float8)
