"""What older torch releases of the range that we support cannot do; there the product refuses it by name."""

import pytest

from megazpp.parallel.axis import can_order_groups

needs_any_order = pytest.mark.skipif(not can_order_groups(), reason="torch 2.13 makes groups of ranks in any order")
