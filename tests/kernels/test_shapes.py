"""Tensors without memory: nothing is computed, everything is checked."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.block_quant import Feedback, pack, range_table, unpack, unpack_sum
from kernels.formats import BlockFormat, plan_row

INT8 = BlockFormat(8, 32)


def test_fake_tensors_are_checked_and_nothing_else():
    table = range_table(plan_row(70, INT8), torch.float32)
    with FakeTensorMode():
        x, messages = torch.empty(3, 70), torch.empty(3, table.layout.message_bytes, dtype=torch.uint8)
        pack(x, table, messages=messages, errors=Feedback.zeros((3,), table, x.device))
        base = torch.empty(3, 70, dtype=torch.bfloat16)
        pack(x, table, messages=messages, base=base)
        unpack(messages, table, out=x)
        unpack_sum(messages, table, out=x[0])
        with pytest.raises(ValueError, match="messages is"):
            pack(x, table, messages=messages[:, :2])
        with pytest.raises(ValueError, match=r"base .* has rows of another size"):
            pack(x, table, messages=messages, base=base[:, :69])
