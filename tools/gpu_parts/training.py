"""Part "training" of tools/gpu_check.py: the product on one GPU, beside the same model in plain PyTorch.

All sides of a case live in one process and take turns, so that whatever else the machine does falls on all; medians
count. A turn is a few optimizer steps, after which the host waits for the GPU. The product runs as `pretrain_gpt.py`
builds it, from its shipped configs. MFU is of the model's FLOPs: recomputation does not count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from benchmark_kernels import Piece, time_on
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.part import Report, Task
from gpu_parts.steps import build_step, count_waits, make_batches, peak_of, profile, read_config, time_turn
from megazpp.arguments import RunConfig
from megazpp.data.batch import MicroBatch
from megazpp.formatting import GIGA, TERA
from megazpp.model.config import GPTConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, Place
from megazpp.parallel.worker import Worker, run_worker
from megazpp.topology.cluster import Cluster
from megazpp.training.anomalies import Guard, LossHistory, NotFinite
from megazpp.training.batches import plan_batches
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops

LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
PLAIN, STAGE_1, SELECTIVE = (3, "none"), (1, "none"), (3, "selective")  # ZeRO stage, recomputation


class TrainingCase(NamedTuple):
    """Lines of the table, one per way to run the config, beside one peer; `cudnn`: all try cuDNN's attention first."""

    config: str
    compiled: bool
    variants: tuple[tuple[int, str], ...] = (PLAIN,)
    cudnn: bool = False


CASES = (  # most important first
    TrainingCase("gpt_125m", True, (PLAIN, STAGE_1)),
    TrainingCase("gpt_1b3", True, (PLAIN, STAGE_1, SELECTIVE)),
    TrainingCase("gpt_125m", False),
    TrainingCase("gpt_1b3", False, (PLAIN, SELECTIVE)),
    TrainingCase("gpt_350m", True, (PLAIN, SELECTIVE)),
    TrainingCase("gpt_350m", False),
    TrainingCase("gpt_1b3", True, cudnn=True),
    TrainingCase("gpt_125m", True, (SELECTIVE,)),
)
TOY_CASES = (
    TrainingCase("gpt_125m", True, (PLAIN, SELECTIVE)),
    TrainingCase("gpt_125m", False, (STAGE_1,), cudnn=True),
)
TOY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 2"
)


def measure(task: Task, report: Report) -> None:
    """Become a worker of one, as the program does."""
    if task.rehearse:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # no code generation
    torch.set_float32_matmul_precision("high")  # the peer's habit; the product computes nothing in fp32 here

    def main(worker: Worker) -> None:
        measure_cases(task, report, worker.device)

    run_worker(Place(started=True, world_size=1), LaunchConfig(nproc=1), main)


def measure_cases(task: Task, report: Report, device: torch.device) -> None:
    """What the GPU reaches where nothing but arithmetic counts, then all cases that there is time for."""
    size = task.size(8192, 64)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    [seconds] = time_on(device.type, [Piece("product", 0, 0, lambda: a @ b)], 20)
    report.note(f"a product of two bf16 matrices {size} x {size}: {2 * size**3 / seconds / TERA:.1f} TFLOP/s")
    longest = {True: 0.0, False: 0.0}  # seconds of a case so far, compiled or not
    for case in task.size(CASES, TOY_CASES):
        began = report.elapsed()
        if began + longest[case.compiled] > task.seconds:
            report.note(f"no time for {case.config}, compile {case.compiled}")
            continue
        try:
            with sdpa_kernel(CUDNN_FIRST, set_priority=True) if case.cudnn else contextlib.nullcontext():
                measure_case(case, task, report, device)
        except Exception as error:  # out of memory, say: the next case may fit
            traceback.print_exc()
            report.fail(f"{case}: {type(error).__name__}: {str(error)[:200]}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        longest[case.compiled] = max(longest[case.compiled], report.elapsed() - began)


def measure_case(case: TrainingCase, task: Task, report: Report, device: torch.device) -> None:
    """Build all sides, the peer last, and let them take turns."""
    vocab_size = task.size(50257, 300)
    flags = f"@configs/{case.config}.args {task.size('', TOY)}{' --compile' if case.compiled else ' --no-compile'}"
    configs = [
        read_config(f"{flags} --zero-stage {stage} --recompute-granularity {recompute}")
        for stage, recompute in case.variants
    ]
    model, length = configs[0].model, configs[0].data.seq_length
    assert length is not None
    padded = model.padded_vocab_size(vocab_size, 1)
    data = make_batches(configs[0], vocab_size, task.size(4, 2), device)
    builders: list[Callable[[], Callable[[], object]]] = [
        *(functools.partial(build_ours, config, vocab_size, data, device) for config in configs),
        lambda: functools.partial(PeerStep(model, padded, device, compiled=case.compiled), data),
    ]
    sides: list[Callable[[], object]] = []
    peaks = []  # bytes, of the model too
    for build in builders:
        before = torch.cuda.memory_allocated()
        sides.append(build())
        peaks.append(peak_of(sides[-1], task.size(3, 1), device) - before)
        print(f"{case}: side {len(sides)}: {time_turn(sides[-1], 1, device):.3f} s per step", flush=True)
    turns = [[time_turn(side, task.size(2, 1), device) for side in sides] for _ in range(task.size(5, 1))]
    seconds = [statistics.median(times) for times in zip(*turns, strict=True)]

    tokens = sum(batch.tokens.numel() for batch in data)
    flops = tokens * model_flops_per_token(model, padded_vocab_size=padded, seq_length=length)
    peak = peak_flops(device_name(device), torch.bfloat16)
    mfu = [f"{flops / each / peak:.1%}" if peak else "" for each in seconds]
    for index, (stage, recompute) in enumerate(case.variants):
        report.row(
            config=case.config,
            compile="on" if case.compiled else "off",
            recompute=recompute,
            ZeRO_stage=stage,
            attention="cuDNN first" if case.cudnn else "torch's choice",
            tokens_per_s=round(tokens / seconds[index]),
            TFLOP_per_s=round(flops / seconds[index] / TERA, 1),
            MFU=mfu[index],
            GB=round(peaks[index] / GIGA, 1),
            peer_tokens_per_s=round(tokens / seconds[-1]),
            peer_MFU=mfu[-1],
            peer_GB=round(peaks[-1] / GIGA, 1),
            of_peer=f"{statistics.median(turn[-1] / turn[index] for turn in turns):.3f} x",
            host_waits=count_waits(sides[index], device),
        )
    name = f"{case.config}-{'compiled' if case.compiled else 'eager'}{'-cudnn' if case.cudnn else ''}"
    profile(name, {"ours": sides[0], "peer": sides[-1]}, task.folder, device)


def build_ours(
    config: RunConfig, vocab_size: int, data: list[MicroBatch], device: torch.device
) -> Callable[[], object]:
    """A step of the product on this data, as `pretrain_gpt.py` builds it; it waits for the step before."""
    layout = plan_dims(config.parallel, Cluster(num_nodes=1, ranks_per_node=1), zero_stage=config.zero.stage)
    dims = ParallelDims(layout, device_type=device.type)
    step = build_step(config, dims, vocab_size=vocab_size, device=device)
    not_finite = NotFinite(step.sharding, dims, plan_batches(config.batches, data_parallel_size=1), None)
    step.guard = Guard(config.anomalies, not_finite, LossHistory(), dynamic_scale=False, log=print)
    return functools.partial(step.launch, data, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


class PeerBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden
        self.heads = config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, config.ffn_size), nn.Linear(config.ffn_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, seq, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class PeerGPT(nn.Module):
    """tokens and labels [B, S] -> mean loss."""

    def __init__(self, config: GPTConfig, padded_vocab_size: int) -> None:
        super().__init__()
        assert config.max_position_embeddings is not None
        self.wte = nn.Embedding(padded_vocab_size, config.hidden)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden)
        self.blocks = nn.ModuleList(PeerBlock(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, padded_vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=config.init_method_std)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class PeerStep:
    """One optimizer step of the peer on micro-batches: a GPT as people write it in plain PyTorch (nanoGPT's loop).

    fp32 parameters, autocast to bf16, scaled_dot_product_attention, tied embeddings, fused AdamW, all of it compiled.
    """

    def __init__(self, config: GPTConfig, padded_vocab_size: int, device: torch.device, *, compiled: bool) -> None:
        with device:
            self.model = PeerGPT(config, padded_vocab_size)
        self._run = torch.compile(self.model) if compiled else self.model
        self._device_type = device.type
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> None:
        for batch in micro_batches:
            with torch.autocast(self._device_type, dtype=torch.bfloat16):
                loss = self._run(batch.tokens, batch.labels) / len(micro_batches)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
