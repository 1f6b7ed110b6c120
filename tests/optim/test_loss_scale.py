"""Loss scale: every step follows Megatron-LM's rule."""

from helpers.refusals import not_refused

from megazpp.optim.config import LossScaleConfig
from megazpp.optim.loss_scale import DynamicLossScale, LossScaler, build_loss_scaler

CONFIG = LossScaleConfig(initial_loss_scale=16.0, min_loss_scale=2.0, loss_scale_window=3.0, hysteresis=2)


def scales(outcomes: str, scaler: LossScaler | None = None) -> list[float]:
    """Return the scale before the first and after every step; "." is a step without overflow, "x" one with overflow."""
    scaler = scaler or DynamicLossScale(CONFIG)
    history = [scaler.scale]
    for outcome in outcomes:
        scaler.update(outcome == "x")
        history.append(scaler.scale)
    return history


def test_dynamic_scale_follows_megatrons_rule():
    assert scales("......") == [16, 16, 16, 32, 32, 32, 64]  # doubles after each window
    # one overflow is tolerated, and the scale stays at or above the minimum
    assert scales("xxxxxx") == [16, 16, 8, 4, 2, 2, 2]
    assert scales("x.x") == [16, 16, 16, 8]  # a step without overflow does not restore the hysteresis
    assert scales("x...x") == [16, 16, 16, 16, 32, 32]  # a doubled scale restores the hysteresis
    assert scales("..x...") == [16, 16, 16, 16, 16, 16, 32]  # an overflow restarts the window


def test_restored_scale_continues_unchanged():
    outcomes = "..xx....x..x...xx."
    for cut in range(len(outcomes)):
        before, after = DynamicLossScale(CONFIG), DynamicLossScale(CONFIG)
        scales(outcomes[:cut], before)
        after.load_state_dict(before.state_dict())
        assert scales(outcomes[cut:], after) == scales(outcomes)[cut:]


def test_fp16_scale_starts_at_2_to_the_32_and_constant_scale_stays():
    for constant, fp16, expected in (
        (128.0, True, [128.0, 128.0]),
        (None, True, [2.0**32, 2.0**31]),
        (None, False, [1, 1]),
    ):
        scaler = build_loss_scaler(LossScaleConfig(loss_scale=constant, hysteresis=1), fp16=fp16)
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
