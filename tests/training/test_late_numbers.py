"""Test that the host may read a step's loss and gradient norm one step later.

All results are bit-identical to results of a host that reads the numbers at once. The host does not wait for the device
before an update, and no step's numbers are lost.
"""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.faults import guarded, launch, state
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from helpers.training import BIASED_STYLE, Case, build_step
from torch.utils._python_dispatch import TorchDispatchMode

from megazpp.optim.build import build_optimizer
from megazpp.optim.clip import clip_divisor, divide_grads_, global_grad_norm
from megazpp.optim.config import OptimizerConfig
from megazpp.optim.optimizer import set_rates_, update_
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.comm_queue import HostCopy
from megazpp.training.objective import LanguageModelLoss
from megazpp.zero.config import PrecisionConfig, ZeroConfig

ZEROPP = ZeroConfig(zeropp=True)
OPERATIONS = {"_fused_adamw_": "update"} | dict.fromkeys(("_local_scalar_dense", "equal", "nonzero"), "wait")


def seen_by_the_host(case: Case, waits: bool) -> list[str]:
    """Return what the host does in three steps and a final wait, in order.

    "backward" stands for forward and backward, "update" for an optimizer's update, and "numbers" for a read of a step's
    loss and gradient norm. "wait" stands for any other operation in which the host waits for a result of the device.
    """
    step, _ = build_step(case)
    guarded(step, case, None, waits=waits)
    # the first step is not recorded, because it also checks the layout of the shards, for which the host waits
    launch(step, case, 0).wait()
    seen: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.__name__.split(".")[0]
            seen.extend(what for operation, what in OPERATIONS.items() if operation == name)
            return func(*args, **(kwargs or {}))

    def noted(owner: Any, name: str, what: str) -> Any:
        """Return a patch of the method `name` of `owner`.

        The patched method records `what` instead of the operations inside its call.
        """
        call = getattr(owner, name)

        def note(*args: Any) -> Any:
            before, result = len(seen), call(*args)
            seen[before:] = [what]
            return result

        return mock.patch.object(owner, name, note)

    numbers, lists = noted(HostCopy, "wait", "numbers"), noted(torch.Tensor, "tolist", "wait")
    with numbers, lists, noted(step, "_forward_backward", "backward"), Operations():
        for index in (1, 2, 3):
            launched = launch(step, case, index)
        launched.wait()
    return [what for what, _ in itertools.groupby(seen)]


@pytest.mark.parametrize("case", [Case(nodes=2, zero=ZEROPP, micro_batches=2), slow(Case(tp=2))], ids=["zeropp", "tp"])
def test_host_reads_only_the_previous_step_between_backward_and_update(case):
    for seen in ranks(2).run(seen_by_the_host, case, False):
        assert seen == ["backward", "update", *["backward", "numbers", "update"] * 2, "numbers"]


def test_loss_spikes_are_checked_before_the_update():
    for seen in ranks(2).run(seen_by_the_host, Case(), True):
        assert seen == ["backward", "numbers", "update", "numbers"] * 3


def late_and_at_once(case: Case) -> None:
    """Check that the host may read a step's numbers at once or one step later.

    Records, weights and moments must be identical.
    """
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
    "zeropp": (2, Case(nodes=2, zero=ZEROPP, micro_batches=2)),
    "tp": (2, Case(stage=0, tp=2)),
    "expert bias": (2, Case(model=BIASED_STYLE, stage=2)),
    "differences": (2, Case(nodes=2, zero=LOSSLESS, precision=PrecisionConfig(bf16=True))),
}


@pytest.mark.parametrize("given", chosen(CASES, "differences"))
def test_late_and_immediate_numbers_give_identical_steps(given):
    world, case = given
    ranks(world).run(late_and_at_once, case)


def keep_state_where_only_the_loss_is_infinite(case: Case) -> None:
    step, _ = build_step(case)
    guarded(step, case, None)
    launch(step, case, 0)
    before, loss = state(step), LanguageModelLoss.loss
    with mock.patch.object(LanguageModelLoss, "loss", lambda *given: loss(*given) + float("inf")):
        launch(step, case, 1)
    assert state(step) == before


def test_infinite_loss_skips_the_update_though_gradients_are_finite():
    for case in (Case(), Case(model=BIASED_STYLE)):
        ranks(1).run(keep_state_where_only_the_loss_is_infinite, case)


@pytest.mark.gpu
def test_cuda_step_does_not_wait_and_its_numbers_arrive_later():
    parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = build_optimizer(torch.nn.ParameterDict({"p": parameter}), OptimizerConfig())
    set_rates_(optimizer, learning_rate=1.0, weight_decay=0.0)
    copies = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in (2.0, float("nan")):
            parameter.grad = torch.full_like(parameter, value)
            divide_grads_([parameter], torch.ones((), device="cuda"))
            norm = global_grad_norm([("p", parameter)], MeshAxis("tp"), MeshAxis("shard")).value
            found_inf = (~norm.isfinite()).float()
            update_(optimizer, clip_divisor(norm, 1.0), found_inf)
            copies.append(HostCopy(torch.stack((norm.double(), found_inf.double()))))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (norm, taken), (_, skipped) = (copy.wait() for copy in copies)
    assert (norm, taken, skipped) == (pytest.approx(2.0 * 1000**0.5), 0.0, 1.0)
    torch.testing.assert_close(parameter.detach(), torch.zeros(1000, device="cuda"), rtol=0, atol=1e-4)
    assert float(optimizer.state[parameter]["step"]) == 1.0
