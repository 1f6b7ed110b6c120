"""Tokenize a corpus into Megatron's .bin/.idx pairs, in several processes (preprocess_data.py).

The main process cuts the input files into blocks of documents (data/documents.py). Worker processes tokenize the
blocks, and the main process writes the token ids in the order of the input. The output files appear under their names
only when they are complete (data/indexed_builder.py).
"""

from __future__ import annotations

import array
import contextlib
import datetime
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from megazpp.base.files import check_prefix
from megazpp.base.flags import MOST_PROCESSES, Config, flag
from megazpp.base.program import end_with
from megazpp.data.documents import BadLine, Block, parse_block, read_blocks, readable_inputs, stop_or_skip
from megazpp.data.indexed_builder import IndexedDatasetBuilder, check_output, optimal_dtype
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig, document_end, load_tokenizer, special_tokens_note

T = TypeVar("T")
R = TypeVar("R")

_BATCH = 256  # documents that are tokenized in one call; a larger number needs more memory for lists of ids
_READ_AHEAD = 4  # items per worker that `map_in_processes` submits before it yields the first result


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Config):
    """Preprocessing.

    The corpus to tokenize, and the .bin/.idx pairs to write.

    Attributes:
        input: JSON lines, Parquet or text files, also .gz and .zst.
        json_keys: fields to tokenize, each into a separate dataset.
        output_prefix: prefix of the datasets PREFIX_KEY_document.bin and .idx.
        append_eod: end every document with the tokenizer's end-of-document token.
        workers: processes that tokenize.
        log_interval: documents between two lines of progress.
        on_error: reaction to a malformed line; skip counts it and continues.
        overwrite: replace existing datasets.
    """

    input: tuple[str, ...] = flag(None, nargs="+", required=True)
    json_keys: tuple[str, ...] = flag(("text",), nargs="+")
    output_prefix: str = flag(None, metavar="PREFIX", required=True)
    append_eod: bool = flag(False)
    workers: int = flag(1, must_be="positive", most=MOST_PROCESSES)
    log_interval: int = flag(1000, must_be="positive")
    on_error: Literal["stop", "skip"] = flag("stop")
    overwrite: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys {' '.join(self.json_keys)} names a field twice: name each field once")


class Encoded(NamedTuple):
    """A tokenized block of documents.

    Attributes:
        tokens: for each of --json-keys, [sum of lengths] token ids of the documents, concatenated.
        lengths: for each of --json-keys, [documents] int32 number of ids of each document.
        bad_lines: malformed lines of the block.
        text_bytes: bytes of the block's texts under all --json-keys, in UTF-8.
        disk_bytes: bytes of the input file, before decompression, that were read for the block.
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    bad_lines: list[BadLine]
    text_bytes: int
    disk_bytes: int


@dataclass(kw_only=True)
class PreprocessProgress:
    """Progress of the tokenization of a corpus, for the log and the final summary.

    Attributes:
        total_disk_bytes: size of all input files in bytes.
        started: value of `time.monotonic` at the start, in seconds.
        documents: number of documents tokenized so far, including those with empty texts.
        tokens: number of token ids written so far for all --json-keys, including eod and special tokens around texts.
        bad_lines: number of malformed lines found so far.
        text_bytes: bytes of the texts tokenized so far for all --json-keys, in UTF-8.
        disk_bytes: bytes of the input files read so far, before decompression.
    """

    total_disk_bytes: int
    started: float = field(default_factory=time.monotonic)
    documents: int = 0
    tokens: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0

    def add(self, block: Encoded) -> None:
        """Add the counts of a tokenized block of documents to the progress."""
        self.documents += len(block.lengths[0])
        self.tokens += sum(map(len, block.tokens))
        self.bad_lines += len(block.bad_lines)
        self.text_bytes += block.text_bytes
        self.disk_bytes += block.disk_bytes

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        share = min(1.0, self.disk_bytes / max(1, self.total_disk_bytes))
        left = seconds / share * (1 - share) if share else float("inf")
        counts = (self.documents, self.text_bytes / 1e6, self.tokens)
        documents, megabytes, tokens = (count / seconds if seconds else 0.0 for count in counts)
        return (
            f"Processed {self.documents:,} documents, {self.tokens:,} tokens ({documents:.1f} docs/s,"
            f" {megabytes:.2f} MB/s, {tokens:,.0f} tokens/s);"
            f" {share:.1%} of the input, {_clock(seconds)} gone, {_clock(left)} left"
        )


def preprocess(config: PreprocessConfig, tokenizer: TokenizerConfig, log: Callable[[str], None]) -> PreprocessProgress:
    """Tokenize a corpus into one .bin/.idx pair for each of --json-keys, and return the final counts.

    Args:
        config: flags of the input and the output.
        tokenizer: flags of the tokenizer. Each worker process loads the tokenizer from these flags.
        log: function that prints a line: a note, the progress, or a malformed line that is skipped.
    Raises:
        ValueError: a flag or an input file is not usable, there is no text, or a line is malformed and --on-error is
            stop. No output file is left in these cases.
    """
    # ---- check the flags, and load the tokenizer
    loaded = load_tokenizer(tokenizer)
    inputs, prefixes = _check(config, loaded)
    assert loaded is not None
    if note := special_tokens_note(loaded):
        log(f"note: {note}")
    dtype, keys = optimal_dtype(loaded.vocab_size), config.json_keys
    progress = PreprocessProgress(total_disk_bytes=sum(path.stat().st_size for path in inputs))
    # ---- tokenize the documents, and write the .bin/.idx pair of each field
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(prefix, dtype)) for prefix in prefixes]
        blocks = itertools.chain.from_iterable(read_blocks(path, keys) for path in inputs)
        encoded: Generator[Encoded, None, None]
        how: dict[str, Any] = {"keys": keys, "append_eod": config.append_eod}
        if config.workers == 1:
            encoded = (encode_block(block, loaded, **how) for block in blocks)
        else:
            encode = functools.partial(_encode_in_worker, config=tokenizer, **how)
            encoded = map_in_processes(encode, blocks, config.workers)
        for block in stack.enter_context(contextlib.closing(encoded)):
            for bad in block.bad_lines:
                stop_or_skip(bad, config.on_error, log)
            for builder, tokens, lengths in zip(builders, block.tokens, block.lengths, strict=True):
                # A document with an empty text becomes a document without sequences, as in Megatron.
                builder.extend(tokens, lengths[lengths > 0], np.cumsum(lengths > 0))
            logged = progress.documents // config.log_interval
            progress.add(block)
            if progress.documents // config.log_interval > logged:
                log(str(progress))
        for builder, key in zip(builders, keys, strict=True):
            if len(builder) == 0:
                raise ValueError(
                    f"--input {' '.join(config.input)} has no text in the field {key}: leave the field out of "
                    "--json-keys, or give files with text"
                )
        for builder in builders:
            builder.finalize()
    if not config.append_eod and (end := document_end(loaded)):
        log(f"note: documents do not end with the end-of-document token {end[0]}; --append-eod adds it")
    return progress


def encode_block(block: Block, tokenizer: Tokenizer, *, keys: Sequence[str], append_eod: bool) -> Encoded:
    """Tokenize the documents of a block. An empty text gets no token ids, not even special tokens or an eod.

    Args:
        block: documents to parse and tokenize.
        tokenizer: tokenizer of the texts.
        keys: names of the fields to tokenize (--json-keys).
        append_eod: True to end each document with the tokenizer's eod, unless its special tokens already end with eod.
    """
    end, num_added = document_end(tokenizer) if append_eod else [], tokenizer.special_tokens.number
    ids = [array.array("i") for _ in keys]  # collect ids in arrays, because lists are 5 % slower
    lengths: list[list[int]] = [[] for _ in keys]
    found = list(parse_block(block, keys))
    bad_lines, text_bytes = [each for each in found if isinstance(each, BadLine)], 0
    documents = [each for each in found if not isinstance(each, BadLine)]
    for i in range(len(keys)):
        for first in range(0, len(documents), _BATCH):
            texts = [document[i] for document in documents[first : first + _BATCH]]
            text_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
            for tokens in tokenizer.encode_batch(texts):
                whole = tokens + end if len(tokens) > num_added else []
                ids[i].fromlist(whole)
                lengths[i].append(len(whole))
    dtype = optimal_dtype(tokenizer.vocab_size)
    return Encoded(
        [np.frombuffer(each, dtype=np.intc).astype(dtype) for each in ids],
        [np.array(each, dtype=np.int32) for each in lengths],
        bad_lines,
        text_bytes,
        block.disk_bytes,
    )


def _check(config: PreprocessConfig, tokenizer: Tokenizer | None) -> tuple[list[Path], list[Path]]:
    """Check flags, input files and output paths before a tokenization; raise ValueError if one of them is unusable.

    Returns:
        The input files, and for each of --json-keys the prefix of the .bin/.idx pair to write.
    """
    if tokenizer is None:
        raise ValueError("--tokenizer-model is missing: name a tokenizer (tools/train_tokenizer.py trains one)")
    if config.append_eod and tokenizer.eod is None:
        raise ValueError(
            "--append-eod: the tokenizer has no end-of-document token: name one of its tokens by --eos-token, or leave "
            "out --append-eod"
        )
    check_prefix(config.output_prefix, "--output-prefix")
    prefixes = [Path(f"{config.output_prefix}_{key}_document").expanduser() for key in config.json_keys]
    for prefix in prefixes:
        check_output(prefix, overwrite=config.overwrite)
    return readable_inputs(config.input, config.json_keys), prefixes


def _encode_in_worker(block: Block, config: TokenizerConfig, **how: Any) -> Encoded:
    tokenizer = _load_once(config)
    assert tokenizer is not None
    return encode_block(block, tokenizer, **how)


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def map_in_processes(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Generator[R, None, None]:
    """Apply `function` to each item in worker processes, and yield the results in the order of the items.

    Items and results are stored in temporary files, and messages between processes contain only file names. The reason
    is that ProcessPoolExecutor has one pipe for the results of all workers. If a worker is killed while it writes a
    long message, the pool waits forever for the rest. A message with a file name is short enough to be written
    atomically.

    All processes end when the generator ends, is closed, or raises an error.

    Args:
        function: function from an item to a result. It is pickled for each item, so it should be small; large objects
            that it needs should be cached in the worker.
        items: items to process.
        num_workers: number of worker processes.
    Raises:
        ValueError: a worker was killed, or there is no space for temporary files.
        Exception: an error that `function` raised in a worker.
    """
    ahead: deque[tuple[Path, Future[None]]] = deque()

    def first_result() -> Any:
        path, done = ahead.popleft()
        done.result()
        result = pickle.loads(path.read_bytes())
        path.unlink()
        return result

    with tempfile.TemporaryDirectory(prefix="megazpp-workers-") as folder:
        context = multiprocessing.get_context("spawn")  # tokenizers have threads, which do not survive a fork
        pool = ProcessPoolExecutor(num_workers, context, initializer=_prepare_worker, initargs=(os.getpid(),))
        try:
            for number, item in enumerate(items):
                path = Path(folder, str(number))
                _store(item, path)
                ahead.append((path, pool.submit(_replace, path, function)))
                if len(ahead) == _READ_AHEAD * num_workers:
                    yield first_result()
            while ahead:
                yield first_result()
        except BrokenProcessPool as error:
            raise ValueError("a worker of --workers was killed, possibly out of memory; use fewer --workers") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_worker(parent: int) -> None:
    """Make a new worker process tokenize in one thread, ignore Ctrl-C, and end with the main process.

    `parent` is the process ID of the main process.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenize in one thread, because the workers together use all cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C and ends the workers
    end_with(parent)  # otherwise a worker would wait forever for an item after the main process was killed


def _replace(path: Path, function: Callable[[Any], Any]) -> None:
    """Replace the pickled item in the file `path` by the result of `function`. Worker processes call this."""
    _store(function(pickle.loads(path.read_bytes())), path)


def _store(value: object, path: Path) -> None:
    try:
        path.write_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except OSError as error:
        raise ValueError(f"--workers: {path}: {error.strerror}; set TMPDIR to another folder") from error


def _clock(seconds: float) -> str:
    return "?" if seconds == float("inf") else str(datetime.timedelta(seconds=int(seconds)))
