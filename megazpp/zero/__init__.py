"""Floor 2: data-parallel sharding of any model, on FSDP2.

For other people's models `zeropp` has FSDP2's collectives travel in ZeRO++'s two hops.
"""

from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.fsdp2 import trainer_callback, zeropp
from megazpp.zero.sharding import Sharding, shard_model

__all__ = ["PrecisionConfig", "Sharding", "ZeroConfig", "shard_model", "trainer_callback", "zeropp"]
