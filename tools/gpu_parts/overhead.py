"""Part "overhead" of tools/gpu_check.py: what quantization costs a training step, measured on one rank that pretends.

The process is rank 0 of 2 nodes x 8 ranks that do not exist (torch's back end "fake"). Its collectives are copies of
the bytes that would arrive, on the streams on which they would arrive, so everything but the wire is real: shards of a
sixteenth, FSDP2, hops, queues, kernels. The same hops without quantization, and plain ZeRO-3, are the comparison; what
the quantization kernels take by the profiler is the most that they could cost if nothing hid them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable

import torch

from gpu_parts.part import Report, Task
from gpu_parts.steps import build_step, make_batches, read_config, time_turn, wait
from megazpp.arguments import RunConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.planner.dry_run import fake_ranks
from megazpp.topology.cluster import Cluster
from megazpp.training.step import TrainStep
from megazpp.zero.config import ZeroConfig

CLUSTER = Cluster(num_nodes=2, ranks_per_node=8)
QUANTIZED, UNQUANTIZED, ZERO_3 = "quantized", "16 bit", "ZeRO-3"
VARIANTS = {
    QUANTIZED: ZeroConfig(zeropp=True),
    UNQUANTIZED: ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16)),
    ZERO_3: ZeroConfig(),
}
KERNELS = ("_pack_kernel", "_unpack_sum_kernel")
VOCAB = 512  # so that the layers are nearly everything
CASES = ((6, "gpt_1b3", 1), (3, "gpt_6b7", 1), (8, "gpt_6b7", 8))  # layers of a config, split over TP ranks
TOY_CASES = ((2, "gpt_1b3", 1), (1, "gpt_6b7", 2))
TOY = (
    "--hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 16"
)


class CopyingAxis(MeshAxis):
    """An axis whose other ranks send what this one does."""

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        out.view(self.size, *x.shape).copy_(x.clone().expand(self.size, *x.shape))  # `x` may be a slot of `out`
        return out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        mine = x[: x.shape[0] // self.size]
        return mine.clone() if out is None else out.copy_(mine)

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        return x.clone()


def measure(task: Task, report: Report) -> None:
    """One row per case."""
    device, longest = torch.device(task.device), 0.0
    with fake_ranks(0, CLUSTER.world_size):
        for layers, name, tp in task.size(CASES, TOY_CASES):
            case, began = f"{layers} of {name}, TP {tp}", report.elapsed()
            if began + longest > task.seconds:
                report.note(f"no time for {case}")
                continue
            flags = f"@configs/{name}.args {task.size('--compile', TOY)} --tensor-model-parallel-size {tp}"
            flags += " --sequence-parallel" * (tp > 1)
            measure_layers(case, read_config(flags, num_layers=layers), task, report, device)
            torch._dynamo.reset()
            longest = max(longest, report.elapsed() - began)


def measure_layers(case: str, config: RunConfig, task: Task, report: Report, device: torch.device) -> None:
    """All variants in turn, then the kernels alone."""
    data = make_batches(config, VOCAB, 1, device)
    steps = {
        variant: functools.partial(build(config, zero, device), data, learning_rate=1e-4, weight_decay=0.0)
        for variant, zero in VARIANTS.items()
    }
    for step in steps.values():
        time_turn(step, task.size(3, 1), device)  # warms up
    turns = [{name: time_turn(step, 1, device) for name, step in steps.items()} for _ in range(task.size(15, 1))]
    seconds = {variant: statistics.median(turn[variant] for turn in turns) for variant in steps}
    kernels = kernel_seconds(steps[QUANTIZED], device)

    def slower_than(other: str) -> str:
        return f"{statistics.median(turn[QUANTIZED] / turn[other] for turn in turns) - 1:.1%}"

    report.row(
        layers=case,
        tokens=data[0].tokens.numel(),
        ms_of_a_step=round(seconds[QUANTIZED] * 1e3, 2),
        ms_at_16_bit=round(seconds[UNQUANTIZED] * 1e3, 2),
        slower_by=slower_than(UNQUANTIZED),
        ms_of_ZeRO_3=round(seconds[ZERO_3] * 1e3, 2),
        slower_than_ZeRO_3_by=slower_than(ZERO_3),
        ms_of_quantization_kernels=round(kernels * 1e3, 2),
        of_a_step=f"{kernels / seconds[QUANTIZED]:.1%}",
        goal="3 %",
    )


def build(config: RunConfig, zero: ZeroConfig, device: torch.device) -> TrainStep:
    """The rank's shards and its step."""
    dims = ParallelDims(plan_dims(config.parallel, CLUSTER, zero_stage=3), device_type=device.type)
    for axis in (dims.tp, dims.cross, dims.local, dims.shard):
        axis.__class__ = CopyingAxis
    return build_step(dataclasses.replace(config, zero=zero), dims, vocab_size=VOCAB, device=device)


def kernel_seconds(step: Callable[[], object], device: torch.device) -> float:
    """What the quantization kernels take in one step, added up; 0 on the CPU, which has other ones."""
    if device.type != "cuda":
        step()
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        step()
        wait(device)
    found = [event for event in profiled.key_averages() if event.key.startswith(KERNELS)]
    return sum(event.self_device_time_total for event in found) * 1e-6
