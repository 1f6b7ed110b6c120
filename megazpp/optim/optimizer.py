"""The optimizer, torch's or apex's, and its parameter groups.

torch's fused AdamW runs on the local tensors of the DTensors that FSDP2 makes (an empty one does no harm): it takes
DTensors too, but then the host works out placements for each of them. Its fused SGD does not take DTensors (torch 2.13:
"no sharding strategy registered"), so SGD runs the multi-tensor path. Learning rate and weight decay are set before
every step by `set_rates_`, from the schedule. Muon is here as an optimizer; its work on matrices is muon.py's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.adamw import adamw

from megazpp.base.flags import check_not_negative, check_positive, check_words, flag, spelling
from megazpp.optim.apex import ApexAdam, check_apex
from megazpp.optim.clip import divide_grads_
from megazpp.optim.muon import JointOrthogonalizer, MuonConfig, Orthogonalizer, row_dtype
from megazpp.optim.muon_plan import layer_matrices
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.parameters import local

ADAM = "--optimizer adam muon"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(MuonConfig):
    """Optimizer.

    Its kernels, its constants and the gradient clipping threshold.
    """

    optimizer: Literal["adam", "sgd", "muon"] = flag(
        "adam",
        "adam (AdamW: decoupled weight decay), sgd with momentum, or muon (matrices of the layers; the rest by AdamW)",
    )
    optimizer_backend: Literal["torch", "apex"] = flag(
        "torch",
        "whose fused kernels run the optimizer: torch, or apex (NVIDIA apex with its CUDA extensions)",
    )
    weight_decay: float = flag(0.01, "weight decay coefficient; biases and one-dimensional parameters are exempt")
    adam_beta1: float = flag(0.9, "decay of Adam's running average of the gradient", needs=ADAM)
    adam_beta2: float = flag(0.999, "decay of Adam's running average of the squared gradient", needs=ADAM)
    adam_eps: float = flag(1e-8, "added to the root of the squared gradient in Adam's denominator", needs=ADAM)
    sgd_momentum: float = flag(0.9, "momentum factor", needs="--optimizer sgd")
    clip_grad: float = flag(1.0, "gradients are scaled down to this global L2 norm; 0 turns clipping off")

    def __post_init__(self) -> None:
        check_words(self)
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{spelling(self, name)} {value} is not in [0, 1)")
        check_positive(self, "adam_eps")  # 0 / 0 where a gradient is 0: the embedding of a token that does not occur
        check_not_negative(self, "weight_decay", "clip_grad")
        self.check_muon()
        if self.optimizer_backend == "apex" and self.optimizer != "adam":
            raise ValueError(f"--optimizer-backend apex runs --optimizer adam only, not --optimizer {self.optimizer}")


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    device: torch.device,
    *,
    orthogonalizer: Orthogonalizer | JointOrthogonalizer | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `config` over sharded parameters; those that need no gradient are left out.

    The learning rate is 0 until `set_rates_` is called. Raises ValueError if apex is asked for and is not here.

    Args:
        orthogonalizer: of --optimizer muon, for the matrices among the parameters.
    """
    if config.optimizer_backend == "apex":
        check_apex(device.type)
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "muon":
        assert orthogonalizer is not None, "--optimizer muon needs to know the matrices"
        return Muon(dict(named_parameters), orthogonalizer, config, betas=betas, eps=config.adam_eps)
    groups = parameter_groups(named_parameters, config.weight_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, foreach=True)
    if config.optimizer_backend == "apex":
        return ApexAdam(groups, betas=betas, eps=config.adam_eps)
    return ShardedAdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True, foreach=False)


def build_orthogonalizer(
    model: nn.Module, config: OptimizerConfig, dims: ParallelDims, dtype: torch.dtype
) -> Orthogonalizer | JointOrthogonalizer | None:
    """Make the part of --optimizer muon that knows the sharded model, which computes in `dtype`; None without it."""
    if config.optimizer != "muon":
        return None
    matrices, rows = layer_matrices(model, dims.tp.size, dims.layout.ep), row_dtype(dtype)
    dense = [matrix for matrix in matrices if not matrix.expert]
    joined = Orthogonalizer(dense, config, dims.layout, node=dims.node, cross=dims.cross, dtype=rows)
    if len(dense) == len(matrices):
        return joined
    # ep ranks hold whole experts, which nothing joins along ep: the ranks of `local` share out an expert's rows
    axes, layout = dims.experts, dataclasses.replace(dims.experts.layout, tp=1)
    experts = [matrix for matrix in matrices if matrix.expert]
    return JointOrthogonalizer(
        [joined, Orthogonalizer(experts, config, layout, node=axes.local, cross=axes.cross, dtype=rows)]
    )


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW on the local tensors of parameters that may be DTensors.

    State per parameter as torch has it: "step", and "exp_avg" and "exp_avg_sq", placed like the parameter.
    """

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Update every parameter that has a gradient; no closure is supported.

        Gradients are divided by `grad_scale` first, in place. `found_inf` 1 leaves parameters and state as they are,
        "step" too, and 0 does not. Both are fp32 scalars on the device, so that the host need not know.
        """
        assert closure is None, "the update has its gradients"
        for group in self.param_groups:
            _adamw_(group, self.state, grad_scale, found_inf)


def _adamw_(
    group: dict[str, Any],
    state_of: dict[torch.Tensor, Any],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in trained:
        if not state_of[parameter]:
            state_of[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    states = [state_of[parameter] for parameter in trained]
    adamw(
        [local(parameter) for parameter in trained],
        [local(parameter.grad) for parameter in trained],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of `orthogonalizer` and fused AdamW for all other parameters, which may be DTensors.

    State of a matrix: "momentum_buffer", placed like the parameter; of the others AdamW's. The first group, of which
    "matrices" is True, has the matrices; the others have their rate times --muon-adam-lr-multiple.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        orthogonalizer: Orthogonalizer | JointOrthogonalizer,
        config: OptimizerConfig,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        names = [matrix.name for matrix in orthogonalizer.parameters]
        groups = parameter_groups([(name, named[name]) for name in names], config.weight_decay)
        rest = [(name, parameter) for name, parameter in named.items() if name not in names]
        for group in parameter_groups(rest, config.weight_decay):
            groups.append(group | {"lr_mult": config.muon_adam_lr_multiple, "matrices": False})
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "fused": True, "matrices": True})
        self._orthogonalizer, self._config = orthogonalizer, config

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        iteration: int = 1,
    ) -> None:
        """Update every parameter, as `ShardedAdamW.step` does; matrices have gradients.

        At multiples of --muon-full-interval, `iteration` makes matrices whole that span nodes.
        """
        assert closure is None, "the update has its gradients"
        for group in self.param_groups:
            if group["matrices"]:
                self._update_matrices_(group, grad_scale, found_inf, iteration)
            else:
                _adamw_(group, self.state, grad_scale, found_inf)

    def _update_matrices_(
        self,
        group: dict[str, Any],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        iteration: int,
    ) -> None:
        updates, momentum = list[torch.Tensor](), self._config.muon_momentum
        taken = None if found_inf is None else found_inf == 0.0
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer, gradient = local(state["momentum_buffer"]), local(parameter.grad)
            if grad_scale is not None:
                gradient = gradient / grad_scale
            if taken is not None:  # averaged with itself, the momentum stays as it is, to the bit
                gradient = gradient.where(taken, buffer)
            buffer.lerp_(gradient, 1.0 - momentum)
            updates.append(gradient.lerp(buffer, momentum) if self._config.muon_use_nesterov else buffer)
        decay, rate = 1.0 - group["lr"] * group["weight_decay"], group["lr"]
        for parameter, x in zip(group["params"], self._orthogonalizer(updates, iteration=iteration), strict=True):
            weight = local(parameter)
            updated = (weight * decay).sub_(x, alpha=rate)
            weight.copy_(updated if taken is None else updated.where(taken, weight))


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Megatron's two groups: parameters that decay, and biases and one-dimensional ones, which do not.

    "wd_mult", 1 or 0, scales the scheduled weight decay, "lr_mult", 1, the rate. An empty group is left out.
    """
    groups: dict[float, list[nn.Parameter]] = {1.0: [], 0.0: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[0.0 if name.endswith(".bias") or parameter.ndim == 1 else 1.0].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay * multiple, "wd_mult": multiple, "lr_mult": 1.0}
        for multiple, parameters in groups.items()
        if parameters
    ]


def set_rates_(optimizer: torch.optim.Optimizer, *, learning_rate: float, weight_decay: float) -> None:
    """Write the schedule's values into every group, times the group's multiples."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]


def update_(
    optimizer: torch.optim.Optimizer,
    grad_divisor: torch.Tensor,
    found_inf: torch.Tensor | None = None,
    *,
    iteration: int = 1,
) -> None:
    """Step with gradients divided by `grad_divisor`; both are fp32 scalars, `found_inf` is for `skips_on_device`."""
    if isinstance(optimizer, Muon):
        optimizer.step(grad_scale=grad_divisor, found_inf=found_inf, iteration=iteration)
        return
    if isinstance(optimizer, ShardedAdamW):
        optimizer.step(grad_scale=grad_divisor, found_inf=found_inf)
        return
    assert found_inf is None, f"{type(optimizer).__name__} cannot skip a step by itself"
    divide_grads_((p for group in optimizer.param_groups for p in group["params"]), grad_divisor)
    optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer skips a non-finite step on the device, so that the host need not wait."""
    return isinstance(optimizer, (ShardedAdamW, Muon))


def optimizer_backends(config: OptimizerConfig, device_type: str) -> list[tuple[str, str, str]]:
    """Rows (piece, implementation, why) of the optimizer for the table of back ends."""
    implementation, why = "torch.optim.AdamW(fused=True)", f"torch has a fused kernel on {device_type}"
    if config.optimizer_backend == "apex":
        implementation, why = "apex.optimizers.FusedAdam", "asked for by --optimizer-backend apex"
    elif config.optimizer == "sgd":
        implementation, why = "torch.optim.SGD(foreach=True)", "torch's fused SGD does not take DTensors"
    elif config.optimizer == "muon":
        implementation = "Muon of the layers' matrices in batches, " + implementation
    return [("optimizer", implementation, why)]
