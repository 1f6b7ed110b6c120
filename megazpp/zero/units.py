"""The sharding units of an FSDP2 model, and each unit's parameters in FSDP2's flat order.

A sharding unit is FSDP2's parameter group: the parameters that are gathered and reduced together. This file reads
FSDP2's private objects. For models of `megazpp.zeropp`, drop_in/units.py reads further private objects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megazpp.zero.wire import Segment, plan_segments

Fingerprint = tuple[object, ...]
U = TypeVar("U", bound="Unit")


@dataclass(frozen=True, kw_only=True)
class UnitParameter:
    """A parameter of a sharding unit: where the model registers the parameter, and how ranks shard and send it."""

    name: str  # name of the parameter in the model
    module: nn.Module  # module that registers the parameter; while gathered, FSDP2 registers another tensor there
    attribute: str  # name of the parameter in `module`
    shape: tuple[int, ...]  # shape unsharded over the data ranks, but local to this tensor-parallel rank
    exact: bool = False  # True if ranks always send the parameter unquantized, as its `ParameterSpec` says


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A sharding unit, FSDP2's parameter group: the parameters that are gathered and reduced together.

    ZeRO++'s collectives use the following members besides the fields. The planner simulates the collectives with units
    without tensors (planner/simulator.py), which implement these members:

        gather.py    is_sharded, is_frozen, fingerprint, shard_reader, input_reader, check_shard_reader
        reduce.py    trained, segments_of, has_gradients, add_to_gradients

    In a backward of FSDP2, which the planner does not run, reduce.py also uses clear_gradients, list_once,
    fill_gradients and with_gradient.
    """

    name: str = ""  # names of the unit's modules in the model, for messages to the user
    modules: tuple[FSDPModule, ...]  # the modules of one `fully_shard` call, usually one
    parameters: tuple[UnitParameter, ...]  # the unit's parameters in FSDP2's flat order
    num_shards: int = 1  # number of ranks over which dim 0 of each parameter is sharded
    segments: tuple[Segment, ...]  # the range of each parameter's elements in this rank's flat shard

    @property
    def key(self) -> str:
        """The name of the unit's first parameter, which identifies the unit in checkpoints and messages."""
        return self.parameters[0].name

    @property
    def is_sharded(self) -> bool:
        """True if the unit's modules hold the sharded parameters now, False if they hold the gathered parameters."""
        # Ask FSDP2, because the type of the tensors does not show whether they are sharded. Gathered parameters may be
        # DTensors too, as with tensor parallelism.
        return bool(self._group.is_sharded)

    def fingerprint(self) -> Fingerprint:
        """Return a tuple that changes when a parameter's shard is replaced or written to.

        `TwoHopGather` compares such tuples to detect that the weights have changed since they were sent. The tuple has
        one entry per parameter: the identity and the version counters of the shard. Fused and foreach optimizer steps
        on DTensors move no version counter, so the tuple does not change in these steps.
        """
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([(id(tensor), tensor._version, tensor._local_tensor._version) for tensor in shards])

    @property
    def is_frozen(self) -> bool:
        """True if no optimizer step can change the unit: none of its parameters requires or has a gradient."""
        return not any(tensor.requires_grad or tensor.grad is not None for tensor in self._tensors())

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """Return a function that copies this rank's shards of the unit's parameters into a new flat shard.

        The flat shard equals the input that FSDP2 passes to the unit's all-gather, so a gather can start before FSDP2
        asks for it. Returns None instead of a function while the parameters are gathered.

        Args:
            dtype: dtype of the flat shard, in which the weights are gathered.
        """
        if not self.is_sharded:
            return None
        shards = [p._sharded_param_data for p in self._group.fsdp_params]  # 1-D tensors, padded by FSDP2

        def read() -> torch.Tensor:
            """Copy this rank's shards of the unit's parameters into a new flat shard, with zeros as padding."""
            flat = torch.zeros(self.segments[-1].stop, dtype=dtype, device=shards[0].device)
            torch._foreach_copy_(_parts_of(flat, self.segments, shards), shards)
            return flat

        return read

    def input_reader(self, given: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that returns `given`, this rank's flat shard as FSDP2 has passed it to the all-gather.

        Subclasses override this method if FSDP2's input is not the flat shard: the planner's units without tensors, and
        units with weights in host memory (--optimizer-cpu-offload).
        """
        return lambda: given

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Raise RuntimeError if `shard_reader` does not reproduce the flat shard that this version of FSDP2 gathers.

        Call this method once before relying on `shard_reader`, which reads private objects of FSDP2.

        Args:
            expected: flat shard that FSDP2 has passed to the unit's all-gather.
        """
        read = self.shard_reader(expected.dtype)
        with torch.no_grad():
            if read is not None and not torch.equal(read().view(torch.uint8), expected.view(torch.uint8)):
                raise RuntimeError(
                    f"torch {torch.__version__} lays out the flat shard of the FSDP2 unit with {self.key} in an "
                    "unknown way, so weights cannot be read before FSDP2 gathers them: use torch 2.11 to 2.15"
                )

    def shards(self) -> list[torch.Tensor]:
        """Return this rank's local shard of each of the unit's parameters, to read it or to write to it in place.

        Call this method while the unit is sharded.
        """
        return [tensor._local_tensor.detach() for tensor in self._tensors()]

    @contextmanager
    def unsharded(self) -> Iterator[list[torch.Tensor]]:
        """Gather the unit, yield its gathered parameters as a list, and reshard the unit at the end of the context."""
        for module in self.modules:
            module.unshard()
        yield [getattr(p.module, p.attribute) for p in self.parameters]
        for module in self.modules:
            module.reshard()

    @contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Return a context in which FSDP2 does not free the unit's gathered parameters after a forward."""
        group, state = self._group, self.modules[0]._get_fsdp_state()
        before, group.post_forward_mesh_info = group.post_forward_mesh_info, None
        try:
            yield
        finally:
            # At a model's first forward, FSDP2 sets `post_forward_mesh_info` of the root unit to None, so that the
            # root's parameters stay gathered after a forward. FSDP2 does not do so if the program has passed
            # `reshard_after_forward`. The first forward may have run in this context, so `before` may be outdated.
            keeps = state._is_root and state._auto_reshard_after_forward
            group.post_forward_mesh_info = None if keeps else before

    def as_dtensors(self, shards: Sequence[torch.Tensor]) -> dict[str, DTensor]:
        """Wrap one local tensor per parameter as DTensors that are sharded like the unit's parameters.

        Args:
            shards: local tensors with the shapes of this rank's shards of the parameters.
        Returns:
            The DTensors by parameter name. They share the memory of `shards`.
        """
        found = {}
        for shard, like, p in zip(shards, self._tensors(), self.parameters, strict=True):
            unsharded = {"shape": like.shape, "stride": like.stride()}
            found[p.name] = DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **unsharded)
        return found

    def as_parameters(self, flat: torch.Tensor) -> dict[str, DTensor]:
        """Return views of a flat shard of S elements as DTensors by parameter name, sharded like the unit's parameters.

        Call this method while the unit is sharded.
        """
        shards = self.shards()
        parts = _parts_of(flat, self.segments, [shard.view(-1) for shard in shards])
        return self.as_dtensors([part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)])

    def segments_of(self, indices: Sequence[int]) -> tuple[Segment, ...]:
        """Return the segments of a flat shard that holds only the unit's parameters with these indices.

        FSDP2 makes such a flat shard if a backward computes gradients for only some parameters of the unit.
        """
        if (key := tuple(indices)) not in self._known_segments:
            found: list[Segment] = []
            for index in indices:
                segment = self.segments[index]
                found.append(dataclasses.replace(segment, start=found[-1].stop if found else 0))
            self._known_segments[key] = tuple(found)
        return self._known_segments[key]

    @functools.cached_property
    def _known_segments(self) -> dict[tuple[int, ...], tuple[Segment, ...]]:
        """The cache of `segments_of` by tuple of parameter indices: each backward asks for the same few tuples."""
        return {}

    @property
    def trained(self) -> tuple[int, ...]:
        """The indices of the unit's parameters that require a gradient now.

        The property is not cached: a program may freeze parameters during a run, and FSDP2 reads `requires_grad` at
        each use too.
        """
        return tuple(i for i, p in enumerate(self._group.fsdp_params) if p.sharded_param.requires_grad)

    # ---- gradients: hook into FSDP2's reduction, and fill, clear or add to gradients -------------------------------

    def replace_post_backward(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Make FSDP2 call `reduce` instead of its own function that reduces the unit's gradients after a backward.

        Returns FSDP2's own function, which `reduce` may call.
        """
        original, self._group.post_backward = self._group.post_backward, reduce
        return original

    def list_once(self) -> None:
        """Make FSDP2 visit this unit once at the end of a backward, not once per module of the unit.

        FSDP2 goes through the list `all_states` then. In torch 2.11 the list has one entry per module, so it contains
        the state of a unit with several modules several times. For each entry after the first one, FSDP2 would reduce
        the unit again, with zeros as gradients.
        """
        if len(self.modules) > 1:
            states: list[Any] = self.modules[0]._get_fsdp_state()._state_ctx.all_states
            states[:] = dict.fromkeys(states)

    @property
    def reduces_gradients(self) -> bool:
        """True if FSDP2 reduces the unit's gradients after each backward.

        False after `set_requires_gradient_sync(False)`: FSDP2 then accumulates gradients without communication.
        """
        return bool(self._group.reduce_grads)

    def with_gradient(self) -> tuple[int, ...]:
        """Return the indices of the unit's parameters that have, on this rank, a gradient that is not reduced yet."""
        found = enumerate(self._group.fsdp_params)
        return tuple([index for index, parameter in found if _has_gradient(parameter)])

    def fill_gradients(self, indices: Collection[int]) -> None:
        """Give a zero gradient to each of the unit's parameters `indices` that has no gradient to reduce.

        FSDP2 then passes gradients of the same parameters to the reduce-scatter on all ranks. Parameters that were
        never gathered, or that have no elements, get no zero gradient. torch 2.13 and newer have an option to fill in
        zeros (`set_reduce_scatter_unused_params`), torch 2.11 does not.
        """
        parameters = self._group.fsdp_params
        missing = [parameters[index] for index in indices if not _has_gradient(parameters[index])]
        # torch 2.15 accumulates gradients in `.grad` of the gathered parameter, and `unsharded_accumulated_grad` is a
        # property there. Earlier versions have an attribute of this name, which is a separate tensor.
        in_grad = isinstance(getattr(type(parameters[0]), "unsharded_accumulated_grad", None), property)
        accumulated = [p.unsharded_accumulated_grad for p in parameters] if missing and not in_grad else []
        dtype = next((gradient.dtype for gradient in accumulated if gradient is not None), None)
        for parameter in missing:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is None or not gathered.numel():
                continue
            zeros = torch.zeros_like(gathered, dtype=gathered.grad_dtype if in_grad else dtype, requires_grad=False)
            if dtype is None:
                gathered.grad = zeros
            else:  # use the dtype of the unit's accumulated gradients, because FSDP2 reduces a unit in one dtype
                parameter.unsharded_accumulated_grad = zeros

    def has_gradients(self, indices: Sequence[int]) -> bool:
        """Return True if any of the unit's parameters with these indices has a reduced gradient (`.grad`).

        FSDP2 adds the next reduced gradient to an existing one instead of replacing it.
        """
        return any(self._group.fsdp_params[index].sharded_param.grad is not None for index in indices)

    def clear_gradients(self, indices: Collection[int]) -> None:
        """Set the reduced gradients (`.grad`) of the unit's parameters with these indices to None."""
        for index in indices:
            self._group.fsdp_params[index].sharded_param.grad = None

    def add_to_gradients(
        self, reduced: torch.Tensor, indices: Sequence[int], gradients: Sequence[Any] | None = None
    ) -> None:
        """Add a flat shard of reduced gradients to the gradients of the unit's parameters, in place.

        Args:
            reduced: [S] flat shard of S elements with this rank's shards of the reduced gradients.
            indices: indices, in the unit, of the parameters whose gradients `reduced` holds.
            gradients: DTensors to add to, one per index; None in the sequence skips its parameter. By default they are
                the parameters' `.grad`.
        """
        if gradients is None:
            gradients = [self._group.fsdp_params[index].sharded_param.grad for index in indices]
        parts = zip(self.segments_of(indices), gradients, strict=True)
        wanted = [(s, gradient._local_tensor.view(-1)) for s, gradient in parts if gradient is not None]
        if not wanted:
            return
        # FSDP2's reduce stream has written `.grad`. FSDP2 makes the compute stream wait for that stream only later, but
        # the addition below needs `.grad` now.
        if reduced.is_cuda:
            torch.cuda.current_stream().wait_stream(self._group.comm_ctx.reduce_scatter_stream)
        with torch.no_grad():
            flat = [local for _, local in wanted]
            torch._foreach_add_(flat, [reduced[s.start : s.start + len(local)] for s, local in wanted])

    @functools.cached_property
    def _group(self) -> Any:
        """FSDP2's private object (`FSDPParamGroup`) for the unit, the same for the lifetime of the unit's modules."""
        return self.modules[0]._get_fsdp_state()._fsdp_param_group

    def _tensors(self) -> list[Any]:
        """Return the tensors that the unit's modules hold as parameters now.

        While the unit is sharded, they are the sharded parameters, otherwise the gathered parameters.
        """
        # Access to `_parameters` takes half the host time of `getattr`.
        return [p.module._parameters[p.attribute] for p in self.parameters]


def find_units(model: nn.Module, *, unit_class: type[U], data_dims: int = 1) -> list[U]:
    """Return the sharding units of a model that FSDP2 has wrapped, the outermost unit first.

    Call this function while the parameters are sharded. A wrapped module whose parameters all belong to nested units
    makes no unit.

    Args:
        model: model that `fully_shard` has wrapped.
        unit_class: class of the returned units.
        data_dims: number of leading dims of the parameters' mesh that belong to FSDP2. The remaining mesh dims are
            tensor-parallel.
    Raises:
        TypeError: `fully_shard` has not wrapped `model`.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} is not wrapped by fully_shard: call fully_shard(model) first")
    names = {module: name for name, module in model.named_modules()}
    wrapped = (module for module in model.modules() if isinstance(module, FSDPModule))
    states: dict[Any, None] = dict.fromkeys(module._get_fsdp_state() for module in wrapped)
    units = []
    for state in states:
        # `_modules` has the order of the `fully_shard` call, in which FSDP2 also concatenates the modules' parameters.
        modules = tuple(module for module in state._modules if module in names)
        seen: set[object] = set()
        found = [p for module in modules for p in _parameters(module, names, seen, data_dims)]
        if not found:
            continue
        shapes = [(p.name, p.shape) for p in found]
        mesh = found[0].module._parameters[found[0].attribute].device_mesh  # type: ignore[union-attr]
        unit = unit_class(
            name=", ".join(names[module] or "the rest" for module in modules),
            modules=modules,
            parameters=tuple(found),
            num_shards=mesh.size(data_dims - 1),
            segments=plan_segments(shapes, mesh.size(data_dims - 1), exact={p.name for p in found if p.exact}),
        )
        units.append(unit)
    return units


def _has_gradient(fsdp_parameter: Any) -> bool:
    """Return True if a parameter, given as FSDP2's private `FSDPParam`, has a gradient that was not reduced yet."""
    # FSDP2 sets this attribute at the first all-gather. Before that, the parameter cannot have a gradient.
    gathered = getattr(fsdp_parameter, "_unsharded_param", None)
    return fsdp_parameter.unsharded_accumulated_grad is not None or getattr(gathered, "grad", None) is not None


def _parts_of(flat: torch.Tensor, segments: Sequence[Segment], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat shard, one per parameter, without FSDP2's padding.

    Args:
        flat: 1-D flat shard of a sharding unit.
        segments: segments of the flat shard, one per parameter.
        like: 1-D tensors whose lengths are the numbers of elements without padding, one per parameter.
    """
    padded = flat.split([segment.size for segment in segments])
    return [part if part.shape == other.shape else part[: len(other)] for part, other in zip(padded, like, strict=True)]


def _parameters(
    root: nn.Module, names: dict[nn.Module, str], seen: set[object], data_dims: int
) -> Iterator[UnitParameter]:
    """Yield the parameters below a module in the order of FSDP2's flat shard: depth first, children before parents.

    Nested FSDP2 modules are skipped, because they are separate units. A shared parameter appears only at its first
    position. Parameters in FSDP2's `ignored_params` are not DTensors and are skipped.

    Args:
        root: module that `fully_shard` has wrapped, or one of its descendants in the recursion.
        names: name in the model of each module.
        seen: modules and parameters of the unit that were visited before. This function adds each module and parameter
            that it visits.
        data_dims: number of leading dims of the parameters' mesh that belong to FSDP2.
    """
    for child in root.children():
        if not isinstance(child, FSDPModule) and child not in seen:
            yield from _parameters(child, names, seen, data_dims)
    seen.add(root)
    specs = getattr(root, "specs", {})
    for attribute, tensor in root.named_parameters(recurse=False):
        if tensor in seen or not isinstance(tensor, DTensor):
            continue
        seen.add(tensor)
        shape = list(tensor.shape)
        for mesh_dim, placement in enumerate(tensor.placements[data_dims:], data_dims):
            # Tensor-parallel ranks split this dim evenly, but `tensor.shape` is the shape over all of them.
            if isinstance(placement, Shard):
                shape[placement.dim] //= tensor.device_mesh.size(mesh_dim)
        yield UnitParameter(
            name=f"{names[root]}.{attribute}".lstrip("."),
            module=root,
            attribute=attribute,
            shape=tuple(shape),
            exact=attribute in specs and specs[attribute].exact,
        )
