"""The conversion between formats that `tools/convert_checkpoint.py` runs.

All checks come before the output begins. Tensors are then converted one after the other, into a folder that appears
complete or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megazpp.base.files import remove, renamed_when_done, try_lock
from megazpp.checkpoint.folder import TRACKER, CheckpointFolder
from megazpp.checkpoint.metadata import IMPORTED_FROM, SCORE_PAD, SHAPE, CheckpointMetadata, found_from_anywhere
from megazpp.checkpoint.read import find_weights
from megazpp.checkpoint.weights import WeightOpener
from megazpp.convert.config import ConvertConfig
from megazpp.convert.huggingface import class_name, open_model, write_model
from megazpp.convert.megatron import open_megatron
from megazpp.convert.model import HEAD, Model
from megazpp.convert.native import NO_ADAPTERS, AdapterConverter, open_checkpoint, open_tokenizer, write_weights
from megazpp.convert.tokenizer_files import find_differences, write_tokenizer_files
from megazpp.data.tokenizer import TokenizerConfig, load_tokenizer, names_tokenizer, special_tokens_note
from megazpp.data.tokenizer_folder import CONFIG
from megazpp.optim.config import ScheduleConfig
from megazpp.optim.schedule import build_schedule


def convert(
    config: ConvertConfig, tokenizer: TokenizerConfig, say: Callable[[str], None], *, opener: WeightOpener
) -> str:
    """Convert a model; return a line about the result.

    Args:
        config: flags of the conversion.
        tokenizer: flags of the model's tokenizer; empty flags use the tokenizer of --input.
        say: function that prints a line.
        opener: opener of weights; an optional feature may provide one for checkpoints with adapters.
    Raises:
        ValueError: a file is missing or damaged, or the other format cannot hold the model. Nothing is written.
    """
    # ---- check the flags
    if config.input is None or config.output is None:
        raise ValueError(f"{'--input' if config.input is None else '--output'} is missing")
    source, target = Path(config.input).expanduser(), Path(config.output).expanduser()
    if not source.is_dir():
        raise ValueError(f"--input {source} {'is not a folder' if source.exists() else 'does not exist'}")
    check_output(target)
    kind = config.source or guess_format(source)
    wanted = config.target or ("huggingface" if kind == "megazpp" else "megazpp")
    adapter, trained = None if config.adapter is None else Path(config.adapter).expanduser(), False
    opener = opener if isinstance(opener, AdapterConverter) else NO_ADAPTERS
    if kind == "megazpp":
        folder = CheckpointFolder(source, "--input")
        trained = not opener.is_whole(find_weights(folder, config.ckpt_step, opener=opener)[1])
    merges = kind == wanted == "megazpp" and (adapter is not None or trained)
    if config.keep_adapters and (merges or not trained):
        raise ValueError(
            f"--keep-adapters needs a LoRA run's checkpoint as --input, not {source}, and --to huggingface"
        )
    if (kind == "megazpp") == (wanted == "megazpp") and not merges:
        raise ValueError(f"--from {kind} --to {wanted}: exactly one of the two has to be megazpp")
    if adapter is not None and not adapter.is_dir():
        raise ValueError(f"--adapter {adapter} {'is not a folder' if adapter.exists() else 'does not exist'}")
    if kind == "huggingface" and config.ckpt_step is not None:
        raise ValueError(f"--ckpt-step {config.ckpt_step}: --input {source} is a single model without iterations")
    # ---- open the model, and write it
    say(f"{source} is {_NAMES[kind]}")
    record: CheckpointMetadata | None = None
    if kind == "megazpp":
        model, record = open_checkpoint(source, config.ckpt_step, opener, merge=not config.keep_adapters)
    else:
        model = open_megatron(source, config.ckpt_step) if kind == "megatron" else open_model(source, adapter=adapter)
    if adapter is not None:
        model = opener.merge(model, adapter)
    if record is None:
        return bring_in(model, target, tokenizer, say)
    if not merges:
        kept = opener if config.keep_adapters else None
        return export(source, target, model, record, tokenizer, say, adapters=kept)
    # ---- a checkpoint with merged adapters, and without training state
    own = open_tokenizer(source, record, tokenizer, say)
    flags = record.flags | dict.fromkeys((*opener.flags, IMPORTED_FROM))
    record = dataclasses.replace(record, scaler={}, groups=[], guard={}, layout={}, tokenizer_folder=None)
    record = dataclasses.replace(record, flags=flags, vocab_size=model.rows, has_optimizer=False, has_rng=False)
    with whole_folder(target) as unfinished:
        write_weights(unfinished, model, record, {} if own is None else own.files)
    return f"{target} holds the model as iteration {record.progress.iteration}{_described(model)}"


_NAMES = {
    "huggingface": "a Hugging Face model",
    "megatron": "a checkpoint of Megatron-LM",
    "megazpp": "a checkpoint of MegaZ++",
}


def guess_format(folder: Path) -> str:
    """Return a folder's format, by its files; raise ValueError if no format fits."""
    if (folder / CONFIG).is_file():
        return "huggingface"
    if any(folder.glob("iter_*/run.json")):
        return "megazpp"
    if any(folder.glob("mp_rank_*")) or (folder / TRACKER).is_file():
        return "megatron"
    raise ValueError(
        f"--input {folder} is neither a Hugging Face model ({CONFIG}) nor a folder of checkpoints ({TRACKER})"
    )


def export(
    source: Path,
    target: Path,
    model: Model,
    record: CheckpointMetadata,
    given: TokenizerConfig,
    say: Callable[[str], None],
    *,
    adapters: AdapterConverter | None = None,
) -> str:
    """Write our checkpoint as a Hugging Face folder; return a line about it.

    Args:
        source: folder of checkpoints.
        target: folder to write.
        model: model of the checkpoint.
        record: metadata of the checkpoint.
        given: flags of the tokenizer.
        say: function that prints a line.
        adapters: converter of the checkpoint's adapters, which are written to the folder adapter/; `model` is their
            base. None for a checkpoint without adapters, or with merged ones.
    """
    if HEAD in model.tensors and not record.is_reward_model:
        say("note: the policy's value head (scalar_head) is left out, because a language model has none")
        model = model._replace(tensors={name: entry for name, entry in model.tensors.items() if name != HEAD})
    name, tokenizer = class_name(model), open_tokenizer(source, record, given, say)
    for note in find_differences(tokenizer) if tokenizer is not None else ():
        say(f"note: {note}")
    with whole_folder(target) as folder:
        ids, ends = write_tokenizer_files(folder, tokenizer), {None if tokenizer is None else tokenizer.eod}
        ids |= {name: _inside(name, value, model.rows, say) for name, value in ids.items() if name.endswith("_id")}
        ends |= {*eos} if isinstance(eos := ids.get("eos_token_id"), list) else {eos}
        if HEAD in model.tensors and SCORE_PAD in record.flags:  # the padding token of the imported model
            ids["pad_token_id"] = record.flags[SCORE_PAD]
        elif HEAD in model.tensors and ids.get("pad_token_id") in (None, *ends):
            ids["pad_token_id"] = None  # with eos as padding, transformers would score the token before the end
            say("note: no token serves for padding only, so transformers scores one text at a time (pad_token_id)")
        write_model(folder, model, token_ids=ids)
        if adapters is not None:
            (folder / "adapter").mkdir()
            checkpoint = CheckpointFolder(source, "--input").of(record.progress.iteration)
            adapters.export(checkpoint, record, model.config, target, folder / "adapter")
    what = "iteration" if adapters is None else "the base and adapters of iteration"
    return f"{target} holds {what} {record.progress.iteration} as {name}{_described(model)}"


def _inside(name: str, value: Any, rows: int, say: Callable[[str], None]) -> Any:
    """Return an id of config.json, or a list of ids, without ids beyond the rows of the embedding."""
    ids = value if isinstance(value, list) else [value]
    kept = [each for each in ids if each is None or -rows <= each < rows]
    if kept == ids:
        return value
    say(f"note: {name} {value} is left out of config.json, because it is beyond the {rows} rows of the embedding")
    return kept or None if isinstance(value, list) else None


def bring_in(model: Model, target: Path, given: TokenizerConfig, say: Callable[[str], None]) -> str:
    """Write a model as a checkpoint of ours, without optimizer state; return a line about it.

    Args:
        model: model to write.
        target: folder of checkpoints to write.
        given: flags of the tokenizer; empty flags use the tokenizer of the model.
        say: function that prints a line.
    """
    for line in model.notes:
        say(f"note: {line}")
    # ---- tokenizer
    found = given if names_tokenizer(given) else model.tokenizer
    found = dataclasses.replace(found, add_special_tokens=given.add_special_tokens, eos_token=given.eos_token)
    tokenizer = load_tokenizer(found)
    if tokenizer is None:
        say("note: no tokenizer was found; give its flags (see --help) to store it with the checkpoint")
    else:
        num_ids, missing = tokenizer.vocab_size, "texts with other tokens are refused"
        if model.padded:
            model = model.first_rows(min(num_ids, model.rows))
        if num_ids != model.rows:
            what = missing if num_ids > model.rows else "all rows are used, as in transformers"
            say(f"note: the tokenizer has {num_ids} tokens, and the model's vocabulary has {model.rows} rows: {what}")
            tokenizer.fit(model.rows)
        for note in (special_tokens_note(tokenizer), *find_differences(tokenizer)):
            if note is not None:
                say(f"note: {note}")
    # ---- metadata
    schedule = build_schedule(  # a record needs one, but an import has no training to resume
        ScheduleConfig(lr=0.0), weight_decay=0.0, train_iters=1, train_samples=None, global_batch_size=1
    )
    own, held = dataclasses.asdict(model.config), (*SHAPE, "init_method_std", "hidden_dropout", "attention_dropout")
    flags = {  # flags that our programs take from a checkpoint
        **{name: own[name] for name in held},
        **dataclasses.asdict(found),
        "seq_length": model.seq_length,
        **({"objective": "reward", SCORE_PAD: model.score_pad} if HEAD in model.tensors else {"objective": None}),
        "bf16": model.dtype == torch.bfloat16,
        "fp16": model.dtype == torch.float16,
    }
    record = CheckpointMetadata(
        progress=model.progress,
        scaler={},
        groups=[],
        schedule=schedule.state_dict(),
        flags=found_from_anywhere(flags) | {IMPORTED_FROM: model.origin},
        vocab_size=model.rows,
        tokenizer=None if tokenizer is None else tokenizer.identity,
        layout={},
        has_optimizer=False,
        has_rng=False,
        torch=torch.__version__,
    )
    with whole_folder(target) as folder:
        write_weights(folder, model, record, {} if tokenizer is None else tokenizer.files)
    return f"{target} holds the model as iteration {model.progress.iteration}{_described(model)}"


def _described(model: Model) -> str:
    parameters = sum(torch.Size(entry.shape).numel() for entry in model.tensors.values())
    return f": {parameters:,} parameters, {model.dtype}, {model.rows:,} tokens"


def check_output(path: Path) -> None:
    """Raise ValueError if an output folder cannot be created or is not empty, before the work for it begins."""
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"--output {path} is not empty")
        if path.is_mount():  # nothing can be renamed onto a mount point
            raise ValueError(f"--output {path} is the mount point of a file system; give a folder inside it")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"--output {path} exists and is not a folder")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` at the end, or removed if an exception is raised.

    The leftovers of a killed conversion are removed by the next one with the same output.

    Raises:
        ValueError: the folder cannot be created, or another process is writing it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written to: {error.strerror}") from error
    try:
        if not try_lock(descriptor):
            raise ValueError(f"--output {path} is being written by another conversion")
        for entry in unfinished.iterdir():
            remove(entry)
        with renamed_when_done(unfinished, path):
            yield unfinished
            check_output(path)  # again, because another process may have created it meanwhile
    finally:
        os.close(descriptor)
