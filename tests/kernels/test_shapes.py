"""Tensors without memory: nothing is computed, everything is checked."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.block_quant import Feedback, dequantize_blockwise, dequantize_sum, quantize_blockwise
from kernels.formats import BlockFormat

INT8 = BlockFormat(8, 32)


def test_fake_tensors_are_checked_and_nothing_else():
    with FakeTensorMode():
        x, scales = torch.empty(3, 70), torch.empty(3, 3, dtype=torch.bfloat16)
        payload = torch.empty(3, INT8.payload_bytes(70), dtype=torch.uint8)
        feedback = Feedback.zeros((3,), 70, INT8, x.device)
        quantize_blockwise(x, INT8, payload=payload, scales=scales, feedback=feedback)
        base = torch.empty(3, 70, dtype=torch.bfloat16)
        quantize_blockwise(x, INT8, payload=payload, scales=scales, base=base)
        dequantize_blockwise(payload, scales, INT8, out=x)
        dequantize_sum(payload, scales, INT8, out=x[0])
        with pytest.raises(ValueError, match="scales is"):
            quantize_blockwise(x, INT8, payload=payload, scales=scales[:, :2])
        with pytest.raises(ValueError, match="base is"):
            quantize_blockwise(x, INT8, payload=payload, scales=scales, base=base[:, :69])
