"""Bytes of UTF-8 text per token, for the metric bits per byte.

Text is decoded token by token, not sample by sample. The edge of a sample can cut a character into tokens of single
bytes. A decoder would replace them by U+FFFD, which has three bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megazpp.data.tokenizer import Tokenizer


class TokenBytes:
    """Counter of the bytes that tokens encode; the size of each token is computed once.

    Special tokens (eod, BOS and others) and unknown pieces count zero bytes, so they never lower bits per byte.

    Args:
        tokenizer: tokenizer of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._sizes = tokenizer, dict[tuple[int, bool], int]()
        ends = [] if tokenizer.eod is None else [tokenizer.eod]
        self._boundaries = np.array(
            [*ends, *tokenizer.special_tokens.before, *tokenizer.special_tokens.after], dtype=np.int64
        )
        # decoded before a token that does not begin a document, because decoders drop a leading space
        self._anchor = tokenizer.encode_spans("a", add_special_tokens=False).ids[-1:]

    def count(self, ids: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> int:
        """Return the number of bytes of the labels `ids[1:]` that `counted` selects.

        Args:
            ids: [S + 1] ids of a sample. Counted labels are in the vocabulary.
            counted: [S] mask, True where the label counts.
        """
        labels, firsts = ids[1:][counted], np.isin(ids[:-1][counted], self._boundaries)
        pairs, numbers = np.unique(2 * labels + firsts, return_counts=True)
        sizes = [self.size(pair // 2, first=pair % 2 == 1) for pair in pairs.tolist()]
        return int(np.dot(np.array(sizes, dtype=np.int64), numbers))

    def size(self, token: int, *, first: bool) -> int:
        """Return the number of bytes of one token.

        Args:
            token: id of the token.
            first: True if the token begins a document, where decoders may drop a leading space.
        """
        if (token, first) not in self._sizes:
            size = self._tokenizer.piece_bytes(token)
            if size is None:
                context = [] if first else self._anchor
                whole, before = (self._tokenizer.decode(ids).encode() for ids in ([*context, token], context))
                size = len(whole) - len(before)
            self._sizes[token, first] = size
        return self._sizes[token, first]
