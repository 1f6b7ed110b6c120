"""Hugging Face's Llama and its relatives: rotary positions, and queries, keys and values as three matrices.

| model_type | differs from llama in                                        | flags here                              |
|------------|--------------------------------------------------------------|-----------------------------------------|
| mistral    | tokens look back over a window at most; no biases            | --window-size                           |
| qwen2      | biases on queries, keys and values only; windows by layers   | --add-qkv-bias, --window-attn-skip-freq |
| qwen3      | normalized queries and keys; no biases; windows by layers    | --qk-layernorm                          |
| granite    | factors of embeddings, scores, residuals and logits          | --embedding-multiplier and three more   |
| smollm3    | layers without rotary positions; windows by layers           | --no-rope-freq                          |
| phi3       | windows; some channels rotate; fused matrices, split here    | --rotary-percent                        |
| olmo2      | norms behind attention and MLP, and of all queries and keys  | --norm-after-block                      |
| starcoder2 | LayerNorm, a GeLU MLP, biases everywhere; windows            | no --swiglu                             |
| gpt_neox   | starcoder2 with attention and MLP in parallel (neox.py)      | --use-parallel-residual                 |

A model that is a Llama without these differences becomes one. A relative that differs in such ways alone is one more
entry of `RELATIVES` and one more case of `huggingface.choose_architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megazpp.convert.gpt2 import ACTIVATIONS
from megazpp.convert.model import Deferred, ForeignTensors, qkv_rows, refuse, same
from megazpp.convert.rotary import read_rotary, write_scaling
from megazpp.convert.settings import Settings
from megazpp.model.config import GPTConfig

_FREQUENCIES = re.compile(r"rotary_emb\.inv_freq")  # a buffer in older files
_POSITIONS = ("max_position_embeddings",)
_REQUIRED = ("num_key_value_heads", *_POSITIONS)
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GATE_UP, _GATE, _UP = "mlp.gate_up_proj.", "mlp.gate_proj.", "mlp.up_proj."  # one matrix in phi3's files
_PADDED = ("phi3", "smollm3", "olmo2")  # transformers has a default of pad_token_id, which a small vocabulary lacks
_NO_WINDOW = ("phi3", "starcoder2", "smollm3", "mixtral")  # without sliding_window


@dataclass(frozen=True)
class Relative:
    """A model_type; `gpt2.Gpt2` has the same methods.

    Attributes:
        model_type, class_name: in config.json, and of transformers, with the output layer.
        required: keys of config.json that may not be left out (transformers has defaults for them that no model uses).
        biases: keys that give all linear layers biases.
        qkv_bias, qk_norm: it has biases on queries, keys and values; norms of queries and keys, of each head or of all.
        windows: layers with `sliding_window`: none, all where it is given, or by `layer_types` where
            `use_sliding_window` is true.
        tied, theta, norm_epsilon: defaults of transformers.
        dropouts: keys of the dropout of the residual stream.
        multipliers, unrotated, norm_after, fused, partial, layer_norm: it has the difference of the table above.
    """

    model_type: str
    class_name: str
    required: tuple[str, ...] = _REQUIRED
    biases: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: Literal["", "heads", "all"] = ""
    windows: Literal["", "all", "layers"] = ""
    tied: bool = False
    theta: float = 10000.0
    norm_epsilon: float = 1e-6
    dropouts: tuple[str, ...] = ()
    multipliers: bool = False
    unrotated: bool = False
    norm_after: bool = False
    fused: bool = False
    partial: bool = False
    layer_norm: bool = False

    @property
    def epsilon(self) -> str:
        return "norm_epsilon" if self.layer_norm else "rms_norm_eps"

    def read(self, settings: Settings) -> dict[str, Any]:
        """Fields of GPTConfig, or a ValueError that names a key; what is left out has transformers' value, if any."""

        def count(key: str, default: int) -> int:
            return settings.count(key, None if key in self.required else default)

        hidden, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
        groups, head_size = count("num_key_value_heads", heads), count("head_dim", max(hidden // heads, 1))
        positions, layers = count("max_position_embeddings", 2048), settings.count("num_hidden_layers")
        activation = {"swiglu": True}
        if self.layer_norm:
            activation = ACTIVATIONS[settings.only("hidden_act", *ACTIVATIONS)]
        else:
            settings.only("hidden_act", "silu", "swish")
        dropouts = {settings.number(key, 0.0) for key in self.dropouts} or {0.0}
        if len(dropouts) > 1:
            raise ValueError(f"{settings.where}: {' and '.join(self.dropouts)} differ, here they are one dropout")
        return {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": settings.count("intermediate_size"),
            "num_attention_heads": heads,
            "kv_channels": None if head_size * heads == hidden else head_size,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
            "max_position_embeddings": positions,
            "position_embedding_type": "rope",
            **read_rotary(settings, positions, theta=self.theta, partial=self.partial, scaled=not self.fused),
            **self._read_layers(settings, layers),
            "normalization": "LayerNorm" if self.layer_norm else "RMSNorm",
            "norm_epsilon": settings.positive(self.epsilon, self.norm_epsilon),
            "norm_after_block": self.norm_after,
            "qk_layernorm": self.qk_norm == "heads",
            "qk_layernorm_all_heads": self.qk_norm == "all",
            **activation,
            **({key: settings.positive(key, 1.0) for key in _MULTIPLIERS} if self.multipliers else {}),
            "untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", self.tied),
            "disable_bias_linear": not self._read_bias(settings),
            "add_qkv_bias": self.qkv_bias,
            "init_method_std": settings.number("initializer_range", 0.02),
            "hidden_dropout": dropouts.pop(),
            "attention_dropout": settings.number("attention_dropout", 0.0),
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """config.json without the vocabulary; a ValueError names the flags of what it cannot hold."""
        windows, multiplied = self.windows, {key: getattr(config, key) for key in _MULTIPLIERS}
        scaled = config.rope_type != "rope" or config.use_rope_scaling
        scaled |= config.rotary_seq_len_interpolation_factor is not None
        plain = dict.fromkeys(_MULTIPLIERS, 1.0) | {"attention_multiplier": None}
        skips = len({*config.attention_span}) > 1
        refuse(
            self.class_name,
            {
                f"--position-embedding-type {config.positions}": config.positions != "rope",
                f"--rotary-percent {config.rotary_percent}": config.rotary_percent != 1.0 and not self.partial,
                f"--no-rope-freq {config.no_rope_freq}": bool(config.unrotated) and not self.unrotated,
                f"--normalization {config.normalization}": (config.normalization == "LayerNorm") != self.layer_norm,
                "--apply-layernorm-1p": config.apply_layernorm_1p,
                "--swiglu" if self.layer_norm else "--no-swiglu": config.swiglu == self.layer_norm,
                f"--window-size {config.window_size}": config.window is not None and not windows,
                f"--window-attn-skip-freq {config.window_attn_skip_freq}": skips and windows == "all",
                "--qk-layernorm": config.qk_layernorm and self.qk_norm != "heads",
                "--qk-layernorm-all-heads": config.qk_layernorm_all_heads and self.qk_norm != "all",
                "--no-qk-layernorm-all-heads": self.qk_norm == "all" and not config.qk_layernorm_all_heads,
                "--norm-after-block": config.norm_after_block and not self.norm_after,
                "--no-norm-after-block": self.norm_after and not config.norm_after_block,
                "--use-parallel-residual": config.use_parallel_residual,
                "--no-disable-bias-linear": config.linear_bias and not self.biases,
                "--add-qkv-bias": config.qkv_bias and not config.linear_bias and not self.qkv_bias,
                **{
                    f"--{key.replace('_', '-')} {value}": value != plain[key] and not self.multipliers
                    for key, value in multiplied.items()
                },
                "rotary frequencies for longer contexts": scaled and self.fused,
            },
        )
        if self.multipliers and config.attention_multiplier is None:
            multiplied["attention_multiplier"] = config.head_size**-0.5
        kind = {name: getattr(config, name) for name in ("openai_gelu", "squared_relu") if getattr(config, name)}
        activations = [name for name, flags in ACTIVATIONS.items() if flags == kind]
        tanh = "gelu_pytorch_tanh"
        activation = "silu" if not self.layer_norm else tanh if tanh in activations else activations[0]
        return {
            "num_hidden_layers": config.layers,
            "hidden_size": config.hidden,
            "intermediate_size": config.ffn_size,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.query_groups,
            "head_dim": config.head_size,
            "hidden_act": activation,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_theta": config.rotary_base,
            "rope_scaling": write_scaling(config),
            self.epsilon: config.norm_epsilon,
            "tie_word_embeddings": config.tied,
            "initializer_range": config.init_method_std,
            "attention_dropout": config.attention_dropout,
            **dict.fromkeys(self.dropouts, config.hidden_dropout),
            **dict.fromkeys(self.biases, config.linear_bias),
            **(multiplied if self.multipliers else {}),
            **({"partial_rotary_factor": config.rotary_percent} if self.partial else {}),
            **({"pad_token_id": None} if self.model_type in _PADDED else {}),
            **self._write_layers(config),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Our names to theirs."""
        kinds = ("weight", "bias") if config.linear_bias else ("weight",)
        norm_kinds = ("weight", "bias") if self.layer_norm else ("weight",)
        found = {"embedding.word.weight": same("model.embed_tokens.weight")}
        found |= {f"final_norm.{kind}": same(f"model.norm.{kind}") for kind in norm_kinds}
        if not config.tied:
            found["output.weight"] = same("lm_head.weight")
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if self.norm_after:
            norms = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
        linears = {"attention.proj": "self_attn.o_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
        if config.swiglu:
            linears |= {"mlp.gate": "mlp.gate_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
        for layer in range(config.layers):
            ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
            for norm, name in norms.items():
                found |= {f"{ours}.{norm}.{kind}": same(f"{theirs}.{name}.{kind}") for kind in norm_kinds}
            if config.qk_layernorm or config.qk_layernorm_all_heads:
                names = {f"{ours}.attention.{x}_norm.weight": f"{theirs}.self_attn.{x}_norm.weight" for x in "qk"}
                found |= {our_name: same(name) for our_name, name in names.items()}
            for kind in kinds:
                found |= {
                    f"{ours}.{linear}.{kind}": same(f"{theirs}.{name}.{kind}") for linear, name in linears.items()
                }
            for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
                parts = ["qkv_proj"] if self.fused else [f"{letter}_proj" for letter in "qkv"]
                names_of_parts = [f"{theirs}.self_attn.{part}.{kind}" for part in parts]
                found[f"{ours}.attention.qkv.{kind}"] = qkv_rows(names_of_parts, config)
        return found

    def their_name(self, name: str) -> str | None:
        """Return the full name of a tensor in a file; None for one that holds no weight.

        Files of a model without an output layer (transformers' AutoModel) have no prefix.
        """
        if _FREQUENCIES.search(name):
            return None
        return name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"

    def opened(self, tensors: Mapping[str, Deferred]) -> dict[str, Deferred]:
        """Tensors of files, with phi3's fused gate and up matrices as two."""
        found: dict[str, Deferred] = {}
        for name, entry in tensors.items():
            if self.fused and _GATE_UP in name and entry.shape[0] % 2 == 0:
                half = entry.shape[0] // 2
                for part, place in ((_GATE, slice(None, half)), (_UP, slice(half, None))):
                    read = _rows(entry.read, place)
                    found[name.replace(_GATE_UP, part)] = Deferred((half, *entry.shape[1:]), entry.dtype, read)
            else:
                found[name] = entry
        return found

    def closed(self, tensors: Mapping[str, Deferred]) -> dict[str, Deferred]:
        """The opposite of `opened`."""
        found: dict[str, Deferred] = {}
        for name, entry in tensors.items():
            if self.fused and _GATE in name:
                up = tensors[name.replace(_GATE, _UP)]
                shape = (2 * entry.shape[0], *entry.shape[1:])
                found[name.replace(_GATE, _GATE_UP)] = Deferred(shape, entry.dtype, _below(entry.read, up.read))
            elif not (self.fused and _UP in name):
                found[name] = entry
        return found

    def _read_bias(self, settings: Settings) -> bool:
        """Return whether all linear layers have biases."""
        if not self.biases:
            settings.absent("attention_bias", "mlp_bias")
            return False
        bias = settings.truth(self.biases[0], self.layer_norm)
        if any(settings.truth(key, self.layer_norm) != bias for key in self.biases):
            raise ValueError(
                f"{settings.where}: {' and '.join(self.biases)} differ, here linear layers have biases or not"
            )
        return bias

    def _read_layers(self, settings: Settings, layers: int) -> dict[str, Any]:
        """Windows and layers without rotary positions; `sliding_window` counts the token itself, and null is none."""
        unrotated = self._read_unrotated(settings, layers)
        found: dict[str, Any] = {"no_rope_freq": _as_list(unrotated) if any(unrotated) else None}
        switched = self.windows == "layers" and settings.truth("use_sliding_window", False)
        if self.windows != "layers" or not switched:  # a Mistral with any layer_types is a Ministral
            settings.each("layer_types", *(() if self.windows == "all" else ("full_attention",)))
        if not self.windows:
            settings.absent("sliding_window" if self.biases else "use_sliding_window")
            return found
        default = None if "sliding_window" in settings.values or self.model_type in _NO_WINDOW else 4096
        without = default is None and "sliding_window" not in settings
        if without and switched:  # transformers cannot compute a sliding layer without a window
            settings.each("layer_types", "full_attention")
        if (self.windows == "layers" and not switched) or without:
            return found
        window = settings.count("sliding_window", default)
        if self.windows == "all":
            return found | {"window_size": f"{window - 1},0"}
        first = settings.count_from_zero("max_window_layers", 28)
        have = [skipped if self.unrotated else layer >= first for layer, skipped in enumerate(unrotated)]
        if "layer_types" in settings:
            settings.each("layer_types", "full_attention", "sliding_attention")
            have = [kind == "sliding_attention" for kind in settings.values["layer_types"]]
        if len(have) != layers:
            raise ValueError(f"{settings.where}: layer_types has {len(have)} items for num_hidden_layers {layers}")
        pattern = None if all(have) else _as_list(have)
        return found | ({"window_size": f"{window - 1},0", "window_attn_skip_freq": pattern} if any(have) else {})

    def _read_unrotated(self, settings: Settings, layers: int) -> list[bool]:
        """Return for each layer whether it has no rotary positions."""
        if not self.unrotated:
            return [False] * layers
        given = settings.values.get("no_rope_layers")
        if given is None:
            every = settings.count("no_rope_layer_interval", 4)
            return [(layer + 1) % every == 0 for layer in range(layers)]
        if not isinstance(given, list) or len(given) != layers or any(item not in (0, 1) for item in given):
            raise ValueError(f"{settings.where}: no_rope_layers {given!r} is not {layers} numbers 0 and 1")
        return [not item for item in given]

    def _write_layers(self, config: GPTConfig) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.unrotated:
            found["no_rope_layers"] = [int(config.rotates(layer)) for layer in range(config.layers)]
        if self.windows == "all":
            return found | {"sliding_window": config.window}
        if config.window is None:
            return found
        kinds = ["full_attention" if span is None else "sliding_attention" for span in config.attention_span]
        return found | {"use_sliding_window": True, "sliding_window": config.window, "layer_types": kinds}


def _as_list(marks: Sequence[bool]) -> str:
    return str([int(mark) for mark in marks]).replace(" ", "")


def _rows(read: Callable[[], torch.Tensor], place: slice) -> Callable[[], torch.Tensor]:
    return lambda: read()[place]


def _below(first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: torch.cat((first(), second()))


_ALL_BIASES = ("attention_bias", "mlp_bias")
RELATIVES = {
    relative.model_type: relative
    for relative in (
        Relative("llama", "LlamaForCausalLM", required=(), biases=_ALL_BIASES),
        Relative("mistral", "MistralForCausalLM", windows="all"),
        Relative("qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows="layers"),
        Relative("qwen3", "Qwen3ForCausalLM", required=(*_REQUIRED, "head_dim"), qk_norm="heads", windows="layers"),
        Relative("granite", "GraniteForCausalLM", required=_POSITIONS, biases=_ALL_BIASES, multipliers=True),
        Relative(
            "smollm3",
            "SmolLM3ForCausalLM",
            biases=_ALL_BIASES,
            windows="layers",
            tied=True,
            theta=2e6,
            unrotated=True,
        ),
        Relative(
            "phi3",
            "Phi3ForCausalLM",
            required=_POSITIONS,
            windows="all",
            norm_epsilon=1e-5,
            dropouts=("resid_pdrop", "embd_pdrop"),
            fused=True,
            partial=True,
        ),
        Relative("olmo2", "Olmo2ForCausalLM", required=_POSITIONS, qk_norm="all", norm_after=True, norm_epsilon=1e-5),
        Relative(
            "starcoder2",
            "Starcoder2ForCausalLM",
            norm_epsilon=1e-5,
            biases=("use_bias",),
            windows="all",
            tied=True,
            dropouts=("residual_dropout", "embedding_dropout"),
            layer_norm=True,
        ),
    )
}
