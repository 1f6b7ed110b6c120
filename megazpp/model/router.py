"""The router of a mixture of experts: choice of experts, factors of their outputs, router losses, and the expert bias.

Symbols: S sequence length, B batch size; N tokens of this rank, K experts per token, E experts per layer; H hidden
size; P expert-parallel (ep) ranks.

Sources: Switch Transformer (arXiv 2101.03961) for the balance loss, ST-MoE (arXiv 2202.08906) for the z-loss,
DeepSeek-V3 (arXiv 2412.19437) for sigmoid scores, Wang et al. (arXiv 2408.15664) for the expert bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.kernels.router import Routed, RouterSettings, find_router
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local


class Routing(NamedTuple):
    """The experts that a mixture of experts' router has chosen for N tokens, and its losses.

    Attributes:
        choice: [N, K] int64, the K experts of each token.
        weight: [N, K] fp32, factors by which the experts' outputs are multiplied.
        loss: [B] fp32, balance loss plus z-loss of each sequence, multiplied by their coefficients. On each rank it is
            a partial sum over the ranks that share the sequence. None in evaluation, or if both coefficients are 0.
    """

    choice: torch.Tensor
    weight: torch.Tensor
    loss: torch.Tensor | None


class Sizes(NamedTuple):
    """Numbers of rows that a mixture of experts exchanges between ep ranks, as Python ints on the host.

    A row is a token's vector for one of its experts. There are P expert-parallel (ep) ranks with E / P experts each.

    Attributes:
        send: [P] number of rows that this rank sends to each ep rank.
        receive: [P] number of rows that this rank receives from each ep rank.
        rows: [E / P] number of rows that each expert of this rank receives, from all ep ranks together.
    """

    send: list[int]
    receive: list[int]
    rows: list[int]


class Kept:
    """Router decisions of a layer's forward, which activation recomputation in backward must repeat.

    Rounding may differ in the recomputation. If a token then chose another expert, the shapes of saved tensors and the
    gradients would change.

    Attributes:
        choice: [S, B, K] int64, the K experts of each of S tokens in B sequences; None before the forward.
        sizes: numbers of rows that are exchanged, stored so that the host waits for them only once; None before they
            are known.
    """

    choice: torch.Tensor | None = None
    sizes: Sizes | None = None


class Router(nn.Module):
    """Router of a mixture of experts, which chooses K of E experts for each token: x [S, B, H] -> `Routing`.

    S is the sequence length, B the batch size, H the hidden size. Logits, scores and losses are fp32. In training with
    the balance loss, forward all-reduces counts [B, E] over tp and over cp, because their ranks hold different tokens
    of a sequence.

    On CUDA, Triton's kernels in kernels/router compute the same results in few launches. PyTorch's operations are used
    instead in three cases: `forward` gets the argument `counted`; there is a balance loss, and the sequences are split
    over tp or cp ranks; or `find_router` returns None. With the kernels, backward rounds the gradient of the logits to
    the dtype of x before the matrix products with x and with the weight, as all other layers do.

    Args:
        config: config of the model.
        tp: tensor-parallel axis.
        cp: context-parallel axis.

    Attributes:
        expert_bias: [E] fp32, added to the scores for the choice only; the factors of the outputs come from the scores.
            `update_expert_bias_` changes it once per optimizer step. None without --moe-router-enable-expert-bias.
        bias_update_rate: change of each element of `expert_bias` per optimizer step; 0 for a constant bias.
    """

    expert_bias: torch.Tensor | None

    def __init__(self, config: GPTConfig, *, tp: MeshAxis, cp: MeshAxis) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.num_experts, self.top_k = config.num_experts, config.moe_router_topk
        self.sigmoid, self.pre_softmax = config.moe_router_score_function == "sigmoid", config.moe_router_pre_softmax
        self.scaling = config.moe_router_topk_scaling_factor
        balances = config.moe_router_load_balancing_type == "seq_aux_loss"
        self.balance_coefficient = config.moe_aux_loss_coeff if balances else 0.0
        self.z_coefficient = config.moe_z_loss_coeff
        self.sequence_axes = (tp, cp)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std, partial=tp.size > 1, exact=True)}
        self.bias_update_rate = config.moe_router_bias_update_rate
        biased = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if biased else None)
        self._totals: torch.Tensor | None = None  # this rank's sums since the last call of `take_totals`
        self._summed: torch.Tensor | None = None  # sums over all ranks since the last call of `take_summed_totals`

    def forward(
        self,
        x: torch.Tensor,
        kept: Kept | None = None,
        *,
        length: int | torch.Tensor,
        counted: torch.Tensor | None = None,
    ) -> Routing:
        """Choose the experts of each token, and compute the factors of their outputs and the router's losses.

        Args:
            x: [S, B, H], vectors of this rank's S tokens in each of B sequences.
            kept: an empty `Kept` in which a forward stores its decisions, or the filled one, whose decisions a
                recomputation repeats. None without recomputation.
            length: number of tokens of a complete sequence, on all tp and cp ranks together. With `counted` a tensor
                [B] instead: the number of tokens of each complete sequence that the losses include.
            counted: [S, B] fp32, 1 for tokens that the losses include, 0 for other tokens; None if all tokens count.
        """
        kept = kept or Kept()
        if counted is None and (kernels := self._kernels(x)) is not None:
            return self._fused(kernels, x, kept, length)
        # ---- logits and scores of all experts for each token, [S, B, E]
        logits = F.linear(x.float(), local(self.weight).float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)

        # ---- choose K experts for each token, or repeat the choice of the forward in a recomputation
        recomputing = kept.choice is not None
        if kept.choice is None:
            kept.choice = self._ranked(scores.detach(), logits.detach()).topk(self.top_k, dim=-1).indices
        choice = kept.choice

        # ---- normalized scores, with which the totals for the metrics and the losses are computed
        shares = scores / scores.sum(dim=-1, keepdim=True) if self.sigmoid else scores
        if counted is not None:
            shares = shares * counted.unsqueeze(-1)
        if self.training and not recomputing and torch.is_grad_enabled():
            self._count(choice, shares.detach(), counted)
        loss = self._loss(logits, shares, choice, length, counted) if self.training else None
        return Routing(choice.flatten(0, 1), self._weight(logits, scores, choice).flatten(0, 1), loss)

    def _kernels(self, x: torch.Tensor) -> ModuleType | None:
        """Return the module with Triton's router kernels for tokens `x`; None if PyTorch's operations must be used.

        The kernels cannot sum the counts of a balance loss over tp or cp ranks. `find_router` documents the other cases
        in which the result is None.
        """
        splits = any(axis.size > 1 for axis in self.sequence_axes)
        return None if splits and self.balance_coefficient > 0.0 else find_router(x, self.num_experts)

    def _fused(self, kernels: ModuleType, x: torch.Tensor, kept: Kept, length: int | torch.Tensor) -> Routing:
        """Compute the result of `forward` by Triton's kernels, which support only an integer `length`.

        Args:
            kernels: module with the kernels, from `_kernels`.
            x: [S, B, H], vectors of this rank's S tokens in each of B sequences.
            kept: object in which a forward stores its decisions, or whose decisions a recomputation repeats.
            length: number of tokens of a complete sequence.
        """
        assert isinstance(length, int)
        totals: torch.Tensor | None = None
        if self.training and kept.choice is None and torch.is_grad_enabled():
            if self._totals is None:
                self._totals = torch.zeros(2 * self.num_experts + 2, dtype=torch.float64, device=x.device)
            totals = self._totals
        # The kernels compute the losses from sums over tokens, where `_loss` has means. The coefficients therefore
        # include the divisors of these means.
        settings = RouterSettings(
            batch=x.shape[1],
            top_k=self.top_k,
            sigmoid=self.sigmoid,
            pre_softmax=self.pre_softmax,
            scaling=1.0 if self.scaling is None else self.scaling,
            balance=self.balance_coefficient * self.num_experts / (self.top_k * length * length),
            z=self.z_coefficient / length,
        )
        choice = None if kept.choice is None else kept.choice.flatten(0, 1)
        found = _FusedRouter.apply(
            x.flatten(0, 1), local(self.weight), self.expert_bias, choice, totals, settings, kernels
        )
        weight, loss, choice = found
        if kept.choice is None:
            kept.choice = choice.view(*x.shape[:2], -1)
        has_loss = self.training and (self.balance_coefficient > 0.0 or self.z_coefficient > 0.0)
        return Routing(choice, weight, loss if has_loss else None)

    def take_totals(self) -> torch.Tensor | None:
        """Return this router's sums over the training tokens of this rank since the last call, and reset them.

        Returns:
            [2 E + 2] fp64 for E experts: how often each expert was chosen [E]; the sum of each expert's normalized
            scores [E]; the number of tokens; and the sum of the entropies of the tokens' normalized scores, in nats.
            None if this router has processed no training tokens.
        """
        totals, self._totals = self._totals, None
        return totals

    def add_summed_totals(self, totals: torch.Tensor) -> None:
        """Add this router's totals of a training step, summed over ranks, to its sum for the metrics.

        The totals have the form of the result of `take_totals`: [2 E + 2] for E experts. `update_expert_bias_` calls
        this method in each training step, because it takes the totals of every single step by `take_totals`, which
        resets them. The metrics need the sum over all steps since the last log line, which this method adds up.
        """
        self._summed = totals if self._summed is None else self._summed + totals

    def take_summed_totals(self) -> torch.Tensor | None:
        """Return this router's totals over ranks and over training steps since the last call, and reset them.

        The totals have the form of the result of `take_totals`; `add_summed_totals` has collected them. The result is
        None if `add_summed_totals` was not called since the last call, as for routers without an expert bias.
        """
        summed, self._summed = self._summed, None
        return summed

    def _ranked(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the values whose K largest select a token's experts: the scores plus the expert bias.

        Arguments and result are [S, B, E] for B sequences of S tokens and E experts. Without a bias, softmax scores are
        replaced by the logits, which have the same order. Unlike probabilities, logits do not tie at 0 by underflow.
        """
        if self.expert_bias is not None:
            return scores + self.expert_bias
        return scores if self.sigmoid else logits

    def _weight(self, logits: torch.Tensor, scores: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Return the factors [S, B, K] fp32 by which the outputs of the chosen experts are multiplied.

        There are B sequences of S tokens; K of E experts are chosen for each token.

        Args:
            logits: [S, B, E] fp32 logits of the router.
            scores: [S, B, E] sigmoids or softmax of the logits.
            choice: [S, B, K] int64, chosen experts.
        """
        if self.sigmoid:
            weight = scores.gather(-1, choice)
            if self.top_k > 1:
                weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        elif self.pre_softmax:
            weight = scores.gather(-1, choice)
        else:
            weight = logits.gather(-1, choice).softmax(dim=-1)
        return weight if self.scaling is None else weight * self.scaling

    def _loss(
        self,
        logits: torch.Tensor,
        shares: torch.Tensor,
        choice: torch.Tensor,
        length: int | torch.Tensor,
        counted: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the router's losses of each sequence [B], multiplied by their coefficients; None without losses.

        The balance loss of a sequence is E sum_i f_i P_i. f_i is the fraction of choices that select expert i, and P_i
        is the mean normalized score of expert i. f is summed over the ranks that share the sequence, and has no
        gradient. P contains only this rank's tokens, so that the losses of these ranks add up to the complete loss.
        There are B sequences with S tokens on this rank; K of E experts are chosen for each token.

        Args:
            logits: [S, B, E] fp32 logits of the router.
            shares: [S, B, E] fp32, normalized scores, 0 for tokens that do not count.
            choice: [S, B, K] int64, chosen experts.
            length: number of counted tokens of a complete sequence, an int or [B].
            counted: [S, B] fp32, 1 for tokens that the losses include; None if all tokens count.
        """
        loss: torch.Tensor | None = None
        if self.balance_coefficient > 0.0:
            chosen = F.one_hot(choice, self.num_experts)
            if counted is not None:
                chosen = chosen * counted[..., None, None]
            found = chosen.sum(dim=(0, 2)).float()  # [B sequences, E experts] how often tokens chose each expert
            for axis in self.sequence_axes:
                found = axis.all_reduce_(found)
            balance = (found * shares.sum(dim=0)).sum(dim=-1) * (self.num_experts / (self.top_k * length * length))
            loss = self.balance_coefficient * balance
        if self.z_coefficient > 0.0:
            squares = logits.logsumexp(dim=-1).square()
            z = (squares if counted is None else squares * counted).sum(dim=0) * (self.z_coefficient / length)
            loss = z if loss is None else loss + z
        return loss

    @torch.no_grad()
    def _count(self, choice: torch.Tensor, shares: torch.Tensor, counted: torch.Tensor | None) -> None:
        """Add a micro-batch to this router's totals: choices and scores by expert, tokens, and entropies.

        There are B sequences with S tokens on this rank; K of E experts are chosen for each token.

        Args:
            choice: [S, B, K] int64, chosen experts.
            shares: [S, B, E] fp32, normalized scores, 0 for tokens that do not count.
            counted: [S, B] fp32, 1 for tokens that count; None if all tokens count.
        """
        counts = torch.zeros(self.num_experts, dtype=torch.float64, device=choice.device)
        chosen = torch.ones_like(choice, dtype=torch.float64)
        tokens = counts.new_full((), shares[..., 0].numel())
        if counted is not None:
            chosen = chosen * counted.unsqueeze(-1)
            tokens = counted.sum(dtype=torch.float64)
        counts.scatter_add_(0, choice.flatten(), chosen.flatten())
        sums = shares.sum(dim=(0, 1), dtype=torch.float64)
        entropy = -torch.xlogy(shares, shares).sum(dtype=torch.float64)  # uncounted tokens have shares 0 and add 0
        found = torch.cat([counts, sums, torch.stack([tokens, entropy])])
        self._totals = found if self._totals is None else self._totals + found


class _FusedRouter(torch.autograd.Function):
    """Autograd function of the router in Triton's kernels.

    It maps the vectors x [N, H] of N tokens and the router's weight [E, H] to factors of outputs [N, K], losses [B] and
    choices [N, K]. K of E experts are chosen for each token, and B is the number of sequences.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        choice: torch.Tensor | None,
        totals: torch.Tensor | None,
        settings: RouterSettings,
        kernels: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # An fp32 result of a 16-bit matrix product keeps the logits in fp32, as in `Router.forward`: products of 16-bit
        # numbers are exact in fp32, and are summed in fp32.
        mixed: dict[str, Any] = {"out_dtype": torch.float32} if x.is_cuda and x.dtype != torch.float32 else {}
        logits = torch.mm(x, weight.to(x.dtype).t(), **mixed)
        routed = kernels.route(logits, bias, choice, totals, settings)
        ctx.save_for_backward(x, weight, logits, *routed)
        ctx.settings, ctx.kernels = settings, kernels
        ctx.mark_non_differentiable(routed.choice)
        ctx.set_materialize_grads(False)  # a gradient of zeros for `choice` would take a kernel launch
        return routed.weight, routed.loss, routed.choice

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight, logits, *routed = ctx.saved_tensors
        of_factors, of_loss = (
            torch.zeros_like(output) if grad is None else grad
            for output, grad in zip((routed[1], routed[3]), grads, strict=False)
        )
        found = ctx.kernels.route_backward(logits, Routed(*routed), of_factors, of_loss, ctx.settings, x.dtype)
        of_x = torch.mm(found, weight.to(x.dtype)) if ctx.needs_input_grad[0] else None
        of_weight = torch.mm(found.t(), x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, *[None] * 5


def biased_routers(model: nn.Module) -> list[Router]:
    """Return the routers of `model` whose expert bias changes with each optimizer step; [] if there are none.

    A bias is constant if its update rate is 0. It is also constant in a frozen model: there the bias is a plain tensor
    instead of a registered buffer (`WeightReader.fill_buffers` in packed_weights/reader.py).
    """
    routers = [module for module in model.modules() if isinstance(module, Router) and module.bias_update_rate > 0.0]
    return [router for router in routers if any(name == "expert_bias" for name, _ in router.named_buffers())]


@torch.no_grad()
def update_expert_bias_(
    routers: Sequence[Router], sum_over_ranks_: Callable[[torch.Tensor], torch.Tensor], *, factor: torch.Tensor | float
) -> None:
    """Change each expert's bias so that the load of experts evens out, once per optimizer step.

    The rule for an expert is bias += rate * sign(mean - count). `count` is the number of tokens that have chosen this
    expert, and `mean` is the mean count of the layer's experts. Counts cover all training tokens since the last call,
    on all ranks. Counts are integers in fp64, so every layout of ranks computes the same bias. One all-reduce covers
    all layers.
    Megatron-LM has the same rule, but also applies it in a step that is skipped because of an overflow.

    Args:
        routers: routers with an expert bias, all of which have processed training tokens since the last call.
        sum_over_ranks_: function that sums a tensor in place over all ranks, and returns it.
        factor: 1 to update the biases; 0 for a skipped step, whose counts are only logged.
    """
    own = [totals for router in routers if (totals := router.take_totals()) is not None]
    totals = sum_over_ranks_(torch.stack(own))  # [layers, 2 E + 2], E experts: see `Router.take_totals`
    counts = totals[:, : routers[0].num_experts]
    steps = (counts.mean(dim=1, keepdim=True) - counts).sign().float() * (routers[0].bias_update_rate * factor)
    for router, step, of_router in zip(routers, steps, totals, strict=True):
        assert router.expert_bias is not None
        router.expert_bias += step
        router.add_summed_totals(of_router)


def router_metrics(model: nn.Module, sum_over_ranks_: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    """Return metrics of how evenly routers distributed the training tokens since the last call; {} without experts.

    max_expert_load: number of tokens that chose the busiest expert, divided by the mean over experts; 1 if balanced.
        The value is the maximum over layers. The other metrics are means over layers.
    idle_experts: fraction of the experts that no token chose.
    router_entropy: mean entropy of the tokens' normalized scores in nats; at most log(number of experts).
    expert_balance: E sum_i f_i P_i over all tokens; 1 if balanced. E is the number of experts, f_i the fraction of
        choices that select expert i, and P_i its mean normalized score.

    Each metric also appears per layer, with the suffix "/layer_N". Layers whose routers have counted no token are left
    out.

    Args:
        model: model whose routers are read. Their totals are reset.
        sum_over_ranks_: function that sums a tensor in place over all ranks, and returns it.
    """
    # ---- get the totals of all routers, and sum them over ranks, unless `update_expert_bias_` has summed them already
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]
    summed = {name: totals for name, router in routers if (totals := router.take_summed_totals()) is not None}
    found = summed or {name: totals for name, router in routers if (totals := router.take_totals()) is not None}
    if not found:
        return {}
    stacked = torch.stack([*found.values()])
    rows = (stacked if summed else sum_over_ranks_(stacked)).tolist()

    # ---- metrics of each layer with experts, by the layer's number
    by_layer: dict[str, dict[str, float]] = {}
    for name, (*numbers, tokens, entropy) in zip(found, rows, strict=True):
        experts = len(numbers) // 2
        counts, scores, choices = numbers[:experts], numbers[experts:], sum(numbers[:experts])
        if not choices:
            continue  # this layer's router has counted no token, so it has no metrics
        by_layer[name.split(".")[1]] = {
            "max_expert_load": max(counts) * experts / choices,
            "idle_experts": sum(count == 0.0 for count in counts) / experts,
            "router_entropy": entropy / tokens,
            "expert_balance": experts * sum(c * s for c, s in zip(counts, scores, strict=True)) / (choices * tokens),
        }

    # ---- metrics of the model: the maximum over layers of max_expert_load, the mean over layers of the other metrics,
    # and each layer's values with the suffix "/layer_N"
    if not by_layer:
        return {}
    names = next(iter(by_layer.values()))
    means = {name: sum(layer[name] for layer in by_layer.values()) / len(by_layer) for name in names}
    means["max_expert_load"] = max(layer["max_expert_load"] for layer in by_layer.values())
    return means | {
        f"{name}/layer_{layer}": value for layer, values in by_layer.items() for name, value in values.items()
    }
