"""Block quantization of tensors that have shapes and no memory (FakeTensor): nothing is left to do after the checks."""

from __future__ import annotations


def nothing(*arguments: object, **switches: object) -> None:
    """Every result is written into a tensor of the caller, so there is nothing to return either."""


pack = unpack_sum = nothing
