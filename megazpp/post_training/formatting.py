"""Conversion of lines of post-training data to tokens and loss masks.

This is one file of more than 300 lines, because all formats of lines share their columns and helpers. The formats:

    columns                         objectives         meaning
    messages                        sft                a conversation; loss on all of it, or on the assistant's words
    prompt, completion              sft                loss on the completion
    text                            sft                loss on the whole text
    prompt, chosen, rejected        reward, dpo        two answers to the prompt; `chosen` is preferred
    chosen, rejected                reward, dpo        two answers; their common beginning is the prompt
    prompt, any other columns       grpo, ppo          the reward functions get the other columns

With the objective reward, a column `margin` may hold the number by which the preferred answer's score should be higher.

A conversation is a list of messages, each with a role and a content. `messages` holds a conversation, and `text` a
string. Each of `prompt`, `completion`, `chosen` and `rejected` holds a conversation or a string. A chat template
converts a conversation to text, and alone decides how this text ends. After `text`, and after an answer that is a
string, the tokenizer's end-of-document token is added. Prompt and answer are tokenized as one text, and a token with
characters of both belongs to the answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megazpp.data.cache import cache_key, load_or_save_arrays
from megazpp.data.documents import kind_of, read_records
from megazpp.data.text import content_hash
from megazpp.data.tokenizer import Tokenizer
from megazpp.post_training.chat import ChatTemplate, Message, options_of
from megazpp.post_training.config import DataFormatConfig

T = TypeVar("T")
Record = Mapping[str, Any]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
# A text, the ranges (start, end) of its characters that are trained on, and True if the tokenizer adds special tokens
# and the end-of-document token. For a text from a chat template the third value is False, because the template has
# written the special tokens itself (as in TRL 1.16).
Text = tuple[str, list[tuple[int, int]], bool]
# Columns that may hold conversations, or variables of their chat templates
_CHAT = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "documents", "chat_template_kwargs")
_SAME = "'chosen' and 'rejected' are the same"
_SUPERVISED = "'messages', nor 'prompt' and 'completion', nor 'text'"


class Examples(NamedTuple):
    """The tokens of all examples of a dataset, concatenated.

    A supervised example is one row. Pair i is two rows: row 2i has its preferred and row 2i + 1 its rejected answer.

    Attributes:
        tokens: [T] int32 token ids of all rows, T tokens in all.
        mask: [T] uint8 loss mask, 1 where the token is to be predicted; 0 at the first token of each row.
        starts: [rows + 1] int64 index of each row's first token in `tokens`, and T at the end.
        counts: [8] int64, eight numbers in this order: all examples in the files; examples that were cut to
            --max-length; examples that were left out because no token of the answer remained; examples whose answer
            begins inside a token; pairs that were left out because both answers are the same; the index of the file
            with the first such pair; the number of this pair's line; and conversations.
        margins: [pairs] fp32 values of the column `margin`, 0 for pairs without one; empty if the column was not read.
    """

    tokens: Ids
    mask: Mask
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    margins: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)

    def row(self, number: int) -> tuple[Ids, Mask]:
        """Return token ids and loss mask of row `number`: a supervised example, or prompt and one answer of a pair."""
        part = slice(*self.starts[number : number + 2].tolist())
        return self.tokens[part], self.mask[part]


class Prompt(NamedTuple):
    """A prompt of the data, for which completions are sampled.

    Attributes:
        tokens: token ids of the prompt, at least one, up to the place where the answer begins.
        value: value of the column `prompt` in the data, a string or a list of messages.
        columns: values of the line's other columns, which reward functions get.
        place: file and line of the prompt, for error messages.
    """

    tokens: list[int]
    value: str | list[Message]
    columns: dict[str, Any]
    place: str


def read_examples(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: DataFormatConfig,
    *,
    pairs: bool,
    margins: bool = False,
    cache_dir: Path | None,
    log: Callable[[str], None] = lambda line: None,
    seconds: float = math.inf,
) -> Examples:
    """Read and tokenize examples for supervised training, or pairs of answers. The tokens are cached.

    Args:
        paths: files of JSON lines or Parquet.
        tokenizer: tokenizer of the texts.
        template: chat template that converts conversations to text.
        config: flags of the data format.
        pairs: True to read pairs of answers, False to read supervised examples.
        margins: True to read the column `margin` of pairs as well.
        cache_dir: folder in which tokenized files are cached; None keeps the tokens in memory only.
        log: function that prints a line: before files are tokenized, and about the result.
        seconds: time limit for a check of the data. Each file gets an equal part. The default reads all lines.
    Raises:
        ValueError: a line does not have the expected columns, or no example is left. The message names the line.
        TimeoutError: the time limit has passed, and all lines read so far are correct.
    """
    # ---- tokenize, or read the cache
    texts = _pair_texts if pairs else _supervised_texts

    def build() -> Examples:
        found = _tokenize(
            paths, tokenizer, config.max_length, lambda record: texts(record, template, config), seconds, margins
        )
        return found if margins else Examples(*found[:4])

    if cache_dir is None:
        examples = build()
    else:
        # 7 and 6 are the versions of the cached arrays with and without margins. Raise one if its arrays change.
        key = cache_key(
            kind=f"examples-{7 if margins else 6} {texts.__name__}",
            data=content_hash(paths),
            tokenizer=tokenizer.identity,
            template=template.key,
            flags=[config.max_length, config.assistant_only_loss, config.completion_only_loss],
        )
        path = cache_dir / "examples" / key
        if not path.exists():
            log(f"tokenizing {_names(paths)}")
        examples = Examples(*load_or_save_arrays(path, build))
    # ---- report the numbers of examples in the log
    total, cut, empty, within, same, file, line, conversations = examples.counts.tolist()
    template.used |= conversations > 0
    if config.assistant_only_loss and not template.trains_end_of_turn():
        log(
            f"WARNING: --assistant-only-loss: the assistant's words in {template.name} do not end with a token that "
            "can stop generation, so the model does not learn to stop: put the token that ends the turn before "
            "{% endgeneration %}, or name it with --eos-token"
        )
    log(
        f"{total:,} examples with {len(examples.tokens):,} tokens in all: {_names(paths)}"
        + (f"; {cut:,} were cut to --max-length {config.max_length}, so raise it to train on their ends" if cut else "")
        + (f"; {empty:,} of them left out, because no token of their answers is left" if empty else "")
        + (f"; {same:,} of them left out, because {_SAME}, the first at {paths[file]}, line {line}" if same else "")
        + (
            f"; note: the answers of {within:,} begin inside a token of their prompt, unlike sampled completions: "
            "move a space at the end of a prompt to the answer"
            if within
            else ""
        )
    )
    return examples


def read_prompts(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    max_prompt_length: int,
    seconds: float = math.inf,
) -> list[Prompt]:
    """Read and tokenize the prompts of all lines, for the sampling of completions.

    Args:
        paths: files of JSON lines or Parquet.
        tokenizer: tokenizer of the texts.
        template: chat template that converts conversations to text.
        max_prompt_length: largest allowed number of tokens of a prompt.
        seconds: time limit for a check of the data. Each file gets an equal part. The default reads all lines.
    Raises:
        ValueError: a line has no usable prompt or too long a prompt, or the files have no line.
        TimeoutError: the time limit has passed, and all lines read so far are correct.
    """

    def read(record: Record) -> tuple[list[int], str | list[Message], dict[str, Any]]:
        columns = {name: each for name, each in record.items() if name != "prompt"}
        value, ids = prompt_ids(record, tokenizer, template)
        if len(ids) > max_prompt_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but --max-length leaves {max_prompt_length} for it after"
                " --max-completion-length: shorten the prompt, or change one of these flags"
            )
        return ids, value, columns

    prompts = [Prompt(*found, f"{path}, line {number}") for path, number, found in _each(paths, read, seconds)]
    if not prompts:
        raise ValueError(f"{_names(paths)}: there is no prompt, because the files have no lines")
    return prompts


def prompt_ids(record: Record, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[str | list[Message], list[int]]:
    """Return the prompt of a line of data: the value of the column `prompt`, and its token ids.

    A conversation's token ids include the beginning of the assistant's turn. The model needs at least one token, so an
    empty prompt becomes the end-of-document token, or token 0 of a tokenizer without this token.
    """
    _check_text_only(record)
    value = _value(record, "prompt")
    if isinstance(value, str):
        ids = tokenizer.encode_prompt(value)
    else:
        ids = tokenizer.encode_spans(_render_prompt(template, value, record), add_special_tokens=False).ids
    return value, ids or [tokenizer.eod or 0]


def _check_text_only(record: Record) -> None:
    """Raise a ValueError if a line of data has images. TRL's trainers would insert these into the messages."""
    for name in ("image", "images"):
        if record.get(name):
            raise ValueError(f"the column {name!r} holds images, but only text is supported; remove or rename it")


def _supervised_texts(record: Record, template: ChatTemplate, config: DataFormatConfig) -> list[Text]:
    """Return a list with one `Text` for a line of supervised data: its text, and the character ranges to train on.

    Raises:
        ValueError: the line lacks the columns of supervised data, has a value of the wrong type, or has images.
    """
    _check_text_only(record)
    if record.get("messages") is not None:
        messages = _value(record, "messages")
        if isinstance(messages, str):
            raise ValueError("'messages' is a string, not a list of messages: a string belongs in 'text'")
        return [(*_conversation(messages, record, template, config), False)]
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = _value(record, "prompt"), _value(record, "completion")
        return [_answer(prompt, completion, "completion", record, template, config)]
    if record.get("text") is None:
        raise ValueError(f"there is neither {_SUPERVISED}, only {_columns(record)}: add or rename columns")
    text = _value(record, "text")
    if not isinstance(text, str):
        raise ValueError("'text' is a list, not a string: a conversation belongs in 'messages'")
    return [_string(text, 0, config)]


def _pair_texts(record: Record, template: ChatTemplate, config: DataFormatConfig) -> list[Text]:
    """Return two `Text` for a pair of answers: the prompt with the preferred and the prompt with the rejected answer.

    A `Text` has the text, and the character ranges to train on. The list is empty if both answers are the same.
    """
    _check_text_only(record)
    chosen, rejected = _value(record, "chosen"), _value(record, "rejected")
    if chosen == rejected:
        return []
    if record.get("prompt") is not None:
        prompt = _value(record, "prompt")
    elif type(chosen) is not type(rejected):
        raise ValueError("one of 'chosen' and 'rejected' is a string, the other a conversation: give the same type")
    else:
        same = _same(chosen, rejected)
        if isinstance(chosen, str) and chosen[:same].endswith(" "):
            same -= 1  # a space between prompt and answers belongs to the answers, as in TRL
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    # The loss of pairs is always on the answers, so drop the flags that decide where supervised examples have a loss
    config = DataFormatConfig(max_length=config.max_length)
    answers = {"chosen": chosen, "rejected": rejected}
    return [_answer(prompt, answer, name, record, template, config) for name, answer in answers.items()]


def _answer(
    prompt: str | list[Message],
    answer: str | list[Message],
    name: str,
    record: Record,
    template: ChatTemplate,
    config: DataFormatConfig,
) -> Text:
    """Join prompt and answer of a line of data, and return one `Text` with the character ranges that are trained on.

    Args:
        prompt: the prompt, a string or a conversation.
        answer: the answer, a string or the following messages of the conversation.
        name: name of the answer's column, for error messages.
        record: the line of data, which may have variables of the chat template.
        template: chat template that converts conversations to text.
        config: flags of the data format.
    """
    if isinstance(prompt, str) and isinstance(answer, str):
        return _string(prompt + answer, len(prompt) if config.completion_only_loss else 0, config)
    if isinstance(answer, str):
        raise ValueError(f"'prompt' is a conversation and {name!r} a string: both must have the same type")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if answer and not any(message["role"] == "assistant" for message in answer):
        raise ValueError(f"{name!r} has no message of the role 'assistant', which an answer must have: add it")
    if answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]  # some datasets repeat the prompt in the answer
    text, spans = _conversation([*prompt, *answer], record, template, config)
    asked = _render_prompt(template, prompt, record)  # raises a ValueError if the prompt ends with an answer
    if config.completion_only_loss:
        # The answer starts where the text of the prompt and the text of the conversation first differ. This may be
        # before the prompt's end, because a template may begin the assistant's turn differently after a prompt.
        start = _same(asked, text)
        if start < len(asked) and not text.startswith(template.render(prompt, options=options_of(record))):
            raise ValueError(
                f"{template.name} renders the messages of 'prompt' differently if {name!r} follows, so the answer's "
                "beginning is unknown: give a template whose text of a conversation begins with the text of its first "
                "messages, or train supervised runs on all words with --no-completion-only-loss"
            )
        spans = [(max(start, first), last) for first, last in spans if last > start]
    return text, spans, False


def _string(text: str, start: int, config: DataFormatConfig) -> Text:
    """Return the `Text` of a string that is no conversation; its characters from `start` on are trained on.

    Raises:
        ValueError: --assistant-only-loss is set, which requires a conversation.
    """
    if config.assistant_only_loss:
        raise ValueError("--assistant-only-loss needs a conversation (a list of messages), but this is a string")
    return text, [(start, len(text))], True


def _conversation(
    messages: Sequence[Message], record: Record, template: ChatTemplate, config: DataFormatConfig
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the ranges of characters that are trained on.

    The ranges are the assistant's words with --assistant-only-loss, and the complete text otherwise.
    """
    if config.assistant_only_loss:
        return template.render_spans(messages, options=options_of(record))
    text = template.render(messages, options=options_of(record))
    return text, [(0, len(text))]


def _render_prompt(template: ChatTemplate, prompt: Sequence[Message], record: Record) -> str:
    """Return the text of a prompt that is a conversation, up to the beginning of the assistant's answer.

    Raises:
        ValueError: the last message is already the assistant's, or the template cannot render the conversation.
    """
    if prompt and prompt[-1]["role"] == "assistant":
        raise ValueError(
            "the last message of 'prompt' is the assistant's, so there is nothing to answer: move this message to the "
            "answer's column, or remove it"
        )
    return template.render(prompt, add_generation_prompt=True, options=options_of(record))


def _value(record: Record, name: str) -> Any:
    """Return the value of a column of a line of data: a string, or a list of messages.

    Raises:
        ValueError: the column is missing, or its value has another type.
    """
    value = record.get(name)
    if value is None:
        raise ValueError(f"there is no {name!r}, only {_columns(record)}: add or rename the column")
    if isinstance(value, str):
        value.encode()  # raises an error for half a surrogate pair, which JSON can contain but UTF-8 cannot
        return value
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    ):
        raise ValueError(
            f"{name!r} is neither a string nor a list of messages, objects with 'role' and 'content': "
            "correct this column of the data"
        )
    return [_message(each, f"message {number} of {name!r}") for number, each in enumerate(value, start=1)]


def _message(message: Mapping[str, Any], name: str) -> Message:
    """Return a message of a conversation without its null values, as transformers does.

    Args:
        message: the message, with a role.
        name: description of the message for error messages.

    Raises:
        ValueError: the message has no content, or content that is not text.
    """
    found = {key: value for key, value in message.items() if value is not None}
    content, others = found.get("content"), found.keys() - {"role", "name", "content"}
    if content is None and not any(found[key] for key in others):
        raise ValueError(f"{name} has the role {found['role']!r} and no content: give a text under 'content'")
    if isinstance(content, list):
        found["content"] = content = [_without_nulls(part) for part in content]
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise ValueError(
                    f"{name} has a part that is not text: {part!r:.80}; only parts {{'type': 'text', 'text': ...}} are "
                    "supported"
                )
    elif not isinstance(content, str | None):
        raise ValueError(f"{name} has the content {content!r:.80}, neither a string nor a list of parts: correct it")
    return found


def _columns(record: Record) -> str:
    """Return the names of the columns of a line of data that are not null, with commas, for error messages."""
    return ", ".join(repr(name) for name, value in record.items() if value is not None) or "an empty object"


def _same(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common beginning of two strings, or of two lists of messages."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tokenize(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    max_length: int,
    texts: Callable[[Record], list[Text]],
    seconds: float,
    with_margins: bool,
) -> Examples:
    """Read and tokenize all lines of the data, and count the examples that are cut or left out.

    Args:
        paths: files of JSON lines or Parquet.
        tokenizer: tokenizer of the texts.
        max_length: largest number of tokens of a row; longer rows are cut.
        texts: function that returns the texts of a line: one for a supervised example, two for a pair of answers, and
            none for a pair that is left out.
        seconds: time limit, see `read_examples`.
        with_margins: True to read the column `margin`.
    """

    def encode(record: Record) -> tuple[list[tuple[Ids, Mask, bool]], bool, float]:
        found = texts(record)
        margin = _margin(record) if with_margins else 0.0
        return [_encode(*text, tokenizer) for text in found], not all(ends for _, _, ends in found), margin

    tokens: list[Ids] = []
    masks: list[Mask] = []
    margins: list[float] = []
    total = cut = empty = within = same = conversations = 0
    first = (0, 0)
    for path, number, (rows, is_conversation, margin) in _each(paths, encode, seconds):
        total += 1
        conversations += is_conversation
        cut += any(len(ids) > max_length for ids, _, _ in rows)
        within += any(begins_within for _, _, begins_within in rows)
        shown, learned = [ids[:max_length] for ids, _, _ in rows], [mask[:max_length] for _, mask, _ in rows]
        if not all(mask.any() for mask in learned):
            empty += 1
        elif not rows or (len(rows) == 2 and np.array_equal(shown[0], shown[1])):
            same, first = same + 1, first if same else (paths.index(path), number)
        else:
            tokens += shown
            masks += learned
            margins.append(margin)
    if not tokens:
        why = f"no example has an answer within --max-length {max_length}" if total else "there is no example"
        raise ValueError(
            f"{_names(paths)}: {why}, so there is nothing to train on: check the data"
            + (f"; {_SAME}, first in line {first[1]}" if same else "")
        )
    starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    counts = np.array([total, cut, empty, within, same, *first, conversations])
    return Examples(np.concatenate(tokens), np.concatenate(masks), starts, counts, np.array(margins, dtype=np.float32))


def _margin(record: Record) -> float:
    """Return the number by which the preferred answer's score should be higher: the column `margin` of a line, or 0.

    Raises:
        ValueError: the column has another value than a finite number.
    """
    value = 0.0 if record.get("margin") is None else record["margin"]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"'margin' is {value!r:.80}, but must be a finite number: correct this column")
    return float(value)


def _encode(text: str, learned: Sequence[tuple[int, int]], ends: bool, tokenizer: Tokenizer) -> tuple[Ids, Mask, bool]:
    """Tokenize a text, and compute its loss mask.

    Args:
        text: text to tokenize.
        learned: ranges (start, end) of characters that are trained on.
        ends: True to add the tokenizer's special tokens and the end-of-document token.
        tokenizer: tokenizer of the text.

    Returns:
        the token ids; the loss mask; and True if one of the ranges begins inside a token. The mask is 1 where a token
        has a character that is trained on, and at tokens that are added after a range at the end of the text. The mask
        is always 0 at the first token.
    """
    # For a token that stands for one byte of a character, some tokenizers report an empty range of characters. Count
    # such a token as one character wide, so that it overlaps the ranges that are trained on.
    ids, spans = tokenizer.encode_spans(text, add_special_tokens=ends)
    places = np.array(spans, dtype=np.int64).reshape(-1, 2)
    first, last = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
    mask = np.zeros(len(ids) + 1, dtype=np.uint8)
    within = False
    for start, stop in learned:
        # Extend a range that stops at the end of the text by one, to include tokens that the tokenizer adds at the end
        mask[:-1] |= (first < stop + (stop == len(text))) & (last > start)
        within |= bool(((first < start) & (last > start)).any())
    if (
        ends
        and tokenizer.eod is not None
        and not (text.endswith(tokenizer.eod_name or "\0") or ids[-1:] == [tokenizer.eod])
    ):
        ids, mask[-1] = [*ids, tokenizer.eod], 1
    mask = mask[: len(ids)]
    mask[:1] = 0
    return np.array(ids, dtype=np.int32), mask, within


def _each(paths: Sequence[Path], read: Callable[[Record], T], seconds: float) -> Iterator[tuple[Path, int, T]]:
    """Read all lines of the data; yield the file, the line number and the result of `read` for each line.

    Parquet gives all objects of a column the same keys. So a null inside a conversation of a Parquet file means that
    the key is missing in this object. Such keys are removed in the columns `_CHAT`, which may hold conversations.

    Args:
        paths: files of JSON lines or Parquet.
        read: function that converts a line; its ValueErrors get the file and the line in their messages.
        seconds: time limit, divided equally among the files; infinite to read all lines.

    Raises:
        ValueError: a file cannot be read, or `read` refuses a line.
        TimeoutError: the time limit has passed, and all lines read so far are correct.
    """

    def without_nulls(record: Record) -> T:
        return read({name: _without_nulls(value) if name in _CHAT else value for name, value in record.items()})

    cut = False
    for path in paths:
        stop = time.monotonic() + seconds / len(paths)
        is_parquet = path.is_file() and kind_of(path) == "parquet"
        for number, found in read_records(path, without_nulls if is_parquet else read):
            yield path, number, found
            if time.monotonic() > stop:
                cut = True
                break
    if cut:
        raise TimeoutError


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose values are null, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _names(paths: Sequence[Path]) -> str:
    return " ".join(path.name for path in paths)
