"""Reward functions (--reward-funcs): Python callables that give rewards to sampled completions, as in TRL.

A reward function `f(prompts, completions, completion_ids, **columns)` returns a list with a number for each completion,
or None for a completion without a reward. `f` may be a coroutine function (async def). Each prompt is a string or a
list of messages, as in the data. Each completion is a string, or a list with one message of the assistant if the prompt
is a list of messages. `completion_ids` are the token ids of each completion, including the token that ended it.
`columns` are the other columns of the data, each as a list. All arguments are passed by name. A function without `**`
gets only the arguments that it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from megazpp.base.files import find_file
from megazpp.post_training.config import RewardConfig
from megazpp.post_training.formatting import Prompt
from megazpp.post_training.losses import nanstd

_GIVEN = ("prompts", "completions", "completion_ids")  # reward functions' arguments that are no columns of the data


class RewardFunction(NamedTuple):
    """A reward function that --reward-funcs names.

    Attributes:
        name: name of the function in metrics and messages: its Python name, or the value of the flag if two functions
            have the same Python name.
        function: the Python function.
    """

    name: str
    function: Callable[..., Sequence[float | None]]


def load_reward_functions(config: RewardConfig) -> list[RewardFunction]:
    """Import the reward functions that --reward-funcs names.

    Raises:
        ValueError: a module is missing, cannot be imported, or does not have the function.
    """
    functions = [(value, _load(value)) for value in config.reward_funcs]
    names = [value.rpartition(":")[2] for value, _ in functions]
    return [
        RewardFunction(name if names.count(name) == 1 else value, function)
        for name, (value, function) in zip(names, functions, strict=True)
    ]


def digest_of_sources(functions: Iterable[RewardFunction]) -> str:
    """Return a digest of the source files of reward functions, by which ranks check that their files are equal."""
    digest = hashlib.sha256()
    for each in functions:
        with contextlib.suppress(TypeError):  # leaves out functions in C, which have no source file
            digest.update(Path(inspect.getfile(each.function)).read_bytes())
    return digest.hexdigest()


def check_arguments(functions: Sequence[RewardFunction], columns: Iterable[str]) -> None:
    """Raise a ValueError if a reward function requires an argument that it does not get.

    Args:
        functions: reward functions to check.
        columns: names of the data's columns other than `prompt`, which are arguments of reward functions.
    """
    known = sorted({*_GIVEN, *columns})
    for each in functions:
        for name, parameter in inspect.signature(each.function).parameters.items():
            named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            starred = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if parameter.default is inspect.Parameter.empty and not starred and not (named and name in known):
                raise ValueError(
                    f"reward function {each.name} requires the argument {name!r}, but reward functions get only "
                    f"{', '.join(known)}, by name: rename the argument, or give it a default"
                )


def judge(
    functions: Sequence[RewardFunction],
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Call all reward functions for N completions.

    Args:
        functions: reward functions to call.
        prompts: prompt of each completion.
        completions: text of each completion.
        completion_ids: token ids of each completion; None if no function uses them.
    Returns:
        [N, functions] fp64 rewards; NaN where a function returns None.
    Raises:
        ValueError: a function fails, or does not return one number per completion. The message names the function and
            the line of the data.
    """
    values = [
        [{"role": "assistant", "content": text}] if isinstance(prompt.value, list) else text
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    columns = [_call(each, prompts, values, completion_ids) for each in functions]
    return torch.tensor(columns, dtype=torch.float64).reshape(len(functions), len(prompts)).t().contiguous()


def total_rewards(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Return the weighted sum of the rewards of each of N completions.

    Args:
        rewards: [N, functions] rewards; NaN for no reward, which the sum leaves out.
        weights: weight of each reward function; None for 1 each.
    Returns:
        [N] sums; NaN for a completion without any reward.
    """
    weighted = rewards if weights is None else rewards * rewards.new_tensor(weights)
    return weighted.nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)


def reward_metrics(
    names: Sequence[str], rewards: torch.Tensor, total: torch.Tensor, *, group_size: int
) -> dict[str, float]:
    """Return the metrics of a generation's rewards: means and standard deviations, by TRL's names.

    Args:
        names: names of the reward functions.
        rewards: [N, functions] rewards of all N completions; NaN for no reward.
        total: [N] weighted sums of the rewards; NaN for a completion without any reward.
        group_size: number of completions of each prompt, which are in sequence.
    """
    found: dict[str, float] = {}
    for name, column in zip(names, rewards.t(), strict=True):
        known = column[~column.isnan()]
        if len(known):
            found[f"rewards/{name}/mean"] = float(known.mean())
            found[f"rewards/{name}/std"] = float(known.std()) if len(known) > 1 else 0.0
    found["reward"] = float(total.nanmean())
    if group_size > 1:
        spread = nanstd(total.view(-1, group_size)).nan_to_num(0.0)
        found["reward_std"] = float(spread.mean())
        found["frac_reward_zero_std"] = float((spread < 1e-8).double().mean())
    elif len(known := total[~total.isnan()]) > 1:
        found["reward_std"] = float(known.std())
    return found


def check_reward_functions(config: RewardConfig) -> None:
    """Check before workers start that the modules of --reward-funcs exist, without running their code.

    The text of a file must also contain the function's name, unless a star import may define the function.

    Raises:
        ValueError: a file is missing, has a syntax error or does not contain the function's name, or a module is not
            installed.
    """
    for value in config.reward_funcs:
        module_name, _, name = value.rpartition(":")
        path = find_file(module_name)
        with _importing(value):
            if path.suffix == ".py":
                compile(source := path.read_bytes(), path, "exec", dont_inherit=True)
                if name.encode() not in source and b"import *" not in source:
                    raise AttributeError(f"the module has no function {name}")
            elif importlib.util.find_spec(module_name.partition(".")[0]) is None:
                raise ModuleNotFoundError(f"No module named {module_name!r}")


def _load(value: str) -> Callable[..., Any]:
    """Import the function that a value of --reward-funcs names, MODULE:FUNCTION or FILE.py:FUNCTION.

    Raises:
        ValueError: the module or the file cannot be imported, or it has no such function.
    """
    module_name, _, name = value.rpartition(":")
    path = find_file(module_name)
    with _importing(value):
        module = _load_file(path) if path.suffix == ".py" else importlib.import_module(module_name)
        if not callable(function := getattr(module, name, None)):
            raise AttributeError(f"the module has no function {name}")
    return function


def _load_file(path: Path) -> ModuleType:
    """Import the module in a Python file outside the import path, and return it; each file is run once per process.

    The module is registered in sys.modules, because parts of Python, such as dataclasses, look it up there.
    """
    name = f"megazpp_reward_file:{path.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@contextlib.contextmanager
def _importing(value: str) -> Iterator[None]:
    """Return a context that turns any error into a ValueError that names --reward-funcs and its value."""
    try:
        yield
    except Exception as error:
        module_name, _, name = value.rpartition(":")
        how = "" if module_name.endswith(".py") else f" (a file is given as {module_name}.py:{name})"
        raise ValueError(f"--reward-funcs {value}: cannot import it: {type(error).__name__}: {error}{how}") from error


def _call(
    each: RewardFunction,
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None,
) -> list[float]:
    """Call one reward function, and return its reward for each completion; NaN for None.

    Raises:
        ValueError: the function fails, or does not return one number per completion.
    """
    try:
        found: Any = each.function(**_arguments(each, prompts, completions, completion_ids))
        found = asyncio.run(found) if inspect.iscoroutine(found) else found
        if isinstance(found, str | bytes | Mapping):  # their items are characters or keys, which are no rewards
            raise TypeError(f"it returned a {type(found).__name__}, not a list with one number or None per completion")
        rewards = list(found)
    except (Exception, SystemExit) as error:  # a function that calls `sys.exit` would end only this rank
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward function {each.name} failed at {_places(prompts)}: {problem}") from error
    if len(rewards) != len(prompts):
        raise ValueError(
            f"reward function {each.name} gave {len(rewards)} rewards for {len(prompts)} completions,"
            f" of {_places(prompts)}: it must return a list with one number or None for each completion"
        )
    return [_number(each, value, prompt) for value, prompt in zip(rewards, prompts, strict=True)]


def _arguments(
    each: RewardFunction,
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None,
) -> dict[str, list[Any]]:
    """Return the arguments of one reward function, by name.

    A function with `**` gets all arguments; any other function gets only the arguments that it names.
    """
    names = list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    found: dict[str, list[Any]] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    found |= {"prompts": [prompt.value for prompt in prompts], "completions": list(completions)}
    found |= {} if completion_ids is None else {"completion_ids": list(completion_ids)}
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(each.function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return found
    return {name: values for name, values in found.items() if name in parameters}


def _places(prompts: Sequence[Prompt]) -> str:
    """Return the file and line of the first and of the last prompt as text, for error messages."""
    return f"{prompts[0].place} to {prompts[-1].place}" if prompts else "no prompts"


def _number(each: RewardFunction, value: Any, prompt: Prompt) -> float:
    """Return the reward that a reward function gave to a completion of `prompt`; NaN for None.

    Raises:
        ValueError: the reward is not a number, or is beyond the range of fp32.
    """
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max:  # losses are fp32; with `not`, NaN is refused too
        raise ValueError(
            f"reward function {each.name} gave {value!r:.80}, not a finite fp32 number or None, for {prompt.place}: "
            "correct the function"
        )
    return number
