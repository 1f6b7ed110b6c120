"""NVIDIA apex's FusedAdam for DTensor parameters.

FusedAdam passes raw pointers to its kernels, and a DTensor has no raw pointer. So there are two optimizers. `ApexAdam`
holds the DTensors, so that its groups and state can be checkpointed and resharded. In each step it calls FusedAdam,
which works on plain parameters and moments that share the memory of the DTensors' local shards.

`check_apex` looks for apex's files, because the package named apex on PyPI is an unrelated project.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megazpp.tensor_parallel.parameters import local

_ADVICE = (
    "build NVIDIA apex from source with its CUDA extensions (the package named apex on PyPI is an unrelated"
    " project), or use --optimizer-backend torch"
)


def check_apex(device_type: str) -> None:
    """Raise ValueError if --optimizer-backend apex cannot run on devices of the type `device_type`.

    The flag needs the type "cuda", and installed versions of apex's FusedAdam and of apex's CUDA extension `amp_C`.
    """
    if device_type != "cuda":
        raise ValueError(
            f"--optimizer-backend apex needs a CUDA device, but this run uses {device_type}: use"
            " --optimizer-backend torch"
        )
    package = importlib.util.find_spec("apex")
    folders = (package.submodule_search_locations if package else None) or []
    if not any((Path(folder) / "optimizers" / "fused_adam.py").exists() for folder in folders):
        raise ValueError(f"--optimizer-backend apex: apex.optimizers.FusedAdam is not installed; {_ADVICE}")
    if importlib.util.find_spec("amp_C") is None:
        raise ValueError(f"--optimizer-backend apex: apex's CUDA extension amp_C is not installed; {_ADVICE}")


class ApexAdam(torch.optim.Optimizer):
    """AdamW computed by apex.optimizers.FusedAdam, for parameters that may be DTensors.

    The moments are sharded like their parameters. As in apex, "step" is an entry of each parameter group, not of each
    parameter's state.

    Args:
        groups: parameter groups, as `parameter_groups` returns them.
        betas: decay rates of the running averages of the gradient and of the squared gradient.
        eps: constant that is added to the denominator of the update.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "step": 0})
        stand_ins = [
            {**group, "params": [nn.Parameter(local(p.detach())) for p in group["params"]]}
            for group in self.param_groups
        ]
        fused_adam = importlib.import_module("apex.optimizers").FusedAdam
        self._fused = fused_adam(stand_ins, lr=0.0, betas=betas, eps=eps, adam_w_mode=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not supported and must be None."""
        assert closure is None, "FusedAdam does not support a closure, which torch's optimizers accept"
        for group, fused_group in zip(self.param_groups, self._fused.param_groups, strict=True):
            for name in ("lr", "weight_decay", "step"):
                fused_group[name] = group[name]
            for parameter, stand_in in zip(group["params"], fused_group["params"], strict=True):
                self._lend_(parameter, stand_in)
        self._fused.step()
        for group, fused_group in zip(self.param_groups, self._fused.param_groups, strict=True):
            group["step"] = fused_group["step"]

    def _lend_(self, parameter: nn.Parameter, stand_in: nn.Parameter) -> None:
        """Let FusedAdam's plain parameter `stand_in` share the memory of a DTensor's local shard for one step.

        The gradient and the moments of `stand_in` share the memory of the local shards of the gradient and the moments
        of `parameter`, the DTensor. If `parameter` has no gradient or its local shard is empty, `stand_in` gets no
        gradient, so that FusedAdam skips it.
        """
        stand_in.grad = None
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        shard = local(parameter.detach())
        if shard.numel() == 0:
            return
        stand_in.data = shard
        stand_in.grad = local(parameter.grad)
        self._fused.state[stand_in] = {name: local(moment) for name, moment in state.items()}
