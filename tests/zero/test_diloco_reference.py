"""Local steps by hand: when fragments travel, what the outer optimizer makes of them, and what quantization loses."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.diloco_reference import Islands, OuterRule, strided_fragments
from helpers.training import CPU, Case
from torch import Tensor, nn

from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_

ROUNDING = 1e-5  # fp32, sums in another order


class Weights(nn.Module):
    """Parameters a [8, 32], b [8, 32] and c [8] without a model."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("a", (8, 32)), ("b", (8, 32)), ("c", (8,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


ALL = [["a", "b", "c"]]


def islands_of(count: int, fragments: list[list[str]], **settings: object) -> tuple[Islands, list[Weights]]:
    models = [Weights() for _ in range(count)]
    return Islands(models, fragments, OuterRule(**settings)), models  # type: ignore[arg-type]


def move(models: list[Weights], seed: int = 1) -> None:
    """An inner step of each island, all different."""
    generator = torch.Generator().manual_seed(seed)
    for model in models:
        for p in model.parameters():
            p.data += torch.randn(p.shape, generator=generator)


def values(model: Weights) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("counts", [(8, 8), (4, 12), (4, 4, 8)])
def test_averaging_after_every_step_of_sgd_is_sgd_on_the_whole_batch(counts: tuple[int, ...]):
    case = Case(steps=4)
    together = GPTModel(case.model, vocab_size=case.vocab_size, tp=MeshAxis("tp"))
    initialize_parameters_(together, seed=case.seed, draw_device=CPU)
    start = copy.deepcopy(together.state_dict())
    models = [copy.deepcopy(together) for _ in counts]
    islands = Islands(models, strided_fragments(together, 1), OuterRule(steps=1))

    def step_(model: GPTModel, step: int, first: int, count: int) -> None:
        batch = case.batch(step, first, count)
        model(batch.tokens, batch.labels).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.3).step()
        model.zero_grad()

    for step in range(case.steps):
        step_(together, step, 0, case.global_batch)
        first = 0
        for model, count in zip(models, counts, strict=True):
            step_(model, step, first, count)
            first += count
        islands.after_step(step + 1, [float(count * case.seq_length) for count in counts])
    assert all(not torch.allclose(p, start[name], atol=1e-3) for name, p in together.named_parameters() if p.ndim > 1)
    assert_close(islands.common, {name: p.detach() for name, p in together.named_parameters()})


@pytest.mark.parametrize(
    ("fragments", "sent"),
    [
        ([["a", "b", "c"]], {4: [0], 8: [0], 9: [0]}),
        ([["a", "c"], ["b"]], {2: [0], 4: [1], 6: [0], 8: [1], 9: [0, 1]}),
        ([["a"], [], ["b"], ["c"]], {1: [0], 2: [1], 3: [2], 4: [3], 5: [0], 6: [1], 7: [2], 8: [3], 9: [0, 1, 2, 3]}),
    ],
)
def test_fragments_are_sent_in_turn_and_all_of_them_in_the_end(fragments: list[list[str]], sent: dict[int, list[int]]):
    islands, models = islands_of(2, fragments, steps=4)
    for iteration in range(1, 10):
        before = {name: weight.clone() for name, weight in islands.common.items()}
        move(models, iteration)
        own = [values(model) for model in models]
        found = islands.after_step(iteration, [1.0, 1.0], last=iteration == 9)
        assert found == sent.get(iteration, [])
        names = {name for index in found for name in fragments[index]}
        for name in before:
            assert torch.equal(islands.common[name], before[name]) != (name in names)
            for model, mine in zip(models, own, strict=True):
                expected = islands.common[name] if name in names else mine[name]
                assert torch.equal(values(model)[name], expected)


def test_nesterov_by_hand():
    islands, models = islands_of(2, ALL, steps=2, outer_lr=0.5, outer_momentum=0.8)
    for model in models:
        model.a.data.fill_(10.0)
    islands = Islands(models, ALL, islands.settings)
    islands.after_step(1, [3.0, 1.0])
    models[0].a.data -= 4.0  # the islands count 3 / 4 and 1 / 4 by their tokens
    models[1].a.data += 4.0
    islands.after_step(2, [0.0, 0.0])
    # D = 0.75 * 4 - 0.25 * 4 = 2; m = 2; outer = 10 - 0.5 * (2 + 0.8 * 2) = 8.2
    assert_close(islands.common, {"a": torch.full((8, 32), 8.2)})
    assert all(torch.equal(model.a, islands.common["a"]) for model in models)
    models[0].a.data -= 1.0
    islands.after_step(3, [1.0, 1.0])
    islands.after_step(4, [0.0, 0.0])
    # D = 0.5; m = 0.8 * 2 + 0.5 = 2.1; outer = 8.2 - 0.5 * (0.5 + 0.8 * 2.1) = 7.11
    assert_close(islands.common, {"a": torch.full((8, 32), 7.11)})
    assert_close(islands.momentum, {"a": torch.full((8, 32), 2.1)})


def test_a_merge_comes_after_its_delay_and_keeps_a_share_of_the_steps_in_between():
    islands, models = islands_of(2, ALL, steps=4, delay=2, merge_alpha=0.25)
    move(models)
    for iteration in range(1, 4):
        islands.after_step(iteration, [1.0, 1.0])
    at_send = [values(model) for model in models]
    assert islands.after_step(4, [1.0, 1.0]) == [0]
    mean = {name: (at_send[0][name] + at_send[1][name]) / 2 for name in at_send[0]}
    assert_close(islands.common, mean)
    for model, mine in zip(models, at_send, strict=True):
        assert all(torch.equal(values(model)[name], mine[name]) for name in mine)
    move(models, 2)
    islands.after_step(5, [1.0, 1.0])
    before = [values(model) for model in models]
    islands.after_step(6, [1.0, 1.0])
    for model, mine in zip(models, before, strict=True):
        assert_close(values(model), {name: 0.25 * mine[name] + 0.75 * mean[name] for name in mean})


def test_the_end_merges_what_is_under_way_and_leaves_one_set_of_weights():
    islands, models = islands_of(3, ALL, steps=4, delay=2, merge_alpha=0.25)
    move(models)
    islands.after_step(4, [1.0, 1.0, 1.0])
    sent = {name: weight.clone() for name, weight in islands.common.items()}
    move(models, 2)
    own = [values(model) for model in models]
    islands.after_step(5, [1.0, 1.0, 1.0], last=True)
    mean = {name: sum((mine[name] for mine in own), torch.zeros(())) / 3 for name in sent}
    assert_close(islands.common, {name: 0.25 * mean[name] + 0.75 * sent[name] for name in sent})
    assert all(torch.equal(values(model)[name], weight) for model in models for name, weight in islands.common.items())


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_errors_that_are_fed_back_whole_keep_the_sum_of_what_was_sent(bits: int, levels: int):
    """The same difference is sent often: the mean of what arrives is off by one error's share instead of an error."""
    error: dict[float | None, dict[str, float]] = {}
    for beta in (None, 0.0):
        islands, models = islands_of(1, ALL, steps=1, gradient_bits=bits, feedback_beta=beta)
        start = values(models[0])
        change = values(Weights())
        rounds = 20
        for iteration in range(1, rounds + 1):
            for name, p in models[0].named_parameters():
                p.data.copy_(islands.common[name] - change[name])
            islands.after_step(iteration, [1.0])
        mean = {name: (start[name] - islands.common[name]) / rounds for name in start}
        error[beta] = {name: float((mean[name] - change[name]).abs().max()) for name in mean}
    step = float(values(Weights())["a"].abs().max()) / levels
    for name in ("a", "b"):
        assert error[None][name] > 0.3 * step
        assert error[0.0][name] < 1.2 * step / rounds + ROUNDING  # what is still held back: at most one error
    assert max(found["c"] for found in error.values()) < ROUNDING  # travels whole


def test_a_moving_average_feeds_back_a_share_of_the_newest_error():
    """After one send, 1 - beta of its error is added to a next difference of zero."""
    sent: dict[float, Tensor] = {}
    for beta in (0.0, 0.75):
        islands, models = islands_of(1, ALL, steps=1, gradient_bits=4, feedback_beta=beta)
        models[0].a.data += values(models[0])["a"]
        islands.after_step(1, [1.0])
        lost = 2 * values(Weights())["a"] - islands.common["a"]
        before = islands.common["a"].clone()
        islands.after_step(2, [1.0])
        sent[beta] = before - islands.common["a"]
        expected = -lost * (1 - beta)
        assert lost.abs().max() > 0.1
        scale = expected.abs().view(-1, 128).amax(-1, keepdim=True).repeat_interleave(128, 1).view(8, 32)
        assert (
            (sent[beta] - expected).abs() <= 0.16 * scale + ROUNDING
        ).all()  # int4 of the largest, int8 of the error
    assert sent[0.0].abs().max() > 3 * sent[0.75].abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_reach_all_islands_alike_and_catch_up_with_the_outer_ones(bits: int):
    islands, models = islands_of(2, ALL, steps=1, weight_bits=bits)
    move(models)
    islands.after_step(1, [1.0, 1.0])
    distances = []
    for iteration in range(2, 6):
        distances.append(float((islands.common["a"] - islands.outer["a"]).abs().max()))
        assert torch.equal(islands.common["c"], islands.outer["c"])
        assert all(torch.equal(model.a, islands.common["a"]) for model in models)
        islands.after_step(iteration, [1.0, 1.0])
    assert distances[0] > 1e-3
    assert distances[-1] < distances[0] / 100


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="2 fragments do not fit"):
        islands_of(2, [["a"], ["b", "c"]], steps=5)
    with pytest.raises(ValueError, match="fragments do not fit"):
        islands_of(2, ALL, steps=5, delay=5)
    with pytest.raises(ValueError, match="every parameter once"):
        islands_of(2, [["a"], ["a", "b"]])
    models = [Weights(), Weights()]
    models[1].c.data += 1
    with pytest.raises(ValueError, match="different weights"):
        Islands(models, ALL, OuterRule())
