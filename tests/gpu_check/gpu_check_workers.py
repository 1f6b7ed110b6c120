"""Run the worker programs of gpu_check.py: `python -m gpu_check_workers baseline|pretended|optimizers|streams ...`.

"baseline" and "pretended" train for comparison with `pretrain_gpt.py`: with the same flags, and on random tokens.

baseline: a GPT-2 or Llama model in plain PyTorch, in the style of torchtitan. It uses FSDP2 on each block, bf16
parameters, fp32 gradients, fused AdamW and clipping. Each block and the head are compiled. Query, key and value come
from one matrix product.

pretended: this project's training step on rank 0 of 2 nodes x 8 ranks, of which only rank 0 exists (torch's back end
"fake"). Local copies of the same size on the same streams replace the collectives. The shards of 1/16, the hops, the
queues and the kernels are real; only the links are not.

optimizers: three steps with each optimizer and precision on the device and on the CPU, from the same weights.

streams: `pretrain_gpt.py` with deterministic kernels. With --disturbed it adds delays and NaN to every communication
queue (parallel/comm_queue.py) and to the streams that submit tasks to it, to expose races:

- Random delays before and after a task: if a result is read too early, the reader gets the old contents.
- Random delays of the compute before layers: if memory is overwritten too early, the compute reads the new contents.
- Memory of random sizes is allocated, filled with NaN and freed: a buffer that was freed while another stream still
  used it becomes NaN.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore  # the import also registers the back end "fake"

import pretrain_gpt
from megazpp.base.program import leave, program
from megazpp.data.loader import MicroBatch, make_micro_batch, on_device
from megazpp.features import FEATURES
from megazpp.model.backends import find_product
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import TransformerLayer
from megazpp.optim.build import build_optimizer
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import StreamQueue, ThreadQueue, Work
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.run.arguments import RunConfig, parse_run_config
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep
from megazpp.zero.plan import plan_comm

PRETENDED = Cluster(num_nodes=2, ranks_per_node=8)
# longest random delay, and the factor that turns seconds into clock cycles of the GPU
MOST_SECONDS, CYCLES_PER_SECOND = 1e-3, 1.5e9
# sizes on both sides of 1 MB, above which torch allocates from another pool
POISON_ELEMENTS = (1 << 8, 1 << 12, 1 << 18, 3 << 18, 1 << 20, 3 << 20)
RANDOM = random.Random(int(os.environ.get("RANK", "0")))


class PlainBlock(nn.Module):
    """A transformer layer of the baseline in plain PyTorch, from [B, S, H] to [B, S, H] (batch, sequence, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, width, queries = config, config.hidden, config.heads * config.head_size
        linear = functools.partial(nn.Linear, bias=not config.disable_bias_linear)
        self.norm_1, self.norm_2 = (getattr(nn, config.normalization)(width) for _ in range(2))
        self.qkv = linear(width, queries + 2 * config.query_groups * config.head_size)
        self.projection, self.fc2 = linear(queries, width), linear(config.ffn_size, width)
        self.fc1 = linear(width, (1 + config.swiglu) * config.ffn_size)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer to x [B, S, H].

        `rotary` holds the cosines and sines [2, S, D] of rotary embeddings for heads of size D; None for a model
        without them.
        """
        heads, groups, size = self.config.heads, self.config.query_groups, self.config.head_size
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, size)).transpose(1, 2)  # [B, heads, S, D]
        q, k, v = qkv.split((heads, groups, groups), dim=1)
        if rotary is not None:
            q, k = (rotate(each, *rotary) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != heads)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        gate, *up = self.fc1(self.norm_2(x)).split(self.config.ffn_size, dim=-1)
        return x + self.fc2(F.silu(gate) * up[0] if up else F.gelu(gate))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to queries or keys x [B, heads, S, D], given their cosines and sines [S, D]."""
    a, b = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-b, a), dim=-1) * sine).to(x.dtype)


class PlainModel(nn.Module):
    """The GPT-2 or Llama model of the baseline in plain PyTorch.

    Args:
        config: shape and style of the model.
        rows: number of rows of the embedding, including padding of the vocabulary.
        length: sequence length in tokens.
    """

    def __init__(self, config: GPTConfig, rows: int, length: int) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(rows, config.hidden), nn.Linear(config.hidden, rows, bias=False)
        self.norm, self.rotary, self.positions = getattr(nn, config.normalization)(config.hidden), None, None
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        if config.position_embedding_type == "rope":
            rates = config.rotary_base ** -torch.arange(0, 1, 2 / config.head_size)
            angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
            self.rotary = torch.stack((angles.cos(), angles.sin()))
        else:
            self.positions = nn.Parameter(torch.empty(length, config.hidden))
        if not config.untie_embeddings_and_output_weights:
            self.linear.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=config.init_method_std)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the model's predictions from tokens [B, S] for labels [B, S]."""
        x = self.embedding(tokens) + (0.0 if self.positions is None else self.positions)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.loss(x, labels)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, given the last layer's output x [B, S, H] and labels [B, S].

        Norm, output layer and cross entropy are in one method, so that torch.compile can fuse them.
        """
        return F.cross_entropy(self.linear(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def baseline(config: RunConfig, rows: int, data: list[MicroBatch], device: torch.device) -> Callable[[], object]:
    """Build the plain PyTorch baseline, and return a function that trains one step on `data`.

    Args:
        config: flags with the model's shape.
        rows: number of rows of the embedding, including padding of the vocabulary.
        data: micro-batches of each step.
        device: device of the model.
    """
    with device:
        model = PlainModel(config.model, rows, data[0].tokens.shape[1])
    if config.model.fp8_format is not None:
        torchao = importlib.import_module("torchao.float8")
        recipe = torchao.Float8LinearConfig.from_recipe_name("tensorwise")
        torchao.convert_to_float8_training(model.blocks, config=recipe)
    # without a GPU, the rehearsal skips the generation of code
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    model.loss = torch.compile(model.loss, backend=backend)  # type: ignore[method-assign]
    for block in model.blocks:
        block.compile(backend=backend)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=dist.init_device_mesh(device.type, (1,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        """Train one optimizer step on all micro-batches of `data`."""
        for batch in data:
            (model(batch.tokens, batch.labels) / len(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class CopyingAxis(MeshAxis):
    """A mesh axis whose collectives only copy this rank's data, as if all other ranks sent the same data."""

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """Return x repeated once per rank of the axis; written into `out` if `out` is given."""
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        own = x.clone()  # a copy, because `x` may be a slice of `out`
        out.view(self.size, *x.shape).copy_(own.expand(self.size, *x.shape))
        return out

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        """Return the first of the axis's slices of x, without adding anything; written into `out` if `out` is given."""
        mine = x[: x.shape[0] // self.size]
        return mine.clone() if out is None else out.copy_(mine)

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        """Return a copy of x, as if each other rank sent back the part of x that this rank sends to it."""
        return x.clone()


def pretended(config: RunConfig, rows: int, data: list[MicroBatch], device: torch.device) -> Callable[[], object]:
    """Build this project's training step for rank 0 of the cluster PRETENDED, and return a function that runs it.

    Args:
        config: flags of the run.
        rows: size of the vocabulary.
        data: micro-batches of each step.
        device: device of the model.
    """
    dims = ParallelDims(plan_dims(config.parallel, PRETENDED, zero_stage=3), device_type=device.type)
    for axis in (dims.tp, dims.cross, dims.local, dims.shard):
        axis.__class__ = CopyingAxis
    return functools.partial(our_step(config, rows, dims, device), data, learning_rate=1e-4, weight_decay=0.0)


def our_step(config: RunConfig, rows: int, dims: ParallelDims, device: torch.device) -> TrainStep:
    """Build this project's training step with a newly initialized model, and return it.

    Args:
        config: flags of the run.
        rows: size of the vocabulary.
        dims: mesh of the ranks.
        device: device of the model.
    """
    wire = plan_comm(config.zero, dims.layout, config.precision.param_dtype)
    built = build_model(config.model_spec(rows, wire), dims, device)
    optimizer = build_optimizer(built.model, config.optimizer, dims=dims, dtype=config.precision.param_dtype)
    scaler = LossScaler(config.loss_scale, fp16=config.precision.fp16)
    return TrainStep(*built, optimizer, scaler, dims, clip_grad=config.optimizer.clip_grad)


def train(side: str, words: list[str]) -> None:
    """Train with "baseline" or "pretended", and write the step times and the memory in the format of metrics.jsonl.

    Args:
        side: "baseline" or "pretended".
        words: flags of pretrain_gpt.py, which include --run-dir.
    """
    # Parse the flags, and draw random tokens as data.
    config, cuda = parse_run_config(words, Path(), features=FEATURES).config, torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    find_product(config.model, device)  # raises an error if this device does not support --fp8-format
    batches, folder, every = config.batches, Path(config.tracking.run_dir or ""), config.tracking.log_interval
    samples, length = batches.global_batch_size or 1, config.data.seq_length or 1
    rows = config.model.padded_vocab_size((config.tokenizer.vocab_size or 1) + 1, 1)
    tokens = torch.randint(rows, (samples, length + 1)).split(batches.micro_batch_size or 1)
    data = [on_device(make_micro_batch(each, eod=None), device) for each in tokens]

    # Build the training step.
    if side == "baseline":
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        step = baseline(config, rows, data, device)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PRETENDED.world_size)
        step = pretended(config, rows, data, device)

    # Train, and write a line of metrics.jsonl after every log interval.
    folder.mkdir(parents=True)
    for last in range(every, (batches.train_iters or (batches.train_samples or 0) // samples) + 1, every):
        started = time.perf_counter()
        for _ in range(every):
            step()
        if cuda:
            torch.cuda.synchronize()
        line = {"iteration": last, "step_seconds": (time.perf_counter() - started) / every}
        line["peak_memory_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
        line["consumed_tokens"] = last * samples * length
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


# ---- the worker program "optimizers" ----

# Each entry of OPTIMIZERS has flags, and the largest relative difference of losses and gradient norms between device
# and CPU that rounding can cause. On a GPU the layers are compiled unless the flags say otherwise.
LLAMA = "--position-embedding-type rope --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2"
EXPERTS = f"{LLAMA} --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01"
OPTIMIZERS = (
    ("--optimizer adam --no-bf16", 1e-3),
    ("--optimizer sgd --no-bf16 --no-compile", 1e-3),
    ("--optimizer muon --no-bf16 --no-compile", 1e-2),  # Muon orthogonalizes in bf16, which rounds more
    ("--optimizer adam --bf16", 3e-2),
    ("--optimizer adam --no-bf16 --fp16 --loss-scale 128 --no-compile", 3e-2),
    (f"--optimizer adam --no-bf16 --no-compile {LLAMA}", 1e-3),
    (f"--optimizer adam --bf16 --no-compile {LLAMA} --window-size 15,0", 3e-2),
    (f"--optimizer adam --no-bf16 --no-compile {EXPERTS}", 1e-3),
    (f"--optimizer adam --bf16 {EXPERTS}", 3e-2),
)


def optimizers(words: list[str]) -> None:
    """Compare the losses and gradient norms of three steps on the device with the CPU's, for each entry of OPTIMIZERS.

    The results are written to the file (not folder) that --run-dir in `words` names, as a JSON list with a dictionary
    for each entry.
    """
    cuda, rows = torch.cuda.is_available(), list[dict[str, Any]]()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    for flags, allowed in OPTIMIZERS:
        own = [*words, "--use-cpu-initialization", *flags.split()]
        config = parse_run_config(own, Path(), features=FEATURES).config
        on_cpu, on_device = (_steps(config, torch.device(name)) for name in ("cpu", "cuda" if cuda else "cpu"))
        apart = max(abs(a - b) / abs(a) for a, b in zip(on_cpu, on_device, strict=True))
        rows.append({"flags": flags, "largest_relative_difference": float(f"{apart:.2g}"), "allowed": allowed})
        rows[-1]["first_loss"], rows[-1]["last_loss"] = (round(on_device[index], 4) for index in (0, -2))
        Path(config.tracking.run_dir or "").write_text(json.dumps(rows))


def _steps(config: RunConfig, device: torch.device) -> list[float]:
    """Train three steps on random tokens; return loss and gradient norm of step 1, then of step 2, then of step 3."""
    dims = ParallelDims(
        plan_dims(config.parallel, Cluster(num_nodes=1, ranks_per_node=1), zero_stage=3), device_type=device.type
    )
    rows = config.model.padded_vocab_size((config.tokenizer.vocab_size or 1) + 1, 1)
    tokens = torch.randint(rows, (2, (config.data.seq_length or 1) + 1), generator=torch.Generator().manual_seed(1))
    batch = on_device(make_micro_batch(tokens, eod=None), device)
    step = our_step(config, rows, dims, device)
    records = [step([batch], learning_rate=1e-3, weight_decay=0.1) for _ in range(3)]
    numbers = [number for record in records for number in (record.loss, record.grad_norm)]
    return [float("nan") if number is None else number for number in numbers]


# ---- the worker program "streams" ----


def disturb() -> None:
    """Delay the current stream at random (on the CPU: the thread), and leave freed memory that is filled with NaN.

    A missing wait then changes results: data is read too early, or freed memory is used.
    """
    cuda, seconds = torch.cuda.is_available(), RANDOM.choice((0.0, RANDOM.random())) * MOST_SECONDS
    if cuda:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
    else:
        time.sleep(seconds)
    torch.full((RANDOM.choice(POISON_ELEMENTS),), float("nan"), device="cuda" if cuda else "cpu")


def disturbed(submit: Callable[..., Work[Any]]) -> Callable[..., Work[Any]]:
    """Wrap a communication queue's `submit` so that `disturb` runs before it, and around each task on the queue."""

    def submit_disturbed(queue: object, task: Callable[[], Any], **when: Any) -> Work[Any]:
        """Disturb the submitting stream, then submit the task with disturbances around it."""

        def around() -> Any:
            """Run the task between two disturbances on the queue, and return its result."""
            disturb()
            result = task()
            disturb()
            return result

        disturb()
        return submit(queue, around, **when)

    return submit_disturbed


def streams() -> int:
    """Run `pretrain_gpt.py` with deterministic kernels and return its exit code.

    The flag --disturbed adds random delays and NaN to all communication queues and before all layers.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Disable the attention kernels whose backward adds in an arbitrary order, because `warn_only` lets them run.
    for kernel in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    if "--disturbed" in sys.argv:
        sys.argv.remove("--disturbed")
        for kind in (StreamQueue, ThreadQueue):
            kind.submit = disturbed(kind.submit)  # type: ignore[method-assign]
        register_module_forward_pre_hook(lambda module, _: disturb() if isinstance(module, TransformerLayer) else None)
    return pretrain_gpt.main()


@program
def main(argv: list[str]) -> None:
    """Run the worker program that the first argument names; the other arguments are flags of pretrain_gpt.py."""
    side, *words = argv
    if side == "streams":
        sys.argv[1:] = words
        leave(streams())
    if side == "optimizers":
        optimizers(words)
    else:
        train(side, words)


if __name__ == "__main__":
    raise SystemExit(main())
