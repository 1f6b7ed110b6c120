"""A model during a conversion: its tensors by our names, and the mapping from another format's tensors to ours.

A conversion handles one tensor at a time. All shapes and dtypes are checked before the first tensor is read. Each
tensor is then read, rearranged and written before the next one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megazpp.base.program import errors_as
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.schedule import TrainingProgress
from megazpp.tensor_parallel.parameters import model_state

WORDS, OUTPUT, HEAD = "embedding.word.weight", "output.weight", "scalar_head.weight"


class Deferred(NamedTuple):
    """A tensor that is read on demand.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        read: function that reads it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def held(tensor: torch.Tensor) -> Deferred:
    """Return a `Deferred` for a tensor in memory."""
    return Deferred(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def rows_of(entry: Deferred, first: int, last: int) -> Deferred:
    """Return the rows from `first` up to `last` of a tensor."""
    return Deferred((last - first, *entry.shape[1:]), entry.dtype, lambda: entry.read()[first:last])


class Model(NamedTuple):
    """A model during a conversion.

    Attributes:
        config: architecture of the model.
        rows: rows of the embedding.
        tensors: all tensors, by the names of `GPTModel`.
        seq_length: tokens of a training sample. 0 for a model from our checkpoint, whose metadata has this and the next
            values.
        tokenizer: flags of the tokenizer, whose files are on this machine; empty flags if there is none.
        progress: progress of the training.
        padded: True if rows beyond the tokenizer's vocabulary are padding.
        origin: Hugging Face folder with these weights, or None.
        score_pad: padding token of a reward model, whose score is at the last other token; None for the last token.
        notes: differences from the other program's model, for the user.
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
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which nearly all tensors share."""
        return self.tensors[WORDS].dtype

    def first_rows(self, rows: int) -> Model:
        """Return the model with the first `rows` rows of its embedding and output layer, without padding."""
        cut = {name: rows_of(self.tensors[name], 0, rows) for name in (WORDS, OUTPUT) if name in self.tensors}
        return self._replace(rows=rows, tensors={**self.tensors, **cut})


class ForeignTensors(NamedTuple):
    """The tensors of another format that correspond to one of ours, and the conversions between them.

    Attributes:
        theirs: names of the other format's tensors.
        join: function that builds our tensor from the other format's tensors, in the order of `theirs`.
        split: inverse of `join`; it also works on meta tensors, to find shapes.
        transposed: True if the other format stores matrices as [in, out].
    """

    theirs: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    transposed: bool = False


def model_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """Return a GPTConfig with these fields; a ValueError about invalid ones names their source `where`."""
    with errors_as(f"{where} describes no model", (ValueError, TypeError)):
        return GPTConfig(**values)


def model_shapes(
    config: GPTConfig, rows: int, where: str, *, num_tensors: int, scalar_head: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each tensor of a model.

    Args:
        config: architecture of the model.
        rows: rows of the embedding.
        where: file that describes the model, for messages.
        num_tensors: number of existing tensors; a model with more layers is refused before it is built.
        scalar_head: True for a model with a scalar head.
    Raises:
        ValueError: the settings describe no model.
    """
    if config.layers > num_tensors:
        raise ValueError(f"{where} describes a model of {config.layers} layers, but there are {num_tensors} tensors")
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    try:
        with torch.device("meta"):
            model = GPTModel(unpadded, vocab_size=rows, scalar_head=scalar_head)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # torch raises these for absurd sizes
        raise ValueError(f"{where} describes no model: {str(error).splitlines()[0]}") from error
    return {name: tuple(tensor.shape) for name, tensor in model_state(model).items()}


def checked_model(config: GPTConfig, tensors: Mapping[str, Deferred], where: str) -> Model:
    """Return a model of these tensors; raise ValueError that names their file `where` if they do not fit `config`."""
    if WORDS not in tensors:
        raise ValueError(f"{where} holds no word embeddings")
    rows = tensors[WORDS].shape[0]
    expected = model_shapes(config, rows, where, num_tensors=len(tensors), scalar_head=HEAD in tensors)
    check_tensors({name: entry.shape for name, entry in tensors.items()}, expected, where)
    return Model(config, rows, tensors)


def same(name: str) -> ForeignTensors:
    """Map one of our tensors to the same tensor with another name."""
    return ForeignTensors((name,), lambda parts: parts[0], lambda ours: [ours])


def transposed(name: str) -> ForeignTensors:
    """Map one of our matrices to a matrix that the other format stores as [in, out]."""
    return ForeignTensors((name,), lambda parts: parts[0].t(), lambda ours: [ours.t()], transposed=True)


def fuse_qkv(parts: Sequence[torch.Tensor], *, groups: int, head_size: int) -> torch.Tensor:
    """Fuse rows of queries, keys and values into our layout [group, (queries of the group, key, value), channel]."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, head_size, *rest) for part in parts], dim=1).flatten(0, 2)


def split_qkv(fused: torch.Tensor, *, groups: int, head_size: int) -> list[torch.Tensor]:
    """Undo `fuse_qkv`."""
    rows = fused.reshape(groups, -1, head_size, *fused.shape[1:])
    queries = rows.shape[1] - 2
    return [part.flatten(0, 2) for part in rows.split((queries, 1, 1), dim=1)]


def qkv_rows(names: Sequence[str], config: GPTConfig, *, transposed: bool = False) -> ForeignTensors:
    """Map our fused rows to queries, keys and values as three tensors, or concatenated in one.

    Args:
        names: names of the three tensors, or of the one.
        config: architecture of the model.
        transposed: True if the other format stores matrices as [in, out].
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
    """Map each of our tensors to the tensors of Hugging Face's model that hold it, by the names of modules.

    Args:
        config: architecture of the model.
        modules: our names to transformers' names, for modules outside the layers.
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
    """Return our tensors; each is assembled from the other format's tensors when it is read.

    Args:
        pieces: for each of our tensors, the other format's tensors that hold it.
        theirs: tensors of the other format.
        shapes: shapes of our tensors.
        where: file that holds `theirs`, for messages.
    Raises:
        ValueError: a tensor is missing, has the wrong shape, or does not belong to the model.
    """

    def join(piece: ForeignTensors, dtype: torch.dtype) -> torch.Tensor:
        return piece.join([theirs[name].read().to(dtype) for name in piece.theirs]).contiguous()

    parts = {ours: piece.split(torch.empty(shapes[ours], device="meta")) for ours, piece in pieces.items()}
    named = [pair for ours, piece in pieces.items() for pair in zip(piece.theirs, parts[ours], strict=True)]
    expected = {name: tuple(part.shape) for name, part in named}
    check_tensors({name: entry.shape for name, entry in theirs.items()}, expected, where)
    joined = {}
    for ours, piece in pieces.items():
        # the narrowest dtype that holds the values of all pieces without rounding
        dtype = functools.reduce(torch.promote_types, (theirs[name].dtype for name in piece.theirs))
        joined[ours] = Deferred(shapes[ours], dtype, functools.partial(join, piece, dtype))
    return joined


def split_all(pieces: Mapping[str, ForeignTensors], ours: Mapping[str, Deferred]) -> dict[str, Deferred]:
    """Return the other format's tensors; each is cut out of one of our tensors when it is read.

    A tensor of ours is read once if its parts are read in order.

    Raises:
        ValueError: the other format has no place for a tensor of ours.
    """

    last: list[tuple[Deferred, torch.Tensor]] = []  # the tensor of ours that was read last

    def split(piece: ForeignTensors, entry: Deferred, index: int) -> torch.Tensor:
        if not last or last[0][0] is not entry:
            last[:] = [(entry, entry.read())]
        parts = piece.split(last[0][1])
        if index == len(parts) - 1:
            last.clear()
        return parts[index].contiguous()

    if lost := sorted(ours.keys() - pieces.keys()):
        raise ValueError(f"the other format has no place for {', '.join(lost)}")
    found = {}
    for name, piece in pieces.items():
        entry = ours[name]
        parts = piece.split(torch.empty(entry.shape, device="meta"))
        for index, (their_name, part) in enumerate(zip(piece.theirs, parts, strict=True)):
            found[their_name] = Deferred(tuple(part.shape), entry.dtype, functools.partial(split, piece, entry, index))
    return found


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ValueError that names missing tensors, unexpected tensors, and tensors with the wrong shape.

    Args:
        found: shapes of the existing tensors.
        expected: shapes of the model's tensors.
        where: file that holds the tensors, for messages.
    """
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
