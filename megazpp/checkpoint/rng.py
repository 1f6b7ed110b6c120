"""The states of all random generators of a rank, as tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megazpp.model.dropout import SharedGenerator
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.parameters import seed_for


def rng_states(shared: SharedGenerator | None, device: torch.device) -> dict[str, torch.Tensor]:
    """Python's, numpy's and torch's default generators, the device's, and the one that tp ranks share; uint8."""
    kind, keys, *rest = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    states = {
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor([kind, keys.tolist(), *rest]),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if shared is not None:
        states["shared"] = shared.generator.get_state()
    return states


def set_rng_states(states: Mapping[str, torch.Tensor], shared: SharedGenerator | None, device: torch.device) -> None:
    """Undo everything that was drawn since `rng_states`; generators without a state are left alone."""
    if "python" in states:
        version, internal, gauss_next = _from_tensor(states["python"])
        random.setstate((version, tuple(internal), gauss_next))
    if "numpy" in states:
        kind, keys, *rest = _from_tensor(states["numpy"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "shared" in states and shared is not None:
        shared.generator.set_state(states["shared"])


def reseed(
    shared: SharedGenerator | None, *, seed: int, iteration: int, data_rank: int, data_size: int, tp_rank: int
) -> None:
    """Seed all generators for a run that continues on other ranks: from what they are now, and from the iteration.

    So that the masks of the run's first steps do not come again.
    """
    seed = seed_for(f"iteration {iteration} on {data_size} data ranks", seed=seed)
    seed_everything(seed, data_rank=data_rank, tp_rank=tp_rank)
    if shared is not None:
        shared.generator.manual_seed(seed_for(f"dropout on data rank {data_rank}", seed=seed))


def _as_tensor(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _from_tensor(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
