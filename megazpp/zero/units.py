"""The sharding units of an FSDP2 model and their parameters in FSDP2's flat order.

A unit is what FSDP2 calls a parameter group. One file of more than 300 lines, because only this file reads FSDP2's
private objects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megazpp.zero.wire import QUANTIZABLE, Segment, plan_segments

Fingerprint = tuple[object, ...]
# The end of an error about a hook that would run before the overlapped reduction has finished
EARLY = (
    ", which would see gradients before they are reduced: set --no-overlap-grad-reduce or "
    "ZeroConfig(overlap_grad_reduce=False), and run no backward with set_is_last_backward(False)"
)


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
    """A sharding unit, FSDP2's parameter group: the parameters that are gathered and reduced together."""

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

    @property
    def in_last_backward(self) -> bool:
        """True unless `FSDPModule.set_is_last_backward(False)` was called for the backward that is running."""
        return all(module._get_fsdp_state()._state_ctx.is_last_backward for module in self.modules)

    @property
    def gradient_divide_factor(self) -> float | None:
        """The value of `FSDPModule.set_gradient_divide_factor`; None means the number of data ranks."""
        return self._group.gradient_divide_factor

    @property
    def gather_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype in which FSDP2 gathers each parameter.

        This is `param_dtype` of the mixed-precision policy for floating-point parameters, and the parameter's dtype
        otherwise.
        """
        policy = self._group.mp_policy.param_dtype
        own = [p.sharded_param.dtype for p in self._group.fsdp_params]
        return tuple(policy if policy is not None and dtype.is_floating_point else dtype for dtype in own)

    @property
    def reduce_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which the gradients of the trained parameters would be reduced; FSDP2 supports one per unit."""
        policy = self._group.mp_policy.reduce_dtype
        return {policy or self.gather_dtypes[index] for index in self.trained}

    def check_one_mesh(self) -> None:
        """Raise ValueError if FSDP2 shards parameters of the unit over several meshes."""
        for module in self.modules:
            if len(getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())) > 1:
                raise ValueError(
                    f"{self.name} has parameters on several meshes (shard_placement_fn): ZeRO++ needs one mesh"
                )

    def check_fsdp2(self) -> None:
        """Raise ValueError if the unit uses an FSDP2 option that ZeRO++ does not support."""
        # ---- options of the unit
        group = self._group
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise ValueError(
                f"{self.name} has CPUOffloadPolicy, which ZeRO++ does not support; call fully_shard without "
                "offload_policy"
            )
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError(
                f"{self.name} reshards to fewer ranks after forward, which ZeRO++ does not support: set "
                "reshard_after_forward=True"
            )
        for comm, name in (group._all_gather_comm, "all-gathers"), (group._reduce_scatter_comm, "reduce-scatters"):
            kind = type(comm)
            if not (kind.__module__.startswith("torch.") and kind.__name__.startswith("Default")):
                raise ValueError(
                    f"{self.name} uses {kind.__name__} for its {name}, which ZeRO++ would replace: remove the call "
                    "that sets it"
                )
        # ---- types and dtypes of its parameters
        for parameter, p in zip(self.parameters, group.fsdp_params, strict=True):
            kind = type(p.sharded_param._local_tensor)
            if kind is not torch.Tensor:
                raise ValueError(
                    f"{parameter.name} is a {kind.__name__}, a tensor subclass with its own all-gather: ZeRO++ needs "
                    "plain tensors; keep weights in bf16 or fp32 (torchao: enable_fsdp_float8_all_gather=False)"
                )
        self.check_dtypes()

    def check_dtypes(self) -> None:
        """Raise ValueError if the gradients of the unit would be reduced in a dtype that ZeRO++ does not support."""
        for dtype in self.reduce_dtypes - set(QUANTIZABLE):
            name = self.parameters[self.trained[0]].name
            raise ValueError(
                f"the gradients of {self.name} ({name} and others) are reduced in {dtype}: ZeRO++ reduces fp32, bf16 "
                "and fp16; call model.float() before the first forward, or set "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )

    def refuse_other_comms(self) -> None:
        """Raise RuntimeError if the program has replaced this project's collectives since they were installed."""
        group = self._group
        for comm, name in (group._all_gather_comm, "all-gathers"), (group._reduce_scatter_comm, "reduce-scatters"):
            if not type(comm).__module__.startswith("megazpp."):
                raise RuntimeError(
                    f"{self.name} uses {type(comm).__name__} for its {name}, which was set after the call of "
                    "megazpp.zeropp and replaces ZeRO++: remove the call that sets it"
                )

    def fingerprint(self) -> Fingerprint:
        """Return a value per parameter that changes if its shard is replaced, or if a write moves its version counter.

        Fused and foreach optimizer steps on DTensors move no version counter.
        """
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([(id(tensor), tensor._version, tensor._local_tensor._version) for tensor in shards])

    @property
    def has_our_comms(self) -> bool:
        """True if this project's collectives are installed in the unit."""
        state = self.modules[0]._get_fsdp_state()
        # A unit on several meshes has several FSDP2 groups.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        return any(type(group._all_gather_comm).__module__.startswith("megazpp.") for group in groups)

    @property
    def is_trained(self) -> tuple[bool, ...]:
        """For each parameter, True if it requires a gradient now."""
        return tuple([p.sharded_param.requires_grad for p in self._group.fsdp_params])

    def stepped(self, held: Collection[int] | None) -> tuple[bool, ...]:
        """Return, for each parameter, True if a step of an optimizer may change it.

        Args:
            held: `id`s of the tensors that the optimizer holds; None means all tensors.
        """
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([
            (tensor.requires_grad or tensor.grad is not None) and (held is None or id(tensor) in held)
            for tensor in shards
        ])  # fmt: skip

    def padded_shards(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter, 1-D and with FSDP2's padding.

        FSDP2 gathers from these tensors. They exist also while the unit is gathered.
        """
        return [p._sharded_param_data for p in self._group.fsdp_params]

    @property
    def is_frozen(self) -> bool:
        """True if no optimizer step can change the unit: no parameter requires a gradient or has one."""
        return not any(tensor.requires_grad or tensor.grad is not None for tensor in self._tensors())

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """Return a function that builds this rank's flat shard [S], equal to FSDP2's input of the unit's all-gather.

        Returns None while the parameters are gathered.

        Args:
            dtype: dtype of the flat shard; uint8 for a unit whose parameters have several dtypes.
        """
        if not self.is_sharded:
            return None
        shards = self.padded_shards()

        def read() -> torch.Tensor:
            """Copy the shards into a flat shard [S], with zeros as padding."""
            if dtype == torch.uint8:
                return self._read_bytes(shards)
            flat = torch.zeros(self.segments[-1].stop, dtype=dtype, device=shards[0].device)
            torch._foreach_copy_(_parts_of(flat, self.segments, shards), shards)
            return flat

        return read

    def _read_bytes(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat shard of parameters with several dtypes as bytes [S] uint8, in FSDP2's layout."""
        rows = []
        for shard, segment, dtype in zip(shards, self.segments, self.gather_dtypes, strict=True):
            row = torch.zeros(segment.size, dtype=dtype, device=shard.device)
            row[: len(shard)].copy_(shard)
            rows.append(row.view(torch.uint8))
        return torch.cat(rows)

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
                    "2.13"
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

    def gradient(self, index: int) -> Any:
        """Return the `.grad` that FSDP2 has set on a parameter's shard: a DTensor or None."""
        return self._group.fsdp_params[index].sharded_param.grad

    def shard_id(self, index: int) -> int:
        """Return the `id` of a parameter's sharded DTensor, the tensor that optimizers hold."""
        return id(self._group.fsdp_params[index].sharded_param)

    def clear_gradient(self, index: int) -> None:
        """Set the `.grad` of a parameter's shard to None."""
        self._group.fsdp_params[index].sharded_param.grad = None

    def add_to_gradients(self, reduced: torch.Tensor, indices: Sequence[int], gradients: Sequence[Any]) -> None:
        """Add a reduced flat shard to the unit's gradients in place.

        Args:
            reduced: [S] flat shard of the gradients of the parameters `indices`.
            indices: indices of the parameters.
            gradients: the `.grad` of each of these parameters; None skips the parameter.
        """
        parts = zip(self.segments_of(indices), gradients, strict=True)
        wanted = [(s, gradient._local_tensor.view(-1)) for s, gradient in parts if gradient is not None]
        if not wanted:
            return
        if reduced.is_cuda:  # FSDP2 makes the compute stream wait for its reduce stream only after the whole backward
            torch.cuda.current_stream().wait_stream(self._group.comm_ctx.reduce_scatter_stream)
        with torch.no_grad():
            flat = [own for _, own in wanted]
            torch._foreach_add_(flat, [reduced[s.start : s.start + len(own)] for s, own in wanted])

    def refuse_gradient_hooks(self) -> None:
        """Raise RuntimeError if a hook of the unit would read gradients while their reduction is still in flight."""
        for p, parameter in zip(self._group.fsdp_params, self.parameters, strict=True):
            if getattr(p.sharded_param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(f"{parameter.name} has a post-accumulate-grad hook{EARLY}")
        if self._group._all_reduce_hook is not None and not self._group._is_hsdp:
            raise RuntimeError(f"{self.name} has an all-reduce hook{EARLY}")

    def origins(self) -> list[tuple[str, object]]:
        """Return the name and the original parameter's identity of each parameter.

        Two units with the same identity share a parameter. torch 2.11 does not record identities, so they never match
        there.
        """
        found = zip(self.parameters, self._group.fsdp_params, strict=True)
        return [(parameter.name, getattr(p, "_orig_param_uid", id(p))) for parameter, p in found]

    # ---- gradients that FSDP2 has not reduced yet ----------------------------------------------------------------

    def replace_post_backward(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Replace the function with which FSDP2 reduces the unit's gradients, and return FSDP2's function."""
        original, self._group.post_backward = self._group.post_backward, reduce
        return original

    @property
    def reduces_gradients(self) -> bool:
        """False if FSDP2 accumulates gradients without communication, as set by `set_requires_gradient_sync(False)`."""
        return bool(self._group.reduce_grads)

    @property
    def is_gathered(self) -> bool:
        """True if FSDP2 holds the gathered parameters of the unit now."""
        return bool(self._group.is_unsharded)

    @property
    def zero_fills(self) -> bool:
        """True if `FSDPModule.set_reduce_scatter_unused_params` is set.

        FSDP2 then gives parameters without a gradient zeros instead of None.
        """
        return bool(getattr(self._group, "reduce_scatter_unused_params", False))

    def with_gradient(self) -> set[int]:
        """Return the indices of the parameters that have a gradient on this rank which FSDP2 has not reduced yet."""
        return {
            index
            for index, p in enumerate(self._group.fsdp_params)
            if p.unsharded_accumulated_grad is not None or getattr(_gathered(p), "grad", None) is not None
        }

    def fill_gradients(self, indices: Sequence[int]) -> None:
        """Set zero gradients for the parameters `indices`, so that FSDP2 reduces them with the others.

        torch 2.13 has an option for this (`set_reduce_scatter_unused_params`), torch 2.11 does not.
        """
        accumulated = [p.unsharded_accumulated_grad for p in self._group.fsdp_params]
        dtype = next((gradient.dtype for gradient in accumulated if gradient is not None), None)
        for index in indices:
            p = self._group.fsdp_params[index]
            zeros = torch.zeros_like(_gathered(p), dtype=dtype, requires_grad=False)
            if dtype is None:
                _gathered(p).grad = zeros
            else:  # FSDP2 reduces one dtype per unit, and has accumulated earlier backwards in this dtype
                p.unsharded_accumulated_grad = zeros

    def can_fill(self, index: int) -> bool:
        """Return True if `fill_gradients` can set a zero gradient: the parameter was gathered once and is not empty."""
        gathered = _gathered(self._group.fsdp_params[index])
        return gathered is not None and gathered.numel() > 0

    def force_sums(self) -> None:
        """Make FSDP2 request plain sums and divide them itself, even if the program has changed that setting since."""
        self._group.force_sum_reduction_for_comms = True

    @functools.cached_property
    def _group(self) -> Any:
        """FSDP2's private object for the unit; it stays the same for the lifetime of the unit's modules."""
        return self.modules[0]._get_fsdp_state()._fsdp_param_group

    def _tensors(self) -> list[Any]:
        """Return the tensors that the modules hold now, sharded or gathered."""
        return [p.module._parameters[p.attribute] for p in self.parameters]  # twice as fast as `getattr`


def find_units(model: nn.Module, *, data_dims: int = 1) -> list[Unit]:
    """Return the sharding units of a wrapped model, the outermost last. The parameters must be sharded.

    Args:
        model: a model that `fully_shard` has wrapped.
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
        unit = Unit(
            name=", ".join(names[module] or "the rest" for module in modules),
            modules=tuple(modules),
            parameters=tuple(found),
            num_shards=mesh.size(data_dims - 1),
            segments=plan_segments(shapes, mesh.size(data_dims - 1), exact={p.name for p in found if p.exact}),
        )
        units.append(unit)
    return units


def _gathered(fsdp_parameter: Any) -> Any:
    """Return the gathered parameter that FSDP2 keeps for `fsdp_parameter`; None before the first use."""
    return getattr(fsdp_parameter, "_unsharded_param", None)


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
