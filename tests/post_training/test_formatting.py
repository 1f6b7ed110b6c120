"""Test the conversion of data records to tokens and loss masks. Errors name the file and the line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from helpers.hf_models import write_llama_tokenizer
from helpers.hf_tokenizers import byte_fallback, byte_level
from helpers.hf_tokenizers import write as write_folder
from helpers.refusals import not_refused
from tokenizers import processors

from megazpp.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer
from megazpp.post_training.chat import ChatTemplate, load_chat_template
from megazpp.post_training.config import ChatConfig, DataFormatConfig
from megazpp.post_training.formatting import Examples, Prompt, read_examples, read_prompts

TOKENIZER = ByteTokenizer()
TEMPLATE = load_chat_template(ChatConfig(), TOKENIZER)
USER, ANSWER = {"role": "user", "content": "é?"}, {"role": "assistant", "content": "ja"}
WORSE = {"role": "assistant", "content": "nein"}
PARTS = [{"type": "text", "text": "é", "image": None}, {"type": "text", "text": "?"}]
ASKED = "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n"
CHAT = f"{ASKED}ja$\n"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a.jsonl"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(
    *paths: Path, tokenizer: Tokenizer = TOKENIZER, template: ChatTemplate = TEMPLATE, flags: Any = (), **options: Any
) -> Examples:
    """Read the examples of all files.

    `flags` are fields of DataFormatConfig, and `options` are arguments of `read_examples`.
    """
    config = DataFormatConfig(**{"max_length": 200, **dict(flags)})
    return read_examples(paths, tokenizer, template, config, **{"pairs": False, "cache_dir": None, **options})


def shown(examples: Examples) -> list[tuple[str, str]]:
    """Return for each example its text, and the part of the text that has a loss.

    The end-of-document token is shown as $.
    """

    def text(ids: Any) -> str:
        return bytes(ord("$") if token == TOKENIZER.eod else token for token in ids.tolist()).decode(errors="replace")

    rows = [examples.row(number) for number in range(len(examples.starts) - 1)]
    return [(text(ids), text(ids[mask > 0])) for ids, mask in rows]


ASSISTANT = {"assistant_only_loss": True}
# Each entry has a data record, flags, the expected text, and the part of the text that has a loss.
SUPERVISED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"text": "abc"}, {}, "abc$", "bc$"),
    ({"prompt": "1+1=", "completion": "2"}, {}, "1+1=2$", "2$"),
    ({"prompt": "1+1=", "completion": "2"}, {"completion_only_loss": False}, "1+1=2$", "+1=2$"),
    ({"prompt": "é", "completion": "ü", "text": "?"}, {}, "éü$", "ü$"),
    ({"messages": [USER, ANSWER]}, {}, CHAT, CHAT[1:]),
    ({"messages": [USER, ANSWER]}, ASSISTANT, CHAT, "ja$"),
    ({"messages": [USER, ANSWER, USER, ANSWER]}, ASSISTANT, CHAT * 2, "ja$ja$"),
    ({"messages": [{"role": "user", "content": PARTS}, ANSWER]}, {}, CHAT, CHAT[1:]),
    ({"prompt": [USER], "completion": [ANSWER]}, {}, CHAT, "ja$\n"),
    ({"prompt": [USER], "completion": [ANSWER]}, ASSISTANT, CHAT, "ja$"),
    ({"prompt": "é?", "completion": [ANSWER]}, {}, CHAT, "ja$\n"),
    ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, {}, CHAT * 2, "ja$\n"),
    ({"prompt": [USER, ANSWER, USER], "completion": [USER, ANSWER, USER, ANSWER]}, {}, CHAT * 2, "ja$\n"),
    ({"text": "abcdef"}, {"max_length": 4}, "abcd", "bcd"),
]
CHATS = [(CHAT, "ja$\n"), (CHAT.replace("ja", "nein"), "nein$\n")]
PAIRS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"prompt": "1+1=", "chosen": "2", "rejected": "31"}, [("1+1=2$", "2$"), ("1+1=31$", "31$")]),
    ({"chosen": "say so now", "rejected": "say so not"}, [("say so now$", "w$"), ("say so not$", "t$")]),
    ({"chosen": "say yes", "rejected": "say no"}, [("say yes$", " yes$"), ("say no$", " no$")]),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]}, CHATS),
    ({"chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, CHATS),
    ({"prompt": "é?", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]}, CHATS),
]


def test_record_becomes_text_and_loss_mask_and_a_pair_two_rows(path):
    for record, flags, text, learned in SUPERVISED:
        assert shown(read(write(path, record), flags=flags)) == [(text, learned)], record
    for record, rows in PAIRS:
        assert shown(read(write(path, record), pairs=True)) == rows, record


def test_cut_empty_and_equal_answers_are_counted_and_tokens_cached(path, tmp_path):
    lines: list[str] = []
    rows = [("1", "2", "3"), ("1234567", "8", "9"), ("1", "23456789", "2"), ("a", "b", "b"), ("a", "23456", "23457")]
    chat = [USER, ANSWER]
    write(path, *({"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows), {"chosen": chat, "rejected": chat})
    options: dict[str, Any] = {"pairs": True, "cache_dir": tmp_path / "cache", "log": lines.append}
    examples = read(path, flags={"max_length": 5}, **options)
    assert shown(examples) == [("12$", "2$"), ("13$", "3$"), ("12345", "2345"), ("12$", "2$")]
    same = f"3 of them left out, because 'chosen' and 'rejected' are the same, the first at {path}, line 4"
    assert lines == [
        "tokenizing a.jsonl",
        "6 examples with 14 tokens in all: a.jsonl; 3 were cut to --max-length 5, so raise it to train on their ends; "
        "1 of them left out, because no token of their answers is left; " + same,
    ]
    again = read(path, flags={"max_length": 5}, **options)
    assert lines[2:] == lines[1:2]  # tokens that come from the cache are logged with the same counts as tokenized ones
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(again, examples, strict=True))


def test_token_cache_depends_on_template_and_flags(path, tmp_path):
    write(path, {"messages": [USER, ANSWER]})
    short = (
        "{% for m in messages %}{{ m.role[0] + m.content + '.' }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    found = {
        shown(read(path, template=template, flags={"assistant_only_loss": only}, cache_dir=tmp_path))[0]
        for template in (TEMPLATE, ChatTemplate(TOKENIZER, short))
        for only in (False, True)
    }
    assert len(found) == 4


def message(**fields: object) -> dict[str, Any]:
    return {"messages": [fields]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"txt": "a"},
        "a.jsonl, line 2: there is neither 'messages', nor 'prompt' and 'completion', nor 'text', only 'txt'",
    ),
    ({}, "only an empty object"),
    ({"text": 3}, "'text' is neither a string nor a list of messages"),
    ({"text": [USER]}, "'text' is a list, not a string"),
    ({"messages": "hi"}, "'messages' is a string, not a list of messages"),
    ({"messages": [{"from": "human"}]}, "'messages' is neither a string nor a list of messages"),
    ({"prompt": [USER], "completion": "ja"}, "'prompt' is a conversation and 'completion' a string"),
    ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "the last message of 'prompt' is the assistant's"),
    ({"text": "\ud800"}, "is half of a surrogate pair"),
    ({"text": "a", "images": ["b.png"]}, "the column 'images' holds images, but only text is supported"),
    (message(role="usr", content="a"), "message 1 has the role 'usr', which is none of system"),
    (message(role="user", content=None), "message 1 of 'messages' has the role 'user' and no content"),
    (message(role="assistant", tool_calls=[]), "has the role 'assistant' and no content"),
    (message(role="assistant", tool_calls=["f"]), "the default chat template does not read 'tool_calls' of the conv"),
    (
        {"messages": [USER, ANSWER], "tools": [{"name": "f"}], "documents": [{"text": "t"}]},
        "the default chat template does not read 'documents' and 'tools' of the conversation",
    ),
    (message(role="user", content=5), "has the content 5, neither a string nor a list"),
    (message(role="user", content=[{"type": "image"}]), "has a part that is not text: {"),
]
REFUSED_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, "a.jsonl, line 1: there is no 'rejected', only 'prompt', 'chosen'"),
    ({"chosen": "b", "rejected": [USER]}, "one of 'chosen' and 'rejected' is a string"),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]}, "'rejected' has no message of the role 'assistant'"),
    ({"chosen": "a", "rejected": "b", "image": "c.png"}, "the column 'image' holds images, but only text is supported"),
    ({"chosen": "a b", "rejected": "a b"}, "'chosen' and 'rejected' are the same, first in line 1"),
]
REFUSED_WITH: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"text": "a"}, ASSISTANT, "line 1: --assistant-only-loss needs a conversation"),
    ({"prompt": "a", "completion": "b"}, ASSISTANT, "line 1: --assistant-only-loss needs a conversation"),
    (
        {"prompt": "123", "completion": "4"},
        {"max_length": 2},
        "a.jsonl: no example has an answer within --max-length 2",
    ),
]


def test_bad_record_is_rejected_with_file_and_line(path):
    assert not not_refused(REFUSED, lambda record: read(write(path, {"text": "fine"}, record)))
    assert not not_refused(REFUSED_PAIRS, lambda record: read(write(path, record), pairs=True))
    assert not not_refused(REFUSED_WITH, lambda record, flags: read(write(path, record), flags=flags))
    assert not not_refused([(path, "a.jsonl: there is no example")], lambda path: read(write(path)))


EACH = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}>{%% endif %%}"
MOVING = {  # templates that render a prompt's messages differently if an answer follows
    "system message in the last message": EACH
    % (
        "{% if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}: "
        "{% endif %}{{ m.content }}|{% endif %}"
    ),
    "thoughts before the last answer left out": EACH
    % ("{% if loop.last or messages[-1].role != 'assistant' %}{{ m.reasoning_content }};{% endif %}{{ m.content }}|"),
    "number of messages": "{{ messages | length }}" + EACH % "{{ m.content }}|",
}
TURNS = "{% for m in messages %}{% if m.role == 'assistant' %}>{% endif %}{{ m.content }}|{% endfor %}"
STEADY = {  # templates with which the answer's beginning is known, and the answer's text
    "another beginning of the turn": (TURNS + "{% if add_generation_prompt %}><think>{% endif %}", "ja|"),
    "an end of text after conversations": (TURNS + "{% if add_generation_prompt %}>{% else %}${% endif %}", "ja|$"),
}


def test_prompt_that_a_template_changes_after_the_answer_is_refused(path):
    """Check that a template is refused if it renders a prompt differently once an answer follows.

    Otherwise the loss mask would begin inside the prompt, where the texts with and without the answer first differ.
    """
    asked = [{"role": "system", "content": "kurz"}, USER, {**WORSE, "reasoning_content": "hm"}, USER]
    for source in MOVING.values():
        template = ChatTemplate(TOKENIZER, source, name="T")
        write(path, {"prompt": asked, "completion": [ANSWER]})
        with pytest.raises(ValueError, match="line 1: T renders the messages of 'prompt' differently if 'completion'"):
            read(path, template=template)
        assert shown(read(path, template=template, flags={"completion_only_loss": False}))
        write(path, {"prompt": asked, "chosen": [ANSWER], "rejected": [WORSE]})
        with pytest.raises(ValueError, match="line 1: T renders the messages of 'prompt' differently if 'chosen'"):
            read(path, template=template, pairs=True)
    for name, (source, learned) in STEADY.items():
        write(path, {"prompt": asked, "completion": [ANSWER]})
        ((_, found),) = shown(read(path, template=ChatTemplate(TOKENIZER, source)))
        assert found == learned, name


def test_prompts_keep_their_columns_and_place(path):
    write(path, {"prompt": "1+1=", "answer": 2}, {"prompt": [USER], "level": "easy"}, {"prompt": ""})
    first, second, third = read_prompts([path], TOKENIZER, TEMPLATE, max_prompt_length=53)
    assert first == Prompt([*b"1+1="], "1+1=", {"answer": 2}, f"{path}, line 1")
    assert second == Prompt([*ASKED.encode()], [USER], {"level": "easy"}, f"{path}, line 2")
    assert third.tokens == [TOKENIZER.eod]
    refused = [
        ([{"prompt": [USER]}], "line 1: the prompt has 53 tokens, but --max-length leaves 52"),
        ([{"text": "a"}], "line 1: there is no 'prompt', only 'text'"),
        ([], "a.jsonl: there is no prompt"),
    ]

    def ask(records: list[object]) -> object:
        return read_prompts([write(path, *records)], TOKENIZER, TEMPLATE, max_prompt_length=52)

    assert not not_refused(refused, ask)


def test_strings_get_tokenizer_marks_and_conversations_only_template_ones(path, tmp_path):
    """Compare token ids with the token ids of TRL's trainers.

    TRL tokenizes a plain text and the end token together, as one string, and uses chat templates unchanged.
    """
    words = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money\n" * 9
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + eos_token }}{% endfor %}"
    folder = write_llama_tokenizer(tmp_path / "their", words, chat_template=template)
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(find_tokenizer(folder))
    chat = load_chat_template(ChatConfig(), tokenizer)
    talk = [{"role": "user", "content": "money"}, {"role": "assistant", "content": "little"}]

    def plain(text: str) -> list[int]:
        return theirs(text)["input_ids"]

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        return theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]

    records: list[Any] = [{"prompt": "Call", "completion": answer} for answer in (" me", " me</s>")]
    records += [{"text": "money"}, {"messages": talk}, {"prompt": "Call ", "completion": "me"}]
    lines: list[str] = []
    examples = read(write(path, *records), tokenizer=tokenizer, template=chat, log=lines.append)
    assert (
        "note: the answers of 1 begin inside a token of their prompt" in lines[0]
    )  # " me" is one token, so the answer "me" begins inside it
    expected = [plain("Call me</s>"), plain("Call me</s>"), plain("money</s>"), rendered(talk)]
    for number, (ids, first) in enumerate(zip(expected, [len(plain("Call"))] * 2 + [1, 1], strict=True)):
        assert ids[:2].count(1) == 1
        assert examples.row(number)[0].tolist() == ids
        assert examples.row(number)[1].tolist() == [0] * first + [1] * (len(ids) - first)
    prompts = read_prompts(
        [write(path, {"prompt": "money"}, {"prompt": talk[:1]})], tokenizer, chat, max_prompt_length=50
    )
    assert [prompt.tokens for prompt in prompts] == [plain("money"), rendered(talk[:1])]


def test_text_has_each_special_token_once_and_a_prompt_no_end(path, tmp_path):
    (folder := tmp_path / "their").mkdir()
    byte_fallback(folder)  # writes a tokenizer that adds <s> and </s>; </s> ends a document
    tokenizer = load_tokenizer(find_tokenizer(folder))
    texts = ("ab", "<s>ab", "ab</s>", "<s>ab</s>")
    write(
        path, *({"text": text} for text in texts), *({"prompt": text[:-5], "completion": "b</s>"} for text in texts[3:])
    )
    examples = read(path, tokenizer=tokenizer)
    start, *ab, end = tokenizer.encode("ab")
    for number in range(5):
        ids, mask = (part.tolist() for part in examples.row(number))
        assert ids == [start, *ab, end]
        assert mask == ([0, 0, 1, 1] if number == 4 else [0, *[1] * len(ab), 1])
    prompts = read_prompts(
        [write(path, {"prompt": "ab"}, {"prompt": "<s>ab"})], tokenizer, TEMPLATE, max_prompt_length=9
    )
    assert [prompt.tokens for prompt in prompts] == [[start, *ab]] * 2


def test_space_at_the_end_of_a_prompt_is_not_trained_on(path, tmp_path):
    (folder := tmp_path / "their").mkdir()
    tokenizer = byte_level(["<|endoftext|>"], split=r"\S+|\s")
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    write_folder(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    ours = load_tokenizer(find_tokenizer(folder))
    examples = read(write(path, {"prompt": "a: ", "completion": "me"}), tokenizer=ours)
    ids, mask = (part.tolist() for part in examples.row(0))
    assert ours.decode([each for each, learned in zip(ids, mask, strict=True) if learned]) == "me"


def test_margins_of_pairs_are_read_for_reward_models_only(path):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin} for margin in (0.5, None, -2)]
    pairs.insert(
        1, {"prompt": "a", "chosen": "b", "rejected": "b", "margin": 9}
    )  # equal answers, so this pair is left out
    found = read(write(path, *pairs), pairs=True, margins=True)
    assert found.margins.tolist() == [0.5, 0.0, -2.0]
    for margin in ("1", math.nan, [1]):
        write(path, {**pairs[0], "margin": margin})
        with pytest.raises(ValueError, match=r"line 1: 'margin' is .*, but must be a finite number"):
            read(path, pairs=True, margins=True)
        assert not len(read(path, pairs=True).margins)


def test_reading_with_a_time_limit_raises_timeout_or_the_first_error(path, tmp_path):
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    write(path, good, bad)
    with pytest.raises(TimeoutError):
        read(path, seconds=0.0)
    # The beginning of each file is read even after the time limit, so an error in the first line is found.
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: there is neither"):
        read(path, write(tmp_path / "b.jsonl", bad), seconds=0.0)
    with pytest.raises(TimeoutError):
        read_prompts([path], TOKENIZER, TEMPLATE, max_prompt_length=9, seconds=0.0)


def test_template_may_use_other_roles_and_calls_without_content(path):
    """Test messages with unknown roles, and with tool calls in place of content.

    Keys with null values are removed before the template sees a message.
    """
    source = (
        "{% for m in messages %}{{ m.keys() | join('+') }}:{{ m.role }}{{ m.content }}{{ m.tool_calls }} {% endfor %}"
    )
    calls = {"role": "assistant", "content": None, "tool_calls": ["f"]}
    write(path, {"messages": [{"role": "critic", "content": "x", "tool_calls": None}, calls]})
    with pytest.raises(ValueError, match="line 1: message 1 has the role 'critic'"):
        read(path, template=ChatTemplate(TOKENIZER, source))
    found = read(path, template=ChatTemplate(TOKENIZER, "{% if 'critic' %}" + source + "{% endif %}"))
    assert shown(found)[0][0] == "role+content:criticx role+tool_calls:assistant['f'] "
