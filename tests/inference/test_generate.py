"""Test generation against a plain loop over one model, on every parallel layout."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from helpers.hf_models import TOKENS, VOCAB, make_model, our_model, save
from helpers.ranks import ranks
from helpers.tiers import nightly, slow
from helpers.training import CPU, GPT2_STYLE, LLAMA_STYLE, MIXTURE_STYLE, Case, build_on_ranks, build_step

from megazpp.convert.huggingface import open_model
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import draw_completions, generate
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.zero.config import ZeroConfig

# the last prompt has 20 tokens, more than the longest input of the model, 16
PROMPTS = ((5, 1, 100), (7,), (2, 3, 5, 7, 11, 13), tuple(range(30, 50)))
# initial weights have a larger standard deviation than usual, so that logits differ by much more than rounding
STYLES = {
    "gpt2": dataclasses.replace(GPT2_STYLE, init_method_std=0.5),
    "llama": dataclasses.replace(LLAMA_STYLE, init_method_std=0.5),
    "mixture": dataclasses.replace(MIXTURE_STYLE, num_layers=2, init_method_std=0.5),
}
# generates more tokens than the longest input of the model, 16
GREEDY = SampleConfig(sample_tokens=20, sample_temperature=0.0)
DRAWN = SampleConfig(sample_tokens=20, sample_temperature=0.7, sample_top_k=10)
ZEROPP = ZeroConfig(zeropp=True)


@torch.no_grad()
def plain_loop(model: GPTModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Generate `num_tokens` tokens greedily, without padding and cache.

    Each token takes a plain forward over the last 16 tokens.
    """
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model.tp.all_gather(model(torch.tensor([tokens[-16:]]))[0, -1])[:101]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@functools.cache
def greedy_reference(style: GPTConfig, prompt: tuple[int, ...]) -> list[int]:
    model = GPTModel(style, vocab_size=101).eval()
    initialize_parameters_(model, seed=5, draw_device=CPU)
    return plain_loop(model, prompt, GREEDY.sample_tokens)


def generate_on_ranks(case: Case, *asked: tuple[tuple[tuple[int, ...], ...], SampleConfig, int, int]) -> list[Any]:
    """Generate for each request, which is (prompts, config, seed, index of the first prompt).

    Return the tokens of all requests.
    """
    built = build_on_ranks(case)
    found = [
        generate(*built, prompts, config, max_length=16, seed=seed, first_prompt=number).tokens
        for prompts, config, seed, number in asked
    ]
    assert built[0].training
    return found


@pytest.mark.parametrize("layout", [{"ep": 2}, slow({"ep": 4, "tp": 2})])
def test_ranks_that_share_out_experts_generate_the_same_texts(layout):
    """Check that ranks of one expert-parallel group generate equal texts.

    Rank 0 samples for all ranks, so that they run equally many forwards.
    """
    case, asked = Case(model=STYLES["mixture"], **layout), [(PROMPTS[:3], GREEDY, 1, 0), (PROMPTS[:3], DRAWN, 1, 0)]
    results = ranks(max(layout.values())).run(generate_on_ranks, case, *asked)
    for greedy, drawn in results:
        assert greedy == [greedy_reference(case.model, prompt) for prompt in PROMPTS[:3]]
        assert drawn == results[0][1]


DRAWS = [(PROMPTS[:1], DRAWN, seed, 0) for seed in (1, 2, 1)]


@pytest.mark.parametrize(
    ("style", "world_size", "tp", "stage", "sequence_parallel"),
    [
        ("gpt2", 2, 1, 3, False),
        slow("llama", 2, 2, 0, True),
        nightly("mixture", 2, 2, 3, False),
        slow("gpt2", 2, 1, 1, False),
        slow("mixture", 4, 2, 3, True),
        nightly("gpt2", 4, 2, 3, True),
        nightly("llama", 4, 4, 2, False),
    ],
)
def test_greedy_tokens_match_plain_forwards_and_samples_follow_the_seed(
    style, world_size, tp, stage, sequence_parallel
):
    model, asked = STYLES[style], [(PROMPTS[:3], GREEDY, 1, 0), (PROMPTS[3:], GREEDY, 1, 0), *DRAWS]
    case = Case(model=model, tp=tp, stage=stage, sequence_parallel=sequence_parallel)
    (alone,) = ranks(1).run(generate_on_ranks, Case(model=model), *DRAWS)
    for first, second, *drawn in ranks(world_size).run(generate_on_ranks, case, *asked):
        assert [*first, *second] == [greedy_reference(model, prompt) for prompt in PROMPTS]
        assert len(set(second[0])) > 2  # if all tokens were the same, wrong logits could give them, too
        assert drawn == alone
        assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_greedy_tokens_of_experts_equal_transformers(kind, tmp_path):
    """Compare greedy tokens of a mixture of experts with transformers.

    This project continues all prompts together with a cache, and transformers one after the other.
    """
    theirs, count = make_model(kind), 12
    ours = our_model(open_model(save(theirs, tmp_path)))
    prompts = [TOKENS[0, :length].tolist() for length in (1, 5, 9)]
    expected = [
        theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=VOCAB)[0].tolist()
        for prompt in prompts
    ]
    config = SampleConfig(sample_tokens=count, sample_temperature=0.0)
    drawn = draw_completions(ours, ours.tp, prompts, config, torch.zeros(len(prompts), count, dtype=torch.float64))
    assert [[*prompt, *row] for prompt, row in zip(prompts, drawn.tokens.tolist(), strict=True)] == expected
    assert len({*drawn.tokens.flatten().tolist()}) > 4  # if all tokens were the same, wrong logits could give them, too


def generate_sharded(case: Case) -> tuple[list[list[int]], list[int]]:
    """Check generated tokens against plain forwards of the same shards; return the tokens and numbers of gathers.

    The shards may be quantized. The numbers of all-gathers are for generations of 2, 2 and 5 tokens and for the plain
    forwards. Only the first generation crosses nodes.
    """
    model, sharding, dims = build_on_ranks(case)
    tokens: list[list[int]] = []

    def gathers() -> int:
        table = dims.counter.table().items()
        return sum(t.calls for (_, axis, kind), t in table if kind == "all_gather" and axis != "tp")

    counts = [gathers()]
    for num_tokens in (2, 2, 5):
        config = dataclasses.replace(GREEDY, sample_tokens=num_tokens)
        tokens = generate(model, sharding, dims, PROMPTS[:3], config, max_length=16, seed=1).tokens
        counts.append(gathers())
    assert tokens == [plain_loop(model.eval(), prompt, 5) for prompt in PROMPTS[:3]]
    counts.append(gathers())
    return tokens, [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.parametrize(
    ("style", "tp", "zero"), [("gpt2", 2, ZEROPP), nightly("llama", 1, ZEROPP), slow("llama", 2, None)]
)
def test_generation_gathers_weights_once_and_frees_them_afterwards(style, tp, zero):
    results = ranks(4).run(generate_sharded, Case(model=STYLES[style], tp=tp, nodes=2, zero=zero))
    for tokens, (first, short, long, after) in results:
        assert tokens == results[0][0]
        assert 0 < first >= short == long
        assert after == 3 * 5 * long


def train_around_a_sample(case: Case, samples: bool) -> list[tuple[float, float]]:
    step, dims = build_step(case)
    found, few = [], dataclasses.replace(DRAWN, sample_tokens=3)
    for index in range(3):
        result = step(case.batches(index, dims), learning_rate=1e-2, weight_decay=0.01)
        found.append((result.loss, result.grad_norm))
        if samples:
            generate(step.model, step.sharding, dims, PROMPTS, few, max_length=16, seed=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zero", [nightly(None), ZEROPP])
def test_sample_during_training_changes_nothing(zero):
    dropout = dataclasses.replace(GPT2_STYLE, hidden_dropout=0.1)
    case = Case(model=dropout, tp=2, nodes=2, sequence_parallel=True, zero=zero)
    assert ranks(4).run(train_around_a_sample, case, True) == ranks(4).run(train_around_a_sample, case, False)


def test_sampled_tokens_do_not_depend_on_other_prompts_of_the_batch():
    nothing = dataclasses.replace(GREEDY, sample_tokens=0)
    alone = [(PROMPTS[number : number + 1], DRAWN, 1, number) for number in range(3)]
    asked = [(PROMPTS[:3], DRAWN, 1, 0), *alone, (PROMPTS[:2], nothing, 1, 0)]
    ((together, *rows, empty),) = ranks(1).run(generate_on_ranks, Case(model=STYLES["llama"]), *asked)
    assert rows == [[row] for row in together]
    assert empty == [[], []]
