"""Our GPT in one process against an independent implementation with the same weights."""

import pytest
import torch
import transformers

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_

VOCAB, SEQ, BATCH = 107, 24, 3
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def build(config: GPTConfig) -> GPTModel:
    model = GPTModel(config, vocab_size=VOCAB, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=7, draw_device=torch.device("cpu"))
    with torch.no_grad():  # norms and biases off their constants, so that a swapped pair shows
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def split_qkv(tensor: torch.Tensor, *, groups: int, queries: int, channels: int) -> tuple[torch.Tensor, ...]:
    """Rows [group, (queries, key, value), channels] -> separate q, k, v rows."""
    rows = tensor.view(groups, queries + 2, channels, *tensor.shape[1:])
    q, k, v = rows[:, :queries], rows[:, queries], rows[:, queries + 1]
    return tuple(part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v))


def assert_same_logits_and_gradients(
    ours: GPTModel, theirs: torch.nn.Module, pairs: dict[str, torch.nn.Parameter]
) -> None:
    """`pairs` maps our parameter names to their parameters of the same shape."""
    tokens, labels = tokens_and_labels()
    torch.testing.assert_close(ours(tokens)[..., :VOCAB], theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    ours(tokens, labels).mean().backward()
    theirs_loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    theirs_loss.backward()
    named = dict(ours.named_parameters())
    for name, parameter in pairs.items():
        gradient = parameter.grad
        assert gradient is not None
        ours_gradient = named[name].grad[: gradient.shape[0]]
        torch.testing.assert_close(ours_gradient, gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_gpt2_style_gives_the_logits_and_gradients_of_gpt2lmheadmodel():
    config = GPTConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=SEQ, openai_gelu=True, **NO_DROPOUT
    )
    ours = build(config)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    state = {n: p.detach() for n, p in ours.named_parameters()}
    copied = {
        "transformer.wte.weight": state["embedding.word.weight"][:VOCAB],
        "transformer.wpe.weight": state["embedding.position.weight"],
        "transformer.ln_f.weight": state["final_norm.weight"],
        "transformer.ln_f.bias": state["final_norm.bias"],
    }
    for i in range(2):
        for ours_name, name in {
            "attention_norm": "ln_1",
            "mlp_norm": "ln_2",
            "attention.proj": "attn.c_proj",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
        }.items():
            weight = state[f"layers.{i}.{ours_name}.weight"]
            copied[f"transformer.h.{i}.{name}.weight"] = weight.t() if weight.dim() == 2 else weight  # Conv1D
            copied[f"transformer.h.{i}.{name}.bias"] = state[f"layers.{i}.{ours_name}.bias"]
        for kind in ("weight", "bias"):
            qkv = split_qkv(state[f"layers.{i}.attention.qkv.{kind}"], groups=4, queries=1, channels=8)
            joined = torch.cat(qkv)
            copied[f"transformer.h.{i}.attn.c_attn.{kind}"] = joined.t() if kind == "weight" else joined
    missing = theirs.load_state_dict(copied, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]  # tied
    assert not missing.unexpected_keys
    hf = theirs.transformer
    pairs = {
        "embedding.word.weight": hf.wte.weight,
        "embedding.position.weight": hf.wpe.weight,
        "layers.0.attention_norm.weight": hf.h[0].ln_1.weight,
        "layers.1.attention.proj.bias": hf.h[1].attn.c_proj.bias,
        "layers.0.mlp.fc1.bias": hf.h[0].mlp.c_fc.bias,
        "final_norm.bias": hf.ln_f.bias,
    }
    assert_same_logits_and_gradients(ours, theirs, pairs)
    gradient = dict(ours.named_parameters())["layers.0.attention.qkv.weight"].grad
    joined = torch.cat(split_qkv(gradient, groups=4, queries=1, channels=8)).t()
    torch.testing.assert_close(joined, hf.h[0].attn.c_attn.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_llama_style_gives_the_logits_and_gradients_of_llamaforcausallm(groups: int, tied: bool):
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=56,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=groups,
        position_embedding_type="rope",
        rotary_base=500000.0,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=not tied,
        **NO_DROPOUT,
    )
    ours = build(config)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=groups,
            max_position_embeddings=SEQ,
            rope_theta=500000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=tied,
        )
    )
    state = {n: p.detach() for n, p in ours.named_parameters()}
    names = {"embedding.word.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    if not tied:
        names["output.weight"] = "lm_head.weight"
    for i in range(2):
        for ours_name, name in {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "attention.proj": "self_attn.o_proj",
            "mlp.gate": "mlp.gate_proj",
            "mlp.fc1": "mlp.up_proj",
            "mlp.fc2": "mlp.down_proj",
        }.items():
            names[f"layers.{i}.{ours_name}.weight"] = f"model.layers.{i}.{name}.weight"
    copied = {theirs_name: state[ours_name] for ours_name, theirs_name in names.items()}
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        if key in copied:
            copied[key] = copied[key][:VOCAB]
    for i in range(2):
        qkv = split_qkv(state[f"layers.{i}.attention.qkv.weight"], groups=groups, queries=4 // groups, channels=8)
        for part, letter in zip(qkv, "qkv", strict=True):
            copied[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = part
    loaded = theirs.load_state_dict(copied, strict=False)
    assert set(loaded.missing_keys) <= ({"lm_head.weight"} if tied else set())
    assert not loaded.unexpected_keys
    parameters = dict(theirs.named_parameters())
    assert_same_logits_and_gradients(ours, theirs, {ours_name: parameters[name] for ours_name, name in names.items()})
