"""Continue texts with a checkpoint's model.

python tools/generate.py --load checkpoints/ --prompt "Call me" "It was" --sample-tokens 100
python tools/generate.py --load checkpoints/ --prompt-file prompts.txt --temperature 0
python tools/generate.py --load checkpoints/ --tensor-model-parallel-size 2 < prompts.txt

Model, tokenizer and precision are the checkpoint's. A prompt is a line of the file, or of stdin, that is not empty
(--prompt "" begins with nothing); texts go to stdout as they grow, everything else to stderr.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megazpp.base.arguments import RunConfig
from megazpp.base.flags import check_positive, flag
from megazpp.base.program import program
from megazpp.base.run import Loaded, run_on_checkpoint
from megazpp.data.tokenizer import marks_note
from megazpp.inference.memory import sequences_that_fit
from megazpp.inference.text import continue_texts
from megazpp.stored.streamed import Speed

DEFAULT_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Generation: the prompts, and how many at once."""

    prompt_file: str | None = flag(None, "file with a prompt on each line (default: stdin, without --prompt)")
    prompts_at_once: int | Literal["auto"] = flag(
        8, "prompts of one batch; keys and values of all of them are kept; auto: as many as fit, at most 256"
    )
    kv_on: Literal["device", "host"] = flag(
        "device", "where keys and values lie; from the host those of one layer at a time are copied to the device"
    )
    compare_without_cache: bool = flag(False, "generate again without the cache, and say how fast and whether equal")

    def __post_init__(self) -> None:
        if self.prompts_at_once != "auto":
            check_positive(self, "prompts_at_once")


@program
def main(argv: list[str]) -> int:
    return run_on_checkpoint(__file__, __doc__, GenerateConfig, run, argv, check=check, spread=False)


def check(config: RunConfig, extra: GenerateConfig) -> None:
    """Refuse what cannot be before anything is loaded."""
    if extra.prompt_file is None:
        return
    if config.sample.sample_prompt:
        raise ValueError("--sample-prompt and --prompt-file exclude each other")
    if not Path(extra.prompt_file).expanduser().is_file():
        raise ValueError(f"--prompt-file {extra.prompt_file} does not exist")
    if next(read_prompts(config, dataclasses.replace(extra, prompts_at_once=1)), None) is None:
        raise ValueError(f"--prompt-file {extra.prompt_file} holds no prompt")


def run(loaded: Loaded) -> None:
    config, world, longest = loaded.config, loaded.dims.world, loaded.config.data.seq_length
    assert longest is not None
    sample = dataclasses.replace(config.sample, sample_tokens=config.sample.sample_tokens or DEFAULT_TOKENS)
    batches = read_prompts(config, with_batch_size(loaded)) if world.rank == 0 else iter(())
    out, done = sys.stdout if world.rank == 0 else None, 0
    write = functools.partial(
        continue_texts,
        *loaded.built,
        loaded.dims,
        loaded.tokenizer,
        max_length=longest,
        seed=config.launch.seed,
        cache_on_host=loaded.extra.kv_on == "host",
    )
    if note := marks_note(loaded.tokenizer):
        loaded.say(f"note: {note}")
    speed, count = None, 0
    while prompts := world.share_object(next(batches, [])):
        if loaded.streamed is not None and speed is None:
            speed = Speed(loaded.streamed)
        _, generated = write(prompts, sample, first_prompt=done, out=out)
        loaded.say(f"with the cache: {generated.describe()}")
        if loaded.extra.compare_without_cache:
            _, plain = write(prompts, sample, first_prompt=done, use_cache=False)
            same = (
                "the same tokens" if plain.tokens == generated.tokens else "other tokens: sums were rounded otherwise"
            )
            loaded.say(f"without it: {plain.describe()}; {same}")
        done, count = done + len(prompts), count + sum(map(len, generated.tokens))
    if not done:
        raise ValueError("there is no prompt on stdin")
    if speed is not None:
        loaded.say(speed.reached(count))


def with_batch_size(loaded: Loaded) -> GenerateConfig:
    """The program's flags, with a number of prompts; on the rank that reads them."""
    extra: GenerateConfig = loaded.extra
    if extra.prompts_at_once != "auto":
        return extra
    on_host = extra.kv_on == "host"
    fits = sequences_that_fit(loaded.built[0], loaded.config.data.seq_length or 1, loaded.device, on_host=on_host)
    loaded.say(f" {fits} prompts at once")
    return dataclasses.replace(extra, prompts_at_once=fits)


def read_prompts(config: RunConfig, extra: GenerateConfig) -> Iterator[list[str]]:
    """Batches of prompts; from a terminal each as it is typed."""
    assert extra.prompts_at_once != "auto"
    if config.sample.sample_prompt:
        prompts = iter(config.sample.sample_prompt)  # also empty ones
        while batch := list(itertools.islice(prompts, extra.prompts_at_once)):
            yield batch
    elif extra.prompt_file is not None:
        with Path(extra.prompt_file).expanduser().open(encoding="utf-8") as file:
            yield from _batches(file, extra.prompts_at_once, f"--prompt-file {extra.prompt_file}")
    else:
        yield from _batches(sys.stdin, 1 if sys.stdin.isatty() else extra.prompts_at_once, "stdin")


def _batches(lines: Iterator[str], size: int, name: str) -> Iterator[list[str]]:
    prompts = filter(None, (line.rstrip("\r\n") for line in lines if line.encode()))
    try:
        while batch := list(itertools.islice(prompts, size)):
            yield batch
    except UnicodeError as error:
        raise ValueError(f"{name} is not text in UTF-8: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main())
