"""Loss scaling: keeps small fp16 gradients from flushing to zero.

The loss is multiplied by `scaler.scale` before backward, and the gradients are divided by it before clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazpp.base.flags import check_positive, flag


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling.

    A constant loss scale, or the constants of the dynamic loss scale of --fp16.
    """

    loss_scale: float | None = flag(None, "constant loss scale; without it --fp16 scales dynamically")
    initial_loss_scale: float = flag(float(2**32), "first value of the dynamic loss scale")
    min_loss_scale: float = flag(1.0, "lower bound of the dynamic loss scale")
    loss_scale_window: float = flag(1000.0, "steps without overflow after which the dynamic scale doubles")
    hysteresis: int = flag(2, "overflows that are tolerated before the dynamic scale halves")

    def __post_init__(self) -> None:
        check_positive(self, "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        low, first = self.min_loss_scale, self.initial_loss_scale
        if low > first:
            raise ValueError(f"--min-loss-scale {low} is above --initial-loss-scale {first}")


class LossScaler:
    """A scale that stays as it is."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Call after every step; `found_inf`: a gradient was NaN or Inf (the same on every rank)."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}  # what else was saved with it is in its units

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build_loss_scaler(config: LossScaleConfig, *, fp16: bool) -> LossScaler:
    if fp16 and config.loss_scale is None:
        return DynamicLossScale(config)
    return LossScaler(1.0 if config.loss_scale is None else config.loss_scale)


class DynamicLossScale(LossScaler):
    """Megatron's dynamic scale: halve on overflow, double after a window of steps without one.

    The first `hysteresis - 1` overflows since the scale last grew do not lower it; each one after them does.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(config.initial_loss_scale)
        self._config, self._growth_tracker, self._hysteresis_tracker = config, 0, config.hysteresis

    def update(self, found_inf: bool) -> None:
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

    def state_dict(self) -> dict[str, Any]:  # under Megatron's names
        trackers = {"growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}
        return {"scale": self.scale, **trackers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._growth_tracker = int(state.get("growth_tracker", 0))  # a constant scale has none
        self._hysteresis_tracker = int(state.get("hysteresis_tracker", self._config.hysteresis))
