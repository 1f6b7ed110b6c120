"""What tests of tensor parallelism share: an axis of all ranks of the job, slices of full tensors, counted calls."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.training import GPT2_STYLE, LLAMA_STYLE, packed_documents
from torch.distributed.device_mesh import DeviceMesh

from megazpp.data.loader import MicroBatch
from megazpp.model.config import GPTConfig
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.layers import Product
from megazpp.tensor_parallel.parameters import (
    distribute_parameters,
    initialize_parameters_,
    local,
    partial_parameters,
    sum_partial_gradients_,
)

CPU = torch.device("cpu")
VOCAB, SEQ = 101, 16
STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}  # llama's heads are grouped


def tp_axis() -> MeshAxis:
    """A tp axis of all ranks of this job (of one rank where there is no job), with a counter of its own."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return MeshAxis("tp", wire="tp")
    return MeshAxis("tp", ranks=tuple(range(size)), rank=dist.get_rank(), group=dist.group.WORLD, wire="tp")


def part(full: torch.Tensor, dim: int, tp: MeshAxis) -> torch.Tensor:
    """This rank's slice of `full` along `dim`, a copy."""
    return full.chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def counted(tp: MeshAxis, action: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The result of `action` and how often it called each collective on `tp`."""
    before = tp.counter.table()
    result = action()
    after = tp.counter.table()
    calls = {key[2]: traffic.calls - (before[key].calls if key in before else 0) for key, traffic in after.items()}
    return result, {collective: count for collective, count in calls.items() if count}


def build_gpt(
    config: GPTConfig,
    tp: MeshAxis,
    *,
    vocab_size: int,
    sequence_parallel: bool = False,
    seed: int = 7,
    dropout_seed: int = 11,
    data_rank: int = 0,
    product: Product | None = None,
) -> GPTModel:
    """An unsharded GPT on `tp`; weights follow from `seed`, dropout masks from `dropout_seed`."""
    seed_everything(dropout_seed, data_rank=data_rank, tp_rank=tp.rank)
    shared = SharedGenerator(CPU, seed=dropout_seed, data_rank=data_rank)
    model = GPTModel(
        config,
        vocab_size=vocab_size,
        tp=tp,
        sequence_parallel=sequence_parallel,
        shared_generator=shared,
        product=product,
    )
    if tp.size > 1:
        distribute_parameters(model, tp_mesh())
    initialize_parameters_(model, seed=seed, draw_device=CPU)
    return model


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [3, 16] each."""
    ids = torch.randint(VOCAB, (3, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def packed(seq: int = SEQ) -> MicroBatch:
    """Rows of one to four documents, some of a single token; a row's last one may be cut."""
    return packed_documents(VOCAB, seq, [(0, 0), (0, 5), (0, 6), (1, seq - 1), (2, 3), (2, 9)])


def losses_of(model: GPTModel, data: MicroBatch) -> torch.Tensor:
    return model(data.tokens, data.labels, position_ids=data.position_ids, document_starts=data.document_starts)


@functools.cache
def tp_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))


def local_gradients(model: torch.nn.Module, tp: MeshAxis | None = None) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient, as the optimizer sees it: summed over `tp`, or the model's, if partial."""
    partial = partial_parameters(model)
    grads = {name: None if p.grad is None else local(p.grad).clone() for name, p in model.named_parameters()}
    if partial:
        parts = [SimpleNamespace(grad=grad) for name, grad in grads.items() if name in partial]
        sum_partial_gradients_(parts, tp or model.tp)  # in place
    return grads


def compare_slices(
    layer: torch.nn.Module,
    whole: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    splits: dict[str, int],
    *arguments: Any,
    tp: MeshAxis,
    sequence_parallel: bool,
    row: object,
) -> None:
    """Compare this rank's part of a layer, its outputs, gradients and calls, with the whole one's in fp64 to 1e-11.

    Args:
        whole: computes the whole one of x and its weights, which the layer is given too.
        splits: the dim along which a weight is split; others are on all ranks.
        arguments: of the layer, behind x.
    """
    leaf, leaves = x.clone().requires_grad_(), {name: w.clone().requires_grad_() for name, w in weights.items()}
    y = whole(leaf, leaves)
    y_grad = draw(9, *y.shape)
    y.backward(y_grad)

    def slice_of(name: str, full: torch.Tensor) -> torch.Tensor:
        return part(full, splits[name], tp) if name in splits else full

    assert weights.keys() == dict(layer.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            assert parameter.shape == slice_of(name, weights[name]).shape
            parameter.copy_(slice_of(name, weights[name]))
    x_part, y_part, x_grad, upstream = (
        part(full.detach(), 0, tp) if sequence_parallel else full.detach().clone() for full in (x, y, leaf.grad, y_grad)
    )
    ours, forward = counted(tp, lambda: layer(x_part.requires_grad_(), *arguments))
    _, backward = counted(tp, lambda: ours.backward(upstream))
    exact: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
    assert_near(row, ours.detach(), y_part, **exact)
    assert_near(row, x_part.grad, x_grad, **exact)
    for name, grad in local_gradients(layer, tp).items():
        assert_near((row, name), grad, slice_of(name, leaves[name].grad), **exact)
    if tp.size == 1 or not splits:
        assert (forward, backward) == ({}, {})
    elif sequence_parallel:
        assert forward == {"all_gather": 1, "reduce_scatter": 1}
        assert backward == {"all_gather": 2, "reduce_scatter": 1}
    else:
        assert forward == backward == {"all_reduce": 1}


def assert_near(row: object, found: torch.Tensor, expected: torch.Tensor, **tolerances: Any) -> None:
    """`torch.testing.assert_close`, naming what is compared."""
    torch.testing.assert_close(found, expected, **tolerances, msg=lambda text: f"{row}: {text}")


def assert_gradients_near(
    ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 1e-5
) -> None:
    """Compare gradients of the same names to `share`, relative and of the largest element of each."""
    assert list(ours) == list(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(ours[name], grad, rtol=share, atol=share * float(grad.abs().max()))
