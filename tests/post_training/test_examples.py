"""Lines of data become tokens with a loss where it belongs; a line that cannot is named."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import transformers
from helpers.hf_models import write_llama_tokenizer
from pyarrow import parquet

from megazpp.data.tokenizer import ByteTokenizer, EncodedText, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer
from megazpp.post_training.chat import ChatTemplate, load_chat_template
from megazpp.post_training.examples import DataFormatConfig, Examples, read_examples, read_prompts

TOKENIZER = ByteTokenizer()
TEMPLATE = load_chat_template(None, TOKENIZER)
USER, ANSWER = {"role": "user", "content": "é?"}, {"role": "assistant", "content": "ja"}
WORSE = {"role": "assistant", "content": "nein"}
SHORT = "{% for m in messages %}{{ m.role[0] + m.content + '.' }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def supervised(path: Path, *, pairs: bool = False, **flags: Any) -> Examples:
    config = DataFormatConfig(**{"max_length": 200, **flags})
    return read_examples([path], TOKENIZER, TEMPLATE, config, pairs=pairs, cache_dir=None)


pairs = functools.partial(supervised, pairs=True)


def shown(examples: Examples) -> list[tuple[str, str]]:
    """Each row as text, and what of it is learned, eod as $."""
    found = []
    for number in range(len(examples.starts) - 1):
        tokens, mask = examples.row(number)
        texts = [
            bytes(ord("$") if token == TOKENIZER.eod else int(token) for token in part).decode(errors="replace")
            for part in (tokens, tokens[mask > 0])
        ]
        found.append((texts[0], texts[1]))
    return found


CHAT = "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\nja$\n"


@pytest.mark.parametrize(
    ("record", "flags", "text", "learned"),
    [
        ({"text": "abc"}, {}, "abc$", "bc$"),
        ({"prompt": "1+1=", "completion": "2"}, {}, "1+1=2$", "2$"),
        ({"prompt": "1+1=", "completion": "2"}, {"completion_only_loss": False}, "1+1=2$", "+1=2$"),
        ({"prompt": "é", "completion": "ü", "text": "?"}, {}, "éü$", "ü$"),
        ({"messages": [USER, ANSWER]}, {}, CHAT, CHAT[1:]),
        ({"messages": [USER, ANSWER]}, {"assistant_only_loss": True}, CHAT, "ja$"),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, {"assistant_only_loss": True}, CHAT * 2, "ja$ja$"),
        ({"prompt": [USER], "completion": [ANSWER]}, {}, CHAT, "ja$\n"),
        ({"prompt": [USER], "completion": [ANSWER]}, {"assistant_only_loss": True}, CHAT, "ja$"),
        ({"prompt": "é?", "completion": [ANSWER]}, {}, CHAT, "ja$\n"),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, {}, CHAT * 2, "ja$\n"),
        ({"text": "abcdef"}, {"max_length": 4}, "abcd", "bcd"),
    ],
)
def test_a_record_becomes_its_text_and_what_is_learned_of_it(
    tmp_path: Path, record: dict[str, Any], flags: dict[str, Any], text: str, learned: str
) -> None:
    assert shown(supervised(write(tmp_path / "a.jsonl", record), **flags)) == [(text, learned)]


@pytest.mark.parametrize(
    ("record", "rows"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "31"}, [("1+1=2$", "2$"), ("1+1=31$", "31$")]),
        ({"chosen": "say so now", "rejected": "say so not"}, [("say so now$", "w$"), ("say so not$", "t$")]),
        ({"chosen": "say yes", "rejected": "say no"}, [("say yes$", " yes$"), ("say no$", " no$")]),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [WORSE]},
            [(CHAT, "ja$\n"), (CHAT.replace("ja", "nein"), "nein$\n")],
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
            [(CHAT, "ja$\n"), (CHAT.replace("ja", "nein"), "nein$\n")],
        ),
        (
            {"prompt": "é?", "chosen": [USER, ANSWER], "rejected": [USER, WORSE]},
            [(CHAT, "ja$\n"), (CHAT.replace("ja", "nein"), "nein$\n")],
        ),
    ],
)
def test_a_pair_becomes_two_rows_with_a_loss_on_the_answers(
    tmp_path: Path, record: dict[str, Any], rows: list[tuple[str, str]]
) -> None:
    assert shown(pairs(write(tmp_path / "a.jsonl", record))) == rows


def test_what_has_no_answer_within_the_length_is_left_out_and_counted(tmp_path: Path) -> None:
    lines: list[str] = []
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1234567", "completion": "8"},
        {"prompt": "1", "completion": "23456789"},
        {"prompt": "1", "completion": "2"},
    )
    config = DataFormatConfig(max_length=5)
    kept: Any = {"pairs": False, "cache_dir": tmp_path / "cache", "log": lines.append}
    examples = read_examples([path], TOKENIZER, TEMPLATE, config, **kept)
    assert shown(examples) == [("12345", "2345"), ("12$", "2$")]
    assert lines == [
        "tokenizing a.jsonl",
        "3 examples of 8 tokens: a.jsonl; 2 were cut to --max-length 5; 1 left out, of whose answer there is nothing",
    ]
    again = read_examples([path], TOKENIZER, TEMPLATE, config, **kept)
    assert lines[2:] == lines[1:2]  # kept, and counted all the same
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(again, examples, strict=True))
    with pytest.raises(ValueError, match=r"a.jsonl: no example has an answer within --max-length 2"):
        supervised(write(tmp_path / "a.jsonl", {"prompt": "123", "completion": "4"}), max_length=2)


def test_an_answer_that_begins_within_a_token_of_its_prompt_is_noted(tmp_path: Path) -> None:
    """As with a tokenizer whose words begin with their space."""

    class InPairs(ByteTokenizer):
        def _encode_spans(self, text: str) -> EncodedText:
            starts = range(0, len(text), 2)
            spans = [(start, min(start + 2, len(text))) for start in starts]
            return EncodedText([ord(text[start]) for start in starts], spans)

    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "c"}, {"prompt": "abc", "completion": "d"})
    lines: list[str] = []
    config = DataFormatConfig(max_length=20)
    read_examples([path], InPairs(), TEMPLATE, config, pairs=False, cache_dir=None, log=lines.append)
    assert "note: the answers of 1 begin within a token of their prompt" in lines[-1]
    supervised(path)


def test_another_template_or_flag_does_not_find_the_tokens_of_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]})
    found = {
        tuple(shown(read_examples([path], TOKENIZER, template, config, pairs=False, cache_dir=tmp_path))[0])
        for template in (TEMPLATE, ChatTemplate(SHORT, name="short"))
        for config in (DataFormatConfig(), DataFormatConfig(assistant_only_loss=True))
    }
    assert len(found) == 4


def test_parquet_has_the_same_records(tmp_path: Path) -> None:
    records = [{"messages": [USER, {**ANSWER, "tool_calls": "x"}]}, {"messages": [USER, ANSWER]}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    template = ChatTemplate("{% for m in messages %}{{ m.keys() | join('+') }} {% endfor %}", name="keys")
    config = DataFormatConfig()
    examples = read_examples([tmp_path / "a.parquet"], TOKENIZER, template, config, pairs=False, cache_dir=None)
    assert [text for text, _ in shown(examples)] == [
        "role+content role+content+tool_calls ",
        "role+content role+content ",
    ]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"txt": "a"}, "there is neither 'messages', nor 'prompt' and 'completion', nor 'text', only 'txt'"),
        ({}, "only an empty object"),
        ({"text": 3}, "'text' is neither a string nor a list of messages"),
        ({"text": [USER]}, "'text' is a list, not a string"),
        ({"messages": "hi"}, "'messages' is a string, not a list of messages"),
        ({"messages": [{"from": "human"}]}, "'messages' is neither a string nor a list of messages"),
        ({"prompt": [USER], "completion": "ja"}, "'prompt' is a conversation and 'completion' a string"),
        ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "the last message of 'prompt' is the assistant's"),
        ({"text": "\ud800"}, "is half of a surrogate pair"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "message 1 has the role 'usr', which is none of system"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "message 1 of 'messages' has the role 'user' and no content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "has the role 'assistant' and no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "has the content 5, neither a string nor a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has a part that is no text: {"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, record: object, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "fine"}, record)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: ") as caught:
        supervised(path)
    assert reason in str(caught.value)


def test_a_bad_pair_and_a_loss_that_needs_a_conversation_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: there is no 'rejected', only 'prompt', 'chosen'"):
        pairs(write(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b"}))
    with pytest.raises(ValueError, match="line 1: of 'chosen' and 'rejected' one is a string"):
        pairs(write(tmp_path / "a.jsonl", {"chosen": "b", "rejected": [USER]}))
    for record in ({"text": "a"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(ValueError, match="line 1: --assistant-only-loss needs a conversation"):
            supervised(write(tmp_path / "a.jsonl", record), assistant_only_loss=True)


def test_prompts_keep_their_columns_and_place(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": 2}, {"prompt": [USER], "level": "easy"}, {"prompt": ""}
    )
    first, second, third = read_prompts([path], TOKENIZER, TEMPLATE, max_prompt_length=60)
    assert (first.tokens, first.value, first.columns) == ([*b"1+1="], "1+1=", {"answer": 2})
    assert bytes(second.tokens).decode() == "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n"
    assert (second.value, second.columns, second.place) == ([USER], {"level": "easy"}, f"{path}, line 2")
    assert third.tokens == [TOKENIZER.eod]
    with pytest.raises(ValueError, match="line 2: the prompt has 53 tokens, more than the 50 that --max-length leaves"):
        read_prompts([path], TOKENIZER, TEMPLATE, max_prompt_length=50)
    with pytest.raises(ValueError, match=r"line 1: there is no 'prompt', only 'text'"):
        read_prompts([write(tmp_path / "b.jsonl", {"text": "a"})], TOKENIZER, TEMPLATE, max_prompt_length=50)
    with pytest.raises(ValueError, match=r"c.jsonl: there is no prompt"):
        read_prompts([write(tmp_path / "c.jsonl")], TOKENIZER, TEMPLATE, max_prompt_length=50)


@pytest.mark.parametrize("value", [-1, 0, 1])
def test_a_length_without_a_token_to_predict_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"--max-length {value} "):
        DataFormatConfig(max_length=value)


def test_strings_have_the_tokenizer_s_marks_and_conversations_those_that_their_template_writes(tmp_path: Path) -> None:
    """The ids that TRL's trainers give a folder of transformers: text and eos as one string, templates as they are."""
    words = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money\n" * 9
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + eos_token }}{% endfor %}"
    folder = write_llama_tokenizer(tmp_path / "their", words, chat_template=template)
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(find_tokenizer(folder))
    assert tokenizer is not None
    talk = [{"role": "user", "content": "money"}, {"role": "assistant", "content": "little"}]
    records = [
        {"prompt": "Call", "completion": " me"},
        {"prompt": "Call", "completion": " me</s>"},
        {"text": "money"},
        {"messages": talk},
    ]
    path, config = write(tmp_path / "a.jsonl", *records), DataFormatConfig(max_length=200)
    chat = load_chat_template(None, tokenizer)
    examples = read_examples([path], tokenizer, chat, config, pairs=False, cache_dir=None)
    rendered = theirs.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    answered, text = theirs("Call me</s>")["input_ids"], theirs("money</s>")["input_ids"]
    assert [examples.row(i)[0].tolist() for i in range(4)] == [answered, answered, text, rendered]
    first = len(theirs("Call")["input_ids"])
    learned = [examples.row(i)[1].tolist() for i in range(4)]
    assert learned[:2] == [[0] * first + [1] * (len(answered) - first)] * 2
    assert learned[2:] == [[0] + [1] * (len(ids) - 1) for ids in (text, rendered)]
    assert rendered[:2].count(1) == answered[:2].count(1) == 1
    prompts = write(tmp_path / "p.jsonl", {"prompt": "money"}, {"prompt": talk[:1]})
    one, two = read_prompts([prompts], tokenizer, chat, max_prompt_length=50)
    assert one.tokens == theirs("money")["input_ids"]
    assert two.tokens == theirs.apply_chat_template(talk[:1], tokenize=True, return_dict=True)["input_ids"]


def test_what_is_read_for_so_long_only_says_so_and_names_what_it_has_met(tmp_path: Path) -> None:
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    path = write(tmp_path / "a.jsonl", good, bad)
    with pytest.raises(TimeoutError):
        read_examples([path], TOKENIZER, TEMPLATE, DataFormatConfig(), pairs=False, cache_dir=None, seconds=0.0)
    later = write(tmp_path / "b.jsonl", bad)  # each file from its beginning
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: there is neither"):
        read_examples([path, later], TOKENIZER, TEMPLATE, DataFormatConfig(), pairs=False, cache_dir=None, seconds=0.0)
    with pytest.raises(TimeoutError):
        read_prompts([path], TOKENIZER, TEMPLATE, max_prompt_length=9, seconds=0.0)


def test_parts_of_text_are_one_text_and_a_call_needs_no_content(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "é", "image": None}, {"type": "text", "text": "?"}]
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert shown(supervised(path)) == shown(supervised(write(tmp_path / "b.jsonl", {"messages": [USER, ANSWER]})))
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{% endfor %}", name="t"
    )
    calls = {"role": "assistant", "content": None, "tool_calls": ["f"]}
    write(path, {"messages": [{"role": "critic", "content": "x"}, calls]})
    with pytest.raises(ValueError, match="line 1: message 1 has the role 'critic'"):
        read_examples([path], TOKENIZER, template, DataFormatConfig(), pairs=False, cache_dir=None)
    named = ChatTemplate("{% if 'critic' %}" + template.source + "{% endif %}", name="t")
    found = read_examples([path], TOKENIZER, named, DataFormatConfig(), pairs=False, cache_dir=None)
    assert bytes(found.tokens.tolist()).decode() == "critic:xassistant:['f']"


def test_answers_that_are_the_same_are_left_out_with_the_line_of_the_first(tmp_path: Path) -> None:
    lines: list[str] = []
    chat = [USER, ANSWER]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": chat, "rejected": chat},
        {"prompt": "a", "chosen": "123456", "rejected": "123457"},
    )
    config = DataFormatConfig(max_length=6)
    found = read_examples([path], TOKENIZER, TEMPLATE, config, pairs=True, cache_dir=None, log=lines.append)
    assert len(found.starts) == 3
    assert f"; 3 left out, because 'chosen' and 'rejected' are the same, the first at {path}, line 2" in lines[0]
    other = {"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]}
    with pytest.raises(ValueError, match="line 1: 'rejected' has no message of the role 'assistant'"):
        pairs(write(tmp_path / "b.jsonl", other))
