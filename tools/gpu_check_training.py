"""Part "training" of tools/gpu_check.py: the product on one GPU, beside the same model in plain PyTorch.

Both live in one process and take turns, so that whatever else the machine does falls on both; medians count. A turn is
a few optimizer steps, after which the host waits for the GPU. The product runs as `pretrain_gpt.py` builds it, from its
shipped configs; the peer is gpu_check_peer.py. MFU is of the model's FLOPs: recomputation does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_check_measure import allocated, count_waits, peak_of, profile, time_turn
from gpu_check_part import Report, Task, run_part
from gpu_check_peer import PeerStep
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazpp.arguments import RunConfig, parse_run_config
from megazpp.data.batch import MicroBatch, make_micro_batch
from megazpp.optim.loss_scale import build_loss_scaler
from megazpp.optim.optimizer import build_optimizer
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, Place
from megazpp.parallel.worker import Worker, run_worker
from megazpp.topology.cluster import Cluster
from megazpp.training.flops import TERA, model_flops_per_token, peak_flops
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
GIGA = 1e9
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Case(NamedTuple):
    """One line of the table; `cudnn`: both sides try cuDNN's attention first."""

    config: str
    compiled: bool
    recompute: str = "none"
    zero_stage: int = 3
    cudnn: bool = False


class Sizes(NamedTuple):
    """
    Attributes:
        cases: most important first.
        shrink: flags that make toys of the configs.
        vocab_size: tokens.
        micro_batches: of a step.
        warm_up, turns, steps: untimed steps, turns of each side, steps of a turn.
    """

    cases: tuple[Case, ...]
    shrink: tuple[str, ...]
    vocab_size: int
    micro_batches: int
    warm_up: int
    turns: int
    steps: int


TOY = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32")
SIZES = {
    "gpu": Sizes(
        cases=(
            Case("gpt_125m", True),
            Case("gpt_1b3", True),
            Case("gpt_125m", False),
            Case("gpt_1b3", False),
            Case("gpt_125m", True, zero_stage=1),
            Case("gpt_1b3", True, zero_stage=1),
            Case("gpt_1b3", True, cudnn=True),
            Case("gpt_350m", True),
            Case("gpt_1b3", True, "selective"),
            Case("gpt_350m", False),
            Case("gpt_125m", True, "selective"),
            Case("gpt_350m", True, "selective"),
        ),
        shrink=(),
        vocab_size=50257,
        micro_batches=4,
        warm_up=3,
        turns=5,
        steps=2,
    ),
    "rehearsal": Sizes(
        cases=(Case("gpt_125m", True), Case("gpt_125m", False, "selective", zero_stage=1, cudnn=True)),
        shrink=(*TOY, "--micro-batch-size", "1", "--global-batch-size", "2"),
        vocab_size=300,
        micro_batches=2,
        warm_up=1,
        turns=1,
        steps=1,
    ),
}


def measure(task: Task, report: Report) -> None:
    """Become a worker of one, as the program does."""
    if task.rehearse:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # no code generation
    torch.set_float32_matmul_precision("high")  # the peer's habit; the product computes nothing in fp32 here

    def main(worker: Worker) -> None:
        measure_cases(task, report, worker.device)

    run_worker(Place(started=True, world_size=1), LaunchConfig(nproc=1), main)


def measure_cases(task: Task, report: Report, device: torch.device) -> None:
    """All cases that there is time for."""
    sizes = SIZES[task.sizes]
    longest = {True: 0.0, False: 0.0}  # seconds of a case so far, compiled or not
    for case in sizes.cases:
        if report.elapsed() + longest[case.compiled] > task.seconds:
            report.note(f"no time for {case}")
            continue
        began = report.elapsed()
        try:
            with sdpa_kernel(CUDNN_FIRST, set_priority=True) if case.cudnn else contextlib.nullcontext():
                measure_case(case, sizes, task, report, device)
        except Exception as error:  # out of memory, say: the next case may fit
            traceback.print_exc()
            report.fail(f"{case}: {type(error).__name__}: {str(error)[:200]}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        longest[case.compiled] = max(longest[case.compiled], report.elapsed() - began)


def measure_case(case: Case, sizes: Sizes, task: Task, report: Report, device: torch.device) -> None:
    """Build both, let them take turns."""
    config = read_config(case, sizes)
    padded = config.model.padded_vocab_size(sizes.vocab_size, 1)
    data = make_batches(config, sizes.vocab_size, sizes.micro_batches, device)
    before = allocated(device)
    step = build_ours(config, sizes, device)
    ours_bytes = allocated(device) - before
    peer = PeerStep(config.model, padded, device, compiled=case.compiled)
    peer_bytes = allocated(device) - before - ours_bytes

    def ours() -> None:
        step(data, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    peers = functools.partial(peer, data)
    peaks = [peak_of(side, sizes.warm_up, device) for side in (ours, peers)]
    turns = [[time_turn(side, sizes.steps, device) for side in (ours, peers)] for _ in range(sizes.turns)]
    seconds = [statistics.median(turn[side] for turn in turns) for side in (0, 1)]
    tokens = sum(batch.tokens.numel() for batch in data)
    assert config.data.seq_length is not None
    flops = tokens * model_flops_per_token(config.model, padded_vocab_size=padded, seq_length=config.data.seq_length)
    peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16) if device.type == "cuda" else None
    report.row(
        config=case.config,
        compile="on" if case.compiled else "off",
        recompute=case.recompute,
        ZeRO_stage=case.zero_stage,
        attention="cuDNN first" if case.cudnn else "torch's choice",
        tokens_per_s=round(tokens / seconds[0]),
        TFLOP_per_s=round(flops / seconds[0] / TERA, 1),
        MFU=f"{flops / seconds[0] / peak:.1%}" if peak else "",
        GB=round((peaks[0] + ours_bytes) / GIGA, 1),
        peer_tokens_per_s=round(tokens / seconds[1]),
        peer_MFU=f"{flops / seconds[1] / peak:.1%}" if peak else "",
        peer_GB=round((peaks[1] + peer_bytes) / GIGA, 1),
        of_peer=f"{statistics.median(turn[1] / turn[0] for turn in turns):.3f} x",
        host_waits=count_waits(ours, device),
    )
    name = f"{case.config}-compile-{case.compiled}-{case.recompute}-{case.zero_stage}-{case.cudnn}"
    profile(name, {"ours": ours, "peer": peers}, task.folder, device)


def read_config(case: Case, sizes: Sizes) -> RunConfig:
    """The shipped config with this case's flags."""
    flags = [f"@configs/{case.config}.args", *sizes.shrink, "--recompute-granularity", case.recompute]
    flags += ["--zero-stage", str(case.zero_stage), *(["--compile"] if case.compiled else [])]
    config = parse_run_config(flags, ROOT).config
    limit = config.data.seq_length
    return dataclasses.replace(config, model=dataclasses.replace(config.model, max_position_embeddings=limit))


def build_ours(config: RunConfig, sizes: Sizes, device: torch.device) -> TrainStep:
    dims = ParallelDims(
        plan_dims(config.parallel, Cluster(num_nodes=1, ranks_per_node=1), zero_stage=config.zero.stage),
        device_type=device.type,
    )
    built = build_model(config.model_spec(sizes.vocab_size), dims, device)
    optimizer = build_optimizer(list(built.model.named_parameters()), config.optimizer, device)
    scaler = build_loss_scaler(config.loss_scale, fp16=False)
    return TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)


def make_batches(config: RunConfig, vocab_size: int, micro_batches: int, device: torch.device) -> list[MicroBatch]:
    """Random tokens in the config's shape."""
    samples, length = config.batches.micro_batch_size, config.data.seq_length
    assert samples is not None
    assert length is not None
    generator = torch.Generator().manual_seed(config.launch.seed)
    drawn = torch.randint(vocab_size, (micro_batches, samples, length + 1), generator=generator)
    return [make_micro_batch(each, eod=None).to(device) for each in drawn]


if __name__ == "__main__":
    sys.exit(run_part(measure))
