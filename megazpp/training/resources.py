"""What this process has used: memory and CPU time."""

from __future__ import annotations

import resource
import sys
import time

import torch

MEBI = 1024 * 1024


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on a CUDA device; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    return time.process_time()


def memory_line(rank: int, iteration: int, device: torch.device) -> str | None:
    """Megatron's memory line, printed once after the first log interval; None without a CUDA device."""
    if device.type != "cuda":
        return None
    sizes = {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }
    line = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    return line + "".join(f" | {name}: {size / MEBI:.2f}" for name, size in sizes.items())
