"""Build the tokenizer and the three datasets (training, validation, test) that the flags describe.

This file opens the sources of tokens: .bin/.idx pairs, text that it tokenizes, or generated documents. data/blend.py
then samples and blends them. Every rank calls the same functions with the same arguments. Tokenized text, trained
tokenizers and sample indices take time, so one process per node builds them and stores them in the cache directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazpp.base.files import cache_folder
from megazpp.base.program import Problems
from megazpp.data.blend import (
    BlendedDataset,
    DataSource,
    MockSequences,
    build_split,
    fit_for_split,
    indexed_source,
    open_sources,
)
from megazpp.data.cache import check_cache_dir
from megazpp.data.config import DataConfig, Splits, parse_split, paths_by_use, require_source
from megazpp.data.gpt_dataset import GPTDataset, Sequences, TooFewTokensError
from megazpp.data.loader import check_eod
from megazpp.data.text import cached_indexed_dataset, cached_sentencepiece, check_texts, resolve_text_paths
from megazpp.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerConfig, load_tokenizer

Samples = GPTDataset | BlendedDataset

DEFAULT_VOCAB_SIZE = 4096

# Checks of special and end-of-document tokens read the first _LOOKED_AT sequences of a dataset. In each sequence,
# `_has` searches the first _TOKENS_LOOKED_AT tokens and the last token.
_LOOKED_AT, _TOKENS_LOOKED_AT = 64, 1 << 20
_NO_TOKENIZER = "--tokenizer-model is missing: the ids in --data-path have no meaning without their tokenizer"


def check_inputs(
    config: DataConfig, tokenizer: TokenizerConfig, *, loaded: Tokenizer | None = None
) -> Tokenizer | None:
    """Check the data and the tokenizer of a run before workers start, by opening each file that the flags name.

    Args:
        config: flags of the data: the sources of tokens and the cache directory.
        tokenizer: flags of the tokenizer.
        loaded: tokenizer that these flags name; None loads it here.
    Returns:
        The tokenizer that the flags name, or None if the run trains one on --text-path or uses bytes for --mock-data.
    Raises:
        ValueError: a file is missing or damaged, or flags do not suit each other. The message names the flag and the
            file.
    """
    require_source(config)
    problems, sources = Problems(), list[DataSource]()
    with problems:
        loaded = loaded or load_tokenizer(tokenizer)
        if loaded is None and config.mock_data:
            ByteTokenizer(tokenizer.vocab_size or 256)  # the constructor raises ValueError if --vocab-size is below 256
        elif loaded is None and not config.text_path:
            raise ValueError(_NO_TOKENIZER)
    with problems:
        check_cache_dir(cache_dir(config))
    with problems:
        if config.text_path:
            check_texts(resolve_text_paths(config.text_path))
    for flag_name, values in {"--data-path": config.data_path, **paths_by_use(config)}.items():
        with problems:
            sources += open_sources(values, flag_name=flag_name)[0]
    problems.raise_all()
    if loaded is not None:
        check_special_tokens(
            [source.sequences for source in sources], loaded, " ".join(source.name for source in sources)
        )
    return loaded


def uses_with_data(config: DataConfig) -> Splits[bool]:
    """Return for each of training, validation and test True if the flags give it data, otherwise False.

    Each of the flags --train-data-path, --valid-data-path and --test-data-path gives data to the split in its name.
    Without these flags, --split gives data to each split whose proportion is above 0.
    """
    if any(paths := paths_by_use(config).values()):
        return Splits(*map(bool, paths))
    return Splits(*(start < stop for start, stop in parse_split(config.split)))


def check_special_tokens(datasets: Sequence[Sequences], tokenizer: Tokenizer, name: str) -> None:
    """Raise ValueError if tokenized data and a run disagree whether texts begin with special tokens, such as BOS.

    The function reads the first sequences of each dataset. It raises no error if some of these sequences begin with
    the special tokens and others do not.

    Args:
        datasets: tokenized datasets.
        tokenizer: tokenizer of the run, with --add-special-tokens or --no-add-special-tokens applied.
        name: description of the datasets for messages.
    """
    before, count = tokenizer.special_tokens.before, len(tokenizer.special_tokens.before)
    places = [(each, i) for each in datasets for i in range(min(len(each.lengths), _LOOKED_AT)) if each.lengths[i]]
    begins = [each.get(i)[:count].tolist() == before for each, i in places]
    if count == 0 or not begins or any(begins) != all(begins) or all(begins) == tokenizer.special_tokens.used:
        return
    if not tokenizer.special_tokens.used:
        raise ValueError(
            f"{name}: all texts begin with the special tokens {before}, against --no-add-special-tokens; "
            "leave out that flag, or tokenize the data again"
        )
    raise ValueError(
        f"{name}: no text begins with the special tokens {before}, but --add-special-tokens asks for them; "
        "give --no-add-special-tokens, or tokenize the data again"
    )


def missing_ends(sources: Iterable[DataSource], config: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Return a warning if given flags have no effect, because a source's first sequences have no end-of-document token.

    These flags are --reset-position-ids, --reset-attention-mask and --eod-mask-loss.

    Args:
        sources: sources that the run uses.
        config: flags of the data.
        tokenizer: tokenizer of the run.
    Returns:
        A line for the log, or None if there is nothing to warn about.
    """
    flags = {name: on for name, on in batch_options(config, tokenizer).items() if name != "eod"}
    names = [f"--{name.replace('_', '-')}" for name, on in flags.items() if on]
    without = [source.name for source in sources if names and not _has(tokenizer.eod, source.sequences)]
    if not without:
        return None
    return (
        f"WARNING: the first {_LOOKED_AT} sequences of {', '.join(dict.fromkeys(without))} have no end-of-document "
        f"token ({tokenizer.eod}), without which {', '.join(names)} has no effect; preprocess_data.py --append-eod "
        "adds it"
    )


def _has(token: int | None, sequences: Sequences) -> bool:
    """Return True if the first sequences of a dataset contain the id `token`, such as the end-of-document token.

    The search reads 64 sequences. In a long sequence, it reads only the first 2**20 ids and the last id.
    """
    for index, length in enumerate(sequences.lengths[:_LOOKED_AT].tolist()):
        parts = sequences.get(index, 0, min(length, _TOKENS_LOOKED_AT)), sequences.get(index, max(length - 1, 0))
        if any((part == token).any() for part in parts):
            return True
    return False


def build_tokenizer(
    config: TokenizerConfig, data: DataConfig, *, exact: bool = True, log: Callable[[str], None]
) -> Tokenizer:
    """Load the tokenizer that the flags name, train one on --text-path, or use bytes for --mock-data.

    Args:
        config: flags of the tokenizer. They may name no tokenizer.
        data: flags of the data, which decide what happens if the flags name no tokenizer.
        exact: True if the user has typed --vocab-size, so that a trained tokenizer must have exactly that size.
        log: function that prints a line.
    Raises:
        ValueError: the named tokenizer cannot be loaded, or none is named and the data is a .bin/.idx pair.
    """
    tokenizer = load_tokenizer(config)
    if tokenizer is not None:
        return tokenizer
    if data.text_path:
        paths = resolve_text_paths(data.text_path)
        size, exact = config.vocab_size or DEFAULT_VOCAB_SIZE, exact and config.vocab_size is not None
        return cached_sentencepiece(paths, size, exact=exact, cache_dir=cache_dir(data), log=log)
    if data.mock_data:
        return ByteTokenizer(config.vocab_size or 256)
    raise ValueError(_NO_TOKENIZER)


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    num_samples: Splits[int],
    seed: int,
    exact: bool = True,
    log: Callable[[str], None],
) -> Splits[Samples | None]:
    """Build the training, validation and test datasets of a run.

    Args:
        config: flags of the data.
        tokenizer: tokenizer of the run.
        num_samples: number of samples that the whole run takes for training, and that one evaluation takes for
            validation and for the test.
        seed: seed for the order of the samples.
        exact: True if the user has typed --split. Too few tokens for validation or test are then an error, as they
            always are for the data of --valid-data-path and --test-data-path. If False, the run continues without the
            validation or test dataset, and logs a note.
        log: function that prints a line. It is called before each slow operation and for each dataset.
    Returns:
        The three datasets. A dataset is None if the run takes no samples of it, or if there is no data for it.
    Raises:
        ValueError: flags contradict each other, a file is missing or damaged, a split has too few tokens, or its index
            does not fit into memory.
    """
    # ---- open the sources of tokens
    require_source(config)
    check_eod(**batch_options(config, tokenizer))
    assert config.seq_length is not None
    paths, bounds = paths_by_use(config), parse_split(config.split)
    weights: tuple[float, ...] | None = None
    if any(paths.values()):
        opened = [open_sources(values, flag_name=name) for name, values in paths.items()]
        bounds = Splits((0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    else:  # --split divides each source into training, validation and test data
        if config.mock_data:
            sequences = MockSequences(vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
            sources = [DataSource(sequences, "mock data", is_cached=False)]
        elif config.text_path:
            files = resolve_text_paths(config.text_path)
            prefix = cached_indexed_dataset(files, tokenizer, cache_dir=cache_dir(config), log=log)
            sources = [indexed_source(prefix, "--text-path")._replace(name=" ".join(config.text_path))]
        else:
            sources, weights = open_sources(config.data_path, flag_name="--data-path")
        sources = fit_for_split(sources, bounds)
        opened = [(sources, weights)] * len(bounds)
        for source in sources:
            if source.by_tokens:
                log(
                    f"note: --split: {source.name} has too few documents ({len(source.sequences.lengths)}) for each use"
                    " to get whole ones; it is split by tokens, inside documents"
                )
    # ---- build the training, validation and test samples
    used = [
        source for (sources, _), wanted in zip(opened, num_samples, strict=True) if wanted > 0 for source in sources
    ]
    if warning := missing_ends(used, config, tokenizer):
        log(warning)
    found: dict[str, Samples | None] = dict.fromkeys(Splits._fields)
    sizes = {"seq_length": config.seq_length, "vocab_size": tokenizer.vocab_size, "seed": seed}
    for use, (sources, weights), share, wanted in zip(Splits._fields, opened, bounds, num_samples, strict=True):
        if sources and wanted > 0 and share[0] < share[1]:
            try:
                found[use] = built = build_split(
                    use, sources, weights, share, num_samples=wanted, **sizes, cache_path=cache_dir(config)
                )
            except TooFewTokensError as error:
                if exact or use == "train" or any(paths.values()):
                    raise
                log(f"note: --split {config.split}: {error}, so there is no {use} data")
            except MemoryError as error:
                flag = "--train-iters or --train-samples" if use == "train" else "--eval-iters"
                raise ValueError(
                    f"{flag}: the index of {wanted:,} {use} samples does not fit into memory ({error}): lower the value"
                ) from error
            else:
                log(f"{use}: {built.description}")
    return Splits(**found)


def batch_options(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keyword arguments of `make_micro_batch`, which builds the model's inputs from samples.

    These are the tokenizer's `eod` and the flags `reset_position_ids`, `reset_attention_mask` and `eod_mask_loss`.
    """
    return {
        "eod": tokenizer.eod,
        "reset_position_ids": config.reset_position_ids,
        "reset_attention_mask": config.reset_attention_mask,
        "eod_mask_loss": config.eod_mask_loss,
    }


def unigram_entropy(dataset: Samples, vocab_size: int) -> float:
    """Return the entropy of a dataset's token frequencies, in nats per token.

    On this dataset, a model that ignores the context of a token cannot have a lower loss. Logs therefore show the
    entropy next to the loss, for comparison.
    """
    counts = dataset.token_counts(vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def cache_dir(config: DataConfig) -> Path:
    """Return the cache directory: --data-cache-path, or the folder `megazpp` in the user's cache directory."""
    return cache_folder() if config.data_cache_path is None else Path(config.data_cache_path).expanduser()
