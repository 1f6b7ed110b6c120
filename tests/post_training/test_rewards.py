"""Test reward functions: lookup by name, arguments, weights, and errors that name the function and the sample."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import not_refused

from megazpp.post_training.config import RewardConfig
from megazpp.post_training.formatting import Prompt
from megazpp.post_training.rewards import (
    RewardFunction,
    check_arguments,
    check_reward_functions,
    digest_of_sources,
    judge,
    load_reward_functions,
    reward_metrics,
    total_rewards,
)

USER = {"role": "user", "content": "1+2?"}
PROMPTS = [
    Prompt([1], "1+1=", {"answer": "2", "level": 1}, "a.jsonl, line 1"),
    Prompt([2], [USER], {"answer": "3"}, "a.jsonl, line 2"),
]
COMPLETIONS = ["2", "four"]

SOURCE = """
def right(prompts, completions, answer, **columns):
    assert columns == {"level": [1, None]}
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text == wanted) for text, wanted in zip(texts, answer)]

def short(completions):
    return [-len(str(each)) for each in completions]

def only_strings(prompts, completions):
    return [1 if isinstance(prompt, str) else None for prompt in prompts]

value = 3
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def named(*functions: Any) -> list[RewardFunction]:
    return [RewardFunction("f", function) for function in functions]


def test_reward_functions_are_imported_and_their_rewards_weighted(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    weights = (1.0, 0.5, 2.0)
    functions = load_reward_functions(
        RewardConfig(reward_funcs=(f"{file}:right", "my_rewards:short", f"{file}:only_strings"), reward_weights=weights)
    )
    rewards = judge(functions, PROMPTS, COMPLETIONS)
    message = str([{"role": "assistant", "content": "four"}])
    expected = torch.tensor([[1, -1, 1], [0, -len(message), math.nan]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, equal_nan=True, rtol=0, atol=0)
    assert total_rewards(rewards, weights).tolist() == [2.5, -len(message) / 2]
    assert total_rewards(rewards).tolist() == [1.0, float(-len(message))]
    twice = RewardConfig(reward_funcs=(f"{file}:short", "my_rewards:short", f"{file}:right"))
    names = [[each.name for each in found] for found in (functions, load_reward_functions(twice))]
    sys.modules.pop("my_rewards", None)
    assert names == [["right", "short", "only_strings"], [f"{file}:short", "my_rewards:short", "right"]]


def test_rewards_may_be_any_number_type_or_none():
    rewards = judge(named(lambda **_: [None, True], lambda **_: [None, torch.tensor(0.5)]), PROMPTS, COMPLETIONS)
    torch.testing.assert_close(rewards, torch.tensor([[math.nan] * 2, [1.0, 0.5]]).double(), equal_nan=True)
    torch.testing.assert_close(total_rewards(rewards), torch.tensor([math.nan, 1.5]).double(), equal_nan=True)


def test_reward_metrics_ignore_missing_rewards_and_use_group_sums():
    rewards = torch.tensor([[1.0, math.nan], [3.0, 2.0], [5.0, math.nan], [5.0, math.nan]], dtype=torch.float64)
    found = reward_metrics(["f", "g"], rewards, total_rewards(rewards), group_size=2)
    expected = {"rewards/f/mean": 3.5, "rewards/f/std": (11 / 3) ** 0.5, "rewards/g/mean": 2.0, "rewards/g/std": 0.0}
    # The total rewards are 1 and 5 in the first group of two completions, and 5 and 5 in the second group.
    expected |= {"reward": 4.0, "reward_std": 8**0.5 / 2, "frac_reward_zero_std": 0.5}
    assert found == pytest.approx(expected)
    alone = reward_metrics(["f", "g"], rewards, total_rewards(rewards), group_size=1)
    assert alone["reward_std"] == pytest.approx(2.0)
    assert "frac_reward_zero_std" not in alone


def test_failing_reward_function_is_named_with_the_sample():
    both = "a.jsonl, line 1 to a.jsonl, line 2"
    rows: list[tuple[Any, str]] = [
        (
            lambda completions: [float(str(each)) for each in completions],
            f"function f failed at {both}: ValueError: could not convert string to float: \"[{{'role': 'assistant'",
        ),
        (lambda completions: [1 / (len(completions) - 2)], f"failed at {both}: ZeroDivisionError"),
        (lambda **_: [1.0], f"reward function f gave 1 rewards for 2 completions, of {both}"),
        (lambda **_: [1.0, "x"], "reward function f gave 'x', not a finite fp32 number or None, for a.jsonl, line 2"),
        (lambda **_: [1.0, "2.0"], "reward function f gave '2.0', not a finite fp32 number or None"),
        (lambda **_: [math.nan, 1.0], "reward function f gave nan, not a finite fp32 number"),
        (lambda **_: [1.0, 1e39], "reward function f gave 1e+39, not a finite fp32 number"),
        (lambda **_: [1.0, 10**400], "not a finite fp32 number"),
        (lambda **_: 3.0, f"failed at {both}: TypeError"),
        (lambda **_: "11", f"failed at {both}: TypeError: it returned a str, not a list"),
        (lambda **_: {1.0: "a", 2.0: "b"}, f"failed at {both}: TypeError: it returned a dict, not a list"),
        (lambda **_: sys.exit(3), f"failed at {both}: SystemExit: 3"),
    ]
    assert not not_refused(rows, lambda function: judge(named(function), PROMPTS, COMPLETIONS))


def test_function_that_cannot_be_imported_is_named(file, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    unread = [
        (f"{tmp_path}/none.py:f", "No such file"),
        ("gone:f", "ModuleNotFound"),
        (f"{tmp_path}/syntax.py:f", "SyntaxError"),
        ("gone.part:f", "given as gone.part.py:f"),
        (f"{file}:missing", "has no function missing"),
    ]
    run = [
        (f"{file}:value", "no function value"),
        (f"{tmp_path}/broken.py:f", "ZeroDivisionError"),
    ]
    for rows, look in ((unread, check_reward_functions), ([*unread, *run], load_reward_functions)):
        assert not not_refused(rows, lambda name, look=look: look(RewardConfig(reward_funcs=(name,))))


ARGUMENTS = """
from __future__ import annotations
from dataclasses import dataclass

count = 0

@dataclass
class Kept:
    number: float

def tokens(completion_ids, **columns):
    global count
    count += 1
    return [float(len(each)) for each in completion_ids]

async def waits(completions, answer):
    return [Kept(float(count)).number for each in completions]

def wants(completions, solution, *, level=2):
    return [1.0] * len(completions)

def positional(completions, answer, /):
    return [1.0] * len(completions)
"""


def test_reward_functions_get_tokens_may_wait_and_share_their_file(tmp_path):
    path = tmp_path / "other_rewards.py"
    path.write_text(ARGUMENTS)
    functions = load_reward_functions(RewardConfig(reward_funcs=(f"{path}:tokens", f"{path}:waits")))
    check_arguments(functions, ["answer", "level"])
    rewards = judge(functions, PROMPTS, COMPLETIONS, [[5], [6, 7, 0]])
    assert rewards.tolist() == [[1.0, 1.0], [3.0, 1.0]]


def test_argument_that_a_reward_function_does_not_get_is_named_before_the_first_call(tmp_path):
    path = tmp_path / "other_rewards.py"
    path.write_text(ARGUMENTS)
    known = "only answer, completion_ids, completions, level, prompts, by name"
    for name, missing in (("wants", "'solution'"), ("positional", "'completions'")):
        functions = load_reward_functions(RewardConfig(reward_funcs=(f"{path}:{name}",)))
        with pytest.raises(ValueError, match=f"{name} requires the argument {missing}, but .* {known}"):
            check_arguments(functions, ["answer", "level"])
    wants = load_reward_functions(RewardConfig(reward_funcs=(f"{path}:wants",)))
    check_arguments(wants, ["solution"])


def test_digest_of_reward_functions_changes_with_their_file(file):
    digests = []
    for text in (SOURCE, SOURCE + "# changed on one host\n", SOURCE):
        file.write_text(text)
        digests.append(digest_of_sources([*load_reward_functions(RewardConfig(reward_funcs=(f"{file}:right",)))]))
    assert digests[0] == digests[2] != digests[1]
    assert digest_of_sources([RewardFunction("len", len)]) != digests[0]


def test_reward_functions_are_checked_without_running_their_file(file, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\nfrom math import *\ndef f(): pass")
    there = (f"{file}:right", f"{tmp_path}/broken.py:f", f"{tmp_path}/broken.py:cos", "math:f")
    check_reward_functions(RewardConfig(reward_funcs=there))
