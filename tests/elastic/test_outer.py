"""Compare elastic DiLoCo's outer steps with the exchange of fixed replica groups: all weights have equal bits.

In elastic DiLoCo, every group has the whole outer state and computes each outer step itself.
"""

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import LLAMA_STYLE, Case, build_diloco, build_step, diloco_plan

from megazpp.diloco.config import DilocoConfig
from megazpp.elastic.outer import WholeOuter


def compare_exchanges(case: Case, versions: int) -> list[bool]:
    """Train fixed replica groups, and compute each outer step also by elastic DiLoCo from the groups' messages.

    Returns:
        For each version, True if the outer weights and R, the groups' common copy of them, are equal in both. Then a
        last entry, True if R is not all zero.
    """
    step, dims = build_step(case)
    fixed, groups = build_diloco(case, step, dims), dims.replica_group.size
    whole = WholeOuter(step.sharding, diloco_plan(case), case.precision, num_groups=groups, late_factor=0.5)
    plan, equal = fixed.plan, []
    for index in range(versions * plan.steps):
        size = case.global_batch // dims.data_size
        batch = case.batch(index, dims.data_rank * size, size)
        step([batch], learning_rate=3e-3, weight_decay=0.01)
        with dims.counter.paused():
            tokens = dims.sum_over_data_(batch.loss_mask.sum(dtype=torch.float64))
        fixed.count(tokens)
        if (index + 1) % plan.steps == 0:
            sent = float(fixed._tokens[0])
            mine = whole.pack(sent), sent
            # (message, tokens) of the ranks with the same shard, one per group
            found = dims.replica_group.gather_objects(mine)
            found = dims.replica_group.share_object(found)
            version = len(equal)
            entries = [{"base": version, "tokens": tokens} for _, tokens in found]
            whole.apply(entries, [message for message, _ in found], version)
        fixed.after_step(index + 1)
        if (index + 1) % plan.steps == 0:
            pairs = zip(fixed.units, whole.units, strict=True)
            rows = [torch.equal(mine.rows, theirs.rows) for mine, theirs in pairs]
            own = dims.replica_group.rank
            outer = [torch.equal(a.outer, b.outer[own]) for a, b in zip(fixed.units, whole.units, strict=True)]
            equal.append(all(rows + outer))
    changed = any(bool(unit.rows.any()) for unit in whole.units)
    return [*equal, changed]


def flags(bits: int, **more: float) -> DilocoConfig:
    return DilocoConfig(diloco_steps=2, diloco_weight_bits=bits, diloco_gradient_bits=bits, diloco_outer_lr=0.7, **more)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case(nodes=2, documents=True, diloco=flags(4, diloco_outer_momentum=0.6))),
        slow(4, Case(nodes=4, diloco=flags(16, diloco_outer_momentum=0.6))),
        slow(4, Case(nodes=2, tp=2, model=LLAMA_STYLE, vocab_size=112, diloco=flags(4, diloco_outer_momentum=0.6))),
    ],
)
def test_outer_steps_of_all_groups_have_the_bits_of_the_fixed_exchange(world, case):
    for equal in ranks(world).run(compare_exchanges, case, 3):
        assert equal == [True] * 4


def late_and_snapshot(case: Case) -> tuple[torch.Tensor, torch.Tensor, bool, bool]:
    """Apply two contributions, one of them late by a version, to one of two equal outer states.

    Then load a snapshot of the changed state into the other state.

    Returns:
        (smallest decrease of an element of R, the common copy of the outer weights; largest decrease; True if the
        fingerprints of the two states differ before the load; True if the fingerprints are equal after the load).
    """
    step, _ = build_step(case)
    plan = diloco_plan(Case(nodes=2, diloco=flags(16, diloco_outer_momentum=0.0)))
    whole, other = (WholeOuter(step.sharding, plan, case.precision, num_groups=2, late_factor=0.5) for _ in range(2))
    before = [unit.rows.clone() for unit in whole.units]
    with torch.no_grad():
        for shard in (shard for unit in step.sharding.units for shard in unit.shards()):
            shard.sub_(1.0)  # now R - weights, the outer gradient, is 1
    ahead = whole.pack(8.0)
    with torch.no_grad():
        for shard in (shard for unit in step.sharding.units for shard in unit.shards()):
            shard.add_(1.0)  # now the outer gradient is 0 again
    level = whole.pack(8.0)
    whole.apply([{"base": 1, "tokens": 8.0}, {"base": 0, "tokens": 8.0}], [level, ahead], version=1)
    moved = torch.cat([(a - b.rows).flatten() for a, b in zip(before, whole.units, strict=True)])
    differ = whole.fingerprint() != other.fingerprint()
    other.load(bytearray(whole.dump()))
    return moved.min(), moved.max(), differ, whole.fingerprint() == other.fingerprint()


def test_late_contribution_has_less_weight_and_a_snapshot_has_the_whole_state():
    """The mean of outer gradient 0 with weight 1 and outer gradient 1 with weight 0.5 is 1/3.

    The outer learning rate is 0.7, so every weight decreases by 0.7 / 3. Padding must not change.
    """
    (found,) = ranks(1).run(late_and_snapshot, Case(steps=1))
    least, most, differ, equal = found
    assert float(least) == 0.0
    assert float(most) == pytest.approx(0.7 / 3, rel=1e-4)
    assert (differ, equal) == (True, True)


def shifted(case: Case) -> tuple[float, float, float]:
    """Merge a contribution while this group has trained steps that it has not published.

    Returns:
        (largest decrease of R, the common copy of the outer weights, in the contribution's fragment; mean of R minus
        this group's own weights in this fragment; largest change of R in the other fragment).
    """
    step, _ = build_step(case)
    plan = diloco_plan(Case(nodes=2, diloco=flags(16, diloco_outer_momentum=0.0, diloco_fragments=2)))
    whole = WholeOuter(step.sharding, plan, case.precision, num_groups=2, late_factor=0.5)
    with torch.no_grad():
        for shard in (shard for unit in step.sharding.units for shard in unit.shards()):
            shard.sub_(1.0)
    units, rest = whole.fragments
    before, elsewhere = [unit.rows.clone() for unit in units], [unit.rows.clone() for unit in rest]
    whole.apply([{"base": 2, "tokens": 8.0}], [whole.pack(8.0, version=2)], version=2)
    whole.shift(units, before)
    distances = [row - shard for unit in units for row, shard in unit.pairs(unit.rows)]
    moved = torch.cat([(a - b.rows).flatten() for a, b in zip(before, units, strict=True)])
    other = torch.cat([(a - b.rows).flatten() for a, b in zip(elsewhere, rest, strict=True)])
    return float(moved.max()), float(torch.cat([d.flatten() for d in distances]).mean()), float(other.abs().max())


def test_version_of_a_fragment_keeps_steps_that_are_not_published():
    """Merge a contribution into a fragment while this group has trained steps that it has not published.

    R moves by the outer step of 0.7. The group's own weights must move with R, so that they stay 1.0 below R.
    """
    ((moved, distance, elsewhere),) = ranks(1).run(shifted, Case(steps=1))
    assert moved == pytest.approx(0.7, rel=1e-4)
    assert distance == pytest.approx(1.0, rel=1e-4)
    assert elsewhere == 0.0
