"""Rank process of benchmark_cluster.py: holds the models of all variants and runs one step of a variant per command.

Rank 0 receives commands from the benchmark through a pipe and passes them to the other ranks. A command runs one
optimizer step, timed between two barriers. With DiLoCo, a command runs a whole cycle of H local steps. The cycle begins
after one merge of outer gradients and ends with the next, so that no message is in flight when another variant runs.

Steps run the code of pretrain_gpt.py. On CPUs its reduce-scatter is a ring, which sends half as many bytes as the
reduce-scatter of gloo.
"""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from megazpp.base.program import leave
from megazpp.data.loader import make_micro_batch
from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import ReplicaGroups
from megazpp.features import FEATURES
from megazpp.optim.build import build_optimizer
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import detect_rank_info
from megazpp.parallel.worker import Worker, seed_everything, worker_process
from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import changed
from megazpp.run.arguments import RunConfig, parse_run_config
from megazpp.run.checks import plan_run
from megazpp.run.trainer import measure_cluster
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep

TIMEOUT_MINUTES = 60  # long, because a step of 8 micro-batches takes minutes on the slowest links
CPU = torch.device("cpu")
ESTIMATE = "estimate"


def multiply_in_fp32_() -> None:
    """Make linear layers, experts and attention compute in fp32 and return the dtype of their input.

    On a CPU without bf16 instructions, matrix products in bf16 take a hundred times as long. The benchmark measures
    communication, so the time of the arithmetic should be small.
    """
    linear, grouped, attention = functional.linear, functional.grouped_mm, functional.scaled_dot_product_attention

    def fp32_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    def fp32_grouped(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        return grouped(x.float(), weight.float(), offs=offs).to(x.dtype)

    def fp32_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return attention(q.float(), k.float(), v.float(), **options).to(q.dtype)

    functional.linear = fp32_linear  # type: ignore[assignment]
    functional.grouped_mm = fp32_grouped  # type: ignore[assignment]
    functional.scaled_dot_product_attention = fp32_attention  # type: ignore[assignment]


class VariantRun:
    """Model, training step and (for DiLoCo) outer weights of one variant on this rank.

    Args:
        config: flags of the variant.
        cluster: cluster of the job.
        dims_of: parallel axes by layout; variants with equal layouts share them.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, dims_of: dict[Layout, ParallelDims]) -> None:
        self.config, plan = config, plan_run(config, cluster, device_type="cpu")
        if plan.layout not in dims_of:
            dims_of[plan.layout] = ParallelDims(plan.layout, device_type="cpu")
        self.dims = dims = dims_of[plan.layout]
        seed_everything(config.launch.seed, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
        vocab_size = config.tokenizer.vocab_size
        assert vocab_size is not None
        built = build_model(config.model_spec(vocab_size, plan.wire), dims, CPU)
        optimizer = build_optimizer(built.model, config.optimizer)
        scaler = LossScaler(config.loss_scale, fp16=False)
        self._step = TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)
        diloco = plan.of(DilocoPlan)
        self._replica_groups = None if diloco is None else ReplicaGroups(built.sharding, dims, diloco, config.precision)
        # With DiLoCo, each command begins just after a merge, `diloco.delay` steps after the messages were sent.
        self.steps, self._iteration = (1, 0) if diloco is None else (diloco.steps, diloco.delay)
        self._lr = config.schedule.lr or 0.0
        self.num_parameters = sum(p.numel() for p in built.model.parameters())
        generator = torch.Generator().manual_seed(config.launch.seed + dims.data_rank)
        size = config.batches.micro_batch_size or 1, (config.data.seq_length or 1) + 1
        self._batch = make_micro_batch(torch.randint(vocab_size, size, generator=generator), eod=None)

    def step(self, micro_batches: int) -> float:
        """Run one optimizer step, and then DiLoCo's synchronization if one is due; return the loss."""
        loss = self._step([self._batch] * micro_batches, learning_rate=self._lr, weight_decay=0.0).loss
        if self._replica_groups is not None:
            self._iteration += 1
            tokens = torch.tensor(self._batch.tokens.numel() * micro_batches * self.dims.shard.size)
            self._replica_groups.count(tokens.double())
            self._replica_groups.after_step(self._iteration)
        return loss


def serve(cluster: Cluster, flags: dict[str, str], control: int, worker: Worker) -> None:
    """Build all variants, and then run the commands (variant, micro-batches) that rank 0 reads from the pipe, forever.

    A command with the name ESTIMATE in place of a variant measures links and devices as a run does at its start. The
    answer to this command has the planner's estimate of the seconds per step, by variant.

    The answer to any other command has these entries: "seconds" per step, between two barriers; "loss" of the last
    step; "cross_bytes", which a node has sent to other nodes per step, by the program's counters; and "steps", the
    number of steps.
    """
    # ---- build all variants
    multiply_in_fp32_()
    dims_of: dict[Layout, ParallelDims] = {}
    configs = {name: parse_run_config(words.split(), Path(), features=FEATURES).config for name, words in flags.items()}
    runs = {name: VariantRun(config, cluster, dims_of) for name, config in configs.items()}
    first = next(iter(runs.values()))

    def counted() -> torch.Tensor:
        """Return the number of bytes that this rank has sent to other nodes since its start."""
        return torch.tensor([sum(dims.counter.sent_bytes("cross") for dims in dims_of.values())])

    # ---- run the commands of the benchmark, which rank 0 receives and shares with all ranks
    pipe, world = Connection(control) if worker.rank == 0 else None, first.dims.world
    if pipe:
        pipe.send({"parameters": first.num_parameters})
    while True:
        (variant, micro_batches), before = world.share_object(pipe.recv() if pipe else None), counted()
        if variant == ESTIMATE:
            measured, lines = measure_cluster(first.config, cluster, first.dims, CPU)
            if pipe:
                print("\n".join(lines), flush=True)
                pipe.send({name: estimate(run.config, measured, micro_batches) for name, run in runs.items()})
            continue
        run = runs[variant]
        dist.barrier()
        started = time.perf_counter()
        for _ in range(run.steps):
            loss = run.step(micro_batches)
        dist.barrier()
        seconds = (time.perf_counter() - started) / run.steps
        of_nodes = world.all_gather(counted() - before).view(cluster.num_nodes, -1).sum(1)
        if pipe:
            sent = [int(each) // run.steps for each in of_nodes]
            pipe.send({"seconds": seconds, "loss": loss, "cross_bytes": sent, "steps": run.steps})


def estimate(config: RunConfig, cluster: Cluster, micro_batches: int) -> float:
    """Return the planner's estimate of a step's seconds on a cluster with known links and device."""
    size = (config.batches.micro_batch_size or 1) * micro_batches * cluster.world_size
    size //= config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    config = changed(config, batches={"global_batch_size": size})
    seconds = Estimator(cluster, device_type="cpu").estimate(config).seconds
    assert seconds is not None
    return seconds


def main() -> None:
    """Run one rank. Its arguments are a JSON object (nodes, ranks_per_node, flags by variant) and rank 0's pipe."""
    job = json.loads(sys.argv[1])
    cluster = Cluster(num_nodes=job["nodes"], ranks_per_node=job["ranks_per_node"])
    config = LaunchConfig(distributed_backend="gloo", distributed_timeout_minutes=TIMEOUT_MINUTES)
    with worker_process(detect_rank_info(config), config) as worker:
        serve(cluster, job["flags"], int(sys.argv[2]), worker)
    leave(0)


if __name__ == "__main__":
    main()
