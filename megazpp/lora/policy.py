"""LoRA in post-training: a policy whose base weights are frozen, and whose adapters are trained.

Only the adapters are trained and saved, and only they and their gradients cross nodes. The base weights are sharded and
gathered inside a node. They have no fp32 master weights and no optimizer moments. In the context `adapters_off`, the
same model is also the reference model. Settings have PEFT's names, and target layers have transformers' names
(peft.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from megazpp.checkpoint.metadata import IMPORTED_FROM, CheckpointMetadata
from megazpp.checkpoint.read import LoadSource
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL, SCALAR_HEAD
from megazpp.data.text import content_hash
from megazpp.lora.checks import adapter_settings
from megazpp.lora.config import LoraConfig
from megazpp.lora.layers import Linear, LowRankAdapter, LowRankExpertAdapter, QkvAdapter
from megazpp.lora.peft import AdapterSettings, Branch, find_branches, read_adapter, tensors_file, write_adapter
from megazpp.model.backends import GROUPED_MULTIPLE
from megazpp.model.gpt import GPTModel, TransformerLayer
from megazpp.model.layer_parts import Dropout, SharedGenerator
from megazpp.model.moe import Experts
from megazpp.packed_weights.frozen import FrozenUnits
from megazpp.packed_weights.load import load_frozen_model
from megazpp.packed_weights.reader import FrozenPlace
from megazpp.parallel.agreement import check_equal_on_all_ranks
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.layers import Adapter, RowParallelLinear
from megazpp.training.config import ModelSpec
from megazpp.training.setup import ShardedModel, fill, shard_built


class AdaptedPolicy(NamedTuple):
    """A policy with trained LoRA adapters on frozen base weights.

    Attributes:
        built: the model, and the sharding handle of the trained parameters.
        base: handle to the frozen base weights.
        settings: settings of the adapters, with the checksum of the base weights.
    """

    built: ShardedModel
    base: FrozenUnits
    settings: AdapterSettings


def load_adapted(
    spec: ModelSpec,
    lora: LoraConfig,
    place: FrozenPlace,
    source: LoadSource,
    record: CheckpointMetadata,
    *,
    trained: Callable[[str], bool] = lambda name: False,
    keep_reference: bool = False,
) -> AdaptedPolicy:
    """Load a checkpoint as frozen base weights, and add the adapters of --lora-load, or new adapters.

    New adapters do not change the model's function before they are trained. All ranks call this.

    Args:
        spec: config, precision and seed of the model.
        lora: flags of LoRA.
        place: device and process groups for the frozen weights.
        source: checkpoint of the base weights.
        record: metadata of this checkpoint.
        trained: function that returns True for the names of parameters that are trained besides the adapters, such as a
            scalar head. They begin with the values in the folder of --lora-load if it has them, otherwise with the
            checkpoint's values, and if that has none either, with random values.
        keep_reference: True to keep a copy of the adapters of --lora-load for the reference model, see `adapters_off`.
    Raises:
        ValueError: the adapters of --lora-load were trained on base weights with another checksum.
    """
    # ---- load the base weights, frozen and packed in --base-weight-bits
    settings = adapter_settings(lora, spec.config)
    dims, device = place.dims, place.device
    bits = lora.base_weight_bits
    if bits is not None:
        rounded = "" if bits >= 8 * spec.precision.param_dtype.itemsize else " (rounded)"
        place.say(f" base weights: {bits} bits{rounded}, in memory")
    model, base, checksum = load_frozen_model(spec, place, source, record, bits=bits, trained=trained)
    origin = record.flags.get(IMPORTED_FROM) or str(source.folder.path.resolve())
    settings = settings._replace(base=origin, checksum=checksum)
    shared = SharedGenerator(device, seed=spec.seed, data_rank=dims.dropout_rank)
    # ---- add new adapters, and give them the values of --lora-load if the flag is set
    add_adapters(model, settings, shared)
    built = fill(shard_built(model, spec, dims), spec, dims, device)
    saved = SafeReader(source.checkpoint)
    # `begun` has the initial values of trained parameters by name: the checkpoint's values of a scalar head, which the
    # values of --lora-load then replace
    begun = {key.removeprefix(MODEL): saved.read_whole(key) for key in saved.tensors() if key.startswith(SCALAR_HEAD)}
    if lora.lora_load is not None:
        found, tensors = read_adapter(Path(lora.lora_load), spec.config)
        (digest,) = content_hash([tensors_file(Path(lora.lora_load))])
        check_equal_on_all_ranks(place.files, f"--lora-load {lora.lora_load}", digest)
        if found.checksum not in (None, settings.checksum):
            raise ValueError(
                f"--lora-load {lora.lora_load} was trained on weights with checksum {found.checksum}, but --load "
                f"{settings.base} has {settings.checksum}; give the adapters' base by --load: its base was {found.base}"
            )
        begun |= tensors
    _begin_with(built, begun)
    for name, module in built.model.named_modules():
        if lora.lora_load is not None and keep_reference and isinstance(module, Adapter):
            module.has_reference = True
            if isinstance(module, LowRankAdapter):
                module.keep_reference(begun[f"{name}.a"], begun[f"{name}.b"], device)
    return AdaptedPolicy(built, base, settings)


def add_adapters(model: GPTModel, settings: AdapterSettings, shared: SharedGenerator | None) -> None:
    """Add LoRA adapters, with parameters on the meta device, to the layers that `settings.targets` names.

    Args:
        model: model that gets the adapters.
        settings: settings of the adapters.
        shared: random generator that is equal on all tp ranks, for dropout masks of inputs that all tp ranks hold. None
            if the model does not train, if the adapters have no dropout, or if there is one tp rank.
    """
    by_linear: dict[str, list[Branch]] = {}
    for branch in find_branches(model.config, settings.targets):
        by_linear.setdefault(branch.linear, []).append(branch)
    agreeing = shared if settings.dropout > 0.0 and model.tp.size > 1 else None
    with torch.device("meta"):
        for name, branches in by_linear.items():
            linear = model.get_submodule(name)
            if isinstance(linear, Experts):
                _add_to_experts(linear, branches, settings)
                continue
            assert isinstance(linear, Linear), name
            linear.adapter = _adapter(model, linear, branches, settings, agreeing)
    # Activation recomputation (`TransformerLayer.forward`) and saved checkpoints (`RandomGenerators` in
    # checkpoint/state.py) restore only the generator in the model's settings. So make the generator of the adapters'
    # dropout that generator.
    if agreeing is not None:
        model.settings = dataclasses.replace(model.settings, generator=agreeing)
        for layer in model.layers:
            assert isinstance(layer, TransformerLayer)
            layer.settings = model.settings


def _add_to_experts(experts: Experts, branches: list[Branch], settings: AdapterSettings) -> None:
    """Add LoRA adapters to those matrices (gate, fc1, fc2) of a layer's experts that `branches` lists.

    Raises:
        ValueError: torch's grouped matrix product, which computes all experts at once on this device, does not support
            the adapters' rank.
    """
    hidden, inner, rank = experts.gate.shape[1], experts.inner, settings.rank
    if experts.grouped and rank % GROUPED_MULTIPLE:
        raise ValueError(
            f"--lora-r {rank} with adapters on experts: torch's grouped matrix product needs a multiple of "
            f"{GROUPED_MULTIPLE}; give such a rank"
        )
    for branch in branches:
        sizes = (inner, hidden) if branch.part == "fc2" else (hidden, inner)
        experts.adapter[branch.part] = LowRankExpertAdapter(
            experts.num_experts, *sizes, rank=rank, scale=settings.scale, dropout=Dropout(settings.dropout, None)
        )


def _adapter(
    model: GPTModel, linear: Linear, branches: list[Branch], settings: AdapterSettings, agreeing: SharedGenerator | None
) -> LowRankAdapter | QkvAdapter:
    """Return a new LoRA adapter for a linear layer.

    If `branches` are parts of the fused projection of queries, keys and values, the result is a `QkvAdapter`, which
    contains an adapter for each of them.

    Args:
        model: model that contains the layer.
        linear: base layer.
        branches: the parts of the layer that get an adapter.
        settings: settings of the adapters.
        agreeing: random generator that is equal on all tp ranks, for dropout masks of inputs that all tp ranks hold.
            With None, each tp rank samples its masks from its own torch generator.
    """
    config, shared = model.config, None if isinstance(linear, RowParallelLinear) else agreeing

    def adapter(out_features: int) -> LowRankAdapter:
        dropout = Dropout(settings.dropout, shared)
        return LowRankAdapter(linear, out_features, rank=settings.rank, scale=settings.scale, dropout=dropout)

    if not branches[0].part:
        return adapter(linear.weight.shape[0])
    groups, queries = config.query_groups // model.tp.size, config.heads // config.query_groups
    heads = {"q": queries, "k": 1, "v": 1}
    parts = {branch.part: adapter(groups * heads[branch.part] * config.head_size) for branch in branches}
    return QkvAdapter(parts, groups=groups, queries_per_group=queries, head_size=config.head_size)


def save_adapter(policy: AdaptedPolicy, folder: Path, dims: ParallelDims, *, with_head: bool = False) -> None:
    """Write a policy's unsharded adapters in PEFT's format. All ranks call this, and rank 0 writes the files.

    Args:
        policy: policy with trained adapters.
        folder: folder for the files; rank 0 creates it, but its parent folder must exist.
        dims: parallel layout.
        with_head: True to write a reward model's scalar head as well.
    """
    model, sharding = policy.built
    sharding.reshard()
    whole = {}
    with dims.counter.paused():
        for name, parameter in model.named_parameters():
            if with_head or ".adapter." in name:
                value = parameter.detach()
                whole[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    if dims.world.rank == 0:
        folder.mkdir(exist_ok=True)
        write_adapter(folder, model.config, policy.settings, whole)


def _begin_with(built: ShardedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the trained parameters of a model to initial values.

    Args:
        built: the model and its sharding handle.
        tensors: unsharded values by parameter name; other parameters do not change.
    """
    built.sharding.reshard()
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if name in tensors:
                value: torch.Tensor = tensors[name].to(parameter.device, parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(value)
    built.sharding.invalidate_weights()
