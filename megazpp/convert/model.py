"""A model between two formats: its shape, and its tensors under our names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megazpp.checkpoint.record import TrainingProgress
from megazpp.convert.tensors import Deferred
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis

WORDS, OUTPUT = "embedding.word.weight", "output.weight"


class Model(NamedTuple):
    """What a source gives and a sink takes.

    Attributes:
        config: its shape.
        rows: of the embedding.
        tensors: all of them, by the names of `GPTModel`.
    """

    config: GPTConfig
    rows: int
    tensors: Mapping[str, Deferred]

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, and hence of nearly all."""
        return self.tensors[WORDS].dtype


class Imported(NamedTuple):
    """A model that is to be a checkpoint of ours.

    Attributes:
        progress: where its training stood.
        seq_length: of the samples it is made for.
        tokenizer: flags, with files of this machine; without any if there is none.
        padded: rows beyond the tokenizer's are padding.
    """

    model: Model
    progress: TrainingProgress
    seq_length: int
    tokenizer: TokenizerConfig
    padded: bool


def model_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """The shape that settings describe.

    Args:
        values: fields of GPTConfig.
        where: what the settings are of, for messages.
    Raises:
        ValueError: they describe no model.
    """
    try:
        return GPTConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where} describes no model: {error}") from error


def model_shapes(config: GPTConfig, rows: int, where: str, *, num_tensors: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, whole.

    Args:
        where: what the settings are of, for messages.
        num_tensors: that are there; a model of more layers is not built.
    Raises:
        ValueError: the settings describe no model.
    """
    if config.layers > num_tensors:
        raise ValueError(f"{where} describes a model of {config.layers} layers, but there are {num_tensors} tensors")
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    try:
        with torch.device("meta"):
            model = GPTModel(unpadded, vocab_size=rows, tp=MeshAxis("tp"))
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch's, of sizes beyond any machine
        raise ValueError(f"{where} describes no model: {str(error).splitlines()[0]}") from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def first_rows(model: Model, rows: int) -> Model:
    """The model without what pads its vocabulary."""
    cut = {name: _cut(entry, rows) if name in (WORDS, OUTPUT) else entry for name, entry in model.tensors.items()}
    return Model(model.config, rows, cut)


def _cut(entry: Deferred, rows: int) -> Deferred:
    return Deferred((rows, *entry.shape[1:]), entry.dtype, lambda: entry.read()[:rows])
