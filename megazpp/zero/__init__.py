"""Data-parallel sharding with FSDP2, with ZeRO++'s quantized two-hop collectives as an option.

`shard_model` shards a model of this project's training. drop_in/ adds ZeRO++ to FSDP2 loops of other programs.
"""

from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.sharding import Sharding, shard_model

__all__ = ["PrecisionConfig", "Sharding", "ZeroConfig", "shard_model"]
