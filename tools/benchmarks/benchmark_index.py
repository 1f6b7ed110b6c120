"""Time building the document, sample and shuffle indices of a corpus of many documents.

python tools/benchmarks/benchmark_index.py --documents 10000000 --mean-length 500 --seq-length 2048 --epochs 1
"""

from __future__ import annotations

import time

import numpy as np

from megazpp.data.gpt_dataset import build_indices
from megazpp.program import flags_of, program


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of the corpus")
    parser.add_argument("--mean-length", type=float, default=500, help="tokens of a document on average")
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--epochs", type=float, default=1.0, help="how often the corpus is used")
    args = parser.parse_args(argv)

    lengths = np.random.default_rng(0).exponential(args.mean_length, args.documents).astype(np.int32) + 1
    tokens = int(lengths.sum(dtype=np.int64))
    num_samples = int(args.epochs * (tokens - 1) // args.seq_length)
    started = time.perf_counter()
    indices = build_indices(lengths, first=0, num_samples=num_samples, seq_length=args.seq_length, seed=1234)
    seconds = time.perf_counter() - started
    print(
        f"{args.documents:,} documents, {tokens:,} tokens, {len(indices.shuffle):,} samples of {args.seq_length}:"
        f" {seconds:.2f} s, {sum(array.nbytes for array in indices) / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
