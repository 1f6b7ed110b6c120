"""What pages quote of the planner is what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megazpp.arguments import parse_run_config
from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import for_planning, schemes
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
QUOTED = re.compile(
    r"`python pretrain_gpt.py (?P<flags>@\S+ --zeropp) --plan --cluster-file (?P<folder>\S+/)(?P<fast>\w+\.yaml)`, "
    r"`--zeropp` is (?P<fast_hsdp>[\d. to]+) times as fast as HSDP and "
    r"(?P<fast_zero3>[\d. to]+) times as fast as ZeRO-3;"
    r".*?\(`(?P<slow>\w+\.yaml)`\) the plan says (?P<slow_hsdp>[\d. to]+) and (?P<slow_zero3>[\d. to]+)\. "
)


@pytest.mark.slow
def test_the_page_of_zero_quotes_how_much_faster_the_planner_finds_zeropp():
    page = " ".join((ROOT / "megazpp/zero/README.md").read_text(encoding="utf-8").split())
    quoted = QUOTED.search(page)
    assert quoted is not None
    for network in ("fast", "slow"):
        path = ROOT / quoted["folder"] / quoted[network]
        flags = [*quoted["flags"].split(), "--cluster-file", str(path)]
        named = schemes(for_planning(parse_run_config(flags, ROOT).config, "--plan"))
        estimator = Estimator(read_cluster(path), device_type="cpu")
        ends = {name: estimator.estimates(named[name]) for name in ("ZeRO-3", "HSDP", "--zeropp")}
        for name, rival in (("hsdp", "HSDP"), ("zero3", "ZeRO-3")):
            pairs = zip(ends["--zeropp"], ends[rival], strict=True)
            ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
            for text, ratio in zip(quoted[f"{network}_{name}"].split(" to "), sorted(ratios), strict=True):
                digits = len(text.partition(".")[2])
                assert f"{ratio:.{digits}f}" == text, (network, rival)
