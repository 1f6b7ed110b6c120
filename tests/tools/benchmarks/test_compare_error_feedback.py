"""The study of error feedback: its one process sums gradients as ranks do, and its table pairs runs by seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare_error_feedback import VARIANTS, Losses, SummedGradients, table, train
from helpers.ranks import ranks
from measure_gradient_noise import StandIn
from torch import nn

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero import ZeroConfig, shard_model

SHAPES = [torch.Size(shape) for shape in ((33, 20), (7,), (16, 64))]
NODES, STEPS = 2, 3
CLUSTER = Cluster(num_nodes=NODES, ranks_per_node=1)


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def reduced_on_ranks(name: str) -> list[torch.Tensor]:
    """The whole sums of each step, as a sharded model's backward leaves them."""
    dims = ParallelDims(plan_dims(ParallelConfig(), CLUSTER, zero_stage=3), device_type="cpu")
    zero = ZeroConfig(zero_quantized_gradients=True, **(VARIANTS[name].zero or {}))
    model = StandIn([[], SHAPES])
    sharding = shard_model(model, [], dims, zero=zero)
    sums = []
    for step in range(STEPS):
        sharding.begin_micro_batch(last=True)
        model(gradients(step, dims.data_rank)).backward()
        sums.append(model.take_gradients())
        sharding.end_step(torch.tensor(0.3), iteration=step + 1)
    return sums


def reduced_in_one_process(name: str) -> list[torch.Tensor]:
    model = nn.Module()
    model.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    reduction = SummedGradients(model, VARIANTS[name], plan_dims(ParallelConfig(), CLUSTER, zero_stage=3))
    sums = []
    for step in range(STEPS):
        reduction.sum([gradients(step, rank) for rank in range(NODES)])
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        reduction.sharding.end_step(torch.tensor(0.3), iteration=step + 1)
    return sums


@pytest.mark.parametrize("name", ["none", "clipped with its gradients", "moving average"])
def test_one_process_sums_bit_for_bit_as_two_nodes_do(name: str):
    for found in ranks(NODES).run(reduced_on_ranks, name):
        for expected, got in zip(found, reduced_in_one_process(name), strict=True):
            assert torch.equal(got, expected)


# fmt: off
FLAGS = [
    "@configs/gpt_tiny.args", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2",
    "--seq-length", "32", "--max-position-embeddings", "32", "--global-batch-size", "4", "--micro-batch-size", "2",
    "--vocab-size", "512", "--num-workers", "0", "--train-iters", "3", "--eval-iters", "1",
]
# fmt: on


@pytest.mark.slow
def test_variants_start_alike_and_part(tmp_path: Path):
    flags = [*FLAGS, "--data-cache-path", str(tmp_path)]
    runs = {name: train(flags, variant, NODES) for name, variant in VARIANTS.items()}
    assert len({run.train[0] for run in runs.values()}) == 1
    assert len({run.train[2] for run in runs.values()}) == len(VARIANTS)
    assert all(abs(run.valid - runs["ZeRO-3"].valid) < 0.01 for run in runs.values())


def test_the_table_pairs_runs_by_seed():
    results = {
        "ZeRO-3": [Losses([3.0, 2.0], [0.5, 4.0], 2.5), Losses([3.2, 2.2], [0.5, 0.5], 2.6)],
        "none": [Losses([3.0, 2.2], [0.5, 0.5], 2.6), Losses([3.0, 2.2], [0.5, 0.5], 2.6)],
    }
    assert table(results).splitlines()[2:] == [
        "| ZeRO-3 | 2.6000 | +0.0000 ± 0.0000 | 0.0000 ± 0.0000 | 2.5500 | +0.0000 ± 0.0000 |",
        "| none | 2.6000 | +0.0000 ± 0.1000 | 0.1000 ± 0.0000 | 2.6000 | +0.0500 ± 0.0500 |",
        "",
        "Gradient norms of ZeRO-3: median 0.50, at most 4.0; 25 % above 1.",
    ]
