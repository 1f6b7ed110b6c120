"""Test the byte counts of single tokens.

The counts of a document's tokens add up to the bytes of its text, however samples cut the document.
"""

import io

import numpy as np
import pytest
import sentencepiece
import tokenizers
from helpers.hf_models import write_llama_tokenizer
from helpers.hf_tokenizers import definition
from helpers.pairs import TEXT

from megazpp.data.text import train_sentencepiece
from megazpp.data.token_bytes import TokenBytes
from megazpp.data.tokenizer import ByteTokenizer, HFTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from megazpp.data.tokenizer_folder import find_tokenizer

TEXTS = ["naïve—日本語 🐳 �", "two  words", "x", "日本", "🐳"]


def with_dummy_prefix() -> SentencePieceTokenizer:
    """Return a SentencePiece tokenizer like Llama's.

    It adds a leading space to a text, and decoding removes that space.
    """
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=out,
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        model_type="bpe",
    )
    return SentencePieceTokenizer(out.getvalue())


def byte_fallback() -> HFTokenizer:
    """Return a Hugging Face tokenizer with pieces for some letters, and one-byte pieces for all other characters."""
    names = ["</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"twordsxnaive"]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(dict.fromkeys(names))}, [], byte_fallback=True)
    tokenizer, of = tokenizers.Tokenizer(model), tokenizers.decoders
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = of.Sequence([of.Replace("▁", " "), of.ByteFallback(), of.Fuse()])
    return HFTokenizer(definition(tokenizer.to_str()))


def word_pieces() -> HFTokenizer:
    """Return a WordPiece tokenizer. Its decoding adds spaces between words, and joins pieces of one word."""
    vocabulary = {name: i for i, name in enumerate(["[UNK]", "</s>", "two", "wor", "##ds", "x"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return HFTokenizer(definition(tokenizer.to_str()))


@pytest.fixture(
    scope="module", params=["bytes", "sentencepiece", "dummy prefix", "byte-level BPE", "byte fallback", "Llama"]
)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        return SentencePieceTokenizer(train_sentencepiece(iter([TEXT]), 300))
    if request.param == "dummy prefix":
        return with_dummy_prefix()
    if request.param == "byte fallback":
        return byte_fallback()
    if request.param == "byte-level BPE":
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
        return HFTokenizer(definition(bpe.to_str()))
    folder = tmp_path_factory.mktemp("llama")
    write_llama_tokenizer(folder, "".join(TEXTS) + TEXT[:2000])
    loaded = load_tokenizer(find_tokenizer(folder))
    assert loaded is not None
    return loaded


def test_token_bytes_add_up_to_the_text_at_every_cut(tokenizer):
    sizes, ids, lengths = TokenBytes(tokenizer), [tokenizer.eod], [0]
    for text in TEXTS:
        encoded = [*tokenizer.encode(text), tokenizer.eod]
        ids += encoded
        lengths.append(lengths[-1] + len(text.encode()))
    line = np.array(ids, dtype=np.int64)
    # Neighboring samples share a token id: the last label of one sample is the first input of the next.
    for cut in range(1, len(line) - 1):
        parts = line[: cut + 1], line[cut:]
        assert sum(sizes.count(part, np.ones(len(part) - 1, dtype=bool)) for part in parts) == lengths[-1]


def test_masked_label_removes_exactly_its_bytes(tokenizer):
    sizes = TokenBytes(tokenizer)
    ids = np.array([tokenizer.eod, *tokenizer.encode("日x")], dtype=np.int64)
    every = np.ones(len(ids) - 1, dtype=bool)
    for left_out in range(len(every)):
        others = np.arange(len(every)) != left_out
        assert sizes.count(ids, others) + sizes.count(ids, ~others) == sizes.count(ids, every) == 4
    assert sizes.count(ids, ~every) == 0


def test_words_count_their_spaces_and_unknown_pieces_count_nothing():
    pieces = word_pieces()
    sizes = TokenBytes(pieces)
    # the unknown "?" counts no bytes; the text is decoded to "two x", which has 5 bytes
    for text, expected in (("two words", 9), ("words two", 9), ("two ? x", 5)):
        ids = np.array([pieces.eod, *pieces.encode(text), pieces.eod], dtype=np.int64)
        assert sizes.count(ids, np.ones(len(ids) - 1, dtype=bool)) == expected, text


def test_ids_beyond_the_pieces_and_marks_have_no_bytes(tokenizer):
    sizes = TokenBytes(tokenizer)
    tokenizer.vocab_size += 3
    for token in (
        tokenizer.eod,
        tokenizer.vocab_size - 1,
        *tokenizer.special_tokens.before,
        *tokenizer.special_tokens.after,
    ):
        assert sizes.size(token, first=False) == sizes.size(token, first=True) == 0
    tokenizer.vocab_size -= 3
