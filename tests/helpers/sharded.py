"""Build a small model with awkward shapes and known gradients, sharded over tensor- and data-parallel ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster

# Each parameter's shape and its placement over tensor-parallel ranks. Dim 0 of `single` has one row, so the shards of
# all data-parallel ranks but one are empty
PARAMETERS = {
    "column.weight": ((8, 3), Shard(0)),
    "row.weight": ((5, 4), Shard(1)),
    "column.bias": ((12,), Shard(0)),
    "row.bias": ((63,), Replicate()),
    "norm.weight": ((7,), Replicate()),
    "single.weight": ((1, 257), Replicate()),
}


def one_process_model() -> nn.Module:
    """Build the unsharded model of PARAMETERS with random weights, of which every fourth element is exactly zero."""
    model, generator = nn.Module(), torch.Generator().manual_seed(5)
    for name, (shape, _) in PARAMETERS.items():
        owner, leaf = name.split(".")
        if not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        value = torch.randn(shape, generator=generator)
        value.view(-1)[::4] = 0.0
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(value))
    return model


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of all unsharded weights and optimizer moments, by name. All ranks call this."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {key: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for key, x in found.items()}


def sharded_model(tp: int, replicas: int) -> tuple[nn.Module, ParallelDims]:
    """Build the model of `one_process_model` on four ranks, sharded by FSDP2, with gradients equal to its weights.

    Args:
        tp: tensor-parallel size.
        replicas: replicas of the sharded model (--num-distributed-optimizer-instances).

    Returns:
        (model, mesh of the ranks).
    """
    config = ParallelConfig(tensor_model_parallel_size=tp, num_distributed_optimizer_instances=replicas)
    dims = ParallelDims(plan_dims(config, Cluster(num_nodes=1, ranks_per_node=4), zero_stage=3), device_type="cpu")
    model = one_process_model()
    # the mesh has no tp dim if tp is 1, so the parameters then stay plain tensors
    for name, (_, placement) in PARAMETERS.items() if tp > 1 else ():
        owner, leaf = name.split(".")
        value = distribute_tensor(model.get_parameter(name).data, dims.mesh["tp"], [placement])
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value))
    fully_shard(model, mesh=dims.data_mesh)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return model, dims
