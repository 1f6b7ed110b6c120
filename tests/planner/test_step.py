"""Planned bytes are counted bytes, and the simulated order of hops is the recorded one."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.ranks import ranks
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_step

from megazpp.parallel.axis import TrafficCounter
from megazpp.parallel.dims import ParallelConfig, plan_dims
from megazpp.planner.paper import PaperAxis
from megazpp.planner.speed import measure, traffic_between
from megazpp.planner.step import PaperStep, TrafficTable
from megazpp.planner.trace import trace_model
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig, plan_wire
from megazpp.zero.precision import PrecisionConfig

ALL = ZeroConfig(zeropp=True)


def plan(case: Case, world: int, rank: int = 0) -> PaperStep:
    zero = case.zero or ZeroConfig(zero_stage=case.stage)
    cluster = Cluster(num_nodes=case.nodes, ranks_per_node=world // case.nodes, order=case.order)
    config = ParallelConfig(tensor_model_parallel_size=case.tp, num_distributed_optimizer_instances=case.replicas)
    layout = plan_dims(config, cluster, zero_stage=zero.stage)
    tp = PaperAxis(layout, "tp", rank=rank, counter=TrafficCounter())
    trace = trace_model(
        case.model,
        vocab_size=case.vocab_size,
        seq_length=case.seq_length,
        micro_batch_size=case.global_batch // layout.data // case.micro_batches,
        tp=tp,
        sequence_parallel=case.sequence_parallel,
        dtype=case.precision.param_dtype,
    )
    return PaperStep(
        trace,
        layout=layout,
        wire=plan_wire(zero, layout),
        zero=zero,
        precision=case.precision,
        rank=rank,
        on_cpu=True,
    )


def count(case: Case) -> TrafficTable:
    """What the second step of a run sends."""
    step, dims = build_step(case)
    size = case.global_batch // dims.data_size // case.micro_batches
    before: TrafficTable = {}
    for index in range(2):
        before = dims.counter.table()
        batches = [
            case.batch(index, (m * dims.data_size + dims.data_rank) * size, size) for m in range(case.micro_batches)
        ]
        step(batches, learning_rate=1e-3, weight_decay=0.0)
    return traffic_between(before, dims.counter.table())


GRID = {
    "stage 0": Case(stage=0, replicas=1, nodes=2),
    "stage 1": Case(stage=1, nodes=2, micro_batches=2),
    "stage 2": Case(stage=2, nodes=2, micro_batches=2, tp=2),
    "ZeRO-3": Case(nodes=2, micro_batches=2, model=LLAMA_STYLE),
    "ZeRO-3, tied, tp": Case(nodes=2, tp=2, micro_batches=2),
    "HSDP": Case(nodes=2, replicas=2, micro_batches=2, precision=PrecisionConfig(bf16=True)),
    "qwZ": Case(nodes=2, zero=ZeroConfig(zero_quantized_weights=True), precision=PrecisionConfig(bf16=True)),
    "hpZ": Case(nodes=2, zero=ZeroConfig(zero_hpz_partition_size="auto"), micro_batches=2),
    "qgZ": Case(nodes=2, zero=ZeroConfig(zero_quantized_gradients=True), micro_batches=2, model=LLAMA_STYLE),
    "zeropp": Case(nodes=2, zero=ALL, micro_batches=4, precision=PrecisionConfig(bf16=True)),
    "zeropp, tp, sequence": Case(nodes=2, zero=ALL, tp=2, sequence_parallel=True, model=LLAMA_STYLE),
    "zeropp, cyclic": Case(nodes=2, zero=ALL, order=(0, 2, 1, 3)),
    "every micro-batch": Case(nodes=2, zero=ZeroConfig(zeropp=True, zero_cross_every_microbatch=True), micro_batches=2),
    "no overlap, recompute": Case(
        nodes=2,
        tp=2,
        micro_batches=2,
        model=dataclasses.replace(GPT2_STYLE, recompute_granularity="full"),
        zero=ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False),
    ),
}


@pytest.mark.parametrize("case", GRID.values(), ids=GRID)
def test_planned_bytes_and_calls_are_the_counted_ones_exactly(case: Case):
    for rank, counted in enumerate(ranks(4).run(count, case)):
        assert measure(plan(case, 4, rank), case.micro_batches).traffic == counted
        assert counted
