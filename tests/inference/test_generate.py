"""Generation against a plain loop over one model, and over every way of spreading the model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_on_ranks, build_step

from megazpp.inference.generate import generate
from megazpp.inference.sample import SampleConfig
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_
from megazpp.zero.config import ZeroConfig

PROMPTS = ((5, 1, 100), (7,), (2, 3, 5, 7, 11, 13), tuple(range(30, 50)))  # the last one is longer than the model takes
STYLES = {  # a larger std than usual, so that the logits differ by much more than rounding
    "gpt2": dataclasses.replace(GPT2_STYLE, init_method_std=0.5),
    "llama": dataclasses.replace(LLAMA_STYLE, init_method_std=0.5),
}
GREEDY = SampleConfig(sample_tokens=20, sample_temperature=0.0)  # beyond the longest input of 16
SHORT = dataclasses.replace(GREEDY, sample_tokens=8)
DRAWN = SampleConfig(sample_tokens=20, sample_temperature=0.7, sample_top_k=10)
ZEROPP = ZeroConfig(zeropp=True)


def plain_model(style: GPTConfig) -> GPTModel:
    model = GPTModel(style, vocab_size=101, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=5, draw_device=CPU)
    return model


@torch.no_grad()
def plain_loop(model: GPTModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Argmax of a plain forward over what came before, one token after the other, without padding."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-16:]])
        logits = model.tp.all_gather(model(seen)[0, -1])[:101]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@functools.cache
def greedy_reference(style: GPTConfig, prompt: tuple[int, ...]) -> list[int]:
    return plain_loop(plain_model(style).eval(), prompt, GREEDY.sample_tokens)


def generate_on_ranks(
    case: Case, prompts: tuple[tuple[int, ...], ...], config: SampleConfig, seeds: tuple[int, ...], **options: Any
) -> list[list[list[int]]]:
    built = build_on_ranks(case)
    found = [generate(*built, prompts, config, max_length=16, seed=seed, **options).tokens for seed in seeds]
    assert built[0].training
    return found


def agreed(world_size: int, *args: Any, **options: Any) -> Any:
    """What all ranks agree on."""
    first, *others = ranks(world_size).run(generate_on_ranks, *args, **options)
    assert all(other == first for other in others)
    return first


GRID = [(1, 1, 3, False), (2, 1, 3, False), (2, 2, 0, True), (4, 1, 1, False), (4, 2, 3, True), (4, 4, 2, False)]
DEFAULT = (("gpt2", GRID[1]), ("llama", GRID[2]))


@pytest.mark.parametrize(
    ("style", "world_size", "tp", "stage", "sequence_parallel"),
    [(style, *layout) if (style, layout) in DEFAULT else slow(style, *layout) for style in STYLES for layout in GRID],
)
def test_greedy_tokens_of_a_batch_are_those_of_plain_forwards_row_by_row(
    style: str, world_size: int, tp: int, stage: int, sequence_parallel: bool
):
    model = STYLES[style]
    case = Case(model=model, tp=tp, stage=stage, sequence_parallel=sequence_parallel)
    for prompts in (PROMPTS[:3], PROMPTS[3:]):
        (tokens,) = agreed(world_size, case, prompts, GREEDY, (1,))
        assert tokens == [greedy_reference(model, prompt) for prompt in prompts]
    assert len(set(tokens[0])) > 2  # a text that varies, so equality says something


def zeropp_on_ranks(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Generated, and from plain forwards of the same sharded model, which sees quantized weights."""
    model, sharding, dims = build_on_ranks(case)
    tokens = generate(model, sharding, dims, PROMPTS[:3], SHORT, max_length=16, seed=1).tokens
    model.eval()
    return tokens, [plain_loop(model, prompt, SHORT.sample_tokens) for prompt in PROMPTS[:3]]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_greedy_tokens_under_zeropp_are_those_of_its_plain_forwards(style: str, tp: int):
    case = Case(model=STYLES[style], tp=tp, nodes=2, zero=ZEROPP)
    results = ranks(4).run(zeropp_on_ranks, case)
    for tokens, expected in results:
        assert tokens == expected
        assert tokens == results[0][0]


def gathers_on_ranks(case: Case) -> list[int]:
    """Gathers of weights by generations of 2, 2 and 8 tokens (the first also crosses nodes), then by one forward."""
    model, sharding, dims = build_on_ranks(case)
    found = []

    def calls() -> int:
        table = dims.counter.table().items()
        return sum(t.calls for (_, axis, kind), t in table if kind == "all_gather" and axis != "tp")

    for num_tokens in (2, 2, 8):
        before = calls()
        config = dataclasses.replace(GREEDY, sample_tokens=num_tokens)
        generate(model, sharding, dims, PROMPTS[:2], config, max_length=16, seed=1)
        found.append(calls() - before)
    before = calls()
    with torch.no_grad():
        model.eval()(torch.zeros(1, 16, dtype=torch.int64))
    return [*found, calls() - before]


@pytest.mark.parametrize("zero", [None, ZEROPP])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_are_gathered_once_per_generation_and_freed_after_it(zero: ZeroConfig | None, tp: int):
    for first, short, long, after in ranks(4).run(gathers_on_ranks, Case(tp=tp, nodes=2, zero=zero)):
        assert first >= short == long == after
        assert first > 0


def train_around_a_sample(case: Case, samples: bool) -> list[tuple[float, float]]:
    step, dims = build_step(case)
    found = []
    for index in range(4):
        size = case.global_batch // dims.data_size
        result = step([case.batch(index, dims.data_rank * size, size)], learning_rate=1e-2, weight_decay=0.01)
        found.append((result.loss, result.grad_norm))
        if samples:
            generate(step.model, step.sharding, dims, PROMPTS, DRAWN, max_length=16, seed=1)
    return found


@pytest.mark.parametrize("zero", [slow(None), ZEROPP])
def test_a_sample_in_the_middle_changes_nothing_about_the_training(zero: ZeroConfig | None):
    dropout = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.1)
    case = Case(model=dropout, tp=2, nodes=2, sequence_parallel=True, zero=zero)
    assert ranks(4).run(train_around_a_sample, case, True) == ranks(4).run(train_around_a_sample, case, False)


@functools.cache
def drawn_by_one_process() -> list[list[list[int]]]:
    return agreed(1, Case(model=STYLES["gpt2"]), PROMPTS[:1], DRAWN, (1, 2, 1))


@pytest.mark.parametrize(
    ("world_size", "tp", "stage", "sequence_parallel"),
    [GRID[1], GRID[2], *(slow(*layout) for layout in GRID[3:])],
)
def test_drawn_tokens_depend_on_the_seed_alone(world_size: int, tp: int, stage: int, sequence_parallel: bool):
    alone = drawn_by_one_process()
    assert alone[0] == alone[2] != alone[1]
    case = Case(model=STYLES["gpt2"], tp=tp, stage=stage, sequence_parallel=sequence_parallel)
    assert agreed(world_size, case, PROMPTS[:1], DRAWN, (1, 2, 1)) == alone


def test_drawn_tokens_of_a_prompt_do_not_depend_on_the_others_of_its_batch():
    case = Case(model=STYLES["llama"])
    (together,) = agreed(1, case, PROMPTS[:3], DRAWN, (1,))
    for number in range(3):
        (alone,) = agreed(1, case, PROMPTS[number : number + 1], DRAWN, (1,), first_prompt=number)
        assert alone == [together[number]]


def stopped_on_ranks(case: Case) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Row 0 ends after three tokens, row 2 after five."""
    told: list[tuple[int, int]] = []

    def is_last(row: int, token: int) -> bool:
        told.append((row, token))
        return [r for r, _ in told].count(row) == {0: 3, 1: 99, 2: 5}[row]

    built = build_on_ranks(case)
    return generate(*built, PROMPTS[:3], SHORT, max_length=16, seed=1, is_last=is_last).tokens, told


def test_a_row_that_ends_early_leaves_the_others_as_they_are():
    style = STYLES["llama"]
    ((tokens, told),) = ranks(1).run(stopped_on_ranks, Case(model=style))
    expected = [greedy_reference(style, prompt) for prompt in PROMPTS[:3]]
    assert tokens == [expected[0][:3], expected[1][:8], expected[2][:5]]
    assert [[token for r, token in told if r == row] for row in range(3)] == tokens


def test_nothing_is_generated_where_nothing_is_asked_for():
    assert agreed(1, Case(), PROMPTS[:2], dataclasses.replace(GREEDY, sample_tokens=0), (1,)) == [[[], []]]
