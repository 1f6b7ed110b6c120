"""ZeRO++ for FSDP2 training loops of other programs: `megazpp.zeropp` and `megazpp.trainer_callback`.

A program of this kind may change which parameters it trains, write to weights, discard gradients, and step optimizers
on some ranks only. This folder supports all of that on top of megazpp/zero, which does not import this folder.

    api.py, callback.py       the two public functions
    wrap.py                   wraps a model that `fully_shard` has not wrapped
    handle.py                 the handle that `zeropp` returns, and the files that it adds to a program's checkpoints
    units.py, dims.py         sharding units and mesh axes of a program's model
    gather.py, codec.py       all-gathers of units whose dtypes the program decides
    writes.py, checksum.py    detection of writes to weights, by checksums and votes of all ranks
    reduce.py, accumulate.py  reduce-scatters after which gradients are as in FSDP2, and gradient accumulation
"""

from megazpp.drop_in.api import zeropp
from megazpp.drop_in.callback import trainer_callback
from megazpp.drop_in.handle import Handle

__all__ = ["Handle", "trainer_callback", "zeropp"]
