"""From one format to another: what `tools/convert_checkpoint.py` does.

Everything that can be refused is refused before the output is begun; then one tensor after the other goes through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megazpp.checkpoint.folder import TRACKER
from megazpp.checkpoint.record import SHAPE, RunRecord, TrainingProgress, found_from_anywhere
from megazpp.convert.huggingface import choose_architecture, open_model, write_model
from megazpp.convert.megatron import open_megatron
from megazpp.convert.model import Imported, Model
from megazpp.convert.native import open_checkpoint, open_tokenizer, write_weights
from megazpp.convert.output import check_output, whole_folder
from megazpp.convert.peft import merged
from megazpp.convert.tokenizer_files import find_differences, write_tokenizer_files
from megazpp.data.tokenizer import TokenizerConfig, find_tokenizer, load_tokenizer, marks_note, names_tokenizer
from megazpp.data.tokenizer_folder import CONFIG
from megazpp.flags import check_words, flag
from megazpp.optim.schedule import ScheduleConfig, build_schedule


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What becomes what."""

    input: str | None = flag(None, "folder of the model: Hugging Face's, or of Megatron's or our own checkpoints")
    output: str | None = flag(None, "folder to write, which must be new or empty")
    source: Literal["huggingface", "megatron", "megazpp"] | None = flag(
        None, "format of --input (default: what it looks like)", name="--from"
    )
    target: Literal["huggingface", "megazpp"] | None = flag(
        None, "format of --output (default: huggingface from our checkpoints, megazpp from all others)", name="--to"
    )
    ckpt_step: int | None = flag(None, "convert the checkpoint of this iteration instead of the latest")
    adapter: str | None = flag(None, "folder of a LoRA adapter (adapter_config.json), which is merged into the weights")

    def __post_init__(self) -> None:
        check_words(self)


def convert(config: ConvertConfig, tokenizer: TokenizerConfig, say: Callable[[str], None]) -> str:
    """Convert; returns the line that says what came out.

    Args:
        tokenizer: flags for the model's tokenizer; without any, what is found with the model.
        say: prints a line of progress.
    Raises:
        ValueError: something is missing, damaged, or cannot be in the other format; nothing is written.
    """
    if config.input is None or config.output is None:
        raise ValueError(f"{'--input' if config.input is None else '--output'} is missing")
    source, target = Path(config.input).expanduser(), Path(config.output).expanduser()
    if not source.is_dir():
        raise ValueError(f"--input {source} {'is no folder' if source.exists() else 'does not exist'}")
    check_output(target)
    kind = config.source or guess_format(source)
    wanted = config.target or ("huggingface" if kind == "megazpp" else "megazpp")
    adapter = None if config.adapter is None else Path(config.adapter).expanduser()
    merges = adapter is not None and kind == wanted == "megazpp"
    if (kind == "megazpp") == (wanted == "megazpp") and not merges:
        raise ValueError(f"--from {kind} --to {wanted}: one of the two has to be megazpp, and one another format")
    if adapter is not None and not adapter.is_dir():
        raise ValueError(f"--adapter {adapter} {'is no folder' if adapter.exists() else 'does not exist'}")
    if kind == "huggingface" and config.ckpt_step is not None:
        raise ValueError(f"--ckpt-step {config.ckpt_step}: --input {source} is one model, without iterations")
    say(f"{source} is {_NAMES[kind]}")
    if merges:
        return rewrite(source, target, config.ckpt_step, tokenizer, say, adapter)
    if kind == "megazpp":
        return export(source, target, config.ckpt_step, tokenizer, say, adapter)
    if kind == "megatron":
        imported = open_megatron(source, config.ckpt_step)
        return bring_in(imported._replace(model=_with(adapter, imported.model)), target, tokenizer, say)
    model = _with(adapter, open_model(source))
    length, window = model.config.max_position_embeddings, model.config.window
    assert length is not None
    found, seq_length = find_tokenizer(source), min(length, window or length)
    return bring_in(Imported(model, TrainingProgress(), seq_length, found, padded=False), target, tokenizer, say)


_NAMES = {
    "huggingface": "a Hugging Face model",
    "megatron": "a checkpoint of Megatron-LM's",
    "megazpp": "a checkpoint of MegaZ++",
}


def guess_format(folder: Path) -> str:
    """What a folder looks like; raises ValueError if like nothing that is known."""
    if (folder / CONFIG).is_file():
        return "huggingface"
    if any(folder.glob("iter_*/run.json")):
        return "megazpp"
    if any(folder.glob("mp_rank_*")) or (folder / TRACKER).is_file():
        return "megatron"
    raise ValueError(
        f"--input {folder} is neither a Hugging Face model ({CONFIG}) nor a folder of checkpoints ({TRACKER})"
    )


def _with(adapter: Path | None, model: Model) -> Model:
    return model if adapter is None else merged(model, adapter)


def export(
    source: Path,
    target: Path,
    iteration: int | None,
    given: TokenizerConfig,
    say: Callable[[str], None],
    adapter: Path | None = None,
) -> str:
    """Our checkpoint to a Hugging Face folder."""
    model, record = open_checkpoint(source, iteration)
    model = _with(adapter, model)
    architecture = choose_architecture(model.config)
    tokenizer = open_tokenizer(source, record, given, say)
    for note in find_differences(tokenizer) if tokenizer is not None else ():
        say(f"note: {note}")
    with whole_folder(target) as folder:
        write_model(folder, model, token_ids=write_tokenizer_files(folder, tokenizer))
    return f"{target} holds iteration {record.progress.iteration} as {architecture.class_name}{_described(model)}"


def rewrite(
    source: Path,
    target: Path,
    iteration: int | None,
    given: TokenizerConfig,
    say: Callable[[str], None],
    adapter: Path | None,
) -> str:
    """Our checkpoint as another one of ours, without what trains it, and with an adapter merged."""
    model, record = open_checkpoint(source, iteration)
    model = _with(adapter, model)
    tokenizer = open_tokenizer(source, record, given, say)
    new = dataclasses.replace(record, scaler={}, groups=[], guard={}, layout={}, tokenizer_folder=None)
    new = dataclasses.replace(new, vocab_size=model.rows, has_optimizer=False, has_rng=False)
    with whole_folder(target) as folder:
        write_weights(folder, model, new, {} if tokenizer is None else tokenizer.files)
    return f"{target} holds the model as iteration {record.progress.iteration}{_described(model)}"


def bring_in(imported: Imported, target: Path, given: TokenizerConfig, say: Callable[[str], None]) -> str:
    """A model as a checkpoint of ours, without an optimizer."""
    found = given if names_tokenizer(given) else imported.tokenizer
    found = dataclasses.replace(found, add_special_tokens=given.add_special_tokens)
    tokenizer, model = load_tokenizer(found), imported.model
    if tokenizer is None:
        say("note: no tokenizer was found; the flags for one (see --help) record it with the checkpoint")
    else:
        num_ids, missing = tokenizer.vocab_size, "a text with one of the rest is refused"
        if imported.padded:
            model = model.first_rows(min(num_ids, model.rows))
        if num_ids != model.rows:
            what = missing if num_ids > model.rows else "all count, as in transformers"
            say(f"note: the tokenizer has {num_ids} tokens, the model's vocabulary is its {model.rows} rows: {what}")
            tokenizer.fit(model.rows)
        for note in (marks_note(tokenizer), *find_differences(tokenizer)):
            if note is not None:
                say(f"note: {note}")
    schedule = build_schedule(  # which no weights go with
        ScheduleConfig(lr=0.0), weight_decay=0.0, train_iters=1, train_samples=None, global_batch_size=1
    )
    with whole_folder(target) as folder:
        record = RunRecord(
            progress=imported.progress,
            scaler={},
            groups=[],
            schedule=schedule.state_dict(),
            flags=found_from_anywhere(_flags(model, imported.seq_length, found)),
            vocab_size=model.rows,
            tokenizer=None if tokenizer is None else tokenizer.identity,
            layout={},
            has_optimizer=False,
            has_rng=False,
            torch=torch.__version__,
        )
        write_weights(folder, model, record, {} if tokenizer is None else tokenizer.files)
    return f"{target} holds the model as iteration {imported.progress.iteration}{_described(model)}"


def _flags(model: Model, seq_length: int, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """What our programs take from a checkpoint, by field name."""
    own = dataclasses.asdict(model.config)
    return {
        **{name: own[name] for name in (*SHAPE, "init_method_std", "hidden_dropout", "attention_dropout")},
        **dataclasses.asdict(tokenizer),
        "seq_length": seq_length,
        "bf16": model.dtype == torch.bfloat16,
        "fp16": model.dtype == torch.float16,
    }


def _described(model: Model) -> str:
    parameters = sum(torch.Size(entry.shape).numel() for entry in model.tensors.values())
    return f": {parameters:,} parameters, {model.dtype}, {model.rows:,} tokens"
