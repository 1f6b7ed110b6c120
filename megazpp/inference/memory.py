"""The number of sequences that a generation takes at once: those whose keys and values fit in memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megazpp.model.gpt import GPTModel

MOST_SEQUENCES = 256  # of a batch that is chosen


def sequences_that_fit(model: GPTModel, length: int, device: torch.device, *, on_host: bool) -> int:
    """Count the sequences of `length` tokens that have their keys and values in half of the free memory; 1 to 256.

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
