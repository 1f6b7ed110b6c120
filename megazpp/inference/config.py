"""The flags of text generation."""

from __future__ import annotations

from dataclasses import dataclass

from megazpp.base.flags import check_not_negative, check_positive, flag
from megazpp.run.arguments import FeatureConfig


@dataclass(frozen=True, kw_only=True)
class SampleConfig(FeatureConfig):
    """Text generation.

    Prompts, number of tokens, and how tokens are sampled.
    """

    sample_prompt: tuple[str, ...] = flag(
        (),
        "texts to continue (default: an end-of-document token; stdin in generate.py)",
        nargs="*",
        aliases=("--prompt",),
    )
    sample_tokens: int = flag(
        0, "number of tokens to generate; 0 generates no sample", aliases=("--num-tokens-to-generate",)
    )
    sample_temperature: float = flag(
        0.8, "divisor of the logits; 0 selects the most likely token", aliases=("--temperature",)
    )
    sample_top_k: int = flag(
        40, "number of most likely tokens to sample from; 0 keeps all", aliases=("--top-k", "--top_k")
    )
    sample_top_p: float = flag(
        1.0,
        "probability in (0, 1]: sample from the most likely tokens that together have it",
        aliases=("--top-p", "--top_p"),
    )
    sample_min_p: float | None = flag(
        None,
        "share in [0, 1]: sample from tokens with at least this share of the most likely token's probability",
        aliases=("--min-p",),
    )
    sample_repetition_penalty: float = flag(
        1.0,
        "divisor of positive logits and factor of negative logits, for tokens that already occur in the prompt or text",
        aliases=("--repetition-penalty",),
    )
    sample_stop: tuple[str, ...] = flag(
        (),
        "strings that end a text and are not part of it; \\n in them is a line break",
        nargs="*",
        aliases=("--stop",),
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "sample_tokens", "sample_temperature", "sample_top_k")
        if not 0.0 < self.sample_top_p <= 1.0:
            raise ValueError(f"--sample-top-p {self.sample_top_p} is not in (0, 1]")
        if not 0.0 <= (self.sample_min_p or 0.0) <= 1.0:
            raise ValueError(f"--sample-min-p {self.sample_min_p} is not in [0, 1]")
        check_positive(self, "sample_repetition_penalty")
        if "" in self.sample_stop:
            raise ValueError("--sample-stop '' is in every text: give a string that is not empty")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a generated text; `\\n` in the flag becomes a line break."""
        return tuple(stop.replace("\\n", "\n") for stop in self.sample_stop)
