"""The reference's log-probabilities of all pairs of a data set: computed once, kept on disk beside the tokens.

    KEY.logps | one line of JSON: key, pairs that are known, CRC-32 | [pairs, 2] fp32, from the first pair on

The key names what they follow from: the tokens and masks of the pairs (so text, template, tokenizer and --max-length),
the reference's checkpoint, and the precision it computes in. The file is written anew, whole, after every few
micro-batches, so that a run that was stopped is taken up there; the next run with the same key reads it and never opens
the reference. Rank 0 reads and writes. A file that is not as it was written is left out of account and replaced.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megazpp.base.files import locked, write_whole
from megazpp.checkpoint.checksums import DamagedError
from megazpp.checkpoint.together import together
from megazpp.data.cache import cache_key, check_cache_dir
from megazpp.post_training.batch import row_multiple
from megazpp.post_training.data import PreferenceDataset, make_pair_batch
from megazpp.post_training.objectives import Scorer
from megazpp.stored.load import FrozenPlace

ROUNDS = 64  # micro-batches of each data rank between two writes


def known_logps(
    dataset: PreferenceDataset,
    open_reference: Callable[[], Scorer],
    place: FrozenPlace,
    *,
    reference: str,
    folder: Path,
    micro_batch_size: int,
) -> torch.Tensor:
    """[pairs, 2] fp32 log-probabilities of both answers of all pairs of the files, on the CPU of every rank.

    Args:
        open_reference: called on all ranks where not all of them are on disk.
        reference: names it and how it computes.
        folder: of the file.
    Raises:
        ValueError: the file cannot be read or written; on every rank.
    """
    files, total, say = place.files, dataset.num_pairs, place.say

    def find() -> tuple[Path, str, torch.Tensor] | None:
        if files.rank > 0:
            return None
        check_cache_dir(folder)
        key = cache_key(kind="reference log-probabilities 1", data=dataset.digest(), reference=reference)
        path, found = folder / f"{key}.logps", torch.zeros(0, 2)
        try:
            found = read_logps(path, key)
        except FileNotFoundError:
            pass
        except DamagedError as error:
            say(f"note: {error}: they are computed anew")
        return path, key, found

    path, key, found = files.share_object(together(files, find))
    if len(found) == total:
        say(f"the reference's log-probabilities of {total:,} pairs: {path}")
        return found
    say(f"the reference's log-probabilities of {total:,} pairs are computed, {len(found):,} are in {path}")
    model, stride = open_reference(), micro_batch_size * place.dims.data_size
    while len(found) < total:
        last = min(len(found) + ROUNDS * stride, total)
        part = reference_logps(model, dataset, range(len(found), last), place, micro_batch_size=micro_batch_size)
        found = torch.cat((found, part))
        together(files, functools.partial(write_logps, path, key, found if files.rank == 0 else None))
    return found


@torch.no_grad()
def reference_logps(
    reference: Scorer, dataset: PreferenceDataset, pairs: range, place: FrozenPlace, *, micro_batch_size: int
) -> torch.Tensor:
    """[len(pairs), 2] fp32 log-probabilities of both answers of these pairs of the files, on the CPU of every rank.

    Each data rank takes every so manieth micro-batch; all of them run equally many.
    """
    dims, found, multiple = place.dims, torch.zeros(len(pairs), 2), row_multiple(place.device, place.dims)
    stride = micro_batch_size * dims.data_size
    with dims.counter.paused():  # no step sends this
        for first in range(dims.data_rank * micro_batch_size, -(-len(pairs) // stride) * stride, stride):
            places = range(first, first + micro_batch_size)
            samples = np.stack([dataset.pair(pairs[each % len(pairs)]) for each in places])
            batch = make_pair_batch(torch.from_numpy(samples), multiple=multiple).to(place.device)
            logps = (reference.logps(batch) * batch.loss_mask).sum(dim=1).view(2, -1).t().cpu()
            for each, row in zip(places, logps, strict=True):
                if each < len(pairs):
                    found[each] = row
        return dims.sum_over_data_(found.to(place.device)).cpu()


def write_logps(path: Path, key: str, logps: torch.Tensor | None) -> None:
    """Write those of the first pairs, [pairs, 2] fp32, if any; raises ValueError if the file cannot be written."""
    if logps is None:
        return
    content = logps.numpy().astype("<f4").tobytes()
    line = json.dumps({"key": key, "pairs": len(logps), "crc32": zlib.crc32(content)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):  # another run may be at the same pairs
            write_whole(path, line.encode() + b"\n" + content)
    except OSError as error:
        raise ValueError(f"--data-cache-path: cannot write {path}: {error}") from error


def read_logps(path: Path, key: str) -> torch.Tensor:
    """Those of the first pairs, [pairs, 2] fp32.

    Raises:
        FileNotFoundError: there is no file.
        DamagedError: it is not as it was written, or of another key.
    """
    line, _, content = path.read_bytes().partition(b"\n")
    try:
        about = json.loads(line)
        expected = {"key": key, "pairs": len(content) // 8, "crc32": zlib.crc32(content)}
    except ValueError:
        about, expected = None, {}
    if about != expected:
        raise DamagedError(f"{path} is damaged or of other pairs")
    return torch.from_numpy(np.frombuffer(content, dtype="<f4").astype(np.float32)).view(-1, 2)
