"""Loss scaling, which prevents small fp16 gradients from being rounded to zero.

The caller multiplies the loss by the scale before backward, and divides the gradients by it before clipping.
"""

from __future__ import annotations

from typing import Any

from megazpp.optim.config import LossScaleConfig


class LossScaler:
    """Constant loss scale, and the interface of `DynamicLossScale`.

    Attributes:
        scale: current factor of the loss.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Adapt the scale after a step; a constant scale does nothing.

        Args:
            found_inf: True if a gradient was NaN or Inf; equal on every rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        # a constant scale is saved too, because the checkpoint's error feedback is multiplied by it
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...  # a constant scale keeps the value of --loss-scale


def build_loss_scaler(config: LossScaleConfig, *, fp16: bool) -> LossScaler:
    """Return the dynamic loss scale for fp16 without --loss-scale, and otherwise a constant one (1 by default)."""
    if fp16 and config.loss_scale is None:
        return DynamicLossScale(config)
    return LossScaler(1.0 if config.loss_scale is None else config.loss_scale)


class DynamicLossScale(LossScaler):
    """Megatron-LM's dynamic loss scale: halved after overflows, doubled after a window of steps without overflow.

    The first `hysteresis - 1` overflows since the scale last grew do not change it. Each later overflow halves it.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(config.initial_loss_scale)
        self._config, self._growth_tracker, self._hysteresis_tracker = config, 0, config.hysteresis

    def update(self, found_inf: bool) -> None:
        """Halve or double the scale after a step, if due; `found_inf`: a gradient was NaN or Inf."""
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
        """Return the scale and both counters, with Megatron-LM's names."""
        trackers = {"growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}
        return {"scale": self.scale, **trackers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and both counters; the checkpoint of a constant scale has no counters."""
        self.scale = float(state["scale"])
        self._growth_tracker = int(state.get("growth_tracker", 0))
        self._hysteresis_tracker = int(state.get("hysteresis_tracker", self._config.hysteresis))
