"""Test the plan that is made from flags and a cluster, and the errors for flags that contradict each other."""

from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import not_refused, table
from helpers.small_run import SMALL, check, parse

from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.axis import MeshAxis
from megazpp.run import checks, trainer
from megazpp.run.checks import check_uses, plan_run
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import CommPlan, ZeroConfig
from megazpp.zero.plan import WeightDelta, plan_comm

# each line: number of ranks on one node | flags | beginning of the error
REFUSED = """
2 | --tensor-model-parallel-size 2 --num-attention-heads 7 --kv-channels 8 | --num-attention-heads 7 is not divisible by
4 | --tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2 | --num-query-groups 2 is not
2 | --tensor-model-parallel-size 2 --ffn-hidden-size 101 | --ffn-hidden-size 101 is not divisible by
2 | --tensor-model-parallel-size 2 --sequence-parallel --seq-length 63 | --seq-length 63 is not divisible by
1 | --rope-scaling-factor 32 | --rope-scaling-factor 32.0 needs --use-rope-scaling
1 | --use-rope-scaling | --use-rope-scaling needs --position-embedding-type rope
1 | --window-size 62 | --window-size 62 is not LEFT,0
1 | --window-attn-skip-freq 2 | --window-attn-skip-freq 2 needs --window-size
1 | --window-size 7,0 --window-attn-skip-freq 0 | --window-attn-skip-freq 0 is neither a positive number N
1 | --window-size 7,0 --window-attn-skip-freq [1,2] | --window-attn-skip-freq [1,2] is neither a positive number
1 | --window-size 7,0 --window-attn-skip-freq [1,1,1,1,1,1,1] | [1,1,1,1,1,1,1] does not have one entry
1 | --no-rope-freq 4 | --no-rope-freq 4 needs --position-embedding-type rope
1 | --position-embedding-type rope --no-rope-freq -1 | --no-rope-freq -1 is neither a positive number N
1 | --rope-type yarn | --rope-type yarn needs --position-embedding-type rope
1 | --rotary-scaling-factor 2 | --rotary-scaling-factor 2.0 needs --rope-type yarn dynamic, not rope
1 | --position-embedding-type rope --rope-type yarn --rotary-scaling-factor 0.5 | --rotary-scaling-factor 0.5 is not
1 | --yarn-beta-fast 16 | --yarn-beta-fast 16.0 needs --rope-type yarn
1 | --position-embedding-type rope --rope-type yarn --use-rope-scaling | --use-rope-scaling and --rope-type yarn exclude
1 | --rotary-seq-len-interpolation-factor 2 | interpolation-factor 2.0 needs --position-embedding-type rope
1 | --rope-scaling-original-length 99 | --rope-scaling-original-length 99 needs --use-rope-scaling
2 | --position-embedding-type rope --rope-type dynamic --context-parallel-size 2 | --rope-type dynamic needs whole seq
1 | --qk-layernorm-all-heads | --qk-layernorm-all-heads needs --normalization RMSNorm
1 | --normalization RMSNorm --qk-layernorm --qk-layernorm-all-heads | --qk-layernorm-all-heads exclude
1 | --logits-scaling 0 | --logits-scaling 0.0 is not
1 | --attention-multiplier -1 | --attention-multiplier -1.0 is not
1 | --window-size 63,1 | --window-size 63,1 is not LEFT,0
1 | --num-query-groups 2 | --num-query-groups 2 needs --group-query-attention
1 | --moe-shared-expert-gate | --moe-shared-expert-gate needs --moe-shared-expert-intermediate-size
1 | --seq-length 65 | --seq-length 65 is longer than --max-position-embeddings 64
1 | --hidden-dropout 1.0 | --hidden-dropout 1.0 is not in [0, 1)
1 | --recompute-method uniform | --recompute-method uniform needs --recompute-granularity full
1 | --recompute-num-layers 2 | --recompute-num-layers 2 needs --recompute-granularity full
1 | --moe-router-enable-expert-bias | --moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, not
2 | --pipeline-model-parallel-size 2 | is not supported; split the model by --tensor-model-p
4 | --context-parallel-size 4 --num-attention-heads 6 --kv-channels 8 | --num-attention-heads 6 is not divisible by
4 | --context-parallel-size 2 --num-attention-heads 6 --kv-channels 8 --tensor-model-parallel-size 2 | parallel-size 2 x
4 | --context-parallel-size 4 --seq-length 62 | --seq-length 62 is not divisible by --context-parallel-size 4
4 | --hsdp | --hsdp makes one copy of the model per node, and there is only one node
2 | --zero-stage 0 --use-distributed-optimizer | --use-distributed-optimizer
2 | --global-batch-size 6 | --global-batch-size 6 is not divisible by --micro-batch-size 2
2 | --global-batch-size 7 --micro-batch-size none | --global-batch-size 7 is not divisible by data-parallel size 2
1 | --rampup-batch-size 1 2 9 --train-iters none --train-samples 9 | --global-batch-size 2 (derived, not set) is not 1
2 | --train-iters none --train-samples 3 | --train-samples 3 are too few for one global batch of 4,
1 | --position-embedding-type rope --rope-type dynamic --rotary-scaling-factor 1.5 --seq-length 128 | 64 x --rotary-sca
1 | --fp8-format e4m3 --bf16 --hidden-size 24 --num-attention-heads 1 --ffn-hidden-size 9 | e4m3: --hidden-size 24:
3 | --num-attention-heads 3 --kv-channels 8 --tensor-model-parallel-size 3 | --ffn-hidden-size 256 (derived, not set) is
1 | --lr-warmup-iters 11 --seq-length 65 | --seq-length 65 is longer
1 | --seq-length 65 --lr-warmup-iters 11 | --lr-warmup-iters 11: the warm-up
1 | --hsdp --optimizer-backend apex | --optimizer-backend apex
1 | --lr-warmup-samples 5 | --lr-warmup-samples 5 cannot be combined with --train-iters 10
1 | --dataloader-type cyclic | --dataloader-type cyclic is not supported
1 | --fp16 --bf16 | --fp16 and --bf16 are both set: choose one
1 | --lr-warmup-iters 2 --lr-warmup-fraction 0.1 | --lr-warmup-fraction 0.1 and --lr-warmup-iters 2 exclude each
1 | --grad-reduce-in-bf16 | --grad-reduce-in-bf16 requires --bf16
1 | --seed 4294967296 | --seed 4294967296 is more than 4294967295, the largest
1 | --distributed-timeout-minutes 1e12 | 1000000000000.0 is more than 527040, a year
1 | --distributed-timeout-seconds-after-init 1e12 | 1000000000000.0 is more than 31622400, a
1 | --optimizer sgd --sgd-momentum 1 | --sgd-momentum 1.0 is not in [0, 1)
1 | --nccl-cross-max-ctas 65 | --nccl-cross-max-ctas 65 is more than 64, NCCL's limit
1 | --node-rank 1 | command line: --node-rank 1 needs --nnodes
1 | --master-addr a | command line: --master-addr a needs --nnodes
1 | --master-port 70000 | --master-port 70000 is more than 65535, the largest TCP port
1 | --start-weight-decay 0.1 | --start-weight-decay 0.1 needs --weight-decay-incr-style linear cosine, not constant
1 | --lr -1 --min-lr 1e-4 | --lr -1.0 is negative
1 | --zero-gradient-bits 3 4 | --zero-gradient-bits: '3' is not one of 4, 8, 16
2 | --zero-weight-delta auto | --zero-weight-delta auto chooses the format in which --zeropp sends weights: add --zeropp
2 | --zeropp --zero-weight-delta auto --zero-quantized-weights | auto and --zero-quantized-weights are both set
2 | --zeropp --zero-weight-delta auto --no-zero-quantized-weights | auto and --no-zero-quantized-weights are both set
2 | --zeropp --zero-weight-delta auto --zero-weight-bits 8 | auto and --zero-weight-bits 8 are both set
2 | --zeropp --zero-weight-delta auto --zero-hpz-partition-size 1 | auto and --zero-hpz-partition-size 1 are both
1 | --adam-beta2 1.0 | --adam-beta2 1.0 is not in [0, 1)
1 | --optimizer-backend apex | --optimizer-backend apex
1 | --no-muon-use-nesterov | --no-muon-use-nesterov needs --optimizer muon, not adam
1 | --timeline-step 11 | --timeline-step 11 is not reached: the run ends with iteration 10
1 | --timeline-step 5 --exit-interval 4 | --timeline-step 5 is not reached: --exit-interval 4 ends the run
1 | --timeline-step 5 --skip-train | --timeline-step 5 records training steps, and --skip-train takes no step
1 | --record-memory-history | --record-memory-history needs CUDA, and this run uses cpu
4 | --profile --profile-step-start 1 --profile-ranks 4 | --profile-ranks 4 does not exist: the ranks of this run are
1 | --profile --profile-step-start 1 --profile-step-end 1 | --profile-step-start 1 must be
1 | --profile | --profile-step-start 10 is not reached: the run ends with iteration 10
1 | --profile --profile-step-start 1 --exit-interval 1 | --profile-step-start 1 is not reached: --exit-interval 1 ends
1 | --profile --profile-step-start 1 --skip-train | --profile records training steps, and --skip-train takes no step
"""


def test_incompatible_flags_are_rejected_by_name_and_value():
    assert not not_refused(table(REFUSED), lambda ranks, flags: check(flags, ranks_per_node=int(ranks)))


def test_all_missing_flags_are_named_in_one_error():
    missing = "--hidden-size, --num-attention-heads, --max-position-embeddings, --seq-length, --micro-batch-size, --lr"
    with pytest.raises(ValueError, match=f"flags are missing: {missing}, --train-iters .*, --data-path "):
        plan_run(parse("--num-layers 2").config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu")


def test_plan_holds_layout_batches_schedule_wire_formats_and_notices():
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 32 --lr-warmup-iters 3 --hsdp"
    plan = check(flags, nodes=2, ranks_per_node=4)
    assert (plan.layout.tp, plan.layout.shard, plan.layout.replicate, plan.layout.data) == (2, 2, 2, 4)
    assert plan.batches.num_micro_batches_at(0) == 4
    assert plan.schedule.learning_rate(3 * 32) == 1e-3
    assert plan.notices == ()
    (note,) = [line for line in check("--zeropp", nodes=2, ranks_per_node=2).notices if "--zero-weight-delta" in line]
    assert note.startswith("--zero-weight-delta auto: weights cross nodes as int8 blocks, because with float32 compute")
    assert "--zero-weight-delta" not in str(check("--zeropp", ranks_per_node=4).notices)
    plan = check("--zeropp", nodes=2, ranks_per_node=2)
    assert plan.wire == plan_comm(ZeroConfig(zeropp=True), plan.layout, torch.float32) != CommPlan()
    cluster = Cluster(num_nodes=2, ranks_per_node=2, notices=("hosts: a, b",))
    spanning = plan_run(parse(f"{SMALL} --tensor-model-parallel-size 4").config, cluster, device_type="cpu")
    assert spanning.notices[0] == "hosts: a, b"
    assert spanning.notices[1].startswith("warning: --tensor-model-parallel-size 4 spans 2 nodes")


def test_without_a_c_compiler_lossless_deltas_are_refused_and_auto_takes_int8_blocks(monkeypatch):
    for module in (checks, trainer):
        monkeypatch.setattr(module, "missing", lambda device_type: "no C compiler found")
    with pytest.raises(ValueError, match="--zero-weight-delta lossless cannot be used on this machine: no C compiler"):
        check("--zeropp --bf16 --zero-weight-delta lossless", nodes=2, ranks_per_node=2)
    config, cluster = parse(f"{SMALL} --zeropp --bf16").config, Cluster(num_nodes=2, ranks_per_node=2)
    dims = SimpleNamespace(layout=SimpleNamespace(cross=2), world=MeshAxis("world"))
    choice = trainer.choose_weight_delta(config, cluster, dims, torch.device("cpu"))
    assert choice == WeightDelta(False, "lossless deltas cannot be computed: no C compiler found")


def test_profiling_and_timeline_flags_that_record_something_pass():
    profile = "--profile --profile-step-start 1"
    check(f"{profile} --timeline-step 4 --timing-log-level 2 --profile-ranks 0")
    check("--profile-step-start 99 --skip-train")
    check(f"{profile} --record-memory-history", device="cuda")
    with pytest.raises(ValueError, match="--profile-ranks -1"):
        check("--record-memory-history --profile-ranks -1", device="cuda")


def test_evaluations_without_validation_data_are_noted():
    for flags, notices in (
        ("--eval-interval 5 --split 1,0,1", ("--eval-interval 5: no data for validation (--split 1,0,1), ",)),
        ("--eval-interval 5 --eval-iters 0 --split 1,0,1", ()),
        ("--eval-interval 5", ()),
        ("--split 1,0,1", ()),
    ):
        parsed = parse(f"{SMALL} {flags}")
        found = check_uses(parsed.config, parsed.origins)
        assert [notice[: len(start)] for notice, start in zip(found, notices, strict=True)] == list(notices)
    skips = parse(f"{SMALL} --split 0,1,0 --skip-train")
    assert check_uses(skips.config, skips.origins) == ()


def test_exit_interval_ends_a_resumed_run_at_the_next_multiple():
    def check_at(iteration: int, timeline_step: int) -> None:
        config = parse(f"{SMALL} --timeline-step {timeline_step} --exit-interval 4").config
        start = TrainingProgress(iteration, 2 * iteration)
        plan_run(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu", start=start)

    check_at(5, 8)
    rows = [
        ((0, 8), "--timeline-step 8 is not reached: --exit-interval 4 ends the run"),
        ((5, 9), "--timeline-step 9 is not reached: --exit-interval 4 ends the run after iteration 8"),
        ((9, 11), "--timeline-step 11 is not reached: the run ends with iteration 10"),
    ]
    assert not not_refused(rows, lambda at: check_at(*at))


def test_resumed_run_notes_steps_to_record_that_it_has_passed():
    config = parse(f"{SMALL} --timeline-step 3 --profile --profile-step-start 1 --profile-step-end 4").config
    notes = []
    for iteration in (2, 3, 4):
        start = TrainingProgress(iteration, 2 * iteration)
        plan = plan_run(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu", start=start)
        notes.append([notice.partition(":")[0] for notice in plan.notices if "is not recorded" in notice])
    assert notes == [[], ["--timeline-step 3"], ["--timeline-step 3", "--profile-step-end 4"]]


def test_resumed_run_of_samples_reports_the_samples_left_over():
    config = parse(f"{SMALL} --train-samples 21".replace("--train-iters 10", "")).config
    plan = plan_run(config, Cluster(num_nodes=1, ranks_per_node=2), device_type="cpu", start=TrainingProgress(3, 6))
    assert (plan.batches.total_iterations, plan.batches.total_samples) == (3 + 3, 6 + 3 * 4)
    assert "--train-samples 21: the last 3 are too few for a global batch of 4, and no step takes them" in plan.notices
