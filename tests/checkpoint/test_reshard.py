"""Test that every parallel layout can load the checkpoints of every other layout."""

import dataclasses

import pytest
from helpers.checkpoints import Attempt, run
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import BIASED_STYLE, GPT2_STYLE, LLAMA_STYLE, MIXTURE_STYLE, Case, train_plain

from megazpp.optim.config import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

ROUNDING = 1e-5  # relative tolerance for losses: layouts add fp32 numbers in different orders over a few steps
SEEDED = "note: random generators are seeded again: the checkpoint has no states of this layout"
FEEDBACK = "note: error feedback begins at zero: the checkpoint has none of this layout"
WHOLE = "note: the next inter-node messages carry whole weights: the checkpoint has no secondary partition"
ZEROPP, KEPT = ZeroConfig(zeropp=True), ZeroConfig(zeropp=True, zero_weight_delta="lossless")
PLAIN = Case(model=dataclasses.replace(GPT2_STYLE, num_layers=1), nodes=2, global_batch=12)
MUON = dataclasses.replace(PLAIN, optimizer=OptimizerConfig(optimizer="muon"))
DIFFERENCES = dataclasses.replace(PLAIN, zero=KEPT, precision=PrecisionConfig(bf16=True))
MIXTURE = Case(model=dataclasses.replace(MIXTURE_STYLE, make_vocab_size_divisible_by=3), tp=2, nodes=2, zero=ZEROPP)
BIASED = dataclasses.replace(MIXTURE, model=dataclasses.replace(BIASED_STYLE, make_vocab_size_divisible_by=3))
MIXTURE_KEPT = dataclasses.replace(MIXTURE, zero=KEPT, precision=PrecisionConfig(bf16=True), tp=1, ep=2)
LLAMA = Case(model=dataclasses.replace(LLAMA_STYLE, make_vocab_size_divisible_by=3), tp=2, nodes=2, zero=ZEROPP)
ONCE = ([SEEDED], [SEEDED])
BOTH = ([FEEDBACK, SEEDED], [FEEDBACK, SEEDED])
# Each entry has the numbers of ranks of the two layouts; the case of the first layout; the changes that give the
# second layout, which pads the vocabulary of 101 to 101, 102 or 104; a substring of some checkpoint keys, and the
# number of keys that contain it; and the notes in the log when the second layout loads, and then when the first one
# loads.
CASES = {
    "tp 2": (2, 2, PLAIN, {"tp": 2, "nodes": 1}, ".exp_avg_sq", 16, ONCE),
    "tp 2, zero 2": (4, 4, PLAIN, {"tp": 2, "nodes": 1, "stage": 2}, ".exp_avg_sq", 16, ONCE),
    "tp 4, zero 0": (4, 4, PLAIN, {"tp": 4, "nodes": 1, "stage": 0}, ".exp_avg_sq", 16, ONCE),
    "one rank, zero 1": (2, 1, PLAIN, {"nodes": 1, "stage": 1}, ".exp_avg_sq", 16, ONCE),
    "three nodes": (4, 3, PLAIN, {"nodes": 3}, ".exp_avg_sq", 16, ONCE),
    "muon": (2, 2, MUON, {"tp": 2, "nodes": 1}, ".momentum_buffer", 4, ONCE),
    "zeropp": (4, 4, LLAMA, {"tp": 1}, ".exp_avg_sq", 17, BOTH),
    "experts": (4, 4, dataclasses.replace(MIXTURE, tp=1, ep=2), {"ep": 1}, ".exp_avg_sq", 11, ([FEEDBACK], [FEEDBACK])),
    "expert bias": (4, 4, dataclasses.replace(BIASED, tp=1, ep=2), {"ep": 1, "tp": 2}, ".expert_bias", 1, BOTH),
    "experts, kept": (4, 4, MIXTURE_KEPT, {"ep": 1, "tp": 2}, "secondary.", 15, BOTH),
    "experts, one node": (
        4,
        4,
        dataclasses.replace(MIXTURE, ep=2),
        {"ep": 4, "nodes": 1},
        ".exp_avg_sq",
        11,
        ([], [FEEDBACK]),
    ),
    "kept": (4, 4, DIFFERENCES, {"tp": 2}, "secondary.", 18, BOTH),
    "kept, three nodes": (4, 3, DIFFERENCES, {"nodes": 3}, "secondary.", 18, BOTH),
    "nothing kept on one node": (4, 4, DIFFERENCES, {"nodes": 1}, "secondary.", 18, ([], [FEEDBACK, WHOLE])),
}


SLOW = ("one rank, zero 1", "muon", "zeropp", "expert bias", "kept")


@pytest.mark.parametrize("case", chosen(CASES, "tp 2", slow=SLOW))
def test_layouts_read_each_bit_of_each_other_and_say_what_begins_anew(tmp_path, case):
    """Train a step with one layout, resume for a step with another layout, and then for a step with the first layout.

    States that belong to a layout, such as error feedback, begin anew, and a note in the log says so.
    """
    world, then, first, other, part, count, notes = case
    second, a, b = dataclasses.replace(first, **other), str(tmp_path / "a"), str(tmp_path / "b")
    one = ranks(world).run(run, first, 1, whole=True, save=a)[0]
    two = ranks(then).run(run, second, 2, whole=True, load=a, save=b)[0]
    three = ranks(world).run(run, first, 3, whole=True, load=b)[0]
    there = part != "secondary." or second.nodes > 1
    assert sum(part in key for key in one.state) == count
    assert any(part in key for key in two.loaded) == there
    for before, after in ((one.state, two.loaded), (two.state, three.loaded)):
        kept, found = ({key: x[key] for key in x if there or part not in key} for x in (before, after))
        assert found == kept
    assert (two.notes, three.notes) == notes
    if first is PLAIN:  # the losses after both resumes equal an uninterrupted run's losses
        losses = [loss for loss, _ in two.steps + three.steps]
        assert losses == pytest.approx(train_plain(PLAIN)["loss"][1:3], rel=ROUNDING)


def load_move_and_reload(case: Case, **flags: str | int) -> str:
    """Load a checkpoint of another layout, train a step, and load the checkpoint again.

    Check that the second load restores the state as the first one loaded it. Return the hash of the state of torch's
    random generator.
    """
    attempt = Attempt(case, **flags)
    progress = attempt.load()
    loaded = attempt.fingerprint()
    attempt.train(progress.iteration + 1, saves=False)
    moved = attempt.fingerprint()
    attempt.reload()
    attempt.checkpoints.finish()
    assert attempt.fingerprint() == loaded
    assert any(moved[key] != loaded[key] for key in loaded if key.startswith("feedback."))
    (generator,) = (loaded[key] for key in loaded if key.startswith("rng.") and key.endswith(".torch"))
    return generator


@pytest.mark.slow
def test_each_load_of_another_layout_s_checkpoint_begins_anew_what_it_lacks(tmp_path):
    """Load checkpoints of another layout, which have no error feedback and no random states for this layout.

    Error feedback must be zero again at each load. Random generators must differ between ranks and iterations, because
    the dropout masks of earlier steps would repeat otherwise.
    """
    case, save = Case(tp=2, zero=ZEROPP), {"save": str(tmp_path), "save_interval": 1}
    ranks(2).run(run, case, 2, **save)
    other, load = dataclasses.replace(case, tp=1, nodes=2), save | {"load": str(tmp_path)}
    found = [ranks(2).run(load_move_and_reload, other, ckpt_step=iteration, **load) for iteration in (1, 2)]
    assert len({generator for of_ranks in found for generator in of_ranks}) == 4
