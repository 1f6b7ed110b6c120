"""One rank of benchmark_cluster.py: holds the models of all variants and runs a step of whichever it is told.

One file of more than 300 lines: each variant is built, stepped and counted by the same rank.

Rank 0 takes orders from the benchmark through a pipe and passes them on; every order is one optimizer step, timed
between two barriers, or with local steps a whole cycle of them: H steps, of which the first follows a merge and the
last ends with the next, so that nothing is under way when another variant's turn comes. Everything is the product's own
(`build_model`, `TrainStep`) but two baselines: plain FSDP2, and a ring in place of gloo's reduce-scatter, with which
ZeRO-3 would put 3.5 instead of 2.6 model sizes on an uplink of two nodes x 4 ranks. That is gloo's doing, not ZeRO-3's,
and would flatter what is compared with it.

Weights and gradients are bf16 on every wire where a variant does not quantize them; the shards are fp32.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from megazpp.data.loader import make_micro_batch
from megazpp.inference.generate import draw_completions, evaluating
from megazpp.inference.sample import SampleConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaleConfig, build_loss_scaler
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker, run_worker, seed_everything
from megazpp.tensor_parallel.parameters import distribute_parameters, initialize_parameters_
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.training.metrics import cpu_seconds
from megazpp.training.setup import Built, ModelSpec, build_model
from megazpp.training.step import TrainStep
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.diloco import DiLoCo
from megazpp.zero.diloco_config import DilocoConfig, plan_diloco
from megazpp.zero.sharding import Sharding, materialize
from megazpp.zero.units import find_units

SEED, LEARNING_RATE = 1234, 1e-4
TIMEOUT_MINUTES = 60  # a step of 8 micro-batches takes minutes on the slowest links
PRECISION = PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)
LONG = 10**6  # iterations of the run that a variant with local steps pretends to be part of


class Variant(NamedTuple):
    """One way to train.

    Attributes:
        label: for people.
        zero: None for FSDP2 as it is.
        hsdp: one sharded copy of the model per node.
        per_token: completions are drawn without keeping the gathered weights from token to token.
        local: local steps, an island per node; by default every step is synchronized.
    """

    label: str
    zero: ZeroConfig | None
    hsdp: bool = False
    per_token: bool = False
    local: DilocoConfig = DilocoConfig()

    @property
    def steps(self) -> int:
        """Optimizer steps from one synchronization to the next."""
        return self.local.diloco_steps or 1


def local_steps(steps: int, delay: int) -> Variant:
    """ZeRO-3 on every node, and outer momentum, whose state is the largest."""
    config = DilocoConfig(diloco_steps=steps, diloco_delay=delay, diloco_outer_momentum=0.9)
    return Variant(f"local steps, H = {steps}" + (f", delay {delay}" if delay else ""), ZeroConfig(), local=config)


VARIANTS = {
    "fsdp2": Variant("FSDP2, gloo's collectives", None),
    "zero3": Variant("ZeRO-3, ring", ZeroConfig()),
    "zero3-per-token": Variant("ZeRO-3, ring, gathered per token", ZeroConfig(), per_token=True),
    "zero3-overlap": Variant("ZeRO-3, ring, overlap", ZeroConfig(overlap_param_gather=True, overlap_grad_reduce=True)),
    "hsdp": Variant("FSDP2 HSDP", ZeroConfig(), hsdp=True),
    "qwz": Variant("+qwZ", ZeroConfig(zero_quantized_weights=True)),
    "hpz": Variant("+hpZ", ZeroConfig(zero_hpz_partition_size="auto")),
    "qgz": Variant("+qgZ", ZeroConfig(zero_quantized_gradients=True)),
    "zeropp": Variant(
        "--zeropp, no overlap", ZeroConfig(zeropp=True, overlap_param_gather=False, overlap_grad_reduce=False)
    ),
    "zeropp-overlap": Variant("--zeropp", ZeroConfig(zeropp=True)),
    "weights-8-8": Variant("weights 8 8", ZeroConfig(zeropp=True, zero_weight_bits=(8, 8))),
    "weights-8-4": Variant("weights 8 4", ZeroConfig(zeropp=True, zero_weight_bits=(8, 4))),
    "weights-16-4": Variant("weights 16 4", ZeroConfig(zeropp=True, zero_weight_bits=(16, 4))),
    "diloco-10": local_steps(10, 0),
    "diloco-10-delay": local_steps(10, 2),
    "diloco-50": local_steps(50, 0),
    "diloco-50-delay": local_steps(50, 10),
}


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """The settings of what the ranks of one job build.

    Attributes:
        tp: tensor-parallel degree.
        variants: keys of VARIANTS.
        hidden_size, num_layers, vocab_size: of the model.
        seq_length, micro_batch_size: tokens of a sample and samples of a rank's micro-batch.
        rollout_tokens: of a completion; before a step each rank draws one for every sample of it. 0: no rollout.
    """

    nodes: int
    ranks_per_node: int
    tp: int
    variants: tuple[str, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    rollout_tokens: int = 0

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=max(self.hidden_size // 64, self.tp),
            max_position_embeddings=max(self.seq_length, self.rollout_tokens + 1),
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )


class RingAxis(MeshAxis):
    """An axis whose reduce-scatter is a ring of sends and receives: (n-1)/n of the buffer per rank, as counted."""

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if self.size == 1:
            return super().reduce_scatter(x, out=out)
        slots = x.contiguous().view(self.size, x.shape[0] // self.size, *x.shape[1:])
        successor, predecessor = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        with self._span("reduce_scatter", of):
            partial = slots[self.rank - 1]
            for hop in range(2, self.size + 1):  # the slot that is sum so far goes round and ends at its owner
                incoming = torch.empty_like(partial)
                received = dist.irecv(incoming, predecessor, group=self.group)
                for request in (received, dist.isend(partial, successor, group=self.group)):
                    assert request is not None
                    request.wait()
                partial = incoming.add_(slots[self.rank - hop])
        self.count("reduce_scatter", self.ring_bytes(x))
        return partial if out is None else out.copy_(partial)


def multiply_in_fp32_() -> None:
    """Have layers and attention of bf16 tensors compute in fp32.

    A CPU without instructions for bf16 takes a hundred times as long for bf16 matrix products, and the wires, not the
    arithmetic, are what is measured.
    """
    linear, attention = functional.linear, functional.scaled_dot_product_attention

    def fp32_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    def fp32_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return attention(q.float(), k.float(), v.float(), **options).to(q.dtype)

    functional.linear = fp32_linear  # type: ignore[assignment]
    functional.scaled_dot_product_attention = fp32_attention  # type: ignore[assignment]


def use_ring_(dims: ParallelDims) -> None:
    """Have the shard axis reduce in a ring."""
    dims.shard.__class__ = RingAxis


class Bench:
    """The variants' models and training steps of this rank."""

    def __init__(self, settings: BenchmarkSettings) -> None:
        cluster = Cluster(num_nodes=settings.nodes, ranks_per_node=settings.ranks_per_node)
        self.settings, self.cluster = settings, cluster
        self._dims: dict[Layout, ParallelDims] = {}
        self._steps = {name: self._build(VARIANTS[name]) for name in settings.variants}
        self._islands = {name: self._split(VARIANTS[name], self._steps[name]) for name in settings.variants}
        self._iterations = {name: VARIANTS[name].local.diloco_delay for name in settings.variants}
        self.num_parameters = sum(p.numel() for p in next(iter(self._steps.values())).model.parameters())
        some_dims = next(iter(self._dims.values()))
        generator = torch.Generator().manual_seed(SEED + some_dims.data_rank)
        shape = (settings.micro_batch_size, settings.seq_length + 1)
        self._batch = make_micro_batch(torch.randint(settings.vocab_size, shape, generator=generator), eod=None)
        self.world = some_dims.world

    def run(self, variant: str, micro_batches: int) -> dict[str, Any]:
        """A rollout, if there are any, and one optimizer step or cycle of one variant on all ranks.

        Returns:
            rollout_seconds and rollout_cross_bytes, 0 and None without one; seconds per step between two barriers;
            cpu_seconds of all ranks together and cross_bytes, per node as our counters have it, of both, per step; the
            last loss.
        """
        before = self._counted()
        dist.barrier()
        started = time.perf_counter()
        rollout: dict[str, Any] = {"rollout_seconds": 0.0, "rollout_cross_bytes": None}
        if self.settings.rollout_tokens:
            self._draw(variant, micro_batches)
            dist.barrier()
            seconds = time.perf_counter() - started
            rollout = {"rollout_seconds": seconds, "rollout_cross_bytes": self._per_node(before)[1]}
            started = time.perf_counter()
        steps = VARIANTS[variant].steps
        for _ in range(steps):
            loss = self._step(variant, micro_batches)
        dist.barrier()
        seconds = (time.perf_counter() - started) / steps
        cpu, sent = self._per_node(before)
        of_steps = {"cpu_seconds": sum(cpu) / steps, "cross_bytes": [all_sent // steps for all_sent in sent]}
        return {"seconds": seconds, "loss": loss, **of_steps, **rollout}

    def _step(self, variant: str, micro_batches: int) -> float:
        """One optimizer step, and what islands do after it; returns the loss."""
        step, islands = self._steps[variant], self._islands[variant]
        batches = [self._batch] * micro_batches
        loss = step(batches, learning_rate=LEARNING_RATE, weight_decay=0.0).loss
        if islands is not None:
            self._iterations[variant] += 1
            tokens = torch.tensor(self._batch.tokens.numel() * micro_batches * step.dims.shard.size)
            islands.count(tokens.double())
            islands.after_step(self._iterations[variant])
        return loss

    def _draw(self, variant: str, micro_batches: int) -> None:
        """A completion of one random token for each of this rank's samples of a step."""
        step, tokens = self._steps[variant], self.settings.rollout_tokens
        count = self.settings.micro_batch_size * micro_batches
        gathered = contextlib.nullcontext() if VARIANTS[variant].per_token else step.sharding.kept_gathered()
        with evaluating(step.model), gathered:
            draw_completions(
                step.model,
                step.dims.tp,
                self._batch.tokens[:1, :1].expand(count, 1).tolist(),
                SampleConfig(sample_tokens=tokens, sample_temperature=1.0, sample_top_k=0),
                torch.rand(count, tokens, dtype=torch.float64),
                ends=None,
            )

    def _per_node(self, before: torch.Tensor) -> tuple[list[float], list[int]]:
        """CPU seconds and bytes to other nodes of every node since `before`."""
        everyone = self.world.all_gather(self._counted() - before).view(self.cluster.num_nodes, -1, 2).sum(1)
        return everyone[:, 0].tolist(), [int(sent) for sent in everyone[:, 1]]

    def _counted(self) -> torch.Tensor:
        sent = sum(dims.counter.sent_bytes("cross") for dims in self._dims.values())
        return torch.tensor([[cpu_seconds(), sent]], dtype=torch.float64)

    def _build(self, variant: Variant) -> TrainStep:
        settings, cpu = self.settings, torch.device("cpu")
        config = ParallelConfig(tensor_model_parallel_size=settings.tp, hsdp=variant.hsdp)
        islands = 1 if variant.local.diloco_steps is None else settings.nodes
        layout = plan_dims(config, self.cluster, zero_stage=3, islands=islands)
        if layout not in self._dims:
            self._dims[layout] = ParallelDims(layout, device_type="cpu")
            use_ring_(self._dims[layout])
        dims = self._dims[layout]
        seed_everything(SEED, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
        if variant.zero is None:
            built = build_plain(settings, dims)
        else:
            model, size = settings.model, settings.vocab_size
            spec = ModelSpec(config=model, vocab_size=size, zero=variant.zero, precision=PRECISION, seed=SEED)
            built = build_model(spec, dims, cpu)
        optimizer = build_optimizer(list(built.model.named_parameters()), OptimizerConfig(), cpu)
        return TrainStep(*built, optimizer, build_loss_scaler(LossScaleConfig(), fp16=False), dims, clip_grad=1.0)

    def _split(self, variant: Variant, step: TrainStep) -> DiLoCo | None:
        """The islands of a variant with local steps."""
        settings = self.settings
        tokens = step.dims.shard.size * settings.micro_batch_size * settings.seq_length
        options = {"num_layers": settings.num_layers, "tokens_per_step": tokens}
        plan = plan_diloco(variant.local, ZeroConfig(), iterations=LONG, **options)
        return None if plan is None else DiLoCo(step.sharding, step.dims, plan, PRECISION)


def build_plain(settings: BenchmarkSettings, dims: ParallelDims) -> Built:
    """The same model wrapped with FSDP2 alone: nothing installed, gradients summed as ours are."""
    with torch.device("meta"):
        model = GPTModel(settings.model, vocab_size=settings.vocab_size, tp=dims.tp)
    if dims.tp.size > 1:
        distribute_parameters(model, dims.mesh["tp"])
    policy = MixedPrecisionPolicy(
        param_dtype=PRECISION.param_dtype, reduce_dtype=PRECISION.reduce_dtype, cast_forward_inputs=False
    )
    units: list[list[nn.Module]] = [*model.sharding_units(), [model]]
    for unit in units:
        target = unit[0] if len(unit) == 1 else unit
        fully_shard(target, mesh=dims.data_mesh, reshard_after_forward=True, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    materialize(model, torch.device("cpu"))
    initialize_parameters_(model, seed=SEED, draw_device=torch.device("cpu"))
    return Built(model, Sharding(model, find_units(model, dims.shard.size, data_dims=dims.data_mesh.ndim), 3))


def serve(settings: BenchmarkSettings, control: int, worker: Worker) -> None:
    """Build everything, then take the steps (variant, micro-batches) that rank 0 reads from the pipe, until None."""
    multiply_in_fp32_()
    bench = Bench(settings)
    pipe = Connection(control) if worker.rank == 0 else None
    if pipe:
        pipe.send({"parameters": bench.num_parameters})
    while (order := bench.world.share_object(pipe.recv() if pipe else None)) is not None:
        answer = bench.run(*order)
        if pipe:
            pipe.send(answer)


def main() -> None:
    """Arguments: the settings as JSON, and the number of the pipe that rank 0 has inherited."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    settings = BenchmarkSettings(**{**fields, "variants": tuple(fields["variants"])})
    config = LaunchConfig(distributed_backend="gloo", distributed_timeout_minutes=TIMEOUT_MINUTES, seed=SEED)
    run_worker(find_place(config), config, functools.partial(serve, settings, int(sys.argv[2])))


if __name__ == "__main__":
    main()
