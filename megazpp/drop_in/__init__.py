"""ZeRO++ for FSDP2 training loops of other programs: `megazpp.zeropp` and `megazpp.trainer_callback`.

A program of this kind may change which parameters it trains, write to weights, discard gradients, and step optimizers
on some ranks only. This folder adds the support for that to megazpp/zero, which does not import it.

    api.py, callback.py      the two public functions
    wrap.py                  wrapping of a model that `fully_shard` has not wrapped
    handle.py                the handle that `zeropp` returns, and its state beside a program's checkpoints
    units.py, dims.py        sharding units and mesh axes that the program has made
    gather.py, writes.py     all-gathers that detect writes to weights, by checksum.py and votes of all ranks
    reduce.py, accumulate.py reduce-scatters after which gradients are as in FSDP2, and gradient accumulation
"""

from megazpp.drop_in.api import zeropp
from megazpp.drop_in.callback import trainer_callback
from megazpp.drop_in.handle import Handle

__all__ = ["Handle", "trainer_callback", "zeropp"]
