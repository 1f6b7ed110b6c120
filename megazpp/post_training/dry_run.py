"""`--dry-run` with LoRA: one optimizer step of one rank of a cluster that is not there, beside that of all weights.

Both are the program itself on tensors without memory (planner/dry_run.py), with the language model's loss.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.formats import BlockFormat
from megazpp.arguments import RunConfig
from megazpp.checks import check_run_config
from megazpp.formatting import MEGA, aligned
from megazpp.model.dropout import SharedGenerator
from megazpp.parallel.dims import ParallelDims
from megazpp.planner.dry_run import CPU, count_step, fake_ranks
from megazpp.planner.step import TrafficTable
from megazpp.planner.variants import for_planning
from megazpp.post_training.lora import LoraConfig, add_adapters
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import WIRES
from megazpp.training.setup import Built, ModelSpec, model_on_meta, shard_built
from megazpp.zero.freeze import freeze, frozen_axis
from megazpp.zero.sharding import materialize


class LoraDryRun(NamedTuple):
    """What one rank sends and holds in a step.

    Attributes:
        adapters, everything: calls and bytes by (wire, axis, collective), where adapters are trained, and all weights.
        live_bytes, everything_live_bytes: of tensors at the fullest moment.
        base_bytes: of the frozen weights among them.
        trained: adapters' parameters.
    """

    adapters: TrafficTable
    everything: TrafficTable
    live_bytes: int
    everything_live_bytes: int
    base_bytes: int
    trained: int

    def sent(self, wire: str) -> tuple[int, int]:
        """Bytes with adapters, and with all weights."""
        adapters, everything = (
            sum(traffic.sent_bytes for key, traffic in table.items() if key[0] == wire)
            for table in (self.adapters, self.everything)
        )
        return adapters, everything

    def describe(self) -> str:
        """A table of both."""
        rows: list[tuple[str, ...]] = [("MB of one rank, one optimizer step", "LoRA", "all weights", "")]
        both = {f"sent, {wire}": self.sent(wire) for wire in WIRES}
        both["live at the fullest moment"] = self.live_bytes, self.everything_live_bytes
        rows += [
            (what, f"{one / MEGA:.3f}", f"{all_ / MEGA:.3f}", f"{100 * one / all_:.2f} %" if all_ else "")
            for what, (one, all_) in both.items()
        ]
        note = f"{self.trained:,} parameters in adapters; {self.base_bytes / MEGA:.3f} MB of frozen weights"
        return "\n".join([*aligned(rows), note])


def dry_run_lora(
    config: RunConfig, lora: LoraConfig, cluster: Cluster, *, rank: int, fmt: BlockFormat | None = None
) -> LoraDryRun:
    """Take a step of adapters and a step of all weights.

    Args:
        fmt: how frozen weights are kept.
    Raises:
        ValueError: flags that do not fit each other or the cluster, or no --vocab-size.
    """
    config = for_planning(config, "--dry-run")
    plan = check_run_config(config, cluster, device_type=CPU.type)
    count = plan.batches.num_micro_batches_at(plan.batches.rampup_samples)
    sizes: list[int] = []

    def adapted(spec: ModelSpec, dims: ParallelDims, fake: FakeTensorMode) -> Built:
        model = model_on_meta(spec, dims, CPU)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

        def load(name: str, rows: slice) -> torch.Tensor:
            return torch.zeros(rows.stop - rows.start, *shapes[name][1:])

        make = functools.partial(freeze, device=CPU, dtype=spec.precision.param_dtype, fmt=fmt)
        with fake:
            base = make(model, model.sharding_units(), frozen_axis(dims), load)
        add_adapters(model, lora.settings(spec.config), SharedGenerator(CPU, seed=spec.seed, data_rank=dims.data_rank))
        sizes.extend([base.kept_bytes, sum(parameter.numel() for parameter in model.parameters())])
        built = shard_built(model, spec, dims)
        with fake:
            materialize(built.model, CPU)
        return built

    with fake_ranks(rank, cluster.world_size):
        # a thread would not see the modes that make its tensors fake
        dims = ParallelDims(plan.layout, device_type=CPU.type, nccl=config.nccl, threads=False)
        adapters, live_bytes = count_step(config, plan, dims, count, adapted)
    with fake_ranks(rank, cluster.world_size):
        dims = ParallelDims(plan.layout, device_type=CPU.type, nccl=config.nccl, threads=False)
        everything, most = count_step(config, plan, dims, count)
    return LoraDryRun(adapters, everything, live_bytes, most, *sizes)
