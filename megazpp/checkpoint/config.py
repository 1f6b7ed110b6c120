"""The flags of checkpoints: Megatron's, and --keep-last and --load-fallback."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import check_not_negative, check_positive, flag, spelling


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Where and how often to save, and what to load.
    """

    save: str | None = flag(None, "folder for checkpoints; no other job may use it at the same time", common=True)
    save_to_run_dir: bool = flag(False, "without --save: write checkpoints to the run folder, in checkpoints/")
    save_interval: int | None = flag(None, "iterations between checkpoints; the last one is always saved", common=True)
    keep_last: int | None = flag(None, "delete checkpoints but this many of the newest; default: keep all")
    save_retain_interval: int | None = flag(
        None, "keep checkpoints of iterations that this divides, and delete others but --keep-last (1)"
    )
    save_optim: bool = flag(True, "write the optimizer's state")
    save_rng: bool = flag(True, "write the states of the random generators")
    async_save: bool = flag(False, "go on training while a copy is written; takes the memory of that copy")
    load: str | None = flag(None, "folder of checkpoints to resume from; start anew if it has none", common=True)
    ckpt_step: int | None = flag(None, "load the checkpoint of this iteration instead of the latest")
    load_fallback: bool = flag(False, "where the checkpoint to load is damaged, load the newest that is not")
    load_optim: bool = flag(True, "load the optimizer's state and continue its schedule")
    load_rng: bool = flag(True, "load the states of the random generators")
    finetune: bool = flag(False, "load the weights only, and begin with iteration 0")
    lora_base: tuple[str, ...] = flag(
        (),
        "folders that now hold the bases of LoRA's adapters, where they are not where --load's record says",
        nargs="*",
    )
    exit_on_missing_checkpoint: bool = flag(False, "end if --load has no checkpoint, instead of starting anew")
    use_checkpoint_args: bool = flag(False, "take the model's shape from the checkpoint's flags")
    override_opt_param_scheduler: bool = flag(
        False,
        "where the schedule is not the checkpoint's, go on with this run's",
        name="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "where the schedule is not the checkpoint's, go on with the checkpoint's",
        name="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
    )

    def __post_init__(self) -> None:
        check_positive(self, "save_interval", "keep_last", "save_retain_interval")
        check_not_negative(self, "ckpt_step")
        for name in ("keep_last", "save_retain_interval", "async_save"):
            if getattr(self, name) and self.save is None and not self.save_to_run_dir:
                raise ValueError(f"{spelling(self, name)} needs --save")
        for name in ("ckpt_step", "load_fallback", "finetune", "exit_on_missing_checkpoint", "use_checkpoint_args"):
            value = getattr(self, name)
            if value is not None and value is not False and self.load is None:
                raise ValueError(f"{spelling(self, name)} needs --load")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"
            )
