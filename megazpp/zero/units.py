"""The sharding units of an FSDP2 model and their parameters in FSDP2's flat order.

A unit is what FSDP2 calls a parameter group. This file reads FSDP2's private objects; for models of `megazpp.zeropp`
drop_in/units.py reads more of them.
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
    """One parameter of a sharding unit."""

    name: str
    module: nn.Module  # module that registers the parameter; while gathered, FSDP2 registers another object there
    attribute: str  # attribute name in that module
    shape: tuple[int, ...]  # full over the data ranks, local to this tensor-parallel rank
    mesh_dims: int  # dims of the sharded DTensor's mesh; a gathered parameter is a plain tensor or on the tp mesh alone
    exact: bool = False  # never quantized between ranks, as its `ParameterSpec` says


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A sharding unit, FSDP2's parameter group: the parameters that are gathered and reduced together.

    The collectives use these members besides the fields, which a unit without tensors replaces (planner/simulator.py):

        gather.py    is_sharded, is_frozen, fingerprint, shard_reader, input_reader, check_shard_reader
        reduce.py    trained, segments_of, has_gradients, add_to_gradients; through FSDP2 also clear_gradients,
                     list_once, fill_gradients, with_gradient
    """

    name: str = ""  # names of its modules in the model, for messages to the user
    modules: tuple[FSDPModule, ...]  # the modules of one `fully_shard` call, usually one
    parameters: tuple[UnitParameter, ...]  # in FSDP2's flat order
    num_shards: int = 1  # number of ranks over which dim 0 of each parameter is sharded
    segments: tuple[Segment, ...]  # the place of each parameter in this rank's flat shard

    @property
    def key(self) -> str:
        """The name of the unit's first parameter, which identifies the unit."""
        return self.parameters[0].name

    @property
    def is_sharded(self) -> bool:
        """True if the modules hold the sharded parameters now, False if they hold the gathered ones."""
        # With tensor parallelism gathered parameters are DTensors too, but on a mesh with fewer dims.
        tensors = zip(self._tensors(), self.parameters, strict=True)
        return all(isinstance(t, DTensor) and t.device_mesh.ndim == p.mesh_dims for t, p in tensors)

    def fingerprint(self) -> Fingerprint:
        """Return a value per parameter that changes if its shard is replaced, or if a write moves its version counter.

        Fused and foreach optimizer steps on DTensors move no version counter.
        """
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([(id(tensor), tensor._version, tensor._local_tensor._version) for tensor in shards])

    @property
    def is_frozen(self) -> bool:
        """True if no optimizer step can change the unit: no parameter requires a gradient or has one."""
        return not any(tensor.requires_grad or tensor.grad is not None for tensor in self._tensors())

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """Return a function that builds this rank's flat shard [S], equal to FSDP2's input of the unit's all-gather.

        Returns None while the parameters are gathered.

        Args:
            dtype: dtype of the flat shard.
        """
        if not self.is_sharded:
            return None
        shards = [p._sharded_param_data for p in self._group.fsdp_params]  # 1-D, with FSDP2's padding

        def read() -> torch.Tensor:
            """Copy the shards into a flat shard [S], with zeros as padding."""
            flat = torch.zeros(self.segments[-1].stop, dtype=dtype, device=shards[0].device)
            torch._foreach_copy_(_parts_of(flat, self.segments, shards), shards)
            return flat

        return read

    def input_reader(self, given: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that returns this rank's flat shard [S], as FSDP2 has passed it to the all-gather."""
        return lambda: given

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Raise RuntimeError if `shard_reader` does not reproduce the flat shard that this version of FSDP2 gathers.

        Call it once before relying on `shard_reader`.

        Args:
            expected: [S] the input that FSDP2 passed to the all-gather.
        """
        read = self.shard_reader(expected.dtype)
        with torch.no_grad():
            if read is not None and not torch.equal(read().view(torch.uint8), expected.view(torch.uint8)):
                raise RuntimeError(
                    f"torch {torch.__version__} lays out the shard of {self.key} in an unknown way: use torch 2.11 to "
                    "2.15"
                )

    def shards(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter, for reading or in-place writing. The unit must be sharded."""
        return [tensor._local_tensor.detach() for tensor in self._tensors()]

    @contextmanager
    def unsharded(self) -> Iterator[list[torch.Tensor]]:
        """Gather the unit in this context, which yields each parameter as the modules then hold it."""
        for module in self.modules:
            module.unshard()
        yield [getattr(p.module, p.attribute) for p in self.parameters]
        for module in self.modules:
            module.reshard()

    def as_dtensors(self, shards: Sequence[torch.Tensor]) -> dict[str, DTensor]:
        """Return tensors shaped like `shards` as DTensors by parameter name.

        They have the meshes and placements of the unit's parameters.
        """
        found = {}
        for shard, like, p in zip(shards, self._tensors(), self.parameters, strict=True):
            whole = {"shape": like.shape, "stride": like.stride()}
            found[p.name] = DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **whole)
        return found

    def as_parameters(self, flat: torch.Tensor) -> dict[str, DTensor]:
        """Return views of a flat shard [S] as DTensors by parameter name, sharded like the parameters.

        The unit must be sharded.
        """
        shards = self.shards()
        parts = _parts_of(flat, self.segments, [shard.view(-1) for shard in shards])
        return self.as_dtensors([part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)])

    def segments_of(self, indices: Sequence[int]) -> tuple[Segment, ...]:
        """Return the segments of a flat shard that holds only the parameters `indices`.

        FSDP2 lays out the gradients of a backward in this way.
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
        """The cache of `segments_of`: each backward asks for the same few index tuples."""
        return {}

    @property
    def trained(self) -> tuple[int, ...]:
        """Indices of the parameters that require a gradient now; FSDP2 also reads this at each use."""
        return tuple(i for i, p in enumerate(self._group.fsdp_params) if p.sharded_param.requires_grad)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def replace_post_backward(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Replace the function with which FSDP2 reduces the unit's gradients, and return FSDP2's function."""
        original, self._group.post_backward = self._group.post_backward, reduce
        return original

    def list_once(self) -> None:
        """Remove repetitions of this unit from FSDP2's list of the units that it visits at the end of a backward.

        torch 2.11 lists a unit once per module, and would reduce a unit of several modules again, as zeros.
        """
        if len(self.modules) > 1:
            states: list[Any] = self.modules[0]._get_fsdp_state()._state_ctx.all_states
            states[:] = dict.fromkeys(states)

    @property
    def reduces_gradients(self) -> bool:
        """False if FSDP2 accumulates gradients without communication, as set by `set_requires_gradient_sync(False)`."""
        return bool(self._group.reduce_grads)

    def with_gradient(self) -> tuple[int, ...]:
        """Return the indices of the parameters that have a gradient on this rank which FSDP2 has not reduced yet."""
        found = enumerate(self._group.fsdp_params)
        return tuple([index for index, parameter in found if _has_gradient(parameter)])

    def fill_gradients(self, indices: Collection[int]) -> None:
        """Set zero gradients where the parameters `indices` have none, so that FSDP2 reduces them with the others.

        Parameters that were never gathered or have no elements are left alone. torch 2.13 has an option for this
        (`set_reduce_scatter_unused_params`), torch 2.11 does not.
        """
        parameters = self._group.fsdp_params
        missing = [parameters[index] for index in indices if not _has_gradient(parameters[index])]
        # torch 2.15 accumulates in `.grad` of the gathered parameter; there the attribute is a property
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
            else:  # FSDP2 reduces one dtype per unit, and has accumulated earlier backwards in this dtype
                parameter.unsharded_accumulated_grad = zeros

    def has_gradients(self, indices: Sequence[int]) -> bool:
        """Return True if any of the parameters `indices` has a reduced gradient, to which FSDP2 would add."""
        return any(self._group.fsdp_params[index].sharded_param.grad is not None for index in indices)

    def clear_gradients(self, indices: Sequence[int]) -> None:
        """Set the reduced gradients of the parameters `indices` to None."""
        for index in indices:
            self._group.fsdp_params[index].sharded_param.grad = None

    def add_to_gradients(
        self, reduced: torch.Tensor, indices: Sequence[int], gradients: Sequence[Any] | None = None
    ) -> None:
        """Add a reduced flat shard to the unit's gradients in place.

        Args:
            reduced: [S] flat shard of the gradients of the parameters `indices`.
            indices: indices of the parameters.
            gradients: gradients to add to, None for a parameter that is skipped; by default the `.grad` of each.
        """
        if gradients is None:
            gradients = [self._group.fsdp_params[index].sharded_param.grad for index in indices]
        parts = zip(self.segments_of(indices), gradients, strict=True)
        wanted = [(s, gradient._local_tensor.view(-1)) for s, gradient in parts if gradient is not None]
        if not wanted:
            return
        if reduced.is_cuda:  # FSDP2 makes the compute stream wait for its reduce stream only after the whole backward
            torch.cuda.current_stream().wait_stream(self._group.comm_ctx.reduce_scatter_stream)
        with torch.no_grad():
            flat = [own for _, own in wanted]
            torch._foreach_add_(flat, [reduced[s.start : s.start + len(own)] for s, own in wanted])

    @functools.cached_property
    def _group(self) -> Any:
        """FSDP2's private object for the unit; it stays the same for the lifetime of the unit's modules."""
        return self.modules[0]._get_fsdp_state()._fsdp_param_group

    def _tensors(self) -> list[Any]:
        """Return the tensors that the modules hold now, sharded or gathered."""
        return [p.module._parameters[p.attribute] for p in self.parameters]  # twice as fast as `getattr`


def find_units(model: nn.Module, *, unit_class: type[U], data_dims: int = 1) -> list[U]:
    """Return the sharding units of a wrapped model, the outermost last. The parameters must be sharded.

    Args:
        model: a model that `fully_shard` has wrapped.
        unit_class: class of the units.
        data_dims: number of leading mesh dims that belong to FSDP2; the remaining ones are tensor-parallel.
    Raises:
        TypeError: `fully_shard` has not wrapped `model`.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} is not wrapped by fully_shard: call fully_shard(model) first")
    names = {module: name for name, module in model.named_modules()}
    states: dict[object, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            states.setdefault(module._get_fsdp_state(), []).append(module)
    units = []
    for modules in states.values():
        seen: set[object] = set()
        found = [p for module in modules for p in _parameters(module, names, seen, data_dims)]
        if not found:
            continue
        shapes = [(p.name, p.shape) for p in found]
        mesh = found[0].module._parameters[found[0].attribute].device_mesh  # type: ignore[union-attr]
        unit = unit_class(
            name=", ".join(names[module] or "the rest" for module in modules),
            modules=tuple(modules),
            parameters=tuple(found),
            num_shards=mesh.size(data_dims - 1),
            segments=plan_segments(shapes, mesh.size(data_dims - 1), exact={p.name for p in found if p.exact}),
        )
        units.append(unit)
    return units


def _has_gradient(fsdp_parameter: Any) -> bool:
    """Return True if FSDP2's private object of a parameter has a gradient that was not reduced yet."""
    gathered = getattr(fsdp_parameter, "_unsharded_param", None)  # None before the first use
    return fsdp_parameter.unsharded_accumulated_grad is not None or getattr(gathered, "grad", None) is not None


def _parts_of(flat: torch.Tensor, segments: Sequence[Segment], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat shard [S], one per segment, without FSDP2's padding.

    Args:
        flat: [S] the flat shard.
        segments: the segments of the flat shard.
        like: 1-D tensors whose lengths are the unpadded sizes.
    """
    padded = flat.split([segment.size for segment in segments])
    return [part if part.shape == other.shape else part[: len(other)] for part, other in zip(padded, like, strict=True)]


def _parameters(
    root: nn.Module, names: dict[nn.Module, str], seen: set[object], data_dims: int
) -> Iterator[UnitParameter]:
    """Yield a unit's parameters in FSDP2's order: depth first, children before their parent.

    Nested units are skipped, and a shared parameter appears once, at its first place. Parameters in `ignored_params`
    are not DTensors and are skipped too.
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
            if isinstance(placement, Shard):  # over tensor-parallel ranks
                shape[placement.dim] //= tensor.device_mesh.size(mesh_dim)
        yield UnitParameter(
            name=f"{names[root]}.{attribute}".lstrip("."),
            module=root,
            attribute=attribute,
            shape=tuple(shape),
            mesh_dims=tensor.device_mesh.ndim,
            exact=attribute in specs and specs[attribute].exact,
        )
