"""The host reads a step's numbers one step later: the same bits, no wait before an update, and nothing is lost."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.faults import guarded, launch, state
from helpers.pretended_run import Run
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import Case, build_step
from torch.utils._python_dispatch import TorchDispatchMode

from megazpp.optim.clip import clip_divisor, divide_grads_, global_grad_norm
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer, set_rates_
from megazpp.parallel.axis import MeshAxis
from megazpp.training import step as step_module
from megazpp.training.anomalies import NotFiniteError
from megazpp.training.objective import LanguageModelLoss
from megazpp.training.step import HostCopy
from megazpp.zero.config import PrecisionConfig, ZeroConfig

ZEROPP = ZeroConfig(zeropp=True)
READS = ("_local_scalar_dense", "equal", "nonzero")  # operations whose result the host has to wait for


class Reads(TorchDispatchMode):
    """Writes down the operations that the host waits for."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in READS:
            self._seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reads_of_the_host(case: Case, waits: bool) -> list[str]:
    """What the host did in three steps and a wait for the last one's numbers."""
    step, _ = build_step(case)
    guarded(step, case, None, waits=waits)
    launch(step, case, 0).wait()  # units check how torch lays their shards out once
    seen: list[str] = []

    def noted(owner: Any, name: str, what: str) -> Any:
        """A patch that writes down, once the call is over, `what` and nothing that happened inside."""
        call = getattr(owner, name)

        def note(*args: Any, **named: Any) -> Any:
            before = len(seen)
            result = call(*args, **named)
            if what != "update":
                del seen[before:]
            seen.append(what)
            return result

        return mock.patch.object(owner, name, note)

    with (
        noted(HostCopy, "wait", "numbers"),
        noted(torch.Tensor, "tolist", "tolist"),
        noted(step_module, "update_", "update"),
        noted(step, "_forward_backward", "backward"),
        Reads(seen),
    ):
        for index in (1, 2, 3):
            launched = launch(step, case, index)
        launched.wait()
    return [what for what, _ in itertools.groupby(seen)]


@pytest.mark.parametrize(
    "case", [{"nodes": 2, "zero": ZEROPP, "micro_batches": 2}, slow({"stage": 0}), {"tp": 2}], ids=["zeropp", "0", "tp"]
)
def test_between_backward_and_update_the_host_reads_only_the_numbers_of_the_step_before(case):
    for seen in ranks(2).run(reads_of_the_host, Case(**case), False):
        assert seen == ["backward", "update", *["backward", "numbers", "update"] * 2, "numbers"]


def test_loss_spikes_are_looked_for_before_the_update():
    for seen in ranks(2).run(reads_of_the_host, Case(), True):
        assert seen == ["backward", "numbers", "update", "numbers"] * 3


def late_and_at_once(case: Case) -> None:
    """Both ways come to the same bits, records, weights and moments."""
    ends = []
    for waits in (False, True):
        step, _ = build_step(case)
        guarded(step, case, None, waits=waits)
        step.count_zeros = True
        launched = [launch(step, case, index) for index in range(3)]
        assert [each.waits for each in launched] == [waits] * 3
        ends.append(([each.wait() for each in launched], state(step)))
    assert ends[0] == ends[1]


LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
CASES = {
    "zeropp": Case(nodes=2, zero=ZEROPP, micro_batches=2),
    "tp": Case(tp=2, stage=2),
    "0": Case(stage=0),
    "differences": Case(nodes=2, zero=LOSSLESS, precision=PrecisionConfig(bf16=True), tp=2),
}


@pytest.mark.parametrize("case", chosen(CASES, "differences"))
def test_late_numbers_and_numbers_at_once_make_the_same_steps(case):
    ranks(4).run(late_and_at_once, case)


def keep_state_where_only_the_loss_is_infinite() -> None:
    case = Case()
    step, _ = build_step(case)
    guarded(step, case, None)
    launch(step, case, 0)
    before, loss = state(step), LanguageModelLoss.loss
    with mock.patch.object(LanguageModelLoss, "loss", lambda *given: loss(*given) + float("inf")):
        launch(step, case, 1)
    assert state(step) == before


def test_a_loss_that_is_infinite_leaves_weights_and_moments_alone_though_gradients_are_finite():
    ranks(1).run(keep_state_where_only_the_loss_is_infinite)


def scaled(precision: PrecisionConfig) -> list[bool]:
    case = Case(precision=precision)
    step, _ = build_step(case)
    guarded(step, case, None, dynamic_scale=precision.fp16)
    return [launch(step, case, index).waits for index in range(2)]


def test_a_dynamic_loss_scale_waits_because_it_has_to_know():
    for fp16 in (True, False):
        assert ranks(1).run(scaled, PrecisionConfig(fp16=fp16)) == [[fp16] * 2]


@pytest.mark.gpu
def test_on_cuda_norm_clipping_skip_and_update_wait_for_nothing_and_the_numbers_come_later():
    parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    named, axes = [("p", parameter)], (MeshAxis("tp"), MeshAxis("shard"))
    optimizer = build_optimizer(named, OptimizerConfig(), parameter.device)
    set_rates_(optimizer, learning_rate=1.0, weight_decay=0.0)
    copies = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in (2.0, float("nan")):
            parameter.grad = torch.full_like(parameter, value)
            divide_grads_([parameter], torch.ones((), device="cuda"))
            norm = global_grad_norm(named, *axes).value
            found_inf = (~norm.isfinite()).float()
            step_module.update_(optimizer, clip_divisor(norm, 1.0), found_inf)
            copies.append(HostCopy(torch.stack((norm.double(), found_inf.double()))))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (norm, taken), (_, skipped) = (copy.wait() for copy in copies)
    assert (norm, taken, skipped) == (pytest.approx(2.0 * 1000**0.5), 0.0, 1.0)
    torch.testing.assert_close(parameter.detach(), torch.zeros(1000, device="cuda"), rtol=0, atol=1e-4)
    assert float(optimizer.state[parameter]["step"]) == 1.0


# ---- the loop -------------------------------------------------------------------------------------------------------


def test_the_loop_reads_late_but_before_a_log_line_a_checkpoint_an_evaluation_and_the_end():
    run = Run([1.0] * 8, log_interval=5, eval_interval=4)
    assert run.fake.events == [
        *("launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3", "save 3"),
        *("launch 4", "read 4", "launch 5", "read 5", "launch 6", "read 6", "save 6"),
        *("launch 7", "launch 8", "read 7", "read 8", "save 8"),
    ]
    assert [(r["iteration"], r["steps"]) for r in run.tracker.records] == [(5, 5), (8, 3)]  # none is lost


def test_a_step_that_is_not_finite_is_never_saved():
    for bad in (2, 3, 6, 8):
        events: list[str] = []
        with pytest.raises(NotFiniteError, match=f"iteration {bad}"):
            Run([1.0] * 8, bad=bad, events=events, log_interval=100, eval_interval=100)
        assert [event for event in events if event.startswith("save")] == [f"save {n}" for n in (3, 6, 8) if n < bad]
        assert events[-1] == f"read {bad}"
