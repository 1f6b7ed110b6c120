"""What follows from a run's flags and a cluster, and what does not fit together."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megazpp.base.arguments import RunConfig, parse_run_config
from megazpp.base.checks import RunPlan, check_run_config
from megazpp.topology.cluster import Cluster, Link, Links
from megazpp.zero.config import ZeroConfig, plan_wire

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)

SPIKES, PROFILE = "--loss-spike-sigma 5", "--profile --profile-step-start 1"


def parse(text: str) -> RunConfig:
    return parse_run_config(shlex.split(text), ROOT).config


def check(text: str, *, nodes: int = 1, ranks_per_node: int = 1) -> RunPlan:
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node)
    return check_run_config(parse(f"{SMALL} {text}"), cluster, device_type="cpu")


def test_all_missing_flags_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="required flags are missing") as caught:
        check_run_config(parse("--num-layers 2"), Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu")
    for name in ("hidden-size", "num-attention-heads", "max-position-embeddings", "seq-length", "micro-batch-size"):
        assert f"--{name}" in str(caught.value)
    for name in ("--lr", "--train-iters", "--data-path"):
        assert name in str(caught.value)
    assert "--num-layers" not in str(caught.value)


def test_a_run_that_fits_gives_its_layout_batches_and_schedule() -> None:
    plan = check(
        "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 32 --lr-warmup-iters 3 --hsdp",
        nodes=2,
        ranks_per_node=4,
    )
    assert (plan.layout.tp, plan.layout.shard, plan.layout.replicate, plan.layout.data) == (2, 2, 2, 4)
    assert plan.batches.num_micro_batches_at(0) == 4
    assert plan.schedule.learning_rate(3 * 32) == 1e-3
    assert plan.notices == ()


def test_a_plan_has_the_wire_formats_and_the_notices_of_cluster_and_layout() -> None:
    plan = check("--zeropp", nodes=2, ranks_per_node=2)
    assert plan.wire == plan_wire(ZeroConfig(zeropp=True), plan.layout)
    assert plan.wire.gather is not None
    cluster = Cluster(num_nodes=2, ranks_per_node=2, notices=("hosts: a, b",))
    spanning = check_run_config(parse(f"{SMALL} --tensor-model-parallel-size 4"), cluster, device_type="cpu")
    assert spanning.notices[0] == "hosts: a, b"
    assert spanning.notices[1].startswith("warning: --tensor-model-parallel-size 4 spans 2 nodes")


def test_links_can_be_filled_in_once_they_are_measured() -> None:
    plan, links = check(""), Links(network=Link(12.5, 3.0, "measured"))
    known = plan.with_links(links)
    assert known.layout.cluster.links == links
    assert known.layout.describe() == plan.layout.describe()
    assert known._replace(layout=plan.layout) == plan


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (
            "--tensor-model-parallel-size 2 --num-attention-heads 7 --kv-channels 8",
            2,
            "--num-attention-heads 7 is not divisible by --tensor-model-parallel-size 2",
        ),
        (
            "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
            4,
            "--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4",
        ),
        (
            "--tensor-model-parallel-size 2 --ffn-hidden-size 101",
            2,
            "--ffn-hidden-size 101 is not divisible by --tensor-model-parallel-size 2",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
            2,
            "--seq-length 63 is not divisible by --tensor-model-parallel-size 2, which --sequence-parallel needs",
        ),
        ("--rope-scaling-factor 32", 1, "--rope-scaling-factor 32.0 needs --use-rope-scaling"),
        ("--use-rope-scaling", 1, "--use-rope-scaling needs --position-embedding-type rope"),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 0.5",
            1,
            "--rope-scaling-factor 0.5 is not a number from 1 on",
        ),
        ("--position-embedding-type rope --rotary-base 0", 1, "--rotary-base 0.0 is not positive"),
        ("--window-size 62,0", 1, "--seq-length 64 is longer than the 63 tokens of --window-size 62,0"),
        ("--window-size 63", 1, "--window-size 63 is not LEFT,0"),
        ("--window-size 63,1", 1, "--window-size 63,1 is not LEFT,0"),
        ("--num-query-groups 2", 1, "--num-query-groups 2 needs --group-query-attention"),
        ("--seq-length 65", 1, "--seq-length 65 is longer than --max-position-embeddings 64"),
        ("--hidden-dropout 1.0", 1, "--hidden-dropout 1.0 is not in [0, 1)"),
        ("--recompute-method uniform", 1, "need --recompute-granularity full"),
        ("--tensor-model-parallel-size 3", 4, "--tensor-model-parallel-size 3 neither divides the 4 ranks"),
        ("--pipeline-model-parallel-size 2", 2, "--pipeline-model-parallel-size 2 is not supported"),
        ("--context-parallel-size 2", 2, "--context-parallel-size 2 is not supported"),
        ("--num-distributed-optimizer-instances 3", 4, "--num-distributed-optimizer-instances 3 does not divide"),
        ("--hsdp", 4, "--hsdp makes one copy of the model per node, and there is only one node"),
        ("--zero-stage 0 --use-distributed-optimizer", 2, "--use-distributed-optimizer"),
        ("--global-batch-size 6", 2, "--global-batch-size 6 is not divisible by --micro-batch-size 2"),
        ("--train-iters 0", 1, "--train-iters 0 is not positive"),
        ("--train-samples 80", 1, "--train-iters 10 and --train-samples 80: give only one"),
        ("--rampup-batch-size 2 2 8", 1, "--rampup-batch-size 2 2 8 needs --train-samples"),
        ("--lr-warmup-samples 5", 1, "--lr-warmup-samples 5 cannot be mixed with --train-iters 10"),
        ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10: the warm-up must be shorter"),
        ("--min-lr 1", 1, "--min-lr 1.0 is above --lr 0.001"),
        ("--lr-decay-style WSD", 1, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--start-weight-decay 0.1", 1, "--start-weight-decay 0.1 needs --weight-decay-incr-style"),
        ("--data-path a", 1, "--data-path and --mock-data are given"),
        ("--dataloader-type cyclic", 1, "--dataloader-type cyclic is not supported"),
        ("--log-interval 0", 1, "--log-interval 0 is not positive"),
        ("--vocab-size 0", 1, "--vocab-size 0 is not positive"),
        ("--adam-beta2 1.0", 1, "--adam-beta2 1.0 is not in [0, 1)"),
        ("--loss-scale -1", 1, "--loss-scale -1"),
        ("--optimizer-backend apex", 1, "--optimizer-backend apex"),
        (f"{SPIKES} --loss-spike-action rewind", 1, "--loss-spike-action rewind needs --save"),
        ("--timeline-step 11", 1, "--timeline-step 11 is beyond the run's 10 iterations"),
        ("--timeline-step 5 --exit-interval 4", 1, "--timeline-step 5 is beyond --exit-interval 4"),
        ("--timeline-step 5 --skip-train", 1, "--timeline-step 5: --skip-train takes no step"),
        ("--record-memory-history", 1, "--record-memory-history records CUDA's allocator, and this run is on cpu"),
        (f"{PROFILE} --profile-ranks 4", 4, "--profile-ranks 4: the ranks are 0 to 3"),
        (f"{PROFILE} --profile-step-end 1", 1, "--profile-step-start 1 is not below --profile-step-end 1"),
        ("--profile", 1, "--profile-step-start 10: the run ends with iteration 10"),
        (f"{PROFILE} --exit-interval 1", 1, "--profile-step-start 1: the run ends with iteration 1"),
        (f"{PROFILE} --skip-train", 1, "--profile: --skip-train takes no step"),
        ("--nccl-cross-max-ctas 65", 1, "--nccl-cross-max-ctas 65 is not a number from 1 to 64"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_names_and_values_of_the_flags(
    flags: str, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        check(flags, ranks_per_node=ranks)
    assert message in str(caught.value)


def test_observers_that_record_something_are_fine() -> None:
    check(f"{PROFILE} --timeline-step 4 --timing-log-level 2 --profile-ranks 0")
    check("--profile-step-start 99 --skip-train")
    config = parse(f"{SMALL} {PROFILE} --record-memory-history")
    check_run_config(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cuda")
    with pytest.raises(ValueError, match="--profile-ranks -1"):
        check_run_config(
            parse(f"{SMALL} --record-memory-history --profile-ranks -1"),
            Cluster(num_nodes=1, ranks_per_node=1),
            device_type="cuda",
        )
