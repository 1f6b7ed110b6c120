"""Mixture of experts in place of an MLP: router, dispatch over expert-parallel ranks, products, combination.

Symbols: S sequence length, B batch size, T tensor-parallel ranks; N tokens of this rank, K experts per token, E experts
per layer; P expert-parallel (ep) ranks with E / P experts each; H hidden size, F width inside an expert; R rows that
a rank receives, where a row is a token's vector for one of its experts.

    x [N, H] --router--> choice [N, K] and weight [N, K]
    rows by expert [N K, H] --all-to-all over ep--> rows by source [R, H] --sort--> rows by expert [R, H]
    --gated MLP of each expert--> [R, H] --the same way back--> [N, K, H] --weighted sum over K--> [N, H]

No token is dropped, because experts have no capacity limit. Tensor parallelism does not split experts. Instead, each tp
rank dispatches a part of the tokens.

The experts of a layer share one parameter [E F, H] per matrix, which concatenates the experts' rows. This parameter is
split over ep as a column-parallel weight is split over tp. The experts of a layer form a separate sharding unit
(FSDP2's parameter group) on the axes `ParallelDims.experts`.

Sources: Switch Transformer (arXiv 2101.03961) for the balance loss, ST-MoE (arXiv 2202.08906) for the z-loss,
DeepSeek-V3 (arXiv 2412.19437) for sigmoid scores, Wang et al. (arXiv 2408.15664) for the expert bias, MegaBlocks (arXiv
2211.15841) for dispatch without dropped tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megazpp.model.config import GPTConfig
from megazpp.model.mlp import MLP
from megazpp.model.norms import Norm
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.host_copy import HostCopy
from megazpp.tensor_parallel.layers import Product
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import enter_region, exchange_rows, leave_region, take_rows


class Routing(NamedTuple):
    """The experts that the router chose for N tokens.

    Attributes:
        choice: [N, K] int64, experts of each token.
        weight: [N, K] fp32, factors by which the experts' outputs are multiplied.
        loss: [B] fp32, this rank's part of the balance loss and z-loss of each sequence, multiplied by their
            coefficients. None in evaluation, or if both coefficients are 0.
    """

    choice: torch.Tensor
    weight: torch.Tensor
    loss: torch.Tensor | None


class Sizes(NamedTuple):
    """Numbers of rows in a dispatch, as Python ints on the host.

    Attributes:
        send: rows that this rank sends to each ep rank, [P].
        receive: rows that this rank receives from each ep rank, [P].
        rows: rows of each expert of this rank, [E / P].
    """

    send: list[int]
    receive: list[int]
    rows: list[int]


class Kept:
    """Decisions of a layer's forward pass, which activation recomputation in the backward pass must repeat.

    Rounding may differ in the recomputation. If a token then chose another expert, the shapes of saved tensors and the
    gradients would change.

    Attributes:
        choice: experts of each token; None before the forward pass.
        sizes: numbers of rows, kept so that the host waits for them only once; None before they are known.
    """

    choice: torch.Tensor | None = None
    sizes: Sizes | None = None


class Routes(NamedTuple):
    """Permutations and sizes that send each row to its expert and back.

    Attributes:
        order: [N K] int64, indices of all choices sorted by expert. Choice i belongs to token i // K.
        inverse: [N K] int64, inverse permutation of `order`.
        received: [P, E / P] int64, rows that each expert of this rank receives from each ep rank.
        sizes: function that returns the numbers of rows. It blocks until they have been copied to the host.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    received: torch.Tensor
    sizes: Callable[[], Sizes]


class Router(nn.Module):
    """Router that chooses K experts for each token: x [S, B, H] -> `Routing`.

    Logits, scores and losses are fp32. In training with the balance loss, the forward pass all-reduces counts [B, E]
    over tp and over cp, because their ranks have parts of a sequence.

    Attributes:
        expert_bias: [E] fp32, added to the scores for the choice only; the factors of the outputs come from the scores.
            `update_expert_bias_` changes it once per optimizer step. None without --moe-router-enable-expert-bias.
        bias_update_rate: change of each element of `expert_bias` per optimizer step.
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
        self._totals: torch.Tensor | None = None
        self._summed: torch.Tensor | None = None

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
            x: [S, B, H], tokens of this rank.
            kept: decisions to repeat in a recomputation, or an empty `Kept` to store them in. None without
                recomputation.
            length: tokens of a complete sequence, over all ranks of tp and cp; [B] if sequences have different numbers
                of counted tokens.
            counted: [S, B] fp32, 1 for tokens that the losses include, 0 for others; None if all tokens count.
        """
        # ---- scores
        logits = F.linear(x.float(), local(self.weight).float())  # [S, B, E]
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)

        # ---- choice
        recomputing = kept is not None and kept.choice is not None
        if recomputing:
            assert kept is not None
            choice = kept.choice
            assert choice is not None
        else:
            choice = self._ranked(scores.detach(), logits.detach()).topk(self.top_k, dim=-1).indices
        if kept is not None:
            kept.choice = choice

        # ---- totals for the metrics, and losses
        shares = scores / scores.sum(dim=-1, keepdim=True) if self.sigmoid else scores
        if self.training and not recomputing and torch.is_grad_enabled():
            self._count(choice, shares.detach(), counted)
        loss = self._loss(logits, shares, choice, length, counted) if self.training else None
        return Routing(choice.flatten(0, 1), self._weight(logits, scores, choice).flatten(0, 1), loss)

    def take_totals(self) -> torch.Tensor | None:
        """Return the sums over the training tokens of this rank since the last call, and reset them.

        Returns:
            [2 E + 2] fp64: how often each expert was chosen [E]; the sum of each expert's normalized scores [E]; the
            number of tokens; the sum of the entropies of the tokens' normalized scores, in nats. None if no training
            tokens were processed.
        """
        totals, self._totals = self._totals, None
        return totals

    def add_summed_totals(self, totals: torch.Tensor) -> None:
        """Add the totals of a step [2 E + 2], already summed over ranks, to those that `take_summed_totals` returns."""
        self._summed = totals if self._summed is None else self._summed + totals

    def take_summed_totals(self) -> torch.Tensor | None:
        """Return the sum of the totals given to `add_summed_totals` since the last call; None if there were none."""
        summed, self._summed = self._summed, None
        return summed

    def _ranked(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the values [S, B, E] whose K largest select the experts.

        With softmax these are the logits, which have the same order. Unlike probabilities, they do not tie at 0 by
        underflow.
        """
        if self.expert_bias is not None:
            return scores + self.expert_bias
        return scores if self.sigmoid else logits

    def _weight(self, logits: torch.Tensor, scores: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Return the factors [S, B, K] by which the outputs of the chosen experts are multiplied."""
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
        """Return this rank's part of each sequence's losses [B], multiplied by their coefficients; None without losses.

        The balance loss of a sequence is E sum_i f_i P_i. f_i is the fraction of choices that select expert i, and P_i
        is the mean normalized score of expert i. f is summed over the ranks that have parts of the sequence, and has no
        gradient. P contains only this rank's tokens, so that the losses of these ranks add up to the complete loss.

        Args:
            logits: [S, B, E] fp32.
            shares: [S, B, E] fp32, normalized scores.
            choice: [S, B, K] int64, chosen experts.
            length: counted tokens of a complete sequence, a number or [B].
            counted: [S, B] fp32, 1 for tokens that the losses include; None if all tokens count.
        """
        loss: torch.Tensor | None = None
        if self.balance_coefficient > 0.0:
            chosen = F.one_hot(choice, self.num_experts)
            if counted is not None:
                chosen, shares = chosen * counted[..., None, None], shares * counted.unsqueeze(-1)
            found = chosen.sum(dim=(0, 2)).float()  # [B, E]
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
        """Add the choices [S, B, K] and the normalized scores [S, B, E] of a forward pass to the totals."""
        factor = torch.ones_like(shares[..., 0]) if counted is None else counted  # [S, B], 0 for uncounted tokens
        factor = factor.double()
        counts = torch.zeros(self.num_experts, dtype=torch.float64, device=choice.device)
        counts.scatter_add_(0, choice.flatten(), factor.unsqueeze(-1).expand_as(choice).flatten())
        sums = (shares.double() * factor.unsqueeze(-1)).sum(dim=(0, 1))
        entropy = -(torch.xlogy(shares, shares).sum(dim=-1).double() * factor).sum()
        found = torch.cat([counts, sums, torch.stack([factor.sum(), entropy])])
        self._totals = found if self._totals is None else self._totals + found


class Experts(nn.Module):
    """The experts of this ep rank: x [N, H] -> [N K, H], where row n K + k is the output of token n's k-th expert.

    This module is a separate sharding unit (FSDP2's parameter group). Collectives on ep: two all-to-alls of rows in the
    forward pass, and two in the backward pass.

    Args:
        config: shape of the model.
        ep: expert-parallel axis.
        grouped: whether one grouped kernel multiplies the rows of all experts (`find_grouped_product` of backends.py).
            It needs no row counts on the host. Otherwise a loop multiplies expert by expert.
        output_std: standard deviation of the initial values of `fc2`.
    """

    gate: nn.Parameter
    fc1: nn.Parameter
    fc2: nn.Parameter

    def __init__(self, config: GPTConfig, *, ep: MeshAxis, grouped: bool, output_std: float) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert config.num_experts % ep.size == 0, f"{config.num_experts} experts over {ep.size} ranks"
        self.ep, self.num_experts, self.inner = ep, config.num_experts // ep.size, config.expert_ffn_size
        self.grouped = grouped
        self.specs = {}
        for name, std in {"gate": config.init_method_std, "fc1": config.init_method_std, "fc2": output_std}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(self.num_experts * self.inner, config.hidden)))
            matrices: dict[str, Any] = {"matrices": (self.inner,) * self.num_experts, "transposed": name == "fc2"}
            self.specs[name] = ParameterSpec(split=0, std=std, expert=True, **matrices)

    def forward(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Send rows to their experts, apply the experts, and send the results back in the order of the tokens.

        The result is a new tensor and not a view, because FSDP2 attaches a backward hook to it.
        """
        order, inverse, received = routes.order, routes.inverse, routes.received
        # ---- send rows to their experts and sort them by expert
        rows = take_rows(x, order, inverse, copies=len(order) // max(len(x), 1))  # [N K, H], by expert
        if self.ep.size > 1:
            sizes = routes.sizes()
            rows = exchange_rows(rows, self.ep, sizes.send, sizes.receive)  # [R, H], by source, then by expert
            experts = torch.arange(self.num_experts, device=x.device).repeat(self.ep.size)
            if has_values(received):
                experts = experts.repeat_interleave(received.flatten(), output_size=len(rows))
            else:
                experts = experts.new_empty(len(rows))
            by_expert = experts.argsort(stable=True)
            by_source = _inverse(by_expert)
            rows = take_rows(rows, by_expert, by_source)
        # ---- apply the experts
        weights = [local(p) for p in (self.gate, self.fc1, self.fc2)]
        if self.grouped and has_values(received):
            gate, fc1, fc2 = (weight.view(self.num_experts, self.inner, -1) for weight in weights)
            rows = _grouped_products(rows, gate, fc1, fc2, received.sum(dim=0))
        else:
            rows = _looped_products(rows, *weights, routes.sizes().rows)
        # ---- send the results back
        if self.ep.size > 1:
            rows = exchange_rows(take_rows(rows, by_source, by_expert), self.ep, sizes.receive, sizes.send)
        return take_rows(rows, inverse, order)


class MoE(nn.Module):
    """Mixture-of-experts layer: [S, B, H] -> [S, B, H], or [S/T, B, H] -> [S/T, B, H] with sequence parallelism.

    Collectives on tp without sequence parallelism: one all-reduce in the forward pass, one in the backward pass. With
    sequence parallelism there are none of these. The router and the shared MLP add their own. Collectives on ep: one
    all-to-all of counts in the forward pass, and the all-to-alls of `Experts`. If ep has several ranks, the host waits
    once per forward pass for the numbers of rows.

    Args:
        config: shape of the model.
        tp: tensor-parallel axis.
        cp: context-parallel axis.
        ep: expert-parallel axis.
        sequence_parallel: whether activations are split along the sequence over tp outside of this layer.
        grouped: whether one grouped kernel applies all experts; see `Experts`.
        output_std: standard deviation of the initial values of output matrices.
        product: matrix product of the shared MLP; None for the default 16-bit product.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: MeshAxis,
        cp: MeshAxis,
        ep: MeshAxis,
        sequence_parallel: bool,
        grouped: bool,
        output_std: float,
        product: Product | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.ep, self.sequence_parallel = tp, ep, sequence_parallel
        self.planned_load = 1.0  # load of this rank's experts, relative to the mean, that --plan assumes
        self.length_factor = cp.size * (tp.size if sequence_parallel else 1)
        self.router = Router(config, tp=tp, cp=cp)
        self.experts = Experts(config, ep=ep, grouped=grouped, output_std=output_std)
        self.shared: MLP | None = None
        self.shared_gate: SharedGate | None = None
        if (inner := config.moe_shared_expert_intermediate_size) is not None:
            linear: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "product": product}
            self.shared = MLP(config, output_std=output_std, inner=inner, **linear)
            self.shared_gate = (
                SharedGate(config, tp=tp, split=sequence_parallel) if config.moe_shared_expert_gate else None
            )

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: Norm,
        kept: Kept | None = None,
        counted: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer to `norm(x)`.

        Args:
            x: [S, B, H], or [S/T, B, H] with sequence parallelism.
            norm: norm before the layer.
            kept: router decisions to repeat in a recomputation, or an empty `Kept` to store them in.
            counted: tokens that the router's losses include, as in `AttentionInputs`; None if all tokens count. Its
                mask has the tokens of all tp ranks.

        Returns:
            the output in the shape of `x`; this rank's part of each sequence's router losses [B] fp32, or None.
        """
        x = norm(x)
        tp, splits = self.tp, self.tp.size > 1 and not self.sequence_parallel

        # ---- select the tokens that this tp rank dispatches; without sequence parallelism every tp rank has all tokens
        whole = enter_region(x, tp, sequence_parallel=False) if splits else x
        parts = whole.tensor_split(tp.size) if splits else [whole]
        mine = parts[tp.rank] if splits else whole

        # ---- route, apply the experts, and combine their outputs
        if counted is None:
            routing = self.router(mine, kept, length=len(whole) * self.length_factor)
        else:
            mask, length = counted
            routing = self.router(mine, kept, length=length, counted=mask.tensor_split(tp.size)[tp.rank])
        routes = plan_routes(
            routing.choice, self.ep, self.experts.num_experts, kept or Kept(), planned_load=self.planned_load
        )
        rows = self.experts(mine.flatten(0, 1), routes).view(*routing.weight.shape, x.shape[-1])  # [N, K, H]
        y = (routing.weight.to(x.dtype).unsqueeze(1) @ rows).view_as(mine)

        # ---- sum over tp, where each rank has zeros for the tokens of other ranks
        if splits:
            before = sum(len(part) for part in parts[: tp.rank])
            y = F.pad(y, (0, 0, 0, 0, before, len(whole) - before - len(mine)))
            y = leave_region(y, tp, sequence_parallel=False)

        # ---- add the shared MLP, which processes every token
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x))
        return y, routing.loss


class SharedGate(nn.Module):
    """Sigmoid gate that scales the output of the shared MLP per token: [S, B, H] -> [S, B, 1].

    Args:
        config: shape of the model.
        tp: tensor-parallel axis.
        split: whether each tp rank has different tokens (sequence parallelism). The weight's gradient on each rank is
            then a partial sum over tp.
    """

    def __init__(self, config: GPTConfig, *, tp: MeshAxis, split: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std, partial=split and tp.size > 1, exact=True)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight)).sigmoid()


def biased_routers(model: nn.Module) -> list[Router]:
    """Return the routers of `model` that have an expert bias."""
    return [module for module in model.modules() if isinstance(module, Router) and module.expert_bias is not None]


@torch.no_grad()
def update_expert_bias_(
    routers: Sequence[Router], sum_over_ranks_: Callable[[torch.Tensor], torch.Tensor], *, factor: torch.Tensor | float
) -> None:
    """Move each expert's bias towards an even load: bias += rate sign(mean over experts of counts - counts).

    The counts are those of all training tokens since the last call, over all ranks. They are integers in fp64, so every
    layout computes the same bias. One all-reduce covers all layers. Megatron-LM has the same rule, but it also applies
    it in a step that is skipped because of an overflow.

    Args:
        routers: routers with a bias. Each has processed training tokens since the last call.
        sum_over_ranks_: function that sums a tensor in place over all ranks and returns it.
        factor: 1 to update; 0 for a skipped step, whose counts are only logged.
    """
    own = [totals for router in routers if (totals := router.take_totals()) is not None]
    totals = sum_over_ranks_(torch.stack(own))  # [layers, 2 E + 2]
    counts = totals[:, : routers[0].num_experts]
    steps = (counts.mean(dim=1, keepdim=True) - counts).sign().float() * (routers[0].bias_update_rate * factor)
    for router, step, of_router in zip(routers, steps, totals, strict=True):
        assert router.expert_bias is not None
        router.expert_bias += step
        router.add_summed_totals(of_router)


def router_metrics(model: nn.Module, sum_over_ranks_: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    """Return metrics of how evenly routers distributed the training tokens since the last call; {} without experts.

    max_expert_load: choices of the busiest expert, divided by the mean over experts; 1 if balanced. The maximum over
        layers. The other metrics are means over layers.
    idle_experts: fraction of the experts that received no tokens.
    router_entropy: mean entropy of the tokens' normalized scores in nats; at most log(number of experts).
    expert_balance: E sum_i f_i P_i over all tokens, with the symbols of `Router._loss`; 1 if balanced.

    Each metric also appears per layer, with the suffix "/layer_N".

    Args:
        model: model whose routers are read. Their sums are reset.
        sum_over_ranks_: function that sums a tensor in place over all ranks and returns it.
    """
    # ---- sum the totals of all routers over ranks; routers with a bias have been summed in each step
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]
    summed = {name: totals for name, router in routers if (totals := router.take_summed_totals()) is not None}
    found = summed or {name: totals for name, router in routers if (totals := router.take_totals()) is not None}
    if not found:
        return {}
    stacked = torch.stack([*found.values()])
    rows = (stacked if summed else sum_over_ranks_(stacked)).tolist()

    # ---- metrics of each layer
    by_layer: dict[str, dict[str, float]] = {}
    for name, (*numbers, tokens, entropy) in zip(found, rows, strict=True):
        experts = len(numbers) // 2
        counts, scores, choices = numbers[:experts], numbers[experts:], sum(numbers[:experts])
        by_layer[name.split(".")[1]] = {
            "max_expert_load": max(counts) * experts / choices,
            "idle_experts": sum(count == 0.0 for count in counts) / experts,
            "router_entropy": entropy / tokens,
            "expert_balance": experts * sum(c * s for c, s in zip(counts, scores, strict=True)) / (choices * tokens),
        }

    # ---- metrics of the model
    names = next(iter(by_layer.values()))
    means = {name: sum(layer[name] for layer in by_layer.values()) / len(by_layer) for name in names}
    means["max_expert_load"] = max(layer["max_expert_load"] for layer in by_layer.values())
    return means | {
        f"{name}/layer_{layer}": value for layer, values in by_layer.items() for name, value in values.items()
    }


def plan_routes(
    choice: torch.Tensor, ep: MeshAxis, num_experts: int, kept: Kept, *, planned_load: float = 1.0
) -> Routes:
    """Compute the routes of all rows, and exchange their counts between ep ranks with one all-to-all.

    Args:
        choice: [N, K] int64, experts of each token.
        ep: expert-parallel axis.
        num_experts: experts per ep rank.
        kept: numbers of rows to reuse in a recomputation. In the forward pass they are stored there.
        planned_load: load of this rank's experts, relative to the mean over experts, if tensors have no values.
    """
    flat = choice.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(ep.size * num_experts, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat)).view(ep.size, num_experts)
    received = ep.all_to_all(counts, of="counts")
    if kept.sizes is None and not has_values(counts):
        kept.sizes = _planned_sizes(len(flat), ep.size, num_experts, planned_load)
    copied = None
    if kept.sizes is None:
        copied = HostCopy(torch.cat([counts.sum(dim=1), received.sum(dim=1), received.sum(dim=0)]))

    def sizes() -> Sizes:
        if kept.sizes is None:
            assert copied is not None
            numbers, ranks = copied.wait(), ep.size
            kept.sizes = Sizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])
        return kept.sizes

    return Routes(order, _inverse(order), received, sizes)


def has_values(x: torch.Tensor) -> bool:
    """Return whether a tensor has values; in `--plan` and `--dry-run`, tensors have only shapes."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def _planned_sizes(rows: int, ranks: int, num_experts: int, load: float) -> Sizes:
    """Return the numbers of rows for `--plan`, where each rank divides `rows` rows over experts as evenly as possible.

    With a load above 1, this rank's experts receive `load` times as many rows as the mean expert, but at most all rows.
    """
    least, more = divmod(rows, ranks * num_experts)
    each = [least + (expert < more) for expert in range(ranks * num_experts)]
    send = [sum(each[rank * num_experts : (rank + 1) * num_experts]) for rank in range(ranks)]
    if load > 1.0 and ranks > 1:
        busy = min(round(load * rows / (ranks * num_experts)), rows // num_experts)  # of one source and one expert
        return Sizes(send, [busy * num_experts] * ranks, [busy * ranks] * num_experts)
    return Sizes(send, send, [least * ranks + more // num_experts] * num_experts)


def _looped_products(
    rows: torch.Tensor, gate: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Apply each expert to its rows: (silu(x gate^T) * (x fc1^T)) fc2.

    The matrices may be packed weights, which support only `split`, `F.linear` and `torch.mm`.

    Args:
        rows: [R, H], sorted by expert.
        gate: [experts F, H].
        fc1: [experts F, H].
        fc2: [experts F, H], the transposed output matrices.
        sizes: number of rows of each expert.
    """
    inner = len(gate) // len(sizes)
    if not has_values(rows) and len(set(sizes)) == 1:  # batched products with the same operations, for --plan
        even = rows.view(len(sizes), -1, rows.shape[-1])
        gate, fc1, fc2 = (weight.view(len(sizes), inner, -1) for weight in (gate, fc1, fc2))
        return ((F.silu(even @ gate.mT) * (even @ fc1.mT)) @ fc2).flatten(0, 1)
    parts = zip(rows.split(sizes), gate.split(inner), fc1.split(inner), fc2.split(inner), strict=True)
    return torch.cat([torch.mm(F.silu(F.linear(part, g)) * F.linear(part, u), d) for part, g, u, d in parts])


def _grouped_products(
    rows: torch.Tensor, gate: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Compute the result of `_looped_products` with torch's grouped matmul; `counts` [experts] are on the device."""
    ends = counts.cumsum(dim=0).int()
    inside = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, fc1.mT, offs=ends)
    return F.grouped_mm(inside, fc2, offs=ends)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse permutation of `order` [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
