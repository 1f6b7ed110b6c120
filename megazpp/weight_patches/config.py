"""The flags of weight patches: files with changed weights for external inference engines."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import flag
from megazpp.run.arguments import FeatureConfig


@dataclass(frozen=True, kw_only=True)
class PatchesConfig(FeatureConfig):
    """Weight patches.

    Files with the weights that each training step changes, for external inference engines.

    Attributes:
        save_weight_patches: folder in which every rank writes how each step has changed its 16-bit weights, for
            inference engines.
        weight_anchor_interval: iterations between files with all weights in --save-weight-patches.
    """

    save_weight_patches: str | None = flag(None)
    weight_anchor_interval: int = flag(100, needs="--save-weight-patches", must_be="positive")
