"""Test the sampling of a token: which tokens can be drawn, and how often."""

import math

import torch
import transformers
from helpers.refusals import not_refused

from megazpp.inference.config import SampleConfig
from megazpp.inference.sample import next_probabilities, occurring, pick_rows

SHARES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = SHARES.log() + 3.0


def sample(**fields: float) -> SampleConfig:
    """Return sampling settings with temperature 1 and without a limit of tokens (top-k), changed by `fields`."""
    return SampleConfig(**{"sample_temperature": 1.0, "sample_top_k": 0, **fields})


def test_token_frequencies_at_temperature_1_match_the_model():
    uniform = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = pick_rows(LOGITS.expand(4000, -1), sample(), uniform)
    shares = torch.bincount(drawn, minlength=5) / 4000
    # the bound is 4 standard deviations of the most likely token's frequency among 4000 draws
    assert (shares - SHARES).abs().max() < 0.03


def test_probabilities_match_transformers_logits_processors():
    generator = torch.Generator().manual_seed(3)
    logits, rows = 3 * torch.randn(40, 23, generator=generator), torch.randint(23, (40, 6), generator=generator)
    for config in (
        sample(sample_top_k=1, sample_temperature=0.7),
        sample(sample_top_k=30),
        sample(sample_top_p=0.01, sample_temperature=0.7),
        sample(sample_top_p=0.6, sample_top_k=5, sample_temperature=3.0),
        sample(sample_repetition_penalty=1.3),
        sample(sample_min_p=0.2, sample_temperature=0.7),
        sample(sample_repetition_penalty=0.7, sample_min_p=0.1, sample_top_k=9, sample_top_p=0.8),
    ):
        expected = logits.clone()
        for processor in (
            transformers.RepetitionPenaltyLogitsProcessor(config.sample_repetition_penalty),
            transformers.TemperatureLogitsWarper(config.sample_temperature),
            transformers.TopKLogitsWarper(config.sample_top_k or 23),
            transformers.TopPLogitsWarper(config.sample_top_p),
            transformers.MinPLogitsWarper(config.sample_min_p or 0.0),
        ):
            expected = processor(rows, expected)
        found = next_probabilities(logits, config, occurring(rows.tolist(), 23, config))
        found /= found.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(found, expected.softmax(dim=-1), rtol=1e-5, atol=1e-7, msg=str(config))
        assert torch.equal(found > 0, expected > -math.inf), config


def test_top_p_and_min_p_keep_tokens_that_just_reach_their_share():
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log2() * math.log(2.0)
    for config, kept in (
        (sample(sample_top_p=0.5), [1]),
        (sample(sample_top_p=0.51), [0, 1]),
        (sample(sample_min_p=0.5), [0, 1]),
        (sample(sample_min_p=0.51), [1]),
    ):
        assert next_probabilities(logits, config)[0].nonzero().flatten().tolist() == kept, config


def test_temperature_0_takes_the_most_likely_token_after_the_penalty():
    config = sample(sample_temperature=0.0, sample_repetition_penalty=2.0)
    # the repetition penalty doubles negative logits, so a repeated token's -1 becomes -2
    logits = torch.tensor([[-1.0, 3.0, 2.0]] * 3 + [[-1.0, -3.0, -1.5]])
    seen = occurring([[], [0, 2], [1, 1], [0]], 3, config)
    assert pick_rows(logits, config, torch.zeros(4, dtype=torch.float64), seen).tolist() == [1, 1, 2, 2]


def test_invalid_sampling_settings_raise_an_error():
    rows = [
        ({"sample_top_p": 1.1}, "--sample-top-p 1.1 is not in (0, 1]"),
        ({"sample_min_p": 1.5}, "--sample-min-p 1.5 is more than 1"),
        ({"sample_stop": ("a", "")}, "--sample-stop '' is in every text"),
        # these numbers give NaN in fp32
        ({"sample_temperature": 1e-40}, "--sample-temperature 1e-40 is not in [1e-09, 1000000000.0]"),
        ({"sample_temperature": 1e40}, "--sample-temperature 1e+40 is not in"),
        ({"sample_top_p": 1e-300}, "--sample-top-p 1e-300 is not in"),
        ({"sample_repetition_penalty": 1e-40}, "--sample-repetition-penalty 1e-40 is not in"),
    ]
    assert not not_refused(rows, lambda fields: sample(**fields))
    assert sample(sample_temperature=0.0, sample_top_p=1e-9, sample_repetition_penalty=1e9).sample_temperature == 0.0


def test_stop_string_may_contain_a_line_break():
    assert SampleConfig(sample_stop=(r"\n\n", "é.")).stops == ("\n\n", "é.")
