"""Templates write what transformers makes of them, and tell which words are the assistant's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from megazpp.data.tokenizer import ByteTokenizer, HFTokenizer
from megazpp.data.tokenizer_folder import DESCRIPTION
from megazpp.post_training.chat import DEFAULT_TEMPLATE, ChatTemplate, load_chat_template

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '2 < 3 & "so"?'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "naïve 🐳?"},
    {"role": "assistant", "content": "No — never."},
]
PLAIN = """\
{%- for message in messages %}
    {%- if loop.index0 == 0 and message.role == 'tool' %}{{ raise_exception('no tool may begin') }}{% endif %}
    {{- bos_token + '[' + message.role + '] ' + message.content | trim + eos_token }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<s>[assistant] ' }}{% endif %}
"""
MARKED = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
A: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message.role }}: {{ message.content }}
{% endif %}
{% endfor %}
"""
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")), **VARIABLES
    )


@pytest.mark.parametrize("source", [PLAIN, MARKED, DEFAULT_TEMPLATE])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_template_writes_what_transformers_makes_of_it(
    reference: PreTrainedTokenizerFast, source: str, prompt: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {}}}]
    template = ChatTemplate(source, name="it", variables=VARIABLES)
    for messages in (TURNS, TURNS[:2], TURNS[1:3]):
        for given in (None, tools):
            theirs = reference.apply_chat_template(
                messages, chat_template=source, tools=given, add_generation_prompt=prompt, tokenize=False
            )
            assert template.render(messages, add_generation_prompt=prompt, tools=given) == theirs


@pytest.mark.parametrize("source", [PLAIN, MARKED, DEFAULT_TEMPLATE])
def test_the_assistants_words_are_found_with_and_without_marks(source: str) -> None:
    template = ChatTemplate(source, name="it", variables=VARIABLES)
    text, spans = template.render_spans(TURNS)
    assert text == template.render(TURNS)
    found = [text[first:last] for first, last in spans]
    assert [words.removesuffix("\n") for words in found] == ["Yes.</s>", "No — never.</s>"]


def test_a_template_whose_beginning_changes_with_the_end_does_not_tell_whose_words_they_are() -> None:
    template = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", name="T")
    with pytest.raises(ValueError, match="T does not tell which words are the assistant's: it has no"):
        template.render_spans(TURNS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "T: roles must alternate"),
        ("{{ messages[0].content + 3 }}", "T: can only concatenate"),
        ("{{ messages.__class__.__mro__ }}", "T: access to attribute '__class__'"),
        ("{% set _ = messages.append(1) %}", "T: access to attribute 'append'"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_error_with_its_name(source: str, message: str) -> None:
    with pytest.raises(ValueError, match="T: ") as caught:
        ChatTemplate(source, name="T").render(TURNS)
    assert message in str(caught.value)


def test_the_template_is_the_flags_else_the_tokenizers_else_the_default(tmp_path: Any) -> None:
    definition = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<e>": 1}, unk_token="a")).to_str()

    def tokenizer(**files: object) -> HFTokenizer:
        contents = {
            name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in files.items()
        }
        return HFTokenizer(definition, eod="<e>", files={"tokenizer.json": definition.encode(), **contents})

    described: dict[str, Any] = {
        "eos_token": {"content": "<e>"},
        "bos_token": "<b>",
        "chat_template": "{{ bos_token }}D",
    }
    named = described | {"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "N"}]}
    (tmp_path / "t.jinja").write_text("F{{ eos_token }}")
    for path, files, text in [
        (str(tmp_path / "t.jinja"), {DESCRIPTION: described}, "F<e>"),
        (None, {DESCRIPTION: described}, "<b>D"),
        (None, {DESCRIPTION: named}, "N"),
        (None, {DESCRIPTION: described, "chat_template.jinja": b"J"}, "J"),
        (None, {}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<e>\n"),
    ]:
        template = load_chat_template(path, tokenizer(**files))
        assert template.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]) == text
    assert load_chat_template(None, ByteTokenizer()).render(TURNS[2:3]).endswith("Yes.<|endoftext|>\n")
    (tmp_path / "bad.jinja").write_text("one\n{% if %}")
    with pytest.raises(ValueError, match=r"--chat-template .*bad.jinja, line 2: Expected an expression"):
        load_chat_template(str(tmp_path / "bad.jinja"), ByteTokenizer())
    with pytest.raises(ValueError, match="--chat-template nowhere cannot be read"):
        load_chat_template("nowhere", ByteTokenizer())
