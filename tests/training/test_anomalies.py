"""Test the guard, which reacts to training steps with a NaN, an infinite number or a loss spike.

A loss or gradient that is NaN or infinite ends the job, or the step is skipped. A NaN on one rank ends the job on all
ranks before the optimizer's update, and the error names the rank, the parameter and the samples. A step with a loss
spike is skipped.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.context import context
from helpers.faults import guarded, launch, poison_gradient, poison_output, state
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import Case, build_step

from megazpp.optim.clip import GradNorm
from megazpp.optim.config import LossScaleConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.axis import MeshAxis
from megazpp.training.anomalies import Guard, LossHistory, NotFiniteError, StepReport, describe
from megazpp.training.batches import BatchConfig, plan_batches
from megazpp.training.config import AnomalyConfig
from megazpp.zero.config import ZeroConfig

NAN, INF = float("nan"), float("inf")
ZEROPP = ZeroConfig(zeropp=True)


def scaler(*, fp16: bool = True, **flags: float) -> LossScaler:
    return LossScaler(LossScaleConfig(**flags), fp16=fp16)


class Watched:
    """A guard of one rank that detects losses more than `sigma` standard deviations above the recent mean.

    `said` is the list of its log lines.
    """

    def __init__(self, sigma: float | None = None, *, check: bool = True, **settings: Any) -> None:
        self.history, self.iteration = LossHistory(), 0
        self.sharding = mock.Mock(**{"own_gradients.return_value": None})
        rank = MeshAxis("world")
        run, self.said = context(SimpleNamespace(world=rank, tp=rank, shard=rank, data_rank=0))
        config = AnomalyConfig(loss_spike_sigma=sigma, check_for_nan_in_loss_and_grad=check)
        plan = plan_batches(BatchConfig(micro_batch_size=1, train_iters=200), data_parallel_size=1)
        self.guard = Guard(config, self.sharding, run, plan, self.history, **{"scaler": scaler(fp16=False), **settings})

    def takes(self, *losses: float, norm: float = 1.0) -> list[bool]:
        """Pass one step per loss to the guard.

        Return a list that has True for each step that the guard lets update weights.
        """
        return [self._takes(loss, norm) for loss in losses]

    def _takes(self, loss: float, norm: float) -> bool:
        self.iteration += 1
        self.guard.begin_step()
        found = GradNorm(torch.tensor(norm), [], torch.zeros(0), 1.0)
        return self.guard.allows(self.iteration, loss, norm, self.guard.evidence(torch.tensor([loss]), found))


def test_non_finite_loss_or_gradient_ends_the_job_or_skips_the_step():
    """Test which non-finite numbers end the job.

    With a dynamic loss scale that can decrease, an infinite or NaN gradient only skips the step, but a NaN or infinite
    loss still ends the job. Without --check-for-nan-in-loss-and-grad, such losses and gradients only skip the step.
    """
    dynamic, unchecked = {"scaler": scaler()}, {"check": False}
    lowest, tolerant = ({"scaler": scaler(initial_loss_scale=1.0, hysteresis=h)} for h in (1, 2))
    constant = {"scaler": scaler(loss_scale=8.0)}
    for settings, loss, norm, expected in (
        ({}, 1.0, 1.0, [True]),
        ({}, NAN, 1.0, "iteration 1"),
        ({}, INF, 1.0, "iteration 1"),
        ({}, 1.0, NAN, "iteration 1"),
        ({}, 1.0, INF, "iteration 1"),
        (dynamic, 1.0, INF, [False]),
        (dynamic, 1.0, NAN, [False]),
        (dynamic, NAN, NAN, "iteration 1"),
        (lowest, 1.0, INF, "iteration 1"),
        (tolerant, 1.0, INF, [False]),
        (constant, 1.0, INF, "iteration 1"),
        (unchecked, 1.0, NAN, [False]),
        (unchecked, NAN, NAN, [False]),
        (unchecked, 1.0, 1.0, [True]),
    ):
        watched, row = Watched(**settings), (settings, loss, norm)
        try:
            found: list[bool] | str = watched.takes(loss, norm=norm)
        except NotFiniteError as error:
            found = str(error).partition(": loss")[0]
        assert found == expected, row
        assert watched.sharding.watch_gradients.called == (settings != unchecked), row


def test_guard_can_wait_a_step_if_it_only_checks_for_finite_values():
    """Check `can_wait`, which is True if the guard may decide after the step's update has been queued.

    Only a guard that checks for NaN and infinite numbers, and for nothing else, can do so.
    """
    for settings in ({}, {"sigma": 6.0}, {"verify_interval": 3}, {"scaler": scaler()}, {"check": False}):
        assert Watched(**settings).guard.can_wait == (settings == {}), settings


def noisy(count: int, level: float = 3.0) -> list[float]:
    generator = random.Random(4)
    return [generator.gauss(level, 0.1) for _ in range(count)]


def test_loss_spike_is_skipped_and_logged_and_training_continues():
    watched = Watched(6.0)
    assert watched.takes(*noisy(50), 5.0, *noisy(50)) == [True] * 50 + [False] + [True] * 50
    assert watched.said == [
        "iteration 51: the loss is 5.0000, the earlier mean 2.9985 +- 0.0894 over 50 steps; the step is skipped"
    ]


def test_falling_and_first_losses_are_no_spikes_and_a_plateau_skips_few():
    watched = Watched(6.0)
    assert all(watched.takes(1.0, 9.0, 1.0, 9.0, *noisy(30), *noisy(100, level=1.0)))
    after = watched.takes(*noisy(100, level=6.0))
    assert 1 <= after.count(False) <= 5
    assert all(after[5:])


def test_non_finite_loss_is_not_added_to_the_history_without_the_check():
    assert Watched(6.0, check=False).takes(*noisy(50), NAN, 9.0) == [True] * 51 + [False]


def test_loss_spikes_are_detected_from_the_21st_loss_on():
    for before in (19, 20):
        assert Watched(6.0).takes(*noisy(before), 9.0)[-1] == (before < 20)


def test_resumed_guard_restores_the_loss_history():
    first, resumed = Watched(6.0), Watched(6.0)
    assert all(first.takes(*noisy(50)))
    resumed.history.load_state_dict(first.history.state_dict())
    assert resumed.takes(5.0) == [False]


def test_weights_are_verified_at_the_interval_before_other_checks():
    verified: list[int] = []
    watched = Watched(verify_interval=3, verify=lambda: verified.append(watched.iteration))
    assert all(watched.takes(*[1.0] * 8))
    with pytest.raises(NotFiniteError):
        watched.takes(NAN)
    assert verified == [3, 6, 9]


def test_nan_in_a_replica_group_ends_the_job_when_all_groups_end_it():
    watched = Watched(has_replica_groups=True)
    assert watched.takes(1.0) == [True]
    assert not watched.guard.has_failed
    assert watched.takes(NAN) == watched.takes(1.0, norm=INF) == [False]
    assert watched.guard.has_failed
    # a loss and then a gradient of this replica group was not finite; the error names the earlier of both steps
    with pytest.raises(NotFiniteError, match="iteration 2: "):
        watched.guard.end_job()


def test_report_names_only_ranks_that_failed_in_the_reported_step():
    reports = [StepReport(rank, step, NAN, 1.0, [NAN], [], {}) for rank, step in enumerate((3, 4, 3))]
    watched = Watched(has_replica_groups=True)
    watched.guard.run.dims.world = mock.Mock(gather_objects=lambda own: reports, share_object=lambda message: message)
    with pytest.raises(NotFiniteError) as error:
        watched.guard.end_job()
    first, *others = str(error.value).splitlines()
    assert first.startswith("iteration 3: ")
    assert [line.rpartition(" ")[2] for line in others] == ["0", "2"]


# ---- the error message of a NaN -------------------------------------------------------------------------------------


def train_with_a_fault(case: Case, where: str, rank: int, folder: Path, *, late: bool) -> str:
    """Put a NaN into the third of four steps, and return that step's error message.

    The function also checks that the step changes no weights and no moments of AdamW. `where` is "gradient" or
    "output". If `late` is False, the host reads the loss and norm of step 3 before it launches step 4. Otherwise it
    reads them in step 4.
    """
    step, dims = build_step(case)
    guarded(step, case, folder, waits=not late)
    good, before = [launch(step, case, index) for index in range(2)], state(step)
    hooks: list[Any] = []
    if dims.world.rank == rank:
        module = step.model.layers[1].mlp.fc2
        hooks.append(poison_gradient(module) if where == "gradient" else poison_output(step.model.final_norm, when=2))
    try:
        bad = launch(step, case, 2)
        assert late
        assert not bad.skipped  # the host has not read the NaN of step 3 yet
        assert state(step) == before
        for hook in hooks:
            hook.remove()
        launch(step, case, 3)
    except NotFiniteError as error:
        assert state(step) == before
        assert not any(each.wait().skipped for each in good)
        return str(error)
    return "no error"


UNKNOWN = "an unknown rank, because FSDP2 sums the gradients of whole copies (ZeRO stage 0)"
# settings of the case, rank with the NaN, whether the host reads the NaN one step later, rank that the error names
FAULTS: dict[str, tuple[dict[str, Any], int, bool, str]] = {
    "late": ({"nodes": 2, "zero": ZEROPP, "tp": 2}, 1, True, "rank 1"),
    "at once": ({"stage": 1}, 0, False, "rank 0"),
    "whole copies": ({"stage": 0}, 1, False, UNKNOWN),
}


@pytest.mark.parametrize("fault", chosen(FAULTS, "at once"))
def test_nan_gradient_report_names_the_parameter_and_the_rank_if_known(fault, tmp_path):
    flags, rank, late, origin = fault
    case = Case(micro_batches=2, **flags)
    (message,) = set(ranks(4).run(train_with_a_fault, case, "gradient", rank, tmp_path, late=late))
    first, *lines = message.splitlines()
    assert first.startswith("iteration 3: loss ")
    assert first.endswith(", gradient norm nan; the job ends before the update, with the weights of iteration 2")
    file = tmp_path / "not-finite-3.json"
    assert lines == [
        f"layers.1.mlp.fc2.weight: the norm of the gradient is nan, from {origin}",
        f"samples, losses and norms: {file}",
    ]
    record = json.loads(file.read_text())
    assert (record["first_sample"], record["samples"]) == (32, 16)
    # strict JSON has no NaN, so the report writes the NaN norm as null
    assert record["grad_norms"]["layers.1.mlp.fc2.weight"] is None
    assert 0 < record["grad_norms"]["layers.0.mlp.fc2.weight"] < 100
    assert len(record["ranks"]) == 4


def test_nan_loss_report_names_the_micro_batch_and_its_samples(tmp_path):
    """With 4 data ranks and 2 micro-batches of 2 samples, a step has 16 samples, so step 3 starts at sample 32.

    The second micro-batch of data rank 2 starts 4 + 2 micro-batches later, at sample 32 + (4 + 2) * 2 = 44.
    """
    case = Case(micro_batches=2, nodes=2, zero=ZEROPP)
    (message,) = set(ranks(4).run(train_with_a_fault, case, "output", 2, tmp_path, late=True))
    lines = message.splitlines()
    assert lines[1] == "the loss of micro-batch 1 (samples 44 to 45) is not finite on rank 2"
    assert all(line.endswith("from rank 2") for line in lines[2:-2])


def test_long_report_is_truncated_and_counts_the_rest():
    norms = {f"p{i}": float("inf") for i in range(10)}
    reports = [StepReport(rank, 5, 1.0, float("nan"), [float("nan")], [], norms) for rank in range(12)]
    lines = describe(reports[0], reports, first_sample=0, micro_batch_size=1, data_size=1).splitlines()
    assert len(lines) == 1 + 8 + 8 + 1
    assert lines[9] == "p0: the norm of the gradient is inf, every rank's own gradient was finite"
    assert lines[-1] == "and 6 more"


def test_report_of_one_rank_names_it_although_its_gradients_are_not_reduced():
    report = StepReport(0, 5, 1.0, INF, [1.0], None, {"p": INF})
    lines = describe(report, [report], first_sample=0, micro_batch_size=1, data_size=1).splitlines()
    assert lines[1:] == ["p: the norm of the gradient is inf, from rank 0"]


def test_report_names_the_samples_of_a_job_that_shares_a_run_with_others():
    watched = Watched()
    watched.guard.plan = plan_batches(BatchConfig(micro_batch_size=2, train_iters=200), data_parallel_size=4)
    watched.guard.first_sample = {0: 100}.__getitem__  # the second half of a global batch of 8 begins at sample 100
    evidence = watched.guard.evidence(torch.tensor([1.0, NAN]), GradNorm(torch.ones(()), [], torch.zeros(0), 1.0))
    with pytest.raises(NotFiniteError, match=r"loss of micro-batch 1 \(samples 108 to 109\) is not finite on rank 0"):
        watched.guard.allows(1, NAN, 1.0, evidence)


def test_report_names_the_loss_scale_of_the_step():
    for scale, expected in (
        (1.0, "norm inf; the job ends"),
        (512.0, "norm inf at the loss scale 512 (see --loss-scale"),
    ):
        report = StepReport(0, 5, 1.0, INF, [1.0], [], {}, scale)
        assert expected in describe(report, [report], first_sample=0, micro_batch_size=1, data_size=1)
