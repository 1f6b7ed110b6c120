"""ZeRO++ for FSDP2 models of other frameworks, by one call in the program: `megazpp.zeropp(model)`.

The program's training loop stays unchanged.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megazpp.base.launcher import env_number
from megazpp.drop_in.dims import GuestDims
from megazpp.drop_in.gather import ProgramGather, ProgramRingGather
from megazpp.drop_in.handle import Comms, Handle
from megazpp.drop_in.reduce import ProgramContext, ProgramRingReduce, RestoringReduce
from megazpp.drop_in.units import QUANTIZABLE, ProgramUnit, find_program_units
from megazpp.drop_in.wrap import ReplacedParameters, dtype_when_wrapped, mesh_to_wrap, wrap_model
from megazpp.drop_in.writes import WatchedGather, WriteWatch
from megazpp.parallel.agreement import find_differences, in_lines
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.host_discovery import describe_host, share_survey
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout
from megazpp.zero.comms import in_backward
from megazpp.zero.config import CommPlan, Dtypes, ZeroConfig
from megazpp.zero.plan import plan_comm
from megazpp.zero.sharding import axes_of_hops

# Name of the environment variable from which `zeropp` reads the number of ranks per node if its argument
# `ranks_per_node` is None. If the number is smaller than the number of ranks on a machine, ZeRO++ treats the machine as
# several emulated nodes.
RANKS_PER_NODE = "MEGAZPP_RANKS_PER_NODE"
HANDLE = "_megazpp"  # name of the attribute with the handle and its settings, in the `__dict__` of the model


def zeropp(
    model: nn.Module, *, ranks_per_node: int | None = None, config: ZeroConfig | None = None, **fsdp: Any
) -> Handle:
    """Replace the all-gathers and reduce-scatters of an FSDP2 model with ZeRO++'s quantized two-hop collectives.

    Call this function on all ranks before training. A second call for the same model with equal arguments returns the
    same handle and changes nothing.

    The training loop stays unchanged. Create the optimizer after the call, because wrapping replaces the parameters.
    Gradients are means over ranks as in FSDP2, and `set_gradient_divide_factor` still applies. Gradients cross nodes
    when FSDP2 reduces them: in each backward, except after `set_requires_gradient_sync(False)` and inside
    `Handle.accumulate`. ZeRO++ detects a write to weights before the next forward, and sends the written weights again
    (writes.py).

    Args:
        model: model that `fully_shard` has wrapped on a mesh [data] or [data, tensor parallel] of all ranks. Experts
            may be on another mesh [data, expert parallel] of all ranks. If the model is not wrapped yet, `zeropp` wraps
            each repeated block and then the rest of the model, over all ranks.
        ranks_per_node: number of consecutive ranks that share a node. None reads the environment variable
            MEGAZPP_RANKS_PER_NODE. If this variable is not set either, the ranks find out which ranks share a host.
        config: formats in which weights and gradients are sent, and further settings of ZeRO++. The default is
            `ZeroConfig(zeropp=True, zero_error_feedback=False)`. With error feedback, the program must call
            `Handle.end_step` after each optimizer step. With `zero_weight_delta="auto"`, weights cross nodes as int8
            blocks, because the speed of the links is unknown here. With 16-bit mixed precision, "lossless" sends exact
            weights. For lossless deltas and for error feedback, a resumed run is bit-identical only with `Handle.save`
            and `Handle.load`.
        fsdp: keyword arguments of `fully_shard` for a model that is not wrapped yet, such as `mp_policy`.
    Returns:
        The handle to the sharded model. The model keeps a reference to the handle, so the program may discard it.
    Raises:
        TypeError: an argument has a wrong type, or FSDP1 or DDP has wrapped the model.
        RuntimeError: there is no process group, or a gradient hook would see gradients before they are reduced. Such a
            hook works only with `ZeroConfig(overlap_grad_reduce=False)`.
        ValueError: ranks pass different settings, the mesh does not number ranks node by node, `config` selects another
            stage than 3, FSDP2 uses an option that ZeRO++ does not support, or a forward or backward is running. The
            model is unchanged then, except that `zeropp` may have wrapped it.
    """
    # ---- return the handle of an earlier zeropp call for this model
    config = ZeroConfig(zeropp=True, zero_error_feedback=False) if config is None else config
    _check_arguments(model, config)
    if isinstance(getattr(model, "_orig_mod", None), FSDPModule):
        model = model.get_submodule("_orig_mod")  # FSDP2 has hooked the module inside torch.compile's wrapper
    ranks_per_node = _ranks_per_node(ranks_per_node)
    fields = {f"config.{field.name}": getattr(config, field.name) for field in dataclasses.fields(config)}
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    asked: dict[str, Any] = {"ranks_per_node": ranks_per_node, **settings, **fsdp}
    if isinstance(installed := model.__dict__.get(HANDLE), _Installed):
        installed.check(asked)
        return installed.handle

    # ---- check the model, and wrap it with FSDP2 if the program has not done so
    _check_model(model)
    _check_equal_settings({"ranks_per_node": ranks_per_node, **settings})
    replaced: ReplacedParameters | None = None
    if isinstance(model, FSDPModule):
        if fsdp:
            raise ValueError(
                f"{next(iter(fsdp))} is not an argument of zeropp itself (ranks_per_node, config), and the model is "
                "already wrapped by fully_shard: correct the name, or pass an argument of fully_shard to fully_shard"
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps the root gathered after a forward, but the code below reads its shards
        mesh, expert_mesh = _meshes_of(model)
        cluster = _find_cluster(mesh, ranks_per_node)
    else:
        mesh = mesh_to_wrap(model, fsdp)
        cluster = _find_cluster(mesh, ranks_per_node)
        # This call only checks `config`: an invalid config must raise its error before the model is wrapped.
        plan_comm(config, plan_layout(cluster, tp=1, replicas=1), dtype_when_wrapped(model, fsdp))
        replaced = wrap_model(model, mesh, fsdp)
        mesh, expert_mesh = _meshes_of(model)

    # ---- plan the layout of ranks, the sharding units and the formats of messages
    layout = _plan_layout(cluster, mesh, expert_mesh)
    units = find_program_units(model)
    for unit in units:
        unit.check_fsdp2()
    # The plan needs one compute dtype, and gets the dtype of the first weights in fp32, bf16 or fp16. Units with other
    # dtypes still work, because each all-gather reads the dtypes of its own unit.
    dtypes = [dtype for unit in units for dtype in unit.gather_dtypes if dtype in QUANTIZABLE]
    if not dtypes:
        raise ValueError("the model has no parameters in fp32, bf16 or fp16, so ZeRO++ has nothing to reduce")
    reduced = [dtype for unit in units for dtype in unit.reduce_dtypes]
    precision = Dtypes(dtypes[0], reduced[0] if reduced else dtypes[0])
    wire = plan_comm(config, layout, precision.param_dtype)
    if wire.overlap_reduce:
        for unit in units:
            unit.refuse_gradient_hooks()

    # ---- install the collectives
    handle = _install_comms(model, units, GuestDims(layout, mesh, expert_mesh), wire, config, precision, replaced)
    _refuse_later_comms(units)
    # Write to `__dict__`, in which a later call looks for the handle. `setattr` on torch.compile's wrapper would set an
    # attribute of the module inside of the wrapper instead.
    model.__dict__[HANDLE] = _Installed(handle, layout.cluster.ranks_per_node, asked)
    if dist.get_rank() == 0:
        anew = "error feedback and lossless deltas begin anew, unless Handle.load loads what Handle.save has saved"
        lines = [layout.describe(), wire.describe(), *wire.notices, *([anew] if handle.keeps_state else ())]
        mixed = [unit.name for unit in units if unit.num_shards > 1 and not unit.is_quantizable]
        if mixed and wire.gather is not None and wire.gather.fmt is not None:
            lines.append(
                f"the weights of {len(mixed)} fully_shard calls ({mixed[0]} first) are not quantized: each of these "
                "calls has parameters that are gathered in several dtypes, or in another dtype than fp32, bf16 and fp16"
            )
        for line in lines:
            # Programs set fields of `ZeroConfig`, not flags: print zero_gradient_bits, not --zero-gradient-bits
            text = re.sub(r"--([a-z][a-z-]+)", lambda found: found[1].replace("-", "_"), line)
            print(f"megazpp: {text}", flush=True)
    return handle


def _install_comms(
    model: nn.Module,
    units: Sequence[ProgramUnit],
    dims: GuestDims,
    wire: CommPlan,
    zero: ZeroConfig,
    precision: Dtypes,
    replaced: ReplacedParameters | None,
) -> Handle:
    """Replace FSDP2's collectives in all units of a program's model, and return the handle to the model.

    Args:
        model: model that `fully_shard` has wrapped over the meshes of `dims`.
        units: sharding units of the model.
        dims: mesh axes of the program's meshes.
        wire: plan of the collectives that replace FSDP2's.
        zero: settings of ZeRO++.
        precision: compute and reduction dtypes of the model.
        replaced: parameters of the model before `zeropp` wrapped it; None if the program has wrapped it.
    """
    # ---- create the mesh axes; all ranks create the axes' process groups in the same order
    two_hops, hosts = wire.gather is not None or wire.reduce is not None, list[MeshAxis]()
    if two_hops:
        hosts = dims.host_axes("local", "cross", *(["tp"] if dims.layout.tp > 1 else []))
    axes = [axes_of_hops(each, wire) for each in dict.fromkeys((dims, dims.experts))]
    context = ProgramContext(*axes[0], plan=wire, zero=zero, precision=precision)
    # For each shard axis, by its ranks, a context with its axes. A unit finds its context by the ranks over which its
    # parameters are sharded.
    contexts = {each[2].ranks: context.over(*each) for each in axes}
    # ---- create and install one all-gather and one reduce-scatter per unit
    comms = []
    for unit in units:
        if unit.num_shards > 1:  # for a unit on one rank FSDP2 calls no collectives, so there are none to replace
            unit.force_sums()
            comms.append(gather_and_reduce := _make_comms(unit, contexts[unit.ranks]))
            unit.use_comms(*gather_and_reduce)
            gather_and_reduce[1].attach()
    if hosts:
        watched = [gather for gather, _ in comms if isinstance(gather, WatchedGather)]
        WriteWatch(watched, model, hosts, context.accumulation)
    return Handle(model, units, zero, comms, dims.counter, context.accumulation, dims.layout, replaced)


def _make_comms(unit: ProgramUnit, context: ProgramContext) -> Comms:
    """Return the all-gather and the reduce-scatter that replace FSDP2's for one unit, as `context.plan` says."""
    plan = context.plan
    two_hops = WatchedGather if plan.gather is not None and plan.gather.keep else ProgramGather
    gather = ProgramRingGather(unit, context) if plan.gather is None else two_hops(unit, context)
    if plan.reduce is None:
        return gather, ProgramRingReduce(unit, context)
    return gather, RestoringReduce(unit, context, lambda: gather.num_uses)


class _Installed(NamedTuple):
    """The handle that `zeropp` has created for a model, and the arguments of that call."""

    handle: Handle
    # Number of ranks per node, from the argument of `zeropp`, MEGAZPP_RANKS_PER_NODE, or the hosts of the ranks
    ranks_per_node: int
    asked: dict[str, Any]  # arguments of the `zeropp` call by name, with one entry per field of the config

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raise ValueError if a later `zeropp` call for the same model passes other arguments than the first call.

        If only the later call sets `ranks_per_node`, it must equal the number that the first call has discovered.

        Args:
            asked: arguments of the later call by name, in the form of the attribute `asked`.
        """
        before = dict(self.asked)
        if before["ranks_per_node"] is None and asked["ranks_per_node"] is not None:
            before["ranks_per_node"] = self.ranks_per_node
        differ = [name for name in {**before, **asked} if before.get(name) != asked.get(name)]
        if differ:
            settings = "; ".join(f"{name} was {before.get(name)}, now {asked.get(name)}" for name in differ)
            raise ValueError(
                f"megazpp.zeropp was already called for this model with other settings: {settings}. Call it once, or "
                "with equal arguments"
            )


def _refuse_later_comms(units: Sequence[ProgramUnit]) -> None:
    """Make each forward of a unit check that the program has not replaced ZeRO++'s collectives since `zeropp`.

    If the program has replaced them, the forward raises RuntimeError.
    """
    for unit in units:
        if unit.has_our_comms:

            @torch.compiler.disable
            def check(*_: Any, unit: ProgramUnit = unit) -> None:
                """Raise RuntimeError if ZeRO++'s collectives were replaced; torch calls this before each forward."""
                unit.refuse_other_comms()

            for module in unit.modules:
                assert isinstance(module, nn.Module)
                module.register_forward_pre_hook(check, prepend=True)  # runs before FSDP2's hook, which gathers weights


def _check_arguments(model: object, config: object) -> None:
    """Raise TypeError if an argument has a wrong type, and ValueError if `config` selects another ZeRO stage than 3."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"megazpp.zeropp requires an nn.Module as its first argument, not {given}: pass the model")
    if not isinstance(config, ZeroConfig):
        raise TypeError(f"the argument config is a {type(config).__name__}: pass megazpp.ZeroConfig(zeropp=True, ...)")
    if config.stage != 3:
        by = "use_distributed_optimizer=True" if config.zero_stage is None else f"zero_stage={config.zero_stage}"
        raise ValueError(
            f"ZeroConfig({by}) selects ZeRO stage {config.stage}, but a model of fully_shard has stage 3: leave the "
            "argument out"
        )


def _check_equal_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks if a rank calls `zeropp` with other settings than rank 0.

    Ranks with different settings would wait for each other for ever. The usual cause is that MEGAZPP_RANKS_PER_NODE is
    set on some hosts only.
    """
    if not dist.is_initialized():
        return  # `mesh_to_wrap`, which `zeropp` calls next, raises the error about the missing process group
    mine = {name: str(value) for name, value in settings.items()}
    size = dist.get_world_size()
    group = dist.group.WORLD if size > 1 else None
    world = MeshAxis("world", ranks=tuple(range(size)), rank=dist.get_rank(), group=group, wire="world")
    if found := find_differences(world, mine):
        raise ValueError(
            f"different settings of megazpp.zeropp: {'; '.join(in_lines(found))}. Pass equal arguments on all ranks, "
            f"and set {RANKS_PER_NODE} on all hosts or on none"
        )


def _meshes_of(model: nn.Module) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the device meshes on which `fully_shard` has placed the model's parameters.

    Returns:
        Two meshes. The first mesh, [data] or [data, tensor parallel], has the model's first parameter, which is not a
        parameter of an expert. The second mesh, [data, expert parallel], has the parameters of experts. The second mesh
        is None if the model has no experts, or if experts are sharded over the same ranks as all other parameters.
    Raises:
        ValueError: a parameter is placed in a way that ZeRO++ does not support, or no parameter is sharded.
    """
    meshes: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # FSDP2 does not shard the parameters in `ignored_params` of fully_shard
        mesh = parameter.device_mesh
        if getattr(parameter.placements[0], "dim", None) != 0 or mesh.ndim > 2:
            raise ValueError(
                f"the parameter {name} is placed as {parameter.placements} on {mesh}, but ZeRO++ requires Shard(0) "
                "over a mesh [data], [data, tensor parallel] or [data, expert parallel]. HSDP and further mesh dims "
                "are not supported: call fully_shard with such a mesh and without shard_placement_fn, and shard "
                "experts over no more ranks than there are experts"
            )
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group(0)))
        first, known = meshes.get(ranks, (name, mesh))
        meshes[ranks] = (first, mesh if mesh.ndim > known.ndim else known)
    if not meshes:
        raise ValueError("fully_shard has sharded no parameter of the model: check its ignored_params")
    if len(meshes) > 2 or (len(meshes) == 2 and len({mesh.size() for _, mesh in meshes.values()}) > 1):
        (some, (first, _)), (others, (second, _)) = list(meshes.items())[:: len(meshes) - 1]
        raise ValueError(
            f"the parameter {first} is sharded over ranks {list(some)}, {second} over {list(others)}: ZeRO++ requires "
            "one mesh of all ranks, and allows one more mesh of all ranks for experts, [data, expert parallel]. Pass "
            "the same mesh to every fully_shard call, and make experts DTensors on the expert-parallel dim before it"
        )
    # The mesh of a parameter may be an older mesh that equals the mesh of `fully_shard`, but has other process groups.
    # ZeRO++ must use FSDP2's own groups.
    of_fsdp2 = {unit.ranks: unit.mesh for unit in find_program_units(model)}
    dense, *experts = [mesh if mesh.ndim == 2 else of_fsdp2[ranks] for ranks, (_, mesh) in meshes.items()]
    return dense, experts[0] if experts else None


def _plan_layout(cluster: Cluster, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> Layout:
    """Return the layout of ranks for a program's meshes on a cluster.

    Args:
        cluster: number of nodes, and of ranks per node.
        mesh: mesh [data] or [data, tensor parallel] of parameters that are not experts'.
        expert_mesh: mesh [data, expert parallel] of experts' parameters; None if there is none.
    Raises:
        ValueError: the meshes do not number ranks node by node, or experts are split over several nodes.
    """
    tp, ep = (1 if each is None or each.ndim == 1 else each.size(1) for each in (mesh, expert_mesh))
    if cluster.local_domain_size % ep:
        fitting = [size for size in range(1, cluster.local_domain_size) if cluster.local_domain_size % size == 0]
        raise ValueError(
            f"expert parallelism across nodes is not supported: experts are split over {ep} ranks, but a node has "
            f"{cluster.local_domain_size}, so tokens would cross nodes in every layer. Set the expert-parallel degree "
            "(ep_size of transformers, expert_parallel_degree of torchtitan) to "
            f"{' or '.join(map(str, [*fitting, cluster.local_domain_size]))}"
        )
    layout = plan_layout(cluster, tp=tp, replicas=1, ep=ep)
    for each in (mesh, *(() if expert_mesh is None else (expert_mesh,))):
        if each.mesh.flatten().tolist() != list(layout.mesh_ranks()):
            raise ValueError(
                f"the device mesh has the ranks in the order {each.mesh.flatten().tolist()}, but ZeRO++ requires the "
                f"order {list(layout.mesh_ranks())}: number ranks node by node, and build the mesh from all of them, "
                "with the tensor-parallel or expert-parallel dim last"
            )
    return layout


def _ranks_per_node(given: int | None) -> int | None:
    """Return the number of ranks per node that the argument of `zeropp` or MEGAZPP_RANKS_PER_NODE sets.

    Args:
        given: argument of `zeropp`, which has priority over the environment variable.
    Returns:
        The number of ranks per node, or None if neither is set.
    Raises:
        TypeError: the argument is not an integer.
        ValueError: the environment variable is used, and is not an integer.
    """
    if given is not None and not isinstance(given, int):
        raise TypeError(f"ranks_per_node is {given!r}, a {type(given).__name__}: pass a whole number such as 8")
    if given is not None or (said := os.environ.get(RANKS_PER_NODE)) is None:
        return given
    if not said.isdecimal():
        raise ValueError(f"{RANKS_PER_NODE}={said} is not a number of ranks per node: set an integer such as 8")
    return int(said)


def _find_cluster(mesh: DeviceMesh, ranks_per_node: int | None) -> Cluster:
    """Return the `Cluster` of the job: the number of nodes, and the number of ranks on each node.

    Args:
        mesh: mesh of the model, which must contain all ranks of the job.
        ranks_per_node: number of consecutive ranks that share a node. None lets the ranks tell each other on which
            hosts they run.
    Raises:
        ValueError: the mesh lacks ranks, or `ranks_per_node` does not divide their number.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if mesh.size() != world_size:
        raise ValueError(
            f"the device mesh has {mesh.size()} of {world_size} ranks: ZeRO++ requires a mesh of all ranks of the job"
        )
    if ranks_per_node is not None:
        if ranks_per_node < 1 or world_size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node {ranks_per_node} does not divide the {world_size} ranks of the job: pass the number "
                "of ranks that share a node"
            )
        return Cluster(num_nodes=world_size // ranks_per_node, ranks_per_node=ranks_per_node)
    local_rank = env_number("LOCAL_RANK", os.environ, default=rank)
    # Like FSDP2, use the current CUDA device and not the device with the index `local_rank`, because a process may see
    # only one GPU.
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else 0)
    return share_survey(_get_default_store(), rank, world_size, describe_host(local_rank, device))


def _check_model(model: nn.Module) -> None:
    """Raise TypeError or ValueError if `zeropp` cannot install ZeRO++ in this model now.

    The errors are for a model to which one of these statements applies:

    - `zeropp` was called before for a part of the model, or for a larger model that contains this one
    - FSDP1 or DDP has wrapped the model, or FSDP2 has wrapped only submodules of it
    - the model has no parameters
    - a forward or a backward is running
    """
    # ---- ZeRO++ must not be installed already in a submodule of the model, or in a larger model that contains it
    wrapped = (module for module in model.modules() if isinstance(module, FSDPModule))
    for unit in (unit for module in wrapped for unit in find_program_units(module)):
        if unit.has_our_comms:
            raise ValueError(
                f"megazpp.zeropp was already called for another module that holds the parameter {unit.key}: call it "
                "once, for the outermost module"
            )
    # ---- raise an error for FSDP1 and DDP, and if only submodules are wrapped with FSDP2
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
            raise TypeError(
                f"{type(module).__name__} has wrapped the model, which ZeRO++ does not support: wrap the model with "
                "FSDP2 (fully_shard) instead"
            )
    if next(model.parameters(), None) is None:
        raise ValueError(f"the model, a {type(model).__name__}, has no parameters that ZeRO++ could shard")
    inner = [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    if inner and not isinstance(model, FSDPModule):
        raise ValueError(
            f"the submodule {inner[0]} is wrapped by fully_shard, but the model is not: call fully_shard(model) after "
            "wrapping its blocks, or pass the FSDP2 root module to megazpp.zeropp"
        )
    running = "backward" if in_backward() else "forward" if _in_forward(model) else None
    if running is not None:
        raise ValueError(f"megazpp.zeropp was called inside a {running}: call it between steps")


def _in_forward(model: nn.Module) -> bool:
    """Return True if this thread is inside a call of one of the model's modules.

    `zeropp` must not reshard the model then, because the running forward still needs its gathered parameters.
    """
    # FSDP2's training state is not reliable here: after an exception in a forward it keeps its last value. So search
    # the Python stack for a module call.
    modules, frame = set(model.modules()), inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] in modules:
            return True
        frame = frame.f_back
    return False
