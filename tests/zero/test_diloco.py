"""Local steps between islands do on ranks what a plain simulator of them does in one process."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from helpers.diloco_reference import Islands, OuterRule
from helpers.ranks import ranks
from helpers.stream_races import simulated_streams
from helpers.tiers import slow
from helpers.training import CLIP, CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_diloco, build_step

from kernels.formats import BlockFormat
from megazpp.islands.config import IslandsConfig, plan_islands
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
    plan = plan_islands(case.diloco, ZeroConfig(), iterations=case.steps, num_layers=9, tokens_per_step=1.0)
    assert plan is not None
    same = ("steps", "delay", "merge_alpha", "outer_lr", "outer_momentum")
    islands = Islands(models, fragments, OuterRule(**{name: getattr(plan, name) for name in same}))
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


def reference_of_two(settings: OuterRule) -> tuple[Islands, list[torch.nn.Linear]]:
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    for model in models:
        torch.nn.init.constant_(model.weight, 10.0)
        torch.nn.init.constant_(model.bias, 1.0)
    return Islands(models, [["weight", "bias"]], settings), models


def test_nesterov_by_hand():
    islands, models = reference_of_two(OuterRule(steps=2, outer_lr=0.5, outer_momentum=0.8))
    islands.after_step(1, [3.0, 1.0])
    models[0].weight.data -= 4.0  # the islands count 3 / 4 and 1 / 4 by their tokens
    models[1].weight.data += 4.0
    islands.after_step(2, [0.0, 0.0])
    # D = 0.75 * 4 - 0.25 * 4 = 2; m = 2; outer = 10 - 0.5 * (2 + 0.8 * 2) = 8.2
    assert islands.common["weight"].tolist() == [[pytest.approx(8.2)] * 3] * 2
    assert all(torch.equal(model.weight, islands.common["weight"]) for model in models)
    models[0].weight.data -= 1.0
    islands.after_step(3, [1.0, 1.0])
    islands.after_step(4, [0.0, 0.0])
    # D = 0.5; m = 0.8 * 2 + 0.5 = 2.1; outer = 8.2 - 0.5 * (0.5 + 0.8 * 2.1) = 7.11
    assert islands.common["weight"].tolist() == [[pytest.approx(7.11)] * 3] * 2


def test_a_merge_comes_after_its_delay_and_keeps_a_share_of_the_steps_in_between():
    islands, models = reference_of_two(OuterRule(steps=4, delay=2, merge_alpha=0.25))
    models[0].weight.data -= 4.0
    weights = []
    for iteration in range(1, 7):
        islands.after_step(iteration, [1.0, 1.0])
        weights.append([model.weight[0, 0].item() for model in models])
    assert weights[:5] == [[6.0, 10.0]] * 5  # sent after the fourth: R = 8
    assert weights[5] == [0.25 * 6.0 + 0.75 * 8.0, 0.25 * 10.0 + 0.75 * 8.0]


@pytest.mark.parametrize(
    ("world", "case"),
    [(4, Case(nodes=2)), slow(4, Case(nodes=4)), slow(4, Case(nodes=2, tp=2, model=LLAMA_STYLE, vocab_size=112))],
)
def test_averaging_every_step_of_sgd_is_data_parallel_sgd(world: int, case: Case):
    flags = local_steps(1, outer_lr=1.0, outer_momentum=0.0)
    case = dataclasses.replace(case, diloco=flags, learning_rate=0.3, steps=4)
    expected = data_parallel(case)
    for result in ranks(world).run(train_islands, case, plain=True):
        assert_close(result.common[-1], expected, 1e-6)
        assert_close(result.inner, result.common[-1], 0.0)
        assert_close(result.outer[-1], result.common[-1], 0.0)


MOMENTUM = local_steps(2, outer_lr=0.7, outer_momentum=0.9)
FRAGMENTS = local_steps(4, fragments=2, delay=3, outer_lr=0.8, outer_momentum=0.5)
PAIRS = local_steps(2, islands=2, outer_momentum=0.5, outer_lr=0.9)
EXACT = ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16))
SIMULATED = {
    "averages": (4, Case(nodes=2, diloco=local_steps(3))),
    "momentum, documents": (4, Case(nodes=2, documents=True, diloco=MOMENTUM)),
    # of 112 rows of the vocabulary tp 2 pads none
    "fragments, delay, tp 2": (4, Case(nodes=2, tp=2, model=LLAMA_STYLE, vocab_size=112, diloco=FRAGMENTS)),
    "3 islands": (3, Case(nodes=3, global_batch=12, diloco=dataclasses.replace(MOMENTUM, diloco_delay=1))),
    "4 islands, alpha": (4, Case(nodes=4, documents=True, diloco=local_steps(2, delay=1, merge_alpha=0.25))),
    "islands of two nodes": (4, Case(nodes=4, zero=EXACT, diloco=PAIRS)),
    "of two nodes, stage 1": (4, Case(nodes=4, stage=1, diloco=local_steps(2, islands=2, fragments=2, delay=1))),
    "tp 2 x 2 x 2": (8, Case(nodes=4, tp=2, vocab_size=100, diloco=PAIRS)),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("fragments, delay, tp 2", "momentum, documents") else slow(name) for name in SIMULATED],
)
def test_it_is_the_simulator_of_islands(name: str):
    world, case = SIMULATED[name]
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
        slow(4, Case(nodes=4, model=LLAMA_STYLE, precision=BF16, diloco=IslandsConfig(diloco_steps=2, diloco_delay=1))),
        slow(8, Case(nodes=4, tp=2, precision=BF16, diloco=IslandsConfig(diloco_steps=2, diloco_islands=2))),
    ],
)
def test_four_bits_leave_the_same_bits_on_all_islands_close_to_the_outer_weights(world: int, case: Case):
    case = dataclasses.replace(case, steps=6, learning_rate=3e-3)
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


@pytest.mark.parametrize(("bits", "size"), [(16, 3), slow(8, 3), (4, 2)])
def test_each_synchronization_sends_two_messages_of_each_unit_and_the_tokens(bits: int, size: int):
    config = IslandsConfig(diloco_steps=3, diloco_weight_bits=bits, diloco_gradient_bits=bits)  # type: ignore[arg-type]
    case = Case(model=WIDE, nodes=size + 1, global_batch=12, steps=6, diloco=config)
    fmt = None if bits == 16 else BlockFormat(bits, 128)  # type: ignore[arg-type]
    for result in ranks(size + 1).run(train_islands, case):
        messages = [plan_message(segments, fmt, exact_itemsize=4).message_bytes for segments in result.segments]
        assert result.sent == 2 * (2 * size * sum(messages) + 2 * 8 * size // (size + 1))
        elements = sum(segments[-1].stop for segments in result.segments)
        assert sum(messages) == pytest.approx(elements * (bits / 8 if bits < 16 else 4), rel=0.2)


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


@pytest.mark.parametrize("case", [Case(nodes=2), slow(Case(nodes=2, tp=2, precision=BF16))])
def test_an_evaluation_sees_the_islands_common_weights_and_leaves_their_own(case: Case):
    flags = IslandsConfig(diloco_steps=2, diloco_delay=1)
    results = ranks(4).run(look_at_outer_weights, dataclasses.replace(case, diloco=flags))
    assert all(common and own for common, own, _ in results)
    assert len({loss for _, _, loss in results}) == 1


def train_on_streams(case: Case) -> list[str]:
    with simulated_streams() as streams:
        train_islands(case)
    return streams.found


@pytest.mark.parametrize(
    "case",
    [
        slow(Case(nodes=2, diloco=IslandsConfig(diloco_steps=2, diloco_delay=1, diloco_outer_momentum=0.9))),
        slow(Case(nodes=4, zero=ZeroConfig(zeropp=True), diloco=IslandsConfig(diloco_steps=2, diloco_islands=2))),
    ],
)
def test_no_two_streams_race(case: Case):
    assert ranks(4).run(train_on_streams, dataclasses.replace(case, steps=6)) == [[]] * 4


def test_fragments_take_turns_and_nobody_waits_for_one_that_has_not_come():
    config = IslandsConfig(diloco_steps=6, diloco_fragments=3)
    plan = plan_islands(config, ZeroConfig(), iterations=60, num_layers=3, tokens_per_step=1.0)
    assert plan is not None
    assert [plan.sends_at(t) for t in range(1, 13)] == [None, 0, None, 1, None, 2, None, 0, None, 1, None, 2]


@pytest.mark.parametrize(
    ("steps", "iterations", "lr", "momentum"), [(10, 1990, 1.0, 0.0), (10, 2000, 0.4, 0.9), (9, 99_999, 1.0, 0.0)]
)
def test_outer_momentum_is_for_many_synchronizations_far_apart(steps: int, iterations: int, lr: float, momentum: float):
    def planned(**flags: Any) -> Any:
        config = IslandsConfig(diloco_steps=steps, **flags)
        return plan_islands(config, ZeroConfig(), iterations=iterations, num_layers=2, tokens_per_step=1.0)

    chosen = planned()
    assert (chosen.outer_lr, chosen.outer_momentum, bool(chosen.notices)) == (lr, momentum, momentum == 0.0)
    given = planned(diloco_outer_lr=0.5, diloco_outer_momentum=0.3)
    assert (given.outer_lr, given.outer_momentum, given.notices) == (0.5, 0.3, ())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"diloco_steps": 4, "diloco_delay": 4}, "--diloco-delay 4 is not less than --diloco-steps 4"),
        ({"diloco_steps": 10, "diloco_fragments": 3}, "--diloco-steps 10 is not divisible by --diloco-fragments 3"),
        ({"diloco_steps": 0}, "--diloco-steps 0 is not positive"),
        ({"diloco_islands": 1}, "--diloco-islands 1: it takes two"),
        ({"diloco_outer_momentum": 1.0}, "--diloco-outer-momentum 1.0 is not in"),
        ({"diloco_merge_alpha": -0.5}, "--diloco-merge-alpha -0.5 is not in"),
    ],
)
def test_what_means_nothing_is_refused(flags: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        IslandsConfig(**flags)


def test_there_are_no_more_fragments_than_layers():
    config = IslandsConfig(diloco_steps=6, diloco_fragments=3)
    with pytest.raises(ValueError, match="--diloco-fragments 3 is more than --num-layers 2"):
        plan_islands(config, ZeroConfig(), iterations=60, num_layers=2, tokens_per_step=1.0)
