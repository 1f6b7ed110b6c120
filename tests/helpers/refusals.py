"""Check tables of rejected inputs: each row holds an input and a piece of the expected error message."""

from collections.abc import Callable, Iterable
from typing import Any


def table(text: str) -> list[tuple[str, ...]]:
    """Return the cells of each line of `text`, a table with ` | ` between columns. Blanks around cells are removed."""
    return [tuple(map(str.strip, line.split(" | "))) for line in text.strip().splitlines()]


def not_refused(
    rows: Iterable[tuple[Any, ...]], ask: Callable[..., object], kind: type[Exception] = ValueError
) -> list[str]:
    """Return a description of each row whose input does not raise the expected error; [] if all do.

    Args:
        rows: arguments of `ask`, followed by a piece of the expected message.
        ask: function that should reject the arguments.
        kind: type of the expected exception.
    """
    wrong = []
    for *words, message in rows:
        try:
            ask(*words)
            wrong.append(f"{words}: nothing was raised")
        except kind as error:
            if message not in str(error):
                wrong.append(f"{words}: {error}")
    return wrong
