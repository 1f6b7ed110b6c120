"""Training is deterministic, on as much of the text as is wanted, and says when the text is too little."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from megazpp.data.tokenizer_training import first_characters, train_sentencepiece

TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9


def test_training_twice_gives_the_same_bytes() -> None:
    assert train_sentencepiece(iter([TEXT]), 300) == train_sentencepiece([TEXT], 300)
    assert train_sentencepiece([TEXT], 299) != train_sentencepiece([TEXT], 300)


@pytest.mark.parametrize(
    ("text", "size", "reason"),
    [
        (TEXT, 100_000, "Vocabulary size too high (100000). Please set it to a value <= "),
        (TEXT, 10, "Vocabulary size is smaller than required_chars. 10 vs "),
        ("\n\n", 300, "it is blank"),
    ],
)
def test_a_vocabulary_the_text_cannot_fill_is_refused_without_sentencepiece_s_own_files_and_lines(
    text: str, size: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--vocab-size {size} does not suit this text: {reason}")) as raised:
        train_sentencepiece(iter([text]), size)
    assert "INTERNAL" not in str(raised.value)
    assert "trainer_interface" not in str(raised.value)


def test_what_is_wrong_with_a_line_is_not_blamed_on_the_vocabulary() -> None:
    def texts() -> Iterator[str]:
        yield TEXT
        raise ValueError("a.jsonl, line 2: there is no 'text'")

    with pytest.raises(ValueError, match=r"^a\.jsonl, line 2: there is no 'text'$"):
        train_sentencepiece(texts(), 300)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(1, ["a"]), (2, ["ab"]), (3, ["ab", "", "c"]), (5, ["ab", "", "cde"]), (9, ["ab", "", "cde", "f"])],
)
def test_the_first_characters_may_end_inside_a_text(limit: int, wanted: list[str]) -> None:
    texts = iter(["ab", "", "cde", "f"])
    assert list(first_characters(texts, limit)) == wanted
    if limit <= 5:
        assert next(texts, None) is not None  # no further than needed
