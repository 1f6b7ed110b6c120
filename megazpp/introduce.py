"""What a run says first: its flags, sizes, layout and back ends, and the constants behind its figures."""

from __future__ import annotations

import torch

from megazpp.arguments import ParsedRun, RunConfig
from megazpp.checks import RunPlan
from megazpp.flags import render_arguments_block
from megazpp.model.gpt import model_backends
from megazpp.optim.backends import backend_table, optimizer_backends
from megazpp.training.context import RunContext
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops
from megazpp.training.metrics import RunShape
from megazpp.zero.config import wire_backends


def introduce(run: RunContext, parsed: ParsedRun, plan: RunPlan) -> None:
    """Print what will run: what was noticed, flags, sizes, layout, back ends."""
    layout, config = plan.layout, parsed.config
    run.log(
        f"using world size: {layout.cluster.world_size}, data-parallel size: {layout.data}, "
        f"tensor-model-parallel size: {layout.tp}, pipeline-model-parallel size: 1"
    )
    for notice in (*parsed.notices, *plan.notices):
        run.log(f"note: {notice}")
    run.log(render_arguments_block(config.parts, parsed.origins))
    run.log(f"{layout.describe()}; ZeRO stage {config.zero.stage}")
    if layout.cluster.links is not None:
        run.log(layout.cluster.links.describe())
    run.log(plan.wire.describe())
    device_type = run.device.type
    model = model_backends(
        config.model,
        layout.tp,
        device=run.device,
        dtype=config.precision.param_dtype,
        documents=config.data.reset_attention_mask,
    )
    rows = [*optimizer_backends(config.optimizer, device_type), *model]
    run.log(backend_table([*rows, *wire_backends(plan.wire, device_type)]))


def run_shape(config: RunConfig, plan: RunPlan, *, vocab_size: int, device: torch.device) -> RunShape:
    """The constants behind tokens per second, TFLOP/s and the time left."""
    model, layout, seq_length = config.model, plan.layout, config.data.seq_length
    assert seq_length is not None
    padded = model.padded_vocab_size(vocab_size, layout.tp)
    return RunShape(
        total_iterations=plan.batches.total_iterations,
        total_samples=plan.batches.total_samples,
        seq_length=seq_length,
        world_size=layout.cluster.world_size,
        flops_per_token=model_flops_per_token(model, padded_vocab_size=padded, seq_length=seq_length),
        peak_flops=peak_flops(device_name(device), config.precision.param_dtype),
    )
