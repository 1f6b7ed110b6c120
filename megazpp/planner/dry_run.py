"""`--dry-run`: the program itself as one rank of a cluster that is not there, against its plan.

The mesh, the model, FSDP2 with our comms installed, and one optimizer step run as in training; of many micro-batches
the first, a middle and the last one, and with local steps a synchronization of all fragments. Two things are pretended:
the process groups are torch's back end "fake", which sends nothing, and tensors have shapes and no memory
(FakeTensorMode on top of the meta device, because FSDP2 refuses parameters that are on it), so that `.item()` is 1. The
process is a CPU's, whatever the plan is for: bytes do not depend on that, and RMSNorm keeps what CUDA's kernel keeps.
Not run: data loading, checkpoints, and comparing kept weights. With --reset-attention-mask every sample is one
document, and attention inside it takes a CPU's way, a mask.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.base.program import MEGA, aligned
from megazpp.data.loader import make_micro_batch
from megazpp.diloco.config import DilocoPlan
from megazpp.diloco.outer import Islands
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer, build_orthogonalizer
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.estimate import paper_step
from megazpp.planner.report import describe_plan
from megazpp.planner.simulator import Memory
from megazpp.planner.step import (
    NOTHING,
    SIMULATED_MICRO_BATCHES,
    TrafficTable,
    measure,
    most_under_way,
    summed,
    traffic_between,
)
from megazpp.planner.trace import FLOAT8_ON_PAPER, FusedNorm
from megazpp.planner.variants import changed, for_planning
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan, check_run_config
from megazpp.topology.cluster import Cluster
from megazpp.training.objective import Objective
from megazpp.training.setup import ModelSpec, ShardedModel, shard_on_meta
from megazpp.training.step import TrainStep

CPU = torch.device("cpu")
LOSS_BYTES = 4  # of each micro-batch, until the step ends


class DryTask(NamedTuple):
    """The part of a dry run in which trainings differ: the model on fake tensors, and each micro-batch.

    Attributes:
        objective: None: the language model's loss. Its metrics are not asked for: no tensor has values.
        before_step: is called before each step, for forwards of other models.
    """

    built: ShardedModel
    batch: Any
    objective: Objective | None = None
    before_step: Callable[[], object] = lambda: None


MakeTask = Callable[[ModelSpec, ParallelDims, FakeTensorMode], DryTask]


class DryRun(NamedTuple):
    """One optimizer step of one rank.

    Attributes:
        planned, counted: calls and bytes of the step, and of a synchronization of islands; {} without those.
        memory: planned for this rank.
        live_bytes: of the tensors that live at the fullest moment, counted.
    """

    plan: RunPlan
    rank: int
    micro_batches: int
    planned: tuple[TrafficTable, TrafficTable]
    counted: tuple[TrafficTable, TrafficTable]
    memory: Counter[Memory]
    live_bytes: int

    @property
    def agrees(self) -> bool:
        return self.planned == self.counted

    def describe(self) -> str:
        rest, memory = self.micro_batches - SIMULATED_MICRO_BATCHES, self.memory.total()
        note = f" ({SIMULATED_MICRO_BATCHES} micro-batches run, the middle one counts {rest + 1} times)"
        titles = [f"rank {self.rank} of {self.plan.layout.cluster.world_size}, one optimizer step{note * (rest > 0)}:"]
        if (diloco := self.plan.of(DilocoPlan)) is not None:
            titles.append(f"and one synchronization of all fragments, every {diloco.steps} steps:")
        lines = [*describe_plan(self.plan, self.micro_batches), ""]
        for title, planned, counted in zip(titles, self.planned, self.counted, strict=False):
            lines += [title, *_compared(planned, counted)]
        lines.append(
            f"tensors live at the fullest moment: {self.live_bytes / MEGA:.3f} MB, planned "
            f"{memory / MEGA:.3f} MB ({100 * (memory / self.live_bytes - 1):+.1f} %)"
        )
        return "\n".join(lines)


def _compared(planned: TrafficTable, counted: TrafficTable) -> Iterator[str]:
    """Both tables side by side, and whether they are equal."""
    header = ("wire", "axis", "collective", "calls planned", "counted", "bytes planned", "counted", "")
    rows: list[tuple[str, ...]] = [header]
    for key in sorted(planned | counted):
        ours, theirs = planned.get(key, NOTHING), counted.get(key, NOTHING)
        calls, sizes = (tuple(map(str, pair)) for pair in zip(ours, theirs, strict=True))
        rows.append((*key, *calls, *sizes, "" if ours == theirs else "DIFFERS"))
    yield from aligned(rows)
    sent = sum(traffic.sent_bytes for traffic in counted.values())
    yield f"{sent / MEGA:.3f} MB: " + ("as planned" if planned == counted else "NOT AS PLANNED")


def dry_run(config: RunConfig, cluster: Cluster, *, rank: int) -> DryRun:
    """Plan the optimizer step of `rank`, and run it.

    Raises:
        ValueError: flags that do not fit each other or the cluster, a rank that it does not have, or no --vocab-size.
    """
    config, plan = plan_dry_run(config, cluster, rank)
    paper = paper_step(config, plan, device_type=CPU.type, rank=rank, on_cpu=True)
    count = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
    planned = measure(paper, count).traffic, paper.synchronize().traffic

    def language_model(spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> DryTask:
        built = shard_on_meta(spec, dims, CPU)
        with fake:
            built.model.to_empty(device=CPU)
            return language_model_task(config, plan, built)

    counted, live_bytes = count_step(config, plan, rank, language_model)
    return DryRun(plan, rank, count, planned, counted, paper.ledger.peak, live_bytes)


def plan_dry_run(config: RunConfig, cluster: Cluster, rank: int) -> tuple[RunConfig, RunPlan]:
    """The run that a dry run takes a step of, and its plan on CPUs; raises as `dry_run` does."""
    config = for_planning(config, "--dry-run")
    if not 0 <= rank < cluster.world_size:
        raise ValueError(f"--dry-run-rank {rank} is not a rank of the cluster: it has 0 to {cluster.world_size - 1}")
    return config, check_run_config(config, cluster, device_type=CPU.type)


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """This process is `rank` of a job whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the back end

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def language_model_task(config: RunConfig, plan: RunPlan, built: ShardedModel) -> DryTask:
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
    """Take a short step (for moments, error feedback, the order of use) and then a whole one.

    Returns:
        The traffic of a step, that of a synchronization of islands, and the most bytes that live.
    """
    vocab_size = config.tokenizer.vocab_size
    assert vocab_size is not None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    spec = changed(config, model={"compile": False}).model_spec(vocab_size, plan.wire)
    if config.model.fp8_format is not None:
        spec = dataclasses.replace(spec, product=FLOAT8_ON_PAPER)
    with fake_ranks(rank, plan.layout.cluster.world_size):
        # a thread would not see the modes that make its tensors fake
        dims = ParallelDims(plan.layout, device_type=CPU.type, nccl=config.nccl, threads=False)
        task = make_task(spec, dims, fake)
        if task.objective is not None:
            task.objective.metrics = dict  # type: ignore[method-assign]
        with fake, FusedNorm(), FakeScalars(), PeakBytes() as live:
            islands = None
            if (diloco := plan.of(DilocoPlan)) is not None:
                islands = Islands(task.built.sharding, dims, diloco, config.precision)
            model, dtype = task.built.model, config.precision.param_dtype
            matrices = build_orthogonalizer(model, config.optimizer, dims, dtype)
            step = TrainStep(
                *task.built,
                build_optimizer(list(model.named_parameters()), config.optimizer, CPU, orthogonalizer=matrices),
                build_loss_scaler(config.loss_scale, fp16=config.precision.fp16),
                dims,
                clip_grad=config.optimizer.clip_grad,
                objective=task.objective,
            )
            step([task.batch], learning_rate=1.0, weight_decay=0.0, iteration=1)
            if islands is not None:
                _send_what_is_under_way(islands)
            micro_batches = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
            rest, sent = max(micro_batches - SIMULATED_MICRO_BATCHES, 0), []
            for count in (SIMULATED_MICRO_BATCHES - 1, SIMULATED_MICRO_BATCHES) if rest else (micro_batches,):
                before = dims.counter.table()
                gc.collect()  # building a model leaves cycles
                live.peak = 0
                task.before_step()
                step([task.batch] * count, learning_rate=1.0, weight_decay=0.0, iteration=1)
                sent.append(traffic_between(before, dims.counter.table()))
            before = dims.counter.table()
            if islands is not None:
                islands.finish()
            synchronization = traffic_between(before, dims.counter.table())
    return (summed((1 + rest, sent[-1]), (-rest, sent[0])), synchronization), live.peak + rest * LOSS_BYTES


def _send_what_is_under_way(islands: Islands) -> None:
    """Have as many messages under way as there are at most during a step."""
    plan = islands.plan
    if plan.delay:
        _, last = most_under_way(islands.fragments, plan)
        for turn in range(1, plan.fragments + last + 2):  # all fragments, and then those up to the last of them
            islands.after_step(turn * plan.steps // plan.fragments)


class FakeScalars(TorchDispatchMode):
    """Makes `.item()` of a fake tensor 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


class PeakBytes(TorchDispatchMode):
    """`peak`: the most bytes that lived at once since it was set to 0, of tensors that operations of this thread had.

    FSDP2 empties storages by resizing them, of which no operation tells. So what is known only grows, until it would
    be a new peak: then all sizes are read anew. `fullest` has them at the peak, by the storage's `_cdata`.
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
            # the device of a fake tensor is a slow question
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
