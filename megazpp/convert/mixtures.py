"""Hugging Face's mixtures of experts: Llama's relatives with a router and experts in place of the MLP.

| model_type | attention like | router weights                    | shared MLP | dense layers     |
|------------|----------------|-----------------------------------|------------|------------------|
| mixtral    | mistral        | softmax over the chosen experts   | none       | none             |
| qwen3_moe  | qwen3          | by `norm_topk_prob`, as below     | none       | by two keys      |
| qwen2_moe  | qwen2          | by `norm_topk_prob`               | with gate  | by two keys      |
| olmoe      | olmo2          | by `norm_topk_prob`               | none       | none             |

With `norm_topk_prob`, weights of the chosen experts add up to 1, as in a softmax over these alone. Without it, they
come from a softmax over all experts (--moe-router-pre-softmax). `decoder_sparse_step` and `mlp_only_layers` name the
layers that keep a dense MLP. Each matrix of an expert is a tensor there; here those of all experts are one, with fc2
transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megazpp.convert.llama import Relative
from megazpp.convert.model import ForeignTensors, same
from megazpp.convert.settings import Settings
from megazpp.model.config import GPTConfig

_COUNT = "num_experts", "num_local_experts"  # two names of one setting, by versions of transformers
_SPARSE = "decoder_sparse_step", "mlp_only_layers"


@dataclass(frozen=True)
class Mixture(Relative):
    """A model_type with experts, with the methods of `llama.Relative`.

    Attributes:
        moe: the name of the module that holds router and experts.
        parts: names of an expert's gate, up and down matrices.
        always_normalized: it has no `norm_topk_prob`: weights of the chosen experts add up to 1.
        inner: the key of an expert's width.
        shared: it has a shared MLP with a gate.
        sparse: it may have layers without experts.
    """

    moe: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    always_normalized: bool = False
    inner: str = "moe_intermediate_size"
    shared: bool = False
    sparse: bool = False

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig; a ValueError names a key."""
        settings.absent("router_jitter_noise", empty=(None, 0, 0.0))
        settings.absent("clip_qkv")
        settings.only("qkv_bias", True)
        layers = settings.count("num_hidden_layers")
        found = super().read(settings) | {
            "num_experts": settings.count(_COUNT[0] if _COUNT[0] in settings else _COUNT[1]),
            "moe_router_topk": settings.count("num_experts_per_tok"),
            "moe_ffn_hidden_size": settings.count(self.inner),
            "moe_router_pre_softmax": not (self.always_normalized or settings.truth("norm_topk_prob", False)),
        }
        if self.shared:
            found["moe_shared_expert_intermediate_size"] = settings.count("shared_expert_intermediate_size")
            found["moe_shared_expert_gate"] = True
        if self.sparse:
            step, without = settings.count(_SPARSE[0], 1), settings.values.get(_SPARSE[1]) or []
            if not isinstance(without, list) or any(not isinstance(layer, int) for layer in without):
                raise ValueError(f"{settings.where}: {_SPARSE[1]} {without!r} is not a list of layers")
            marks = [int(layer not in without and (layer + 1) % step == 0) for layer in range(layers)]
            found["moe_layer_freq"] = "1" if all(marks) else str(marks).replace(" ", "")
        return found

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return config.json without the vocabulary, and without settings that the family has no key for."""
        normalized = {} if self.always_normalized else {"norm_topk_prob": not config.moe_router_pre_softmax}
        without = [layer for layer in range(config.layers) if not config.has_experts(layer)]
        width = config.moe_shared_expert_intermediate_size
        return {
            **super().write(config),
            _COUNT[1] if self.always_normalized else _COUNT[0]: config.num_experts,
            "num_experts_per_tok": config.moe_router_topk,
            self.inner: config.expert_ffn_size,
            "router_aux_loss_coef": config.moe_aux_loss_coeff,
            **normalized,
            **({"shared_expert_intermediate_size": width, "qkv_bias": True} if self.shared else {}),
            **(dict(zip(_SPARSE, (1, without), strict=True)) if self.sparse else {}),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Return our names to theirs."""
        found = super().pieces(config)
        for layer in config.expert_layers:
            ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.{self.moe}"
            for name in ("gate", "fc1", "fc2"):
                del found[f"{ours}.{name}.weight"]
            found[f"{ours}.router.weight"] = same(f"{theirs}.gate.weight")
            assert config.num_experts is not None
            for name, part in zip(("gate", "fc1", "fc2"), self.parts, strict=True):
                names = [f"{theirs}.experts.{expert}.{part}.weight" for expert in range(config.num_experts)]
                found[f"{ours}.experts.{name}"] = _experts(names, transposed=name == "fc2")
            if self.shared:
                for name, part in zip(("gate", "fc1", "fc2"), self.parts, strict=True):
                    found[f"{ours}.shared.{name}.weight"] = same(f"{theirs}.shared_expert.{part}.weight")
                found[f"{ours}.shared_gate.weight"] = same(f"{theirs}.shared_expert_gate.weight")
        return found


def _experts(names: Sequence[str], *, transposed: bool) -> ForeignTensors:
    """Return the conversion of the matrices of all experts into one below the other."""

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.t() if transposed else part for part in parts])

    def split(ours: torch.Tensor) -> list[torch.Tensor]:
        return [part.t() if transposed else part for part in ours.chunk(len(names))]

    return ForeignTensors(tuple(names), join, split, transposed)


MIXTURES = (
    Mixture(
        "mixtral",
        "MixtralForCausalLM",
        windows="all",
        moe="block_sparse_moe",
        parts=("w1", "w3", "w2"),
        always_normalized=True,
        inner="intermediate_size",
    ),
    Mixture("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm="heads", sparse=True),
    Mixture("qwen2_moe", "Qwen2MoeForCausalLM", qkv_bias=True, windows="layers", shared=True, sparse=True),
    Mixture("olmoe", "OlmoeForCausalLM", qk_norm="all", inner="intermediate_size"),
)
