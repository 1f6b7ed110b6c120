"""LoRA adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors, read, written and merged.

An adapter of ours is a parameter `a` [in, r] and a parameter `b` [out, r] under the linear layer that it stands beside;
there it is `lora_A.weight` [r, in] and `lora_B.weight` [out, r] under the name of Hugging Face's module. Where that has
queries, keys and values apart, so have the adapters; GPT-2's c_attn is one module and has one A. The safetensors file
says beside the tensors which weights they were trained on, by checksum (checkpoint/weights.py), which PEFT ignores.
"""

from __future__ import annotations

import functools
import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.base.files import write_whole
from megazpp.checkpoint.weights import spell_checksum, sum_of_bits
from megazpp.convert.huggingface import find_architecture, model_pieces, read_json
from megazpp.convert.model import (
    HEAD,
    Deferred,
    ForeignTensors,
    Model,
    check_tensors,
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
from megazpp.tensor_parallel.lora import merged

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
ALL_LINEAR = "all-linear"
BASE = "base_checksum"
_PREFIX = "base_model.model."
# Keys of adapter_config.json: those that change nothing in merged weights, the plain values of others, and keys that
# PEFT's own code reads for us. Any further key has to be off.
_ANY_VALUE = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "fan_in_fan_out", "megatron_core"),
    *("qalora_group_size", "eva_config", "runtime_config"),
)
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # all others change the base's weights
}
_BY_PEFT = (
    *("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"),
    *("layers_pattern", "exclude_modules"),
)
_OTHERS = ("lm_head", "embed_tokens", "wte")  # modules beside the layers
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
    def is_qkv(self) -> bool:
        return self.linear.endswith(".qkv")

    @property
    def name(self) -> str:
        """The prefix of the adapter's parameters in our model."""
        return f"{self.linear}.adapter.{self.part}".rstrip(".")


def default_targets(config: GPTConfig) -> tuple[str, ...]:
    """PEFT's for such a model; where it has none, the layer of queries, keys and values."""
    names = [branch.module.rpartition(".")[2] for branch in find_branches(config, (ALL_LINEAR,)) if branch.is_qkv]
    return ("q_proj", "v_proj") if "q_proj" in names else (names[0],)


def find_branches(config: GPTConfig, targets: Sequence[str]) -> list[Branch]:
    """The adapters that the targets ask for, in the order of our layers.

    Raises:
        ValueError: a target is no linear layer of the model's, or an embedding or output layer.
    """
    pieces, branches = model_pieces(config), list[Branch]()
    if find_architecture(config).fused:  # an adapter beside phi3's gate_up_proj would have one A for two matrices here
        pieces = {name: piece for name, piece in pieces.items() if not re.search(r"\.mlp\.(gate|fc1)\.", name)}
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
    weights = model_pieces(config)
    for branch in branches:
        theirs, rows = f"{_PREFIX}{branch.module}.lora_B.weight", weights[f"{branch.linear}.weight"]
        pieces[f"{branch.name}.a"] = transposed(f"{_PREFIX}{branch.module}.lora_A.weight")
        pieces[f"{branch.name}.b"] = same(theirs)
        if branch.is_qkv and not branch.part:  # B's rows lie as those of the weight
            pieces[f"{branch.name}.b"] = (
                qkv_rows([theirs], config) if rows.transposed else rows._replace(theirs=(theirs,))
            )
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
    """Read an adapter that is trained further: its settings, and its whole tensors under our names.

    Raises:
        ValueError: a file is missing or damaged, the adapter is another model's, or training has no such adapter.
    """
    found, branches = _read_config(folder, config), find_branches(config, (ALL_LINEAR,))
    modules = [branch.module for branch in branches]
    terms = {name: term for name in (*modules, *_OTHERS) if (term := found.find_term(name)) is not None}
    others = {*(found.peft.modules_to_save or ()), *terms} - {*_HEADS, *modules}
    problems = {"use_dora": found.peft.use_dora, "several ranks or scales": len({*terms.values()}) > 1}
    problems[f"target_modules or modules_to_save {', '.join(sorted(others))}"] = bool(others)
    if words := [problem for problem, there in problems.items() if there]:
        raise ValueError(f"{folder / CONFIG} has {', '.join(words)}: adapters here do not train like that")
    branches = [branch for branch in branches if branch.module in terms]
    (rank, scale), targets = next(iter(terms.values())), tuple(branch.module for branch in branches)
    if found.all_linear:
        targets = (ALL_LINEAR,)
    elif found.plain:
        targets = tuple(sorted(found.peft.target_modules))
    shapes = adapter_shapes(config, branches, rank) | {HEAD: (1, config.hidden)}
    pieces, tensors = adapter_pieces(config, branches, scores=found.scores), open_tensors(_tensors_file(folder))
    joined = join_all(pieces, tensors, shapes, str(_tensors_file(folder)))
    base, checksum = found.peft.base_model_name_or_path, _read_checksum(folder)
    settings = AdapterSettings(rank, scale * rank, float(found.peft.lora_dropout or 0.0), targets, base, checksum)
    return settings, {name: entry.read() for name, entry in joined.items()}


class _Config(NamedTuple):
    """An adapter's settings: PEFT's LoraConfig, or an object with the fields of a plain adapter."""

    peft: Any
    plain: bool
    all_linear: bool

    @property
    def scores(self) -> bool:
        return bool(self.peft.task_type == _SCORES)

    def find_term(self, module: str) -> tuple[int, float] | None:
        """Return rank and scale of the term beside Hugging Face's module of this name; None for no term."""
        config, rank, alpha = self.peft, self.peft.r, self.peft.lora_alpha
        if self.plain:
            beside = any(f".{module}".endswith(f".{target}") for target in config.target_modules)
            return (rank, alpha / rank) if beside else None
        from peft.tuners.tuners_utils import check_target_module_exists
        from peft.utils.other import get_pattern_key

        if not check_target_module_exists(config, module):
            return None
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, module), rank)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, module), alpha)
        return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _read_config(folder: Path, config: GPTConfig) -> _Config:
    """Read adapter_config.json, with PEFT's own PeftConfig unless all keys have the values of a plain adapter.

    Raises:
        ValueError: a key asks for more than LoRA beside linear layers, or for PEFT where it is not installed.
    """
    values, path = read_json(folder / CONFIG), folder / CONFIG
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{path} has peft_type {values.get('peft_type')!r}; only LORA is known")
    plain = dict.fromkeys(values, (None, False, "", [], {})) | _PLAIN
    odd = {key: value for key, value in values.items() if key not in _ANY_VALUE and value not in plain[key]}
    if unknown := [f"{key} {value!r}" for key, value in odd.items() if key not in _BY_PEFT]:
        raise ValueError(f"{path} asks for {', '.join(unknown)}, which adapters here do not have")
    if values.get("task_type") == _SCORES and {*odd.get("modules_to_save", ())} <= {*_HEADS}:
        odd.pop("modules_to_save", None)  # PEFT names them of itself
    rank, alpha, targets = (values.get(key) for key in ("r", "lora_alpha", "target_modules"))
    numbers = [rank, alpha, *(values.get("rank_pattern") or {}).values(), *(values.get("alpha_pattern") or {}).values()]
    sound = all(isinstance(number, int | float) and number > 0 for number in numbers) and isinstance(rank, int)
    if not (sound and targets and isinstance(targets, str | list)):
        raise ValueError(f"{path} has r {rank!r}, lora_alpha {alpha!r}, target_modules {targets!r}, and {odd!r}")
    all_linear = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    if isinstance(targets, str) and not all_linear:
        odd["target_modules"] = targets
    found: Any = types.SimpleNamespace(**dict.fromkeys((*_ANY_VALUE, *_BY_PEFT)) | values)
    if odd:
        try:
            import peft  # takes seconds, which plain adapters need not spend

            found = peft.PeftConfig.from_pretrained(str(folder))
        except ImportError as error:
            raise ValueError(f"{path} asks for {', '.join(odd)}, which needs the package peft: {error}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a LoraConfig of PEFT: {error}") from error
    modules = [branch.module for branch in find_branches(config, (ALL_LINEAR,))]
    if all_linear:
        found.target_modules = modules
    settings = _Config(found, not odd, all_linear)
    if not any(map(settings.find_term, (*modules, *_OTHERS))):
        names = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
        raise ValueError(f"{path}: target_modules {targets} is no linear layer of this model's: there are {names}")
    return settings


def _tensors_file(folder: Path) -> Path:
    """Return the file of an adapter's tensors that PEFT would read."""
    return folder / (PICKLED if (folder / PICKLED).is_file() and not (folder / TENSORS).is_file() else TENSORS)


def _read_checksum(folder: Path) -> str | None:
    return read_metadata(folder / TENSORS).get(BASE) if (folder / TENSORS).is_file() else None


class _Change(NamedTuple):
    """The change of one of Hugging Face's tensors: `whole` replaces it, and a low-rank term is added.

    Attributes:
        a, b: factors of the term, [r, in] and [out, r].
        magnitude: [out] norms that DoRA gives the rows of the sum; None for plain LoRA.
    """

    whole: Deferred | None
    scale: float = 1.0
    a: Deferred | None = None
    b: Deferred | None = None
    magnitude: Deferred | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the changed `weight` [out, in], computed in fp32 and rounded to its type."""
        dtype = weight.dtype
        weight = weight if self.whole is None else self.whole.read()
        if self.a is None or self.b is None:
            return weight.to(dtype)
        total = merged(weight.float(), self.a.read().t(), self.b.read(), self.scale)
        if self.magnitude is not None:
            total *= (self.magnitude.read().float() / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
        return total.to(dtype)


def _read_changes(folder: Path, config: GPTConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Change]:
    """Read what an adapter does to Hugging Face's tensors of these shapes ([out, in] of linear layers)."""
    found, path = _read_config(folder, config), _tensors_file(folder)
    tensors = {
        name.removeprefix(_PREFIX).replace(".base_layer.", "."): entry for name, entry in open_tensors(path).items()
    }
    saved = tuple({*(found.peft.modules_to_save or ()), *(_HEADS if found.scores else ())})
    whole = {name for name in shapes if name.removesuffix(".weight").endswith(saved)} if saved else set()
    expected = {name: shapes[name] for name in whole | (tensors.keys() & shapes.keys())}
    changes = {name: _Change(tensors.get(name)) for name in expected}
    modules = {*_OTHERS, *(name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2)}
    terms = {module: term for module in sorted(modules) if (term := found.find_term(module)) is not None}
    words = {module for module in modules if module.endswith(_OTHERS if config.tied else _OTHERS[1:])}
    replaced = {module for module in words if module.endswith(saved)} if config.tied and saved else set()
    if alone := words & (terms.keys() | replaced):
        problem = f"{', '.join(sorted(alone))}: adapters of embeddings and of weights tied to them are not supported"
        raise ValueError(f"{folder / CONFIG} asks for {problem}")
    for module, (rank, scale) in terms.items():
        outputs, inputs = shapes[f"{module}.weight"]
        parts: dict[str, tuple[int, ...]] = {
            f"{module}.lora_A.weight": (rank, inputs),
            f"{module}.lora_B.weight": (outputs, rank),
        }
        parts |= {f"{module}.lora_magnitude_vector": (outputs,)} if found.peft.use_dora else {}
        expected |= parts
        changes[f"{module}.weight"] = _Change(tensors.get(f"{module}.weight"), scale, *map(tensors.get, parts))
    check_tensors({name: entry.shape for name, entry in tensors.items()}, expected, str(path))
    return changes


def with_adapter(model: Model, folder: Path) -> Model:
    """Return `model` merged with an adapter: its weights are changed, in fp32, when they are read.

    Raises:
        ValueError: a file is missing or damaged; the adapter is another model's, does what LoRA does not, or was
            trained on other weights, by checksum.
    """
    wanted, tensors = _read_checksum(folder), dict(model.tensors)
    if wanted is not None and (found := checksum_of(model)) != wanted:
        raise ValueError(
            f"{folder} was trained on weights with checksum {wanted}; these have {found}: "
            "merge it into the checkpoint it was trained on"
        )
    pieces = model_pieces(model.config) | {HEAD: same("score.weight")}
    shapes: dict[str, tuple[int, ...]] = {}
    tensors.setdefault(HEAD, held(torch.zeros(1, model.config.hidden)))
    for name, piece in pieces.items():
        if name in tensors:
            parts = piece.split(torch.empty(tensors[name].shape, device="meta"))
            whole = [tuple(part.t().shape if piece.transposed else part.shape) for part in parts]
            shapes |= dict(zip(piece.theirs, whole, strict=True))
    changes = _read_changes(folder, model.config, shapes)

    def change(piece: ForeignTensors, entry: Deferred) -> torch.Tensor:
        parts = []
        for name, part in zip(piece.theirs, piece.split(entry.read()), strict=True):
            made = changes[name](part.t() if piece.transposed else part) if name in changes else None
            parts.append(part if made is None else made.t() if piece.transposed else made)
        return piece.join(parts).contiguous()

    for name, piece in pieces.items():
        if changes.keys() & {*piece.theirs}:
            tensors[name] = tensors[name]._replace(read=functools.partial(change, piece, tensors[name]))
        elif name == HEAD and name not in model.tensors:
            del tensors[HEAD]
    return model._replace(tensors=tensors, origin=None)


def checksum_of(model: Model) -> str:
    """The checksum of a model's weights but for a scalar head, read one after the other."""
    weights = [(name, entry) for name, entry in model.tensors.items() if name != HEAD]
    return spell_checksum(sum(sum_of_bits(name, entry.read(), (0, 0), entry.shape) for name, entry in weights))
