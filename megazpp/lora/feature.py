"""Registers LoRA as an optional feature: runs and programs can load checkpoints that contain only adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megazpp.base.flags import flag
from megazpp.run.arguments import FeatureConfig
from megazpp.run.feature import Feature

if TYPE_CHECKING:
    from megazpp.lora.weights import AdapterOpener


@dataclass(frozen=True, kw_only=True)
class AdapterBaseConfig(FeatureConfig):
    """Checkpoints of LoRA.

    Folders of the weights that LoRA adapters change.
    """

    lora_base: tuple[str, ...] = flag(
        (),
        "folders of checkpoints with the base weights of the LoRA adapters that are loaded, if they were moved",
        nargs="*",
    )


class Lora(Feature):
    """Opens checkpoints of LoRA runs as whole weights. Post-training has the flags that train adapters."""

    config, opens_weights = AdapterBaseConfig, True

    def weight_opener(self, sections: Sequence[Any]) -> AdapterOpener:
        """Return the opener, which looks for bases in the folders of --lora-base first."""
        return adapter_opener(sections)


def adapter_opener(sections: Sequence[Any]) -> AdapterOpener:
    """Return the opener of checkpoints with adapters; `sections` may have the folders of their bases."""
    from megazpp.lora.weights import AdapterOpener

    given = next((section for section in sections if isinstance(section, AdapterBaseConfig)), AdapterBaseConfig())
    return AdapterOpener(given.lora_base)


FEATURE = Lora()
