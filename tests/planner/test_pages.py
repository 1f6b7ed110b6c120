"""Figures that documentation pages quote of the planner are the figures that the planner computes."""

import dataclasses
import re

import pytest
from helpers.small_run import ROOT, parse

from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.simulator import Memory
from megazpp.planner.variants import for_planning, schemes
from megazpp.topology.cluster import Cluster, Link
from megazpp.topology.cluster_file import read_cluster

QUOTED = re.compile(
    r"`python pretrain_gpt.py (?P<flags>@\S+ --zeropp) --plan --cluster-file (?P<folder>\S+/)(?P<fast>\w+\.yaml)`, "
    r"`--zeropp` is (?P<fast_hsdp>[\d.]+) times as fast as HSDP and "
    r"(?P<fast_zero3>[\d.]+) times as fast as ZeRO-3;"
    r".*?\(`(?P<slow>\w+\.yaml)`\) the plan says (?P<slow_hsdp>[\d.]+) and (?P<slow_zero3>[\d.]+\d)\. "
)


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_zeropp_page_quotes_the_planners_speedups():
    quoted = QUOTED.search(page("zeropp.md"))
    for network in ("fast", "slow"):
        file = ROOT / quoted["folder"] / quoted[network]
        named = schemes(for_planning(parse(f"{quoted['flags']} --cluster-file {file}").config, "--plan"))
        estimator = Estimator(read_cluster(file), device_type="cpu")
        zeropp, *rivals = (estimator.estimate(named[name]).seconds for name in ("--zeropp", "HSDP", "ZeRO-3"))
        for rival, text in zip(rivals, (quoted[f"{network}_hsdp"], quoted[f"{network}_zero3"]), strict=True):
            assert f"{rival / zeropp:.{len(text.partition('.')[2])}f}" == text, network


def test_planner_page_quotes_the_planners_local_steps():
    text = page("planner.md")
    cluster = read_cluster(ROOT / "configs/clusters/dgx_h100_8x_100gbit.yaml")

    def planned(flags: str, cluster: Cluster = cluster) -> Estimate:
        return Estimator(cluster, device_type="cpu").estimate(for_planning(parse(flags).config, "--plan"))

    local, zeropp = "@configs/gpt_1b3.args --diloco-steps 30", planned("@configs/gpt_1b3.args --zeropp")
    own = planned(local)
    each, mean = own.node_island_bytes / 1e6, own.node_cross_bytes / 1e6
    assert f"{each:.0f} MB in a synchronization, {mean:.1f} MB per step (`--zeropp`: " in text
    assert f"(`--zeropp`: {zeropp.node_cross_bytes / 1e6:.0f} MB)" in text
    assert f"from {own.sufficient_gigabits:.1f} Gbit/s on its bytes take at most 5 % of the time" in text
    links = cluster.links._replace(network=Link(own.sufficient_gigabits / 8))
    slow = planned(local, dataclasses.replace(cluster, links=links))
    assert f"holds steps up by {100 * slow.held_up / (30 * slow.seconds - slow.held_up):.1f} %" in text
    llama = "@configs/llama_8b.args --vocab-size 32000 --ffn-hidden-size 11008 --num-query-groups 32 --diloco-steps 30"
    two = planned(llama, dataclasses.replace(cluster, num_nodes=2))
    assert f"an island each: {two.node_cross_bytes / 1e6:.0f} MB per step" in text
    parameters = two.memory[Memory.PARAMETERS] / 4 * 8
    assert parameters == pytest.approx(6.74e9, rel=0.001)
    assert two.node_cross_bytes == pytest.approx(2 * (0.5 + 2 / 128) * parameters / 2 / 30, rel=0.005)
