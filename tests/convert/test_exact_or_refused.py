"""Test that every config.json gives transformers' logits, or is rejected with an error that names the key in it."""

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers.hf_models import LLAMA3, SEQ, SIZES, TOKENS, file_tensors, our_logits, randomized
from helpers.tiers import chosen, pairwise
from safetensors.torch import save_file

from megazpp.convert.huggingface import open_model

CLOSE = 1e-4  # absolute tolerance for logits of about 1, because the two models add fp32 numbers in different orders
ABSENT = object()
Values = dict[str, Any]
# config.json with small sizes for each model_type; GPT-2 has a hidden size of 24, a multiple of its default of 12 heads
BASE: dict[str, Values] = {
    kind: {"model_type": kind} | sizes | ({"n_embd": 24} if kind == "gpt2" else {"sliding_window": None})
    for kind, sizes in SIZES.items()
}


class Value(NamedTuple):
    """Keys to set in a config.json, and a part of the error with which the conversion rejects them.

    `refused` is None if the conversion of a model with these keys is exact.
    """

    keys: Values
    refused: str | None = None


def rope(**keys: Any) -> Values:
    return {"rope_scaling": keys}


# fmt: off
ROTARY = [
    Value({}),
    Value({"rope_theta": 50.0}),
    Value({"rope_theta": 70, **rope(rope_type="default", rope_theta=50.0)}),
    Value({"rope_theta": 70.0, **rope(type="default")}),
    Value({"rope_theta": 70.0, "rope_scaling": {}, "rope_parameters": {"rope_theta": 50.0}}),
    Value({"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}, **rope(rope_theta=50.0)}),
    Value({"rope_theta": 5e5, **rope(**LLAMA3)}),
    Value({"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "factor": 8}}),
    Value({"rope_theta": 5e5, **rope(**LLAMA3 | {"low_freq_factor": 2.0})}, "rope_parameters.low_freq_factor 2.0"),
    Value({"rope_theta": 5e5, **rope(**LLAMA3 | {"original_max_position_embeddings": 16})}),
    Value({"original_max_position_embeddings": 16, **rope(**LLAMA3)}),
    Value({"rope_parameters": {k: LLAMA3[k] for k in LLAMA3 if "max" not in k}}),
    Value(rope(rope_type="linear", factor=2.0)),
    Value({"rope_theta": 70.0, **rope(type="dynamic", factor=2.0)}),
    Value({"max_position_embeddings": 20, **rope(rope_type="dynamic", factor=2.0)}),
    Value({"rope_theta": 70.0, **rope(type="yarn", factor=4.0, original_max_position_embeddings=9)}),
    Value({"rope_theta": 70.0, **rope(rope_type="yarn", factor=4.0)}),
    Value(rope(rope_type="yarn", factor=4.0, truncate=False), "rope_parameters.truncate False"),
    Value(rope(rope_type="longrope", factor=4.0), "for 'rope_type'='longrope'"),
    Value(rope(rope_type="longrope", factor=4.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4), "type 'longrope'"),
    Value({"rope_theta": 50.0, "partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor 0.5"),
    Value(rope(rope_type="default", partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor 0.5"),
    Value(rope(full_attention={"rope_type": "default", "rope_theta": 50.0}), "rope_parameters.full_attention"),
]
FEW_ROTARY = [ROTARY[index] for index in (1, 2, 6, 12, 15)]
COMMON = [
    [Value({}), Value({"tie_word_embeddings": True})],
    [Value({}), Value({"num_key_value_heads": 4}), Value({"num_key_value_heads": 1}), Value({"head_dim": 10}),
     Value({"head_dim": 7}, "`head_dim`=7")],
    [Value({}), Value({"rms_norm_eps": 0.3}), Value({"rms_norm_eps": ABSENT}),
     Value({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0 is not positive"),
     Value({"rms_norm_eps": float("nan")}, "rms_norm_eps nan is not a finite number"),
     Value({"hidden_act": "gelu"}, "hidden_act 'gelu'"), Value({"is_causal": False}, "is_causal False")],
]
FULL = {"layer_types": ["full_attention"] * 2}
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
LAYERS = [Value({}), Value(FULL),
          Value(MIXED, "layer_types 'sliding_attention'")]
QWEN = [Value({}), Value({"sliding_window": 5}), Value({"use_sliding_window": False, "max_window_layers": 1}),
        Value({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        Value({"use_sliding_window": True, "max_window_layers": 0}),
        Value({"use_sliding_window": True, "sliding_window": None}),
        Value({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        Value({"use_sliding_window": True, "sliding_window": 0, "layer_types": ["sliding_attention"] * 2},
              "sliding_window 0 is not a positive integer")]
WINDOWS = [Value({}), Value({"sliding_window": SEQ}), Value({"sliding_window": 4096}),
           Value({"sliding_window": ABSENT}), Value({"sliding_window": 5}), Value({"sliding_window": 1}),
           Value({"sliding_window": 0}, "sliding_window 0 is not a positive integer")]
BIASED = Value({"attention_bias": True}, "attention_bias True")
BIASES = [Value({}), Value({"attention_bias": True, "mlp_bias": True}),
          Value({"attention_bias": True}, "mlp_bias False"), Value({"mlp_bias": True}, "mlp_bias True")]
PARTIAL = [Value({}), Value({"partial_rotary_factor": 0.5}),
           Value(rope(rope_type="default", partial_rotary_factor=0.5)),
           Value({"partial_rotary_factor": 0.3}),  # 0.3 of a head's 8 channels is rounded down to 2 rotated channels
           Value({"partial_rotary_factor": 0.1}, "--rotary-percent 0.1 of")]
NORMALIZED = [Value({}), Value({"norm_topk_prob": True}), Value({"norm_topk_prob": False})]
SPARSE = [Value({}), Value({"mlp_only_layers": [0]}), Value({"mlp_only_layers": [1]}),
          Value({"decoder_sparse_step": 2}), Value({"mlp_only_layers": [7]}), Value({"mlp_only_layers": [0, 1]}),
          Value({"decoder_sparse_step": 3}), Value({"mlp_only_layers": 1}, "mlp_only_layers")]
AXES: dict[str, list[list[Value]]] = {
    "gpt2": [
        [Value({}), Value({"tie_word_embeddings": False})],
        [Value({}), Value({"n_inner": 20}), Value({"activation_function": "gelu"}),
         Value({"activation_function": "relu"}, "activation_function 'relu'"),
         Value({"scale_attn_weights": False}, "scale_attn_weights False"), Value({"is_causal": False}, "is_causal")],
        [Value({}), Value({"layer_norm_epsilon": 0.3}), Value({"layer_norm_epsilon": -0.3}, "layer_norm_epsilon -0.3"),
         Value({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon 0.0")],
        [Value({}), Value({"n_head": ABSENT, "num_attention_heads": 2}), Value({"n_head": ABSENT}),
         Value({"num_attention_heads": 4}),
         Value({"num_attention_heads": 2}),
         Value({"n_embd": ABSENT, "hidden_size": 48, "n_layer": ABSENT, "num_hidden_layers": 1, "n_positions": ABSENT,
                "max_position_embeddings": 30})],
    ],
    "llama": [ROTARY, *COMMON, LAYERS,
        BIASES,
        # transformers ignores sliding_window for Llama, so this project must too
        [Value({}), Value({"sliding_window": 5})],
    ],
    "mistral": [FEW_ROTARY, *COMMON,
        [Value({}), Value(FULL, "model_type 'ministral'")],
        WINDOWS,
    ],
    "qwen2": [FEW_ROTARY, *COMMON, LAYERS, QWEN],
    "qwen3": [FEW_ROTARY, COMMON[0], [*COMMON[1], Value({"head_dim": ABSENT})], COMMON[2], LAYERS, QWEN,
        [Value({}), BIASED],
    ],
    "granite": [FEW_ROTARY, *COMMON, LAYERS, BIASES,
        [Value({}), Value({"embedding_multiplier": 3.0}),
         Value({"embedding_multiplier": 0.0}, "embedding_multiplier 0")],
        [Value({}), Value({"attention_multiplier": 0.2}), Value({"attention_multiplier": 8**-0.5})],
        [Value({}), Value({"residual_multiplier": 0.5}), Value({"logits_scaling": 2.0}),
         Value({"logits_scaling": -2.0}, "logits_scaling -2.0 is not positive")],
    ],
    "smollm3": [FEW_ROTARY, *COMMON, BIASES,
        [Value({}), Value({"no_rope_layers": [1, 0]}), Value({"no_rope_layers": [0, 0]}),
         Value({"no_rope_layer_interval": 2}), Value({"no_rope_layers": [1, 0, 1]}, "--no-rope-freq")],
        [*LAYERS, Value({"use_sliding_window": True, "sliding_window": 5}), Value({"sliding_window": 5}),
         Value({"use_sliding_window": True, "sliding_window": 5, **MIXED}),
         Value({"use_sliding_window": True, "sliding_window": 5, "layer_types": ["chunked_attention"] * 2},
               "layer_types 'chunked_attention'")],
    ],
    "phi3": [[ROTARY[index] for index in (0, 1, 2, 3)], COMMON[0], COMMON[1][:3], COMMON[2], WINDOWS, PARTIAL,
        [Value({}), BIASED, Value(rope(**LLAMA3), "must be one of ['longrope'], got llama3"),
         Value({"resid_pdrop": 0.1, "embd_pdrop": 0.1}), Value({"resid_pdrop": 0.1}, "embd_pdrop 0.0")],
    ],
    "olmo2": [FEW_ROTARY, *COMMON, LAYERS[:1], [Value({}), BIASED]],
    "starcoder2": [FEW_ROTARY, *COMMON[:2], WINDOWS,
        [Value({}), Value({"norm_epsilon": 0.3}), Value({"norm_epsilon": ABSENT}),
         Value({"norm_epsilon": 0.0}, "norm_epsilon 0.0 is not positive"),
         Value({"is_causal": False}, "is_causal False")],
        [Value({}), Value({"hidden_act": "gelu"}), Value({"hidden_act": "relu2"}),
         Value({"hidden_act": "silu"}, "hidden_act 'silu'")],
        [Value({}), Value({"use_bias": False}), Value({"tie_word_embeddings": False}),
         Value({"residual_dropout": 0.1}, "embedding_dropout 0.0")],
    ],
    "mixtral": [FEW_ROTARY[:4], *COMMON, WINDOWS,
        [Value({}), Value({"num_experts_per_tok": 1}), Value({"num_experts_per_tok": 4}),
         Value({"num_local_experts": 1, "num_experts_per_tok": 1}),
         Value({"num_experts_per_tok": 5}, "--moe-router-topk 5"),
         Value({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1")],
        [Value({}), BIASED, Value({"router_aux_loss_coef": 0.2}), Value({"output_router_logits": True})],
    ],
    "qwen3_moe": [FEW_ROTARY, COMMON[0], [*COMMON[1], Value({"head_dim": ABSENT})], COMMON[2],
        WINDOWS[:2], NORMALIZED, SPARSE,
        [Value({}), Value({"use_sliding_window": True, "sliding_window": 5}),
         Value({"use_sliding_window": True, "sliding_window": None})],
        [Value({}), BIASED, Value({"moe_intermediate_size": 44}),
         Value({"num_experts_per_tok": 1}), Value({"num_experts": 0}, "experts 0 is not a positive integer")],
    ],
    "olmoe": [FEW_ROTARY, COMMON[0], COMMON[1][:3], COMMON[2], NORMALIZED,
        [Value({}), BIASED, Value({"clip_qkv": 0.5}, "clip_qkv 0.5"), Value({"sliding_window": 5}),
         Value({"num_experts_per_tok": 1}), Value({"num_experts_per_tok": 4})],
    ],
}
# fmt: on


def write_folder(folder: Path, kind: str, values: Values) -> Any:
    """Save a random transformers model in `folder` with exactly this config.json. Return the model."""
    write_config(folder, kind, values)
    model = randomized(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)))
    model.save_pretrained(folder)
    # replace the config.json that save_pretrained has written, because it has further keys
    write_config(folder, kind, values)
    return model


def write_config(folder: Path, kind: str, values: Values) -> None:
    folder.mkdir(exist_ok=True)
    given = {key: value for key, value in (BASE[kind] | values).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(given))


def check(folder: Path, kind: str, *settings: Value) -> bool:
    """Check a config.json with all `settings`.

    If no setting is refused, the converted model must give transformers' logits; return True. Otherwise the conversion
    must fail with the error of a refused setting; return False.
    """
    values = {key: value for setting in settings for key, value in setting.keys.items()}
    reasons = [setting.refused for setting in settings if setting.refused is not None]
    if values.get("use_sliding_window") and values.get("sliding_window") == 5:
        # layer_types with "sliding_attention" are accepted if sliding_window is set
        reasons = [reason for reason in reasons if "sliding_attention" not in reason]
    if not reasons:
        with torch.no_grad():
            expected = write_folder(folder, kind, values)(TOKENS).logits
        assert (our_logits(open_model(folder)) - expected).abs().max() < CLOSE, values
        return True
    write_config(folder, kind, values)
    with pytest.raises(ValueError, match="|".join(map(re.escape, reasons))) as caught:
        our_logits(open_model(folder))
    assert "\n" not in str(caught.value)
    return False


@pytest.mark.parametrize("kind", chosen({kind: kind for kind in AXES}, "gpt2", "llama"))
def test_every_setting_is_exact_or_rejected_by_its_key(kind, tmp_path):
    """Check configs that set an accepted value of every axis, and configs that set only one refused value.

    Each accepted value is in at least one of these configs, and each refused value in exactly one.
    """
    write_folder(tmp_path, kind, {})
    axes = accepted_values(kind)
    for number in range(max(map(len, axes))):
        assert check(tmp_path, kind, *(values[number % len(values)] for values in axes))
    for value in itertools.chain(*AXES[kind]):
        if value.refused is not None:
            check(tmp_path, kind, value)


def accepted_values(kind: str) -> list[list[Value]]:
    return [[value for value in axis if value.refused is None] for axis in AXES[kind]]


def settings_of_all_pairs(kind: str) -> list[list[Value]]:
    """Return lists with one accepted value per axis of AXES[kind]. Together they contain every pair of values."""
    axes = accepted_values(kind)
    picked = [case.values for case in pairwise(itertools.product(*map(range, map(len, axes)))) if not case.marks]
    return [[axis[place] for axis, place in zip(axes, places, strict=True)] for places in picked]


@pytest.mark.parametrize("kind", chosen({kind: kind for kind in AXES}, slow=("gpt2", "llama")))
def test_every_pair_of_settings_is_exact_or_rejected_by_its_key(kind, tmp_path):
    write_folder(tmp_path, kind, {})
    # combine each refused value with each accepted value of the other axes: a config has one value of every axis
    for axis in AXES[kind]:
        others = [values for values, of in zip(accepted_values(kind), AXES[kind], strict=True) if of is not axis]
        for refused in (value for value in axis if value.refused is not None):
            for number in range(max(map(len, others))):
                check(tmp_path, kind, refused, *(values[number % len(values)] for values in others))
    for values in settings_of_all_pairs(kind):
        assert check(tmp_path, kind, *values)


def test_tied_output_matrix_that_differs_from_the_embedding_is_rejected(tmp_path):
    for kind, words in (("gpt2", "transformer.wte.weight"), ("llama", "model.embed_tokens.weight")):
        folder = tmp_path / kind
        write_folder(folder, kind, {"tie_word_embeddings": True})
        tensors, same = file_tensors(folder), our_logits(open_model(folder))
        embedding = tensors[words]
        save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
        assert torch.equal(our_logits(open_model(folder)), same)
        for other in (embedding + 1e-3, embedding.bfloat16(), embedding[1:].clone()):
            save_file(tensors | {"lm_head.weight": other}, folder / "model.safetensors")
            with pytest.raises(ValueError, match=f"tie_word_embeddings is true, but lm_head.weight is not {words}"):
                open_model(folder)


# fmt: off
REFUSED: list[tuple[str, Values, str]] = [
    ("gpt2", {"model_type": "gemma"}, "model_type 'gemma' cannot be converted"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt2", {"n_layer": 0}, "n_layer 0 is not a positive integer"),
    ("gpt2", {"n_head": 5}, "--hidden-size 24 is not divisible by --num-attention-heads 5"),
    ("gpt2", {"tie_word_embeddings": 3}, "'tie_word_embeddings' expected bool, got int (value: 3)"),
    ("llama", {"rope_parameters": {**LLAMA3, "factor": None, "rope_theta": 5e5}}, "factor"),
    ("llama", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, "--rope-scaling-factor 0.5"),
    ("llama", {"rope_scaling": "linear"}, "rope_parameters"),
    ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"layer_types": 3}, "config.json: "),
    ("llama", {"rms_norm_eps": "tiny"}, "'rms_norm_eps' expected float, got str (value: 'tiny')"),
    ("llama", {"num_key_value_heads": 3}, "--num-attention-heads 4 is not divisible by --num-query-groups 3"),
    ("llama", {"hidden_size": 40}, "q_proj.weight has shape [32, 32], but the model's is [40, 40]"),
    ("llama", {"vocab_size": 108}, "model.embed_tokens.weight has shape [107, 32]"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2.self_attn.v_proj.weight and 6 more are missing"),
    ("llama", {"num_hidden_layers": 1}, "have no place in this model"),
    # absurd sizes must be rejected before a model is built, which would take minutes and all memory
    ("gpt2", {"n_layer": 10**4}, "describes a model of 10000 layers, but its files have only 28 tensors"),
    ("gpt2", {"n_layer": 10**9}, "describes no model: --num-layers 1000000000 is more than 10000"),
    ("gpt2", {"n_embd": 10**9}, "n_inner 4000000000 is above 2147483647, which no model reaches"),
    ("gpt2", {"n_inner": 10**9}, "has shape"),
    ("gpt2", {"n_positions": 10**30}, f"n_positions {10**30} is above 2147483647, which no model reaches"),
    ("qwen3", {"head_dim": 10**9, "num_attention_heads": 10**9, "num_key_value_heads": 10**9}, "describes no model"),
    ("llama", {"rope_theta": 10**400}, "is not a finite number"),
]
# fmt: on


def test_unsupported_config_is_rejected_by_its_key_in_one_line(tmp_path):
    for kind in ("gpt2", "llama", "qwen3"):
        write_folder(tmp_path / kind, kind, {})
    for kind, values, message in REFUSED:
        write_config(tmp_path / kind, kind, values)
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            open_model(tmp_path / kind)
        assert "\n" not in str(caught.value)
