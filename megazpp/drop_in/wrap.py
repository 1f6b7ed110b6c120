"""Wrapping of a model by FSDP2, for `megazpp.zeropp` with a model that is not wrapped yet."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megazpp.drop_in.units import QUANTIZABLE


def mesh_to_wrap(model: nn.Module, fsdp: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh on which `zeropp` wraps a model: the one in `fsdp`, or otherwise one of all ranks.

    Raises:
        RuntimeError: there is no process group.
        TypeError, ValueError: `fsdp` has another kind of mesh, or the process group has no back end for the device of
            the model.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("megazpp.zeropp needs a process group: call torch.distributed.init_process_group first")
    if (mesh := fsdp.get("mesh")) is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}, not a DeviceMesh")
        if mesh.ndim > 1:
            raise ValueError(f"{mesh} has {mesh.ndim} dims: HSDP and further mesh dims are not supported; pass one dim")
        return mesh
    device_type = next(model.parameters()).device.type
    if device_type == "meta":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    supported = [device.type for device in world._device_types]
    if device_type not in supported:
        raise ValueError(
            f"the model is on {device_type}, but the process group has no back end for {device_type}: move the model "
            f"to {' or '.join(supported)} before the call of megazpp.zeropp"
        )
    return DeviceMesh.from_group(world, device_type)  # the world's group keeps the user's timeout


def dtype_when_wrapped(model: nn.Module, fsdp: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which weights will be gathered when `fully_shard` has wrapped the model with `fsdp`."""
    policy = fsdp.get("mp_policy")
    given: torch.dtype | None = getattr(policy, "param_dtype", None)
    own = (parameter.dtype for parameter in model.parameters())
    return given or next((dtype for dtype in own if dtype in QUANTIZABLE), torch.float32)


def wrap_model(model: nn.Module, mesh: DeviceMesh, fsdp: Mapping[str, Any]) -> ReplacedParameters:
    """Call `fully_shard` on each repeated block and then on the whole model, over the ranks of `mesh`.

    Returns:
        The parameters that this has replaced.
    """
    blocks, before = repeated_blocks(model), dict(model.named_parameters())
    for block in reversed(blocks):  # a block inside another one comes first
        fully_shard(block, **{**fsdp, "mesh": mesh})
    fully_shard(model, **{**fsdp, "mesh": mesh})
    kept = {id(parameter) for parameter in model.parameters()}  # those in `ignored_params`
    return ReplacedParameters({name: each for name, each in before.items() if id(each) not in kept})


class ReplacedParameters:
    """The parameters that `fully_shard` has replaced in a model, by which optimizers are recognized that train nothing.

    Such an optimizer was created before the model was wrapped. Its parameters get no gradients any more.

    Args:
        replaced: the parameters by name.
    """

    def __init__(self, replaced: Mapping[str, nn.Parameter]) -> None:
        self._references = {id(parameter): (weakref.ref(parameter), name) for name, parameter in replaced.items()}
        self._checked = weakref.WeakSet[torch.optim.Optimizer]()

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError before the first step of an optimizer that holds such a parameter."""
        if optimizer in self._checked:
            return
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            reference, name = self._references.get(id(parameter), (None, ""))
            if reference is not None and reference() is parameter:
                raise RuntimeError(
                    f"the optimizer holds {name} as it was before megazpp.zeropp wrapped the model, so it would train "
                    "nothing: create the optimizer after the call of megazpp.zeropp"
                )
        self._checked.add(optimizer)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model in order, each one once. Each one becomes a sharding unit.

    These are the modules that Hugging Face's `_no_split_modules` names, without the model itself. Without that
    attribute they are the items of a list or Sequential whose modules all have the same type. Of several such lists,
    the one with the most parameters counts.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    if not blocks:
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1)
        alike = [items for items in lists if len({type(item) for item in items}) == 1]
        largest = max(alike, key=lambda items: sum(p.numel() for p in items.parameters()), default=())
        # a model may use one block several times, and then its list has it several times
        blocks = [block for block in dict.fromkeys(largest) if next(block.parameters(), None) is not None]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one type: wrap its parts with fully_shard, then call "
            "zeropp"
        )
    return blocks
