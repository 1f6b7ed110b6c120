"""Local steps between islands do on ranks what a plain simulator of them does in one process."""

import copy
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from helpers.diloco_reference import Islands
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import chosen, slow
from helpers.training import CLIP, CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_diloco, build_step, diloco_plan

from kernels.formats import BlockFormat
from megazpp.islands.config import IslandsConfig, IslandsPlan, plan_islands
from megazpp.islands.outer import send_fragment
from megazpp.model.gpt import GPTModel
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import Work
from megazpp.tensor_parallel.parameters import initialize_parameters_
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.wire import plan_message

BF16 = PrecisionConfig(bf16=True)
WIDE = dataclasses.replace(GPT2_STYLE, hidden_size=64, ffn_hidden_size=256)
SGD = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0)
ADAM = OptimizerConfig(adam_eps=1e-4)  # of gradients near 0 the rest is rounding, which Adam would make a step of


def local_steps(steps: int, **flags: Any) -> IslandsConfig:
    """Not quantized, unless flags say so."""
    bits = {"diloco_weight_bits": 16, "diloco_gradient_bits": 16}
    given = {f"diloco_{name}": value for name, value in flags.items()}
    return IslandsConfig(diloco_steps=steps, **{**bits, **given})


class Trained(NamedTuple):
    """What one rank knows after a training on islands."""

    outer: list[dict[str, torch.Tensor]]  # the outer weights in full, after each step
    common: list[dict[str, torch.Tensor]]  # R
    inner: dict[str, torch.Tensor]  # this island's weights in full, at the end
    losses: list[float]
    sent: int  # bytes along the island axis
    segments: list[Any]  # of each unit's outer weights
    fragments: list[list[str]]  # names of their parameters
    feedback: int  # bytes that are not zero of the errors that outer gradients feed back


def train_islands(case: Case, *, plain: bool = False) -> Trained:
    """With AdamW and clipping, or with SGD alone."""
    step, dims = build_step(case)
    step.optimizer = build_optimizer(list(step.model.named_parameters()), SGD if plain else ADAM, CPU)
    step.clip_grad = 0.0 if plain else CLIP
    diloco = build_diloco(case, step, dims)
    assert diloco is not None
    size, decay = case.global_batch // dims.data_size, 0.0 if plain else 0.01
    outer, common, losses = [], [], []
    for index in range(case.steps):
        batch = case.batch(index, dims.data_rank * size, size)
        losses.append(step([batch], learning_rate=case.learning_rate, weight_decay=decay).loss)
        with dims.counter.paused():
            tokens = dims.sum_over_data_(batch.loss_mask.sum(dtype=torch.float64))
        diloco.count(tokens)
        if index + 1 == case.steps:
            diloco.finish()
        else:
            diloco.after_step(index + 1)
        step.sharding.free_gathered()
        outer.append(full(diloco.weights()))
        common.append(full(diloco.common()))
    return Trained(
        outer,
        common,
        full({name: p.detach() for name, p in step.model.named_parameters()}),
        losses,
        dims.counter.sent_on_axis("island"),
        [unit.segments for unit in diloco.units],
        [[p.name for unit in fragment for p in unit.unit.parameters] for fragment in diloco.fragments],
        sum(int(x.count_nonzero()) for x in diloco.error_feedback().values()),
    )


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


def simulate(case: Case, fragments: list[list[str]]) -> tuple[list[dict[str, torch.Tensor]], list[list[float]]]:
    """R after each step, and the losses of each island."""
    first = GPTModel(case.model, vocab_size=case.vocab_size, tp=MeshAxis("tp"))
    initialize_parameters_(first, seed=case.seed, draw_device=CPU)
    count = case.islands
    models = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
    optimizers = [build_optimizer(list(model.named_parameters()), ADAM, CPU) for model in models]
    rule = diloco_plan(case)
    assert rule is not None
    islands = Islands(models, fragments, rule)
    size, common, losses = case.global_batch // count, [], [list[float]() for _ in models]
    for index in range(case.steps):
        tokens = []
        for island, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            batch = case.batch(index, island * size, size)
            values = model(
                batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
            )
            loss = (values * batch.loss_mask).sum() / batch.loss_mask.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in own.param_groups:
                group["lr"], group["weight_decay"] = case.learning_rate, 0.01 * group["wd_mult"]
            own.step()
            own.zero_grad()
            losses[island].append(loss.item())
            tokens.append(float(batch.loss_mask.sum()))
        islands.after_step(index + 1, tokens, last=index + 1 == case.steps)
        common.append({name: weight.clone() for name, weight in islands.common.items()})
    return common, losses


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=tolerance, atol=tolerance), name


def data_parallel(case: Case) -> dict[str, torch.Tensor]:
    """Plain SGD over the whole batch in one process."""
    model = GPTModel(case.model, vocab_size=case.vocab_size, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=case.seed, draw_device=CPU)
    for index in range(case.steps):
        batch = case.batch(index, 0, case.global_batch)
        model(batch.tokens, batch.labels).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= case.learning_rate * p.grad
                p.grad = None
    return {name: p.detach() for name, p in model.named_parameters()}


def test_averaging_every_step_of_sgd_is_data_parallel_sgd():
    flags = local_steps(1, outer_lr=1.0, outer_momentum=0.0)
    case = Case(nodes=2, diloco=flags, learning_rate=0.3, steps=4)
    expected = data_parallel(case)
    for result in ranks(4).run(train_islands, case, plain=True):
        assert_close(result.common[-1], expected, 1e-6)
        assert_close(result.inner, result.common[-1], 0.0)
        assert_close(result.outer[-1], result.common[-1], 0.0)


MOMENTUM = local_steps(2, outer_lr=0.7, outer_momentum=0.9)
FRAGMENTS = local_steps(4, fragments=2, delay=3, merge_alpha=0.25, outer_lr=0.8, outer_momentum=0.5)
PAIRS = local_steps(2, islands=2, outer_momentum=0.5, outer_lr=0.9)
EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
SIMULATED = {
    "momentum, documents": (4, Case(nodes=2, documents=True, diloco=MOMENTUM)),
    # of 112 rows of the vocabulary tp 2 pads none
    "fragments, delay, tp 2": (4, Case(nodes=2, tp=2, model=LLAMA_STYLE, vocab_size=112, diloco=FRAGMENTS)),
    "3 islands": (3, Case(nodes=3, global_batch=12, diloco=dataclasses.replace(MOMENTUM, diloco_delay=1))),
    "4 islands": (4, Case(nodes=4, documents=True, diloco=local_steps(2, delay=1))),
    "islands of two nodes": (4, Case(nodes=4, zero=EXACT, diloco=PAIRS)),
    "of two nodes, stage 1": (4, Case(nodes=4, stage=1, diloco=local_steps(2, islands=2, fragments=2, delay=1))),
    "tp 2 x 2 x 2": (8, Case(nodes=4, tp=2, vocab_size=100, diloco=PAIRS)),
}


@pytest.mark.parametrize("given", chosen(SIMULATED, "fragments, delay, tp 2", "momentum, documents"))
def test_it_is_the_simulator_of_islands(given):
    world, case = given
    case = dataclasses.replace(case, steps=7, learning_rate=3e-3)
    results = ranks(world).run(train_islands, case)
    common, losses = simulate(case, results[0].fragments)
    for rank, result in enumerate(results):
        for index in range(case.steps):
            assert_close(result.common[index], common[index], 1e-5)
            assert_close(result.outer[index], common[index], 1e-5)
        assert result.losses == pytest.approx(losses[rank * case.islands // world], rel=1e-5)
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(common)]
    assert 0 < sum(moved) <= case.steps - 1
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, Case(nodes=2, diloco=IslandsConfig(diloco_steps=2, diloco_outer_momentum=0.9, diloco_outer_lr=0.7))),
        slow(8, Case(nodes=4, tp=2, precision=BF16, diloco=IslandsConfig(diloco_steps=2, diloco_islands=2))),
    ],
)
def test_four_bits_leave_the_same_bits_on_all_islands_close_to_the_outer_weights(world, case):
    case = dataclasses.replace(case, steps=4, learning_rate=3e-3)
    exact = dataclasses.replace(case.diloco, diloco_weight_bits=16, diloco_gradient_bits=16)
    results = ranks(world).run(train_islands, case)
    reference = ranks(world).run(train_islands, dataclasses.replace(case, diloco=exact))
    start = reference[0].common[0]
    for result in results:
        for index in range(case.steps):
            assert_close(result.common[index], results[0].common[index], 0.0)
        for name, weight in reference[0].outer[-1].items():
            change = (weight - start[name]).norm()
            if weight.ndim == 1 or not change:
                continue
            assert (result.outer[-1][name] - weight).norm() < 0.25 * change, name
            assert (result.common[-1][name] - result.outer[-1][name]).norm() < 0.25 * change, name
        assert_close(result.inner, result.common[-1], 0.0)
        assert result.feedback > 0  # what 4 bits have lost is kept for the next outer gradients


def test_islands_with_no_tokens_send_finite_numbers():
    sent: list[float] = []

    def send(weight: torch.Tensor, correction: Work[torch.Tensor]) -> None:
        sent.extend((weight.item(), correction.join().item()))

    unit, plan = cast(Any, SimpleNamespace(send=send)), cast(Any, SimpleNamespace(tokens=8.0))
    send_fragment([unit], MeshAxis("island"), plan, torch.zeros((), dtype=torch.float64))
    assert sent == [0.0, 8.0]


def test_each_synchronization_sends_two_messages_of_each_unit_and_the_tokens():
    bits: Any
    for bits, size in ((16, 3), (8, 2), (4, 2)):  # `size` islands beside one's own
        config = IslandsConfig(diloco_steps=1, diloco_weight_bits=bits, diloco_gradient_bits=bits)
        case = Case(model=WIDE, nodes=size + 1, global_batch=12, steps=2, diloco=config)
        fmt = None if bits == 16 else BlockFormat(bits, 128)
        for result in ranks(size + 1).run(train_islands, case):
            messages = [plan_message(segments, fmt, exact_itemsize=4).message_bytes for segments in result.segments]
            assert result.sent == 2 * (2 * size * sum(messages) + 2 * 8 * size // (size + 1)), bits
            elements = sum(segments[-1].stop for segments in result.segments)
            assert sum(messages) == pytest.approx(elements * (bits / 8 if bits < 16 else 4), rel=0.2), bits


def look_at_outer_weights(case: Case) -> tuple[bool, bool, float]:
    """Whether the model computed with R inside, and with its own weights again after it, bit for bit; the loss."""
    step, dims = build_step(case)
    diloco = build_diloco(case, step, dims)
    assert diloco is not None
    size = case.global_batch // dims.data_size
    batch = case.batch(0, dims.data_rank * size, size)
    for index in range(3):  # sent after the second, under way at the third
        step([batch], learning_rate=1e-2, weight_decay=0.0)
        diloco.count(batch.loss_mask.sum())
        diloco.after_step(index + 1)
    shards = [shard for unit in diloco.units for shard in unit.unit.shards()]
    own = [shard.clone() for shard in shards]
    common = [cast(Any, x).to_local() for x in diloco.common().values()]
    held_out = case.batch(9, 0, 4)
    with diloco.outer_weights(), torch.no_grad():
        found = [shard.clone() for shard in shards]
        loss = float(step.model(held_out.tokens, held_out.labels).mean())
        step.sharding.free_gathered()
    with torch.no_grad():
        step.model(held_out.tokens, held_out.labels)
    step.sharding.free_gathered()
    computed_with_common = all(map(torch.equal, found, common)) and not all(map(torch.equal, found, own))
    return computed_with_common, all(map(torch.equal, shards, own)), loss


def test_an_evaluation_sees_the_islands_common_weights_and_leaves_their_own():
    flags = IslandsConfig(diloco_steps=2, diloco_delay=1)
    results = ranks(4).run(look_at_outer_weights, Case(nodes=2, tp=2, precision=BF16, diloco=flags))
    assert all(common and own for common, own, _ in results)
    assert len({loss for _, _, loss in results}) == 1


# ---- flags and plan -------------------------------------------------------------------------------------------------


def plan(*, iterations: int = 60, num_layers: int = 3, **flags: Any) -> IslandsPlan:
    given = {"iterations": iterations, "num_layers": num_layers, "tokens_per_step": 1.0}
    found = plan_islands(IslandsConfig(**flags), ZeroConfig(), **given)
    assert found is not None
    return found


def test_fragments_take_turns_and_nobody_waits_for_one_that_has_not_come():
    found = plan(diloco_steps=6, diloco_fragments=3)
    assert [found.sends_at(t) for t in range(1, 13)] == [None, 0, None, 1, None, 2, None, 0, None, 1, None, 2]


def test_outer_momentum_is_for_many_synchronizations_far_apart():
    for steps, iterations, lr, momentum in ((10, 1990, 1.0, 0.0), (10, 2000, 0.4, 0.9), (9, 99_999, 1.0, 0.0)):
        found = plan(iterations=iterations, diloco_steps=steps)
        assert (found.outer_lr, found.outer_momentum, bool(found.notices)) == (lr, momentum, momentum == 0.0), steps
        given = {"diloco_outer_lr": 0.5, "diloco_outer_momentum": 0.3}
        found = plan(iterations=iterations, diloco_steps=steps, **given)
        assert (found.outer_lr, found.outer_momentum, found.notices) == (0.5, 0.3, ()), steps


def test_what_means_nothing_is_refused():
    wrong: list[Any] = [
        ({"diloco_steps": 4, "diloco_delay": 4}, "--diloco-delay 4 is not less than --diloco-steps 4"),
        ({"diloco_steps": 10, "diloco_fragments": 3}, "--diloco-steps 10 is not divisible by --diloco-fragments 3"),
        ({"diloco_steps": 8, "diloco_fragments": 4}, "--diloco-fragments 4 is more than --num-layers 3"),
        ({"diloco_steps": 0}, "--diloco-steps 0 is not positive"),
        ({"diloco_islands": 1}, "--diloco-islands 1: it takes two"),
        ({"diloco_outer_momentum": 1.0}, "--diloco-outer-momentum 1.0 is not in"),
        ({"diloco_merge_alpha": -0.5}, "--diloco-merge-alpha -0.5 is not in"),
    ]
    assert not_refused(wrong, lambda flags: plan(**flags)) == []
