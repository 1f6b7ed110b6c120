"""Command-line flags for saving and loading checkpoints. Most have the names and meanings of Megatron-LM's flags."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import Config, flag, spelling


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Checkpoints.

    Folders to save to and load from, save intervals, and the parts of a checkpoint to save and load.

    Attributes:
        save: folder to save checkpoints in; only one job at a time may use it.
        save_to_run_dir: save checkpoints in checkpoints/ of the run folder, if --save is not given.
        save_interval: iterations between checkpoints; the last iteration is always saved.
        keep_last: number of newest checkpoints to keep; older ones are deleted (default: keep all, unless
            --save-retain-interval is given).
        save_retain_interval: keep only checkpoints whose iteration is a multiple of this number, and the --keep-last
            newest ones, or the newest one without --keep-last.
        save_optim: save the optimizer states.
        save_rng: save the states of the random generators.
        async_save: save in the background during training, from a copy of the tensors in host memory.
        load: folder of checkpoints to load; a training run starts from scratch if it has none.
        ckpt_step: load the checkpoint of this iteration instead of the latest.
        load_fallback: load the newest undamaged checkpoint before the requested one if that is damaged.
        load_optim: load the optimizer states and continue the learning-rate schedule.
        load_rng: load the states of the random generators.
        finetune: load only the weights and start at iteration 0.
        exit_on_missing_checkpoint: stop with an error if --load has no checkpoint.
        use_checkpoint_args: take the model's shape from the checkpoint.
        override_opt_param_scheduler: use this run's learning-rate schedule if the checkpoint has a different one.
        use_checkpoint_opt_param_scheduler: use the checkpoint's learning-rate schedule if this run has a different one.
    """

    save: str | None = flag(None, common=True)
    save_to_run_dir: bool = flag(False)
    save_interval: int | None = flag(None, common=True, must_be="positive")
    keep_last: int | None = flag(None, must_be="positive")
    save_retain_interval: int | None = flag(None, must_be="positive")
    save_optim: bool = flag(True)
    save_rng: bool = flag(True)
    async_save: bool = flag(False)
    load: str | None = flag(None, common=True)
    ckpt_step: int | None = flag(None, must_be="not negative")
    load_fallback: bool = flag(False)
    load_optim: bool = flag(True)
    load_rng: bool = flag(True)
    finetune: bool = flag(False)
    exit_on_missing_checkpoint: bool = flag(False)
    use_checkpoint_args: bool = flag(False)
    override_opt_param_scheduler: bool = flag(
        False,
        name="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        name="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # ---- reject flags that have no effect without --save or --load
        for name in ("keep_last", "save_retain_interval", "async_save"):
            if getattr(self, name) and not self.saves:
                raise ValueError(f"{spelling(self, name)} needs --save: without it, the run saves no checkpoints")
        for name in ("ckpt_step", "load_fallback", "finetune", "exit_on_missing_checkpoint", "use_checkpoint_args"):
            value = getattr(self, name)
            if value is not None and value is not False and self.load is None:
                raise ValueError(f"{spelling(self, name)} needs --load: without it, the run loads no checkpoint")
        # ---- reject flags that contradict each other
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one"
            )

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints, to --save or, with --save-to-run-dir, into its run folder."""
        return self.save is not None or self.save_to_run_dir
