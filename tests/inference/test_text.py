"""Test generated texts while their tokens arrive: what is printed after each token, and where a text ends."""

import dataclasses
import io
import json

import pytest
import sentencepiece
import torch
import transformers
from helpers.hf_tokenizers import byte_fallback, gpt2, llama3, qwen2, unigram
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import Case, build_on_ranks

from megazpp.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer
from megazpp.inference.config import SampleConfig
from megazpp.inference.text import Continuation, Start, Stream, continue_texts, start_of

BYTES = ByteTokenizer()


def grow(text: str, *stop: str) -> list[str]:
    """Add the tokens of `text` one by one. Return, for each added token, the text that can no longer change after it.

    The loop ends when one of the `stop` strings ends the text.
    """
    row, shown = Continuation(BYTES, [], stop), []
    for token in BYTES.encode(text):
        over = row.add(token)
        shown.append(row.text)
        assert row.over == over
        if over:
            break
    return shown


def test_text_ends_before_the_first_stop_string():
    assert grow("one. two! three", "!", ".")[-1] == "one"
    assert grow("aab", "ab", "b")[-1] == "a"
    assert grow("no end", "!")[-1] == "no end"


SAID = "money<|im_end|>\nnever <|im_end|>x<|endoftext|> two </s>me"
STOPS = [
    *([], ["<|im_end|>"], ["\n"], ["<|im_end|>\n"], ["never <|im_end|>"], ["<|im_end|>x", "two"]),
    *(["</s>"], ["ney<|im_end|>\nn"], ["<|eot_id|>", "ver"], ["e t", "<|endoftext|>"]),
]


@pytest.mark.parametrize("write", [qwen2, llama3, byte_fallback, gpt2])
def test_text_ends_at_the_same_token_as_in_transformers(tmp_path, write):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = load_tokenizer(find_tokenizer(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode_spans(SAID, add_special_tokens=False).ids
    assert {2, 5, theirs.eos_token_id} >= {*tokenizer.stop_ids}
    for stops in STOPS:
        row, ends = Continuation(tokenizer, [], stops), [transformers.EosTokenCriteria(tokenizer.stop_ids)]
        ends += [transformers.StopStringCriteria(theirs, stops)] if stops else []
        count = next(n for n in range(1, len(ids) + 1) if row.add(ids[n - 1]) or n == len(ids))
        told = [any(bool(end(torch.tensor([ids[:n]]), None)) for end in ends) for n in range(1, len(ids) + 1)]
        assert count == (told.index(True) + 1 if True in told else len(ids)), stops
        if row.over:
            assert not any(name in row.text for name in (*tokenizer.special_ids, *stops))


def test_partial_characters_and_stop_strings_are_held_back_until_the_end():
    assert grow("aé€") == ["a", "a", "aé", "aé", "aé", "aé€"]
    assert grow("ab-\nc", "-\n\n") == ["a", "ab", "ab", "ab", "ab-\nc"]
    ended, finished = (Continuation(BYTES, BYTES.encode("x"), ["-\n\n"]) for _ in range(2))
    for row in (ended, finished):
        assert [row.add(token) for token in BYTES.encode("ab-\n")] == [False] * 4
        assert row.text == "ab"
    assert ended.add(BYTES.eod)  # the end-of-document token ends the text, and is not part of it
    finished.finish()
    assert [(row.text, row.over) for row in (ended, finished)] == [("ab-\n", True)] * 2


def test_space_between_prompt_and_text_belongs_to_the_text():
    # by default SentencePiece drops the first space of a text, so this tokenizer shows whether the space is lost
    model = io.BytesIO()
    sentences = iter(["call me ishmael some years ago"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, vocab_size=16, minloglevel=2
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    start, whole = tokenizer.encode("call me"), tokenizer.encode("call me ishmael")
    assert tokenizer.decode(whole[len(start) :]) == "ishmael"
    row = Continuation(tokenizer, start, ())
    for token in whole[len(start) :]:
        row.add(token)
    assert row.text == " ishmael"


def test_clean_up_in_the_files_removes_no_space_from_a_text(tmp_path):
    unigram(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(find_tokenizer(tmp_path))
    text = "me . me"
    ids = tokenizer.encode_spans(text, add_special_tokens=False).ids
    assert (tokenizer.decode(ids), tokenizer.decode_with_specials(ids)) == (text, text)


def test_rows_are_printed_in_order_and_the_first_open_one_as_it_grows():
    """Text of the second row must wait until the first row has ended at its stop string."""
    out, rows = io.StringIO(), [Continuation(BYTES, [], ("!",)) for _ in range(2)]
    stream = Stream([Start([0], "A:"), Start([0], "B:")], rows, out)
    seen = []
    for row, letter in [(0, "x"), (1, "u"), (0, "y"), (1, "!"), (0, "!")]:
        rows[row].add(ord(letter))
        stream.show()
        seen.append(out.getvalue())
    assert seen == ["A:x", "A:x", "A:xy", "A:xy", "A:xy\nB:u\n"]


def texts_on_ranks(case: Case, config: SampleConfig) -> tuple[list[str], str]:
    built, out = build_on_ranks(case), io.StringIO()
    texts, _ = continue_texts(
        *built, BYTES, [start_of(each, BYTES) for each in ("ab", "", "long")], config, max_length=16, seed=1, out=out
    )
    return texts, out.getvalue()


@pytest.mark.parametrize("tp", [1, slow(2)])
def test_printed_text_equals_returned_text_and_stops_end_rows_on_all_ranks(tp):
    config, case = SampleConfig(sample_tokens=8, sample_temperature=1.0, sample_top_k=0), Case(vocab_size=257, tp=tp)
    (texts, shown), (others, _) = ranks(2).run(texts_on_ranks, case, config)
    assert texts == others
    assert shown == "".join(f"{prompt}{text}\n" for prompt, text in zip(["ab", "", "long"], texts, strict=True))
    stop = texts[0][3:5]
    for cut, _ in ranks(2).run(texts_on_ranks, case, dataclasses.replace(config, sample_stop=(stop,))):
        assert cut == [text.split(stop)[0] for text in texts]
        assert cut[0] == texts[0][:3]
