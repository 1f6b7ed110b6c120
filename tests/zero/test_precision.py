"""Which formats the precision flags select."""

import pytest
import torch

from megazpp.zero.config import PrecisionConfig

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
