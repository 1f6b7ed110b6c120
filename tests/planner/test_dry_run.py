"""The program on a cluster that is not there sends what its plan says, and holds as much memory as a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.tiers import slow

import megazpp.planner.dry_run as module
from megazpp.base.arguments import RunConfig, parse_run_config
from megazpp.parallel.axis import Traffic
from megazpp.planner.dry_run import dry_run
from megazpp.planner.step import PaperStep, SimulatedStep, measure
from megazpp.topology.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["@configs/gpt_tiny.args", "--num-layers", "2", "--seq-length", "32", "--micro-batch-size", "1"]
GPT = [*SMALL, "--hidden-size", "72", "--num-attention-heads", "12", "--vocab-size", "301"]
FLOAT8 = [*SMALL, "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "301", "--bf16"]
FLOAT8 += ["--fp8-format", "hybrid"]
LLAMA = ["@configs/llama_1b.args", *SMALL[1:], "--hidden-size", "72", "--num-attention-heads", "12"]
LLAMA += ["--num-query-groups", "6", "--ffn-hidden-size", "100", "--vocab-size", "301"]


def config(*flags: str, samples: int) -> RunConfig:
    return parse_run_config([*flags, "--global-batch-size", str(samples)], ROOT).config


NODES, SQUARE = Cluster(num_nodes=3, ranks_per_node=4), Cluster(num_nodes=2, ranks_per_node=2)
CYCLIC = Cluster(num_nodes=2, ranks_per_node=2, order=(0, 2, 1, 3))
ISLANDS = ["--diloco-steps", "6", "--diloco-islands", "2", "--diloco-outer-momentum", "0.9"]
MUON = ["--optimizer", "muon", "--muon-full-interval", "5"]
TP, CP = ["--tensor-model-parallel-size", "2"], ["--context-parallel-size", "2"]
FULL = ["--recompute-granularity", "full"]
LAYOUTS = {
    "ZeRO-3, uneven shards": slow(config(*GPT, samples=12), NODES, (0, 11)),
    "HSDP, tp": slow(config(*GPT, "--hsdp", *TP, "--bf16", samples=12), NODES, (0,)),
    "cp, zeropp, k = 4": (config(*GPT, "--zeropp", "--bf16", *CP, samples=24), NODES, (6,)),
    "cp, tp, groups repeated, recomputed": slow(
        config(*LLAMA, *CP, *TP, "--sequence-parallel", "--num-query-groups", "2", *FULL, samples=12), NODES, (3,)
    ),
    "zeropp, k = 2": (config(*GPT, "--zeropp", "--bf16", samples=24), NODES, (6,)),
    "lossless": slow(config(*GPT, "--zeropp", "--bf16", "--zero-weight-delta", "lossless", samples=24), NODES, (6,)),
    "llama, zeropp, tp": slow(config(*LLAMA, "--zeropp", *TP, "--sequence-parallel", samples=12), NODES, (11,)),
    "zeropp, cyclic, recomputed": slow(
        config(*GPT, "--zeropp", "--recompute-granularity", "full", "--fp16", samples=4),
        CYCLIC,
        (1,),
    ),
    "Muon, zeropp, tp": (config(*GPT, *MUON, "--zeropp", *TP, "--bf16", samples=12), NODES, (0, 11)),
    "float8, tp": slow(config(*FLOAT8, "--zeropp", *TP, "--sequence-parallel", samples=4), SQUARE, (3,)),
    "local steps": (config(*GPT, "--bf16", *TP, "--diloco-steps", "4", samples=6), NODES, (11,)),
    "local steps on islands of two nodes": slow(
        config(*GPT, "--zeropp", "--bf16", *ISLANDS, "--diloco-fragments", "2", "--diloco-delay", "5", samples=64),
        Cluster(num_nodes=4, ranks_per_node=4),
        (0, 5),
    ),
    "384 ranks": slow(config(*GPT, "--zeropp", samples=384), Cluster(num_nodes=24, ranks_per_node=16), (383,)),
}


@pytest.mark.parametrize(("run", "cluster", "ranks"), LAYOUTS.values(), ids=LAYOUTS)
def test_first_middle_and_last_ranks_send_what_is_planned(run: RunConfig, cluster: Cluster, ranks: tuple[int, ...]):
    for rank in ranks:
        dry = dry_run(run, cluster, rank=rank)
        assert dry.counted == dry.planned
        step, synchronization = dry.counted
        assert step
        assert bool(synchronization) == (run.islands.diloco_steps is not None)
        text = dry.describe()
        assert text.count("as planned") == (2 if synchronization else 1)
    assert not dist.is_initialized()


MANY = {
    "zeropp": ["--zeropp", "--bf16"],
    "stage 1": slow(["--zero-stage", "1"]),
    "stage 2": slow(["--zero-stage", "2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", MANY.values(), ids=MANY)
def test_three_micro_batches_say_of_many_what_all_of_them_do(flags: list[str], monkeypatch: pytest.MonkeyPatch):
    run = config(*GPT, *flags, samples=20)
    few = dry_run(run, SQUARE, rank=1)
    monkeypatch.setattr(module, "SIMULATED_MICRO_BATCHES", 5)
    everything = dry_run(run, SQUARE, rank=1)
    assert few == everything
    assert few.agrees
    monkeypatch.undo()
    assert "one optimizer step (3 micro-batches run, the middle one counts 3 times):" in few.describe()


def test_no_memory_is_taken():
    """A model of 0.5 TB in fp32: 12 x 2 x 73728^2 parameters."""
    shape = ["--hidden-size", "73728", "--num-attention-heads", "192", "--ffn-hidden-size", "294912"]
    dry = dry_run(config(*SMALL, *shape, samples=16), Cluster(num_nodes=2, ranks_per_node=8), rank=9)
    assert dry.agrees
    assert dry.live_bytes > 12 * 2 * 73728**2 * 4 // 16


def test_a_plan_that_is_a_byte_off_is_noticed(monkeypatch: pytest.MonkeyPatch):
    key = ("local", "shard", "all_gather")

    def wrong(step: PaperStep, micro_batches: int) -> SimulatedStep:
        right = measure(step, micro_batches)
        calls, sent = right.traffic[key]
        return right._replace(traffic=right.traffic | {key: Traffic(calls, sent + 1)})

    monkeypatch.setattr(module, "measure", wrong)
    dry = dry_run(config(*GPT, samples=4), SQUARE, rank=0)
    assert not dry.agrees
    assert "NOT AS PLANNED" in dry.describe()
    assert [line.split()[:3] for line in dry.describe().splitlines() if "DIFFERS" in line] == [list(key)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_the_cluster_does_not_have_is_refused(rank: int):
    with pytest.raises(ValueError, match=f"--dry-run-rank {rank} is not a rank of the cluster: it has 0 to 3"):
        dry_run(config(*GPT, samples=4), SQUARE, rank=rank)


def test_the_tokenizer_is_not_opened_so_its_size_must_be_given():
    with pytest.raises(ValueError, match="--dry-run needs --vocab-size"):
        dry_run(config(*GPT, "--vocab-size", "none", samples=4), SQUARE, rank=0)
