"""Norms, MLP and dropout of a transformer layer, and their recomputation in backward.

Recomputation: selective recomputation puts a norm (or an activation) and the matrix product that follows it into one
checkpoint. Autograd then stores only the norm's input. Backward recomputes the norm but not the matrix product:
non-reentrant checkpointing stops once it has recomputed all saved tensors, and the last one is the input of the matrix
product. A checkpoint inside torch.compile recomputes everything that it contains. In compiled code the checkpoint
therefore contains only the norm, and not the matrix product.

Dropout: tensor-parallel (tp) ranks hold different attention heads and, with sequence parallelism, different slices of
the sequence. The dropout masks of such tensors must differ between ranks. They come from torch's default generator,
which has another seed on each rank. Without sequence parallelism tp ranks hold the same residual stream, whose
dropout masks must be equal on all tp ranks. These masks come from a `SharedGenerator`.
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

from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.cross_entropy import Fuse, torch_compiled
from megazpp.tensor_parallel.initialize import seed_for
from megazpp.tensor_parallel.layers import ColumnParallelLinear, Product, RowParallelLinear, column_parallel
from megazpp.tensor_parallel.parameters import ParameterSpec, local
from megazpp.tensor_parallel.regions import copy_to_region, reduce_from_region_

# Maximum number of compiled graphs that torch may store for the forward function of all layers. Torch's limit of 8 is
# too low, because each combination of the following needs its own graph: the model (up to four in a process), gradients
# on or off, training or evaluation, a batch of one row or of several rows, and generation with a key-value cache.
MOST_GRAPHS = 64

# Type of a kernel for attention inside documents, such as `variable_length`. Its arguments are queries, keys, values,
# the documents' offsets, the length of the longest document, the window, and the factor of the scores.
DocumentKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int | None, float | None], torch.Tensor
]


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings that all layers of a model share: mesh axes, and implementations for a device. The default is one rank.

    Attributes:
        tp: tensor-parallel axis.
        cp: context-parallel axis.
        ep: expert-parallel axis.
        sequence_parallel: True if the residual stream is split along the sequence over tp ranks.
        generator: generator of the dropout masks that must be equal on all tp ranks; None if no dropout masks have to
            be equal on them.
        document_kernel: kernel for attention inside documents or a window; None if attention masks are used instead.
        product: function that computes the matrix products of linear layers, such as float8's; None for torch's
            products in the dtype of the inputs, which overlap with collectives on tp.
        grouped: True if one grouped kernel multiplies the matrices of all experts of a layer (`find_grouped_product`).
        compiled: True to apply torch.compile to the layers; None compiles them only if --compile is set explicitly.
        fuse_loss: function that fuses the elementwise work on the logits into single kernels (`linear_cross_entropy`);
            None to fuse this work by torch.compile if the layers are compiled, and not to fuse it otherwise.
        varying_sizes: True to compile the layers at once for any batch size and sequence length, instead of once for
            each of the first few sizes.
        device: device on which the model computes; None for the device of the parameters. The two differ if parameters
            are in host memory.
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
    fuse_loss: Fuse | None = None
    varying_sizes: bool = False
    device: torch.device | None = None

    def used_by(self, config: GPTConfig) -> LayerSettings:
        """Return a copy of these settings in which everything that a model of `config` does not use is off.

        Sequence parallelism is off for one tp rank. The shared generator is None unless dropout masks must be equal on
        several tp ranks. `compiled` is True or False instead of None, and `fuse_loss` is None only if nothing is fused.
        """
        # With sequence parallelism, tp ranks hold different tokens of the residual stream. The ranks' dropout masks
        # must then differ, so the layers get no shared generator.
        splits = self.sequence_parallel and self.tp.size > 1
        generator = self.generator if self.tp.size > 1 and not splits else None
        compiled = config.compile is True if self.compiled is None else self.compiled
        fuse = self.fuse_loss or (torch_compiled if compiled else None)
        return replace(self, sequence_parallel=splits, generator=generator, compiled=compiled, fuse_loss=fuse)

    @property
    def linear(self) -> dict[str, Any]:
        """The settings of linear layers, as keyword arguments for ColumnParallelLinear and RowParallelLinear."""
        return {"tp": self.tp, "sequence_parallel": self.sequence_parallel, "product": self.product}


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension: [..., size] -> [..., size].

    Collectives on tp: none. With `split` each tp rank computes only a partial sum of the gradients of weight and bias.

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
        """Normalize x [..., size] over its last dimension.

        Args:
            x: tensor to normalize.
            weights: result of `read_weights`, for a checkpoint inside compiled code; None to read the module's weights.
        """
        weight, *bias = self.read_weights() if weights is None else weights
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return F.layer_norm(x, weight.shape, weight, bias[0], self.epsilon)

    def read_weights(self) -> tuple[torch.Tensor, ...]:
        """Return the factors of the norm, and the bias if it is a LayerNorm, as local tensors for `forward`.

        An activation checkpoint inside a compiled graph cannot take DTensors, so `normed` passes these local tensors
        into it. With --apply-layernorm-1p the factors are the stored weight plus 1.
        """
        weight = local(self.weight) + 1.0 if self.one_plus else local(self.weight)
        return (weight,) if self.kind == "RMSNorm" else (weight, local(self.bias))


class HeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads together, for --qk-layernorm-all-heads: [..., heads, D] -> same shape.

    D is the number of channels per head. The heads are split over tp ranks. Collectives on tp: 1 all-reduce of one fp32
    number per token in forward, and 1 in backward.

    Args:
        config: config of the model.
        size: number of channels of all heads on all tp ranks together.
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
        # `reduce_from_region_` sums the squares over tp in forward, `copy_to_region` sums their gradients in backward.
        squares = copy_to_region(reduce_from_region_(own.square().sum(dim=-1, keepdim=True), self.tp), self.tp)
        return (own * (squares / self.size + self.epsilon).rsqrt() * weight).to(x.dtype).view_as(x)


def normed(norm: Norm | None, x: torch.Tensor, *, then: Callable[[torch.Tensor], Any], recompute: bool) -> Any:
    """Apply a norm and the linear layer that follows it: return then(norm(x)), or then(x) if `norm` is None.

    Args:
        norm: norm to apply; None for no norm.
        x: input of the norm.
        then: function that computes the matrix product of the linear layer from the norm's output.
        recompute: True if backward recomputes the norm instead of storing its output.
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
    """Return then(cheap(*args)), for selective recomputation.

    With `when`, autograd stores only the arguments of `cheap`, and backward calls `cheap` again.

    Args:
        cheap: function to recompute, such as a norm, an activation or the attention core.
        args: arguments of `cheap`.
        then: function with the matrix product that follows, which is not recomputed; None if there is none.
        when: True to recompute; False to let autograd store what the backward of `cheap` needs.
        draws: True if `cheap` samples from torch's default generator, whose state the recomputation must then repeat.
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
    """Call `function` in a non-reentrant activation checkpoint.

    With `draws`, the recomputation starts with the state that torch's default generator had in forward.
    """
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
        settings: mesh axes and implementations that all layers share.
        output_std: standard deviation of the initial weights of the output matrix `fc2`.
        inner: feed-forward size F, as for the shared MLP of a mixture of experts; None for the size in `config`.
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
        self.gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = gated
        self.gate = ColumnParallelLinear(hidden, inner, std=std, **split) if config.swiglu else None
        self.fc1 = ColumnParallelLinear(hidden, inner, std=std, **split)
        self.fc2 = RowParallelLinear(inner, hidden, std=output_std, **split)

    def forward(self, x: torch.Tensor, *, norm: Norm | None = None) -> torch.Tensor:
        """Return the MLP's output for norm(x), or for x if `norm` is None; backward may recompute the norm."""
        layers = [self.fc1] if self.gate is None else [self.fc1, self.gate]
        # Column-parallel matrix products over T ranks, from H to F channels for S tokens of B sequences: [S, B, H], or
        # [S/T, B, H] with sequence parallelism, -> [S, B, F/T]. SwiGLU has two such products, up and gate.
        parts = normed(norm, x, then=lambda x: column_parallel(x, layers), recompute=self.recompute_norm)
        return recomputed(self._inside, *parts, then=self.fc2, when=self.recompute_activation)

    def _inside(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the MLP's activation function to `up` [S, B, F/T], and return a tensor of the same shape.

        S is the sequence length, B the batch size, F the feed-forward size, T the number of tp ranks. SwiGLU is
        silu(gate) * up, with `gate` shaped like `up`.
        """
        if gate is not None:
            return self.gated(gate, up)
        if self.squared_relu:
            return F.relu(up).square()
        return F.gelu(up, approximate=self.gelu_approximation)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, the hidden layer of a gated MLP."""
    return F.silu(gate) * up


class SharedGenerator:
    """Random generator of dropout masks that must be equal on all tensor-parallel ranks with the same data.

    The generator's state is equal on these ranks, and differs between data-parallel ranks.

    Args:
        device: device on which dropout masks are sampled.
        seed: seed of the run.
        data_rank: data-parallel rank of this process.
    """

    def __init__(self, device: torch.device, *, seed: int, data_rank: int) -> None:
        self.generator = torch.Generator(device)
        self.seed(seed, data_rank=data_rank)

    def seed(self, seed: int, *, data_rank: int) -> None:
        """Reset the generator to the state that the run's seed determines for this data-parallel rank."""
        self.generator.manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the two contexts that `torch.utils.checkpoint` expects from its argument `context_fn`.

        The second context surrounds the recomputation, which then samples the same dropout masks as the forward.
        Afterwards this context restores the generator's state.
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
        rate: probability with which an element is set to zero.
        shared: generator that gives all tensor-parallel ranks the same dropout masks; None for torch's default
            generator, with which the dropout masks of these ranks differ.
    """

    def __init__(self, rate: float, shared: SharedGenerator | None) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply dropout to x.

        Args:
            x: tensor of any shape.
            mask: dropout mask for x that `draw` has sampled; None samples a new dropout mask.
        """
        if not self._agrees():
            return F.dropout(x, self.rate, self.training)
        return x * (_draw(x, self.rate, self.shared) if mask is None else mask)

    def draw(self, like: torch.Tensor) -> torch.Tensor | None:
        """Sample a dropout mask for a tensor in the shape of `like` from the generator that tp ranks share.

        A compiled layer cannot use the shared generator. So `TransformerLayer` samples the mask before it runs compiled
        code, which passes the mask to `forward`. Returns None if no shared generator is used; `forward` then calls
        torch's dropout.
        """
        return _draw(like, self.rate, self.shared) if self._agrees() else None

    def _agrees(self) -> bool:
        """Return True if dropout is active, and its masks come from the generator that all tp ranks share."""
        return self.shared is not None and self.rate > 0.0 and self.training


@torch.compiler.disable
def _draw(like: torch.Tensor, rate: float, shared: SharedGenerator | None) -> torch.Tensor:
    """Sample a dropout mask with the values 0 and 1 / (1 - rate), in the shape and dtype of `like`."""
    assert shared is not None
    return torch.empty_like(like).bernoulli_(1.0 - rate, generator=shared.generator).div_(1.0 - rate)


def compile_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `torch.compile` to a layer's function, and raise torch's limit of graphs per function to MOST_GRAPHS."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    return torch.compile(function)


def mark_varying(tensor: torch.Tensor | None, *dims: int) -> None:
    """Tell torch.compile that the dimensions `dims` of `tensor` vary, so that one graph serves all their sizes above 1.

    If `tensor` is None, nothing happens.
    """
    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, dims)
