"""Test a mixture of experts in one process: grouped matrix products, metrics of expert loads, and rejected flags."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from helpers.refusals import not_refused
from helpers.tensor_parallel import assert_gradients_near, build_gpt, sample
from helpers.training import BIASED_STYLE, MIXTURE_STYLE

from megazpp.kernels.expert_rows import Sorted, sort_rows
from megazpp.model.backends import grouped_product_is_right, loop_reason
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.model.moe import Gating, _looped_products, _products_by_matrix, weighted_sum
from megazpp.model.router import Router, biased_routers, router_metrics, update_expert_bias_
from megazpp.parallel.axis import MeshAxis
from megazpp.run.checks import check_experts
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.topology.cluster import Cluster
from megazpp.topology.plan import plan_layout

SWIGLU = {"swiglu": True, "disable_bias_linear": True}


def test_grouped_products_equal_looped_products_with_idle_experts():
    """Compare grouped matrix products with a loop over experts, of which two get no tokens: output and all gradients.

    The tolerance is 1e-4, because both add fp32 numbers in different orders.
    """
    generator, sizes = torch.Generator().manual_seed(1), [0, 5, 0, 8]
    tensors = [torch.randn(shape, generator=generator) for shape in ((13, 8), *[(4, 16, 8)] * 3)]
    results = []
    ends = torch.tensor(sizes).cumsum(0).int()
    gated = Gating(compiled=False)
    for product, *counts in ((_looped_products, sizes, gated), (_products_by_matrix, ends, gated, {})):
        given = [tensor.clone().requires_grad_() for tensor in tensors]
        rows, *weights = given
        found = product(rows, *(w.flatten(0, 1) for w in weights), *counts)
        results.append([found, *torch.autograd.grad(found.square().sum(), given)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert all(gradient[idle].count_nonzero() == 0 for gradient in results[1][2:] for idle in (0, 2))
    assert grouped_product_is_right(torch.device("cpu"), torch.float32)


def assert_equal_operations(ours: Any, plain: Any, *shapes: tuple[int, ...]) -> None:
    """Compare outputs and gradients of `ours` and `plain` for 5, 7, 1 and 0 rows.

    Sums in another order differ by 1e-6.
    """
    generator = torch.Generator().manual_seed(1)
    for n in (5, 7, 1, 0):
        inputs = [torch.randn((n, *shape), generator=generator).requires_grad_() for shape in shapes]
        found, expected = (function(*inputs) for function in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_weighted_sum_equals_plain_operations():
    def by_expert(weight: torch.Tensor) -> Sorted:
        return sort_rows(torch.arange(weight.numel()).flip(0) % 4, 4)

    def fused_sum(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return weighted_sum(weight, rows.flatten(0, 1), by_expert(weight))

    def plain_sum(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (weight.unsqueeze(-1) * rows.flatten(0, 1)[by_expert(weight).inverse].view_as(rows)).sum(dim=1)

    assert_equal_operations(fused_sum, plain_sum, (3,), (3, 8))


@pytest.mark.slow
def test_compiled_gating_equals_plain_operations(monkeypatch):
    """Compile with the back end "aot_eager", because torch.compile's C++ compiler would take most of the time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert_equal_operations(Gating(compiled=True), Gating(compiled=False), (8,), (8,))


@pytest.mark.gpu
def test_experts_on_a_gpu_match_the_loop_and_do_not_wait():
    """Compare bf16 gradients of grouped products with a loop's gradients; some experts get no tokens.

    torch raises an error if grouped products let the host wait for the GPU.
    """
    config = dataclasses.replace(MIXTURE_STYLE, num_experts=64, moe_ffn_hidden_size=24, kv_channels=8)
    tokens, labels = (tensor.to("cuda") for tensor in sample())
    gradients = []
    for grouped in (True, False):
        gpt = build_gpt(config, grouped=grouped).to("cuda", torch.bfloat16)
        # the first step is not checked, because the host waits while torch loads kernels
        gpt(tokens, labels).mean().backward()
        gpt.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if grouped else "default")
        try:
            gpt(tokens, labels).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gradients.append({name: parameter.grad for name, parameter in gpt.named_parameters()})
    assert_gradients_near(*gradients, 5e-2)


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "reason"),
    [
        (None, torch.bfloat16, {}, "NVIDIA GPUs only"),
        ((8, 0), torch.bfloat16, {}, "needs compute capability 9.0 to be faster, not 8.0"),
        ((9, 0), torch.float16, {}, "is fast in bf16, not in torch.float16"),
        ((9, 0), torch.bfloat16, {"moe_ffn_hidden_size": 20}, "multiples of 8 channels, not 24 and 20"),
        ((9, 0), torch.bfloat16, {"moe_ffn_hidden_size": 16}, None),
    ],
)
def test_loop_over_experts_has_a_reason(capability, dtype, changes, reason):
    """Check the reason for which experts are computed one by one in a loop; None if a grouped product computes them."""
    config = GPTConfig(num_layers=1, hidden_size=24, num_attention_heads=1, num_experts=4, **SWIGLU | changes)
    found = loop_reason(config, capability=capability, dtype=dtype)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_router_metrics_equal_their_formulas():
    """Compare the router's logged loads, entropy and balance with values computed from its weights."""
    model = GPTModel(MIXTURE_STYLE, vocab_size=101)
    initialize_parameters_(model, seed=3, draw_device=torch.device("cpu"))
    router, seen = model.layers[0].mlp.router, []
    router.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    tokens = torch.randint(101, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    for batch in tokens:
        model(batch, batch)
    model.eval()
    model(tokens[0], tokens[0])  # a forward in evaluation adds nothing to the router's totals
    scores = (torch.cat([x.flatten(0, 1) for x in seen[:2]]) @ router.weight.detach().t()).softmax(-1)
    counts = torch.bincount(scores.topk(2, -1).indices.flatten(), minlength=4).double()
    expected = {
        "max_expert_load": counts.max() * 4 / counts.sum(),
        "idle_experts": (counts == 0).double().mean(),
        "router_entropy": -(scores * scores.log()).sum(-1).mean(),
        "expert_balance": 4 * (counts / counts.sum() * scores.double().mean(0)).sum(),
    }
    found = router_metrics(model, lambda sums: sums)
    for name, value in expected.items():
        assert found[name] == found[f"{name}/layer_0"] == pytest.approx(float(value), rel=1e-5)
    assert found["router_entropy"] <= math.log(4)
    assert router_metrics(model, lambda sums: sums) == {}
    model.train()
    model(tokens[0], tokens[0])
    assert router_metrics(model, lambda sums: 0 * sums) == {}  # totals of 0 tokens over all ranks give no metrics


def test_expert_bias_changes_choices_but_not_weights_and_moves_towards_an_even_load():
    """Give expert 0 a bias of 2, more than any sigmoid score, so that every token chooses it.

    The bias changes the choice but not the weights of experts, and each update moves it by the update rate towards an
    even load. An evaluation changes no totals.
    """
    config = dataclasses.replace(BIASED_STYLE, moe_router_bias_update_rate=0.25)
    router = Router(config, tp=MeshAxis("tp"), cp=MeshAxis("cp"))
    initialize_parameters_(router, seed=3, draw_device=torch.device("cpu"))
    router.expert_bias[0] = 2.0
    x = torch.randn(5, 3, config.hidden, generator=torch.Generator().manual_seed(1))
    for training in (False, True, True):
        routing = router.train(training)(x, length=5)
    scores = (x @ router.weight.t()).sigmoid().flatten(0, 1).detach()
    choice = (scores + torch.tensor([2.0, 0.0, 0.0, 0.0])).topk(2, -1).indices
    assert torch.equal(routing.choice, choice)
    weight = scores.gather(1, choice)
    torch.testing.assert_close(routing.weight.detach(), weight / weight.sum(1, keepdim=True))

    # number of tokens of each expert in two training forwards with the same input, hence the factor 2
    counts = 2 * torch.bincount(choice.flatten(), minlength=4)
    expected = torch.tensor([2.0, 0.0, 0.0, 0.0]) + 0.25 * (counts.float().mean() - counts).sign()
    assert biased_routers(router) == [router]
    update_expert_bias_([router], lambda sums: sums, factor=1.0)
    assert torch.equal(router.expert_bias, expected)
    assert torch.equal(router.take_summed_totals()[:4], counts.double())
    router(x, length=5)
    update_expert_bias_([router], lambda sums: sums, factor=0.0)
    assert torch.equal(router.expert_bias, expected)


def test_router_metrics_do_not_sum_the_totals_of_biased_routers_again():
    """Compute the metrics after an update of the expert biases, which has summed the routers' totals over ranks.

    The metrics must use these sums, and not sum the totals again.
    """
    model = GPTModel(BIASED_STYLE, vocab_size=101)
    initialize_parameters_(model, seed=3, draw_device=torch.device("cpu"))
    tokens = torch.randint(101, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    for batch in tokens:
        model(batch, batch)
    update_expert_bias_(biased_routers(model), lambda sums: 2 * sums, factor=1.0)
    assert (
        router_metrics(model, lambda sums: pytest.fail("the totals of biased routers were summed over ranks twice"))[
            "max_expert_load"
        ]
        >= 1.0
    )
    assert router_metrics(model, lambda sums: pytest.fail("summed totals, although no token was counted since")) == {}


def router_losses(model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor) -> torch.Tensor:
    return router_loss


@pytest.mark.parametrize("recompute", [None, "full"])
def test_router_losses_leave_out_uncounted_tokens(recompute):
    """Compare router losses and gradients of padded rows with the same rows alone, without padding.

    Sums in another order differ by 1e-5.
    """
    style = dataclasses.replace(MIXTURE_STYLE, num_layers=2, moe_z_loss_coeff=0.1, recompute_granularity=recompute)
    tokens = torch.randint(101, (3, 9), generator=torch.Generator().manual_seed(2))
    lengths, results = [4, 9, 1], []
    for padded in (True, False):
        model = GPTModel(style, vocab_size=101)
        initialize_parameters_(model, seed=3, draw_device=torch.device("cpu"))
        if padded:
            counted = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
            found = model(tokens, counted=counted, head=router_losses)
        else:
            rows = [row[None, :length] for row, length in zip(tokens, lengths, strict=True)]
            found = torch.cat([model(row, head=router_losses) for row in rows])
        found.square().sum().backward()
        results.append([found.detach(), *(layer.mlp.router.weight.grad for layer in model.layers)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def test_totals_leave_out_uncounted_tokens():
    """Check that padding tokens do not enter the router's totals.

    The totals give the logged loads and the updates of the bias of experts.
    """
    router = Router(MIXTURE_STYLE, tp=MeshAxis("tp"), cp=MeshAxis("cp"))
    initialize_parameters_(router, seed=3, draw_device=torch.device("cpu"))
    x = torch.randn(5, 3, MIXTURE_STYLE.hidden, generator=torch.Generator().manual_seed(1))
    router.train()(x[:2], length=2)
    expected = router.take_totals()
    router(x, length=torch.tensor([2, 2, 2]), counted=torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])[:, None].expand(5, 3))
    torch.testing.assert_close(router.take_totals(), expected)


def test_flags_that_experts_cannot_have_are_refused():
    rows = [
        ({"moe_router_topk": 5}, "--moe-router-topk 5 is more than --num-experts 4"),
        ({"swiglu": False}, "--num-experts 4 needs --swiglu"),
        ({"disable_bias_linear": False}, "--num-experts 4 needs --disable-bias-linear"),
        ({"norm_after_block": True}, "--norm-after-block with --num-experts 4"),
        ({"moe_layer_freq": "0"}, "--moe-layer-freq 0 is neither"),
        ({"moe_layer_freq": "[1]", "num_layers": 2}, "--moe-layer-freq [1] does not have one entry for each"),
        ({"moe_aux_loss_coeff": -1.0}, "--moe-aux-loss-coeff -1.0 is negative"),
        (
            {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
            "--moe-aux-loss-coeff 0.1 needs --moe-router-load-balancing-type seq_aux_loss",
        ),
        ({"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"}, "sigmoid: no softmax"),
        ({"moe_router_bias_update_rate": -1.0}, "--moe-router-bias-update-rate -1.0 is negative"),
    ]
    assert not not_refused(rows, lambda changes: GPTConfig(**{"num_experts": 4} | SWIGLU | changes))


def test_layouts_that_do_not_fit_the_experts_are_refused():
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    rows = [
        ({"ep": 4}, {"num_experts": 6}, "--num-experts 6 is not divisible by --expert-model-parallel-size 4"),
        ({"ep": 2}, {}, "--expert-model-parallel-size 2 needs --num-experts"),
        ({"tp": 8}, {"num_experts": 8}, "--num-experts 8 with --tensor-model-parallel-size 8, more than the 4 ranks"),
        (
            {"num_replica_groups": 2},
            {
                "num_experts": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            },
            "--moe-router-enable-expert-bias with --diloco-steps is not supported",
        ),
        ({"ep": 8}, {"num_experts": 8}, "--expert-model-parallel-size 8 does not divide the 4 ranks of a node"),
    ]

    def check(degrees: dict[str, int], changes: dict[str, int]) -> None:
        layout = plan_layout(cluster, **{"tp": 1, "replicas": 1} | degrees)
        check_experts(GPTConfig(**SWIGLU | changes), layout, zero_stage=3)

    assert not not_refused([(row[:2], row[2]) for row in rows], lambda given: check(*given))
    layout = plan_layout(cluster, tp=2, replicas=4)
    with pytest.raises(ValueError, match="needs --expert-model-parallel-size 2 like"):
        check_experts(GPTConfig(**SWIGLU, num_experts=8), layout, zero_stage=0)
