"""Conversations to text by Jinja templates, as a tokenizer_config.json at Hugging Face has them.

A template is a program from elsewhere, so it runs in Jinja's sandbox, with what transformers gives it: `messages`,
`add_generation_prompt`, `tools`, `bos_token`, `eos_token` and the like, `raise_exception`, `strftime_now`, `tojson`.
What it writes between {% generation %} and {% endgeneration %} are the assistant's words; of a template without these
they are what each of the assistant's messages adds to the text.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megazpp.data.tokenizer import Tokenizer
from megazpp.data.tokenizer_folder import DESCRIPTION

Message = Mapping[str, Any]
Spans = tuple[str, list[tuple[int, int]]]

# ChatML in plain text; the assistant's turn ends with the end of a document, at which drawing ends
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
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEMPLATE_FILE = "chat_template.jinja"
# Unicode's noncharacters "for internal use": around the assistant's words until the text is complete
_BEGIN, _END = "\ufdd0", "\ufdd1"


class ChatTemplate:
    """A template that was read.

    Args:
        source: Jinja.
        name: of the template in messages.
        variables: what it is given beside the messages.
    Attributes:
        key: equal for templates that write the same text.
    Raises:
        ValueError: it is not Jinja.
    """

    def __init__(self, source: str, *, name: str, variables: Mapping[str, str] | None = None) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.source, self.name, self._variables = source, name, dict(variables or {})
        self.key: list[object] = [source, self._variables]
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{name}, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Sequence[object] | None = None
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with role and content.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: what the assistant may call, as JSON schemas.
        Raises:
            ValueError: the template does not take such a conversation.
        """
        return self._render(messages, add_generation_prompt, tools).replace(_BEGIN, "").replace(_END, "")

    def render_spans(self, messages: Sequence[Message], *, tools: Sequence[object] | None = None) -> Spans:
        """The text of a conversation, and the places in it, from and to, that are the assistant's words.

        Raises:
            ValueError: the template does not take such a conversation, or it does not tell whose words they are.
        """
        marked = self._render(messages, False, tools)
        if _BEGIN not in marked:
            return self._what_messages_add(messages, marked, tools)
        pieces, spans = marked.split(_BEGIN), []
        text = pieces[0]
        for piece in pieces[1:]:
            words, _, others = piece.partition(_END)
            spans.append((len(text), len(text) + len(words)))
            text += words + others
        return text, spans

    def _what_messages_add(self, messages: Sequence[Message], text: str, tools: Sequence[object] | None) -> Spans:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:number], add_generation_prompt=True, tools=tools)
                after = self.render(messages[: number + 1], tools=tools)
                if not (text.startswith(before) and after.startswith(before) and text.startswith(after)):
                    raise ValueError(
                        f"{self.name} does not tell which words are the assistant's: it has no {{% generation %}}, and"
                        f" its text of the first {number + 1} messages is not how its text of all begins"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[object] | None) -> str:
        for number, role in enumerate((message["role"] for message in messages), start=1):
            if not (role in _ROLES or any(f"{quote}{role}{quote}" in self.source for quote in "'\"")):
                raise ValueError(
                    f"message {number} has the role {role!r}, which is none of {', '.join(_ROLES)}, and {self.name} has"
                    " no such word"
                )
        try:
            return self._template.render(
                self._variables | {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # a template raises whatever its expressions do
            raise ValueError(f"{self.name}: {error}") from error


def load_chat_template(path: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of --chat-template, else the one among the tokenizer's files, else `DEFAULT_TEMPLATE`.

    Raises:
        ValueError: the file cannot be read, or what it holds is no template.
    """
    try:
        description = json.loads(tokenizer.files.get(DESCRIPTION, b"{}"))
    except ValueError:
        description = {}
    variables = {"eos_token": tokenizer.eod_name or "", "bos_token": ""}
    for name, token in description.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    source, name = DEFAULT_TEMPLATE, "the default chat template"
    found = description.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    if path is not None:
        name = f"--chat-template {path}"
        try:
            source = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} cannot be read: {error}") from error
    elif _TEMPLATE_FILE in tokenizer.files:
        source, name = tokenizer.files[_TEMPLATE_FILE].decode(), f"the tokenizer's {_TEMPLATE_FILE}"
    elif isinstance(found, str):
        source, name = found, f"the chat_template of the tokenizer's {DESCRIPTION}"
    return ChatTemplate(source, name=name, variables=variables)


class _Generation(jinja2.ext.Extension):
    """The tags {% generation %} and {% endgeneration %}: what is between them is marked."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return _BEGIN + caller() + _END


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})  # Jinja's own escapes for HTML


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
