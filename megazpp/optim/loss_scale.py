"""Loss scaling, which prevents small fp16 gradients from being rounded to zero.

The training step multiplies the loss by the loss scale before backward, and divides the gradients by the loss scale
before clipping.
"""

from __future__ import annotations

from typing import Any

from megazpp.optim.config import LossScaleConfig


class LossScaler:
    """Constant loss scale, and base class of `DynamicLossScale`.

    Attributes:
        scale: number by which the loss of the current step is multiplied; 1 without loss scaling.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Adapt a dynamic loss scale after a training step; a constant loss scale does not change.

        Args:
            found_inf: True if a gradient of the step was NaN or Inf; equal on every rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return {"scale": loss scale} for a checkpoint."""
        # A constant loss scale is saved too. ZeRO++'s error feedback in the checkpoint is multiplied by this scale, and
        # a run that resumes with another scale must convert the error feedback.
        return {"scale": self.scale}

    # A resumed run with a constant loss scale uses its own --loss-scale, so nothing is restored from the checkpoint.
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build_loss_scaler(config: LossScaleConfig, *, fp16: bool) -> LossScaler:
    """Return a dynamic loss scale if --fp16 is set without --loss-scale; otherwise a constant one, by default 1."""
    if fp16 and config.loss_scale is None:
        return DynamicLossScale(config)
    return LossScaler(1.0 if config.loss_scale is None else config.loss_scale)


class DynamicLossScale(LossScaler):
    """Megatron-LM's dynamic loss scale: halved after overflows, doubled after a window of steps without overflow.

    An overflow is a step with a NaN or Inf gradient. The first `hysteresis - 1` overflows after the loss scale last
    grew do not change it. Each later overflow halves it.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(config.initial_loss_scale)
        self._config, self._growth_tracker, self._hysteresis_tracker = config, 0, config.hysteresis

    def update(self, found_inf: bool) -> None:
        """Count a training step, and halve or double the loss scale if the rule of this class requires it.

        Args:
            found_inf: True if a gradient of the step was NaN or Inf; equal on every rank.
        """
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
        """Return the loss scale and the counters of steps and overflows, with Megatron-LM's names, for a checkpoint."""
        trackers = {"growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}
        return {"scale": self.scale, **trackers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the dynamic loss scale and its counters of steps and overflows from a checkpoint.

        A checkpoint of a run with a constant loss scale has no counters, which then start as in a new run.
        """
        self.scale = float(state["scale"])
        self._growth_tracker = int(state.get("growth_tracker", 0))
        self._hysteresis_tracker = int(state.get("hysteresis_tracker", self._config.hysteresis))
