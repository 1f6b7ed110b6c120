"""The sharding units of models of `megazpp.zeropp`: checks of FSDP2's options, and settings that a program may change.

This file and zero/units.py read FSDP2's private objects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from megazpp.zero.comms import in_backward
from megazpp.zero.units import Unit, find_units
from megazpp.zero.wire import plan_segments

# Dtypes of weights and gradients that ZeRO++ can send in quantized blocks. Weights in other dtypes are sent unchanged,
# and gradients in other dtypes are not supported.
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ProgramUnit(Unit):
    """A sharding unit of a model of `megazpp.zeropp`, which the program or `zeropp` has wrapped with `fully_shard`.

    If the modules of one `fully_shard` call have parameters on two meshes, as in torchtitan's calls for layers with
    experts, FSDP2 makes two parameter groups. Each group is a unit.
    """

    index: int = 0  # index of the unit's group among the parameter groups that FSDP2 has made of the unit's modules

    # ---- dtypes, FSDP2's settings and its mesh ---------------------------------------------------------------------

    @property
    def gather_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype in which FSDP2 gathers each parameter of the unit.

        For floating-point parameters this is `param_dtype` of the mixed-precision policy, if it is set. Otherwise it is
        the dtype of the parameter.
        """
        found = []
        for p in self._group.fsdp_params:  # in torch 2.15 each parameter may have a mixed-precision policy of its own
            policy, own = p.mp_policy.param_dtype, p.sharded_param.dtype
            found.append(policy if policy is not None and own.is_floating_point else own)
        return tuple(found)

    @property
    def is_quantizable(self) -> bool:
        """True if FSDP2 gathers all parameters of the unit in one dtype that ZeRO++ can quantize."""
        return len(set(self.gather_dtypes)) == 1 and self.gather_dtypes[0] in QUANTIZABLE

    @property
    def reduce_dtypes(self) -> set[torch.dtype]:
        """The dtypes in which FSDP2 reduces the gradients of the unit's trained parameters.

        Without `reduce_dtype` in the mixed-precision policy, torch 2.15 reduces a gradient in the parameter's
        `grad_dtype`, by default the dtype of the sharded parameter. Earlier versions reduce it in the dtype of the
        gathered parameter. ZeRO++ supports one dtype per unit.
        """
        found, gathered = set(), self.gather_dtypes
        for index in self.trained:
            p = self._group.fsdp_params[index]
            found.add(p.mp_policy.reduce_dtype or getattr(p, "sharded_grad_dtype", gathered[index]))
        return found

    @property
    def gradient_divide_factor(self) -> float | None:
        """The divisor of gradient sums that `FSDPModule.set_gradient_divide_factor` has set.

        None means the number of data ranks.
        """
        return self._group.gradient_divide_factor

    @property
    def is_trained(self) -> tuple[bool, ...]:
        """One bool per parameter of the unit: True if the parameter requires a gradient now."""
        return tuple([p.sharded_param.requires_grad for p in self._group.fsdp_params])

    @property
    def zero_filled(self) -> list[int]:
        """The indices of the parameters for whose missing gradients FSDP2 reduces zeros.

        The list is empty unless the program has called `FSDPModule.set_reduce_scatter_unused_params(True)`.
        """
        fills, parameters = getattr(self._group, "reduce_scatter_unused_params", False), self._group.fsdp_params
        gathered = [getattr(p, "_unsharded_param", None) for p in parameters if fills]
        return [index for index, tensor in enumerate(gathered) if tensor is not None and tensor.requires_grad]

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh over which FSDP2 shards the unit's parameters."""
        return self._group.mesh_info.mesh

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks over which FSDP2 shards the unit's parameters."""
        return tuple(dist.get_process_group_ranks(self._group.mesh_info.shard_process_group))

    # ---- replace FSDP2's collectives, and refuse options, collectives and hooks that ZeRO++ does not support ---------

    def use_comms(self, gather: Any, reduce: Any) -> None:
        """Replace FSDP2's all-gather and reduce-scatter of the unit by `gather` and `reduce`.

        FSDP2's own setters, such as `set_custom_all_gather`, refuse modules that have two parameter groups.
        """
        self._group._all_gather_comm, self._group._reduce_scatter_comm = gather, reduce

    def check_fsdp2(self) -> None:
        """Raise ValueError if the unit uses an option of FSDP2 or a type of parameters that ZeRO++ does not support."""
        # ---- FSDP2's options for the unit
        group = self._group
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise ValueError(
                f"the FSDP2 unit {self.name} was wrapped with CPUOffloadPolicy, which ZeRO++ does not support: call "
                "fully_shard without offload_policy"
            )
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError(
                f"the FSDP2 unit {self.name} reshards to fewer ranks after forward, which ZeRO++ does not support: set "
                "reshard_after_forward=True"
            )
        for comm, name in self._comms:
            kind = type(comm)
            if not (kind.__module__.startswith("torch.") and kind.__name__.startswith("Default")):
                raise ValueError(
                    f"the FSDP2 unit {self.name} uses {kind.__name__} for its {name}, which ZeRO++ would replace: "
                    "remove the call that installs this class"
                )
        # ---- types and dtypes of the unit's parameters
        for parameter, p in zip(self.parameters, group.fsdp_params, strict=True):
            kind = type(p.sharded_param._local_tensor)
            if kind is not torch.Tensor:
                raise ValueError(
                    f"{parameter.name} is a {kind.__name__}, a tensor subclass with its own all-gather, but ZeRO++ "
                    "supports only plain tensors: keep weights in bf16 or fp32 (torchao: "
                    "enable_fsdp_float8_all_gather=False)"
                )
        self.check_dtypes()

    def check_dtypes(self) -> None:
        """Raise ValueError if the gradients of the unit would be reduced in a dtype that ZeRO++ does not support."""
        # torch 2.15 sorts the gradients of a unit by `grad_dtype`. With several dtypes, FSDP2 would pass gradients in
        # another order than the unit's messages have.
        if len({getattr(self._group.fsdp_params[index], "sharded_grad_dtype", None) for index in self.trained}) > 1:
            raise ValueError(
                f"the parameters of {self.name} have several values of grad_dtype, but ZeRO++ supports only one in all "
                "parameters of a fully_shard call: set the same grad_dtype for all of them"
            )
        for dtype in self.reduce_dtypes - set(QUANTIZABLE):
            name = self.parameters[self.trained[0]].name
            raise ValueError(
                f"FSDP2 reduces the gradients of {self.name} ({name} and others) in {dtype}, but ZeRO++ supports only "
                "fp32, bf16 and fp16: call model.float() before the first forward, or set "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )

    def refuse_other_comms(self) -> None:
        """Raise RuntimeError if the program has replaced ZeRO++'s collectives of the unit since `zeropp` was called."""
        for comm, name in self._comms:
            if not type(comm).__module__.startswith("megazpp."):
                raise RuntimeError(
                    f"the FSDP2 unit {self.name} uses {type(comm).__name__} for its {name}. This class was installed "
                    "after the call of megazpp.zeropp and replaces ZeRO++: remove the call that installs it"
                )

    def refuse_gradient_hooks(self) -> None:
        """Raise RuntimeError if a hook of the program would see gradients of the unit while their reduction still runs.

        Such hooks are all-reduce hooks of FSDP2, and post-accumulate-grad hooks of parameters.
        """
        found = [
            f"{parameter.name} has a post-accumulate-grad hook"
            for p, parameter in zip(self._group.fsdp_params, self.parameters, strict=True)
            if getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
        ]
        if self._group._all_reduce_hook is not None and not self._group._is_hsdp:
            found.append(f"the FSDP2 unit {self.name} has an all-reduce hook")
        if found:
            raise RuntimeError(
                f"{found[0]}. The hook would see gradients before they are reduced: remove the hook, or set "
                "ZeroConfig(overlap_grad_reduce=False) and run no backward inside accumulate()"
            )

    @property
    def has_our_comms(self) -> bool:
        """True if `megazpp.zeropp` has installed its collectives in the unit."""
        return type(self._group._all_gather_comm).__module__.startswith("megazpp.")

    @property
    def _comms(self) -> tuple[tuple[object, str], tuple[object, str]]:
        """The unit's all-gather and reduce-scatter, each as a pair of the object and its name for messages."""
        return (self._group._all_gather_comm, "all-gathers"), (self._group._reduce_scatter_comm, "reduce-scatters")

    # ---- weights: which of them an optimizer step may change, and readers of shards ----------------------------------

    def stepped(self, held: Collection[int] | None) -> tuple[bool, ...]:
        """Return one bool per parameter of the unit: True if a step of an optimizer may change the parameter.

        A step may change a parameter that the optimizer holds, and that requires or has a gradient.

        Args:
            held: `id`s of the tensors in the optimizer's parameter groups; None means all parameters.
        """
        found = []
        for shard in [p.sharded_param for p in self._group.fsdp_params]:
            may_change = shard.requires_grad or shard.grad is not None
            found.append(may_change and (held is None or id(shard) in held))
        return tuple(found)

    def padded_shards(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter of the unit, as 1-D tensors with FSDP2's padding.

        FSDP2 gathers from these tensors. They exist also while the unit is gathered.
        """
        return [p._sharded_param_data for p in self._group.fsdp_params]

    def shard_reader(self, dtype: torch.dtype) -> Callable[[], torch.Tensor] | None:
        """Return a function that copies this rank's shards into a new flat shard; see `Unit.shard_reader`.

        If `dtype` is uint8, as for a unit that `ByteCodec` packs, the flat shard has the bytes of the parameters.
        """
        if dtype != torch.uint8 or not self.is_sharded:
            return super().shard_reader(dtype)
        shards = self.padded_shards()

        def read() -> torch.Tensor:
            """Copy this rank's shards of the unit's parameters into a new flat shard of bytes, padded with zeros."""
            rows = []
            for shard, segment, own_dtype in zip(shards, self.segments, self.gather_dtypes, strict=True):
                row = torch.zeros(segment.size, dtype=own_dtype, device=shard.device)
                row[: len(shard)].copy_(shard)
                rows.append(row.view(torch.uint8))
            return torch.cat(rows)

        return read

    @property
    def is_gathered(self) -> bool:
        """True if the unit is gathered now: FSDP2 has not freed its gathered parameters since the last use."""
        return bool(self._group.is_unsharded)

    # ---- gradients: read and replace `.grad`, and change FSDP2's reduction -------------------------------------------

    def gradient(self, index: int) -> Any:
        """Return the reduced gradient of the unit's parameter `index`: the `.grad` of its shard, a DTensor or None."""
        return self._group.fsdp_params[index].sharded_param.grad

    def shard_id(self, index: int) -> int:
        """Return the `id` of the sharded DTensor of the unit's parameter `index`, the tensor that optimizers hold."""
        return id(self._group.fsdp_params[index].sharded_param)

    def swap_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Set `.grad` of each of the unit's shards to its entry in `gradients`, and return the previous gradients.

        Both lists have one DTensor or None per parameter.
        """
        shards = [p.sharded_param for p in self._group.fsdp_params]
        before = [shard.grad for shard in shards]
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient
        return before

    def force_sums(self) -> None:
        """Make FSDP2 request sums instead of means from its reduce-scatter, and divide the sums itself.

        ZeRO++ calls this method before each reduction, because the program may have changed the setting.
        """
        self._group.force_sum_reduction_for_comms = True

    @functools.cached_property
    def _group(self) -> Any:
        """FSDP2's private object (`FSDPParamGroup`) for the unit, the same for the lifetime of the unit's modules."""
        return _groups_of(self.modules[0])[self.index]


def find_program_units(model: nn.Module) -> list[ProgramUnit]:
    """Return the sharding units of a model of `megazpp.zeropp`, one per parameter group of FSDP2.

    See `find_units`. A module whose parameters are on two meshes has two units.
    """
    found = list[ProgramUnit]()
    for unit in find_units(model, unit_class=ProgramUnit):
        groups = _groups_of(unit.modules[0])
        for index, group in enumerate(groups if len(groups) > 1 else ()):
            owned = {(p._module_info.module, p._module_info.param_name) for p in group.fsdp_params}
            parameters = tuple(p for p in unit.parameters if (p.module, p.attribute) in owned)
            size, exact = group.mesh_info.shard_mesh_size, {p.name for p in parameters if p.exact}
            segments = plan_segments([(p.name, p.shape) for p in parameters], size, exact=exact)
            part = {"parameters": parameters, "num_shards": size, "segments": segments, "index": index}
            found.append(dataclasses.replace(unit, name=f"{unit.name} ({parameters[0].name} and others)", **part))
        if len(groups) == 1:
            found.append(unit)
    return found


def in_backward_of(module: Any) -> bool:
    """Return True if a backward of the model to which a wrapped module belongs runs in this thread.

    Return False in the backward of another model.
    """
    # After an exception FSDP2's flag can remain True until the next backward, so also ask autograd.
    return in_backward() and bool(module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)


def _groups_of(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups (`FSDPParamGroup`) of a wrapped module; torch 2.11 and 2.12 allow only one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else groups
