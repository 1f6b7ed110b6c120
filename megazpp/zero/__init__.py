"""Data-parallel sharding with FSDP2, with ZeRO++'s quantized two-hop collectives as an option.

`shard_model` is the entry point for this project's own training. `zeropp` is the entry point for FSDP2 models of other
frameworks.
"""

from megazpp.zero.api import trainer_callback, zeropp
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.sharding import Sharding, shard_model

__all__ = ["PrecisionConfig", "Sharding", "ZeroConfig", "shard_model", "trainer_callback", "zeropp"]
