"""Compare preprocess_data.py with SentencePiece called plainly: tokens per second of CPU time, and of the clock.

python tools/benchmarks/benchmark_preprocessing.py --megabytes 16 --workers 1 2 --rounds 5

The corpus is the shipped one, its paragraphs one document each, repeated. The yardstick is a loop over texts in memory
that calls SentencePiece, in as many processes at once as there are workers; ours reads JSON lines and brings a dataset
to the disk, the start of the workers included. Ratios are medians over rounds in which both run in turn. On a machine
with other work on it only CPU time means something.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sentencepiece

from megazpp.data.preprocess import PreprocessConfig, preprocess
from megazpp.data.text import read_documents, resolve_text_paths
from megazpp.data.tokenizer import TokenizerConfig
from megazpp.data.tokenizer_training import train_sentencepiece
from megazpp.program import flags_of, program

VOCAB_SIZE = 8192


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the text for each worker")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers to try")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of which the median counts")
    args = parser.parse_args(argv)

    chapters = list(read_documents(resolve_text_paths(["builtin:moby_dick"])[0]))
    paragraphs = [text for chapter in chapters for text in chapter.split("\n\n")]
    texts = paragraphs * max(1, round(args.megabytes * 1e6 / sum(len(text.encode()) for text in paragraphs)))
    with tempfile.TemporaryDirectory() as folder:
        model, corpus = Path(folder, "sp.model"), Path(folder, "corpus.jsonl")
        model.write_bytes(train_sentencepiece(chapters, VOCAB_SIZE))
        for workers in args.workers:
            with open(corpus, "w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for _ in range(workers) for text in texts)
            compare(corpus, model, texts, workers, args.rounds)


def compare(corpus: Path, model: Path, texts: list[str], workers: int, rounds: int) -> None:
    """Print the rates of both and their ratios."""
    config = PreprocessConfig(
        input=(str(corpus),), output_prefix=str(corpus.with_suffix("")), workers=workers, overwrite=True
    )
    tokenizer = TokenizerConfig(tokenizer_model=str(model))
    plain, ours = [], []
    for _ in range(rounds):
        plain.append(measure(lambda: encode_plainly(model, texts, workers)))
        ours.append(measure(lambda: preprocess(config, tokenizer, lambda _: None).tokens))
    print(f"{workers} worker(s), {corpus.stat().st_size / 1e6:.1f} MB, {workers * len(texts):,} documents")
    for unit, theirs, mine in zip(("cpu", "clock"), zip(*plain, strict=True), zip(*ours, strict=True), strict=True):
        ratio = statistics.median(b / a for a, b in zip(theirs, mine, strict=True))
        print(
            f"  tokens/s ({unit:5}): SentencePiece {statistics.median(theirs):9,.0f}, preprocess_data.py"
            f" {statistics.median(mine):9,.0f}, ratio {ratio:.3f}"
        )


def measure(run: Callable[[], int]) -> tuple[float, float]:
    """Tokens, which `run` returns, per second of CPU time of all processes that have ended since, and of the clock."""
    cpu, clock = cpu_seconds(), time.perf_counter()
    tokens = run()
    return tokens / (cpu_seconds() - cpu), tokens / (time.perf_counter() - clock)


def cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def encode_plainly(model: Path, texts: Sequence[str], workers: int) -> int:
    """The number of tokens of `workers` loops at once, each in a process."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        counts = pool.starmap(count_tokens, [(model, texts)] * workers, chunksize=1)
        pool.close()
        pool.join()  # before its CPU time is read
    return sum(counts)


def count_tokens(model: Path, texts: Sequence[str]) -> int:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return sum(len(processor.encode(text)) for text in texts)


if __name__ == "__main__":
    raise SystemExit(main())
