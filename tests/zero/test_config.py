"""What the flags of ZeRO++ and precision come to, and which combinations are refused."""

from __future__ import annotations

import pytest
import torch

from kernels.formats import BlockFormat
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout, plan_layout
from megazpp.zero.config import GatherPlan, PrecisionConfig, ReducePlan, ZeroConfig, plan_wire, wire_backends


def layout(nodes: int = 2, ranks: int = 4, tp: int = 1, replicas: int = 1) -> Layout:
    return plan_layout(Cluster(num_nodes=nodes, ranks_per_node=ranks), tp=tp, replicas=replicas)


INT8, INT4, WEIGHTS = BlockFormat(8, 128), BlockFormat(4, 128), BlockFormat(8, 256)
CLIPPED = BlockFormat(4, 128, clip=True)


@pytest.mark.parametrize(
    ("flags", "gather", "reduce"),
    [
        ({}, None, None),
        ({"zeropp": True}, GatherPlan(WEIGHTS, True), ReducePlan(INT8, CLIPPED)),
        ({"zeropp": True, "zero_quantized_weights": False}, GatherPlan(None, True), ReducePlan(INT8, CLIPPED)),
        ({"zeropp": True, "zero_weight_bits": 16}, GatherPlan(None, True), ReducePlan(INT8, CLIPPED)),
        ({"zeropp": True, "zero_weight_bits": (8,)}, GatherPlan(WEIGHTS, True), ReducePlan(INT8, CLIPPED)),
        ({"zeropp": True, "zero_weight_bits": (16, 16)}, GatherPlan(None, True), ReducePlan(INT8, CLIPPED)),
        ({"zeropp": True, "zero_weight_delta": "lossless"}, GatherPlan(None, True, True), ReducePlan(INT8, CLIPPED)),
        ({"zero_hpz_partition_size": "auto", "zero_weight_delta": "lossless"}, GatherPlan(None, True, True), None),
        ({"zeropp": True, "zero_hpz_partition_size": "1"}, GatherPlan(WEIGHTS, False), ReducePlan(INT8, CLIPPED)),
        ({"zeropp": True, "zero_quantized_gradients": False}, GatherPlan(WEIGHTS, True), None),
        ({"zero_quantized_weights": True}, GatherPlan(WEIGHTS, False), None),
        ({"zero_hpz_partition_size": "4"}, GatherPlan(None, True), None),
        ({"zero_quantized_gradients": True, "zero_error_feedback": False}, None, ReducePlan(INT8, INT4)),
        ({"zero_quantized_gradients": True, "zero_gradient_bits": (4, 4)}, None, ReducePlan(INT4, CLIPPED)),
        ({"zero_quantized_gradients": True, "zero_gradient_bits": (16, 8)}, None, ReducePlan(None, INT8)),
    ],
)
def test_each_switch_can_be_set_or_unset_alone(flags, gather, reduce):
    plan = plan_wire(ZeroConfig(**flags), layout(), torch.bfloat16)
    assert (plan.gather, plan.reduce) == (gather, reduce)
    assert plan.notices == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"zeropp": True, "zero_stage": 2}, "--zeropp needs --zero-stage 3, not 2"),
        ({"zero_quantized_weights": True, "use_distributed_optimizer": True}, "--zero-quantized-weights needs"),
        ({"zero_hpz_partition_size": "3"}, "--zero-hpz-partition-size 3 is neither auto, 1 .* nor 4"),
        ({"zero_hpz_partition_size": "all"}, "--zero-hpz-partition-size all"),
        ({"zeropp": True, "zero_gradient_bits": (8, 5)}, "--zero-gradient-bits 8 5"),
        ({"zero_gradient_bits": (3, 4)}, "--zero-gradient-bits 3 4 is not two of 4, 8 and 16"),
        ({"zero_weight_bits": 4}, "--zero-weight-bits 4 is neither 8 nor 16"),
        ({"zeropp": True, "zero_weight_bits": (16, 8)}, "--zero-weight-bits 16 8 is neither"),
        (
            {"zeropp": True, "zero_weight_bits": (16, 4)},
            "--zero-weight-bits 16 4 is gone: --zero-weight-delta",
        ),
        ({"zeropp": True, "zero_weight_bits": (8, 4)}, "--zero-weight-bits 8 4 is gone: --zero-weight-delta"),
        (
            {"zeropp": True, "zero_weight_delta": "lossless", "zero_hpz_partition_size": "1"},
            "--zero-weight-delta lossless .* needs --zero-hpz-partition-size auto, not 1",
        ),
        ({"zero_quantized_weights": True, "zero_weight_delta": "lossless"}, "lossless .* auto, not 1"),
        ({"zero_weight_keyframe_interval": 0}, "--zero-weight-keyframe-interval 0 is not positive"),
    ],
)
def test_impossible_combinations_name_the_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        plan_wire(ZeroConfig(**flags), layout(), torch.bfloat16)


def test_lossless_differences_are_of_16_bits():
    with pytest.raises(ValueError, match="--zero-weight-delta lossless needs --bf16 or --fp16"):
        plan_wire(ZeroConfig(zeropp=True, zero_weight_delta="lossless"), layout(), torch.float32)


UNUSED = {
    "zero_weight_bits": (16, "--zero-weight-bits 16"),
    "zero_weight_keyframe_interval": (9, "--zero-weight-keyframe-interval 9"),
    "zero_gradient_bits": ((4, 4), "--zero-gradient-bits 4 4"),
    "zero_error_feedback": (False, "--no-zero-error-feedback"),
    "zero_error_feedback_beta": (0.5, "--zero-error-feedback-beta 0.5"),
    "zero_error_feedback_reset": (9, "--zero-error-feedback-reset 9"),
    "zero_accumulate_in_bf16": (True, "--zero-accumulate-in-bf16"),
    "zero_cross_every_microbatch": (True, "--zero-cross-every-microbatch"),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_flags_that_change_nothing_without_zeropp_are_noted(stage):
    flags = {name: value for name, (value, _) in UNUSED.items()}
    (notice,) = plan_wire(ZeroConfig(zero_stage=stage, **flags), layout(), torch.bfloat16).notices
    assert notice.endswith(", ".join(words for _, words in UNUSED.values()))


@pytest.mark.parametrize("name", UNUSED)
def test_with_zeropp_each_of_them_has_its_effect(name):
    delta = {"zero_weight_delta": "lossless"} if name == "zero_weight_keyframe_interval" else {}
    flags = {"zeropp": True, **delta, name: UNUSED[name][0]}
    assert plan_wire(ZeroConfig(**flags), layout(), torch.bfloat16).notices == ()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"zero_quantized_weights": True, "zero_accumulate_in_bf16": True}, "--zero-accumulate-in-bf16"),
        ({"zero_quantized_weights": True, "zero_weight_bits": 16}, "--zero-quantized-weights"),
        ({"zeropp": True, "zero_weight_keyframe_interval": 9}, "--zero-weight-keyframe-interval 9"),
        ({"zero_hpz_partition_size": "auto", "zero_weight_bits": 16}, "--zero-weight-bits 16"),
        ({"zeropp": True, "zero_weight_delta": "lossless", "zero_weight_bits": 16}, "--zero-weight-bits 16"),
        ({"zeropp": True, "zero_gradient_bits": (8, 16), "zero_error_feedback": False}, "--no-zero-error-feedback"),
        ({"zero_stage": 2, "overlap_param_gather": True}, "--overlap-param-gather"),
    ],
)
def test_what_one_switch_alone_does_not_use_is_noted(flags, name):
    (notice,) = plan_wire(ZeroConfig(**flags), layout(), torch.bfloat16).notices
    assert notice.split(": ")[-1].split(", ")[-1].startswith(name)


def test_sums_over_copies_are_not_overlapped_and_the_flag_is_noted():
    plan = plan_wire(ZeroConfig(overlap_grad_reduce=True), layout(replicas=2), torch.bfloat16)
    assert not plan.overlap_reduce
    assert plan.notices[0].endswith("--overlap-grad-reduce")


def test_a_combination_that_cannot_pay_says_what_it_does_instead():
    one_node = plan_wire(ZeroConfig(zeropp=True), layout(nodes=1), torch.bfloat16)
    assert (one_node.gather, one_node.reduce) == (None, None)
    assert "no traffic crosses nodes here, so weights and gradients travel as in ZeRO-3" in one_node.notices[0]
    copy_per_node = plan_wire(ZeroConfig(zeropp=True), layout(replicas=2), torch.bfloat16)
    assert "as in ZeRO-3" in copy_per_node.notices[0]
    alone = plan_wire(ZeroConfig(zeropp=True), layout(tp=4), torch.bfloat16)
    assert alone.gather is not None
    assert "whole copy" in alone.notices[0]


def test_the_plan_says_what_travels():
    plan = plan_wire(ZeroConfig(zeropp=True, zero_weight_delta="lossless"), layout(), torch.bfloat16)
    assert plan.notices == ()
    assert plan.describe().startswith(
        "weights are gathered in two hops, not quantized inside nodes, lossless differences across, kept inside"
    )


@pytest.mark.parametrize(
    ("flags", "quantizes"),
    [
        ({}, False),
        ({"zeropp": True, "zero_weight_delta": "lossless", "zero_quantized_gradients": False}, True),
        ({"zeropp": True}, True),
        ({"zero_hpz_partition_size": "auto"}, False),
        ({"zeropp": True, "zero_weight_bits": 16, "zero_gradient_bits": (16, 16)}, False),
        ({"zero_quantized_gradients": True, "zero_gradient_bits": (16, 4)}, True),
    ],
)
def test_the_table_of_back_ends_names_block_quantization_where_something_is_quantized(flags, quantizes):
    rows = wire_backends(plan_wire(ZeroConfig(**flags), layout(), torch.bfloat16), "cpu")
    assert [piece for piece, _, _ in rows] == ["block quantization"] * quantizes


def test_a_device_that_cannot_quantize_is_refused():
    with pytest.raises(ValueError, match="no implementation for xpu"):
        wire_backends(plan_wire(ZeroConfig(zeropp=True), layout(), torch.bfloat16), "xpu")


# ---- precision -------------------------------------------------------------------------------------------------------

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("flags", "compute", "reduce"),
    [
        ({}, FP32, FP32),
        ({"bf16": True}, BF16, FP32),
        ({"bf16": True, "grad_reduce_in_bf16": True}, BF16, BF16),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": True}, BF16, FP32),
        ({"fp16": True}, FP16, FP16),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, FP16, FP32),
    ],
)
def test_the_flags_choose_compute_and_reduction_formats(
    flags: dict[str, bool], compute: torch.dtype, reduce: torch.dtype
):
    config = PrecisionConfig(**flags)
    assert (config.param_dtype, config.reduce_dtype) == (compute, reduce)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fp16": True, "bf16": True}, "--fp16 and --bf16"),
        ({"grad_reduce_in_bf16": True}, "--grad-reduce-in-bf16 needs --bf16"),
        (
            {"bf16": True, "grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": True},
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32",
        ),
    ],
)
def test_contradictions_name_the_flags(flags: dict[str, bool], message: str):
    with pytest.raises(ValueError, match=message):
        PrecisionConfig(**flags)
