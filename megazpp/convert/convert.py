"""Convert a model between the formats of MegaZ++, Hugging Face and Megatron-LM (tools/convert_checkpoint.py).

All checks come before the first byte of output. Tensors are then converted one after the other. The output folder
appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megazpp.base.files import errors_as, remove, renamed_when_done, try_lock
from megazpp.checkpoint.folder import TRACKER, CheckpointFolder
from megazpp.checkpoint.metadata import IMPORTED_FROM, SCORE_PAD, SHAPE, CheckpointMetadata, found_from_anywhere
from megazpp.checkpoint.read import find_weights
from megazpp.checkpoint.safe_reader import WeightOpener
from megazpp.convert.config import ConvertConfig
from megazpp.convert.huggingface import class_name, open_model, rounding_notes, write_model
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
    """Convert the model in --input to the format of --output, and return a line for the log about the result.

    Args:
        config: flags of the conversion.
        tokenizer: flags of the model's tokenizer. Flags that name no tokenizer select the tokenizer in --input.
        say: function that prints a line.
        opener: opener of a checkpoint's weights. LoRA's opener, an `AdapterConverter`, also reads adapters.
    Raises:
        ValueError: a file is missing or damaged, flags contradict each other, or the target format cannot represent
            the model. Nothing is written in these cases.
    """
    # ---- check the flags
    source, target = Path(config.input).expanduser(), Path(config.output).expanduser()
    if not source.is_dir():
        raise ValueError(
            f"--input {source} {'is not a folder' if source.exists() else 'does not exist'}: name the model's folder"
        )
    check_output(target)
    kind = config.source or guess_format(source)
    wanted = config.target or ("huggingface" if kind == "megazpp" else "megazpp")
    adapter, trained = None if config.adapter is None else Path(config.adapter).expanduser(), False
    opener = opener if isinstance(opener, AdapterConverter) else NO_ADAPTERS
    if kind == "megazpp":  # `trained` is True if the checkpoint has only the adapters that a LoRA run has trained
        folder = CheckpointFolder(source, "--input")
        trained = not opener.is_whole(find_weights(folder, config.ckpt_step, opener=opener)[1])
    # True for the one conversion from MegaZ++ to MegaZ++: to merge adapters into a checkpoint
    merges = kind == wanted == "megazpp" and (adapter is not None or trained)
    if config.keep_adapters and (merges or not trained):
        raise ValueError(
            f"--keep-adapters needs a LoRA run's checkpoint as --input, not {source}, and --to huggingface; "
            "otherwise leave it out"
        )
    if (kind == "megazpp") == (wanted == "megazpp") and not merges:
        raise ValueError(
            f"--from {kind} --to {wanted}: exactly one of the two has to be megazpp, because no other pair of formats "
            "is converted"
        )
    if adapter is not None and not adapter.is_dir():
        raise ValueError(
            f"--adapter {adapter} {'is not a folder' if adapter.exists() else 'does not exist'}: name its folder"
        )
    if kind == "huggingface" and config.ckpt_step is not None:
        raise ValueError(
            f"--ckpt-step {config.ckpt_step}: --input {source} is a single model without iterations; leave out "
            "--ckpt-step"
        )
    # ---- open the model, and write it in the other format
    say(f"--input {source} has the format {kind}")
    record: CheckpointMetadata | None = None
    if kind == "megazpp":
        model, record = open_checkpoint(source, config.ckpt_step, opener, merge=not config.keep_adapters)
    else:
        model = open_megatron(source, config.ckpt_step) if kind == "megatron" else open_model(source, adapter=adapter)
    if adapter is not None:
        model = opener.merge(model, adapter)
    if (size := tokenizer.model_vocab_size) is not None:
        if not model.padded or size > model.rows:
            padding = "" if model.padded else ", none of which is padding"
            raise ValueError(
                f"--model-vocab-size {size}: this flag removes the padding of a Megatron-LM model's vocabulary, but "
                f"--input {source} has {model.rows} rows{padding}; leave it out"
            )
        model = model.first_rows(size)
    if record is None:
        return bring_in(model, target, tokenizer, say)
    if not merges:
        kept = opener if config.keep_adapters else None
        return export(source, target, model, record, tokenizer, say, adapters=kept)
    # ---- write a MegaZ++ checkpoint with merged adapters, without training state
    own = open_tokenizer(source, record, tokenizer, say)
    flags = record.flags | dict.fromkeys((*opener.flags, IMPORTED_FROM))
    record = dataclasses.replace(record, scaler={}, groups=[], guard={}, layout={}, tokenizer_folder=None)
    record = dataclasses.replace(record, flags=flags, vocab_size=model.rows, has_optimizer=False, has_rng=False)
    with whole_folder(target) as unfinished:
        write_weights(unfinished, model, record, {} if own is None else own.files)
    return f"{target} holds the model as iteration {record.progress.iteration}{_described(model)}"


def guess_format(folder: Path) -> str:
    """Return the format of a model's folder, detected from its files: "huggingface", "megazpp" or "megatron".

    Raises:
        ValueError: the files are of no such format.
    """
    if (folder / CONFIG).is_file():
        return "huggingface"
    if any(folder.glob("iter_*/run.json")):
        return "megazpp"
    if any(folder.glob("mp_rank_*")) or (folder / TRACKER).is_file():
        return "megatron"
    raise ValueError(
        f"--input {folder} is neither a Hugging Face model ({CONFIG}) nor a folder of checkpoints ({TRACKER}): name "
        "another folder"
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
    """Write the model of a MegaZ++ checkpoint as a Hugging Face folder, and return a line for the log about it.

    Args:
        source: folder of checkpoints.
        target: Hugging Face folder to write.
        model: model of the checkpoint.
        record: metadata of the checkpoint.
        given: flags of the tokenizer. Flags that name no tokenizer select the checkpoint's tokenizer.
        say: function that prints a line.
        adapters: converter that writes the checkpoint's adapters to the subfolder adapter/. `model` then has the base
            weights without the adapters. None for a checkpoint without adapters, or if `model` has merged ones.
    """
    if HEAD in model.tensors and not record.is_reward_model:
        say("note: the policy's value head (scalar_head) is left out, because a language model has none")
        model = model._replace(tensors={name: entry for name, entry in model.tensors.items() if name != HEAD})
    name, tokenizer = class_name(model), open_tokenizer(source, record, given, say)
    differences = () if tokenizer is None else find_differences(tokenizer)
    for note in (*differences, *rounding_notes(model, model.dtype)):
        say(f"note: {note}")
    with whole_folder(target) as folder:
        ids, ends = write_tokenizer_files(folder, tokenizer), {None if tokenizer is None else tokenizer.eod}
        ids |= {name: _inside(name, value, model.rows, say) for name, value in ids.items() if name.endswith("_id")}
        ends |= {*eos} if isinstance(eos := ids.get("eos_token_id"), list) else {eos}
        # A reward model that was converted from Hugging Face keeps its padding token
        if HEAD in model.tensors and SCORE_PAD in record.flags:
            ids["pad_token_id"] = record.flags[SCORE_PAD]
        elif HEAD in model.tensors and ids.get("pad_token_id") in (None, *ends):
            # transformers takes the score at the last token that is not padding. With eos as padding token, this would
            # be the token before eos, but the model was trained with the score at the last token.
            ids["pad_token_id"] = None
            say("note: no token serves for padding only, so transformers scores one text at a time (pad_token_id)")
        write_model(folder, model, token_ids=ids)
        if adapters is not None:
            (folder / "adapter").mkdir()
            checkpoint = CheckpointFolder(source, "--input").of(record.progress.iteration)
            adapters.export(checkpoint, record, model.config, target, folder / "adapter")
    what = "iteration" if adapters is None else "the base and adapters of iteration"
    return f"{target} holds {what} {record.progress.iteration} as {name}{_described(model)}"


def _inside(name: str, value: Any, rows: int, say: Callable[[str], None]) -> Any:
    """Remove ids without a row in the embedding matrix from an entry of config.json about special tokens.

    Args:
        name: name of the entry, such as eos_token_id.
        value: value of the entry: an id, None, or a list of ids.
        rows: rows of the embedding matrix.
        say: function that prints a note if an id is removed.
    Returns:
        The entry's value without these ids; None if no id is left.
    """
    # Negative ids count from the end: transformers passes pad_token_id to torch's Embedding, where -1 is the last row
    ids = value if isinstance(value, list) else [value]
    kept = [each for each in ids if each is None or -rows <= each < rows]
    if kept == ids:
        return value
    say(f"note: {name} {value} is left out of config.json, because it is beyond the {rows} rows of the embedding")
    return kept or None if isinstance(value, list) else None


def bring_in(model: Model, target: Path, given: TokenizerConfig, say: Callable[[str], None]) -> str:
    """Write a model from Hugging Face or Megatron-LM as a MegaZ++ checkpoint, and return a line for the log about it.

    The checkpoint has no optimizer states.

    Args:
        model: model to write.
        target: folder of checkpoints to write.
        given: flags of the tokenizer. Flags that name no tokenizer select the model's tokenizer.
        say: function that prints a line.
    """
    for line in model.notes:
        say(f"note: {line}")
    # ---- open the tokenizer, and compare its size with the model's vocabulary
    found = given if names_tokenizer(given) else model.tokenizer
    overridden = ("add_special_tokens", "eos_token", "model_vocab_size")
    found = dataclasses.replace(found, **{name: getattr(given, name) for name in overridden})
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
        # Do not compare the tokenizer of a Megatron-LM model with transformers' one. The comparison needs transformers,
        # without which such a model can be converted.
        differences = () if model.padded else find_differences(tokenizer)
        for note in (special_tokens_note(tokenizer), *differences):
            if note is not None:
                say(f"note: {note}")
    # ---- build the metadata of the checkpoint, and write it with the weights
    schedule = build_schedule(  # run.json must contain a schedule, although no run resumes this checkpoint's training
        ScheduleConfig(lr=0.0), weight_decay=0.0, train_iters=1, train_samples=None, global_batch_size=1
    )
    own, held = dataclasses.asdict(model.config), (*SHAPE, "init_method_std", "hidden_dropout", "attention_dropout")
    flags = {  # flags that the programs of MegaZ++ read from a checkpoint
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
    """Return the end of a log line about a written model: number of parameters, dtype, and vocabulary size."""
    parameters = sum(torch.Size(entry.shape).numel() for entry in model.tensors.values())
    return f": {parameters:,} parameters, {model.dtype}, {model.rows:,} tokens"


def check_output(path: Path) -> None:
    """Raise ValueError if the folder of --output exists and is not empty, or cannot be replaced by a rename."""
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"--output {path} is not empty; name a new or empty folder")
        if path.is_mount():  # the finished folder could not be renamed to a mount point
            raise ValueError(f"--output {path} is the mount point of a file system; give a folder inside it")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"--output {path} exists and is not a folder; name a new or empty folder")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Return a context that yields a temporary folder, and renames it to `path`, the folder of --output, at its end.

    If an exception ends the context, the temporary folder is removed. If the process is killed, the temporary folder
    remains, and the next conversion with the same --output removes its files and uses it.

    Raises:
        ValueError: the folder cannot be created, or another process is writing it.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with errors_as(f"--output {path} cannot be written to", OSError, remedy="name another folder"):
        unfinished.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor):
            raise ValueError(
                f"--output {path} is being written by another conversion: wait for its end, or name another folder"
            )
        for entry in unfinished.iterdir():
            remove(entry)
        with renamed_when_done(unfinished, path):
            yield unfinished
            check_output(path)  # a second check, because another process may have created the folder meanwhile
    finally:
        os.close(descriptor)
