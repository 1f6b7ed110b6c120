"""Compare ZeRO++ without quantization with plain FSDP2 in popular training frameworks, such as accelerate and TRL."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.frameworks import CHECKPOINTS, FRAMEWORKS, SCENARIOS, compare, is_installed
from helpers.ranks import Ranks
from helpers.tiers import nightly

pytestmark = pytest.mark.slow


# The frameworks in which the slow tier runs each scenario. torchtitan's loop differs from the others: it builds its
# models on meta, has adapters of its own, and reduces gradients in every backward.
IN_SLOW_TIER = {
    "LoRA": ("torchtitan",),
    "unfreezing halfway": ("Trainer",),
    "layer drop": ("accelerate",),
    "layer drop by rank": ("TRL SFT",),
    "EMA swap": ("accelerate",),
    "discarded batch": ("torchtitan",),
    "train() twice": ("TRL SFT",),
    "evaluation between": ("TRL DPO",),
}


def cases() -> Iterator[Any]:
    """Yield all pairs of framework and scenario as test parameters; the nightly tier runs those not in IN_SLOW_TIER."""
    for scenario, framework in itertools.product(SCENARIOS, FRAMEWORKS):
        yield (pytest.param if framework in IN_SLOW_TIER[scenario] else nightly)(framework, scenario)


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[], Ranks]]:
    """Yield a function that returns two worker processes, and starts new ones if a failed test has killed them.

    The processes end after the last test of this module, because imported frameworks take much memory.
    """
    found: list[Ranks] = []

    def alive() -> Ranks:
        if not found or not all(process.is_alive() for process in found[-1].processes):
            found.append(Ranks(2))
        return found[-1]

    yield alive
    for each in found:
        each.stop()


@pytest.mark.parametrize(("framework", "scenario"), [*cases()])
def test_framework_training_matches_plain_fsdp2(framework, scenario, workers):
    """Train with a framework, with and without `megazpp.zeropp`, and compare the results.

    On two nodes of one rank each, losses and weights are bit-identical. tests/drop_in/test_like_fsdp2.py compares the
    loops that call FSDP2 themselves.
    """
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed, or not for torch {torch.__version__}")
    for losses, sent in workers().run(compare, framework, scenario):
        assert len(losses) >= 4
        assert sent > 0


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", nightly("FULL_STATE_DICT")])
# accelerate's own case is nightly, because the case of transformers' Trainer also saves and loads through accelerate
@pytest.mark.parametrize("framework", [nightly(each) if each == "accelerate" else each for each in CHECKPOINTS])
def test_framework_checkpoints_load_with_and_without_zeropp(framework, kind, tmp_path, workers):
    """A run with lossless deltas resumes bit-identically, because it saves its state beside the framework's files."""
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    workers().run(CHECKPOINTS[framework], str(tmp_path), kind)
