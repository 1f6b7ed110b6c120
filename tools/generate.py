"""Generate text with the model of a checkpoint.

python tools/generate.py --load checkpoints/ --prompt "Call me" "It was" --sample-tokens 100
python tools/generate.py --load checkpoints/ --prompt-file prompts.txt --temperature 0
python tools/generate.py --load checkpoints/ --tensor-model-parallel-size 2 < prompts.txt
python tools/generate.py --load checkpoints/ --chat --prompt "Who is Ahab?" --system-prompt "Be brief."
python tools/generate.py --load checkpoints/ --chat --prompt-file conversation.json

The checkpoint determines the model, the tokenizer, the chat template and the precision.

Prompts: each line of a text file, or of stdin, that is not empty is a prompt. (--prompt "" generates without a prompt.)
Each line of a file NAME.jsonl is an object whose "prompt" is a text or, with --chat, a list of messages (the key
"messages" is accepted as well). A file NAME.json holds one such object or list.

Output: texts are written to stdout while they are generated, with --chat only the answers. All other output goes to
stderr.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

# A step of decoding has many small products, after each of which torch's threads wait for each other. By default they
# wait in a busy loop. If other programs use the cores, this loop takes milliseconds from the threads that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it when torch is imported

from megazpp.base.flags import flag
from megazpp.base.program import answer_flags
from megazpp.features import FEATURES
from megazpp.inference.config import SampleConfig, parse_checkpoint_flags
from megazpp.post_training.config import ChatConfig
from megazpp.run.arguments import ParsedRun
from megazpp.run.flag_checks import check_paths

DEFAULT_TOKENS = 100  # number of generated tokens without --sample-tokens


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ChatConfig):
    """Prompts.

    The source of the prompts, and the batch size.

    Attributes:
        prompt_file: file with one prompt per line, or NAME.jsonl or NAME.json (default: stdin, unless --prompt is
            given).
        chat: treat prompts as messages of a user, which are rendered with the chat template.
        truncate_prompt: remove the beginning of a prompt that leaves no room for --sample-tokens, instead of rejecting
            long prompts.
        prompts_at_once: number of prompts per batch, whose keys and values are all cached; auto: as many as fit, at
            most 256.
        kv_cache_device: location of the key-value cache; with host, one layer's cache at a time is copied to the
            device.
    """

    prompt_file: str | None = flag(None, must_exist=True)
    chat: bool = flag(False)
    truncate_prompt: bool = flag(False)
    prompts_at_once: int | Literal["auto"] = flag(8, must_be="positive")
    kv_cache_device: Literal["device", "host"] = flag("device")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in () if self.chat else [field.name for field in dataclasses.fields(ChatConfig)]:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} applies only to messages: add --chat"
                )


def parse(argv: list[str]) -> ParsedRun:
    """Return the flags of the command line. Flags that the user leaves out are read from the checkpoint later.

    Raises:
        ValueError: a flag is wrong, or --sample-prompt and --prompt-file are both given.
    """
    common, defaults = [field.name for field in dataclasses.fields(SampleConfig)], {"sample_tokens": DEFAULT_TOKENS}
    options: dict[str, Any] = {"description": __doc__, "features": FEATURES, "common": common, "defaults": defaults}
    parsed = parse_checkpoint_flags(argv, GenerateConfig, file=__file__, **options)
    sampling, file = parsed.config.section(SampleConfig), parsed.extra[0].prompt_file
    if sampling.sample_tokens == 0:
        raise ValueError("--sample-tokens 0 generates nothing; give a positive number")
    if sampling.sample_prompt and file is not None:
        raise ValueError("--sample-prompt and --prompt-file exclude each other; give only one of them")
    return parsed


# answers --help and rejects most wrong flags before the imports below, which take seconds
answer_flags(__name__, parse, functools.partial(check_paths, needs_load=True))

from megazpp.parallel.failure import report_tracebacks

report_tracebacks()  # tells the other hosts if one of the imports below fails on this host

from megazpp.base.files import errors_as
from megazpp.base.program import UserError, user_errors
from megazpp.checkpoint.metadata import CheckpointMetadata
from megazpp.data.dataset import build_tokenizer
from megazpp.data.documents import read_records
from megazpp.data.tokenizer import Tokenizer, special_tokens_note
from megazpp.inference.generate import sequences_that_fit
from megazpp.inference.on_checkpoint import Loaded, run_on_checkpoint
from megazpp.inference.text import Start, check_start, continue_texts, start_of
from megazpp.post_training.chat import ChatTemplate, load_chat_template
from megazpp.post_training.config import ChatConfig
from megazpp.post_training.formatting import prompt_ids
from megazpp.run.arguments import RunConfig
from megazpp.run.start import distributed_program

GivenPrompt = str | dict[str, Any]  # a text, or an object with the key "prompt" or "messages" as in a .jsonl file


@distributed_program
def main(argv: list[str]) -> int:
    """Load the checkpoint on all ranks and continue the prompts. Return the exit code."""
    return run_on_checkpoint(parse(argv), run, main=main, check=check, spread=False)


def check(config: RunConfig, extra: GenerateConfig, _: CheckpointMetadata) -> None:
    """Raise a ValueError if a flag or a prompt is wrong, before the checkpoint is loaded. This leaves stdin unread."""
    given, file = config.section(SampleConfig).sample_prompt, extra.prompt_file
    if not given and file is None:
        return
    tokenizer = build_tokenizer(config.tokenizer, config.data, log=lambda line: None)
    starts = Starts(tokenizer, config, extra, lambda note: None)
    if not [starts.make(prompt) for batch in read_prompts(given, file, 1) for prompt in batch]:
        raise ValueError(f"--prompt-file {file} holds no prompt; write at least one into it")


class Starts:
    """A converter of prompts to token IDs, which truncates or rejects prompts that are too long.

    Args:
        tokenizer: the model's tokenizer.
        config: flags with the sequence length and the number of tokens to generate.
        extra: flags of this program.
        say: function that prints a note about a prompt that is truncated or may become too long.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: RunConfig, extra: GenerateConfig, say: Callable[[str], None]
    ) -> None:
        assert config.data.seq_length is not None
        self._tokenizer, self._say, self._count, self._cuts = tokenizer, say, 0, extra.truncate_prompt
        self._longest = config.data.seq_length
        self._tokens = config.section(SampleConfig).sample_tokens
        self._template = load_chat_template(extra, tokenizer) if extra.chat else None
        if self._template is not None and self._template.is_default:
            say("note: the tokenizer has no chat template, so --chat writes ChatML in plain text (--chat-template)")

    def make(self, prompt: GivenPrompt) -> Start:
        """Return the token IDs of a prompt, together with the text to show.

        Raises:
            ValueError: the prompt cannot be continued. The message has the number of the prompt.
        """
        self._count += 1
        name, longest, before = f"prompt {self._count}", self._longest, self._tokenizer.special_tokens.before
        with errors_as(name):
            ids, shown = self._start(prompt)
        first = len(before) if ids[: len(before)] == before else 0
        kept = max(longest - self._tokens, first + 1)
        if self._cuts and kept < len(ids):
            self._say(f"note: {name} is truncated from {len(ids)} tokens to its last {kept}")
            ids = ids[:first] + ids[first - kept :]  # the special tokens at the beginning, and the last other tokens
        elif len(ids) + self._tokens > longest:
            self._say(
                f"note: {name} and its continuation exceed the model's {longest} tokens, so each token attends only to "
                "the latest ones"
            )
        return check_start(Start(ids, shown), longest, name, advice="--truncate-prompt removes its beginning")

    def _start(self, prompt: GivenPrompt) -> Start:
        """Return the untruncated token IDs of a prompt, rendered with the chat template if --chat is given.

        Raises:
            ValueError: the prompt is a conversation without --chat, or the template cannot render it.
        """
        if self._template is None and isinstance(prompt, str):
            return start_of(prompt, self._tokenizer)
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        record: dict[str, Any] = {"prompt": given.get("messages"), **given}
        value = record["prompt"]
        if self._template is None and isinstance(value, list):
            raise ValueError("the prompt is a list of messages; add --chat to render it with the chat template")
        if self._template is not None and isinstance(value, str):
            record["prompt"] = [{"role": "user", "content": value}]
        template = self._template or ChatTemplate(self._tokenizer)
        return Start(prompt_ids(record, self._tokenizer, template)[1], "" if self._template else value)


def run(loaded: Loaded) -> None:
    """Continue all prompts with the loaded model, batch by batch. Rank 0 reads the prompts and prints the texts.

    Raises:
        UserError: a prompt cannot be read or continued, or stdin has no prompt.
    """
    # Read the settings, and on rank 0 create the iterator of batches of prompts.
    config, world, extra, longest = loaded.config, loaded.dims.world, loaded.extra, loaded.config.data.seq_length
    assert longest is not None
    sample = config.section(SampleConfig)
    on_host, size, batches = extra.kv_cache_device == "host", extra.prompts_at_once, iter(list[list[GivenPrompt]]())
    if world.rank == 0:
        if size == "auto":
            size = sequences_that_fit(loaded.built[0], longest, loaded.device, on_host=on_host)
            loaded.say(f" {size} prompts at once")
        batches = read_prompts(config.section(SampleConfig).sample_prompt, extra.prompt_file, size)
    with user_errors():
        make = Starts(loaded.tokenizer, config, extra, loaded.say).make
    out, done = sys.stdout if world.rank == 0 else None, 0
    if note := special_tokens_note(loaded.tokenizer, prompts=True):
        loaded.say(f"note: {note}")

    # Rank 0 shares each batch with the other ranks; an empty batch ends the loop.
    started, count = 0.0, 0
    while True:
        with user_errors():
            starts = [make(prompt) for prompt in next(batches, [])]
        if not (starts := world.share_object(starts)):
            break
        started = started or time.perf_counter()
        _, generated = continue_texts(
            *loaded.built,
            loaded.dims,
            loaded.tokenizer,
            starts,
            sample,
            max_length=longest,
            seed=config.launch.seed,
            first_prompt=done,
            out=out,
            cache_on_host=on_host,
        )
        loaded.say(f"with the cache: {generated.describe()}")
        done, count = done + len(starts), count + sum(map(len, generated.tokens))

    # Raise an error if there was no prompt. If the weights were streamed, print the speed.
    if not done:
        raise UserError("stdin has no prompt; write one per line, or give --prompt or --prompt-file")
    if loaded.streamed is not None:
        loaded.say(loaded.streamed.describe_speed(count, time.perf_counter() - started))


def read_prompts(given: Sequence[str], file: str | None, size: int) -> Iterator[list[GivenPrompt]]:
    """Yield batches of prompts: from --prompt if it is given, otherwise from the file or stdin.

    Args:
        given: prompts of --prompt, which may be empty texts. If there are any, nothing else is read.
        file: path of the file with prompts. The suffix decides the format: one JSON object or prompt (.json), one JSON
            object per line (.jsonl), or else one prompt per line. None reads lines from stdin. On a terminal each line
            is a batch, so that it is answered immediately.
        size: largest number of prompts per batch.
    Raises:
        OSError: the file cannot be read, except for a .jsonl file.
        ValueError: the file or stdin is not UTF-8, the file is not JSON although its name says so, or a .jsonl file
            cannot be read.
    """
    if given:
        yield from _batches(given, size)
        return
    name = "stdin" if file is None else f"--prompt-file {file}"
    with (
        errors_as(f"{name} is not JSON", (json.JSONDecodeError, RecursionError)),
        errors_as(f"{name} is not text in UTF-8", UnicodeError),
    ):
        if file is None:
            yield from _batches(_lines(sys.stdin), 1 if sys.stdin.isatty() else size)
        elif file.endswith(".json"):
            found = json.loads(Path(file).expanduser().read_text(encoding="utf-8-sig"))
            yield [found if isinstance(found, dict) else {"prompt": found}]
        elif file.endswith(".jsonl"):
            yield from _batches((record for _, record in read_records(Path(file).expanduser(), dict)), size)
        else:
            with Path(file).expanduser().open(encoding="utf-8-sig") as lines:
                yield from _batches(_lines(lines), size)


def _lines(file: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a file that are not empty; raise UnicodeEncodeError for a line that was not valid UTF-8."""
    return filter(None, (line.rstrip("\r\n") for line in file if line.encode()))


def _batches(prompts: Iterable[GivenPrompt], size: int) -> Iterator[list[GivenPrompt]]:
    """Yield lists of at most `size` prompts."""
    rest = iter(prompts)
    while batch := list(itertools.islice(rest, size)):
        yield batch


if __name__ == "__main__":
    raise SystemExit(main())
