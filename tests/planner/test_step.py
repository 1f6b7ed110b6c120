"""Planned bytes are counted bytes, and the simulated order of hops is the recorded one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_diloco, build_step, diloco_plan

from megazpp.islands.config import IslandsConfig
from megazpp.optim.optimizer import OptimizerConfig
from megazpp.parallel.axis import TrafficCounter
from megazpp.parallel.dims import ParallelConfig, plan_dims
from megazpp.planner.paper import SimulatedQueue
from megazpp.planner.step import PaperStep, TrafficTable, measure, traffic_between
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import ModelSpec
from megazpp.zero.config import PrecisionConfig, ZeroConfig

ALL = ZeroConfig(zeropp=True)
MUON = OptimizerConfig(optimizer="muon")


def plan(case: Case, world: int, rank: int = 0) -> PaperStep:
    zero = case.zero or ZeroConfig(zero_stage=case.stage)
    cluster = Cluster(num_nodes=case.nodes, ranks_per_node=world // case.nodes, order=case.order)
    degrees = {"tensor_model_parallel_size": case.tp, "context_parallel_size": case.cp}
    config = ParallelConfig(**degrees, num_distributed_optimizer_instances=case.replicas)
    layout = plan_dims(config, cluster, zero_stage=zero.stage, islands=case.islands)
    return PaperStep(
        ModelSpec(
            config=case.model,
            vocab_size=case.vocab_size,
            sequence_parallel=case.sequence_parallel,
            zero=zero,
            precision=case.precision,
            seed=0,
        ),
        layout,
        seq_length=case.seq_length,
        micro_batch_size=case.global_batch // layout.data // case.micro_batches,
        rank=rank,
        on_cpu=True,
        islands=diloco_plan(case),
        muon=case.optimizer if case.optimizer.optimizer == "muon" else None,
    )


def count(case: Case) -> tuple[TrafficTable, TrafficTable]:
    """What the second step of a run sends, and then a synchronization of islands."""
    step, dims = build_step(case)
    diloco = build_diloco(case, step, dims)
    size = case.global_batch // dims.data_size // case.micro_batches
    before: TrafficTable = {}
    for index in range(2):
        before = dims.counter.table()
        batches = [
            case.batch(index, (m * dims.data_size + dims.data_rank) * size, size) for m in range(case.micro_batches)
        ]
        step(batches, learning_rate=1e-3, weight_decay=0.0, iteration=1)
    between = dims.counter.table()
    if diloco is not None:
        diloco.finish()
    return traffic_between(before, between), traffic_between(between, dims.counter.table())


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
    "Muon, whole": Case(stage=2, tp=2, micro_batches=2, model=LLAMA_STYLE, optimizer=MUON),
    "Muon, by nodes": Case(nodes=2, zero=ALL, precision=PrecisionConfig(bf16=True), optimizer=MUON),
    "Muon, whole over nodes": Case(
        nodes=2, tp=2, zero=ALL, micro_batches=2, optimizer=dataclasses.replace(MUON, muon_full_interval=1)
    ),
    "no overlap, recompute": Case(
        nodes=2,
        tp=2,
        micro_batches=2,
        model=dataclasses.replace(GPT2_STYLE, recompute_granularity="full"),
        zero=ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False),
    ),
}


@pytest.mark.parametrize(
    "case", chosen(GRID, "stage 1", "HSDP", "zeropp", "zeropp, tp, sequence", "Muon, whole over nodes")
)
def test_planned_bytes_and_calls_are_the_counted_ones_exactly(case: Case):
    for rank, (counted, synchronized) in enumerate(ranks(4).run(count, case)):
        step = plan(case, 4, rank)
        assert measure(step, case.micro_batches).traffic == counted
        assert counted
        assert step.synchronize() == ({}, 0.0, {})
        assert synchronized == {}


EVERY = {"diloco_steps": 4}
ISLANDS = {
    "quantized": Case(nodes=2, diloco=IslandsConfig(**EVERY)),
    "tp, late fragments": Case(
        nodes=2,
        tp=2,
        model=LLAMA_STYLE,
        precision=PrecisionConfig(bf16=True),
        diloco=IslandsConfig(**EVERY, diloco_fragments=2, diloco_delay=3, diloco_outer_momentum=0.9),
    ),
    "zeropp inside": Case(nodes=4, zero=ALL, micro_batches=2, diloco=IslandsConfig(**EVERY, diloco_islands=2)),
    "not quantized": Case(
        nodes=4, order=(0, 2, 1, 3), diloco=IslandsConfig(**EVERY, diloco_weight_bits=16, diloco_gradient_bits=16)
    ),
}


@pytest.mark.parametrize("case", chosen(ISLANDS, "quantized", "tp, late fragments"))
def test_planned_bytes_between_islands_are_those_of_a_real_synchronization(case: Case):
    for rank, (counted, synchronized) in enumerate(ranks(4).run(count, case)):
        step = plan(case, 4, rank)
        assert measure(step, case.micro_batches).traffic == counted
        assert step.synchronize().traffic == synchronized
        assert {axis for _, axis, _ in counted}.isdisjoint({"island"})
        assert {(axis, collective) for _, axis, collective in synchronized} == {
            ("island", "all_to_all"),
            ("island", "all_gather"),
            ("island", "all_reduce"),
        }


# ---- the order of hops ----------------------------------------------------------------------------------------------

Order = tuple[list[str], dict[str, list[tuple[str, int]]]]


def record(counter: TrafficCounter) -> dict[str, list[tuple[str, int]]]:
    """By axis, every collective and its bytes from now on."""
    sent: dict[str, list[tuple[str, int]]] = {"local": [], "cross": [], "shard": []}
    add = counter.add

    def note(wire: str, axis: str, collective: str, sent_bytes: int) -> None:
        if axis in sent:
            sent[axis].append((collective, sent_bytes))
        add(wire, axis, collective, sent_bytes)

    counter.add = note  # type: ignore[method-assign]
    return sent


def real_order(case: Case) -> Order:
    """The queues to which the second step gives tasks, in order, and what each axis sends."""
    step, dims = build_step(case)
    size = case.global_batch // dims.data_size // case.micro_batches
    batches = [case.batch(0, (m * dims.data_size + dims.data_rank) * size, size) for m in range(case.micro_batches)]
    step(batches, learning_rate=1e-3, weight_decay=0.0)
    submitted: list[str] = []
    for name in ("local", "cross", "shard"):
        queue = getattr(dims, name).queue

        def submit(task: Any, *, name: str = name, given: Any = queue.submit, **when: Any) -> Any:
            submitted.append(name)
            return given(task, **when)

        queue.submit = submit
    sent = record(dims.counter)
    step(batches, learning_rate=1e-3, weight_decay=0.0)
    return submitted, sent


def simulated_order(case: Case, monkeypatch: pytest.MonkeyPatch) -> Order:
    step = plan(case, 4)
    step.run(case.micro_batches)
    submitted: list[str] = []
    given = SimulatedQueue.submit

    def submit(queue: SimulatedQueue, task: Any, **when: Any) -> Any:
        submitted.append(queue.name)
        return given(queue, task, **when)

    monkeypatch.setattr(SimulatedQueue, "submit", submit)
    sent = record(step.counter)
    step.run(case.micro_batches)
    return submitted, sent


ORDERS = {
    "zeropp, untied": Case(nodes=2, zero=ALL, micro_batches=2, model=LLAMA_STYLE),
    "zeropp, tied, tp": Case(nodes=2, zero=ALL, micro_batches=2),
    "hpZ": Case(nodes=2, zero=ZeroConfig(zero_hpz_partition_size="auto", overlap_param_gather=True)),
    "ZeRO-3": Case(nodes=2, zero=ZeroConfig(overlap_param_gather=True, overlap_grad_reduce=True), micro_batches=2),
}


@pytest.mark.parametrize("case", chosen(ORDERS, "zeropp, tied, tp"))
def test_hops_are_given_to_queues_and_sent_in_the_order_of_a_real_step(case: Case, monkeypatch: pytest.MonkeyPatch):
    real = ranks(4).run(real_order, case)[0]
    assert len(real[0]) > 10
    assert simulated_order(case, monkeypatch) == real
