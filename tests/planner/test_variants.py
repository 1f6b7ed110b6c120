"""Search for the fastest variant of a run: the fastest candidate that fits comes first."""

import pytest
from helpers.small_run import parse

from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import Choice, search, with_recompute
from megazpp.topology.cluster import Cluster, Device, Link, Links

SLOW = Links(domain=Link(100.0), network=Link(0.1))


def found(
    flags: str = "",
    *,
    gigabytes: float = 1.0,
    links: Links | None = SLOW,
    nodes: int = 2,
    model: str = "gpt_tiny",
) -> dict[str, Choice]:
    """Return the candidates for a tiny model with ZeRO-3 on nodes of two ranks, by name, in their order."""
    config = parse(f"@configs/{model}.args --bf16 {flags}").config
    device = Device("a GPU", teraflops=10.0, gigabytes=gigabytes, gigabytes_per_second=100.0)
    cluster = Cluster(num_nodes=nodes, ranks_per_node=2, links=links, device=device)
    return {choice.name: choice for choice in search(Estimator(cluster, device_type="cpu"), config)}


def heads(names: dict[str, Choice], before: str) -> set[str]:
    return {name.split(before)[0] for name in names}


def test_search_sorts_fitting_candidates_by_speed_before_the_rest():
    choices = found()
    assert heads(choices, ",") == {"ZeRO-3", "HSDP", "--zeropp"}
    assert heads(choices, ", micro") >= {"--zeropp, tp 1, local domain 2", "--zeropp, tp 2, local domain 1"}
    fits = [choice.fits for choice in choices.values()]
    assert fits == sorted(fits, reverse=True)
    speeds = [choice.speed for choice in choices.values() if choice.fits]
    assert speeds == sorted(speeds, reverse=True)
    best = next(iter(choices))
    assert best.startswith("--zeropp, tp 1, local domain 2")
    assert choices[best].estimate.plan.layout.local == 2
    assert not any("diloco" in name for name in choices)


def test_search_keeps_local_steps():
    choices = found("--diloco-steps 4")
    assert heads(choices, ", micro") == {
        "ZeRO-3, --diloco-steps 4, tp 1, local domain 2",
        "ZeRO-3, --diloco-steps 4, tp 2, local domain 1",
    }
    assert all(choice.estimate.node_replica_group_bytes > 0 for choice in choices.values())


def test_search_tries_expert_parallel_sizes_of_models_with_experts():
    choices = found("--global-batch-size 4 --num-layers 1", model="moe_tiny")
    sizes = {f"--zeropp, tp {tp}, ep {ep}, local domain {2 // tp}" for tp in (1, 2) for ep in (1, 2)}
    assert heads(choices, ", micro") >= sizes
    for name, choice in choices.items():
        assert f", ep {choice.estimate.plan.layout.ep}, " in name
    local = found("--global-batch-size 4 --num-layers 1 --diloco-steps 4", model="moe_tiny")
    assert all(", ep 1, " in name for name in local)
    assert not any(", ep " in name for name in found("--global-batch-size 4 --num-layers 1"))


@pytest.mark.slow
def test_search_tries_zeropp_but_not_hsdp_inside_wide_replica_groups():
    choices = found("--diloco-steps 4 --diloco-replica-groups 2", nodes=4)
    assert heads(choices, ",") == {"ZeRO-3", "--zeropp"}
    assert next(iter(choices)).startswith("--zeropp, --diloco-steps 4, ")


def test_search_uses_nearest_batch_and_names_impossible_flags():
    choices = found("--global-batch-size 18 --num-attention-heads 1")
    assert any("tp 1, local domain 2, micro-batch 4 of batch 16," in name for name in choices)
    assert not any("tp 1, local domain 2, micro-batch 8" in name for name in choices)  # needs 32 samples per step
    problems = [choice.problem for name, choice in choices.items() if "tp 2" in name]
    assert problems
    assert all("--num-attention-heads 1" in problem for problem in problems)


@pytest.mark.slow
def test_search_tries_more_recomputation_until_it_fits():
    name, flags = "ZeRO-3, tp 1, local domain 2, micro-batch 1, recompute none", "--global-batch-size 4"
    plain = found(flags)[name].estimate.gigabytes
    for share, tried in ((0.95, ["selective"]), (0.5, ["selective", "full"])):
        choices = found(flags, gigabytes=share * plain / 0.9)
        assert not choices[name].fits
        assert [word for word in ("selective", "full") if name.replace("none", word) in choices] == tried


def test_search_without_links_reports_fitting_without_speeds():
    assert all(choice.fits and not choice.speed for choice in found(links=None).values() if choice.estimate)


def test_with_recompute_drops_the_method_without_recomputation():
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    full = parse(f"@configs/gpt_tiny.args {flags}").config
    assert with_recompute(full, None).model.recompute_method is None
    assert with_recompute(full, "full") == full
