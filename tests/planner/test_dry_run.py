"""Test the dry run: the program on fake ranks sends exactly the planned bytes and needs about the planned memory."""

from pathlib import Path
from typing import Any

import helpers.dry_run as module
import pytest
import torch
import torch.distributed as dist
from helpers.dry_run import dry_run
from helpers.refusals import table
from helpers.tiers import chosen

from megazpp.diloco.outer import OuterUnit, ReplicaGroups
from megazpp.features import FEATURES
from megazpp.planner.simulator import Memory
from megazpp.run.arguments import RunConfig, parse_run_config
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import cyclic_order
from megazpp.training.step import TrainStep

ROOT = Path(__file__).resolve().parents[2]
SIZES = """--num-layers 2 --hidden-size 72 --num-attention-heads 12 --vocab-size 500 --seq-length 64
    --micro-batch-size 2 --max-position-embeddings 64 --hidden-dropout 0 --attention-dropout 0
    --lr 1e-3 --train-iters 2 --mock-data"""
WORDS = {
    "LLAMA": "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--ffn-hidden-size 100 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 6",
    "TP": "--tensor-model-parallel-size 2",
    "SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "CP": "--context-parallel-size 2",
    "FULL": "--recompute-granularity full",
    "SELECTIVE": "--recompute-granularity selective",
    "MASK": "--reset-attention-mask",
    "FLOAT8": "--bf16 --fp8-format hybrid --hidden-size 64 --num-attention-heads 4",
    "MUON": "--optimizer muon --muon-full-interval 5",
    # quantized weights cross nodes; without --zero-weight-delta none they would cross as lossless deltas
    "INT8": "--zeropp --zero-weight-delta none",
    "LOCAL": "--diloco-steps 4",
    "MOMENTUM": "--diloco-outer-momentum 0.9",
    "GROUPS": "--diloco-replica-groups 2",
    "EXACT": "--diloco-weight-bits 16 --diloco-gradient-bits 16",
    "SHORT": "--num-layers 1 --vocab-size 8192 --seq-length 8 --micro-batch-size 1",
    "HUGE": "--num-layers 1 --hidden-size 73728 --num-attention-heads 192 --ffn-hidden-size 294912",
    "DROPOUT": "--attention-dropout 0.1 --seq-length 512 --max-position-embeddings 512 --num-attention-heads 6",
    "K4": "",  # no flag: K4 means four micro-batches per step
}
# Each case has nodes x ranks per node ("c": ranks in cyclic order), the rank that runs, and flags. Words in capitals
# stand for the flags above.
RUNS = table("""
    2x4   |   0 | --zero-stage 0 K4
    2x4   |   0 | --fp16 --zero-stage 1 TP
    2x4   |   3 | --bf16 --zero-stage 1 K4
    2x4   |   3 | --bf16 --zero-stage 2 LLAMA
    3x4   |  11 | --lr 1e-3
    3x4   |  11 | --bf16 LLAMA SELECTIVE
    2x4   |   0 | --bf16 SP --optimizer sgd
    2x4   |   2 | --bf16 --hsdp --grad-reduce-in-bf16 TP LLAMA FULL
    2x4   |   0 | --bf16 --zero-hpz-partition-size auto
    3x4   |   6 | --bf16 INT8 CP K4
    2x2   |   1 | --bf16 INT8 --context-parallel-size 4 --allow-cp-across-nodes K4
    3x4   |  10 | --zeropp LLAMA SP SELECTIVE K4
    2x2c  |   1 | --fp16 INT8 LLAMA FULL --no-overlap-grad-reduce
    2x4   |   0 | --bf16 INT8 --zero-accumulate-in-bf16 --optimizer sgd K4
    2x4   |   0 | --bf16 INT8 --no-zero-error-feedback --zero-cross-every-microbatch
    2x4   |   6 | --bf16 --zeropp
    2x4   |   6 | --fp16 --zeropp DROPOUT
    2x4   |   0 | --bf16 MASK LLAMA K4
    2x4   |   0 | --bf16 MASK CP LLAMA SELECTIVE
    3x4   |   2 | CP SP LLAMA FULL --num-query-groups 2
    3x4   |  10 | --bf16 MUON INT8 TP
    2x2   |   2 | FLOAT8 INT8 SP
    3x4   |  10 | --bf16 TP LOCAL
    2x4   |   0 | LOCAL MOMENTUM --no-zero-error-feedback K4
    2x4   |   0 | --bf16 LOCAL --diloco-fragment-sync-delay 1 SP LLAMA
    2x4   |   0 | --bf16 LOCAL --diloco-fragments 2 --diloco-fragment-sync-delay 3 --diloco-gradient-bits 8
    2x4   |   0 | --bf16 LOCAL EXACT --diloco-fragment-sync-delay 2
    4x4   |   5 | --bf16 INT8 LOCAL MOMENTUM GROUPS --diloco-fragments 2 --diloco-fragment-sync-delay 3
    2x1   |   1 | LOCAL SHORT
    2x1   |   1 | LOCAL SHORT EXACT
    1x1   |   0 | --bf16 K4
    1x1   |   0 | --fp16 --zero-stage 2 LLAMA K4
    24x16 | 383 | --zeropp
    2x8   |   9 | HUGE
""")


def run_config(text: str, cluster: Cluster) -> RunConfig:
    words = text.split()
    flags = " ".join([SIZES, *(WORDS.get(word, word) for word in words)]).split()
    ranks = cluster.world_size // 2 ** len({"TP", "SP", "CP"} & {*words})
    samples = (1 if "SHORT" in words else 2) * ranks * (4 if "K4" in words else 1)
    return parse_run_config(
        [*flags, "--global-batch-size", str(samples)], ROOT, features=FEATURES, default_file=None
    ).config


def instances(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Patch the class `name`; return a list to which each instance that a dry run creates is appended."""
    made: list[Any] = []
    make = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1])
    return made


def lasting(step: TrainStep, outer: list[OuterUnit]) -> dict[Memory, list[torch.Tensor | None]]:
    """Return the tensors of a training step that persist between steps, by kind of memory.

    `outer` has DiLoCo's outer states.
    """
    moments = [value for state in step.optimizer.state.values() for value in state.values()]
    return {
        Memory.PARAMETERS: list(step.model.parameters()),
        Memory.MOMENTS: [moment for moment in moments if torch.is_tensor(moment) and moment.dim()],
        Memory.SECONDARY: [gather.secondary.messages for gather in step.sharding._gathers if gather._keep],
        Memory.FEEDBACK: list(step.sharding.rank_state().values()),
        Memory.COMMON: [unit.rows for unit in outer],
        Memory.OUTER: [tensor for unit in outer for tensor in (unit.outer, unit.momentum)],
        Memory.OUTER_FEEDBACK: [unit.errors and unit.errors.messages for unit in outer],
    }


QUICK = ("--bf16 --zeropp", "HUGE")
SLOW = (
    *("--zero-stage 0 K4", "--bf16 --hsdp --grad-reduce-in-bf16 TP LLAMA FULL"),
    *("--zeropp LLAMA SP SELECTIVE K4", "--fp16 INT8 LLAMA FULL --no-overlap-grad-reduce"),
    "--bf16 INT8 --zero-accumulate-in-bf16 --optimizer sgd K4",
    "--bf16 INT8 --no-zero-error-feedback --zero-cross-every-microbatch",
    *("--fp16 --zeropp DROPOUT", "--bf16 MASK CP LLAMA SELECTIVE", "--bf16 MUON INT8 TP", "FLOAT8 INT8 SP"),
    "--zeropp",
    "--bf16 INT8 LOCAL MOMENTUM GROUPS --diloco-fragments 2 --diloco-fragment-sync-delay 3",
)


@pytest.mark.parametrize("case", chosen({row[-1]: row for row in RUNS}, *QUICK, slow=SLOW))
def test_dry_run_sends_planned_bytes_and_needs_planned_memory(case, monkeypatch):
    shape, rank, flags = case
    nodes, ranks_per_node = map(int, shape.removesuffix("c").split("x"))
    order = cyclic_order(nodes, ranks_per_node) if shape.endswith("c") else None
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node, order=order)
    steps, counts, replica_groups = (
        instances(monkeypatch, name) for name in ("TrainStep", "PeakBytes", "ReplicaGroups")
    )
    send, messages = module._send_what_is_under_way, set()

    def sending(made: ReplicaGroups) -> None:
        send(made)
        messages.update(unit._sent.untyped_storage()._cdata for unit in made.units if unit._sent is not None)

    monkeypatch.setattr(module, "_send_what_is_under_way", sending)
    run = run_config(flags, cluster)
    dry = dry_run(run, cluster, rank=int(rank))
    assert not dist.is_initialized()
    assert dry.counted == dry.planned
    assert [bool(table) for table in dry.counted] == [ranks_per_node > 1, bool(replica_groups)]
    fullest = counts[0].fullest
    for kind, tensors in lasting(steps[0], replica_groups[0].units if replica_groups else []).items():
        storages = {getattr(t, "_local_tensor", t).untyped_storage()._cdata for t in tensors if t is not None}
        assert dry.memory[kind] == sum(fullest.get(storage, 0) for storage in storages), kind
    assert dry.memory[Memory.OUTER_MESSAGES] == sum(fullest[message] for message in messages)
    assert (dry.memory[Memory.OUTER_MESSAGES] > 0) == ("--diloco-fragment-sync-delay" in flags)
    # With recomputation the tolerance is larger, because reference cycles keep tensors alive until Python's garbage
    # collector runs.
    assert dry.memory.total() == pytest.approx(dry.live_bytes, rel=0.05 if run.model.recompute_granularity else 0.007)
    if flags == "HUGE":
        assert dry.live_bytes > 12 * 73728**2 * 4 // 16
