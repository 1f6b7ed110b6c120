"""Every layout reads what any layout has written."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import Attempt, Job, run_all
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_plain

from megazpp.optim.optimizer import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

ROUNDING = 1e-5  # relative: fp32 sums in another order over a few steps
SHAPE = dataclasses.replace(GPT2_STYLE, num_layers=1)
FIRST = Case(model=SHAPE, nodes=2, global_batch=12)
SEEDED = "note: random generators are seeded anew: the checkpoint has no states of this layout"
FEEDBACK = "note: error feedback begins at zero: the checkpoint has none of this layout"
WHOLE = "note: weights cross nodes whole at first: the checkpoint has no weights that nodes keep"


def there_and_back(folder: Path, first: Case, second: Case, *, world: int = 4) -> tuple[dict, dict, dict]:
    """Two steps of `first` on 4 ranks, two more of `second` on `world` ranks, and one more of `first`."""
    a, b = str(folder / "a"), str(folder / "b")
    [one] = ranks(4).run(run_all, [Job(case=first, steps=2, flags={"save": a})])[0]
    [two] = ranks(world).run(run_all, [Job(case=second, steps=4, flags={"load": a, "save": b})])[0]
    [three] = ranks(4).run(run_all, [Job(case=first, steps=5, flags={"load": b})])[0]
    return one, two, three


def notes(result: dict[str, Any]) -> list[str]:
    return [line for line in result["lines"] if "note:" in line]


@functools.cache
def uninterrupted() -> list[float]:
    return train_plain(FIRST)["loss"]


@pytest.mark.parametrize(
    ("world", "layout"),  # the vocabulary of 101 is padded to 101, 102 and 104
    [
        (4, {"tp": 2, "nodes": 2}),
        slow(4, {"tp": 2, "nodes": 1, "stage": 2}),
        slow(4, {"tp": 4, "nodes": 1, "stage": 0}),
        slow(1, {"nodes": 1, "stage": 1}),
        slow(3, {"nodes": 3}),
    ],
)
def test_every_layout_reads_each_bit_trains_on_as_if_uninterrupted_and_says_what_begins_anew(tmp_path, world, layout):
    """To and from one layout, bit for bit, so every other pair follows."""
    one, two, three = there_and_back(tmp_path, FIRST, dataclasses.replace(FIRST, **layout), world=world)
    assert (two["loaded"], three["loaded"]) == (one["end"], two["end"])
    assert sum(".exp_avg_sq" in key for key in one["end"]) > 10
    assert two["losses"] + three["losses"] == pytest.approx(uninterrupted()[2:], rel=ROUNDING)
    assert notes(two) == notes(three) == [SEEDED]


@pytest.mark.parametrize(("world", "tp", "nodes"), [(4, 2, 2), slow(3, 1, 3), slow(4, 1, 1)])
def test_the_weights_that_nodes_keep_go_to_other_layouts_bit_for_bit_and_back(tmp_path, world, tp, nodes):
    """On one node nobody keeps any."""
    zero, bf16 = ZeroConfig(zeropp=True, zero_weight_delta="lossless"), PrecisionConfig(bf16=True)
    first = dataclasses.replace(FIRST, zero=zero, precision=bf16)
    second = dataclasses.replace(first, tp=tp, nodes=nodes)
    one, two, three = there_and_back(tmp_path, first, second, world=world)
    assert sum(key.startswith("secondary.") for key in one["end"]) > 12
    assert two["loaded"].items() <= one["end"].items()
    assert three["loaded"].items() <= two["end"].items() or nodes == 1
    assert any(key.startswith("secondary.") for key in two["loaded"]) == (nodes > 1)
    assert (WHOLE in notes(three)) == (nodes == 1)


@pytest.mark.slow
def test_muon_s_momentum_goes_to_another_layout_bit_for_bit_and_back(tmp_path):
    first = dataclasses.replace(FIRST, optimizer=OptimizerConfig(optimizer="muon"))
    one, two, three = there_and_back(tmp_path, first, dataclasses.replace(first, tp=2))
    assert sum(key.endswith("momentum_buffer") for key in one["end"]) == 4
    assert (two["loaded"], three["loaded"]) == (one["end"], two["end"])


@pytest.mark.slow
def test_zeropp_goes_to_other_nodes_with_its_error_feedback_at_zero(tmp_path):
    shape = dataclasses.replace(LLAMA_STYLE, make_vocab_size_divisible_by=3)
    first = Case(model=shape, tp=2, nodes=2, zero=ZeroConfig(zeropp=True))
    one, two, three = there_and_back(tmp_path, first, dataclasses.replace(first, tp=1))
    assert [FEEDBACK in notes(result) for result in (one, two, three)] == [False, True, True]
    assert (two["loaded"], three["loaded"]) == (one["end"], two["end"])


def load_move_and_rewind(jobs: list[Job]) -> list[list[dict[str, str]]]:
    """Of each job the state as loaded, a step later, and after going back."""
    return [_load_move_and_rewind(job) for job in jobs]


def _load_move_and_rewind(job: Job) -> list[dict[str, str]]:
    attempt = Attempt(job)
    progress = attempt.load()
    loaded = attempt.fingerprint()
    attempt.job = dataclasses.replace(job, steps=progress.iteration + 1)
    attempt.checkpoints.after_step = lambda progress, *, last: None
    finish, attempt.checkpoints.finish = attempt.checkpoints.finish, lambda: None
    attempt.train(progress)
    moved = attempt.fingerprint()
    attempt.checkpoints.rewind()
    back = attempt.fingerprint()
    finish()
    return [loaded, moved, back]


def test_going_back_to_another_layout_s_checkpoint_begins_anew_what_it_lacks_as_the_first_time(tmp_path):
    """Error feedback is zero again, not a later step's; random generators are other ones at each iteration."""
    case, save = Case(tp=2, zero=ZeroConfig(zeropp=True)), {"save": str(tmp_path), "save_interval": 1}
    ranks(2).run(run_all, [Job(case=case, steps=2, flags=save)])
    other, load = dataclasses.replace(case, tp=1, nodes=2), save | {"load": str(tmp_path)}
    jobs = [Job(case=other, steps=0, flags=load | {"ckpt_step": iteration}) for iteration in (1, 2)]
    generators = []
    for of_rank in ranks(2).run(load_move_and_rewind, jobs):
        for loaded, moved, back in of_rank:
            assert back == loaded
            assert any(moved[key] != loaded[key] for key in loaded if key.startswith("feedback."))
            generators += [loaded[key] for key in loaded if key.startswith("rng.") and key.endswith(".torch")]
    assert len(set(generators)) == len(generators) == 4
