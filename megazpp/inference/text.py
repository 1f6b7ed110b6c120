"""Generate text: continue prompts, print each text while it grows, and end it at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

from megazpp.data.tokenizer import Tokenizer
from megazpp.inference.config import SampleConfig
from megazpp.inference.generate import Generated, generate
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.zero.sharding import WeightHandle

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode the first bytes of an incomplete character to this


class Start(NamedTuple):
    """The beginning of a text that the model continues.

    Attributes:
        ids: token ids of the beginning, at least one.
        shown: text that is printed for the beginning.
    """

    ids: list[int]
    shown: str


def start_of(prompt: str, tokenizer: Tokenizer) -> Start:
    """Tokenize a prompt as the beginning of a text; an empty prompt becomes an end-of-document token."""
    return Start(tokenizer.encode_prompt(prompt) or [tokenizer.eod or 0], prompt)


def check_start(start: Start, longest: int, name: str, *, advice: str = "") -> Start:
    """Check that the beginning of a text is not longer than the model accepts, and return the beginning unchanged.

    Args:
        start: beginning of a text.
        longest: longest input of the model, in tokens.
        name: source of the text for the error message, such as a flag.
        advice: clause about what to do, which ends the error message.
    Raises:
        ValueError: the beginning has more than `longest` tokens.
    """
    if len(start.ids) > longest:
        end = f": {advice}" if advice else ""
        raise ValueError(f"{name} has {len(start.ids)} tokens, and the model takes at most {longest}{end}")
    return start


def split_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[list[int], list[str]]:
    """Divide the stop strings of a text into special tokens and other strings.

    Args:
        tokenizer: tokenizer of the model.
        stops: strings that end a text. Some may be names of special tokens.
    Returns:
        the token ids that end a text, which are `Tokenizer.stop_ids` and the special tokens in `stops`; and the other
        strings.
    """
    special = [tokenizer.special_ids[stop] for stop in stops if stop in tokenizer.special_ids]
    return [*tokenizer.stop_ids, *special], [stop for stop in stops if stop not in tokenizer.special_ids]


class Continuation:
    """The text that continues one prompt, while its tokens are generated one by one.

    Args:
        tokenizer: tokenizer of the model.
        prompt: token ids of the prompt.
        stop: strings that end the text. The text ends before the first stop string in it. A stop string may contain
            special tokens, which are left out of the text as well.
    Attributes:
        text: the part of the new tokens' text that further tokens cannot change. While the text grows, an incomplete
            character and a possible beginning of a stop string at its end are left out.
        over: True once the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, (self._ends, self._stop) = tokenizer, split_stops(tokenizer, stop)
        self._names = [name for name in tokenizer.special_ids if any(name in stop for stop in self._stop)]
        # Decode prompt and new tokens together, to keep a space between them. The first `_skip` characters of the
        # decoded text are the prompt's. If stop strings contain special tokens (`_names`), the tokens are also decoded
        # with special tokens. The first `_whole_skip` characters of that text are the prompt's.
        self._tokens, self._skip = list(prompt), len(tokenizer.decode(prompt))
        self._whole_skip = len(tokenizer.decode_with_specials(self._tokens)) if self._names else 0
        self.text, self.over = "", False

    def add(self, token: int) -> bool:
        """Add the next generated token id to the text, and return True if this token ends the text."""
        if token in self._ends:
            self.finish()
            return True
        self._tokens.append(token)
        text = whole = self._decode()
        if self._names:
            whole = self._tokenizer.decode_with_specials(self._tokens)[self._whole_skip :]
        ends = [place for stop in self._stop if (place := whole.find(stop)) >= 0]
        if ends:
            self.text, self.over = whole[: min(ends)], True
            for name in self._tokenizer.special_ids if self._names else ():
                self.text = self.text.replace(name, "")
        else:
            # Hold back the last characters: further tokens may change them, or complete a stop string
            known = text.rstrip(UNFINISHED)
            begun = [n for stop in self._stop for n in range(1, len(stop)) if known.endswith(stop[:n])]
            self.text = known[: len(known) - max(begun, default=0)]
        return self.over

    def finish(self) -> None:
        """End the generated text. Characters that were held back become part of it."""
        if not self.over:
            self.text, self.over = self._decode(), True

    def _decode(self) -> str:
        """Return the text of all new tokens, without the prompt."""
        return self._tokenizer.decode(self._tokens)[self._skip :]


class Stream:
    """Printer of prompts and their continuations while they are generated.

    The first incomplete text is printed while it grows. Later texts are printed only after it is complete, so that
    texts appear in the order of the prompts.

    Args:
        starts: beginnings of the texts.
        rows: continuation of each beginning.
        out: file to which the texts are printed.
    """

    def __init__(self, starts: Sequence[Start], rows: Sequence[Continuation], out: TextIO) -> None:
        self._starts, self._rows, self._out = starts, rows, out
        # `_row` is the index of the text that is printed. `_written` is 0 until the beginning of this text is printed,
        # and then 1 plus the number of printed characters after the beginning.
        self._row = self._written = 0

    def show(self) -> None:
        """Print the characters of the texts that have been generated since the last call."""
        while self._row < len(self._rows):
            row = self._rows[self._row]
            if not self._written:
                self._out.write(self._starts[self._row].shown)
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
    starts: Sequence[Start],
    config: SampleConfig,
    *,
    out: TextIO | None = None,
    **options: Any,
) -> tuple[list[str], Generated]:
    """Continue texts until a stop string, a token that ends a text, or the largest number of tokens.

    All ranks call this.

    Args:
        model: model that continues the texts.
        sharding: handle to the model's weights.
        dims: mesh axes of the job.
        tokenizer: tokenizer of the model.
        starts: beginnings of the texts.
        config: sampling settings.
        out: file to which beginnings and texts are printed as they grow; None prints nothing.
        options: further arguments of `generate`.
    Returns:
        the texts without their beginnings, and the generated tokens with their time.
    """
    rows = [Continuation(tokenizer, start.ids, config.stops) for start in starts]
    stream = None if out is None else Stream(starts, rows, out)

    def is_last(row: int, token: int) -> bool:
        over = rows[row].add(token)
        if stream is not None:
            stream.show()
        return over

    ids = [start.ids for start in starts]
    generated = generate(model, sharding, dims, ids, config, is_last=is_last, **options)
    for row in rows:
        row.finish()
    if stream is not None:
        stream.show()
    return [row.text for row in rows], generated
