"""Test mixtures of experts: each layout must train like one process that computes every expert for every token."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tiers import chosen, nightly, slow
from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel, Head, MixtureLayer
from megazpp.model.router import Router, biased_routers, update_expert_bias_
from megazpp.optim.clip import global_grad_norm
from megazpp.optim.optimizer import ShardedAdamW
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.tensor_parallel.parameters import partial_parameters, sum_partial_gradients_
from megazpp.topology.cluster import Cluster
from megazpp.training.config import ModelSpec
from megazpp.training.setup import build_model
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.plan import plan_comm

VOCAB, SEQ, BATCH, STEPS = 61, 8, 16, 3
TWO_HOPS = {"zeropp": True, "zero_weight_bits": 16, "zero_gradient_bits": (16, 16), "zero_error_feedback": False}
ROUTERS: dict[str, dict[str, Any]] = {
    "pre-softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "shared": {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "no balance": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
    "some layers": {"moe_layer_freq": "[0,1]", "ffn_hidden_size": 20, "moe_ffn_hidden_size": 12},
}


def model_config(**changes: Any) -> GPTConfig:
    given: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 12,
        "max_position_embeddings": SEQ,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
        "make_vocab_size_divisible_by": 4,
        "compile": False,
        "num_experts": 8,
        "moe_aux_loss_coeff": 0.02,
        "moe_z_loss_coeff": 0.01,
    }
    return GPTConfig(**given | changes)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


# ---- the reference: all experts compute all tokens ----


def every_expert(moe: nn.Module, config: GPTConfig, y: torch.Tensor, *, kept: Any = None, counted: Any = None) -> Any:
    """Compute a mixture-of-experts layer by its definition: all experts compute all tokens, weighted by the router.

    Args:
        moe: layer whose weights are used.
        config: model to which the layer belongs.
        y: [B, S, H] input of the layer: B samples of S tokens, with H channels.
        kept: not used; the layer's `forward` has this argument.
        counted: not used; the layer's `forward` has this argument.

    Returns:
        (output [B, S, H], sum [B] of the router's auxiliary losses for each sequence).
    """
    logits = y @ moe.router.weight.t()
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ranked = logits if moe.router.expert_bias is None else scores + moe.router.expert_bias
    chosen = torch.zeros_like(logits).scatter(-1, ranked.topk(config.moe_router_topk, -1).indices, 1.0)
    # tokens per expert in the step, because the reference computes a complete step in one call
    moe.counts = chosen.sum((0, 1))
    weight = scores * chosen
    if not config.moe_router_pre_softmax:
        weight = weight / weight.sum(-1, keepdim=True)
    weight = weight * (config.moe_router_topk_scaling_factor or 1.0)
    count, inner, out = config.num_experts, config.expert_ffn_size, torch.zeros_like(y)
    for i in range(count):
        gate, fc1, fc2 = (p[i * inner : (i + 1) * inner] for p in (moe.experts.gate, moe.experts.fc1, moe.experts.fc2))
        out = out + weight[..., i : i + 1] * ((F.silu(y @ gate.t()) * (y @ fc1.t())) @ fc2)
    if moe.shared is not None:
        gate, fc1, fc2 = moe.shared.gate.weight, moe.shared.fc1.weight, moe.shared.fc2.weight
        shared = (F.silu(y @ gate.t()) * (y @ fc1.t())) @ fc2.t()
        out = out + shared * (y @ moe.shared_gate.weight.t()).sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    balance = count * (chosen.mean(0) / config.moe_router_topk * shares.mean(0)).sum(-1)
    z = logits.logsumexp(-1).square().mean(0)
    return out, config.moe_aux_loss_coeff * balance + config.moe_z_loss_coeff * z


def both_losses(labels: torch.Tensor) -> Head:
    return lambda model, x, router_loss: (model.token_losses(x, labels)[0], router_loss)


@functools.cache
def reference(config: GPTConfig) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train in one process, where all experts compute all tokens.

    Returns:
        (losses of all steps, gradient norms of all steps, gradients of the first step by name, final weights by name).
    """
    model = GPTModel(config, vocab_size=VOCAB)
    initialize_parameters_(model, seed=7, draw_device=torch.device("cpu"))
    for layer in model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.forward = functools.partial(every_expert, layer.mlp, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    losses, norms, first = [], [], None
    for _ in range(STEPS):
        losses_of_tokens, router_loss = model(batch()[0], head=both_losses(batch()[1]))
        loss = losses_of_tokens.mean() + router_loss.mean()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        first = first or gradients
        losses.append(loss.item())
        norms.append(torch.stack([g.norm() for g in gradients.values()]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
        for layer in model.layers if config.moe_router_enable_expert_bias else ():
            error = layer.mlp.counts.mean() - layer.mlp.counts
            layer.mlp.router.expert_bias += config.moe_router_bias_update_rate * error.sign()
    assert first is not None
    return losses, norms, first, {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}


# ---- training with the package's own code ----


def full(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def build(config: GPTConfig, nodes: int, zero: ZeroConfig, bf16: bool = False, **parallel: Any) -> Any:
    size = torch.distributed.get_world_size()
    degrees = ParallelConfig(**parallel)
    layout = plan_dims(degrees, Cluster(num_nodes=nodes, ranks_per_node=size // nodes), zero_stage=zero.stage)
    dims = ParallelDims(layout, device_type="cpu")
    sequence_parallel, precision = degrees.sequence_parallel, PrecisionConfig(bf16=bf16)
    spec = ModelSpec(
        config=config,
        vocab_size=VOCAB,
        sequence_parallel=sequence_parallel,
        zero=zero,
        wire=plan_comm(zero, layout, precision.param_dtype),
        precision=precision,
        seed=7,
    )
    return *build_model(spec, dims, torch.device("cpu")), dims


def train(config: GPTConfig, nodes: int, zero: dict[str, Any], parallel: dict[str, Any], micro_batches: int = 2) -> Any:
    """Train on ranks that are spread over `nodes` nodes.

    Returns:
        (the results that `reference` returns, bytes that this rank has sent between nodes).
    """
    model, sharding, dims = build(config, nodes, ZeroConfig(**zero), **parallel)
    model.train()
    optimizer = ShardedAdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.1, fused=True, foreach=False
    )
    own, partial = BATCH // dims.data_size, partial_parameters(model)
    mine = slice(dims.data_rank * own, (dims.data_rank + 1) * own)
    parts = list(zip(*(x[mine].chunk(micro_batches) for x in batch()), strict=True))
    losses, norms, first, routers = [], [], None, biased_routers(model)
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for index, part in enumerate(parts):
            sharding.begin_micro_batch(last=index == len(parts) - 1)
            losses_of_tokens, router_loss = model(part[0], head=both_losses(part[1]))
            loss = losses_of_tokens.sum() / (BATCH * SEQ) + router_loss.sum() / BATCH
            loss.backward()
            total += loss.detach().double()
        named = list(model.named_parameters())
        sum_partial_gradients_((p for name, p in named if name in partial), dims.tp)
        losses.append(dims.sum_over_data_(total).item())
        norms.append(global_grad_norm(named, dims.tp, dims.shard).value.item())
        first = first or {name: full(p.grad) for name, p in named}
        with sharding.weight_update():
            optimizer.step()
        optimizer.zero_grad()
        if routers:
            update_expert_bias_(routers, dims.world.all_reduce_, factor=1.0)
        sharding.end_step(1.0, iteration=step + 1)
    sharding.reshard()
    weights = {name: full(x.detach()) for name, x in (*model.named_parameters(), *model.named_buffers())}
    return (losses, norms, first, weights), dims.counter.sent_bytes("cross")


def compare(changes: dict[str, Any], nodes: int, zero: dict[str, Any], parallel: dict[str, Any]) -> int:
    found, crossed = train(model_config(**changes), nodes, zero, parallel)
    changes = {name: value for name, value in changes.items() if not name.startswith("recompute")}
    expected = reference(model_config(**changes))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0.0)
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        for name, value in theirs.items():
            error = (mine[name][: len(value)] - value).norm() / value.norm()
            assert error < 1e-5, f"{name}: {error}"
    return crossed


GRID = {
    f"{nodes} nodes, ep {ep}, tp {tp}{', sequence' if sequence else ''}, {'two hops' if zero else 'ZeRO-3'}": (
        nodes,
        zero,
        {
            "expert_model_parallel_size": ep,
            "tensor_model_parallel_size": tp,
            "sequence_parallel": sequence,
        },
    )
    for nodes, ep, (tp, sequence), zero in [
        *itertools.product((2,), (1, 2), ((1, False), (2, False), (2, True)), ({}, TWO_HOPS)),
        (1, 4, (1, False), {}),
        (1, 4, (2, True), {}),
        (1, 2, (4, True), {}),
    ]
}


SLOW = (
    "2 nodes, ep 2, tp 2, sequence, two hops",
    "1 nodes, ep 4, tp 2, sequence, ZeRO-3",
)


@pytest.mark.parametrize("case", chosen(GRID, "2 nodes, ep 2, tp 1, two hops", slow=SLOW))
def test_layouts_with_experts_train_as_one_process(case):
    """Compare losses, gradient norms, first gradients, and weights after three AdamW steps with one process."""
    ranks(4).run(compare, {}, *case)


@pytest.mark.parametrize("changes", chosen(ROUTERS, slow=("shared",)))
def test_routers_train_as_one_process(changes):
    ranks(4).run(compare, changes, 2, TWO_HOPS, {"expert_model_parallel_size": 2})


BIAS = ROUTERS["expert bias"]
MORE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "context parallel, expert bias": (BIAS, TWO_HOPS, {"context_parallel_size": 2}),
    "stage 1": ({}, {"zero_stage": 1}, {}),
    "recomputation, tp, expert bias": (
        BIAS | {"recompute_granularity": "full"},
        TWO_HOPS,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "expert bias, two copies": (BIAS, {}, {"num_distributed_optimizer_instances": 2}),
}


@pytest.mark.parametrize("case", chosen(MORE))
def test_experts_train_as_one_process_with_other_features(case):
    changes, zero, parallel = case
    ranks(4).run(compare, changes, 2, zero, {"expert_model_parallel_size": 2} | parallel)


@pytest.mark.slow
def test_bytes_between_nodes_do_not_depend_on_expert_parallelism():
    crossed = {ep: ranks(4).run(compare, {}, 2, TWO_HOPS, {"expert_model_parallel_size": ep}) for ep in (1, 2)}
    assert crossed[1] == crossed[2]
    assert min(crossed[1]) > 0


def lossless_and_16_bits(parallel: dict[str, Any]) -> list[tuple[Any, int]]:
    """Train in bf16 twice: with lossless deltas between nodes, and with complete 16-bit weights.

    Returns:
        The results of `train` for each of the two.
    """
    formats: list[dict[str, Any]] = [{"zero_weight_bits": None, "zero_weight_delta": "lossless"}, {}]
    return [train(model_config(), 2, TWO_HOPS | other, {"bf16": True} | parallel) for other in formats]


@pytest.mark.parametrize("ep", [slow(2), nightly(1)])
def test_lossless_deltas_of_experts_train_as_whole_16_bit_weights(ep):
    """Check that lossless deltas and complete 16-bit weights give bit-identical losses, gradients and weights.

    Equal gradients show that the routers choose the same experts as well.
    """
    for (lossless, _), (whole, _) in ranks(4).run(lossless_and_16_bits, {"expert_model_parallel_size": ep}):
        torch.testing.assert_close(lossless, whole, rtol=0.0, atol=0.0)


def noisy_choices(kept: bool) -> list[dict[str, torch.Tensor]]:
    """Train with noise in the router's logits that differs from call to call, with full recomputation and without it.

    Args:
        kept: False to discard the router's choices of the forward, so that the recomputation chooses experts again.

    Returns:
        The final weights by name of each of the two trainings.
    """
    calls = itertools.count()

    def disturbed(self: Router, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + next(calls))
        return logits + 0.02 * torch.randn(logits.shape, generator=generator)

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_ranked", disturbed)
        if not kept:
            patch.setattr(MixtureLayer, "_kept", lambda layer: ())
        for changes in ({"recompute_granularity": "full"}, {}):
            calls = itertools.count()
            config = model_config(**changes)
            results.append(train(config, 2, TWO_HOPS, {"expert_model_parallel_size": 2}, micro_batches=1)[0][3])
    return results


@pytest.mark.slow
def test_recomputation_repeats_the_choices_of_the_forward():
    """Check that weights are bit-identical with and without recomputation, although routers have random noise.

    If the recomputation chose experts anew, other experts would get other numbers of tokens, and torch would raise an
    error.
    """
    for recomputed, plain in ranks(4).run(noisy_choices, True):
        torch.testing.assert_close(recomputed, plain, rtol=0.0, atol=0.0)
    with pytest.raises(AssertionError, match="CheckpointError"):
        ranks(4).run(noisy_choices, False)
