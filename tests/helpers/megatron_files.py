"""Checkpoints as Megatron-LM's ranks have written them, made of whole weights by the layouts of its source."""

import argparse
import dataclasses
import functools
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_

VOCAB, PADDED = 300, 384
# what stands for parts of our names, replaced in this order; "/" for a dict in a dict
_OLD = {
    "embedding.word.": "language_model/embedding/word_embeddings/",
    "embedding.position.": "language_model/embedding/position_embeddings/",
    "output.": "language_model/output_layer/",
    "layers.": "language_model/transformer/layers.",
    "final_norm": "language_model/transformer/final_layernorm",
    "attention_norm": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.proj": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "fc1": "dense_h_to_4h",
    "fc2": "dense_4h_to_h",
}
_NEW = _OLD | {
    "layers.": "language_model/encoder/layers.",
    "final_norm": "language_model/encoder/final_norm",
    "attention_norm": "input_norm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.proj": "self_attention.dense",
    "mlp_norm": "post_attention_norm",
}
_CORE = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "output.": "output_layer.",
    "layers.": "decoder.layers.",
    "final_norm": "decoder.final_layernorm",
    "fc": "linear_fc",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.proj": "self_attention.linear_proj",
    "attention_norm.": "self_attention.linear_qkv.layer_norm_",
    "mlp_norm.": "mlp.linear_fc1.layer_norm_",
}
_NAMES = {"old": _OLD, "new": _NEW, "core": _CORE}


def make_weights(config: GPTConfig) -> dict[str, torch.Tensor]:
    """Of one process, with a padded vocabulary and no two tensors alike."""
    model = GPTModel(config, vocab_size=VOCAB, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=11, draw_device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator))
    return weights


def arguments(config: GPTConfig, tp: int, **more: Any) -> argparse.Namespace:
    """What such a run's arguments were: our flags have Megatron's names, but for a few; defaults are left out."""
    flags = {name: value for name, value in dataclasses.asdict(config).items() if value != getattr(GPTConfig, name)}
    others = {
        "seq_length": 16,
        "openai_gelu": False,
        "bias_gelu_fusion": config.openai_gelu,
        "add_bias_linear": config.linear_bias,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "padded_vocab_size": PADDED,
        "params_dtype": torch.float32,
        "consumed_train_samples": 4000,
    }
    return argparse.Namespace(**flags | others | more)


def write_megatron(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    config: GPTConfig,
    *,
    tp: int,
    version: float = 3.0,
    names: str = "new",
    zipped: bool = True,
    **changes: Any,
) -> Path:
    """A folder of --save with iteration 100."""
    for rank in range(tp):
        part = _rank_part(weights, config, rank, tp, version)
        state: dict[str, Any] = {
            "args": arguments(config, tp),
            "iteration": 100,
            "model": _named(part, _NAMES[names]) | ({"decoder._extra_state": None} if names == "core" else {}),
            "rng_state": [{"random": random.getstate(), "np": np.random.get_state(), "torch": torch.get_rng_state()}],
            **({"checkpoint_version": version} if version else {}),
        }
        file = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save(state | changes, file, _use_new_zipfile_serialization=zipped)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _rank_part(
    weights: Mapping[str, torch.Tensor], config: GPTConfig, rank: int, tp: int, version: float
) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in weights.items():
        if re.search(r"(word|output)\.weight|(qkv|fc1|gate)\.", name):
            part = tensor.chunk(tp)[rank]
        elif re.search(r"(proj|fc2)\.weight", name):
            part = tensor.chunk(tp, dim=1)[rank]
        else:
            part = tensor
        if ".qkv." in name and version < 2:
            rows = part.view(config.heads // tp, 3, config.head_size, *part.shape[1:])
            rows = rows.transpose(0, 1) if version == 0 else rows.transpose(1, 2)
            part = rows.reshape(part.shape)
        found[name] = part.clone()
    for name in [name for name in found if ".gate." in name]:  # one matrix for both
        fc1 = name.replace(".gate.", ".fc1.")
        found[fc1] = torch.cat([found.pop(name), found[fc1]])
    return found


def _named(part: dict[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, tensor in part.items():
        *path, key = functools.reduce(lambda there, ours: there.replace(ours, names[ours]), names, name).split("/")
        functools.reduce(lambda place, step: place.setdefault(step, {}), path, nested)[key] = tensor
    return nested
