"""Read and write MegaZ++'s own checkpoints for a conversion, one tensor at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megazpp.checkpoint.checkpoints import write_checkpoint
from megazpp.checkpoint.checksums import verify_files
from megazpp.checkpoint.folder import CheckpointFolder, read_tokenizer
from megazpp.checkpoint.metadata import CheckpointMetadata, shape_of
from megazpp.checkpoint.read import find_weights
from megazpp.checkpoint.safe_reader import SafeReader, WeightOpener
from megazpp.checkpoint.state import MODEL, under
from megazpp.convert.model import Deferred, Model, checked_model, model_config
from megazpp.data.config import DataConfig
from megazpp.data.dataset import build_tokenizer
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, names_tokenizer
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis


class AdapterConverter(WeightOpener):
    """An opener of checkpoints that also converts adapters (LoRA) from and to another program's format.

    The conversion of adapters is the task of subclasses, which optional features provide; see
    `megazpp.run.feature.Feature.weight_opener`. This base class is for programs without such a feature: it opens only
    checkpoints that contain all weights of their model.
    """

    def open_base(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Open the base weights of a checkpoint with adapters, without the changes by the adapters.

        The arguments are the same as for `open`. This base class supports only checkpoints without adapters, whose base
        weights are all their weights. The method therefore calls `open`.
        """
        return self.open(checkpoint, record, files)

    def merge(self, model: Model, folder: Path) -> Model:
        """Return a model whose weights include the changes by another program's adapter.

        Args:
            model: model with the base weights.
            folder: folder of the adapter.
        Raises:
            ValueError: a file is missing or damaged, the adapter does not fit the model, or no feature converts
                adapters.
        """
        raise ValueError(
            f"--adapter {folder}: the optional feature that merges adapters is not installed: leave out --adapter"
        )

    def export(self, checkpoint: Path, record: CheckpointMetadata, config: GPTConfig, base: Path, folder: Path) -> None:
        """Write a checkpoint's adapters, if it has any, in the format of another program.

        Args:
            checkpoint: folder of the checkpoint.
            record: metadata of the checkpoint.
            config: architecture of the model.
            base: folder that will contain the converted base weights, which the adapter's files name.
            folder: existing folder into which the adapter's files are written.
        """


NO_ADAPTERS = AdapterConverter()


def open_checkpoint(
    folder: Path, iteration: int | None, opener: AdapterConverter = NO_ADAPTERS, *, merge: bool = True
) -> tuple[Model, CheckpointMetadata]:
    """Verify and open a MegaZ++ checkpoint for a conversion. Tensors are read on demand.

    Args:
        folder: folder of checkpoints.
        iteration: iteration of the checkpoint; None for the latest.
        opener: opener of the weights, also of checkpoints with adapters.
        merge: True to return weights that include the changes by adapters; False to return the base weights.
    Returns:
        The model without padding rows in its vocabulary matrices, and the metadata of the checkpoint.
    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    source, record = find_weights(CheckpointFolder(folder, "--input"), iteration, opener=opener)
    checkpoint, where, flags = source.checkpoint, str(source.checkpoint), record.flags
    verify_files(checkpoint)
    names = ("hidden_dropout", "attention_dropout", "init_method_std")
    values = shape_of(flags) | {name: flags[name] for name in names if name in flags}
    if values.get("max_position_embeddings") is None:
        # A run with rotary positions may leave out --max-position-embeddings, but other formats require a value.
        values["max_position_embeddings"] = flags.get("seq_length")
    config = model_config(values, where)
    reader = (opener.open if merge else opener.open_base)(checkpoint, record, MeshAxis("checkpoint"))
    tensors = {
        name: Deferred(tuple(entry.size), entry.properties.dtype, functools.partial(reader.read_whole, MODEL + name))
        for name, entry in under(MODEL, reader.tensors()).items()
    }
    model = checked_model(config, tensors, where)
    # A training run pads the vocabulary matrices. A checkpoint whose metadata has no layout comes from a conversion,
    # which does not pad them.
    return (model.first_rows(record.vocab_size) if record.layout else model), record


def open_tokenizer(
    folder: Path, record: CheckpointMetadata, given: TokenizerConfig, say: Callable[[str], None]
) -> Tokenizer | None:
    """Open the tokenizer for a checkpoint: the one that the user names, or else the checkpoint's.

    The checkpoint's tokenizer is loaded from the files that are stored with the checkpoint. If there are none, the
    tokenizer is built from the flags of the checkpoint's run: loaded from the file that they name, or trained again.

    Args:
        folder: folder of checkpoints.
        record: metadata of the checkpoint.
        given: tokenizer flags of the user, which may name no tokenizer.
        say: function that prints a line.
    Returns:
        The tokenizer; None, after a note in the log, if neither the user nor the checkpoint names one.
    Raises:
        ValueError: files are missing or damaged, or the tokenizer has another number of tokens than the checkpoint's.
    """
    if names_tokenizer(given):
        tokenizer = load_tokenizer(given)
    elif record.tokenizer_folder is not None:
        adds, found = record.adds_special_tokens, read_tokenizer(folder, record.tokenizer_folder)
        tokenizer = load_tokenizer(dataclasses.replace(found, add_special_tokens=adds, eos_token=given.eos_token))
    else:  # load or train the tokenizer that the flags of the checkpoint's run describe
        saved: dict[str, Any] = {f.name: record.flags.get(f.name) for f in dataclasses.fields(TokenizerConfig)}
        config = TokenizerConfig(**saved | {"add_special_tokens": record.adds_special_tokens})
        texts, mock = tuple(record.flags.get("text_path") or ()), bool(record.flags.get("mock_data"))
        cache = record.flags.get("data_cache_path")
        known, tokenizer = names_tokenizer(config) or texts or mock, None
        if known:
            data = DataConfig(text_path=texts, mock_data=mock, data_cache_path=cache)
            tokenizer = build_tokenizer(config, data, log=say)
    if tokenizer is None:
        say("note: the checkpoint comes without a tokenizer; --tokenizer-model adds it to the output")
    elif record.tokenizer in (None, tokenizer.identity):
        pass  # the checkpoint's tokenizer is equal, or the checkpoint does not say which tokenizer it had
    elif tokenizer.vocab_size != record.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the tokenizer of {folder} had {record.vocab_size}: "
            "name the checkpoint's tokenizer, or none"
        )
    else:
        say(f"WARNING: the tokenizer gives other ids than the tokenizer of {folder}")
    return tokenizer


def write_weights(folder: Path, model: Model, record: CheckpointMetadata, tokenizer: Mapping[str, bytes]) -> str:
    """Write a converted model as a MegaZ++ checkpoint, without optimizer states, and return a line for the log.

    Args:
        folder: folder of checkpoints to write into.
        model: model whose tensors are read and written one after the other.
        record: metadata of the checkpoint, whose training progress contains the iteration.
        tokenizer: contents of the tokenizer's files by file name; empty for a tokenizer without files.
    """
    entries = {MODEL + name: entry for name, entry in model.tensors.items()}
    meta = {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()}

    def read(key: str) -> torch.Tensor:
        return entries[key].read()

    folders, axis = CheckpointFolder(folder, "--output"), MeshAxis("checkpoint")
    return write_checkpoint(record, meta, folders, axis, read=read, tokenizer=tokenizer)
