"""Test torch.compile of layers: one graph per kind of layer, with the losses and gradients of eager layers.

Except for one test, layers are compiled with torch's back ends "aot_eager" and "eager". Neither needs the C++ compiler,
which would take most of the time. "aot_eager" runs all other parts of torch.compile, and "eager" only traces graphs.
"""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from helpers.checkpoints import run
from helpers.ranks import ranks
from helpers.tensor_parallel import STYLES, VOCAB, assert_gradients_near, build_gpt, packed, sample, saved_tensors, step
from helpers.tiers import nightly
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, train_on_ranks

from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import draw_completions, evaluating
from megazpp.model import backends
from megazpp.model.config import GPTConfig
from megazpp.model.float8 import Float8Format, float8_product
from megazpp.model.gpt import GPTModel
from megazpp.post_training.objectives import TokenHead

pytestmark = pytest.mark.slow

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def compiled(model: GPTConfig, **changes: Any) -> GPTConfig:
    return dataclasses.replace(model, compile=True, **changes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU: no g++ here")
def test_compiled_kernels_match_eager_losses_and_gradients():
    """Compare a compiled model with an eager one. The tolerance is 1e-5, because fused kernels add in another order.

    Gradients are compared relative to their largest element.
    """
    model = dataclasses.replace(GPT2_STYLE, num_layers=1)
    (losses, grads), (expected, wanted) = (step(build_gpt(each)) for each in (compiled(model), model))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    # compiling changes no parameter name, so both models' gradients have the same keys
    assert_gradients_near(grads, wanted)


@contextlib.contextmanager
def aot_eager(backend: str = "aot_eager") -> Iterator[None]:
    """Let torch.compile inside the block use `backend`, which generates no code and so needs no C++ compiler.

    The back end "eager" only traces graphs, which is cheaper.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stopped = functools.partial(torch.compile, backend=backend)
    with (
        mock.patch.object(torch, "compile", stopped),
        mock.patch.object(backends, "missing_compiler", return_value=None),
    ):
        yield


def graphs() -> int:
    """Return the number of graphs that torch.compile has made since the beginning of the `aot_eager` block."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def eager_and_compiled(model: GPTConfig, sequence_parallel: bool, float8: Float8Format | None) -> dict[str, Any]:
    """Run two steps with an eager model and with a compiled one.

    Returns:
        "eager" and "compiled": losses and gradients of both steps, and traffic. "graphs": number of graphs. "breaks":
        number of graph breaks by reason. "kept": shapes of the tensors that the compiled model saved for backward.
    """
    found: dict[str, Any] = {}
    product = None if float8 is None else float8_product(float8, emulate=True)
    for name, config in (("eager", model), ("compiled", compiled(model))):
        with aot_eager(), saved_tensors() as saved:
            gpt = build_gpt(config, sequence_parallel=sequence_parallel, product=product)
            saved.clear()
            found[name] = [step(gpt), step(gpt, packed()), gpt.tp.counter.table()]
    return found | {
        "graphs": graphs(),
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "kept": {tuple(x.shape) for x in saved},
    }


NORMS_AND_ACTIVATION = {"recompute_granularity": "selective"}
CORE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp_act")}


@pytest.mark.parametrize(("size", "sequence_parallel", "style", "changes", "float8", "breaks"), [
    (1, False, "llama", NORMS_AND_ACTIVATION, None, 0),
    nightly(1, False, "gpt2", CORE, None, 0),
    nightly(2, False, "gpt2", DROPOUT | NORMS_AND_ACTIVATION, None, 0),
    nightly(2, True, "llama", DROPOUT | NORMS_AND_ACTIVATION, None, 0),
    nightly(2, True, "gpt2", DROPOUT | CORE, None, 1),  # torch 2.13 breaks the graph once for this combination
    (1, False, "llama", {}, "hybrid", 0),
    nightly(2, True, "llama", {}, "hybrid", 0),
])  # fmt: skip
def test_layer_is_one_graph_and_communicates_like_eager(size, sequence_parallel, style, changes, float8, breaks):
    """Check that a compiled layer is one graph, sends the same bytes as an eager layer, and gives equal results.

    Results agree only if dropout masks are equal too. The tolerance is 1e-5, because compiled code adds in another
    order.
    """
    if float8:
        pytest.importorskip("torchao")
    model = dataclasses.replace(STYLES[style], **changes)
    for found in ranks(size).run(eager_and_compiled, model, sequence_parallel, float8):
        assert found["graphs"]
        assert len(found["breaks"]) == breaks, found["breaks"]
        (*expected, sent), (*steps, ours) = found["eager"], found["compiled"]
        assert ours == sent
        for (losses, grads), (wanted, wanted_grads) in zip(steps, expected, strict=True):
            torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
            assert_gradients_near(grads, wanted_grads)
        # autograd saves hidden states of 16 tokens x 3 samples; with sequence parallelism only a rank's 8 tokens
        if float8 is None:
            assert ((16, 3, model.hidden) in found["kept"]) == (not sequence_parallel)
            assert (8, 3, model.hidden) in found["kept"] or not sequence_parallel


def test_all_layers_share_one_compilation():
    """Train and evaluate a compiled model of 10 layers, which is more than torch's limit of graphs for one function."""
    model, counts = compiled(GPT2_STYLE, num_layers=10, hidden_size=8, ffn_hidden_size=8), []
    with aot_eager():
        gpt = build_gpt(model)
        for action in (lambda: step(gpt), lambda: step(gpt), lambda: gpt.eval()(sample()[0])):
            action()
            counts.append(graphs())
    # after one step and after two: one graph for all layers, one for the forward of the loss, and one for its backward
    assert counts[:2] == [3, 3]
    assert counts[2] <= 4  # evaluation may add one graph of the layer without dropout


def post_training_model(style: GPTConfig, *, frozen: bool = False) -> GPTModel:
    return build_gpt(style, scalar_head=not frozen, varying_sizes=True).requires_grad_(not frozen)


def test_post_training_models_have_one_graph_per_kind_for_any_size():
    """Test that models of post-training have one graph per kind of layer, for any number and length of rows.

    The four kinds are the policy in training, without gradients and in evaluation, and a frozen reference. Single rows
    need each kind again, which is more than torch's limit of 8 graphs.
    """
    with aot_eager("eager"):
        policy, eager = post_training_model(compiled(LLAMA_STYLE)), post_training_model(LLAMA_STYLE)
        reference = post_training_model(compiled(LLAMA_STYLE), frozen=True)
        counts = []
        for rows, seq in ((2, 16), (3, 9), (1, 16), (2, 7), (1, 5)):
            ids = torch.randint(VOCAB, (rows, seq), generator=torch.Generator().manual_seed(rows))
            head = TokenHead(ids, with_entropy=True)
            outputs, expected = (model.train()(ids, head=head) for model in (policy, eager))
            torch.testing.assert_close(outputs.losses, expected.losses, rtol=1e-5, atol=0)
            outputs.losses.sum().backward()
            with torch.no_grad():
                for model, training in ((policy, True), (policy, False), (reference, False)):
                    model.train(training)(ids, ids)
            counts.append(graphs())
    frames = torch._dynamo.utils.counters["frames"]
    # torch compiled each function that it saw; none fell back to eager execution
    assert frames["total"] == frames["ok"]
    # after each batch: 4 kinds of layers and 3 graphs of the loss, and 4 more kinds from the first single row on
    assert counts == [7, 7, 11, 11, 11]


@aot_eager("eager")
def decode(compile_: bool) -> tuple[list[list[int]], list[int]]:
    """Generate tokens for three, two and one prompts; return the tokens, and the number of graphs after each call."""
    prompts, tokens, counts = [[5, 6, 7], [8, 9, 10, 11], [1]], [], []
    greedy = SampleConfig(sample_tokens=9, sample_temperature=0.0)
    model = build_gpt(dataclasses.replace(LLAMA_STYLE, compile=compile_))
    for rows in (3, 2, 1):
        with evaluating(model):
            drawn = draw_completions(model, model.tp, prompts[:rows], greedy, torch.zeros(rows, 9), ends=())
        tokens += drawn.tokens.tolist()
        counts.append(graphs())
    return tokens, counts


def test_decoding_has_one_graph_for_many_rows_and_one_for_single():
    """Check that generation compiles one graph for several rows and one for a single row.

    Tokens are the same as without compilation, and --no-compile makes no graph.
    """
    ((tokens, counts),), ((expected, none),) = (ranks(1).run(decode, each) for each in (True, False))
    assert tokens == expected
    assert (counts, none) == ([1, 1, 2], [0, 0, 0])


@aot_eager()
def one_step(model: GPTConfig, sequence_parallel: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return step(build_gpt(model, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize(("size", "sequence_parallel", "kind"), [
    nightly(1, False, "selective"),
    (2, True, "full"),  # full recomputation with sequence parallelism repeats the all-gathers too
])  # fmt: skip
def test_recomputation_of_compiled_dropout_layers_changes_no_bit(size, sequence_parallel, kind):
    plain, recomputed = (compiled(GPT2_STYLE, **DROPOUT, recompute_granularity=each) for each in (None, kind))
    found = [ranks(size).run(one_step, model, sequence_parallel) for model in (plain, recomputed)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@aot_eager()
def with_graphs(function: Callable[..., Any], *args: Any, **flags: Any) -> tuple[Any, int]:
    return function(*args, **flags), graphs()


def test_resumed_compiled_run_is_bit_identical(tmp_path):
    case = Case(model=compiled(GPT2_STYLE, **DROPOUT), tp=2, sequence_parallel=True, micro_batches=2)
    folder = str(tmp_path)
    straight, resumed = (
        ranks(2).run(with_graphs, run, case, 2, **flags)
        for flags in ({"save": folder, "save_interval": 1}, {"load": folder, "ckpt_step": 1})
    )
    for (whole, _), (after, _) in zip(straight, resumed, strict=True):
        assert after.steps == whole.steps[1:]
        assert after.state == whole.state


@pytest.mark.parametrize(("tp", "cp", "sequence_parallel", "changes"), [
    (1, 2, False, {"recompute_granularity": "full"}),
    (2, 1, True, {}),
])  # fmt: skip
def test_compiled_sharded_run_equals_an_eager_run(tp, cp, sequence_parallel, changes):
    """Train two steps of two micro-batches with compiled and with eager layers under FSDP2, and compare.

    Both must send the same bytes. Losses and gradient norms may differ by 1e-5, because fp32 sums are in other orders.
    """
    model = dataclasses.replace(GPT2_STYLE, **changes)
    case = Case(model=model, steps=2, micro_batches=2, tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    expected = ranks(2).run(train_on_ranks, case)[0]
    case = dataclasses.replace(case, model=compiled(model))
    for result, graphs_made in ranks(2).run(with_graphs, train_on_ranks, case):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert result["sent"] == expected["sent"]
        assert 0 < graphs_made < 20  # compiled code is reused: layers, steps and micro-batches do not each add graphs
