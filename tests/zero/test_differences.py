"""Weights that cross nodes as lossless differences from the resident secondary partition."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import LLAMA_STYLE, Case, FixedBatches, build_step

from kernels.weight_delta import message_bytes
from megazpp.training.objective import Evaluator
from megazpp.training.step import TrainStep
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.gather import Crossing
from megazpp.zero.verify import CorruptWeightsError, verify_weights

BF16, FP16 = PrecisionConfig(bf16=True), PrecisionConfig(fp16=True)


def lossless(**flags: Any) -> ZeroConfig:
    return ZeroConfig(zeropp=True, zero_weight_delta="lossless", **flags)


class Watched(NamedTuple):
    """What one rank saw of one unit at one step."""

    shard: torch.Tensor  # [S] w, before the step
    resident: torch.Tensor  # [N, S] R, in the step
    gathered: torch.Tensor  # [N L, S] what the step computed with
    needed: int  # bytes of the longest body of the step's difference; 0 where there was none


class Run(NamedTuple):
    """What one rank saw."""

    units: list[list[Watched]]
    losses: list[float]
    place: tuple[int, int]  # index along cross and local
    cross_bytes: list[int]  # of weights, per step
    left_out: int


def weight_bytes(dims: Any) -> int:
    """Bytes of weights that this rank has sent to other nodes."""
    return sum(t.sent_bytes for key, t in dims.counter.table().items() if key[1:] == ("cross", "all_gather"))


def train_step(step: TrainStep, case: Case, dims: Any, index: int) -> float:
    rate = case.learning_rate * min(index / 4, 1.0)  # a warm-up from nothing
    how = {"learning_rate": rate, "weight_decay": 0.01, "iteration": index + 1}
    return step(case.batches(index, dims), **how).loss


def watch(case: Case, evaluate_after: tuple[int, ...]) -> Run:
    """Train and look; also evaluate in between, which is to send nothing of its own and change nothing."""
    step, dims = build_step(case)
    gathers = step.sharding._gathers
    watched: list[list[Watched]] = [[] for _ in gathers]
    losses, sent = [], []
    for index in range(case.steps):
        shards = [gather.unit.shard_reader(case.precision.param_dtype)() for gather in gathers]
        before = weight_bytes(dims)
        losses.append(train_step(step, case, dims, index))
        sent.append(weight_bytes(dims) - before)
        with dims.counter.paused():
            for gather, shard, seen in zip(gathers, shards, watched, strict=True):
                resident, needed = gather.resident().weights.clone(), int(gather.lossless().recent[0])
                seen.append(Watched(shard, resident, used(gather, dims), needed))
        if index in evaluate_after:  # its first use is the next step's message
            batches = FixedBatches(case.batches(0, dims))
            Evaluator(step.model, step.sharding, batches, dims, iterations=1, batch_size=1)()
    place, left_out = (dims.cross.rank, dims.local.rank), int(step.sharding.metrics()["weights_left_out"])
    return Run(watched, losses, place, sent, left_out)


def used(gather: Any, dims: Any) -> torch.Tensor:
    """[N L, S] what a use would hand to FSDP2, out of the messages that are kept."""
    messages = gather.secondary.messages
    received = dims.local.all_gather(messages).view(dims.local.size, *messages.shape)
    out = torch.empty(dims.cross.size, dims.local.size, gather._codec.layout.size, dtype=gather._codec.dtype)
    gather._codec.unpack(received, out.transpose(0, 1))
    return out.flatten(0, 1)


def losses(case: Case) -> list[float]:
    step, dims = build_step(case)
    return [train_step(step, case, dims, index) for index in range(case.steps)]


CASES: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {  # ranks, training, the steps to evaluate after
    "bf16": (4, {"micro_batches": 2}, ()),
    "fp16, tp 2, one rank per node": (4, {"tp": 2, "precision": FP16}, ()),
    "3 nodes, evaluations": (3, {"nodes": 3, "global_batch": 12}, (1, 3)),
    "tp 2, llama": (8, {"tp": 2, "model": LLAMA_STYLE, "sequence_parallel": True}, ()),
    "copies": (8, {"nodes": 4, "replicas": 2}, ()),
    "200 steps": (4, {"steps": 200, "learning_rate": 1e-3}, ()),
}


@pytest.mark.parametrize("setting", chosen(CASES, "bf16", "fp16, tp 2, one rank per node", "3 nodes, evaluations"))
def test_every_rank_computes_with_the_owners_weights_and_losses_are_those_of_16_bits(setting):
    world, given, evaluate_after = setting
    case = Case(**{"nodes": 2, "precision": BF16, **given}, zero=lossless())
    runs: list[Run] = ranks(world).run(watch, case, evaluate_after)
    sixteen = ranks(world).run(losses, dataclasses.replace(case, zero=ZeroConfig(zeropp=True, zero_weight_bits=16)))
    assert [run.losses for run in runs] == sixteen
    assert [run.left_out for run in runs] == [0] * world
    nodes = 1 + max(run.place[0] for run in runs)
    same = [sum(other.place == run.place for other in runs[:index]) for index, run in enumerate(runs)]  # tp, copy
    for index in range(len(runs[0].units)):
        shards = {(run.place, tp): run.units[index] for tp, run in zip(same, runs, strict=True)}
        for (place, tp), mine in shards.items():
            owners = [shards[(node, place[1]), tp] for node in range(nodes)]
            for step, each in enumerate(mine):
                rows = torch.stack([owner[step].shard for owner in owners])
                assert torch.equal(bits(each.resident), bits(rows))
                everyone = torch.stack([shards[at, tp][step].shard for at in sorted({at for at, _ in shards})])
                assert torch.equal(bits(each.gathered), bits(everyone))
    for run in runs:
        whole, first, *later = run.cross_bytes
        sizes = [len(unit[0].shard) for unit in run.units]
        assert whole == (nodes - 1) * sum(-(-2 * size // 16) * 16 for size in sizes)
        assert first == (nodes - 1) * sum(message_bytes(size) for size in sizes)
        for step, sent in enumerate(later, 2):
            last, before = ([unit[step - back].needed for unit in run.units] for back in (1, 2))
            assert sent == (nodes - 1) * sum(map(expected_bytes, sizes, last, before))


def expected_bytes(size: int, last: int, before: int) -> int:
    """An eighth more than what the last difference needed plus its growth; room for all in the first two."""
    needed = int(1.125 * (last + max(last - before, 0))) + 128
    return message_bytes(size, min(needed, 2 * size) if before else None)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def with_little_room(case: Case) -> tuple[list[bool], list[int], list[str]]:
    """By step: R is what the owners have; left out; what was computed with, summed up. Messages are short in step 3."""
    step, dims = build_step(case)
    equal, left_out, sums = [], [], []
    for index in range(case.steps):
        gathers = step.sharding._gathers
        shards = [gather.unit.shard_reader(torch.bfloat16)() for gather in gathers]
        if index == 3:
            for gather in gathers:
                gather.lossless().recent.fill_(40)
        train_step(step, case, dims, index)
        rows = [gather.resident().weights[dims.cross.rank] for gather in gathers]
        equal.append(all(torch.equal(bits(a), bits(b)) for a, b in zip(rows, shards, strict=True)))
        for gather in gathers:
            gather.lossless()  # waits for the numbers that the host reads in the next step
        left_out.append(int(step.sharding.metrics()["weights_left_out"]))
        with dims.counter.paused():
            sums.append(str([int(bits(used(gather, dims)).long().sum()) for gather in gathers]))
    return equal, left_out, sums


def test_what_a_message_has_no_room_for_waits_and_all_ranks_compute_with_the_same():
    answers = ranks(4).run(with_little_room, Case(nodes=2, zero=lossless(), precision=BF16, steps=8))
    for equal, left_out, sums in answers:
        assert equal[:3] == [True] * 3
        assert equal[-1]
        assert left_out[:3] == [0] * 3
        assert left_out[3] > 0 == left_out[-1]
        assert sums == answers[0][2]
    assert not all(equal[3] for equal, *_ in answers)


# ---- what crosses when ----------------------------------------------------------------------------------------------


def crossings_after(case: Case) -> dict[str, set[Crossing]]:
    """What the next use of each unit would send, after this and that."""
    step, dims = build_step(case)
    gathers, parameters = step.sharding._gathers, list(step.model.parameters())

    def take_step(**settings: Any) -> None:
        torch.optim.AdamW(parameters, lr=1e-3, **settings).step()

    def write(first: int = 0, past_counters: bool = False) -> None:
        for parameter in parameters[: first or None]:
            (parameter.data if past_counters else parameter).mul_(1.5)

    actions = {
        "a use": lambda: None,
        "a change of mode": lambda: (step.model.eval(), step.model.train()),
        "a step, fused": lambda: take_step(fused=True),
        "a step, foreach": lambda: take_step(foreach=True),
        "a step, loop": lambda: take_step(foreach=False),
        "a step of another optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step,
        "a write": write,
        "a write, then a step": lambda: (write(), step.optimizer.step()),
        "a step, then a write to the first unit": lambda: (step.optimizer.step(), write(first=1)),
        "weights_changed": step.sharding.weights_changed,
        "a load": lambda: step.model.load_state_dict(step.model.state_dict()),
        "a write past all counters": lambda: write(past_counters=True),
    }
    found = {"nothing was ever sent": {gather.next_crossing() for gather in gathers}}
    for index, (what, action) in enumerate(actions.items()):
        step._forward_backward(case.batches(index, dims))
        with torch.no_grad():
            action()
        found[what] = {gather.next_crossing() for gather in gathers}
    return found


def test_a_step_sends_a_difference_any_other_write_whole_weights_and_nothing_else_anything():
    nothing, difference, keyframe = ({crossing} for crossing in Crossing)
    others = {"a use": nothing, "a change of mode": nothing, "a write past all counters": nothing}
    others["a step, then a write to the first unit"] = difference | keyframe
    for found in ranks(4).run(crossings_after, Case(nodes=2, zero=lossless(), precision=BF16, model=LLAMA_STYLE)):
        for what, crossing in found.items():
            expected = others.get(what, difference if what.startswith("a step") else keyframe)
            assert crossing == expected, what


def with_a_bad_weight(case: Case) -> list[list[bool]]:
    """Which units every gathered row of which is finite; after a bad weight, two steps later, after a keyframe."""
    step, dims = build_step(case)
    gathers = step.sharding._gathers

    def finite() -> list[bool]:
        step._forward_backward(case.batches(0, dims))
        return [bool(used(gather, dims).isfinite().all()) for gather in gathers]

    found = [finite()]
    weight = step.model.layers[0].mlp.fc1.weight
    step.optimizer.step()
    weight_shard = weight.to_local().view(-1)
    if dims.world.rank == 3:
        before = weight_shard[0].item()
        weight_shard.data[0] = float("nan")
    found.append(finite())
    if dims.world.rank == 3:
        weight_shard.data[0] = before
    for _ in range(2):  # the first message may have no room for a block of which all bits change
        for parameter in step.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.SGD(step.model.parameters(), lr=0.0).step()
        healed = finite()
    found.append(healed)
    step.sharding.weights_changed()
    found.append(finite())
    return found


def test_what_is_not_finite_arrives_and_goes_again():
    case = Case(nodes=2, zero=lossless(), precision=BF16)
    for start, broken, later, healed in ranks(4).run(with_a_bad_weight, case):
        assert broken.count(False) == 1
        assert all(start + later + healed)


# ---- corruption -----------------------------------------------------------------------------------------------------


def with_a_flipped_bit(case: Case, steps: int) -> tuple[list[str], list[int]]:
    """What the check of R says in each step, and what crosses, after a bit of one rank's R was flipped in step 3."""
    step, dims = build_step(case)
    said, sent = [], []

    class Verify:
        can_wait = False

        def begin_step(self) -> None: ...

        def evidence(self, *others: object) -> str:
            return "none"

        def allows(self, iteration: int, *others: object) -> bool:
            if iteration == 3 and dims.world.rank == 3:
                gather = step.sharding._gathers[1]
                place = max(gather.unit.segments, key=lambda segment: segment.size).start  # 1-D ones are replaced
                gather.resident().weights[0, place : place + 1].view(torch.uint8)[0] ^= 16
            try:
                verify_weights(step.sharding, dims)
                said.append("")
            except CorruptWeightsError as error:
                said.append(str(error).splitlines()[1])
            return True

    step.guard = Verify()
    for index in range(steps):
        before = weight_bytes(dims)
        train_step(step, case, dims, index)
        sent.append(weight_bytes(dims) - before)
    return said, sent


def test_a_flipped_bit_in_the_resident_weights_is_found_and_lives_until_the_keyframe_of_the_interval():
    """Whole weights cross after iterations 4 and 8, in the next step; the bit is rank 3's, of what rank 1 has sent."""
    case = Case(nodes=2, zero=lossless(zero_weight_keyframe_interval=4), precision=BF16, learning_rate=1e-5)
    answers = ranks(4).run(with_a_flipped_bit, case, 9)
    for said, sent in answers:
        broken = "layers.0, shard of rank 1: other weights on rank 2, 3"
        assert said == ["", "", broken, broken, *[""] * 5]
        assert sent[0] == sent[4] == sent[8] > max(sent[i] for i in (3, 5, 6, 7))


def restored(case: Case) -> list[bool]:
    """Say of each unit whether a new model computes with the same weights, out of what was kept after a use."""
    (step, dims), (again, again_dims) = build_step(case), build_step(case)
    for index in range(2):
        train_step(step, case, dims, index)
    step._forward_backward(case.batches(2, dims))
    step.sharding.free_gathered()
    again.model.load_state_dict(step.model.state_dict())
    assert again.sharding.load_secondary_state(step.sharding.secondary_state())
    again._forward_backward(case.batches(2, again_dims))
    pairs = zip(step.sharding._gathers, again.sharding._gathers, strict=True)
    return [torch.equal(bits(used(one, dims)), bits(used(other, again_dims))) for one, other in pairs]


def test_restored_resident_weights_are_sent_inside_a_node_as_before():
    assert all(all(same) for same in ranks(4).run(restored, Case(nodes=2, zero=lossless(), precision=BF16)))


def without_begin_step(case: Case) -> None:
    step, _ = build_step(case)
    with pytest.raises(RuntimeError, match=r"--zero-weight-keyframe-interval 9 needs Sharding.begin_step\(iteration\)"):
        step.optimizer.step()


def test_a_keyframe_interval_needs_to_know_the_iteration():
    ranks(2).run(without_begin_step, Case(nodes=2, zero=lossless(zero_weight_keyframe_interval=9), precision=BF16))
