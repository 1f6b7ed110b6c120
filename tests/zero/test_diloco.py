"""Test DiLoCo: replica groups on several ranks must match a simulator that runs all of them in one process."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import diloco_reference
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import chosen
from helpers.training import CLIP, CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_diloco, build_step, diloco_plan

from megazpp.diloco.config import DilocoConfig, DilocoPlan, plan_diloco
from megazpp.diloco.outer import ReplicaGroups, send_fragment
from megazpp.diloco.rows import outer_step_
from megazpp.kernels.formats import BlockFormat
from megazpp.model.gpt import GPTModel
from megazpp.optim.build import build_optimizer
from megazpp.optim.config import OptimizerConfig
from megazpp.optim.optimizer import set_rates_
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.training.step import TrainStep
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.wire import plan_message

BF16 = PrecisionConfig(bf16=True)
WIDE = dataclasses.replace(GPT2_STYLE, hidden_size=64, ffn_hidden_size=256)
ADAM = OptimizerConfig(adam_eps=1e-4)  # with the default eps, Adam would amplify the rounding of gradients near 0

Weights = dict[str, torch.Tensor]


def exact(steps: int, **flags: Any) -> DilocoConfig:
    """Return DiLoCo's flags for a synchronization every `steps` steps without quantization."""
    given = {f"diloco_{name}": value for name, value in flags.items()}
    return DilocoConfig(diloco_steps=steps, diloco_weight_bits=16, diloco_gradient_bits=16, **given)


def train_replica_groups(case: Case) -> Iterator[tuple[TrainStep, ReplicaGroups, float]]:
    """Train with DiLoCo, and yield (training step, replica groups, loss) after each step."""
    step, dims = build_step(case)
    step.optimizer = build_optimizer(step.model, ADAM)
    replica_groups = build_diloco(case, step, dims)
    size = case.global_batch // dims.data_size
    for index in range(case.steps):
        batch = case.batch(index, dims.data_rank * size, size)
        loss = step([batch], learning_rate=case.learning_rate, weight_decay=ADAM.weight_decay).loss
        with dims.counter.paused():
            replica_groups.count(dims.sum_over_data_(batch.loss_mask.sum(dtype=torch.float64)))
        if index + 1 == case.steps:
            replica_groups.finish()
        else:
            replica_groups.after_step(index + 1)
        step.sharding.reshard()
        yield step, replica_groups, loss


def full(tensors: Weights) -> Weights:
    return {name: tensor.detach().full_tensor().clone() for name, tensor in tensors.items()}


class Seen(NamedTuple):
    common: list[Weights]  # R, the groups' common copy of the outer weights, after each step
    outer: Weights  # outer weights after the last step
    inner: Weights  # this group's own weights after the last step
    losses: list[float]  # loss of each step
    feeds_back: bool  # True if an error feedback of this rank is not zero after the last step
    fragments: list[list[str]]  # parameter names of each fragment


def seen_on_replica_groups(case: Case) -> Seen:
    common, losses = [], []
    for step, groups, loss in train_replica_groups(case):
        common.append(full(groups.common()))
        losses.append(loss)
        model = step.model
    outer, inner = full(groups.weights()), full(dict(model.named_parameters()))
    feeds_back = any(x.any() for x in groups.error_feedback().values())
    fragments = [[p.name for u in units for p in u.unit.parameters] for units in groups.fragments]
    return Seen(common, outer, inner, losses, feeds_back, fragments)


def first_model(case: Case) -> GPTModel:
    model = GPTModel(case.model, vocab_size=case.vocab_size)
    initialize_parameters_(model, seed=case.seed, draw_device=CPU)
    return model


def simulate(case: Case, fragments: list[list[str]]) -> tuple[list[Weights], list[list[float]]]:
    """Simulate replica groups in one process with helpers/diloco_reference.py.

    Returns:
        (outer weights by name after each step, losses of each group's steps).
    """
    first, count = first_model(case), case.num_replica_groups
    models = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
    optimizers = [build_optimizer(model, ADAM) for model in models]
    replica_groups = diloco_reference.ReplicaGroups(models, fragments, diloco_plan(case))
    size, common, losses = case.global_batch // count, [], [[] for _ in models]
    for index in range(case.steps):
        batches = [case.batch(index, group * size, size) for group in range(count)]
        for model, optimizer, batch, seen in zip(models, optimizers, batches, losses, strict=True):
            places = {"position_ids": batch.position_ids, "document_starts": batch.document_starts}
            loss = (model(batch.tokens, batch.labels, **places) * batch.loss_mask).sum() / batch.loss_mask.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            set_rates_(optimizer, learning_rate=case.learning_rate, weight_decay=ADAM.weight_decay)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        tokens = [float(batch.loss_mask.sum()) for batch in batches]
        replica_groups.after_step(index + 1, tokens, last=index + 1 == case.steps)
        common.append({name: weight.clone() for name, weight in replica_groups.common.items()})
    return common, losses


MOMENTUM = exact(2, outer_lr=0.7, outer_momentum=0.9)
FRAGMENTS = exact(4, fragments=2, fragment_sync_delay=3, fragment_update_alpha=0.25, outer_lr=0.8, outer_momentum=0.5)
PAIRS = exact(2, replica_groups=2, outer_momentum=0.5, outer_lr=0.9)
EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
SIMULATED = {
    "momentum, documents": (2, Case(nodes=2, documents=True, diloco=MOMENTUM)),
    # with 112 rows of the vocabulary, tensor parallelism over 2 ranks needs no padding
    "fragments, delay, tp 2": (4, Case(nodes=2, tp=2, model=LLAMA_STYLE, vocab_size=112, diloco=FRAGMENTS)),
    "3 replica groups": (
        3,
        Case(nodes=3, global_batch=12, diloco=dataclasses.replace(MOMENTUM, diloco_fragment_sync_delay=1)),
    ),
    "replica groups of two nodes": (4, Case(nodes=4, zero=EXACT, diloco=PAIRS)),
    "of two nodes, stage 1": (
        4,
        Case(nodes=4, stage=1, diloco=exact(2, replica_groups=2, fragments=2, fragment_sync_delay=1)),
    ),
    "tp 2 x 2 x 2": (8, Case(nodes=4, tp=2, vocab_size=100, diloco=PAIRS)),
}


@pytest.mark.parametrize(
    "given", chosen(SIMULATED, "fragments, delay, tp 2", slow=("momentum, documents", "replica groups of two nodes"))
)
def test_local_steps_match_the_simulator(given):
    world, case = given
    case = dataclasses.replace(case, steps=7, learning_rate=3e-3)
    results = ranks(world).run(seen_on_replica_groups, case)
    expected, losses = simulate(case, results[0].fragments)
    for rank, seen in enumerate(results):
        torch.testing.assert_close([*seen.common, seen.outer], [*expected, expected[-1]], rtol=1e-5, atol=1e-5)
        assert seen.losses == pytest.approx(losses[rank * case.num_replica_groups // world], rel=1e-5)
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(expected)]
    assert 0 < sum(moved) < case.steps
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_four_bit_synchronization_keeps_replica_groups_identical():
    """Check that 4-bit synchronizations leave all groups with equal weights, which are close to an unquantized run's.

    R is the groups' common copy of the outer weights. It must stay close to the outer weights, which are never
    quantized.
    """
    flags = DilocoConfig(diloco_steps=2, diloco_outer_momentum=0.9, diloco_outer_lr=0.7)
    case = Case(nodes=2, precision=BF16, diloco=flags, steps=4, learning_rate=3e-3)
    sixteen = dataclasses.replace(flags, diloco_weight_bits=16, diloco_gradient_bits=16)
    exact = ranks(2).run(seen_on_replica_groups, dataclasses.replace(case, diloco=sixteen))[0]
    results = ranks(2).run(seen_on_replica_groups, case)
    common, outer = results[0].common[-1], results[0].outer
    for seen in results:
        torch.testing.assert_close(seen.common, results[0].common, rtol=0, atol=0)
        torch.testing.assert_close(seen.inner, common, rtol=0, atol=0)
        # error feedback: stored quantization errors will be added to the next outer gradients
        assert seen.feeds_back
    for name, weight in exact.outer.items():
        change = (weight - exact.common[0][name]).norm()
        if weight.ndim > 1 and change:
            assert (outer[name] - weight).norm() < 0.25 * change, name
            assert (common[name] - outer[name]).norm() < 0.25 * change, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_operation_of_the_outer_step_is_rounded_alone(device):
    """Compare the outer step with numpy, which never fuses a multiplication and an addition into one rounding.

    torch fuses them with AVX2 and AVX-512. With fused operations, the outer weights would depend on the processor.
    """
    plan = plan_diloco(
        exact(20, outer_lr=0.7, outer_momentum=0.6), ZeroConfig(), iterations=1, num_layers=1, tokens_per_step=1
    )
    generator = torch.Generator().manual_seed(0)
    outer, momentum, mean = torch.rand(3, 10_007, generator=generator).unbind()
    new_momentum = momentum.numpy() * np.float32(0.6) + mean.numpy()
    expected = outer.numpy() - mean.numpy() * np.float32(0.7) - new_momentum * np.float32(0.7 * 0.6)
    outer, momentum, mean = (tensor.to(device) for tensor in (outer, momentum, mean))
    outer_step_(outer, momentum, mean, plan)
    assert np.array_equal(momentum.cpu().numpy(), new_momentum)
    assert np.array_equal(outer.cpu().numpy(), expected)


def test_replica_group_without_tokens_sends_finite_numbers():
    unit = mock.Mock()
    send_fragment([unit], MeshAxis("replica_group"), mock.Mock(tokens=8.0), torch.zeros((), dtype=torch.float64))
    weight, correction = unit.send.call_args.args
    assert (weight.item(), correction.join().item()) == (0.0, 8.0)


def count_what_is_sent(case: Case, bits: int) -> None:
    *_, (step, replica_groups, _) = train_replica_groups(case)
    others, fmt = case.nodes - 1, None if bits == 16 else BlockFormat(bits, 128)
    messages = sum(plan_message(unit.segments, fmt, exact_itemsize=4).message_bytes for unit in replica_groups.units)
    of_tokens = 2 * 8 * others // case.nodes
    assert step.dims.counter.sent_on_axis("replica_group") == case.steps * (2 * others * messages + of_tokens)
    elements = sum(unit.segments[-1].stop for unit in replica_groups.units)
    assert messages == pytest.approx(elements * (bits / 8 if bits < 16 else 4), rel=0.2)


def test_synchronization_sends_two_messages_per_unit_and_token_counts():
    for bits, nodes in ((16, 2), (4, 4)):
        config = DilocoConfig(diloco_steps=1, diloco_weight_bits=bits, diloco_gradient_bits=bits)
        case = Case(model=WIDE, nodes=nodes, global_batch=12, steps=2, diloco=config)
        ranks(nodes).run(count_what_is_sent, case, bits)


def look_at_outer_weights(case: Case) -> float:
    """Return an evaluation's loss inside `outer_weights()`.

    Check that the model has DiLoCo's outer weights inside the context, and the group's own weights again after it.
    """
    # The loop ends after step 3, when messages that were sent after step 2 are still in flight
    *_, (step, replica_groups, _) = itertools.islice(train_replica_groups(case), 3)
    shards = [shard for unit in replica_groups.units for shard in unit.unit.shards()]
    own = [shard.clone() for shard in shards]
    common = [x.to_local() for x in replica_groups.common().values()]
    assert not all(map(torch.equal, own, common))
    batch = case.batch(9, 0, 4)
    with torch.no_grad():
        with replica_groups.outer_weights():
            assert all(map(torch.equal, shards, common))
            loss = step.model(batch.tokens, batch.labels).mean().item()
            step.sharding.reshard()
        step.model(batch.tokens, batch.labels)
    step.sharding.reshard()
    assert all(map(torch.equal, shards, own))
    return loss


def test_evaluation_uses_the_outer_weights_and_restores_own():
    flags = DilocoConfig(diloco_steps=2, diloco_fragment_sync_delay=1)
    case = Case(nodes=2, tp=2, precision=BF16, diloco=flags, steps=4)
    assert len({*ranks(4).run(look_at_outer_weights, case)}) == 1


# ---- flags of DiLoCo, and the plan that follows ---------------------------------------------------------------------


def plan(*, iterations: int = 60, **flags: Any) -> DilocoPlan:
    given = {"iterations": iterations, "num_layers": 3, "tokens_per_step": 1.0}
    return plan_diloco(DilocoConfig(**flags), ZeroConfig(), **given)


def test_fragments_are_sent_in_turn_at_equal_distances():
    found = plan(diloco_steps=6, diloco_fragments=3)
    assert [found.sends_at(t) for t in range(1, 13)] == [None, 0, None, 1, None, 2, None, 0, None, 1, None, 2]


def test_outer_momentum_needs_many_synchronizations_far_apart():
    for steps, iterations, lr, momentum in ((10, 1990, 1.0, 0.0), (10, 2000, 0.4, 0.9), (9, 99_999, 1.0, 0.0)):
        found = plan(iterations=iterations, diloco_steps=steps)
        assert (found.outer_lr, found.outer_momentum, bool(found.notices)) == (lr, momentum, momentum == 0.0), steps
        given = {"diloco_outer_lr": 0.5, "diloco_outer_momentum": 0.3}
        found = plan(iterations=iterations, diloco_steps=steps, **given)
        assert (found.outer_lr, found.outer_momentum, found.notices) == (0.5, 0.3, ()), steps


def test_invalid_local_step_flags_are_rejected():
    wrong = [
        (
            {"diloco_steps": 4, "diloco_fragment_sync_delay": 4},
            "--diloco-fragment-sync-delay 4 is not less than --diloco-steps 4",
        ),
        ({"diloco_steps": 10, "diloco_fragments": 3}, "--diloco-steps 10 is not divisible by --diloco-fragments 3"),
        ({"diloco_steps": 8, "diloco_fragments": 4}, "--diloco-fragments 4 is more than --num-layers 3"),
        ({"diloco_steps": 0}, "--diloco-steps 0 is not positive"),
        ({"diloco_replica_groups": 1}, "--diloco-replica-groups 1 is too small"),
        ({"diloco_outer_momentum": 1.0}, "--diloco-outer-momentum 1.0 is not in"),
        ({"diloco_fragment_update_alpha": -0.5}, "--diloco-fragment-update-alpha -0.5 is not in"),
    ]
    assert not_refused(wrong, lambda flags: plan(**flags)) == []
