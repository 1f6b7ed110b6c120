"""The sharding units of an FSDP2 model (FSDP2 calls them parameter groups), their parameters in FSDP2's flat order.

One file of more than 300 lines: all that is read of FSDP2's own objects is read here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megazpp.zero.wire import QUANTIZABLE, Segment, plan_segments

Fingerprint = tuple[object, ...]
EARLY = (
    ", which would see gradients before they are reduced: it needs --no-overlap-grad-reduce, "
    "ZeroConfig(overlap_grad_reduce=False), and no backward with set_is_last_backward(False)"
)


@dataclass(frozen=True, kw_only=True)
class UnitParameter:
    """One parameter of a unit."""

    name: str
    module: nn.Module  # where it is registered; FSDP2 puts another object there while it is gathered
    attribute: str
    shape: tuple[int, ...]  # on this tensor-parallel rank, not sharded over data ranks
    mesh_dims: int  # of the mesh that its shards are on; gathered parameters have none, or the tensor-parallel one
    exact: bool = False  # never quantized between ranks, as its `ParameterSpec` says


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One of FSDP2's parameter groups: the parameters that are gathered and reduced together."""

    name: str = ""  # of its modules in the model, for messages
    modules: tuple[FSDPModule, ...]  # usually one
    parameters: tuple[UnitParameter, ...]  # in FSDP2's flat order
    num_shards: int = 1  # the ranks that its parameters are spread over
    segments: tuple[Segment, ...]  # of the parameters in the flat shard

    @property
    def key(self) -> str:
        """The name of its first parameter, which no other unit has."""
        return self.parameters[0].name

    @property
    def is_sharded(self) -> bool:
        """True if the modules hold the shards now, not the gathered parameters (with tp, DTensors on its mesh)."""
        tensors = zip(self._tensors(), self.parameters, strict=True)
        return all(isinstance(t, DTensor) and t.device_mesh.ndim == p.mesh_dims for t, p in tensors)

    @property
    def in_last_backward(self) -> bool:
        """True if the backward that runs is a step's last one, as `FSDPModule.set_is_last_backward` has said."""
        return all(module._get_fsdp_state()._state_ctx.is_last_backward for module in self.modules)

    @property
    def gradient_divide_factor(self) -> float | None:
        """The number that `FSDPModule.set_gradient_divide_factor` was given; None: the data ranks."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    @property
    def gather_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype in which FSDP2 gathers each parameter; an integer parameter keeps its own."""
        policy = self._group.mp_policy.param_dtype
        own = [p.sharded_param.dtype for p in self._group.fsdp_params]
        return tuple(policy if policy is not None and dtype.is_floating_point else dtype for dtype in own)

    @property
    def reduce_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which FSDP2 reduces the gradients of the trained parameters; FSDP2 takes one."""
        policy = self._group.mp_policy.reduce_dtype
        return {policy or self.gather_dtypes[index] for index in self.trained}

    def check_one_mesh(self) -> None:
        """Raise ValueError if FSDP2 keeps parameters of the unit on several meshes."""
        for module in self.modules:
            if len(getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())) > 1:
                raise ValueError(
                    f"{self.name} has parameters on several meshes (shard_placement_fn): ZeRO++ takes one mesh"
                )

    def check_fsdp2(self) -> None:
        """Raise ValueError for what FSDP2 was asked to do with the unit and ZeRO++ cannot do."""
        group = self._group
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise ValueError(
                f"{self.name} has CPUOffloadPolicy, which ZeRO++ does not support; call fully_shard without "
                "offload_policy"
            )
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError(f"{self.name} reshards to fewer ranks after forward: it needs reshard_after_forward=True")
        if not type(group._all_gather_comm).__name__.startswith("Default"):
            raise ValueError(
                f"{self.name} has {type(group._all_gather_comm).__name__} for its all-gathers, which ZeRO++ replaces: "
                "leave the call that has set it out"
            )
        for parameter, p in zip(self.parameters, group.fsdp_params, strict=True):
            kind = type(p.sharded_param._local_tensor)
            if kind is not torch.Tensor:
                raise ValueError(
                    f"{parameter.name} is a {kind.__name__}, which gathers itself: ZeRO++ takes plain tensors; keep "
                    "weights in bf16 or fp32 (torchao: enable_fsdp_float8_all_gather=False)"
                )
        for dtype in self.reduce_dtypes - set(QUANTIZABLE):
            name = self.parameters[self.trained[0]].name
            raise ValueError(
                f"the gradients of {self.name} ({name} and others) are reduced in {dtype}: ZeRO++ reduces fp32, bf16 "
                "and fp16; call model.float() before fully_shard, or set "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )

    def fingerprint(self) -> Fingerprint:
        """One value per parameter that changes when autograd counts a write to its shard, or the shard is replaced."""
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([(id(tensor), tensor._version, tensor._local_tensor._version) for tensor in shards])

    @property
    def has_our_comms(self) -> bool:
        """True if the unit's collectives are not FSDP2's own."""
        state = self.modules[0]._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # several on several meshes
        return any(type(group._all_gather_comm).__module__.startswith("megazpp.") for group in groups)

    @property
    def is_trained(self) -> tuple[bool, ...]:
        """True for each parameter that requires a gradient now."""
        return tuple([p.sharded_param.requires_grad for p in self._group.fsdp_params])

    def stepped(self, held: Collection[int] | None) -> tuple[bool, ...]:
        """True for each parameter that a step changes, of an optimizer that holds these `id`s; None: any tensor."""
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([
            (tensor.requires_grad or tensor.grad is not None) and (held is None or id(tensor) in held)
            for tensor in shards
        ])  # fmt: skip

    def padded_shards(self) -> list[torch.Tensor]:
        """This rank's shard of each parameter, 1-D and padded, which FSDP2 gathers from; also while it is gathered."""
        return [p._sharded_param_data for p in self._group.fsdp_params]

    @property
    def is_frozen(self) -> bool:
        """True if no optimizer's step can change the unit: nothing in it is trained, or has a gradient."""
        return not any(tensor.requires_grad or tensor.grad is not None for tensor in self._tensors())

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """A function that makes this rank's flat shard [S] as FSDP2 gathers it; None while parameters are gathered."""
        if not self.is_sharded:
            return None
        shards = self.padded_shards()

        def read() -> torch.Tensor:
            if dtype == torch.uint8:
                return self._read_bytes(shards)
            flat = torch.zeros(self.segments[-1].stop, dtype=dtype, device=shards[0].device)
            torch._foreach_copy_(_parts_of(flat, self.segments, shards), shards)
            return flat

        return read

    def _read_bytes(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The flat shard of parameters of several dtypes, as FSDP2 gathers it: their bytes, one after the other."""
        rows = []
        for shard, segment, dtype in zip(shards, self.segments, self.gather_dtypes, strict=True):
            row = torch.zeros(segment.size, dtype=dtype, device=shard.device)
            row[: len(shard)].copy_(shard)
            rows.append(row.view(torch.uint8))
        return torch.cat(rows)

    def check_shard_reader(self, expected: torch.Tensor) -> None:
        """Raise RuntimeError if this version of FSDP2 lays shards out otherwise; call before using `shard_reader`."""
        read = self.shard_reader(expected.dtype)
        with torch.no_grad():
            if read is not None and not torch.equal(read().view(torch.uint8), expected.view(torch.uint8)):
                raise RuntimeError(f"torch {torch.__version__} lays the shard of {self.key} out otherwise")

    def shards(self) -> list[torch.Tensor]:
        """This rank's shard of each parameter, to read or to write in place, while the unit `is_sharded`."""
        return [tensor._local_tensor.detach() for tensor in self._tensors()]

    def as_dtensors(self, shards: Sequence[torch.Tensor]) -> dict[str, DTensor]:
        """Tensors shaped like `shards` as DTensors sharded like the parameters, by name."""
        found = {}
        for shard, like, p in zip(shards, self._tensors(), self.parameters, strict=True):
            whole = {"shape": like.shape, "stride": like.stride()}
            found[p.name] = DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, **whole)
        return found

    def as_parameters(self, flat: torch.Tensor) -> dict[str, DTensor]:
        """Views of a flat shard [S] as DTensors sharded like the unit's parameters, by name, while it `is_sharded`."""
        shards = self.shards()
        parts = _parts_of(flat, self.segments, [shard.view(-1) for shard in shards])
        return self.as_dtensors([part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)])

    def segments_of(self, indices: Sequence[int]) -> tuple[Segment, ...]:
        """The segments of some parameters in a flat shard that holds these alone, as FSDP2 lays out gradients."""
        known = self._known_segments.get(key := tuple(indices))
        if known is not None:
            return known
        found: list[Segment] = []
        for index in indices:
            segment = self.segments[index]
            found.append(dataclasses.replace(segment, start=found[-1].stop if found else 0))
        self._known_segments[key] = tuple(found)
        return self._known_segments[key]

    @functools.cached_property
    def _known_segments(self) -> dict[tuple[int, ...], tuple[Segment, ...]]:
        """Results of `segments_of`: every backward asks for the same few."""
        return {}

    @property
    def trained(self) -> tuple[int, ...]:
        """Indices of the parameters that require a gradient now; FSDP2 reads this at each use, too."""
        return tuple(i for i, p in enumerate(self._group.fsdp_params) if p.sharded_param.requires_grad)

    def gradient(self, index: int) -> Any:
        """The `.grad` of a parameter's shard, which FSDP2 sets; a DTensor or None."""
        return self._group.fsdp_params[index].sharded_param.grad

    def shard_id(self, index: int) -> int:
        """The `id` of a parameter's shard, which optimizers hold."""
        return id(self._group.fsdp_params[index].sharded_param)

    def clear_gradient(self, index: int) -> None:
        """Set the `.grad` of a parameter's shard to None."""
        self._group.fsdp_params[index].sharded_param.grad = None

    def add_to_gradients(self, reduced: torch.Tensor, indices: Sequence[int], gradients: Sequence[Any]) -> None:
        """Add the flat shard of the gradients of `indices` to `gradients`; None stands for one that is not wanted."""
        parts = zip(self.segments_of(indices), gradients, strict=True)
        wanted = [(s, gradient._local_tensor.view(-1)) for s, gradient in parts if gradient is not None]
        if not wanted:
            return
        if reduced.is_cuda:  # FSDP2 itself waits for its stream only when a whole backward is over
            torch.cuda.current_stream().wait_stream(self._group.comm_ctx.reduce_scatter_stream)
        with torch.no_grad():
            flat = [own for _, own in wanted]
            torch._foreach_add_(flat, [reduced[s.start : s.start + len(own)] for s, own in wanted])

    def refuse_gradient_hooks(self) -> None:
        """Raise RuntimeError if something wants gradients before the backward is over, when they are not there yet."""
        for p, parameter in zip(self._group.fsdp_params, self.parameters, strict=True):
            if getattr(p.sharded_param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(f"{parameter.name} has a post-accumulate-grad hook{EARLY}")
        if self._group._all_reduce_hook is not None and not self._is_hsdp:
            raise RuntimeError(f"{self.name} has an all-reduce hook{EARLY}")

    def origins(self) -> list[tuple[str, object]]:
        """Name and origin of each parameter: one origin in two units was one parameter. torch 2.11 does not say it."""
        found = zip(self.parameters, self._group.fsdp_params, strict=True)
        return [(parameter.name, getattr(p, "_orig_param_uid", id(p))) for parameter, p in found]

    # ---- what FSDP2 reduces at the end of a backward -------------------------------------------------------------

    def wrap_post_backward(self, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace the function by which FSDP2 reduces the unit's gradients with what `wrap` makes of it."""
        self._group.post_backward = wrap(self._group.post_backward)

    @property
    def reduces_gradients(self) -> bool:
        """False if FSDP2 accumulates gradients without communication (`set_requires_gradient_sync`)."""
        reduces: bool = self._group.reduce_grads
        return reduces

    @property
    def is_gathered(self) -> bool:
        """True if FSDP2 keeps the gathered parameters now."""
        gathered: bool = self._group.is_unsharded
        return gathered

    @property
    def zero_fills(self) -> bool:
        """True if `FSDPModule.set_reduce_scatter_unused_params` has asked for zeros in the place of None."""
        return bool(getattr(self._group, "reduce_scatter_unused_params", False))

    def with_gradient(self) -> set[int]:
        """Indices of the parameters that have got a gradient on this rank, which FSDP2 has not reduced yet."""
        return {
            index
            for index, p in enumerate(self._group.fsdp_params)
            if p.unsharded_accumulated_grad is not None or getattr(_gathered(p), "grad", None) is not None
        }

    def fill_gradients(self, indices: Sequence[int]) -> None:
        """Give parameters without a gradient zeros, which FSDP2 then reduces; torch 2.13 could, torch 2.11 cannot."""
        accumulated = [p.unsharded_accumulated_grad for p in self._group.fsdp_params]
        dtype = next((gradient.dtype for gradient in accumulated if gradient is not None), None)
        for index in indices:
            p = self._group.fsdp_params[index]
            zeros = torch.zeros_like(_gathered(p), dtype=dtype, requires_grad=False)
            if dtype is None:
                _gathered(p).grad = zeros
            else:  # FSDP2 reduces gradients of one dtype, and has those of earlier backwards in this one
                p.unsharded_accumulated_grad = zeros

    def can_fill(self, index: int) -> bool:
        """True if FSDP2 can reduce zeros for a parameter: it was gathered once, and has elements."""
        gathered = _gathered(self._group.fsdp_params[index])
        return gathered is not None and gathered.numel() > 0

    def force_sums(self) -> None:
        """Have FSDP2 ask for sums that it divides itself, also where the program has set it otherwise since."""
        self._group.force_sum_reduction_for_comms = True

    @functools.cached_property
    def _group(self) -> Any:
        """FSDP2's own object for the unit, the same as long as its modules live."""
        return self.modules[0]._get_fsdp_state()._fsdp_param_group

    @property
    def _is_hsdp(self) -> bool:
        hsdp: bool = self._group._is_hsdp
        return hsdp

    def _tensors(self) -> list[Any]:
        return [p.module._parameters[p.attribute] for p in self.parameters]  # half of the time of `getattr`


def find_units(model: nn.Module, *, data_dims: int = 1) -> list[Unit]:
    """The units of a wrapped model, outermost last; call while its parameters are shards.

    Args:
        data_dims: leading dims of the parameters' meshes that are FSDP2's; the others are tensor-parallel.
    Raises:
        TypeError: `model` has not been wrapped by `fully_shard`.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} has not been wrapped by fully_shard")
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
    """The gathered parameter, an object that FSDP2 keeps; None before the first use."""
    return getattr(fsdp_parameter, "_unsharded_param", None)


def _parts_of(flat: torch.Tensor, segments: Sequence[Segment], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the segments of a flat shard [S], each as long as its 1-D tensor of `like`: without the padding."""
    padded = flat.split([segment.size for segment in segments])
    return [part if part.shape == other.shape else part[: len(other)] for part, other in zip(padded, like, strict=True)]


def _parameters(
    root: nn.Module, names: dict[nn.Module, str], seen: set[object], data_dims: int
) -> Iterator[UnitParameter]:
    """FSDP2's order: children before their parent, nested units left out, a shared parameter where it first appears.

    Parameters that FSDP2 was told to ignore are no DTensors of its mesh, and left out.
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
