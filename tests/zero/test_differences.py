"""Weights that cross nodes as differences from the resident secondary partition (--zero-weight-bits 16 4 and others).

The reference is the rule in one process, in plain torch: every node's row of a unit after the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, FixedBatches, build_step

from kernels.block_quant import reference
from kernels.formats import BlockFormat
from megazpp.training.objective import Evaluator
from megazpp.training.step import TrainStep
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.gather import Crossing
from megazpp.zero.verify import CorruptWeightsError, verify_weights
from megazpp.zero.wire import plan_message

BF16, FP16 = PrecisionConfig(bf16=True), PrecisionConfig(fp16=True)


def with_bits(inside: int, across: int, **flags: Any) -> ZeroConfig:
    return ZeroConfig(zeropp=True, zero_weight_bits=(inside, across), **flags)


def quantized(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """What arrives of x [n], fp32."""
    payload, scales = torch.empty(fmt.payload_bytes(len(x)), dtype=torch.uint8), torch.empty(fmt.num_blocks(len(x)))
    scales, out = scales.bfloat16(), torch.empty(len(x))
    reference.quantize(x.float(), fmt, payload, scales, None)
    reference.dequantize(payload, scales, fmt, out)
    return out


def followed(shards: list[torch.Tensor], segments: Any, fmt: BlockFormat) -> list[torch.Tensor]:
    """The rule in one process: R's row [S] after each message about `shards`, the first of which is a keyframe."""
    rows = [shards[0].clone()]
    for shard in shards[1:]:
        last, row = rows[-1].float(), shard.clone()
        for segment in segments:
            part, blocks = slice(segment.start, segment.stop), fmt.payload_bytes(segment.size)
            is_shorter = blocks + fmt.scale_bytes(segment.size) < segment.size * shard.element_size()
            if is_shorter and not segment.exact:
                row[part] = (last[part] + quantized(shard[part].float() - last[part], fmt)).to(shard.dtype)
        rows.append(row)
    return rows


# ---- the ranks ------------------------------------------------------------------------------------------------------


class Watched(NamedTuple):
    """What one rank saw of one unit at one step."""

    shard: torch.Tensor  # [S] w, before the step
    resident: torch.Tensor  # [N, S] R, in the step
    gathered: torch.Tensor  # [N L, S] what the step computed with


class Run(NamedTuple):
    """What one rank saw."""

    units: list[tuple[Any, list[Watched]]]  # each one's segments
    losses: list[float]
    validations: list[float]
    place: tuple[int, int]  # index along cross and local
    sizes: tuple[int, int]
    cross_bytes: list[int]  # of weights, per step


def weight_bytes(dims: Any) -> int:
    """Bytes of weights that this rank has sent to other nodes."""
    return sum(t.sent_bytes for key, t in dims.counter.table().items() if key[1:] == ("cross", "all_gather"))


def train_step(step: TrainStep, case: Case, dims: Any, index: int) -> float:
    how = {"learning_rate": case.learning_rate, "weight_decay": 0.01, "iteration": index + 1}
    return step(case.batches(index, dims), **how).loss


def watch(case: Case, evaluate_after: tuple[int, ...] = ()) -> Run:
    """Train and look; also evaluate in between, which is to change nothing."""
    step, dims = build_step(case)
    gathers = step.sharding._gathers
    watched: list[list[Watched]] = [[] for _ in gathers]
    losses, validations, sent = [], [], []
    for index in range(case.steps):
        dtype = case.precision.param_dtype
        shards = [gather.unit.shard_reader(dtype)() for gather in gathers]
        before = weight_bytes(dims)
        losses.append(train_step(step, case, dims, index))
        sent.append(weight_bytes(dims) - before)
        with dims.counter.paused():
            for gather, shard, seen in zip(gathers, shards, watched, strict=True):
                residents = gather.resident().weights
                seen.append(Watched(shard, residents.clone(), used(gather, dims)))
        if index in evaluate_after:
            evaluator = Evaluator(
                step.model, step.sharding, FixedBatches(case.batches(0, dims)), dims, iterations=1, batch_size=1
            )
            validations.append(evaluator())
    places = (dims.cross.rank, dims.local.rank), (dims.cross.size, dims.local.size)
    segments = [gather.unit.segments for gather in gathers]
    return Run(list(zip(segments, watched, strict=True)), losses, validations, *places, sent)


def used(gather: Any, dims: Any) -> torch.Tensor:
    """[N L, S] what a use would hand to FSDP2, out of the messages that are kept."""
    messages = gather.secondary.messages
    received = dims.local.all_gather(messages).view(dims.local.size, *messages.shape)
    out = torch.empty(dims.cross.size, dims.local.size, gather._codec.layout.size, dtype=gather._codec.dtype)
    gather._codec.unpack(received, out.transpose(0, 1))
    return out.flatten(0, 1)


CASES = {
    "16 4, bf16": (4, Case(nodes=2, zero=with_bits(16, 4), precision=BF16, micro_batches=2)),
    "8 4, fp32": (4, Case(nodes=2, zero=with_bits(8, 4), model=LLAMA_STYLE)),
    "8 4, fp16, tp 2, one rank per node": (4, Case(nodes=2, tp=2, zero=with_bits(8, 4), precision=FP16)),
    "16 4, 3 nodes": (3, Case(nodes=3, zero=with_bits(16, 4), global_batch=12)),
    "16 4, 5 nodes": (5, Case(nodes=5, zero=with_bits(16, 4), precision=BF16, global_batch=10)),
    "8 4, tp 2, llama": (8, Case(nodes=2, tp=2, zero=with_bits(8, 4), precision=BF16, model=LLAMA_STYLE)),
    "16 4, copies": (8, Case(nodes=4, replicas=2, zero=with_bits(16, 4), precision=BF16)),
}
DEFAULT = ("16 4, bf16", "8 4, fp16, tp 2, one rank per node", "16 4, 3 nodes")


@pytest.mark.parametrize("name", [name if name in DEFAULT else slow(name) for name in CASES])
def test_resident_weights_follow_the_rule_of_one_process_and_are_what_every_rank_computes_with(name: str):
    world, case = CASES[name]
    runs: list[Run] = ranks(world).run(watch, case)
    num_nodes, num_local = runs[0].sizes
    itemsize, inside = case.precision.param_dtype.itemsize, case.zero.weight_bits[0]
    whole, differences = 0, 0
    for index, (segments, seen) in enumerate(runs[0].units):
        whole += plan_message(segments, None, exact_itemsize=itemsize).message_bytes
        fmt = BlockFormat(case.zero.weight_bits[1], 128)
        differences += plan_message(segments, fmt, exact_itemsize=itemsize).message_bytes
        shards = {(run.place, tp): run.units[index][1] for tp, run in tp_ranks(runs, case)}
        for (place, tp), mine in shards.items():
            for node in range(num_nodes):
                owner = shards[(node, place[1]), tp]
                rows = followed([each.shard for each in owner], segments, fmt)
                assert any(not torch.equal(row, each.shard) for row, each in zip(rows, owner, strict=True))
                for row, each in zip(rows, mine, strict=True):
                    assert torch.equal(bits(each.resident[node]), bits(row))
            if inside == 16 or num_local == 1:
                for step, each in enumerate(mine):
                    order = [(n, local) for n in range(num_nodes) for local in range(num_local)]
                    rows = torch.stack([shards[at, tp][step].resident[at[0]] for at in order])
                    assert torch.equal(bits(each.gathered), bits(rows))
            for step, each in enumerate(mine):
                first = shards[(0, 0), tp][step]
                assert torch.equal(bits(each.gathered), bits(first.gathered))
        assert len(seen) == case.steps
    for run in runs:
        assert run.cross_bytes == [(num_nodes - 1) * n for n in (whole, *[differences] * (case.steps - 1))]
    assert differences < (0.6 if itemsize == 2 else 0.4) * whole


def tp_ranks(runs: list[Run], case: Case) -> list[tuple[int, Run]]:
    """Each rank's run with what sets it apart from those that are at the same place: tensor-parallel index, copy."""
    return [(sum(other.place == run.place for other in runs[:index]), run) for index, run in enumerate(runs)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def test_evaluations_send_nothing_of_their_own_and_change_nothing():
    case = Case(nodes=2, zero=with_bits(16, 4), precision=BF16)
    calm, evaluated = (ranks(4).run(watch, case, after) for after in ((), (1, 3)))
    for one, other in zip(calm, evaluated, strict=True):
        assert one.losses == other.losses
        assert len(other.validations) == 2
        assert one.cross_bytes == other.cross_bytes  # an evaluation's first use is the next step's message
        for (_, ours), (_, theirs) in zip(one.units, other.units, strict=True):
            assert all(torch.equal(bits(a.resident), bits(b.resident)) for a, b in zip(ours, theirs, strict=True))


# ---- what crosses when ----------------------------------------------------------------------------------------------


def crossings_after(case: Case) -> dict[str, set[Crossing]]:
    """What the next use of each unit would send, after this and that."""
    step, dims = build_step(case)
    gathers, parameters = step.sharding._gathers, list(step.model.parameters())

    def take_step(**settings: Any) -> None:
        torch.optim.AdamW(parameters, lr=1e-3, **settings).step()

    def write(first: int = 0, *, of: Any = lambda parameter: parameter) -> None:
        for parameter in parameters[: first or None]:
            of(parameter).mul_(1.5)

    actions = {
        "a use": lambda: None,
        "a change of mode": lambda: (step.model.eval(), step.model.train()),
        "a step, fused": lambda: take_step(fused=True),
        "a step, foreach": lambda: take_step(foreach=True),
        "a step, loop": lambda: take_step(foreach=False),
        "a step of another optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step,
        "a write": write,
        "a write to the local shards": lambda: write(of=lambda parameter: parameter.to_local()),
        "a write, then a step": lambda: (write(), step.optimizer.step()),
        "a step, then a write to the first unit": lambda: (step.optimizer.step(), write(first=1)),
        "weights_changed": step.sharding.weights_changed,
        "a load": lambda: step.model.load_state_dict(step.model.state_dict()),
        "a write past all counters": lambda: write(of=lambda parameter: parameter.data),
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
    for found in ranks(4).run(crossings_after, Case(nodes=2, zero=with_bits(16, 4), model=LLAMA_STYLE)):
        for what, crossing in found.items():
            expected = others.get(what, difference if what.startswith("a step") else keyframe)
            assert crossing == expected, what


def test_without_differences_a_step_and_any_other_write_send_whole_weights():
    nothing, _, keyframe = ({crossing} for crossing in Crossing)
    calm = ("a use", "a change of mode", "a write past all counters")
    for found in ranks(4).run(crossings_after, Case(nodes=2, zero=with_bits(8, 8), model=LLAMA_STYLE)):
        for what, crossing in found.items():
            assert crossing == (nothing if what in calm else keyframe), what


def with_a_bad_weight(case: Case, bad: float) -> list[list[bool]]:
    """Which units every gathered row of which is finite; after a bad weight, a step later, after a keyframe."""
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
        weight_shard.data[0] = bad
    found.append(finite())
    if dims.world.rank == 3:
        weight_shard.data[0] = before
    step.optimizer.zero_grad()
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(step.model.parameters(), lr=0.0).step()
    found.append(finite())
    step.sharding.weights_changed()
    found.append(finite())
    return found


@pytest.mark.parametrize(("inside", "bad"), [(16, float("nan")), (8, float("inf")), slow(16, -float("inf"))])
def test_what_is_not_finite_arrives_as_nan_and_stays_until_the_next_keyframe(inside: int, bad: float):
    for start, broken, later, healed in ranks(4).run(with_a_bad_weight, Case(nodes=2, zero=with_bits(inside, 4)), bad):
        assert all(start)
        assert broken == later
        assert broken.count(False) == 1
        assert all(healed)


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


@pytest.mark.parametrize("inside", [16, slow(8)])
def test_a_flipped_bit_in_the_resident_weights_is_found_and_lives_until_the_keyframe_of_the_interval(inside: int):
    """Whole weights cross after iterations 4 and 8, in the next step; the bit is rank 3's, of what rank 1 has sent."""
    zero = with_bits(inside, 4, zero_weight_keyframe_interval=4)
    answers = ranks(4).run(with_a_flipped_bit, Case(nodes=2, zero=zero), 9)
    for said, sent in answers:
        broken = "layers.0, shard of rank 1: other weights on rank 2, 3"
        assert said == ["", "", broken, broken, *[""] * 5]
        assert {sent[0], sent[4], sent[8]} == {max(sent)}
        assert {sent[i] for i in (1, 2, 3, 5, 6, 7)} == {min(sent)}
        assert max(sent) > min(sent) > 0


def restored(case: Case) -> list[bool]:
    """Say of each unit whether a new model computes with the same weights, out of what was kept after a use."""
    step, dims = build_step(case)
    train_step(step, case, dims, 0)
    train_step(step, case, dims, 1)
    step._forward_backward(case.batches(2, dims))
    step.sharding.free_gathered()
    again, again_dims = build_step(case)
    again.model.load_state_dict(step.model.state_dict())
    assert again.sharding.load_secondary_state(step.sharding.secondary_state())
    again._forward_backward(case.batches(2, again_dims))
    pairs = zip(step.sharding._gathers, again.sharding._gathers, strict=True)
    return [torch.equal(bits(used(one, dims)), bits(used(other, again_dims))) for one, other in pairs]


def test_restored_resident_weights_are_sent_inside_a_node_as_before():
    assert all(all(same) for same in ranks(4).run(restored, Case(nodes=2, zero=with_bits(8, 4), precision=BF16)))


def without_begin_step(case: Case) -> None:
    step, _ = build_step(case)
    with pytest.raises(RuntimeError, match=r"--zero-weight-keyframe-interval 9 needs Sharding.begin_step\(iteration\)"):
        step.optimizer.step()


def test_a_keyframe_interval_needs_to_know_the_iteration():
    ranks(2).run(without_begin_step, Case(nodes=2, zero=with_bits(16, 4, zero_weight_keyframe_interval=9)))


# ---- how close ------------------------------------------------------------------------------------------------------


def errors_of_weights(case: Case) -> list[float]:
    """Relative L2 error of the matrices that a step computes with, at each step."""
    step, dims = build_step(case)
    found = []
    for index in range(case.steps):
        gathers = step.sharding._gathers
        shards = [gather.unit.shard_reader(torch.float32)() for gather in gathers]
        rate = case.learning_rate * (index + 1) / 20  # a warm-up
        step(case.batches(index, dims), learning_rate=rate, weight_decay=0.01)
        wrong, whole = 0.0, 0.0
        for gather, shard in zip(gathers, shards, strict=True):
            mine = used(gather, dims)[dims.shard.rank].float()
            for segment in gather.unit.segments:
                if not segment.exact:
                    part = slice(segment.start, segment.stop)
                    wrong += float((mine[part] - shard[part]).square().sum())
                    whole += float(shard[part].square().sum())
        found.append((wrong / whole) ** 0.5)
    return found


@pytest.mark.slow
def test_differences_bring_weights_three_times_as_close_as_8_bits_do():
    model = dataclasses.replace(GPT2_STYLE, hidden_size=96, ffn_hidden_size=384)
    case = Case(nodes=2, precision=BF16, learning_rate=1e-3, steps=10, model=model)
    cases = (dataclasses.replace(case, zero=with_bits(*pair)) for pair in ((8, 8), (16, 4)))
    eight, four = (ranks(4).run(errors_of_weights, each)[0] for each in cases)
    assert four[0] < 0.0018  # bf16
    assert max(four) < 0.0025
    assert min(eight) > 3 * max(four)
