"""Test the schedule that overlaps ZeRO++'s hops with compute.

Results, bytes and the order of collectives may not depend on overlap or on delays.
"""

import dataclasses
import random
import time
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_step, train_on_ranks
from torch import nn

from megazpp.checkpoint.state import SecondaryPartition
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.comms import GatherSchedule
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.plan import plan_comm
from megazpp.zero.sharding import Sharding, shard_model

ALL = ZeroConfig(zeropp=True)
LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
BF16 = PrecisionConfig(bf16=True)
OFF = {"overlap_param_gather": False, "overlap_grad_reduce": False}
ON = {"overlap_param_gather": True, "overlap_grad_reduce": True}


RECOMPUTE = dataclasses.replace(GPT2_STYLE, recompute_granularity="full")
OVERLAPS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (4, {"zero": ZeroConfig(), "model": LLAMA_STYLE}),
    "qwZ": (4, {"zero": ZeroConfig(zero_quantized_weights=True), "micro_batches": 4}),
    "hpZ": (4, {"zero": ZeroConfig(zero_hpz_partition_size="auto"), "model": LLAMA_STYLE}),
    "qgZ": (4, {"zero": ZeroConfig(zero_quantized_gradients=True), "micro_batches": 4, "model": LLAMA_STYLE}),
    "zeropp": (4, {"micro_batches": 4, "model": LLAMA_STYLE}),
    "classic": (4, {"zero": ZeroConfig(zeropp=True, zero_cross_every_microbatch=True), "micro_batches": 2}),
    "lossless": (4, {"zero": LOSSLESS, "precision": BF16, "micro_batches": 2, "model": LLAMA_STYLE}),
    "one rank per node": (2, {}),
    "tp": (4, {"tp": 2, "sequence_parallel": True}),
    "recompute": (4, {"model": RECOMPUTE, "micro_batches": 2}),
    "bf16 reduce": (4, {"precision": PrecisionConfig(bf16=True, grad_reduce_in_bf16=True), "micro_batches": 2}),
    "3 nodes": (6, {"nodes": 3, "global_batch": 12}),
}


@pytest.mark.parametrize(
    "setting", chosen(OVERLAPS, "lossless", slow=("classic", "one rank per node", "tp", "recompute"))
)
def test_overlap_changes_neither_results_nor_bytes(setting):
    world, given = setting
    given = {"zero": ALL, "nodes": 2, "steps": 3, **given}
    overlapped, plain = (
        ranks(world).run(train_on_ranks, Case(**{**given, "zero": dataclasses.replace(given["zero"], **flags)}))[0]
        for flags in (ON, OFF)
    )
    assert overlapped == plain  # losses, gradient norms and bytes on every wire


# ---- gradients that are filled in place ---------------------------------------------------------------------------


def gradients_of_two_forwards(case: Case) -> dict[str, Any]:
    """Reduce each sharding unit twice in one backward, with slow cross hops; then take a step of two micro-batches.

    Returns:
        "gradients": this rank's gradients of the first backward. "complete": before each reduction, True if the
        previous one had finished. "added": calls of `add_to_gradients` in the step. "between": before each micro-batch
        of the step, True if any parameter had a gradient.
    """
    step, dims = build_step(case)
    complete: list[bool] = []

    def watch(reduce: Any, reduce_by_fsdp2: Any) -> Any:
        def post_backward(*given: Any) -> None:
            complete.append(getattr(reduce._filling, "_future", None) is None or reduce._filling._future.done())
            reduce_by_fsdp2(*given)

        return post_backward

    for reduce in step.sharding._watchable:
        reduce._fsdp2_post_backward = watch(reduce, reduce._fsdp2_post_backward)

    def slow_hop(axis: MeshAxis, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        time.sleep(0.02 if axis.name == "cross" else 0.0)
        return all_to_all(axis, x, of=of)

    all_to_all = MeshAxis.all_to_all
    with mock.patch.object(MeshAxis, "all_to_all", slow_hop):
        step.sharding.begin_micro_batch(last=True)
        losses = [step._objective.loss(step.model, batch) for batch in case.batches(0, dims)]
        sum(losses).backward()
    gradients = [p.grad._local_tensor.tolist() for p in step.model.parameters()]
    step.optimizer.zero_grad()
    between = []
    with mock.patch.object(type(step.sharding.units[0]), "add_to_gradients") as add:
        begin = step.sharding.begin_micro_batch
        step.sharding.begin_micro_batch = lambda *, last: (
            between.append(any(p.grad is not None for p in step.model.parameters())),
            begin(last=last),
        )
        step(case.batches(1, dims), learning_rate=1e-3, weight_decay=0.0)
    return {"gradients": gradients, "complete": complete, "added": add.call_count, "between": between}


def test_gradients_are_filled_in_place_and_a_second_sum_waits_for_the_first():
    case = Case(nodes=2, micro_batches=2, global_batch=8, model=LLAMA_STYLE, zero=ALL, precision=BF16)
    plain = dataclasses.replace(case, zero=dataclasses.replace(ALL, **OFF))
    found, expected = (ranks(2).run(gradients_of_two_forwards, each)[0] for each in (case, plain))
    assert found["gradients"] == expected["gradients"]
    assert len(found["complete"]) >= 6
    assert all(found["complete"])
    assert found["added"] == 0
    assert found["between"] == expected["between"] == [False, False]


# ---- the order of collectives -------------------------------------------------------------------------------------


def train_with_delays(case: Case) -> dict[str, Any]:
    """Train while each rank delays every hop at random; return the results with the calls of collectives by axis."""
    called: dict[str, list[str]] = defaultdict(list)
    clock = random.Random(torch.distributed.get_rank())

    def delayed(original: Any) -> Any:
        def call(axis: MeshAxis, x: torch.Tensor, **how: Any) -> torch.Tensor:
            if axis.name in ("cross", "local"):
                called[axis.name].append(f"{original.__name__} {x.nbytes}")
                time.sleep(clock.random() * 0.005)
            return original(axis, x, **how)

        return call

    hops = {name: delayed(getattr(MeshAxis, name)) for name in ("all_gather", "all_to_all")}
    with mock.patch.multiple(MeshAxis, **hops):
        return {**train_on_ranks(case), "called": called}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [ALL, LOSSLESS], ids=["zeropp", "lossless"])
def test_random_delays_change_neither_collective_order_nor_results(zero):
    case = Case(nodes=2, micro_batches=2, steps=3, model=LLAMA_STYLE, zero=zero, precision=BF16)
    expected = ranks(4).run(train_on_ranks, case)[0]
    results = ranks(4).run(train_with_delays, case)
    assert [r["loss"] for r in results] == [expected["loss"]] * 4
    # All ranks must call the same collectives of the same sizes in the same order. With lossless deltas, only the
    # number of calls is compared, because the sizes depend on the weights
    called = [{k: calls if zero is ALL else len(calls) for k, calls in r["called"].items()} for r in results]
    assert called == called[:1] * 4


def order_of_cross_hops(case: Case) -> tuple[list[int], int]:
    """Train two steps, and watch the cross hops of the second one.

    Returns:
        (elements of each all-gather on the cross axis, number of cross hops that had been submitted before the forward
        of the first layer).
    """
    step, dims = build_step(case)
    cross, started = dims.cross, []
    step(case.batches(0, dims), learning_rate=1e-3, weight_decay=0.0)
    with (
        mock.patch.object(cross, "all_gather", side_effect=cross.all_gather) as gather,
        mock.patch.object(cross.queue, "submit", side_effect=cross.queue.submit) as submit,
    ):
        step.model.layers[0].register_forward_pre_hook(lambda *_: started.append(submit.call_count))
        step(case.batches(0, dims), learning_rate=1e-3, weight_decay=0.0)
    return [call.args[0].numel() for call in gather.call_args_list], started[0]


def test_first_use_after_a_step_starts_all_cross_gathers_in_order():
    for (embedding, *layers, output), started in ranks(4).run(
        order_of_cross_hops, Case(nodes=2, model=LLAMA_STYLE, zero=ALL)
    ):
        assert layers == [layers[0]] * 2  # the two layers have messages of equal size, and each unit crosses once
        assert layers[0] not in (embedding, output)
        assert started == 4  # all four units have started, although only the embedding has been used so far


def test_cuda_use_starts_two_cross_hops_and_a_step_cancels_pending_ones():
    """`forget_stale` must cancel hops that were requested before a step and have not started.

    Such a hop would send the weights from before the step.
    """
    gathers = [mock.Mock(**{"start_early.return_value": True}) for _ in range(5)]
    schedule = GatherSchedule(overlap=True, queue=mock.Mock(blocks_host=False))
    for gather in gathers:
        schedule.add(gather)
    schedule.used(gathers[0], crossed=True)
    schedule.forget_stale()
    schedule.used(gathers[1], crossed=False)
    assert [gather.start_early.called for gather in gathers] == [False, True, True, False, False]


# ---- a model that leaves out layers -------------------------------------------------------------------------------


class Skipping(nn.Module):
    """A model of three linear layers, whose middle layer is left out while `skip` is True."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != 1 or not self.skip:
                x = torch.tanh(layer(x))
        return x.sum()


def build_skipping(flags: dict[str, Any], *, units: bool = True) -> tuple[Skipping, Sharding, ParallelDims]:
    dims = ParallelDims(
        plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2), zero_stage=3), device_type="cpu"
    )
    model = Skipping()
    precision = PrecisionConfig(bf16=flags.get("zero_weight_delta") == "lossless")
    groups = [[layer] for layer in model.layers] if units else []
    zero = ZeroConfig(zeropp=True, **flags)
    wire = plan_comm(zero, dims.layout, precision.param_dtype)
    return model, shard_model(model, groups, dims, zero=zero, precision=precision, wire=wire), dims


def train_while_skipping(flags: dict[str, Any], units: bool = True) -> list[float]:
    """Train the model `Skipping`, whose middle layer is left out in some steps, and return all losses.

    Between steps, evaluate in inference mode, write to weights, and save and load the secondary partition.

    Args:
        flags: fields of ZeroConfig.
        units: True to make each layer a sharding unit; False for one unit of the whole model.
    """
    model, sharding, dims = build_skipping(flags, units=units)
    losses = []
    for step in range(7):
        model.skip = step in (2, 3, 5)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * step + dims.data_rank))
        x = x.bfloat16() if flags.get("zero_weight_delta") == "lossless" else x
        for last in (False, True):
            sharding.begin_micro_batch(last=last)
            loss = model(x)
            loss.backward()
            losses.append(loss.item())
        with sharding.weight_update(), torch.no_grad():
            for parameter in (p for p in model.parameters() if p.grad is not None):
                # a step of SGD on the shards, because an optimizer of DTensors takes much more time
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.05)
        model.zero_grad()
        if step == 3:
            with torch.inference_mode():
                losses.append(model(x).item())
        if step == 4:
            with torch.no_grad():
                model.layers[0].weight.mul_(0.5)
        if step == 5:
            sharding.reshard()
            SecondaryPartition(sharding).accept(SecondaryPartition(sharding).tensors(), 0)
    return losses


@pytest.mark.parametrize(
    ("delta", "units"),
    [slow("none", True), slow("none", False), ("lossless", True)],
)
def test_sometimes_skipped_layer_never_uses_stale_weights(delta, units):
    on, off = (ranks(4).run(train_while_skipping, {**flags, "zero_weight_delta": delta}, units) for flags in (ON, OFF))
    assert on == off
