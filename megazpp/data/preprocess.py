"""A corpus to Megatron's .bin/.idx pairs: read, tokenize in several processes, write in order.

The main process cuts the files into blocks (documents.py), worker processes tokenize them, and the main process writes
the results in the order of the input. The output appears when it is complete (indexed_dataset.py).
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

from megazpp.base.flags import check_positive, check_words, flag
from megazpp.base.program import end_with
from megazpp.data.documents import BadLine, Block, check_readable, parse_block, read_blocks, stop_or_skip
from megazpp.data.indexed_dataset import IndexedDatasetBuilder, check_output, optimal_dtype
from megazpp.data.tokenizer import Tokenizer, TokenizerConfig, document_end, load_tokenizer, marks_note

T = TypeVar("T")
R = TypeVar("R")

_BATCH = 256  # documents whose ids are in memory as Python objects at once
_READ_AHEAD = 4  # items per worker that are taken before the result of the first of them is given out


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """A corpus to tokenize, and the place of the datasets."""

    input: tuple[str, ...] = flag((), "JSON lines, Parquet or text files, also .gz and .zst", nargs="+")
    json_keys: tuple[str, ...] = flag(("text",), "fields to tokenize; each makes a dataset of its own", nargs="+")
    output_prefix: str | None = flag(None, "the datasets are PREFIX_KEY_document.bin and .idx", metavar="PREFIX")
    append_eod: bool = flag(False, "end every document with the tokenizer's end-of-document token")
    workers: int = flag(1, "processes that tokenize")
    log_interval: int = flag(1000, "documents between two lines of progress")
    on_error: Literal["stop", "skip"] = flag("stop", "what to do at a line that is no document; skip counts it")
    overwrite: bool = flag(False, "replace datasets of that name")

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "workers", "log_interval")
        if len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys {' '.join(self.json_keys)} names one twice")


class Encoded(NamedTuple):
    """A tokenized block."""

    tokens: list[np.ndarray]  # per key: [sum of lengths] ids of the documents back to back
    lengths: list[np.ndarray]  # per key: [documents] int32
    bad_lines: list[BadLine]
    text_bytes: int
    disk_bytes: int  # of the part of the file that was read for it


@dataclass(kw_only=True)
class PreprocessProgress:
    """Counts of what has been written, out of `total_disk_bytes` of input.

    Attributes:
        documents: records of the input, also those with empty texts.
        tokens, text_bytes: sums over all of --json-keys; tokens include eod and the marks around texts.
    """

    total_disk_bytes: int
    started: float = field(default_factory=time.monotonic)
    documents: int = 0
    tokens: int = 0
    bad_lines: int = 0
    text_bytes: int = 0
    disk_bytes: int = 0

    def add(self, block: Encoded) -> None:
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
    """Tokenize a corpus; see `PreprocessConfig`. `log` gets lines of progress and bad lines.

    Raises:
        ValueError: a flag or an input is not usable, there is no text, or a line is bad and --on-error is stop. Nothing
            is written then.
    """
    loaded = load_tokenizer(tokenizer)
    inputs, prefixes = _check(config, loaded)
    assert loaded is not None
    if note := marks_note(loaded):
        log(f"note: {note}")
    dtype, keys = optimal_dtype(loaded.vocab_size), config.json_keys
    progress = PreprocessProgress(total_disk_bytes=sum(path.stat().st_size for path in inputs))
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
                builder.extend(tokens, lengths[lengths > 0], np.cumsum(lengths > 0))  # as Megatron: no empty sequences
            logged = progress.documents // config.log_interval
            progress.add(block)
            if progress.documents // config.log_interval > logged:
                log(str(progress))
        for builder, key in zip(builders, keys, strict=True):
            if len(builder) == 0:
                raise ValueError(f"--input {' '.join(config.input)} holds no {key}")
        for builder in builders:
            builder.finalize()
    return progress


def encode_block(block: Block, tokenizer: Tokenizer, *, keys: Sequence[str], append_eod: bool) -> Encoded:
    """Tokenize the documents of a block; an empty text has no ids, not even marks or an eod."""
    end, marks = document_end(tokenizer) if append_eod else [], tokenizer.marks.number
    ids = [array.array("i") for _ in keys]  # a list would keep an object for every token of the block: 5 % slower
    lengths: list[list[int]] = [[] for _ in keys]
    found = list(parse_block(block, keys))
    bad_lines, text_bytes = [each for each in found if isinstance(each, BadLine)], 0
    documents = [each for each in found if not isinstance(each, BadLine)]
    for i in range(len(keys)):
        for first in range(0, len(documents), _BATCH):
            texts = [document[i] for document in documents[first : first + _BATCH]]
            text_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
            for tokens in tokenizer.encode_batch(texts):
                whole = tokens + end if len(tokens) > marks else []
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
    """Refuse all that can be refused beforehand; returns the input files and the prefixes of the datasets."""
    if not config.input:
        raise ValueError("--input is missing: the files to tokenize")
    if config.output_prefix is None:
        raise ValueError("--output-prefix is missing: where the datasets go")
    if tokenizer is None:
        raise ValueError("--tokenizer-model is missing (tools/train_tokenizer.py makes one)")
    if config.append_eod and tokenizer.eod is None:
        raise ValueError("--append-eod: the tokenizer has no end-of-document token")
    prefixes = [Path(f"{config.output_prefix}_{key}_document").expanduser() for key in config.json_keys]
    for prefix in prefixes:
        check_output(prefix, overwrite=config.overwrite)
    inputs = [Path(value).expanduser() for value in config.input]
    for path in inputs:
        check_readable(path, config.json_keys)
    return inputs, prefixes


def _encode_in_worker(block: Block, config: TokenizerConfig, **how: Any) -> Encoded:
    tokenizer = _load_once(config)
    assert tokenizer is not None
    return encode_block(block, tokenizer, **how)


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def map_in_processes(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Generator[R, None, None]:
    """Yield the results of `function` for all items, in their order; leave no process behind, however this ends.

    The library's pool has one pipe for the results of all workers, and waits forever for the rest of a message whose
    sender is killed in the middle of it. So items and results are handed over as files, and messages are their names:
    fewer bytes than a pipe takes at once, which are written wholly or not at all.

    `function` is pickled with every item, so it is small (2 KB), and a cache in the worker keeps its needs; its
    exceptions come out. A ValueError says that a worker was killed, or that there is no room for temporary files.
    """
    ahead: deque[tuple[Path, Future[None]]] = deque()

    def first_result() -> Any:
        path, done = ahead.popleft()
        done.result()
        result = pickle.loads(path.read_bytes())
        path.unlink()
        return result

    with tempfile.TemporaryDirectory(prefix="megazpp-workers-") as folder:
        context = multiprocessing.get_context("spawn")  # not forked: tokenizers have threads
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
            raise ValueError("--workers: one was killed, perhaps for want of memory") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_worker(parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has one thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends the workers
    end_with(parent)  # else a worker waits for the next item forever when the main process is killed


def _replace(path: Path, function: Callable[[Any], Any]) -> None:
    """Apply `function` to the item in a file, in a worker, and put the result in its place."""
    _store(function(pickle.loads(path.read_bytes())), path)


def _store(value: object, path: Path) -> None:
    try:
        path.write_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except OSError as error:
        raise ValueError(f"--workers: {path}: {error.strerror}; TMPDIR names another folder") from error


def _clock(seconds: float) -> str:
    return "?" if seconds == float("inf") else str(datetime.timedelta(seconds=int(seconds)))
