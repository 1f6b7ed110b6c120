"""The table of back ends says what `build_optimizer` really builds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazpp.optim.backends import backend_table, optimizer_backends
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer


@pytest.mark.parametrize(
    ("kind", "implementation"), [("adam", "torch.optim.AdamW(fused=True)"), ("sgd", "torch.optim.SGD(foreach=True)")]
)
def test_the_row_names_the_class_and_the_path_that_is_built(kind: str, implementation: str):
    config = OptimizerConfig(optimizer=kind)
    row, *_ = optimizer_backends(config, "cpu")
    optimizer = build_optimizer(nn.Linear(2, 2).named_parameters(), config, torch.device("cpu"))
    path = next(name for name in ("fused", "foreach") if optimizer.defaults[name])
    assert row.implementation == f"torch.optim.{type(optimizer).__name__}({path}=True)" == implementation


def test_a_device_without_fused_kernels_says_so():
    row, *_ = optimizer_backends(OptimizerConfig(), "xpu")
    assert row == ("optimizer", "torch.optim.AdamW(foreach=True)", "torch has no fused kernel on xpu")


def test_apex_is_named_when_asked_for():
    row, *_ = optimizer_backends(OptimizerConfig(optimizer_backend="apex"), "cuda")
    assert row.implementation == "apex.optimizers.FusedAdam"


def test_the_table_is_aligned_and_takes_plain_tuples():
    lines = backend_table([("attention", "torch SDPA", "flash"), ("x", "y", "z")]).splitlines()
    assert lines == [
        "piece      implementation  why",
        "attention  torch SDPA      flash",
        "x          y               z",
    ]
