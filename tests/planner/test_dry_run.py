"""The program on a cluster that is not there sends what its plan says, and holds as much memory as planned."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.refusals import not_refused, table
from helpers.tiers import chosen

import megazpp.planner.dry_run as module
from megazpp.base.arguments import RunConfig, parse_run_config
from megazpp.islands.outer import Islands, OuterUnit
from megazpp.parallel.axis import Traffic
from megazpp.planner.dry_run import DryRun, PeakBytes, dry_run
from megazpp.planner.paper import Memory
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import cyclic_order
from megazpp.training.step import TrainStep
from megazpp.zero.secondary import Resident, Secondary

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
    "LOCAL": "--diloco-steps 4",
    "MOMENTUM": "--diloco-outer-momentum 0.9",
    "EXACT": "--diloco-weight-bits 16 --diloco-gradient-bits 16",
    "SHORT": "--num-layers 1 --vocab-size 8192 --seq-length 8 --micro-batch-size 1",
    "HUGE": "--num-layers 1 --hidden-size 73728 --num-attention-heads 192 --ffn-hidden-size 294912",
    "K4": "",  # micro-batches
}
# nodes and ranks of each (c: in cyclic order), the rank that runs, flags
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
    3x4   |   6 | --bf16 --zeropp CP K4
    3x4   |  10 | --zeropp LLAMA SP SELECTIVE K4
    2x2 c |   1 | --fp16 --zeropp LLAMA FULL --no-overlap-grad-reduce
    2x4   |   0 | --bf16 --zeropp --zero-accumulate-in-bf16 --optimizer sgd K4
    2x4   |   0 | --bf16 --zeropp --no-zero-error-feedback --zero-cross-every-microbatch
    2x4   |   6 | --bf16 --zeropp --zero-weight-delta lossless
    2x4   |   0 | --bf16 MASK LLAMA K4
    2x4   |   0 | --bf16 MASK CP LLAMA SELECTIVE
    3x4   |   2 | CP SP LLAMA FULL --num-query-groups 2
    3x4   |  10 | --bf16 MUON --zeropp TP
    2x2   |   2 | FLOAT8 --zeropp SP
    3x4   |  10 | --bf16 TP LOCAL
    2x4   |   0 | LOCAL MOMENTUM --no-zero-error-feedback K4
    2x4   |   0 | --bf16 LOCAL --diloco-delay 1 SP LLAMA
    2x4   |   0 | --bf16 LOCAL --diloco-fragments 2 --diloco-delay 3 --diloco-gradient-bits 8
    2x4   |   0 | --bf16 LOCAL EXACT --diloco-delay 2
    4x4   |   5 | --bf16 --zeropp LOCAL MOMENTUM --diloco-islands 2 --diloco-fragments 2 --diloco-delay 3
    2x1   |   1 | LOCAL SHORT
    2x1   |   1 | LOCAL SHORT EXACT
    1x1   |   0 | --bf16 K4
    1x1   |   0 | --fp16 --zero-stage 2 LLAMA K4
    24x16 | 383 | --zeropp
    2x8   |   9 | HUGE
""")
SQUARE = Cluster(num_nodes=2, ranks_per_node=2)


def run_config(text: str, cluster: Cluster) -> RunConfig:
    words = text.split()
    flags = " ".join([SIZES, *(WORDS.get(word, word) for word in words)]).split()
    ranks = cluster.world_size // 2 ** len({"TP", "SP", "CP"} & {*words})
    samples = (1 if "SHORT" in words else 2) * ranks * (4 if "K4" in words else 1)
    return parse_run_config([*flags, "--global-batch-size", str(samples)], ROOT, default_file=None).config


class Seen:
    """The step and the count of a dry run, which it keeps to itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "TrainStep", self._step)
        monkeypatch.setattr(module, "PeakBytes", self._live)
        monkeypatch.setattr(module, "Islands", self._islands)
        self._send = module._send_what_is_under_way
        monkeypatch.setattr(module, "_send_what_is_under_way", self._sending)
        self.outer: list[OuterUnit] = []
        self.sent: list[int] = []  # storages of messages, which must not live longer because of this

    def _step(self, *args: Any, **kwargs: Any) -> TrainStep:
        self.step = TrainStep(*args, **kwargs)
        return self.step

    def _live(self) -> PeakBytes:
        self.live = PeakBytes()
        return self.live

    def _islands(self, *args: Any) -> Islands:
        islands = Islands(*args)
        self.outer = islands.units
        return islands

    def _sending(self, islands: Islands) -> None:
        self._send(islands)
        self.sent = [unit._sent.untyped_storage()._cdata for unit in islands.units if unit._sent is not None]

    def kinds(self) -> dict[Memory, int]:
        """Bytes at the fullest moment of what outlives a step."""
        step, sharding = self.step, self.step.sharding
        moments = [value for state in step.optimizer.state.values() for value in state.values()]
        owned = {
            Memory.PARAMETERS: list(step.model.parameters()),
            Memory.MOMENTS: [m for m in moments if isinstance(m, torch.Tensor) and m.dim()],
            Memory.SECONDARY: [x for g in sharding._gathers if g._keep for x in kept(g.secondary)],
            Memory.FEEDBACK: list(sharding.rank_state().values()),
            Memory.COMMON: [unit.rows for unit in self.outer],
            Memory.OUTER: [x for unit in self.outer for x in (unit.outer, unit.momentum) if x is not None],
            Memory.OUTER_FEEDBACK: [unit.errors.messages for unit in self.outer if unit.errors is not None],
        }
        found = {kind: self._bytes(tensors) for kind, tensors in owned.items()}
        return found | {Memory.OUTER_MESSAGES: sum(self.live.fullest[storage] for storage in self.sent)}

    def _bytes(self, tensors: list[Any]) -> int:
        storages = {getattr(t, "_local_tensor", t).untyped_storage()._cdata for t in tensors}
        return sum(self.live.fullest.get(storage, 0) for storage in storages)  # an empty shard's is not there


def kept(secondary: Secondary) -> list[torch.Tensor]:
    buffers = (secondary.messages, secondary.weights if isinstance(secondary, Resident) else None)
    return [x for x in buffers if x is not None]


@pytest.mark.parametrize(
    "case",
    chosen(
        {row[-1]: row for row in RUNS}, "--bf16 --zeropp CP K4", "--bf16 MUON --zeropp TP", "--bf16 TP LOCAL", "HUGE"
    ),
)
def test_a_dry_run_sends_what_is_planned_and_lives_on_as_much_memory(case, monkeypatch):
    shape, number, flags = case
    nodes, ranks_per_node = map(int, shape.removesuffix(" c").split("x"))
    order = cyclic_order(nodes, ranks_per_node) if shape.endswith(" c") else None
    cluster, rank = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node, order=order), int(number)
    run, seen = run_config(flags, cluster), Seen(monkeypatch)
    dry = dry_run(run, cluster, rank=rank)
    assert not dist.is_initialized()
    assert dry.counted == dry.planned
    step, synchronization = dry.counted
    assert bool(step) == (cluster.ranks_per_node > 1)
    assert bool(synchronization) == (run.islands.diloco_steps is not None)
    assert dry.describe().count("as planned") == (2 if synchronization else 1)
    at_the_end = "SHORT" in flags and "EXACT" in flags  # the fullest moment is a synchronization
    for kind, counted in seen.kinds().items():
        assert dry.memory[kind] == counted or (at_the_end and kind == Memory.OUTER_MESSAGES), kind
    assert (dry.memory[Memory.OUTER_MESSAGES] > 0) == ("--diloco-delay" in flags or at_the_end)
    error = 100 * (dry.memory.total() / dry.live_bytes - 1)
    # recomputation leaves cycles, which live until the garbage collector comes
    assert abs(error) < (5.0 if run.model.recompute_granularity else 0.7)
    if "HUGE" in flags:
        assert dry.live_bytes > 12 * 73728**2 * 4 // 16


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--zeropp --bf16", "--zero-stage 1"])
def test_three_micro_batches_say_of_many_what_all_of_them_do(flags, monkeypatch):
    run = run_config(f"{flags} K4", SQUARE)
    few = dry_run(run, SQUARE, rank=1)
    monkeypatch.setattr(module, "SIMULATED_MICRO_BATCHES", 4)
    assert few == dry_run(run, SQUARE, rank=1)
    assert few.agrees
    monkeypatch.undo()
    assert "one optimizer step (3 micro-batches run, the middle one counts 2 times):" in few.describe()


def test_a_plan_that_is_a_byte_off_is_noticed():
    _, plan = module.plan_dry_run(run_config("", SQUARE), SQUARE, 0)
    key, other = ("local", "shard", "all_gather"), ("cross", "shard", "all_gather")
    counted = {key: Traffic(3, 100), other: Traffic(3, 100)}
    planned = counted | {key: Traffic(3, 101)}
    dry = DryRun(plan, 0, 1, (planned, {}), (counted, {}), Counter({Memory.PARAMETERS: 99}), 100)
    assert not dry.agrees
    lines = dry.describe().splitlines()
    assert [line.split()[:3] for line in lines if "DIFFERS" in line] == [list(key)]
    assert any("NOT AS PLANNED" in line for line in lines)
    assert "(-1.0 %)" in lines[-1]


def test_a_rank_that_is_not_there_and_a_tokenizer_that_is_not_opened_are_refused():
    run = run_config("", SQUARE)
    rows = [
        *((run, rank, f"--dry-run-rank {rank} is not a rank of the cluster: it has 0 to 3") for rank in (-1, 4)),
        (run_config("--vocab-size none", SQUARE), 0, "--dry-run needs --vocab-size"),
    ]
    assert not not_refused(rows, lambda config, rank: dry_run(config, SQUARE, rank=rank))
