"""Read, write and merge LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT itself reads adapters, decides which layers they change, and merges them. It works on a transformers model without
weights. Each weight is put into that model only while it is merged, so a conversion has one tensor in memory at a time.

In this project's model, an adapter has parameters `a` [in, r] and `b` [out, r], under the name of its linear layer.
PEFT stores them as `lora_A.weight` [r, in] and `lora_B.weight` [out, r] under the name of transformers' module. If
transformers has separate modules for queries, keys and values, each has its own adapter. GPT-2 has one module (c_attn),
and so one adapter.

The safetensors file also records the checksum of the base weights on which the adapter was trained
(checkpoint/safe_reader.py). PEFT ignores this entry.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megazpp.base.files import write_whole
from megazpp.convert.families import split_gate_up
from megazpp.convert.huggingface import Architecture, find_architecture, model_pieces, read_json, to_files
from megazpp.convert.mixtures import of_experts
from megazpp.convert.model import (
    HEAD,
    WORDS,
    Deferred,
    ForeignTensors,
    Model,
    held,
    join_all,
    qkv_rows,
    same,
    split_all,
    transposed,
)
from megazpp.convert.safetensors_file import read_metadata, write_tensors
from megazpp.data.tokenizer_folder import import_package
from megazpp.model.config import GPTConfig
from megazpp.packed_weights.reader import spell_checksum, sum_of_bits

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
ALL_LINEAR = "all-linear"
BASE = "base_checksum"  # key of the base weights' checksum in the metadata of adapter_model.safetensors
# Fields of LoraConfig whose values are the first fields of `AdapterSettings`, in this order
SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
_PREFIX = "base_model.model."  # prefix that PEFT puts before the names of transformers' modules
# Keys of adapter_config.json that may have any value: PEFT itself applies them, or they do not change merged weights.
# All other keys must have PEFT's default, because their effect is not supported here.
_KNOWN = (
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "fan_in_fan_out", "megatron_core"),
    *("qalora_group_size", "eva_config", "runtime_config", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules"),
)
# Values of the key init_lora_weights with which PEFT leaves the base weights unchanged; others are rejected
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
# For reward models: PEFT's task type, the module names that PEFT uses for their heads, and the name of a head's weight
_SCORES, _HEADS, _SCORE = "SEQ_CLS", ("classifier", "score"), "score.weight"
# Matches the names of tensors of embeddings and output layers, one of whose sizes is the vocabulary size. The factors
# that the pattern excludes have the rank of the adapter and the hidden size as their sizes
_WORDS = re.compile(r"\b(lm_head|embed_tokens|wte)\.(?!lora_A|lora_embedding_B)")
# Matches the names of adapters on matrices that phi3 fuses. GPT-2's fused matrix has another name.
_FUSED = re.compile(r"\.(qkv_proj|gate_up_proj)\.")
_LINEARS = ("attention.qkv", "attention.proj", "mlp.gate", "mlp.fc1", "mlp.fc2")


class AdapterSettings(NamedTuple):
    """The settings of LoRA adapters, which adapter_config.json stores.

    Attributes:
        rank: rank r of the adapters (PEFT's r).
        alpha: numerator of the factor of an adapter's output (PEFT's lora_alpha).
        dropout: dropout probability of an adapter's input (PEFT's lora_dropout).
        targets: suffixes of the names of transformers' modules that have adapters, or "all-linear".
        base: name or folder of the base weights on which the adapters were trained; None if it is unknown.
        checksum: checksum of the base weights; None if it is unknown.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    base: str | None = None
    checksum: str | None = None

    @property
    def scale(self) -> float:
        """The factor by which a LoRA adapter's output is multiplied, alpha / rank."""
        return self.alpha / self.rank


class Branch(NamedTuple):
    """A place for a LoRA adapter in this project's model, and the module of transformers that corresponds to it.

    Attributes:
        linear: name of the linear layer, such as layers.0.attention.qkv, or of the experts of a layer.
        part: "q", "k" or "v" if the adapter changes only queries, keys or values of the layer; "" for the whole layer.
            For experts, the matrix that it changes: "gate", "fc1" or "fc2".
        module: name of transformers' module; for experts, without the number of the expert.
    """

    linear: str
    part: str
    module: str

    @property
    def is_qkv(self) -> bool:
        """True if the adapter changes the projection of queries, keys and values, or a part of it."""
        return self.linear.endswith(".qkv")

    @property
    def is_experts(self) -> bool:
        """True if this is the place of the adapters of one matrix (gate, fc1 or fc2) of all experts of a layer."""
        return self.linear.endswith(".experts")

    @property
    def name(self) -> str:
        """The prefix of the adapter's parameter names in this project's model."""
        return f"{self.linear}.adapter.{self.part}".rstrip(".")


def default_targets(config: GPTConfig) -> tuple[str, ...]:
    """Return PEFT's default target modules for a model, which get adapters without --lora-target-modules.

    They are q_proj and v_proj. If one module of transformers' model computes queries, keys and values together, the
    only default target is that module.
    """
    names = [branch.module.rpartition(".")[2] for branch in find_branches(config, (ALL_LINEAR,)) if branch.is_qkv]
    return ("q_proj", "v_proj") if "q_proj" in names else (names[0],)


def find_branches(config: GPTConfig, targets: Sequence[str]) -> list[Branch]:
    """Return the places of a model that get LoRA adapters, in the order of its layers.

    Args:
        config: architecture of the model.
        targets: suffixes of the names of transformers' modules, or "all-linear".
    Raises:
        ValueError: a target is not the name of a linear layer of the model.
    """
    pieces, branches = model_pieces(config), list[Branch]()
    # phi3 fuses the matrices gate and fc1 into one module, gate_up_proj, so in PEFT they share one matrix A. Adapters
    # that share A are not supported, so leave gate and fc1 out.
    if find_architecture(config).fused:
        pieces = {name: piece for name, piece in pieces.items() if not re.search(r"\.mlp\.(gate|fc1)\.", name)}
    for linear in (f"layers.{layer}.{name}" for layer in range(config.layers) for name in _LINEARS):
        if piece := pieces.get(f"{linear}.weight"):
            parts = "qkv" if len(piece.theirs) == 3 else [""]
            modules = [name.removesuffix(".weight") for name in piece.theirs]
            branches += [Branch(linear, part, name) for part, name in zip(parts, modules, strict=True)]
    for linear in (f"layers.{layer}.mlp.experts" for layer in config.expert_layers):
        for part in ("gate", "fc1", "fc2"):
            first = pieces[f"{linear}.{part}"].theirs[0].removesuffix(".weight")
            branches.append(Branch(linear, part, first.replace(".experts.0.", ".experts.")))
    if tuple(targets) == (ALL_LINEAR,):
        return branches
    chosen = {target: [x for x in branches if f".{x.module}".endswith(f".{target}")] for target in targets}
    for target, found in chosen.items():
        if not found:
            names = sorted({branch.module.rpartition(".")[2] for branch in branches})
            raise ValueError(
                f"--lora-target-modules {target} is not a linear layer of this model: there are {', '.join(names)}, "
                f"and {ALL_LINEAR} for all"
            )
    return [branch for branch in branches if any(branch in found for found in chosen.values())]


def adapter_pieces(config: GPTConfig, branches: Sequence[Branch], *, scores: bool = False) -> dict[str, ForeignTensors]:
    """Return, for each parameter of the adapters in this project's model, the tensors of PEFT that correspond to it.

    Args:
        config: architecture of the model.
        branches: places of the model that have adapters.
        scores: True to include the scalar head of a reward model.
    """
    pieces = {HEAD: same(f"{_PREFIX}score.weight")} if scores else {}
    weights = model_pieces(config)
    for branch in branches:
        if branch.is_experts:
            pieces |= _pieces_of_experts(branch, weights[f"{branch.linear}.{branch.part}"].theirs)
            continue
        theirs, rows = f"{_PREFIX}{branch.module}.lora_B.weight", weights[f"{branch.linear}.weight"]
        pieces[f"{branch.name}.a"] = transposed(f"{_PREFIX}{branch.module}.lora_A.weight")
        pieces[f"{branch.name}.b"] = same(theirs)
        if branch.is_qkv and not branch.part:  # B's rows have the order of the weight's rows, so convert both alike
            pieces[f"{branch.name}.b"] = (
                qkv_rows([theirs], config) if rows.transposed else rows._replace(theirs=(theirs,))
            )
    return pieces


def _pieces_of_experts(branch: Branch, weights: Sequence[str]) -> dict[str, ForeignTensors]:
    """Return, by parameter name, PEFT's tensors that correspond to the parameters `a` and `b` of adapters on experts.

    Args:
        branch: place of the adapters, one matrix (gate, fc1 or fc2) of all experts of a layer.
        weights: names of transformers' weights for this matrix, one for each expert.
    """
    modules = [f"{_PREFIX}{name.removesuffix('.weight')}" for name in weights]
    a, b = ([f"{module}.lora_{letter}.weight" for module in modules] for letter in "AB")
    return {f"{branch.name}.a": of_experts(a, transposed=True), f"{branch.name}.b": of_experts(b, transposed=False)}


def write_adapter(
    folder: Path, config: GPTConfig, settings: AdapterSettings, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    Args:
        folder: existing folder, in which files of these names are replaced.
        config: architecture of the model.
        settings: settings of the adapters.
        tensors: unsharded parameters of the adapters, and of a reward model's scalar head, on the CPU, by the names
            that they have in this project's model.
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
        "fan_in_fan_out": find_architecture(config).model_type == "gpt2",  # GPT-2's matrices are [in, out]
        "bias": "none",
        "inference_mode": True,
    }
    write_whole(folder / CONFIG, (json.dumps(values, indent=2) + "\n").encode())


def read_adapter(folder: Path, config: GPTConfig) -> tuple[AdapterSettings, dict[str, torch.Tensor]]:
    """Read adapters in PEFT's format to train them further.

    Args:
        folder: folder with PEFT's files.
        config: architecture of the model that gets the adapters.

    Returns:
        the settings; and the unsharded fp32 parameters by the names that they have in this project's model.

    Raises:
        ValueError: a file is missing or damaged, the adapters belong to another model, or training does not support
            them.
    """
    (model, plain, _), path = _open_adapter(folder, config), folder / CONFIG
    # Collect what training does not support: several ranks or scales (`terms`), and changes to other tensors than those
    # of the model's linear layers and scalar head (`others`)
    found, layers = model.peft_config["default"], _lora_layers(model)
    branches = [branch for branch in find_branches(config, (ALL_LINEAR,)) if branch.module in layers]
    terms = {(layer.r["default"], layer.scaling["default"]) for layer in layers.values()}
    others = ({*layers} - {branch.module for branch in branches}) | ({*_saved(model), *plain} - {_SCORE})
    patterns = [f"{name} {getattr(found, name)}" for name in ("rank_pattern", "alpha_pattern") if getattr(found, name)]
    problems = {
        "use_dora": found.use_dora,
        f"{' and '.join(patterns)} (several ranks or scales)": len(terms) > 1,
        f"target_modules or modules_to_save {', '.join(sorted(others))}": bool(others),
    }
    if words := [problem for problem, there in problems.items() if there]:
        raise ValueError(
            f"{path} has {', '.join(words)}, which training does not support; merge the adapter into its base with "
            "tools/convert_checkpoint.py --adapter, and train the result"
        )
    (rank, scale), given = terms.pop(), read_json(path)["target_modules"]
    # target_modules is a list of suffixes, or a text: all-linear or a pattern. `asked` has the suffixes of a list, and
    # all-linear for any text. If `asked` does not select exactly the layers that PEFT has adapted, because the text is
    # a pattern for example, the targets are the full names of these layers.
    asked = (ALL_LINEAR,) if isinstance(given, str) else tuple(sorted(given))
    targets = asked if find_branches(config, asked) == branches else tuple(branch.module for branch in branches)
    state = import_package("peft", str(path)).get_peft_model_state_dict(model, save_embedding_layers=False)
    pieces = adapter_pieces(config, branches, scores=_SCORE in _saved(model))
    tensors = {name: piece.join([state[each] for each in piece.theirs]) for name, piece in pieces.items()}
    base, dropout, checksum = found.base_model_name_or_path, float(found.lora_dropout or 0.0), _read_checksum(folder)
    settings = AdapterSettings(rank, scale * rank, dropout, targets, base, checksum)
    # Copy the tensors: their file is memory-mapped, and a running training may replace it
    contiguous = torch.contiguous_format
    return settings, {name: each.detach().clone(memory_format=contiguous) for name, each in tensors.items()}


def tensors_file(folder: Path) -> Path:
    """Return the path of an adapter's tensors, which PEFT writes as safetensors or, in old versions, pickled."""
    return folder / (TENSORS if (folder / TENSORS).is_file() else PICKLED)


def with_adapter(model: Model, folder: Path) -> Model:
    """Return a model in which adapters in PEFT's format are merged into the weights.

    Each weight is merged, in fp32, when it is read.

    Args:
        model: the base model, whose weights are read on demand.
        folder: folder with PEFT's files.

    Raises:
        ValueError: a file is missing or damaged. Or the adapters belong to another model, change more than LoRA does,
            or were trained on base weights with another checksum.
    """
    wanted, path, config = _read_checksum(folder), folder / CONFIG, model.config
    if wanted is not None and (found := checksum_of(model)) != wanted:
        raise ValueError(
            f"{folder} was trained on weights with checksum {wanted}, but the given weights have {found}: "
            "merge the adapter into the checkpoint on which it was trained"
        )
    # ---- load the adapter, and collect the model's tensors by transformers' names
    adapted, plain, architecture = _open_adapter(folder, config)
    saved, ours = _saved(adapted), dict(model.tensors)
    if _SCORE in saved:
        ours.setdefault(HEAD, held(torch.zeros(1, config.hidden)))
    pieces = architecture.pieces(config) | {HEAD: same(_SCORE)}
    pieces = {name: piece for name, piece in pieces.items() if name in ours}
    theirs = to_files(architecture, split_all(pieces, ours))
    # ---- apply the adapter: collect the weights that it replaces, and the LoRA layers, which are merged when read
    # With tied embeddings the model has no lm_head.weight. An lm_head.weight in the adapter's files is then compared
    # with the word embedding. A base weight in these files (`plain`) replaces the model's weight only if their values
    # differ.
    tied = {*pieces[WORDS].theirs} if config.tied else set()
    for name, tensor in (saved | plain).items():
        own = theirs.get(next(iter(tied)) if tied and name == "lm_head.weight" else name)
        if own is not None and own.shape != tensor.shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(tensor.shape)}, but the model's is {list(own.shape)}: resize the "
                "base as it was resized for the adapter's training"
            )
        if name in plain and own is not None and not torch.equal(own.read().float(), tensor):
            saved[name] = tensor
    reads: dict[str, Any] = {name: functools.partial(torch.Tensor.detach, tensor) for name, tensor in saved.items()}
    for name, layer in _lora_layers(adapted).items():
        if (weight := theirs.get(f"{name}.weight")) is not None:
            base = held(saved[f"{name}.weight"]) if f"{name}.weight" in saved else weight
            reads[f"{name}.weight"] = functools.partial(_merge, layer, base)
    missing = {*reads, *(f"{name}.weight" for name in _lora_layers(adapted))} - theirs.keys()
    if problems := missing | (tied & reads.keys()):
        why = (
            "which this model does not have as weights of its own" if missing else "which are tied to the output layer"
        )
        raise ValueError(f"{path} changes {', '.join(sorted(problems))}, {why}: this adapter cannot be merged")
    # ---- convert the merged tensors back to this project's names
    merged = theirs | {name: theirs[name]._replace(read=read) for name, read in reads.items()}
    shapes = {name: ours[name].shape for name in pieces}
    joined = join_all(pieces, split_gate_up(merged), shapes, str(folder))
    return model._replace(tensors={name: joined.get(name, entry) for name, entry in ours.items()}, origin=None)


def checksum_of(model: Model) -> str:
    """Return the checksum of a model's weights, without a scalar head. Only one weight is in memory at a time."""
    weights = [(name, entry) for name, entry in model.tensors.items() if name != HEAD]
    return spell_checksum(sum(sum_of_bits(name, entry.read(), (0, 0), entry.shape) for name, entry in weights))


def _open_adapter(folder: Path, config: GPTConfig) -> tuple[Any, dict[str, torch.Tensor], Architecture]:
    """Load adapters by PEFT into a transformers model without weights.

    Args:
        folder: folder with PEFT's files.
        config: architecture of the model.

    Returns:
        PEFT's model; further tensors of the files by transformers' names; and the family of the model. The further
        tensors are base weights that are neither adapters nor in modules_to_save. PEFT saves embeddings, for example,
        if their number of rows was changed for the training.

    Raises:
        ValueError: PEFT is not installed or refuses the adapters, or they change more than LoRA does.
    """
    path, values = folder / CONFIG, read_json(folder / CONFIG)
    # ---- reject adapters that are not plain LoRA
    if values.get("peft_type") != "LORA":
        raise ValueError(
            f"{path} has peft_type {values.get('peft_type')!r}, but only LORA is supported: give adapters of LoRA"
        )
    peft = import_package("peft", str(path))
    plain: dict[str, Any] = vars(peft.LoraConfig())
    off: tuple[Any, ...] = (None, False, "", [], {})  # values with which a key of adapter_config.json has no effect
    inits = {"init_lora_weights": _INITS}
    odd = [
        f"{key} {value!r}"
        for key, value in values.items()
        if key not in _KNOWN and value not in (plain.get(key), *off, *inits.get(key, ()))
    ]
    if odd:
        raise ValueError(f"{path} asks for {', '.join(odd)}, which is not supported: give adapters without them")
    if not any((folder / name).is_file() for name in (TENSORS, PICKLED)):
        raise ValueError(
            f"{folder / TENSORS} is missing: the folder has no tensors of an adapter; give a folder that PEFT has saved"
        )
    # ---- load the adapter on a base without weights
    try:
        with warnings.catch_warnings(action="ignore"):  # hides deprecation warnings of PEFT and transformers
            settings, scores = peft.PeftConfig.from_pretrained(str(folder)), values.get("task_type") == _SCORES
            settings.init_lora_weights = False  # the adapters are loaded, so PEFT need not initialize them
            if scores:
                settings.modules_to_save = [*(settings.modules_to_save or ()), *_HEADS]
            found = peft.load_peft_weights(str(folder), device="cpu")
            tensors = {name: tensor.float() for name, tensor in found.items()}
            # The embedding's A has a column per token, and all other tensors that match _WORDS have a row per token
            words = {name: tensor for name, tensor in tensors.items() if _WORDS.search(name)}
            rows = max([1, *(each.shape["lora_embedding_A" in name] for name, each in words.items())])
            architecture = find_architecture(config, fused=any(map(_FUSED.search, tensors)))
            empty = _empty_model(architecture, config, rows, scores=scores)
            model = peft.PeftModel(empty, settings, low_cpu_mem_usage=True)
            loaded = peft.set_peft_model_state_dict(model, tensors, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT raises many types of errors for files that it cannot use
        text = " ".join(str(error).split())
        raise ValueError(f"{path}: PEFT cannot load this adapter: {type(error).__name__}: {text}") from error
    if any(".experts." in name for name in tensors):
        raise ValueError(
            f"{folder} has adapters on experts, which are not read from PEFT's files; resume the run that trained "
            "them, or load its checkpoint, whose adapters are merged while loading"
        )
    own = [name for name, tensor in model.named_parameters() if "lora_" in name or ".modules_to_save." in name]
    missing = [name for name in own if model.get_parameter(name).is_meta]
    if problems := [*missing, *loaded.unexpected_keys]:
        what = "are missing" if missing else "have no place in this model"
        remedy = "the files are incomplete, or are of an adapter for another model"
        raise ValueError(f"{folder}: the adapter's tensors {', '.join(problems[:3])} {what}: {remedy}")
    plain = {
        name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if "lora_" not in name
    }
    saved = _saved(model)
    return model, {name: tensor for name, tensor in plain.items() if name not in saved}, architecture


def _empty_model(architecture: Architecture, config: GPTConfig, rows: int, *, scores: bool) -> Any:
    """Return transformers' model of an architecture, whose weights take no memory.

    Args:
        architecture: family of the model.
        config: architecture of the model.
        rows: vocabulary size of the model.
        scores: True for a reward model with a scalar head.
    """
    transformers = import_package("transformers", "an adapter")
    values = architecture.write(config) | {"vocab_size": rows, "num_labels": 1, "max_position_embeddings": 1}
    values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    description = transformers.AutoConfig.for_model(architecture.model_type, **values)
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(description)
    for module in model.modules():
        # PEFT moves adapters to the device of the base weights. So replace the base weights, which are on the meta
        # device, by tensors on the CPU. Each is a view of a single element, so that it takes no memory.
        for name, tensor in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.zeros(1).expand(tensor.shape), requires_grad=False))
    return model


def _lora_layers(model: Any) -> dict[str, Any]:
    """Return the layers of PEFT's model that have adapters, by transformers' names of the modules."""
    from peft.tuners.lora import LoraLayer

    return {name: each for name, each in model.base_model.model.named_modules() if isinstance(each, LoraLayer)}


def _saved(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of PEFT's model that replace base weights (modules_to_save), by transformers' names."""
    named, mark = model.base_model.model.named_parameters(), ".modules_to_save.default"
    return {name.replace(mark, ""): tensor for name, tensor in named if mark in name}


def _merge(layer: Any, weight: Deferred) -> torch.Tensor:
    """Merge a layer's LoRA adapter into the layer's weight by PEFT, and return the merged weight in fp32.

    Args:
        layer: PEFT's layer, whose base weight is a placeholder that takes no memory.
        weight: the layer's weight, which is read from its file here.
    """
    base = layer.get_base_layer()
    empty, base.weight = base.weight, nn.Parameter(weight.read().float(), requires_grad=False)
    layer.merge()
    layer.merged_adapters.clear()  # with an entry in this list, PEFT would not merge the adapter again at the next read
    found, base.weight = base.weight.data, empty
    return found


def _read_checksum(folder: Path) -> str | None:
    """Return the checksum of the base weights that adapter_model.safetensors records; None if it records none."""
    return read_metadata(folder / TENSORS).get(BASE) if (folder / TENSORS).is_file() else None
