"""What pages quote of the planner is what it says."""

import dataclasses
import re
from pathlib import Path

import pytest

from megazpp.base.arguments import parse_run_config
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.paper import Memory
from megazpp.planner.variants import for_planning, schemes
from megazpp.topology.cluster import Cluster, Link
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
QUOTED = re.compile(
    r"`python pretrain_gpt.py (?P<flags>@\S+ --zeropp) --plan --cluster-file (?P<folder>\S+/)(?P<fast>\w+\.yaml)`, "
    r"`--zeropp` is (?P<fast_hsdp>[\d.]+) times as fast as HSDP and "
    r"(?P<fast_zero3>[\d.]+) times as fast as ZeRO-3;"
    r".*?\(`(?P<slow>\w+\.yaml)`\) the plan says (?P<slow_hsdp>[\d.]+) and (?P<slow_zero3>[\d.]+\d)\. "
)


@pytest.mark.slow
def test_the_page_of_zero_quotes_how_much_faster_the_planner_finds_zeropp():
    page = " ".join((ROOT / "docs/zeropp.md").read_text(encoding="utf-8").split())
    quoted = QUOTED.search(page)
    assert quoted is not None
    for network in ("fast", "slow"):
        path = ROOT / quoted["folder"] / quoted[network]
        flags = [*quoted["flags"].split(), "--cluster-file", str(path)]
        named = schemes(for_planning(parse_run_config(flags, ROOT).config, "--plan"))
        estimator = Estimator(read_cluster(path), device_type="cpu")
        speeds = {name: estimator.estimate(named[name]).tokens_per_second for name in ("ZeRO-3", "HSDP", "--zeropp")}
        for name, rival in (("hsdp", "HSDP"), ("zero3", "ZeRO-3")):
            text = quoted[f"{network}_{name}"]
            digits = len(text.partition(".")[2])
            assert f"{speeds['--zeropp'] / speeds[rival]:.{digits}f}" == text, (network, rival)


def test_the_planner_s_page_quotes_what_it_says_of_local_steps():
    page = " ".join((ROOT / "docs/planner.md").read_text(encoding="utf-8").split())
    cluster = read_cluster(ROOT / "configs/clusters/dgx_h100_8x_100gbit.yaml")

    def planned(*flags: str, cluster: Cluster = cluster) -> Estimate:
        config = for_planning(parse_run_config([*flags], ROOT).config, "--plan")
        return Estimator(cluster, device_type="cpu").estimate(config)

    own, zeropp = planned("@configs/gpt_1b3.args", "--diloco-steps", "30"), planned("@configs/gpt_1b3.args", "--zeropp")
    each, mean = own.node_island_bytes / 1e6, own.node_cross_bytes / 1e6
    assert f"{each:.0f} MB in a synchronization, {mean:.1f} MB per step (`--zeropp`: " in page
    assert f"(`--zeropp`: {zeropp.node_cross_bytes / 1e6:.0f} MB)" in page
    assert f"from {own.sufficient_gigabits:.1f} Gbit/s on its bytes take at most 5 % of the time" in page
    assert cluster.links is not None
    links = cluster.links._replace(network=Link(own.sufficient_gigabits / 8))
    slow = planned("@configs/gpt_1b3.args", "--diloco-steps", "30", cluster=dataclasses.replace(cluster, links=links))
    assert slow.seconds is not None
    share = slow.held_up / (30 * slow.seconds - slow.held_up)
    assert f"holds steps up by {100 * share:.1f} %" in page
    llama = ["@configs/llama_8b.args", "--vocab-size", "32000", "--ffn-hidden-size", "11008"]
    llama += ["--num-query-groups", "32", "--diloco-steps", "30"]
    two = planned(*llama, cluster=dataclasses.replace(cluster, num_nodes=2))
    assert f"an island each: {two.node_cross_bytes / 1e6:.0f} MB per step" in page
    parameters = two.memory[Memory.PARAMETERS] / 4 * 8
    assert parameters == pytest.approx(6.74e9, rel=0.001)
    assert two.node_cross_bytes == pytest.approx(2 * (0.5 + 2 / 128) * parameters / 2 / 30, rel=0.005)
