"""Test that the planner's figures in documentation pages are those that the planner computes."""

import dataclasses
import re
from pathlib import Path

import pytest
from helpers.small_run import ROOT, parse

from megazpp.planner.estimate import Estimate, Estimator
from megazpp.planner.report import report_parts
from megazpp.planner.simulator import Memory
from megazpp.planner.variants import for_planning, local_steps, schemes
from megazpp.run.start import planned_cluster
from megazpp.topology.cluster import Cluster, Link
from megazpp.topology.cluster_file import read_cluster

FLAGS = re.compile(
    r"python pretrain_gpt.py (?P<flags>@\S+ --zeropp) --plan --cluster-file (?P<folder>configs/clusters/)\S+"
)
FASTER = re.compile(r"\| `(\w+\.yaml)`: [^|]+ per node \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|")


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_zeropp_page_quotes_the_planners_speedups():
    text = page("concepts/zeropp.md")
    rows, (command, *_) = FASTER.findall(text), [found for found in FLAGS.finditer(text) if "6b7" in found["flags"]]
    assert len(rows) == 2
    for name, *quoted in rows:
        file = ROOT / command["folder"] / name
        named = schemes(for_planning(parse(f"{command['flags']} --cluster-file {file}").config, "--plan"))
        estimator = Estimator(read_cluster(file), device_type="cpu")
        compared = ("--zeropp", "ZeRO-1", "HSDP", "ZeRO-3")
        zeropp, *rivals = (estimator.estimate(named[scheme]).seconds for scheme in compared)
        for rival, value in zip(rivals, quoted, strict=True):
            assert f"{rival / zeropp:.{len(value.partition('.')[2])}f}" == value, name


def test_planner_page_quotes_the_planners_local_steps():
    text = page("planner.md")
    cluster = read_cluster(ROOT / "configs/clusters/dgx_h100_8x_100gbit.yaml")

    def planned(flags: str, cluster: Cluster = cluster) -> Estimate:
        return Estimator(cluster, device_type="cpu").estimate(for_planning(parse(flags).config, "--plan"))

    local, zeropp = "@configs/gpt_1b3.args --diloco-steps 30", planned("@configs/gpt_1b3.args --zeropp")
    own = planned(local)
    each, mean = own.node_replica_group_bytes / 1e6, own.node_cross_bytes / 1e6
    links = cluster.links._replace(network=Link(own.sufficient_gigabits / 8))
    slow = planned(local, dataclasses.replace(cluster, links=links))
    llama = "@configs/llama_8b.args --vocab-size 32000 --ffn-hidden-size 11008 --num-query-groups 32 --diloco-steps 30"
    two = planned(llama, dataclasses.replace(cluster, num_nodes=2))
    rows = {
        "MB sent by a node per synchronization": f"{each:.0f}",
        "MB sent by a node per step, mean": f"{mean:.1f}",
        "the same with `--zeropp` instead of DiLoCo": f"{zeropp.node_cross_bytes / 1e6:.0f}",
        "Gbit/s per node from which a synchronization takes at most 5 % of the time": f"{own.sufficient_gigabits:.1f}",
        "extra time with links of that line rate, which deliver less": (
            f"{100 * slow.held_up / (30 * slow.seconds - slow.held_up):.1f} %"
        ),
        "MB per step for the shape of Llama 2 7B on two of these nodes": f"{two.node_cross_bytes / 1e6:.0f}",
    }
    for name, value in rows.items():
        assert f"| {name} | {value} |" in text
    parameters = two.memory[Memory.PARAMETERS] / 4 * 8
    assert parameters == pytest.approx(6.74e9, rel=0.001)
    assert two.node_cross_bytes == pytest.approx(2 * (0.5 + 2 / 128) * parameters / 2 / 30, rel=0.005)


SCHEMES = re.compile(r"^\| scheme \| MB between nodes \| .*\n\|[-|]+\n((?:\|.*\n)+)", re.M)
PLAN = re.compile(r"^python pretrain_gpt.py ((?:.*\\\n)*.*--plan.*)$", re.M)


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def test_two_machines_page_quotes_the_plan_of_three_links(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/guides/two_machines.md").read_text(encoding="utf-8")
    (table,) = SCHEMES.finditer(text)
    (command,) = (found[1] for found in PLAN.finditer(text, endpos=table.start()) if "two_laptops" in found[1])
    config, cluster = (
        for_planning(parse(command).config, "--plan"),
        read_cluster(Path("configs/clusters/two_laptops.yaml")),
    )
    named = schemes(config) | local_steps(config, cluster)
    for name, megabytes, *speeds in (cells(line) for line in table[1].splitlines()):
        for gigabits, speed in zip((1, 2.5, 10), speeds, strict=True):
            links = cluster.links._replace(network=Link(gigabits / 8))
            found = Estimator(dataclasses.replace(cluster, links=links), device_type="cpu").estimate(named[name])
            assert f"{found.node_cross_bytes / 1e6:.1f}" == megabytes
            assert f"{found.tokens_per_second:.0f}" == speed


def test_megatron_pages_table_of_schemes_has_every_row_of_the_plan(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/guides/migrating_megatron.md").read_text(encoding="utf-8")
    (table,) = SCHEMES.finditer(text)
    command = list(PLAN.finditer(text, endpos=table.start()))[-1][1]
    config = parse(command.replace("\\\n", " ")).config
    parts = report_parts(config, planned_cluster(config), device_type="cpu")
    head, *planned = [
        re.split(" {2,}", line.strip()) for line in next(p for p in parts if p[:6] == "scheme").splitlines()
    ]
    columns = [head.index(column) for column in cells(table[0].partition("\n")[0])]
    rows = [[row[column] for column in columns] for row in planned if len(row) == len(head)]
    assert [cells(line) for line in table[1].splitlines()] == rows
