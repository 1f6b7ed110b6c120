"""Initial values of a model's parameters, and their conversion to DTensors before sharding.

Every rank fills each unsharded parameter by a random generator with a seed from (seed of the run, parameter's name),
and keeps only its shard. So weights do not depend on the number of ranks or their placement. An expert's matrix has a
separate generator with a seed from (seed, name, expert), so that a rank generates only experts whose rows it holds.

GPUs of different types may generate different numbers from one seed, because CUDA's generator depends on the number of
multiprocessors. Therefore `share_parameters_` copies the values from one rank to all ranks that hold the same shard.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import ParameterSpec, local, owned_parameters


def distribute_parameters(model: nn.Module, tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None = None) -> None:
    """Replace the model's parameters with DTensors that wrap the same local tensors; call this before `fully_shard`.

    Args:
        model: model whose parameters are plain tensors, local to this tensor-parallel rank.
        tp_mesh: tensor-parallel mesh of all parameters but experts'; None leaves these parameters unchanged.
        ep_mesh: expert-parallel mesh of experts' parameters; None leaves these parameters unchanged.
    """
    for _, module, attribute, spec in list(owned_parameters(model)):
        mesh = ep_mesh if spec.expert else tp_mesh
        if mesh is None:
            continue
        tensor = getattr(module, attribute)
        placement = Replicate() if spec.split is None else Shard(spec.split)
        wrapped = DTensor.from_local(tensor.detach(), mesh, [placement], run_check=False)
        setattr(module, attribute, nn.Parameter(wrapped, requires_grad=tensor.requires_grad))


@torch.no_grad()
def initialize_parameters_(model: nn.Module, *, seed: int, draw_device: torch.device) -> None:
    """Initialize every parameter of a model in place, and set every buffer to zero.

    The values of a parameter depend only on `seed`, the parameter's name and the kind of `draw_device`.

    Args:
        model: model whose parameters are local tensors or DTensors of any placement.
        seed: seed of the run.
        draw_device: device on which unsharded parameters, or unsharded matrices of experts, are generated, one at a
            time. The CPU and CUDA generate different numbers from the same seed.
    """
    for name, module, attribute, spec in owned_parameters(model):
        parameter = getattr(module, attribute)
        if spec.expert and spec.matrices:
            _draw_experts_(parameter, name, spec, seed=seed, draw_device=draw_device)
            continue
        full = draw_parameter(name, tuple(parameter.shape), spec, seed=seed, device=draw_device)
        if isinstance(parameter, DTensor):
            full, mesh = full.to(parameter.device), parameter.device_mesh
            placed = distribute_tensor(full, mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(placed.to_local())
        else:
            parameter.copy_(full)
    for buffer in model.buffers():
        buffer.zero_()


def _draw_experts_(
    parameter: torch.Tensor, name: str, spec: ParameterSpec, *, seed: int, draw_device: torch.device
) -> None:
    """Initialize a parameter of E experts in place; only experts whose rows this rank holds are generated.

    Args:
        parameter: [E F, H] local tensor, or DTensor whose rows are sharded. F, H: rows and columns of an expert's
            matrix.
        name: name of the parameter in the model.
        spec: specification with the distribution of the values. All its `matrices` have F rows.
        seed: seed of the run.
        draw_device: device on which each expert's matrix [F, H] is generated.
    """
    rows, target = torch.arange(len(parameter), device=parameter.device), parameter
    if isinstance(parameter, DTensor):
        target = parameter.to_local()
        rows = distribute_tensor(rows, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    # `rows` has the indices of this rank's rows in the unsharded parameter, `size` the number of rows of an expert.
    rows, size = rows.cpu(), spec.matrices[0]
    for expert in rows.div(size, rounding_mode="floor").unique().tolist():
        matrix = draw_parameter(f"{name}.{expert}", (size, *target.shape[1:]), spec, seed=seed, device=draw_device)
        (here,) = torch.where(rows // size == expert)
        target[here.to(target.device)] = matrix[(rows[here] % size).to(draw_device)].to(target.device)


@torch.no_grad()
def share_parameters_(model: nn.Module, *copies: MeshAxis, tp: MeshAxis, device: torch.device) -> None:
    """Copy randomly initialized parameters from one rank to all ranks that hold the same shard.

    Without this copy, ranks with GPUs of different types could hold different values, see the top of this file.

    Args:
        model: model whose parameters are updated in place.
        copies: axes along which all ranks hold equal shards. The first rank of each axis sends its values to the
            others.
        tp: tensor-parallel axis. Parameters that are not split over it are copied along it as well.
        device: device on which the collectives run. The parameters may be in host memory.
    """
    for _, module, attribute, spec in owned_parameters(model):
        if spec.std > 0.0:  # all other parameters start with a constant, which is equal on all ranks
            own = local(getattr(module, attribute).detach())
            values = own.to(device)
            if spec.split is None:
                tp.broadcast_(values)
            for axis in copies:
                axis.broadcast_(values)
            if values is not own:
                own.copy_(values)


def draw_parameter(
    name: str, shape: tuple[int, ...], spec: ParameterSpec, *, seed: int, device: torch.device
) -> torch.Tensor:
    """Return the initial values of one unsharded parameter, in fp32.

    Args:
        name: name of the parameter. Name and seed determine the values.
        shape: shape of the unsharded parameter.
        spec: specification with the distribution of the values, and the number of rows that are not padding.
        seed: seed of the run.
        device: device on which the values are generated.
    """
    full = torch.full(shape, spec.value, dtype=torch.float32, device=device)
    if spec.std > 0.0:
        generator = torch.Generator(device).manual_seed(seed_for(name, seed=seed))
        full[: spec.rows].normal_(0.0, spec.std, generator=generator)
        if spec.rows is not None:
            full[spec.rows :] = 0.0
    return full


def seed_for(name: str, *, seed: int) -> int:
    """Return a seed for a random generator, a hash of (seed, name), so that parameters get unrelated numbers.

    Args:
        name: name of a parameter.
        seed: seed of the run.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
