"""Training is deterministic, on as much of the text as is wanted, and says when the text is too little."""

from __future__ import annotations

import pytest

from megazpp.data.tokenizer_training import first_characters, train_sentencepiece

TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9


def test_training_twice_gives_the_same_bytes() -> None:
    assert train_sentencepiece(iter([TEXT]), 300) == train_sentencepiece([TEXT], 300)
    assert train_sentencepiece([TEXT], 299) != train_sentencepiece([TEXT], 300)


def test_a_vocabulary_the_text_cannot_fill_is_refused() -> None:
    for size in (100_000, 10):
        with pytest.raises(ValueError, match=f"--vocab-size {size} does not suit this text"):
            train_sentencepiece(iter([TEXT]), size)


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(1, ["a"]), (2, ["ab"]), (3, ["ab", "", "c"]), (5, ["ab", "", "cde"]), (9, ["ab", "", "cde", "f"])],
)
def test_the_first_characters_may_end_inside_a_text(limit: int, wanted: list[str]) -> None:
    texts = iter(["ab", "", "cde", "f"])
    assert list(first_characters(texts, limit)) == wanted
    if limit <= 5:
        assert next(texts, None) is not None  # no further than needed
