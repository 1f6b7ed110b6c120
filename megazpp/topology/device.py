"""What a rank computes with: figures from a cluster file."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """A GPU. Figures are data sheets'; each file of configs/clusters says where they were looked up.

    Attributes:
        name: the vendor's.
        teraflops: dense 16-bit peak.
        gigabytes: memory (1e9 bytes).
        gigabytes_per_second: of that memory.
        source: where the figures come from.
        shares: what programs reach of them: a calibration of topology/shares.py; None where nothing was compared.
    """

    name: str
    teraflops: float
    gigabytes: float
    gigabytes_per_second: float
    source: str = ""
    shares: str | None = None
