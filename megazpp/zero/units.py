"""The sharding units of an FSDP2 model (FSDP2 calls them parameter groups), their parameters in FSDP2's flat order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from megazpp.zero.config import Dtypes
from megazpp.zero.wire import Segment, plan_segments

Fingerprint = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class UnitParameter:
    """One parameter of a unit."""

    name: str
    module: nn.Module  # where it is registered; FSDP2 puts another object there while it is gathered
    attribute: str
    shape: tuple[int, ...]  # on this tensor-parallel rank, not sharded over data ranks
    mesh_dims: int  # of the mesh that its shards are on; gathered parameters have none, or the tensor-parallel one
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One of FSDP2's parameter groups: the parameters that are gathered and reduced together."""

    name: str = ""  # of its modules in the model, for messages
    modules: tuple[FSDPModule, ...]  # usually one
    parameters: tuple[UnitParameter, ...]  # in FSDP2's flat order
    segments: tuple[Segment, ...]  # of the parameters in the flat shard
    trained_segments: tuple[Segment, ...]  # of the trained ones in the flat shard of gradients

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

    def dtypes(self) -> set[Dtypes]:
        """The dtypes in which FSDP2 gathers weights and reduces gradients; several if weights are gathered as bytes.

        Raises:
            ValueError: FSDP2 keeps shards in the host's memory, or on fewer ranks between forward and backward.
        """
        if isinstance(self._group.offload_policy, CPUOffloadPolicy):
            raise ValueError("CPUOffloadPolicy: ZeRO++ reads shards where they are computed with")
        if self._group.post_forward_mesh_info not in (None, self._group.mesh_info):
            raise ValueError(f"{self.name} reshards to fewer ranks after forward: it needs reshard_after_forward=True")
        policy = self._group.mp_policy
        found = {policy.param_dtype or tensor.dtype for tensor in self._tensors()}
        return {Dtypes(dtype, policy.reduce_dtype or dtype) for dtype in found}

    def fingerprint(self) -> Fingerprint:
        """One value per parameter that changes when autograd counts a write to its shard, or the shard is replaced."""
        shards = [p.sharded_param for p in self._group.fsdp_params]
        return tuple([(id(tensor), tensor._version, tensor._local_tensor._version) for tensor in shards])

    @property
    def has_our_comms(self) -> bool:
        """True if the unit's collectives are not FSDP2's own."""
        return type(self._group._all_gather_comm).__module__.startswith("megazpp.")

    @property
    def trained(self) -> tuple[bool, ...]:
        """True for each parameter that is trained now."""
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
            flat = torch.zeros(self.segments[-1].stop, dtype=dtype, device=shards[0].device)
            torch._foreach_copy_(_parts_of(flat, self.segments, shards), shards)
            return flat

        return read

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

    def add_to_gradients(self, reduced: torch.Tensor) -> None:
        """Add the flat shard of gradients [S] to `.grad` of the trained parameters, which FSDP2 has set."""
        trained = [p for p in self.parameters if p.requires_grad]
        gradients = [getattr(p.module, p.attribute).grad._local_tensor.view(-1) for p in trained]
        with torch.no_grad():
            torch._foreach_add_(gradients, _parts_of(reduced, self.trained_segments, gradients))

    def refuse_gradient_hooks(self) -> None:
        """Raise RuntimeError if a parameter has a hook that wants its gradient before the backward is over."""
        for p in self.parameters:
            if getattr(getattr(p.module, p.attribute), "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"{p.name} has a post-accumulate-grad hook, which would see gradients before they are reduced: "
                    "it needs --no-overlap-grad-reduce"
                )

    @property
    def _group(self) -> Any:
        """FSDP2's own object for the unit."""
        return self.modules[0]._get_fsdp_state()._fsdp_param_group

    def _tensors(self) -> list[Any]:
        return [p.module._parameters[p.attribute] for p in self.parameters]  # half of the time of `getattr`


def find_units(model: nn.Module, num_shards: int, *, data_dims: int = 1) -> list[Unit]:
    """The units of a wrapped model, outermost last; call while its parameters are shards.

    Args:
        num_shards: ranks that dim 0 of each parameter is spread over.
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
        shapes, trained = [(p.name, p.shape) for p in found], [(p.name, p.shape) for p in found if p.requires_grad]
        unit = Unit(
            name=", ".join(names[module] or "the rest" for module in modules),
            modules=tuple(modules),
            parameters=tuple(found),
            segments=plan_segments(shapes, num_shards),
            trained_segments=plan_segments(trained, num_shards),
        )
        units.append(unit)
    return units


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
            requires_grad=tensor.requires_grad,
        )
