"""Work whose failure on one rank is a failure on all: no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megazpp.base.program import in_words
from megazpp.checkpoint.checksums import DamagedError
from megazpp.parallel.axis import MeshAxis, make_group
from megazpp.parallel.dims import ParallelDims

T = TypeVar("T")


def open_axis(dims: ParallelDims) -> MeshAxis:
    """All ranks, with a gloo group of their own: files are the CPU's, and a save may run beside the training."""
    world = dims.world
    group: dist.ProcessGroup | None = None
    if world.size > 1:
        group = make_group([world.ranks], "checkpoint", backend="gloo")
    return MeshAxis("checkpoint", ranks=world.ranks, rank=world.rank, group=group, wire="world")


def together(axis: MeshAxis, work: Callable[[], T]) -> T:
    """Do `work` on every rank and return its result.

    Raises:
        ValueError: on every rank, if it raised an OSError or a ValueError on any; of the latter's kind if all agree.
    """
    result: T | None = None
    failure: tuple[type[ValueError], str] | None = None
    try:
        result = work()
    except ValueError as error:
        failure = DamagedError if isinstance(error, DamagedError) else ValueError, in_words(error)
    except OSError as error:
        failure = ValueError, f"rank {axis.rank}: {in_words(error)}"
    except CheckpointException as error:  # the library's: some ranks' failures, raised on all ranks
        texts = {rank: str(found[0]) or type(found[0]).__name__ for rank, found in sorted(error.failures.items())}
        failure = ValueError, "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())
    failures = [f for f in axis.share_object(axis.gather_objects(failure)) if f is not None]
    if failures:
        kinds = {kind for kind, _ in failures}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        raise kind("\n".join(dict.fromkeys(text for _, text in failures)))
    return result  # type: ignore[return-value]
