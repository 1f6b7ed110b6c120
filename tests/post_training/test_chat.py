"""Compare the text, token ids and loss masks of conversations with transformers' apply_chat_template."""

import functools
import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import transformers
from helpers.chat_templates import (
    ASK,
    CALLS,
    CHATML,
    CHATS,
    EACH,
    LATE,
    MARKED,
    TALK,
    TELL,
    THINKS,
    TOOL,
    WITH_TOOLS,
    Chat,
)
from helpers.hf_tokenizers import added, llama2, llama3, qwen2, unigram
from helpers.refusals import not_refused
from helpers.tiers import chosen

from megazpp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer
from megazpp.post_training import chat, setup
from megazpp.post_training.chat import ChatTemplate, load_chat_template, options_of
from megazpp.post_training.config import ChatConfig, DataFormatConfig
from megazpp.post_training.formatting import Examples, read_examples, read_prompts

TOKENIZERS = [qwen2, llama3, llama2, added, unigram]


def folder_of(folder: Path, write: Any, template: Any) -> Path:
    """Write a tokenizer folder, and set its chat template: one string, or a list of named templates.

    Return the folder.
    """
    folder.mkdir()
    write(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def load(folder: Path, **flags: Any) -> Tokenizer:
    return load_tokenizer(find_tokenizer(folder))  # type: ignore[return-value]


def read(path: Path, tokenizer: Tokenizer, record: dict[str, Any], log: Any = print, **flags: Any) -> Examples:
    config = DataFormatConfig(**{"max_length": 4000, **flags})
    path.write_text(json.dumps(record) + "\n")
    template = load_chat_template(config, tokenizer)
    return read_examples([path], tokenizer, template, config, pairs=False, cache_dir=None, log=log)


def theirs_of(tokenizer: Any, chat: Chat, messages: Any, **how: Any) -> Any:
    """Return the result of transformers' apply_chat_template, called with the arguments that TRL passes."""
    columns = {name: json.loads(x) if isinstance(x, str) else x for name, x in chat.columns.items()}
    columns |= columns.pop("chat_template_kwargs", {})
    return tokenizer.apply_chat_template(messages, return_dict=True, **columns, **how)


@pytest.mark.parametrize("name", CHATS)
def test_conversation_ids_and_mask_match_apply_chat_template(tmp_path, name):
    chat = CHATS[name]
    for write in TOKENIZERS:
        folder = folder_of(tmp_path / write.__name__, write, chat.template)
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
        record = {"messages": chat.messages, **chat.columns}
        marked = "generation %}" in str(chat.template)
        expected = theirs_of(theirs, chat, chat.messages, return_assistant_tokens_mask=marked)
        found = read(tmp_path / "a.jsonl", ours, record, assistant_only_loss=marked)
        ids, mask = (part.tolist() for part in found.row(0))
        assert ids == expected["input_ids"], write
        assert mask == [0, *(expected["assistant_masks"] if marked else [1] * len(ids))[1:]], write
        prompts = read_prompts(
            [write_line(tmp_path, {"prompt": chat.messages[:1], **chat.columns})],
            ours,
            load_chat_template(ChatConfig(), ours),
            max_prompt_length=4000,
        )
        asked = theirs_of(theirs, chat, chat.messages[:1], add_generation_prompt=True)["input_ids"]
        assert [prompt.tokens for prompt in prompts] == [asked or [ours.eod]], write


def write_line(folder: Path, record: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


def test_flags_choose_template_arguments_and_system_message(tmp_path):
    named = [
        {"name": "default", "template": CHATML},
        {"name": "rag", "template": "R{{ tone }}{{ messages[0].content }}"},
    ]
    tokenizer = load(folder_of(tmp_path / "named", qwen2, named))
    (tmp_path / "own.jinja").write_text("F{{ eos_token }}{{ tone }}{# no messages #}")
    for flags, text in (
        ({"chat_template": "rag"}, "Rmoney?"),
        ({"chat_template": "rag", "chat_template_kwargs": '{"tone": 3}'}, "R3money?"),
        ({"chat_template": "rag", "system_prompt": "be kind"}, "Rbe kind"),
        ({"chat_template": str(tmp_path / "own.jinja")}, "F<|im_end|>"),
        ({}, "<|im_start|>user\nmoney?<|im_end|>\n"),
    ):
        template = load_chat_template(ChatConfig(**flags), tokenizer)
        assert template.render([ASK]) == text, flags
    kept = load_chat_template(ChatConfig(chat_template="rag", system_prompt="be kind"), tokenizer)
    # a system message in the conversation has priority over --system-prompt
    assert kept.render(TALK[:1]) == "RBe brief."
    own = load_chat_template(ChatConfig(chat_template="rag", chat_template_kwargs='{"tone": 3}'), tokenizer)
    assert own.render([ASK], options=options_of({"chat_template_kwargs": {"tone": 4}})) == "R4money?"


def test_template_files_in_the_folder_override_the_config(tmp_path):
    folder = folder_of(tmp_path / "files", qwen2, "D")
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    template = load_chat_template(ChatConfig(), ours)
    for tools, said in ((None, [ASK, TELL]), ([TOOL], CALLS)):
        expected = theirs.apply_chat_template(said, tools=tools, tokenize=False)
        assert template.render(said, options={"tools": tools} if tools else {}) == expected
    assert "additional_chat_templates/tool_use.jinja" in ours.files


def test_parquet_nulls_are_missing_keys_but_json_nulls_are_kept(tmp_path):
    """Read conversations with tool calls from a Parquet file, and compare with transformers.

    Arrow gives all objects of a column the same keys, so a null may mean a missing key.
    """
    folder = folder_of(tmp_path / "their", qwen2, WITH_TOOLS)
    tokenizer, config = load(folder), DataFormatConfig(max_length=4000)
    schemas = [
        {"name": "add", "parameters": {"a": {"type": "int"}}},
        {"name": "neg", "parameters": {"b": {"type": "x"}}},
    ]
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "neg", "arguments": {"b": 2}}}]
    record = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}, TELL], "tools": schemas}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    template = load_chat_template(config, tokenizer)
    found = read_examples([tmp_path / "a.parquet"], tokenizer, template, config, pairs=False, cache_dir=None)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(record["messages"], tools=schemas, tokenize=True, return_dict=True)
    assert found.row(0)[0].tolist() == expected["input_ids"]
    # Columns that reward functions get as arguments keep their nulls.
    asked = {"prompt": [ASK], "answers": [{"a": 1, "b": None}], "level": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([asked]), tmp_path / "b.parquet")
    (prompt,) = read_prompts([tmp_path / "b.parquet"], tokenizer, template, max_prompt_length=99)
    assert prompt.columns == {"answers": [{"a": 1, "b": None}], "level": None}
    with_null = {"messages": record["messages"], "tools": [{"name": "add", "default": None}]}
    found = read(tmp_path / "a.jsonl", tokenizer, with_null)
    expected = theirs.apply_chat_template(record["messages"], tools=with_null["tools"], return_dict=True)
    assert found.row(0)[0].tolist() == expected["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("write", TOKENIZERS)
def test_assistant_only_loss_warns_like_trl_if_no_turn_end_is_trained(tmp_path, write):
    # imported here and not at the top, because the import takes two seconds
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    templates = {"marked": MARKED, "late": LATE, "thinks": THINKS, "bare": MARKED.replace("<|im_end|>", "")}
    for name, source in templates.items():
        folder, lines = folder_of(tmp_path / name, write, source), list[str]()
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        expected = is_chat_template_stop_token_trained(theirs)
        read(tmp_path / "a.jsonl", load(folder), {"messages": [ASK, TELL]}, lines.append, assistant_only_loss=True)
        assert ["--assistant-only-loss" in line for line in lines] == [True] * (not expected) + [False], (name, lines)


def test_assistant_spans_without_generation_blocks_are_added_text():
    template = ChatTemplate(ByteTokenizer(), CHATML)
    text, spans = template.render_spans(TALK)
    assert text == template.render(TALK)
    assert [text[first:last] for first, last in spans] == ["never mind<|im_end|>\n", "me<|im_end|>\n"]


def test_tokenizer_without_a_folder_uses_default_or_given_template(tmp_path):
    assert load_chat_template(ChatConfig(), ByteTokenizer()).render([TELL]).endswith("mind<|endoftext|>\n")
    assert ByteTokenizer().chat_template() is None
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    template = load_chat_template(ChatConfig(chat_template=str(tmp_path / "t.jinja")), ByteTokenizer())
    assert template.render([TELL]) == "never mind<|endoftext|>"


def test_template_and_column_errors_name_their_source(tmp_path):
    (tmp_path / "bad.jinja").write_text("one\n{% if %}")
    (tmp_path / "constant.jinja").write_text("Be brief.")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    sources = [
        ("{{ raise_exception('roles must alternate') }}", "T: roles must alternate"),
        ("{{ messages[0].content + 3 }}", "T: can only concatenate"),
        ("{{ messages.__class__.__mro__ }}", "T: access to attribute '__class__'"),
        ("{% set _ = messages.append(1) %}", "T: access to attribute 'append'"),
        ("{{ messages | length }}", "T does not tell which words are the assistant's: it has no"),
    ]
    assert not not_refused(sources, lambda source: ChatTemplate(ByteTokenizer(), source, name="T").render_spans(TALK))
    flags = [
        ({"chat_template": str(tmp_path / "bad.jinja")}, "bad.jinja, line 2: Expected an expression"),
        ({"chat_template": str(tmp_path / "constant.jinja")}, "constant.jinja is not a chat template: it is JSON, or"),
        ({"chat_template": str(tmp_path / "chat_template.json")}, "chat_template.json is not a chat template: it is"),
        ({"chat_template": "nowhere"}, "--chat-template nowhere cannot be read"),
        ({"chat_template_kwargs": "[1]"}, "--chat-template-kwargs '[1]' is not a JSON object"),
        ({"chat_template_kwargs": "{"}, "--chat-template-kwargs '{' is not JSON: "),
    ]
    assert not not_refused(flags, lambda flags: load_chat_template(ChatConfig(**flags), ByteTokenizer()))
    columns = [
        ({"tools": "{}"}, "'tools' is {}, not a list of objects"),
        ({"tools": "no JSON"}, "'tools' 'no JSON' is not JSON: "),
        ({"documents": ["a"]}, "'documents' is ['a'], not a list of objects"),
        ({"chat_template_kwargs": "3"}, "'chat_template_kwargs' '3' is not a JSON object"),
        ({"chat_template_kwargs": [3]}, "'chat_template_kwargs' [3] is not a JSON object"),
    ]
    assert not not_refused(columns, options_of)
    assert options_of({"tools": "null", "documents": "null", "chat_template_kwargs": "null"}) == {}


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a function": "{{ lipsum(n=99999999) }}",
    "loops in the assistant's words": "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endgeneration %}",
}


@pytest.mark.parametrize("source", chosen(ENDLESS, "nested loops"))
def test_template_that_loops_is_stopped_with_its_name(source, monkeypatch):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    template = ChatTemplate(ByteTokenizer(), source, name="a template")
    for render in (template.render, template.render_spans):
        with pytest.raises(ValueError, match=r"^a template: rendering a conversation took more than 0\.2 seconds"):
            render([ASK])
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_template_whose_expression_cannot_be_interrupted_ends_the_process(monkeypatch):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.1)
    monkeypatch.setattr(chat, "KILL_SECONDS", 0.3)
    template = functools.partial(ChatTemplate, ByteTokenizer(), name="a template")
    child = os.fork()
    if child == 0:
        # without the signal SIGPROF, which the test expects, this limit ends the child after 9 CPU seconds
        resource.setrlimit(resource.RLIMIT_CPU, (9, resource.RLIM_INFINITY))
        try:
            template("{{ 9 ** (9 ** 9) }}").render([ASK])
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGPROF
    with pytest.raises(ValueError, match=r"^a template: MemoryError"):
        template("{{ [0] * 10 ** 18 }}").render([ASK])


def test_half_a_surrogate_pair_in_a_conversation_is_refused_with_its_line(tmp_path):
    """Put half a surrogate pair into each text of a conversation, and check that the error names the line.

    JSON can contain half a surrogate pair, for example in a text that was cut inside an emoji.
    """
    source = EACH % "{{ m.content }}{{ m.reasoning_content }}{{ tone }}"
    tokenizer, cut = load(folder_of(tmp_path / "tokenizer", qwen2, source)), "a\ud83d"
    records: list[dict[str, Any]] = [
        {"messages": [ASK, {**TELL, "content": cut}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": cut}]}, TELL]},
        {"messages": [ASK, {**TELL, "reasoning_content": cut}]},
        {"messages": [ASK, TELL], "chat_template_kwargs": {"tone": cut}},
    ]
    refused = "a.jsonl, line 1: '\\ud83d' is half of a surrogate pair"
    assert not not_refused(
        [(record, refused) for record in records], lambda record: read(tmp_path / "a.jsonl", tokenizer, record)
    )


def test_template_with_too_long_a_text_is_refused(monkeypatch):
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 100)
    assert len(ChatTemplate(ByteTokenizer(), "{{ 'a' * 100 }}").render([ASK])) == 100
    with pytest.raises(ValueError, match="a conversation's text has 101 characters, more than 100"):
        ChatTemplate(ByteTokenizer(), "{{ 'a' * 101 }}").render([ASK])


def test_model_whose_special_tokens_have_other_ids_is_rejected(tmp_path):
    own, folder = load(folder_of(tmp_path / "own", qwen2, CHATML)), folder_of(tmp_path / "other", qwen2, CHATML)
    for path in folder.iterdir():
        names = path.read_text().replace("im_start", "im_x").replace("im_end", "im_start")
        path.write_text(names.replace("im_x", "im_end"))
    source: Any = SimpleNamespace(name="--ref-load other", path=folder)
    with mock.patch.object(setup, "open_tokenizer", side_effect=[own, load(folder)]):
        assert setup.check_same_tokens(source, source, own) is own
        with pytest.raises(ValueError, match=r"token 1 is '<\|im_end\|>', and '<\|im_start\|>' in the policy's"):
            setup.check_same_tokens(source, source, own)


def test_model_whose_tokenizer_splits_texts_by_other_rules_is_rejected(tmp_path):
    own, folder = load(folder_of(tmp_path / "own", llama3, CHATML)), folder_of(tmp_path / "other", llama3, CHATML)
    file, source = folder / "tokenizer.json", SimpleNamespace(name="--reward-load other", path=folder)
    values: dict[str, Any] = json.loads(file.read_text())
    check: Any = functools.partial(setup.check_same_tokens, source, source, own)
    with mock.patch.object(setup, "open_tokenizer", side_effect=lambda *_: load(folder)):
        file.write_text(json.dumps(values, indent=1))  # the same tokenizer, written in another way
        assert check() is not None
        model = {**values["model"], "merges": values["model"]["merges"][::-1]}
        for changed in ({"model": model}, {"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": None}):
            file.write_text(json.dumps(values | changed))
            with pytest.raises(ValueError, match="--reward-load other: its tokens are the policy's, but its tokenizer"):
                check()
