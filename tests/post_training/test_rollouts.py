"""Rollouts: what is drawn, on which ranks, what crosses nodes, and what a checkpoint keeps of a buffer."""

import dataclasses
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import slow
from post_training.policies import SEQ, Layout, PostCase, build, make_loader, prompts, train_on_rollouts

from megazpp.base.program import UserError
from megazpp.inference.generate import draw_completions, evaluating, generate
from megazpp.inference.sample import SampleConfig, pick_rows
from megazpp.post_training import rollouts
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.rewards import RewardFunction

GRPO = PostTrainingConfig(objective="grpo", num_generations=4, max_completion_length=8)
LATER = dataclasses.replace(GRPO, steps_per_generation=2, num_iterations=2)
PPO = PostTrainingConfig(objective="ppo", max_completion_length=8, num_ppo_epochs=2, whiten_rewards=True)
CASES = {
    "grpo": PostCase(post=GRPO, steps=2),
    "grpo, two steps twice": PostCase(post=dataclasses.replace(LATER, beta=0.1), steps=5, temperature=0.8),
    "ppo": PostCase(post=PPO, steps=3),
}
LAYOUTS = {
    "tp 2": Layout(world=2, tp=2, micro_batch_size=8),
    "data 2": Layout(world=2, micro_batch_size=2),  # groups of 4 lie on both ranks
    "cp 2": Layout(world=2, cp=2, micro_batch_size=8),
    "cp 2 x data 2": Layout(world=4, cp=2, micro_batch_size=2),
    "tp 2 x 2 nodes": Layout(world=4, tp=2, nodes=2, micro_batch_size=2),
}


def train_all(names: Iterable[str], layout: Layout, *, whole_rows: bool = False) -> list[dict[str, Any]]:
    """`train_on_rollouts` of some cases; `whole_rows` leaves all rows as long as --max-length."""
    shorten, lengths = rollouts.shortened, set[int]()

    def seen(batch: Any, multiple: int) -> Any:
        found = shorten(batch, SEQ if whole_rows else multiple)
        lengths.add(found.tokens.shape[1])
        return found

    with mock.patch.object(rollouts, "shortened", seen):
        found = [train_on_rollouts(dataclasses.replace(CASES[name], layout=layout)) for name in names]
    assert lengths == {SEQ} if whole_rows else lengths < {8, 16, SEQ}
    return found


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp 2", ["grpo"]),
        ("data 2", ["grpo, two steps twice"]),
        ("cp 2", ["ppo"]),
        slow("cp 2 x data 2", [*CASES]),
        slow("tp 2 x 2 nodes", [*CASES]),
    ],
)
def test_every_layout_draws_the_same_completions_and_trains_on_them_alike_in_rows_as_long_as_needed(layout, names):
    (expected,) = ranks(1).run(train_all, names, Layout(micro_batch_size=8), whole_rows=True)
    for wanted in expected:  # the reference is what the policy begins as
        assert wanted["steps"][0].get("kl", 0.0) == pytest.approx(0.0, abs=1e-6)
    for found in ranks(LAYOUTS[layout].world).run(train_all, names, LAYOUTS[layout]):
        for own, wanted in zip(found, expected, strict=True):
            assert own["tables"] == wanted["tables"]
            for one, other in zip(own["steps"], wanted["steps"], strict=True):
                assert one == pytest.approx(other, rel=2e-3, abs=2e-4)


def first_ratios(case: PostCase) -> list[float]:
    """The largest differences of a buffer's log-probabilities to those of the forward that is trained on first."""
    built, dims = build(case)
    loader = make_loader(case, built, dims)
    built.model.train()
    found = []
    for batch in loader.step(0, case.global_batch):
        losses = built.model(
            batch.tokens, batch.labels, position_ids=batch.position_ids, temperature=0.7, with_entropy=True
        ).losses
        losses.sum().backward()  # with a graph, as in training
        found += [float(((x + losses) * batch.loss_mask).abs().max()) for x in (batch.old_logps, batch.sampling_logps)]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(world=2, tp=2),
        Layout(world=2, nodes=2, zeropp=True),
        slow(Layout()),
        slow(Layout(world=4, tp=2, nodes=2, zeropp=True, sequence_parallel=True)),
    ],
)
def test_the_first_ratio_of_a_buffer_is_exactly_1_and_drawing_knew_the_same_log_probabilities(layout):
    case = PostCase(post=LATER, layout=layout, temperature=0.7)
    for found in ranks(layout.world).run(first_ratios, case):
        assert max(found[::2]) == 0.0
        assert max(found[1::2]) < 1e-4


def cross_bytes(lengths: list[int], layout: Layout) -> list[int]:
    """The bytes between nodes of a rollout of completions of each of these lengths at most."""
    found = []
    for length in lengths:
        case = PostCase(post=dataclasses.replace(GRPO, max_completion_length=length), layout=layout)
        built, dims = build(case)
        make_loader(case, built, dims).step(0, case.global_batch)
        found.append(dims.counter.sent_bytes("cross"))
    return found


def test_what_a_rollout_sends_between_nodes_does_not_depend_on_its_length():
    for zeropp in (False, True):
        for short, long in ranks(2).run(cross_bytes, [1, 16], Layout(world=2, nodes=2, zeropp=zeropp)):
            assert 0 < short == long


def uneven(case: PostCase) -> list[int]:
    """Each data rank draws for another number of tokens, and for prompts of its own."""
    built, dims = build(case)
    limit = 2 + 9 * dims.data_rank
    loader = make_loader(case, built, dims)
    sampler = dataclasses.replace(loader.sampler, config=SampleConfig(sample_tokens=limit, sample_top_k=0))
    chosen = prompts()[dims.data_rank :]
    drawn, _ = sampler.draw(chosen, [f"{dims.data_rank} {i}" for i in range(len(chosen))])
    loader.step(0, case.global_batch)  # and they meet again
    return drawn.lengths.tolist()


def test_ranks_whose_texts_end_early_do_not_hang_the_others():
    first, second = ranks(2).run(uneven, PostCase(post=GRPO, layout=Layout(world=2)))
    assert (len(first), len(second)) == (6, 5)
    assert max(first) <= 2 < max(second)


def resumed(case: PostCase, stops: list[int]) -> list[tuple[list[Any], list[Any]]]:
    """The batches of the step after each of `stops`, of a run and of one that begins with what the first had there."""
    built, dims = build(case)
    loader, size, found = make_loader(case, built, dims), case.global_batch, []
    for index in range(max(stops) + 1):
        if index not in stops:
            loader.step(index * size, size)
            continue
        again, metrics, gathered = make_loader(case, built, dims), loader.metrics(), dict[str, torch.Tensor]()
        for each in dims.world.share_object(dims.world.gather_objects(loader.tensors())):
            gathered |= each
        again.accept(gathered, 0)
        found.append((loader.step(index * size, size), again.step(index * size, size)))
        same = {k: v for k, v in again.metrics().items() if not k.startswith("rollout/")}
        assert not gathered or same == {k: v for k, v in metrics.items() if not k.startswith("rollout/")}
    return found


@pytest.mark.parametrize("post", [LATER, dataclasses.replace(PPO, num_mini_batches=2)])
def test_a_buffer_goes_on_where_a_checkpoint_has_left_it(post):
    case = PostCase(post=post, layout=Layout(world=2, micro_batch_size=2))
    for of_rank in ranks(2).run(resumed, case, [1, 3, 4]):
        for straight, continued in of_rank:
            for one, other in zip(straight, continued, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert a is b is None or torch.equal(a, b)


def places_of(case: PostCase) -> list[list[int]]:
    """Which of the buffer's completions each step takes, by their tokens."""
    built, dims = build(case)
    loader, size, found = make_loader(case, built, dims), case.global_batch, list[list[int]]()
    for index in range(6):
        (batch,) = loader.step(index * size, size)
        known = loader._buffer.batch.tokens[:, : batch.tokens.shape[1]].tolist()
        found.append([known.index(row) for row in batch.tokens.tolist()])
    return found


def test_each_pass_goes_through_the_slices_in_turn():
    post = dataclasses.replace(PPO, num_ppo_epochs=3, num_mini_batches=2)
    (found,) = ranks(1).run(places_of, PostCase(post=post, layout=Layout(micro_batch_size=8)))
    assert found == [[*range(8)], [*range(8, 16)]] * 3


def kept_by(case: PostCase) -> dict[str, torch.Tensor]:
    built, dims = build(case)
    loader = make_loader(case, built, dims)
    loader.step(0, case.global_batch)
    return loader.tensors()


def half_ended(case: PostCase) -> dict[str, torch.Tensor]:
    """The buffer of one rank, every second of whose completions is told to have ended by itself."""
    built, dims = build(case)
    loader = make_loader(case, built, dims)
    draw = loader.sampler.draw

    def told(_: Any, prompts: Any, names: Any) -> Any:
        drawn, texts = draw(prompts, names)
        return drawn._replace(ended=torch.arange(len(prompts)) % 2 == 0), texts

    with mock.patch.object(type(loader.sampler), "draw", told):
        loader.step(0, case.global_batch)
    return {name.removeprefix("rollout.").removeprefix("0."): tensor for name, tensor in loader.tensors().items()}


def filled(post: PostTrainingConfig, **flags: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The buffer, and which of its rows have ended."""
    case = PostCase(post=dataclasses.replace(post, **flags), layout=Layout(micro_batch_size=8))
    (kept,) = ranks(1).run(half_ended, case)
    return kept, kept["rows"] % 2 == 0


def test_completions_that_the_limit_has_cut_are_left_out_of_the_loss_on_demand():
    (plain, ended), (masked, _) = filled(LATER), filled(LATER, mask_truncated_completions=True)
    assert torch.equal(masked["mask"][ended], plain["mask"][ended])
    assert plain["mask"][~ended].any(dim=1).all()
    assert not masked["mask"][~ended].any()


def test_completions_that_the_limit_has_cut_cost_the_penalty_once():
    """Undiscounted, a row's return at its first place is the sum of its rewards."""
    post = dataclasses.replace(PPO, whiten_rewards=False, gamma=1.0, lam=1.0, missing_eos_penalty=None)
    (plain, ended), (penalized, _) = filled(post), filled(post, missing_eos_penalty=0.75)
    first = plain["mask"].argmax(dim=1, keepdim=True)
    lost = (plain["returns"] - penalized["returns"]).gather(1, first).squeeze(1)
    assert lost.tolist() == pytest.approx(torch.where(ended, 0.0, 0.75).tolist(), abs=1e-5)


def taken_up(case: PostCase, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    built, dims = build(case)
    loader = make_loader(case, built, dims)
    loader.accept(tensors, 0)
    return [batch.tokens for batch in loader.step(case.global_batch, case.global_batch)]


def test_a_buffer_of_two_ranks_goes_on_on_one():
    tensors: dict[str, torch.Tensor] = {}
    for each in ranks(2).run(kept_by, PostCase(post=LATER, layout=Layout(world=2, micro_batch_size=2))):
        tensors |= each
    case = PostCase(post=LATER, layout=Layout(micro_batch_size=8))
    (one,) = ranks(1).run(taken_up, case, tensors)
    (same,) = ranks(1).run(taken_up, case, ranks(1).run(kept_by, case)[0])
    assert torch.equal(torch.cat(one), torch.cat(same))


def failing(case: PostCase) -> str:
    """The error of a rollout whose reward function divides by zero."""
    built, dims = build(case)
    loader = make_loader(case, built, dims)
    functions = [RewardFunction("broken", lambda completions, number: [1 / (n - n) for n in number])]
    loader.sampler = dataclasses.replace(loader.sampler, functions=functions)
    with pytest.raises(UserError) as caught:
        loader.step(0, case.global_batch)
    return str(caught.value)


def test_a_failing_reward_function_ends_all_ranks_with_the_sample_s_line():
    for message in ranks(2).run(failing, PostCase(post=GRPO, layout=Layout(world=2))):
        assert "reward function broken failed at p.jsonl, line " in message


def test_rows_are_picked_by_their_own_numbers_among_the_top_k_and_top_p():
    generator = torch.Generator().manual_seed(1)
    logits, uniform = torch.randn(50, 11, generator=generator), torch.rand(50, generator=generator, dtype=torch.float64)
    config = SampleConfig(sample_temperature=0.5, sample_top_k=4, sample_top_p=0.7)
    picked = pick_rows(logits, config, uniform)
    for row in range(50):
        scores = logits[row].double() / 0.5
        likely = scores.sort(descending=True).indices[:4]
        shares = torch.softmax(scores[likely], dim=0)
        kept = likely[shares.cumsum(0) - shares < 0.7]
        assert int(picked[row]) in kept.tolist()
        assert torch.equal(pick_rows(logits[row : row + 1], config, uniform[row : row + 1])[0], picked[row])
    many = pick_rows(
        logits[:1].expand(20000, -1),
        SampleConfig(sample_temperature=1.0, sample_top_k=0),
        torch.rand(20000, dtype=torch.float64, generator=generator),
    )
    shares = torch.bincount(many, minlength=11) / 20000
    torch.testing.assert_close(shares, torch.softmax(logits[0], dim=0), atol=0.015, rtol=0)


def rows_alone(case: PostCase) -> tuple[list[Any], list[Any]]:
    """A batch that shrinks while it is drawn, and each of its rows by itself."""
    built, dims = build(case)
    chosen = [prompt.tokens for prompt in prompts()]
    uniform = torch.rand(len(chosen), 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    config = SampleConfig(sample_tokens=12, sample_top_k=0, sample_temperature=1.0)

    def is_last(row: int, token: int) -> bool:
        counts[row] += 1
        return counts[row] == 1 + 2 * row

    with evaluating(built.model), built.sharding.kept_gathered():
        counts = [0] * len(chosen)
        together = draw_completions(built.model, dims.tp, chosen, config, uniform, ends=None, is_last=is_last)
        alone = []
        for row, tokens in enumerate(chosen):
            limit = dataclasses.replace(config, sample_tokens=1 + 2 * row)
            alone.append(draw_completions(built.model, dims.tp, [tokens], limit, uniform[row : row + 1], ends=None))
    rows = [(together.tokens[i, :n].tolist(), n) for i, n in enumerate(together.lengths.tolist())]
    assert together.ended.tolist() == [True] * len(chosen)
    for row, each in enumerate(alone):
        n = each.lengths[0]
        torch.testing.assert_close(together.logps[row, :n], each.logps[0], atol=1e-5, rtol=0)
    return rows, [(each.tokens[0].tolist(), int(each.lengths[0])) for each in alone]


def test_rows_that_are_over_leave_the_batch_and_the_others_go_on_as_if_alone():
    ((together, alone),) = ranks(1).run(rows_alone, PostCase(post=GRPO))
    assert together == alone
    assert [n for _, n in together] == [1, 3, 5, 7, 9, 11]
    assert SEQ >= 18


def penalized(case: PostCase) -> list[list[list[int]]]:
    """Greedy texts of a batch that shrinks, by both ways to draw, with a penalty and without."""
    built, dims = build(case)
    rows, found = [prompt.tokens for prompt in prompts()], []
    for penalty in (1e6, 1.0):
        config = SampleConfig(sample_tokens=12, sample_temperature=0.0, sample_repetition_penalty=penalty)
        ends = iter(range(99))
        with evaluating(built.model), built.sharding.kept_gathered():
            drawn = draw_completions(
                built.model,
                dims.tp,
                rows,
                config,
                torch.zeros(len(rows), 12, dtype=torch.float64),
                ends=None,
                is_last=lambda row, token, ends=ends: row < 4 and next(ends) == row,  # the first four end at once
            )
        texts = [drawn.tokens[i, :n].tolist() for i, n in enumerate(drawn.lengths.tolist())]
        new = generate(built.model, built.sharding, dims, rows, config, max_length=SEQ, seed=1).tokens
        found.append([own[:n] for own, n in zip(new, drawn.lengths.tolist(), strict=True)])
        assert texts == found[-1]
    return found


def test_a_penalty_keeps_both_ways_to_draw_from_repeating_the_prompt_and_the_text():
    for without_repeats, free in ranks(2).run(penalized, PostCase(post=GRPO, layout=Layout(world=2, tp=2))):
        for prompt, own in zip(prompts(), without_repeats, strict=True):
            assert len({*own, *prompt.tokens}) == len(own) + len({*prompt.tokens})
        assert any(len(set(own)) < len(own) for own in free)
        assert [len(own) for own in free] == [1, 1, 1, 1, 12, 12]
