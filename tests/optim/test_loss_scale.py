"""Test the dynamic loss scale: it follows Megatron-LM's rule at every step."""

from helpers.refusals import not_refused

from megazpp.optim.config import LossScaleConfig
from megazpp.optim.optimizer import LossScaler

CONFIG = LossScaleConfig(initial_loss_scale=16.0, min_loss_scale=2.0, loss_scale_window=3.0, hysteresis=2)


def scales(outcomes: str, scaler: LossScaler | None = None) -> list[float]:
    """Return the loss scale before the first step and after every step of `outcomes`.

    "." is a step without overflow, "x" is a step with overflow.
    """
    scaler = scaler or LossScaler(CONFIG, fp16=True)
    history = [scaler.scale]
    for outcome in outcomes:
        scaler.update(outcome == "x")
        history.append(scaler.scale)
    return history


def test_dynamic_scale_follows_megatrons_rule():
    # without overflow, the scale doubles after each window of 3 steps
    assert scales("......") == [16, 16, 16, 32, 32, 32, 64]
    # The first overflow is tolerated (hysteresis), each further one halves the scale, and the scale stays at or above
    # the minimum of 2.
    assert scales("xxxxxx") == [16, 16, 8, 4, 2, 2, 2]
    # one step without overflow does not renew the tolerance, so the second overflow halves the scale
    assert scales("x.x") == [16, 16, 16, 8]
    assert scales("x...x") == [16, 16, 16, 16, 32, 32]  # when the scale doubles, one overflow is tolerated again
    # an overflow restarts the window of 3 steps, also if it is tolerated
    assert scales("..x...") == [16, 16, 16, 16, 16, 16, 32]


def test_overflow_is_an_error_once_the_scale_cannot_decrease():
    """The scale falls from 16 to the minimum of 2 in four overflows, so the next one has to end the run."""
    scaler, accepted = LossScaler(CONFIG, fp16=True), []
    for _ in range(6):
        accepted.append(scaler.accepts_overflow)
        scaler.update(True)
    assert accepted == [True, True, True, True, False, False]
    assert not LossScaler(LossScaleConfig(loss_scale=8.0), fp16=True).accepts_overflow


def test_restored_scale_continues_unchanged():
    outcomes = "..xx....x..x...xx."
    for cut in range(len(outcomes)):
        before, after = LossScaler(CONFIG, fp16=True), LossScaler(CONFIG, fp16=True)
        scales(outcomes[:cut], before)
        after.load_state_dict(before.state_dict())
        assert scales(outcomes[cut:], after) == scales(outcomes)[cut:]


def test_fp16_scale_starts_at_2_to_the_32_and_constant_scale_stays():
    for constant, fp16, expected in (
        (128.0, True, [128.0, 128.0]),
        (None, True, [2.0**32, 2.0**31]),
        (None, False, [1, 1]),
    ):
        scaler = LossScaler(LossScaleConfig(loss_scale=constant, hysteresis=1), fp16=fp16)
        assert scales("x", scaler) == expected
        scaler.load_state_dict(scaler.state_dict())
        assert scaler.scale == expected[-1]


def test_invalid_loss_scales_are_refused():
    rows = [
        ({"loss_scale": 0.0}, "--loss-scale 0.0 is not positive"),
        ({"hysteresis": 0}, "--hysteresis 0 is not positive"),
        ({"min_loss_scale": 4.0, "initial_loss_scale": 2.0}, "--min-loss-scale 4.0 is above --initial-loss-scale 2.0"),
    ]
    assert not not_refused(rows, lambda config: LossScaleConfig(**config))
