"""Test the schedule of learning rate and weight decay at hand-computed values, and rejected flags."""

import math
from typing import Any

import pytest
from helpers.refusals import not_refused

from megazpp.optim.config import ScheduleConfig
from megazpp.optim.schedule import Schedule, build_schedule


def schedule(train_iters: int | None = 100, train_samples: int | None = None, **flags: Any) -> Schedule:
    """Build a learning-rate schedule for 10 samples per step.

    By default, the rate has its peak at 1.0 and its minimum at 0.1.
    """
    config = ScheduleConfig(**{"lr": 1.0, "min_lr": 0.1, **flags})
    return build_schedule(
        config, weight_decay=0.01, train_iters=train_iters, train_samples=train_samples, global_batch_size=10
    )


WARM = {"lr_warmup_iters": 20}
COSINE = {"lr_decay_style": "cosine", "lr_warmup_iters": 10}
CONSTANT = {"lr_decay_style": "constant", "lr_warmup_iters": 10}
ROOT = {"lr_decay_style": "inverse-square-root"}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 40}
RATES = [  # each entry: flags of the schedule, and the expected learning rates by number of consumed samples
    # linear: the learning rate falls from 1.0 at the end of the warm-up (200 samples) to 0.1 at 1000 samples
    (WARM, {0: 0.0, 50: 0.25, 200: 1.0, 400: 0.1 + 0.75 * 0.9, 1000: 0.1, 5000: 0.1}),
    ({**WARM, "lr_warmup_init": 0.2}, {0: 0.2, 100: 0.6}),
    ({}, {0: 1.0, 500: 0.55}),
    ({"lr_decay_iters": 50}, {250: 0.55, 510: 0.1}),
    # --lr-warmup-fraction is a fraction of the decay length, and may give a fraction of a sample
    ({"lr_warmup_fraction": 0.25}, {125: 0.5}),
    ({"lr_warmup_fraction": 0.25, "lr_decay_iters": 40}, {50: 0.5}),
    ({"lr_warmup_fraction": 0.0125}, {12: 12 / 12.5}),
    # cosine: the decaying part 0.5 * (cos(pi * progress) + 1) is 3/4 at a third of the decay and 1/2 at half of it
    (COSINE, {100: 1.0, 400: 0.1 + 0.75 * 0.9, 550: 0.55, 1001: 0.1}),
    # constant: after the warm-up, the peak for the rest of the run
    (CONSTANT, {50: 0.5, 9999: 1.0}),
    # inverse square root: the rate is sqrt(warm-up / consumed samples), not below the minimum. After the decay length
    # it is the minimum.
    ({**ROOT, "lr_warmup_iters": 10}, {400: 0.5, 1000: math.sqrt(0.1), 1001: 0.1}),
    ({**ROOT, "min_lr": 0.25, "lr_warmup_iters": 1}, {640: 0.25}),
    (ROOT, {0: 1.0, 25: 0.2}),
    # WSD (warm-up, stable, decay): the rate is the peak until 400 samples before the end, and then it decays
    ({**WSD, "lr_warmup_iters": 10}, {600: 1.0}),
    (WSD, {800: 0.1 + 0.9 * (2.0 * math.sqrt(0.5) - 1.0), 1000: 0.1}),
    ({**WSD, "lr_wsd_decay_style": "linear"}, {700: 0.775}),
    ({**WSD, "lr_wsd_decay_style": "cosine"}, {800: 0.55}),
    ({**WSD, "lr_wsd_decay_style": "minus_sqrt"}, {700: 0.55}),
]


def test_learning_rate_equals_megatrons():
    for flags, expected in RATES:
        curve = schedule(**flags)
        assert {n: curve.learning_rate(n) for n in expected} == pytest.approx(expected, rel=1e-12, abs=1e-15), flags


def test_lengths_in_samples_give_the_curve_of_iterations():
    flags = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}
    by_iters = schedule(lr_warmup_iters=10, lr_decay_iters=80, lr_wsd_decay_iters=30, **flags)
    by_samples = schedule(None, 1000, lr_warmup_samples=100, lr_decay_samples=800, lr_wsd_decay_samples=300, **flags)
    assert by_iters == by_samples


def test_weight_decay_ramp_equals_megatrons():
    assert schedule().weight_decay(300) == 0.01
    for style, curve in (
        ("linear", {0: 0.1, 250: 0.15, 1000: 0.3, 2000: 0.3}),
        ("cosine", {0: 0.1, 500: 0.2, 1000 / 3: 0.1 + 0.25 * 0.2, 1001: 0.3}),
    ):
        ramp = {"weight_decay_incr_style": style, "start_weight_decay": 0.1, "end_weight_decay": 0.3}
        # the ramp of weight decay lasts for the whole run, whatever --lr-decay-iters says
        found = schedule(lr_decay_iters=20, **ramp)
        assert {n: found.weight_decay(n) for n in curve} == pytest.approx(curve, rel=1e-12), style


ITERS, SAMPLES = (10, None), (None, 99)  # lengths of the run: (--train-iters, --train-samples)
WARMUP_AND_FRACTION = {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}
DECAYS = {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1}
REFUSED = [
    (ITERS, {"lr_decay_samples": 7}, "--lr-decay-samples 7 cannot be combined with --train-iters 10"),
    (ITERS, {"lr_wsd_decay_samples": 7}, "--lr-wsd-decay-samples 7 cannot be combined"),
    (SAMPLES, {"lr_decay_iters": 7}, "--lr-decay-iters 7 cannot be combined with --train-samples 99"),
    (SAMPLES, {"lr_warmup_iters": 7}, "--lr-warmup-iters 7 cannot be combined with --train-samples 99"),
    (ITERS, WARMUP_AND_FRACTION, "--lr-warmup-fraction 0.1 and --lr-warmup-iters 2 exclude"),
    (SAMPLES, {"lr_warmup_samples": 2, "lr_warmup_fraction": 0.1}, "--lr-warmup-samples 2 exclude each other"),
    (ITERS, {"lr_warmup_iters": 10}, "must be shorter than the decay, --train-iters 10"),
    (ITERS, {"lr_warmup_iters": 5, "lr_decay_iters": 5}, "must be shorter than the decay, --lr-decay-iters 5"),
    (SAMPLES, {"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0: the warm-up must be shorter"),
    (ITERS, {"lr_warmup_iters": -1}, "--lr-warmup-iters -1 is negative"),
    (ITERS, {"lr_decay_iters": 0}, "--lr-decay-iters 0 is not positive"),
    (ITERS, {"lr": None}, "--lr is required"),
    (ITERS, {"min_lr": 2.0}, "--min-lr 2.0 is above --lr 1.0"),
    (ITERS, {"lr_warmup_init": 2.0}, "--lr-warmup-init 2.0 is not between 0 and --lr 1.0"),
    (ITERS, {"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (ITERS, {**WSD, "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2}, "decay-iters 9 does not fit"),
    (ITERS, {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, "(given: None, 0.1)"),
    (ITERS, DECAYS, "--start-weight-decay 0.2 is not between 0 and --end-weight-decay 0.1"),
]


def test_flags_that_megatron_refuses_are_refused():
    assert not not_refused(REFUSED, lambda train, flags: schedule(*train, **{"min_lr": 0.0, **flags}))
