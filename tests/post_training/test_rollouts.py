"""Test rollouts: sampled completions, their layout over ranks, inter-node traffic, and resuming inside a buffer."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import nightly, slow
from post_training.policies import BATCH, MIXTURE, SEQ, PostCase, build, near, train

from megazpp.base.program import UserError
from megazpp.data.tokenizer import ByteTokenizer
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import draw_completions, evaluating
from megazpp.inference.sample import next_probabilities, pick_rows
from megazpp.post_training import rollouts
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import PromptDataset, RolloutBatch
from megazpp.post_training.formatting import Prompt
from megazpp.post_training.objectives import PolicyLoss, TokenHead
from megazpp.post_training.reference import FrozenModel
from megazpp.post_training.rewards import RewardFunction
from megazpp.post_training.rollouts import PolicySampler, RolloutLoader
from megazpp.training.objective import StopRequested
from megazpp.training.setup import ShardedModel
from megazpp.zero.config import ZeroConfig

TEXTS = ("ab", "Hello", "x", "12+34=", "zz zz", "??")
PROMPTS = [Prompt([*x.encode()], x, {"number": i}, f"p.jsonl, line {i + 1}") for i, x in enumerate(TEXTS)]
GRPO = PostTrainingConfig(objective="grpo", num_generations=4, max_completion_length=8)
LATER = dataclasses.replace(GRPO, steps_per_generation=2, num_iterations=2)
PPO = PostTrainingConfig(objective="ppo", max_completion_length=8, num_ppo_epochs=2, whiten_rewards=True)
CASES = {
    "grpo": PostCase(post=GRPO),
    "grpo, two steps twice": PostCase(post=dataclasses.replace(LATER, beta=0.1), steps=5, temperature=0.8),
    "ppo": PostCase(post=PPO, steps=3),
    "grpo of experts": PostCase(post=GRPO, model=MIXTURE),
    "ppo of experts": PostCase(post=PPO, model=MIXTURE),
}
ZEROPP = ZeroConfig(zeropp=True)
DROPPED = (
    "the 16 completions of the checkpoint are dropped, because they were sampled and rewarded with other values of"
)


def open_loader(case: PostCase) -> RolloutLoader:
    built, dims = build(case)
    length = case.post.max_completion_length
    config = SampleConfig(sample_tokens=length, sample_temperature=case.temperature, sample_top_k=0)
    functions = [RewardFunction("evens", evens)]
    options: dict[str, Any] = {"config": config, "functions": functions, "at_once": case.post.rollouts_at_once}
    sampler = PolicySampler(*built, dims, ByteTokenizer(), **options, seed=3)
    return RolloutLoader(
        sampler,
        PromptDataset(PROMPTS, num_samples=999, seed=1),
        case.post,
        reward_weights=None,
        reference=None,
        reward_model=None,
        max_length=SEQ,
        global_batch_size=BATCH,
        micro_batch_size=case.micro_batch_size,
        show=lambda iteration, completions: None,
    )


def evens(completions: list[str], number: list[int]) -> list[float]:
    """Reward each completion by its number of characters with even codes / 8, plus its prompt's `number` / 100.

    The small second term shows whether functions get the right column.
    """
    return [sum(ord(c) % 2 == 0 for c in text) / 8 + n / 100 for text, n in zip(completions, number, strict=True)]


def metrics_of(loader: RolloutLoader) -> dict[str, float]:
    """Return the metrics of a rollout loader without its timings."""
    return {name: value for name, value in loader.metrics().items() if not name.startswith("rollout/")}


def train_on_rollouts(case: PostCase) -> tuple[list[Any], list[dict[str, float]]]:
    """Train on rollouts; return the buffer's table of each step as a list, and the metrics of each step."""
    loader, tables = open_loader(case), []
    sampler = loader.sampler
    if case.post.needs_reference:
        loader.reference = FrozenModel(build(case, scalar_head=False)[0].model, temperature=case.temperature).logps
    options: dict[str, Any] = {"temperature": case.temperature, "rollout_metrics": lambda: metrics_of(loader)}
    objective = PolicyLoss(case.post, sampler.dims, **options)

    def steps() -> Iterator[Any]:
        for index in range(case.steps):
            yield loader.step(index * BATCH, BATCH)
            tables.append(loader._buffer.table.tolist())

    return tables, train(ShardedModel(sampler.model, sampler.sharding), sampler.dims, objective, steps())


def train_all(names: list[str], multiple: int, **layout: Any) -> list[Any]:
    """Return the results of `train_on_rollouts` for the named cases.

    Rows are padded to a multiple of `multiple` tokens.
    """
    with mock.patch.object(rollouts, "row_multiple", return_value=multiple):
        return [train_on_rollouts(dataclasses.replace(CASES[name], **layout)) for name in names]


def step_without_rewards(case: PostCase) -> str:
    loader = open_loader(case)
    loader.sampler.functions = [RewardFunction("silent", lambda completions, **rest: [None] * len(completions))]
    with pytest.raises(UserError, match="evens returned None for all 8 completions of iteration 1") as error:
        loader.step(0, BATCH)
    return str(error.value)


def give_up_generations(case: PostCase) -> None:
    loader = open_loader(case)
    # A step samples 8 completions in two batches of 4, and then computes old log-probabilities in four micro-batches.
    # `give_up`, which raises if a stop signal has arrived, is called before each of these six.
    for allowed in range(7):
        calls = iter(range(100))

        def give_up(calls: Iterator[int] = calls, allowed: int = allowed) -> None:
            if next(calls) == allowed:
                raise StopRequested("SIGTERM")

        loader.sampler.give_up = give_up
        if allowed == 6:
            assert loader.step(0, BATCH)
            assert next(calls) == 6
            return
        with pytest.raises(StopRequested, match="SIGTERM"):
            loader.step(0, BATCH)
        assert loader.tensors() == {}


def test_generation_is_given_up_between_its_batches():
    post = dataclasses.replace(PPO, rollouts_at_once=4)
    ranks(1).run(give_up_generations, PostCase(post=post, micro_batch_size=2))


def test_generation_without_any_reward_stops_the_run():
    assert len({*ranks(2).run(step_without_rewards, PostCase(post=GRPO, micro_batch_size=2))}) == 1


@pytest.mark.parametrize(
    ("world", "layout", "names"),
    [
        (2, {"tp": 2, "micro_batch_size": 8}, ["grpo"]),
        # a micro-batch has 2 rows, so both ranks share each group of 4 completions
        slow(2, {"micro_batch_size": 2}, ["grpo, two steps twice"]),
        slow(2, {"cp": 2, "micro_batch_size": 8}, ["ppo"]),
        slow(2, {"micro_batch_size": 2}, ["grpo of experts"]),
        nightly(4, {"cp": 2, "micro_batch_size": 2}, [*CASES]),
        slow(4, {"tp": 2, "nodes": 2, "micro_batch_size": 2}, ["grpo, two steps twice", "ppo of experts"]),
    ],
)
def test_every_layout_samples_and_trains_alike_with_short_rows(world, layout, names):
    (expected,) = ranks(1).run(train_all, names, SEQ, micro_batch_size=8)
    # in the first step the policy still equals the reference model, so their KL divergence is 0
    for _, steps in expected:
        assert steps[0].get("kl", 0.0) == pytest.approx(0.0, abs=1e-6)
    for found in ranks(world).run(train_all, names, 8, **layout):
        for (tables, steps), (their_tables, their_steps) in zip(found, expected, strict=True):
            assert tables == their_tables
            assert steps == near(their_steps, rel=2e-3, abs=2e-4)


def compare_first_forward(case: PostCase) -> None:
    """Compare log-probabilities in a rollout buffer, and from sampling, with the first training forward's."""
    loader = open_loader(case)
    model = loader.sampler.model.train()
    for batch in loader.step(0, BATCH):
        head = TokenHead(batch.labels, temperature=0.7, with_entropy=True)
        losses = model(batch.tokens, position_ids=batch.position_ids, head=head).losses
        losses.sum().backward()  # the forward has an autograd graph, as in training, which may select other kernels
        assert torch.equal(batch.old_logps * batch.loss_mask, -losses * batch.loss_mask)
        assert ((batch.sampling_logps + losses) * batch.loss_mask).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"tp": 2}),
        slow(2, {"nodes": 2, "zero": ZEROPP}),
        slow(2, {"nodes": 2, "zero": ZEROPP, "model": MIXTURE}),
        slow(1, {}),
        slow(4, {"tp": 2, "nodes": 2, "zero": ZEROPP, "sequence_parallel": True}),
    ],
)
def test_first_ratio_of_a_buffer_is_exactly_1(world, layout):
    """Check that the importance ratio of a buffer's first step is exactly 1.

    Log-probabilities from sampling agree with the training forward only to 1e-4.
    """
    ranks(world).run(compare_first_forward, PostCase(post=LATER, temperature=0.7, **layout))


def cross_bytes(case: PostCase) -> int:
    loader = open_loader(case)
    loader.step(0, BATCH)
    return loader.sampler.dims.counter.sent_bytes("cross")


def test_inter_node_bytes_of_a_rollout_do_not_depend_on_its_length():
    posts = [dataclasses.replace(GRPO, max_completion_length=length) for length in (1, 16)]
    for zero in (None, ZEROPP):
        short, long = (ranks(2).run(cross_bytes, PostCase(post=post, nodes=2, zero=zero)) for post in posts)
        assert min(short) > 0
        assert short == long


def draw_unevenly(case: PostCase) -> list[int]:
    """Let each data rank sample another number of prompts, with another limit of tokens.

    Return the lengths in tokens of this rank's completions.
    """
    loader = open_loader(case)
    rank = loader.sampler.dims.data_rank
    config = SampleConfig(sample_tokens=2 + 9 * rank, sample_top_k=0)
    drawn, _ = dataclasses.replace(loader.sampler, config=config).draw(PROMPTS[rank:], [*"abcdef"[rank:]])
    # a step with collectives of all ranks works afterwards, which shows that no rank waits in a collective of `draw`
    loader.step(0, BATCH)
    return drawn.lengths.tolist()


def test_ranks_with_short_texts_do_not_block_the_others():
    first, second = ranks(2).run(draw_unevenly, PostCase(post=GRPO))
    assert (len(first), len(second)) == (6, 5)
    assert max(first) <= 2 < max(second)


def go_on(case: PostCase, kept: dict[str, torch.Tensor] | None = None) -> None:
    """Compare a rollout loader with one that resumes after each step.

    The second loader gets the first one's state, or `kept`, and both must give the same next batch.
    """
    straight, again = open_loader(case), open_loader(case)
    world = straight.sampler.dims.world
    straight.step(0, BATCH)
    for index in range(1, 5):
        parts = world.share_object(world.gather_objects(straight.tensors()))
        again.accept(kept or dict(collections.ChainMap(*parts)), 0)
        one, other = (loader.step(index * BATCH, BATCH) for loader in (straight, again))
        torch.testing.assert_close(other, one, rtol=0, atol=0)
        assert metrics_of(again) == metrics_of(straight)


@pytest.mark.parametrize("post", [LATER, dataclasses.replace(PPO, num_mini_batches=2)])
def test_buffer_resumes_from_a_checkpoint(post):
    ranks(2).run(go_on, PostCase(post=post, micro_batch_size=2))


def kept_by(case: PostCase) -> dict[str, torch.Tensor]:
    loader = open_loader(case)
    loader.step(0, BATCH)
    return loader.tensors()


def test_buffer_of_two_ranks_resumes_on_one():
    case = PostCase(post=LATER, micro_batch_size=2)
    one, other = ranks(2).run(kept_by, case)
    ranks(1).run(go_on, case, one | other)


def go_on_with_half_the_batch(case: PostCase, steps: int) -> tuple[list[list[int]], list[str], list[bool]]:
    """Run `steps` steps, and resume with half the batch size.

    Return the numbers of the prompts of each generation, the notes that the resumed loader logs, and for each step
    whether it generates.
    """
    before, after = open_loader(case), open_loader(case)
    after.global_batch_size, after.start = BATCH // 2, (steps, steps * BATCH)
    used = list[list[int]]()
    for loader in (before, after):

        def draw(prompts: Any, names: Any, draw: Any = loader.sampler.draw) -> Any:
            used.append([int(str(prompt.columns["number"])) for prompt in prompts])
            return draw(prompts, names)

        loader.sampler.draw = draw
    for index in range(steps):
        before.step(index * BATCH, BATCH)
    notes, draws = after.accept(before.tensors(), 0), []
    for index in range(4):
        known = len(used)
        after.step(steps * BATCH + index * BATCH // 2, BATCH // 2)
        draws.append(len(used) > known)
    return used, notes, draws


@pytest.mark.parametrize(
    ("post", "steps", "before", "after", "draws"),
    [
        (GRPO, 3, [[0, 1], [2, 3], [4, 5]], [[6], [7], [8], [9]], [True] * 4),
        # One generation of four prompts serves four steps. The run resumes with half the batch size after one step of
        # the second generation, so that generation is dropped and its prompts are sampled again, two at a time.
        (LATER, 5, [[0, 1, 2, 3], [4, 5, 6, 7]], [[4, 5], [6, 7]], [True, False, False, True]),
        (LATER, 4, [[0, 1, 2, 3]], [[4, 5]], [True, False, False, False]),
    ],
)
def test_rollouts_resume_with_the_next_prompts_at_another_batch_size(post, steps, before, after, draws):
    ((used, notes, drawn),) = ranks(1).run(go_on_with_half_the_batch, PostCase(post=post, micro_batch_size=4), steps)
    order = PromptDataset(PROMPTS, num_samples=99, seed=1)
    expected = [[order[number].columns["number"] for number in numbers] for numbers in before + after]
    assert [numbers[:: post.group_size] for numbers in used] == expected
    assert drawn == draws
    dropped = [f"{DROPPED} --global-batch-size"]
    assert notes == (dropped if steps % (post.slices * post.passes) else [])


def resume_with_other_flags(case: PostCase) -> list[list[str]]:
    """Resume inside a buffer with other values of flags, and train on it; return the notes for each change."""
    before = open_loader(case)
    before.step(0, BATCH)
    sampler, notes = before.sampler, []
    cooler = dataclasses.replace(sampler.config, sample_temperature=0.5)
    changes: list[dict[str, Any]] = [
        {"config": dataclasses.replace(case.post, beta=0.1), "reference": lambda batch: torch.zeros_like(batch.labels)},
        {"config": dataclasses.replace(case.post, num_generations=2, scale_rewards="batch")},
        {"sampler": dataclasses.replace(sampler, config=cooler)},
        {"sampler": dataclasses.replace(sampler, functions=[*sampler.functions, RewardFunction("odds", evens)])},
        {"reward_weights": [2.0]},
        {"config": dataclasses.replace(case.post, rollouts_at_once=4)},
    ]
    for change in changes:
        after = dataclasses.replace(before, **change)
        notes.append(after.accept(before.tensors(), 1))
        assert set(after.tensors()) == (set() if notes[-1] else set(before.tensors()))
        batches = after.step(BATCH, BATCH)
        assert all((batch.ref_logps is None) == (after.reference is None) for batch in batches)
        after.metrics()
    return notes


def test_buffer_of_a_run_with_other_flags_is_dropped_by_their_names():
    (notes,) = ranks(1).run(resume_with_other_flags, PostCase(post=LATER, micro_batch_size=4))
    changed = ("beta", "num-generations, --scale-rewards", "sample-temperature", "reward-funcs", "reward-weights")
    assert notes == [*([f"{DROPPED} --{names}"] for names in changed), []]


def go_through(case: PostCase) -> None:
    loader = open_loader(case)
    for index in range(6):
        (batch,) = loader.step(index * BATCH, BATCH)
        # Rows of 24 tokens are cut to 16, because prompts have at most 7 tokens and completions at most 8.
        assert batch.tokens.shape[1] == 16
        rows = loader._buffer.batch.tokens[:, : batch.tokens.shape[1]]
        assert torch.equal(batch.tokens, rows.view(2, BATCH, -1)[index % 2])


def test_each_pass_visits_all_slices_in_order():
    post = dataclasses.replace(PPO, num_ppo_epochs=3, num_mini_batches=2)
    ranks(1).run(go_through, PostCase(post=post, micro_batch_size=8))


def fill(case: PostCase) -> RolloutBatch:
    """Fill a rollout buffer, and return its batch.

    Every second completion is marked as ended (not cut at the limit).
    """
    loader = open_loader(case)
    draw = loader.sampler.draw

    def told(prompts: list[Prompt], names: list[str]) -> Any:
        drawn, texts = draw(prompts, names)
        return drawn._replace(ended=torch.arange(len(prompts)) % 2 == 0), texts

    loader.sampler.draw = told
    loader.step(0, BATCH)
    return loader._buffer.batch


def filled(post: PostTrainingConfig, **flags: Any) -> RolloutBatch:
    return ranks(1).run(fill, PostCase(post=dataclasses.replace(post, **flags), micro_batch_size=8))[0]


def test_completions_do_not_depend_on_how_many_are_sampled_at_once():
    together, few = (filled(GRPO, rollouts_at_once=count).tokens for count in (None, 3))
    assert torch.equal(together, few)


def test_truncated_completions_are_masked_if_asked():
    plain, masked = (filled(LATER, mask_truncated_completions=each).loss_mask for each in (False, True))
    assert torch.equal(masked[::2], plain[::2])
    assert plain[1::2].any(dim=1).all()
    assert not masked[1::2].any()


def test_truncated_completions_get_the_penalty_once():
    """Check that --missing-eos-penalty is subtracted once from completions that were cut.

    Without discounting, the return at a completion's first token is the sum of its rewards.
    """
    post = dataclasses.replace(PPO, whiten_rewards=False, gamma=1.0, lam=1.0)
    plain, penalized = (filled(post, missing_eos_penalty=penalty) for penalty in (None, 0.75))
    first = plain.loss_mask.argmax(dim=1, keepdim=True)
    lost = (plain.returns - penalized.returns).gather(1, first)
    torch.testing.assert_close(lost.view(-1, 2), torch.tensor([[0.0, 0.75]] * 4), atol=1e-5, rtol=0)


def fail_to_judge(case: PostCase) -> None:
    loader = open_loader(case)
    loader.sampler.functions = [RewardFunction("broken", lambda completions, number: [1 / (n - n) for n in number])]
    with pytest.raises(UserError, match=r"reward function broken failed at p\.jsonl, line "):
        loader.step(0, BATCH)


def test_failing_reward_function_ends_all_ranks_with_the_sample_line():
    ranks(2).run(fail_to_judge, PostCase(post=GRPO))


def test_pick_rows_samples_by_its_numbers_and_probabilities():
    generator = torch.Generator().manual_seed(1)
    logits, uniform = torch.randn(50, 11, generator=generator), torch.rand(50, generator=generator, dtype=torch.float64)
    config = SampleConfig(sample_temperature=0.5, sample_top_k=4, sample_top_p=0.7)
    picked = pick_rows(logits, config, uniform)
    assert (next_probabilities(logits, config).gather(1, picked.unsqueeze(1)) > 0).all()
    assert [int(pick_rows(logits[i : i + 1], config, uniform[i : i + 1])) for i in range(50)] == picked.tolist()
    evenly = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    many = pick_rows(logits[:1].expand(1000, -1), config, evenly)
    shares = next_probabilities(logits[:1], config)[0]
    torch.testing.assert_close(torch.bincount(many, minlength=11) / 1000, shares / shares.sum(), atol=2e-3, rtol=0)


def draw_together_and_alone(case: PostCase) -> None:
    """Compare completions that are sampled together with completions of one prompt alone.

    Row i ends with its token number 1 + 2i, so the batch shrinks during the generation.
    """
    (model, sharding), dims = build(case)
    rows, asked = [prompt.tokens for prompt in PROMPTS], collections.Counter()
    config = SampleConfig(sample_tokens=12, sample_top_k=0, sample_temperature=1.0)
    uniform = torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def is_last(row: int, token: int) -> bool:
        asked[row] += 1
        return asked[row] == 1 + 2 * row

    with evaluating(model), sharding.keep_unsharded():
        together = draw_completions(model, dims.tp, rows, config, uniform, ends=(), is_last=is_last)
        assert together.ended.all()
        assert together.lengths.tolist() == [1, 3, 5, 7, 9, 11]
        for row, length in enumerate(together.lengths.tolist()):
            alone = draw_completions(model, dims.tp, [rows[row]], config, uniform[row : row + 1], ends=())
            assert torch.equal(together.tokens[row, :length], alone.tokens[0, :length])
            torch.testing.assert_close(together.logps[row, :length], alone.logps[0, :length], atol=1e-5, rtol=0)


def test_finished_rows_leave_the_batch_without_changing_others():
    ranks(1).run(draw_together_and_alone, PostCase(post=GRPO))


def draw_with_penalty(case: PostCase) -> None:
    """Sample greedily with and without a repetition penalty; only without it do texts repeat tokens.

    The first four rows end with their first token, so the batch shrinks.
    """
    (model, sharding), dims = build(case)
    rows, nothing = [prompt.tokens for prompt in PROMPTS], torch.zeros(6, 12, dtype=torch.float64)
    for penalty in (1e6, 1.0):
        config = SampleConfig(sample_tokens=12, sample_temperature=0.0, sample_repetition_penalty=penalty)
        with evaluating(model), sharding.keep_unsharded():
            drawn = draw_completions(model, dims.tp, rows, config, nothing, is_last=lambda row, token: row < 4)
        assert drawn.lengths.tolist() == [1, 1, 1, 1, 12, 12]
        texts = [row[:n] for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)]
        repeated = [len({*text}) < len(text) or {*text} & {*own} for text, own in zip(texts, rows, strict=True)]
        assert any(repeated) == (penalty == 1.0)


def test_repetition_penalty_also_counts_the_tokens_of_the_prompt():
    ranks(2).run(draw_with_penalty, PostCase(post=GRPO, tp=2))
