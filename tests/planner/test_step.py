"""Test the simulated step.

Its bytes and their order equal a real step's, and its memory is close to real tensors' memory.
"""

import dataclasses
import functools
import gc
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from helpers.dry_run import PeakBytes
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import (
    GPT2_STYLE,
    LLAMA_STYLE,
    MIXTURE_STYLE,
    Case,
    build_diloco,
    build_step,
    diloco_plan,
    spec_of,
    wire_of,
)

from megazpp.diloco.config import DilocoConfig
from megazpp.elastic.outer import WholeOuter
from megazpp.optim.config import OptimizerConfig
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import plan_dims
from megazpp.planner.cost import ClusterCosts, Efficiency
from megazpp.planner.simulator import Memory
from megazpp.planner.step import StepSimulator, TrafficTable, measure, traffic_between
from megazpp.planner.trace import trace_on_rank
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.layout import DATA_AXES
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.plan import GRADIENT_BLOCK

BF16 = PrecisionConfig(bf16=True)
ALL = ZeroConfig(zeropp=True)
ALONE = ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False)
HOST: dict[str, Any] = {"optimizer_cpu_offload": True, "zero_offload_partial_sums": True}
MUON = OptimizerConfig(optimizer="muon")
LOCAL = functools.partial(DilocoConfig, diloco_steps=4)
two_nodes = functools.partial(Case, nodes=2)


def plan(case: Case, rank: int = 0, *, elastic: bool = False, links: Links | None = None) -> StepSimulator:
    """Return the simulator of one training step of `case`, for one of four ranks.

    With `links` the ranks are GPUs whose steps take time, otherwise CPUs whose bytes are counted.
    """
    device = None if links is None else Device("GPU", 100.0, 80.0, 1000.0)
    cluster = Cluster(
        num_nodes=case.nodes, ranks_per_node=4 // case.nodes, order=case.order, links=links, device=device
    )
    config = ParallelConfig(
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        num_distributed_optimizer_instances=case.replicas,
        expert_model_parallel_size=case.ep,
    )
    layout = plan_dims(config, cluster, zero_stage=case.stage, num_replica_groups=case.num_replica_groups)
    spec, size = spec_of(case, wire_of(case, layout)), case.global_batch // layout.data // case.micro_batches
    return StepSimulator(
        trace_on_rank(spec, layout, seq_length=case.seq_length, micro_batch_size=size),
        spec,
        layout,
        rank=rank,
        costs=None if links is None else ClusterCosts(layout, Efficiency()),
        on_cpu=links is None,
        diloco=diloco_plan(case),
        elastic=elastic,
        muon=case.optimizer if case.optimizer.optimizer == "muon" else None,
    )


def watch(counter: Any, axes: Any) -> Mock:
    """Return a mock that records every collective (as "add") and every task of an axis's queue (by the axis's name)."""
    told = Mock()
    told.attach_mock(Mock(wraps=counter.add), "add")
    counter.add = told.add
    for name in DATA_AXES:
        told.attach_mock(Mock(wraps=axes[name].queue.submit), name)
        axes[name].queue.submit = getattr(told, name)
    return told


def in_order(told: Mock) -> tuple[list[str], dict[str, list[Any]]]:
    """Return, from the record of `watch`, the axis of each task in the order of submission, and the traffic by axis.

    The traffic of an axis is a list of [collective, bytes sent by this rank].
    """
    collectives = [call.args for call in told.add.mock_calls]
    sent = {axis: [what for _, on, *what in collectives if on == axis] for axis in DATA_AXES}
    return [name for name, *_ in told.mock_calls if name != "add"], sent


def count(case: Case) -> tuple[TrafficTable, Any, TrafficTable]:
    """Train two steps, and return this rank's communication in the second step and in a synchronization after it.

    Returns:
        (traffic of the second step; its tasks and collectives in order, as `in_order` returns them; traffic of the
        DiLoCo synchronization, {} without DiLoCo).
    """
    step, dims = build_step(case)
    diloco = build_diloco(case, step, dims)
    step(case.batches(0, dims), learning_rate=1e-3, weight_decay=0.0)
    step.sharding.settle()
    before, told = dims.counter.table(), watch(dims.counter, {name: getattr(dims, name) for name in DATA_AXES})
    step(case.batches(1, dims), learning_rate=1e-3, weight_decay=0.0)
    step.sharding.settle()
    between, order = dims.counter.table(), in_order(told)
    if diloco is not None:
        diloco.finish()
    return traffic_between(before, between), order, traffic_between(between, dims.counter.table())


GRID = {
    "stage 0": two_nodes(stage=0),
    "stage 1": two_nodes(stage=1, micro_batches=2),
    "stage 2": two_nodes(stage=2, micro_batches=2, tp=2),
    "ZeRO-3, overlap": two_nodes(
        micro_batches=2, model=LLAMA_STYLE, zero=ZeroConfig(overlap_param_gather=True, overlap_grad_reduce=True)
    ),
    "ZeRO-3, tied, tp": two_nodes(tp=2, micro_batches=2),
    "HSDP": two_nodes(replicas=2, micro_batches=2, precision=BF16),
    "qwZ": two_nodes(zero=ZeroConfig(zero_quantized_weights=True), precision=BF16),
    "hpZ, overlap": two_nodes(
        micro_batches=2, zero=ZeroConfig(zero_hpz_partition_size="auto", overlap_param_gather=True)
    ),
    "qgZ": two_nodes(zero=ZeroConfig(zero_quantized_gradients=True), micro_batches=2, model=LLAMA_STYLE),
    "zeropp": two_nodes(zero=ALL, micro_batches=4, precision=BF16),
    "zeropp, tp, sequence": two_nodes(zero=ALL, tp=2, sequence_parallel=True, model=LLAMA_STYLE),
    "zeropp, cyclic": two_nodes(zero=ALL, order=(0, 2, 1, 3)),
    "every micro-batch": two_nodes(
        zero=ZeroConfig(zeropp=True, zero_cross_every_microbatch=True), micro_batches=2, model=LLAMA_STYLE
    ),
    "Muon, whole": Case(stage=2, tp=2, micro_batches=2, model=LLAMA_STYLE, optimizer=MUON),
    "Muon, by nodes": two_nodes(zero=ALL, precision=BF16, optimizer=MUON),
    "Muon, whole over nodes": two_nodes(
        tp=2, zero=ALL, micro_batches=2, optimizer=dataclasses.replace(MUON, muon_full_interval=1)
    ),
    "no overlap, recompute": two_nodes(
        tp=2, micro_batches=2, model=dataclasses.replace(GPT2_STYLE, recompute_granularity="full"), zero=ALONE
    ),
    "states in host memory": two_nodes(zero=dataclasses.replace(ALL, **HOST), micro_batches=4, precision=BF16),
    "states in host memory, hpZ off": two_nodes(
        zero=ZeroConfig(zeropp=True, zero_hpz_partition_size="1", **HOST), micro_batches=2, precision=BF16
    ),
    "states in host memory, ZeRO-3": two_nodes(zero=ZeroConfig(optimizer_cpu_offload=True), micro_batches=2),
    "replica groups, quantized": two_nodes(diloco=LOCAL()),
    "replica groups, tp, late fragments": two_nodes(
        tp=2,
        model=LLAMA_STYLE,
        precision=BF16,
        diloco=LOCAL(diloco_fragments=2, diloco_fragment_sync_delay=3, diloco_outer_momentum=0.9),
    ),
    "zeropp on replica groups": Case(nodes=4, zero=ALL, micro_batches=2, diloco=LOCAL(diloco_replica_groups=2)),
    "replica groups of one rank, not quantized": Case(
        nodes=4, order=(0, 2, 1, 3), diloco=LOCAL(diloco_weight_bits=16, diloco_gradient_bits=16)
    ),
}
QUICK = ("zeropp, tp, sequence", "states in host memory")
SLOW = (
    "HSDP",
    *("stage 0", "stage 2", "ZeRO-3, overlap", "hpZ, overlap", "zeropp, cyclic", "every micro-batch"),
    *("Muon, by nodes", "Muon, whole over nodes", "no overlap, recompute", "states in host memory, hpZ off"),
    *("replica groups, tp, late fragments", "zeropp on replica groups"),
    "replica groups of one rank, not quantized",
)


@pytest.mark.parametrize("case", chosen(GRID, *QUICK, slow=SLOW))
def test_simulated_calls_and_bytes_equal_a_real_steps_in_order(case):
    for rank, (counted, order, synchronized) in enumerate(ranks(4).run(count, case)):
        step = plan(case, rank)
        assert measure(step, case.micro_batches).traffic == counted
        told = watch(step.counter, step._axes)
        step.run(case.micro_batches)
        assert in_order(told) == order
        assert len(order[0]) > 10 or case.zero != ALL
        assert step.synchronize().traffic == synchronized
        exchanges = {("replica_group", collective) for collective in ("all_to_all", "all_gather", "all_reduce")}
        assert {key[1:] for key in synchronized} == (exchanges if case.diloco.asked else set())
        assert "replica_group" not in {axis for _, axis, _ in counted}


with_experts = functools.partial(two_nodes, model=MIXTURE_STYLE, micro_batches=2)
EXPERTS = {
    "whole on each rank": with_experts(zero=ALL),
    "two expert-parallel ranks": with_experts(zero=ALL, ep=2),
    "ZeRO-3, tp": with_experts(tp=2, sequence_parallel=True),
    "some layers, Muon": with_experts(
        model=dataclasses.replace(MIXTURE_STYLE, num_layers=3, moe_layer_freq="[0,1,1]"), ep=2, optimizer=MUON
    ),
    "tp and ep": with_experts(zero=ALL, tp=2, ep=2, precision=BF16),
}


@pytest.mark.parametrize("case", chosen(EXPERTS, "two expert-parallel ranks", slow=("some layers, Muon", "tp and ep")))
def test_simulated_traffic_with_experts_equals_a_real_steps_except_for_uneven_tokens(case):
    for rank, (counted, _, _) in enumerate(ranks(4).run(count, case)):
        found = measure(plan(case, rank), case.micro_batches).traffic
        tokens = ("tp", "tp", "all_to_all") if case.tp == case.ep else ("local", "ep", "all_to_all")
        uneven = found.pop(tokens, None), counted.pop(tokens, None)
        assert found == counted
        assert len({None if each is None else each.calls for each in uneven}) == 1
        assert (uneven[0] is not None) == (case.ep > 1)


@pytest.mark.parametrize("zero", [ALL, ZeroConfig(zero_quantized_weights=True), ZeroConfig(zero_stage=1)])
@pytest.mark.parametrize("network", [3e-4, 3e-3, 10.0])
def test_repeated_micro_batches_take_as_long_as_simulated_ones(zero, network):
    """Compare a step of which few micro-batches are simulated with the same step simulated completely.

    The host launches kernels more slowly than the device computes these small layers. Only after the device has waited
    for the network is the host ahead of the device, so the step has both states.
    """
    links = Links(domain=Link(100.0), network=Link(network))
    whole, repeated = (plan(wide(zero=zero, stage=zero.stage, precision=BF16), links=links) for _ in range(2))
    whole.learn_order()
    expected, found = whole.run(40), measure(repeated, 40)
    assert found.traffic == expected.traffic
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.busy == pytest.approx(expected.busy)


def test_gathers_of_a_forward_wait_for_the_previous_backward():
    """Check that the first gather of a simulated forward starts after the previous backward has ended.

    In FSDP2, the root module makes the streams of gathers wait for the compute stream at the start of each forward.
    """
    zero, links = ZeroConfig(zero_quantized_weights=True), Links(domain=Link(100.0), network=Link(1e-4))
    step = plan(two_nodes(zero=zero, model=LLAMA_STYLE), links=links)
    simulation, schedule, starts, ends = step._simulation, step._context.reduce_schedule, [], []
    step.units[0].read = lambda: starts.append(simulation.running.now)
    told = Mock(wraps=schedule.end_backward, side_effect=lambda: ends.append(simulation.compute.now) or DEFAULT)
    schedule.end_backward = told
    step.run(2)
    assert starts[len(starts) // 2] >= ends[0]


# ---- memory of a simulated step -------------------------------------------------------------------------------------


WIDE = dataclasses.replace(GPT2_STYLE, num_layers=4, hidden_size=64, ffn_hidden_size=None, max_position_embeddings=64)
LONG = dataclasses.replace(WIDE, num_layers=1, max_position_embeddings=4096)
wide = functools.partial(Case, nodes=2, model=WIDE, vocab_size=512, seq_length=64, global_batch=8)


def test_local_steps_memory_equals_its_formulas():
    """Compare DiLoCo's memory with formulas, for P parameters, L ranks of a replica group and W ranks in all.

    In bytes: the common copy takes 4 P/L, outer error feedback about P/L, outer weights and momentum 8 P/W.
    """
    model = dataclasses.replace(WIDE, hidden_size=512)
    step = plan(wide(model=model, diloco=LOCAL(diloco_outer_momentum=0.9), precision=BF16))
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


def sizes_of_contribution(case: Case) -> tuple[int, int]:
    """Return the bytes of this rank's contribution, and of its snapshot of the outer state, in elastic DiLoCo."""
    step, dims = build_step(case)
    groups = dims.replica_group.size
    outer = WholeOuter(step.sharding, diloco_plan(case), case.precision, num_groups=groups, late_factor=0.5)
    return len(outer.pack(8.0)), len(outer.dump())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_planned_bytes_and_memory_of_groups_that_are_jobs_equal_real_ones(momentum):
    """Compare the plan of elastic DiLoCo with real bytes. Each rank sends its contribution to the other three groups.

    R (the common copy), outer weights and momentum are not split over groups, because each group is a job.
    """
    case = Case(nodes=4, model=LLAMA_STYLE, diloco=LOCAL(diloco_outer_momentum=momentum))
    for rank, (message, snapshot) in enumerate(ranks(4).run(sizes_of_contribution, case)):
        step = plan(case, rank, elastic=True)
        step.run(1)
        kinds, synchronized = step.ledger.peak, step.synchronize()
        ((key, sent),) = synchronized.traffic.items()
        assert key == ("cross", "replica_group", "send")
        assert (sent.calls, sent.sent_bytes) == (3, 3 * message)
        assert kinds[Memory.COMMON] + kinds[Memory.OUTER] == snapshot
        assert kinds[Memory.OUTER] == (2 if momentum else 1) * kinds[Memory.COMMON]


def test_reduction_buffers_hold_sent_and_received_messages():
    step = plan(two_nodes(zero=ALL, model=LLAMA_STYLE, precision=BF16))
    traffic = measure(step, 1).traffic
    sent = {axis: counted.sent_bytes for (_, axis, what), counted in traffic.items() if what == "all_to_all"}
    # Each axis has two ranks, so half of a reduction buffer is sent, and half stays on the rank.
    assert sum(unit.reduce_buffer for unit in step.units) == 2 * 2 * sent["local"]
    assert sum(unit.cross_buffer for unit in step.units) == 2 * 2 * sent["cross"]


def live_bytes(case: Case) -> int:
    """Train three steps; return the peak memory of the third step in bytes."""
    gc.collect()
    with PeakBytes() as live:
        step, dims = build_step(case)
        for index in (0, 1, 0):
            live.peak = 0
            step(case.batches(index, dims), learning_rate=1e-3, weight_decay=0.0)
    return live.peak


REAL = {  # cases without overlap, because PeakBytes does not see what queues allocate in their threads
    "zeropp, k = 2": wide(zero=ALONE, micro_batches=2, precision=BF16),
    "tp": wide(tp=2),
    "4k tokens on 4": wide(nodes=1, model=LONG, cp=4, precision=BF16, seq_length=4096, global_batch=1),
}


@pytest.mark.parametrize("case", chosen(REAL, slow=("zeropp, k = 2",)))
def test_simulated_memory_is_close_to_real_tensors(case):
    peak = ranks(4).run(live_bytes, case)[0]
    step = plan(case)
    step.run(case.micro_batches)
    assert step.ledger.peak.total() == pytest.approx(peak, rel=0.05)
