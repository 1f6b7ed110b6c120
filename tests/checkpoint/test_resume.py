"""A resumed run is the same run: bit for bit at the same layout, to fp32 rounding at another."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.checkpoints import Attempt, Job, run, run_each
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case

from megazpp.islands.config import IslandsConfig
from megazpp.optim.optimizer import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

DROPOUT = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.1, attention_dropout=0.1)
BF16, FP16 = PrecisionConfig(bf16=True), PrecisionConfig(fp16=True)
ZEROPP = ZeroConfig(zeropp=True)
DIFFERENCES = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
RESET = dataclasses.replace(ZEROPP, zero_error_feedback_beta=0.0, zero_error_feedback_reset=3)
MUON = OptimizerConfig(optimizer="muon", muon_full_interval=3)
STEPS = 4
CASES = {
    "zero 3, cp 2": Case(model=DROPOUT, cp=2),
    "zero 1, tp 2": Case(model=DROPOUT, tp=2, stage=1, micro_batches=2),
    "zero 0, fp16": Case(model=DROPOUT, stage=0, precision=FP16),
    "copies, async": Case(model=LLAMA_STYLE, replicas=2),
    "zeropp, k 2, bf16": Case(model=DROPOUT, nodes=2, zero=ZEROPP, micro_batches=2, precision=BF16),
    "zeropp, reset, fp16": Case(model=DROPOUT, nodes=2, zero=RESET, precision=FP16),
    "zeropp, tp 2, float8": Case(
        model=DROPOUT, nodes=2, tp=2, zero=ZEROPP, sequence_parallel=True, micro_batches=2, float8="hybrid"
    ),
    "zeropp, cp 2, tp 2, llama": Case(
        model=LLAMA_STYLE, nodes=2, cp=2, tp=2, zero=ZEROPP, sequence_parallel=True, micro_batches=2
    ),
    "differences, bf16": Case(model=DROPOUT, nodes=2, zero=DIFFERENCES, micro_batches=2, precision=BF16),
    "differences, fp16, tp 2, async": Case(model=LLAMA_STYLE, nodes=2, tp=2, zero=DIFFERENCES, precision=FP16),
    "zeropp, muon, tp 2, fp16": Case(model=LLAMA_STYLE, nodes=2, tp=2, zero=ZEROPP, precision=FP16, optimizer=MUON),
    "islands, muon": Case(
        model=DROPOUT,
        nodes=2,
        diloco=IslandsConfig(diloco_steps=2, diloco_outer_momentum=0.9),
        optimizer=OptimizerConfig(optimizer="muon"),
    ),
    "islands, fp16": Case(model=LLAMA_STYLE, nodes=2, precision=FP16, diloco=IslandsConfig(diloco_steps=3)),
    "islands, fragments, between two": Case(
        model=DROPOUT,
        nodes=2,
        tp=2,
        precision=BF16,
        diloco=IslandsConfig(diloco_steps=4, diloco_fragments=2, diloco_outer_momentum=0.5),
    ),
    "islands, messages under way, async": Case(
        model=LLAMA_STYLE, nodes=2, diloco=IslandsConfig(diloco_steps=2, diloco_delay=1)
    ),
    "islands of two nodes, differences": Case(
        model=DROPOUT,
        nodes=4,
        zero=DIFFERENCES,
        precision=BF16,
        diloco=IslandsConfig(diloco_steps=2, diloco_islands=2, diloco_delay=1),
    ),
}
DEFAULT = (
    *("zero 3, cp 2", "zeropp, k 2, bf16", "differences, bf16"),
    *("islands, fragments, between two", "zeropp, muon, tp 2, fp16"),
)


def note_lines(result: dict[str, Any]) -> list[str]:
    return [line for line in result["lines"] if "note:" in line]


@pytest.mark.parametrize("name", [name if name in DEFAULT else slow(name) for name in CASES])
def test_a_run_goes_on_from_a_checkpoint_as_the_run_that_wrote_it_bit_for_bit(tmp_path, name):
    if CASES[name].float8 is not None:
        pytest.importorskip("torchao")
    save = {"save": str(tmp_path), "save_interval": 2, "async_save": "async" in name}
    load = {"load": str(tmp_path), "ckpt_step": 2}
    jobs = [Job(case=CASES[name], steps=STEPS, flags=flags) for flags in (save, load)]
    for straight, resumed in ranks(4).run(run_each, jobs):
        assert resumed["start"].iteration == 2
        assert resumed["steps"] == straight["steps"][2:]
        assert resumed["state"] == straight["state"]
        assert len(resumed["state"]) > 60
        assert any(key.startswith("feedback.1x") for key in resumed["state"]) or "zeropp" not in name
        assert not note_lines(resumed)


@pytest.mark.parametrize(
    "name", ["differences, bf16", slow("differences, fp16, tp 2, async"), slow("islands, messages under way, async")]
)
def test_saving_and_using_weights_before_they_are_saved_changes_nothing(tmp_path, name):
    """An evaluation has sent the difference already, so the continued run must not; and it must where none has."""
    save = {"save": str(tmp_path), "save_interval": 2, "async_save": True}
    straight = Job(case=CASES[name], steps=STEPS, flags={})
    evaluated = Job(case=CASES[name], steps=STEPS, flags=save, evaluates=True)
    resumed = Job(case=CASES[name], steps=STEPS, flags={"load": str(tmp_path), "ckpt_step": 2})
    for expected, through, again in ranks(4).run(run_each, [straight, evaluated, resumed]):
        assert through["steps"] == expected["steps"]
        assert again["steps"] == expected["steps"][2:]
        assert again["state"] == expected["state"]
        assert sum(key.startswith("secondary.") for key in again["state"]) > 20 or "differences" not in name
        assert not note_lines(again)


@pytest.mark.slow
def test_a_checkpoint_without_kept_weights_begins_with_whole_ones_and_one_line(tmp_path):
    """And kept weights of a checkpoint are left alone where nobody sends differences."""
    with_4 = CASES["differences, bf16"]
    with_8_bits, in_fp16 = dataclasses.replace(with_4, zero=ZEROPP), dataclasses.replace(with_4, precision=FP16)
    flags = {"save": str(tmp_path), "load": str(tmp_path)}
    cases = (with_8_bits, with_4, with_8_bits, with_4, in_fp16)
    jobs = [Job(case=case, steps=steps, flags=flags) for steps, case in enumerate(cases, 1)]
    _, first, second, third, fourth = ranks(2).run(run_each, jobs)[0]
    note = "note: weights cross nodes whole at first: the checkpoint has no weights that nodes keep"
    assert (note_lines(first), note_lines(second), note_lines(third)) == ([note], [], [note])
    assert any(key.startswith("secondary.") for key in first["state"])
    assert not any(key.startswith("secondary.") for key in second["state"])
    assert note in fourth["lines"]  # they were kept in another dtype


@pytest.mark.parametrize(("first", "then"), [("adam", "muon"), slow("muon", "adam")])
def test_adamw_goes_on_as_muon_and_back_with_new_moments_of_matrices_and_says_so_once(tmp_path, first, then):
    flags = {"save": str(tmp_path), "load": str(tmp_path)}
    jobs = [
        Job(case=Case(model=LLAMA_STYLE, tp=2, optimizer=OptimizerConfig(optimizer=kind)), steps=steps, flags=flags)
        for steps, kind in enumerate((first, then, then), 1)
    ]
    _, second, third = ranks(2).run(run_each, jobs)[0]
    assert note_lines(second) == [
        "note: moments of 10 parameters begin at zero: the checkpoint has another optimizer's"
    ]
    state = {key.removeprefix("optimizer.state.") for key in second["state"]}
    assert "embedding.word.weight.exp_avg" in state
    moments = {key.rpartition(".")[2] for key in state if key.startswith("layers.1.mlp.fc1.weight.")}
    assert moments == ({"momentum_buffer"} if then == "muon" else {"step", "exp_avg", "exp_avg_sq"})
    assert not note_lines(third)


@pytest.mark.parametrize("to", [1, slow(4)])
def test_a_checkpoint_goes_on_with_samples_split_among_more_or_fewer_ranks(tmp_path, to):
    first, second = (Case(model=GPT2_STYLE, cp=cp) for cp in (2, to))
    save, load = {"save": str(tmp_path), "save_interval": 2}, {"load": str(tmp_path), "ckpt_step": 2}
    jobs = [Job(case=first, steps=STEPS, flags=save), Job(case=second, steps=STEPS, flags=load)]
    straight, found = ranks(4).run(run_each, jobs)[0]
    assert found["start"].iteration == 2
    for ours, theirs in zip(found["steps"], straight["steps"][2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def with_scales(jobs: list[Job], scales: list[float]) -> list[list[tuple[float, float]]]:
    """The losses and gradient norms of attempts whose losses are multiplied by `scales`."""
    results = []
    for job, scale in zip(jobs, scales, strict=True):
        attempt = Attempt(job)
        attempt.step.scaler.scale = scale
        results.append(attempt.train(attempt.load()))
    return results


def test_a_run_that_goes_on_with_another_loss_scale_feeds_its_errors_back_in_the_new_units(tmp_path):
    """In fp32 powers of two are exact, so an error in the units of the old scale would show in the first loss."""
    case = Case(model=GPT2_STYLE, nodes=2, zero=ZEROPP)
    begins = Job(case=case, steps=2, flags={"save": str(tmp_path)})
    goes_on = Job(case=case, steps=STEPS, flags={"load": str(tmp_path)})
    for _, same, other in ranks(2).run(with_scales, [begins, goes_on, goes_on], [2.0**8, 2.0**8, 2.0**12]):
        assert other == same


def test_a_run_that_went_back_goes_on_from_there_after_a_restart_and_keeps_what_it_writes_again(tmp_path):
    """Killed before its first save: the tracker names what --ckpt-step chose, and no checkpoint is gone."""
    everything = {"save": str(tmp_path), "save_interval": 1}
    whole = Job(case=Case(), steps=3, flags=everything)
    back = Job(case=Case(), steps=1, flags=everything | {"load": str(tmp_path), "ckpt_step": 1})  # saves nothing yet
    _, killed = ranks(2).run(run_each, [whole, back])[0]
    again = ranks(2).run(run, dataclasses.replace(back, steps=2), restarted=True)[0]
    assert killed["start"].iteration == again["start"].iteration == 1
    names = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert names == ["iter_0000001", "iter_0000002", "iter_0000002.replaced-1", "iter_0000003"]
    assert f" | the older one is now {tmp_path}/iter_0000002.replaced-1" in again["lines"][-1]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2\n"


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
