"""Part "overhead" of tools/gpu_check.py: what quantization costs a training step, measured on one rank that pretends.

The process is rank 0 of 2 nodes x 8 ranks that do not exist (torch's back end "fake"). Its collectives are copies of
the bytes that would arrive, on the streams on which they would arrive, so everything but the wire is real: shards of a
sixteenth, FSDP2, hops, lanes, kernels. The same hops without quantization are the comparison; what the quantization
kernels take by the profiler is the most that they could cost if nothing hid them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_check_measure import time_turn, wait
from gpu_check_part import Report, Task, run_part
from gpu_check_training import make_batches

from megazpp.arguments import RunConfig, parse_run_config
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.planner.dry_run import fake_ranks
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep
from megazpp.zero.config import ZeroConfig

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = Cluster(num_nodes=2, ranks_per_node=8)
VARIANTS = {
    "quantized": ZeroConfig(zeropp=True),
    "16 bit": ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16)),
}
KERNELS = ("_quantize_kernel", "_dequantize_sum_kernel", "_dequantize_sum_quantize_kernel")
GOAL = "3 %"
LEARNING_RATE = 1e-4


class Sizes(NamedTuple):
    """
    Attributes:
        layers: config -> how many of its layers.
        shrink: flags that make toys of the configs.
    """

    layers: dict[str, int]
    shrink: tuple[str, ...]
    warm_up: int
    turns: int


TOY = ("--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32", "--max-position-embeddings", "32")
SIZES = {
    "gpu": Sizes({"gpt_1b3": 6, "gpt_6b7": 3}, (), 3, 9),
    "rehearsal": Sizes({"gpt_1b3": 2}, (*TOY, "--micro-batch-size", "1", "--global-batch-size", "16"), 1, 1),
}
VOCAB = 512  # so that the layers are nearly everything


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
    """One row per config."""
    sizes = SIZES[task.sizes]
    device = torch.device(task.device)
    with fake_ranks(0, CLUSTER.world_size):
        for name, layers in sizes.layers.items():
            config = parse_run_config([f"@configs/{name}.args", *sizes.shrink], ROOT).config
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))
            measure_layers(f"{layers} of {name}", config, sizes, report, device)


def measure_layers(what: str, config: RunConfig, sizes: Sizes, report: Report, device: torch.device) -> None:
    """Both variants in turn, then the kernels alone."""
    data = make_batches(config, VOCAB, 1, device)
    steps = {
        variant: functools.partial(build(config, zero, device), data, learning_rate=LEARNING_RATE, weight_decay=0.0)
        for variant, zero in VARIANTS.items()
    }
    for step in steps.values():
        time_turn(step, sizes.warm_up, device)
    turns = [{variant: time_turn(step, 1, device) for variant, step in steps.items()} for _ in range(sizes.turns)]
    seconds = {variant: statistics.median(turn[variant] for turn in turns) for variant in steps}
    kernels = kernel_seconds(steps["quantized"], device)
    report.row(
        layers=what,
        tokens=data[0].tokens.numel(),
        ms_of_a_step=round(seconds["quantized"] * 1e3, 2),
        ms_at_16_bit=round(seconds["16 bit"] * 1e3, 2),
        slower_by=f"{1 - statistics.median(turn['16 bit'] / turn['quantized'] for turn in turns):.1%}",
        ms_of_quantization_kernels=round(kernels * 1e3, 2),
        of_a_step=f"{kernels / seconds['quantized']:.1%}",
        goal=GOAL,
    )


def build(config: RunConfig, zero: ZeroConfig, device: torch.device) -> TrainStep:
    """The rank's shards and its step."""
    layout = plan_dims(ParallelConfig(), CLUSTER, zero_stage=3)
    dims = ParallelDims(layout, device_type=device.type)
    dims.cross, dims.local = copying(dims.cross), copying(dims.local)
    built = build_model(dataclasses.replace(config, zero=zero).model_spec(VOCAB), dims, device)
    optimizer = build_optimizer(list(built.model.named_parameters()), config.optimizer, device)
    scaler = build_loss_scaler(config.loss_scale, fp16=False)
    return TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)


def copying(axis: MeshAxis) -> CopyingAxis:
    return CopyingAxis(
        axis.name, ranks=axis.ranks, rank=axis.rank, group=axis.group, wire=axis.wire, timeline=axis.timeline
    )


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


if __name__ == "__main__":
    sys.exit(run_part(measure))
