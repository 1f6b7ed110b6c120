"""Read and write the model in a Hugging Face folder: config.json, and weights in one or several safetensors files.

transformers reads config.json and completes it by its defaults. Classes for Hugging Face's families (`Relative`,
`Mixture`, `Gpt2`) map the result to the fields of GPTConfig and back. A family, which config.json names as model_type,
can represent a model if writing config.json for this family and reading it back gives the same model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megazpp.base.files import write_whole
from megazpp.base.flags import as_written
from megazpp.checkpoint.metadata import SHAPE
from megazpp.convert.families import RELATIVES, Gpt2, Relative, join_gate_up, split_gate_up
from megazpp.convert.mixtures import MIXTURES
from megazpp.convert.model import (
    HEAD,
    OUTPUT,
    WORDS,
    Deferred,
    ForeignTensors,
    Model,
    join_all,
    model_config,
    model_shapes,
    same,
    split_all,
)
from megazpp.convert.safetensors_file import num_bytes, open_tensors, write_tensors
from megazpp.convert.settings import Settings
from megazpp.data.tokenizer_folder import CONFIG, find_tokenizer, import_package, read_settings
from megazpp.model.config import GPTConfig

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files of weights in a Hugging Face folder. If several exist, transformers reads the first of them.
_FILES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
FILE_BYTES = 5 * 10**9  # largest size of a safetensors file in bytes, as in transformers
# If a folder has the file ADAPTER, from_pretrained changes the weights by an adapter. If a folder has files that match
# SHARDS, from_pretrained reads the weights in these files instead of the weights in the model's files.
ADAPTER, SHARDS = "adapter_config.json", "shard-*-model-*-of-*.safetensors"
_SCORE, _CLASSIFIER = "score.weight", "ForSequenceClassification"
Architecture = Gpt2 | Relative
ARCHITECTURES: dict[str, Architecture] = {each.model_type: each for each in (Gpt2(), *RELATIVES, *MIXTURES)}


def open_model(folder: Path, *, adapter: Path | None = None) -> Model:
    """Open the model of a Hugging Face folder. A tensor is read from its file when the conversion needs its values.

    An output matrix that is tied to the embedding but also stored in the files is read at once, to compare both.

    Args:
        folder: Hugging Face folder of the model.
        adapter: folder of an adapter (--adapter), which `convert` merges into the opened model; None without one.
    Raises:
        ValueError: a file is missing or damaged, or the model is not supported.
    """
    _check_alone(folder, adapter)
    settings = _read_config(folder)
    architecture = ARCHITECTURES[settings.text("model_type")]
    settings.absent("quantization_config", "per_layer_config")
    settings.only("is_causal", True)
    values = architecture.read(settings)
    tensors = split_gate_up(_open_files(folder, architecture, settings.values.get("transformers_weights")))
    if architecture.predicts:  # leave out the layer after the last one, see `Relative.predicts`
        beyond = f"model.layers.{values['num_layers']}."
        tensors = {name: entry for name, entry in tensors.items() if not name.startswith(beyond)}
    scores = _SCORE in tensors  # True for a reward model, which has no output layer
    if scores:
        values["untie_embeddings_and_output_weights"] = False
    config = model_config(values, settings.where)
    rows = settings.count("vocab_size")
    shapes = model_shapes(config, rows, settings.where, num_tensors=len(tensors), scalar_head=scores)
    pieces = _pieces(architecture, config, scores=scores)
    if config.tied and (copy := tensors.pop("lm_head.weight", None)) is not None:
        # Some files contain a copy of the tied matrix. A copy with other values is rejected, because some versions of
        # transformers use it and others ignore it.
        words = pieces[WORDS].theirs[0]
        original = tensors.get(words, copy)
        if copy.shape != original.shape or not torch.equal(copy.read().float(), original.read().float()):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight is not {words}; "
                "write false into config.json to keep both, or remove lm_head.weight from the files"
            )
    length = config.max_position_embeddings
    assert length is not None
    tensors = join_all(pieces, tensors, shapes, str(folder))
    found = Model(config, rows, tensors, length, find_tokenizer(folder))
    asked = getattr(torch, str(settings.values.get("dtype")), None)
    notes = () if asked is None else rounding_notes(found, asked)
    # Adapters that this project writes name the matrices of the family that `find_architecture` returns. PEFT cannot
    # load them on this folder if only the folder's family fuses matrices. `Model.origin` is then None.
    origin = str(folder.resolve()) if find_architecture(config).fused == architecture.fused else None
    score_pad = settings.values.get("pad_token_id")
    return found._replace(origin=origin, score_pad=score_pad, notes=notes)


def rounding_notes(model: Model, dtype: torch.dtype) -> tuple[str, ...]:
    """Return a line for the log if transformers' `from_pretrained` rounds weights of a model; () if it rounds none.

    The biases of experts do not count, because transformers keeps them in fp32.

    Args:
        model: model in a Hugging Face folder.
        dtype: dtype in the folder's config.json, to which `from_pretrained` converts the weights.
    """
    dtypes = {name: entry.dtype for name, entry in model.tensors.items() if not name.endswith("expert_bias")}
    rounded = [name for name, stored in dtypes.items() if torch.promote_types(stored, dtype) != dtype]
    if not rounded:
        return ()
    example = f"{rounded[0]} is stored in {dtypes[rounded[0]]}"
    return (f"{CONFIG} asks for {dtype}, to which from_pretrained rounds {len(rounded)} weights: {example}",)


def _check_alone(folder: Path, adapter: Path | None) -> None:
    """Raise ValueError if transformers' `from_pretrained` would use an adapter or a distributed checkpoint in a folder.

    Args:
        folder: Hugging Face folder of the model.
        adapter: folder of an adapter that is merged into the model; None if none is merged.
    """
    if (folder / ADAPTER).is_file() and (adapter is None or adapter.resolve() != folder.resolve()):
        raise ValueError(
            f"{folder} also holds an adapter ({ADAPTER}), which from_pretrained applies to the weights: --adapter "
            f"{folder} merges it; to convert the weights alone, move the files of the adapter to another folder"
        )
    if any(folder.glob(SHARDS)):
        raise ValueError(
            f"{folder} also holds a distributed checkpoint ({SHARDS}), which from_pretrained loads in place of the "
            "other files; save the model again with save_pretrained, or move these files to another folder"
        )


def _read_config(folder: Path) -> Settings:
    """Return the values of a folder's config.json, completed by the defaults of transformers.

    Raises:
        ValueError: the file is missing or damaged, or the family (model_type) is not supported.
    """
    kind = read_json(folder / CONFIG).get("model_type")
    if kind in ARCHITECTURES:
        transformers = import_package("transformers", "a Hugging Face model")
        try:
            values = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
        except Exception as error:  # transformers raises errors of many types for an invalid config.json
            raise ValueError(f"transformers cannot read {folder / CONFIG}: {' '.join(str(error).split())}") from error
        kind = values["model_type"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"{folder / CONFIG}: model_type {kind!r} cannot be converted; these model types can be: {known}"
        )
    return Settings(values, str(folder / CONFIG))


def write_model(folder: Path, model: Model, *, token_ids: Mapping[str, Any]) -> None:
    """Write a model into a Hugging Face folder: config.json, and safetensors files of at most 5 GB.

    Args:
        folder: existing folder to write into.
        model: model to write.
        token_ids: entries of config.json about special tokens, such as eos_token_id.
    Raises:
        ValueError: no family of Hugging Face can represent the model.
    """
    architecture, scores = choose_architecture(model.config), HEAD in model.tensors
    kept = {name: entry for name, entry in model.tensors.items() if not (scores and name == OUTPUT)}
    tensors = to_files(architecture, split_all(_pieces(architecture, model.config, scores=scores), kept))
    hub = import_package("huggingface_hub", "a Hugging Face folder")
    files = hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=num_bytes,
        get_storage_id=lambda entry: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for name, held in files.filename_to_tensors.items():
        write_tensors(folder / name, {each: tensors[each] for each in held})
    if files.is_sharded:
        _write_json(folder / INDEX, {"metadata": files.metadata, "weight_map": files.tensor_to_filename})
    description = {
        "architectures": [class_name(model)],
        "model_type": architecture.model_type,
        "vocab_size": model.rows,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        **architecture.write(model.config),
        **token_ids,
        **({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if scores else {}),
    }
    _write_json(folder / CONFIG, description)


def class_name(model: Model) -> str:
    """Return the name of the class that transformers uses for a model, such as LlamaForCausalLM.

    For a reward model, whose scalar head scores texts, the result is the class for sequence classification.

    Raises:
        ValueError: no family can represent the model, or its family has no class for sequence classification.
    """
    architecture = choose_architecture(model.config)
    if HEAD not in model.tensors:
        return architecture.class_name
    stem = re.sub(r"(ForCausalLM|LMHeadModel)$", "", architecture.class_name)
    auto = import_package("transformers.models.auto.modeling_auto", "a reward model")
    if architecture.model_type not in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(
            f"transformers has no {stem}{_CLASSIFIER}, so a reward model of the family {architecture.model_type} "
            "cannot be exported"
        )
    return stem + _CLASSIFIER


def model_pieces(config: GPTConfig) -> dict[str, ForeignTensors]:
    """Return, by the name of each tensor of `GPTModel`, the corresponding tensors of a Hugging Face model.

    The Hugging Face model is of the first family that can represent a model of this architecture.
    """
    return find_architecture(config).pieces(config)


def _pieces(architecture: Architecture, config: GPTConfig, *, scores: bool) -> dict[str, ForeignTensors]:
    """Return, by the name of each tensor of `GPTModel`, the corresponding tensors of a Hugging Face model.

    Args:
        architecture: family of the model.
        config: architecture of the model.
        scores: True for a reward model, which has a scalar head instead of the output layer.
    """
    pieces = architecture.pieces(config)
    if scores:
        pieces = {name: piece for name, piece in pieces.items() if name != OUTPUT} | {HEAD: same(_SCORE)}
    return pieces


def choose_architecture(config: GPTConfig) -> Architecture:
    """Return the first Hugging Face family that can represent a model.

    Raises:
        ValueError: no family can. The message names the flags that the most similar family does not support.
    """
    architecture = find_architecture(config)
    if problems := _differences(architecture, config):
        flags = ", ".join(as_written(config, config.__dataclass_fields__[name]) for name in problems)
        raise ValueError(
            f"{architecture.class_name} cannot hold a model with {flags}, and no other family of Hugging Face is "
            "nearer to this model"
        )
    return architecture


def find_architecture(config: GPTConfig, *, fused: bool = False) -> Architecture:
    """Return the first Hugging Face family that can represent a model.

    If no family can, return the family for which the smallest number of the model's config fields is not supported.

    Args:
        config: architecture of the model.
        fused: True to prefer a family that fuses matrices, as phi3 does, among several that can represent the model.
    """
    return min(ARCHITECTURES.values(), key=lambda each: (len(_differences(each, config)), each.fused != fused))


@functools.cache
def _differences(architecture: Architecture, config: GPTConfig) -> list[str]:
    """Return the names of those fields of a GPTConfig whose values a Hugging Face family cannot represent."""
    config = replace(config, max_position_embeddings=config.max_position_embeddings or 1)
    try:
        back = GPTConfig(**architecture.read(Settings(architecture.write(config), architecture.class_name)))
    except ValueError:  # the family does not support a value of `config` at all
        return list(SHAPE)
    # SHAPE names for each field a property, whose value may depend on several fields. If the property differs, report
    # only fields that differ themselves.
    pairs = asdict(config), asdict(back)
    changed = [name for name, derived in SHAPE.items() if getattr(config, derived) != getattr(back, derived)]
    return [name for name in changed if pairs[0][name] != pairs[1][name]]


def to_files(architecture: Architecture, tensors: dict[str, Deferred]) -> dict[str, Deferred]:
    """Return a model's tensors, by name, as a Hugging Face family stores them in files.

    phi3 stores gate and up as one matrix. For all other families, `tensors` are returned unchanged.
    """
    return join_gate_up(tensors) if architecture.fused else tensors


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise ValueError if the file is missing or contains something else."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, but a Hugging Face model needs it: copy the complete folder")
    return read_settings({path.name: path.read_bytes()}, path.name, f"in {path.parent}")


def _open_files(folder: Path, architecture: Architecture, explicit: str | None) -> dict[str, Deferred]:
    """Open the weights of a Hugging Face folder, and return them by their names in transformers.

    Stored tensors that are not weights (`Relative.buffers`) are ignored.

    If the folder has weights in several formats, the function opens the files that transformers would open.

    Args:
        folder: Hugging Face folder of the model.
        architecture: family of the model, with the prefix of tensor names and the pattern of tensors to ignore.
        explicit: file that config.json names in transformers_weights; None if it names none.
    Raises:
        ValueError: a file is missing or damaged, or is not in this folder.
    """
    file = explicit or next((name for name in _FILES if (folder / name).is_file()), WHOLE)
    places: Any = {"": file}  # like the `weight_map` of an index, from tensor names to files, but with only one entry
    if file.endswith(".index.json") and Path(file).name == file:
        places = read_json(folder / file).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(
                f"{folder / file} has no weight_map from tensors to files, so it is damaged: copy it again"
            )
    found, known = dict[str, Deferred](), (architecture.prefix, "lm_head.", "score.")
    for part in sorted({*map(str, places.values())}):
        if Path(part).name != part or part in ("", ".", ".."):
            raise ValueError(
                f"{folder} names {part!r} as a file of weights, which is not a file of this folder; use a folder from "
                "a source that you trust"
            )
        tensors = open_tensors(folder / part, lambda name: not architecture.buffers.fullmatch(name))
        # Add the family's prefix to names without it, see `Relative.prefix`
        found |= {name if name.startswith(known) else known[0] + name: entry for name, entry in tensors.items()}
    return found


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
