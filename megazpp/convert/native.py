"""Our own checkpoints, one tensor at a time: read for another format, written from one."""

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
from megazpp.checkpoint.weights import AdaptedReader, open_weights
from megazpp.convert.model import Deferred, Model, checked_model, model_config
from megazpp.convert.peft import AdapterSettings, default_targets
from megazpp.data.dataset import DataConfig, build_tokenizer
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, names_tokenizer
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis


def open_checkpoint(
    folder: Path, iteration: int | None, lora_base: tuple[str, ...] = (), *, merge: bool = True
) -> tuple[Model, CheckpointMetadata]:
    """The weights of a checkpoint (None: the latest) without the padding of their vocabulary, and what it says.

    Adapters are merged into their base, or else left out. Raises ValueError if there is none, or it is damaged.
    """
    source, record = find_weights(CheckpointFolder(folder, "--input"), iteration, lora_base=lora_base)
    checkpoint, where, flags = source.checkpoint, str(source.checkpoint), record.flags
    verify_files(checkpoint)
    names = ("hidden_dropout", "attention_dropout", "init_method_std")
    values = shape_of(flags) | {name: flags[name] for name in names if name in flags}
    if values.get("max_position_embeddings") is None:
        values["max_position_embeddings"] = flags.get("seq_length")  # rotary positions need no such flag here
    config = model_config(values, where)
    reader = open_weights(checkpoint, record, MeshAxis("checkpoint"), lora_base)
    if isinstance(reader, AdaptedReader) and not merge:
        reader = reader.base
    tensors = {
        name: Deferred(tuple(entry.size), entry.properties.dtype, functools.partial(reader.read_whole, MODEL + name))
        for name, entry in under(MODEL, reader.tensors()).items()
    }
    model = checked_model(config, tensors, where)
    # a run pads; a checkpoint without a layout comes from a conversion, and has the rows it had there
    return (model.first_rows(record.vocab_size) if record.layout else model), record


def read_trained(
    folder: Path, record: CheckpointMetadata, config: GPTConfig
) -> tuple[AdapterSettings, dict[str, torch.Tensor]]:
    """The adapters of a LoRA run's checkpoint, and the scalar head beside them, whole."""
    reader, saved = SafeReader(CheckpointFolder(folder, "--input").of(record.progress.iteration)), record.adapters
    assert saved is not None, "the checkpoint holds no adapters"
    targets = saved.targets or default_targets(config)
    settings = AdapterSettings(saved.rank, saved.alpha, saved.dropout, targets, checksum=saved.base_checksum)
    tensors = {name: reader.read_whole(MODEL + name) for name in under(MODEL, reader.tensors())}
    return settings, tensors


def open_tokenizer(
    folder: Path, record: CheckpointMetadata, given: TokenizerConfig, say: Callable[[str], None]
) -> Tokenizer | None:
    """The tokenizer of a checkpoint: what flags name, else what lies beside it, else what its flags say.

    Returns:
        None if nothing tells; that is said.
    Raises:
        ValueError: its files are missing or damaged, or it is another checkpoint's.
    """
    if names_tokenizer(given):
        tokenizer = load_tokenizer(given)
    elif record.tokenizer_folder is not None:
        adds = bool(record.adds_special_tokens)
        found = read_tokenizer(folder, record.tokenizer_folder)
        tokenizer = load_tokenizer(dataclasses.replace(found, add_special_tokens=adds, eos_token=given.eos_token))
    else:
        tokenizer = _remade_tokenizer(record, say)
    if tokenizer is None:
        say("note: the checkpoint comes without a tokenizer; --tokenizer-model adds it to the output")
    elif record.tokenizer in (None, tokenizer.identity):
        pass  # the model may have more rows than it has ids, or fewer
    elif tokenizer.vocab_size != record.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, that of {folder} had {record.vocab_size}")
    else:
        say(f"WARNING: the tokenizer gives other ids than that of {folder}")
    return tokenizer


def write_weights(folder: Path, model: Model, record: CheckpointMetadata, tokenizer: Mapping[str, bytes]) -> str:
    """Write a checkpoint of the record's iteration, and the tokenizer's files; returns the line that says so."""
    entries = {MODEL + name: entry for name, entry in model.tensors.items()}
    meta = {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()}

    def read(key: str) -> torch.Tensor:
        return entries[key].read()

    folders, axis = CheckpointFolder(folder, "--output"), MeshAxis("checkpoint")
    return write_checkpoint(record, meta, folders, axis, read=read, tokenizer=tokenizer)


def _remade_tokenizer(record: CheckpointMetadata, say: Callable[[str], None]) -> Tokenizer | None:
    """The tokenizer that the flags of a checkpoint without its files name, or were trained with."""
    saved: dict[str, Any] = {f.name: record.flags.get(f.name) for f in dataclasses.fields(TokenizerConfig)}
    saved["add_special_tokens"] = bool(saved["add_special_tokens"])
    config, texts = TokenizerConfig(**saved), record.flags.get("text_path") or ()
    if not (names_tokenizer(config) or texts or record.flags.get("mock_data")):
        return None
    data = DataConfig(
        text_path=tuple(texts),
        mock_data=bool(record.flags.get("mock_data")),
        data_cache_path=record.flags.get("data_cache_path"),
    )
    return build_tokenizer(config, data, log=say)
