"""The model's own code, run once on the meta device: what it computes, sends over tp and keeps for backward.

Forward and backward of one micro-batch run on tensors without memory, on a tensor-parallel axis on paper, so that work,
traffic and activations are those of the code and not of a formula beside it. Layers are alike: at most two are run.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import TrafficCounter
from megazpp.planner.paper import PaperAxis
from megazpp.planner.recorder import BACKWARD, FORWARD, FusedAttention, FusedNorm, TraceRecorder, TraceSegment, backward
from megazpp.topology.layout import Layout

Parameters = tuple[tuple[str, tuple[int, ...]], ...]  # name and shape on one tensor-parallel rank


class Trace(NamedTuple):
    """One micro-batch. Keys of the segments: (FORWARD or BACKWARD, index), embedding 0, layers 1 to n, head n + 1.

    Attributes:
        units: parameters of each sharding unit, in the order of use.
        tied: the first unit holds embedding, final norm and output, and is in use from the first to the last segment.
        logits_bytes: of the logits as the output layer makes them.
    """

    segments: dict[tuple[str, int], TraceSegment]
    units: tuple[Parameters, ...]
    tied: bool
    logits_bytes: int

    @property
    def num_segments(self) -> int:
        return len(self.segments) // 2


def trace_model(
    config: GPTConfig,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    layout: Layout,
    sequence_parallel: bool,
    dtype: torch.dtype,
    documents: Literal["kernel", "mask"] | None = None,
    on_cpu: bool = False,
) -> Trace:
    """Run one micro-batch on paper.

    Args:
        layout: whose tensor parallelism it is.
        dtype: what the layers compute in.
        documents: how attention stays inside documents, each of which is as long as a sample; None if it need not.
        on_cpu: whether the attention kernels are a CPU's.
    """
    tp = PaperAxis(layout, "tp", rank=0, counter=TrafficCounter())
    shape = dataclasses.replace(config, num_layers=min(config.layers, 2))
    if config.recompute_method == "block":  # the first layer is run again, the second is not
        shape = dataclasses.replace(shape, recompute_num_layers=1)
    recorder = TraceRecorder()
    attention = FusedAttention(recorder, on_cpu=on_cpu)
    with torch.device("meta"):
        model = GPTModel(
            shape,
            vocab_size=vocab_size,
            tp=tp,
            sequence_parallel=sequence_parallel,
            document_kernel=attention.inside_documents if documents == "kernel" else None,
        ).to(dtype)
        starts = torch.empty(micro_batch_size + 1, dtype=torch.int32) if documents else None
        tokens = torch.empty(micro_batch_size, seq_length, dtype=torch.int64)
        mask = torch.empty(micro_batch_size, seq_length)
    recorder.watch(model)
    tp.observe(recorder.sent)
    with recorder, attention, FusedNorm(recorder.memory_pass):
        losses = model(tokens, tokens, document_starts=starts)
        loss = (losses * mask).sum()
        recorder.enter((BACKWARD, shape.layers + 1))
        backward(loss)
        recorder.enter((BACKWARD, -1))
    like = [0, *(_like(config, shape, index) for index in range(config.layers)), shape.layers + 1]
    return Trace(
        segments={
            (phase, index): recorder.segment((phase, traced))
            for phase in (FORWARD, BACKWARD)
            for index, traced in enumerate(like)
        },
        units=_units(model, like[1:-1]),
        tied=config.tied,
        logits_bytes=config.padded_vocab_size(vocab_size, tp.size) // tp.size * tokens.numel() * dtype.itemsize,
    )


def _like(config: GPTConfig, traced: GPTConfig, index: int) -> int:
    """The segment of the traced layer that layer `index` is like."""
    return 2 if traced.layers == 2 and config.recompute_method == "block" and not config.recomputes_layer(index) else 1


def _units(model: GPTModel, layers: list[int]) -> tuple[Parameters, ...]:
    """Parameters of the units in FSDP2's flat order, which is `named_parameters()`'s; the root's first.

    Args:
        layers: for each layer the segment of the one that was traced.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    traced = [
        tuple((names[p], tuple(p.shape)) for module in modules for p in module.parameters())
        for modules in model.sharding_units()
    ]
    taken = {name for unit in traced for name, _ in unit}
    root = tuple((name, tuple(p.shape)) for p, name in names.items() if name not in taken)
    is_layer = [unit[0][0].startswith("layers.") for unit in traced]
    first, stop = is_layer.index(True), len(is_layer) - is_layer[::-1].index(True)
    template, after = traced[first], traced[stop:]
    before = traced[:first] + ([root] if root else [])
    return (
        *before,
        *(
            tuple((name.replace("layers.0.", f"layers.{index}.", 1), shape) for name, shape in template)
            for index in range(len(layers))
        ),
        *after,
    )
