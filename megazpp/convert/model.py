"""A model between two formats: its tensors under our names, and which of another format's tensors make one of ours.

A model passes through a conversion one tensor at a time: shapes and types are known and checked before the first one
is read, and each is read, rearranged and written before the next.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megazpp.checkpoint.metadata import TrainingProgress
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis

WORDS, OUTPUT, HEAD = "embedding.word.weight", "output.weight", "scalar_head.weight"


class Deferred(NamedTuple):
    """A tensor that `read` gives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def held(tensor: torch.Tensor) -> Deferred:
    """A tensor that is in memory already."""
    return Deferred(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def rows_of(entry: Deferred, first: int, last: int) -> Deferred:
    """Return the rows from `first` up to `last` of a tensor."""
    return Deferred((last - first, *entry.shape[1:]), entry.dtype, lambda: entry.read()[first:last])


class Model(NamedTuple):
    """A model between two formats: read from one, written in the other.

    Attributes:
        config: its shape.
        rows: of the embedding.
        tensors: all of them, by the names of `GPTModel`.
        seq_length: of the samples it is made for; 0 where a record says it, as all that follows.
        tokenizer: flags, with files of this machine; without any if there is none.
        progress: where its training stood.
        padded: rows beyond the tokenizer's are padding.
        origin: the Hugging Face folder with these weights.
        score_pad: of a reward model: it scores a text's last token other than this one; None for the last.
    """

    config: GPTConfig
    rows: int
    tensors: Mapping[str, Deferred]
    seq_length: int = 0
    tokenizer: TokenizerConfig = TokenizerConfig()
    progress: TrainingProgress = TrainingProgress()
    padded: bool = False
    origin: str | None = None
    score_pad: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The embedding's type, which nearly all have."""
        return self.tensors[WORDS].dtype

    def first_rows(self, rows: int) -> Model:
        """The model without what pads its vocabulary."""
        cut = {name: rows_of(self.tensors[name], 0, rows) for name in (WORDS, OUTPUT) if name in self.tensors}
        return self._replace(rows=rows, tensors={**self.tensors, **cut})


class ForeignTensors(NamedTuple):
    """The tensors of another format that make one of ours, and the functions between them.

    Attributes:
        theirs: the names of the tensors that it is there.
        join: makes ours of them, in that order.
        split: the other way round; tells the shapes too, of a tensor without data.
        transposed: matrices are stored as [in, out] there.
    """

    theirs: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    transposed: bool = False


def model_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """The config with these fields; raises ValueError naming `where` they are from if they describe no model."""
    try:
        return GPTConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where} describes no model: {error}") from error


def model_shapes(
    config: GPTConfig, rows: int, where: str, *, num_tensors: int, scalar_head: bool = False
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, whole; raises ValueError naming `where` if the settings describe none.

    Args:
        num_tensors: that are there; a model of more layers is not built.
    """
    if config.layers > num_tensors:
        raise ValueError(f"{where} describes a model of {config.layers} layers, but there are {num_tensors} tensors")
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    try:
        with torch.device("meta"):
            model = GPTModel(unpadded, vocab_size=rows, tp=MeshAxis("tp"), scalar_head=scalar_head)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch's, of sizes beyond any machine
        raise ValueError(f"{where} describes no model: {str(error).splitlines()[0]}") from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def checked_model(config: GPTConfig, tensors: Mapping[str, Deferred], where: str) -> Model:
    """The model of these tensors; raises ValueError naming `where` they are from if they are not the config's."""
    if WORDS not in tensors:
        raise ValueError(f"{where} holds no word embeddings")
    rows = tensors[WORDS].shape[0]
    expected = model_shapes(config, rows, where, num_tensors=len(tensors), scalar_head=HEAD in tensors)
    check_tensors({name: entry.shape for name, entry in tensors.items()}, expected, where)
    return Model(config, rows, tensors)


def same(name: str) -> ForeignTensors:
    """The same tensor under another name."""
    return ForeignTensors((name,), lambda parts: parts[0], lambda ours: [ours])


def transposed(name: str) -> ForeignTensors:
    """A matrix that is stored as [in, out] there."""
    return ForeignTensors((name,), lambda parts: parts[0].t(), lambda ours: [ours.t()], transposed=True)


def fuse_qkv(parts: Sequence[torch.Tensor], *, groups: int, head_size: int) -> torch.Tensor:
    """Rows of queries, keys and values to our fused rows [group, (queries of the group, key, value), channel]."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, head_size, *rest) for part in parts], dim=1).flatten(0, 2)


def split_qkv(fused: torch.Tensor, *, groups: int, head_size: int) -> list[torch.Tensor]:
    """Split what `fuse_qkv` has fused."""
    rows = fused.reshape(groups, -1, head_size, *fused.shape[1:])
    queries = rows.shape[1] - 2
    return [part.flatten(0, 2) for part in rows.split((queries, 1, 1), dim=1)]


def qkv_rows(names: Sequence[str], config: GPTConfig, *, transposed: bool = False) -> ForeignTensors:
    """Our fused rows, from queries, keys and values as three tensors or below each other in one.

    Args:
        transposed: matrices are stored as [in, out] there.
    """
    shape = {"groups": config.query_groups, "head_size": config.head_size}

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = [part.t() if transposed else part for part in parts]
        sizes = [count * config.head_size for count in (config.heads, config.query_groups, config.query_groups)]
        return fuse_qkv(rows if len(rows) > 1 else rows[0].split(sizes), **shape)

    def split(ours: torch.Tensor) -> list[torch.Tensor]:
        rows = split_qkv(ours, **shape)
        return [part.t() if transposed else part for part in (rows if len(names) > 1 else [torch.cat(rows)])]

    return ForeignTensors(tuple(names), join, split, transposed)


def named_pieces(
    config: GPTConfig,
    modules: Mapping[str, str],
    layer_modules: Mapping[str, str],
    qkv: Sequence[str],
    *,
    layers: str,
    is_transposed: bool = False,
) -> dict[str, ForeignTensors]:
    """Return the tensors of transformers for each of ours, from names of modules.

    Args:
        modules: our names to transformers', of modules beside the layers.
        layer_modules: the same inside a layer, without queries, keys and values.
        qkv: modules inside a layer that hold queries, keys and values: three, or one for all.
        layers: prefix of transformers' layers.
        is_transposed: matrices of linear layers are stored as [in, out].
    """
    found, named = dict[str, ForeignTensors](), dict(modules)
    for layer in range(config.layers):
        named |= {f"layers.{layer}.{ours}": f"{layers}.{layer}.{theirs}" for ours, theirs in layer_modules.items()}
        for kind in ("weight", "bias")[: 1 + config.qkv_bias]:
            parts = [f"{layers}.{layer}.{part}.{kind}" for part in qkv]
            found[f"layers.{layer}.attention.qkv.{kind}"] = qkv_rows(parts, config, transposed=is_transposed)
    for ours, theirs in named.items():
        is_norm, is_linear = ours.endswith("norm"), ".attention." in ours or ".mlp." in ours
        has_bias = config.normalization == "LayerNorm" if is_norm else is_linear and config.linear_bias
        matrix = transposed if is_transposed and is_linear else same
        found[f"{ours}.weight"] = matrix(f"{theirs}.weight")
        if has_bias:
            found[f"{ours}.bias"] = same(f"{theirs}.bias")
    return found


def join_all(
    pieces: Mapping[str, ForeignTensors],
    theirs: Mapping[str, Deferred],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> dict[str, Deferred]:
    """Our tensors, each made of theirs when it is read.

    Args:
        shapes: of ours.
        where: what holds `theirs`, for messages.
    Raises:
        ValueError: a tensor is missing, has another shape than the model's, or has no place in it.
    """

    def join(piece: ForeignTensors, dtype: torch.dtype) -> torch.Tensor:
        return piece.join([theirs[name].read().to(dtype) for name in piece.theirs]).contiguous()

    parts = {ours: piece.split(torch.empty(shapes[ours], device="meta")) for ours, piece in pieces.items()}
    named = [pair for ours, piece in pieces.items() for pair in zip(piece.theirs, parts[ours], strict=True)]
    expected = {name: tuple(part.shape) for name, part in named}
    check_tensors({name: entry.shape for name, entry in theirs.items()}, expected, where)
    joined = {}
    for ours, piece in pieces.items():
        dtype = functools.reduce(torch.promote_types, (theirs[name].dtype for name in piece.theirs))  # exact
        joined[ours] = Deferred(shapes[ours], dtype, functools.partial(join, piece, dtype))
    return joined


def split_all(pieces: Mapping[str, ForeignTensors], ours: Mapping[str, Deferred]) -> dict[str, Deferred]:
    """Their tensors, each a part of ours; one that is several parts is read as often."""

    def split(piece: ForeignTensors, entry: Deferred, index: int) -> torch.Tensor:
        return piece.split(entry.read())[index].contiguous()

    found = {}
    for name, piece in pieces.items():
        entry = ours[name]
        parts = piece.split(torch.empty(entry.shape, device="meta"))
        for index, (their_name, part) in enumerate(zip(piece.theirs, parts, strict=True)):
            found[their_name] = Deferred(tuple(part.shape), entry.dtype, functools.partial(split, piece, entry, index))
    return found


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ValueError naming tensors that are missing, that nobody expects, or that have another shape."""
    problems = []
    for names, one, several in (
        ([name for name in expected if name not in found], "is missing", "are missing"),
        ([name for name in found if name not in expected], "has no place in this model", "have no place in this model"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{', '.join(names[:3])}{more} {one if len(names) == 1 else several}")
    problems += [
        f"{name} has shape {list(found[name])}, the model's is {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if problems:
        more = f" (and {len(problems) - 3} more like that)" if len(problems) > 3 else ""
        raise ValueError(f"{where}: {'; '.join(problems[:3])}{more}")
