"""Planned bytes are counted bytes, sent in the order of a real step; planned memory is that of real tensors."""

import dataclasses
import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_diloco, build_step, diloco_plan

from megazpp.islands.config import IslandsConfig
from megazpp.optim.optimizer import OptimizerConfig
from megazpp.parallel.axis import MeshAxis, TrafficCounter
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.planner.dry_run import PeakBytes
from megazpp.planner.paper import Memory
from megazpp.planner.step import PaperStep, TrafficTable, measure, traffic_between
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import DATA_AXES
from megazpp.training.setup import ModelSpec
from megazpp.training.step import TrainStep
from megazpp.zero.config import GRADIENT_BLOCK, PrecisionConfig, ZeroConfig

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


class Sent(NamedTuple):
    """In order: the queues to which a step gives tasks, and what each axis sends, as (collective, bytes)."""

    queues: list[str]
    axes: dict[str, list[tuple[str, int]]]


def watched(counter: TrafficCounter, axes: Mapping[str, MeshAxis]) -> Sent:
    """What `axes` do from now on."""
    sent = Sent([], {name: [] for name in axes})
    add = counter.add

    def note(wire: str, axis: str, collective: str, sent_bytes: int) -> None:
        if axis in sent.axes:
            sent.axes[axis].append((collective, sent_bytes))
        add(wire, axis, collective, sent_bytes)

    counter.add = note  # type: ignore[method-assign]
    for name, axis in axes.items():
        queue: Any = axis.queue

        def submit(task: Any, *, name: str = name, given: Any = queue.submit, **when: Any) -> Any:
            sent.queues.append(name)
            return given(task, **when)

        queue.submit = submit
    return sent


def take_steps(case: Case, step: TrainStep, dims: ParallelDims, count: int) -> None:
    size = case.global_batch // dims.data_size // case.micro_batches
    for index in range(count):
        starts = [(m * dims.data_size + dims.data_rank) * size for m in range(case.micro_batches)]
        batches = [case.batch(index, start, size) for start in starts]
        step(batches, learning_rate=1e-3, weight_decay=0.0, iteration=1)


def count(case: Case) -> tuple[TrafficTable, Sent, TrafficTable]:
    """What the second step of a run sends, in which order, and what a synchronization of islands sends then."""
    step, dims = build_step(case)
    diloco = build_diloco(case, step, dims)
    take_steps(case, step, dims, 1)
    before, sent = dims.counter.table(), watched(dims.counter, {name: getattr(dims, name) for name in DATA_AXES})
    take_steps(case, step, dims, 1)
    between = dims.counter.table()
    if diloco is not None:
        diloco.finish()
    return traffic_between(before, between), sent, traffic_between(between, dims.counter.table())


EVERY = {"diloco_steps": 4}
GRID = {
    "stage 0": Case(stage=0, replicas=1, nodes=2),
    "stage 1": Case(stage=1, nodes=2, micro_batches=2),
    "stage 2": Case(stage=2, nodes=2, micro_batches=2, tp=2),
    "ZeRO-3, overlap": Case(
        nodes=2,
        micro_batches=2,
        model=LLAMA_STYLE,
        zero=ZeroConfig(overlap_param_gather=True, overlap_grad_reduce=True),
    ),
    "ZeRO-3, tied, tp": Case(nodes=2, tp=2, micro_batches=2),
    "HSDP": Case(nodes=2, replicas=2, micro_batches=2, precision=PrecisionConfig(bf16=True)),
    "qwZ": Case(nodes=2, zero=ZeroConfig(zero_quantized_weights=True), precision=PrecisionConfig(bf16=True)),
    "hpZ, overlap": Case(
        nodes=2, micro_batches=2, zero=ZeroConfig(zero_hpz_partition_size="auto", overlap_param_gather=True)
    ),
    "qgZ": Case(nodes=2, zero=ZeroConfig(zero_quantized_gradients=True), micro_batches=2, model=LLAMA_STYLE),
    "zeropp": Case(nodes=2, zero=ALL, micro_batches=4, precision=PrecisionConfig(bf16=True)),
    "zeropp, tp, sequence": Case(nodes=2, zero=ALL, tp=2, sequence_parallel=True, model=LLAMA_STYLE),
    "zeropp, cyclic": Case(nodes=2, zero=ALL, order=(0, 2, 1, 3)),
    "every micro-batch": Case(
        nodes=2, zero=ZeroConfig(zeropp=True, zero_cross_every_microbatch=True), micro_batches=2, model=LLAMA_STYLE
    ),
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
    "islands, quantized": Case(nodes=2, diloco=IslandsConfig(**EVERY)),
    "islands, tp, late fragments": Case(
        nodes=2,
        tp=2,
        model=LLAMA_STYLE,
        precision=PrecisionConfig(bf16=True),
        diloco=IslandsConfig(**EVERY, diloco_fragments=2, diloco_delay=3, diloco_outer_momentum=0.9),
    ),
    "zeropp on islands": Case(nodes=4, zero=ALL, micro_batches=2, diloco=IslandsConfig(**EVERY, diloco_islands=2)),
    "islands of one rank, not quantized": Case(
        nodes=4, order=(0, 2, 1, 3), diloco=IslandsConfig(**EVERY, diloco_weight_bits=16, diloco_gradient_bits=16)
    ),
}


@pytest.mark.parametrize(
    "case",
    chosen(
        GRID,
        "stage 1",
        "HSDP",
        "zeropp",
        "zeropp, tp, sequence",
        "Muon, whole over nodes",
        "islands, tp, late fragments",
    ),
)
def test_planned_calls_and_bytes_are_the_counted_ones_exactly_and_sent_in_their_order(case):
    for rank, (counted, sent, synchronized) in enumerate(ranks(4).run(count, case)):
        step = plan(case, 4, rank)
        assert measure(step, case.micro_batches).traffic == counted
        planned = watched(step.counter, {name: step._axes[name] for name in DATA_AXES})
        step.run(case.micro_batches)
        assert planned == sent
        assert len(sent.queues) > 10 or case.zero != ALL
        assert step.synchronize().traffic == synchronized
        calls = {(axis, collective) for _, axis, collective in synchronized}
        exchanges = {("island", collective) for collective in ("all_to_all", "all_gather", "all_reduce")}
        assert calls == (exchanges if case.diloco.asked else set())
        assert "island" not in {axis for _, axis, _ in counted}


# ---- memory ---------------------------------------------------------------------------------------------------------


WIDE = dataclasses.replace(GPT2_STYLE, num_layers=4, hidden_size=64, ffn_hidden_size=None, max_position_embeddings=64)
SHAPE: dict[str, Any] = {"nodes": 2, "vocab_size": 512, "seq_length": 64, "global_batch": 8}
BF16 = PrecisionConfig(bf16=True)


def test_local_steps_take_what_their_formulas_say():
    """P parameters on L ranks of an island and W in all: R 4 P/L, feedback P/L, outer weights and momentum 8 P/W."""
    wide, local = dataclasses.replace(WIDE, hidden_size=512), IslandsConfig(**EVERY, diloco_outer_momentum=0.9)
    step = plan(Case(model=wide, diloco=local, precision=BF16, **SHAPE), 4)
    step.run(1)
    kinds, parameters = step.ledger.peak, sum(unit.elements for unit in step.units)
    assert kinds[Memory.PARAMETERS] + kinds[Memory.MOMENTS] == 12 * parameters / 2
    assert kinds[Memory.COMMON] == 4 * parameters / 2
    assert kinds[Memory.OUTER] == 8 * parameters / 4
    assert kinds[Memory.OUTER_FEEDBACK] == pytest.approx((1 + 2 / GRADIENT_BLOCK) * parameters / 2, rel=0.02)
    assert kinds[Memory.OUTER_MESSAGES] == 0
    step.synchronize()
    messages = step.ledger._now[Memory.OUTER_MESSAGES]
    assert messages == pytest.approx((0.5 + 2 / GRADIENT_BLOCK) * parameters / 2, rel=0.05)


def test_the_buffers_of_a_reduction_s_hops_hold_what_is_sent_and_what_is_received():
    step = plan(Case(nodes=2, zero=ALL, model=LLAMA_STYLE, precision=BF16), 4)
    traffic = measure(step, 1).traffic
    sent = {axis: counted.sent_bytes for (_, axis, what), counted in traffic.items() if what == "all_to_all"}
    # to one of two ranks, where the buffers also hold what stays
    assert sum(unit.reduce_buffer for unit in step.units) == 2 * 2 * sent["local"]
    assert sum(unit.cross_buffer for unit in step.units) == 2 * 2 * sent["cross"]


def live_bytes(case: Case) -> int:
    """The most within the third step."""
    gc.collect()
    with PeakBytes() as live:
        step, dims = build_step(case)
        take_steps(case, step, dims, 2)
        live.peak = 0
        take_steps(case, step, dims, 1)
    return live.peak


# PeakBytes does not see what queues allocate in their threads, so nothing overlaps here
ALONE = ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False)
LONG = dataclasses.replace(WIDE, num_layers=1, max_position_embeddings=16384)
REAL = {
    "zeropp, k = 2": Case(model=WIDE, zero=ALONE, micro_batches=2, precision=BF16, **SHAPE),
    "tp": Case(model=WIDE, tp=2, **SHAPE),
    "16k tokens on 4": Case(
        model=LONG, cp=4, precision=BF16, **SHAPE | {"nodes": 1, "seq_length": 16384, "global_batch": 1}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL.values(), ids=REAL)
def test_real_tensors_take_what_is_planned(case):
    peak = ranks(4).run(live_bytes, case)[0]
    step = plan(case, 4)
    step.run(case.micro_batches)
    assert step.ledger.peak.total() == pytest.approx(peak, rel=0.05)
