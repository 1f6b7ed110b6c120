"""Test the choice of attention kernels, and which layers are compiled.

Attention passes no mask to cuDNN, attention inside documents makes no S x S tensors, and layers are compiled where a
compiler exists.
"""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.refusals import not_refused
from helpers.tensor_parallel import SEQ, STYLES, assert_gradients_near, build_gpt, losses_of, packed, step
from helpers.training import GPT2_STYLE
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megazpp.data.loader import on_device
from megazpp.model import attention, backends
from megazpp.model.attention import variable_length
from megazpp.model.backends import compiles_layers, find_document_kernel, mask_reason, missing_compiler, model_backends
from megazpp.model.gpt import GPTModel
from megazpp.model.kv_cache import KVCache
from megazpp.model.layer_parts import DocumentKernel
from megazpp.planner.trace import FORWARD, TraceRecorder

WIDE = {name: dataclasses.replace(style, kv_channels=8) for name, style in STYLES.items()}
A100, H100 = (8, 0), (9, 0)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@torch.no_grad()
def documents_and_generation(gpt: GPTModel) -> list[torch.Tensor]:
    """Run a model on packed documents (attention with a mask), on a prompt (without), and on one more token (with).

    Return the losses of the documents, and the logits of the prompt and of the token.
    """
    cache, tokens = KVCache(len(gpt.layers), 3, SEQ), packed().tokens
    found = [losses_of(gpt, packed()), gpt(tokens[:, :5], cache=cache)]
    cache.add([5, 3, 4])
    return [*found, gpt(tokens[:, 5:6], cache=cache)]


@pytest.mark.parametrize("style", STYLES)
def test_cuda_masks_use_two_kernels_without_grouped_heads(style, monkeypatch):
    """Check how attention calls torch on CUDA; CPU tensors report `is_cuda` here, to select that code.

    With a mask, only the memory-efficient and the math kernel are allowed, and keys and values are repeated for all
    heads. Without a mask torch may choose any kernel.
    """
    gpt, calls, original = build_gpt(STYLES[style]), [], F.scaled_dot_product_attention
    expected, everything = documents_and_generation(gpt), set(_cur_sdpa_kernel_backends())

    def attention(q, k, v, **how: Any) -> torch.Tensor:
        masked, ungrouped = how.get("attn_mask") is not None, q.shape[1] == k.shape[1] == v.shape[1]
        assert ungrouped or not masked
        calls.append((masked, how.get("is_causal", False), set(_cur_sdpa_kernel_backends())))
        return original(q, k, v, **how)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    torch.testing.assert_close(documents_and_generation(gpt), expected, rtol=1e-5, atol=1e-5)
    with_mask = (True, False, {SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH})
    assert calls == [with_mask] * 2 + [(False, True, everything)] * 2 + [with_mask] * 2


# ---- attention inside documents -------------------------------------------------------------------------------------


def one_by_one(
    q, k, v, starts, key_starts, longest, longest_key, *, window_size, enable_gqa=False, scale=None
) -> torch.Tensor:
    """Compute attention inside each document, in place of torch's varlen_attn, which needs CUDA.

    The function also checks the arguments that varlen_attn would get.
    """
    left, right = window_size
    assert right == 0  # a query sees no later tokens (causal attention)
    assert not enable_gqa or "enable_gqa" in attention.VARLEN_ARGUMENTS
    assert starts is key_starts
    assert starts.dtype == torch.int32
    lengths = starts.diff().tolist()
    assert longest == longest_key >= max(lengths)
    documents = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    masks = [torch.ones(length, length, dtype=torch.bool).tril() for length in lengths]
    masks = masks if left < 0 else [mask.triu(-left) for mask in masks]
    found = [
        F.scaled_dot_product_attention(*each, attn_mask=mask, enable_gqa=enable_gqa, scale=scale)
        for each, mask in zip(documents, masks, strict=True)
    ]
    return torch.cat(found, dim=1).transpose(0, 1).contiguous()


@pytest.mark.parametrize(("style", "changes", "times", "arguments"), [
    ("gpt2", {"recompute_granularity": "full"}, 2, ("window_size", "enable_gqa")),
    ("llama", {}, 1, ("window_size", "enable_gqa")),
    ("llama", {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}, 2, ("window_size",)),
    # this kind of selective recomputation does not include attention, so each layer calls the kernel once
    ("gpt2", {"recompute_granularity": "selective"}, 1, ("window_size",)),
])  # fmt: skip
def test_document_kernel_equals_the_mask(style, changes, times, arguments, monkeypatch):
    """Compare attention by the variable-length kernel with attention by a document mask, in fp64.

    The tolerance is 1e-6, because losses are rounded to fp32. torch 2.11 has no enable_gqa; there, keys and values are
    repeated.
    """
    kernel = mock.Mock(side_effect=one_by_one)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", frozenset(arguments))
    config = dataclasses.replace(STYLES[style], **changes)
    (losses, grads), (ours, our_grads) = (
        step(build_gpt(config, document_kernel=each).double(), packed()) for each in (None, variable_length)
    )
    assert kernel.call_count == config.layers * times
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)
    assert_gradients_near(our_grads, grads, 1e-6)


WINDOWS: dict[str, dict[str, Any]] = {
    "all layers": {"window_size": "2,0"},
    "every second layer": {"window_size": "4,0", "window_attn_skip_freq": "2", "attention_multiplier": 0.3},
    "one token": {"window_size": "0,0", "window_attn_skip_freq": "[0,1]"},
}


@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_window_kernel_equals_the_mask(name, in_documents, monkeypatch):
    """Compare attention with a window by the variable-length kernel with attention by a window mask, in fp64.

    The tolerance is 1e-6, because losses are rounded to fp32.
    """
    monkeypatch.setattr(attention, "varlen_attn", one_by_one)
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", frozenset(("window_size", "enable_gqa")))
    config, batch = dataclasses.replace(STYLES["llama"], **WINDOWS[name]), packed()
    batch = batch if in_documents else batch._replace(document_starts=None)
    (losses, grads), (ours, our_grads), (whole, _) = (
        step(build_gpt(each, document_kernel=kernel).double(), batch)
        for each, kernel in ((config, None), (config, variable_length), (STYLES["llama"], None))
    )
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)
    assert_gradients_near(our_grads, grads, 1e-6)
    assert not torch.allclose(losses, whole, rtol=1e-4)


def test_window_longer_than_the_sample_changes_no_bit():
    batch, wide = packed()._replace(document_starts=None), dataclasses.replace(STYLES["llama"], window_size="31,0")
    (losses, grads), (ours, our_grads) = (step(build_gpt(config), batch) for config in (STYLES["llama"], wide))
    assert torch.equal(ours, losses)
    assert all(torch.equal(one, other) for one, other in zip(our_grads.values(), grads.values(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, "15,0"])
@pytest.mark.parametrize("style", WIDE)
def test_document_kernel_equals_the_mask_on_a_gpu(style, window):
    """Compare torch's variable-length kernel with a document mask in bf16 on a GPU.

    The tolerance allows a few bf16 roundings of 2^-8 at different operations.
    """
    config = dataclasses.replace(WIDE[style], max_position_embeddings=128, window_size=window)
    batch = on_device(packed(128), GPU)
    (losses, grads), (ours, our_grads) = (
        step(build_gpt(config, document_kernel=each).to("cuda", torch.bfloat16), batch)
        for each in (None, variable_length)
    )
    torch.testing.assert_close(ours, losses, rtol=2e-2, atol=2e-2)
    assert_gradients_near(our_grads, grads, 5e-2)


def bytes_of_documents(kernel: DocumentKernel | None, seq: int) -> int:
    """Return the peak memory in bytes of forward and backward for three rows of `seq` tokens, traced on meta tensors.

    Even on meta tensors, torch checks the arguments of the document kernel.
    """
    with torch.device("meta"):
        gpt = build_gpt(WIDE["llama"], document_kernel=kernel).bfloat16()
        tokens, starts = torch.zeros(3, seq, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
        with TraceRecorder() as recorder:
            gpt(tokens, tokens, document_starts=starts).sum().backward()
    return recorder.segments[FORWARD, 0].peak


def test_varlen_attention_needs_no_s_by_s_memory():
    assert bytes_of_documents(variable_length, 4096) < 2.01 * bytes_of_documents(variable_length, 2048)
    assert bytes_of_documents(None, 4096) > 3.5 * bytes_of_documents(None, 2048)


@pytest.mark.slow
def test_compiled_layer_takes_documents_in_one_graph():
    with torch.device("meta"):
        gpt = build_gpt(WIDE["llama"], document_kernel=variable_length).bfloat16()
        layer = torch.compile(gpt.layers[0]._run, backend="aot_eager", fullgraph=True)
        x = torch.zeros(SEQ, 3, 24, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.zeros(3, SEQ, dtype=torch.int64)
        for documents in (4, 7, 9):
            starts = torch.zeros(documents + 1, dtype=torch.int32)
            (inputs,) = gpt._attention_inputs(positions, starts, None, None, SEQ).values()
            layer(x, inputs).sum().backward()


def test_unsupported_document_kernels_give_a_reason_and_a_mask(monkeypatch):
    def reason(changes: dict[str, Any], capability: tuple[int, int] | None, dtype: torch.dtype) -> str | None:
        return mask_reason(dataclasses.replace(WIDE["llama"], **changes), capability=capability, dtype=dtype)

    for *given, words in (
        ({}, None, torch.bfloat16, "only NVIDIA GPUs have a kernel for attention inside documents"),
        ({}, (7, 5), torch.float16, "needs compute capability 8.0, not 7.5"),
        ({}, A100, torch.float32, "needs 16-bit inputs, not torch.float32: see --bf16"),
        ({"kv_channels": 12}, A100, torch.bfloat16, "up to 192 channels per head, not 12"),
        ({"kv_channels": 256}, A100, torch.bfloat16, "up to 192 channels per head, not 256"),
        ({"attention_dropout": 0.1}, A100, torch.bfloat16, "not support dropout: --attention-dropout is 0.1"),
    ):
        assert words in reason(*given)
    assert reason({}, A100, torch.bfloat16) is reason({}, H100, torch.float16) is None


def test_cpu_uses_a_mask_and_gpu_the_kernel_and_both_are_listed(monkeypatch):
    monkeypatch.setattr(backends, "capability", {CPU: None, GPU: H100}.get)
    for device, dtype, kernel, name in (
        (CPU, torch.bfloat16, None, "scaled_dot_product_attention"),
        (GPU, torch.bfloat16, variable_length, "varlen_attn"),
        (GPU, torch.float32, None, "scaled_dot_product_attention"),
    ):
        assert find_document_kernel(WIDE["llama"], device, dtype) is kernel
        table = model_backends(WIDE["llama"], device=device, dtype=dtype, documents=True)
        assert table[0][1].split()[1] == name


# ---- which layers torch.compile compiles -----------------------------------------------------------------------------


def test_layers_are_compiled_by_default_on_cuda(monkeypatch):
    def choice(compile_: bool | None, device: str) -> bool:
        return compiles_layers(dataclasses.replace(GPT2_STYLE, compile=compile_), device)[0]

    cases = [(None, "cuda"), (None, "cpu"), (False, "cuda"), (True, "cpu")]
    monkeypatch.setattr(backends, "missing_compiler", lambda device_type: None)
    assert list(itertools.starmap(choice, cases)) == [True, False, False, True]
    monkeypatch.setattr(backends, "missing_compiler", lambda device_type: "there is no Triton")
    rows = model_backends(GPT2_STYLE, device=GPU, dtype=torch.float32, documents=False)
    assert rows[-1] == ("layers", "eager", "cannot be compiled: there is no Triton")
    assert not not_refused(
        [(True, device, "--compile cannot be used: there is no Triton") for device in ("cuda", "cpu")], choice
    )


def test_missing_compiler_is_named(monkeypatch):
    for device, variable, compiler, triton, capability, words in (
        ("cpu", "CXX", "no-such-compiler", True, None, "there is no C++ compiler (no-such-compiler)"),
        ("cpu", "CXX", "ls", True, None, "None"),
        ("cuda", "CC", "ls", None, H100, "there is no Triton"),
        ("cuda", "CC", "ls", True, (6, 1), "Triton needs compute capability 7.0, not 6.1"),
        ("cuda", "CC", "no-such-compiler", True, H100, "the compiler CC=no-such-compiler is not found"),
        ("cuda", "CC", "ls", True, H100, "None"),
    ):
        monkeypatch.setenv(variable, compiler)
        monkeypatch.setattr(backends.importlib.util, "find_spec", mock.Mock(return_value=triton))
        monkeypatch.setattr(backends, "capability", mock.Mock(return_value=capability))
        assert words in str(missing_compiler(device))
