"""Data-parallel sharding of any model with FSDP2, whose collectives can travel in ZeRO++'s two hops.

`zeropp` adds the two hops to a model of another framework.
"""

from megazpp.zero.api import trainer_callback, zeropp
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.sharding import Sharding, shard_model

__all__ = ["PrecisionConfig", "Sharding", "ZeroConfig", "shard_model", "trainer_callback", "zeropp"]
