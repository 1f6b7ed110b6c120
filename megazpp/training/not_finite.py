"""Where a NaN or Inf came from: which micro-batch and which parameter, on which rank.

A sum over ranks spreads what is not finite over all of them. So each rank looks at its own gradients before they are
summed (`Sharding.watch_gradients`: per sharding unit, one pass, no wait for the device), and only when the norm of the
step is not finite are ranks asked who it was. The job then ends with the weights as they were before the step, and
not-finite-<iteration>.json in the run folder holds what is needed to look: samples, losses, norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megazpp.errors import JobError
from megazpp.optim.clip import grad_norms
from megazpp.parallel.dims import ParallelDims
from megazpp.training.batches import BatchPlan
from megazpp.training.run_folder import RunFolder
from megazpp.zero.sharding import Sharding

SHOWN = 8  # parameters and micro-batches that the message names; the file has all


class NotFiniteError(JobError):
    """The loss or a gradient is NaN or Inf."""


class Found(NamedTuple):
    """What one rank knows.

    Attributes:
        data_rank: which samples it had.
        losses: its share of the loss, by micro-batch.
        elements: parameter -> elements of this rank's shard of the summed gradient that are not finite.
        suspects: parameters of the units in which its own gradients were not finite; None where nobody can look.
    """

    data_rank: int
    losses: list[float]
    elements: dict[str, int]
    suspects: list[str] | None


class NotFinite:
    """Asks the ranks and ends the job.

    Args:
        sharding: the model whose gradients are in question.
        dims: for asking.
        plan: which samples an iteration has.
        folder: where rank 0 writes; None on the others.
    """

    def __init__(self, sharding: Sharding, dims: ParallelDims, plan: BatchPlan, folder: RunFolder | None) -> None:
        self._sharding, self._dims, self._plan, self._folder = sharding, dims, plan, folder

    def watch(self) -> None:
        """Before each step: look at its gradients before they are summed."""
        self._sharding.watch_gradients()

    def report(self, iteration: int, loss: float, norm: float, local_losses: torch.Tensor) -> None:
        """Gather, write and raise; called on all ranks.

        Raises:
            NotFiniteError: the same message on all ranks.
        """
        named = list(self._sharding.model.named_parameters())
        elements = {name: count for name, p in named if (count := _not_finite_elements(p.grad))}
        norms = grad_norms(named, self._dims.tp, self._dims.shard)
        mine = Found(self._dims.data_rank, local_losses.tolist(), elements, self._sharding.not_finite_here())
        found = self._dims.world.gather_objects(mine)
        message = None
        if found:
            first, size = self._samples(iteration)
            message = describe(found, iteration, loss, norm, first, self._plan.micro_batch_size)
            if self._folder is not None:
                record: dict[str, Any] = {
                    "iteration": iteration,
                    "loss": loss,
                    "grad_norm": norm,
                    "first_sample": first,
                }
                record |= {"samples": size, "micro_batch_size": self._plan.micro_batch_size, "grad_norms": norms}
                record |= {"ranks": [each._asdict() for each in found]}
                message += f"\nsamples, losses and norms: {self._folder.write_not_finite(iteration, record)}"
        raise NotFiniteError(self._dims.world.share_object(message))

    def _samples(self, iteration: int) -> tuple[int, int]:
        """The first sample of the iteration, and how many it has."""
        first = self._plan.consumed_samples_at(iteration - 1)
        return first, self._plan.batch_size_at(first)


def describe(
    found: Sequence[Found], iteration: int, loss: float, norm: float, first_sample: int, micro_batch_size: int
) -> str:
    """The message for the user.

    Args:
        found: by rank.
        first_sample: of the iteration.
    """
    lines = [
        f"iteration {iteration}: loss {loss:g}, gradient norm {norm:g}; the job ends before the update, the weights "
        f"are those of iteration {iteration - 1}"
    ]
    data_size = 1 + max(each.data_rank for each in found)
    bad_losses = [
        (rank, index, each.data_rank)
        for rank, each in enumerate(found)
        for index, value in enumerate(each.losses)
        if not math.isfinite(value)
    ]
    for rank, index, data_rank in bad_losses[:SHOWN]:
        start = first_sample + (index * data_size + data_rank) * micro_batch_size
        lines.append(
            f"the loss of micro-batch {index} (samples {start} to {start + micro_batch_size - 1}) is not finite on "
            f"rank {rank}"
        )
    bad = _elements_by_parameter(found)
    for name, count in list(bad.items())[:SHOWN]:
        ranks = [rank for rank, each in enumerate(found) if name in (each.suspects or ())]
        if found[0].suspects is None:
            origin = "from a rank that is not known, because whole copies are summed inside FSDP2"
        else:
            origin = f"from rank {', '.join(map(str, ranks))}" if ranks else "every rank's own gradient was finite"
        lines.append(f"{name}: {count} elements of the gradient are not finite, {origin}")
    more = len(bad_losses[SHOWN:]) + len(bad) - len(list(bad)[:SHOWN])
    return "\n".join([*lines, f"and {more} more"] if more else lines)


def _elements_by_parameter(found: Sequence[Found]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for each in found:
        for name, count in each.elements.items():
            counts[name] = counts.get(name, 0) + count
    return counts


def _not_finite_elements(gradient: Any) -> int:
    if gradient is None:
        return 0
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return int((~torch.isfinite(local)).sum())
