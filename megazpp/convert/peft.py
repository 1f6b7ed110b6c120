"""LoRA adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors, read, written and merged.

An adapter of ours is a parameter `a` [in, r] and a parameter `b` [out, r] under the linear layer that it stands beside;
there it is `lora_A.weight` [r, in] and `lora_B.weight` [out, r] under the name of Hugging Face's module. Where that has
queries, keys and values apart, so have the adapters; GPT-2's c_attn is one module and has one A. The safetensors file
says beside the tensors which weights they were trained on, by checksum (checkpoint/weights.py), which PEFT ignores.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.base.files import write_whole
from megazpp.checkpoint.state import under
from megazpp.checkpoint.weights import spell_checksum, sum_of_bits
from megazpp.convert.huggingface import ARCHITECTURES, read_json
from megazpp.convert.model import (
    HEAD,
    Deferred,
    ForeignTensors,
    Model,
    held,
    join_all,
    model_shapes,
    qkv_rows,
    same,
    split_all,
    transposed,
)
from megazpp.convert.safetensors_file import open_tensors, read_metadata, write_tensors
from megazpp.model.config import GPTConfig
from megazpp.tensor_parallel.lora import joined_factors, merged

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
BASE = "base_checksum"
_PREFIX = "base_model.model."
_UNKNOWN = (
    *("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"),
    *("layers_pattern", "exclude_modules"),
)
_SCORES, _HEADS = "SEQ_CLS", ("classifier", "score")  # PEFT's of a reward model
_LINEARS = ("attention.qkv", "attention.proj", "mlp.gate", "mlp.fc1", "mlp.fc2")


class AdapterSettings(NamedTuple):
    """An adapter's settings in adapter_config.json.

    Attributes:
        rank, alpha, dropout: PEFT's r, lora_alpha, lora_dropout.
        targets: ends of the names of Hugging Face's modules, or all-linear.
        base: the name or folder of the weights it was trained on.
        checksum: of these weights; None if nobody knows.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    base: str | None = None
    checksum: str | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Branch(NamedTuple):
    """An adapter of ours, and the module of Hugging Face's that it belongs to.

    Attributes:
        linear: our layer's name in the model, such as layers.0.attention.qkv.
        part: "q", "k" or "v" of it; "" for all.
        module: its name there.
    """

    linear: str
    part: str
    module: str

    @property
    def name(self) -> str:
        """The prefix of the adapter's parameters in our model."""
        return f"{self.linear}.adapter.{self.part}".rstrip(".")


def default_targets(config: GPTConfig) -> tuple[str, ...]:
    """PEFT's for such a model."""
    return ("q_proj", "v_proj") if config.positions == "rope" else ("c_attn",)


def find_branches(config: GPTConfig, targets: Sequence[str]) -> list[Branch]:
    """The adapters that the targets ask for, in the order of our layers.

    Raises:
        ValueError: a target is no linear layer of the model's, or an embedding or output layer.
    """
    pieces = ARCHITECTURES["llama" if config.positions == "rope" else "gpt2"].pieces(config)
    branches: list[Branch] = []
    for linear in (f"layers.{layer}.{name}" for layer in range(config.layers) for name in _LINEARS):
        if piece := pieces.get(f"{linear}.weight"):
            parts = "qkv" if len(piece.theirs) == 3 else [""]
            modules = [name.removesuffix(".weight") for name in piece.theirs]
            branches += [Branch(linear, part, name) for part, name in zip(parts, modules, strict=True)]
    if tuple(targets) == (ALL_LINEAR,):
        return branches
    chosen = {target: [x for x in branches if f".{x.module}".endswith(f".{target}")] for target in targets}
    for target, found in chosen.items():
        if not found:
            names = sorted({branch.module.rpartition(".")[2] for branch in branches})
            raise ValueError(
                f"--lora-target-modules {target} is no linear layer of this model's: there are {', '.join(names)}, "
                f"and {ALL_LINEAR} for all"
            )
    return [branch for branch in branches if any(branch in found for found in chosen.values())]


def adapter_pieces(config: GPTConfig, branches: Sequence[Branch], *, scores: bool = False) -> dict[str, ForeignTensors]:
    """Our tensors' names to PEFT's; with the head of a reward model if it `scores`."""
    pieces = {HEAD: same(f"{_PREFIX}score.weight")} if scores else {}
    for branch in branches:
        theirs, fused = f"{_PREFIX}{branch.module}.lora_B.weight", branch.linear.endswith("qkv") and not branch.part
        pieces[f"{branch.name}.a"] = transposed(f"{_PREFIX}{branch.module}.lora_A.weight")
        pieces[f"{branch.name}.b"] = qkv_rows([theirs], config) if fused else same(theirs)
    return pieces


def adapter_shapes(config: GPTConfig, branches: Sequence[Branch], rank: int) -> dict[str, tuple[int, ...]]:
    """Whole shapes of our tensors."""
    heads = {"q": config.heads, "k": config.query_groups, "v": config.query_groups}
    linears = model_shapes(config, 1, CONFIG, num_tensors=config.layers)
    shapes: dict[str, tuple[int, ...]] = {}
    for branch in branches:
        outputs, inputs = linears[f"{branch.linear}.weight"]
        rows = heads[branch.part] * config.head_size if branch.part else outputs
        shapes |= {f"{branch.name}.a": (inputs, rank), f"{branch.name}.b": (rows, rank)}
    return shapes


def write_adapter(
    folder: Path, config: GPTConfig, settings: AdapterSettings, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write an adapter's two files.

    Args:
        folder: exists; files of these names are replaced.
        tensors: whole, by our names, on the CPU.
    """
    scores = HEAD in tensors
    pieces = adapter_pieces(config, find_branches(config, settings.targets), scores=scores)
    found = split_all(pieces, {name: held(tensor) for name, tensor in tensors.items()})
    write_tensors(folder / TENSORS, found, {} if settings.checksum is None else {BASE: settings.checksum})
    values = {
        "peft_type": "LORA",
        "task_type": _SCORES if scores else "CAUSAL_LM",
        **({"modules_to_save": [*_HEADS]} if scores else {}),
        "base_model_name_or_path": settings.base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": ALL_LINEAR if settings.targets == (ALL_LINEAR,) else list(settings.targets),
        "fan_in_fan_out": config.positions != "rope",  # GPT-2's matrices are [in, out]
        "bias": "none",
        "inference_mode": True,
    }
    write_whole(folder / CONFIG, (json.dumps(values, indent=2) + "\n").encode())


def read_adapter(folder: Path, config: GPTConfig) -> tuple[AdapterSettings, dict[str, torch.Tensor]]:
    """An adapter for a model of this shape, its tensors whole under our names.

    Raises:
        ValueError: a file is missing or damaged, the adapter is another model's, or it does what adapters here do not.
    """
    values, path = read_json(folder / CONFIG), folder / CONFIG
    settings = _read_settings(values, path)
    branches = find_branches(config, settings.targets)
    scores = values.get("task_type") == _SCORES
    theirs, pieces = open_tensors(folder / TENSORS), adapter_pieces(config, branches, scores=scores)
    shapes = adapter_shapes(config, branches, settings.rank) | {HEAD: (1, config.hidden)}
    joined = join_all(pieces, theirs, shapes, str(folder / TENSORS))
    tensors = {name: entry.read() for name, entry in joined.items()}
    return settings._replace(checksum=read_metadata(folder / TENSORS).get(BASE)), tensors


def _read_settings(values: Mapping[str, Any], path: Path) -> AdapterSettings:
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{path} has peft_type {values.get('peft_type')!r}; only LORA is known")
    unknown = {name for name in _UNKNOWN if values.get(name)}
    if values.get("task_type") == _SCORES and set(values.get("modules_to_save") or ()) <= {*_HEADS}:
        unknown -= {"modules_to_save"}  # PEFT names them of itself
    if unknown or values.get("bias", "none") != "none":
        raise ValueError(f"{path} asks for {', '.join(sorted(unknown)) or 'bias'}, which adapters here do not have")
    targets = values.get("target_modules")
    targets = (targets,) if isinstance(targets, str) else tuple(targets or ())
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, (int, float)) and targets):
        raise ValueError(f"{path} has r {rank!r}, lora_alpha {alpha!r}, target_modules {list(targets)}")
    base = values.get("base_model_name_or_path")
    return AdapterSettings(rank, float(alpha), float(values.get("lora_dropout") or 0.0), tuple(sorted(targets)), base)


def with_adapter(model: Model, folder: Path) -> Model:
    """`model` with scale x (A B) added to its weights, in fp32 and rounded to their type; each when it is read.

    Raises:
        ValueError: see `read_adapter`; or the adapter was trained on other weights, by checksum.
    """
    settings, adapters = read_adapter(folder, model.config)
    if settings.checksum is not None and (found := checksum_of(model)) != settings.checksum:
        raise ValueError(
            f"{folder} was trained on weights with checksum {settings.checksum}; these have {found}: "
            "merge it into the checkpoint it was trained on"
        )
    config, tensors = model.config, dict(model.tensors)

    def merge(entry: Deferred, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return merged(entry.read(), a, b, settings.scale)

    for linear in dict.fromkeys(branch.linear for branch in find_branches(config, settings.targets)):
        own, entry = under(f"{linear}.adapter.", adapters), tensors[f"{linear}.weight"]
        factors = joined_factors(own, config.query_groups, config.heads, config.head_size)
        tensors[f"{linear}.weight"] = entry._replace(read=functools.partial(merge, entry, *factors))
    if HEAD in adapters:
        tensors[HEAD] = held(adapters[HEAD])
    return model._replace(tensors=tensors, origin=None)


def checksum_of(model: Model) -> str:
    """The checksum of a model's weights but for a scalar head, read one after the other."""
    weights = [(name, entry) for name, entry in model.tensors.items() if name != HEAD]
    return spell_checksum(sum(sum_of_bits(name, entry.read(), (0, 0), entry.shape) for name, entry in weights))
