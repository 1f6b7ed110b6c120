"""A reader of weight patches for the process of an inference engine. It needs neither a process group nor a GPU.

    reader = PatchReader("patches")
    step = reader.advance()                      # all complete patches; None if there are no weights yet
    model.load_weights(reader.weights())         # names and shapes of Hugging Face
    reader.save("/dev/shm/policy")               # or a folder that from_pretrained reads

patches.py describes the files. The reader checks the checksum of each file, and that each patch applies to the weights
that it holds, before it changes them. It keeps one copy of all weights in host memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.base.files import DamagedError, remove, renamed_when_done
from megazpp.convert.huggingface import choose_architecture, model_pieces, to_files, write_model
from megazpp.convert.model import Deferred, Model, model_config, split_all
from megazpp.data.tokenizer_folder import import_package
from megazpp.kernels.weight_delta import decode
from megazpp.weight_patches.patches import checksum

_NAME = re.compile(r"(weights|patch)-(\d+)-(\d+)-of-(\d+)\.safetensors")
_SAVED = "weight_patch.json"  # marks a folder that `PatchReader.save` may replace


class _Part(NamedTuple):
    """The weights of one writer: its shards by name, their places, and the checksum of its chain."""

    tensors: dict[str, torch.Tensor]
    model: dict[str, Any]
    chain: str


class PatchReader:
    """The weights of a run after one of its steps, in host memory.

    Args:
        folder: the folder that --save-weight-patches names.
    Attributes:
        step: optimizer step of the weights; None before the first `advance`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.step: int | None = None
        self._folder = Path(folder)
        self._chain: Path | None = None
        self._parts: list[_Part] = []

    def advance(self, step: int | None = None) -> int | None:
        """Read the files that lead to the weights of `step`, and return the step.

        Processes that share a model must load the same weights, so give them the same step (`newest_step`).

        Args:
            step: a step of the newest chain; None for its newest complete one.
        Returns:
            the step of the weights; None if no weights are complete.
        Raises:
            ValueError: there are no complete files for `step`.
            DamagedError: a file is damaged, or its patch does not apply to these weights. It has changed nothing.
        """
        step = newest_step(self._folder) if step is None else step
        if step is None:
            return None
        chain, weights, patches = _newest_chain(self._folder)
        starts = [self.step] if self.step is not None and chain == self._chain else []
        starts += sorted(weights, reverse=True)
        start = next((a for a in starts if a <= step and all(n in patches for n in range(a + 1, step + 1))), None)
        if start is None:
            raise ValueError(f"{chain or self._folder} has no complete files for step {step}")
        if start != self.step or chain != self._chain:
            self._parts = [_read_weights(path) for path in weights[start]]
            self._chain, self.step = chain, start
        for number in range(start + 1, step + 1):
            self._apply(patches[number])
            self.step = number
        return step

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and contents of all tensors as Hugging Face's model has them, assembled one after the other."""
        model = self._model()
        theirs = split_all(model_pieces(model.config), model.tensors)
        for name, entry in to_files(choose_architecture(model.config), theirs).items():
            yield name, entry.read()

    def save(self, folder: str | Path) -> None:
        """Write config.json, the weights, and their step to a folder. An earlier one of this method is replaced.

        Raises:
            ValueError: the folder holds other files.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / _SAVED).is_file() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds files that were not written here: name a new or empty folder")
        unfinished = folder.with_name(folder.name + ".unfinished")
        remove(unfinished)
        unfinished.mkdir(parents=True)
        with renamed_when_done(unfinished, folder, synced=False):
            write_model(unfinished, self._model(), token_ids={})
            (unfinished / _SAVED).write_text(json.dumps({"step": self.step}))
            remove(folder)

    def _model(self) -> Model:
        """Return the model, whose tensors are assembled from all parts when they are read."""
        assert self._parts, "advance() has found no weights yet"
        about, tensors = self._parts[0].model, dict[str, Deferred]()
        for part in self._parts:
            for name, tensor in part.tensors.items():
                shape = tuple(part.model["places"][name][0])
                tensors[name] = Deferred(shape, tensor.dtype, partial(self._assemble, name))
        config, rows = model_config(about["config"], str(self._chain)), about["vocab_size"]
        return Model(config, rows, tensors).first_rows(rows)

    def _assemble(self, name: str) -> torch.Tensor:
        """Return a whole tensor, from the shards of all writers."""
        found = [(part.tensors[name], *part.model["places"][name]) for part in self._parts if name in part.tensors]
        whole = torch.empty(found[0][1], dtype=found[0][0].dtype)
        for shard, _, first in found:
            whole[tuple(slice(a, a + n) for a, n in zip(first, shard.shape, strict=True))] = shard
        return whole

    def _apply(self, paths: Sequence[Path]) -> None:
        """Apply the patches of all writers, after all of them were checked."""
        found = [(part, *_read_patch(path, part)) for path, part in zip(paths, self._parts, strict=True)]
        for part, changes, _ in found:
            for name, change in changes.items():
                if change.dtype == torch.uint8:
                    decode(change.unsqueeze(0), part.tensors[name].view(1, -1))
                else:
                    part.tensors[name].copy_(change)
        self._parts = [part._replace(chain=chain) for part, _, chain in found]


def newest_step(folder: str | Path) -> int | None:
    """Return the newest step whose weights a `PatchReader` can read; None if there is none."""
    _, weights, patches = _newest_chain(Path(folder))
    return next((a for a in count(max(weights)) if a + 1 not in patches), None) if weights else None


def _newest_chain(folder: Path) -> tuple[Path | None, dict[int, list[Path]], dict[int, list[Path]]]:
    """Return the newest chain with complete weights, and the files of its complete weights and patches by step."""
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
    """Return the tensors and the metadata of a file, and the checksum of its tensors, continued from `start`."""
    safetensors = import_package("safetensors", str(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}, f"{checksum(tensors, start):08x}"
    except (safetensors.SafetensorError, OSError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error


def _read_weights(path: Path) -> _Part:
    """Read the shards of one writer."""
    tensors, about, found = _read(path)
    if found != about.get("checksum"):
        raise DamagedError(f"{path} is damaged: its tensors have the checksum {found}, not {about.get('checksum')}")
    return _Part(tensors, json.loads(about["model"]), about["chain"])


def _read_patch(path: Path, part: _Part) -> tuple[dict[str, torch.Tensor], str]:
    """Read the changes of one writer, and the checksum of its chain after them."""
    changes, about, found = _read(path, int(part.chain, 16))
    if about.get("base") != part.chain:
        raise DamagedError(f"{path} applies to weights with chain {about.get('base')}, but these have {part.chain}")
    if found != about.get("chain"):
        raise DamagedError(f"{path} is damaged: its chain has the checksum {found}, not {about.get('chain')}")
    return changes, found
