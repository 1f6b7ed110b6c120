"""Test writes of a program to the weights of a model with `megazpp.zeropp`.

ZeRO++ must notice each write before the next forward. On two ranks, losses are bit-identical to plain FSDP2's.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import ranks
from helpers.tiers import chosen, slow
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import megazpp
from megazpp.drop_in.checksum import checksum, mixed_sum
from megazpp.drop_in.writes import WriteWatch

WIDTH = 12
# EXACT keeps FSDP2's own reduction of gradients. The two hops of TWO_HOPS add gradients in another order
EXACT: dict[str, Any] = {"zero_weight_bits": 16, "zero_quantized_gradients": False}
TWO_HOPS: dict[str, Any] = {"zero_weight_bits": 16, "zero_gradient_bits": (16, 16)}
LOSSLESS: dict[str, Any] = {"zero_weight_delta": "lossless", "zero_quantized_gradients": False}
Write = Callable[[nn.Module, dict[str, Any]], Any]


def build(
    config: dict[str, Any] | None, *, frozen: tuple[str, ...] = (), bf16: bool = False, adam: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Build a model of three blocks on plain FSDP2 or with ZeRO++.

    Args:
        config: fields of ZeroConfig; None for plain FSDP2.
        frozen: parts of names; a parameter whose name contains one of them is frozen.
        bf16: True to compute in bf16.
        adam: True for AdamW; False for SGD.

    Returns:
        (model, optimizer, handle of `zeropp` or None).
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}
    for block in model:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    handle = None
    if config is None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides
    else:
        zero = megazpp.ZeroConfig(zeropp=True, zero_error_feedback=False, **config)
        handle = megazpp.zeropp(model, ranks_per_node=dist.get_world_size() // 2, config=zero)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05) if adam else torch.optim.SGD(trained, lr=0.5)
    return model, optimizer, handle


def loss_of(model: nn.Module, sample: int) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * sample + dist.get_rank()))
    return (model(x) - x.roll(1, 1)).square().mean()


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        loss = loss_of(model, 99).item()
    model.reshard()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, sample: int) -> float:
    loss = loss_of(model, sample)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def foreach_copy(model: nn.Module, saved: dict[str, Any]) -> None:
    names, parameters = zip(*model.named_parameters(), strict=True)
    torch._foreach_copy_([p.to_local().detach() for p in parameters], [saved[name].to_local() for name in names])


def in_a_thread(model: nn.Module, saved: dict[str, Any]) -> None:
    thread = threading.Thread(target=local_of_detach, args=(model, saved))
    thread.start()
    thread.join()


def local_of_detach(model: nn.Module, saved: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.detach().to_local().copy_(saved[name].to_local())


def local_of_state_dict(model: nn.Module, saved: dict[str, Any]) -> None:
    for name, tensor in list(model.state_dict().items())[:12]:  # the first 12 entries are the model's parameters
        tensor.to_local().copy_(saved[name].to_local())


def data_copy(model: nn.Module, saved: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(saved[name])


def data_assigned(model: nn.Module, saved: dict[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = saved[name].clone()


def merged(model: nn.Module, saved: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.data += 0.125


def flipped(model: nn.Module, saved: dict[str, Any]) -> None:
    """Reverse the order of each parameter's elements on this rank, which a plain sum as checksum would not notice."""
    for parameter in model.parameters():
        local = parameter.detach().to_local().view(-1)
        local.copy_(local.flip(0).clone())


def one_sign(model: nn.Module, saved: dict[str, Any]) -> None:
    """Flip the sign bit of a single weight, on the last rank only."""
    local = model[1][2].weight.detach().to_local().view(-1)
    if dist.get_rank() == dist.get_world_size() - 1:
        local[-1:].neg_()


def on_one_rank(model: nn.Module, saved: dict[str, Any]) -> None:
    if dist.get_rank() == 1:
        local_of_detach(model, saved)


def loaded(model: nn.Module, saved: dict[str, Any]) -> None:
    model.load_state_dict(saved, strict=False)


def assigned(model: nn.Module, saved: dict[str, Any]) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in saved.items()}, strict=False, assign=True)


def read_in_place(model: nn.Module, saved: dict[str, Any]) -> None:
    into = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, DTensor)}
    dcp.load({"model": into}, checkpoint_id=saved["folder"])


WRITES = {
    write.__name__: write
    for write in (
        foreach_copy,
        in_a_thread,
        local_of_detach,
        local_of_state_dict,
        data_copy,
        data_assigned,
        merged,
        flipped,
        one_sign,
        on_one_rank,
        loaded,
        assigned,
        read_in_place,
    )
}


def write_and_train(config: dict[str, Any] | None, name: str, folder: str, options: dict[str, Any]) -> list[float]:
    """Run steps, evaluations and writes to the weights in turn, and return all losses.

    Args:
        config: fields of ZeroConfig; None for plain FSDP2.
        name: key of WRITES.
        folder: folder for the checkpoint that "read_in_place" reads.
        options: further arguments of `build`.
    """
    model, optimizer, _ = build(config, **options)
    saved: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    if name == "read_in_place":
        dcp.save({"model": saved}, checkpoint_id=folder)
        saved["folder"] = folder
    losses = [evaluate(model), step(model, optimizer, 1), evaluate(model)]
    WRITES[name](model, saved)
    losses += [evaluate(model), evaluate(model), step(model, optimizer, 2)]
    WRITES[name](model, saved)
    losses += [step(model, optimizer, sample) for sample in (3, 4)]
    loss_of(model, 5).backward()  # the next write follows a forward and backward without an optimizer step
    model.reshard()
    WRITES[name](model, saved)
    return [*losses, step(model, optimizer, 6), evaluate(model)]


def same_as_fsdp2(name: str, folder: str, options: dict[str, Any], configs: tuple[dict[str, Any], ...]) -> None:
    expected = write_and_train(None, name, f"{folder}/plain", options)
    for index, config in enumerate(configs):
        assert_same(write_and_train(config, name, f"{folder}/{index}", options), expected)


def assert_same(losses: list[float], expected: list[float]) -> None:
    """Assert equal losses.

    Two ranks can add gradients in one order only, so that losses are bit-identical. With more ranks, ZeRO++ adds
    gradients in another order than gloo.
    """
    rel = 0.0 if dist.get_world_size() == 2 else 1e-4
    assert losses == pytest.approx(expected, rel=rel, abs=0.0)


FIRST = ("data_assigned", "one_sign", "on_one_rank", "read_in_place")


@pytest.mark.parametrize("write", chosen(WRITES, *FIRST))
def test_write_reaches_the_next_forward(write, tmp_path):
    ranks(2).run(same_as_fsdp2, write.__name__, str(tmp_path), {}, (EXACT,))


@pytest.mark.slow
def test_write_on_one_of_four_ranks_reaches_the_next_forward(tmp_path):
    ranks(4).run(same_as_fsdp2, "on_one_rank", str(tmp_path), {}, (EXACT,))


PARTS: dict[str, dict[str, Any]] = {
    "a block": {"frozen": ("2.",)},
    "parts of blocks": {"frozen": ("0.0.", "1.", "weight"), "adam": True},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize(
    ("name", "part"),
    [("merged", "a block"), ("on_one_rank", "parts of blocks"), slow("read_in_place", "bf16")],
)
def test_write_reaches_the_next_forward_of_a_partly_frozen_model(name, part, tmp_path):
    configs = (EXACT, LOSSLESS) if part == "bf16" else (EXACT,)
    ranks(2).run(same_as_fsdp2, name, str(tmp_path), PARTS[part], configs)


def average_weights(config: dict[str, Any] | None) -> list[float]:
    """Train, evaluate after each step with a moving average of the weights and with the weights, and return all losses.

    The average is swapped in through views that have version counters of their own, so the parameters' counters do not
    show these writes to ZeRO++.
    """
    model, optimizer, _ = build(config, adam=True)
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def swap() -> None:
        for name, parameter in model.named_parameters():
            local, other = parameter.detach().to_local(), average[name].to_local()
            kept = local.clone()
            local.copy_(other)
            other.copy_(kept)

    losses = []
    for sample in range(3):
        losses.append(step(model, optimizer, sample))
        model.reshard()
        for name, parameter in model.named_parameters():
            average[name].to_local().lerp_(parameter.detach().to_local(), 0.5)
        swap()
        losses.append(evaluate(model))
        swap()
        losses.append(evaluate(model))
    return losses


def averages_as_fsdp2() -> None:
    assert average_weights(EXACT) == average_weights(None)


def test_swapped_weight_average_is_evaluated_and_swapped_back():
    ranks(2).run(averages_as_fsdp2)


def votes_of(kind: str) -> list[int]:
    """Return the number of votes (exchanges about written weights) in each of three forwards, the second without grad.

    The root of the model has no parameters of its own. `kind` "of a block" calls one block instead, and returns its
    votes.
    """
    votes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        exchange = WriteWatch._exchange
        patch.setattr(WriteWatch, "_exchange", lambda watch, own: votes.append(1) or exchange(watch, own))
        model, optimizer, _ = build(EXACT)
        if kind == "of a block":
            model[1](torch.ones(2, WIDTH))
            return [len(votes)]
        found = []
        for act in (lambda: step(model, optimizer, 1), lambda: evaluate(model), lambda: step(model, optimizer, 2)):
            votes.clear()
            act()
            found.append(len(votes))
        return found


def test_forward_has_one_vote_even_if_the_root_has_no_parameters():
    assert ranks(2).run(votes_of, "of the model") == [[1, 1, 1]] * 2
    assert ranks(2).run(votes_of, "of a block") == [[1]] * 2


# ---- writes and steps on only one rank ------------------------------------------------------------------------------


def probe(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any) -> None:
    own = nn.Parameter(torch.ones(1))
    own.sum().backward()
    torch.optim.Adam([own], lr=0.1).step()


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups:
        parameters = group["params"]
        torch._foreach_add_([p.to_local() for p in parameters], -0.25)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    optimizer.zero_grad()


def announce_alone(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any) -> None:
    if handle is not None:
        handle.invalidate_weights()


def write_alone(model: nn.Module, optimizer: torch.optim.Optimizer, handle: Any) -> None:
    model[2][0].bias.detach().to_local().zero_()


ALONE = {action.__name__: action for action in (probe, step_alone, announce_alone, write_alone)}


def act_alone(config: dict[str, Any] | None, name: str, acting: int) -> list[float]:
    """Train two steps, after each of which only rank `acting` does the action `name` of ALONE; return all losses.

    Each step is followed by an evaluation before the action and one after it.
    """
    model, optimizer, handle = build(config, bf16=config is None or "zero_weight_delta" in config)
    losses = []
    for sample in range(2):
        losses += [step(model, optimizer, sample), evaluate(model)]
        if dist.get_rank() == acting % dist.get_world_size():
            with torch.no_grad() if name != "probe" else torch.enable_grad():
                ALONE[name](model, optimizer, handle)
        losses.append(evaluate(model))
    return losses


@pytest.mark.parametrize(
    ("name", "acting", "world_size"),
    [
        *(slow("probe", 0, 2), ("step_alone", 1, 2), slow("announce_alone", 0, 2)),
        *(("write_alone", 1, 2), slow("write_alone", 3, 4)),
    ],
)
def test_action_on_one_rank_reaches_all_ranks(name, acting, world_size):
    ranks(world_size).run(alone_as_fsdp2, name, acting)


def alone_as_fsdp2(name: str, acting: int) -> None:
    assert_same(act_alone(LOSSLESS, name, acting), act_alone(None, name, acting))
    losses = act_alone(TWO_HOPS, name, acting)
    assert len(losses) == 6


def grow(config: dict[str, Any] | None, kind: str) -> list[float]:
    """Train with optimizer steps that change few weights, then many, and return the losses and two evaluations.

    Args:
        config: fields of ZeroConfig; None for plain FSDP2.
        kind: "rate" raises the learning rate, "optimizer" steps an optimizer of the matrices after one of the biases.
    """
    torch.manual_seed(0)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 200), nn.Tanh(), nn.Linear(200, WIDTH)) for _ in range(2)))
    for module in (*model, model):
        fully_shard(module, **policy)
        module.set_force_sum_reduction_for_comms(True)
    if config is not None:
        megazpp.zeropp(
            model, ranks_per_node=1, config=megazpp.ZeroConfig(zeropp=True, zero_error_feedback=False, **config)
        )
    every = list(model.parameters())
    optimizers = [torch.optim.AdamW(every, lr=1e-7), torch.optim.AdamW(every, lr=0.1)]
    if kind == "optimizer":
        optimizers = [torch.optim.AdamW([p for p in every if p.ndim == ndim], lr=0.1) for ndim in (1, 2)]
    losses = []
    for sample, optimizer in enumerate([optimizers[0]] * 4 + [optimizers[1]]):
        losses.append(step(model, optimizer, sample))
        model.zero_grad()
    return [*losses, evaluate(model), evaluate(model)]


def grows_as_fsdp2(kind: str) -> None:
    assert grow(LOSSLESS, kind) == grow(None, kind)


@pytest.mark.parametrize("kind", ["rate", slow("optimizer")])
def test_lossless_delta_that_outgrows_its_message_reaches_the_next_forward(kind):
    ranks(2).run(grows_as_fsdp2, kind)


def find_late() -> None:
    """Let the last rank report a write one forward too late, and check that all ranks raise.

    On CUDA, the host reads the results of checksums in the next forward, so as not to wait for the GPU.
    """
    model, optimizer, _ = build(EXACT)
    losses = [step(model, optimizer, sample) for sample in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(WriteWatch, "_read_late", lambda watch: [1])
        with pytest.raises(RuntimeError, match=r"written to weights of .*1 between two forwards"):
            loss_of(model, 3)
    model.reshard()
    assert [*losses, step(model, optimizer, 3)] == [
        *(step(*other, sample) for other in [build(None)[:2]] for sample in (1, 2, 3))
    ]


def test_late_detection_on_one_rank_raises_on_all_ranks():
    ranks(2).run(find_late)


def interrupt(module: nn.Module, model: nn.Module) -> None:
    """Raise KeyboardInterrupt in a forward of `module`; torch then calls no forward hooks."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model[1][1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        module(torch.ones(1, WIDTH))
    hook.remove()
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def interrupted(config: dict[str, Any] | None) -> list[float]:
    """Interrupt a forward of the model or of a block between steps, and return all losses of the training."""
    model, optimizer, _ = build(config)
    losses = [step(model, optimizer, 0)]
    for sample, module in enumerate((model, model[1], model), start=1):
        interrupt(module, model)
        losses += [step(model, optimizer, sample), evaluate(model)]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        losses.append(evaluate(model))
    return losses


def interrupted_as_fsdp2() -> None:
    assert interrupted(EXACT) == interrupted(None)


def test_votes_go_on_after_an_interrupted_forward():
    ranks(2).run(interrupted_as_fsdp2)


# ---- checksums, which detect writes to weights ----------------------------------------------------------------------


@pytest.mark.parametrize("function", [checksum, mixed_sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("sizes", [[1], [0, 63, 257], [4099, 0, 5]])
def test_checksum_changes_with_any_bit_and_with_element_order(function, dtype, sizes):
    generator = torch.Generator().manual_seed(1)
    shards = [torch.randint(-100, 100, (size,), generator=generator).to(dtype) for size in sizes]
    before = int(function(shards))
    # The checksum may not depend on the alignment of the data in memory
    assert int(function([torch.cat([shard[:1], shard])[1:] for shard in shards])) == before

    def is_seen(write: Callable[[torch.Tensor], Any]) -> bool:
        written = [shard.clone() for shard in shards]
        for shard in written:
            write(shard)
        return int(function(written)) != before

    for index in {0, sizes[-1] // 2, sizes[-1] - 1}:
        for bit in (1, 128):
            assert is_seen(lambda shard, at=index, bit=bit: shard.view(torch.uint8)[at : at + 1].bitwise_xor_(bit))
    assert is_seen(torch.Tensor.neg_)
    if len(sizes) > 1:
        # this flips the top bits of an even number of words, which cancel in a plain sum
        assert is_seen(lambda shard: shard[1::2].neg_())
        assert is_seen(lambda shard: shard.copy_(shard.flip(0)))
        assert is_seen(lambda shard: shard.copy_(shard.roll(2)))
        assert int(function(shards[::-1])) != before
