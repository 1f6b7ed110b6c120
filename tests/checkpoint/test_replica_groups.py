"""Test checkpoints of DiLoCo's replica groups, loaded with other numbers of groups or without DiLoCo."""

import dataclasses
import functools

import pytest
import torch
from helpers.checkpoints import Attempt, run
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import chosen
from helpers.training import Case

from megazpp.base.files import DamagedError
from megazpp.checkpoint.state import under
from megazpp.diloco.config import DilocoConfig


def grouped(number: int, *, fragments: int = 1, **case: int) -> Case:
    rule = {"diloco_steps": 2, "diloco_outer_lr": 0.7, "diloco_outer_momentum": 0.9, "diloco_fragment_sync_delay": 1}
    config = DilocoConfig(diloco_replica_groups=number, diloco_fragments=fragments, **rule)
    return Case(**{"nodes": 4, "diloco": config} | case)


NONE, TWO, FOUR, FRAGMENTS = Case(nodes=4), grouped(2), grouped(4), grouped(2, fragments=2)
WIDE = grouped(2, tp=2, nodes=2)  # two replica groups with one node each, and tensor parallelism of 2
NONE_1, TWO_1, FOUR_1 = (dataclasses.replace(case, stage=1) for case in (NONE, TWO, FOUR))
BEGIN = "note: replica groups start at the outer weights, because the checkpoint "
OTHERS = [f"{BEGIN}has another number of groups"]
MODEL = {"model.": "model."}
BEGUN = MODEL | {"diloco.common.": "model.", "replica_group.I.inner.": "model."}
KEPT = BEGUN | {"diloco.momentum.": "diloco.momentum."}
ALL = MODEL | {name: name for name in ("diloco.", "replica_group.I.inner.", "replica_group.I.counts")}
# Each entry has the case that saves, the case that loads, {prefix of loaded keys: prefix of the saved keys with equal
# values}, and the expected notes in the log. I is the index of the replica group.
CASES = {
    "four from two": (TWO, FOUR, KEPT, OTHERS),
    "two from four": (FOUR_1, TWO_1, KEPT, OTHERS),
    "none from two": (TWO, NONE, MODEL, []),
    "none from two, zero 1": (TWO_1, NONE_1, MODEL, []),
    "two from none": (NONE, TWO, BEGUN, OTHERS),
    "two from none, zero 1": (NONE_1, TWO_1, BEGUN, OTHERS),
    "fragments": (TWO, FRAGMENTS, KEPT, [f"{BEGIN}has other --diloco-fragments"]),
    "wide from narrow": (TWO, WIDE, ALL, []),
    "narrow from wide": (WIDE, TWO, ALL, []),
}
SLOW = ("none from two", "four from two", "two from none", "fragments", "wide from narrow")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that trains a case for 4 steps on four ranks and saves a checkpoint, once per case.

    The function returns the folder of the checkpoint, and the final state of each replica group by its index. The
    checkpoint is saved while a fragment's outer gradient is still being sent, if the case has a delay. Replica groups
    differ from each other and from the outer weights, otherwise a test could not notice a group with another's state.
    """

    @functools.cache
    def save(case: Case) -> tuple[str, dict[int, dict[str, str]]]:
        folder = str(tmp_path_factory.mktemp("replica_groups"))
        of_group = {each.replica_group: each.state for each in ranks(4).run(run, case, 4, whole=True, save=folder)}
        if len(of_group) > 1:
            assert under("diloco.common.", of_group[0]) != under("model.", of_group[0])
            assert moments(of_group[0], 0) != moments(of_group[1], 1)
        return folder, of_group

    return save


def moments(state: dict[str, str], group: int) -> dict[str, str]:
    return under(f"replica_group.{group}.optimizer.state." if group else "optimizer.state.", state)


@pytest.mark.parametrize("case", chosen(CASES, slow=SLOW))
def test_checkpoint_of_replica_groups_resumes_with_other_numbers(saved, case):
    before, after, same, notes = case
    folder, of_group = saved(before)
    for result in ranks(4).run(run, after, 5, whole=True, load=folder):
        group, source = result.replica_group, result.replica_group % before.num_replica_groups
        for ours, theirs in same.items():
            expected = under(theirs.replace("I", str(group)), of_group[source])
            assert under(ours.replace("I", str(group)), result.loaded) == expected != {}, ours
        assert moments(result.loaded, group) == moments(of_group[source], source) != {}
        assert any(key.startswith(("replica_group.", "diloco.")) for key in result.loaded) == (
            after.num_replica_groups > 1
        )
        assert result.state != result.loaded
        assert [line for line in result.lines if BEGIN in line] == notes


def accepted(case: Case) -> list[str]:
    """Try to load incomplete or damaged DiLoCo checkpoints; return the problem of each one that is accepted.

    The list is empty if all of them are rejected.
    """
    attempt = Attempt(case)
    attempt.train(1)
    there, own = attempt.state.tensors(optimizer=True, rng=False), f"replica_group.{attempt.dims.replica_group.rank}."
    missing = ("diloco.common.final_norm.weight", f"{own}inner.final_norm.weight", f"{own}values")
    without = {gone: {key: x for key, x in there.items() if key != gone} for gone in missing}
    rows = [(rest, f"the DiLoCo checkpoint of iteration 1 has no tensor {gone}") for gone, rest in without.items()]
    cut = there | {f"{own}values": there[f"{own}values"][:-3]}
    rows.append((cut, f"are damaged in the checkpoint of iteration 1 ({own}values: "))

    def accept(tensors: dict[str, torch.Tensor]) -> None:
        attempt.state.accept(tensors, optimizer=True, rng=False, iteration=1)

    return not_refused(rows, accept, DamagedError)


def test_missing_or_damaged_part_of_a_replica_group_is_named():
    assert ranks(2).run(accepted, grouped(2, nodes=2)) == [[], []]
