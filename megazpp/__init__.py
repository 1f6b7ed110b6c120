"""MegaZ++: GPT pretraining with tensor parallelism and ZeRO++ sharding, and ZeRO++ in one line for any FSDP2 model."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["ZeroConfig", "trainer_callback", "zeropp"]


def __getattr__(name: str) -> Any:
    """Import what this page names on use: tools for data start without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'megazpp' has no attribute {name!r}")
    return getattr(importlib.import_module("megazpp.zero"), name)
