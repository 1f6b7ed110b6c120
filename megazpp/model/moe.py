"""A mixture of experts in place of the MLP: router, dispatch over expert parallelism, products, combination.

N tokens of this rank, K experts per token, E experts in all, P expert-parallel (ep) ranks with E / P experts each, H
channels, F channels inside an expert, R rows that a rank receives:

    x [N, H] --router--> choice [N, K] and weight [N, K]
    rows by expert [N K, H] --all-to-all over ep--> rows by source [R, H] --sort--> rows by expert [R, H]
    --gated MLP of each expert--> [R, H] --the same way back--> [N, K, H] --weighted sum over K--> [N, H]

No token is dropped, and there is no capacity. Tensor parallelism does not split an expert: each tp rank dispatches a
part of the tokens. Each matrix of all experts of a layer is one parameter [E F, H], the rows of one expert after those
of the other, which is split over ep like a column-parallel weight over tp. Experts are a sharding unit of their own
inside the layer, on the axes `ParallelDims.experts`.

Sources: Switch Transformer (arXiv 2101.03961) for the balance loss, ST-MoE (arXiv 2202.08906) for the z-loss,
DeepSeek-V3 (arXiv 2412.19437) for sigmoid scores, MegaBlocks (arXiv 2211.15841) for dispatch without dropped tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megazpp.model.config import GPTConfig
from megazpp.model.mlp import MLP
from megazpp.model.norms import Norm
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.layers import Product
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import enter_region, exchange_rows, leave_region, take_rows


class Routing(NamedTuple):
    """The router's decision for N tokens.

    Attributes:
        choice: [N, K] int64, the experts of each token.
        weight: [N, K] fp32, the factors of their outputs.
        loss: [B] fp32, this rank's part of each sequence's balance loss and z-loss, times their coefficients; None in
            evaluation, and where both coefficients are 0.
    """

    choice: torch.Tensor
    weight: torch.Tensor
    loss: torch.Tensor | None


class Sizes(NamedTuple):
    """Numbers of rows, on the host.

    Attributes:
        send, receive: to and from each ep rank.
        rows: of each of this rank's experts.
    """

    send: list[int]
    receive: list[int]
    rows: list[int]


class Kept:
    """The decisions of a layer's forward that its recomputation in backward repeats.

    Rounding may differ in a recomputation. A token that then went to another expert would change the shapes of saved
    tensors, and the gradients.

    Attributes:
        choice: the experts of each token; None before the forward.
        sizes: the numbers of rows, so that the host waits for them once.
    """

    choice: torch.Tensor | None = None
    sizes: Sizes | None = None


class Routes(NamedTuple):
    """The way of each row to its expert and back.

    Attributes:
        order: [N K] int64, the choices sorted by expert; choice i belongs to token i // K.
        inverse: [N K] int64, the place of each choice in `order`.
        received: [P, E / P] int64, rows that this rank's experts get from each ep rank.
        sizes: returns the numbers of rows; waits for the device if they have not arrived.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    received: torch.Tensor
    sizes: Callable[[], Sizes]


class LoadTotals(NamedTuple):
    """Sums over the tokens that a router has seen in training, on this rank.

    Attributes:
        counts: [E] fp64, how many choices fell on each expert.
        scores: [E] fp64, the sum of each expert's normalized scores.
        tokens: number of tokens.
        entropy: sum of the entropies of the scores, in nats.
    """

    counts: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    entropy: torch.Tensor


class Router(nn.Module):
    """Choose K experts for each token: x [S, B, H] -> `Routing`.

    Logits, scores and losses are fp32. Collectives on tp and cp: one all-reduce of [B, E] counts on each where the
    balance loss is on, because their ranks have parts of a sequence.
    """

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
        self._totals: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, kept: Kept | None = None, *, length: int) -> Routing:
        """Choose experts.

        Args:
            x: [S, B, H], this rank's tokens.
            kept: decisions to repeat, or to fill in.
            length: tokens of a whole sequence, over all ranks of tp and cp.
        """
        logits = F.linear(x.float(), local(self.weight).float())  # [S, B, E]
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        recomputing = kept is not None and kept.choice is not None
        if recomputing:
            assert kept is not None
            choice = kept.choice
            assert choice is not None
        else:
            choice = self._ranked(scores.detach(), logits.detach()).topk(self.top_k, dim=-1).indices
        if kept is not None:
            kept.choice = choice
        shares = scores / scores.sum(dim=-1, keepdim=True) if self.sigmoid else scores
        if self.training and not recomputing:
            self._count(choice, shares.detach())
        loss = self._loss(logits, shares, choice, length) if self.training else None
        return Routing(choice.flatten(0, 1), self._weight(logits, scores, choice).flatten(0, 1), loss)

    def take_totals(self) -> LoadTotals | None:
        """Return the sums since the last call and start again at zero; None where no token was seen."""
        totals, self._totals = self._totals, None
        if totals is None:
            return None
        counts, scores, rest = totals.split([self.num_experts, self.num_experts, 2])
        return LoadTotals(counts, scores, *rest)

    def _ranked(self, scores: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the numbers whose largest K decide; softmax keeps the order of logits, which have no ties at 0."""
        return scores if self.sigmoid else logits

    def _weight(self, logits: torch.Tensor, scores: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Return the factors [S, B, K] of the chosen experts' outputs."""
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
        self, logits: torch.Tensor, shares: torch.Tensor, choice: torch.Tensor, length: int
    ) -> torch.Tensor | None:
        """Return this rank's part of each sequence's losses [B], times their coefficients.

        The balance of a sequence is E sum_i f_i P_i, with f_i the share of choices that fall on expert i, and P_i its
        mean score. f is summed over the ranks that have parts of the sequence and has no gradient; P stays a part.
        """
        loss: torch.Tensor | None = None
        if self.balance_coefficient > 0.0:
            found = F.one_hot(choice, self.num_experts).sum(dim=(0, 2)).float()  # [B, E]
            for axis in self.sequence_axes:
                found = axis.all_reduce_(found)
            balance = (found * shares.sum(dim=0)).sum(dim=-1) * (self.num_experts / (self.top_k * length * length))
            loss = self.balance_coefficient * balance
        if self.z_coefficient > 0.0:
            z = logits.logsumexp(dim=-1).square().sum(dim=0) * (self.z_coefficient / length)
            loss = z if loss is None else loss + z
        return loss

    @torch.no_grad()
    def _count(self, choice: torch.Tensor, shares: torch.Tensor) -> None:
        counts = torch.zeros(self.num_experts, dtype=torch.float64, device=choice.device)
        counts.scatter_add_(0, choice.flatten(), torch.ones_like(choice, dtype=torch.float64).flatten())
        entropy = -torch.xlogy(shares, shares).sum(dtype=torch.float64)
        tokens = torch.full_like(entropy, shares[..., 0].numel())
        found = torch.cat([counts, shares.sum(dim=(0, 1), dtype=torch.float64), torch.stack([tokens, entropy])])
        self._totals = found if self._totals is None else self._totals + found


class Experts(nn.Module):
    """The experts of this ep rank, a sharding unit of its own: x [N, H] -> [N K, H], the rows of each token's experts.

    Collectives on ep: forward two all-to-alls of rows, backward two.

    Args:
        grouped: compute the products of all experts in one kernel (`find_grouped_product` of backends.py), which needs
            no numbers on the host; False: expert by expert.
        output_std: standard deviation of the initial values of fc2.
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
        """Send the rows to their experts, multiply, and return them token by token.

        The result is a fresh tensor, not a view: FSDP2 hooks it.
        """
        order, inverse, received = routes.order, routes.inverse, routes.received
        # ---- rows to their experts ----
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
        # ---- their products ----
        gate, fc1, fc2 = (local(p).view(self.num_experts, self.inner, -1) for p in (self.gate, self.fc1, self.fc2))
        if self.grouped and has_values(received):
            rows = _grouped_products(rows, gate, fc1, fc2, received.sum(dim=0))
        else:
            rows = _looped_products(rows, gate, fc1, fc2, routes.sizes().rows)
        # ---- and back ----
        if self.ep.size > 1:
            rows = exchange_rows(take_rows(rows, by_source, by_expert), self.ep, sizes.receive, sizes.send)
        return take_rows(rows, inverse, order)


class MoE(nn.Module):
    """A mixture of experts: [S, B, H] -> [S, B, H] ([S/T, B, H] at both ends with sequence parallelism).

    Collectives on tp: without sequence parallelism one region entered and one left, as in the MLP; with it none, but
    those of the router and of the shared MLP. On ep: one all-to-all of counts in the forward, and those of `Experts`.
    Where ep has several ranks the host waits once per forward, for numbers of rows.
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
        self, x: torch.Tensor, *, norm: Norm, kept: Kept | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output for `norm(x)`, and this rank's part of each sequence's router losses [B], or None."""
        x = norm(x)
        tp, splits = self.tp, self.tp.size > 1 and not self.sequence_parallel
        # ---- without sequence parallelism, all tp ranks have all tokens, and each dispatches a part ----
        whole = enter_region(x, tp, sequence_parallel=False) if splits else x
        parts = whole.tensor_split(tp.size) if splits else [whole]
        mine = parts[tp.rank] if splits else whole
        routing = self.router(mine, kept, length=len(whole) * self.length_factor)
        routes = plan_routes(routing.choice, self.ep, self.experts.num_experts, kept or Kept())
        rows = self.experts(mine.flatten(0, 1), routes).view(*routing.weight.shape, x.shape[-1])  # [N, K, H]
        y = (routing.weight.to(x.dtype).unsqueeze(1) @ rows).view_as(mine)
        if splits:  # zeros for the tokens of other ranks, which the sum over tp fills
            before = sum(len(part) for part in parts[: tp.rank])
            y = F.pad(y, (0, 0, 0, 0, before, len(whole) - before - len(mine)))
            y = leave_region(y, tp, sequence_parallel=False)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x))
        return y, routing.loss


class SharedGate(nn.Module):
    """The sigmoid gate of the shared MLP: [S, B, H] -> [S, B, 1].

    Args:
        split: each tp rank has other tokens, so it has a part of the gradient.
    """

    def __init__(self, config: GPTConfig, *, tp: MeshAxis, split: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std, partial=split and tp.size > 1, exact=True)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight)).sigmoid()


def router_metrics(model: nn.Module, sum_over_ranks_: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    """Return how evenly the tokens since the last call were spread over experts; {} without experts.

    max_expert_load: choices of the busiest expert over the mean of all experts; 1 is even. The largest of all layers.
    idle_experts: share of experts that no token was sent to; the mean over layers, as all that follows.
    router_entropy: entropy of a token's scores in nats; at most log(number of experts).
    expert_balance: E sum_i f_i P_i over all tokens (see `Router`); 1 is even.
    The same of each layer has "/layer_N" behind its name.

    Args:
        sum_over_ranks_: sums a tensor in place over all ranks and returns it.
    """
    routers = [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]
    totals = {name: router.take_totals() for name, router in routers}
    found = {name: sums for name, sums in totals.items() if sums is not None}
    if not found:
        return {}
    flat = [torch.cat([sums.counts, sums.scores, sums.tokens[None], sums.entropy[None]]) for sums in found.values()]
    rows = sum_over_ranks_(torch.stack(flat)).tolist()
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
    names = next(iter(by_layer.values()))
    means = {name: sum(layer[name] for layer in by_layer.values()) / len(by_layer) for name in names}
    means["max_expert_load"] = max(layer["max_expert_load"] for layer in by_layer.values())
    return means | {
        f"{name}/layer_{layer}": value for layer, values in by_layer.items() for name, value in values.items()
    }


def plan_routes(choice: torch.Tensor, ep: MeshAxis, num_experts: int, kept: Kept) -> Routes:
    """Plan the way of each row, and tell each ep rank how many it gets; one all-to-all of counts.

    Args:
        choice: [N, K] int64.
        num_experts: experts of each ep rank.
        kept: a recomputation's numbers of rows, or where to keep the forward's.
    """
    flat = choice.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(ep.size * num_experts, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat)).view(ep.size, num_experts)
    received = ep.all_to_all(counts, of="counts")
    if kept.sizes is None and not has_values(counts):
        kept.sizes = _even_sizes(len(flat), ep.size, num_experts)
    read = None if kept.sizes is not None else _host_sizes(counts, received)

    def sizes() -> Sizes:
        if kept.sizes is None:
            assert read is not None
            kept.sizes = read()
        return kept.sizes

    return Routes(order, _inverse(order), received, sizes)


def has_values(x: torch.Tensor) -> bool:
    """Return whether a tensor has values: those of `--plan` and `--dry-run` have shapes only."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def _host_sizes(counts: torch.Tensor, received: torch.Tensor) -> Callable[[], Sizes]:
    """Start to copy the numbers of rows to the host and return a function that waits for them."""
    ranks = len(counts)
    flat, arrived = torch.cat([counts.sum(dim=1), received.sum(dim=1), received.sum(dim=0)]), None
    if flat.is_cuda:
        flat, arrived = flat.to("cpu", non_blocking=True), torch.cuda.Event()
        arrived.record()

    def read() -> Sizes:
        if arrived is not None:
            arrived.synchronize()
        numbers = flat.tolist()
        return Sizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])

    return read


def _even_sizes(rows: int, ranks: int, num_experts: int) -> Sizes:
    """Return the numbers of rows where all experts get as many, as far as `rows` can be divided."""
    least, more = divmod(rows, ranks * num_experts)
    each = [least + (expert < more) for expert in range(ranks * num_experts)]
    send = [sum(each[rank * num_experts : (rank + 1) * num_experts]) for rank in range(ranks)]
    return Sizes(send, send, [least * ranks + more // num_experts] * num_experts)


def _looped_products(
    rows: torch.Tensor, gate: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Return silu(rows gate^T) * (rows fc1^T) times fc2 of each expert's rows: [R, H]; weights [experts, F, H]."""
    if not has_values(rows) and len(set(sizes)) == 1:  # the same operations in one product, for --plan
        even = rows.view(len(sizes), -1, rows.shape[-1])
        return ((F.silu(even @ gate.mT) * (even @ fc1.mT)) @ fc2).flatten(0, 1)
    parts = zip(rows.split(sizes), gate, fc1, fc2, strict=True)
    return torch.cat([(F.silu(part @ g.t()) * (part @ u.t())) @ d for part, g, u, d in parts])


def _grouped_products(
    rows: torch.Tensor, gate: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return what `_looped_products` returns, by torch's grouped product; `counts` [experts] are on the device."""
    ends = counts.cumsum(dim=0).int()
    inside = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, fc1.mT, offs=ends)
    return F.grouped_mm(inside, fc2, offs=ends)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes `order` [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
