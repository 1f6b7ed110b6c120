"""ZeRO++ for a model that is not ours: `megazpp.zeropp(model)`, after which FSDP2's own loop goes on as before."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.host_discovery import describe_host, share_survey
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import plan_layout
from megazpp.zero.config import Dtypes, ZeroConfig, plan_comm
from megazpp.zero.schedule import in_backward
from megazpp.zero.sharding import Sharding, install_comms
from megazpp.zero.units import Unit, find_units
from megazpp.zero.wire import QUANTIZABLE

RANKS_PER_NODE = "MEGAZPP_RANKS_PER_NODE"  # a variable, for trying a training on one machine
HANDLE, STATE = "_megazpp", "_megazpp_state"  # an attribute of the model, and a submodule that its state_dict visits


def zeropp(
    model: nn.Module, *, ranks_per_node: int | None = None, config: ZeroConfig | None = None, **fsdp: Any
) -> Sharding:
    """Have the weights and gradients of an FSDP2 model travel in ZeRO++'s two hops; call on all ranks, before training.

    A later call for the same model with equal arguments returns the same handle and changes nothing.

    Nothing else of the training changes: gradients are FSDP2's means (`set_gradient_divide_factor` is obeyed), and
    gradients cross nodes when FSDP2 reduces them in a step's last backward (`set_requires_gradient_sync`,
    `set_is_last_backward`). Writes to weights before a forward are noticed (writes.py).

    Args:
        model: wrapped by `fully_shard` on a mesh [data] or [data, tensor parallel] of all ranks; or not wrapped yet:
            then each repeated block and the rest become a unit over all ranks.
        ranks_per_node: where consecutive ranks share a node; None: the variable MEGAZPP_RANKS_PER_NODE says it, or the
            ranks find out where they are.
        config: formats and switches; the default is `ZeroConfig(zeropp=True, zero_error_feedback=False)`. With error
            feedback, `Sharding.end_step` has to be told what clipping did to the gradients.
        fsdp: arguments of `fully_shard` for a model that is not wrapped, as `mp_policy`.
    Returns:
        The handle, which need not be kept: the model keeps it.
    Raises:
        TypeError: FSDP1 or DDP has wrapped the model.
        RuntimeError: a hook wants gradients before they are reduced; it needs `ZeroConfig(overlap_grad_reduce=False)`.
        ValueError: the mesh is no rectangle of nodes, FSDP2 was asked for what ZeRO++ cannot do, or a forward or
            backward is running. Nothing has been changed then, except that a model that was not wrapped is.
    """
    config = config or ZeroConfig(zeropp=True, zero_error_feedback=False)
    if isinstance(getattr(model, "_orig_mod", None), FSDPModule):
        model = model.get_submodule("_orig_mod")  # compiled; FSDP2's hooks are on the module inside
    ranks_per_node = _ranks_per_node(ranks_per_node)
    asked: dict[str, Any] = {"ranks_per_node": ranks_per_node, **_settings_of(config), **fsdp}
    if isinstance(installed := model.__dict__.get(HANDLE), _Installed):
        installed.check(asked)
        return installed.sharding
    _refuse_shared_units(model)
    _check_model(model)
    tensor = next(model.parameters())
    if not isinstance(model, FSDPModule):
        _wrap(model, tensor.device.type, fsdp)
    elif fsdp:
        raise ValueError(
            f"{next(iter(fsdp))}: the model is already wrapped by fully_shard; pass this argument to fully_shard"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward may have left the root's parameters gathered
    mesh = _mesh_of(model)
    tp = mesh.size(1) if mesh.ndim == 2 else 1
    layout = plan_layout(_find_cluster(mesh, ranks_per_node), tp=tp, replicas=1)
    if mesh.mesh.flatten().tolist() != list(layout.mesh_ranks()):
        raise ValueError(
            f"the mesh has the ranks in the order {mesh.mesh.flatten().tolist()}, node by node it is "
            f"{list(layout.mesh_ranks())}: number ranks node by node, and make the mesh of all of them"
        )
    units = find_units(model)
    _check_units(units)
    precision = _precision_of(units)
    wire = plan_comm(config, layout, precision.param_dtype)
    if wire.overlap_reduce:
        for unit in units:
            unit.refuse_gradient_hooks()
    dims = ParallelDims(layout, device_type=mesh.device_type, mesh=mesh)
    sharding = install_comms(model, units, dims, wire, config, precision, stage=3, means=True, watch=True)
    setattr(model, HANDLE, _Installed(sharding, layout.cluster.ranks_per_node, asked))
    if sharding.keeps_state:
        containers = nn.Sequential | nn.ModuleList | nn.ModuleDict  # which would run it, or number it
        next(m for m in model.modules() if not isinstance(m, containers)).add_module(STATE, KeptState(sharding))
    if dist.get_rank() == 0:
        for line in (layout.describe(), wire.describe(), *wire.notices):
            print(f"megazpp: {line}", flush=True)
    return sharding


class _Installed(NamedTuple):
    """The handle of a model and the settings with which it was made."""

    sharding: Sharding
    ranks_per_node: int  # what was asked for, or found
    asked: dict[str, Any]

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raise ValueError if a later call asks for other settings."""
        before = dict(self.asked)
        if before["ranks_per_node"] is None and asked["ranks_per_node"] is not None:
            before["ranks_per_node"] = self.ranks_per_node
        differ = [name for name in {**before, **asked} if before.get(name) != asked.get(name)]
        if differ:
            settings = "; ".join(f"{name} was {before.get(name)}, now {asked.get(name)}" for name in differ)
            raise ValueError(f"megazpp.zeropp was called for this model before, with other settings: {settings}")


def _settings_of(config: ZeroConfig) -> dict[str, Any]:
    return {f"config.{field.name}": getattr(config, field.name) for field in dataclasses.fields(config)}


def _refuse_shared_units(model: nn.Module) -> None:
    """Raise ValueError if a part of the model, or a model that it is a part of, has ZeRO++ already."""
    wrapped = (module for module in model.modules() if isinstance(module, FSDPModule))
    for unit in (unit for module in wrapped for unit in find_units(module)):
        if unit.has_our_comms:
            raise ValueError(
                f"megazpp.zeropp was called before for another module with the parameter {unit.key}: call it once, for "
                "the outermost module"
            )


def trainer_callback(**arguments: Any) -> Any:
    """A callback for transformers' Trainer and TRL's, which calls `zeropp` with these arguments."""
    from transformers import TrainerCallback  # not all who import this have it

    class Zeropp(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            model: nn.Module = given["model"]
            if not isinstance(model, FSDPModule):
                raise TypeError("the Trainer has not wrapped the model by FSDP2: it needs fsdp=True and fsdp_version 2")
            zeropp(model, **arguments)

    return Zeropp()


class KeptState(nn.Module):
    """A submodule without parameters, through which a state_dict has what ZeRO++ needs to go on bit for bit.

    That is what nodes keep of the weights where differences cross, and the error feedback, which belongs to its rank.
    """

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self._sharding = [sharding]

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Copies of all that there may be, zeros for what there is not yet: a checkpoint is read into the same."""
        (sharding,) = self._sharding
        sharding.reshard()
        feedback = {f"rank {dist.get_rank()} {name}": part.clone() for name, part in sharding.rank_state().items()}
        return sharding.secondary_targets() | sharding.secondary_state() | feedback

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `get_extra_state` has returned; the weights have been loaded."""
        (sharding,) = self._sharding
        sharding.reshard()
        complete = sharding.load_secondary_state(state)
        for name, part in sharding.rank_state().items():
            kept = state.get(f"rank {dist.get_rank()} {name}")
            complete = complete and kept is not None and kept.shape == part.shape
            part.zero_() if kept is None or kept.shape != part.shape else part.copy_(kept)
        if not complete:
            self._say_anew()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}_extra_state" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args)
        else:  # a checkpoint of a run without ZeRO++
            self._say_anew()

    def _say_anew(self) -> None:
        if dist.get_rank() == 0:
            print(
                "megazpp: the checkpoint has no state of ZeRO++ for these ranks: whole weights cross first", flush=True
            )


def _wrap(model: nn.Module, device_type: str, fsdp: Mapping[str, Any]) -> None:
    """Wrap each repeated block, and the rest of the model, over all ranks."""
    if device_type == "meta":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("megazpp.zeropp needs process groups: call torch.distributed.init_process_group first")
    mesh = fsdp.get("mesh") or DeviceMesh.from_group(world, device_type)  # with the user's timeout
    for block in repeated_blocks(model):
        fully_shard(block, **{**fsdp, "mesh": mesh})
    fully_shard(model, **{**fsdp, "mesh": mesh})


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model is a stack of, in order: what a Hugging Face model will not split, else its lists' items.

    Raises:
        ValueError: there are none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1)
        outermost = next((items for items in lists if len({type(item) for item in items}) == 1), ())
        blocks = [block for block in outermost if next(block.parameters(), None) is not None]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no list of equal blocks: wrap its parts with fully_shard, then call zeropp"
        )
    return blocks


def _mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh [data] or [data, tensor parallel] that FSDP2 was given."""
    meshes: dict[int, DeviceMesh] = {}
    ranks: dict[tuple[int, ...], str] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # one that FSDP2 was told to ignore
        if getattr(parameter.placements[0], "dim", None) != 0 or parameter.device_mesh.ndim > 2:
            raise ValueError(
                f"{name} is placed as {parameter.placements} on {parameter.device_mesh}: ZeRO++ takes rows in shards "
                "over [data] or [data, tensor parallel], no copies (HSDP) and no further dims"
            )
        meshes[parameter.device_mesh.ndim] = parameter.device_mesh
        ranks.setdefault(tuple(dist.get_process_group_ranks(parameter.device_mesh.get_group(0))), name)
    if not meshes:
        raise ValueError("fully_shard has sharded no parameter of the model (ignored_params?)")
    if len(ranks) > 1:
        (some, first), (others, second) = list(ranks.items())[:2]
        raise ValueError(
            f"{first} is sharded over ranks {list(some)}, {second} over {list(others)}: ZeRO++ takes one mesh; give "
            "every fully_shard call the same"
        )
    return meshes[max(meshes)]


def _ranks_per_node(given: int | None) -> int | None:
    """The argument, else the variable; None where neither says anything."""
    if given is not None or (said := os.environ.get(RANKS_PER_NODE)) is None:
        return given
    if not said.isdecimal():
        raise ValueError(f"{RANKS_PER_NODE}={said} is no number of ranks")
    return int(said)


def _find_cluster(mesh: DeviceMesh, ranks_per_node: int | None) -> Cluster:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if mesh.size() != world_size:
        raise ValueError(f"the mesh has {mesh.size()} of {world_size} ranks: ZeRO++ takes a mesh of all")
    if ranks_per_node is not None:
        if ranks_per_node < 1 or world_size % ranks_per_node:
            raise ValueError(f"ranks_per_node {ranks_per_node} does not divide {world_size} ranks")
        return Cluster(num_nodes=world_size // ranks_per_node, ranks_per_node=ranks_per_node)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device(mesh.device_type, local_rank if mesh.device_type == "cuda" else 0)
    return share_survey(_get_default_store(), rank, world_size, describe_host(local_rank, device))


def _precision_of(units: Sequence[Unit]) -> Dtypes:
    """The dtypes of the first unit that has floating-point weights; each unit may have its own."""
    found = [dtype for unit in units for dtype in unit.gather_dtypes if dtype in QUANTIZABLE]
    if not found:
        raise ValueError("the model has no parameters in fp32, bf16 or fp16, so there is nothing that ZeRO++ reduces")
    reduced = [dtype for unit in units for dtype in unit.reduce_dtypes]
    return Dtypes(found[0], reduced[0] if reduced else found[0])


def _check_model(model: nn.Module) -> None:
    """Raise for a model that is wrapped in a way that ZeRO++ cannot take."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
            raise TypeError(f"{type(module).__name__} has wrapped the model: ZeRO++ needs FSDP2, fully_shard")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters")
    inner = [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    if inner and not isinstance(model, FSDPModule):
        raise ValueError(
            f"{inner[0]} is wrapped by fully_shard, and the model is not: call fully_shard(model) after its blocks, "
            "or hand in the module that is the root"
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ValueError("the model is compiled: call megazpp.zeropp(model) first, then torch.compile(model)")
    running = "backward" if in_backward() else "forward" if _in_forward(model) else None
    if running is not None:
        raise ValueError(f"megazpp.zeropp was called inside a {running}: call it between steps")


def _in_forward(model: nn.Module) -> bool:
    """True if this thread is inside a call of one of the model's modules, which would lose its gathered parameters."""
    # FSDP2's own state does not tell: it stays as it was when an exception ended a forward
    modules, frame = set(model.modules()), inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] in modules:
            return True
        frame = frame.f_back
    return False


def _check_units(units: Sequence[Unit]) -> None:
    """Raise ValueError for units that ZeRO++ cannot take, and for a parameter that is in two of them."""
    for unit in units:
        unit.check_one_mesh()
    for unit in units:
        unit.check_fsdp2()
    first: dict[object, str] = {}
    for unit in units:
        for name, uid in unit.origins():
            if first.setdefault(uid, name) != name:
                raise ValueError(
                    f"{name} and {first[uid]} are one parameter in two units: wrap their modules together, "
                    "fully_shard([a, b])"
                )
