"""Initial values of a model's parameters, and their conversion to DTensors before sharding.

A generator seeded by (seed, name) fills the whole parameter, and each rank keeps its part. An expert's matrix has its
own generator, seeded by (seed, name, expert), so that a rank generates only experts whose rows it holds. Weights
therefore do not depend on the number of ranks or their placement. GPUs of different models generate different numbers
from one seed, because CUDA divides a tensor by its number of multiprocessors. `share_parameters_` then copies the
values from one rank to all ranks that hold the same part.
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
    """Replace parameters with DTensors that wrap the same local tensors.

    Args:
        model: model with plain parameters.
        tp_mesh: mesh of all parameters but experts'; None leaves these parameters unchanged.
        ep_mesh: mesh of experts' parameters; None leaves these parameters unchanged.
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
    """Initialize every parameter in place, from values that depend only on the seed and its name; zero every buffer.

    Args:
        model: model whose parameters are local tensors or DTensors of any placement.
        seed: seed of the run.
        draw_device: device on which the whole tensors, or whole matrices of experts, are generated, one at a time. The
            CPU and CUDA generate different numbers from the same seed.
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
    """Initialize a parameter of experts [E F, H] in place. Only experts whose rows this rank holds are generated.

    Args:
        parameter: local tensor, or DTensor whose rows are sharded.
        name: name of the parameter.
        spec: distribution of the values. All its `matrices` have F rows.
        seed: seed of the run.
        draw_device: device on which each expert's matrix [F, H] is generated.
    """
    rows, target = torch.arange(len(parameter), device=parameter.device), parameter
    if isinstance(parameter, DTensor):
        target = parameter.to_local()
        rows = distribute_tensor(rows, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    rows, size = rows.cpu(), spec.matrices[0]  # numbers of this rank's rows in the whole parameter
    for expert in rows.div(size, rounding_mode="floor").unique().tolist():
        matrix = draw_parameter(f"{name}.{expert}", (size, *target.shape[1:]), spec, seed=seed, device=draw_device)
        (here,) = torch.where(rows // size == expert)
        target[here.to(target.device)] = matrix[(rows[here] % size).to(draw_device)].to(target.device)


@torch.no_grad()
def share_parameters_(model: nn.Module, *copies: MeshAxis, tp: MeshAxis, device: torch.device) -> None:
    """Copy randomly initialized parameters from one rank to all ranks that hold the same part.

    Args:
        model: model whose parameters are updated in place.
        copies: axes along which ranks hold equal parts.
        tp: tensor-parallel axis. Parameters that it does not split are copied along it as well.
        device: device of the collectives. The parameters may be in host memory.
    """
    for _, module, attribute, spec in owned_parameters(model):
        if spec.std > 0.0:
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
    """Return the whole initial value of one parameter, fp32.

    Args:
        name: name of the parameter. It determines the values together with the seed.
        shape: shape of the whole parameter.
        spec: distribution of the values, and rows without padding.
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
    """Return a generator seed for a pair (seed, name). The hash makes the seeds of different pairs unrelated."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
