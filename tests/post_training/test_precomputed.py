"""Log-probabilities of the reference: computed once, taken up after a stop, and never those of something else."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.checkpoints import frozen_place
from helpers.ranks import ranks
from helpers.training import Case, dims_on_ranks

from megazpp.post_training import precomputed
from megazpp.post_training.batch import PairBatch, RolloutBatch
from megazpp.post_training.data import PreferenceDataset
from megazpp.post_training.examples import Examples
from megazpp.post_training.precomputed import known_logps, read_logps

PAIRS, LENGTH = 11, 8


class StopError(Exception):
    """The run ends here."""


class Formula:
    """A reference whose log-probabilities follow from tokens and labels; it fails at forward number `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.forwards, self._stop = 0, stop

    def logps(self, batch: PairBatch | RolloutBatch) -> torch.Tensor:
        if self.forwards == self._stop:
            raise StopError
        self.forwards += 1
        return -(batch.tokens * 7 + batch.labels).float() / 16


class Found(NamedTuple):
    """What a run had, how often it asked the reference (None: it never opened it), and what it said."""

    logps: torch.Tensor | None
    forwards: int | None
    lines: list[str]


def examples(seed: int = 1) -> Examples:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, LENGTH + 1, 2 * PAIRS)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    mask = generator.integers(0, 2, starts[-1]).astype(np.uint8)
    mask[starts[:-1]] = 0
    tokens = generator.integers(0, 50, starts[-1]).astype(np.int32)
    return Examples(tokens, mask, starts.astype(np.int64), np.zeros(4, dtype=np.int64))


def expected(seed: int = 1) -> torch.Tensor:
    """The formula, pair by pair; sixteenths are exact in fp32."""
    data, rows = examples(seed), []
    for number in range(2 * PAIRS):
        tokens, mask = (part.astype(np.float64) for part in data.row(number))
        rows.append(-float(((tokens[:-1] * 7 + tokens[1:]) * mask[1:]).sum()) / 16)
    return torch.tensor(rows).view(PAIRS, 2)


def look_up(folder: str, *, stop: int | None = None, seed: int = 1, reference: str = "base", rounds: int = 1) -> Found:
    place, opened = frozen_place(dims_on_ranks(Case()), (lines := list[str]()).append), list[Formula]()

    def open_reference() -> Formula:
        opened.append(Formula(stop))
        return opened[0]

    dataset = PreferenceDataset(examples(seed), num_samples=None, seed=3, max_length=LENGTH, pad=0)
    options: dict[str, Any] = {"reference": reference, "folder": Path(folder), "micro_batch_size": 2}
    logps = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precomputed, "ROUNDS", rounds)
        with contextlib.suppress(StopError):
            logps = known_logps(dataset, open_reference, place, **options)
    return Found(logps, opened[0].forwards if opened else None, lines)


@pytest.mark.parametrize("world", [1, 2])
def test_they_are_computed_once_and_read_by_the_next_run(tmp_path: Path, world: int):
    for found in ranks(world).run(look_up, str(tmp_path)):
        assert torch.equal(found.logps, expected())
        assert found.forwards == -(-PAIRS // (2 * world))
    (again,) = ranks(1).run(look_up, str(tmp_path))
    assert torch.equal(again.logps, expected())
    assert again.forwards is None
    assert str(tmp_path) in again.lines[-1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_was_stopped_is_taken_up_where_it_last_wrote(tmp_path: Path, world: int):
    for found in ranks(world).run(look_up, str(tmp_path), stop=2):
        assert found.logps is None
    for found in ranks(world).run(look_up, str(tmp_path)):
        assert torch.equal(found.logps, expected())
        assert found.forwards == -(-PAIRS // (2 * world)) - 2
        assert f"{PAIRS:,} pairs are computed, {4 * world}" in "".join(found.lines)


def test_other_pairs_and_another_reference_have_files_of_their_own(tmp_path: Path):
    ranks(1).run(look_up, str(tmp_path))
    for options in ({"seed": 2}, {"reference": "another"}):
        (found,) = ranks(1).run(look_up, str(tmp_path), **options)
        assert found.forwards == 6
        assert torch.equal(found.logps, expected(options.get("seed", 1)))
    assert len(list(tmp_path.glob("*.logps"))) == 3


@pytest.mark.parametrize("change", ["flip", "cut", "empty", "key", "another's"])
def test_a_file_that_is_not_as_it_was_written_is_computed_anew(tmp_path: Path, change: str):
    ranks(1).run(look_up, str(tmp_path))
    (path,) = tmp_path.glob("*.logps")
    content = path.read_bytes()
    if change == "another's":
        ranks(1).run(look_up, str(tmp_path), seed=2)
        (other,) = set(tmp_path.glob("*.logps")) - {path}
        path.write_bytes(other.read_bytes())
    else:
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        path.write_bytes({"flip": flipped, "cut": content[:-8], "empty": b"", "key": b"x" + content[1:]}[change])
    (found,) = ranks(1).run(look_up, str(tmp_path))
    assert found.forwards == 6
    assert torch.equal(found.logps, expected())
    assert f"{path} is damaged or of other pairs: they are computed anew" in "".join(found.lines)
    assert path.read_bytes() == content
    assert torch.equal(read_logps(path, path.stem), expected())


def test_a_folder_that_cannot_be_written_to_is_an_error_on_every_rank(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match=r"--data-cache-path: cannot write .*file is no directory"):
        ranks(2).run(look_up, str(tmp_path / "file"))


def on_a_full_disk(folder: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # the second write is longer
    try:
        look_up(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_that_keeps_what_is_whole(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"--data-cache-path: cannot write .*File too large"):
        ranks(1).run(on_a_full_disk, str(tmp_path))
    (found,) = ranks(1).run(look_up, str(tmp_path))
    assert torch.equal(found.logps, expected())
    assert found.forwards == 5
