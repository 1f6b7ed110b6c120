"""Overlap changes when hops run and nothing else: same bits, bytes and order on every rank, whatever the delays."""

import dataclasses
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.torch_versions import needs_unused_parameters
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, build_step, train_on_ranks
from torch import nn

from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.schedule import GatherSchedule
from megazpp.zero.sharding import shard_model

ALL = ZeroConfig(zeropp=True)
LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
BF16 = PrecisionConfig(bf16=True)
OFF = {"overlap_param_gather": False, "overlap_grad_reduce": False}
ON = {"overlap_param_gather": True, "overlap_grad_reduce": True}


RECOMPUTE = GPTConfig(**{**GPT2_STYLE.__dict__, "recompute_granularity": "full"})
OVERLAPS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (4, {"zero": ZeroConfig(), "model": LLAMA_STYLE}),
    "qwZ": (4, {"zero": ZeroConfig(zero_quantized_weights=True), "micro_batches": 4}),
    "hpZ": (4, {"zero": ZeroConfig(zero_hpz_partition_size="auto"), "model": LLAMA_STYLE}),
    "qgZ": (4, {"zero": ZeroConfig(zero_quantized_gradients=True), "micro_batches": 4, "model": LLAMA_STYLE}),
    "zeropp": (4, {"micro_batches": 4, "model": LLAMA_STYLE}),
    "classic": (4, {"zero": ZeroConfig(zeropp=True, zero_cross_every_microbatch=True), "micro_batches": 4}),
    "lossless": (4, {"zero": LOSSLESS, "precision": BF16, "micro_batches": 2, "model": LLAMA_STYLE}),
    "one rank per node": (2, {}),
    "tp": (4, {"tp": 2, "sequence_parallel": True}),
    "recompute": (4, {"model": RECOMPUTE, "micro_batches": 2}),
    "bf16 reduce": (4, {"precision": PrecisionConfig(bf16=True, grad_reduce_in_bf16=True), "micro_batches": 2}),
    "3 nodes": (6, {"nodes": 3, "global_batch": 12}),
}


@pytest.mark.parametrize("setting", chosen(OVERLAPS, "ZeRO-3", "zeropp", "lossless", "tp"))
def test_overlap_changes_neither_bits_nor_bytes(setting):
    world, given = setting
    given = {"zero": ALL, "nodes": 2, "steps": 3, **given}
    overlapped, plain = (
        ranks(world).run(train_on_ranks, Case(**{**given, "zero": dataclasses.replace(given["zero"], **flags)}))[0]
        for flags in (ON, OFF)
    )
    assert overlapped == plain  # losses, norms, bytes on every wire


# ---- the order of collectives -------------------------------------------------------------------------------------


def train_with_delays(case: Case) -> dict[str, Any]:
    """Every collective of the two hops starts late by a time of its own on each rank; the order of calls is kept."""
    called: dict[str, list[str]] = {}
    clock = random.Random(torch.distributed.get_rank())

    def delayed(original: Any) -> Any:
        def call(axis: MeshAxis, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if axis.name in ("cross", "local"):
                called.setdefault(axis.name, []).append(f"{original.__name__} {x.nbytes}")
                time.sleep(clock.random() * 0.005)
            return original(axis, x, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_to_all"):
            patch.setattr(MeshAxis, name, delayed(getattr(MeshAxis, name)))
        return {**train_on_ranks(case), "called": called}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [ALL, LOSSLESS], ids=["zeropp", "lossless"])
def test_random_delays_on_every_rank_change_neither_the_order_of_collectives_nor_the_result(zero):
    case = Case(nodes=2, tp=2, micro_batches=2, steps=3, model=LLAMA_STYLE, zero=zero, precision=BF16)
    expected = ranks(8).run(train_on_ranks, case)[0]
    results = ranks(8).run(train_with_delays, case)
    assert [r["loss"] for r in results] == [expected["loss"]] * 8
    # ranks that share a tensor-parallel index have messages of one size; so do all
    # here, as tp splits evenly, but for differences, whose size follows from the weights
    called = [{k: calls if zero is ALL else len(calls) for k, calls in r["called"].items()} for r in results]
    assert called == called[:1] * 8


def order_of_cross_hops(case: Case) -> tuple[list[int], int, int]:
    """Sizes of the cross gathers of the second step; how many had started when the first layer's forward began."""
    step, dims = build_step(case)
    cross, gather, submit = dims.cross, dims.cross.all_gather, dims.cross.queue.submit
    sizes, submitted, started = [], [], []
    step(case.batches(0, dims), learning_rate=1e-3, weight_decay=0.0)
    cross.all_gather = lambda x, **how: (sizes.append(x.numel()), gather(x, **how))[1]
    cross.queue.submit = lambda task, **how: (submitted.append(task), submit(task, **how))[1]
    step.model.layers[0].register_forward_pre_hook(lambda *_: started.append(len(submitted)))
    step(case.batches(0, dims), learning_rate=1e-3, weight_decay=0.0)
    return sizes, started[0], len(step.sharding._gathers)


def test_after_a_step_all_cross_gathers_start_with_the_first_use_in_forward_order():
    case = Case(nodes=2, model=LLAMA_STYLE, zero=ALL)
    for sizes, started, units in ranks(4).run(order_of_cross_hops, case):
        assert len(sizes) == units == 4  # embedding, two layers, output: each crosses once
        assert sizes[1] == sizes[2]  # the layers
        assert sizes[0] != sizes[1]
        assert started == units  # although only the embedding has been used yet


def test_a_step_forgets_the_cross_hops_that_have_not_started():
    """On CUDA each use starts two; those of the others would send weights of before the step."""

    class Gather:
        def start_early(self, since: Any) -> bool:
            started.append(self)
            return True

    started: list[Gather] = []
    gathers = [Gather() for _ in range(5)]
    schedule = GatherSchedule(overlap=True, queue=SimpleNamespace(blocks_host=False, moment=lambda: None))
    for gather in gathers:
        schedule.add(gather)
    schedule.used(gathers[0], crossed=True)
    schedule.forget_stale()
    schedule.used(gathers[1], crossed=False)
    assert started == gathers[1:3]


# ---- other people's models ----------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Three layers; the middle one is skipped when told so."""

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


def make(nodes: int, flags: dict[str, Any], *, units: bool = True) -> tuple[Skipping, Any, ParallelDims]:
    cluster = Cluster(num_nodes=nodes, ranks_per_node=torch.distributed.get_world_size() // nodes)
    dims = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")
    model = Skipping()
    groups = [[layer] for layer in model.layers] if units else []
    precision = PrecisionConfig(bf16=flags.get("zero_weight_delta") == "lossless")
    sharding = shard_model(model, groups, dims, zero=ZeroConfig(zeropp=True, **flags), precision=precision)
    return model, sharding, dims


def train_while_skipping(flags: dict[str, Any], units: bool) -> list[float]:
    model, sharding, dims = make(2, flags, units=units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(7):
        model.skip = step in (2, 3, 5)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10 * step + dims.data_rank))
        x = x.to(torch.bfloat16 if flags.get("zero_weight_delta") == "lossless" else torch.float32)
        sharding.begin_micro_batch(last=True)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("delta", "units"),
    [("none", True), pytest.param("none", False, marks=needs_unused_parameters), ("lossless", True)],
)
def test_a_layer_that_is_skipped_now_and_then_is_never_used_stale(delta, units):
    on, off = ({**flags, "zero_weight_delta": delta} for flags in (ON, OFF))
    assert ranks(4).run(train_while_skipping, on, units) == ranks(4).run(train_while_skipping, off, units)


def gradient_hook(flags: dict[str, bool]) -> str:
    model, sharding, dims = make(2, flags)
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    sharding.begin_micro_batch(last=True)
    try:
        model(torch.ones(2, 64)).backward()
    except RuntimeError as error:
        for axis in (dims.local, dims.cross):  # what the other units have in flight
            axis.queue.submit(lambda: None).wait()
        return str(error)
    return ""


def test_a_hook_that_wants_reduced_gradients_early_is_refused():
    assert all(
        "layers.1.weight" in said and "--no-overlap-grad-reduce" in said for said in ranks(4).run(gradient_hook, ON)
    )
    assert ranks(4).run(gradient_hook, OFF) == [""] * 4


def evaluate_in_inference_mode() -> list[float]:
    model, sharding, _ = make(2, ON)
    values = [model(torch.ones(2, 64)).item()]  # FSDP2's own buffers have to be made outside
    sharding.weights_changed()
    with torch.inference_mode():
        values.append(model(torch.ones(2, 64)).item())
    model(torch.ones(2, 64)).backward()
    sharding.weights_changed()
    return [*values, model(torch.ones(2, 64)).item()]


def test_an_evaluation_in_inference_mode_gathers_anew_and_does_not_spoil_training():
    for values in ranks(4).run(evaluate_in_inference_mode):
        assert values[0] == values[1] == values[2] != 0
