"""Attach the guard against NaN and loss spikes to a training step, and inject NaN into the step's model."""

import itertools
from pathlib import Path

import torch
from helpers.checkpoints import digest, local_part
from helpers.context import context
from helpers.training import Case
from torch.utils.hooks import RemovableHandle

from megazpp.training.anomalies import Guard, LossHistory
from megazpp.training.batches import BatchConfig, plan_batches
from megazpp.training.config import AnomalyConfig
from megazpp.training.step import LaunchedStep, TrainStep


def guarded(step: TrainStep, case: Case, folder: Path | None, *, waits: bool = False, **settings: bool) -> None:
    """Attach the guard against NaN to a training step, as a run with --run-dir `folder` has it.

    Args:
        step: training step that gets the guard.
        case: batch sizes of the run.
        folder: run folder in which the guard records anomalies; None records nothing.
        waits: True to detect loss spikes too. The step must then wait for the loss before it updates the weights.
        settings: further keyword arguments of `Guard`.
    """
    size = case.global_batch // step.dims.data_size // case.micro_batches
    batches = BatchConfig(micro_batch_size=size, global_batch_size=case.global_batch, train_iters=10)
    plan = plan_batches(batches, data_parallel_size=step.dims.data_size)
    run, _ = context(step.dims, folder)
    config = AnomalyConfig(loss_spike_sigma=1e6 if waits else None)
    step.guard = Guard(config, step.sharding, run, plan, LossHistory(), **{"scaler": step.scaler, **settings})


def launch(step: TrainStep, case: Case, index: int) -> LaunchedStep:
    batches = case.batches(index, step.dims)
    return step.launch(batches, learning_rate=1e-2, weight_decay=0.01, iteration=index + 1)


def state(step: TrainStep) -> dict[str, str]:
    """Return a hash of each of this rank's weights, buffers and optimizer moments, by name."""
    found = {name: digest(buffer) for name, buffer in step.model.named_buffers()}
    for name, parameter in step.model.named_parameters():
        tensors = {"weight": parameter.detach(), **step.optimizer.state.get(parameter, {})}
        found |= {f"{name}.{key}": digest(x) for key, x in tensors.items()}
    return found


def poison_gradient(module: torch.nn.Module) -> RemovableHandle:
    """Make one element of the gradient of the module's weight NaN in each backward; return the hook's handle."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        local_part(gradient).view(-1)[5] = float("nan")
        return gradient

    return module.register_forward_pre_hook(lambda m, inputs: m.weight.register_hook(poison) and None)


def poison_output(module: torch.nn.Module, when: int) -> RemovableHandle:
    """Make the module's output NaN in call number `when`, counted from 1; return the hook's handle."""
    call = itertools.count(1)
    return module.register_forward_hook(lambda m, inputs, output: output * torch.nan if next(call) == when else output)
