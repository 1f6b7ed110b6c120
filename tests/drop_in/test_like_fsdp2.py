"""Compare unusual training loops under ZeRO++ without quantization with plain FSDP2.

The loops change the trained parameters, accumulate and discard gradients, or use unusual models.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.torch_versions import needs_integers, needs_reset
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

import megazpp

WIDTH = 10
EXACT: dict[str, Any] = {"zero_weight_bits": 16, "zero_gradient_bits": (16, 16), "zero_error_feedback": False}
Weights = dict[str, torch.Tensor]
Result = tuple[list[list[str]], list[float], Weights]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1, WIDTH))  # only one row, so all ranks but one have an empty shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A model of three blocks, each of which is a sharding unit, and two heads in the unit of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2), head: int = 0) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.heads[head](x)


class Run:
    """One training run on this rank, on plain FSDP2 or with ZeRO++.

    Args:
        mode: "plain" for plain FSDP2; "exact", "exact, no overlap" or "exact, one node" for `zeropp` without
            quantization.
        prepare: function that changes the model before it is sharded.
        evaluate_first: True to run a forward before the call of `zeropp`.
        fsdp: further arguments of `fully_shard`.

    Attributes:
        unused: names of the parameters without a gradient at each step.
        norms: gradient norm of each step.
        handle: handle of `zeropp`; None for plain FSDP2.
    """

    def __init__(
        self,
        mode: str,
        prepare: Callable[[Net], object] = lambda model: None,
        *,
        evaluate_first: bool = False,
        **fsdp: Any,
    ) -> None:
        self.model, self.unused, self.norms, self.handle = Net(), [], [], None
        prepare(self.model)
        for block in self.model.blocks:
            fully_shard(block, **fsdp)
        fully_shard(self.model, **fsdp)
        self.optimizer = self.adam(self.model)
        if evaluate_first:
            with torch.no_grad():
                self.model(torch.ones(1, WIDTH))
        if mode == "plain":
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides
        else:
            self.connect(mode)

    def connect(self, mode: str) -> None:
        overlap = {} if mode != "exact, no overlap" else {"overlap_param_gather": False, "overlap_grad_reduce": False}
        config = megazpp.ZeroConfig(zeropp=True, **EXACT, **overlap)
        ranks_per_node = dist.get_world_size() // (1 if mode == "exact, one node" else 2)
        self.handle = megazpp.zeropp(self.model, ranks_per_node=ranks_per_node, config=config)

    @staticmethod
    def adam(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
        """Return AdamW, whose weight decay and moments change each parameter that has a gradient, even of zeros."""
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5, **how)

    def accumulating(self, on: bool = True) -> AbstractContextManager[None]:
        """Return the context for a backward that is not the last one of its step.

        The context delays reductions with ZeRO++ and does nothing with plain FSDP2, or if `on` is False.
        """
        return self.handle.accumulate() if on and self.handle is not None else nullcontext()

    def discard(self) -> None:
        self.optimizer.zero_grad()
        if self.handle is not None:
            self.handle.discard()

    def backward(self, sample: int, *, factor: float = 1.0, last: bool = True, **how: Any) -> None:
        generator = torch.Generator().manual_seed(4 * sample + dist.get_rank())
        how_made: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
        x, y = torch.randn(5, WIDTH, **how_made), torch.randn(5, 4, **how_made)
        with self.accumulating(not last):
            (factor * (self.model(x, **how).float() - y).square().mean()).backward()

    def step(self, *optimizers: torch.optim.Optimizer, **how: Any) -> None:
        self.unused.append([name for name, p in self.model.named_parameters() if p.grad is None])
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor().item())
        for optimizer in optimizers or (self.optimizer,):
            optimizer.step()
            optimizer.zero_grad(**how)

    def train(self, steps: int, *, micro_batches: int = 1, **how: Any) -> "Run":
        """Run training steps whose gradients wait for the last micro-batch, and return this run."""
        for sample in range(steps * micro_batches):
            last = sample % micro_batches == micro_batches - 1
            self.backward(sample, last=last, **how)
            if last:
                self.step()
        return self

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def result(self) -> Result:
        self.reshard()
        weights = {name: p.detach().full_tensor().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                weights[f"{name}.{key}"] = whole.clone()
        return self.unused, self.norms, weights


Scenario = Callable[[str], Run]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# ---- scenarios that change which parameters are trained -----------------------------------------------------------


@scenario
def unfrozen_halfway(mode: str) -> Run:
    """Freeze one whole unit and half of another before the call of `zeropp`, and unfreeze both after two steps."""
    run = Run(mode, lambda model: (model.blocks[0].requires_grad_(False), model.blocks[1].up.requires_grad_(False)))
    run.train(2).model.requires_grad_(True)
    return run.train(2)


@scenario
def frozen_halfway_with_zeroed_gradients(mode: str) -> Run:
    run = Run(mode)
    for step in range(4):
        if step == 2:
            run.model.blocks[1].up.weight.requires_grad_(False)
            run.model.heads[0].bias.requires_grad_(False)
        run.backward(step)
        run.step(set_to_none=False)
    return run


@scenario
def swapped_blocks(mode: str) -> Run:
    """Train one block in each step, in turn, with an optimizer of its own (block-coordinate training)."""
    run = Run(mode)
    optimizers = [run.adam(block) for block in run.model.blocks]
    for step in range(5):
        for index, block in enumerate(run.model.blocks):
            block.requires_grad_(index == step % 3)
        run.backward(step)
        run.step(optimizers[step % 3])
    return run


@scenario
def swapped_matrices_of_a_block_while_accumulating(mode: str) -> Run:
    """Freeze parameters between the micro-batches of a step; gradients of earlier micro-batches must be kept."""
    run = Run(mode)
    for step in range(3):
        for micro_batch in range(3):
            run.model.blocks[1].up.requires_grad_(micro_batch != 2)
            run.model.blocks[1].down.requires_grad_(micro_batch != 0)
            run.model.blocks[2].requires_grad_(micro_batch == 0)
            run.backward(3 * step + micro_batch, last=micro_batch == 2)
        run.step()
    return run


def backwards_of_a_forward(mode: str, *, accumulates: bool) -> Run:
    """Run two backwards for two losses of one forward, after computing a gradient with respect to the input only.

    `accumulates` puts the first backward into the context that delays reductions.
    """
    run = Run(mode)
    for step in range(3):
        generator = torch.Generator().manual_seed(4 * step + dist.get_rank())
        x, y = torch.randn(5, WIDTH, generator=generator), torch.randn(5, 4, generator=generator)
        output = run.model(x.requires_grad_())
        losses = (output - y).square().mean(), output.abs().mean()
        (toward,) = torch.autograd.grad(losses[0], x, retain_graph=True)
        with run.accumulating(accumulates):
            (losses[0] * (1 + toward.square().mean())).backward(retain_graph=True)
        losses[1].backward()
        run.step()
    return run


SCENARIOS["several backwards of a forward"] = lambda mode: backwards_of_a_forward(mode, accumulates=False)
SCENARIOS["several backwards of a forward, the first one waits"] = lambda mode: backwards_of_a_forward(
    mode, accumulates=True
)


@scenario
def announced_last_backward(mode: str) -> Run:
    """Announce each step's last backward by `set_is_last_backward`, and use the gradients between the backwards.

    FSDP2 waits for its streams only after the announced backward.
    """
    run = Run(mode)
    for step in range(3):
        run.model.set_is_last_backward(False)
        run.backward(2 * step)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5).add_(0.01)
        run.model.set_is_last_backward(True)
        run.backward(2 * step + 1)
        run.step()
    return run


@scenario
def called_between_passes(mode: str) -> Run:
    """Call `zeropp` between a forward and its backward, while gradients of an earlier backward exist."""
    run = Run("plain")
    run.backward(0)
    losses = run.model(torch.ones(1, WIDTH)).square().mean()
    if mode != "plain":
        run.connect(mode)
    losses.backward()
    run.step()
    run.backward(1)
    run.step()
    return run


@scenario
def shards_kept_gathered_after_backward(mode: str) -> Run:
    run = Run(mode)
    run.model.set_reshard_after_backward(False)
    for step in range(3):
        run.backward(2 * step, last=False)
        run.backward(2 * step + 1)
        run.reshard()
        run.step()
    return run


@scenario
def gathers_started_before_the_forward(mode: str) -> Run:
    run = Run(mode)
    if run.handle is not None:
        # Delay the thread of cross hops, so that the forward begins before this thread starts the first gather
        run.handle._watched[0]._cross_queue.submit(functools.partial(time.sleep, 0.1))
    for step in range(3):
        for block in run.model.blocks:
            block.unshard(async_op=True)
        run.backward(step)
        run.step()
    return run


@scenario
def blocks_with_reentrant_checkpoints(mode: str) -> Run:
    """Recompute blocks in backwards of their own, inside of the model's backward, while gradients wait."""
    run = Run(mode)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = run.model.blocks[0](x)
        for block in run.model.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return run.model.heads[0](x)

    run.model.forward = forward
    return run.train(2, micro_batches=2)


@scenario
def forward_in_the_backward_of_another_model(mode: str) -> Run:
    """Multiply the gradient of a model's output by the output of another model, which trains as well."""
    run, other = Run(mode), Run(mode)

    def multiply(gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return gradient * other.model(torch.ones(1, WIDTH)).mean()

    for step in range(2):
        output = run.model(torch.full((2, WIDTH), 0.1 * (step + dist.get_rank())))
        output.register_hook(multiply)
        output.square().mean().backward()
        run.step()
        other.backward(step)
        other.step()
    return run


@scenario
def unit_of_modules_in_reverse_order(mode: str) -> Run:
    return Run(mode, lambda model: fully_shard([model.heads[1], model.blocks[0].up])).train(3, head=1)


# ---- scenarios in which parameters get no gradient ----------------------------------------------------------------


@scenario
def dropped_blocks_and_changing_heads(mode: str) -> Run:
    run = Run(mode)
    for step, order in enumerate([(0, 1, 2), (0, 2), (1, 2), (0,)]):
        run.backward(step, order=order, head=step % 2)
        run.step()
    return run


@scenario
def zeros_instead_of_missing_gradients(mode: str) -> Run:
    """Drop blocks while FSDP2 reduces zeros for missing gradients, also of a block that was frozen when it was used."""
    run = Run(mode)
    run.model.set_reduce_scatter_unused_params(True)
    for step, order in enumerate([(0, 1, 2), (0, 2), (1,), (2,)]):
        run.backward(step, order=order, head=step % 2)
        run.step()
        run.model.blocks[step % 2].requires_grad_(step == 2)
    return run


@scenario
def a_block_twice(mode: str) -> Run:
    run = Run(mode)
    for step in range(3):
        run.backward(step, order=(0, 1, 1) if step % 2 else (0, 2))
        run.step()
    return run


@scenario
def used_in_some_micro_batches(mode: str) -> Run:
    """Use some blocks only in the first, the middle or the last micro-batch, and only block 0 in the second step."""
    run = Run(mode)
    for step in range(3):
        for micro_batch, order in enumerate([(0,), (0, 1), (2,)]):
            run.backward(
                3 * step + micro_batch, last=micro_batch == 2, order=(0,) if step == 1 else order, head=step % 2
            )
        run.step()
    return run


@scenario
def used_in_some_micro_batches_without_communication(mode: str) -> Run:
    run = Run(mode)
    for step in range(3):
        for micro_batch, order in enumerate([(0, 1), (0, 2)]):
            run.model.set_requires_gradient_sync(micro_batch == 1)
            run.backward(2 * step + micro_batch, order=order)
        run.step()
    return run


# ---- scenarios that discard gradients ---------------------------------------------------------------------


@contextmanager
def failing(module: nn.Module, *, backward: bool) -> Iterator[None]:
    """Raise ArithmeticError on every rank when a forward enters `module`, or when a backward leaves it.

    The context suppresses the exception.
    """

    def fail(*_: Any) -> None:
        raise ArithmeticError

    if backward:
        handle = module.register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
    else:
        handle = module.register_forward_pre_hook(fail)
    with suppress(ArithmeticError):
        yield
    handle.remove()


def given_up(mode: str, *, last: bool, to_none: bool = True) -> Run:
    """Discard the gradients of an additional micro-batch before two of the steps.

    Args:
        mode: "plain", "exact" or "exact, no overlap", as for `Run`.
        last: True if the discarded micro-batch is announced as the last of a step, so that its gradients are reduced at
            once; False to delay the reduction.
        to_none: False to set discarded gradients to zero instead of None.
    """
    run = Run(mode)
    for step in range(4):
        if step in (1, 3):
            run.backward(100 + step, last=last, factor=float("nan"))
            run.optimizer.zero_grad(set_to_none=to_none)
            if not last:
                run.discard()
        run.backward(2 * step, last=False)
        run.backward(2 * step + 1)
        run.step()
    return run


SCENARIOS["given up while waiting"] = lambda mode: given_up(mode, last=False)
SCENARIOS["given up, none"] = lambda mode: given_up(mode, last=True)
SCENARIOS["given up, zeroed"] = lambda mode: given_up(mode, last=True, to_none=False)


@scenario
def one_rank_discards(mode: str) -> Run:
    """Discard gradients on one rank only, after all ranks have run the same backwards: all ranks must discard them.

    In the first step rank 0 calls `discard`. In the second step rank 1 leaves `accumulate` by an exception.
    """
    run = Run(mode)
    for step in range(2):
        run.backward(3 * step, last=False, factor=5.0)
        run.optimizer.zero_grad()
        if run.handle is not None and dist.get_rank() == step:
            if step == 0:
                run.handle.discard()
            else:
                with suppress(ArithmeticError), run.accumulating():
                    raise ArithmeticError
        run.backward(3 * step + 1, last=False, order=(0, 1))
        run.backward(3 * step + 2)
        run.step()
    return run


@scenario
def gradients_wait_beside_complete_ones(mode: str) -> Run:
    """Delay the reduction of new gradients while `.grad` holds reduced ones, and scale `.grad` in between."""
    run = Run(mode)
    for step in range(3):
        run.backward(3 * step, order=(0, 1))
        run.backward(3 * step + 1, last=False, factor=0.0 if run.handle is None else 1.0)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(-0.25)
        # sums that wait are not scaled, so plain FSDP2 runs this backward only now, after the scaling
        if run.handle is None:
            run.backward(3 * step + 1)
        run.backward(3 * step + 2)
        run.step()
    return run


@scenario
def skipped_steps(mode: str) -> Run:
    run = Run(mode)
    for step in range(4):
        run.backward(2 * step, last=False, factor=float("nan") if step == 1 else 1.0)
        run.backward(2 * step + 1)
        if step == 1:
            run.optimizer.zero_grad()
        else:
            run.step()
    return run


@scenario
def given_up_without_communication(mode: str) -> Run:
    """Discard gradients that FSDP2 has not reduced. FSDP2 keeps them, and adds them to the next step's gradients."""
    run = Run(mode)
    for step in range(3):
        run.model.set_requires_gradient_sync(False)
        run.backward(2 * step)
        run.optimizer.zero_grad()
        run.model.set_requires_gradient_sync(True)
        run.backward(2 * step + 1)
        run.step()
    return run


def aborted(mode: str, *, backward: bool, first: bool, clear: bool = True) -> Run:
    """Raise an exception in a forward or a backward of every second step, and go on training.

    Args:
        mode: "plain", "exact" or "exact, no overlap", as for `Run`.
        backward: True to raise in the backward; False to raise in the forward.
        first: True to interrupt a first micro-batch; False to interrupt one that is announced as the last.
        clear: True to discard the step's earlier gradients after the exception.
    """
    run = Run(mode)
    for step in range(4):
        run.backward(2 * step, last=not clear)
        if step % 2:
            with failing(run.model.blocks[1].up, backward=backward):
                run.backward(100 + step, last=not first, factor=50.0)
            run.model.reset_iter_state()
            for module in run.model.modules():  # after an exception, FSDP2 also keeps the unsharded gradients
                if isinstance(module, FSDPModule):
                    for p in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                        p._unsharded_param.grad = None
            if clear:
                run.discard()
        run.backward(2 * step + 1)
        run.step()
    return run


for backward in (False, True):
    for first in (False, True):
        SCENARIOS[f"aborted in {'backward' if backward else 'forward'}, {'first' if first else 'last'}"] = (
            lambda mode, how={"backward": backward, "first": first}: aborted(mode, **how)
        )
SCENARIOS["aborted in backward, kept"] = lambda mode: aborted(mode, backward=True, first=False, clear=False)


# ---- scenarios with unusual parameters ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a trained fp32 low-rank adapter, as in PEFT."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.a, self.b = nn.Linear(linear.in_features, 3, bias=False), nn.Linear(3, linear.out_features, bias=False)
        nn.init.normal_(self.b.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(self.base.weight.dtype)).float() + self.b(self.a(x))


def adapt(model: Net) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up.to(torch.bfloat16)), Adapted(block.down.to(torch.bfloat16))
    model.heads.requires_grad_(True)


@scenario
def adapters_in_fp32_on_a_base_in_bf16(mode: str) -> Run:
    """Train fp32 adapters on a frozen bf16 base, so that each block has parameters of two dtypes."""
    return Run(mode, adapt).train(2, micro_batches=2)


def with_odd_parameters(model: Net) -> None:
    """Add an integer parameter (as in a QLoRA base), an fp64 parameter and an empty parameter to each block."""
    for index, block in enumerate(model.blocks):
        block.codes = nn.Parameter(torch.arange(13 + index).to(torch.uint8), requires_grad=False)
        block.table = nn.Parameter(torch.arange(7.0, dtype=torch.float64), requires_grad=False)
        block.nothing = nn.Parameter(torch.empty(0, 3))
        block.register_forward_pre_hook(use_odd_parameters)


def use_odd_parameters(block: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = given
    return (x + (block.codes.float().mean() - 6).to(x.dtype) + (block.table.mean() - 3).to(x.dtype),)


@scenario
def odd_parameters(mode: str) -> Run:
    return Run(mode, with_odd_parameters).train(3)


@scenario
def odd_parameters_under_a_bf16_policy(mode: str) -> Run:
    return Run(mode, with_odd_parameters, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)).train(3)


@scenario
def made_on_meta_and_cast_after_the_call(mode: str) -> Run:
    def to_meta(model: Net) -> None:
        model.to("meta")

    run = Run(mode, to_meta)
    run.model.to_empty(device="cpu")
    source = dict(Net().named_parameters())
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(distribute_tensor(source[name].data, p.device_mesh, p.placements))
    run.model.double().float()
    run.optimizer = run.adam(run.model)
    return run.train(3)


@scenario
def called_after_an_evaluation(mode: str) -> Run:
    """Call `zeropp` after a forward without gradients, while the root's parameters are still gathered."""
    return Run(mode, evaluate_first=True).train(3)


@scenario
def under_other_defaults(mode: str) -> Run:
    """Train while torch's default device and dtype differ from the model's, as in programs that set bf16."""
    # In its first step AdamW creates its state, which must not be on the device "meta" that is set below.
    run = Run(mode).train(1)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            run.train(3, micro_batches=2)
    finally:
        torch.set_default_dtype(torch.float32)
    return run


def results(name: str, modes: tuple[str, ...]) -> list[Result]:
    return [SCENARIOS[name](mode).result() for mode in modes]


def assert_alike(found: Result, expected: Result) -> None:
    """Assert that two results of `Run.result` agree.

    Gradients must be None for the same parameters and steps. Sums in another order change numbers by up to 1e-4.
    """
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Return marks that skip the test of a scenario that the FSDP2 of the installed torch does not support."""
    reset = [needs_reset] if name.startswith(("aborted", "zeros")) else []
    return reset + ([needs_integers] if name.startswith("odd") else [])


def compare_with_plain(name: str, world_size: int, modes: tuple[str, ...]) -> None:
    for plain, *others in ranks(world_size).run(results, name, ("plain", *modes)):
        assert all(torch.isfinite(weight).all() for weight in plain[2].values())
        for found in others:
            assert_alike(found, plain)


FIRST = (
    "blocks_with_reentrant_checkpoints",
    "used_in_some_micro_batches",
    "zeros_instead_of_missing_gradients",
    "one_rank_discards",
    "adapters_in_fp32_on_a_base_in_bf16",
)


def cases(first: Sequence[str], first_tier: Any, other_tier: Any) -> list[Any]:
    """Return all scenarios as test parameters; those in `first` get the marks `first_tier`, the others `other_tier`."""
    tiers = {name: first_tier if name in first else other_tier for name in SCENARIOS}
    return [pytest.param(name, marks=[*marks_of(name), *tier]) for name, tier in tiers.items()]


@pytest.mark.parametrize("name", cases(FIRST, [], [pytest.mark.slow]))
def test_training_loop_on_two_ranks_matches_plain_fsdp2(name):
    compare_with_plain(name, 2, ("exact",))


@needs_reset
def test_gradients_on_one_node_match_plain_fsdp2():
    compare_with_plain("zeros_instead_of_missing_gradients", 2, ("exact, one node",))


@pytest.mark.parametrize("name", cases(["one_rank_discards"], [pytest.mark.slow], [pytest.mark.nightly]))
def test_training_loop_matches_plain_fsdp2(name):
    """On four ranks, two on each of two nodes, gradients are also summed inside of nodes before they cross nodes."""
    compare_with_plain(name, 4, ("exact", "exact, no overlap"))


# ---- gradients that wait for their reduction ------------------------------------------------------------------------


def gradients_between_backwards() -> None:
    """Compare `.grad` with plain FSDP2 after each backward of three steps.

    The middle step accumulates on top of reduced gradients.
    """
    plain, exact = Run("plain"), Run("exact")
    for sample in range(9):
        kept = {name: p.grad for name, p in exact.model.named_parameters()}
        before = {name: gradient.to_local().clone() for name, gradient in kept.items() if gradient is not None}
        last = sample % 3 == 2 or sample == 3
        for run in (plain, exact):
            run.backward(sample, last=last)
        for (name, p), q in zip(exact.model.named_parameters(), plain.model.parameters(), strict=True):
            assert last or p.grad is kept[name]
            if not last and name in before:
                assert torch.equal(p.grad.to_local(), before[name])
            if last:
                assert (p.grad is None) == (q.grad is None)
                if q.grad is not None:
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor(), rtol=1e-4, atol=1e-6)
        if sample % 3 == 2:
            plain.step()
            exact.step()


def test_gradients_are_untouched_while_sums_wait_and_complete_afterwards():
    ranks(2).run(gradients_between_backwards)


def message_of(action: Callable[[], object]) -> str:
    """Return the message of the RuntimeError that the action raises, or "" if it raises none."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def misuse() -> dict[str, str]:
    """Use `accumulate` wrongly in several ways, and return this rank's error message by the name of each way.

    After each error, training must go on.
    """
    run, said = Run("exact"), {}
    run.backward(6)
    run.step()

    def nested() -> None:
        with run.accumulating(), run.accumulating():
            pass

    def inside_a_backward() -> None:
        hook = run.model.blocks[1].register_full_backward_hook(lambda *_: run.handle.discard())
        try:
            run.backward(0)
        finally:
            hook.remove()

    def on_some_ranks() -> None:
        run.backward(1, last=dist.get_rank() == 0)

    def step_too_early() -> None:
        run.backward(2, last=False)
        probe = nn.Parameter(torch.ones(1))
        probe.grad = torch.ones(1)
        torch.optim.SGD([probe], lr=0.1).step()  # no error: the step of an optimizer with other parameters is allowed
        run.optimizer.step()

    def backward_without_forward() -> None:
        output = run.model(torch.ones(1, WIDTH)).sum()
        with run.accumulating():
            output.backward(retain_graph=True)
        run.handle.discard()
        output.backward()

    def after_an_interruption() -> None:
        run.backward(3, last=False)
        with failing(run.model.blocks[1].up, backward=True):
            run.backward(4)
        run.model.reset_iter_state()
        run.backward(5)

    for action in (
        nested, inside_a_backward, on_some_ranks, step_too_early, backward_without_forward, after_an_interruption
    ):  # fmt: skip
        said[action.__name__] = message_of(action)
        run.model.reset_iter_state()
        run.reshard()
        run.discard()
        run.backward(6)
        run.step()
        assert all(torch.isfinite(p.to_local()).all() for p in run.model.parameters())
    return said


@needs_reset
def test_misuse_of_accumulate_is_rejected_on_all_ranks():
    expected = {
        "nested": "inside another accumulate()",
        "inside_a_backward": "inside a backward",
        "on_some_ranks": "some ranks run this forward inside accumulate()",
        "step_too_early": "the optimizer steps, but the gradients of",
        "backward_without_forward": "run another forward before the backward",
        "after_an_interruption": "an exception has interrupted the backward",
    }
    for said in ranks(2).run(misuse):
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert text in said[name], said[name]


# ---- behavior that differs from plain FSDP2 -------------------------------------------------------------------------


def use_by_rank() -> list[tuple[bool, ...]]:
    """Train steps in which ranks use different heads of the model.

    In step 1, odd ranks use the second head and even ranks the first. Then all ranks use the first head, and in step 3
    all use the second.

    Returns:
        For each step and head, True if the head's gradient is None.
    """
    run = Run("exact")
    found = []
    for heads in ((0, 1), (0, 0), (1, 1)):
        run.backward(0, head=heads[dist.get_rank() % 2])
        found.append(tuple(head.weight.grad is None for head in run.model.heads))
        if heads == (0, 1):  # one rank used this head, so the mean over ranks is not zero on the other rank either
            mine = run.model.heads[0].bias.grad.full_tensor()
            assert mine.abs().sum() > 0
        run.step()
    return found


def test_gradient_on_some_ranks_exists_on_all_ranks():
    for found in ranks(2).run(use_by_rank):
        assert found == [(False, False), (False, True), (True, False)]


def bytes_of_steps(order: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes that this rank sends inside the node and across nodes in the second step of a training.

    A step has two micro-batches. `order` lists the blocks that each forward uses.
    """
    run = Run("exact")
    counts = []
    for step in range(2):
        run.backward(2 * step, last=False, order=order)
        run.backward(2 * step + 1, order=order)
        run.step()
        counts.append([run.handle.counter.sent_bytes(wire) for wire in ("local", "cross")])
    return tuple(after - before for before, after in zip(*counts, strict=True))


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_unused_block_sends_nothing_and_flags_take_16_bytes(world_size):
    whole, without = (ranks(world_size).run(bytes_of_steps, order)[0] for order in ((0, 1, 2), (0, 2)))
    # Number of rows that a rank has of each parameter of a block: up [7, 10] and its bias [7], down [10, 7], and scale
    # [1, 10], which has one row. An element takes four bytes
    up, down, local = -(-7 // world_size), -(-10 // world_size), world_size // 2
    message = -(-4 * (up * 10 + up + down * 7 + 10) // 16) * 16
    weights, gradients = message, message + 16
    # A step has two micro-batches. Each uses a block twice, and reduces it once. Per step, each rank sends the other
    # node one message of weights and one of gradients. Per use and per reduction, it sends two messages to every other
    # rank of its node.
    assert whole[1] - without[1] == weights + gradients
    assert whole[0] - without[0] == 2 * (local - 1) * (2 * 2 * weights + 2 * gradients)


def feedback_after_giving_up(clear: str) -> tuple[Weights, Weights]:
    """Return the gradients by name of a backward, once without and once with a discarded backward before it.

    `clear` is "none" or "zeroed": how the discarded gradients are cleared.
    """
    found = []
    for give_up in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False))
        zero = megazpp.ZeroConfig(zeropp=True, zero_error_feedback=True)
        handle = megazpp.zeropp(model, ranks_per_node=dist.get_world_size() // 2, config=zero)
        x = torch.randn(3, 96, generator=torch.Generator().manual_seed(dist.get_rank()))
        if give_up:
            (1e3 * model(x).square().mean()).backward()
            model.zero_grad(set_to_none=clear == "none")
        model(x).square().mean().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        model.zero_grad()
        handle.end_step(0.0, iteration=1)
    return tuple(found)


@pytest.mark.parametrize("clear", ["none", slow("zeroed")])
def test_errors_of_a_discarded_backward_are_not_fed_back(clear):
    for without, given_up in ranks(2).run(feedback_after_giving_up, clear):
        torch.testing.assert_close(given_up, without, rtol=0, atol=0)


def hooks_refused() -> None:
    run = Run("exact, no overlap")
    seen: list[float] = []
    run.model.heads[0].bias.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.full_tensor().norm().item())
    )
    run.backward(0)
    plain = run.model.heads[0].bias.grad.full_tensor().norm().item()
    assert seen == [plain]
    with pytest.raises(RuntimeError, match=r"post-accumulate-grad hook.*inside accumulate"):
        run.backward(1, last=False)


def test_hooks_see_reduced_gradients_without_overlap():
    ranks(2).run(hooks_refused)
