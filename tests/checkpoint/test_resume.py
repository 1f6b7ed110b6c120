"""A resumed run is the same run: bit for bit at the same layout, to fp32 rounding at another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import Attempt, Job, run
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case

from megazpp.islands.config import IslandsConfig
from megazpp.optim.optimizer import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

DROPOUT = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.1, attention_dropout=0.1)
ZEROPP = ZeroConfig(zeropp=True)
DIFFERENCES = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
PLAIN = dataclasses.replace(ZEROPP, zero_error_feedback_beta=0.0, zero_error_feedback_reset=3)
CASES = {
    "zero 3": Case(model=DROPOUT),
    "zero 1, tp 2": Case(model=DROPOUT, tp=2, stage=1, micro_batches=2),
    "zero 0, fp16": Case(model=DROPOUT, stage=0, precision=PrecisionConfig(fp16=True)),
    "zeropp, k 2, bf16": Case(
        model=DROPOUT, nodes=2, zero=ZEROPP, micro_batches=2, precision=PrecisionConfig(bf16=True)
    ),
    "zeropp, tp 2, llama": Case(model=LLAMA_STYLE, nodes=2, tp=2, zero=ZEROPP, sequence_parallel=True),
    "zeropp, reset, fp16": Case(model=DROPOUT, nodes=2, zero=PLAIN, precision=PrecisionConfig(fp16=True)),
    "zeropp, tp 2, float8": Case(
        model=DROPOUT, nodes=2, tp=2, zero=ZEROPP, sequence_parallel=True, micro_batches=2, float8="hybrid"
    ),
    "zero 3, cp 2": Case(model=DROPOUT, cp=2),
    "zeropp, cp 2, tp 2, llama": Case(model=LLAMA_STYLE, nodes=2, cp=2, tp=2, zero=ZEROPP, micro_batches=2),
    "copies, async": Case(model=LLAMA_STYLE, replicas=2),
    "differences, bf16": Case(
        model=DROPOUT, nodes=2, zero=DIFFERENCES, micro_batches=2, precision=PrecisionConfig(bf16=True)
    ),
    "differences, fp16, tp 2, async": Case(
        model=LLAMA_STYLE,
        nodes=2,
        tp=2,
        zero=DIFFERENCES,
        precision=PrecisionConfig(fp16=True),
    ),
    "islands, two steps": Case(model=DROPOUT, nodes=2, diloco=IslandsConfig(diloco_steps=2, diloco_outer_momentum=0.9)),
    "islands, fragments, between two": Case(
        model=DROPOUT,
        nodes=2,
        tp=2,
        precision=PrecisionConfig(bf16=True),
        diloco=IslandsConfig(diloco_steps=4, diloco_fragments=2, diloco_outer_momentum=0.5),
    ),
    "islands, messages under way, async": Case(
        model=LLAMA_STYLE, nodes=2, diloco=IslandsConfig(diloco_steps=2, diloco_delay=1)
    ),
    "islands of two nodes, differences": Case(
        model=DROPOUT,
        nodes=4,
        zero=DIFFERENCES,
        precision=PrecisionConfig(bf16=True),
        diloco=IslandsConfig(diloco_steps=2, diloco_islands=2, diloco_delay=1),
    ),
    "muon, zeropp, tp 2, fp16": Case(
        model=LLAMA_STYLE,
        nodes=2,
        tp=2,
        zero=ZEROPP,
        precision=PrecisionConfig(fp16=True),
        optimizer=OptimizerConfig(optimizer="muon", muon_full_interval=3),
    ),
    "islands, muon": Case(
        model=DROPOUT,
        nodes=2,
        diloco=IslandsConfig(diloco_steps=2, diloco_outer_momentum=0.9),
        optimizer=OptimizerConfig(optimizer="muon"),
    ),
    "islands, fp16": Case(
        model=LLAMA_STYLE, nodes=2, precision=PrecisionConfig(fp16=True), diloco=IslandsConfig(diloco_steps=3)
    ),
}


DEFAULT = (
    "zero 3, cp 2",
    "zero 1, tp 2",
    "zeropp, k 2, bf16",
    "differences, bf16",
    "islands, fragments, between two",
    "muon, zeropp, tp 2, fp16",
)


@pytest.mark.parametrize("name", [name if name in DEFAULT else slow(name) for name in CASES])
def test_two_steps_a_checkpoint_and_two_steps_are_four_steps_bit_for_bit(tmp_path: Path, name: str):
    case, save, asynchronous = CASES[name], str(tmp_path), "async" in name
    if case.float8 is not None:
        pytest.importorskip("torchao")
    straight = ranks(4).run(run, Job(case=case, steps=4, flags={}))
    first = ranks(4).run(run, Job(case=case, steps=2, flags={"save": save, "async_save": asynchronous}))
    second = ranks(4).run(run, Job(case=case, steps=4, flags={"load": save}))
    for rank in range(4):
        assert second[rank]["start"].iteration == 2
        assert first[rank]["steps"] + second[rank]["steps"] == straight[rank]["steps"]
        assert second[rank]["state"] == straight[rank]["state"]
        assert len(second[rank]["state"]) > 60
    if "zeropp" in name:
        assert any(key.startswith("feedback.1x") for key in second[0]["state"])
    assert not any("note:" in line for line in second[0]["lines"])


@pytest.mark.parametrize("name", ["differences, bf16", slow("differences, fp16, tp 2, async")])
def test_it_is_the_same_run_too_where_the_last_step_s_weights_were_used_before_they_were_saved(
    tmp_path: Path, name: str
):
    """An evaluation has sent the difference already, so the continued run must not; and it must where none has."""
    case, save, states = CASES[name], str(tmp_path), []
    straight = ranks(4).run(run, Job(case=case, steps=4, flags={}))
    first = ranks(4).run(run, Job(case=case, steps=2, flags={"save": save, "async_save": True}, evaluates=True))
    second = ranks(4).run(run, Job(case=case, steps=4, flags={"load": save}))
    for rank in range(4):
        assert first[rank]["steps"] + second[rank]["steps"] == straight[rank]["steps"]
        assert second[rank]["state"] == straight[rank]["state"]
        states += [key for key in second[rank]["state"] if key.startswith("secondary.")]
    assert len(states) > 4 * 20
    assert not any("note:" in line for line in second[0]["lines"])


@pytest.mark.slow
def test_a_checkpoint_without_kept_weights_begins_with_whole_ones_and_one_line(tmp_path: Path):
    """And kept weights of a checkpoint are left alone where nobody sends differences."""
    save, note = (
        str(tmp_path),
        "note: weights cross nodes whole at first: the checkpoint has no weights that nodes keep",
    )
    with_8_bits, with_4 = (dataclasses.replace(CASES["zeropp, k 2, bf16"], zero=zero) for zero in (ZEROPP, DIFFERENCES))
    ranks(4).run(run, Job(case=with_8_bits, steps=1, flags={"save": save}))
    first = ranks(4).run(run, Job(case=with_4, steps=2, flags={"save": save, "load": save}))
    second = ranks(4).run(run, Job(case=with_8_bits, steps=3, flags={"save": save, "load": save}))
    assert [line for line in first[0]["lines"] if "note:" in line] == [note]
    assert [line for line in second[0]["lines"] if "note:" in line] == []
    assert any(key.startswith("secondary.") for key in first[0]["state"])
    assert not any(key.startswith("secondary.") for key in second[0]["state"])
    in_fp16 = dataclasses.replace(with_4, precision=PrecisionConfig(fp16=True))
    ranks(4).run(run, Job(case=with_4, steps=4, flags={"save": save, "load": save}))
    third = ranks(4).run(run, Job(case=in_fp16, steps=5, flags={"load": save}))
    assert note in third[0]["lines"]  # they were kept in another dtype


@pytest.mark.parametrize(("first", "then"), [("adam", "muon"), slow("muon", "adam")])
def test_adamw_goes_on_as_muon_and_back_with_new_moments_of_matrices_and_says_so_once(
    tmp_path: Path, first: str, then: str
):
    save = str(tmp_path)
    cases = [Case(model=LLAMA_STYLE, tp=2, optimizer=OptimizerConfig(optimizer=kind)) for kind in (first, then)]
    ranks(4).run(run, Job(case=cases[0], steps=2, flags={"save": save}))
    second = ranks(4).run(run, Job(case=cases[1], steps=4, flags={"save": save, "load": save}))
    note = "note: moments of 10 parameters begin at zero: the checkpoint has another optimizer's"
    assert [line for line in second[0]["lines"] if "note:" in line] == [note]
    state = {key.removeprefix("optimizer.state.") for key in second[0]["state"]}
    assert "embedding.word.weight.exp_avg" in state
    moments = {key.rpartition(".")[2] for key in state if key.startswith("layers.1.mlp.fc1.weight.")}
    assert moments == ({"momentum_buffer"} if then == "muon" else {"step", "exp_avg", "exp_avg_sq"})
    third = ranks(4).run(run, Job(case=cases[1], steps=5, flags={"load": save}))
    assert not any("note:" in line for line in third[0]["lines"])


@pytest.mark.parametrize("to", [1, slow(4)])
def test_a_checkpoint_goes_on_with_samples_split_among_more_or_fewer_ranks(tmp_path: Path, to: int):
    first, second = (Case(model=GPT2_STYLE, cp=cp) for cp in (2, to))
    straight = ranks(4).run(run, Job(case=first, steps=4, flags={}))[0]["steps"]
    ranks(4).run(run, Job(case=first, steps=2, flags={"save": str(tmp_path)}))
    found = ranks(4).run(run, Job(case=second, steps=4, flags={"load": str(tmp_path)}))[0]
    assert found["start"].iteration == 2
    for ours, theirs in zip(found["steps"], straight[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def with_scale(job: Job, scale: float) -> list[tuple[float, float]]:
    """The losses and gradient norms of an attempt whose losses are multiplied by `scale`."""
    attempt = Attempt(job)
    attempt.step.scaler.scale = scale
    return attempt.train(attempt.load())


def test_a_run_that_goes_on_with_another_loss_scale_feeds_its_errors_back_in_the_new_units(tmp_path: Path):
    """In fp32 powers of two are exact, so an error in the units of the old scale would show in the first loss."""
    case = Case(model=GPT2_STYLE, nodes=2, zero=ZEROPP)
    ranks(4).run(with_scale, Job(case=case, steps=2, flags={"save": str(tmp_path)}), 2.0**8)
    goes_on = Job(case=case, steps=4, flags={"load": str(tmp_path)})
    same, other = (ranks(4).run(with_scale, goes_on, scale) for scale in (2.0**8, 2.0**12))
    assert other == same


def test_a_run_that_went_back_goes_on_from_there_after_a_restart(tmp_path: Path):
    """Killed before its first save: the tracker names what --ckpt-step chose, and no checkpoint is gone."""
    save, case = str(tmp_path), Case(model=GPT2_STYLE)
    everything = {"save": save, "save_interval": 1}
    ranks(4).run(run, Job(case=case, steps=3, flags=everything))
    back = Job(case=case, steps=1, flags={**everything, "load": save, "ckpt_step": 1})  # ends before a save is due
    assert ranks(4).run(run, back)[0]["start"].iteration == 1
    assert ranks(4).run(restarted, dataclasses.replace(back, steps=3))[0]["start"].iteration == 1
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000001",
        "iter_0000002",
        "iter_0000002.replaced-1",
        "iter_0000003",
        "iter_0000003.replaced-1",
    ]


def restarted(job: Job) -> dict[str, Any]:
    return run(job, restarted=True)


def numbers_without_saved_states() -> list[float]:
    """The next random number after a checkpoint without random states, by its iteration: 1, 2 and 1 again."""
    state = Attempt(Job(case=Case(), steps=0, flags={})).state
    drawn = []
    for iteration in (1, 2, 1):
        state.accept({}, optimizer=False, rng=True, iteration=iteration)
        drawn.append(torch.rand(()).item())
    return drawn


def test_random_numbers_that_begin_anew_follow_from_the_iteration():
    first, second, again = ranks(1).run(numbers_without_saved_states)[0]
    assert first == again != second
