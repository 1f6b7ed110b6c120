"""Mixture of experts in place of an MLP: dispatch over expert-parallel ranks, matrix products, combination.

The router is in router.py.

Symbols: S sequence length, B batch size, T tensor-parallel ranks; N tokens of this rank, K experts per token, E experts
per layer; P expert-parallel (ep) ranks with E / P experts each; H hidden size, F size of an expert's hidden layer; R
rows that a rank receives, where a row is a token's vector for one of its experts. In shapes, N K is N times K.

    x [N, H] --router--> choice [N, K] and weight [N, K]
    rows by expert [N K, H] --all-to-all over ep--> rows by source [R, H] --sort--> rows by expert [R, H]
    --gated MLP of each expert--> [R, H] --the same way back--> [N K, H] --weighted sum over K--> [N, H]

No token is dropped, because experts have no capacity limit. Tensor parallelism does not split experts. Instead, each tp
rank dispatches another slice of the tokens.

The experts of a layer share one parameter [E F, H] per matrix, which concatenates the experts' rows. This parameter is
split over ep as a column-parallel weight is split over tp. The experts of a layer form a separate sharding unit
(FSDP2's parameter group) on the axes `ParallelDims.experts`.

Source: MegaBlocks (arXiv 2211.15841) for dispatch without dropped tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megazpp.kernels import expert_rows
from megazpp.kernels.expert_rows import Sorted, sort_rows
from megazpp.model.config import GPTConfig
from megazpp.model.layer_parts import MLP, LayerSettings, compile_layer, gated, mark_varying
from megazpp.model.router import Kept, Router, Sizes
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import HostCopy
from megazpp.tensor_parallel.layers import Adapter
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import enter_region, exchange_rows, leave_region, take_rows


class Routes(NamedTuple):
    """Permutations and sizes with which a mixture of experts sends each row to its expert and back.

    A row is a token's vector for one of its experts. There are N tokens on this rank, K experts per token, and P
    expert-parallel (ep) ranks with E / P experts each.

    Attributes:
        rows: permutation that sorts this rank's N K choices by expert, and its inverse. Choice i is a choice of token
            i // K.
        received: [P, E / P] int64, number of rows that each expert of this rank receives from each ep rank.
        sizes: function that returns the numbers of rows to exchange. It blocks until these numbers are on the host.
    """

    rows: Sorted
    received: torch.Tensor
    sizes: Callable[[], Sizes]


class Experts(nn.Module):
    """The experts of this ep rank: x [N, H] -> [N K, H], where row i is the output for choice `routes.rows.order[i]`.

    N is the number of this rank's tokens, K the number of experts per token, H the hidden size. Choice c is a choice of
    token c // K. This module is a separate sharding unit (FSDP2's parameter group). Collectives on ep: two all-to-alls
    of rows in the forward pass, and two in the backward pass.

    Args:
        config: config of the model.
        settings: mesh axes and implementations that all layers share. With `grouped`, one kernel multiplies the
            matrices of all experts, and needs no row counts on the host. Otherwise a loop multiplies expert by expert.
        output_std: standard deviation of the initial weights of the output matrices `fc2`.
    """

    gate: nn.Parameter
    fc1: nn.Parameter
    fc2: nn.Parameter

    def __init__(self, config: GPTConfig, settings: LayerSettings, *, output_std: float) -> None:
        super().__init__()
        ep = settings.ep
        assert config.num_experts is not None
        assert config.num_experts % ep.size == 0, f"{config.num_experts} experts cannot be split over {ep.size} ranks"
        self.ep, self.num_experts, self.inner = ep, config.num_experts // ep.size, config.expert_ffn_size
        self.grouped, self.gated = settings.grouped, Gating(compiled=bool(settings.compiled))
        self.adapter = nn.ModuleDict()  # LoRA adapters, by the name of the matrix that they adapt: gate, fc1 or fc2
        self.specs = {}
        for name, std in {"gate": config.init_method_std, "fc1": config.init_method_std, "fc2": output_std}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(self.num_experts * self.inner, config.hidden)))
            matrices: dict[str, Any] = {"matrices": (self.inner,) * self.num_experts, "transposed": name == "fc2"}
            self.specs[name] = ParameterSpec(split=0, std=std, expert=True, **matrices)

    def forward(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Send rows to their experts, apply the experts, and send the results back.

        Args:
            x: [N, H] vectors of this rank's tokens.
            routes: permutations and sizes from `plan_routes`.

        Returns:
            [N K, H] outputs of the K experts of each token, in the order of `routes.rows`. The result is a new tensor
            and not a view, because FSDP2 attaches a backward hook to it.
        """
        sent, received = routes.rows, routes.received
        # ---- copy each of the N tokens once for each of its K experts, into rows [N K, H] sorted by expert, and send
        # the rows to the ranks of their experts
        rows = take_rows(x, sent.order, sent.inverse, copies=len(sent.order) // max(len(x), 1))
        by_expert = sent
        if self.ep.size > 1:
            sizes = routes.sizes()
            # The received rows [R, H] are sorted by source rank, then by expert. Sort them by expert.
            rows = exchange_rows(rows, self.ep, sizes.send, sizes.receive)
            experts = torch.arange(self.num_experts, device=x.device).repeat(self.ep.size)
            if has_values(received):
                experts = experts.repeat_interleave(received.flatten(), output_size=len(rows))
            else:
                experts = experts.new_empty(len(rows))
            by_expert = sort_rows(experts, self.num_experts)
            rows = take_rows(rows, by_expert.order, by_expert.inverse)
        # ---- apply each expert, and its LoRA adapters if there are any, to its rows
        gate, fc1, fc2 = (local(p) for p in (self.gate, self.fc1, self.fc2))
        adapters = {name: each for name, each in self.adapter.items() if isinstance(each, ExpertAdapter) and each.adds}
        grouped = self.grouped and has_values(received)
        if adapters or grouped:
            sizes_or_ends = by_expert.ends if grouped else routes.sizes().rows
            rows = _products_by_matrix(rows, gate, fc1, fc2, sizes_or_ends, self.gated, adapters)
        else:
            rows = _looped_products(rows, gate, fc1, fc2, routes.sizes().rows, self.gated)
        # ---- send the experts' outputs back to the ranks of the tokens
        if self.ep.size > 1:
            rows = take_rows(rows, by_expert.inverse, by_expert.order)
            rows = exchange_rows(rows, self.ep, sizes.receive, sizes.send)
        return rows


class MoE(nn.Module):
    """Mixture of experts of a layer: [S, B, H] -> [S, B, H], or [S/T, B, H] -> [S/T, B, H] with sequence parallelism.

    S is the sequence length, B the batch size, H the hidden size, T the number of tp ranks.

    Collectives on tp without sequence parallelism: one all-reduce in the forward pass, one in the backward pass. With
    sequence parallelism there are none of these. The router and the shared MLP have further collectives. Collectives on
    ep: one all-to-all of row counts in the forward pass, and the all-to-alls of `Experts`. If ep has several ranks, the
    host waits once per forward pass for the numbers of rows.

    Args:
        config: config of the model.
        settings: mesh axes and implementations that all layers share.
        output_std: standard deviation of the initial weights of output matrices.
    """

    def __init__(self, config: GPTConfig, settings: LayerSettings, *, output_std: float) -> None:
        super().__init__()
        tp, self.sequence_parallel = settings.tp, settings.sequence_parallel
        self.tp, self.ep = tp, settings.ep
        # The load that --plan assumes: mean number of rows per expert of this rank, divided by the mean over all
        # experts of the layer.
        self.planned_load = 1.0
        # Length of a complete sequence, divided by the number of its tokens in the input of `forward` on this rank
        self.length_factor = settings.cp.size * (tp.size if self.sequence_parallel else 1)
        self.router = Router(config, tp=tp, cp=settings.cp)
        self.experts = Experts(config, settings, output_std=output_std)
        self.shared: MLP | None = None
        self.shared_gate: SharedGate | None = None
        if (inner := config.moe_shared_expert_intermediate_size) is not None:
            self.shared = MLP(config, settings, output_std=output_std, inner=inner)
            if config.moe_shared_expert_gate:
                self.shared_gate = SharedGate(config, tp=tp, split=self.sequence_parallel)

    def forward(
        self,
        x: torch.Tensor,
        *,
        kept: Kept | None = None,
        counted: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the mixture of experts to the output of a norm.

        Args:
            x: [S, B, H], the output of a norm for B sequences of S tokens with H channels; [S/T, B, H] with sequence
                parallelism over T ranks.
            kept: an empty `Kept` in which a forward stores the router's decisions, or the filled one, whose decisions a
                recomputation repeats. None without recomputation.
            counted: tokens that the router's losses include: ([S, B] fp32 with the tokens of all tp ranks, 1 for such a
                token and 0 for any other; [B] fp32, their number in each complete sequence). None if all tokens count.

        Returns:
            The output in the shape of `x`, and this rank's partial sum of each sequence's router losses, [B] fp32. The
            partial sum is None in evaluation and without router losses.
        """
        tp, splits = self.tp, self.tp.size > 1 and not self.sequence_parallel

        # ---- select the tokens that this tp rank dispatches; without sequence parallelism every tp rank has all tokens
        whole = enter_region(x, tp, sequence_parallel=False) if splits else x
        parts = whole.tensor_split(tp.size) if splits else [whole]
        mine = parts[tp.rank] if splits else whole

        # ---- choose experts for each token, apply the experts, and sum their outputs
        if counted is None:
            routing = self.router(mine, kept, length=len(whole) * self.length_factor)
        else:
            mask, length = counted
            routing = self.router(mine, kept, length=length, counted=mask.tensor_split(tp.size)[tp.rank])
        routes = plan_routes(
            routing.choice, self.ep, self.experts.num_experts, kept or Kept(), planned_load=self.planned_load
        )
        rows = self.experts(mine.flatten(0, 1), routes)  # outputs of K experts for N tokens, [N K, H], sorted by expert
        y = weighted_sum(routing.weight, rows, routes.rows).view_as(mine)

        # ---- combine the outputs of all tp ranks: each rank pads its tokens' outputs with zeros for the tokens of the
        # other ranks, and the sum over ranks has the outputs of all tokens
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
    """Sigmoid gate by which the output of a mixture of experts' shared MLP is multiplied: [S, B, H] -> [S, B, 1].

    The shared MLP has the same input: B sequences of S tokens with H channels.

    Args:
        config: config of the model.
        tp: tensor-parallel axis.
        split: True if tp ranks have different tokens (sequence parallelism). The weight's gradient on each rank is then
            a partial sum over tp ranks.
    """

    def __init__(self, config: GPTConfig, *, tp: MeshAxis, split: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden))
        self.specs = {"weight": ParameterSpec(std=config.init_method_std, partial=split and tp.size > 1, exact=True)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight)).sigmoid()


def plan_routes(
    choice: torch.Tensor, ep: MeshAxis, num_experts: int, kept: Kept, *, planned_load: float = 1.0
) -> Routes:
    """Plan how a mixture of experts sends rows to their experts, and exchange row counts in one all-to-all over ep.

    Args:
        choice: [N, K] int64, the K experts of each of this rank's N tokens.
        ep: expert-parallel axis.
        num_experts: number of experts per ep rank.
        kept: object in which a forward stores the numbers of rows, and from which a recomputation takes them.
        planned_load: mean number of rows per expert of this rank, divided by the mean over all experts. Used only by
            --plan, whose tensors have no values.
    """
    rows = sort_rows(choice.flatten(), ep.size * num_experts)
    counts = rows.counts.view(ep.size, num_experts)
    received = ep.all_to_all(counts, of="counts")
    if kept.sizes is None and not has_values(counts):
        kept.sizes = _planned_sizes(choice.numel(), ep.size, num_experts, planned_load)

    def copy() -> HostCopy:
        """Start a copy of the three lists of `Sizes` to the host, one after another in one tensor."""
        return HostCopy(torch.cat([counts.sum(dim=1), received.sum(dim=1), received.sum(dim=0)]))

    # The all-to-all of rows needs the numbers of rows on the host. So with several ep ranks the copy of these numbers
    # starts here, and overlaps with the kernels that are launched before the all-to-all.
    copied = copy() if kept.sizes is None and ep.size > 1 else None

    def sizes() -> Sizes:
        if kept.sizes is None:
            numbers, ranks = (copied or copy()).wait(), ep.size
            kept.sizes = Sizes(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])
        return kept.sizes

    return Routes(rows, received, sizes)


def has_values(x: torch.Tensor) -> bool:
    """Return True if a tensor has values; False for the meta and fake tensors of `--plan`, which have only shapes."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def _planned_sizes(rows: int, ranks: int, num_experts: int, load: float) -> Sizes:
    """Return the numbers of rows that `--plan` assumes for the exchange between expert-parallel ranks.

    Each rank divides its rows over all experts as evenly as possible. With a load above 1 and several ranks, each of
    this rank's experts receives `load` times the mean number of rows per expert. These experts together receive at most
    all rows.

    Args:
        rows: number of rows per rank: tokens times experts per token.
        ranks: number of expert-parallel ranks.
        num_experts: number of experts per rank.
        load: mean number of rows per expert of this rank, divided by the mean over all experts.
    """
    least, more = divmod(rows, ranks * num_experts)
    each = [least + (expert < more) for expert in range(ranks * num_experts)]
    send = [sum(each[rank * num_experts : (rank + 1) * num_experts]) for rank in range(ranks)]
    if load > 1.0 and ranks > 1:
        # `busy` is the number of rows that each rank sends to each expert of this rank. A rank cannot send more than
        # all its rows, which these experts divide evenly.
        busy = min(round(load * rows / (ranks * num_experts)), rows // num_experts)
        return Sizes(send, [busy * num_experts] * ranks, [busy * ranks] * num_experts)
    # Every expert gets `least` rows from each rank. Each rank has `more` further rows, so all ranks together have
    # ranks * more of them. These are more / num_experts rows for each of the ranks * num_experts experts.
    return Sizes(send, send, [least * ranks + more // num_experts] * num_experts)


def _looped_products(
    rows: torch.Tensor,
    gate: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    sizes: list[int],
    gated: Gating,
) -> torch.Tensor:
    """Apply each expert to its rows x in a loop over experts: (silu(x gate^T) * (x fc1^T)) fc2.

    The matrices may be packed weights, which support only `split`, `F.linear` and `torch.mm`. R is the number of rows,
    H the hidden size, and F the size of an expert's hidden layer.

    Args:
        rows: [R, H] rows of all experts of this rank, sorted by expert.
        gate: [experts * F, H] gate matrices of the experts, one below the other.
        fc1: [experts * F, H] up matrices.
        fc2: [experts * F, H] transposed output matrices.
        sizes: number of rows of each expert.
        gated: function that returns silu(gate) * up.

    Returns:
        Outputs of the experts for their rows, [R, H] in the order of `rows`.
    """
    inner = len(gate) // len(sizes)
    if not has_values(rows) and len(set(sizes)) == 1:
        # --plan traces this function with tensors that have no values. Batched matrix products count as many operations
        # as the loop below, in fewer calls.
        even = rows.view(len(sizes), -1, rows.shape[-1])
        gate, fc1, fc2 = (weight.view(len(sizes), inner, -1) for weight in (gate, fc1, fc2))
        return torch.ops.aten._unsafe_view(gated(even @ gate.mT, even @ fc1.mT) @ fc2, rows.shape)
    parts = zip(rows.split(sizes), gate.split(inner), fc1.split(inner), fc2.split(inner), strict=True)
    return torch.cat([torch.mm(gated(F.linear(part, g), F.linear(part, u)), d) for part, g, u, d in parts])


def _products_by_matrix(
    rows: torch.Tensor,
    gate: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    sizes_or_ends: list[int] | torch.Tensor,
    gated: Gating,
    adapters: dict[str, ExpertAdapter],
) -> torch.Tensor:
    """Compute the outputs of this rank's experts, and add the outputs of LoRA adapters.

    Each row is multiplied by the gate and up matrices of its expert, gated, and multiplied by the output matrix. Each
    of these three products is computed for all experts before the next one, by one call of torch's grouped matrix
    product or by a loop over experts. R is the number of rows, H the hidden size, and F the size of an expert's hidden
    layer.

    Args:
        rows: [R, H] rows of all experts of this rank, sorted by expert.
        gate: [experts * F, H] gate matrices.
        fc1: [experts * F, H] up matrices.
        fc2: [experts * F, H] transposed output matrices.
        sizes_or_ends: list of the number of rows of each expert, for a loop over experts; or the cumulative sum of
            these numbers [experts], for torch's grouped matrix product.
        gated: function that returns silu(gate) * up.
        adapters: adapters by the name of the matrix that they adapt, gate, fc1 or fc2; {} for none.
    Returns:
        [R, H] outputs of the experts.
    """

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of each expert by the expert's matrix: x [R, m] and weight [experts, m, n] -> [R, n].

        x has R rows of m elements, sorted by expert. Each row is multiplied by the m x n matrix of its expert.
        """
        if isinstance(sizes_or_ends, torch.Tensor):
            return F.grouped_mm(x, weight, offs=sizes_or_ends)
        return torch.cat([part @ each for part, each in zip(x.split(sizes_or_ends), weight, strict=True)])

    def adapted(x: torch.Tensor, name: str, weight: torch.Tensor) -> torch.Tensor:
        y = multiply(x, weight)
        return y + adapters[name](x, multiply) if name in adapters else y

    gate, fc1, fc2 = (weight.view(len(sizes_or_ends), -1, rows.shape[-1]) for weight in (gate, fc1, fc2))
    inside = gated(adapted(rows, "gate", gate.mT), adapted(rows, "fc1", fc1.mT))
    return adapted(inside, "fc2", fc2)


class ExpertAdapter(Adapter):
    """Base class of LoRA adapters for the experts of a layer; one adapter serves one matrix of all experts.

    `forward` receives the inputs of the matrix, R rows [R, inputs] of all experts, sorted by expert. It also receives
    the function `multiply` of `_products_by_matrix`, which multiplies the rows of each expert by a matrix of this
    expert.
    """


class Gating:
    """Function that returns silu(gate) * up for R rows of a mixture of experts, compiled on request.

    `gate` and `up` are [R, F], with F the size of an expert's hidden layer. The number R differs from step to step, so
    one compiled graph serves any R.
    """

    def __init__(self, *, compiled: bool) -> None:
        self._run, self._compiled = compile_layer(gated) if compiled else gated, compiled

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, elementwise; the result has the shape of `gate` and `up`."""
        for tensor in (gate, up) if self._compiled else ():
            mark_varying(tensor, 0)
        return self._run(gate, up)


class _WeightedSum(torch.autograd.Function):
    """Autograd function of `weighted_sum`, the sum of the outputs of each token's experts."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, order, inverse, weight)
        return expert_rows.combine(rows, inverse, weight, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        of_rows, of_weight = expert_rows.combine_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return of_weight, of_rows, None, None


def weighted_sum(weight: torch.Tensor, rows: torch.Tensor, by_expert: Sorted) -> torch.Tensor:
    """Sum the outputs of each token's experts, multiplied by the router's factors.

    There are N tokens with K experts each; H is the hidden size.

    Args:
        weight: [N, K] fp32 factors of the outputs, from the router.
        rows: [N K, H] outputs of the experts, sorted by expert.
        by_expert: the order in which the choices of all tokens were sorted by expert.

    Returns:
        [N, H], in the dtype of `rows`.
    """
    return _WeightedSum.apply(weight, rows, by_expert.order, by_expert.inverse)
