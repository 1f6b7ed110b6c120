"""Write checkpoints in Megatron-LM's format, with one file per rank, from unsharded weights.

Names and layouts of the tensors follow Megatron-LM's source.
"""

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
from helpers.refusals import table

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel

VOCAB, PADDED = 300, 384
# Each row has a piece of this project's parameter names, and the pieces that replace it in three generations of
# Megatron-LM, in this order. A name is a path of nested dicts with "/" between the keys
_OURS, *_THEIRS = zip(
    *table("""
embedding.word.     | embedding/word_embeddings/     | embedding/word_embeddings/     | embedding.word_embeddings.
embedding.position. | embedding/position_embeddings/ | embedding/position_embeddings/ | embedding.position_embeddings.
output.             | output_layer/                  | output_layer/                  | output_layer.
layers.             | transformer/layers.            | encoder/layers.                | decoder.layers.
final_norm          | transformer/final_layernorm    | encoder/final_norm             | decoder.final_layernorm
attention_norm.     | input_layernorm.               | input_norm.                    | attention.qkv.layer_norm_
attention.qkv       | attention.query_key_value      | self_attention.query_key_value | self_attention.linear_qkv
attention.q_norm    |                                |                                | self_attention.q_layernorm
attention.k_norm    |                                |                                | self_attention.k_layernorm
attention.proj      | attention.dense                | self_attention.dense           | self_attention.linear_proj
fc1                 | dense_h_to_4h                  | dense_h_to_4h                  | linear_fc1
fc2                 | dense_4h_to_h                  | dense_4h_to_h                  | linear_fc2
mlp_norm.           | post_attention_layernorm.      | post_attention_norm.           | mlp.linear_fc1.layer_norm_
"""),
    strict=True,
)
_NAMES = {
    style: [*zip(_OURS, theirs, strict=True)] for style, theirs in zip(("old", "new", "core"), _THEIRS, strict=True)
}


def make_weights(config: GPTConfig) -> dict[str, torch.Tensor]:
    """Return random weights by name for an unsharded model with a padded vocabulary.

    No two numbers are equal, so that a test notices every mix-up of elements.
    """
    model, generator = GPTModel(config, vocab_size=VOCAB), torch.Generator().manual_seed(4)
    return {name: 0.1 * torch.randn(x.shape, generator=generator) for name, x in model.named_parameters()}


def arguments(config: GPTConfig, tp: int, **more: Any) -> argparse.Namespace:
    """Return the `args` that Megatron-LM stores in a checkpoint of this model; flags with defaults are missing."""
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
    **changes: Any,
) -> Path:
    """Write a Megatron-LM checkpoint of iteration 100 below `folder`, as --save does, and return `folder`.

    Args:
        folder: folder for the checkpoint.
        weights: unsharded weights by this project's names.
        config: model to which the weights belong.
        tp: tensor-parallel size, which is the number of files.
        version: Megatron-LM's checkpoint_version.
        names: generation of the parameter names: "old", "new" or "core".
        changes: entries of the files that replace the usual ones.
    """
    for rank in range(tp):
        model = _named(_rank_part(weights, rank, tp), names)
        state: dict[str, Any] = {
            "args": arguments(config, tp),
            "iteration": 100,
            "model": model | {"decoder._extra_state": None} if names == "core" else {"language_model": model},
            "rng_state": [{"random": random.getstate(), "np": np.random.get_state(), "torch": torch.get_rng_state()}],
            "checkpoint_version": version,
        }
        file = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save(state | changes, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _rank_part(weights: Mapping[str, torch.Tensor], rank: int, tp: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, part in weights.items():
        if re.search(r"(word|output)\.weight|(qkv|fc1|gate)\.", name):
            part = part.chunk(tp)[rank]
        elif re.search(r"(proj|fc2)\.weight", name):
            part = part.chunk(tp, dim=1)[rank]
        found[name] = part.clone()
    for name in [name for name in found if ".gate." in name]:  # Megatron-LM stores gate and up projection in one matrix
        fc1 = name.replace(".gate.", ".fc1.")
        found[fc1] = torch.cat([found.pop(name), found[fc1]])
    return found


def _named(part: dict[str, torch.Tensor], names: str) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, tensor in part.items():
        for ours, theirs in _NAMES[names]:
            name = name.replace(ours, theirs)
        *path, key = name.split("/")
        functools.reduce(lambda place, step: place.setdefault(step, {}), path, nested)[key] = tensor
    return nested
