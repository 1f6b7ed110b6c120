"""NVIDIA apex's FusedAdam on DTensor parameters.

apex hands raw pointers to its kernels, and a DTensor has none. So the public optimizer keeps the DTensors, whose groups
and state can be checkpointed and resharded, and inside each step apex sees plain parameters and moments that share the
local shards' memory. apex is found by its files: the package called `apex` on PyPI is an unrelated project.
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
    """Raise ValueError where apex cannot run: not on CUDA, or FusedAdam or the extension `amp_C` is missing."""
    if device_type != "cuda":
        raise ValueError(f"--optimizer-backend apex needs a CUDA device, this run is on {device_type}; {_ADVICE}")
    package = importlib.util.find_spec("apex")
    folders = (package.submodule_search_locations if package else None) or []
    if not any((Path(folder) / "optimizers" / "fused_adam.py").exists() for folder in folders):
        raise ValueError(f"--optimizer-backend apex: apex.optimizers.FusedAdam is not importable; {_ADVICE}")
    if importlib.util.find_spec("amp_C") is None:
        raise ValueError(f"--optimizer-backend apex: its extension amp_C is not installed; {_ADVICE}")


class ApexAdam(torch.optim.Optimizer):
    """AdamW by apex.optimizers.FusedAdam; state is placed like the parameters, "step" is a group's."""

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
        """One update of every parameter that has a gradient; no closure is supported."""
        assert closure is None, "FusedAdam takes no closure"
        for group, fused_group in zip(self.param_groups, self._fused.param_groups, strict=True):
            for name in ("lr", "weight_decay", "step"):
                fused_group[name] = group[name]
            for parameter, stand_in in zip(group["params"], fused_group["params"], strict=True):
                self._lend_(parameter, stand_in)
        self._fused.step()
        for group, fused_group in zip(self.param_groups, self._fused.param_groups, strict=True):
            group["step"] = fused_group["step"]

    def _lend_(self, parameter: nn.Parameter, stand_in: nn.Parameter) -> None:
        """Point the stand-in, its gradient and its moments at the local shard of `parameter`."""
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
