"""A model during a conversion, and the mapping between the tensors of another format and the tensors of `GPTModel`.

All shapes and dtypes are checked before the first tensor is read. The conversion then reads, rearranges and writes one
tensor after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megazpp.base.files import errors_as
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.optim.schedule import TrainingProgress
from megazpp.tensor_parallel.parameters import model_state

# Names of tensors of `GPTModel`: the embedding matrix, the output matrix, and the weight of a scalar head
WORDS, OUTPUT, HEAD = "embedding.word.weight", "output.weight", "scalar_head.weight"


class Deferred(NamedTuple):
    """A tensor of a model during a conversion, whose values are read on demand.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        read: function that reads the values and returns the tensor on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def held(tensor: torch.Tensor) -> Deferred:
    """Wrap a tensor in memory as a `Deferred`, the type of all tensors in a conversion. `read` returns `tensor`."""
    return Deferred(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def rows_of(entry: Deferred, first: int, last: int) -> Deferred:
    """Return the rows `first` to `last` - 1 of a tensor as a `Deferred`, which cuts them out when it is read."""
    return Deferred((last - first, *entry.shape[1:]), entry.dtype, lambda: entry.read()[first:last])


class Model(NamedTuple):
    """A model during a conversion, from any format, with its tensors by the names of `GPTModel`.

    For a model from a MegaZ++ checkpoint, only the first three attributes are set, because the checkpoint's metadata
    has the other values.

    Attributes:
        config: architecture of the model.
        rows: number of rows of the embedding matrix.
        tensors: all tensors of the model, by their names in `GPTModel`.
        seq_length: tokens of a training sample.
        tokenizer: flags that name the tokenizer's files on this machine; the flags' defaults if there are no files.
        progress: training progress of the model.
        padded: True if rows of the embedding matrix beyond the tokenizer's vocabulary are padding.
        origin: Hugging Face folder with these weights, which PEFT's files name as the base of adapters that are trained
            on this model. None for models from other formats. None also if the folder's family fuses matrices, as phi3
            does, and the family of an export does not: PEFT could not load the adapters on this folder.
        score_pad: id of the padding token of a reward model. The score of a text is the model's output at the last
            token that is not this one. None if the score is always the output at the last token.
        notes: lines for the log about differences from the model in the original program.
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
        """The dtype of the embedding matrix. Nearly all tensors of a model have the same dtype."""
        return self.tensors[WORDS].dtype

    def first_rows(self, rows: int) -> Model:
        """Return the model with only the first `rows` rows of its vocabulary matrices; the other rows are padding."""
        cut = {name: rows_of(self.tensors[name], 0, rows) for name in (WORDS, OUTPUT) if name in self.tensors}
        return self._replace(rows=rows, tensors={**self.tensors, **cut})


class ForeignTensors(NamedTuple):
    """The tensors of another format that correspond to one tensor of `GPTModel`, and the conversions between them.

    Attributes:
        theirs: names of the other format's tensors.
        join: function from the other format's tensors, in the order of `theirs`, to the tensor of `GPTModel`.
        split: inverse of `join`. It also works on meta tensors, to compute shapes.
        transposed: True if the other format stores matrices as [in, out]; `GPTModel` stores them as [out, in].
    """

    theirs: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    transposed: bool = False


def model_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """Return a GPTConfig with the fields `values`; raise ValueError if one is invalid. The message begins with `where`.

    `where` is the file that describes the model.
    """
    with errors_as(f"{where} describes no model", (ValueError, TypeError)):
        return GPTConfig(**values)


def model_shapes(
    config: GPTConfig, rows: int, where: str, *, num_tensors: int, scalar_head: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of each tensor of a `GPTModel`, by name.

    Args:
        config: architecture of the model.
        rows: number of rows of the embedding matrix.
        where: file that describes the model, for messages.
        num_tensors: number of tensors in the model's files. A description with more layers than tensors is damaged, and
            building its layers could take too long.
        scalar_head: True for a model with a scalar head.
    Raises:
        ValueError: no model can be built from `config`, or it has more layers than there are tensors.
    """
    if config.layers > num_tensors:
        raise ValueError(
            f"{where} describes a model of {config.layers} layers, but its files have only {num_tensors} tensors: copy "
            "them again"
        )
    unpadded = dataclasses.replace(config, make_vocab_size_divisible_by=1)
    try:
        with torch.device("meta"):
            model = GPTModel(unpadded, vocab_size=rows, scalar_head=scalar_head)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:  # raised for impossible sizes
        raise ValueError(f"{where} describes no model that can be built: {str(error).splitlines()[0]}") from error
    return {name: tuple(tensor.shape) for name, tensor in model_state(model).items()}


def checked_model(config: GPTConfig, tensors: Mapping[str, Deferred], where: str) -> Model:
    """Return a `Model` with these tensors, after a check that they are exactly the tensors of the architecture.

    Args:
        config: architecture of the model.
        tensors: tensors by their names in `GPTModel`.
        where: file with the tensors, for messages.
    Raises:
        ValueError: a tensor is missing, unexpected, or of the wrong shape.
    """
    if WORDS not in tensors:
        raise ValueError(
            f"{where} contains no word embeddings, so the model is not complete: name another folder or file"
        )
    rows = tensors[WORDS].shape[0]
    expected = model_shapes(config, rows, where, num_tensors=len(tensors), scalar_head=HEAD in tensors)
    check_tensors({name: entry.shape for name, entry in tensors.items()}, expected, where)
    return Model(config, rows, tensors)


def same(name: str) -> ForeignTensors:
    """Return the `ForeignTensors` for a tensor of `GPTModel` that is equal to the other format's tensor `name`."""
    return ForeignTensors((name,), lambda parts: parts[0], lambda ours: [ours])


def transposed(name: str) -> ForeignTensors:
    """Return the `ForeignTensors` for a matrix of `GPTModel` whose transpose is the other format's tensor `name`."""
    return ForeignTensors((name,), lambda parts: parts[0].t(), lambda ours: [ours.t()], transposed=True)


def fuse_qkv(parts: Sequence[torch.Tensor], *, groups: int, head_size: int) -> torch.Tensor:
    """Fuse the matrices (or biases) of queries, keys and values into the single matrix (or bias) of `GPTModel`.

    The rows of the result have the order [group, (queries of the group, key, value), channel]. A group is a key-value
    head with the query heads that use it.

    Args:
        parts: the three matrices [heads * head_size, inputs], or the three biases [heads * head_size].
        groups: number of groups.
        head_size: channels of a head.
    """
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, head_size, *rest) for part in parts], dim=1).flatten(0, 2)


def split_qkv(fused: torch.Tensor, *, groups: int, head_size: int) -> list[torch.Tensor]:
    """Split a fused matrix or bias of `GPTModel` into the parts for queries, keys and values; inverse of `fuse_qkv`."""
    rows = fused.reshape(groups, -1, head_size, *fused.shape[1:])
    queries = rows.shape[1] - 2
    return [part.flatten(0, 2) for part in rows.split((queries, 1, 1), dim=1)]


def qkv_rows(names: Sequence[str], config: GPTConfig, *, transposed: bool = False) -> ForeignTensors:
    """Return the `ForeignTensors` for a layer's fused matrix (or bias) of queries, keys and values in `GPTModel`.

    Args:
        names: names of the other format's three tensors for queries, keys and values, or the name of one tensor that
            concatenates all queries, all keys and all values.
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
    """Describe from which tensors of a Hugging Face model each tensor of `GPTModel` is made, and how.

    The result has a `ForeignTensors` for the name of each tensor of `GPTModel`: names in the Hugging Face model, and
    functions that convert in both directions. The name of a tensor is the name of its module with ".weight" or ".bias".

    Args:
        config: architecture of the model.
        modules: name in transformers of each module of `GPTModel` outside of the layers.
        layer_modules: name in transformers of each module of `GPTModel` in a layer, except queries, keys and values.
        qkv: names in transformers of the modules in a layer for queries, keys and values: three names, or one.
        layers: prefix of the names of layers in transformers.
        is_transposed: True if transformers stores the matrices of linear layers as [in, out].
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
    """Return the tensors of `GPTModel`, which are joined from another format's tensors when they are read.

    Args:
        pieces: for each tensor of `GPTModel`, the mapping to tensors of the other format.
        theirs: tensors of the other format, by name.
        shapes: shape of each tensor of `GPTModel`.
        where: file with the other format's tensors, for messages.
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
        # The joined tensor has the narrowest dtype that represents the other format's values without rounding.
        dtype = functools.reduce(torch.promote_types, (theirs[name].dtype for name in piece.theirs))
        joined[ours] = Deferred(shapes[ours], dtype, functools.partial(join, piece, dtype))
    return joined


def split_all(pieces: Mapping[str, ForeignTensors], ours: Mapping[str, Deferred]) -> dict[str, Deferred]:
    """Return the tensors of another format, which are cut out of tensors of `GPTModel` when they are read.

    If the results are read in their order, each tensor of `GPTModel` is read only once.

    Args:
        pieces: for each tensor of `GPTModel`, the mapping to tensors of the other format.
        ours: tensors of `GPTModel`, by name.
    Raises:
        ValueError: the other format has no counterpart of a tensor in `ours`.
    """

    last: list[tuple[Deferred, torch.Tensor]] = []  # cache with the tensor of `GPTModel` that was read last

    def split(piece: ForeignTensors, entry: Deferred, index: int) -> torch.Tensor:
        if not last or last[0][0] is not entry:
            last[:] = [(entry, entry.read())]
        parts = piece.split(last[0][1])
        if index == len(parts) - 1:
            last.clear()
        return parts[index].contiguous()

    if lost := sorted(ours.keys() - pieces.keys()):
        raise ValueError(f"the target format has no tensors that correspond to {', '.join(lost)} of this model")
    found = {}
    for name, piece in pieces.items():
        # Compute the shapes of the parts from a meta tensor, without reading the values
        entry = ours[name]
        parts = piece.split(torch.empty(entry.shape, device="meta"))
        for index, (their_name, part) in enumerate(zip(piece.theirs, parts, strict=True)):
            found[their_name] = Deferred(tuple(part.shape), entry.dtype, functools.partial(split, piece, entry, index))
    return found


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ValueError if a model's files lack tensors, have unexpected ones, or have tensors of the wrong shape.

    The message has up to three of these problems.

    Args:
        found: shape of each tensor in the files, by name.
        expected: shape of each tensor of the model, by name.
        where: file with the tensors, for the message.
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
        f"{name} has shape {list(found[name])}, but the model's is {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if problems:
        more = f" (and {len(problems) - 3} more like that)" if len(problems) > 3 else ""
        raise ValueError(f"{where}: {'; '.join(problems[:3])}{more}")
