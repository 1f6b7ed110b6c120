"""Tables of refusals: each row names what is asked for and the words of the ValueError that answers it."""

from collections.abc import Callable, Iterable
from typing import Any


def table(text: str) -> list[tuple[str, ...]]:
    """The rows of a table written with ` | ` between its columns."""
    return [tuple(map(str.strip, line.split(" | "))) for line in text.strip().splitlines()]


def not_refused(
    rows: Iterable[tuple[Any, ...]], ask: Callable[..., object], kind: type[Exception] = ValueError
) -> list[str]:
    """A line for each row (arguments of `ask`, message) that raises no error of that kind with that message."""
    wrong = []
    for *words, message in rows:
        try:
            ask(*words)
            wrong.append(f"{words}: nothing was raised")
        except kind as error:
            if message not in str(error):
                wrong.append(f"{words}: {error}")
    return wrong
