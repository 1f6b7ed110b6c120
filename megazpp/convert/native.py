"""Our own checkpoints in a conversion, read and written one tensor at a time."""

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
from megazpp.checkpoint.safe_reader import SafeReader
from megazpp.checkpoint.state import MODEL, under
from megazpp.checkpoint.weights import WeightOpener
from megazpp.convert.model import Deferred, Model, checked_model, model_config
from megazpp.data.config import DataConfig
from megazpp.data.dataset import build_tokenizer
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, names_tokenizer
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis


class AdapterConverter(WeightOpener):
    """An opener of checkpoints that also converts adapters from and to another program's format.

    This class is for checkpoints of whole weights. An optional feature can provide a subclass for adapters, see
    `megazpp.run.feature.Feature.weight_opener`.
    """

    def open_base(self, checkpoint: Path, record: CheckpointMetadata, files: MeshAxis) -> SafeReader:
        """Open the weights that a checkpoint's adapters change, without the adapters."""
        return self.open(checkpoint, record, files)

    def merge(self, model: Model, folder: Path) -> Model:
        """Return the model with an adapter of another program merged into its weights.

        Args:
            model: model to change.
            folder: folder of the adapter.
        Raises:
            ValueError: a file is missing or damaged, the adapter does not fit the model, or no feature converts
                adapters.
        """
        raise ValueError(f"--adapter {folder}: the optional feature that merges adapters is not installed")

    def export(self, checkpoint: Path, record: CheckpointMetadata, config: GPTConfig, base: Path, folder: Path) -> None:
        """Write a checkpoint's adapters, if it has any, in the format of another program.

        Args:
            checkpoint: folder of the checkpoint.
            record: metadata of the checkpoint.
            config: architecture of the model.
            base: folder that will contain the converted base.
            folder: existing folder for the files.
        """


NO_ADAPTERS = AdapterConverter()


def open_checkpoint(
    folder: Path, iteration: int | None, opener: AdapterConverter = NO_ADAPTERS, *, merge: bool = True
) -> tuple[Model, CheckpointMetadata]:
    """Open a checkpoint; return its model without padding of the vocabulary, and its metadata.

    Args:
        folder: folder of checkpoints.
        iteration: iteration to open; None for the latest.
        opener: opener of the weights.
        merge: True to merge adapters into their base, False to drop them.
    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    source, record = find_weights(CheckpointFolder(folder, "--input"), iteration, opener=opener)
    checkpoint, where, flags = source.checkpoint, str(source.checkpoint), record.flags
    verify_files(checkpoint)
    names = ("hidden_dropout", "attention_dropout", "init_method_std")
    values = shape_of(flags) | {name: flags[name] for name in names if name in flags}
    if values.get("max_position_embeddings") is None:
        values["max_position_embeddings"] = flags.get("seq_length")  # rotary positions need no such flag here
    config = model_config(values, where)
    reader = (opener.open if merge else opener.open_base)(checkpoint, record, MeshAxis("checkpoint"))
    tensors = {
        name: Deferred(tuple(entry.size), entry.properties.dtype, functools.partial(reader.read_whole, MODEL + name))
        for name, entry in under(MODEL, reader.tensors()).items()
    }
    model = checked_model(config, tensors, where)
    # Runs pad the vocabulary. A checkpoint without a layout comes from a conversion, which does not.
    return (model.first_rows(record.vocab_size) if record.layout else model), record


def open_tokenizer(
    folder: Path, record: CheckpointMetadata, given: TokenizerConfig, say: Callable[[str], None]
) -> Tokenizer | None:
    """Open the tokenizer of a checkpoint.

    Args:
        folder: folder of checkpoints.
        record: metadata of the checkpoint. Its tokenizer's files come first, then the flags of its run.
        given: flags of the user, which take precedence if they name a tokenizer.
        say: function that prints a line.
    Returns:
        The tokenizer; None, after a note, if none is known.
    Raises:
        ValueError: files are missing or damaged, or the tokenizer has another number of tokens.
    """
    if names_tokenizer(given):
        tokenizer = load_tokenizer(given)
    elif record.tokenizer_folder is not None:
        adds, found = record.adds_special_tokens, read_tokenizer(folder, record.tokenizer_folder)
        tokenizer = load_tokenizer(dataclasses.replace(found, add_special_tokens=adds, eos_token=given.eos_token))
    else:  # load or train the tokenizer that the flags of the run describe
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
        pass  # it is the recorded tokenizer, or none was recorded
    elif tokenizer.vocab_size != record.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but {folder} was made with {record.vocab_size}"
        )
    else:
        say(f"WARNING: the tokenizer gives other ids than the tokenizer of {folder}")
    return tokenizer


def write_weights(folder: Path, model: Model, record: CheckpointMetadata, tokenizer: Mapping[str, bytes]) -> str:
    """Write weights and tokenizer files as the checkpoint of `record.iteration`; return a line for the log."""
    entries = {MODEL + name: entry for name, entry in model.tensors.items()}
    meta = {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()}

    def read(key: str) -> torch.Tensor:
        return entries[key].read()

    folders, axis = CheckpointFolder(folder, "--output"), MeshAxis("checkpoint")
    return write_checkpoint(record, meta, folders, axis, read=read, tokenizer=tokenizer)
