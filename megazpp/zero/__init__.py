"""Floor 2: data-parallel sharding of any model, on FSDP2.

For other people's models: `shard_model` wraps and shards in one call, `attach_zeropp` takes a model that
`fully_shard` has wrapped already.
"""

from megazpp.zero.config import ZeroConfig
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.sharding import Sharding, attach_zeropp, shard_model

__all__ = ["PrecisionConfig", "Sharding", "ZeroConfig", "attach_zeropp", "shard_model"]
