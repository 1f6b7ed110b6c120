"""Where a run is recorded: its folder, wandb and TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.flags import flag


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is recorded, how often, and where."""

    run_dir: str | None = flag(None, "folder of this run's records; default: runs/<time>-<config name>")
    log_interval: int = flag(100, "iterations between two log lines")
    log_throughput: bool = flag(False, "send throughput (model TFLOP/s per rank) to wandb and TensorBoard")
    log_params_norm: bool = flag(False, "log the L2 norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "log how many gradient elements are zero")
    wandb_project: str = flag("", "record to this Weights & Biases project; without it wandb is off")
    wandb_entity: str = flag("", "Weights & Biases entity (user or team)")
    wandb_exp_name: str = flag("", "name of the wandb run; default: the run folder's name")
    wandb_save_dir: str = flag("", "where wandb writes its local files; default: the run folder")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events to this folder")
    tensorboard_log_interval: int = flag(1, "iterations between two records to wandb and TensorBoard")
    tensorboard_queue_size: int = flag(1000, "TensorBoard records that wait before they are written")
    log_timers_to_tensorboard: bool = flag(False, "record step time and throughput to wandb and TensorBoard")
    log_loss_scale_to_tensorboard: bool = flag(True, "record the loss scale to wandb and TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "record the validation perplexity")
    log_memory_to_tensorboard: bool = flag(False, "record device memory to TensorBoard")
    log_world_size_to_tensorboard: bool = flag(False, "record the number of ranks to wandb and TensorBoard")
