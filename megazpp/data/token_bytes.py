"""Count the bytes of UTF-8 text that token ids encode, for the metric bits per byte.

The bytes are counted for each token, not by decoding a complete sample. The edge of a sample can cut through a
character whose bytes are separate tokens. A decoder would replace the remaining bytes by U+FFFD, which has three bytes
in UTF-8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megazpp.data.tokenizer import Tokenizer


class TokenBytes:
    """Counter of the bytes of text that token ids encode, for the metric bits per byte.

    Special tokens (eod, BOS and others) and unknown pieces count zero bytes, so they never lower bits per byte. The
    counter computes the size of each token once and remembers it.

    Args:
        tokenizer: tokenizer that has encoded the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._sizes = tokenizer, dict[tuple[int, bool], int]()
        ends = [] if tokenizer.eod is None else [tokenizer.eod]
        self._boundaries = np.array(
            [*ends, *tokenizer.special_tokens.before, *tokenizer.special_tokens.after], dtype=np.int64
        )
        # `size` decodes this token before a token that does not begin a document, because decoders drop the space at
        # the beginning of a text.
        self._anchor = tokenizer.encode_spans("a", add_special_tokens=False).ids[-1:]

    def count(self, ids: npt.NDArray[np.int64], counted: npt.NDArray[np.bool_]) -> int:
        """Return the total number of bytes of the labels in `ids[1:]` of a sample that `counted` selects.

        Args:
            ids: [S + 1] token ids of a sample with S labels. The selected labels must be in the vocabulary.
            counted: [S] mask, True for the labels whose bytes count.
        """
        labels, firsts = ids[1:][counted], np.isin(ids[:-1][counted], self._boundaries)
        pairs, numbers = np.unique(2 * labels + firsts, return_counts=True)
        sizes = [self.size(pair // 2, first=pair % 2 == 1) for pair in pairs.tolist()]
        return int(np.dot(np.array(sizes, dtype=np.int64), numbers))

    def size(self, token: int, *, first: bool) -> int:
        """Return the number of bytes of UTF-8 text that one token encodes; 0 for a special or unknown token.

        Args:
            token: id of the token.
            first: True if the token begins a document. Decoders may drop a space there, which then does not count.
        """
        if (token, first) not in self._sizes:
            size = self._tokenizer.piece_bytes(token)
            if size is None:
                context = [] if first else self._anchor
                whole, before = (self._tokenizer.decode(ids).encode() for ids in ([*context, token], context))
                size = len(whole) - len(before)
            self._sizes[token, first] = size
        return self._sizes[token, first]
