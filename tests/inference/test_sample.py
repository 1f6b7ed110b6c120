"""Sampling against a plain loop over one model, and over every way of spreading the model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.training import CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_on_ranks

from megazpp.inference.sample import SampleConfig, generate
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_

PROMPT = (5, 1, 100)
STYLES = {  # a larger std than usual, so that the logits differ by much more than rounding
    "gpt2": dataclasses.replace(GPT2_STYLE, init_method_std=0.5),
    "llama": dataclasses.replace(LLAMA_STYLE, init_method_std=0.5),
}
GREEDY = SampleConfig(sample_tokens=20, sample_temperature=0.0)  # beyond the longest input of 16
DRAWN = SampleConfig(sample_tokens=20, sample_temperature=0.7, sample_top_k=10)


def plain_model(style: GPTConfig) -> GPTModel:
    model = GPTModel(style, vocab_size=101, tp=MeshAxis("tp"))
    initialize_parameters_(model, seed=5, draw_device=CPU)
    return model


@functools.cache
@torch.no_grad()
def greedy_reference(style: GPTConfig) -> list[int]:
    """Argmax of a plain forward over what came before, one token after the other, without padding."""
    model, tokens = plain_model(style).eval(), list(PROMPT)
    for _ in range(GREEDY.sample_tokens):
        logits = model(torch.tensor([tokens[-16:]]))[0, -1, :101]
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


def sample_on_ranks(case: Case, config: SampleConfig, seeds: tuple[int, ...]) -> list[list[int]]:
    model, sharding, _ = build_on_ranks(case)
    samples = [generate(model, sharding, PROMPT, config, max_length=16, seed=seed) for seed in seeds]
    assert model.training
    return samples


def sample(world_size: int, config: SampleConfig, seeds: tuple[int, ...] = (1,), **case: Any) -> list[list[int]]:
    """What all ranks agree on."""
    first, *others = ranks(world_size).run(sample_on_ranks, Case(**case), config, seeds)
    assert all(other == first for other in others)
    return first


GRID = [(1, 1, 3, False), (2, 1, 3, False), (2, 2, 0, True), (4, 1, 1, False), (4, 2, 3, True), (4, 4, 2, False)]


@pytest.mark.parametrize(("world_size", "tp", "stage", "sequence_parallel"), GRID)
@pytest.mark.parametrize("style", STYLES)
def test_greedy_tokens_are_those_of_a_plain_forward(
    style: str, world_size: int, tp: int, stage: int, sequence_parallel: bool
):
    model = STYLES[style]
    (tokens,) = sample(world_size, GREEDY, model=model, tp=tp, stage=stage, sequence_parallel=sequence_parallel)
    assert tokens == greedy_reference(model)
    assert len(set(tokens)) > 2  # a text that varies, so equality says something


@pytest.mark.parametrize(("world_size", "tp", "stage", "sequence_parallel"), GRID[1:])
def test_drawn_tokens_depend_on_the_seed_alone(world_size: int, tp: int, stage: int, sequence_parallel: bool):
    alone = sample(1, DRAWN, (1, 2, 1), model=STYLES["gpt2"])
    assert alone[0] == alone[2] != alone[1]
    spread = {"tp": tp, "stage": stage, "sequence_parallel": sequence_parallel}
    assert sample(world_size, DRAWN, (1, 2, 1), model=STYLES["gpt2"], **spread) == alone


def test_top_k_draws_only_among_the_most_likely():
    model = plain_model(STYLES["gpt2"]).eval()
    with torch.no_grad():
        likely = set(model(torch.tensor([PROMPT]))[0, -1, :101].topk(3).indices.tolist())
    config = SampleConfig(sample_tokens=1, sample_temperature=5.0, sample_top_k=3)
    drawn = {token for (token,) in sample(1, config, tuple(range(40)), model=STYLES["gpt2"])}
    assert drawn == likely
    everything = dataclasses.replace(config, sample_top_k=0)
    drawn = {token for (token,) in sample(1, everything, tuple(range(40)), model=STYLES["gpt2"])}
    assert len(drawn) > 10
    assert all(0 <= token < 101 for token in drawn)


def test_the_top_1_is_greedy_at_any_temperature():
    config = SampleConfig(sample_tokens=20, sample_temperature=3.0, sample_top_k=1)
    assert sample(1, config, model=STYLES["gpt2"]) == [greedy_reference(STYLES["gpt2"])]


@pytest.mark.parametrize("name", ["sample_tokens", "sample_temperature", "sample_top_k"])
def test_negative_settings_are_refused(name: str):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} -1 is negative"):
        SampleConfig(**{name: -1})
