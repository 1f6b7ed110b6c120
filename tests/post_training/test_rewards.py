"""Reward functions are found by name, get what they ask for, and are named with the sample when they fail."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megazpp.post_training.examples import Prompt
from megazpp.post_training.rewards import (
    RewardConfig,
    RewardFunction,
    check_reward_functions,
    judge,
    load_reward_functions,
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
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def one(function: Any) -> list[RewardFunction]:
    return [RewardFunction("f", function)]


def test_functions_of_files_and_modules_are_found_and_their_rewards_weighted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(file.parent)
    config = RewardConfig(
        reward_funcs=(f"{file}:right", "my_rewards:short", f"{file}:only_strings"), reward_weights=(1.0, 0.5, 2.0)
    )
    functions = load_reward_functions(config)
    sys.modules.pop("my_rewards", None)
    assert [each.name for each in functions] == ["right", "short", "only_strings"]
    rewards = judge(functions, PROMPTS, COMPLETIONS)
    message = str([{"role": "assistant", "content": "four"}])
    expected = torch.tensor([[1, -1, 1], [0, -len(message), math.nan]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, equal_nan=True, rtol=0, atol=0)
    assert total_rewards(rewards, config.reward_weights).tolist() == [2.5, -len(message) / 2]
    assert total_rewards(rewards).tolist() == [1.0, float(-len(message))]


def test_a_completion_that_no_function_judges_has_no_reward() -> None:
    rewards = judge(one(lambda **_: [None, 0.0]), PROMPTS, COMPLETIONS)
    torch.testing.assert_close(total_rewards(rewards), torch.tensor([math.nan, 0.0]).double(), equal_nan=True)


def test_two_functions_of_one_name_are_told_apart(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(SOURCE)
    config = RewardConfig(reward_funcs=(f"{file}:short", f"{other}:short", f"{file}:right"))
    assert [each.name for each in load_reward_functions(config)] == [f"{file}:short", f"{other}:short", "right"]


def test_a_function_that_raises_is_named_with_the_sample_at_which_it_does() -> None:
    def fails(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        return [float(each if isinstance(each, str) else each[0]["content"]) for each in completions]

    with pytest.raises(ValueError, match=r"function f failed at a.jsonl, line 2, completion .*'four'.*ValueError"):
        judge(one(fails), PROMPTS, COMPLETIONS)

    def fails_together(completions: list[Any]) -> list[float]:
        raise RuntimeError("too many") if len(completions) > 1 else StopIteration

    with pytest.raises(ValueError, match=r"failed at a.jsonl, line 1, completion '2': RuntimeError: too many"):
        judge(one(fails_together), PROMPTS, COMPLETIONS)

    def fails_only_together(completions: list[Any]) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(ValueError, match=r"failed at a.jsonl, line 1 to a.jsonl, line 2: RuntimeError"):
        judge(one(fails_only_together), PROMPTS, COMPLETIONS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "gave 1 rewards for 2 completions, of a.jsonl, line 1 to a.jsonl, line 2"),
        ([1.0, "x"], "gave 'x', not a finite number, for a.jsonl, line 2"),
        ([math.nan, 1.0], "gave nan, not a finite number, for a.jsonl, line 1"),
        (3.0, "failed at a.jsonl, line 1 to a.jsonl, line 2: TypeError"),
    ],
)
def test_rewards_that_are_not_a_number_for_each_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="reward function f") as caught:
        judge(one(lambda **_: value), PROMPTS, COMPLETIONS)
    assert message in str(caught.value)


def test_numbers_may_be_of_any_kind() -> None:
    rewards = judge(one(lambda **_: [torch.tensor(0.5), True]), PROMPTS, COMPLETIONS)
    assert rewards.tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"reward_funcs": ("right",)}, "--reward-funcs right is not module:function"),
        ({"reward_funcs": ("a:b-c",)}, "--reward-funcs a:b-c is not module:function"),
        ({"reward_funcs": ("a:b", "a:b")}, "--reward-funcs a:b a:b names a function twice"),
        ({"reward_funcs": ("a:b",), "reward_weights": (1.0, 2.0)}, "--reward-weights 1.0 2.0 has 2 weights for the 1"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="--reward") as caught:
        RewardConfig(**flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("function", "refusals"),
    [
        (load_reward_functions, {"FILE:value": "no function value", "FOLDER/broken.py:f": "ZeroDivisionError"}),
        (check_reward_functions, {"FOLDER/syntax.py:f": "SyntaxError", "gone.part:f": "given as gone.part.py:f"}),
    ],
)
def test_what_cannot_be_imported_is_named(file: Path, tmp_path: Path, function: Any, refusals: dict[str, str]) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    both = {"FILE:missing": "has no function missing", "FOLDER/none.py:f": "No such file", "gone:f": "ModuleNotFound"}
    for name, message in (both | refusals).items():
        given = name.replace("FILE", str(file)).replace("FOLDER", str(tmp_path))
        with pytest.raises(ValueError, match="--reward-funcs ") as caught:
            function(RewardConfig(reward_funcs=(given,)))
        assert message in str(caught.value)


def test_what_can_be_there_is_found_without_running_anything(file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\nfrom math import *\ndef f(): pass")
    there = (f"{file}:right", f"{tmp_path}/broken.py:f", f"{tmp_path}/broken.py:cos", "math:f")
    check_reward_functions(RewardConfig(reward_funcs=there))
