"""Read Megatron-LM's legacy checkpoints, mp_rank_XX/model_optim_rng.pt, and join the tensor-parallel ranks' tensors.

Such a file is a pickle. In addition to tensors it contains the arguments (an `argparse.Namespace`), enums of Megatron,
and states of random generators. No code in the file is run. torch's restricted unpickler creates tensors, plain
containers and the namespace. Objects of Megatron, numpy and a few other modules (`_HARMLESS`) become `Unknown`. A file
that names any other class is rejected.

Names of tensors in the versions of Megatron-LM:

    language_model.embedding.{word,position}_embeddings.weight
    language_model.{transformer,encoder}.layers.N.{attention,self_attention}.query_key_value.{weight,bias}  ...
    language_model.output_layer.weight                       only if embeddings are not tied
    decoder.layers.N.self_attention.linear_qkv.weight  ...   the same tensors in Megatron-Core

Layout of the rows of query_key_value on a rank with np heads of hn channels: [np, 3, hn] from checkpoint_version 2.0
on, with grouped queries [groups, queries + 2, hn], as in `GPTModel`. Earlier versions, of 2020, have other layouts and
are rejected.

This file is longer than 300 lines because all of it concerns this one format.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megazpp.checkpoint.folder import TRACKER, read_tracker
from megazpp.convert.model import OUTPUT, WORDS, Deferred, Model, check_tensors, checked_model, model_config
from megazpp.convert.safetensors_file import check_stored
from megazpp.convert.settings import Settings
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.optim.schedule import TrainingProgress

FILES = ("model_optim_rng.pt", "model_rng.pt")  # names that the file in a folder mp_rank_XX may have
_TRUTHS = (  # boolean arguments of Megatron-LM that are fields of GPTConfig with the same name
    *("group_query_attention", "use_rotary_position_embeddings", "qk_layernorm", "apply_layernorm_1p", "swiglu"),
    *("squared_relu", "untie_embeddings_and_output_weights", "add_qkv_bias"),
)
# A checkpoint may refer to classes and functions of these packages or with these names. Their objects become `Unknown`.
# These are packages of Megatron-LM, its forks and its libraries; numpy, for the states of random generators; and a few
# modules of Python itself.
_HARMLESS = ("megatron.", "apex.", "deepspeed.", "transformer_engine.", "fp16.", "numpy.", "pathlib.", "signal.")
_HARMLESS_NAMES = ("_codecs.encode", "_io.BytesIO", "types.SimpleNamespace", "enum.Enum")
# Errors that torch and pickle raise for damaged files.
_DAMAGE = (OSError, zipfile.BadZipFile, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError)
# Matches the name of a parameter in a layer; the groups are the layer's number, the module, and "weight" or "bias"
_LAYER = re.compile(r"(?:language_model\.(?:transformer|encoder)|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")
# In Transformer Engine, a linear layer may contain the norm before it. The pattern matches the names of such norms'
# parameters. For each such linear layer, the dictionary has the name of its norm in checkpoints where the norm is a
# separate module.
_FUSED_NORM = re.compile(r"(.*\.)(?:self_attention\.|mlp\.)(linear_qkv|linear_fc1)\.layer_norm_(weight|bias)")
_FUSED_NORMS = {"linear_qkv": "input_layernorm", "linear_fc1": "pre_mlp_layernorm"}
_LAYER_NAMES = {  # name of a layer's module in Megatron-LM, without the "self_" of self_attention: name in `GPTModel`
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "attention.query_key_value": "attention.qkv",
    "attention.linear_qkv": "attention.qkv",
    "attention.q_layernorm": "attention.q_norm",
    "attention.k_layernorm": "attention.k_norm",
    "attention.dense": "attention.proj",
    "attention.linear_proj": "attention.proj",
    "mlp.dense_h_to_4h": "mlp.fc1",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.dense_4h_to_h": "mlp.fc2",
    "mlp.linear_fc2": "mlp.fc2",
}
_OTHER_NAMES = {
    "embedding.word_embeddings.weight": WORDS,
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "output_layer.weight": OUTPUT,
}
_FINAL_NORM = re.compile(r"(?:transformer|encoder|decoder)\.final_(?:layer)?norm\.(weight|bias)")
# Ends of names in `GPTModel` of the tensors whose rows, or whose columns, Megatron-LM splits over tensor-parallel ranks
_SPLIT_ROWS = ("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias", WORDS, OUTPUT)
_SPLIT_COLUMNS = ("proj.weight", "fc2.weight")


def open_megatron(folder: Path, iteration: int | None) -> Model:
    """Open the model of a legacy Megatron-LM checkpoint of any tensor-parallel size. Tensors are joined on demand.

    Args:
        folder: folder of checkpoints, or folder of one checkpoint.
        iteration: iteration of the checkpoint; None for the iteration in the tracker file.
    Raises:
        ValueError: a file is missing, damaged or unsafe, or the model is not supported.
    """
    # ---- open the files of all ranks, and read the arguments of the Megatron-LM run
    files = _rank_files(find_checkpoint(folder, iteration))
    ranks, where = [load_file(file) for file in files], str(files[0])
    arguments, version = ranks[0].get("args"), ranks[0].get("checkpoint_version", 0)
    if not isinstance(arguments, argparse.Namespace):
        raise ValueError(
            f"{where} has no args, the flags of its run, because its version of Megatron-LM did not save them; save "
            "the checkpoint again with a newer version"
        )
    if version not in (2.0, 3.0):
        raise ValueError(
            f"{where}: checkpoint_version {version!r} is not supported, only 2.0 and 3.0; load and save the checkpoint "
            "with a newer Megatron-LM"
        )
    settings = Settings(vars(arguments), f"{where}: args")
    if settings.count("pipeline_model_parallel_size", 1) > 1:
        raise ValueError(
            f"{settings.where}: pipeline_model_parallel_size is not 1, but only 1 can be converted; Megatron's "
            "tools/checkpoint can change it"
        )
    name = "tensor_model_parallel_size" if "tensor_model_parallel_size" in settings else "model_parallel_size"
    if settings.count(name, len(ranks)) != len(ranks):
        raise ValueError(
            f"{settings.where}: {name} is {settings.count(name)}, but there are files of {len(ranks)} ranks: copy the "
            "complete folder"
        )
    config = model_config(_read_config(settings), where)
    # ---- join the tensors of all ranks
    parts = [our_tensors(rank["model"], str(file)) for rank, file in zip(ranks, files, strict=True)]
    shapes = [{name: tuple(tensor.shape) for name, tensor in part.items()} for part in parts]
    for rank, part, found, file in zip(ranks, parts, shapes, files, strict=True):
        check_tensors(found, shapes[0], str(file))  # all tensor-parallel ranks must have tensors of equal shapes
        if rank.get("iteration") != ranks[0].get("iteration"):
            raise ValueError(
                f"{file} is of iteration {rank.get('iteration')}, but {where} is of iteration "
                f"{ranks[0].get('iteration')}: copy the complete checkpoint again"
            )
        for name, tensor in part.items():
            if tensor.dtype != parts[0][name].dtype:
                raise ValueError(
                    f"{file}: the part of {name} has the dtype {tensor.dtype}, but the part in {where} has "
                    f"{parts[0][name].dtype}: copy the complete checkpoint again"
                )
    tensors: dict[str, Deferred] = {}
    for name in parts[0]:
        join = functools.partial(_join, name=name)
        of_ranks = [part[name] for part in parts]
        # With SwiGLU, Megatron-LM's fc1 is one matrix: the rows of gate, then the rows of up. `GPTModel` has two, gate
        # and fc1.
        if config.swiglu and ".mlp.fc1." in name:
            halves = [tensor.chunk(2) for tensor in of_ranks]
            tensors[name.replace(".fc1.", ".gate.")] = _deferred([half[0] for half in halves], join)
            of_ranks = [half[-1] for half in halves]
        tensors[name] = _deferred(of_ranks, join)
    if config.use_rope_scaling and "language_model" in ranks[0]["model"]:
        raise ValueError(
            f"{where}: args: use_rope_scaling is not supported in checkpoints of Megatron-LM's legacy model, only in "
            "those of Megatron-Core"
        )
    if config.tied:
        tensors.pop(OUTPUT, None)  # with tied embeddings, the stored output matrix is a copy of the embedding matrix
    # ---- find the training progress and the tokenizer
    done, consumed = ranks[0].get("iteration"), getattr(arguments, "consumed_train_samples", 0)
    names = [name for name in ("tokenizer_model", "vocab_file", "merge_file") if name in settings]
    tokenizer: dict[str, Any] = {name: settings.text(name) for name in names}
    here = all(Path(file).exists() for file in tokenizer.values())  # False if another machine has the files
    return checked_model(config, tensors, where)._replace(
        progress=TrainingProgress(done if isinstance(done, int) else 0, consumed, consumed),
        seq_length=settings.count("seq_length", config.max_position_embeddings),
        tokenizer=TokenizerConfig(**tokenizer) if here else TokenizerConfig(),
        padded=True,
    )


def find_checkpoint(folder: Path, iteration: int | None) -> Path:
    """Return the folder with the subfolders mp_rank_XX of a Megatron-LM checkpoint.

    Args:
        folder: folder of checkpoints, or folder of one checkpoint.
        iteration: iteration of the checkpoint; None for the iteration in the tracker file.
    Raises:
        ValueError: there is no such checkpoint, or it has a format that is not supported.
    """
    if iteration is None and any(folder.glob("mp_rank_*")):
        return folder
    text = str(iteration) if iteration is not None else read_tracker(folder / TRACKER, words=("release",))
    if text is None:
        raise ValueError(
            f"--input {folder} has neither mp_rank_00 nor {TRACKER}: name a folder of Megatron-LM checkpoints"
        )
    found = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not any(found.glob("mp_rank_*")):
        kind = "is a distributed checkpoint, which is not supported (--ckpt-format torch writes legacy ones)"
        raise ValueError(f"{found} {kind if (found / '.metadata').exists() else 'contains no folder mp_rank_00'}")
    return found


def _rank_files(checkpoint: Path) -> list[Path]:
    """Return the file of each tensor-parallel rank of a Megatron-LM checkpoint, in the order of ranks.

    Raises:
        ValueError: a rank's file is missing, or the checkpoint is pipeline- or expert-parallel.
    """
    folders = sorted(checkpoint.glob("mp_rank_*"))
    odd = [folder for folder in folders if not re.fullmatch(r"mp_rank_\d{2,}", folder.name)]
    if odd:
        raise ValueError(
            f"{odd[0]} belongs to a pipeline- or expert-parallel checkpoint, but only "
            "--pipeline-model-parallel-size 1 can be converted; Megatron's tools/checkpoint can merge it"
        )
    names = [folder.name for folder in folders]
    if names != [f"mp_rank_{rank:02d}" for rank in range(len(names))]:
        raise ValueError(
            f"{checkpoint} has {', '.join(names)}, so the folder of a rank is missing: copy the complete checkpoint"
        )
    files = [[folder / name for name in FILES if (folder / name).is_file()] for folder in folders]
    for folder, found in zip(folders, files, strict=True):
        if not found:
            raise ValueError(f"{folder / FILES[0]} is missing: copy the complete checkpoint")
    return [found[0] for found in files]


def _read_config(settings: Settings) -> dict[str, Any]:
    """Return the fields of GPTConfig for the arguments of a Megatron-LM run.

    An argument may be missing because the run's version of Megatron-LM is older. The argument's field then gets the
    value with which `GPTModel` computes the same as that version.

    Raises:
        ValueError: an argument has a value that is not supported. The message names it.
    """
    settings.absent("apply_residual_connection_post_layernorm", "multi_latent_attention", "rotary_interleaved")
    settings.absent("num_experts", "window_size", "quick_geglu", "activation_func_clamp_value")
    # These arguments change what the model computes, but not the names and shapes of its tensors. So no later check
    # would show that the converted model computes something else.
    settings.absent("qk_l2_norm", "use_mup")
    settings.absent("no_rope_freq", empty=(None, 0))
    settings.only("softmax_type", "vanilla")
    settings.absent("glu_linear_offset", empty=(None, 0, 0.0))
    settings.absent("rotary_seq_len_interpolation_factor", empty=(None, 1, 1.0))
    heads, hidden = settings.count("num_attention_heads"), settings.count("hidden_size")
    truths = {name: settings.truth(name, False) for name in _TRUTHS}
    # By default, Megatron-LM fuses bias and GeLU (bias_gelu_fusion). The fused kernel computes GeLU's tanh
    # approximation.
    tanh = settings.truth("openai_gelu", False) or settings.truth("bias_gelu_fusion", True)
    scaled = settings.truth("use_rope_scaling", False)
    factor = {"rope_scaling_factor": settings.number("rope_scaling_factor", 8.0)} if scaled else {}
    return {
        **truths,
        **factor,
        "use_rope_scaling": scaled,
        "num_layers": settings.count("num_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": settings.count("ffn_hidden_size", 4 * hidden),
        "num_attention_heads": heads,
        "kv_channels": settings.count("kv_channels", max(hidden // heads, 1)),
        "num_query_groups": settings.count("num_query_groups", heads) if truths["group_query_attention"] else 1,
        "max_position_embeddings": settings.count("max_position_embeddings"),
        "position_embedding_type": settings.only("position_embedding_type", "learned_absolute", "rope", "none"),
        "rotary_base": settings.number("rotary_base", 10000.0),
        "rotary_percent": settings.number("rotary_percent", 1.0),
        "normalization": settings.only("normalization", "LayerNorm", "RMSNorm"),
        "norm_epsilon": settings.number("norm_epsilon" if "norm_epsilon" in settings else "layernorm_epsilon", 1e-5),
        "openai_gelu": tanh and not truths["swiglu"] and not truths["squared_relu"],
        "disable_bias_linear": not settings.truth("add_bias_linear", True),
        "init_method_std": settings.number("init_method_std", 0.02),
        "hidden_dropout": settings.number("hidden_dropout", 0.1),
        "attention_dropout": settings.number("attention_dropout", 0.1),
    }


def our_tensors(model: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of one rank's file by their names in `GPTModel`.

    With SwiGLU, the tensor fc1 in the result is as in the file: the rows of gate, and then the rows of up.

    Args:
        model: nested dictionaries of tensors from a Megatron-LM checkpoint. Transformer Engine's extra state is
            ignored.
        where: path of the file, for messages.
        prefix: prefix of all names in `model`, for the recursive call.
    Raises:
        ValueError: a tensor has an unknown name, or a dtype or layout that cannot be converted.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in model.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= our_tensors(value, where, f"{name}.")
        elif isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            if (ours := _our_name(name)) is None:
                raise ValueError(
                    f"{where}: the tensor {name} is not supported, because no tensor of this program's model "
                    "corresponds to it"
                )
            check_stored(name, value, where)
            found[ours] = value
    return found


def _our_name(name: str) -> str | None:
    """Return the name in `GPTModel` of a tensor in a Megatron-LM checkpoint; None for an unknown name."""
    if fused := _FUSED_NORM.fullmatch(name):  # a norm inside Transformer Engine's linear layer
        name = f"{fused[1]}{_FUSED_NORMS[fused[2]]}.{fused[3]}"
    if layer := _LAYER.fullmatch(name):
        ours = _LAYER_NAMES.get(layer[2].removeprefix("self_"))
        return None if ours is None else f"layers.{layer[1]}.{ours}.{layer[3]}"
    name = name.removeprefix("language_model.")
    final = _FINAL_NORM.fullmatch(name)
    return f"final_norm.{final[1]}" if final else _OTHER_NAMES.get(name)


def _join(parts: Sequence[torch.Tensor], *, name: str) -> torch.Tensor:
    """Join the shards of a tensor from all tensor-parallel ranks of a Megatron-LM checkpoint.

    Args:
        parts: shards in the order of ranks. A tensor that is not sharded has equal copies.
        name: name of the tensor in `GPTModel`.
    """
    if not name.endswith(_SPLIT_ROWS + _SPLIT_COLUMNS):
        return parts[0]
    return torch.cat(list(parts), dim=0 if name.endswith(_SPLIT_ROWS) else 1)


def _deferred(parts: Sequence[torch.Tensor], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Deferred:
    """Return a `Deferred`, which joins a tensor from the shards of all tensor-parallel ranks when it is read.

    Args:
        parts: shards in the order of ranks.
        join: function from the shards to the joined tensor. It also works on meta tensors.
    """
    try:
        shape = tuple(join([part.to("meta") for part in parts]).shape)
    except RuntimeError:  # the shards cannot be joined; `checked_model` then reports the wrong shape of the first shard
        shape = tuple(parts[0].shape)
    return Deferred(shape, parts[0].dtype, lambda: join(parts).contiguous())


class Unknown:
    """A placeholder for a pickled object of a checkpoint, whose class is not imported so that none of its code runs."""

    def __new__(cls, *args: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def load_file(path: Path) -> dict[str, Any]:
    """Load one rank's file of a Megatron-LM checkpoint as a dictionary, without running code from the file.

    Tensors are memory-mapped. Files from versions of torch before 1.6 do not support this and are refused.

    Raises:
        ValueError: the file is missing or damaged, is not a checkpoint, or names classes that no checkpoint needs.
    """
    try:
        names = _global_names(path)
        known = {name for name in names if name.startswith(_HARMLESS) or name in _HARMLESS_NAMES}
        allowed: list[Any] = [argparse.Namespace, *((Unknown, name) for name in known)]
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: copy the complete checkpoint") from None
    except pickle.UnpicklingError as error:
        # The message of torch is not shown, because it explains how to load the file by running its code.
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise ValueError(f"{path} is damaged or no checkpoint: copy it again") from error
        text = f"it names {named[1]}, which no checkpoint needs"
        raise ValueError(
            f"{path} is refused, and nothing in it was run: {text}; use a checkpoint from a source that you trust"
        ) from error
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or no checkpoint ({type(error).__name__}): copy it again") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(
            f"{path} contains no model: its entry 'model' is not a dictionary of tensors; name another checkpoint"
        )
    return content


def _global_names(path: Path) -> set[str]:
    """Return the names of all classes and functions that unpickling a file would import, without unpickling it."""
    with zipfile.ZipFile(path) as archive:
        # Without such a file, [0] raises an IndexError, which `load_file` reports as a damaged file
        name = [name for name in archive.namelist() if name.endswith("/data.pkl")][0]  # noqa: RUF015
        codes = pickletools.genops(archive.read(name))
        return {str(value).replace(" ", ".") for code, value, _ in codes if code.name in ("GLOBAL", "INST")}
