"""Flags of checkpoints that contradict each other."""

from typing import Any

from helpers.refusals import not_refused

from megazpp.checkpoint.config import CheckpointConfig

SCHEDULE = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"save": "x", "save_interval": 0}, "--save-interval 0 is not positive"),
    ({"save": "x", "keep_last": 0}, "--keep-last 0 is not positive"),
    ({"load": "x", "ckpt_step": -1}, "--ckpt-step -1 is negative"),
    ({"keep_last": 5}, "--keep-last needs --save"),
    ({"async_save": True}, "--async-save needs --save"),
    ({"save_retain_interval": 5, "load": "x"}, "--save-retain-interval needs --save"),
    ({"finetune": True, "save": "x"}, "--finetune needs --load"),
    ({"load_fallback": True}, "--load-fallback needs --load"),
    ({"ckpt_step": 0}, "--ckpt-step needs --load"),
    ({"use_checkpoint_args": True}, "--use-checkpoint-args needs --load"),
    (SCHEDULE, "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"),
]


def test_what_cannot_work_is_refused_by_name_and_value():
    assert not_refused(REFUSED, lambda flags: CheckpointConfig(**flags)) == []
