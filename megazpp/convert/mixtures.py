"""Convert Hugging Face's mixtures of experts: Llama's relatives with a router and experts instead of the MLP.

| model_type | attention like | router weights                    | shared MLP | dense layers     |
|------------|----------------|-----------------------------------|------------|------------------|
| mixtral    | mistral        | softmax over the chosen experts   | none       | none             |
| qwen3_moe  | qwen3          | by `norm_topk_prob`, as below     | none       | by two keys      |
| qwen2_moe  | qwen2          | by `norm_topk_prob`               | with gate  | by two keys      |
| olmoe      | olmo2          | by `norm_topk_prob`               | none       | none             |
| glm4_moe   | qwen3 or qwen2 | sigmoid scores and an expert bias | no gate    | the first layers |

With `norm_topk_prob`, the router weights of a token's chosen experts add up to 1, as in a softmax over these experts
alone. Without it, the weights come from a softmax over all experts (--moe-router-pre-softmax). `decoder_sparse_step`
and `mlp_only_layers` name the layers that have a dense MLP. Hugging Face stores each matrix of each expert as a tensor.
`GPTModel` has one tensor with the concatenated matrices of all experts, where fc2 is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megazpp.convert.families import Relative
from megazpp.convert.model import ForeignTensors, same
from megazpp.convert.settings import Settings
from megazpp.model.config import GPTConfig

# Keys of config.json that decide which layers have experts: every n-th layer, except the layers in a list
_SPARSE = "decoder_sparse_step", "mlp_only_layers"


@dataclass(frozen=True)
class Mixture(Relative):
    """A Hugging Face family (model_type) with experts. It also has the attributes and methods of `families.Relative`.

    Attributes:
        moe: name of the module in a layer that contains the router and the experts.
        count: keys of config.json for the number of experts: the key that exports write, then its names in other
            versions of transformers.
        parts: names of an expert's gate, up and down matrices.
        always_normalized: True if config.json has no `norm_topk_prob`, and the router weights of the chosen experts
            always add up to 1.
        inner: key of config.json with the inner width of an expert.
        shared: True if each layer with experts also has an MLP for all tokens, whose output is multiplied by a gate.
        shared_name: name of the module with the MLP for all tokens.
        sparse: True if some layers may have a dense MLP instead of experts.
        switched: True if the key use_sliding_window of config.json enables the sliding window of all layers.
    """

    moe: str = "mlp"
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    always_normalized: bool = False
    inner: str = "moe_intermediate_size"
    shared: bool = False
    shared_name: str = "shared_expert"
    sparse: bool = False
    switched: bool = False

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig that a config.json of this family of mixtures of experts defines.

        Args:
            settings: values of the config.json, completed by transformers' defaults.
        Raises:
            ValueError: a value is missing or not supported. The message names its key.
        """
        settings.absent("router_jitter_noise", empty=(None, 0, 0.0))
        settings.absent("clip_qkv")
        settings.only("qkv_bias", True)
        layers = settings.count("num_hidden_layers")
        found = super().read(settings) | {
            "num_experts": settings.count(next((key for key in self.count if key in settings), self.count[0])),
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
                raise ValueError(
                    f"{settings.where}: {_SPARSE[1]} {without!r} is not a list of layer numbers: correct config.json"
                )
            marks = [int(layer not in without and (layer + 1) % step == 0) for layer in range(layers)]
            found["moe_layer_freq"] = "1" if all(marks) else str(marks).replace(" ", "")
        return found

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return the family's config.json for a model, without the entries about vocabulary and special tokens.

        A field of `config` for which the family has no key is left out without an error. `find_architecture` detects
        this by reading the result back.
        """
        normalized = {} if self.always_normalized else {"norm_topk_prob": not config.moe_router_pre_softmax}
        without = [layer for layer in range(config.layers) if not config.has_experts(layer)]
        width = config.moe_shared_expert_intermediate_size
        return {
            **super().write(config),
            self.count[0]: config.num_experts,
            "num_experts_per_tok": config.moe_router_topk,
            self.inner: config.expert_ffn_size,
            "router_aux_loss_coef": config.moe_aux_loss_coeff,
            **normalized,
            **({"use_sliding_window": config.window is not None} if self.switched else {}),
            **({"shared_expert_intermediate_size": width, "qkv_bias": True} if self.shared else {}),
            **(dict(zip(_SPARSE, (1, without), strict=True)) if self.sparse else {}),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Return, by the name of each tensor of `GPTModel`, the corresponding tensors of the family's models."""
        found = super().pieces(config)
        for layer in config.expert_layers:
            ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.{self.moe}"
            for name in ("gate", "fc1", "fc2"):
                del found[f"{ours}.{name}.weight"]
            found[f"{ours}.router.weight"] = same(f"{theirs}.gate.weight")
            assert config.num_experts is not None
            for name, part in zip(("gate", "fc1", "fc2"), self.parts, strict=True):
                names = [f"{theirs}.experts.{expert}.{part}.weight" for expert in range(config.num_experts)]
                found[f"{ours}.experts.{name}"] = of_experts(names, transposed=name == "fc2")
            if config.moe_shared_expert_intermediate_size is not None:
                for name, part in zip(("gate", "fc1", "fc2"), self.parts, strict=True):
                    found[f"{ours}.shared.{name}.weight"] = same(f"{theirs}.{self.shared_name}.{part}.weight")
            if config.moe_router_enable_expert_bias:
                found[f"{ours}.router.expert_bias"] = same(f"{theirs}.gate.e_score_correction_bias")
            if config.moe_shared_expert_gate:
                found[f"{ours}.shared_gate.weight"] = same(f"{theirs}.shared_expert_gate.weight")
        return found


def of_experts(names: Sequence[str], *, transposed: bool) -> ForeignTensors:
    """Return the `ForeignTensors` for a tensor of `GPTModel` that concatenates one matrix of each expert.

    Args:
        names: names of the experts' tensors in Hugging Face's model, in the order of experts.
        transposed: True if `GPTModel` stores each expert's matrix transposed.
    """

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.t() if transposed else part for part in parts])

    def split(ours: torch.Tensor) -> list[torch.Tensor]:
        return [part.t() if transposed else part for part in ours.chunk(len(names))]

    return ForeignTensors(tuple(names), join, split, transposed)


@dataclass(frozen=True)
class Glm(Mixture):
    """Hugging Face's family GLM-4.5, a mixture of experts.

    The router has sigmoid scores and a bias per expert. Layers with experts also have a shared MLP without a gate. The
    first layers are dense. The config.json says whether queries, keys and values have biases, and whether queries and
    keys have norms. Files of released models have one more layer, which predicts a second token. transformers does not
    load this layer, and a conversion leaves it out.
    """

    predicts: ClassVar[bool] = True

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig that a config.json of GLM-4.5 defines.

        Args:
            settings: values of the config.json, completed by transformers' defaults.
        Raises:
            ValueError: a value is missing or not supported. The message names its key.
        """
        settings.only("norm_topk_prob", True)
        for key in ("n_group", "topk_group"):
            settings.only(key, 1)
        # One expert per token is not supported: transformers normalizes this expert's router weight to 1, but with
        # --moe-router-topk 1 the router weight is the expert's score.
        settings.only("num_experts_per_tok", *range(2, max(2, settings.count("n_routed_experts")) + 1))
        found = super().read(Settings({**settings.values, "attention_bias": False}, settings.where))
        dense, scaling = settings.number("first_k_dense_replace"), settings.positive("routed_scaling_factor")
        marks = [int(layer >= dense) for layer in range(found["num_layers"])]
        return found | {
            "add_qkv_bias": settings.truth("attention_bias", False),
            "qk_layernorm": settings.truth("use_qk_norm", False),
            "moe_layer_freq": "1" if all(marks) else str(marks).replace(" ", ""),
            "moe_shared_expert_intermediate_size": found["moe_ffn_hidden_size"] * settings.count("n_shared_experts"),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": None if scaling == 1.0 else scaling,
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return the config.json of GLM-4.5 for a model, without entries about vocabulary and special tokens."""
        return {
            **super().write(config),
            "attention_bias": config.qkv_bias,
            "use_qk_norm": config.qk_layernorm,
            "first_k_dense_replace": next(iter(config.expert_layers), config.layers),
            "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.expert_ffn_size,
            "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
            "num_nextn_predict_layers": 0,
        }


MIXTURES = (
    Mixture(
        "mixtral",
        "MixtralForCausalLM",
        windows="all",
        moe="block_sparse_moe",
        parts=("w1", "w3", "w2"),
        always_normalized=True,
        inner="intermediate_size",
        count=("num_local_experts", "num_experts"),
    ),
    Mixture("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm="heads", windows="all", switched=True, sparse=True),
    Mixture("qwen2_moe", "Qwen2MoeForCausalLM", qkv_bias=True, windows="layers", shared=True, sparse=True),
    Glm(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        partial=True,
        always_normalized=True,
        shared_name="shared_experts",
        count=("n_routed_experts",),
    ),
    Mixture("olmoe", "OlmoeForCausalLM", qk_norm="all", inner="intermediate_size"),
)
