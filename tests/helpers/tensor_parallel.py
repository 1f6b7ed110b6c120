"""What tests of tensor parallelism share: an axis of all ranks of the job, slices of full tensors, counted calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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


@functools.cache
def tp_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))


def local_gradients(model: torch.nn.Module, tp: MeshAxis | None = None) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient, as the optimizer sees it: summed over `tp`, or the model's, if partial."""
    partial = partial_parameters(model)
    copies = {
        name: SimpleNamespace(
            grad=None if p.grad is None else local(p.grad).clone() if name in partial else local(p.grad)
        )
        for name, p in model.named_parameters()
    }
    if partial:
        sum_partial_gradients_([copies[name] for name in copies if name in partial], tp or model.tp)
    return {name: copy.grad for name, copy in copies.items()}


def compare_slices(
    layer: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    y_grad: torch.Tensor,
    grads: dict[str, torch.Tensor],
    splits: dict[str, int],
    *arguments: Any,
    tp: MeshAxis,
    sequence_parallel: bool,
) -> None:
    """Compare this rank's part of a layer, its outputs, gradients and calls, with the whole one's in fp64 to 1e-11.

    Args:
        x: input of the whole one, with its gradient.
        grads: of the whole one's parameters, which are split along the dim in `splits` or on all ranks.
    """
    x_part, y_part, x_grad, upstream = (
        part(full.detach(), 0, tp) if sequence_parallel else full.detach().clone() for full in (x, y, x.grad, y_grad)
    )
    ours, forward = counted(tp, lambda: layer(x_part.requires_grad_(), *arguments))
    _, backward = counted(tp, lambda: ours.backward(upstream))
    exact: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(ours.detach(), y_part, **exact)
    torch.testing.assert_close(x_part.grad, x_grad, **exact)
    found = local_gradients(layer, tp)
    assert found.keys() == grads.keys()
    for name, grad in found.items():
        expected = part(grads[name], splits[name], tp) if name in splits else grads[name]
        torch.testing.assert_close(grad, expected, **exact, msg=lambda text, name=name: f"{name}: {text}")
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
