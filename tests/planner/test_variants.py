"""The search: the fastest that fits comes first."""

from pathlib import Path

import pytest

from megazpp.base.arguments import parse_run_config
from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import Choice, search, with_recompute
from megazpp.topology.cluster import Cluster, Device, Link, Links

ROOT = Path(__file__).resolve().parents[2]
SLOW = Links(domain=Link(100.0), network=Link(0.1))


def found(*flags: str, gigabytes: float, links: Links | None = SLOW, nodes: int = 2) -> list[Choice]:
    config = parse_run_config(["@configs/gpt_tiny.args", "--bf16", "--num-layers", "2", *flags], ROOT).config
    device = Device("a GPU", teraflops=10.0, gigabytes=gigabytes, gigabytes_per_second=100.0)
    cluster = Cluster(num_nodes=nodes, ranks_per_node=2, links=links, device=device)
    return search(Estimator(cluster, device_type="cpu"), config)


def test_schemes_are_varied_and_what_fits_comes_first_by_speed_and_then_the_rest():
    choices = found(gigabytes=1.0)  # ZeRO-3 on a slow network
    assert {choice.name.split(",")[0] for choice in choices} == {"ZeRO-3", "HSDP", "--zeropp"}
    best, fitting = choices[0], [choice for choice in choices if choice.fits]
    assert choices[: len(fitting)] == fitting
    speeds = [choice.speed for choice in fitting]
    assert speeds[0] > speeds[-1]
    assert speeds == sorted(speeds, reverse=True)
    assert {choice.name.split(", micro")[0] for choice in choices} >= {
        "--zeropp, tp 1, local domain 2",
        "--zeropp, tp 2, local domain 1",
    }
    assert best.name.startswith("--zeropp, tp 1, local domain 2")
    assert best.estimate is not None
    assert best.estimate.plan.layout.local == 2


def test_local_steps_are_kept_and_not_chosen():
    assert not any("diloco" in choice.name for choice in found(gigabytes=1.0))
    choices = found("--diloco-steps", "4", gigabytes=1.0)
    assert {choice.name.split(", micro")[0] for choice in choices} == {
        "ZeRO-3, --diloco-steps 4, tp 1, local domain 2",
        "ZeRO-3, --diloco-steps 4, tp 2, local domain 1",
    }
    assert choices[0].fits
    for choice in choices:
        assert choice.estimate is not None
        assert choice.estimate.plan.islands is not None
        assert choice.estimate.node_island_bytes > 0


@pytest.mark.slow
def test_on_islands_of_several_nodes_zeropp_is_tried_inside_and_hsdp_is_not():
    choices = found("--diloco-steps", "4", "--diloco-islands", "2", gigabytes=1.0, nodes=4)
    assert {choice.name.split(",")[0] for choice in choices} == {"ZeRO-3", "--zeropp"}
    assert choices[0].name.startswith("--zeropp, --diloco-steps 4, ")


def test_a_batch_that_does_not_divide_is_the_nearest_that_does_and_what_cannot_run_says_why():
    choices = found("--global-batch-size", "18", "--num-attention-heads", "1", gigabytes=1.0)
    names = [choice.name for choice in choices]
    assert any("tp 1, local domain 2, micro-batch 4 of batch 16," in name for name in names)
    assert not any("tp 1, local domain 2, micro-batch 8" in name for name in names)  # 32 samples at once
    problems = {choice.problem for choice in choices if "tp 2" in choice.name}
    assert all("--num-attention-heads 1" in problem for problem in problems)
    assert problems


@pytest.mark.slow
def test_where_a_candidate_does_not_fit_more_recomputation_is_tried():
    name = "ZeRO-3, tp 1, local domain 2, micro-batch 1, recompute none"
    roomy = {choice.name: choice for choice in found("--global-batch-size", "4", gigabytes=1.0)}[name]
    assert roomy.estimate is not None
    plain = roomy.estimate.gigabytes
    for share, tried in ((0.95, ["selective"]), (0.5, ["selective", "full"])):
        choices = {choice.name: choice for choice in found("--global-batch-size", "4", gigabytes=share * plain / 0.9)}
        assert not choices[name].fits
        assert [word for word in ("selective", "full") if name.replace("none", word) in choices] == tried


def test_without_links_everything_that_fits_is_said_to():
    choices = found(gigabytes=1.0, links=None)
    assert all(choice.fits and not choice.speed for choice in choices if choice.estimate)


def test_recomputation_leaves_no_method_where_there_is_none():
    flags = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"]
    full = parse_run_config(["@configs/gpt_tiny.args", *flags], ROOT).config
    assert with_recompute(full, None).model.recompute_method is None
    assert with_recompute(full, "full") == full
