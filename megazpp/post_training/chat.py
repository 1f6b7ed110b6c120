"""Conversion of conversations (lists of messages) to text by Jinja chat templates, which transformers renders.

With --assistant-only-loss, supervised training predicts only the assistant's words. A template can mark these words by
{% generation %} and {% endgeneration %}. In a template without these tags, the assistant's words are the text that each
message of the assistant adds to the rendered conversation.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megazpp.base.files import errors_as, find_file, read_small_file
from megazpp.data.tokenizer import Tokenizer
from megazpp.data.tokenizer_folder import import_package, with_template
from megazpp.post_training.config import ChatConfig, parse_json, parse_object

Message = Mapping[str, Any]
# The text of a conversation, and the ranges (start, end) of its characters that are the assistant's words
Spans = tuple[str, list[tuple[int, int]]]

# Template for tokenizers without a template: ChatML in plain text, without special tokens. The assistant's turn ends
# with the end-of-document token, at which generation stops.
DEFAULT_TEMPLATE = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + (eos_token or '<|im_end|>') }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
RENDER_SECONDS = 10.0  # limit of the CPU time for rendering one conversation
# CPU time of rendering after which the process is killed: Python cannot interrupt some expressions of a template after
# RENDER_SECONDS
KILL_SECONDS = 30.0
MOST_CHARACTERS = 20_000_000  # limit of a rendered conversation's length; this many characters are millions of tokens
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Pattern that occurs in the source of chat templates which handle messages whose content is a list of parts. Other
# templates expect strings, so `_joined` makes one string of the parts for them.
_READS_PARTS = re.compile(r"""\.type\b|\[\s*['"]type['"]\s*\]|\bis (not )?(string|iterable)\b""")
# A conversation for finding out how a template ends the assistant's turn
_PROBE = [{"role": role, "content": "dummy"} for role in ("user", "assistant", "user")]


class ChatTemplate:
    """The chat template of a run, with the variables that every conversation is rendered with.

    Args:
        tokenizer: tokenizer with the special tokens, and with the template if `source` is None.
        source: Jinja source of the template; None for the template that transformers selects from the tokenizer's
            templates, or `DEFAULT_TEMPLATE` if the tokenizer has none.
        name: description of the template for error messages, such as "--chat-template FILE".
        variables: further variables of the template, such as the values of --chat-template-kwargs.
        system_prompt: system message to put before conversations that have none; None adds no message.
    Attributes:
        key: part of cache keys of tokenized data; two templates with equal keys render the same text.
        used: True once this run has rendered a conversation with the template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None = None,
        *,
        name: str = "the tokenizer's chat template",
        variables: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self._tokenizer, self._source, self.name, self.used = tokenizer, source, name, False
        self._variables = {**tokenizer.variables, **(variables or {})}
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self.key: list[object] = [self.source(None), self.source([{}]), self._variables, system_prompt]

    def source(self, tools: Sequence[object] | None) -> str:
        """Return the Jinja source with which a conversation is rendered.

        Args:
            tools: descriptions of the conversation's tools; None for a conversation without tools. A tokenizer may have
                another template for conversations with tools.

        Raises:
            ValueError: the tokenizer has several templates, and none of them is the default.
        """
        return self._source or self._tokenizer.chat_template(None, tools) or DEFAULT_TEMPLATE

    @property
    def is_default(self) -> bool:
        """True if neither a flag nor the tokenizer has a template, so that `DEFAULT_TEMPLATE` is used."""
        return self._source is None and self._tokenizer.chat_template() is None

    def files(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return a tokenizer's files for a checkpoint, with the chat template that this run has used.

        Args:
            files: contents of the tokenizer's files, by name.

        Returns:
            the files. They are unchanged if the tokenizer has no files, or if the run has rendered no conversation or
            has used the tokenizer's own template.
        """
        changes = self.used and (self._source is not None or self._tokenizer.chat_template() is None)
        return with_template(files, self.source(None)) if changes and files else dict(files)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, options: Mapping[str, Any] = {}
    ) -> str:
        """Render a conversation as one text.

        Args:
            messages: messages of the conversation, each with role and content.
            add_generation_prompt: True to end the text with the beginning of the assistant's next turn.
            options: template variables for this conversation only, see `options_of`.
        Raises:
            ValueError: the template refuses the conversation, or transformers is not installed.
        """
        return self._render(messages, options, add_generation_prompt=add_generation_prompt)[0]

    def render_spans(self, messages: Sequence[Message], *, options: Mapping[str, Any] = {}) -> Spans:
        """Render a conversation as one text, and find the assistant's words in the text.

        Args:
            messages: messages of the conversation, each with role and content.
            options: template variables for this conversation only, see `options_of`.

        Returns:
            the text, and the ranges (start, end) of characters that are the assistant's words.

        Raises:
            ValueError: the template refuses the conversation, or the assistant's words cannot be located.
        """
        if _GENERATION.search(self.source(options.get("tools"))):
            return self._render(messages, options, return_assistant_tokens_mask=True)
        text, spans = self.render(messages, options=options), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:number], add_generation_prompt=True, options=options)
                after = self.render(messages[: number + 1], options=options)
                if not (text.startswith(before) and after.startswith(before) and text.startswith(after)):
                    raise ValueError(
                        f"{self.name} does not tell which words are the assistant's: it has no {{% generation %}}, and"
                        f" the text of all messages does not begin with the text of the first {number + 1}; add"
                        " {% generation %} and {% endgeneration %} to the template"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def trains_end_of_turn(self) -> bool:
        """Return True if the assistant's words in a rendered conversation end with a token that can stop generation.

        Any added token of the tokenizer, such as a special token, counts as such a token. If the assistant's words end
        with another token, a model that is trained on these words alone does not learn to end its turn. The result is
        also True if the template refuses the test conversation `_PROBE`, because nothing is known about it then.

        Source: TRL 1.16, `is_chat_template_stop_token_trained`.
        """
        try:
            text, spans = self.render_spans(_PROBE)
        except ValueError:
            return True
        found = self._tokenizer.encode_spans(text, add_special_tokens=False)
        words = [
            token
            for token, (first, last) in zip(found.ids, found.spans, strict=True)
            if any(first < end and last > start for start, end in spans)
        ]
        decoded = (token for token in reversed(words) if self._tokenizer.decode_with_specials([token]).strip())
        return next(decoded, None) in self._tokenizer.added_ids

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any], **how: bool) -> Spans:
        """Render a conversation; return its text, and the character ranges of the assistant's words.

        Args:
            messages: messages of the conversation.
            options: template variables for this conversation only.
            **how: options of transformers' `render_jinja_template`. Without `return_assistant_tokens_mask` the list of
                ranges is empty.

        Raises:
            ValueError: the template does not handle a message's role, does not read tools, documents or tool calls of
                the conversation, or fails.
        """
        source = self.source(options.get("tools"))
        for number, role in enumerate((message["role"] for message in messages), start=1):
            if not (role in _ROLES or any(f"{quote}{role}{quote}" in source for quote in "'\"")):
                raise ValueError(
                    f"message {number} has the role {role!r}, which is none of {', '.join(_ROLES)}, and {self.name}"
                    " does not contain it: correct the role, or give a template that handles it"
                )
        given = {name for name in ("tools", "documents") if options.get(name)}
        given |= {"tool_calls" for message in messages if message.get("tool_calls")}
        if unread := [name for name in sorted(given) if name not in source]:
            raise ValueError(
                f"{self.name} does not read {' and '.join(map(repr, unread))} of the conversation, so its text would "
                "lack them: give a template that reads them by --chat-template, or remove them from the data"
            )
        if not messages or messages[0]["role"] not in ("system", "developer"):
            messages = [*self._system, *messages]
        if not _READS_PARTS.search(source):
            messages = [_joined(message) for message in messages]
        self.used = True
        texts, spans = _compiled(source, self.name, [messages], **{**self._variables, **options, **how})
        return texts[0], spans[0] if spans else []


def load_chat_template(config: ChatConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template that --chat-template names.

    Without the flag, return the tokenizer's template, or `DEFAULT_TEMPLATE` if the tokenizer has none.

    Raises:
        ValueError: the file of the template cannot be read, is JSON or no Jinja template, or does not read messages.
    """
    path, source, name = config.chat_template, None, "the tokenizer's chat template"
    if path is not None:
        name = f"--chat-template {path}"
        source = tokenizer.chat_template(path)
        if source is None or source == path:  # the tokenizer has no template of this name, so the flag names a file
            with errors_as(f"{name} cannot be read", (OSError, UnicodeDecodeError)):
                source = read_small_file(find_file(path)).decode("utf-8-sig")
        _compiled(source, name, [])
        # Jinja accepts any text. A text that does not read `messages` would replace every conversation, whose words
        # would be lost. A model's chat_template.json and tokenizer_config.json have a template as a JSON string. As
        # Jinja source they would put JSON's braces and backslashes into every conversation.
        if "messages" not in source or _is_json(source):
            raise ValueError(
                f"{name} is not a chat template: it is JSON, or does not read `messages`. Give a file with a Jinja "
                "template (of a model's chat_template.json: jq -r .chat_template chat_template.json > FILE)"
            )
    elif tokenizer.chat_template() is None:
        name = "the default chat template"
    variables = parse_object(config.chat_template_kwargs, "--chat-template-kwargs")
    return ChatTemplate(tokenizer, source, name=name, variables=variables, system_prompt=config.system_prompt)


def _is_json(text: str) -> bool:
    """Return True if a text is a valid JSON document."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables for one conversation, from a line of data.

    They come from the columns `tools`, `documents` and `chat_template_kwargs`. Each column holds a JSON value, or a
    string that contains JSON, as in TRL's format for tools. A column that is null, or the string "null", is left out.

    Raises:
        ValueError: one of the columns has another type.
    """
    parsed = {name: parse_json(record.get(name), repr(name)) for name in ("tools", "documents")}
    found = {name: value for name, value in parsed.items() if value is not None}
    for name, value in found.items():
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise ValueError(f"{name!r} is {value!r:.80}, not a list of objects: correct this column of the data")
    return found | parse_object(record.get("chat_template_kwargs"), "'chat_template_kwargs'")


def _compiled(source: str, name: str, conversations: list[Any], **options: Any) -> tuple[list[str], list[Any]]:
    """Render conversations with a Jinja template by transformers.

    Args:
        source: Jinja source of the template.
        name: description of the template for error messages.
        conversations: lists of messages; an empty list only checks that the template compiles.
        **options: variables of the template, and options of transformers' `render_jinja_template`.

    Returns:
        the text of each conversation, and a list with the ranges of the assistant's words in each conversation. The
        list is empty if `options` do not request the ranges.
    """
    utilities = import_package("transformers", "a conversation").utils.chat_template_utils
    try:
        with _time_limit():
            texts, spans = utilities.render_jinja_template(conversations=conversations, chat_template=source, **options)
    except Exception as error:  # catch every type of error, because expressions in a template can raise any
        line = getattr(error, "lineno", None)
        problem = str(error) or type(error).__name__  # a MemoryError has no text
        raise ValueError(f"{name}{'' if line is None else f', line {line}'}: {problem}") from error
    if (length := max(map(len, texts), default=0)) > MOST_CHARACTERS:
        raise ValueError(
            f"{name}: a conversation's text has {length:,} characters, more than {MOST_CHARACTERS:,}; shorten the "
            "conversation, or correct the template"
        )
    for text in texts:
        # Raise a UnicodeEncodeError (a ValueError) for half a surrogate pair: some tokenizers would raise a TypeError
        # for it, which is not reported as a mistake in the data
        text.encode()
    return texts, spans


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Return a context that raises a TimeoutError after `RENDER_SECONDS` of CPU time.

    The limit is needed because a chat template is a program from the tokenizer's author, which may loop for hours. Only
    the main thread can use the context, because Python handles signals in that thread only.

    A single expression, such as a power of large numbers, may compute in C for hours, and Python raises the
    TimeoutError only after it. After `KILL_SECONDS` of CPU time, SIGPROF therefore prints the Python stack and ends the
    process.
    """

    def stop(*_: object) -> None:
        raise TimeoutError(
            f"rendering a conversation took more than {RENDER_SECONDS:g} seconds of CPU time: the chat template may "
            "loop without end; correct the template, or give another one by --chat-template"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    faulthandler.register(signal.SIGPROF, file=2, all_threads=False, chain=True)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, KILL_SECONDS)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0.0)
        faulthandler.unregister(signal.SIGPROF)
        signal.signal(signal.SIGVTALRM, before)


def _joined(message: Message) -> Message:
    """Join the text parts of a message to one string, for a chat template that expects strings; return the message.

    A message whose content is already a string is returned unchanged.
    """
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message
