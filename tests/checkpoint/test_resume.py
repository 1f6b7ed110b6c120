"""Test that a resumed run is bit-identical on the same layout, and equal up to fp32 rounding on another."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from helpers.checkpoints import Outcome, run
from helpers.ranks import Ranks, ranks
from helpers.tiers import chosen
from helpers.training import BIASED_STYLE, GPT2_STYLE, LLAMA_STYLE, Case

from megazpp.diloco.config import DilocoConfig
from megazpp.optim.config import OptimizerConfig
from megazpp.zero.config import PrecisionConfig, ZeroConfig

DROPOUT = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.1, attention_dropout=0.1)
BF16, FP16 = PrecisionConfig(bf16=True), PrecisionConfig(fp16=True)
ZEROPP = ZeroConfig(zeropp=True)
DIFFERENCES = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
RESET = dataclasses.replace(ZEROPP, zero_error_feedback_beta=0.0, zero_error_feedback_reset=3)
MUON = OptimizerConfig(optimizer="muon")
MUON_3 = OptimizerConfig(optimizer="muon", muon_full_interval=3)
STEPS = 4
gpt = functools.partial(Case, model=DROPOUT, nodes=2)
llama = functools.partial(Case, model=LLAMA_STYLE, nodes=2)
CASES = {
    "zero 3, cp 2": gpt(nodes=1, cp=2),
    "zero 1, tp 2": gpt(nodes=1, tp=2, stage=1, micro_batches=2),
    "zero 0, fp16": gpt(nodes=1, stage=0, precision=FP16),
    "copies, async": llama(nodes=1, replicas=2),
    "zeropp, k 2, bf16": gpt(zero=ZEROPP, micro_batches=2, precision=BF16),
    "zeropp, reset, fp16": gpt(zero=RESET, precision=FP16),
    "zeropp, tp 2, float8": gpt(tp=2, zero=ZEROPP, sequence_parallel=True, micro_batches=2, float8="hybrid"),
    "zeropp, cp 2, tp 2, llama": llama(cp=2, tp=2, zero=ZEROPP, sequence_parallel=True, micro_batches=2),
    "differences, bf16": gpt(zero=DIFFERENCES, micro_batches=2, precision=BF16),
    "differences, fp16, tp 2, async": llama(tp=2, zero=DIFFERENCES, precision=FP16),
    "zeropp, expert bias, ep 2, bf16": Case(model=BIASED_STYLE, nodes=2, ep=2, zero=ZEROPP, precision=BF16),
    "differences, tp 2, float8": gpt(tp=2, zero=DIFFERENCES, precision=BF16, sequence_parallel=True, float8="hybrid"),
    "differences, muon, cp 2": llama(cp=2, zero=DIFFERENCES, precision=BF16, optimizer=MUON_3),
    "zeropp, muon, tp 2, fp16": llama(tp=2, zero=ZEROPP, precision=FP16, optimizer=MUON_3),
    "replica groups, muon": gpt(optimizer=MUON, diloco=DilocoConfig(diloco_steps=2, diloco_outer_momentum=0.9)),
    "replica groups, fp16": llama(precision=FP16, diloco=DilocoConfig(diloco_steps=3)),
    "replica groups, fragments, between two": gpt(
        tp=2, precision=BF16, diloco=DilocoConfig(diloco_steps=4, diloco_fragments=2, diloco_outer_momentum=0.5)
    ),
    "replica groups, messages in flight, async": llama(
        diloco=DilocoConfig(diloco_steps=2, diloco_fragment_sync_delay=1)
    ),
    "replica groups of two nodes, differences": gpt(
        nodes=4,
        zero=DIFFERENCES,
        precision=BF16,
        diloco=DilocoConfig(diloco_steps=2, diloco_replica_groups=2, diloco_fragment_sync_delay=1),
    ),
}


# cases that train on two ranks; the other cases train on four
TWO_RANKS = ("zero 0, fp16", "zeropp, reset, fp16", "differences, bf16", "replica groups, messages in flight, async")
SLOW = (
    *("zero 0, fp16", "zeropp, reset, fp16", "zeropp, cp 2, tp 2, llama", "differences, fp16, tp 2, async"),
    *("differences, muon, cp 2", "zeropp, expert bias, ep 2, bf16", "replica groups, fragments, between two"),
    "replica groups, messages in flight, async",
)


def workers(name: str) -> Ranks:
    return ranks(2 if name in TWO_RANKS else 4)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[[str], tuple[list[Outcome], str]]:
    """Return a function that runs a case without interruption, once, and returns (outcomes, folder of --save)."""

    @functools.cache
    def run_case(name: str) -> tuple[list[Outcome], str]:
        folder = str(tmp_path_factory.mktemp("straight"))
        save = {"save": folder, "save_interval": 2, "async_save": "async" in name}
        return workers(name).run(run, CASES[name], STEPS, **save), folder

    return run_case


@pytest.mark.parametrize("name", chosen({name: name for name in CASES}, "differences, bf16", slow=SLOW))
def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(straight, name):
    if CASES[name].float8 is not None:
        pytest.importorskip("torchao")
    expected, folder = straight(name)
    found = workers(name).run(run, CASES[name], STEPS, load=folder, ckpt_step=2)
    for whole, resumed in zip(expected, found, strict=True):
        assert (resumed.start.iteration, resumed.steps, resumed.notes) == (2, whole.steps[2:], [])
        assert resumed.state == whole.state
        assert len(resumed.state) > 50
        assert any(key.startswith("feedback.1x") for key in resumed.state) or "zeropp" not in name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["differences, bf16", "replica groups, messages in flight, async"])
def test_evaluations_and_async_saves_change_no_result(straight, tmp_path, name):
    """Compare an uninterrupted run, a run with evaluations and asynchronous saves, and a resume from such a save.

    With lossless deltas, an evaluation before the save has sent the weight delta, so the resumed run must not send it
    again. Without an evaluation, the resumed run has to send the delta.
    """
    case, save = CASES[name], {"save": str(tmp_path), "save_interval": 2, "async_save": True}
    evaluated = workers(name).run(run, case, STEPS, evaluates=True, **save)
    resumed = workers(name).run(run, case, STEPS, load=str(tmp_path), ckpt_step=2)
    for expected, through, again in zip(straight(name)[0], evaluated, resumed, strict=True):
        assert through.steps == expected.steps
        assert (again.steps, again.notes) == (expected.steps[2:], [])
        assert again.state == expected.state
        assert sum(key.startswith("secondary.") for key in again.state) > 20 or "differences" not in name


@pytest.mark.slow
def test_checkpoint_without_kept_weights_resumes_with_full_weights(tmp_path):
    """Alternate runs with and without lossless deltas on the same checkpoints.

    Only runs with lossless deltas save a secondary partition. A run without lossless deltas, or in another dtype,
    ignores the saved partition. A run with lossless deltas that finds no partition sends full weights first.
    """
    differences, flags = CASES["differences, bf16"], {"save": str(tmp_path), "load": str(tmp_path)}
    zeropp, in_fp16 = (dataclasses.replace(differences, **other) for other in ({"zero": ZEROPP}, {"precision": FP16}))
    found = [
        ranks(2).run(run, case, steps, **flags)[0]
        for steps, case in enumerate((zeropp, differences, zeropp, differences, in_fp16), 1)
    ]
    note = "note: the next inter-node messages carry whole weights: the checkpoint has no secondary partition"
    assert [note in result.notes for result in found] == [False, True, False, True, True]
    assert [len(result.notes) for result in found[1:4]] == [1, 0, 1]
    kept = [any(key.startswith("secondary.") for key in result.state) for result in found[1:3]]
    assert kept == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("adam", "muon"), ("muon", "adam")])
def test_other_optimizer_resumes_with_new_moments_of_matrices_and_a_note(tmp_path, first, then):
    one, other = (Case(model=LLAMA_STYLE, tp=2, optimizer=OptimizerConfig(optimizer=kind)) for kind in (first, then))
    flags = {"save": str(tmp_path), "load": str(tmp_path)}
    _, second, third = (ranks(2).run(run, case, steps, **flags)[0] for steps, case in enumerate((one, other, other), 1))
    assert second.notes == ["note: moments of 10 parameters begin at zero: the checkpoint has another optimizer's"]
    assert third.notes == []
    assert "optimizer.state.embedding.word.weight.exp_avg" in second.state
    moments = {key.rpartition(".")[2] for key in second.state if key.startswith("optimizer.state.layers.1.mlp.fc1.w")}
    assert moments == ({"momentum_buffer"} if then == "muon" else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.slow
def test_run_resumes_with_another_context_parallel_size(tmp_path):
    straight = ranks(2).run(run, Case(cp=2), STEPS, save=str(tmp_path), save_interval=2)[0]
    found = ranks(2).run(run, Case(cp=1), STEPS, load=str(tmp_path), ckpt_step=2)[0]
    assert found.start.iteration == 2
    torch.testing.assert_close(found.steps, straight.steps[2:], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_error_feedback_is_rescaled_on_resume_with_another_loss_scale(tmp_path):
    """Resume with the same loss scale and with another one, and check that the losses are identical.

    Both scales are powers of two, which are exact in fp32. An error feedback in units of the old scale would change the
    first loss.
    """
    case = Case(nodes=2, zero=ZEROPP)
    ranks(2).run(run, case, 2, scale=2.0**8, save=str(tmp_path))
    same, other = (ranks(2).run(run, case, STEPS, scale=scale, load=str(tmp_path)) for scale in (2.0**8, 2.0**12))
    assert [result.steps for result in other] == [result.steps for result in same]


@pytest.mark.slow
def test_run_that_went_back_resumes_there_after_a_restart(tmp_path):
    """Go back to iteration 1 with --ckpt-step, kill the run before its first save, and restart it.

    The restarted run begins at iteration 1 as well, because the tracker names it. No checkpoint is lost.
    """
    save = {"save": str(tmp_path), "save_interval": 1}
    back = save | {"load": str(tmp_path), "ckpt_step": 1}
    ranks(2).run(run, Case(), 3, **save)
    killed = ranks(2).run(run, Case(), 1, **back)[0]  # trains no step, as if it was killed before its first save
    again = ranks(2).run(run, Case(), 2, restarted=True, **back)[0]
    assert killed.start.iteration == again.start.iteration == 1
    names = sorted(path.name for path in tmp_path.glob("iter_*"))
    aside = ["iter_0000002.replaced-1", "iter_0000003.replaced-1"]
    assert names == sorted(["iter_0000001", "iter_0000002", *aside])
    renamed = " | renamed checkpoints of the abandoned branch: "
    assert f"{renamed}{tmp_path}/{aside[0]}, {tmp_path}/{aside[1]}" in again.lines[-1]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2\n"
