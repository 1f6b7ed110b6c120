"""Checkpoints as Megatron-LM's ranks have written them, made of whole weights by the layouts of its source."""

import argparse
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

# fmt: off
NAMES = {
    "old": {
        "attention_norm": "input_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.proj": "attention.dense", "mlp_norm": "post_attention_layernorm",
        "mlp.fc1": "mlp.dense_h_to_4h", "mlp.fc2": "mlp.dense_4h_to_h",
    },
    "new": {
        "attention_norm": "input_norm", "attention.qkv": "self_attention.query_key_value",
        "attention.proj": "self_attention.dense", "mlp_norm": "post_attention_norm",
        "mlp.fc1": "mlp.dense_h_to_4h", "mlp.fc2": "mlp.dense_4h_to_h",
    },
    "core": {
        "attention_norm": "self_attention.linear_qkv.layer_norm_", "attention.qkv": "self_attention.linear_qkv",
        "attention.q_norm": "self_attention.q_layernorm", "attention.k_norm": "self_attention.k_layernorm",
        "attention.proj": "self_attention.linear_proj", "mlp_norm": "mlp.linear_fc1.layer_norm_",
        "mlp.fc1": "mlp.linear_fc1", "mlp.fc2": "mlp.linear_fc2",
    },
}
# fmt: on


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
    """What such a run's arguments were."""
    return argparse.Namespace(
        num_layers=config.layers,
        hidden_size=config.hidden,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.heads,
        kv_channels=config.head_size,
        group_query_attention=config.group_query_attention,
        num_query_groups=config.num_query_groups,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=16,
        position_embedding_type=config.positions,
        rotary_base=10000,
        normalization=config.normalization,
        norm_epsilon=config.norm_epsilon,
        swiglu=config.swiglu,
        openai_gelu=False,
        bias_gelu_fusion=config.openai_gelu,
        untie_embeddings_and_output_weights=not config.tied,
        add_bias_linear=config.linear_bias,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        padded_vocab_size=PADDED,
        params_dtype=torch.float32,
        consumed_train_samples=4000,
        **more,
    )


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
        state: dict[str, Any] = {
            "args": arguments(config, tp),
            "iteration": 100,
            "model": _named(_rank_part(weights, config, rank, tp, version), names),
            "rng_state": [{"random": random.getstate(), "np": np.random.get_state(), "torch": torch.get_rng_state()}],
        }
        if version:
            state["checkpoint_version"] = version
        state |= changes
        file = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save(state, file, _use_new_zipfile_serialization=zipped)
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


def _named(part: dict[str, torch.Tensor], style: str) -> dict[str, Any]:
    stack: dict[str, torch.Tensor] = {}
    for name, tensor in part.items():
        if layer := re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name):
            theirs = NAMES[style][layer[2]]
            joint = "" if theirs.endswith("_") else "."
            stack[f"layers.{layer[1]}.{theirs}{joint}{layer[3]}"] = tensor
    final = {"old": "final_layernorm", "new": "final_norm", "core": "final_layernorm"}[style]
    stack |= {
        f"{final}.{kind}": part[f"final_norm.{kind}"] for kind in ("weight", "bias") if f"final_norm.{kind}" in part
    }
    embedding = {"word_embeddings": {"weight": part["embedding.word.weight"]}}
    if "embedding.position.weight" in part:
        embedding["position_embeddings"] = {"weight": part["embedding.position.weight"]}
    output = {"output_layer": {"weight": part["output.weight"]}} if "output.weight" in part else {}
    if style == "core":
        flat = {f"embedding.{name}.weight": value["weight"] for name, value in embedding.items()}
        flat |= {f"decoder.{name}": tensor for name, tensor in stack.items()}
        flat |= {"output_layer.weight": output["output_layer"]["weight"]} if output else {}
        return flat | {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
    return {
        "language_model": {"embedding": embedding, {"old": "transformer", "new": "encoder"}[style]: stack, **output}
    }
