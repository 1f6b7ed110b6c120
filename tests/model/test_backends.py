"""Attention kernels: no mask for cuDNN, documents without anything of S x S; layers compiled where they can be."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers.tensor_parallel import (
    SEQ,
    STYLES,
    VOCAB,
    assert_gradients_near,
    build_gpt,
    local_gradients,
    losses_of,
    packed,
)
from helpers.training import GPT2_STYLE
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megazpp.model.backends as module
from megazpp.data.loader import MicroBatch
from megazpp.model.backends import (
    DocumentKernel,
    compiles_layers,
    find_document_kernel,
    mask_reason,
    missing_compiler,
    model_backends,
    variable_length,
)
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.model.kv_cache import KVCache
from megazpp.parallel.axis import MeshAxis

BATCH = 3
WIDE = {name: dataclasses.replace(style, kv_channels=8) for name, style in STYLES.items()}
A100, H100 = (8, 0), (9, 0)


# ---- what torch is asked --------------------------------------------------------------------


class Call(NamedTuple):
    masked: bool
    causal: bool
    enabled: frozenset[SDPBackend]
    grouped: bool


class Calls(TorchFunctionMode):
    """Every call of torch's attention, with the kernels that it may choose from at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            enabled = frozenset(_cur_sdpa_kernel_backends())
            q, k, v = args[:3]
            grouped = q.shape[1] != k.shape[1] or q.shape[1] != v.shape[1]
            self.seen.append(Call(kwargs.get("attn_mask") is not None, bool(kwargs.get("is_causal")), enabled, grouped))
        return func(*args, **(kwargs or {}))


def generate_two_tokens(model: GPTModel) -> torch.Tensor:
    cache = KVCache(len(model.layers), BATCH, SEQ)
    with torch.no_grad():
        model(packed().tokens[:, :5], cache=cache)
        cache.add([5, 3, 4])
        return model(packed().tokens[:, 5:6], cache=cache)


@pytest.mark.parametrize(
    ("run", "style"), [(lambda model: losses_of(model, packed()), "llama"), (generate_two_tokens, "gpt2")]
)
def test_a_mask_on_cuda_goes_to_two_kernels_and_heads_are_not_grouped(style, run, monkeypatch):
    """A CPU whose tensors say that they are CUDA's: fp32, 1e-5. All kernels are allowed again afterwards."""
    gpt, before = build_gpt(STYLES[style], MeshAxis("tp"), vocab_size=VOCAB), _cur_sdpa_kernel_backends()
    expected = run(gpt)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with Calls() as calls:
        torch.testing.assert_close(run(gpt), expected, rtol=1e-5, atol=1e-5)
    two = {SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
    masked = [call for call in calls.seen if call.masked]
    assert masked == [Call(masked=True, causal=False, enabled=frozenset(two), grouped=False)] * STYLES[style].layers
    for call in calls.seen:
        if not call.masked:  # the prompt of a generation: torch's own choice
            assert call.causal
            assert call.enabled == set(before)
    assert _cur_sdpa_kernel_backends() == before


# ---- documents ------------------------------------------------------------------------------------------------------


class ByLoops:
    """Stands in for torch's varlen_attn: checks what it is given, and computes it one document at a time."""

    def __init__(self, seq: int) -> None:
        self.seq, self.calls = seq, 0

    def __call__(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False
    ) -> torch.Tensor:
        self.calls += 1
        (tokens, heads, channels), groups = query.shape, key.shape[1]
        assert key.shape == value.shape == (tokens, groups, channels)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert enable_gqa is (groups != heads)
        assert window_size == (-1, 0)  # causal
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype == torch.int32
        starts = cu_seq_q.tolist()
        assert (starts[0], starts[-1]) == (0, tokens)
        assert max_q == max_k == self.seq >= max(b - a for a, b in itertools.pairwise(starts))
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
        out = []
        for first, stop in itertools.pairwise(starts):
            q, k, v = (x[first:stop] for x in (query, key, value))
            later = torch.ones(stop - first, stop - first).triu(1).bool()
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(channels)
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v))
        return torch.cat(out)


def stand_in(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(module, "varlen_attn", function)
    monkeypatch.setattr(module, "VARLEN_ARGUMENTS", frozenset(inspect.signature(function).parameters))


RECOMPUTED: dict[str, dict[str, Any]] = {
    "kept": {},
    "full": {"recompute_granularity": "full"},
    "selective": {"recompute_granularity": "selective"},  # of which attention is no part
    "core": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
}


def with_both_kernels(config: GPTConfig, data: MicroBatch, to: Callable[[GPTModel], GPTModel]) -> list[Any]:
    """Losses and gradients of documents with a mask, and by offsets."""
    found = []
    for kernel in (None, variable_length):
        gpt = to(build_gpt(config, MeshAxis("tp"), vocab_size=VOCAB))
        for module_ in (gpt, *(layer.attention for layer in gpt.layers)):
            module_.document_kernel = kernel
        losses = losses_of(gpt, data)
        losses.mean().backward()
        found.append((losses.detach(), local_gradients(gpt)))
    return found


@pytest.mark.parametrize(
    ("style", "recompute"), [("gpt2", "full"), ("llama", "kept"), ("llama", "core"), ("gpt2", "selective")]
)
def test_documents_by_offsets_are_those_of_the_mask(style, recompute, monkeypatch):
    """fp64 up to the losses, which are fp32: 1e-6."""
    by_loops = ByLoops(SEQ)
    stand_in(monkeypatch, by_loops)
    config = dataclasses.replace(STYLES[style], **RECOMPUTED[recompute])
    (losses, grads), (ours, our_grads) = with_both_kernels(config, packed(), lambda gpt: gpt.double())
    assert by_loops.calls == config.layers * (1 if recompute in ("kept", "selective") else 2)
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)
    assert_gradients_near(our_grads, grads, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("style", WIDE)
def test_on_a_gpu_the_kernel_gives_the_losses_and_gradients_of_the_mask(style):
    """bf16: a few roundings of 2^-8 in different places."""
    config = dataclasses.replace(WIDE[style], max_position_embeddings=128)
    found = with_both_kernels(config, packed(128).to("cuda"), lambda gpt: gpt.to("cuda", torch.bfloat16))
    (losses, grads), (ours, our_grads) = found
    torch.testing.assert_close(ours, losses, rtol=2e-2, atol=2e-2)
    assert_gradients_near(our_grads, grads, 5e-2)


def meta_gpt(config: GPTConfig, kernel: DocumentKernel | None) -> GPTModel:
    with torch.device("meta"):
        model = GPTModel(config, vocab_size=VOCAB, tp=MeshAxis("tp"), document_kernel=kernel)
    return model.to(torch.bfloat16)


class MadeShapes(TorchDispatchMode):
    """The shapes of all that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes += [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


def test_with_torchs_kernel_nothing_of_s_by_s_is_made():
    """Shapes only, through torch's own function, whose arguments are checked by it; the mask makes such tensors."""
    seq = 512  # no other size of the model
    for kernel in (variable_length, None):
        gpt = meta_gpt(WIDE["llama"], kernel)
        tokens = torch.zeros(BATCH, seq, dtype=torch.int64, device="meta")
        with MadeShapes() as made:
            gpt(tokens, tokens, document_starts=torch.zeros(9, dtype=torch.int32, device="meta")).sum().backward()
        assert all(parameter.grad is not None for parameter in gpt.parameters())
        square = [shape for shape in made.shapes if shape.count(seq) > 1 or shape.count(BATCH * seq) > 1]
        assert (square == []) == (kernel is not None)


@pytest.mark.slow
def test_a_compiled_layer_takes_documents_in_one_graph():
    gpt = meta_gpt(WIDE["llama"], variable_length)
    layer = torch.compile(gpt.layers[0]._run, backend="aot_eager", fullgraph=True)
    x = torch.zeros(SEQ, BATCH, 24, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for documents in (4, 7, 9):
        starts = torch.zeros(documents + 1, dtype=torch.int32, device="meta")
        positions = torch.zeros(BATCH, SEQ, dtype=torch.int64, device="meta")
        layer(x, gpt._attention_inputs(positions, starts, None, SEQ)).sum().backward()


def test_what_the_kernel_cannot_do_is_said_and_takes_a_mask():
    for changes, capability, dtype, words in (
        ({}, A100, torch.bfloat16, "None"),
        ({}, H100, torch.float16, "None"),
        ({}, None, torch.bfloat16, "only CUDA has a kernel for documents"),
        ({}, (7, 5), torch.float16, "needs compute capability 8.0, not 7.5"),
        ({}, A100, torch.float32, "computes in 16 bit, not in torch.float32: see --bf16"),
        ({"kv_channels": 12}, A100, torch.bfloat16, "up to 192 channels per head, not 12"),
        ({"kv_channels": 256}, A100, torch.bfloat16, "up to 192 channels per head, not 256"),
        ({"attention_dropout": 0.1}, A100, torch.bfloat16, "no dropout: --attention-dropout is 0.1"),
    ):
        config = dataclasses.replace(WIDE["llama"], **changes)
        assert words in str(mask_reason(config, capability=capability, dtype=dtype))


def test_a_torch_whose_function_has_no_groups_repeats_keys_and_values(monkeypatch):
    """Torch 2.11's, and fp64 to 1e-12: the attention, and gradients summed over the heads of a group.

    One that has no window either takes a mask.
    """
    q, k, v = (torch.randn(11, n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 2, 2))
    starts, found, by_loops = torch.tensor([0, 4, 5, 11], dtype=torch.int32), [], ByLoops(11)

    def without_groups(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, window_size: Any
    ) -> torch.Tensor:
        return by_loops(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)

    for function in (by_loops, without_groups):
        stand_in(monkeypatch, function)
        assert mask_reason(WIDE["llama"], capability=H100, dtype=torch.bfloat16) is None
        out = variable_length(q, k, v, starts, 11)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    stand_in(monkeypatch, lambda q, k, v, cu_q, cu_k, max_q, max_k, is_causal: None)
    assert "has no window_size" in str(mask_reason(WIDE["gpt2"], capability=H100, dtype=torch.bfloat16))


def test_a_cpu_takes_a_mask_and_a_gpu_the_kernel_and_the_table_names_both(monkeypatch):
    def chosen(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, str]:
        where = torch.device(device)
        row = model_backends(WIDE["llama"], device=where, dtype=dtype, documents=True)[0]
        return find_document_kernel(WIDE["llama"], where, dtype) is variable_length, row[1].split()[1]

    assert chosen("cpu") == (False, "scaled_dot_product_attention")
    monkeypatch.setattr(module, "capability", lambda device: H100)
    assert chosen("cuda") == (True, "varlen_attn")
    assert chosen("cuda", torch.float32) == (False, "scaled_dot_product_attention")


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_layers_are_compiled_on_cuda_by_default(monkeypatch):
    def choice(compile: bool | None, device: str) -> bool:
        return compiles_layers(dataclasses.replace(GPT2_STYLE, compile=compile), device)[0]

    cases = [(None, "cuda"), (None, "cpu"), (False, "cuda"), (True, "cpu")]
    monkeypatch.setattr(module, "missing_compiler", lambda device_type: None)
    assert [choice(*case) for case in cases] == [True, False, False, True]
    monkeypatch.setattr(module, "missing_compiler", lambda device_type: "there is no Triton")
    rows = model_backends(GPT2_STYLE, device=torch.device("cuda"), dtype=torch.float32, documents=False)
    assert rows[-1] == ("layers", "eager", "cannot be compiled: there is no Triton")
    for device in ("cuda", "cpu"):
        with pytest.raises(ValueError, match=r"^--compile: there is no Triton"):
            choice(True, device)


def test_a_missing_compiler_is_named(monkeypatch):
    for device, name, compiler, triton, capability, words in (
        ("cpu", "CXX", "no-such-compiler", True, None, "there is no C++ compiler (no-such-compiler)"),
        ("cpu", "CXX", "ls", True, None, "None"),
        ("cuda", "CC", "ls", None, H100, "there is no Triton"),
        ("cuda", "CC", "ls", True, (6, 1), "Triton needs compute capability 7.0, not 6.1"),
        ("cuda", "CC", "no-such-compiler", True, H100, "CC=no-such-compiler is not found"),
        ("cuda", "CC", "ls", True, H100, "None"),
    ):
        monkeypatch.setenv(name, compiler)
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name, found=triton: found)
        monkeypatch.setattr(module, "capability", lambda device, found=capability: found)
        assert words in str(missing_compiler(device))
