"""The model's own code, run once on the meta device: what it computes, sends over tp and cp and keeps for backward.

One file of more than 300 lines: one recorder files operations, traffic and storages by the same segments (the
embedding, a layer or the head, in forward or backward), so that they are those of the code and not of a formula beside
it. At most three layers are run, since all are alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazpp.model.backends import repeated, varlen_groups
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.muon_plan import LayerMatrix, layer_matrices
from megazpp.parallel.axis import TrafficCounter
from megazpp.planner.cost import Operation
from megazpp.planner.paper import PaperAxis, Parameters
from megazpp.tensor_parallel.layers import Product
from megazpp.tensor_parallel.parameters import partial_parameters
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import plan_layout
from megazpp.training.flops import keys_per_token

FORWARD, BACKWARD = "forward", "backward"
Documents = Literal["kernel", "mask", "CPU's mask"]  # how attention stays inside them
FLOAT8_ON_PAPER: Product = F.linear  # keeps what float8 products keep, where they stand between tp's collectives
MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
FREE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::_unsafe_view")


@dataclass
class TraceSegment:
    """One part of the model in forward or backward.

    Attributes:
        kept: bytes that live when it is done, less those before it; `gradients` of them are whole gradients.
        peak: most bytes that live while it runs, above those before it.
    """

    operations: list[Operation] = field(default_factory=list)
    kept: int = 0
    peak: int = 0
    gradients: int = 0


class Trace(NamedTuple):
    """One micro-batch.

    Attributes:
        segments: by (FORWARD or BACKWARD, index); embedding 0, layers 1 to n, head n + 1.
        units: trained parameters of each sharding unit, in the order of use.
        frozen: its parameters that are not trained.
        partial: parameters of whose gradient each tp rank has a part.
        matrices: those of the layers that are trained, as Muon takes them.
        tied: the first unit holds embedding, final norm and output, and is in use from the first to the last segment.
    """

    segments: dict[tuple[str, int], TraceSegment]
    units: tuple[Parameters, ...]
    frozen: tuple[Parameters, ...]
    partial: Parameters
    matrices: tuple[LayerMatrix, ...]
    tied: bool

    @property
    def num_segments(self) -> int:
        return len(self.segments) // 2


@functools.cache
def trace_model(
    config: GPTConfig,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    tp: int,
    cp: int = 1,
    sequence_parallel: bool,
    dtype: torch.dtype,
    documents: Documents | None = None,
    with_entropy: bool = False,
    prepare: Callable[[GPTModel], None] | None = None,
) -> Trace:
    """Run one micro-batch on paper, once for all calls with equal arguments.

    Args:
        documents: how attention stays inside documents, each of which is as long as a sample; None if it need not.
        with_entropy: also ask for the entropy of the predictions.
        prepare: changes the model, or which of its parameters are trained; where none is there is no backward.
    """
    again = 1 if config.recompute_method == "block" else None  # the first layer is run again, the second is not
    # where something is frozen: no gradient leaves the first layer, and its input is freed in the second
    most = 2 if prepare is None else 3
    alike: dict[str, Any] = {"window_attn_skip_freq": None, "no_rope_freq": None}  # layers differ in products alone
    shape = dataclasses.replace(config, num_layers=min(config.layers, most), recompute_num_layers=again, **alike)
    keys = sum(keys_per_token(seq_length, span) for span in config.attention_span) / config.layers
    recorder = TraceRecorder()
    layout = plan_layout(Cluster(num_nodes=1, ranks_per_node=tp * cp), tp=tp, replicas=1, cp=cp)
    paper_axis = functools.partial(PaperAxis, layout, rank=0, counter=TrafficCounter())
    attention = FusedAttention(recorder, repeats_groups=documents == "mask", share=keys / seq_length)
    with torch.device("meta"):
        model = GPTModel(
            shape,
            vocab_size=vocab_size,
            tp=paper_axis("tp", cost=recorder.note),
            cp=paper_axis("cp", cost=functools.partial(recorder.note, axis="cp")),
            sequence_parallel=sequence_parallel,
            document_kernel=attention.inside_documents if documents == "kernel" else None,
            product=FLOAT8_ON_PAPER if config.fp8_format else None,
        )
        if prepare is not None:
            prepare(model)
        model.to(dtype)
        starts = torch.empty(micro_batch_size + 1, dtype=torch.int32) if documents else None
        tokens = torch.empty(micro_batch_size, seq_length, dtype=torch.int64)
        mask = torch.empty(micro_batch_size, seq_length)
    recorder.watch(model)
    with recorder, attention, FusedNorm(recorder):
        trained = any(parameter.requires_grad for parameter in model.parameters())
        with torch.set_grad_enabled(trained):
            found = model(tokens, tokens, document_starts=starts, with_entropy=with_entropy)
            loss = ((found.losses if with_entropy else found) * mask).sum()
        recorder.enter((BACKWARD, shape.layers + 1))
        if trained:
            loss.backward()
        recorder.enter((BACKWARD, -1))
    units, frozen = (_units(model, config.layers, trained=trained) for trained in (True, False))
    first_layer = functools.partial(re.sub, r"^layers\.\d+\.", "layers.0.")  # the same parameter's name there
    partial = {first_layer(name) for name in partial_parameters(model)}
    twice = shape.layers > 1 and config.recompute_method == "block"  # the second stands for those not run again
    like = [2 if twice and not config.recomputes_layer(index) else 1 for index in range(config.layers)]
    if prepare is not None and not twice:
        like = [min(index + 1, most) for index in range(config.layers)]
    return Trace(
        segments={
            (phase, index): recorder.segments[phase, traced]
            for phase in (FORWARD, BACKWARD)
            for index, traced in enumerate((0, *like, shape.layers + 1))
        },
        units=units,
        frozen=frozen,
        partial=[(name, shape) for unit in units for name, shape in unit if first_layer(name) in partial],
        matrices=tuple(
            matrix._replace(name=matrix.name.replace("layers.0.", f"layers.{index}.", 1))
            for index in range(config.layers)
            for matrix in layer_matrices(model, tp)
            if matrix.name.startswith("layers.0.")
        ),
        tied=config.tied,
    )


def _units(model: GPTModel, num_layers: int, *, trained: bool) -> tuple[Parameters, ...]:
    """Parameters of the units in FSDP2's flat order, which is `named_parameters()`'s; the root's first."""
    rest = dict(model.named_parameters())
    names = {parameter: name for name, parameter in rest.items()}
    units: list[Parameters] = []

    def chosen(parameters: Iterable[torch.nn.Parameter]) -> Parameters:
        return [(names[p], tuple(p.shape)) for p in parameters if p.requires_grad == trained]

    for modules in model.sharding_units():
        parameters = [p for module in modules for p in module.parameters()]
        unit, first = chosen(parameters), names[parameters[0]]
        for p in parameters:
            del rest[names[p]]
        if first.startswith("layers.0."):
            for index in range(num_layers):
                units.append([(name.replace("layers.0.", f"layers.{index}.", 1), shape) for name, shape in unit])
        elif not first.startswith("layers."):
            units.append(unit)
    return (chosen(rest.values()), *units) if rest else tuple(units)


class TraceRecorder(TorchDispatchMode):
    """Notes every operation and every storage, by segment of the model that it watches."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[tuple[str, int], TraceSegment] = defaultdict(TraceSegment)
        self._now = self.segments[FORWARD, 0]
        self._live = self._before = 0  # bytes of the storages that have been seen, now and when the segment began
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, model: GPTModel) -> None:
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(self._accumulated)
        for index, module in enumerate([model.embedding, *model.layers]):
            module.register_forward_pre_hook(functools.partial(self.enter, (FORWARD, index)))
            module.register_forward_hook(self._leaving(index))

    def note(self, kind: str, size: int, *, axis: str = "tp") -> None:
        """A collective, or one kernel that reads and writes `size` bytes of "memory"."""
        self._now.operations.append(Operation(kind, size, axis=axis))

    def product(self, m: int, n: int, k: int, batch: float, touched: int) -> None:
        self._now.operations.append(Operation("matrix", touched, m, n, k, batch))

    def enter(self, key: tuple[str, int], *_: object) -> None:
        """Begin a segment, or go on with it."""
        self._now.kept += self._live - self._before
        self._now, self._before = self.segments[key], self._live

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._now.gradients += parameter.nbytes

    def _leaving(self, index: int) -> Callable[..., None]:
        def leave(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            self.enter((FORWARD, index + 1))
            if output.requires_grad:
                output.register_hook(functools.partial(self.enter, (BACKWARD, index)))

        return leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        name, outputs, inputs = func.name().split(".")[0], _tensors(result), _tensors((args, given))
        owned = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in owned]
        for tensor in fresh:
            self._see(tensor.untyped_storage())
        self._now.peak = max(self._now.peak, self._live - self._before)
        if name in MATRIX:
            a, b = inputs[-2:]
            self.product(a.shape[-2], b.shape[-1], a.shape[-1], math.prod(a.shape[:-2]), _nbytes(inputs + outputs))
        elif not func.is_view and name not in FREE and (fresh or func._schema.is_mutable):
            self.note("memory", _nbytes(inputs + fresh))
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage while it lives; its size does not change."""

        def count(size: int) -> None:
            self._live += size

        if storage not in self._known:
            self._known.add(storage)
            count(storage.nbytes())
            weakref.finalize(storage, count, -storage.nbytes())


class FusedAttention(TorchFunctionMode):
    """Attention as the fused kernels do it, which meta tensors do not choose: no scores of S x S are kept.

    A mask is kept, in the dtype of the queries.

    Args:
        repeats_groups: whether keys and values of a group are repeated: CUDA's kernels take no groups beside a mask.
        share: share of scores that is computed where there is no mask, on average over the layers.
    """

    def __init__(self, recorder: TraceRecorder, *, repeats_groups: bool, share: float = 0.5) -> None:
        super().__init__()
        self._recorder, self._repeats_groups, self._share = recorder, repeats_groups, share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        if self._repeats_groups:
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        return self._attend(q, k, v, mask=kwargs.get("attn_mask"))

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
        """A DocumentKernel: as if every document were `longest` tokens long."""
        batch = q.shape[0] // longest
        k, v = (varlen_groups(x, q.shape[1]) for x in (k, v))
        q, k, v = (x.unflatten(0, (batch, longest)).transpose(1, 2) for x in (q, k, v))
        return self._attend(q, k, v, mask=None).transpose(1, 2).flatten(0, 1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None) -> Any:
        """q [B, heads, S, D], k, v [B, groups, S, D] -> [B, heads, S, D]; keeps these, one fp32 per query, the mask."""
        batch, heads, seq, channels = q.shape
        kept = [q.new_empty(batch, heads, seq, dtype=torch.float32)]
        if mask is not None:
            kept.append(q.new_empty(mask.shape))
        count, touched = batch * heads * (self._share if mask is None else 1.0), _nbytes([q, k])

        def note(phase: str) -> None:  # scores and weighted sum; scores again, and gradients of scores, q, k and v
            for _ in range(2 if phase == FORWARD else 5):
                self._recorder.product(seq, seq, channels, count, touched)

        return _Fused.apply(note, kept, True, q, k, v)


class FusedNorm(TorchFunctionMode):
    """RMSNorm as CUDA's fused kernel does it: its input and one fp32 per row are kept.

    Meta and CPU tensors take torch's composite, which keeps four times as much.
    """

    def __init__(self, recorder: TraceRecorder | None = None) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.rms_norm:
            x, _, weight = (*args, *(kwargs or {}).values())[:3]
            scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
            touched = {FORWARD: _nbytes([x, weight, scale, x])}
            touched[BACKWARD] = touched[FORWARD] + _nbytes([x, weight])  # the gradients' are as large

            def note(phase: str) -> None:
                if self._recorder:
                    self._recorder.note("memory", touched[phase])

            return _Fused.apply(note, [scale], False, x, weight)
        if func is torch.Tensor.backward:  # would turn this mode off, which recomputation needs
            loss = args[0]
            with self:
                return Variable._execution_engine.run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    """A fused kernel: its output is like its first input and lies as that in memory; it keeps its inputs and `kept`."""

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
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
