"""A Hugging Face folder: config.json, safetensors in one file or several, and the tokenizer's files.

transformers reads config.json and completes it by its defaults. `Relative` and `Gpt2` map the result to our flags and
back. A family (model_type) can represent a model if writing config.json for this family and reading it back gives the
same model.
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
from megazpp.convert.gpt2 import Gpt2
from megazpp.convert.llama import RELATIVES, Relative, join_gate_up, split_gate_up
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
_FILES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # transformers takes the first
FILE_BYTES = 5 * 10**9  # the size limit of one file, as in transformers
ADAPTER, SHARDS = "adapter_config.json", "shard-*-model-*-of-*.safetensors"  # files that from_pretrained uses too
_SCORE, _CLASSIFIER = "score.weight", "ForSequenceClassification"
Architecture = Gpt2 | Relative
ARCHITECTURES: dict[str, Architecture] = {each.model_type: each for each in (Gpt2(), *RELATIVES, *MIXTURES)}


def open_model(folder: Path, *, adapter: Path | None = None) -> Model:
    """Open the model of a folder; its weights are read later, when a conversion needs them.

    The exception is an output matrix that should be tied to the embedding but is stored too: both are compared now.

    Args:
        folder: folder of the model.
        adapter: folder of an adapter that the caller merges into the model, or None.
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
    if architecture.predicts:
        beyond = f"model.layers.{values['num_layers']}."
        tensors = {name: entry for name, entry in tensors.items() if not name.startswith(beyond)}
    scores = _SCORE in tensors  # a reward model, without an output layer
    if scores:
        values["untie_embeddings_and_output_weights"] = False
    config = model_config(values, settings.where)
    rows = settings.count("vocab_size")
    shapes = model_shapes(config, rows, settings.where, num_tensors=len(tensors), scalar_head=scores)
    pieces = _pieces(architecture, config, scores=scores)
    if config.tied and (copy := tensors.pop("lm_head.weight", None)) is not None:
        # Some files hold a copy. One that differs is refused, because versions of transformers treat it differently.
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
    asked, stored = settings.values.get("dtype"), str(found.dtype).removeprefix("torch.")
    rounds = f"{CONFIG} asks for {asked}, to which from_pretrained rounds; the weights are kept in {stored}"
    notes = () if asked in (None, stored) else (rounds,)
    origin, score_pad = str(folder.resolve()), settings.values.get("pad_token_id")
    return found._replace(origin=origin, score_pad=score_pad, notes=notes)


def _check_alone(folder: Path, adapter: Path | None) -> None:
    """Raise ValueError if `from_pretrained` would use more of a folder than config.json and the weights."""
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
    """Return config.json as transformers completes it; raises ValueError if the family is not supported."""
    kind = read_json(folder / CONFIG).get("model_type")
    if kind in ARCHITECTURES:
        transformers = import_package("transformers", "a Hugging Face model")
        try:
            values = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
        except Exception as error:  # transformers raises errors of many types
            raise ValueError(f"{folder / CONFIG}: {' '.join(str(error).split())}") from error
        kind = values["model_type"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{folder / CONFIG}: model_type {kind!r} is not one that can be converted ({known})")
    return Settings(values, str(folder / CONFIG))


def write_model(folder: Path, model: Model, *, token_ids: Mapping[str, Any]) -> None:
    """Write config.json and the tensors of a model, in files of at most `FILE_BYTES`.

    Args:
        folder: folder to write into.
        model: model to write.
        token_ids: entries of config.json about special tokens.
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
    """Return the name of transformers' class of a model, which scores whole texts if the model has a scalar head."""
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
    """Map each of our tensors to the tensors that hold it in the family that `find_architecture` returns."""
    return find_architecture(config).pieces(config)


def _pieces(architecture: Architecture, config: GPTConfig, *, scores: bool) -> dict[str, ForeignTensors]:
    """Map our tensors to the family's. If `scores`, the model has a scalar head in place of the output layer."""
    pieces = architecture.pieces(config)
    if scores:
        pieces = {name: piece for name, piece in pieces.items() if name != OUTPUT} | {HEAD: same(_SCORE)}
    return pieces


def choose_architecture(config: GPTConfig) -> Architecture:
    """Return the first family that can represent the model; a ValueError names the flags that no family supports."""
    architecture = find_architecture(config)
    if problems := _differences(architecture, config):
        flags = ", ".join(as_written(config, config.__dataclass_fields__[name]) for name in problems)
        raise ValueError(f"{architecture.class_name} cannot hold a model with {flags}")
    return architecture


def find_architecture(config: GPTConfig) -> Architecture:
    """Return the first family that can represent the model, otherwise the one that lacks the fewest flags."""
    return min(ARCHITECTURES.values(), key=lambda architecture: len(_differences(architecture, config)))


@functools.cache
def _differences(architecture: Architecture, config: GPTConfig) -> list[str]:
    """Return the fields of GPTConfig that the family's config.json cannot represent."""
    config = replace(config, max_position_embeddings=config.max_position_embeddings or 1)
    try:
        back = GPTConfig(**architecture.read(Settings(architecture.write(config), architecture.class_name)))
    except ValueError:  # a value that `read` does not support
        return list(SHAPE)
    pairs = asdict(config), asdict(back)
    changed = [name for name, derived in SHAPE.items() if getattr(config, derived) != getattr(back, derived)]
    return [name for name in changed if pairs[0][name] != pairs[1][name]]


def to_files(architecture: Architecture, tensors: dict[str, Deferred]) -> dict[str, Deferred]:
    """Return the tensors in the form of the family's files: phi3 stores gate and up as one matrix."""
    return join_gate_up(tensors) if architecture.fused else tensors


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; raises ValueError if it is missing or holds something else."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return read_settings({path.name: path.read_bytes()}, path.name, f"in {path.parent}")


def _open_files(folder: Path, architecture: Architecture, explicit: str | None) -> dict[str, Deferred]:
    """Open the weights of a folder by transformers' names, with its order of precedence among files.

    Args:
        folder: folder of the model.
        architecture: family of the model.
        explicit: file that config.json names (transformers_weights), or None.
    """
    file = explicit or next((name for name in _FILES if (folder / name).is_file()), WHOLE)
    places: Any = {"": file}
    if file.endswith(".index.json") and Path(file).name == file:
        places = read_json(folder / file).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder / file} has no weight_map of files")
    found, known = dict[str, Deferred](), (architecture.prefix, "lm_head.", "score.")
    for part in sorted({*map(str, places.values())}):
        if Path(part).name != part or part in ("", ".", ".."):
            raise ValueError(f"{folder} names {part!r} as a file of weights, which is not a file of this folder")
        tensors = open_tensors(folder / part, lambda name: not architecture.buffers.fullmatch(name))
        found |= {name if name.startswith(known) else known[0] + name: entry for name, entry in tensors.items()}
    return found


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
