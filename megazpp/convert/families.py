"""Convert Hugging Face's dense families: GPT-2, Llama, and families that differ from Llama in few ways.

GPT-2 has learned positions, LayerNorm, biases, and matrices stored as [in, out]. Llama has rotary positions, and
queries, keys and values as three matrices.

| model_type | differs from llama in                                        | flags of MegaZ++                        |
|------------|--------------------------------------------------------------|-----------------------------------------|
| mistral    | sliding windows in all layers; no biases                     | --window-size                           |
| qwen2      | biases on queries, keys and values only; windows by layers   | --add-qkv-bias, --window-attn-skip-freq |
| qwen3      | normalized queries and keys; no biases; windows by layers    | --qk-layernorm                          |
| granite    | factors of embeddings, scores, residuals and logits          | --embedding-multiplier and three more   |
| smollm3    | layers without rotary positions; windows by layers           | --no-rope-freq                          |
| phi3       | windows; some channels rotate; fused qkv, fused gate/up      | --rotary-percent                        |
| olmo2      | norms after attention and MLP; q/k norms over all heads      | --norm-after-block                      |
| starcoder2 | LayerNorm, a GeLU MLP, biases everywhere; windows            | no --swiglu                             |

To support a further family that differs from Llama only in these ways, add an entry to `RELATIVES`. An export uses the
first family that can represent the model (`huggingface.find_architecture`).

transformers 5 has the settings of rotary positions in `rope_parameters`, and transformers 4 in `rope_theta`,
`rope_scaling` and `partial_rotary_factor`. Written files contain both.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from megazpp.convert.model import Deferred, ForeignTensors, named_pieces, rows_of
from megazpp.convert.settings import Settings
from megazpp.model.attention import HIGH_TURNS, LOW_TURNS
from megazpp.model.config import GPTConfig

# For each name of an activation function in transformers, the fields of GPTConfig that select this function.
ACTIVATIONS: dict[str, dict[str, bool]] = {
    "gelu_new": {"openai_gelu": True},
    "gelu_pytorch_tanh": {"openai_gelu": True},
    "gelu_fast": {"openai_gelu": True},
    "gelu": {},
    "relu2": {"squared_relu": True},
}
# For each key of a Hugging Face config.json, three names. An import sets the field of GPTConfig with the first name to
# the key's value. An export writes the value of the property of GPTConfig with the second name. The third name is the
# method of `Settings` with which an import reads and checks the value.
Keys = Mapping[str, tuple[str, str, str]]
_GPT2_KEYS: Keys = {
    "n_layer": ("num_layers", "layers", "count"),
    "n_embd": ("hidden_size", "hidden", "count"),
    "n_head": ("num_attention_heads", "heads", "count"),
    "n_positions": ("max_position_embeddings", "max_position_embeddings", "count"),
    "layer_norm_epsilon": ("norm_epsilon", "norm_epsilon", "positive"),
    "initializer_range": ("init_method_std", "init_method_std", "number"),
    "resid_pdrop": ("hidden_dropout", "hidden_dropout", "number"),
    "attn_pdrop": ("attention_dropout", "attention_dropout", "number"),
}


class Gpt2:
    """Hugging Face's family GPT-2, and the mapping of its models to GPTConfig and back.

    The attributes and methods are the same as in `Relative`.
    """

    model_type, class_name, fused, predicts = "gpt2", "GPT2LMHeadModel", False, False
    prefix = "transformer."
    # Older files contain attention masks, which are not weights
    buffers = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig that a GPT-2 config.json defines.

        Raises:
            ValueError: a value is not supported. The message names its key.
        """
        settings.absent("scale_attn_by_inverse_layer_idx", "add_cross_attention")
        settings.only("scale_attn_weights", True)
        found = read_keys(settings, _GPT2_KEYS) | ACTIVATIONS[settings.only("activation_function", *ACTIVATIONS)]
        found["ffn_hidden_size"] = settings.count("n_inner", 4 * found["hidden_size"])
        return found | {"untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", True)}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return GPT-2's config.json for a model, without the entries about the vocabulary and special tokens."""
        return {
            **write_keys(config, _GPT2_KEYS),
            "n_inner": config.ffn_size,
            "embd_pdrop": config.hidden_dropout,
            "tie_word_embeddings": config.tied,
            "activation_function": activation_of(config, "gelu_new"),
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Return, by the name of each tensor of `GPTModel`, the corresponding tensors of Hugging Face's GPT-2."""
        modules = {"embedding.word": "transformer.wte", "embedding.position": "transformer.wpe"}
        modules |= {"final_norm": "transformer.ln_f"} | ({} if config.tied else {"output": "lm_head"})
        parts = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.proj": "attn.c_proj"}
        parts |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
        return named_pieces(config, modules, parts, ["attn.c_attn"], layers="transformer.h", is_transposed=True)


def activation_of(config: GPTConfig, tanh: str) -> str:
    """Return Hugging Face's name of the activation function in a model's MLPs without gates.

    Args:
        config: architecture of the model.
        tanh: the family's name of GeLU's tanh approximation, which differs between Hugging Face's families.
    """
    return tanh if config.openai_gelu else "relu2" if config.squared_relu else "gelu"


def read_keys(settings: Settings, keys: Keys) -> dict[str, Any]:
    """Return the fields of GPTConfig that are set by one key of config.json each.

    Args:
        settings: values of the config.json.
        keys: for each key of config.json, the names of its field of GPTConfig, of the property that exports use, and of
            the method of `Settings` that reads the value.
    Raises:
        ValueError: a value is missing or invalid. The message names its key.
    """
    return {field: getattr(settings, method)(key) for key, (field, _, method) in keys.items()}


def write_keys(config: GPTConfig, keys: Keys) -> dict[str, Any]:
    """Return those entries of a Hugging Face config.json that set one field of GPTConfig each.

    Args:
        config: architecture of the model.
        keys: for each key of config.json, the names of its field of GPTConfig, of the property with the value to write,
            and of the method of `Settings` that imports use.
    """
    return {key: getattr(config, value) for key, (_, value, _) in keys.items()}


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
_LLAMA_KEYS: Keys = {
    "num_hidden_layers": ("num_layers", "layers", "count"),
    "hidden_size": ("hidden_size", "hidden", "count"),
    "intermediate_size": ("ffn_hidden_size", "ffn_size", "count"),
    "num_attention_heads": ("num_attention_heads", "heads", "count"),
    "max_position_embeddings": ("max_position_embeddings", "max_position_embeddings", "count"),
    "initializer_range": ("init_method_std", "init_method_std", "number"),
    "attention_dropout": ("attention_dropout", "attention_dropout", "number"),
}
# Parts of the names of an MLP's matrices in Hugging Face's models. Only phi3 has _GATE_UP, which fuses gate and up.
_GATE_UP, _GATE, _UP = "mlp.gate_up_proj.", "mlp.gate_proj.", "mlp.up_proj."


@dataclass(frozen=True)
class Relative:
    """A Hugging Face family (model_type) that is similar to Llama, and the mapping of its models to GPTConfig and back.

    Attributes:
        prefix: prefix of the tensor names. Files that transformers' AutoModel has written without an output layer have
            names without this prefix.
        buffers: pattern of the names of stored tensors that are not weights. They are ignored.
        predicts: True if files may contain further layers after the model's last layer, which predict tokens after the
            next one. A conversion leaves these layers out.
        model_type: name of the family in config.json.
        class_name: transformers' class of the model with its output layer.
        biases: keys of config.json that enable biases in all linear layers.
        dropouts: keys of config.json with the dropout rate of the residual stream.
        qkv_bias: True if only the projections to queries, keys and values have biases.
        qk_norm: normalization of queries and keys: "" for none, "heads" per head, "all" over all heads together.
        windows: layers that may have sliding-window attention: "" for none, "all", or "layers" for the layers that the
            key `layer_types` names.
        multipliers: True if config.json has factors of embeddings, attention scores, residuals and logits.
        unrotated: True if some layers may have no rotary positions.
        norm_after: True if norms come after attention and MLP instead of before them.
        fused: True if queries, keys and values are one matrix, and gate and up another one.
        partial: True if only some channels of a head may rotate (partial_rotary_factor).
        layer_norm: True for LayerNorm and a GeLU MLP instead of RMSNorm and SwiGLU.
    """

    prefix: ClassVar[str] = "model."
    # Older files contain rotary frequencies, which are not weights
    buffers: ClassVar[re.Pattern[str]] = re.compile(r".*rotary_emb\.inv_freq")
    predicts: ClassVar[bool] = False
    model_type: str
    class_name: str
    biases: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: Literal["", "heads", "all"] = ""
    windows: Literal["", "all", "layers"] = ""
    multipliers: bool = False
    unrotated: bool = False
    norm_after: bool = False
    fused: bool = False
    partial: bool = False
    layer_norm: bool = False

    @property
    def keys(self) -> Keys:
        """The keys of the family's config.json that set one field of GPTConfig each, in the form of `Keys`."""
        epsilon = "norm_epsilon" if self.layer_norm else "rms_norm_eps"
        return {**_LLAMA_KEYS, epsilon: ("norm_epsilon", "norm_epsilon", "positive")}

    def read(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig that a config.json of this family defines.

        Args:
            settings: values of the config.json, completed by transformers' defaults.
        Raises:
            ValueError: a value is missing or not supported. The message names its key.
        """
        found = read_keys(settings, self.keys)
        hidden, heads = found["hidden_size"], found["num_attention_heads"]
        groups, head_size = settings.count("num_key_value_heads"), settings.count("head_dim", max(hidden // heads, 1))
        bias = bool(self.biases) and settings.truth(self.biases[0], False)
        for key in ("attention_bias", "mlp_bias"):
            settings.only(key, bias)
        dropout = settings.number(self.dropouts[0], 0.0) if self.dropouts else 0.0
        for key in self.dropouts:
            settings.only(key, dropout)
        if self.layer_norm:
            found |= ACTIVATIONS[settings.only("hidden_act", *ACTIVATIONS)]
        else:
            settings.only("hidden_act", "silu", "swish")
            found["swiglu"] = True
        if self.multipliers:
            scale = settings.positive("attention_multiplier")
            found |= {key: settings.positive(key) for key in _MULTIPLIERS}
            found["attention_multiplier"] = None if scale == head_size**-0.5 else scale
        return {
            **found,
            "kv_channels": None if head_size * heads == hidden else head_size,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
            "position_embedding_type": "rope",
            **read_rotary(settings, partial=self.partial, scaled=not self.fused),
            **self._read_layers(settings),
            "normalization": "LayerNorm" if self.layer_norm else "RMSNorm",
            "norm_after_block": self.norm_after,
            "qk_layernorm": self.qk_norm == "heads",
            "qk_layernorm_all_heads": self.qk_norm == "all",
            "untie_embeddings_and_output_weights": not settings.truth("tie_word_embeddings", False),
            "disable_bias_linear": not bias,
            "add_qkv_bias": self.qkv_bias,
            "hidden_dropout": dropout,
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Return the family's config.json for a model, without the entries about vocabulary and special tokens.

        A field of `config` for which the family has no key is left out without an error. `find_architecture` detects
        this by reading the result back.
        """
        window, found = config.window if self.windows else None, dict[str, Any]()
        if self.windows == "layers":
            kinds = ["full_attention" if span is None else "sliding_attention" for span in config.attention_span]
            found |= {"use_sliding_window": window is not None, "layer_types": kinds}
        if self.unrotated:
            found["no_rope_layers"] = [int(config.rotates(layer)) for layer in range(config.layers)]
        if self.multipliers:
            own = config.attention_multiplier
            found |= {key: getattr(config, key) for key in _MULTIPLIERS}
            found["attention_multiplier"] = config.head_size**-0.5 if own is None else own
        return {
            **write_keys(config, self.keys),
            "num_key_value_heads": config.query_groups,
            "head_dim": config.head_size,
            "hidden_act": activation_of(config, "gelu_pytorch_tanh") if self.layer_norm else "silu",
            **write_rotary(config, partial=self.partial, scaled=not self.fused),
            "sliding_window": window,
            "tie_word_embeddings": config.tied,
            **dict.fromkeys(self.dropouts, config.hidden_dropout),
            **dict.fromkeys(self.biases, config.linear_bias),
            # Without this entry, transformers uses the family's default padding token, which may exceed the vocabulary
            "pad_token_id": None,
            **found,
        }

    def pieces(self, config: GPTConfig) -> dict[str, ForeignTensors]:
        """Return, by the name of each tensor of `GPTModel`, the corresponding tensors of the family's models."""
        modules = {"embedding.word": "model.embed_tokens", "final_norm": "model.norm"}
        modules |= {} if config.tied else {"output": "lm_head"}
        parts = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if self.norm_after:
            parts = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
        parts |= {"attention.proj": "self_attn.o_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
        if config.swiglu:
            parts |= {"mlp.gate": "mlp.gate_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
        if config.qk_layernorm or config.qk_layernorm_all_heads:
            parts |= {f"attention.{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
        qkv = [f"self_attn.{part}_proj" for part in (("qkv",) if self.fused else "qkv")]
        return named_pieces(config, modules, parts, qkv, layers="model.layers")

    def _read_layers(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of GPTConfig for sliding windows and for layers without rotary positions.

        Hugging Face's window size counts the attending token itself. --window-size counts only earlier tokens, so its
        value is smaller by one.
        """
        found, slides = dict[str, Any](), self.windows == "all" and "sliding_window" in settings
        if self.unrotated:
            found["no_rope_freq"] = str([int(not rotates) for rotates in settings.values["no_rope_layers"]])
        if self.windows == "layers" and settings.truth("use_sliding_window", False) and "sliding_window" in settings:
            kinds = settings.each("layer_types", "full_attention", "sliding_attention")
            found["window_attn_skip_freq"] = str([int(kind == "sliding_attention") for kind in kinds])
            slides = "sliding_attention" in kinds
        else:
            settings.each("layer_types", "full_attention")
        window = settings.count("sliding_window") if slides else None
        return found | ({"window_size": f"{window - 1},0"} if window else {"window_attn_skip_freq": None})


def split_gate_up(tensors: Mapping[str, Deferred]) -> dict[str, Deferred]:
    """Split each fused matrix of gate and up, as in phi3's files, into two tensors; leave other tensors unchanged."""
    found: dict[str, Deferred] = {}
    for name, entry in tensors.items():
        if _GATE_UP in name:
            half = entry.shape[0] // 2
            found[name.replace(_GATE_UP, _GATE)] = rows_of(entry, 0, half)
            found[name.replace(_GATE_UP, _UP)] = rows_of(entry, half, entry.shape[0])
        else:
            found[name] = entry
    return found


def join_gate_up(tensors: Mapping[str, Deferred]) -> dict[str, Deferred]:
    """Fuse the matrices gate and up of each MLP into one tensor, as in phi3's files; the inverse of `split_gate_up`."""
    found: dict[str, Deferred] = {}
    for name, entry in tensors.items():
        if _GATE in name:
            read = functools.partial(_below, entry, tensors[name.replace(_GATE, _UP)])
            shape = (2 * entry.shape[0], *entry.shape[1:])
            found[name.replace(_GATE, _GATE_UP)] = Deferred(shape, entry.dtype, read)
        elif _UP not in name:
            found[name] = entry
    return found


def _below(first: Deferred, second: Deferred) -> torch.Tensor:
    """Read two matrices, and return one matrix with the rows of `first` and then the rows of `second`."""
    return torch.cat((first.read(), second.read()))


_ALL_BIASES = ("attention_bias", "mlp_bias")
_PHI3_DROPOUTS, _STARCODER2_DROPOUTS = ("resid_pdrop", "embd_pdrop"), ("residual_dropout", "embedding_dropout")
RELATIVES = (
    Relative("llama", "LlamaForCausalLM", biases=_ALL_BIASES),
    Relative("mistral", "MistralForCausalLM", windows="all"),
    Relative("qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows="layers"),
    Relative("qwen3", "Qwen3ForCausalLM", qk_norm="heads", windows="layers"),
    Relative("granite", "GraniteForCausalLM", biases=_ALL_BIASES, multipliers=True),
    Relative("smollm3", "SmolLM3ForCausalLM", biases=_ALL_BIASES, windows="layers", unrotated=True),
    Relative("phi3", "Phi3ForCausalLM", windows="all", dropouts=_PHI3_DROPOUTS, fused=True, partial=True),
    Relative("olmo2", "Olmo2ForCausalLM", qk_norm="all", norm_after=True),
    Relative(
        "starcoder2",
        "Starcoder2ForCausalLM",
        biases=("use_bias",),
        windows="all",
        dropouts=_STARCODER2_DROPOUTS,
        layer_norm=True,
    ),
)


# Keys of `rope_parameters`. For frequencies scaled as in Llama 3, `_LLAMA3` has the only values that are supported.
_LLAMA3 = {"low_freq_factor": LOW_TURNS, "high_freq_factor": HIGH_TURNS}
_ORIGINAL = "original_max_position_embeddings"
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", *_LLAMA3, _ORIGINAL, *_YARN)


def read_rotary(settings: Settings, *, partial: bool, scaled: bool) -> dict[str, Any]:
    """Return the fields of GPTConfig for the rotary positions (`rope_parameters`) of a Hugging Face config.json.

    Args:
        settings: values of the config.json, completed by transformers' defaults.
        partial: True if the model's family supports rotating only some channels of a head (partial_rotary_factor).
        scaled: True if the model's family supports scaled rotary frequencies for longer contexts, such as llama3 or
            yarn.
    Raises:
        ValueError: a value is missing or not supported. The message names its key.
    """
    rope = settings.part("rope_parameters")
    kind = rope.only("rope_type", "default", *(("llama3", "linear", "dynamic", "yarn") if scaled else ()))
    rope.absent(*(key for key in rope.values if key not in _ROPE_KEYS), empty=(None,))
    if not partial:
        rope.only("partial_rotary_factor", 1.0)
    percent = rope.positive("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {"rotary_base": rope.positive("rope_theta"), "rotary_percent": percent}
    if kind == "default":
        return found
    factor = rope.positive("factor")
    if kind == "linear":
        return found | {"rotary_seq_len_interpolation_factor": factor}
    if kind == "dynamic":
        return found | {"rope_type": kind, "rotary_scaling_factor": factor}
    original = settings.count(_ORIGINAL, rope.count(_ORIGINAL))
    if kind == "llama3":
        for key, value in _LLAMA3.items():
            rope.only(key, value)
        scaling = {"rope_scaling_factor": factor, "rope_scaling_original_length": original}
        return found | {"use_rope_scaling": True, **scaling}
    rope.only("truncate", True)
    # As in transformers: if mscale and mscale_all_dim are both set, the default of attention_factor is the ratio of the
    # two factors that follow from them and from the scaling factor.
    mscales = [rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    tempered = [1.0 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in mscales]
    default = tempered[0] / tempered[1] if all(mscales) else None
    attention = rope.positive("attention_factor", default) if default or "attention_factor" in rope else None
    turns = {f"yarn_{key}": rope.positive(key, value) for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    lengths: dict[str, Any] = {"yarn_original_max_position_embeddings": original, "yarn_attention_factor": attention}
    return found | turns | lengths | {"rope_type": kind, "rotary_scaling_factor": factor}


def write_rotary(config: GPTConfig, *, partial: bool, scaled: bool) -> dict[str, Any]:
    """Return the keys of config.json for a model's rotary positions, as transformers 4 and 5 read them.

    Args:
        config: architecture of the model.
        partial: True if the model's family supports rotating only some channels of a head (partial_rotary_factor).
        scaled: True if the model's family supports scaled rotary frequencies for longer contexts.
    """
    factor, original = config.rotary_scaling_factor, config.yarn_original_max_position_embeddings
    scaling: dict[str, Any] = {}
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling, **_LLAMA3}
        scaling[_ORIGINAL] = config.rope_scaling_original_length
    elif config.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    elif config.rope_type == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": factor}
    elif config.rope_type == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": config.yarn_attention_factor}
        scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow, _ORIGINAL: original}
    found = {"rope_theta": config.rotary_base} | ({"partial_rotary_factor": config.rotary_percent} if partial else {})
    scaling = {key: value for key, value in scaling.items() if scaled and value is not None}
    return {**found, "rope_scaling": scaling or None, "rope_parameters": {"rope_type": "default", **found, **scaling}}
