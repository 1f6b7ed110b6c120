"""Build the optimizer that the flags select; the matrix operations of Muon are in muon.py.

Torch's fused SGD does not accept DTensors (torch 2.13: "no sharding strategy registered"), so SGD uses torch's
multi-tensor implementation (foreach=True).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megazpp.optim.apex import ApexAdam, check_apex
from megazpp.optim.config import OptimizerConfig
from megazpp.optim.muon import JointOrthogonalizer, Orthogonalizer, row_dtype
from megazpp.optim.muon_plan import layer_matrices
from megazpp.optim.optimizer import DeviceOptimizer, ShardedAdamW, parameter_groups
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import local


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: torch.dtype = torch.float32,
    adamw: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that the flags select; its learning rate is 0 until `set_rates_` is called.

    Args:
        model: sharded model. The optimizer does not get parameters that do not require a gradient.
        config: flags of the optimizer.
        dims: mesh axes of the run, which only Muon needs; None for other optimizers.
        dtype: dtype in which the model computes. Muon derives from it the dtype in which rows are communicated.
        adamw: class that --optimizer adam uses in place of `ShardedAdamW`, such as the class for states in host memory
            (--optimizer-cpu-offload); None for `ShardedAdamW`.

    Raises:
        ValueError: --optimizer-backend apex is set, but apex is not installed or the device is not CUDA.
    """
    named = list(model.named_parameters())
    if config.optimizer == "muon":
        assert dims is not None, "--optimizer muon needs the mesh axes of the run, the argument `dims`"
        return Muon(dict(named), build_orthogonalizer(model, config, dims, dtype), config)
    groups, betas = parameter_groups(named, config.weight_decay), (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, foreach=True)
    if config.optimizer_backend == "apex":
        check_apex(named[0][1].device.type)
        return ApexAdam(groups, betas=betas, eps=config.adam_eps)
    return (adamw or ShardedAdamW)(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True, foreach=False)


def build_orthogonalizer(
    model: nn.Module, config: OptimizerConfig, dims: ParallelDims, dtype: torch.dtype
) -> JointOrthogonalizer:
    """Build the object with which --optimizer muon orthogonalizes the updates of the layers' matrices.

    The matrices of experts have a separate `Orthogonalizer`, because they are sharded over other axes.

    Args:
        model: sharded model.
        config: flags of the optimizer.
        dims: mesh axes of the run.
        dtype: dtype in which the model computes.
    """
    matrices, rows = layer_matrices(model, dims.tp.size, dims.layout.ep), row_dtype(dtype)
    dense, experts = ([matrix for matrix in matrices if matrix.expert is expert] for expert in (False, True))
    parts = [Orthogonalizer(dense, config, dims.layout, node=dims.node, cross=dims.cross, dtype=rows)]
    if experts:
        # An expert-parallel rank has complete experts. So the rows of an expert's matrices are split only over the axes
        # on which FSDP2 shards experts, and not over tensor-parallel ranks.
        axes, layout = dims.experts, dataclasses.replace(dims.experts.layout, tp=1)
        parts.append(Orthogonalizer(experts, config, layout, node=axes.local, cross=axes.cross, dtype=rows))
    return JointOrthogonalizer(parts)


def optimizer_backends(config: OptimizerConfig, device_type: str) -> list[tuple[str, str, str]]:
    """Return the optimizer's rows (part, implementation, reason) for the log's table of back ends.

    Args:
        config: flags of the optimizer.
        device_type: type of the run's devices, "cpu" or "cuda".
    """
    implementation, why = "torch.optim.AdamW(fused=True)", f"torch has a fused kernel on {device_type}"
    if config.optimizer_backend == "apex":
        implementation, why = "apex.optimizers.FusedAdam", "selected by --optimizer-backend apex"
    elif config.optimizer == "sgd":
        implementation, why = "torch.optim.SGD(foreach=True)", "torch's fused SGD does not support DTensors"
    elif config.optimizer == "muon":
        implementation = "Muon for the layers' matrices, in batches of one shape; " + implementation
    return [("optimizer", implementation, why)]


class Muon(DeviceOptimizer):
    """Muon for the matrices of the layers, which must have gradients, and fused AdamW for all other parameters.

    The state of a matrix has the entry "momentum_buffer", sharded like the parameter. Other parameters have AdamW's
    state. The first parameter group, with the entry "matrices" True, holds the matrices that Muon trains. The learning
    rate of the other groups is multiplied by --muon-adam-lr-multiple.

    Args:
        named: all parameters of the model by name. Parameters that do not require a gradient are ignored.
        orthogonalizer: object that orthogonalizes the updates; its `parameters` are the matrices that Muon trains.
        config: flags of the optimizer.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], orthogonalizer: JointOrthogonalizer, config: OptimizerConfig
    ) -> None:
        names = [matrix.name for matrix in orthogonalizer.parameters]
        groups = parameter_groups([(name, named[name]) for name in names], config.weight_decay)
        rest = [(name, parameter) for name, parameter in named.items() if name not in names]
        for group in parameter_groups(rest, config.weight_decay):
            groups.append(group | {"lr_mult": config.muon_adam_lr_multiple, "matrices": False})
        betas = (config.adam_beta1, config.adam_beta2)
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": config.adam_eps, "fused": True, "matrices": True})
        self._orthogonalizer, self._config = orthogonalizer, config

    def _update_(
        self, group: dict[str, Any], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None, iteration: int
    ) -> None:
        """Update one parameter group: the group of matrices by Muon, and other groups by AdamW.

        Args:
            group: parameter group of this optimizer.
            grad_scale: fp32 scalar by which gradients are divided before the update; None for 1.
            found_inf: fp32 scalar on the device; 1 skips the update without making the host wait. 0 or None does not
                skip it.
            iteration: number of the training step. At multiples of --muon-full-interval, a matrix that spans nodes is
                gathered and orthogonalized as one matrix.
        """
        if not group["matrices"]:
            super()._update_(group, grad_scale, found_inf, iteration)
            return
        # ---- update the momentum of each matrix, and compute the update that is orthogonalized: the momentum, or
        # with --muon-use-nesterov the gradient averaged with the momentum
        updates, momentum = list[torch.Tensor](), self._config.muon_momentum
        taken = None if found_inf is None else found_inf == 0.0
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer, gradient = local(state["momentum_buffer"]), local(parameter.grad)
            if grad_scale is not None:
                gradient = gradient / grad_scale
            if taken is not None:
                # In a skipped step the momentum is averaged with itself, which leaves it bit-identical.
                gradient = gradient.where(taken, buffer)
            buffer.lerp_(gradient, 1.0 - momentum)
            updates.append(gradient.lerp(buffer, momentum) if self._config.muon_use_nesterov else buffer)
        # ---- orthogonalize the updates, and subtract them from the weights; a skipped step changes no weight
        decay, rate = 1.0 - group["lr"] * group["weight_decay"], group["lr"]
        for parameter, x in zip(group["params"], self._orthogonalizer(updates, iteration=iteration), strict=True):
            weight = local(parameter)
            updated = (weight * decay).sub_(x, alpha=rate)
            weight.copy_(updated if taken is None else updated.where(taken, weight))
