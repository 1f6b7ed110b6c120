"""--compile: a graph per layer, one compilation for all, the same losses and gradients, below FSDP2 and recomputation.

Except for one test, layers are compiled with torch's "aot_eager" back end: all of torch.compile but the C++ compiler,
which takes most of the time.
"""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from helpers.checkpoints import Outcome, run
from helpers.ranks import ranks
from helpers.tensor_parallel import (
    CPU,
    STYLES,
    VOCAB,
    assert_gradients_near,
    build_gpt,
    local_gradients,
    losses_of,
    packed,
    sample,
    saved_tensors,
    tp_axis,
)
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_on_ranks, train_plain

from megazpp.inference.generate import draw_completions, evaluating
from megazpp.inference.sample import SampleConfig
from megazpp.model import backends
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_

pytestmark = pytest.mark.slow

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def compiled(model: GPTConfig, **changes: Any) -> GPTConfig:
    return dataclasses.replace(model, compile=True, **changes)


def step(gpt: torch.nn.Module, documents: bool = False) -> torch.Tensor:
    losses = losses_of(gpt, packed()) if documents else gpt(*sample())
    losses.mean().backward()
    return losses.detach()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU: no g++ here")
def test_compiled_kernels_give_the_losses_and_gradients_of_eager_ones():
    """1e-5 relative, and to the largest element of a gradient: fused kernels add in another order."""
    model = dataclasses.replace(GPT2_STYLE, num_layers=1)
    ours, eager = (build_gpt(each, MeshAxis("tp"), vocab_size=VOCAB) for each in (compiled(model), model))
    torch.testing.assert_close(step(ours), step(eager), rtol=1e-5, atol=0)
    assert_gradients_near(local_gradients(ours), local_gradients(eager))  # compiling renames nothing


@contextlib.contextmanager
def aot_eager() -> Iterator[None]:
    """Until the end of the block, torch.compile stops short of generating code, and needs no compiler for it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stopped = functools.partial(torch.compile, backend="aot_eager")
    with (
        mock.patch.object(torch, "compile", stopped),
        mock.patch.object(backends, "missing_compiler", return_value=None),
    ):
        yield


def eager_and_compiled(model: GPTConfig, sequence_parallel: bool) -> dict[str, Any]:
    """What two steps of each sent and made; graph breaks, and what the compiled one kept of a whole sequence."""
    found: dict[str, Any] = {}
    for name, config in (("eager", model), ("compiled", compiled(model))):
        tp = tp_axis()
        with aot_eager(), saved_tensors() as saved:
            gpt = build_gpt(config, tp, vocab_size=VOCAB, sequence_parallel=sequence_parallel)
            saved.clear()
            losses = [step(gpt, documents) for documents in (False, True)]
        found[name] = (losses, local_gradients(gpt), tp.counter.table())
    return found | {
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "kept": {tuple(x.shape) for x in saved},
    }


NORMS_AND_ACTIVATION = {"recompute_granularity": "selective"}
CORE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp_act")}


@pytest.mark.parametrize(("size", "sequence_parallel", "style", "changes", "breaks"), [
    (1, False, "llama", {}, 0),
    (1, False, "gpt2", CORE, 0),
    (2, False, "gpt2", DROPOUT | NORMS_AND_ACTIVATION, 0),
    (2, True, "llama", DROPOUT | NORMS_AND_ACTIVATION, 0),
    (2, True, "gpt2", DROPOUT | CORE, 1),  # because of torch 2.13
])  # fmt: skip
def test_a_layer_is_one_graph_but_for_recomputed_attention_of_several_ranks_and_sends_as_eager_ones_do(
    size, sequence_parallel, style, changes, breaks
):
    """Masks are the same, too; 1e-5 as above."""
    model = dataclasses.replace(STYLES[style], **changes)
    for found in ranks(size).run(eager_and_compiled, model, sequence_parallel):
        assert len(found["breaks"]) == breaks
        (expected, wanted, sent), (losses, grads, ours) = found["eager"], found["compiled"]
        assert ours == sent
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        assert_gradients_near(grads, wanted)
        # of the sequence, its slice is kept: 16 tokens, 3 samples
        assert ((16, 3, model.hidden) in found["kept"]) == (not sequence_parallel)
        assert (8, 3, model.hidden) in found["kept"] or not sequence_parallel


def test_all_layers_share_one_compilation():
    """Of 10 layers, which is more than torch's limit for one function."""
    model, counts = compiled(GPT2_STYLE, num_layers=10, hidden_size=8, ffn_hidden_size=8), []
    with aot_eager():
        gpt = build_gpt(model, MeshAxis("tp"), vocab_size=VOCAB)
        for action in (lambda: step(gpt), lambda: step(gpt), lambda: gpt.eval()(sample()[0])):
            action()
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[:2] == [3, 3]  # a layer, and the loss each way
    assert counts[2] <= 4  # dropout is a branch at compile time


def post_training_model(style: GPTConfig, *, frozen: bool = False, **options: Any) -> GPTModel:
    model = GPTModel(style, vocab_size=VOCAB, tp=MeshAxis("tp"), scalar_head=not frozen, varying_sizes=True, **options)
    initialize_parameters_(model, seed=5, draw_device=CPU)
    return model.requires_grad_(not frozen)


def test_models_of_post_training_have_a_graph_of_each_kind_for_every_size():
    """Policy in training, scored and evaluated; a frozen reference; a reward model of another shape: 5 kinds, and each
    again for single rows, which is more than torch's own limit of 8."""
    style, other = LLAMA_STYLE, dataclasses.replace(LLAMA_STYLE, hidden_size=16, ffn_hidden_size=16)
    with aot_eager():
        policy, eager = post_training_model(compiled(style)), post_training_model(style)
        reference, reward = (post_training_model(compiled(each), frozen=True) for each in (style, other))
        counts = []
        for rows, seq in ((2, 16), (3, 9), (4, 12), (1, 16), (2, 7), (1, 5)):
            ids = torch.randint(VOCAB, (rows, seq), generator=torch.Generator().manual_seed(rows))
            outputs, expected = (model.train()(ids, ids, with_entropy=True) for model in (policy, eager))
            torch.testing.assert_close(outputs.losses, expected.losses, rtol=1e-5, atol=0)
            outputs.losses.sum().backward()
            with torch.no_grad():
                for model, training in ((policy, True), (policy, False), (reference, False), (reward, False)):
                    model.train(training)(ids, ids)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["total"] == frames["ok"]  # none was given up
    assert counts == [8, 8, 8, 13, 13, 13]  # three are the loss's


@pytest.mark.parametrize("size", [1, 2])
def test_decoding_has_a_graph_for_any_number_of_rows_and_places_and_one_for_a_single_row(size):
    """The same tokens as without; --no-compile makes none."""
    for found, graphs in ranks(size).run(decoded_with_and_without):
        assert found[True] == found[False]
        assert graphs == {True: [1, 1, 2], False: [0, 0, 0]}


def decoded_with_and_without() -> tuple[dict[bool, list[list[int]]], dict[bool, list[int]]]:
    prompts, found, graphs = [[5, 6, 7], [8, 9, 10, 11], [1]], {}, {}
    greedy = SampleConfig(sample_tokens=9, sample_temperature=0.0)
    for compile_ in (True, False):
        with aot_eager():
            model = build_gpt(dataclasses.replace(LLAMA_STYLE, compile=compile_), tp_axis(), vocab_size=VOCAB)
            found[compile_], graphs[compile_] = [], []
            for rows in (3, 2, 1):
                with evaluating(model):
                    drawn = draw_completions(model, model.tp, prompts[:rows], greedy, torch.zeros(rows, 9), ends=None)
                found[compile_] += drawn.tokens.tolist()
                graphs[compile_].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, graphs


def losses_and_gradients(model: GPTConfig, sequence_parallel: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with aot_eager():
        gpt = build_gpt(model, tp_axis(), vocab_size=VOCAB, sequence_parallel=sequence_parallel)
        return step(gpt), local_gradients(gpt)


@pytest.mark.parametrize(("size", "sequence_parallel", "kind"), [
    (1, False, "selective"),
    (2, True, "full"),  # what is recomputed contains the gathers of sequence parallelism
])  # fmt: skip
def test_recomputation_of_compiled_layers_with_dropout_changes_no_bit(size, sequence_parallel, kind):
    plain, recomputed = (compiled(GPT2_STYLE, **DROPOUT, recompute_granularity=each) for each in (None, kind))
    found = [ranks(size).run(losses_and_gradients, model, sequence_parallel) for model in (plain, recomputed)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def run_compiled(case: Case, steps: int, **flags: str) -> Outcome:
    with aot_eager():
        return run(case, steps, **flags)


def test_a_compiled_run_that_resumes_ends_with_the_same_bits(tmp_path):
    case = Case(model=compiled(GPT2_STYLE, **DROPOUT), tp=2, sequence_parallel=True, micro_batches=2)
    save = str(tmp_path / "save")
    straight = ranks(2).run(run_compiled, case, 2)
    first = ranks(2).run(run_compiled, case, 1, save=save)
    second = ranks(2).run(run_compiled, case, 2, load=save)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert before.steps + after.steps == whole.steps
        assert after.state == whole.state


def train_compiled(case: Case) -> dict[str, Any]:
    with aot_eager():
        result = train_on_ranks(case)
    return {**result, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel", "changes"), [
    (1, 2, False, {"recompute_granularity": "full"}),
    (2, 1, True, {}),
])  # fmt: skip
def test_a_compiled_sharded_run_equals_one_plain_process(tp, cp, sequence_parallel, changes):
    """Through build_model and FSDP2, two steps of two micro-batches: 1e-5 as for every other layout."""
    case = Case(steps=2, micro_batches=2, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    expected = train_plain(case)
    case = dataclasses.replace(case, model=compiled(case.model, **changes))
    for result in ranks(2).run(train_compiled, case):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert 0 < result["graphs"] < 20  # and not one per layer, step and micro-batch
