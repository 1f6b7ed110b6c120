"""Flags for the weights of a model that is not trained: the memory that stores them, and their bits per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazpp.base.flags import Config, flag


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Config):
    """Weight storage.

    Memory in which the weights of a model that is not trained are stored between uses, and their bits per element.

    Attributes:
        weights_device: memory that holds the weights between uses; with host or disk, the device holds the embedding,
            the output layer and a few layers.
        weight_bits: bits per element of packed weights (default: the bits of the compute dtype, without rounding).
        weight_store: folder of packed weights, written once (default: a folder in the user's cache).
        prefetch_layers: number of layers that are fetched ahead of their use; each occupies its packed bytes on the
            device.
    """

    weights_device: Literal["device", "host", "disk"] = flag("device")
    weight_bits: Literal[32, 16, 8, 4] | None = flag(None)
    weight_store: str | None = flag(None, needs="--weights-device disk")
    prefetch_layers: int = flag(1, must_be="not negative")

    @property
    def packs(self) -> bool:
        """True if --weights-device or --weight-bits selects packed weights, which are streamed layer by layer."""
        return self.weights_device != "device" or self.weight_bits is not None
