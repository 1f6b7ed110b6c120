"""Continue texts with a checkpoint's model.

python tools/generate.py --load checkpoints/ --prompt "Call me" "It was" --sample-tokens 100
python tools/generate.py --load checkpoints/ --prompt-file prompts.txt --temperature 0
python tools/generate.py --load checkpoints/ --tensor-model-parallel-size 2 < prompts.txt

Model, tokenizer and precision are the checkpoint's. A prompt is a line of the file, or of stdin, that is not empty
(--prompt "" begins with nothing); texts go to stdout as they grow, everything else to stderr.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from megazpp.base.flags import check_positive, flag
from megazpp.base.program import program
from megazpp.data.tokenizer import marks_note
from megazpp.features import FEATURES
from megazpp.inference.generate import sequences_that_fit
from megazpp.inference.on_checkpoint import Loaded, run_on_checkpoint
from megazpp.inference.sample import SampleConfig
from megazpp.inference.text import continue_texts
from megazpp.run.arguments import RunConfig

DEFAULT_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Prompts.

    Where the prompts come from, and how many are continued at once.
    """

    prompt_file: str | None = flag(None, "file with a prompt on each line (default: stdin, without --prompt)")
    prompts_at_once: int | Literal["auto"] = flag(
        8, "prompts of one batch; keys and values of all of them are kept; auto: as many as fit, at most 256"
    )
    kv_on: Literal["device", "host"] = flag(
        "device", "where keys and values lie; from the host those of one layer at a time are copied to the device"
    )

    def __post_init__(self) -> None:
        if self.prompts_at_once != "auto":
            check_positive(self, "prompts_at_once")


@program
def main(argv: list[str]) -> int:
    return run_on_checkpoint(__file__, __doc__, GenerateConfig, run, argv, check=check, features=FEATURES, spread=False)


def check(config: RunConfig, extra: GenerateConfig) -> None:
    """Refuse what cannot be before anything is loaded."""
    if extra.prompt_file is None:
        return
    if config.section(SampleConfig).sample_prompt:
        raise ValueError("--sample-prompt and --prompt-file exclude each other")
    if not Path(extra.prompt_file).expanduser().is_file():
        raise ValueError(f"--prompt-file {extra.prompt_file} does not exist")
    if next(read_prompts((), extra.prompt_file, 1), None) is None:
        raise ValueError(f"--prompt-file {extra.prompt_file} holds no prompt")


def run(loaded: Loaded) -> None:
    config, world, extra, longest = loaded.config, loaded.dims.world, loaded.extra, loaded.config.data.seq_length
    assert longest is not None
    sample = config.section(SampleConfig)
    sample = dataclasses.replace(sample, sample_tokens=sample.sample_tokens or DEFAULT_TOKENS)
    on_host, size, batches = extra.kv_on == "host", extra.prompts_at_once, iter(list[list[str]]())
    if world.rank == 0:
        if size == "auto":
            size = sequences_that_fit(loaded.built[0], longest, loaded.device, on_host=on_host)
            loaded.say(f" {size} prompts at once")
        batches = read_prompts(config.section(SampleConfig).sample_prompt, extra.prompt_file, size)
    out, done = sys.stdout if world.rank == 0 else None, 0
    if note := marks_note(loaded.tokenizer):
        loaded.say(f"note: {note}")
    started, count = 0.0, 0
    while prompts := world.share_object(next(batches, [])):
        started = started or time.perf_counter()
        _, generated = continue_texts(
            *loaded.built,
            loaded.dims,
            loaded.tokenizer,
            prompts,
            sample,
            max_length=longest,
            seed=config.launch.seed,
            first_prompt=done,
            out=out,
            cache_on_host=on_host,
        )
        loaded.say(f"with the cache: {generated.describe()}")
        done, count = done + len(prompts), count + sum(map(len, generated.tokens))
    if not done:
        raise ValueError("there is no prompt on stdin")
    if loaded.streamed is not None:
        loaded.say(loaded.streamed.describe_speed(count, time.perf_counter() - started))


def read_prompts(given: Sequence[str], file: str | None, size: int) -> Iterator[list[str]]:
    """Batches of prompts: those given, also empty ones; else lines of the file or stdin, from a terminal as typed."""
    if given:
        yield from _batches(given, size)
        return
    name = "stdin" if file is None else f"--prompt-file {file}"
    try:
        if file is None:
            yield from _batches(_lines(sys.stdin), 1 if sys.stdin.isatty() else size)
        else:
            with Path(file).expanduser().open(encoding="utf-8") as lines:
                yield from _batches(_lines(lines), size)
    except UnicodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error}") from error


def _lines(file: Iterable[str]) -> Iterator[str]:
    return filter(None, (line.rstrip("\r\n") for line in file if line.encode()))


def _batches(prompts: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(prompts)
    while batch := list(itertools.islice(rest, size)):
        yield batch


if __name__ == "__main__":
    raise SystemExit(main())
