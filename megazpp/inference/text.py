"""Text from a model: prompts in, continuations out, shown while they grow and ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.generate import Generated, generate
from megazpp.inference.sample import SampleConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import WeightHandle

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of the first bytes of a character


class Continuation:
    """The text of one row as its tokens come.

    Args:
        prompt: its tokens.
        stop: strings that end the text; the earliest counts, and is not part of it.
    Attributes:
        text: of the new tokens, as far as it will not change: no half character, no beginning of a stop string.
        over: it will not grow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens, self._skip = list(prompt), len(tokenizer.decode(prompt))  # a space may lie between the two
        self.text, self.over = "", False

    def add(self, token: int) -> bool:
        """A new token; returns whether it ends the text."""
        if token == self._tokenizer.eod:
            self.finish()
            return True
        self._tokens.append(token)
        text = self._decode()
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.text, self.over = text[: min(ends)], True
        else:
            self.text = text[: len(text) - self._uncertain(text)]
        return self.over

    def finish(self) -> None:
        """There are no more tokens: what was held back is text after all."""
        if not self.over:
            self.text, self.over = self._decode(), True

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens)[self._skip :]

    def _uncertain(self, text: str) -> int:
        """Count the last characters that may still change or turn out to begin a stop string."""
        half = len(text) - len(text.rstrip(UNFINISHED))
        text = text[: len(text) - half]
        begun = [n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return half + max(begun, default=0)


class Stream:
    """Writes prompts and continuations in order: the first that is not over grows, later ones wait for it."""

    def __init__(self, prompts: Sequence[str], rows: Sequence[Continuation], out: TextIO) -> None:
        self._prompts, self._rows, self._out = prompts, rows, out
        self._row = self._written = 0

    def show(self) -> None:
        """Write what is new."""
        while self._row < len(self._rows):
            row = self._rows[self._row]
            if not self._written:
                self._out.write(self._prompts[self._row])
                self._written = 1
            self._out.write(row.text[self._written - 1 :])
            self._written = 1 + len(row.text)
            if not row.over:
                break
            self._out.write("\n")
            self._row, self._written = self._row + 1, 0
        self._out.flush()


def continue_texts(
    model: GPTModel,
    sharding: WeightHandle,
    dims: ParallelDims,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    config: SampleConfig,
    *,
    out: TextIO | None = None,
    **options: Any,
) -> tuple[list[str], Generated]:
    """Continue `prompts`: texts without the prompts, each to its end-of-document token or stop string.

    Args:
        out: where prompts and texts are shown as they grow.
        options: see `generate`.
    """
    starts = [tokenizer.encode(prompt) or [tokenizer.eod or 0] for prompt in prompts]
    rows = [Continuation(tokenizer, start, config.stops) for start in starts]
    stream = None if out is None else Stream(prompts, rows, out)

    def is_last(row: int, token: int) -> bool:
        over = rows[row].add(token)
        if stream is not None:
            stream.show()
        return over

    generated = generate(model, sharding, dims, starts, config, is_last=is_last, **options)
    for row in rows:
        row.finish()
    if stream is not None:
        stream.show()
    return [row.text for row in rows], generated
