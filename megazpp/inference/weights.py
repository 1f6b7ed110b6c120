"""Models larger than memory: where the weights of a model that is only used lie, and in how many bits.

| --weights-on | packed weights are in            | the device holds                                                 |
|--------------|----------------------------------|------------------------------------------------------------------|
| device       | the device's memory              | all of them                                                      |
| host         | pinned memory of the host        | the ends of the model and 1 + --prefetch-layers layers           |
| disk         | a store (checkpoint/weight_store)| the same                                                         |
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megazpp.base.flags import check_not_negative, check_words, flag
from megazpp.model.gpt import GPTModel
from megazpp.zero.packed import Bits
from megazpp.zero.precision import PrecisionConfig
from megazpp.zero.streamed import StreamedUnits

MOST_SEQUENCES = 256  # of a batch that is chosen


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Where the weights of a model that is only used are between uses, and in how many bits."""

    weights_on: Literal["device", "host", "disk"] = flag(
        "device", "where weights lie between uses; of host and disk the device holds the ends and a few layers"
    )
    weight_bits: Literal[32, 16, 8, 4] | None = flag(
        None,
        "bits of an element of the weights at rest (default: as the model computes, so none is rounded)",
    )
    weight_store: str | None = flag(
        None, "folder of packed weights for --weights-on disk, written once (default: in the user's cache)"
    )
    prefetch_layers: int = flag(1, "layers that are fetched ahead of their use; each costs its packed bytes")

    def __post_init__(self) -> None:
        check_words(self)
        check_not_negative(self, "prefetch_layers")
        if self.weight_store is not None and self.weights_on != "disk":
            raise ValueError(f"--weight-store {self.weight_store} needs --weights-on disk, not {self.weights_on}")

    @property
    def packs(self) -> bool:
        """Whether weights are kept packed; else they are shards, as in a training."""
        return self.weights_on != "device" or self.weight_bits is not None

    def at_rest(self, precision: PrecisionConfig) -> tuple[Bits, torch.dtype]:
        """Bits of an element at rest, and the dtype of 32 and 16 bits, for a model that computes in `precision`."""
        half = torch.float16 if precision.fp16 else torch.bfloat16
        bits: Bits = self.weight_bits or (32 if precision.param_dtype == torch.float32 else 16)
        return bits, torch.float32 if bits == 32 else half


class Speed:
    """What streamed weights took since this was made."""

    def __init__(self, units: StreamedUnits) -> None:
        self._units, self._passes, self._waited = units, units.passes, units.waited_seconds
        self._started = time.perf_counter()

    def reached(self, num_tokens: int) -> str:
        """One line about this time, in which `num_tokens` were generated."""
        seconds, passes = time.perf_counter() - self._started, self._units.passes - self._passes
        waited = self._units.waited_seconds - self._waited
        return (
            f" {passes} passes fetched {passes * self._units.plan.pass_bytes} bytes; {num_tokens / seconds:.1f} "
            f"tokens/s; {100 * waited / seconds:.0f} % of the time waited for weights"
        )


def sequences_that_fit(model: GPTModel, length: int, device: torch.device, *, on_host: bool) -> int:
    """How many sequences of `length` tokens have their keys and values in half of the free memory; 1 to 256.

    More would not help: products of so many rows take longer than it takes to unpack the matrix.
    """
    config, weight = model.config, model.embedding.word.weight
    per_token = 2 * config.layers * (config.query_groups // model.tp.size) * config.head_size * weight.element_size()
    on_cuda = device.type == "cuda" and not on_host
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else _available_bytes()
    return min(max(free // 2 // (per_token * length), 1), MOST_SEQUENCES)


def _available_bytes() -> int:
    """Memory of this machine that programs can have; elsewhere than on Linux, all there is."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bf16_note(device: torch.device, dtype: torch.dtype) -> str | None:
    """Advice where a model computes in bf16 on a CPU that has no instructions for it; else None."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return "this CPU has no bf16 instructions: --no-bf16 --weight-bits 16 is much faster, with the same bits at rest"
