"""A micro-batch: what one forward pass of the model is given.

A sample is a window of S + 1 tokens; inputs are the first S, labels the last S. The documents inside a window
end at the tokenizer's eod token. `--reset-attention-mask` turns those ends into `document_starts`, offsets as
variable-length attention takes them, where Megatron builds an [S, S] mask; the model makes that mask from them on
devices without such a kernel (model/backends.py).

Legend: B samples of a micro-batch, S tokens of a sample, D documents of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

Batch = TypeVar("Batch", bound="tuple[Any, ...]")


class MicroBatch(NamedTuple):
    """One forward pass's worth of samples.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token after each of `tokens`.
        loss_mask: [B, S] fp32, 1 where the loss counts.
        position_ids: [B, S] int64.
        document_starts: [D + 1] int32 offsets into the B * S tokens, from 0 to B * S; None without
            --reset-attention-mask. A sample always starts a document.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MicroBatch:
        return mapped(self, lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatch:
        """Copy to page-locked memory, from which copies to a GPU do not block."""
        return mapped(self, torch.Tensor.pin_memory)


def mapped(batch: Batch, f: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Apply `f` to each tensor of the named tuple `batch`; None stays None."""
    kind: Any = type(batch)
    found: Batch = kind(*(None if t is None else f(t) for t in batch))
    return found


def make_micro_batch(
    samples: torch.Tensor,
    *,
    eod: int | None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> MicroBatch:
    """Inputs, labels, masks and positions of a stack of samples.

    Args:
        samples: [B, S + 1] int64.
        eod: the id that ends a document; the token after it starts the next one.
        reset_position_ids: positions count from the start of the document, not of the sample.
        reset_attention_mask: give `document_starts`.
        eod_mask_loss: no loss where the input is eod (the next document's first token cannot be predicted).
    Raises:
        ValueError: one of the three flags is set and there is no eod.
    """
    resets = {"reset_position_ids": reset_position_ids, "reset_attention_mask": reset_attention_mask}
    check_eod(eod, **resets, eod_mask_loss=eod_mask_loss)
    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    if eod_mask_loss:
        loss_mask[tokens == eod] = 0.0

    starts = None
    if reset_position_ids or reset_attention_mask:
        is_start = torch.zeros_like(tokens, dtype=torch.bool)
        is_start[:, 0] = True
        is_start[:, 1:] = tokens[:, :-1] == eod
        if reset_position_ids:
            # starts grow along a row, so a running maximum finds the latest one at or before each token
            positions = positions - torch.where(is_start, positions, 0).cummax(dim=1).values
        if reset_attention_mask:
            offsets = is_start.flatten().nonzero().flatten()
            starts = torch.cat([offsets, offsets.new_tensor([tokens.numel()])]).to(torch.int32)
    return MicroBatch(tokens, labels, loss_mask, positions.contiguous(), starts)


def check_eod(eod: int | None, **flags: bool) -> None:
    """Raises ValueError naming the flags that need to know where documents end, if the tokenizer has no such token."""
    names = ", ".join(f"--{name.replace('_', '-')}" for name, on in flags.items() if on)
    if eod is None and names:
        raise ValueError(f"{names} needs a tokenizer with an end-of-document token, and this one has none")
