"""A reader of weight patches for the process of an inference engine. It needs neither a process group nor a GPU.

    reader = PatchReader("patches")
    step = reader.advance()                      # applies all complete patches; None if there are no weights yet
    model.load_weights(reader.weights())         # weights with the names and shapes of Hugging Face's model
    reader.save("/dev/shm/policy")               # or writes a folder that from_pretrained reads

weight_patches/patches.py describes the files. The reader has one copy of all weights in host memory. Before it applies
a patch, it verifies the checksum of each file, and that the patch is made for exactly these weights.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.base.files import DamagedError, remove, renamed_when_done, write_synced
from megazpp.convert.huggingface import choose_architecture, model_pieces, to_files, write_model
from megazpp.convert.model import Deferred, Model, model_config, split_all
from megazpp.data.tokenizer_folder import import_package
from megazpp.kernels.weight_delta import decode
from megazpp.weight_patches.patches import checksum

# The name of a file of weight patches: kind, training step, index of the file, and number of files per step.
_NAME = re.compile(r"(weights|patch)-(\d+)-(\d+)-of-(\d+)\.safetensors")
_SAVED = "weight_patch.json"  # file in a folder that `PatchReader.save` has written, and may therefore replace
_REMEDY = "copy the file again, or restart the training run, which then writes all weights into a new folder"


class _Part(NamedTuple):
    """The shards that one training rank has written, in host memory.

    Attributes:
        tensors: shards by name; each patch changes them.
        model: metadata `model` of the rank's `weights` file: architecture, and the position of each shard.
        chain: checksum of the rank's files so far, to which the next patch must refer.
    """

    tensors: dict[str, torch.Tensor]
    model: dict[str, Any]
    chain: str


class PatchReader:
    """The weights of a run after one of its training steps, in host memory.

    Args:
        folder: folder that the run's --save-weight-patches names.
    Attributes:
        step: training step after which the weights were written; None before `advance` has found weights.
    """

    def __init__(self, folder: str | Path) -> None:
        self.step: int | None = None
        self._folder = Path(folder)
        self._chain: Path | None = None
        self._parts: list[_Part] = []

    def advance(self, step: int | None = None) -> int | None:
        """Read the files that lead to the weights of training step `step`, and return the step.

        If several processes of an engine compute with parts of one model, all of them must load the same weights. Then
        call `newest_step` once, and pass the result as `step` in all processes.

        Args:
            step: training step of the newest chain of files; None for the newest step whose files are complete.
        Returns:
            The training step of the weights; None if there are no complete files yet.
        Raises:
            ValueError: there are no complete files for `step`.
            DamagedError: a file is damaged, or its patch is made for other weights. The patches before this file may
                have been applied: the reader then has the weights of the step in its attribute `step`.
        """
        step = newest_step(self._folder) if step is None else step
        if step is None:
            return None
        chain, weights, patches = _newest_chain(self._folder)
        # Steps from which patches could lead to `step`: the step of this reader's weights if they belong to the newest
        # chain, and then the steps with `weights` files, the newest first. If the files of the reader's own step still
        # exist, they must be the files that the reader has read.
        known: list[int] = []
        if self.step is not None and chain == self._chain:
            paths = patches.get(self.step) or weights.get(self.step)
            known = [self.step] if paths is None or self._has_read(paths) else []
        starts = [*known, *sorted(weights, reverse=True)]
        start = next((a for a in starts if a <= step and all(n in patches for n in range(a + 1, step + 1))), None)
        if start is None:
            raise ValueError(
                f"{chain or self._folder} does not have all files that lead to the weights of step {step}: wait until "
                "all training ranks have written theirs, or load another step (newest_step)"
            )
        if start not in known:
            self._parts = [_read_weights(path) for path in weights[start]]
            self._chain, self.step = chain, start
        for number in range(start + 1, step + 1):
            self._apply(patches[number])
            self.step = number
        return step

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the values, in host memory, of each tensor of the model in Hugging Face's format."""
        model = self._model()
        theirs = split_all(model_pieces(model.config), model.tensors)
        for name, entry in to_files(choose_architecture(model.config), theirs).items():
            yield name, entry.read()

    def save(self, folder: str | Path) -> None:
        """Write config.json and the weights to a Hugging Face folder, with their training step in weight_patch.json.

        If the folder has a file weight_patch.json, this method has written the folder before, and replaces it.

        Args:
            folder: folder to write.
        Raises:
            ValueError: the folder contains files, but no weight_patch.json, so this method has not written them.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / _SAVED).is_file() and any(folder.iterdir()):
            raise ValueError(f"{folder} has files that PatchReader.save has not written: name a new or empty folder")
        unfinished = folder.with_name(folder.name + ".unfinished")
        remove(unfinished)
        unfinished.mkdir(parents=True)
        with renamed_when_done(unfinished, folder, synced=False):
            write_model(unfinished, self._model(), token_ids=self._parts[0].model["token_ids"])
            write_synced(unfinished / _SAVED, json.dumps({"step": self.step}).encode())
            remove(folder)

    def _model(self) -> Model:
        """Return the run's model as a converter's `Model`, with unsharded tensors by their names in `GPTModel`.

        The converter reads the tensors one after the other. Each tensor is assembled from the shards of all training
        ranks when it is read.
        """
        assert self._parts, "advance() has found no weights yet"
        about, tensors = self._parts[0].model, dict[str, Deferred]()
        for part in self._parts:
            for name, tensor in part.tensors.items():
                shape = tuple(part.model["places"][name][0])
                tensors[name] = Deferred(shape, tensor.dtype, partial(self._assemble, name))
        config, rows = model_config(about["config"], str(self._chain)), about["vocab_size"]
        return Model(config, rows, tensors).first_rows(rows)

    def _assemble(self, name: str) -> torch.Tensor:
        """Return an unsharded tensor of the model, assembled from the shards that the training ranks have written."""
        found = [(part.tensors[name], *part.model["places"][name]) for part in self._parts if name in part.tensors]
        whole = torch.empty(found[0][1], dtype=found[0][0].dtype)
        for shard, _, first in found:
            whole[tuple(slice(a, a + n) for a, n in zip(first, shard.shape, strict=True))] = shard
        return whole

    def _has_read(self, paths: Sequence[Path]) -> bool:
        """Return True if `paths`, the files of all training ranks for the reader's step, have led to its weights.

        They have not if the chain's folder was deleted after the reader had read it, and another run has created a
        folder of the same name.
        """
        chains = []
        for path in paths:
            with _opened(path) as file:
                chains.append((file.metadata() or {}).get("chain"))
        return chains == [part.chain for part in self._parts]

    def _apply(self, paths: Sequence[Path]) -> None:
        """Verify the patches of all training ranks for one step, then change the weights by all of them.

        A damaged file raises DamagedError before any weight changes. `paths` has one `patch` file per training rank.
        """
        found = [(part, *_read_patch(path, part)) for path, part in zip(paths, self._parts, strict=True)]
        for part, changes, _ in found:
            for name, change in changes.items():
                if change.dtype == torch.uint8:
                    decode(change.unsqueeze(0), part.tensors[name].view(1, -1))
                else:
                    part.tensors[name].copy_(change)
        self._parts = [part._replace(chain=chain) for part, _, chain in found]


def newest_step(folder: str | Path) -> int | None:
    """Return the newest training step whose weights a `PatchReader` can read; None if there is none.

    `folder` is the folder that the training run's --save-weight-patches names.
    """
    _, weights, patches = _newest_chain(Path(folder))
    return next((a for a in count(max(weights)) if a + 1 not in patches), None) if weights else None


def _newest_chain(folder: Path) -> tuple[Path | None, dict[int, list[Path]], dict[int, list[Path]]]:
    """Find the newest chain of weight patches in a folder, and list its complete files.

    Returns:
        The chain's folder, and two dictionaries by training step: all ranks' `weights` files, and all ranks' `patch`
        files. Steps without the files of all ranks are left out. The result is (None, {}, {}) if no chain has a
        complete set of `weights` files.
    """
    chains = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    for chain in sorted(chains, key=lambda path: int(path.name), reverse=True):
        found: dict[tuple[str, int], list[Path]] = {}
        for path in sorted(chain.iterdir()):
            if match := _NAME.fullmatch(path.name):
                found.setdefault((match[1], int(match[2])), []).append(path)
        complete = {key: paths for key, paths in found.items() if f"-of-{len(paths):05d}." in paths[0].name}
        weights, patches = (
            {s: paths for (k, s), paths in complete.items() if k == kind} for kind in ("weights", "patch")
        )
        if weights:
            return chain, weights, patches
    return None, {}, {}


def _read(path: Path, start: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, str], str]:
    """Read a file of weight patches.

    Args:
        path: file to read.
        start: checksum of the chain before this file, which the returned checksum continues.
    Returns:
        The tensors by name, the metadata, and the checksum of the metadata `model` and of the tensors, as 8 hexadecimal
        digits.
    Raises:
        DamagedError: the file cannot be read.
    """
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        about = file.metadata() or {}
        return tensors, about, f"{checksum(tensors, zlib.crc32(about.get('model', '').encode(), start)):08x}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of weight patches; raise DamagedError if it cannot be opened or read in the block."""
    safetensors = import_package("safetensors", str(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedError(f"{path} cannot be read as a safetensors file: {error}; {_REMEDY}") from error


def _read_weights(path: Path) -> _Part:
    """Read and verify a `weights` file, and return all shards of the training rank that has written the file.

    Raises:
        DamagedError: the file cannot be read, or its content does not have the checksum in its header.
    """
    tensors, about, found = _read(path)
    if found != about.get("checksum"):
        raise DamagedError(
            f"{path} is damaged: its content has the checksum {found}, not {about.get('checksum')} as in its header; "
            f"{_REMEDY}"
        )
    return _Part(tensors, json.loads(about["model"]), about["chain"])


def _read_patch(path: Path, part: _Part) -> tuple[dict[str, torch.Tensor], str]:
    """Read a `patch` file, and verify that it applies to the shards of its training rank.

    Args:
        path: file to read.
        part: shards of the training rank that has written the file.
    Returns:
        The changes of each shard by name, as lossless weight deltas (1-D uint8), and in the same dictionary the new
        values of the model's buffers. Then the checksum of the chain after this patch, as 8 hexadecimal digits.
    Raises:
        DamagedError: the file is damaged, or the patch is made for other weights.
    """
    changes, about, found = _read(path, int(part.chain, 16))
    if about.get("base") != part.chain:
        raise DamagedError(
            f"{path} changes weights with the checksum {about.get('base')}, but the weights read so far have the "
            f"checksum {part.chain}; {_REMEDY}"
        )
    if found != about.get("chain"):
        raise DamagedError(
            f"{path} is damaged: the checksum with its changes is {found}, not {about.get('chain')} as in its header; "
            f"{_REMEDY}"
        )
    return changes, found
