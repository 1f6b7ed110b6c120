"""Test the communication plan that follows from the ZeRO++ and precision flags, and rejected combinations."""

from typing import Any

import pytest
import torch
from helpers.refusals import not_refused

from megazpp.kernels.formats import BlockFormat
from megazpp.run.checks import wire_backends
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout
from megazpp.zero.config import CommPlan, GatherPlan, PrecisionConfig, ReducePlan, ZeroConfig
from megazpp.zero.plan import plan_comm


def layout_of(nodes: int = 2, ranks: int = 4, tp: int = 1, replicas: int = 1) -> Layout:
    return plan_layout(Cluster(num_nodes=nodes, ranks_per_node=ranks), tp=tp, replicas=replicas)


INT8, INT4, WEIGHTS = BlockFormat(8, 128), BlockFormat(4, 128), BlockFormat(8, 256)
CLIPPED = BlockFormat(4, 128, clip=True)


def plan(layout: Layout | None = None, dtype: torch.dtype = torch.bfloat16, **flags: Any) -> CommPlan:
    return plan_comm(ZeroConfig(**flags), layout or layout_of(), dtype)


def test_each_zeropp_switch_can_be_set_or_unset_alone():
    quantized = ReducePlan(INT8, CLIPPED)
    for flags, gather, reduce in [
        ({}, None, None),
        ({"zeropp": True}, GatherPlan(WEIGHTS, True), quantized),
        ({"zeropp": True, "zero_weight_delta": "none"}, GatherPlan(WEIGHTS, True), quantized),
        ({"zeropp": True, "zero_quantized_weights": False}, GatherPlan(None, True), quantized),
        ({"zeropp": True, "zero_weight_bits": 16}, GatherPlan(None, True), quantized),
        ({"zeropp": True, "zero_weight_bits": 8}, GatherPlan(WEIGHTS, True), quantized),
        ({"zeropp": True, "zero_weight_delta": "lossless"}, GatherPlan(None, True, True), quantized),
        ({"zero_hpz_partition_size": "auto", "zero_weight_delta": "lossless"}, GatherPlan(None, True, True), None),
        ({"zeropp": True, "zero_hpz_partition_size": "1"}, GatherPlan(WEIGHTS, False), quantized),
        ({"zeropp": True, "zero_quantized_gradients": False}, GatherPlan(WEIGHTS, True), None),
        ({"zero_quantized_weights": True}, GatherPlan(WEIGHTS, False), None),
        ({"zero_hpz_partition_size": "4"}, GatherPlan(None, True), None),
        ({"zero_quantized_gradients": True, "zero_error_feedback": False}, None, ReducePlan(INT8, INT4)),
        ({"zero_quantized_gradients": True, "zero_gradient_bits": (4, 4)}, None, ReducePlan(INT4, CLIPPED)),
        ({"zero_quantized_gradients": True, "zero_gradient_bits": (16, 8)}, None, ReducePlan(None, INT8)),
    ]:
        found = plan(**flags)
        assert (found.gather, found.reduce, found.notices) == (gather, reduce, ()), flags


def test_weight_delta_auto_takes_the_choice_unless_a_flag_sets_the_format():
    """Check in which cases the argument `lossless` of `plan_comm` decides the format of weights.

    It is the run's choice for --zero-weight-delta auto. Without --zeropp, or if a flag sets the format, the choice must
    have no effect.
    """
    cases: list[Any] = [
        ({"zeropp": True}, True),
        ({"zeropp": True, "zero_hpz_partition_size": "4"}, True),
        ({}, False),
        ({"zero_hpz_partition_size": "auto"}, False),
        ({"zeropp": True, "zero_hpz_partition_size": "1"}, False),
        ({"zeropp": True, "zero_quantized_weights": True}, False),
        ({"zeropp": True, "zero_weight_bits": 8}, False),
        ({"zeropp": True, "zero_weight_delta": "none"}, False),
    ]
    for flags, chooses in cases:
        config = ZeroConfig(**flags)
        found = [plan_comm(config, layout_of(), torch.bfloat16, lossless=lossless).gather for lossless in (False, True)]
        assert config.chooses_weight_delta == chooses, flags
        if chooses:
            assert found == [GatherPlan(WEIGHTS, True), GatherPlan(None, True, True)], flags
        else:
            assert found[0] == found[1], flags


def test_impossible_zero_flags_are_rejected_by_name():
    lossless: dict[str, Any] = {"zeropp": True, "zero_weight_delta": "lossless"}
    wrong: list[Any] = [
        ({"zeropp": True, "zero_stage": 2}, "--zeropp requires --zero-stage 3, the default, not --zero-stage 2"),
        (
            {"zeropp": True, "use_distributed_optimizer": True},
            "requires --zero-stage 3, the default, not --use-distributed-optimizer, which selects --zero-stage 1",
        ),
        ({"zero_quantized_weights": True, "use_distributed_optimizer": True}, "--zero-quantized-weights requires"),
        ({"zero_hpz_partition_size": "3"}, "--zero-hpz-partition-size 3 is not valid; expected auto, 1"),
        ({"zero_hpz_partition_size": "all"}, "--zero-hpz-partition-size all"),
        ({"zeropp": True, "zero_gradient_bits": (8, 5)}, "--zero-gradient-bits 8 5"),
        ({"zero_gradient_bits": (3, 4)}, "--zero-gradient-bits 3 4 is not one of 4, 8, 16"),
        ({"zero_weight_bits": 4}, "--zero-weight-bits 4 is not one of 8, 16"),
        ({**lossless, "zero_hpz_partition_size": "1"}, "requires --zero-hpz-partition-size auto, not 1"),
        ({"zero_quantized_weights": True, "zero_weight_delta": "lossless"}, "auto, not 1"),
        ({**lossless, "dtype": torch.float32}, "--zero-weight-delta lossless requires --bf16 or --fp16"),
    ]
    assert not_refused(wrong, lambda flags: plan(**flags)) == []
    with pytest.raises(ValueError, match="no implementation for xpu"):
        wire_backends(plan(zeropp=True), "xpu")


UNUSED: dict[str, tuple[Any, str]] = {
    "zero_weight_bits": (16, "--zero-weight-bits 16"),
    "zero_gradient_bits": ((4, 4), "--zero-gradient-bits 4 4"),
    "zero_error_feedback_beta": (0.5, "--zero-error-feedback-beta 0.5"),
    "zero_error_feedback_reset": (9, "--zero-error-feedback-reset 9"),
    "zero_accumulate_in_bf16": (True, "--zero-accumulate-in-bf16"),
    "zero_cross_every_microbatch": (True, "--zero-cross-every-microbatch"),
}


def test_flags_without_effect_give_a_notice_unless_zeropp_is_set():
    for stage in range(4):
        (notice,) = plan(zero_stage=stage, **{name: value for name, (value, _) in UNUSED.items()}).notices
        assert notice.endswith(", ".join(words for _, words in UNUSED.values())), stage
    for name, (value, _) in UNUSED.items():
        assert plan(zeropp=True, **{name: value}).notices == (), name


def test_flags_that_one_switch_alone_ignores_give_a_notice():
    for flags, name in [
        ({"zero_quantized_weights": True, "zero_accumulate_in_bf16": True}, "--zero-accumulate-in-bf16"),
        ({"zero_quantized_weights": True, "zero_weight_bits": 16}, "--zero-quantized-weights"),
        ({"zero_hpz_partition_size": "auto", "zero_weight_bits": 16}, "--zero-weight-bits 16"),
        ({"zeropp": True, "zero_weight_delta": "lossless", "zero_weight_bits": 16}, "--zero-weight-bits 16"),
        ({"zero_stage": 2, "overlap_param_gather": True}, "--overlap-param-gather"),
    ]:
        (notice,) = plan(**flags).notices
        assert notice.split(": ")[-1].split(", ")[-1].startswith(name), notice


def test_switched_off_feature_without_effect_gives_no_notice():
    off = {"zero_error_feedback": False, "overlap_param_gather": False, "overlap_grad_reduce": False}
    assert plan(**off).notices == ()
    (notice,) = plan(layout_of(nodes=1), zeropp=True, **off).notices
    assert "no traffic crosses nodes" in notice


def test_layout_without_inter_node_traffic_falls_back_with_a_notice():
    for where in ({"nodes": 1}, {"replicas": 2}):
        found = plan(layout_of(**where), zeropp=True)
        assert (found.gather, found.reduce) == (None, None), where
        assert "no traffic crosses nodes, so ZeRO-3's collectives are used" in found.notices[0], where
        bits = plan(layout_of(**where), zeropp=True, zero_gradient_bits=(4, 4))
        assert "--zero-gradient-bits 4 4" in bits.notices[1], where
    alone = plan(layout_of(tp=4), zeropp=True)
    assert alone.gather is not None
    assert "full copy" in alone.notices[0]
    assert "--" not in alone.notices[0]  # programs that call the library pass no flags
    copies = plan(layout_of(replicas=2), overlap_grad_reduce=True)
    assert not copies.overlap_reduce, "sums over copies are not overlapped"
    assert copies.notices[0].endswith("--overlap-grad-reduce")


def test_backend_table_lists_block_quantization_if_used():
    for flags, quantizes in [
        ({}, False),
        ({"zeropp": True, "zero_weight_delta": "lossless", "zero_quantized_gradients": False}, True),
        ({"zeropp": True}, True),
        ({"zero_hpz_partition_size": "auto"}, False),
        ({"zeropp": True, "zero_weight_bits": 16, "zero_gradient_bits": (16, 16)}, False),
        ({"zero_quantized_gradients": True, "zero_gradient_bits": (16, 4)}, True),
    ]:
        assert [row[0] for row in wire_backends(plan(**flags), "cpu")] == ["block quantization"] * quantizes, flags


def test_zero_stage_follows_flags_and_is_at_most_two_on_one_rank():
    assert [ZeroConfig(zero_stage=stage).stage_over(1) for stage in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert [ZeroConfig(zero_stage=stage).stage_over(2) for stage in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert (ZeroConfig().stage, ZeroConfig(use_distributed_optimizer=True).stage) == (3, 1)
    assert ZeroConfig(zero_stage=2, use_distributed_optimizer=True).stage == 2


def test_precision_flags_choose_compute_and_reduction_dtypes():
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for flags, compute, reduce in [
        ({}, fp32, fp32),
        ({"bf16": True}, bf16, fp32),
        ({"bf16": True, "grad_reduce_in_bf16": True}, bf16, bf16),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": True}, bf16, fp32),
        ({"fp16": True}, fp16, fp16),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, fp16, fp32),
    ]:
        config = PrecisionConfig(**flags)
        assert (config.param_dtype, config.reduce_dtype) == (compute, reduce), flags


def test_contradictory_precision_flags_are_rejected_by_name():
    wrong: list[Any] = [
        (["fp16", "bf16"], "--fp16 and --bf16"),
        (["grad_reduce_in_bf16"], "--grad-reduce-in-bf16 requires --bf16"),
        (["bf16", "grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"], "--accumulate-allreduce-grads-in-fp32"),
    ]
    assert not_refused(wrong, lambda names: PrecisionConfig(**dict.fromkeys(names, True))) == []
