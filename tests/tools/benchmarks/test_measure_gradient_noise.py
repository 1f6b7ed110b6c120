"""The noise of wire formats on a model's gradients: each above a floor, in the order that error feedback promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.program import ROOT
from helpers.ranks import ranks
from measure_gradient_noise import (
    FORMATS,
    Ratios,
    Recording,
    StandIn,
    WireFormat,
    main,
    measure,
    record_gradients,
    table,
)

from megazpp.base.arguments import parse_run_config
from megazpp.base.checks import check_run_config
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster

pytestmark = pytest.mark.slow

# fmt: off
FLAGS = [
    "@configs/gpt_tiny.args", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2",
    "--seq-length", "64", "--max-position-embeddings", "64", "--global-batch-size", "8", "--micro-batch-size", "1",
    "--vocab-size", "512", "--num-workers", "0",
]
# fmt: on
CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)


def record_and_measure(cache: str) -> tuple[dict[str, Ratios], Recording]:
    parsed = parse_run_config([*FLAGS, "--data-cache-path", cache], ROOT)
    plan = check_run_config(parsed.config, CLUSTER, device_type="cpu")
    dims = ParallelDims(plan_dims(ParallelConfig(), CLUSTER, zero_stage=3), device_type="cpu")
    recording = record_gradients(parsed, plan, dims, train_steps=4, steps=6)
    return {str(wire): measure(recording, wire, dims) for wire in FORMATS}, recording


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks(4).run(record_and_measure, str(tmp_path_factory.mktemp("cache")))


def test_the_formats_are_ordered_as_their_bits_and_error_feedback_pays_in_the_sum(measured: list[Any]):
    """Floors well below what the tiny model shows after 100 steps (52, 47 and 22 dB in one step)."""
    ratios, recording = measured[0]
    assert all(other == ratios for other, _ in measured)
    assert ratios["16/16"].one_step > 48
    assert ratios["8/8"].one_step > 38
    assert ratios["8/4"].one_step > 17
    assert ratios["16/16"].one_step > ratios["8/8"].one_step > ratios["8/4"].one_step > ratios["4/4"].one_step
    assert ratios["8/4, error feedback"].sum_of_steps > ratios["8/4"].sum_of_steps + 5
    assert recording.minibatch < ratios["8/4"].one_step  # the wire's noise is the smaller one


def test_the_recorded_gradients_are_those_of_the_global_batch(measured: list[Any]):
    """The sum over ranks in fp64 equals the recorded sum; shapes are those of the units, each parameter once."""
    recordings = [recording for _, recording in measured]
    for step, exact in enumerate(recordings[0].exact):
        flat = [torch.cat([g.flatten() for g in recording.steps[step]]).double() for recording in recordings]
        torch.testing.assert_close(sum(flat), exact)
        assert all((f - flat[0]).norm() > 0.01 * exact.norm() for f in flat[1:])  # the ranks saw different samples
    shapes = [shape for unit in recordings[0].units for shape in unit]
    assert [g.shape for g in recordings[0].steps[0]] == shapes
    assert len(recordings[0].units) == 3  # two layers and the root
    assert sum(map(math.prod, shapes)) == recordings[0].exact[0].numel()


def test_the_stand_in_s_gradients_are_those_it_is_given():
    gradients = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2)]
    model = StandIn([[torch.Size([3, 4]), torch.Size([5])], [torch.Size([2, 2])]])
    model(gradients).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_the_table_names_formats_and_steps():
    recording = Recording([], [], [], minibatch=4.4)
    text = table({"8/8": Ratios(43.21, 53.0), str(WireFormat(8, 4, True)): Ratios(19.4, math.inf)}, recording, 12)
    assert text.splitlines() == [
        "| bits inside / across nodes | one step, dB | sum of 12 steps, dB |",
        "|---|---|---|",
        "| 8/8 | 43.2 | 53.0 |",
        "| 8/4, error feedback | 19.4 | inf |",
        "",
        "The minibatch's own noise is at 4.4 dB.",
    ]


def test_one_node_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["--nodes", "1"]) == 2
    assert "error: --nodes 1 --ranks-per-node 2: no two nodes" in capsys.readouterr().err
