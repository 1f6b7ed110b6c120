"""One rank of benchmark_cluster.py: holds the models of all variants and runs steps of the requested variant.

Rank 0 receives commands from the benchmark through a pipe and shares them with the other ranks. A command is one
optimizer step, timed between two barriers. With local steps it is a whole cycle of H steps, which begins after a merge
of the islands and ends with the next merge, so that no communication is pending when another variant follows.

All code is the library's own, except that a ring replaces gloo's reduce-scatter. With gloo's, ZeRO-3 would send 3.5
instead of 2.6 times the model's size over an uplink of 2 nodes x 4 ranks. Since this is a property of gloo, not of
ZeRO-3, it would make the other variants look better than they are.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from megazpp.data.loader import make_micro_batch
from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import Islands
from megazpp.features import FEATURES
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import LaunchConfig, detect_rank_info
from megazpp.parallel.worker import Worker, run_worker, seed_everything
from megazpp.run.arguments import RunConfig, parse_run_config
from megazpp.run.checks import check_run_config
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep

TIMEOUT_MINUTES = 60  # on the slowest links a step with 8 micro-batches takes minutes
CPU = torch.device("cpu")


class RingAxis(MeshAxis):
    """A mesh axis whose reduce-scatter is a ring: a rank sends (n-1)/n of the buffer, the number that is counted."""

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """Sum x over the axis and return this rank's slice, see `MeshAxis.reduce_scatter`."""
        if self.size == 1:
            return super().reduce_scatter(x, out=out)
        slots = x.contiguous().view(self.size, x.shape[0] // self.size, *x.shape[1:])
        successor, predecessor = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        with self._span("reduce_scatter", of):
            partial = slots[self.rank - 1]
            # Each partial sum passes around the ring, every rank adds its part, and the sum ends at its owner.
            for hop in range(2, self.size + 1):
                incoming = torch.empty_like(partial)
                received = dist.irecv(incoming, predecessor, group=self.group)
                for request in (received, dist.isend(partial, successor, group=self.group)):
                    assert request is not None
                    request.wait()
                partial = incoming.add_(slots[self.rank - hop])
        self.count("reduce_scatter", self.ring_bytes(x))
        return partial if out is None else out.copy_(partial)


def multiply_in_fp32_() -> None:
    """Replace torch's linear and attention functions by versions that compute in fp32 and round to the input's dtype.

    A CPU without bf16 instructions needs a hundred times as long for matrix products in bf16. The benchmark measures
    communication, not arithmetic.
    """
    linear, attention = functional.linear, functional.scaled_dot_product_attention

    def fp32_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return F.linear computed in fp32."""
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    def fp32_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return F.scaled_dot_product_attention computed in fp32."""
        return attention(q.float(), k.float(), v.float(), **options).to(q.dtype)

    functional.linear = fp32_linear  # type: ignore[assignment]
    functional.scaled_dot_product_attention = fp32_attention  # type: ignore[assignment]


class VariantRun:
    """The model of one variant on this rank, with its training step and its islands.

    Args:
        config: flags of the variant.
        cluster: emulated cluster.
        dims_of: mesh axes by layout, which variants with the same layout share. New ones are added.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, dims_of: dict[Layout, ParallelDims]) -> None:
        plan = check_run_config(config, cluster, device_type="cpu")
        if plan.layout not in dims_of:
            dims_of[plan.layout] = ParallelDims(plan.layout, device_type="cpu")
            dims_of[plan.layout].shard.__class__ = RingAxis
        self.dims = dims = dims_of[plan.layout]
        seed_everything(config.launch.seed, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
        vocab_size = config.tokenizer.vocab_size
        assert vocab_size is not None
        built = build_model(config.model_spec(vocab_size, plan.wire), dims, CPU)
        optimizer = build_optimizer(list(built.model.named_parameters()), config.optimizer, CPU)
        scaler = build_loss_scaler(config.loss_scale, fp16=False)
        self._step = TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)
        diloco = plan.of(DilocoPlan)
        self._islands = None if diloco is None else Islands(built.sharding, dims, diloco, config.precision)
        self.steps, self._iteration = (1, 0) if diloco is None else (diloco.steps, diloco.delay)
        self._lr = config.schedule.lr or 0.0
        self.num_parameters = sum(p.numel() for p in built.model.parameters())
        generator = torch.Generator().manual_seed(config.launch.seed + dims.data_rank)
        size = config.batches.micro_batch_size or 1, (config.data.seq_length or 1) + 1
        self._batch = make_micro_batch(torch.randint(vocab_size, size, generator=generator), eod=None)

    def step(self, micro_batches: int) -> float:
        """Run one optimizer step and the work of the islands after it, and return the loss."""
        loss = self._step([self._batch] * micro_batches, learning_rate=self._lr, weight_decay=0.0).loss
        if self._islands is not None:
            self._iteration += 1
            tokens = torch.tensor(self._batch.tokens.numel() * micro_batches * self.dims.shard.size)
            self._islands.count(tokens.double())
            self._islands.after_step(self._iteration)
        return loss


def serve(cluster: Cluster, flags: dict[str, str], control: int, worker: Worker) -> None:
    """Build the models of all variants, then run the commands (variant, micro-batches) that rank 0 reads from the pipe.

    Rank 0 answers each command with the seconds per step, the loss of the last step, the inter-node bytes per node and
    step by our counters, and the number of steps.

    Args:
        cluster: emulated cluster.
        flags: flags of pretrain_gpt.py for each variant.
        control: file descriptor of the pipe, used by rank 0.
        worker: this rank.
    """
    # Build the models.
    multiply_in_fp32_()
    dims_of: dict[Layout, ParallelDims] = {}
    configs = {name: parse_run_config(words.split(), Path(), features=FEATURES).config for name, words in flags.items()}
    runs = {name: VariantRun(config, cluster, dims_of) for name, config in configs.items()}
    first = next(iter(runs.values()))

    def counted() -> torch.Tensor:
        """Return the inter-node bytes that this rank has sent so far, over all variants."""
        return torch.tensor([sum(dims.counter.sent_bytes("cross") for dims in dims_of.values())])

    pipe, world = Connection(control) if worker.rank == 0 else None, first.dims.world
    if pipe:
        pipe.send({"parameters": first.num_parameters})

    # Run commands until the benchmark ends this process.
    while True:
        (variant, micro_batches), before = world.share_object(pipe.recv() if pipe else None), counted()
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


def main() -> None:
    """Run one rank of the benchmark.

    The command line has two arguments: JSON with the nodes, the ranks per node and the flags of each variant, and the
    file descriptor of the pipe that rank 0 has inherited.
    """
    job = json.loads(sys.argv[1])
    cluster = Cluster(num_nodes=job["nodes"], ranks_per_node=job["ranks_per_node"])
    config = LaunchConfig(distributed_backend="gloo", distributed_timeout_minutes=TIMEOUT_MINUTES)
    run_worker(detect_rank_info(config), config, functools.partial(serve, cluster, job["flags"], int(sys.argv[2])))


if __name__ == "__main__":
    main()
