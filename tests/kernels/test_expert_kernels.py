"""Test the kernels of the router and of expert rows: Triton against PyTorch's operations, also for odd sizes."""

import pytest
import torch
from helpers.tiers import slow
from torch import nn

from megazpp.kernels import expert_rows, router
from megazpp.kernels.expert_rows import reference
from megazpp.model.config import GPTConfig
from megazpp.model.router import Kept, Router
from megazpp.parallel.axis import MeshAxis

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(router.TRITON is None, reason="Triton is not installed"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@pytest.mark.parametrize(
    ("tokens", "copies", "experts", "width"), [(1, 1, 1, 8), slow(257, 2, 6, 20), (700, 3, 5, 2100)]
)
def test_rows_of_experts_match_the_reference(tokens, copies, experts, width):
    """Compare Triton kernels that sort, copy and sum expert rows with the PyTorch reference.

    Orders must be equal. The tolerances cover fused multiply-adds, and in `combine_backward` also sums over the width
    of a row in another order.
    """
    generator = torch.Generator().manual_seed(tokens)
    triton = expert_rows.TRITON
    assert triton is not None
    # the last expert is never chosen, so it gets no tokens
    choice = torch.randint(max(experts - 1, 1), (tokens * copies,), generator=generator).to(DEVICE)
    found, expected = (module.sort_rows(choice, experts) for module in (triton, reference))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    # fewer tokens, because Triton's interpreter takes 1 ms and more per row
    tokens = min(tokens, 3 if width > 1000 else 33)
    found = reference.sort_rows(choice[: tokens * copies], experts)
    x, grad = torch.randn(2, tokens, width, generator=generator).to(DEVICE)
    rows = torch.randn(tokens * copies, width, generator=generator).to(DEVICE)
    weight = torch.rand(tokens, copies, generator=generator).to(DEVICE)
    for name, given in {
        "take": (x, found.order, copies),
        "combine": (rows, found.inverse, None, copies),
        "combine ": (rows, found.inverse, weight, copies),
        "combine_backward": (grad, rows, found.order, found.inverse, weight),
    }.items():
        ours, theirs = (getattr(module, name.strip())(*given) for module in (triton, reference))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 if width < 1000 else 1e-3)


KINDS = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    "sigmoid with bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}
LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.05}


@pytest.mark.parametrize(("kind", "experts", "top_k", "losses"), [
    ("softmax of the chosen", 5, 2, LOSSES),
    ("softmax of all", 4, 1, LOSSES),
    ("sigmoid", 7, 3, LOSSES),
    slow("sigmoid with bias", 6, 1, {}),
    ("sigmoid with bias", 6, 4, {"moe_z_loss_coeff": 0.05}),
])  # fmt: skip
def test_fused_router_matches_plain_operations(kind, experts, top_k, losses, monkeypatch):
    """Compare the fused router kernel with plain operations.

    Chosen experts, their weights, losses, totals and gradients must agree. The second of two forwards repeats the first
    one's choice, as a recomputation does. The relative tolerance of 2e-5 covers sums in another order.
    """
    config = GPTConfig(
        num_layers=1, hidden_size=24, num_attention_heads=1, swiglu=True, disable_bias_linear=True,
        num_experts=experts, moe_router_topk=top_k, **KINDS[kind] | losses,
    )  # fmt: skip
    generator, results = torch.Generator().manual_seed(1), []
    layer = Router(config, tp=MeshAxis("tp"), cp=MeshAxis("cp")).to(DEVICE)
    nn.init.normal_(layer.weight, generator=generator if DEVICE == "cpu" else None)
    if layer.expert_bias is not None:
        layer.expert_bias += torch.rand(experts, generator=generator).to(DEVICE)
    x = torch.randn(11, 3, 24, generator=generator).to(DEVICE).requires_grad_()
    above = torch.randn(11 * 3, top_k, generator=generator).to(DEVICE)
    for module in (router.TRITON, None):
        monkeypatch.setattr("megazpp.model.router.find_router", lambda *given, module=module: module)
        kept = Kept()
        for again in (False, True):
            found = layer.train()(x, kept, length=11)
            total = (found.weight * above).sum() + (0 if found.loss is None else found.loss.square().sum())
            grads = torch.autograd.grad(total, [x, layer.weight])
            losses_found = [] if found.loss is None else [found.loss]
            results.append(
                [found.choice, found.weight, *losses_found, *grads, *([] if again else [layer.take_totals()])]
            )
        # the repeated forward, like a recomputation, adds nothing to the router's totals
        assert layer.take_totals() is None
        evaluated = layer.eval()(x, length=11)
        results[-1] += [evaluated.choice, evaluated.weight]
        assert evaluated.loss is None
    half = len(results) // 2
    for ours, theirs in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
