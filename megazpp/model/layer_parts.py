"""The parts of a layer besides attention: norms, the MLP, dropout, and their recomputation in backward.

Recomputation: selective recomputation puts a norm (or an activation) and the matrix product that follows it into one
checkpoint. Autograd then keeps only the norm's input. Backward recomputes the norm but not the product: non-reentrant
checkpointing stops once it has recomputed all saved tensors, and the last one is the product's input. A checkpoint
inside torch.compile recomputes everything that it contains, so there the product is left outside.

Dropout: tensor-parallel (tp) ranks hold different attention heads and, with sequence parallelism, different slices of
the sequence. Their dropout masks must differ there. The masks come from torch's default generator, which has another
seed on each rank. Without sequence parallelism tp ranks hold the same residual stream, so their masks must be equal
there. These masks come from a `SharedGenerator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazpp.model.attention_kernels import DocumentKernel
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.initialize import seed_for
from megazpp.tensor_parallel.layers import ColumnParallelLinear, Product, RowParallelLinear, column_parallel
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import copy_to_region, reduce_from_region_

# Compiled graphs that torch may keep of the layers' common forward function. Torch's limit of 8 is too low: it needs a
# graph for each combination of model (up to four), gradients, training mode, one row or several, and decoding.
MOST_GRAPHS = 64


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings that all layers of a model share: mesh axes, and implementations for a device. The default is one rank.

    Attributes:
        tp: tensor-parallel axis.
        cp: context-parallel axis.
        ep: expert-parallel axis.
        sequence_parallel: whether the residual stream is split along the sequence over tp.
        generator: generator of the dropout masks that must be equal on all tp ranks; None if masks may differ.
        document_kernel: kernel for attention inside documents; None if masks are used instead.
        product: matrix product of the linear layers; None for 16-bit products that overlap with collectives on tp.
        grouped: whether one grouped kernel multiplies the rows of all experts of a layer (`find_grouped_product`).
        compiled: whether to compile the layers; None compiles them only if --compile is set explicitly.
        varying_sizes: whether to compile the layers at once for any batch size and sequence length, instead of once for
            each of the first few sizes.
        device: device that computes; None for the device of the parameters, which may also be in host memory.
    """

    tp: MeshAxis = field(default_factory=lambda: MeshAxis("tp"))
    cp: MeshAxis = field(default_factory=lambda: MeshAxis("cp"))
    ep: MeshAxis = field(default_factory=lambda: MeshAxis("ep"))
    sequence_parallel: bool = False
    generator: SharedGenerator | None = None
    document_kernel: DocumentKernel | None = None
    product: Product | None = None
    grouped: bool = False
    compiled: bool | None = None
    varying_sizes: bool = False
    device: torch.device | None = None

    def used_by(self, config: GPTConfig) -> LayerSettings:
        """Return the settings in which a model of `config` uses only what it needs on these axes."""
        # with sequence parallelism tp ranks hold different parts of the residual stream, and need different masks
        splits = self.sequence_parallel and self.tp.size > 1
        generator = self.generator if self.tp.size > 1 and not splits else None
        compiled = config.compile is True if self.compiled is None else self.compiled
        return replace(self, sequence_parallel=splits, generator=generator, compiled=compiled)

    @property
    def linear(self) -> dict[str, Any]:
        """The arguments of column- and row-parallel layers."""
        return {"tp": self.tp, "sequence_parallel": self.sequence_parallel, "product": self.product}


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension: [..., size] -> [..., size].

    Collectives on tp: none. With `split` each tp rank computes a part of the gradients of weight and bias.

    Args:
        config: config of the model, which selects LayerNorm or RMSNorm.
        size: number of channels.
        tp: tensor-parallel axis.
        split: True if tp ranks normalize different vectors: slices of the sequence, or the heads of each rank.
    """

    def __init__(self, config: GPTConfig, size: int, *, tp: MeshAxis, split: bool) -> None:
        super().__init__()
        self.kind, self.epsilon = config.normalization, config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p
        partial = split and tp.size > 1
        self.weight = nn.Parameter(torch.empty(size))
        self.specs = {"weight": ParameterSpec(value=0.0 if self.one_plus else 1.0, partial=partial)}
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.empty(size))
            self.specs["bias"] = ParameterSpec(partial=partial)

    def forward(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...] | None = None) -> torch.Tensor:
        """Normalize x, with `weights` (a result of `read_weights`) or, if None, with the module's parameters."""
        weight, *bias = self.read_weights() if weights is None else weights
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias[0], self.epsilon)

    def read_weights(self) -> tuple[torch.Tensor, ...]:
        """Return the weight, and the bias of a LayerNorm, as local tensors.

        A checkpoint inside a compiled graph cannot take DTensors, so callers pass these tensors into it.
        """
        weight = local(self.weight) + 1.0 if self.one_plus else local(self.weight)
        return (weight,) if self.kind == "RMSNorm" else (weight, local(self.bias))


class HeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads together, which are split over tp: [..., heads, D] -> [..., heads, D].

    Collectives on tp: 1 all-reduce of one fp32 number per token in forward, and 1 in backward.

    Args:
        config: config of the model.
        size: number of channels of all heads of all tp ranks.
        tp: tensor-parallel axis.
    """

    def __init__(self, config: GPTConfig, size: int, *, tp: MeshAxis) -> None:
        super().__init__()
        self.size, self.epsilon, self.tp = size, config.norm_epsilon, tp
        self.weight = nn.Parameter(torch.empty(size // tp.size))
        self.specs = {"weight": ParameterSpec(value=1.0, split=0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        if self.tp.size == 1:
            return F.rms_norm(x.flatten(-2), weight.shape, weight, self.epsilon).view_as(x)
        own = x.flatten(-2).float()
        squares = copy_to_region(reduce_from_region_(own.square().sum(dim=-1, keepdim=True), self.tp), self.tp)
        return (own * (squares / self.size + self.epsilon).rsqrt() * weight).to(x.dtype).view_as(x)


def normed(norm: Norm | None, x: torch.Tensor, *, then: Callable[[torch.Tensor], Any], recompute: bool) -> Any:
    """Return then(norm(x)), or then(x) if `norm` is None.

    Args:
        norm: norm to apply, or None.
        x: input of the norm.
        then: matrix product after the norm.
        recompute: True if backward recomputes the norm instead of keeping its output.
    """
    if norm is None:
        return then(x)
    return recomputed(norm, x, norm.read_weights() if recompute else None, then=then, when=recompute)


def recomputed(
    cheap: Callable[..., Any],
    *args: object,
    then: Callable[..., Any] | None = None,
    when: bool,
    draws: bool = False,
    in_graph: bool = True,
) -> Any:
    """Return then(cheap(*args)); backward may recompute `cheap` instead of keeping its intermediate results.

    Args:
        cheap: function to recompute, such as a norm or an activation.
        args: arguments of `cheap`.
        then: matrix product after it, which is not recomputed; None for none.
        when: True to recompute.
        draws: True if `cheap` samples from torch's default generator. The recomputation then restores its state.
        in_graph: True if torch.compile may put the checkpoint of `cheap` into its graph. Attention with DTensor
            parameters must stay outside: torch 2.13 passes the generator's state to the recomputation, and confuses it
            with a DeviceMesh.
    """

    def both(*args: object) -> Any:
        found = cheap(*args)
        return found if then is None else then(found)

    if not (when and torch.is_grad_enabled()):
        return both(*args)
    if torch.compiler.is_compiling():
        found = (_checkpointed if in_graph else _outside)(cheap, *args, draws=draws)
        return found if then is None else then(found)
    return _checkpointed(both, *args, draws=draws)


def _checkpointed(function: Callable[..., Any], *args: object, draws: bool) -> Any:
    """Call `function` in a non-reentrant checkpoint, which with `draws` restores the state of torch's generator."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)


_outside = torch.compiler.disable(_checkpointed)


class MLP(nn.Module):
    """MLP of a layer: [S, B, H] -> [S, B, F] -> [S, B, H].

    S is the sequence length, B the batch size, H the hidden size, F the feed-forward size and T the number of
    tensor-parallel (tp) ranks. With sequence parallelism input and output are [S/T, B, H].

    The gate and up matrices of SwiGLU are two parameters, not one fused matrix [2F, H]: only then does a contiguous
    slice of the rows contain matching gate and up channels for every tp size.

    Collectives on tp: the collectives of one ColumnParallelLinear and one RowParallelLinear.

    Args:
        config: config of the model.
        settings: axes and implementations.
        output_std: standard deviation of the initial weights of the second matrix.
        inner: feed-forward size, F; None for the config's.
    """

    def __init__(
        self, config: GPTConfig, settings: LayerSettings, *, output_std: float, inner: int | None = None
    ) -> None:
        super().__init__()
        self.recompute_norm, self.recompute_activation = config.recomputes("layernorm"), config.recomputes("mlp_act")
        self.squared_relu = config.squared_relu
        self.gelu_approximation = "tanh" if config.openai_gelu else "none"

        hidden, inner, std = config.hidden, inner or config.ffn_size, config.init_method_std
        split = settings.linear | {"bias": config.linear_bias}
        self.gate = ColumnParallelLinear(hidden, inner, std=std, **split) if config.swiglu else None
        self.fc1 = ColumnParallelLinear(hidden, inner, std=std, **split)
        self.fc2 = RowParallelLinear(inner, hidden, std=output_std, **split)

    def forward(self, x: torch.Tensor, *, norm: Norm | None = None) -> torch.Tensor:
        """Return the MLP's output for norm(x), or for x if `norm` is None; backward may recompute the norm."""
        layers = [self.fc1] if self.gate is None else [self.fc1, self.gate]
        # [S, B, H] ([S/T, B, H] with sequence parallelism) -> [S, B, F/T], twice for SwiGLU
        parts = normed(norm, x, then=lambda x: column_parallel(x, layers), recompute=self.recompute_norm)
        return recomputed(self._inside, *parts, then=self.fc2, when=self.recompute_activation)

    def _inside(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the activation function to `up` [S, B, F/T]; SwiGLU multiplies by `gate`, of the same shape."""
        if gate is not None:
            return F.silu(gate) * up
        if self.squared_relu:
            return F.relu(up).square()
        return F.gelu(up, approximate=self.gelu_approximation)


class SharedGenerator:
    """Random generator with the same state on all tp ranks of a data rank, and a different state on each data rank.

    Args:
        device: device on which dropout masks are drawn.
        seed: seed of the run.
        data_rank: data-parallel rank of this process.
    """

    def __init__(self, device: torch.device, *, seed: int, data_rank: int) -> None:
        self.generator = torch.Generator(device)
        self.seed(seed, data_rank=data_rank)

    def seed(self, seed: int, *, data_rank: int) -> None:
        """Seed the generator for a data rank."""
        self.generator.manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the two contexts that `torch.utils.checkpoint` expects from its argument `context_fn`.

        They make the recomputation sample the same masks as the forward, and restore the generator's state after it.
        """
        state = self.generator.get_state()

        @contextmanager
        def replay() -> Iterator[None]:
            now = self.generator.get_state()
            self.generator.set_state(state)
            try:
                yield
            finally:
                self.generator.set_state(now)

        return nullcontext(), replay()


class Dropout(nn.Module):
    """Dropout: in training, set each element to zero with probability `rate` and scale the others by 1 / (1 - rate).

    Args:
        rate: probability that an element is set to zero.
        shared: generator that gives all tp ranks the same masks; None for torch's default generator, with which the
            masks of tp ranks differ.
    """

    def __init__(self, rate: float, shared: SharedGenerator | None) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply dropout to x, with `mask` (a result of `draw`) or, if it is None, with a newly sampled mask."""
        if not self._agrees():
            return F.dropout(x, self.rate, self.training)
        return x * (_draw(x, self.rate, self.shared) if mask is None else mask)

    def draw(self, like: torch.Tensor) -> torch.Tensor | None:
        """Sample the mask for a tensor that is shaped like `like`.

        A compiled layer cannot use the shared generator, so its caller samples the mask beforehand and passes it to
        `forward`. Returns None if no shared generator is used; `forward` then calls torch's dropout.
        """
        return _draw(like, self.rate, self.shared) if self._agrees() else None

    def _agrees(self) -> bool:
        """Return True if dropout is active and its masks come from the shared generator."""
        return self.shared is not None and self.rate > 0.0 and self.training


@torch.compiler.disable
def _draw(like: torch.Tensor, rate: float, shared: SharedGenerator | None) -> torch.Tensor:
    """Sample a mask of 0 and 1 / (1 - rate), with the shape and dtype of `like`."""
    assert shared is not None
    return torch.empty_like(like).bernoulli_(1.0 - rate, generator=shared.generator).div_(1.0 - rate)


def compile_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `torch.compile`, and raise torch's recompile limit to the number of graphs that a process may need."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    return torch.compile(function)


def mark_varying(tensor: torch.Tensor | None, *dims: int) -> None:
    """Let one compiled graph accept `tensor` with any size above 1 in the dimensions `dims`; None is ignored."""
    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, dims)
