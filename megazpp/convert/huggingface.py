"""A Hugging Face folder: config.json, safetensors in one file or several, and the tokenizer's files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megazpp.base.files import write_whole
from megazpp.base.program import in_words
from megazpp.convert.gpt2 import Gpt2
from megazpp.convert.llama import RELATIVES, Relative
from megazpp.convert.mixtures import MIXTURES, choose_mixture
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
from megazpp.convert.neox import NEOX
from megazpp.convert.safetensors_file import open_tensors, split_into_files, write_tensors
from megazpp.convert.settings import Settings
from megazpp.data.tokenizer_folder import CONFIG, find_tokenizer
from megazpp.model.config import GPTConfig

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # transformers takes the first
FILE_BYTES = 5 * 10**9  # as transformers has cut files for years
_SCORE, _CLASSIFIER = "score.weight", "ForSequenceClassification"
Architecture = Gpt2 | Relative
ARCHITECTURES: dict[str, Architecture] = {"gpt2": Gpt2(), **RELATIVES, "gpt_neox": NEOX, **MIXTURES}  # by model_type


def open_model(folder: Path) -> Model:
    """The model of a folder; nothing but shapes is read yet, and a tied output matrix that the files hold once more.

    Raises:
        ValueError: something is missing, damaged, or a model that we do not have.
    """
    settings = Settings(read_json(folder / CONFIG), str(folder / CONFIG))
    kind = settings.text("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{folder / CONFIG}: model_type {kind!r} is not one that can be converted ({known})")
    architecture = ARCHITECTURES[kind]
    settings.absent("quantization_config", "per_layer_config")
    settings.only("is_causal", True)
    values = architecture.read(settings)
    tensors = architecture.opened(_open_files(folder, architecture, settings.values.get("transformers_weights")))
    scores = _SCORE in tensors  # a reward model, without an output layer
    if scores:
        values["untie_embeddings_and_output_weights"] = False
    config = model_config(values, str(folder / CONFIG))
    rows = settings.count("vocab_size", 50257 if kind == "gpt2" else None)
    shapes = model_shapes(config, rows, str(folder / CONFIG), num_tensors=len(tensors), scalar_head=scores)
    pieces = _pieces(architecture, config, scores=scores)
    if config.tied:
        _drop_tied_copy(tensors, pieces[WORDS].theirs[0], str(folder))
    length = config.max_position_embeddings
    assert length is not None
    tensors = join_all(pieces, tensors, shapes, str(folder))
    found = Model(config, rows, tensors, length, find_tokenizer(folder))
    return found._replace(origin=str(folder.resolve()), score_pad=settings.values.get("pad_token_id"))


def write_model(folder: Path, model: Model, *, token_ids: Mapping[str, Any]) -> None:
    """Write config.json, with `token_ids` about the tokenizer, and the tensors, cut into files of `FILE_BYTES`."""
    architecture, scores = choose_architecture(model.config), HEAD in model.tensors
    tensors = architecture.closed(split_all(_pieces(architecture, model.config, scores=scores), model.tensors))
    groups = split_into_files(tensors, FILE_BYTES)
    count = len(groups)
    names = [WHOLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    total = sum(write_tensors(folder / name, group) for name, group in zip(names, groups, strict=True))
    if count > 1:
        places = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
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
    """transformers' class of a model: one that scores whole texts if it has a scalar head."""
    name = choose_architecture(model.config).class_name
    if HEAD not in model.tensors:
        return name
    if name == "GraniteForCausalLM":
        raise ValueError(
            f"transformers has no {_CLASSIFIER} of Granite, which a reward model with its factors would be"
        )
    return re.sub(r"(ForCausalLM|LMHeadModel)$", _CLASSIFIER, name)


def model_pieces(config: GPTConfig) -> dict[str, ForeignTensors]:
    """Their tensors for each of ours, by the names of `find_architecture`."""
    return find_architecture(config).pieces(config)


def _pieces(architecture: Architecture, config: GPTConfig, *, scores: bool) -> dict[str, ForeignTensors]:
    """Their tensors for each of ours; `score` has the place of the output layer."""
    pieces = architecture.pieces(config)
    if scores:
        pieces = {name: piece for name, piece in pieces.items() if name != OUTPUT} | {HEAD: same(_SCORE)}
    return pieces


def choose_architecture(config: GPTConfig) -> Architecture:
    """The one that holds such a model; raises ValueError naming the flags that it has not."""
    architecture = find_architecture(config)
    architecture.write(config)
    return architecture


def find_architecture(config: GPTConfig) -> Architecture:
    """The one that is closest to a model, whether it holds that or not."""
    if config.num_experts is not None:
        return choose_mixture(config)
    return ARCHITECTURES[_model_type(config)]


def _model_type(config: GPTConfig) -> str:
    if config.positions != "rope":
        return "gpt2"
    if config.normalization == "LayerNorm":
        neox = config.use_parallel_residual or config.rotary_percent != 1.0
        return "gpt_neox" if neox else "starcoder2"
    if config.norm_after_block or config.qk_layernorm_all_heads:
        return "olmo2"
    multipliers = (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling)
    if config.attention_multiplier is not None or multipliers != (1.0, 1.0, 1.0):
        return "granite"
    if config.unrotated:
        return "smollm3"
    if config.rotary_percent != 1.0:
        return "phi3"
    if config.window is not None and len({*config.attention_span}) > 1 and not config.qk_layernorm:
        return "qwen2" if config.qkv_bias and not config.linear_bias else "smollm3"
    if config.qk_layernorm:
        return "qwen3"
    if config.window is not None and (config.linear_bias or not config.qkv_bias):
        return "mistral"
    return "qwen2" if config.qkv_bias and not config.linear_bias else "llama"


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object; raises ValueError if it is missing or holds something else."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {in_words(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings")
    return values


def _open_files(folder: Path, architecture: Architecture, explicit: str | None) -> dict[str, Deferred]:
    """Open the weights of a folder, by transformers' names and in its order of precedence among files.

    Args:
        explicit: file that config.json names (transformers_weights).
    """
    file = explicit or next((name for name in _FILES if (folder / name).is_file()), WHOLE)
    if Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"{folder / CONFIG}: transformers_weights {file!r} is no file of this folder")
    if not file.endswith(".index.json"):
        return _open_weights(folder / file, architecture)
    places = read_json(folder / file).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(part, str) for part in places.values()):
        raise ValueError(f"{folder / file} has no weight_map of files")
    if outside := [part for part in places.values() if "/" in part or part in ("", ".", "..")]:
        raise ValueError(f"{folder / file} names {outside[0]!r}, which is no file of this folder")
    found: dict[str, Deferred] = {}
    for part in sorted(set(places.values())):
        tensors = _open_weights(folder / part, architecture)
        listed = (name for name, place in places.items() if place == part)
        absent = [name for name in listed if architecture.their_name(name) not in (None, *tensors)]
        if absent:
            raise ValueError(f"{folder / part} does not hold {absent[0]}, which {file} says it does")
        found |= tensors
    return found


def _open_weights(path: Path, architecture: Architecture) -> dict[str, Deferred]:
    """Open a file's weights by the names that transformers' model gives them; buffers are left out."""
    tensors = open_tensors(path, lambda name: architecture.their_name(name) is not None)
    return {str(architecture.their_name(name)): entry for name, entry in tensors.items()}


def _drop_tied_copy(tensors: dict[str, Deferred], words: str, where: str) -> None:
    """Some files hold the tied matrix twice: ValueError if the copies differ, as versions of transformers do then."""
    name = next((name for name in ("lm_head.weight", "embed_out.weight") if name in tensors), "")
    copy, original = tensors.pop(name, None), tensors.get(words)
    if copy is None or original is None:
        return
    if copy.shape != original.shape or not torch.equal(copy.read().float(), original.read().float()):
        raise ValueError(
            f"{where}: tie_word_embeddings is true, but {name} is not {words}; "
            f"write false into config.json to keep both, or take {name} out of the files"
        )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
