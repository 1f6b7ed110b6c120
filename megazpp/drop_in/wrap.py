"""Wrap a model with FSDP2, for a call of `megazpp.zeropp` whose model `fully_shard` has not wrapped yet."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megazpp.drop_in.units import QUANTIZABLE


def mesh_to_wrap(model: nn.Module, fsdp: Mapping[str, Any]) -> DeviceMesh:
    """Return the device mesh over which `zeropp` shards a model that is not wrapped yet.

    Args:
        model: model to wrap.
        fsdp: keyword arguments of `fully_shard`. If they contain a mesh, the function returns it. Otherwise it returns
            a mesh of all ranks of the job.
    Raises:
        RuntimeError: there is no process group.
        TypeError, ValueError: the mesh in `fsdp` has a wrong type or several dims, or the process group has no back end
            for the model's device.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(
            "megazpp.zeropp requires a process group, but there is none: call init_process_group of torch.distributed "
            "first"
        )
    if (mesh := fsdp.get("mesh")) is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"the argument mesh is a {type(mesh).__name__}: pass a DeviceMesh, or leave it out")
        if mesh.ndim > 1:
            raise ValueError(
                f"the argument mesh, {mesh}, has {mesh.ndim} dims: HSDP and further mesh dims are not supported; pass "
                "a mesh of one dim"
            )
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
    # Use the default group instead of a new group, because the user has set the timeout of the default group.
    return DeviceMesh.from_group(world, device_type)


def dtype_when_wrapped(model: nn.Module, fsdp: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in which FSDP2 will gather weights after `fully_shard(model, **fsdp)`.

    The dtype is `param_dtype` of the mixed-precision policy in `fsdp`, if the policy sets it. Otherwise it is the dtype
    of the first parameter in fp32, bf16 or fp16, or fp32 if there is no such parameter.
    """
    policy = fsdp.get("mp_policy")
    given: torch.dtype | None = getattr(policy, "param_dtype", None)
    own = (parameter.dtype for parameter in model.parameters())
    return given or next((dtype for dtype in own if dtype in QUANTIZABLE), torch.float32)


def wrap_model(model: nn.Module, mesh: DeviceMesh, fsdp: Mapping[str, Any]) -> ReplacedParameters:
    """Call `fully_shard` on each repeated block of a model, and then on the model itself.

    Args:
        model: model to wrap.
        mesh: device mesh over which parameters are sharded.
        fsdp: further keyword arguments of `fully_shard`.
    Returns:
        The model's previous parameters, which FSDP2 has replaced.
    """
    blocks, before = repeated_blocks(model), dict(model.named_parameters())
    for block in reversed(blocks):  # FSDP2 requires that inner blocks are wrapped before outer blocks
        fully_shard(block, **{**fsdp, "mesh": mesh})
    fully_shard(model, **{**fsdp, "mesh": mesh})
    # FSDP2 replaces all parameters except those in its argument `ignored_params`.
    kept = {id(parameter) for parameter in model.parameters()}
    return ReplacedParameters({name: each for name, each in before.items() if id(each) not in kept})


class ReplacedParameters:
    """The parameters of a model before `zeropp` wrapped it, to detect optimizers that would train nothing.

    An optimizer that was created before the model was wrapped holds these parameters. They get no gradients, because
    FSDP2 has put other parameters in their place, so the optimizer would train nothing.

    Args:
        replaced: replaced parameters by name.
    """

    def __init__(self, replaced: Mapping[str, nn.Parameter]) -> None:
        self._references = {id(parameter): (weakref.ref(parameter), name) for name, parameter in replaced.items()}
        self._checked = weakref.WeakSet[torch.optim.Optimizer]()

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if an optimizer, about to step, holds a parameter that `fully_shard` has replaced."""
        if optimizer in self._checked:
            return
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            reference, name = self._references.get(id(parameter), (None, ""))
            if reference is not None and reference() is parameter:
                raise RuntimeError(
                    f"the optimizer holds the parameter {name} from before megazpp.zeropp wrapped the model, so it "
                    "would train nothing: create the optimizer after the call of megazpp.zeropp"
                )
        self._checked.add(optimizer)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model, such as its transformer layers, in order and without repetitions.

    `zeropp` makes each block a sharding unit. Blocks are the modules whose classes Hugging Face's `_no_split_modules`
    names, without the model itself. If a model has no such modules, they are the items of a ModuleList or Sequential in
    which all modules have the same type. Of several such lists, the list with the most parameters counts. A block that
    shares a parameter with a module outside of it is left out, because a parameter can belong to only one unit.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    if not blocks:
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1)
        alike = [items for items in lists if len({type(item) for item in items}) == 1]
        largest = max(alike, key=lambda items: sum(p.numel() for p in items.parameters()), default=())
        # A list may contain one block several times, if the model uses the block several times.
        blocks = [block for block in dict.fromkeys(largest) if next(block.parameters(), None) is not None]
    # Drop blocks that share a parameter with a module outside of the block: the model then registers this parameter
    # more often than the block does.
    in_model = _registrations(model)
    blocks = [block for block in blocks if _registrations(block).items() <= in_model.items()]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks of one type, so megazpp.zeropp cannot choose what to wrap: "
            "wrap submodules and then the model with fully_shard, and call megazpp.zeropp after that"
        )
    return blocks


def _registrations(module: nn.Module) -> Counter[int]:
    """Return how many modules inside of `module` register each parameter, by the parameter's `id`."""
    return Counter(id(parameter) for each in module.modules() for parameter in each.parameters(recurse=False))
