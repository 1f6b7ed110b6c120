"""Log-probabilities of the reference: computed once, taken up after a stop, and never those of something else."""

import contextlib
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import frozen_place
from helpers.ranks import ranks
from helpers.training import Case, dims_on_ranks

from megazpp.post_training import reference
from megazpp.post_training.data import PreferenceDataset
from megazpp.post_training.examples import Examples

PAIRS, LENGTH, CHUNK = 11, 8, 4


class StopError(Exception):
    """The run ends here."""


def examples(seed: int) -> Examples:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, LENGTH + 1, 2 * PAIRS)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    mask = generator.integers(0, 2, starts[-1]).astype(np.uint8)
    mask[starts[:-1]] = 0
    tokens = generator.integers(0, 50, starts[-1]).astype(np.int32)
    return Examples(tokens, mask, starts.astype(np.int64), np.zeros(4, dtype=np.int64))


def expected(seed: int = 1) -> torch.Tensor:
    """Sixteenths, which are exact in fp32, pair by pair."""
    data, rows = examples(seed), []
    for number in range(2 * PAIRS):
        tokens, mask = (part.astype(np.float64) for part in data.row(number))
        rows.append(-float(((tokens[:-1] * 7 + tokens[1:]) * mask[1:]).sum()) / 16)
    return torch.tensor(rows).view(PAIRS, 2)


def look_up(
    folder: str, *, stop: int | None = None, seed: int = 1, name: str = "base"
) -> tuple[torch.Tensor | None, int]:
    """Their values, and how often the reference was asked, a formula that fails at forward number `stop`."""
    place, batches = frozen_place(dims_on_ranks(Case())), list[Any]()

    def logps(batch: Any) -> torch.Tensor:
        if len(batches) == stop:
            raise StopError
        batches.append(batch)
        return -(batch.tokens * 7 + batch.labels).float() / 16

    dataset = PreferenceDataset(examples(seed), num_samples=None, seed=3, max_length=LENGTH, pad=0)
    options: dict[str, Any] = {"reference": name, "folder": Path(folder), "micro_batch_size": 2}
    found = None
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StopError):
        patch.setattr(reference, "CHUNK", CHUNK)
        found = reference.cached_logps(dataset, lambda: logps, place, **options)
    return found, len(batches)


@pytest.mark.parametrize("world", [1, 2])
def test_they_are_computed_once_and_a_run_that_was_stopped_is_taken_up(tmp_path, world):
    """Chunks of 4, 4 and 3 pairs, each of 2 forwards of one rank or 1 of each of two."""
    for found, _ in ranks(world).run(look_up, str(tmp_path), stop=4 // world):
        assert found is None
    for found, forwards in ranks(world).run(look_up, str(tmp_path)):
        assert torch.equal(found, expected())
        assert forwards == 2 // world
    for found, forwards in ranks(1).run(look_up, str(tmp_path)):
        assert torch.equal(found, expected())
        assert forwards == 0


def test_other_pairs_and_another_reference_have_files_of_their_own(tmp_path):
    for options in ({}, {"seed": 2}, {"name": "another"}):
        ((found, forwards),) = ranks(1).run(look_up, str(tmp_path), **options)
        assert forwards == 6
        assert torch.equal(found, expected(options.get("seed", 1)))


def refusal(folder: str, most_bytes: int = resource.RLIM_INFINITY) -> str:
    """The error of a look-up on a disk that takes files of so many bytes; "" without one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        look_up(folder)
    except ValueError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def test_a_file_that_is_damaged_is_an_error_that_names_it(tmp_path):
    ranks(1).run(look_up, str(tmp_path))
    path, crc, other = sorted(tmp_path.glob("*/*.npy"))[:3]
    content, checksum = path.read_bytes(), crc.read_bytes()
    damages: dict[str, tuple[bytes, bytes | None]] = {
        "cut": (content[:-8], checksum),
        "a flipped bit": (content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], checksum),
        "byte order": (content.replace(b"<f4", b">f4"), checksum),
        "another's": (other.read_bytes(), checksum),
        "no checksum": (content, None),
        "another checksum": (content, checksum[:-8] + b"damaged!"),
    }
    for name, (array, its_checksum) in damages.items():
        path.write_bytes(array)
        crc.unlink() if its_checksum is None else crc.write_bytes(its_checksum)
        for message in ranks(2).run(refusal, str(tmp_path)):
            assert f"--data-cache-path: {path.parent} is damaged" in message, name


def test_a_folder_that_cannot_be_written_to_and_a_full_disk_are_errors(tmp_path):
    (tmp_path / "file").touch()
    for message in ranks(2).run(refusal, str(tmp_path / "file")):
        assert "--data-cache-path: cannot write " in message
        assert "file is no directory" in message
    (message,) = ranks(1).run(refusal, str(tmp_path), most_bytes=100)
    assert "--data-cache-path: cannot write " in message
    assert "File too large" in message
    ((found, forwards),) = ranks(1).run(look_up, str(tmp_path))
    assert torch.equal(found, expected())
    assert forwards == 6
