"""Registers LoRA as an optional feature: runs and programs can load checkpoints that contain only adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megazpp.lora.config import AdapterBaseConfig, adapter_opener
from megazpp.lora.weights import AdapterOpener
from megazpp.run.feature import Feature


class Lora(Feature):
    """Opens checkpoints of LoRA runs as whole weights. Post-training has the flags that train adapters."""

    config, opens_weights = AdapterBaseConfig, True

    def weight_opener(self, sections: Sequence[Any]) -> AdapterOpener:
        """Return the opener, which looks for bases in the folders of --lora-base first."""
        return adapter_opener(sections)


FEATURE = Lora()
