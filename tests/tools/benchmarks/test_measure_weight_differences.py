"""Errors of weights that were sent as differences: in the order of the formats, and they do not add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.program import ROOT
from helpers.ranks import ranks
from measure_weight_differences import ALONE, measure, rows, table

from megazpp.arguments import parse_run_config
from megazpp.checks import check_run_config
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims

# fmt: off
FLAGS = [
    "@configs/gpt_tiny.args", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2",
    "--seq-length", "64", "--max-position-embeddings", "64", "--global-batch-size", "4", "--micro-batch-size", "4",
    "--vocab-size", "512", "--num-workers", "0", "--train-iters", "40", "--lr", "1e-3",
]
# fmt: on


def train_and_measure(cache: str) -> dict[str, list[float]]:
    parsed = parse_run_config([*FLAGS, "--data-cache-path", cache], ROOT)
    plan = check_run_config(parsed.config, ALONE, device_type="cpu")
    dims = ParallelDims(plan_dims(ParallelConfig(), ALONE, zero_stage=0), device_type="cpu")
    return measure(parsed, plan, dims, rows(128))


@pytest.mark.slow
def test_errors_are_in_the_order_of_the_formats_and_do_not_add_up(tmp_path: Path):
    errors = ranks(1).run(train_and_measure, str(tmp_path))[0]
    assert {len(found) for found in errors.values()} == {40}
    last = {name: found[-1] for name, found in errors.items()}
    assert last["bf16 weights"] == pytest.approx(0.00166, rel=0.05)
    assert last["bf16 weights"] <= last["int4 differences, R in bf16"] < 1.5 * last["bf16 weights"]
    assert last["int4 differences, R in bf16"] < 0.5 * last["int8 weights, blocks of 256"]


def test_the_table_leaves_out_the_first_steps_of_the_mean():
    text = table({"int4 differences, R in bf16": [1.0] * 20 + [0.001, 0.003, 0.002]})
    assert text.splitlines() == [
        "| what is sent | mean after step 20 | worst | last |",
        "|---|---|---|---|",
        "| int4 differences, R in bf16 | 0.00200 | 1.00000 | 0.00200 |",
    ]
