"""Which implementation of each fused piece is in use, and why: rows of a table that is printed once at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megazpp.optim.optimizer import OptimizerConfig, uses_fused_kernel


class Backend(NamedTuple):
    """One row: the piece, what runs it, and why that was chosen."""

    piece: str
    implementation: str
    reason: str


def optimizer_backends(config: OptimizerConfig, device_type: str) -> list[Backend]:
    """The rows of the optimizer and of gradient clipping for a device type ("cpu", "cuda", ...)."""
    norm = Backend("gradient norm", "torch._foreach_norm", "one kernel over all shards, then one number per axis")
    return [_optimizer_backend(config, device_type), norm]


def backend_table(rows: Sequence[tuple[str, str, str]]) -> str:
    """The rows as aligned text under a heading; rows of other parts may be plain tuples."""
    table = [Backend("piece", "implementation", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in table)


def _optimizer_backend(config: OptimizerConfig, device_type: str) -> Backend:
    if config.optimizer_backend == "apex":
        return Backend("optimizer", "apex.optimizers.FusedAdam", "asked for by --optimizer-backend apex")
    if uses_fused_kernel(config, device_type):
        return Backend("optimizer", "torch.optim.AdamW(fused=True)", f"torch has a fused kernel on {device_type}")
    if config.optimizer == "sgd":
        return Backend("optimizer", "torch.optim.SGD(foreach=True)", "torch's fused SGD does not take DTensors")
    return Backend("optimizer", "torch.optim.AdamW(foreach=True)", f"torch has no fused kernel on {device_type}")
