"""Test float8 matrix products (--fp8-format): rounding, distance to unquantized results, and rejected settings.

Most tests emulate float8 on a CPU.
"""

import dataclasses
import math
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.refusals import not_refused, table
from helpers.small_run import check
from helpers.tensor_parallel import CPU, STYLES, assert_near, build_gpt, counted, draw, local_gradients, sample
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_on_ranks, train_plain

from megazpp.model import backends, float8
from megazpp.model.backends import capability, find_product
from megazpp.model.config import GPTConfig
from megazpp.model.float8 import Float8Format, float8_product
from megazpp.zero.config import ZeroConfig

pytest.importorskip("torchao")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS: dict[Float8Format, torch.dtype] = {"e4m3": E4M3, "hybrid": E5M2}


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round x to the float8 format `dtype`, and return it in fp32.

    The scale maps the largest element of x to the largest number of the format.
    """
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).float() / scale


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of `one - other`, divided by the norm of `other`."""
    return float((one - other).norm() / other.norm())


# ---- one matrix product ----------------------------------------------------------------------------------------------


def float8_device() -> str:
    found = capability(torch.device("cuda")) if torch.cuda.is_available() else None
    return "cuda" if (found or (0, 0)) >= float8.FLOAT8_CAPABILITY else "cpu"


def products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the unquantized output of a linear layer, and the gradients of x and weight.

    `grad` is the gradient of the output.
    """
    return x @ weight.t() + bias, grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


@pytest.mark.parametrize("fmt", GRADIENTS)
def test_float8_products_equal_products_of_rounded_inputs(fmt):
    """Compare float8 products with fp32 products of inputs that are rounded to float8.

    Both products agree to 1e-5, and on GPUs to 2^-10, because tensor cores keep about 14 bits (DeepSeek-V3, 3.3.2).
    Products of unrounded inputs are a few per cent away: float8 numbers have 4 significant bits, or 3 in e5m2.
    """
    # inputs of 15 rows, of 16 rows, and of 7 columns; GPUs do not support 7 columns, so the CPU emulates that case
    for shape in ((3, 5, 32), (4, 4, 32), (1, 7)):
        device = "cpu" if shape[-1] % 16 else float8_device()
        sizes = [shape, (48, shape[-1]), (48,), (*shape[:-1], 48)]
        x, weight, bias, grad = (draw(n, *size, dtype=torch.float32).to(device) for n, size in enumerate(sizes))
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = float8_product(fmt, emulate=device == "cpu")(*leaves)
        y.backward(grad)
        found = y.detach(), leaves[0].grad, leaves[1].grad
        expected = products(rounded(x, E4M3), rounded(weight, E4M3), bias, rounded(grad, GRADIENTS[fmt]))
        for ours, reference, exact in zip(found, expected, products(x, weight, bias, grad), strict=True):
            near = 1e-5 if device == "cpu" else 2.0**-10 * float(reference.abs().max())
            assert_near((shape, reference.shape), ours, reference, rtol=1e-5, atol=near)
            assert 0.005 < distance(ours, exact) < 0.1, (shape, reference.shape)
        torch.testing.assert_close(leaves[2].grad, grad.flatten(0, -2).sum(dim=0))


def test_frozen_weight_skips_its_product_and_result_is_writable():
    x, weight = draw(0, 2, 8, 32, dtype=torch.float32).requires_grad_(), draw(1, 16, 32, dtype=torch.float32)
    product = float8_product("hybrid", emulate=True)
    counts = []
    for trained in (weight.clone().requires_grad_(), weight):
        x.grad = None
        with mock.patch.object(torch, "mm", wraps=torch.mm) as multiply:
            product(x, trained, None).mul_(2.0).sum().backward()
        torch.testing.assert_close(x.grad, (2.0 * rounded(weight, E4M3).sum(dim=0)).expand_as(x), rtol=1e-5, atol=1e-5)
        assert (trained.grad is None) == (not trained.requires_grad)
        # torch.mm counts double, because torchao's float8 product calls a second torch.mm inside
        counts.append(multiply.call_count // 2)
    assert counts == [3, 2]


@pytest.mark.parametrize(("bad", "emulate"), [(math.nan, True), (math.inf, False)])
def test_nan_and_inf_become_nan_and_zeros_stay_zeros(bad, emulate):
    product = float8_product("hybrid", emulate=emulate)
    x, weight = (draw(seed, 16, 32, dtype=torch.float32).requires_grad_() for seed in (0, 1))
    product(x, weight, None).backward(torch.zeros(16, 16))
    assert not x.grad.any()
    assert not weight.grad.any()
    grad = draw(2, 16, 16, dtype=torch.float32)
    grad[3, 5] = bad
    product(x, weight, None).backward(grad)
    assert x.grad[3].isnan().all()
    assert weight.grad[5].isnan().all()
    assert product(torch.full_like(x, bad), weight, None).isnan().all()


def test_scaled_products_get_operands_that_cuda_supports():
    """Check that operands of torch._scaled_mm follow torch 2.13's rules for CUDA tensors (_meta_registrations.py).

    Sizes, strides and dtypes have rules. The matrix product that sums over 15 rows pads them to 16. torch._scaled_mm
    also runs on CPUs, with fewer rules; its result is compared with the emulation.
    """
    x, weight, grad = draw(0, 3, 5, 32), draw(1, 48, 32), draw(2, 3, 5, 48)
    results, sizes, multiply = [], [], torch._scaled_mm

    def checked(a: torch.Tensor, b: torch.Tensor, **settings: Any) -> torch.Tensor:
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0])
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert {a.dtype, b.dtype} in ({E4M3}, {E4M3, E5M2})
        assert all(settings[name].dtype == torch.float32 for name in ("scale_a", "scale_b"))
        sizes.append((*a.shape, b.shape[1]))
        return multiply(a, b, **settings)

    with mock.patch.object(torch, "_scaled_mm", checked):
        for emulate in (False, True):
            leaves = [tensor.bfloat16().requires_grad_() for tensor in (x, weight)]
            y = float8_product("hybrid", emulate=emulate)(*leaves, None)
            y.backward(grad.bfloat16())
            results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    assert sizes == [(15, 32, 48), (15, 48, 32), (48, 16, 32)]
    torch.testing.assert_close(*results, rtol=2**-7, atol=2**-7)  # the two results may differ by one rounding to bf16


# ---- a whole model with float8 matrix products ------------------------------------------------------------------


def losses_and_gradients(
    model: GPTConfig, fmt: Float8Format | None, sequence_parallel: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, int]]:
    """Run a step of a model with float8 products in format `fmt`, or in fp32 if it is None.

    Return the losses, the gradients by name, and the number of calls of each collective on tp in backward.
    """
    product = None if fmt is None else float8_product(fmt, emulate=True)
    gpt = build_gpt(model, sequence_parallel=sequence_parallel, product=product)
    losses = gpt(*sample())
    _, calls = counted(gpt.tp, losses.sum().backward)
    return losses.detach(), local_gradients(gpt), calls


@pytest.mark.parametrize(
    ("style", "fmt", "sequence_parallel", "calls"),
    [
        slow("gpt2", "e4m3", False, {"all_reduce": 5}),
        # two calls of each collective for each of two layers, and one for the output layer
        ("llama", "hybrid", True, {"reduce_scatter": 5, "all_gather": 5}),
    ],
)
def test_float8_model_is_near_fp32_and_gathers_inputs_once(style, fmt, sequence_parallel, calls):
    """Compare float8 with fp32 on one rank, and float8 on two tp ranks with one rank; count backward's collectives.

    Losses differ little, because initial weights are small. A gradient has the errors of all products of later layers.
    Two ranks scale their slices separately, so their float8 operands are rounded differently from those of one rank.
    """
    (losses, grads, _), (plain, exact, _) = (losses_and_gradients(STYLES[style], f) for f in (fmt, None))
    assert 0.0 < distance(losses, plain) < 2e-3
    for name, grad in exact.items():
        assert 0.0 < distance(grads[name], grad) < 0.2, name
    results = ranks(2).run(losses_and_gradients, STYLES[style], fmt, sequence_parallel)
    for rank, (ours, slices, backward) in enumerate(results):
        assert backward == calls
        assert distance(ours, losses) < 2e-3
        # these two matrices are left out, because their vocabulary padding depends on the tp size
        for name in grads.keys() - {"embedding.word.weight", "output.weight"}:
            part, grad = slices[name], grads[name]
            split = [dim for dim in range(grad.dim()) if part.shape[dim] != grad.shape[dim]]
            assert distance(part, grad.chunk(2, split[0])[rank] if split else grad) < 0.2, name


@pytest.mark.slow
def test_float8_sharded_run_learns_and_recomputes_bit_identically():
    zero = ZeroConfig(zeropp=True)
    case = Case(model=LLAMA_STYLE, float8="hybrid", nodes=2, tp=2, sequence_parallel=True, zero=zero, steps=5)
    recompute = dataclasses.replace(case, model=dataclasses.replace(LLAMA_STYLE, recompute_granularity="full"), steps=2)
    ours, recomputed = (ranks(4).run(train_on_ranks, each)[0]["loss"] for each in (case, recompute))
    plain = train_plain(case)["loss"]
    assert recomputed == ours[:2]
    assert ours != plain
    assert ours == pytest.approx(plain, rel=0.01)
    assert ours[-1] < ours[0] - 0.3


# ---- rejected settings of --fp8-format, and its notes -------------------------------------------------------------

ASKED = "--bf16 --fp8-format hybrid --num-attention-heads 4 --ffn-hidden-size 96"


def noticed(flags: str) -> tuple[str, ...]:
    return check(f"{ASKED} {flags}", ranks_per_node=2, device="cuda").notices


def test_sizes_in_multiples_of_16_pass_with_a_note_on_eager_casts():
    # Layers are compiled on CUDA by default, so neither flag line gives a note.
    assert noticed("--compile") == noticed("--kv-channels 8 --group-query-attention") == ()
    assert noticed("--tensor-model-parallel-size 2 --no-compile") == (
        "--fp8-format hybrid without --compile: each cast to float8 is several passes over memory",
    )


REFUSED = """
--no-bf16 | --fp8-format hybrid needs --bf16,
--no-bf16 --fp16 | --fp8-format hybrid needs --bf16,
--hidden-size 72 | --hidden-size 72: a matrix has 72 rows or columns, not a multiple of 16
--ffn-hidden-size 100 | --ffn-hidden-size 100 over 1 tensor-parallel rank(s): a matrix has 100
--tensor-model-parallel-size 2 --ffn-hidden-size 80 | --ffn-hidden-size 80 over 2 tensor-parallel rank(s): a
--kv-channels 2 | 4 heads of 2 channels over 1 tensor-parallel rank(s): a matrix has 8
--kv-channels 4 --group-query-attention | queries, keys and values of 4 heads in 1 group(s)
--fp8-recipe delayed | --fp8-recipe delayed is not supported, only tensorwise
"""


def test_float8_refuses_unsupported_flags_and_sizes():
    assert not not_refused(table(REFUSED), noticed)


def test_devices_without_float8_are_refused():
    gpu, fp8 = torch.device("cuda", 1), dataclasses.replace(GPT2_STYLE, fp8_format="e4m3")

    def find(device: torch.device, found: tuple[int, int] | None, model: GPTConfig = fp8) -> object:
        with mock.patch.object(backends, "capability", return_value=found):
            return find_product(model, device)

    refused = "--fp8-format e4m3 needs an NVIDIA GPU with compute capability 8.9 or later, but this device is "
    rows = [
        (CPU, None, f"{refused}a CPU"),
        (gpu, (8, 0), f"{refused}NVIDIA A100 (cuda:1)"),
        (gpu, None, f"{refused}NVIDIA A100 (cuda:1)"),  # a compute capability of None means an AMD GPU
    ]
    with mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"):
        assert not not_refused(rows, find)
    assert find(CPU, None, GPT2_STYLE) is None
    assert all(find(gpu, found) for found in ((8, 9), (10, 0)))


def test_missing_torchao_error_says_how_to_install_it():
    with (
        mock.patch.dict(sys.modules, {"torchao.float8.config": None}),
        pytest.raises(ValueError, match=r"^--fp8-format hybrid needs torchao: pip install 'torchao>=0.18'"),
    ):
        float8_product("hybrid", emulate=True)
