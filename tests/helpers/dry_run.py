"""Dry run: run one optimizer step of one rank without a cluster, to compare its traffic and memory with the planner.

The mesh, the model, FSDP2 with this project's collectives, and the step run as in training. Of many micro-batches, the
dry run executes only the first, a middle one and the last. Under DiLoCo, a synchronization of all fragments follows.
Two things are replaced:

- Process groups use torch's back end "fake", which sends nothing.
- Tensors have shapes but no memory (FakeTensorMode). `.item()` returns 1.

The plan assumes a CPU as well. The bytes sent are the same on every device. RMSNorm and attention with dropout save the
same tensors for backward as CUDA's kernels. Data loading, checkpoints and the verification of gathered weights do not
run. With --reset-attention-mask every sample is one document, and attention uses a mask, as on a CPU.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.data.loader import make_micro_batch
from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import ReplicaGroups
from megazpp.optim.build import build_optimizer
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.estimate import Estimator, build_step_simulator
from megazpp.planner.simulator import Memory
from megazpp.planner.step import (
    TrafficTable,
    measure,
    most_under_way,
    summed,
    traffic_between,
)
from megazpp.planner.trace import SIMULATED_FLOAT8, fused_norm, replaced
from megazpp.planner.variants import changed
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan, plan_run
from megazpp.topology.cluster import Cluster
from megazpp.training.config import ModelSpec
from megazpp.training.objective import Objective
from megazpp.training.setup import ShardedModel, model_on_meta, shard_built
from megazpp.training.step import TrainStep

CPU = torch.device("cpu")
LOSS_BYTES = 4  # an fp32 loss of each micro-batch takes these bytes until the end of the step


class DryTask(NamedTuple):
    """The part of a dry run that depends on the kind of training: pretraining or an objective of post-training.

    Attributes:
        built: sharded model on fake tensors.
        batch: micro-batch; all micro-batches of a step are this one.
        objective: objective of the training; None for the loss of a language model. The dry run does not compute the
            objective's metrics, because fake tensors have no values.
        before_step: function that is called before each counted step, to run forwards of the reference and reward
            models.
    """

    built: ShardedModel
    batch: Any
    objective: Objective | None = None
    before_step: Callable[[], object] = lambda: None


MakeTask = Callable[[ModelSpec, ParallelDims, FakeTensorMode], DryTask]


class DryRun(NamedTuple):
    """Result of a dry run: planned and counted communication and memory of one optimizer step of one rank.

    Attributes:
        planned: planned calls and bytes of the step, and of a DiLoCo synchronization ({} without DiLoCo).
        counted: counted calls and bytes of the step, and of a DiLoCo synchronization.
        memory: planned bytes by kind at the memory peak.
        live_bytes: counted bytes of all tensors at the memory peak.
    """

    planned: tuple[TrafficTable, TrafficTable]
    counted: tuple[TrafficTable, TrafficTable]
    memory: Counter[Memory]
    live_bytes: int


def dry_run(config: RunConfig, cluster: Cluster, *, rank: int) -> DryRun:
    """Plan one optimizer step of a rank, run it with fake tensors, and return both results.

    Args:
        config: flags of the run, with --vocab-size.
        cluster: cluster of the run.
        rank: global rank whose part of the step this process runs.
    """
    plan = plan_on_cpus(config, cluster)
    simulator = build_step_simulator(config, plan, device_type=CPU.type, rank=rank, on_cpu=True)
    count = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
    planned = measure(simulator, count).traffic, simulator.synchronize().traffic

    def language_model(spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> DryTask:
        built = shard_built(model_on_meta(spec, dims, CPU), spec, dims)
        with fake:
            built.model.to_empty(device=CPU)
            return language_model_task(config, plan, built)

    counted, live_bytes = count_step(config, plan, rank, language_model)
    return DryRun(planned, counted, simulator.ledger.peak, live_bytes)


def plan_on_cpus(config: RunConfig, cluster: Cluster) -> RunPlan:
    """Return the plan of a run on CPUs; the planner resolves `--zero-weight-delta auto` to one of its other values."""
    choice = Estimator(cluster, device_type=CPU.type).choose_weight_delta(config)
    return plan_run(config, cluster, device_type=CPU.type, weight_delta=choice)


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Make this process `rank` of a job inside the context; the other `world_size` - 1 ranks do not exist.

    Collectives use torch's back end "fake", which returns at once and sends nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the back end "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def language_model_task(config: RunConfig, plan: RunPlan, built: ShardedModel) -> DryTask:
    """Return the dry run's task for pretraining: the model `built`, and a micro-batch of zeros in the run's size."""
    seq_length = config.data.seq_length
    assert seq_length is not None
    samples = torch.zeros(plan.batches.micro_batch_size, seq_length + 1, dtype=torch.int64)
    batch = make_micro_batch(samples, eod=None)
    if config.data.reset_attention_mask:
        ends = torch.arange(0, samples.shape[0] * seq_length + 1, seq_length, dtype=torch.int32)
        batch = batch._replace(document_starts=ends)
    return DryTask(built, batch)


def count_step(
    config: RunConfig, plan: RunPlan, rank: int, make_task: MakeTask
) -> tuple[tuple[TrafficTable, TrafficTable], int]:
    """Run the optimizer step of a dry run on fake tensors, and count its traffic and its peak memory.

    A step of one micro-batch comes first. It creates the optimizer's moments and the error feedback, and is not
    counted.

    Args:
        config: flags of the run.
        plan: layout, wire formats and batch sizes of the run.
        rank: global rank whose part of the step this process runs.
        make_task: function that builds the model, a micro-batch and the objective.

    Returns:
        ((traffic of the step, traffic of a DiLoCo synchronization), bytes of all tensors at the memory peak).
    """
    # ---- build the model and the mesh of one rank
    vocab_size = config.tokenizer.vocab_size
    assert vocab_size is not None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    spec = changed(config, model={"compile": False}).model_spec(vocab_size, plan.wire)
    if config.model.fp8_format is not None:
        spec = dataclasses.replace(spec, product=SIMULATED_FLOAT8)
    with fake_ranks(rank, plan.layout.cluster.world_size):
        # No threads run the communication queues, because FakeTensorMode applies only to the thread that enters it
        dims = ParallelDims(plan.layout, device_type=CPU.type, nccl=config.nccl, threads=False)
        task = make_task(spec, dims, fake)
        if task.objective is not None:
            task.objective.metrics = dict  # type: ignore[method-assign]
        with fake, replaced(rms_norm=fused_norm), AttentionDropout(), FakeScalars(), PeakBytes() as live:
            # ---- build the optimizer and the training step
            replica_groups = None
            if (diloco := plan.of(DilocoPlan)) is not None:
                replica_groups = ReplicaGroups(task.built.sharding, dims, diloco, config.precision)
            dtype = config.precision.param_dtype
            step = TrainStep(
                *task.built,
                build_optimizer(task.built.model, config.optimizer, dims=dims, dtype=dtype),
                LossScaler(config.loss_scale, fp16=config.precision.fp16),
                dims,
                clip_grad=config.optimizer.clip_grad,
                objective=task.objective,
            )
            # ---- the first step, which is not counted; it leaves DiLoCo's messages in flight
            step([task.batch], learning_rate=1.0, weight_decay=0.0, iteration=1)
            if replica_groups is not None:
                _send_what_is_under_way(replica_groups)
            # ---- run the counted step. If it has more than 3 micro-batches, run two shorter steps instead, with 2 and
            # with 3 of them. Their difference is the traffic of each further micro-batch
            micro_batches = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
            rest, sent = max(micro_batches - 3, 0), []
            for count in (2, 3) if rest else (micro_batches,):
                before = dims.counter.table()
                gc.collect()  # free earlier models, whose reference cycles hold tensors that would count as memory
                live.peak = 0
                task.before_step()
                step([task.batch] * count, learning_rate=1.0, weight_decay=0.0, iteration=1)
                sent.append(traffic_between(before, dims.counter.table()))
            # ---- count the synchronization of DiLoCo's replica groups
            before = dims.counter.table()
            if replica_groups is not None:
                replica_groups.finish()
            synchronization = traffic_between(before, dims.counter.table())
    return (summed((1 + rest, sent[-1]), (-rest, sent[0])), synchronization), live.peak + rest * LOSS_BYTES


def _send_what_is_under_way(replica_groups: ReplicaGroups) -> None:
    """Start synchronizations of DiLoCo until the bytes of their messages in flight are the most that a step can have.

    With a delay of 0 no messages are in flight during a step, so nothing is done.
    """
    plan = replica_groups.plan
    if plan.delay:
        _, last = most_under_way(replica_groups.fragments, plan)
        # bring DiLoCo into its steady state: send each fragment once, and then again the fragments up to index `last`
        for turn in range(1, plan.fragments + last + 2):
            replica_groups.after_step(turn * plan.steps // plan.fragments)


class AttentionDropout(TorchFunctionMode):
    """Function mode that gives attention with dropout the memory of CUDA's fused kernels, which keep no S x S scores.

    On a CPU, torch has no fused attention with dropout and keeps several S x S tensors per layer. The mode runs
    attention without dropout instead, because fake tensors have no values that dropout could change.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and "dropout_p" in options:
            options["dropout_p"] = 0.0
        return func(*args, **options)


class FakeScalars(TorchDispatchMode):
    """Dispatch mode in which `.item()` of a fake tensor returns 1, and `torch.equal` returns True.

    Fake tensors have no values, so both calls would fail otherwise.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


class PeakBytes(TorchDispatchMode):
    """Dispatch mode that measures the memory peak of all tensors that operations of this thread read or write.

    FSDP2 frees storages by resizing them, and a dispatch mode does not see a resize. Therefore the mode keeps an upper
    bound of the bytes in use, which only grows. When the bound exceeds the peak, the mode reads the sizes of all
    storages again, which gives the exact bytes.

    Attributes:
        peak: most bytes in use at once since this attribute was last set to 0.
        fullest: bytes of each storage when `peak` was reached, by the storage's `_cdata`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._at_most = 0
        self.fullest: dict[int, int] = {}
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            # Test the type first, because reading the device of a fake tensor is slow
            if isinstance(tensor, FakeTensor) or (isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"):
                storage = tensor.untyped_storage()
                grown = storage.nbytes() - self._sizes.get(storage, 0)
                if grown > 0:
                    self._sizes[storage] = storage.nbytes()
                    self._at_most += grown
        if self._at_most > self.peak:
            sizes = [(storage, storage.nbytes()) for storage in list(self._sizes)]
            self._sizes.update(sizes)
            self._at_most = sum(size for _, size in sizes)
            if self._at_most > self.peak:
                self.peak, self.fullest = self._at_most, {storage._cdata: size for storage, size in sizes}
        return result
