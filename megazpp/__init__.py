"""MegaZ++: GPT training with tensor parallelism and ZeRO++ sharding.

`megazpp.zeropp` adds ZeRO++ to any FSDP2 model with one line.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
_MODULES = {"ZeroConfig": "megazpp.zero.config", "trainer_callback": "megazpp.drop_in", "zeropp": "megazpp.drop_in"}
__all__ = ["ZeroConfig", "trainer_callback", "zeropp"]


def __getattr__(name: str) -> Any:
    """Import the names in `__all__` on first use, so that data tools start without importing torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megazpp' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
