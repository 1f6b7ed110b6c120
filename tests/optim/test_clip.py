"""Test global norms and gradient clipping: every element counts once in any layout, and NaN or Inf stays NaN or Inf."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.ranks import ranks
from helpers.sharded import one_process_model, sharded_model
from helpers.tensor_parallel import tp_axis
from helpers.training import CLIP, CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_step
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megazpp.model.gpt import GPTModel
from megazpp.optim import clip
from megazpp.optim.clip import clip_divisor, divide_grads_, global_grad_norm
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.tensor_parallel.parameters import existing_rows
from megazpp.training.metrics import StepRecord

ONE = MeshAxis("tp"), MeshAxis("shard")


def compare_with_one_process(tp: int, replicas: int) -> None:
    """Compare a sharded model's norms with one process's norms; fp32 sums in another order agree to 1e-6."""
    whole, (model, dims) = one_process_model(), sharded_model(tp, replicas)
    for parameter in whole.parameters():
        parameter.grad = parameter.detach() / 2.0
    expected, axes = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item(), (dims.tp, dims.shard)
    named = list(model.named_parameters())
    norm, halved = global_grad_norm(named, *axes), global_grad_norm(named, *axes, divisor=2.0)
    assert norm.value.dtype == torch.float32
    assert norm.value.item() == pytest.approx(2 * expected, rel=1e-6)
    assert halved.value.item() == pytest.approx(expected, rel=1e-6)
    of_each = {name: p.grad.norm().item() for name, p in whole.named_parameters()}
    assert clip.grad_norms(halved, *axes) == pytest.approx(of_each, rel=1e-6)
    assert clip.global_parameter_norm(named, *axes, rows={}, device=CPU) == norm.value
    zeros = sum((p == 0).sum().item() for p in whole.parameters())
    assert clip.count_zero_grads(named, *axes, rows={}).item() == zeros
    nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    divide_grads_([p for _, p in named], clip_divisor(halved.value, 1.0, divisor=2.0))
    for name, parameter in whole.named_parameters():
        clipped = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(clipped, parameter.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("tp", "replicas"), [(2, 1), (4, 1), (1, 2)])
def test_four_ranks_measure_and_clip_like_one_process(tp, replicas):
    ranks(4).run(compare_with_one_process, tp, replicas)


def measure_padded(case: Case) -> tuple[StepRecord, float, float]:
    """Take a step of a model whose vocabulary padding is not zero.

    Return the step's record with the number of zero gradients, the parameter norm, and the gradient norm without
    padding rows.
    """
    step, dims = build_step(case)
    # fill the padding rows with 3.0, as weights from a converted checkpoint may have nonzero padding
    for name, exist in existing_rows(step.model).items():
        parameter = step.model.get_parameter(name).detach()
        if not isinstance(parameter, DTensor):
            parameter[exist:] = 3.0
            continue
        full = parameter.full_tensor()
        full[exist:] = 3.0
        placed = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(placed.to_local())
    named, rows = list(step.model.named_parameters()), existing_rows(step.model)
    norm = clip.global_parameter_norm(named, dims.tp, dims.shard, rows=rows, device=CPU).item()
    step.count_zeros, squares = True, 0.0
    step.optimizer.zero_grad = lambda set_to_none: None
    record = step(case.batches(0, dims), learning_rate=0.0, weight_decay=0.0)
    for name, parameter in named:
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        squares += grad[: rows.get(name)].double().square().sum().item()
    return record, norm, math.sqrt(squares)


@pytest.mark.slow
@pytest.mark.parametrize("style", [GPT2_STYLE, LLAMA_STYLE], ids=["tied", "untied"])
def test_vocabulary_padding_enters_no_statistic(style):
    """Check that padding rows of the vocabulary enter neither norms nor the number of zero gradients.

    The matrix of 101 tokens has 256 rows. Of four ranks, one holds only tokens, one holds tokens and padding, and two
    hold only padding.
    """
    case = Case(model=replace(style, make_vocab_size_divisible_by=128), steps=1)
    plain = GPTModel(replace(style, make_vocab_size_divisible_by=1), vocab_size=101)
    initialize_parameters_(plain, seed=case.seed, draw_device=CPU)
    expected_norm = math.sqrt(sum(p.double().square().sum().item() for p in plain.parameters()))
    batch = case.batch(0, 0, case.global_batch)
    losses = plain(batch.tokens, batch.labels, position_ids=batch.position_ids)
    ((losses * batch.loss_mask).sum() / batch.loss_mask.sum()).backward()
    grad_norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in plain.parameters()))
    zeros = sum((p.grad == 0).sum().item() for p in plain.parameters())
    for world_size, tp in ((2, 2), (4, 2)):
        for record, norm, clipped in ranks(world_size).run(measure_padded, replace(case, tp=tp)):
            assert record.num_zeros == zeros, (world_size, tp)
            assert norm == pytest.approx(expected_norm, rel=1e-6)
            assert record.grad_norm == pytest.approx(grad_norm, rel=1e-5)
            assert clipped == pytest.approx(min(CLIP, grad_norm), rel=1e-4)


def measure_what_is_wrong() -> None:
    """Check that NaN or Inf in one element on one rank reaches the global norm on all ranks.

    Also check that a norm over the wrong shard axis is an error.
    """
    model, dims = sharded_model(2, 1)
    for bad, norm in ((-math.inf, math.inf), (math.nan, math.nan)):
        if dims.tp.rank == dims.shard.rank == 1:
            model.row.bias.grad.to_local()[-1] = bad
        found = global_grad_norm(model.named_parameters(), dims.tp, dims.shard).value.item()
        assert found == pytest.approx(norm, nan_ok=True)
    with pytest.raises(AssertionError, match="split over"):
        global_grad_norm(model.named_parameters(), dims.tp, MeshAxis("data"))


def test_nan_reaches_every_rank_and_unsummed_axis_is_an_error():
    ranks(4).run(measure_what_is_wrong)


def measure_a_plain_tensor() -> None:
    """Check that a plain tensor (no DTensor), which all ranks hold, counts once in the global norm.

    First all ranks of the job are on the tp axis, and then all of them are on the shard axis.
    """
    parameter, tp = nn.Parameter(torch.zeros(9)), tp_axis()
    parameter.grad = torch.ones(9)
    shard = MeshAxis("shard", ranks=tp.ranks, rank=tp.rank, group=tp.group, wire="cross")
    for axes in ((tp, ONE[1]), (ONE[0], shard)):
        assert global_grad_norm([("p", parameter)], *axes).value.item() == 3.0


def test_plain_tensor_counts_once_on_either_axis():
    ranks(2).run(measure_a_plain_tensor)


def norm_of(*grads: torch.Tensor) -> float:
    named = [(str(i), nn.Parameter(torch.zeros_like(grad))) for i, grad in enumerate(grads)]
    for (_, parameter), grad in zip(named, grads, strict=True):
        parameter.grad = grad
    return global_grad_norm(named, *ONE).value.item()


def test_sums_are_exact_in_one_process():
    half = torch.full((100_000,), 0.5, dtype=torch.bfloat16)
    # squares of bf16 numbers are summed in fp32, which bf16 could not represent
    assert norm_of(half) == pytest.approx(0.5 * math.sqrt(100_000), rel=1e-6)
    large = torch.full((1,), 3e19)
    # the squares of these numbers overflow fp32, but the norm is finite
    assert norm_of(large, large) == pytest.approx(3e19 * math.sqrt(2))
    model = nn.Linear(63, 5)
    expected = nn.utils.parameters_to_vector(model.parameters()).norm().item()
    assert clip.global_parameter_norm(model.named_parameters(), *ONE, rows={}, device=CPU).item() == pytest.approx(
        expected, rel=1e-6
    )


def test_norm_without_gradients_is_zero():
    model = nn.Linear(3, 2)
    assert global_grad_norm(model.named_parameters(), *ONE).value.item() == 0.0
    assert clip.count_zero_grads(model.named_parameters(), *ONE, rows={}).item() == 0.0
    divide_grads_(model.parameters(), clip_divisor(torch.tensor(0.0), 1.0))
    assert model.weight.grad is None


def test_clipping_factor_equals_megatrons():
    for norm, max_norm, divisor, factor in (
        (5.0, 1.0, 1.0, 1.0 / (5.0 + 1e-6)),
        (0.5, 1.0, 1.0, 1.0),
        (5.0, 0.0, 4.0, 0.25),
        (5.0, 2.5, 4.0, 2.5 / (5.0 + 1e-6) / 4.0),
        (1e-4, 1e-5, 1.0, 1 / 10.1),  # the norm is so small that the 1e-6 that is added to it changes the factor
        (math.nan, 1.0, 1.0, math.nan),
    ):
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.tensor([1.0, -2.0, 4.0])
        divide_grads_([parameter], clip_divisor(torch.tensor(norm), max_norm, divisor=divisor))
        wanted = torch.tensor([1.0, -2.0, 4.0]) * factor
        torch.testing.assert_close(parameter.grad, wanted, rtol=3e-7, atol=0, equal_nan=True)
