"""Test lossless weight deltas: nodes send each other only changes of the weights in the secondary partition."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import LLAMA_STYLE, Case, FixedBatches, build_step

from megazpp.checkpoint.state import SecondaryPartition
from megazpp.kernels.weight_delta import message_bytes
from megazpp.training.metrics import StepRecord
from megazpp.training.objective import Evaluator
from megazpp.training.step import TrainStep
from megazpp.zero import wire
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.gather import InterNodeMessage
from megazpp.zero.verify import CorruptWeightsError, verify_weights

BF16 = PrecisionConfig(bf16=True)


def lossless(**given: Any) -> Case:
    zero = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
    return Case(**{"nodes": 2, "precision": BF16, "zero": zero, "steps": 5, **given})


def take_step(step: TrainStep, case: Case, index: int) -> tuple[StepRecord, int]:
    """Take a training step, and return (its record, weight bytes that this rank sent to other nodes in the step)."""
    rate = case.learning_rate * min(index / 4, 1.0)  # the learning rate warms up from zero in four steps
    before = step.dims.counter.table()
    record = step(case.batches(index, step.dims), learning_rate=rate, weight_decay=0.01, iteration=index + 1)
    key = ("cross", "cross", "all_gather")
    return record, step.dims.counter.table()[key].sent_bytes - (before[key].sent_bytes if key in before else 0)


def shards_of(step: TrainStep, case: Case) -> list[torch.Tensor]:
    """Return this rank's shards of the weights: one flat tensor in the compute dtype for each sharding unit."""
    return [gather.unit.shard_reader(case.precision.param_dtype)() for gather in step.sharding._gathers]


def used(gather: Any, dims: Any) -> torch.Tensor:
    """Return the weights [N L, S] of a sharding unit that its next use would pass to FSDP2.

    The function gathers and decodes the messages of the secondary partition. N counts nodes, L ranks per node, and S
    elements of a shard.
    """
    messages = gather.secondary.messages
    received = dims.local.all_gather(messages).view(dims.local.size, *messages.shape)
    out = torch.empty(dims.cross.size, dims.local.size, gather._codec.layout.size, dtype=gather._codec.dtype)
    gather._codec.unpack(received, out.transpose(0, 1))
    return out.flatten(0, 1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def expected_bytes(size: int, needed: list[int]) -> int:
    """Return the expected bytes of the next inter-node message with a shard of `size` elements.

    The first message is a keyframe. The next two are weight deltas with room for a change of every element. Later
    messages have room for the previous delta and its growth from the delta before, an eighth more, and 512 bytes.

    Args:
        size: number of elements of the shard.
        needed: bytes of the longest body of each message so far; 0 for a keyframe.
    """
    if len(needed) < 3:
        return message_bytes(size) if needed else -(-2 * size // 16) * 16
    room = int(1.125 * (needed[-1] + max(needed[-1] - needed[-2], 0))) + 512
    return message_bytes(size, min(room, 2 * size))


def train_and_look(case: Case, evaluate_after: tuple[int, ...]) -> list[float]:
    """Train, check the gathered weights and the sent bytes of each step, and return the losses.

    Evaluations follow the steps in `evaluate_after`. Evaluations may neither send further bytes nor change later steps.
    """
    step, dims = build_step(case)
    gathers, losses, left_out = step.sharding._gathers, [], 0.0
    needed: list[list[int]] = [[] for _ in gathers]
    for index in range(case.steps):
        shards = shards_of(step, case)
        expected = (dims.cross.size - 1) * sum(map(expected_bytes, map(len, shards), needed))
        record, sent = take_step(step, case, index)
        losses.append(record.loss)
        left_out += record.metrics["weights_left_out"]
        assert sent == expected
        with dims.counter.paused():
            for gather, shard, lengths in zip(gathers, shards, needed, strict=True):
                of_nodes, of_all = (axis.all_gather(shard[None]) for axis in (dims.cross, dims.shard))
                assert torch.equal(bits(gather.resident().weights), bits(of_nodes))
                assert torch.equal(bits(used(gather, dims)), bits(of_all))
                lengths.append(int(gather.lossless().recent[0]))
        # the evaluation uses the new weights first, so it gets the message that the next step would get
        if index in evaluate_after:
            batches = FixedBatches(case.batches(0, dims))
            Evaluator(step.model, step.sharding, batches, dims, iterations=1, batch_size=1)()
    # Each step records the elements that the messages before it left out, so the last step's number is added here
    assert left_out + step.sharding.metrics()["weights_left_out"] == 0
    return losses


def train(case: Case) -> list[float]:
    step, _ = build_step(case)
    return [take_step(step, case, index)[0].loss for index in range(case.steps)]


# number of ranks, fields of the case, indices of the steps that an evaluation follows
CASES: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "bf16, evaluations": (4, {}, (1, 3)),
    "fp16, tp 2, one rank per node": (4, {"tp": 2, "precision": PrecisionConfig(fp16=True)}, ()),
    "3 nodes, evaluations": (3, {"nodes": 3, "global_batch": 12}, (1, 3)),
    "tp 2, llama": (8, {"tp": 2, "model": LLAMA_STYLE, "sequence_parallel": True}, ()),
    "copies": (4, {"nodes": 4, "replicas": 2}, ()),
    "200 steps": (4, {"steps": 200, "learning_rate": 1e-3}, ()),
}


@pytest.mark.parametrize(
    "setting",
    chosen(CASES, "bf16, evaluations", slow=("fp16, tp 2, one rank per node", "3 nodes, evaluations", "copies")),
)
def test_lossless_deltas_match_owners_weights_and_16_bit_losses(setting):
    world, given, evaluate_after = setting
    case = lossless(**given)
    sixteen = dataclasses.replace(case, zero=ZeroConfig(zeropp=True, zero_weight_bits=16))
    assert ranks(world).run(train_and_look, case, evaluate_after) == ranks(world).run(train, sixteen)


def with_little_room(case: Case) -> tuple[bool, list[int]]:
    """Train with messages that have too little room for the weight deltas of step 3, so that some blocks arrive later.

    Returns:
        True if this rank's copy of the weights equals the owners' weights after step 3; and a checksum of the gathered
        weights of each step, which must be equal on all ranks.
    """
    step, dims = build_step(case)
    gathers, complete, left_out, sums = step.sharding._gathers, [], [], []
    for index in range(8):
        shards = shards_of(step, case)
        spare = wire.SPARE
        if index == 3:
            wire.SPARE = 0
            for gather in gathers:
                gather.lossless().recent.fill_(150)
        take_step(step, case, index)
        wire.SPARE = spare
        rows = [gather.resident().weights[dims.cross.rank] for gather in gathers]
        complete.append(all(torch.equal(bits(a), bits(b)) for a, b in zip(rows, shards, strict=True)))
        for gather in gathers:
            gather.lossless()  # wait until the size counters that the next step needs have reached the host
        left_out.append(int(step.sharding.metrics()["weights_left_out"]))
        sums.append(sum(int(bits(used(gather, dims)).long().sum()) for gather in gathers))
    assert all([*complete[:3], complete[-1]])
    assert left_out[:3] == [0] * 3
    assert left_out[3] > 0 == left_out[-1]
    return complete[3], sums


def test_blocks_without_room_are_delayed_equally_on_all_ranks():
    answers = ranks(2).run(with_little_room, lossless())
    assert not all(complete for complete, _ in answers)
    assert all(sums == answers[0][1] for _, sums in answers)


# ---- choice between no message, weight delta and keyframe -----------------------------------------------------------


def see_what_crosses_next(case: Case) -> None:
    """Check after several actions whether the next use of each unit sends nothing, a weight delta or a keyframe.

    A write through `.data` raises no version counter, so ZeRO++ does not notice the write, and sends nothing.
    """
    step, dims = build_step(case)
    gathers, parameters = step.sharding._gathers, list(step.model.parameters())

    def update(optimizer: torch.optim.Optimizer = step.optimizer) -> None:
        with step.sharding.weight_update():
            optimizer.step()

    def sgd(foreach: bool) -> Any:
        return lambda: update(torch.optim.SGD(parameters, lr=1e-3, foreach=foreach))

    def write(first: int = len(parameters), past_counters: bool = False) -> None:
        for parameter in parameters[:first]:
            (parameter.data if past_counters else parameter).mul_(1.5)

    assert {gather.next_crossing() for gather in gathers} == {InterNodeMessage.KEYFRAME}, "nothing was ever sent"
    nothing, difference, keyframe = ({crossing} for crossing in InterNodeMessage)
    for index, (what, action, expected) in enumerate([
        ("a use", lambda: None, nothing),
        ("a change of mode", lambda: (step.model.eval(), step.model.train()), nothing),
        ("a step, fused", lambda: update(torch.optim.AdamW(parameters, lr=1e-3, fused=True)), difference),
        ("a step, foreach", sgd(foreach=True), difference),
        ("a step, loop", sgd(foreach=False), difference),
        ("a write", write, keyframe),
        ("a write, then a step", lambda: (write(), update()), keyframe),
        ("a step, a write to a unit", lambda: (update(), write(first=1)), difference | keyframe),
        ("invalidate_weights", step.sharding.invalidate_weights, keyframe),
        ("a load", lambda: step.model.load_state_dict(step.model.state_dict()), keyframe),
        ("a write past all counters", lambda: write(past_counters=True), nothing),
    ]):  # fmt: skip
        step._forward_backward(case.batches(index, dims))
        with torch.no_grad():
            action()
        assert {gather.next_crossing() for gather in gathers} == expected, what


def test_step_sends_a_delta_and_other_writes_send_full_weights():
    ranks(2).run(see_what_crosses_next, lossless())


def with_a_bad_weight(case: Case) -> None:
    """Set a weight to NaN and later to its old value, and check when the gathered weights have the NaN."""
    step, dims = build_step(case)
    shard = step.model.layers[0].mlp.fc1.weight.to_local().view(-1).data

    def units_with_a_bad_row() -> int:
        step._forward_backward(case.batches(0, dims))
        return sum(not used(gather, dims).isfinite().all() for gather in step.sharding._gathers)

    assert units_with_a_bad_row() == 0
    with step.sharding.weight_update():
        step.optimizer.step()
    good = shard[:1].clone()
    if dims.world.rank == dims.world.size - 1:
        shard[0] = float("nan")
    assert units_with_a_bad_row() == 1
    shard[:1] = good
    # the first message may lack room for a block in which all bits change, so that the block follows in the second
    for _ in range(2):
        for parameter in step.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with step.sharding.weight_update():
            torch.optim.SGD(step.model.parameters(), lr=0.0).step()
        bad = units_with_a_bad_row()
    assert bad == 0
    step.sharding.invalidate_weights()
    assert units_with_a_bad_row() == 0


def test_non_finite_weights_are_sent_and_later_replaced():
    ranks(2).run(with_a_bad_weight, lossless())


# ---- corrupted weights, and checkpoints of the secondary partition --------------------------------------------------


def with_a_flipped_bit(case: Case) -> None:
    """Flip a bit in rank 3's copy of rank 1's weights in step 3, and check which steps' verification reports it.

    `invalidate_weights` after step 4 makes step 5 send keyframes, which replace the weights with the flipped bit.
    """
    step, dims = build_step(case)
    said: list[str] = []

    def allows(iteration: int, *others: object) -> bool:
        if iteration == 3 and dims.world.rank == 3:
            gather = step.sharding._gathers[1]
            # the largest segment, because 1-D segments are complete in every message, which would repair the flipped
            # bit
            place = max(gather.unit.segments, key=lambda segment: segment.size).start
            gather.resident().weights[0, place : place + 1].view(torch.uint8)[0] ^= 16
        try:
            verify_weights(step.sharding, dims)
            said.append("")
        except CorruptWeightsError as error:
            said.append(str(error).splitlines()[1])
        return True

    evidence = {"begin_step": lambda: None, "evidence": lambda *others: "none"}
    step.guard = cast(Any, SimpleNamespace(can_wait=False, allows=allows, **evidence))
    sent = []
    for index in range(7):
        if index == 4:
            step.sharding.invalidate_weights()
        sent.append(take_step(step, case, index)[1])
    assert said == ["", "", *["layers.0, shard of rank 1: other weights on rank 2, 3"] * 2, *[""] * 3]
    assert sent[0] == sent[4] > max(sent[i] for i in (3, 5, 6))


@pytest.mark.slow
def test_flipped_bit_in_resident_weights_lasts_until_the_next_keyframe():
    ranks(4).run(with_a_flipped_bit, lossless(learning_rate=1e-5))


def restore(case: Case) -> None:
    """Check that a second model computes with the same weights after it got the first one's secondary partition."""
    (step, dims), (again, again_dims) = build_step(case), build_step(case)
    for index in range(2):
        take_step(step, case, index)
    step._forward_backward(case.batches(2, dims))
    step.sharding.reshard()
    again.model.load_state_dict(step.model.state_dict())
    saved = SecondaryPartition(step.sharding).tensors()
    assert SecondaryPartition(again.sharding).accept(saved, 0) == []
    again._forward_backward(case.batches(2, again_dims))
    for one, other in zip(step.sharding._gathers, again.sharding._gathers, strict=True):
        assert torch.equal(bits(used(one, dims)), bits(used(other, again_dims)))


def test_restored_resident_weights_are_gathered_without_change():
    ranks(2).run(restore, lossless())
