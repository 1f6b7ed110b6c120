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
        weight_store: folder of packed weights for --weights-device disk, written once (default: a folder in the user's
            cache).
        prefetch_layers: number of layers that are fetched ahead of their use; each occupies its packed bytes on the
            device.
    """

    weights_device: Literal["device", "host", "disk"] = flag("device")
    weight_bits: Literal[32, 16, 8, 4] | None = flag(None)
    weight_store: str | None = flag(None)
    prefetch_layers: int = flag(1, must_be="not negative")

    def __post_init__(self) -> None:
        """Raise ValueError for flags of weight storage that are out of their range or that conflict."""
        super().__post_init__()
        if self.weight_store is not None and self.weights_device != "disk":
            raise ValueError(
                f"--weight-store {self.weight_store} needs --weights-device disk, not {self.weights_device}: set "
                "--weights-device disk, or leave --weight-store out"
            )

    @property
    def packs(self) -> bool:
        """True if --weights-device or --weight-bits selects packed weights, which are streamed layer by layer."""
        return self.weights_device != "device" or self.weight_bits is not None
