"""Steps as `pretrain_gpt.py` takes them, without its data and checkpoints, and what one does to the GPU.

Time, memory, waits of the host, kernels; on the CPU only time.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megazpp.arguments import RunConfig, parse_run_config
from megazpp.data.batch import MicroBatch, make_micro_batch
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.parallel.dims import ParallelDims
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep

ROOT = Path(__file__).resolve().parents[2]
PROFILED_ROWS = 25


def read_config(flags: str, **model: Any) -> RunConfig:
    """What `pretrain_gpt.py` makes of the flags; `model`: other values of the shape."""
    config = parse_run_config(flags.split(), ROOT).config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def build_step(config: RunConfig, dims: ParallelDims, *, vocab_size: int, device: torch.device) -> TrainStep:
    """The model in shards, its optimizer and its step."""
    built = build_model(config.model_spec(vocab_size), dims, device)
    optimizer = build_optimizer(list(built.model.named_parameters()), config.optimizer, device)
    scaler = build_loss_scaler(config.loss_scale, fp16=config.precision.fp16)
    return TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)


def make_batches(
    config: RunConfig, vocab_size: int, micro_batches: int, device: torch.device, *, seed: int = 1234
) -> list[MicroBatch]:
    """Random tokens in the config's shape."""
    samples, length = config.batches.micro_batch_size, config.data.seq_length
    assert samples is not None
    assert length is not None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab_size, (micro_batches, samples, length + 1), generator=generator)
    return [make_micro_batch(each, eod=None).to(device) for each in drawn]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_turn(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds of one step."""
    wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        run()
    wait(device)
    return (time.perf_counter() - started) / steps


def peak_of(run: Callable[[], object], times: int, device: torch.device) -> int:
    """Warm up; the most bytes that were allocated during the last run (moments too)."""
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
    return torch.cuda.max_memory_allocated()


def count_waits(run: Callable[[], object], device: torch.device) -> int | str:
    """How often the host waits for the GPU in a step, as torch sees it; where is in the log."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "synchroniz" in str(warning.message)]
    for warning in found:
        print(f"the host waits: {warning.filename}:{warning.lineno}")
    return len(found)


def profile(name: str, sides: Mapping[str, Callable[[], object]], folder: Path, device: torch.device) -> None:
    """What one step of each side spends its time on, into files."""
    if device.type != "cuda":
        return
    for side, run in sides.items():
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiled:
            run()
            wait(device)
        table: Any = profiled.key_averages().table(sort_by="self_device_time_total", row_limit=PROFILED_ROWS)
        (folder / f"{name}-{side}.txt").write_text(table)
