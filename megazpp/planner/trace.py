"""Trace of the model for the planner: operations, communication on tp, cp and ep, and memory, by segment of the model.

The model's own code runs once on the meta device, so the trace always agrees with the code. A segment is the embedding,
a layer or the head (final norm and output layer), in forward or in backward. Layers are alike, so at most three layers
run, and the trace repeats their segments for all others.

This is one file of more than 300 lines, because one recorder assigns operations, communication and memory to the same
segments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.model.attention import repeated, varlen_groups
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel, MixtureLayer
from megazpp.model.layer_parts import MLP, LayerSettings
from megazpp.model.moe import Experts
from megazpp.optim.muon_plan import LayerMatrix, layer_matrices
from megazpp.parallel.axis import TrafficCounter
from megazpp.planner.cost import Operation
from megazpp.planner.simulator import META, Parameters, SimulatedAxis
from megazpp.tensor_parallel.layers import Product
from megazpp.tensor_parallel.parameters import owned_parameters, partial_parameters
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout
from megazpp.training.config import ModelSpec
from megazpp.training.flops import keys_per_token

FORWARD, BACKWARD = "forward", "backward"
Documents = Literal["kernel", "mask", "CPU's mask"]  # methods that keep attention inside documents
NO_RECOMPUTE: dict[str, Any] = {
    "recompute_activations": False,
    "recompute_granularity": None,
    "recompute_modules": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
# A function that replaces float8 matrix products in a trace. Like these products, it saves its input and weight for
# backward, and runs after the gather over tp and before the reduction over tp.
SIMULATED_FLOAT8: Product = F.linear
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")  # names of torch's matrix products
# Names of operations of torch that launch no kernel
FREE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::_unsafe_view")


@dataclass
class TraceSegment:
    """Traced operations and memory of one segment of the model (embedding, layer or head), in forward or backward.

    Attributes:
        operations: matrix products, passes over memory and collectives, in order.
        kept: bytes in use after the segment minus bytes in use before it; negative if the segment frees memory.
        peak: most bytes in use during the segment minus bytes in use before it.
        gradients: bytes of `kept` that are unsharded gradients of parameters.
    """

    operations: list[Operation] = field(default_factory=list)
    kept: int = 0
    peak: int = 0
    gradients: int = 0


class Trace(NamedTuple):
    """Trace of a model's forward and backward of one micro-batch on one tensor-parallel rank, for the planner.

    Attributes:
        segments: segments by (FORWARD or BACKWARD, index); index 0 is the embedding, 1 to n the layers, n + 1 the head.
        units: names and shapes of the trained parameters of each sharding unit, in the order of use.
        frozen: names and shapes of the frozen parameters of each sharding unit.
        partial: names and shapes of the parameters whose gradient is a sum over the tp ranks.
        matrices: matrices of the layers that Muon would train.
        tied: True if embeddings are tied. The first unit then holds the embedding and the final norm, and is in use
            from the first to the last segment.
        experts: for each unit, True if it holds the experts of the layer whose unit precedes it.
        exact: names of parameters that are never quantized between ranks.
    """

    segments: dict[tuple[str, int], TraceSegment]
    units: tuple[Parameters, ...]
    frozen: tuple[Parameters, ...]
    partial: Parameters
    matrices: tuple[LayerMatrix, ...]
    tied: bool
    experts: tuple[bool, ...]
    exact: frozenset[str]

    @property
    def num_segments(self) -> int:
        """Number of segments of the model (embedding, layers, head) in one pass, forward or backward."""
        return len(self.segments) // 2


class TraceInputs(NamedTuple):
    """Inputs of the planner's trace of a model, in addition to the model's config.

    Attributes:
        vocab_size: number of tokens in the vocabulary, without padding.
        seq_length: tokens per sample.
        micro_batch_size: samples per micro-batch.
        dtype: dtype in which the model computes.
        tp: number of tensor-parallel ranks.
        cp: number of context-parallel ranks.
        ep: number of expert-parallel ranks.
        sequence_parallel: True if the residual stream is split along the sequence over tp.
        documents: method that keeps attention inside documents, which are assumed to be as long as a sample; None for
            attention over whole samples.
        with_entropy: True to compute the entropy of the predictions as well.
        compiled: True if torch.compile fuses the elementwise work on the logits, and in gated MLPs, as it does on CUDA
            by default.
        prepare: function that changes the model before it runs, for example freezes parameters. A model without trained
            parameters has no backward.
        expert_load: tokens of each expert of this rank, relative to the mean over all experts. The load matters only
            if `ep` is above 1, because otherwise a rank has all experts.
    """

    vocab_size: int
    seq_length: int
    micro_batch_size: int
    dtype: torch.dtype
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    documents: Documents | None = None
    with_entropy: bool = False
    compiled: bool = False
    prepare: Callable[[GPTModel], None] | None = None
    expert_load: float = 1.0


def trace_on_rank(spec: ModelSpec, layout: Layout, **inputs: Any) -> Trace:
    """Trace the forward and backward of a run's model for one micro-batch on one rank.

    Args:
        spec: model and precision of the run.
        layout: sizes of the parallel axes.
        **inputs: fields of `TraceInputs` that `spec` and `layout` do not determine.
    """
    parallel: dict[str, Any] = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    parallel |= {"sequence_parallel": spec.sequence_parallel and layout.tp > 1}
    given = TraceInputs(vocab_size=spec.vocab_size, dtype=spec.precision.param_dtype, **parallel, **inputs)
    return trace_model(spec.config, given)


@functools.cache
def trace_model(config: GPTConfig, inputs: TraceInputs) -> Trace:
    """Trace the forward and backward of a model for one micro-batch. Calls with equal arguments share one result.

    Layers do not depend on the vocabulary. The embedding and the head do not depend on the recomputation and the expert
    parallelism of the layers. Tracing the head takes most of the time, because the head loops over the vocabulary in
    small blocks. So the head is traced separately, once for all variants of the layers.

    Args:
        config: config of the model.
        inputs: sizes of the batch and of the parallel axes, and the other fields of `TraceInputs`.

    Raises:
        ValueError: only some layers have experts, and layers differ in recomputation or in frozen parameters as well.
    """
    # ---- make the configs of models with at most three layers, which represent all layers
    again = 1 if config.recompute_method == "block" else None  # "block" recomputes only the first traced layer
    # Layers with and without a window or rotary embeddings have the same parameters, and count as alike here. Windows
    # change only the work of attention, which is averaged over the layers (`share`, below).
    alike: dict[str, Any] = {"window_attn_skip_freq": None, "no_rope_freq": None}
    mixed = 0 < len(config.expert_layers) < config.layers
    if mixed and (again is not None or inputs.prepare is not None):
        other = "--recompute-method block" if again is not None else "frozen parameters"
        raise ValueError(
            f"the planner does not support --moe-layer-freq {config.moe_layer_freq}, by which only some layers have "
            f"experts, with {other}: leave one of them out"
        )
    # In a mixed model, layer 0 represents the dense layers, and layer 1 the layers with experts.
    alike["moe_layer_freq"] = "[0,1]" if mixed else "1"
    # Number of traced layers: one for each kind of layer that differs from the others. With frozen parameters there are
    # three kinds: the first layer, which computes no gradient of its input; the second layer, during which the memory
    # of the first layer's input is freed; and all others. There are two kinds if only some layers have experts, or if
    # only some recompute.
    most = 3 if inputs.prepare is not None else 2 if mixed or again is not None else 1
    shape = dataclasses.replace(config, num_layers=min(config.layers, most), recompute_num_layers=again, **alike)
    # ---- trace the embedding and the head, and then the layers
    # `share` is the fraction of the S x S scores that attention computes: the mean over layers, which may have windows
    keys = sum(keys_per_token(inputs.seq_length, span) for span in config.attention_span) / config.layers
    share = keys / inputs.seq_length
    # In a model with experts, two layers run before the traced head, because the routers' losses of the layers are
    # added up: with one layer, the trace would lack this addition.
    few = min(config.layers, max(most, 2 if config.expert_layers else 1))
    without = dataclasses.replace(shape, num_layers=few, **NO_RECOMPUTE)
    ends, _ = record_segments(without, inputs._replace(ep=1, expert_load=1.0), share, with_head=True)
    layers, model = record_segments(shape, inputs, share, with_head=False)
    # ---- extend the trace from the traced layers to all layers of the model
    # `kinds` has for each layer of the model the index of the traced layer that has the same parameters.
    kinds = [int(mixed and config.has_experts(index)) for index in range(config.layers)]
    (units, experts), (frozen, _) = (_units(model, kinds, trained=trained) for trained in (True, False))
    partial = {_in_first_layer(name) for name in partial_parameters(model)}
    exact = {_in_first_layer(name) for name, _, _, spec in owned_parameters(model) if spec.exact}
    matrices = layer_matrices(model, inputs.tp, inputs.ep)
    # With --recompute-method block, layer 0 was traced with recomputation and layer 1 without it. `like` has for each
    # layer of the model the index of the traced segment that equals the layer's.
    twice = shape.layers > 1 and config.recompute_method == "block"
    like = [2 if twice and not config.recomputes_layer(index) else 1 for index in range(config.layers)]
    if inputs.prepare is not None and not twice:
        like = [min(index + 1, most) for index in range(config.layers)]
    if mixed:
        like = [kind + 1 for kind in kinds]
    return Trace(
        segments={
            (phase, index): segments[phase, traced]
            for phase in (FORWARD, BACKWARD)
            for index, (segments, traced) in enumerate([(ends, 0), *((layers, each) for each in like), (ends, few + 1)])
        },
        units=units,
        frozen=frozen,
        partial=[(name, shape) for unit in units for name, shape in unit if _in_first_layer(name) in partial],
        matrices=tuple(
            matrix._replace(name=matrix.name.replace(f"layers.{kind}.", f"layers.{index}.", 1))
            for index, kind in enumerate(kinds)
            for matrix in matrices
            if matrix.name.startswith(f"layers.{kind}.")
        ),
        tied=config.tied,
        experts=experts,
        exact=frozenset(name for unit in units for name, _ in unit if _in_first_layer(name) in exact),
    )


@functools.cache
def _in_first_layer(name: str) -> str:
    """Return the name that the parameter `name` of any layer has in layer 0."""
    return re.sub(r"^layers\.\d+\.", "layers.0.", name)


@functools.cache
def record_segments(
    shape: GPTConfig, inputs: TraceInputs, share: float, *, with_head: bool
) -> tuple[dict[tuple[str, int], TraceSegment], GPTModel]:
    """Run a micro-batch of a model with at most three layers on the meta device, and record its operations and memory.

    Args:
        shape: config of this model.
        inputs: sizes of the batch and of the parallel axes, and the other fields of `TraceInputs`.
        share: fraction of the S x S attention scores of a sample of S tokens that is computed, see `FusedAttention`.
        with_head: True to run the output layer and the loss; False to replace them by a sum of the hidden states.

    Returns:
        the recorded segments by (FORWARD or BACKWARD, index), and the model.
    """
    # ---- build the model on the meta device
    recorder, documents, size = TraceRecorder(), inputs.documents, inputs.micro_batch_size
    attention = FusedAttention(recorder, repeats_groups=documents == "mask", share=share)
    tp, cp, ep = inputs.tp, inputs.cp, inputs.ep
    layout = plan_layout(Cluster(num_nodes=1, ranks_per_node=tp * cp), tp=tp, replicas=1, cp=cp)
    paper_axis = functools.partial(SimulatedAxis, layout, rank=0, counter=TrafficCounter())
    # The expert-parallel axis is the tp axis of a separate layout. With `ep` equal to `tp`, experts use the tp axis of
    # the run (`Layout.has_expert_axes`), so their collectives are recorded on "tp".
    of_experts = plan_layout(Cluster(num_nodes=1, ranks_per_node=ep), tp=ep, replicas=1)
    ep_cost = recorder.note if ep == tp else functools.partial(recorder.note, axis="ep")
    settings = LayerSettings(
        tp=paper_axis("tp", cost=recorder.note),
        cp=paper_axis("cp", cost=functools.partial(recorder.note, axis="cp")),
        ep=SimulatedAxis(of_experts, "tp", rank=0, counter=TrafficCounter(), cost=ep_cost),
        sequence_parallel=inputs.sequence_parallel,
        document_kernel=attention.inside_documents if documents == "kernel" else None,
        product=SIMULATED_FLOAT8 if shape.fp8_format else None,
        fuse_loss=recorder.fused if inputs.compiled else None,
    )
    with torch.device("meta"):
        model = GPTModel(shape, settings, vocab_size=inputs.vocab_size)
        if inputs.prepare is not None:
            inputs.prepare(model)
        for layer in model.layers:
            if isinstance(layer, MixtureLayer):
                layer.mlp.planned_load = inputs.expert_load
        for module in model.modules() if inputs.compiled else ():
            if isinstance(module, MLP | Experts):
                # a compiled layer computes silu(gate) again in backward, so it does not keep silu(gate)
                module.gated = recorder.fused(module.gated)
        model.to(inputs.dtype)
        starts = torch.empty(size + 1, dtype=torch.int32) if documents else None
        tokens = torch.empty(size, inputs.seq_length, dtype=torch.int64)
        mask = torch.empty(size, inputs.seq_length)

    def head(model: GPTModel, x: torch.Tensor, router_loss: torch.Tensor | None) -> torch.Tensor:
        """Return the scalar whose backward is traced, with the routers' losses of a model with experts added.

        With `with_head` the scalar is the sum of the tokens' losses, otherwise the sum of the hidden states.
        """
        if with_head:
            losses, _ = model.token_losses(x, tokens, with_entropy=inputs.with_entropy)
            loss = (losses * mask).sum()
        else:
            loss = x.sum()
        return loss if router_loss is None else loss + router_loss.sum()

    # ---- run forward and backward; the recorder and the replacements of norm and attention record their operations
    recorder.watch(model)
    norm = functools.partial(fused_norm, recorder=recorder)
    with recorder, replaced(rms_norm=norm, scaled_dot_product_attention=attention):
        trained = any(parameter.requires_grad for parameter in model.parameters())
        with torch.set_grad_enabled(trained):
            loss = model(tokens, document_starts=starts, head=head)
        recorder.enter((BACKWARD, shape.layers + 1))
        if trained:
            loss.backward()
        recorder.enter((BACKWARD, -1))  # ends the last segment; no segment has the index -1
    return recorder.segments, model


def _units(model: GPTModel, kinds: Sequence[int], *, trained: bool) -> tuple[tuple[Parameters, ...], tuple[bool, ...]]:
    """Return the trained or the frozen parameters of the planned model by sharding unit.

    The unit of the root module comes first. The unit of a layer's experts follows the unit of the layer. Inside a unit
    the parameters have FSDP2's order, which equals the order of `named_parameters()`.

    Args:
        model: traced model of few layers.
        kinds: for each layer of the planned model, the index of the layer of `model` that has the same parameters.
        trained: True to return the trained parameters, False to return the frozen ones.

    Returns:
        names and shapes of each unit's parameters; and for each unit, True if it holds the experts of a layer.
    """
    rest = dict(model.named_parameters())
    names = {parameter: name for name, parameter in rest.items()}
    units: list[Parameters] = []
    experts: list[bool] = []
    of_experts = {p for unit in model.expert_units() for p in unit.parameters()}
    layers: dict[str, list[Parameters]] = {}

    def chosen(parameters: Iterable[torch.nn.Parameter]) -> Parameters:
        return [(names[p], tuple(p.shape)) for p in parameters if p.requires_grad == trained]

    for modules in model.sharding_units():
        parameters = [p for module in modules for p in module.parameters()]
        parts = [[p for p in parameters if p not in of_experts], [p for p in parameters if p in of_experts]]
        found, first = [chosen(part) for part in parts if part], names[parameters[0]]
        if parts[1] and not trained:  # frozen experts form no separate unit: they belong to the layer's frozen unit
            found = [chosen(parameters), []]
        for p in parameters:
            del rest[names[p]]
        if not first.startswith("layers."):
            units += found
            experts.append(False)
            continue
        # ---- repeat the units of the traced layers for all layers of the planned model
        traced = first.split(".")[1]
        layers[traced] = found
        if len(layers) == len(model.layers):
            for index, kind in enumerate(kinds):
                for number, unit in enumerate(layers[str(kind)]):
                    units.append([(name.replace(f"layers.{kind}.", f"layers.{index}.", 1), s) for name, s in unit])
                    experts.append(number == 1)
    if rest:
        units.insert(0, chosen(rest.values()))
        experts.insert(0, False)
    return tuple(units), tuple(experts)


class TraceRecorder(TorchDispatchMode):
    """Dispatch mode that records the operations of a model and the memory of its tensors, by segment of the model.

    Attributes:
        segments: recorded segments by (FORWARD or BACKWARD, index), as in `Trace.segments`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[tuple[str, int], TraceSegment] = defaultdict(TraceSegment)
        self._now = self.segments[FORWARD, 0]
        self._live = self._before = 0  # bytes of all live storages, now and when the current segment began
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # storages whose bytes are counted in `_live`
        self._in_kernel = False  # True while the operations of one fused kernel run, see `fused`

    def watch(self, model: GPTModel) -> None:
        """Register hooks on `model` that start the recording of each segment, and that count the bytes of gradients."""
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        for index, module in enumerate([model.embedding, *model.layers]):
            module.register_forward_pre_hook(functools.partial(self.enter, (FORWARD, index)))
            module.register_forward_hook(self._leaving(index))

    def note(self, kind: str, size: int, *, axis: str = "tp") -> None:
        """Record an operation of the current segment other than a matrix product.

        Args:
            kind: name of a collective, or "memory" for a kernel.
            size: bytes that this rank sends, or that the kernel reads and writes.
            axis: axis of the collective; not used for "memory".
        """
        self._now.operations.append(Operation(kind, size, axis=axis))

    def product(self, m: int, n: int, k: int, batch: float, touched: int) -> None:
        """Record `batch` matrix products [m, k] x [k, n], which read and write `touched` bytes in total."""
        self._now.operations.append(Operation("matrix", touched, m, n, k, batch))

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of a function of tensors that is recorded like one fused kernel, as torch.compile makes it.

        Only the memory of the function's results is counted, because the kernel keeps all other values in registers.
        The recorded passes over memory remain the passes of the function's separate operations, because the
        calibrations in cost.py were fitted with these passes.
        """

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            self._in_kernel = True
            results = function(*args)
            self._in_kernel = False
            for tensor in _tensors(results):
                self._see(tensor.untyped_storage())
            self._now.peak = max(self._now.peak, self._live - self._before)
            return results

        return run

    def enter(self, key: tuple[str, int], *_: object) -> None:
        """Begin a segment of the model, to which operations and memory are added until the next call.

        Args:
            key: (FORWARD or BACKWARD, index) of the segment. A segment that was begun before is continued.
        """
        self._now.kept += self._live - self._before
        self._now, self._before = self.segments[key], self._live

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Count the gradient of a parameter in the current segment; autograd calls this hook after accumulating it."""
        self._now.gradients += parameter.nbytes

    def _leaving(self, index: int) -> Callable[..., None]:
        """Return a forward hook for the module of segment `index`, which begins the next forward segment.

        The hook also lets the backward segment `index` begin when the gradient of the module's output arrives.
        """

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            # A layer with experts returns (hidden states, losses of its router).
            output = output[0] if isinstance(output, tuple) else output
            self.enter((FORWARD, index + 1))
            if output.requires_grad:
                output.register_hook(functools.partial(self.enter, (BACKWARD, index)))

        return leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_view(func):
            return func(*args, **(kwargs or {}))
        key = func, _described(args), _described(tuple(kwargs.items())) if kwargs else ()
        known = _DONE.get(key)
        if known is not None:
            return self._repeat(known, args)
        result = func(*args, **(kwargs or {}))
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        name, outputs, inputs = func.name().split(".")[0], _tensors(result), _tensors((args, given))
        # `fresh` are the outputs in new storages, which take memory. Other outputs use the storage of an input.
        owned = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in owned]
        for tensor in fresh:
            self._see(tensor.untyped_storage())
        self._now.peak = max(self._now.peak, self._live - self._before)
        operation = None
        if name in MATRIX:
            a, b = inputs[-2:]  # the factors; addmm and baddbmm have the summand before them
            touched = _nbytes(inputs + outputs)
            count = math.prod(a.shape[:-2])
            operation = Operation("matrix", touched, a.shape[-2], b.shape[-1], a.shape[-1], count)
        elif name not in FREE and (fresh or func._schema.is_mutable):
            operation = Operation("memory", _nbytes(inputs + fresh))
        if operation is not None:
            self._now.operations.append(operation)
        # On the meta device, torch computes the shapes of results in Python, which takes a millisecond for some
        # operations. So a repeated operation returns a new tensor like its first result, which takes microseconds.
        reusable = isinstance(result, torch.Tensor) and result.is_meta  # results on other devices have values
        if reusable and (result is args[0] or (fresh and not func._schema.is_mutable)):
            like = None if result is args[0] else (result.shape, result.stride(), result.dtype)
            _DONE[key] = _Done(operation, like)
        return result

    def _repeat(self, known: _Done, args: Any) -> torch.Tensor:
        """Record an operation that was recorded before, and return its result without running the operation.

        Args:
            known: record of the operation's first occurrence.
            args: arguments; an operation in place returns the first one.
        """
        result = args[0]
        if known.like is not None:
            size, stride, dtype = known.like
            result = torch.empty_strided(size, stride, dtype=dtype, device=META)
            self._see(result.untyped_storage())
            self._now.peak = max(self._now.peak, self._live - self._before)
        if known.operation is not None:
            self._now.operations.append(known.operation)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage as live until the storage is freed.

        A storage on the meta device has a size, although it takes no memory. Storages inside a fused kernel are not
        counted.
        """

        def count(size: int) -> None:
            self._live += size

        if storage not in self._known and not self._in_kernel:
            self._known.add(storage)
            count(storage.nbytes())
            weakref.finalize(storage, count, -storage.nbytes())


class _Done(NamedTuple):
    """Record of an operation of torch, from which `TraceRecorder` gets the cost and the result of equal operations.

    Attributes:
        operation: cost of the operation, to add to the current segment; None for an operation that takes no time.
        like: size, stride and dtype of the result; None if the operation returns its first argument.
    """

    operation: Operation | None
    like: tuple[torch.Size, tuple[int, ...], torch.dtype] | None


_DONE: dict[Any, _Done] = {}  # records of the operations of all traces, by function and described arguments


@functools.cache
def _is_view(func: Any) -> bool:
    """Return True if an operation of torch returns views of its arguments, which cost neither memory nor time."""
    return bool(func.is_view)


def _described(value: Any) -> Any:
    """Return a hashable description of an operation's arguments, with (size, stride, dtype) in place of each tensor.

    Each other value is paired with its type, because Python's 1, 1.0 and True are equal.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_described(each) for each in value])
    return type(value), value


@contextmanager
def replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of torch.nn.functional inside the context, by name.

    A `TorchFunctionMode` would run Python code in every function of torch, which doubles the time of a trace.
    """
    before = {name: getattr(F, name) for name in functions}
    vars(F).update(functions)
    try:
        yield
    finally:
        vars(F).update(before)


class FusedAttention:
    """Replacement for attention in a trace: a fused kernel's operations and memory.

    A fused kernel does not keep the S x S scores of a sample of S tokens. If it has a mask, it keeps the mask for
    backward, in the dtype of the queries. Without this replacement the trace would have an unfused kernel, because
    torch does not choose fused kernels for meta tensors.

    Args:
        recorder: recorder of operations and memory.
        repeats_groups: True if keys and values are repeated for each query head, because CUDA's kernels with a mask
            need as many heads of keys and values as of queries.
        share: fraction of the S x S scores that a kernel without a mask computes, as the mean over the layers. A kernel
            with a mask computes all scores.
    """

    def __init__(self, recorder: TraceRecorder, *, repeats_groups: bool, share: float = 0.5) -> None:
        self._recorder, self._repeats_groups, self._share = recorder, repeats_groups, share

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: object
    ) -> Any:
        """Record attention, in place of `torch.nn.functional.scaled_dot_product_attention`."""
        if self._repeats_groups:
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        return self._attend(q, k, v, mask=attn_mask)

    def inside_documents(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        longest: int,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Record attention inside documents, in place of a `DocumentKernel` (model/attention.py).

        Every document has `longest` tokens, so q, k and v [tokens, heads, D] are split into samples of that length.
        D is the size of a head.
        """
        batch = q.shape[0] // longest
        k, v = (varlen_groups(x, q.shape[1]) for x in (k, v))
        q, k, v = (x.unflatten(0, (batch, longest)).transpose(1, 2) for x in (q, k, v))
        return self._attend(q, k, v, mask=None).transpose(1, 2).flatten(0, 1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None) -> Any:
        """Record the matrix products and memory of attention, and return a meta tensor [B, heads, S, D] as its output.

        The simulated kernel keeps inputs, output, mask and one fp32 number per query for backward. B is the number of
        samples, S their length in tokens, D the size of a head, and `groups` the number of heads of keys and values.

        Args:
            q: [B, heads, S, D] queries.
            k: [B, groups, S, D] keys.
            v: [B, groups, S, D] values.
            mask: [1 or B, 1, S, S] mask of the scores; None for causal attention.
        """
        batch, heads, seq, channels = q.shape
        kept = [q.new_empty(batch, heads, seq, dtype=torch.float32)]
        if mask is not None:
            kept.append(q.new_empty(mask.shape))
        count, touched = batch * heads * (self._share if mask is None else 1.0), _nbytes([q, k])

        def note(phase: str) -> None:
            # Forward has 2 matrix products: the scores and the weighted sum of values. Backward has 5: the scores
            # again, and the gradients of scores, q, k and v.
            for _ in range(2 if phase == FORWARD else 5):
                self._recorder.product(seq, seq, channels, count, touched)

        return _Fused.apply(note, kept, True, q, k, v)


def fused_norm(
    x: torch.Tensor, shape: object, weight: torch.Tensor, epsilon: float, *, recorder: TraceRecorder | None = None
) -> Any:
    """Return a tensor like RMSNorm's result, and record CUDA's fused kernel; replaces `torch.nn.functional.rms_norm`.

    The fused kernel keeps its input and one fp32 number per token for backward. For meta and CPU tensors torch composes
    RMSNorm from several operations, which keep four times as much memory.

    Args:
        x: [..., D] input.
        shape: ignored.
        weight: [D] factors.
        epsilon: ignored.
        recorder: recorder of the norm's operations; None to record none.
    """
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    touched = {FORWARD: _nbytes([x, weight, scale, x])}
    touched[BACKWARD] = touched[FORWARD] + _nbytes([x, weight])  # backward also writes the gradients of both

    def note(phase: str) -> None:
        if recorder is not None:
            recorder.note("memory", touched[phase])

    return _Fused.apply(note, [scale], False, x, weight)


class _Fused(torch.autograd.Function):
    """Simulated fused kernel, which computes nothing. Its output has the shape and the strides of its first input.

    For backward it keeps its inputs, the tensors `kept` and, if `keeps_output` is True, its output. It calls `note`
    with FORWARD or BACKWARD to record its operations.
    """

    @staticmethod
    def forward(
        ctx: Any, note: Callable[[str], None], kept: list[torch.Tensor], keeps_output: bool, *inputs: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        ctx.save_for_backward(*inputs, *kept, *([out] if keeps_output else []))
        ctx.note, ctx.count = note, len(inputs)
        note(FORWARD)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.note(BACKWARD)
        return None, None, None, *(torch.empty_like(x) for x in ctx.saved_tensors[: ctx.count])


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of a value that may consist of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of all given tensors together."""
    return sum(tensor.nbytes for tensor in tensors)
