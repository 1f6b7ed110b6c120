"""Update of sharded parameters by fused AdamW, the parameter groups of all optimizers, and the loss scale.

build.py chooses the optimizer. AdamW calls torch's fused kernel on the local tensors of FSDP2's DTensors, which may be
empty. The kernel accepts DTensors too, but the host would then spend time to compute placements for each of them.
`set_rates_` sets learning rate and weight decay before every step.

The loss scale prevents small fp16 gradients from being rounded to zero. The training step multiplies the loss by it
before backward, and divides the gradients by it before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from megazpp.optim.clip import divide_grads_
from megazpp.optim.config import LossScaleConfig
from megazpp.tensor_parallel.parameters import local


class DeviceOptimizer(torch.optim.Optimizer):
    """Optimizer that can skip a step without making the host wait. Its parameters may be DTensors.

    This class updates each parameter group by torch's fused AdamW on local tensors; Muon overrides this for its
    matrices. The state of a parameter has torch's entries: "step", and "exp_avg" and "exp_avg_sq", sharded like the
    parameter.
    """

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        iteration: int = 1,
    ) -> None:
        """Update every parameter that has a gradient.

        The scalar tensors are on the device, so that the host does not have to wait for them.

        Args:
            closure: not supported; must be None.
            grad_scale: fp32 scalar by which gradients are divided, in place, before the update; None for 1.
            found_inf: fp32 scalar; 1 skips the update and leaves parameters and state, "step" included, unchanged. 0 or
                None does not skip the update.
            iteration: number of the training step, from which Muon decides whether to gather matrices over nodes.
        """
        assert closure is None, "this optimizer does not support a closure, which torch's optimizers accept"
        for group in self.param_groups:
            self._update_(group, grad_scale, found_inf, iteration)

    def _update_(
        self, group: dict[str, Any], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None, iteration: int
    ) -> None:
        """Update one group's parameters that have a gradient by AdamW; see `step` for the other arguments."""
        # ---- create the state of each parameter at its first update
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        # ---- update the local tensors of all parameters with a gradient by torch's fused AdamW
        states = [self.state[parameter] for parameter in trained]
        fused_adamw_(
            group,
            [local(parameter) for parameter in trained],
            [local(parameter.grad) for parameter in trained],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


def fused_adamw_(
    group: Mapping[str, Any],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    exp_avg_sq: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Update weights and moments in place by torch's fused AdamW.

    Args:
        group: one of the optimizer's `param_groups`, with learning rate, betas, eps and weight decay.
        weights: local tensors of the parameters.
        gradients: local tensors of the gradients.
        exp_avg: local tensors of the first moments.
        exp_avg_sq: local tensors of the second moments.
        steps: number of updates of each parameter, fp32 scalars on the device.
        grad_scale: fp32 scalar on the device by which gradients are divided before the update; None for 1.
        found_inf: fp32 scalar on the device; 1 skips the update, 0 or None does not.
    """
    adamw(
        weights,
        gradients,
        exp_avg,
        exp_avg_sq,
        [],
        steps,
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


class ShardedAdamW(DeviceOptimizer, torch.optim.AdamW):
    """AdamW whose update is torch's fused kernel on the local tensors of DTensors.

    The constructor is `torch.optim.AdamW`'s, and `step` is `DeviceOptimizer.step`.
    """


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into Megatron-LM's two parameter groups, with and without weight decay.

    The group without weight decay holds biases and one-dimensional parameters. `set_rates_` multiplies the scheduled
    weight decay by a group's "wd_mult" (1 or 0), and the scheduled learning rate by its "lr_mult" (1). The result has
    neither empty groups nor parameters that do not require a gradient.

    Args:
        named_parameters: names and parameters of the model.
        weight_decay: weight decay of the first group until `set_rates_` is called.
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
    """Set the learning rate and weight decay of every parameter group for the next step.

    Each group gets the scheduled value times the group's "lr_mult" or "wd_mult".
    """
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
    """Call the optimizer's step, with gradients divided by `grad_divisor`.

    Args:
        optimizer: result of `build_optimizer`.
        grad_divisor: fp32 scalar on the device, from `clip_divisor`: the loss scale times the clipping divisor.
        found_inf: fp32 scalar on the device, 1 if the step must be skipped. It must be None for an optimizer for which
            `skips_on_device` returns False.
        iteration: number of the training step, from which Muon decides whether to gather matrices over nodes.
    """
    if isinstance(optimizer, DeviceOptimizer):
        optimizer.step(grad_scale=grad_divisor, found_inf=found_inf, iteration=iteration)
        return
    assert found_inf is None, f"{type(optimizer).__name__} cannot skip a step on the device: pass found_inf=None"
    divide_grads_((p for group in optimizer.param_groups for p in group["params"]), grad_divisor)
    optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer can skip a step with non-finite gradients without making the host wait."""
    return isinstance(optimizer, DeviceOptimizer)


class LossScaler:
    """Loss scale: Megatron-LM's dynamic loss scale with --fp16 and without --loss-scale, otherwise a constant.

    The dynamic loss scale halves after overflows, and doubles after a window of steps without overflow. An overflow is
    a step with a NaN or Inf gradient. The first `hysteresis - 1` overflows after the loss scale last grew do not change
    it. Each later overflow halves it.

    Args:
        config: flags of loss scaling.
        fp16: True if the model computes in fp16.
    Attributes:
        is_dynamic: True for a dynamic loss scale, False for a constant one.
        scale: number by which the loss of the current step is multiplied; 1 without loss scaling.
    """

    def __init__(self, config: LossScaleConfig, *, fp16: bool) -> None:
        self._config, self.is_dynamic = config, fp16 and config.loss_scale is None
        self.scale = config.initial_loss_scale if self.is_dynamic else config.loss_scale or 1.0
        self._growth_tracker, self._hysteresis_tracker = 0, config.hysteresis

    @property
    def accepts_overflow(self) -> bool:
        """True if an overflow in the current step is no error, because a dynamic loss scale can still decrease.

        The result is False for a constant loss scale. It is also False if the scale is at --min-loss-scale and an
        overflow in the current step would have to halve it. All further steps would then overflow and be skipped too.
        """
        return self.is_dynamic and (self.scale > self._config.min_loss_scale or self._hysteresis_tracker > 1)

    def update(self, found_inf: bool) -> None:
        """Count a training step, and halve or double a dynamic loss scale by the rule in the class docstring.

        Args:
            found_inf: True if a gradient of the step was NaN or Inf; equal on every rank.
        """
        if not self.is_dynamic:
            return
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self._config.min_loss_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker >= self._config.loss_scale_window:
            self._growth_tracker = 0
            self._hysteresis_tracker = self._config.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, and a dynamic scale's counters of steps and overflows with Megatron-LM's names."""
        # A constant loss scale is saved too. ZeRO++'s error feedback in the checkpoint is multiplied by this scale, and
        # a run that resumes with another scale must convert the error feedback.
        trackers = {"growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}
        return {"scale": self.scale, **(trackers if self.is_dynamic else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the dynamic loss scale and its counters of steps and overflows from a checkpoint.

        A checkpoint of a run with a constant loss scale has no counters, which then start as in a new run.
        """
        # A run with a constant loss scale uses its own --loss-scale, not the loss scale in the checkpoint.
        if self.is_dynamic:
            self.scale = float(state["scale"])
            self._growth_tracker = int(state.get("growth_tracker", 0))
            self._hysteresis_tracker = int(state.get("hysteresis_tracker", self._config.hysteresis))
