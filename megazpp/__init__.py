"""MegaZ++: GPT pretraining with tensor parallelism and ZeRO++ sharding, and ZeRO++ in one line for any FSDP2 model."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["ZeroConfig", "zeropp"]


def __getattr__(name: str) -> Any:
    """`zeropp` and `ZeroConfig`, imported on use: most programs start faster without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'megazpp' has no attribute {name!r}")
    from megazpp import zero

    return getattr(zero, name)
