"""The nearest run that a cluster has room for: shipped configs on shipped clusters, and what stays refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.arguments import RunConfig, parse_run_config
from megazpp.checks import check_run_config
from megazpp.planner.variants import for_planning, nearest_run
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
SQUARE = Cluster(num_nodes=2, ranks_per_node=2)


def config(*flags: str) -> RunConfig:
    return for_planning(parse_run_config(list(flags), ROOT).config, "--plan")


def tiny(*flags: str) -> RunConfig:
    return config("@configs/gpt_tiny.args", *flags)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_has_a_nearest_run_on_every_shipped_cluster(path: Path):
    cluster = read_cluster(path)
    for file in sorted((ROOT / "configs").glob("*.args")):
        asked = config(f"@configs/{file.name}")
        run, changes = nearest_run(asked, cluster, device_type="cpu")
        check_run_config(run, cluster, device_type="cpu")
        before, after = asked.batches.global_batch_size, run.batches.global_batch_size
        assert before is not None
        assert after is not None
        assert after <= max(1.5 * before, cluster.world_size)  # no rank has more than one sample
        assert (run == asked) == (changes == ())


def test_a_run_that_fits_stays_as_it_is():
    assert nearest_run(tiny(), SQUARE, device_type="cpu") == (tiny(), ())


def test_what_is_changed_is_said_flag_by_flag():
    run, changes = nearest_run(
        tiny("--tensor-model-parallel-size", "8", "--micro-batch-size", "3"), SQUARE, device_type="cpu"
    )
    assert (run.parallel.tensor_model_parallel_size, run.batches.global_batch_size) == (4, 15)
    assert changes == (
        "--tensor-model-parallel-size 8 does not fit this cluster: planned with 4",
        "--global-batch-size 16 does not fit this cluster: planned with 15",
    )


def test_too_few_samples_for_all_ranks_come_in_smaller_micro_batches():
    run, _ = nearest_run(tiny(), Cluster(num_nodes=3, ranks_per_node=8), device_type="cpu")
    assert (run.batches.micro_batch_size, run.batches.global_batch_size) == (1, 24)


def test_a_ramp_that_does_not_divide_is_left_out():
    flags = ["--train-iters", "none", "--train-samples", "999", "--rampup-batch-size", "8", "8", "99"]
    run, changes = nearest_run(
        tiny("--micro-batch-size", "2", *flags), Cluster(num_nodes=3, ranks_per_node=2), device_type="cpu"
    )
    assert run.batches.rampup_batch_size is None
    assert any(change.startswith("--rampup-batch-size") for change in changes)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-attention-heads", "3"], "--num-attention-heads 3"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size 0"),
        (["--lr", "none"], "required flags are missing: --lr"),
    ],
    ids=str,
)
def test_what_no_other_size_would_help_is_refused_as_a_run_is(flags: list[str], said: str):
    with pytest.raises(ValueError, match=said):
        nearest_run(tiny(*flags), SQUARE, device_type="cpu")
