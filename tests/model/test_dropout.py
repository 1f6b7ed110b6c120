"""Test dropout under tensor parallelism.

Masks are equal where tp ranks hold equal activations, and different elsewhere.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import CPU, build_gpt, draw, sample, step
from helpers.training import GPT2_STYLE, Case, build_on_ranks

from megazpp.model.config import GPTConfig
from megazpp.model.layer_parts import Dropout, SharedGenerator
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.parameters import local

BOTH = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.25, attention_dropout=0.25)
HIDDEN_ONLY = dataclasses.replace(BOTH, attention_dropout=0.0)


@pytest.mark.parametrize(("rate", "shared"), [(0.1, False), (0.5, True)])
def test_dropout_zeroes_a_share_and_scales_the_rest(rate, shared):
    """Check the fraction of zeros within 5 standard errors for 40,000 elements.

    The gradient must have the same mask and factor as the output.
    """
    torch.manual_seed(3)
    dropout = Dropout(rate, SharedGenerator(CPU, seed=1, data_rank=0) if shared else None)
    x = torch.ones(40, 1000, requires_grad=True)
    y = dropout(x)
    zeros = y == 0.0
    assert zeros.float().mean().item() == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 40_000))
    torch.testing.assert_close(y[~zeros], torch.full_like(y[~zeros], 1 / (1 - rate)), rtol=1e-6, atol=0)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert not torch.equal(dropout(x) == 0.0, zeros)  # the next call draws another mask
    assert dropout.eval()(x) is x or torch.equal(dropout(x), x)


def test_dropout_at_rate_zero_samples_nothing_and_keeps_bf16():
    generator = SharedGenerator(CPU, seed=1, data_rank=0)
    x, state, default = torch.ones(100), generator.generator.get_state(), torch.get_rng_state()
    assert all(torch.equal(Dropout(0.0, shared)(x), x) for shared in (generator, None))
    assert torch.equal(generator.generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), default)
    y = Dropout(0.5, generator)(x.bfloat16())
    assert (y.dtype, set(y.tolist())) == (torch.bfloat16, {0.0, 2.0})


def test_generators_of_a_job_start_differently():
    """Check that all random generators of a job start with different numbers, for 3 adjacent seeds.

    Each of 4 data ranks has one generator that its tp ranks share, and each of 4 x 4 ranks has torch's default
    generator.
    """
    starts = []
    for seed in (1234, 1235, 1236):
        for data_rank in range(4):
            shared = SharedGenerator(CPU, seed=seed, data_rank=data_rank).generator
            starts.append(tuple(torch.rand(4, generator=shared).tolist()))
            for tp_rank in range(4):
                seed_everything(seed, data_rank=data_rank, tp_rank=tp_rank)
                starts.append(tuple(torch.rand(4).tolist()))
    assert len(set(starts)) == len(starts) == 3 * 4 * 5


def hidden_masks(sequence_parallel: bool) -> list[torch.Tensor]:
    """Return this rank's five dropout masks of one forward.

    One is for the embedding's output, and two in each of two layers are for the outputs of attention and MLP.
    """
    gpt, masks = build_gpt(BOTH, sequence_parallel=sequence_parallel), list[torch.Tensor]()
    for dropout in (module for module in gpt.modules() if isinstance(module, Dropout)):
        dropout.register_forward_hook(lambda module, args, output: masks.append(output == 0.0))
    gpt(*sample())
    return masks


def test_tp_masks_agree_on_the_residual_stream_and_differ_on_slices():
    """Compare masks of tp ranks. At rate 0.25, independent masks agree on 0.625 of their elements.

    With 240 elements per slice, 0.16 is 5 standard errors of 0.031.
    """
    whole, slices = (ranks(4).run(hidden_masks, sequence_parallel) for sequence_parallel in (False, True))
    for other in whole:
        assert all(map(torch.equal, other, whole[0]))
    for masks, count in (whole[0], 5), ([*itertools.chain(*slices)], 4 * 5):
        assert len(masks) == count
        assert torch.cat(masks).float().mean().item() == pytest.approx(0.25, abs=5 * math.sqrt(0.1875 / (count * 240)))
        for one, other in itertools.combinations(masks, 2):
            assert (one == other).float().mean().item() == pytest.approx(0.625, abs=0.16)


def contexts_of_equal_heads() -> list[torch.Tensor]:
    """Return what attention passes to its output projection: once in evaluation, and twice in training.

    All ranks have equal weights, so that only dropout masks can make ranks differ.
    """
    gpt, seen = build_gpt(dataclasses.replace(BOTH, num_layers=1, hidden_dropout=0.0)), list[torch.Tensor]()
    qkv = local(gpt.layers[0].attention.qkv.weight.detach())
    qkv.copy_(draw(2, *qkv.shape))
    gpt.layers[0].attention.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    for training in (False, True, True):
        gpt.train(training)(*sample())
    return seen


def test_attention_dropout_differs_over_tp_ranks():
    """Check that attention dropout differs between tp ranks, which hold different heads.

    The weights are equal on all ranks here, so only the masks can differ.
    """
    (evaluated, trained, again), (evaluated_1, trained_1, _) = ranks(2).run(contexts_of_equal_heads)
    assert torch.equal(evaluated, evaluated_1)
    for other in (trained_1, again, evaluated):
        assert not torch.equal(trained, other)


def two_forwards(model: GPTConfig, sequence_parallel: bool, seed: int) -> dict[str, torch.Tensor]:
    """Run two training forwards, a backward of the first, and an evaluation, which draws no dropout mask.

    Return the losses under "first", "second" and "eval", and the gradients by parameter name.
    """
    gpt = build_gpt(model, sequence_parallel=sequence_parallel, dropout_seed=seed)
    first, gradients = step(gpt)
    second, state = gpt(*sample()).detach(), torch.get_rng_state()
    evaluated = gpt.eval()(*sample()).detach()
    assert torch.equal(state, torch.get_rng_state())
    return {"first": first, "second": second, "eval": evaluated, **gradients}


def compare_seeds(model: GPTConfig, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Compare training forwards with the same dropout seed, with another seed, and without dropout.

    Return the losses and gradients of the first run.
    """
    none = dataclasses.replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    ours, same, other, plain = (
        two_forwards(config, sequence_parallel, seed)
        for config, seed in ((model, 1), (model, 1), (model, 2), (none, 1))
    )
    torch.testing.assert_close(same, ours, rtol=0, atol=0)
    assert not torch.equal(ours["first"], other["first"])
    assert not torch.equal(ours["first"], ours["second"])
    assert torch.equal(ours["eval"], other["eval"])
    assert torch.equal(ours["eval"], plain["first"])
    return ours


@pytest.mark.parametrize(("size", "sequence_parallel", "model"), [(1, False, HIDDEN_ONLY), (2, True, BOTH)])
def test_dropout_depends_on_the_seed_and_is_off_in_evaluation(size, sequence_parallel, model):
    """Compare losses of several seeds on each rank, and check that losses are equal on all tp ranks.

    Gradients of replicated parameters must be equal on all tp ranks too; otherwise these parameters would diverge.
    """
    first, *others = ranks(size).run(compare_seeds, model, sequence_parallel)
    agreed = ["first", "second", "eval", *(name for name in first if name.endswith(("fc2.bias", "norm.weight")))]
    assert len(agreed) > 6
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in agreed)


def loss_of_the_same_samples(case: Case) -> tuple[int, list[list[float]]]:
    """Run the samples of data rank 0 on every data rank; return this rank's data rank and the losses.

    Only dropout masks can make data ranks differ.
    """
    model, _, dims = build_on_ranks(case)
    data = case.batch(0, 0, 4)
    return dims.data_rank, model(data.tokens, data.labels).tolist()


def test_data_ranks_sample_different_masks():
    results = ranks(4).run(loss_of_the_same_samples, Case(model=HIDDEN_ONLY, tp=2))
    for (one, loss), (other, loss_there) in itertools.combinations(results, 2):
        # losses are equal exactly if two ranks have the same data rank (tp ranks share masks)
        assert (loss == loss_there) == (one == other)
    assert {data_rank for data_rank, _ in results} == {0, 1}
