"""The search: one is taken, every other has its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.arguments import parse_run_config
from megazpp.planner.estimate import Estimator
from megazpp.planner.search import BITS_PAY, Choice, search, with_recompute
from megazpp.topology.cluster import Cluster
from megazpp.topology.device import Device
from megazpp.topology.links import Link, Links

ROOT = Path(__file__).resolve().parents[2]
SLOW = Links(domain=Link(100.0), network=Link(0.1))


def found(*flags: str, gigabytes: float, links: Links | None = SLOW) -> list[Choice]:
    config = parse_run_config(["@configs/gpt_tiny.args", "--bf16", "--num-layers", "2", *flags], ROOT).config
    device = Device("a GPU", teraflops=10.0, gigabytes=gigabytes, gigabytes_per_second=100.0)
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)
    return search(Estimator(cluster, vocab_size=2048, device_type="cpu"), config)


def speed(choice: Choice) -> float:
    assert choice.estimate is not None
    return choice.estimate.tokens_per_second


def test_the_fastest_that_fits_is_taken_and_every_other_says_why_not():
    choices = found("--zeropp", gigabytes=1.0)
    best, others = choices[0], choices[1:]
    assert [choice for choice in choices if not choice.verdict] == [best]
    slower = [choice for choice in others if "slower than the best" in choice.verdict]
    assert slower
    assert all(speed(best) >= speed(choice) for choice in slower)
    assert {choice.name.split(", micro")[0] for choice in choices} == {"tp 1, local domain 2", "tp 2, local domain 1"}
    assert best.name.startswith("tp 1, local domain 2")
    assert best.estimate is not None
    assert best.estimate.plan.layout.local == 2


def test_what_cannot_run_is_rejected_with_the_flags_that_say_so():
    verdicts = {choice.name: choice.verdict for choice in found("--global-batch-size", "16", gigabytes=1.0)}
    assert "--global-batch-size 16" in verdicts["tp 1, local domain 2, micro-batch 8, recompute none"]
    assert "tp 1, local domain 2, micro-batch 8, recompute full" not in verdicts  # more work would not help


def test_what_does_not_fit_says_what_it_needs_and_more_recomputation_is_tried():
    roomy = found("--global-batch-size", "4", gigabytes=1.0)
    sizes = {choice.name: choice.estimate.memory.total / 1e9 for choice in roomy if choice.estimate}
    plain = sizes["tp 1, local domain 2, micro-batch 1, recompute none"]
    choices = found("--global-batch-size", "4", gigabytes=0.95 * plain / 0.9)
    tried = [choice for choice in choices if choice.name.startswith("tp 1, local domain 2, micro-batch 1,")]
    verdict = next(choice.verdict for choice in tried if choice.name.endswith("none"))
    assert verdict == f"needs {plain:.1f} GB, a rank has {0.95 * plain:.1f}"
    assert len(tried) > 1


@pytest.mark.parametrize("asked", [(8, 8), (8, 4)])
def test_other_bits_are_taken_only_where_they_pay(asked: tuple[int, int]):
    choices = found("--zeropp", "--zero-gradient-bits", *map(str, asked), gigabytes=1.0)
    bits = [choice for choice in choices if "gradient bits" in choice.name]
    assert len(bits) == 2
    best = choices[0]
    if best in bits:
        as_asked = next(c for c in choices if best.name == f"{c.name}, gradient bits {best.name[-3:]}")
        assert speed(best) >= BITS_PAY * speed(as_asked)
    else:
        assert all(speed(choice) < BITS_PAY * speed(best) for choice in bits)


def test_without_links_everything_that_fits_is_said_to():
    choices = found(gigabytes=1.0, links=None)
    assert {choice.verdict for choice in choices[1:] if choice.estimate} == {"fits"}


def test_recomputation_leaves_no_method_where_there_is_none():
    flags = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"]
    full = parse_run_config(["@configs/gpt_tiny.args", *flags], ROOT).config
    assert with_recompute(full, None).model.recompute_method is None
    assert with_recompute(full, "full") == full
