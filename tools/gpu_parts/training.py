"""Part "training" of tools/gpu_check.py: the product on one GPU, beside the same model in plain PyTorch.

All sides of a case live in one process and take turns, so that whatever else the machine does falls on all; medians
count. A turn is a few optimizer steps, after which the host waits for the GPU. The product runs as `pretrain_gpt.py`
builds it, from its shipped configs; the peer is peer.py. MFU is of the model's FLOPs: recomputation does not count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from benchmark_kernels import Piece, time_on
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.measure import allocated, count_waits, peak_of, profile, time_turn
from gpu_parts.part import Report, Task, run_part
from gpu_parts.peer import PeerStep
from gpu_parts.steps import build_step, make_batches, read_config
from megazpp.arguments import RunConfig
from megazpp.formatting import GIGA, TERA
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, Place
from megazpp.parallel.worker import Worker, run_worker
from megazpp.topology.cluster import Cluster
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops
from megazpp.training.step import TrainStep

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class TrainingVariant(NamedTuple):
    """How the product runs a config."""

    zero_stage: int = 3
    recompute: str = "none"


class TrainingCase(NamedTuple):
    """Some lines of the table, beside one peer; `cudnn`: all sides try cuDNN's attention first."""

    config: str
    compiled: bool
    variants: tuple[TrainingVariant, ...] = (TrainingVariant(),)
    cudnn: bool = False


class Side(NamedTuple):
    """One that takes turns: a step, and the bytes of what it was built with."""

    run: Callable[[], object]
    built_bytes: int


class TrainingSizes(NamedTuple):
    """
    Attributes:
        cases: most important first.
        shrink: flags that make toys of the configs.
        vocab_size: tokens.
        micro_batches: of a step.
        warm_up, turns, steps: untimed steps, turns of each side, steps of a turn.
        product: rows and columns of the matrices whose product is timed.
    """

    cases: tuple[TrainingCase, ...]
    shrink: tuple[str, ...]
    vocab_size: int
    micro_batches: int
    warm_up: int
    turns: int
    steps: int
    product: int


TOY = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "2"),
)
PLAIN, STAGE_1, SELECTIVE = TrainingVariant(), TrainingVariant(zero_stage=1), TrainingVariant(recompute="selective")
SIZES = {
    "gpu": TrainingSizes(
        cases=(
            TrainingCase("gpt_125m", True, (PLAIN, STAGE_1)),
            TrainingCase("gpt_1b3", True, (PLAIN, STAGE_1, SELECTIVE)),
            TrainingCase("gpt_125m", False),
            TrainingCase("gpt_1b3", False, (PLAIN, SELECTIVE)),
            TrainingCase("gpt_350m", True, (PLAIN, SELECTIVE)),
            TrainingCase("gpt_350m", False),
            TrainingCase("gpt_1b3", True, cudnn=True),
            TrainingCase("gpt_125m", True, (SELECTIVE,)),
        ),
        shrink=(),
        vocab_size=50257,
        micro_batches=4,
        warm_up=3,
        turns=5,
        steps=2,
        product=8192,
    ),
    "rehearsal": TrainingSizes(
        cases=(
            TrainingCase("gpt_125m", True, (PLAIN, SELECTIVE)),
            TrainingCase("gpt_125m", False, (STAGE_1,), cudnn=True),
        ),
        shrink=TOY,
        vocab_size=300,
        micro_batches=2,
        warm_up=1,
        turns=1,
        steps=1,
        product=64,
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
    report.note(f"a product of two bf16 matrices {sizes.product} x {sizes.product}: {product_rate(sizes, device)}")
    longest = {True: 0.0, False: 0.0}  # seconds of a case so far, compiled or not
    for case in sizes.cases:
        if report.elapsed() + longest[case.compiled] > task.seconds:
            report.note(f"no time for {case.config}, compile {case.compiled}")
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


def product_rate(sizes: TrainingSizes, device: torch.device) -> str:
    """What the GPU reaches where nothing but arithmetic counts."""
    a, b = (torch.randn(sizes.product, sizes.product, device=device).to(torch.bfloat16) for _ in range(2))
    [seconds] = time_on(device.type, [Piece("product", 0, 0, lambda: a @ b)], 20)
    return f"{2 * sizes.product**3 / seconds / TERA:.1f} TFLOP/s"


def measure_case(case: TrainingCase, sizes: TrainingSizes, task: Task, report: Report, device: torch.device) -> None:
    """Build all sides, let them take turns."""
    configs = [read_case(case, variant, sizes) for variant in case.variants]
    model, length = configs[0].model, configs[0].data.seq_length
    assert length is not None
    padded = model.padded_vocab_size(sizes.vocab_size, 1)
    data = make_batches(configs[0], sizes.vocab_size, sizes.micro_batches, device)

    def ours(config: RunConfig) -> Callable[[], object]:
        step = build_ours(config, sizes, device)
        return functools.partial(step, data, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    builders: list[Callable[[], Callable[[], object]]] = [functools.partial(ours, config) for config in configs]
    builders.append(lambda: functools.partial(PeerStep(model, padded, device, compiled=case.compiled), data))
    sides, peaks = [], []
    for build in builders:
        before = allocated(device)
        run = build()
        sides.append(Side(run, allocated(device) - before))
        peaks.append(sides[-1].built_bytes + peak_of(run, sizes.warm_up, device))
        print(f"{case}: side {len(sides)}: {time_turn(run, 1, device):.3f} s per step", flush=True)
    turns = [[time_turn(side.run, sizes.steps, device) for side in sides] for _ in range(sizes.turns)]
    seconds = [statistics.median(turn[index] for turn in turns) for index in range(len(sides))]

    tokens = sum(batch.tokens.numel() for batch in data)
    flops = tokens * model_flops_per_token(model, padded_vocab_size=padded, seq_length=length)
    peak = peak_flops(device_name(device), torch.bfloat16)
    mfu = [f"{flops / each / peak:.1%}" if peak else "" for each in seconds]
    for index, variant in enumerate(case.variants):
        report.row(
            config=case.config,
            compile="on" if case.compiled else "off",
            recompute=variant.recompute,
            ZeRO_stage=variant.zero_stage,
            attention="cuDNN first" if case.cudnn else "torch's choice",
            tokens_per_s=round(tokens / seconds[index]),
            TFLOP_per_s=round(flops / seconds[index] / TERA, 1),
            MFU=mfu[index],
            GB=round(peaks[index] / GIGA, 1),
            peer_tokens_per_s=round(tokens / seconds[-1]),
            peer_MFU=mfu[-1],
            peer_GB=round(peaks[-1] / GIGA, 1),
            of_peer=f"{statistics.median(turn[-1] / turn[index] for turn in turns):.3f} x",
            host_waits=count_waits(sides[index].run, device),
        )
    name = f"{case.config}-{'compiled' if case.compiled else 'eager'}{'-cudnn' if case.cudnn else ''}"
    profile(name, {"ours": sides[0].run, "peer": sides[-1].run}, task.folder, device)


def read_case(case: TrainingCase, variant: TrainingVariant, sizes: TrainingSizes) -> RunConfig:
    """The shipped config with this case's flags."""
    flags = [f"@configs/{case.config}.args", *sizes.shrink, "--recompute-granularity", variant.recompute]
    return read_config(*flags, "--zero-stage", str(variant.zero_stage), *(["--compile"] if case.compiled else []))


def build_ours(config: RunConfig, sizes: TrainingSizes, device: torch.device) -> TrainStep:
    layout = plan_dims(config.parallel, Cluster(num_nodes=1, ranks_per_node=1), zero_stage=config.zero.stage)
    return build_step(config, ParallelDims(layout, device_type=device.type), vocab_size=sizes.vocab_size, device=device)


if __name__ == "__main__":
    sys.exit(run_part(measure))
