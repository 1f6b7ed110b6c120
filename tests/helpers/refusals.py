"""Tables of rejected inputs: each row holds an input and a part of the expected error message."""

from collections.abc import Callable, Iterable
from typing import Any


def table(text: str) -> list[tuple[str, ...]]:
    """Return the rows of a table written with ` | ` between its columns."""
    return [tuple(map(str.strip, line.split(" | "))) for line in text.strip().splitlines()]


def not_refused(
    rows: Iterable[tuple[Any, ...]], ask: Callable[..., object], kind: type[Exception] = ValueError
) -> list[str]:
    """Return a line for each row that does not raise an error of type `kind` with the row's message.

    Args:
        rows: arguments of `ask`, followed by a part of the expected message.
        ask: function that should raise.
        kind: expected exception type.
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
