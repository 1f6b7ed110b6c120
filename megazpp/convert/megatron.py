"""Megatron-LM's legacy checkpoints, mp_rank_XX/model_optim_rng.pt: what they are, and the ranks' parts put together.

The rows of query_key_value on one rank of np heads with hn channels: [3, np, hn] in version 0, [np, hn, 3] in version
1.0, [np, 3, hn] from 2.0 on (with grouped queries [groups, queries + 2, hn]), which is ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megazpp.checkpoint.folder import TRACKER, read_tracker
from megazpp.checkpoint.record import TrainingProgress
from megazpp.convert.megatron_file import load_file
from megazpp.convert.megatron_names import our_tensors, split_dim
from megazpp.convert.model import OUTPUT, WORDS, Imported, Model, model_config, model_shapes
from megazpp.convert.settings import Settings
from megazpp.convert.tensors import Deferred, check_tensors, fuse_qkv
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig

Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]
FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,})")


def open_megatron(folder: Path, iteration: int | None) -> Imported:
    """A checkpoint of any tensor-parallel size; tensors are read when they are wanted.

    Args:
        folder: of checkpoints, or one of them.
        iteration: None for what the tracker names.
    Raises:
        ValueError: something is missing, damaged, unsafe, or a model that we do not have.
    """
    files = _rank_files(find_checkpoint(folder, iteration))
    ranks = [load_file(file) for file in files]
    where = str(files[0])
    arguments = ranks[0].get("args")
    if not isinstance(arguments, argparse.Namespace):
        raise ValueError(f"{where} has no args: a checkpoint from before Megatron kept them with the weights")
    settings = Settings(vars(arguments), f"{where}: args")
    _check_ranks(settings, len(ranks))
    version = _version(ranks[0], where)
    config = model_config(_read_config(settings), where)
    parts = [our_tensors(rank["model"], str(file)) for rank, file in zip(ranks, files, strict=True)]
    shapes = [{name: tuple(tensor.shape) for name, tensor in part.items()} for part in parts]
    for found, file in zip(shapes, files, strict=True):
        check_tensors(found, shapes[0], str(file))  # all ranks' alike
    tensors: dict[str, Deferred] = {}
    for name in parts[0]:
        join = _join(name, config, version, len(ranks))
        tensors |= _merge(name, [part[name] for part in parts], join, swiglu=config.swiglu)
    if config.use_rope_scaling and "language_model" in ranks[0]["model"]:
        raise ValueError(f"{where}: args: use_rope_scaling True is not supported here with the legacy model")
    if config.tied:
        tensors.pop(OUTPUT, None)  # a copy
    if WORDS not in tensors:
        raise ValueError(f"{where} has no word_embeddings")
    rows = tensors[WORDS].shape[0]
    expected = model_shapes(config, rows, where, num_tensors=len(tensors))
    check_tensors({name: entry.shape for name, entry in tensors.items()}, expected, where)
    done = ranks[0].get("iteration")
    consumed = getattr(arguments, "consumed_train_samples", 0)
    return Imported(
        Model(config, rows, tensors),
        TrainingProgress(
            iteration=done if isinstance(done, int) else 0, consumed_samples=consumed, scheduled_samples=consumed
        ),
        settings.count("seq_length", config.max_position_embeddings),
        _find_tokenizer(settings),
        padded=True,
    )


def find_checkpoint(folder: Path, iteration: int | None) -> Path:
    """The folder with the ranks' folders.

    Raises:
        ValueError: there is none.
    """
    if iteration is None and any(folder.glob("mp_rank_*")):
        return folder
    if iteration is None:
        text = read_tracker(folder / TRACKER, words=("release",))
        if text is None:
            raise ValueError(f"--input {folder} has neither mp_rank_00 nor {TRACKER}")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        name = f"iter_{iteration:07d}"
    found = folder / name
    if not any(found.glob("mp_rank_*")):
        kind = "a distributed checkpoint (--ckpt-format torch writes the other kind)"
        what = kind if (found / ".metadata").exists() else "no checkpoint with mp_rank_00 in it"
        raise ValueError(f"{found} is {what}")
    return found


def _rank_files(checkpoint: Path) -> list[Path]:
    names = sorted(entry.name for entry in checkpoint.glob("mp_rank_*"))
    odd = [name for name in names if not _RANK.fullmatch(name)]
    if odd:
        raise ValueError(
            f"{checkpoint / odd[0]} is of a pipeline- or expert-parallel checkpoint: only "
            "--pipeline-model-parallel-size 1 can be converted; Megatron's tools/checkpoint can merge it"
        )
    if names != [f"mp_rank_{rank:02d}" for rank in range(len(names))]:
        raise ValueError(f"{checkpoint} has {', '.join(names)}: a rank is missing")
    found = []
    for name in names:
        file = next((checkpoint / name / file for file in FILES if (checkpoint / name / file).is_file()), None)
        if file is None:
            raise ValueError(f"{checkpoint / name / FILES[0]} is missing")
        found.append(file)
    return found


def _check_ranks(settings: Settings, found: int) -> None:
    if settings.count("pipeline_model_parallel_size", 1) > 1:
        raise ValueError(f"{settings.where}: pipeline_model_parallel_size is not 1, which is all that can be converted")
    name = "tensor_model_parallel_size" if "tensor_model_parallel_size" in settings else "model_parallel_size"
    if settings.count(name, found) != found:
        raise ValueError(f"{settings.where}: {name} is {settings.count(name)}, but there are {found} ranks")


def _version(rank: Mapping[str, Any], where: str) -> float:
    version = rank.get("checkpoint_version", 0)
    if version not in (0, 1.0, 2.0, 3.0):
        raise ValueError(f"{where}: checkpoint_version {version!r} is not known (0, 1.0, 2.0, 3.0)")
    return float(version)


def _read_config(settings: Settings) -> dict[str, Any]:
    """Fields of GPTConfig; older versions lack many arguments, and are what the defaults say."""
    settings.absent(
        "apply_residual_connection_post_layernorm",
        "multi_latent_attention",
        "rotary_interleaved",
        "num_experts",
        "window_size",
    )
    settings.absent("rotary_seq_len_interpolation_factor", empty=(None, 1, 1.0))
    heads = settings.count("num_attention_heads")
    positions = settings.only("position_embedding_type", "learned_absolute", "rope", "none")
    grouped = settings.truth("group_query_attention", False)
    swiglu, squared = settings.truth("swiglu", False), settings.truth("squared_relu", False)
    # Megatron's fused bias and GeLU, its default, computes the tanh approximation
    tanh = settings.truth("openai_gelu", False) or settings.truth("bias_gelu_fusion", True)
    bias = settings.truth("add_bias_linear", True)
    scaled = settings.truth("use_rope_scaling", False)
    return {
        "num_layers": settings.count("num_layers"),
        "hidden_size": settings.count("hidden_size"),
        "ffn_hidden_size": settings.count("ffn_hidden_size", 4 * settings.count("hidden_size")),
        "num_attention_heads": heads,
        "kv_channels": settings.count("kv_channels", max(settings.count("hidden_size") // heads, 1)),
        "group_query_attention": grouped,
        "num_query_groups": settings.count("num_query_groups", heads) if grouped else 1,
        "max_position_embeddings": settings.count("max_position_embeddings"),
        "position_embedding_type": positions,
        "use_rotary_position_embeddings": settings.truth("use_rotary_position_embeddings", False),
        "rotary_base": settings.number("rotary_base", 10000.0),
        "rotary_percent": settings.number("rotary_percent", 1.0),
        **(
            {"use_rope_scaling": True, "rope_scaling_factor": settings.number("rope_scaling_factor", 8.0)}
            if scaled
            else {}
        ),
        "qk_layernorm": settings.truth("qk_layernorm", False),
        "normalization": settings.only("normalization", "LayerNorm", "RMSNorm"),
        "norm_epsilon": settings.number("norm_epsilon" if "norm_epsilon" in settings else "layernorm_epsilon", 1e-5),
        "apply_layernorm_1p": settings.truth("apply_layernorm_1p", False),
        "swiglu": swiglu,
        "squared_relu": squared,
        "openai_gelu": tanh and not swiglu and not squared,
        "untie_embeddings_and_output_weights": settings.truth("untie_embeddings_and_output_weights", False),
        "disable_bias_linear": not bias,
        "add_qkv_bias": settings.truth("add_qkv_bias", False),
        "init_method_std": settings.number("init_method_std", 0.02),
        "hidden_dropout": settings.number("hidden_dropout", 0.1),
        "attention_dropout": settings.number("attention_dropout", 0.1),
    }


def _find_tokenizer(settings: Settings) -> TokenizerConfig:
    """The run's tokenizer, where its files are on this machine."""
    files: dict[str, Any] = {
        name: settings.text(name) for name in ("tokenizer_model", "vocab_file", "merge_file") if name in settings
    }
    if not files or not all(Path(file).exists() for file in files.values()):
        return TokenizerConfig()
    return dataclasses.replace(TokenizerConfig(), **files)


def _join(name: str, config: GPTConfig, version: float, tp: int) -> Join:
    """How the ranks' parts of a tensor make the whole."""
    dim = split_dim(name)
    if dim is None:
        return lambda parts: parts[0]
    if ".qkv." in name and version < 2.0:
        heads = max(config.heads // tp, 1)
        return functools.partial(_join_old_qkv, heads=heads, head_size=config.head_size, version=version)
    return lambda parts: torch.cat(list(parts), dim=dim)


def _join_old_qkv(parts: Sequence[torch.Tensor], *, heads: int, head_size: int, version: float) -> torch.Tensor:
    if version == 0:
        return torch.cat([fuse_qkv(part.chunk(3), groups=heads, head_size=head_size) for part in parts])
    rows = [part.reshape(heads, head_size, 3, *part.shape[1:]).transpose(1, 2) for part in parts]
    return torch.cat([part.flatten(0, 2) for part in rows])


def _merge(name: str, parts: Sequence[torch.Tensor], join: Join, *, swiglu: bool) -> dict[str, Deferred]:
    """Our tensors of the ranks' parts of one of theirs: with SwiGLU fc1 is a rank's part of gate above that of ours."""
    if not (swiglu and ".mlp.fc1." in name):
        return {name: _deferred(parts, join)}
    gate, halves = name.replace(".fc1.", ".gate."), [part.chunk(2) for part in parts]
    return {gate: _deferred([half[0] for half in halves], join), name: _deferred([half[-1] for half in halves], join)}


def _deferred(parts: Sequence[torch.Tensor], join: Join) -> Deferred:
    try:
        whole = join([part.to("meta") for part in parts])
    except RuntimeError:  # nothing that can be put together: reported with the shape of a part
        return Deferred(tuple(parts[0].shape), parts[0].dtype, lambda: parts[0])
    return Deferred(tuple(whole.shape), whole.dtype, lambda: join(parts).contiguous())
