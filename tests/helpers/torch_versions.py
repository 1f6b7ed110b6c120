"""What older torch releases of the range that we support cannot do; there the product refuses it by name."""

import pytest
from torch.distributed.fsdp import FSDPModule

from megazpp.parallel.axis import can_order_groups

needs_any_order = pytest.mark.skipif(not can_order_groups(), reason="torch 2.13 makes groups of ranks in any order")
needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 of torch 2.13 can give a forward or backward up"
)
needs_integers = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 of torch 2.13 shards integer parameters"
)
