"""Skip marks for tests of features that older supported torch releases lack.

The package rejects these features on such releases with an error.
"""

import pytest
from torch.distributed.fsdp import FSDPModule

from megazpp.parallel.dims import can_order_groups

needs_any_order = pytest.mark.skipif(
    not can_order_groups(), reason="only torch 2.13 makes groups of ranks in any order"
)
needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="only FSDP2 of torch 2.13 can abort a forward or backward"
)
needs_integers = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="only FSDP2 of torch 2.13 shards integer parameters"
)
