"""What a run begins with: which folder, which checkpoint in it, and how much of that."""

from __future__ import annotations

from typing import NamedTuple

from megazpp.checkpoint.checksums import DamagedError, verify_files
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import RECORD, TRACKER, CheckpointFolder
from megazpp.checkpoint.record import RunRecord, read_record


class LoadSource(NamedTuple):
    """Where to load from.

    Attributes:
        folder: of checkpoints.
        iteration: --ckpt-step; None for what the tracker names.
        continues: the run goes on; otherwise (--finetune) only weights are taken.
        optimizer, rng: what of it is loaded.
        fallback: a damaged checkpoint is passed over for the newest that is not.
    """

    folder: CheckpointFolder
    iteration: int | None
    continues: bool
    optimizer: bool
    rng: bool
    fallback: bool

    def candidates(self) -> list[int]:
        """Iterations to try, the wanted one first; [] if there is no checkpoint.

        Raises:
            DamagedError: the wanted one is not there, and there is no --load-fallback.
            ValueError: --ckpt-step has no checkpoint, no tracker says which of several is wanted, or the folder is that
                of one checkpoint.
        """
        self.folder.check_not_inside()
        found = self.folder.iterations()
        if self.iteration is not None and self.iteration not in found:
            raise ValueError(
                f"--ckpt-step {self.iteration}: {self.folder.of(self.iteration)} is missing; "
                f"{self.folder.name} has iterations {', '.join(map(str, found)) or 'none'}"
            )
        wanted = self._latest(found) if self.iteration is None else self.iteration
        if wanted is None:
            return []
        others = [iteration for iteration in reversed(found) if iteration != wanted]
        return [wanted, *others] if self.fallback else [wanted]

    def _latest(self, found: list[int]) -> int | None:
        """What the tracker names, or with --load-fallback the newest that was found; None where nothing was."""
        try:
            named = self.folder.latest()
        except DamagedError:
            if not self.fallback or not found:
                raise
            return found[-1]
        if named is None and found:
            if not self.fallback:
                raise ValueError(
                    f"{self.folder.name} has iterations {', '.join(map(str, found))}, but no {TRACKER} that says where "
                    "to go on: choose one with --ckpt-step"
                )
            return found[-1]
        return named


def choose_source(config: CheckpointConfig, *, restarted: bool) -> LoadSource | None:
    """What the flags ask to begin with; None to begin anew.

    Args:
        restarted: a fault ended an earlier attempt of this job: what it has saved comes first.
    Raises:
        ValueError: --save holds another run's checkpoints, or --load has none and must.
    """
    if config.save is not None:
        own = CheckpointFolder(config.save, "--save")
        own.check_not_inside()
        if restarted and own.iterations():
            rest = {"optimizer": config.save_optim, "rng": config.save_rng, "fallback": config.load_fallback}
            return LoadSource(own, None, continues=True, **rest)
        same = config.load is not None and CheckpointFolder(config.load, "").path.resolve() == own.path.resolve()
        if own.iterations() and not same:
            raise ValueError(
                f"--save {config.save} holds checkpoints already (up to iteration {own.iterations()[-1]}): "
                f"--load {config.save} goes on from there, or take another folder"
            )
    if config.load is None:
        return None
    continues = not config.finetune
    source = LoadSource(
        CheckpointFolder(config.load, "--load"),
        config.ckpt_step,
        continues=continues,
        optimizer=continues and config.load_optim,
        rng=continues and config.load_rng,
        fallback=config.load_fallback,
    )
    if config.exit_on_missing_checkpoint and not source.candidates():
        raise ValueError(f"--load {config.load} has no checkpoint ({source.folder.path / TRACKER} is missing)")
    return source


def peek(source: LoadSource | None) -> RunRecord | None:
    """The record of the checkpoint that will most likely be loaded, before anything is verified or made.

    Raises:
        ValueError: see `LoadSource.candidates`; it cannot be read, and there is no --load-fallback.
    """
    if source is None:
        return None
    for iteration in source.candidates():
        try:
            verify_files(source.folder.of(iteration), names=[RECORD])
            return read_record(source.folder.of(iteration))
        except DamagedError:
            if not source.fallback:
                raise
    return None
