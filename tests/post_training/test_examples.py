"""Lines of data become tokens with a loss where it belongs; a line that cannot is named."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import transformers
from helpers.hf_models import write_llama_tokenizer
from helpers.refusals import not_refused
from pyarrow import parquet

from megazpp.data.tokenizer import ByteTokenizer, EncodedText, Tokenizer, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer
from megazpp.post_training.chat import ChatTemplate, load_chat_template
from megazpp.post_training.examples import DataFormatConfig, Examples, read_examples, read_prompts

TOKENIZER = ByteTokenizer()
TEMPLATE = load_chat_template(None, TOKENIZER)
USER, ANSWER = {"role": "user", "content": "é?"}, {"role": "assistant", "content": "ja"}
WORSE = {"role": "assistant", "content": "nein"}
PARTS = [{"type": "text", "text": "é", "image": None}, {"type": "text", "text": "?"}]
SHORT = "{% for m in messages %}{{ m.role[0] + m.content + '.' }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def supervised(
    path: Path,
    *,
    pairs: bool = False,
    tokenizer: Tokenizer = TOKENIZER,
    template: ChatTemplate = TEMPLATE,
    kept: dict[str, Any] | None = None,
    **flags: Any,
) -> Examples:
    """The examples of a file; `kept` has the arguments beside the flags."""
    config = DataFormatConfig(**{"max_length": 200, **flags})
    return read_examples([path], tokenizer, template, config, pairs=pairs, **{"cache_dir": None, **(kept or {})})


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


ASSISTANT = {"assistant_only_loss": True}
SUPERVISED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [  # record, flags, text, what is learned of it
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


def test_a_record_becomes_its_text_and_what_is_learned_of_it_and_a_pair_two_rows(tmp_path):
    for record, flags, text, learned in SUPERVISED:
        assert shown(supervised(write(tmp_path / "a.jsonl", record), **flags)) == [(text, learned)], record
    for record, rows in PAIRS:
        assert shown(pairs(write(tmp_path / "a.jsonl", record))) == rows, record


def test_what_has_no_answer_within_the_length_is_left_out_and_counted(tmp_path):
    lines: list[str] = []
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1234567", "completion": "8"},
        {"prompt": "1", "completion": "23456789"},
        {"prompt": "1", "completion": "2"},
    )
    kept: dict[str, Any] = {"cache_dir": tmp_path / "cache", "log": lines.append}
    examples = supervised(path, max_length=5, kept=kept)
    assert shown(examples) == [("12345", "2345"), ("12$", "2$")]
    assert lines == [
        "tokenizing a.jsonl",
        "3 examples of 8 tokens: a.jsonl; 2 were cut to --max-length 5; 1 left out, of whose answer there is nothing",
    ]
    again = supervised(path, max_length=5, kept=kept)
    assert lines[2:] == lines[1:2]  # kept, and counted all the same
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(again, examples, strict=True))
    with pytest.raises(ValueError, match=r"a.jsonl: no example has an answer within --max-length 2"):
        supervised(write(tmp_path / "a.jsonl", {"prompt": "123", "completion": "4"}), max_length=2)


def test_an_answer_that_begins_within_a_token_of_its_prompt_is_noted(tmp_path):
    """As with a tokenizer whose words begin with their space."""

    class InPairs(ByteTokenizer):
        def _encode_spans(self, text: str) -> EncodedText:
            starts = range(0, len(text), 2)
            spans = [(start, min(start + 2, len(text))) for start in starts]
            return EncodedText([ord(text[start]) for start in starts], spans)

    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "c"}, {"prompt": "abc", "completion": "d"})
    lines: list[str] = []
    supervised(path, tokenizer=InPairs(), kept={"log": lines.append})
    supervised(path, kept={"log": lines.append})
    assert ["note: the answers of 1 begin within a token of their prompt" in line for line in lines] == [True, False]


def test_another_template_or_flag_does_not_find_the_tokens_of_the_first(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]})
    found = {
        shown(supervised(path, template=template, assistant_only_loss=only, kept={"cache_dir": tmp_path}))[0]
        for template in (TEMPLATE, ChatTemplate(SHORT, name="short"))
        for only in (False, True)
    }
    assert len(found) == 4


def test_parquet_has_the_same_records(tmp_path):
    records = [{"messages": [USER, {**ANSWER, "tool_calls": "x"}]}, {"messages": [USER, ANSWER]}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    template = ChatTemplate("{% for m in messages %}{{ m.keys() | join('+') }} {% endfor %}", name="keys")
    found = [text for text, _ in shown(supervised(tmp_path / "a.parquet", template=template))]
    assert found == ["role+content role+content+tool_calls ", "role+content role+content "]


def message(**fields: object) -> dict[str, Any]:
    return {"messages": [fields]}


NO_TEXT = message(role="user", content=[{"type": "image"}])
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"txt": "a"}, "there is neither 'messages', nor 'prompt' and 'completion', nor 'text', only 'txt'"),
    ({}, "only an empty object"),
    ({"text": 3}, "'text' is neither a string nor a list of messages"),
    ({"text": [USER]}, "'text' is a list, not a string"),
    ({"messages": "hi"}, "'messages' is a string, not a list of messages"),
    ({"messages": [{"from": "human"}]}, "'messages' is neither a string nor a list of messages"),
    ({"prompt": [USER], "completion": "ja"}, "'prompt' is a conversation and 'completion' a string"),
    ({"prompt": [USER, ANSWER], "completion": [ANSWER]}, "the last message of 'prompt' is the assistant's"),
    ({"text": "\ud800"}, "is half of a surrogate pair"),
    (message(role="usr", content="a"), "message 1 has the role 'usr', which is none of system"),
    (message(role="user", content=None), "message 1 of 'messages' has the role 'user' and no content"),
    (message(role="assistant", tool_calls=[]), "has the role 'assistant' and no content"),
    (message(role="user", content=5), "has the content 5, neither a string nor a list"),
    (NO_TEXT, "has a part that is no text: {"),
]
REFUSED_PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, "there is no 'rejected', only 'prompt', 'chosen'"),
    ({"chosen": "b", "rejected": [USER]}, "of 'chosen' and 'rejected' one is a string"),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]}, "'rejected' has no message of the role 'assistant'"),
]


def test_a_bad_line_is_named_by_file_and_number(tmp_path):
    def ask(record: object) -> Examples:
        return supervised(write(tmp_path / "a.jsonl", {"text": "fine"}, record))

    def ask_pair(record: object) -> Examples:
        return pairs(write(tmp_path / "a.jsonl", record))

    def ask_assistant(record: object) -> Examples:
        return supervised(write(tmp_path / "a.jsonl", record), assistant_only_loss=True)

    for rows in (REFUSED, [(record, "a.jsonl, line 2: ") for record, _ in REFUSED]):
        assert not_refused(rows, ask) == []
    for rows in (REFUSED_PAIRS, [(record, "a.jsonl, line 1: ") for record, _ in REFUSED_PAIRS]):
        assert not_refused(rows, ask_pair) == []
    needs = "line 1: --assistant-only-loss needs a conversation"
    assert not_refused([({"text": "a"}, needs), ({"prompt": "a", "completion": "b"}, needs)], ask_assistant) == []


def test_prompts_keep_their_columns_and_place(tmp_path):
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


def test_strings_have_the_tokenizer_s_marks_and_conversations_those_that_their_template_writes(tmp_path):
    """The ids that TRL's trainers give a folder of transformers: text and eos as one string, templates as they are."""
    words = "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money\n" * 9
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + eos_token }}{% endfor %}"
    folder = write_llama_tokenizer(tmp_path / "their", words, chat_template=template)
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(find_tokenizer(folder))
    assert tokenizer is not None
    talk = [{"role": "user", "content": "money"}, {"role": "assistant", "content": "little"}]
    records = [{"prompt": "Call", "completion": answer} for answer in (" me", " me</s>")]
    records += [{"text": "money"}, {"messages": talk}]
    chat = load_chat_template(None, tokenizer)
    examples = supervised(write(tmp_path / "a.jsonl", *records), tokenizer=tokenizer, template=chat)
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


def test_what_is_read_for_so_long_only_says_so_and_names_what_it_has_met(tmp_path):
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    path = write(tmp_path / "a.jsonl", good, bad)
    with pytest.raises(TimeoutError):
        supervised(path, kept={"seconds": 0.0})
    later = write(tmp_path / "b.jsonl", bad)  # each file from its beginning
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: there is neither"):
        read_examples([path, later], TOKENIZER, TEMPLATE, DataFormatConfig(), pairs=False, cache_dir=None, seconds=0.0)
    with pytest.raises(TimeoutError):
        read_prompts([path], TOKENIZER, TEMPLATE, max_prompt_length=9, seconds=0.0)


def test_a_role_that_the_template_names_and_a_call_without_content_are_taken(tmp_path):
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    calls = {"role": "assistant", "content": None, "tool_calls": ["f"]}
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "critic", "content": "x"}, calls]})
    with pytest.raises(ValueError, match="line 1: message 1 has the role 'critic'"):
        supervised(path, template=ChatTemplate(source, name="t"))
    found = supervised(path, template=ChatTemplate("{% if 'critic' %}" + source + "{% endif %}", name="t"))
    assert bytes(found.tokens.tolist()).decode() == "critic:xassistant:['f']"


def test_answers_that_are_the_same_are_left_out_with_the_line_of_the_first(tmp_path):
    lines: list[str] = []
    chat = [USER, ANSWER]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": chat, "rejected": chat},
        {"prompt": "a", "chosen": "123456", "rejected": "123457"},
    )
    found = pairs(path, max_length=6, kept={"log": lines.append})
    assert len(found.starts) == 3
    assert f"; 3 left out, because 'chosen' and 'rejected' are the same, the first at {path}, line 2" in lines[0]
