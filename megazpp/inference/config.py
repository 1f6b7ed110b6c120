"""Command-line flags of text generation, and parsing of the flags of programs that use a checkpoint's model."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazpp.base.flags import flag, spelling
from megazpp.packed_weights.config import WeightsConfig
from megazpp.run.arguments import TAKEN, FeatureConfig, ParsedRun, parse_run_config

_SMALLEST, _LARGEST = 1e-9, 1e9  # range of numbers by which logits are divided, and of top-p


@dataclass(frozen=True, kw_only=True)
class SampleConfig(FeatureConfig):
    """Text generation.

    Flags for the prompts, the number of tokens, and the way in which tokens are sampled.

    Attributes:
        sample_prompt: texts to continue (default: an end-of-document token; in generate.py, the text from stdin).
        sample_tokens: number of tokens to generate for each prompt; 0 generates no text, which generate.py refuses.
        sample_temperature: divisor of the logits; 0 selects the most likely token.
        sample_top_k: number of most likely tokens to sample from; 0 samples from all.
        sample_top_p: probability in (0, 1]: sample from the most likely tokens that together have this probability.
        sample_min_p: fraction in [0, 1]: sample from tokens with at least this fraction of the most likely token's
            probability.
        sample_repetition_penalty: divisor of positive logits and factor of negative logits, for tokens that already
            occur in the prompt or text.
        sample_stop: strings that end a generated text and are left out of it; \\n in a string is a line break.
    """

    sample_prompt: tuple[str, ...] = flag((), nargs="*", aliases=("--prompt",))
    sample_tokens: int = flag(0, aliases=("--num-tokens-to-generate",), must_be="not negative")
    sample_temperature: float = flag(0.8, aliases=("--temperature",), must_be="not negative")
    sample_top_k: int = flag(40, aliases=("--top-k", "--top_k"), must_be="not negative")
    sample_top_p: float = flag(1.0, aliases=("--top-p", "--top_p"), must_be="a share")
    sample_min_p: float | None = flag(
        None, aliases=("--min-p",), must_be="not negative", most=(1, "the largest probability itself")
    )
    sample_repetition_penalty: float = flag(1.0, aliases=("--repetition-penalty",), must_be="positive")
    sample_stop: tuple[str, ...] = flag((), nargs="*", aliases=("--stop",))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sample_temperature", "sample_top_p", "sample_repetition_penalty"):
            if (value := getattr(self, name)) and not _SMALLEST <= value <= _LARGEST:
                given = f"{spelling(self, name)} {value}"
                raise ValueError(
                    f"{given} is not in [{_SMALLEST}, {_LARGEST}], where logits in fp32 stay finite: give a number in "
                    "this range (--sample-temperature 0 selects the most likely token)"
                )
        if "" in self.sample_stop:
            raise ValueError("--sample-stop '' is in every text: give a string that is not empty")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings of --sample-stop, which end a generated text; `\\n` in the flag has become a line break."""
        return tuple(stop.replace("\\n", "\n") for stop in self.sample_stop)


# Names of config fields whose flags --help lists in every program that uses a checkpoint's model
COMMON = ("load", "ckpt_step", "tensor_model_parallel_size", "nproc", "bf16", "fp16", "tokenizer_model", "print_config")


def parse_checkpoint_flags(
    argv: Sequence[str],
    extra: type,
    *,
    file: str,
    description: str | None,
    features: Sequence[Any],
    common: Sequence[str],
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> ParsedRun:
    """Parse the command line of a program that uses a checkpoint's model.

    The flags that the checkpoint has recorded are not known yet. `run_on_checkpoint` adds them.

    Args:
        argv: command line without the program name.
        extra: config class of the program's own flags.
        file: path of the program's file, which is in a folder directly below the repository's root.
        description: text whose first line describes the program in --help.
        features: optional features, whose flags the program also accepts.
        common: names of config fields whose flags --help lists, in addition to COMMON, the flags of `extra` and the
            flags for the storage of weights.
        defaults: defaults of this program by field name, where they differ from the configs' defaults.
    Raises:
        ValueError: a flag is unknown, its value is not allowed, or --load is missing.
    """
    path = Path(file).resolve()
    parsed = parse_run_config(
        argv,
        path.parents[1],
        program=path.name,
        description=(description or "").partition("\n")[0],
        features=features,
        extra=[extra, WeightsConfig],
        common=[*COMMON, *common],
        default_file=None,
        defaults=defaults,
        taken=TAKEN,
    )
    if parsed.config.checkpoint.load is None:
        raise ValueError("--load is missing: give the folder of the model's checkpoints")
    return parsed
