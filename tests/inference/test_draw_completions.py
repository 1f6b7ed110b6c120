"""Test the generation of a whole batch, in which the host rarely waits for the device.

The reference is a generation that checks each token on the host.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.ranks import ranks
from helpers.tensor_parallel import build_gpt
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE

from megazpp.base.program import UserError
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import Drawn, draw_completions, evaluating
from megazpp.model.gpt import GPTModel

PROMPTS = [[5, 1, 100], [7], [2, 3, 5, 7, 11, 13], [30, 31], [50], [99, 98, 97, 96]]
LIMIT = 40
# initial weights have a larger standard deviation than usual, so that logits differ by much more than rounding
STYLES = {
    "gpt2": dataclasses.replace(GPT2_STYLE, init_method_std=0.3, max_position_embeddings=64),
    "llama": dataclasses.replace(LLAMA_STYLE, init_method_std=0.3, max_position_embeddings=64),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "all tokens": {"sample_top_k": 0, "sample_temperature": 1.0},
    "top k and p": {"sample_top_k": 20, "sample_top_p": 0.9},
    "min p": {"sample_min_p": 0.05},
    "penalty": {"sample_repetition_penalty": 1.5, "sample_top_k": 0},
    "greedy": {"sample_temperature": 0.0, "sample_repetition_penalty": 1.2},
}
# absolute tolerance for log-probabilities in fp32, which are rounded differently with another batch size
ROUNDING = 1e-5


def draw(model: GPTModel, config: SampleConfig, *, ends: Sequence[int] = (), **options: Any) -> Drawn:
    uniform = torch.rand(len(PROMPTS), config.sample_tokens, generator=torch.Generator().manual_seed(2)).double()
    with evaluating(model):
        return draw_completions(model, model.tp, PROMPTS, config, uniform, ends=ends, **options)


def end_of_some(model: GPTModel, config: SampleConfig) -> list[int]:
    """Return two end tokens: one that about half of the completions contain, and one outside of the vocabulary."""
    found = draw(model, config)
    counts = collections.Counter(token for row in found.tokens.tolist() for token in set(row))
    return [min(counts, key=lambda token: abs(counts[token] - len(PROMPTS) // 2)), 500]


def assert_same(found: Drawn, expected: Drawn, *, atol: float) -> None:
    for name in ("tokens", "lengths", "ended"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.logps, expected.logps, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("style", "config"),
    [
        *(("gpt2", "greedy"), ("llama", "penalty")),
        *(slow("gpt2", "all tokens"), slow("llama", "top k and p"), slow("gpt2", "min p")),
    ],
)
def test_host_that_looks_every_eight_tokens_finds_the_same_completions(style, config):
    """Compare completions if the host looks for ended rows after each token, and after every eighth token."""
    model, sample = build_gpt(STYLES[style]), SampleConfig(sample_tokens=LIMIT, **CONFIGS[config])
    ends = end_of_some(model, sample)
    expected = draw(model, sample, ends=ends)
    assert expected.ended.any()
    assert not expected.ended.all()
    assert_same(draw(model, sample, ends=ends, look_every=8), expected, atol=ROUNDING)


def count_waits(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Patch the tensor methods that wait for a device, and the functions that create tensors on the host.

    Return a counter of their calls, by name.
    """
    counts: collections.Counter[str] = collections.Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("tolist", "item", "cpu", "nonzero", "numpy", "__bool__", "__int__", "__float__"):
        counted(torch.Tensor, name)
    counted(torch, "tensor")
    return counts


def test_host_waits_once_per_eight_tokens_and_copies_nothing(monkeypatch):
    model, found = build_gpt(STYLES["gpt2"]), []
    counts = count_waits(monkeypatch)
    for limit in (8, 40):
        counts.clear()
        sample = SampleConfig(sample_tokens=limit, sample_top_k=20, sample_top_p=0.9, sample_repetition_penalty=1.1)
        # the end token 500 is outside of the vocabulary, so no row ends early
        draw(model, sample, ends=[500], look_every=8)
        found.append(dict(counts))
    short, long = found
    assert long.pop("tolist") == 4  # the host looks for ended rows after 8, 16, 24 and 32 tokens
    # all other waits happen before the first token or after the last, so their number does not grow with the length
    assert long == short
    assert short["cpu"] == 4


def test_forward_hooks_run_for_the_prompts_only_and_stay_registered():
    """Check that forward hooks run for the prompts, are off for further tokens, and are registered again at the end.

    Hooks of FSDP2 and of frozen units gather weights, which stay gathered after the prompts' forward.
    """
    model, calls = build_gpt(STYLES["gpt2"]), collections.Counter()
    units = [model, *model.layers]
    for index, module in enumerate(units):
        module.register_forward_pre_hook(lambda module, args, index=index: calls.update([index]))
    hooks = [module._forward_pre_hooks for module in units]
    draw(model, SampleConfig(sample_tokens=5))
    assert calls == dict.fromkeys(range(len(units)), 1)
    assert all(module._forward_pre_hooks is kept for module, kept in zip(units, hooks, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_raise_an_error(temperature):
    model = build_gpt(STYLES["gpt2"])
    with torch.no_grad():
        model.layers[-1].mlp.fc2.weight[0, 0] = torch.nan
    for options in ({}, {"is_last": lambda row, token: False}):
        with pytest.raises(UserError, match="the model's logits are NaN"):
            draw(model, SampleConfig(sample_tokens=3, sample_temperature=temperature), **options)


def test_sampling_ends_at_a_stop_signal():
    model, calls = build_gpt(STYLES["llama"]), iter(range(100))
    drawn = draw(model, SampleConfig(sample_tokens=LIMIT), stopped=lambda: next(calls) == 3)
    assert drawn.lengths.tolist() == [3] * len(PROMPTS)


def draw_on_ranks(config: SampleConfig, ends: Sequence[int], look_every: int) -> Drawn:
    return draw(build_gpt(STYLES["llama"]), config, ends=ends, look_every=look_every)


@pytest.mark.parametrize("config", ["penalty", slow("top k and p")])
def test_tp_ranks_that_look_every_eight_tokens_sample_the_same(config):
    sample = SampleConfig(sample_tokens=LIMIT, **CONFIGS[config])
    ends = end_of_some(build_gpt(STYLES["llama"]), sample)
    (expected,) = ranks(1).run(draw_on_ranks, sample, ends, 1)
    for found in ranks(2).run(draw_on_ranks, sample, ends, 8):
        assert_same(found, expected, atol=ROUNDING)
