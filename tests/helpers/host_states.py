"""Train with training states in host memory (--optimizer-cpu-offload), and return all results that may not change.

Tests compare these results with a training whose states are in device memory. They also check the bytes over PCIe.
"""

import hashlib
import time
from typing import Any

import torch
from helpers.training import Case, build_step

from megazpp.host_states.states import HostStates


def train(case: Case) -> dict[str, Any]:
    """Train with slow host updates, which still run when the next step begins, and return the results of this rank.

    Returns:
        "steps": (loss, gradient norm, True if skipped) per step; "states": hashes of weights and optimizer states by
        name; "sent": bytes by wire; "pcie": bytes between host and device per step; "elements": size of this rank's
        shard.
    """
    step, dims = build_step(case)
    # make each update on the host take longer than the next step's first hop, to expose a hop that does not wait
    if isinstance(host := step.sharding.states, HostStates):
        submit = host.submit
        host.submit = lambda task: submit(lambda rows: (time.sleep(0.02), task(rows)))  # type: ignore[method-assign]
    steps, pcie = [], []
    for index in range(case.steps):
        before = dims.counter.sent_bytes("pcie")
        settings = {"learning_rate": case.learning_rate, "weight_decay": 0.01, "iteration": index + 1}
        record = step(case.batches(index, dims), **settings)
        steps.append((record.loss, record.grad_norm, record.skipped))
        pcie.append(dims.counter.sent_bytes("pcie") - before)
    step.sharding.settle()
    states = {name: digest(x) for name, x in step.model.named_parameters()}
    for name, x in step.model.named_parameters():
        states |= {f"{name}.{key}": digest(value) for key, value in step.optimizer.state[x].items()}
    sent = {wire: dims.counter.sent_bytes(wire) for wire in ("tp", "local", "cross")}
    return {"steps": steps, "states": states, "sent": sent, "pcie": pcie, "elements": step.sharding.shard_elements}


def digest(x: torch.Tensor) -> str:
    """Return a hash of the bytes of this rank's shard of a tensor."""
    own = getattr(x, "_local_tensor", x).detach().contiguous()
    return hashlib.sha256(own.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def train_with_events(case: Case) -> dict[str, Any]:
    """Train with host states while the device skips the second update, and with an evaluation after each step.

    Returns:
        "losses": training and evaluation losses in order; "states": hashes of this rank's weights by name; "copied":
        bytes over PCIe by direction; "elements": size of this rank's shard.
    """
    step, dims = build_step(case)
    update, losses = step.optimizer.step, []

    def skipping(*args: Any, **settings: Any) -> None:
        update(*args, **settings | {"found_inf": torch.tensor(float(len(losses) == 2))})

    step.optimizer.step = skipping  # type: ignore[method-assign]
    for index in range(case.steps):
        settings = {"learning_rate": case.learning_rate, "weight_decay": 0.01, "iteration": index + 1}
        losses.append(step(case.batches(index, dims), **settings).loss)
        batch = case.batches(99, dims)[0]
        step.model.eval()
        with torch.no_grad(), step.sharding.keep_unsharded():
            losses.append(float(step.model(batch.tokens, batch.labels).sum()))
    step.sharding.settle()
    states = {name: digest(x) for name, x in step.model.named_parameters()}
    table = dims.counter.table()
    copied = {key[2]: traffic.sent_bytes for key, traffic in table.items() if key[0] == "pcie"}
    return {"losses": losses, "states": states, "copied": copied, "elements": step.sharding.shard_elements}
