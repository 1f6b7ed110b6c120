"""LoRA: a policy whose base weights are frozen units, and whose adapters alone are sharded, trained, sent and saved.

Between nodes only adapters and their gradients travel. The base is gathered inside a node, has no fp32 master and no
moments, and is its own reference: the same model with its adapters off. Names are PEFT's and, for modules, Hugging
Face's (convert/peft.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.record import RunRecord
from megazpp.convert.peft import (
    AdapterSettings,
    Branch,
    adapter_shapes,
    default_targets,
    find_branches,
    read_adapter,
    write_adapter,
)
from megazpp.flags import check_positive, flag
from megazpp.model.config import GPTConfig
from megazpp.model.dropout import Dropout, SharedGenerator
from megazpp.model.gpt import GPTModel, TransformerLayer
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megazpp.tensor_parallel.lora import LowRankAdapter, QkvAdapter
from megazpp.training.frozen import FrozenPlace, load_frozen_model
from megazpp.training.setup import Built, ModelSpec, fill, shard_built
from megazpp.zero.frozen import FrozenUnits


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: low-rank adapters are trained in the place of all weights."""

    lora_r: int | None = flag(None, "rank of the adapters; trains adapters alone (default: all weights are trained)")
    lora_alpha: float = flag(8.0, "what an adapter adds is scaled by this over its rank", needs="--lora-r")
    lora_dropout: float = flag(0.0, "dropout of an adapter's input", needs="--lora-r")
    lora_target_modules: tuple[str, ...] | None = flag(
        None,
        "layers with an adapter, by Hugging Face's names (q_proj ... down_proj; c_attn, c_fc, c_proj of a GPT-2), or "
        "all-linear (default: q_proj v_proj, or c_attn)",
        nargs="+",
        needs="--lora-r",
    )

    def __post_init__(self) -> None:
        check_positive(self, "lora_r", "lora_alpha")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f"--lora-dropout {self.lora_dropout} is not in [0, 1)")

    def settings(self, config: GPTConfig, *, base: str | None = None, checksum: str | None = None) -> AdapterSettings:
        """What adapter_config.json says.

        Raises:
            ValueError: a target is no layer of the model's, or has a side that is smaller than the rank.
        """
        assert self.lora_r is not None
        targets = self.lora_target_modules or default_targets(config)
        for branch in find_branches(config, targets):
            smaller = min(size for size, _ in adapter_shapes(config, [branch], self.lora_r).values())
            if self.lora_r > smaller:
                raise ValueError(f"--lora-r {self.lora_r} is more than the smaller side of {branch.module}, {smaller}")
        return AdapterSettings(self.lora_r, self.lora_alpha, self.lora_dropout, targets, base, checksum)


class AdaptedPolicy(NamedTuple):
    """A model with trained adapters on a frozen base.

    Attributes:
        built: the model, and the handle on its adapters' shards.
        base: the handle on the frozen weights.
        settings: of the adapters, with the checksum of the base.
    """

    built: Built
    base: FrozenUnits
    settings: AdapterSettings


def load_adapted(
    spec: ModelSpec,
    lora: LoraConfig,
    place: FrozenPlace,
    source: LoadSource,
    record: RunRecord,
    *,
    trained: Callable[[str], bool] = lambda name: False,
) -> AdaptedPolicy:
    """The base of a checkpoint with new adapters, which change nothing yet; on all ranks.

    Args:
        trained: parameters of such names are trained beside the adapters, and begin as the seed has them.
    Otherwise as `load_frozen_model`.
    """
    settings = lora.settings(spec.config)
    dims, device = place.dims, place.device
    frozen = load_frozen_model(spec, place, source, record, trained=trained)
    settings = settings._replace(base=str(source.folder.path), checksum=frozen.checksum)
    shared = SharedGenerator(device, seed=spec.seed, data_rank=dims.data_rank)
    add_adapters(frozen.model, settings, shared)
    built = fill(shard_built(frozen.model, spec, dims), spec, dims, device)
    return AdaptedPolicy(built, frozen.units, settings)


def add_adapters(model: GPTModel, settings: AdapterSettings, shared: SharedGenerator | None) -> None:
    """Put adapters on the meta device beside the layers that `settings` names.

    Args:
        shared: where tp ranks draw the dropout masks of inputs that all of them hold; None where nothing is drawn.
    """
    by_linear: dict[str, list[Branch]] = {}
    for branch in find_branches(model.config, settings.targets):
        by_linear.setdefault(branch.linear, []).append(branch)
    agreeing = shared if settings.dropout > 0.0 and model.tp.size > 1 else None
    with torch.device("meta"):
        for name, branches in by_linear.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, (ColumnParallelLinear, RowParallelLinear)), name
            linear.adapter = _adapter(model, linear, branches, settings, agreeing)
    if agreeing is not None:  # what recomputes a layer, and what is saved, has to know of it
        model.shared_generator = agreeing
        for layer in model.layers:
            assert isinstance(layer, TransformerLayer)
            layer.shared = agreeing


def _adapter(
    model: GPTModel,
    linear: ColumnParallelLinear | RowParallelLinear,
    branches: list[Branch],
    settings: AdapterSettings,
    agreeing: SharedGenerator | None,
) -> LowRankAdapter | QkvAdapter:
    row, config = isinstance(linear, RowParallelLinear), model.config
    outputs, inputs = linear.weight.shape

    def adapter(out_features: int) -> LowRankAdapter:
        return LowRankAdapter(
            inputs,
            out_features,
            rank=settings.rank,
            scale=settings.scale,
            tp=model.tp,
            row=row,
            dropout=Dropout(settings.dropout, None if row else agreeing),
        )

    if not branches[0].part:
        return adapter(outputs)
    groups, queries = config.query_groups // model.tp.size, config.heads // config.query_groups
    heads = {"q": queries, "k": 1, "v": 1}
    parts = {branch.part: adapter(groups * heads[branch.part] * config.head_size) for branch in branches}
    return QkvAdapter(parts, groups=groups, queries_per_group=queries, head_size=config.head_size)


def save_adapter(policy: AdaptedPolicy, folder: Path, dims: ParallelDims) -> None:
    """Write the adapters as PEFT does, whole, on rank 0; every rank calls this. `folder` has to exist there."""
    model, sharding = policy.built
    sharding.free_gathered()
    with dims.counter.paused():
        whole = {name: _whole(p.detach()).cpu() for name, p in _adapters(model)}
    if dims.world.rank == 0:
        write_adapter(folder, model.config, policy.settings, whole)


def load_adapter(policy: AdaptedPolicy, folder: Path) -> None:
    """Go on from adapters that PEFT or `save_adapter` has written; every rank reads all of them.

    Raises:
        ValueError: they are damaged, another model's, of other settings, or were trained on another base.
    """
    model, sharding = policy.built
    found, tensors = read_adapter(folder, model.config)
    own = policy.settings
    if find_branches(model.config, found.targets) != find_branches(model.config, own.targets):
        raise ValueError(f"{folder} has adapters of {', '.join(found.targets)}, not of {', '.join(own.targets)}")
    for name, there, here in (("--lora-r", found.rank, own.rank), ("--lora-alpha", found.alpha, own.alpha)):
        if there != here:
            raise ValueError(f"{name} is {here}, {folder} has {there}")
    if found.checksum not in (None, own.checksum):
        raise ValueError(f"{folder} was trained on a base with checksum {found.checksum}, this one has {own.checksum}")
    sharding.free_gathered()
    with torch.no_grad():
        for name, parameter in _adapters(model):
            value: torch.Tensor = tensors[name].to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
    sharding.weights_changed()


def _adapters(model: GPTModel) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if ".adapter." in name]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
