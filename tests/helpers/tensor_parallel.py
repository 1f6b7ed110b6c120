"""Helpers to compare tensor-parallel layers with unsharded ones.

They make an axis over all ranks, slice weights for a rank, and count collectives.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.training import CPU, GPT2_STYLE, LLAMA_STYLE, packed_documents
from torch.distributed.device_mesh import DeviceMesh

from megazpp.data.loader import MicroBatch
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.model.layer_parts import LayerSettings, SharedGenerator
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.initialize import distribute_parameters, initialize_parameters_
from megazpp.tensor_parallel.parameters import local, owned_parameters, partial_parameters, sum_partial_gradients_

VOCAB, SEQ = 101, 16
STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}  # the Llama style uses grouped-query attention
# Two mappings, for the forward and for the backward: number of calls of each collective, by the collective's name
Calls = tuple[Mapping[str, int], Mapping[str, int]]
# Arguments of `compare_slices`, by sequence parallelism, for a layer that contains a whole tensor-parallel region. Its
# input and output are split along the sequence with sequence parallelism, and complete without it
REGION: dict[bool, dict[str, Any]] = {
    False: {"calls": ({"all_reduce": 1}, {"all_reduce": 1})},
    True: {
        "x_dim": 0,
        "y_dim": 0,
        "calls": ({"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 2, "reduce_scatter": 1}),
    },
}


def tp_axis() -> MeshAxis:
    """Return a tensor-parallel axis over all ranks of this job, with its own counter of bytes.

    In a process without a job, the axis has one rank.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return MeshAxis("tp", wire="tp")
    return MeshAxis("tp", ranks=tuple(range(size)), rank=dist.get_rank(), group=dist.group.WORLD, wire="tp")


@functools.cache
def tp_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))


def part(full: torch.Tensor, dim: int | None, tp: MeshAxis) -> torch.Tensor:
    """Return a copy of this rank's slice of `full` along `dim`; if `dim` is None, a copy of the complete tensor."""
    mine = full if dim is None else full.chunk(tp.size, dim)[tp.rank]
    return mine.clone(memory_format=torch.contiguous_format)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def counted(tp: MeshAxis, action: Callable[..., Any], *args: Any) -> tuple[Any, Mapping[str, int]]:
    """Return the result of `action(*args)`, and the number of calls that it made of each collective on `tp`."""

    def calls() -> Counter[str]:
        return Counter({collective: traffic.calls for (_, _, collective), traffic in tp.counter.table().items()})

    before = calls()
    return action(*args), calls() - before


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """Yield a list to which every tensor is appended that autograd saves for backward inside the context."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


def build_gpt(config: GPTConfig, *, dropout_seed: int = 11, scalar_head: bool = False, **options: Any) -> GPTModel:
    """Build a GPT with tensor parallelism over all ranks of the job.

    The complete weights, of which each rank has a part, are equal in every call. `dropout_seed` seeds the dropout
    masks. `options` are keyword arguments of `LayerSettings`.
    """
    tp = tp_axis()
    seed_everything(dropout_seed, data_rank=0, tp_rank=tp.rank)
    shared = SharedGenerator(CPU, seed=dropout_seed, data_rank=0)
    settings = LayerSettings(tp=tp, generator=shared, **options)
    model = GPTModel(config, settings, vocab_size=VOCAB, scalar_head=scalar_head)
    if tp.size > 1:
        distribute_parameters(model, tp_mesh())
    initialize_parameters_(model, seed=7, draw_device=CPU)
    return model


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens [3, SEQ] and their labels [3, SEQ], which are the next tokens."""
    ids = torch.randint(VOCAB, (3, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def packed(seq: int = SEQ) -> MicroBatch:
    """Return a micro-batch with three rows of one to four documents each, some of which have a single token.

    The last document of a row may be cut off at the end of the row.
    """
    return packed_documents(VOCAB, seq, [(0, 0), (0, 5), (0, 6), (1, seq - 1), (2, 3), (2, 9)])


def losses_of(model: GPTModel, data: MicroBatch) -> torch.Tensor:
    return model(data.tokens, data.labels, position_ids=data.position_ids, document_starts=data.document_starts)


def local_gradients(model: torch.nn.Module, tp: MeshAxis | None = None) -> dict[str, torch.Tensor]:
    """Return this rank's slice of every gradient by name, as the optimizer sees it; None if there is no gradient.

    Each rank has only a partial sum of some gradients. This function sums such gradients over the axis `tp` (default:
    the model's axis).
    """
    partial = partial_parameters(model)
    grads = {name: None if p.grad is None else local(p.grad).clone() for name, p in model.named_parameters()}
    parts = [SimpleNamespace(grad=grad) for name, grad in grads.items() if name in partial]
    sum_partial_gradients_(parts, tp or model.tp)  # in place: each partial gradient becomes its sum over tp
    return grads


def layer_on(kind: Callable[..., torch.nn.Module], config: GPTConfig, *, sequence_parallel: bool) -> Callable[..., Any]:
    """Return the function that `compare_slices` calls to build a layer of class `kind` on a tensor-parallel axis."""

    def make(*, tp: MeshAxis) -> torch.nn.Module:
        return kind(config, LayerSettings(tp=tp, sequence_parallel=sequence_parallel), output_std=1.0)

    return make


def compare_slices(
    row: object,
    make: Callable[..., torch.nn.Module],
    whole: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
    x: torch.Tensor,
    *arguments: Any,
    x_dim: int | None = None,
    y_dim: int | None = None,
    calls: Calls = ({}, {}),
) -> torch.nn.Module:
    """Compare the slices of a layer on this rank with the unsharded layer in fp64: output and all gradients.

    The slices may differ by 1e-11 from the unsharded layer's. Return the layer with this rank's slices.

    Args:
        row: name of the test case for error messages.
        make: function that builds the layer on an axis `tp`; the layer's parameter specs say how its weights are split.
        whole: function that computes the unsharded output from x and all weights by name.
        x: unsharded input.
        arguments: further arguments of the layer.
        x_dim: dim along which the input is split over ranks; None if every rank gets all of it.
        y_dim: dim along which the output is split over ranks; None if every rank returns all of it.
        calls: expected number of each collective on tp, in forward and in backward, if there are several ranks.
    """
    tp, alone = tp_axis(), dict(make(tp=MeshAxis("tp")).named_parameters())
    layer = make(tp=tp).double()
    split = {name: spec.split for name, _, _, spec in owned_parameters(layer)}
    leaf = x.clone().requires_grad_()
    leaves = {name: draw(seed, *p.shape).requires_grad_() for seed, (name, p) in enumerate(alone.items(), start=1)}
    y = whole(leaf, leaves)
    y.backward(y_grad := draw(9, *y.shape))

    for name, parameter in layer.named_parameters():
        weight = part(leaves[name].detach(), split[name], tp)
        assert parameter.shape == weight.shape
        parameter.data = weight
    given = part(x, x_dim, tp).requires_grad_()
    ours, forward = counted(tp, layer, given, *arguments)
    _, backward = counted(tp, ours.backward, part(y_grad, y_dim, tp))
    exact: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
    assert_near((row, "y"), ours.detach(), part(y.detach(), y_dim, tp), **exact)
    assert_near((row, "x"), given.grad, part(leaf.grad, x_dim, tp), **exact)
    for name, grad in local_gradients(layer, tp).items():
        assert_near((row, name), grad, part(leaves[name].grad, split[name], tp), **exact)
    assert (forward, backward) == (calls if tp.size > 1 else ({}, {})), row
    return layer


def step(model: GPTModel, data: MicroBatch | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward on `data` (default: `sample()`), and return (losses, this rank's gradients by name)."""
    losses = model(*sample()) if data is None else losses_of(model, data)
    losses.mean().backward()
    return losses.detach(), local_gradients(model)


def assert_near(row: object, found: torch.Tensor, expected: torch.Tensor, **tolerances: Any) -> None:
    """Assert that two tensors are close as in `torch.testing.assert_close`; `row` names the case in the message."""
    torch.testing.assert_close(found, expected, **tolerances, msg=lambda text: f"{row}: {text}")


def assert_gradients_near(
    ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 1e-5
) -> None:
    """Assert that two dicts of gradients by name have the same names and nearly equal gradients.

    A difference may be `share` times the expected element plus `share` times the gradient's largest element.
    """
    assert list(ours) == list(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(ours[name], grad, rtol=share, atol=share * float(grad.abs().max()))
