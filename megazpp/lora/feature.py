"""Registers LoRA as an optional feature: runs and programs can load checkpoints that contain only adapters."""

from __future__ import annotations

from megazpp.lora.weights import AdapterOpener
from megazpp.run.feature import Feature


class Lora(Feature):
    """Opens checkpoints of LoRA runs as whole weights. Post-training has the flags that train adapters."""

    weight_opener = AdapterOpener


FEATURE = Lora()
