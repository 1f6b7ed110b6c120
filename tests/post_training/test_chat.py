"""Templates write what transformers makes of them, and tell which words are the assistant's."""

import itertools
import json
from typing import Any

import pytest
import tokenizers
from helpers.refusals import not_refused
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


@pytest.mark.parametrize("source", [PLAIN, MARKED, DEFAULT_TEMPLATE])
def test_a_template_writes_what_transformers_makes_of_it_and_tells_the_assistants_words(source):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    reference = PreTrainedTokenizerFast(tokenizer_object=words, **VARIABLES)
    tools = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {}}}]
    template = ChatTemplate(source, name="it", variables=VARIABLES)
    for messages, given, prompt in itertools.product((TURNS, TURNS[:2], TURNS[1:3]), (None, tools), (False, True)):
        options: dict[str, Any] = {"tools": given, "add_generation_prompt": prompt}
        theirs = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        assert template.render(messages, **options) == theirs
    text, spans = template.render_spans(TURNS)
    assert text == template.render(TURNS)
    found = [text[first:last].removesuffix("\n") for first, last in spans]
    assert found == ["Yes.</s>", "No — never.</s>"]


def test_what_a_template_refuses_or_may_not_do_is_an_error_with_its_name():
    rows = [
        ("{{ raise_exception('roles must alternate') }}", "T: roles must alternate"),
        ("{{ messages[0].content + 3 }}", "T: can only concatenate"),
        ("{{ messages.__class__.__mro__ }}", "T: access to attribute '__class__'"),
        ("{% set _ = messages.append(1) %}", "T: access to attribute 'append'"),
        ("{{ messages | length }}", "T does not tell which words are the assistant's: it has no"),
    ]
    assert not not_refused(rows, lambda source: ChatTemplate(source, name="T").render_spans(TURNS))


def test_the_template_is_the_flags_else_the_tokenizers_else_the_default(tmp_path):
    (tmp_path / "t.jinja").write_text("F{{ eos_token }}")
    (tmp_path / "bad.jinja").write_text("one\n{% if %}")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<e>": 1}, unk_token="a")).to_str()
    definition = {"tokenizer.json": words.encode()}
    tokens = {"eos_token": {"content": "<e>"}, "bos_token": "<b>"}
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "N"}]
    plain = json.dumps(tokens | {"chat_template": "{{ bos_token }}D"}).encode()
    for path, files, text in [
        (str(tmp_path / "t.jinja"), {DESCRIPTION: plain}, "F<e>"),
        (None, {DESCRIPTION: plain}, "<b>D"),
        (None, {DESCRIPTION: json.dumps(tokens | {"chat_template": named}).encode()}, "N"),
        (None, {DESCRIPTION: plain, "chat_template.jinja": b"J"}, "J"),
        (None, {}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<e>\n"),
    ]:
        template = load_chat_template(path, HFTokenizer(words, eod="<e>", files=definition | files))
        assert template.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]) == text
    assert load_chat_template(None, ByteTokenizer()).render(TURNS[2:3]).endswith("Yes.<|endoftext|>\n")
    refused = [
        (str(tmp_path / "bad.jinja"), "bad.jinja, line 2: Expected an expression"),
        ("nowhere", "--chat-template nowhere cannot be read"),
    ]
    assert not not_refused(refused, lambda path: load_chat_template(path, ByteTokenizer()))
