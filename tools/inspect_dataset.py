"""Print the contents of a .bin/.idx pair: sizes, document lengths, and the beginning of one document.

python tools/inspect_dataset.py --input my_text_document --tokenizer-model my.model
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

import numpy as np

from megazpp.base.files import errors_as
from megazpp.base.flags import Config, flag
from megazpp.base.program import program_of
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer

# Numbers of token IDs and of documents that are compared with the tokenizer; all of a large dataset would take minutes
CHECKED_IDS, CHECKED_DOCUMENTS = 1 << 27, 1000


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """Inspection.

    The flags that name a dataset, and the part of it to print.

    Attributes:
        input: prefix of the .bin/.idx pair.
        document: index of the document to print.
        tokens: number of tokens to print.
    """

    input: str = flag(None, metavar="PREFIX", required=True)
    document: int = flag(0)
    tokens: int = flag(100, must_be="not negative")


@program_of(InspectConfig, TokenizerConfig)
def main(config: InspectConfig, tokenizer_config: TokenizerConfig) -> None:
    """Print the statistics of the dataset and the beginning of a document."""
    with errors_as(f"--input {config.input}"):
        dataset = IndexedDataset(Path(config.input).expanduser())
    lengths = dataset.document_lengths
    if not 0 <= config.document < len(lengths):
        raise ValueError(f"--document {config.document} does not exist; the documents are 0 to {len(lengths) - 1}")
    tokenizer = load_tokenizer(tokenizer_config)
    bin_bytes, idx_bytes = (path.stat().st_size for path in (dataset.bin_path, dataset.idx_path))
    low, median, high, top = np.percentile(lengths, [10, 50, 90, 99])
    empty = np.count_nonzero(lengths == 0)
    rows = {
        "files": f"{bin_bytes:,} bytes in .bin, {idx_bytes:,} in .idx",
        "tokens": f"{len(dataset.tokens):,} of {dataset.dtype}",
        "documents": f"{len(lengths):,}, including {empty:,} empty ones, in {len(dataset):,} sequences",
        "document length": f"{lengths.min():,} to {lengths.max():,} tokens, mean {lengths.mean():,.1f}",
        "": f"10 % below {low:,.0f}, half below {median:,.0f}, 90 % below {high:,.0f}, 99 % below {top:,.0f}",
    }
    print("\n".join(f"{name:16} {value}" for name, value in rows.items()))
    if tokenizer is not None:
        print(check_ids(dataset, tokenizer))
    print(sample(dataset, config.document, config.tokens, tokenizer))


def check_ids(dataset: IndexedDataset, tokenizer: Tokenizer) -> str:
    """Check whether the token IDs fit the tokenizer, and return two lines with the result.

    The lines give the largest ID, and how many of the first documents end with the tokenizer's end-of-document token.

    Args:
        dataset: dataset whose token IDs are checked.
        tokenizer: tokenizer that should have produced these IDs.
    Raises:
        ValueError: an ID is outside the tokenizer's vocabulary.
    """
    largest = int(dataset.tokens[:CHECKED_IDS].max())
    if largest >= tokenizer.vocab_size:
        raise ValueError(
            f"{dataset.prefix} has the ID {largest}, but the tokenizer has only {tokenizer.vocab_size} tokens; use the "
            "tokenizer with which the dataset was made"
        )
    spans = itertools.pairwise(dataset.document_indices[: CHECKED_DOCUMENTS + 1].tolist())
    last = [end - 1 for start, end in spans if start < end and dataset.lengths[end - 1]]
    ended = sum(int(dataset.get(i)[-1]) == tokenizer.eod for i in last)
    return (
        f"{'ids':16} at most {largest:,}; a vocabulary of {tokenizer.vocab_size:,}\n"
        f"{'':16} of the first {len(last):,} documents with text, {ended:,} end with eod ({tokenizer.eod})"
    )


def sample(dataset: IndexedDataset, document: int, num_tokens: int, tokenizer: Tokenizer | None) -> str:
    """Return the beginning of a document, as text with a tokenizer, otherwise as token IDs."""
    first, end = dataset.document_indices[document : document + 2].tolist()
    ids: list[int] = []
    for sequence in range(first, end):
        ids += dataset.get(sequence)[: num_tokens - len(ids)].tolist()
    total = int(dataset.lengths[first:end].sum(dtype=np.int64))
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
    return f"\ndocument {document}, the first {len(ids):,} of {total:,} tokens:\n{text}"


if __name__ == "__main__":
    raise SystemExit(main())
