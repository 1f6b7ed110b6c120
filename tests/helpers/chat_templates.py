"""Small chat templates for tests of rendering, each with one feature of published templates, and conversations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

TOOL = {"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"a": {"type": "int"}}}}
ASK, TELL = {"role": "user", "content": "money?"}, {"role": "assistant", "content": "never mind"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK: list[dict[str, Any]] = [SYSTEM, ASK, TELL, {"role": "user", "content": " two  "}, {**TELL, "content": "me"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLS = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, TELL]
PARTS = [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}, TELL]
THOUGHT = {"role": "assistant", "content": "yes", "reasoning_content": "think so"}


class Chat(NamedTuple):
    """A test case of rendering.

    Attributes:
        template: Jinja template, or a list of named templates.
        messages: conversation to render.
        columns: further columns of the data set's row, which a template may read.
    """

    template: Any
    messages: list[dict[str, Any]] = TALK
    columns: Mapping[str, Any] = MappingProxyType({})


EACH = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
CHATML = EACH % "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
MARKED = EACH % (
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
)
LATE = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
THINKS = EACH % (
    "{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}<think>{{ m.reasoning_content }}</think>"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}" + EACH % (
    "{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}\n"
)
NESTED = (
    "{%- macro turn(m) -%}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{%- endmacro -%}\n"
    + EACH % "{{ turn(m) }}"
)
CHATS: dict[str, Chat] = {
    "ChatML": Chat(CHATML),
    "generation blocks": Chat(MARKED),
    "end of turn after the block": Chat(LATE),
    "system in the first user turn": Chat(
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        + EACH.replace("in messages", "in messages if m.role != 'system'")
        % "{{ m.role }}: {% if loop.first %}{{ system }}\n\n{% endif %}{{ m.content }}{{ eos_token }}"
    ),
    "bos and trim": Chat("{{ bos_token }}" + EACH % "[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}"),
    "macro": Chat(NESTED),
    "loop controls": Chat(
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "namespace": Chat(
        "{% set ns = namespace(n=0) %}" + EACH % "{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ m.content }}{{ eos_token }}"
    ),
    "blocks on separate lines": Chat(
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nQ: {{ m.content }}\n    {% else %}\n"
        "A: {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    ),
    "tools": Chat(WITH_TOOLS, TALK, {"tools": [TOOL]}),
    "tools in a string": Chat(WITH_TOOLS, CALLS, {"tools": '[{"name": "add", "parameters": {"b": null}}]'}),
    "calls and results": Chat(WITH_TOOLS, CALLS, {"tools": [TOOL]}),
    "documents": Chat(
        "{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}" + CHATML,
        TALK,
        {"documents": [{"title": "A", "text": "b"}, {"title": "C", "text": "d"}]},
    ),
    "reasoning_content": Chat(THINKS, [ASK, THOUGHT]),
    "reasoning": Chat(THINKS, [ASK, {"role": "assistant", "content": "yes", "reasoning": "because"}]),
    "thinking": Chat(THINKS, [ASK, {"role": "assistant", "content": "yes", "thinking": "perhaps", "name": None}]),
    "a template that reads thinking": Chat(EACH % "{{ m.thinking }}|{{ m.content }}{{ eos_token }}", [ASK, THOUGHT]),
    "chat_template_kwargs": Chat(
        EACH % "{{ m.content }}{{ eos_token }}"
        + "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}",
        TALK,
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    "chat_template_kwargs in a string": Chat(
        EACH % "{{ tone }}{{ m.content }}{{ eos_token }}", TALK, {"chat_template_kwargs": '{"tone": "kind: "}'}
    ),
    "several named templates": Chat(
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": WITH_TOOLS}]
    ),
    "several named templates, with tools": Chat(
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": WITH_TOOLS}],
        CALLS,
        {"tools": [TOOL]},
    ),
    "parts of text": Chat(
        EACH % "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}", PARTS[:1]
    ),
    "parts or a string": Chat(
        EACH % "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}"
        "{% endif %}{{ eos_token }}",
        PARTS,
    ),
    "developer": Chat(CHATML, [{"role": "developer", "content": "é"}, ASK, TELL]),
    "JSON of non-ASCII text": Chat(
        "{{ messages | tojson }}{{ eos_token }}", [{"role": "user", "content": "naïve < 🐳"}, TELL]
    ),
}
