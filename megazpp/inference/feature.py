"""Registration of an optional feature: generate a sample of text with the trained model at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megazpp.inference.config import SampleConfig
from megazpp.run.feature import Attached, Feature

if TYPE_CHECKING:
    from megazpp.run.trainer import Trainer


class SampleAtEnd(Feature):
    """A sample of text at the end of training: the model continues the prompts of --sample-prompt.

    The feature is active if --sample-tokens is above 0.
    """

    config = SampleConfig

    def attach(self, trainer: Trainer) -> Attached:
        """Check the prompts, and attach a function that generates and records texts at the end of the training.

        Without --sample-tokens, the returned `Attached` has no function.

        Raises:
            ValueError: a prompt has more tokens than the model accepts.
        """
        parts, run, flags = trainer.parts, trainer.run.context, trainer.run.config
        config, longest = flags.section(SampleConfig), flags.data.seq_length
        if config.sample_tokens == 0:
            return Attached()
        from megazpp.inference.text import check_start, continue_texts, start_of
        from megazpp.training.objective import StopRequested

        assert longest is not None
        prompts, seed = config.sample_prompt or ("",), flags.launch.seed
        begun = (start_of(prompt, parts.tokenizer) for prompt in prompts)
        starts = [check_start(start, longest, "--sample-prompt") for start in begun]

        def write_sample(weights: Callable[[], AbstractContextManager[None]], iteration: int) -> None:
            """Continue the prompts of --sample-prompt, and write the texts to the log and to completions.jsonl.

            If a stop signal has arrived, the texts are left out. See `Attached.finish` for the arguments.
            """
            with weights():
                texts, _ = continue_texts(
                    *parts.built,
                    run.dims,
                    parts.tokenizer,
                    starts,
                    config,
                    max_length=longest,
                    seed=seed,
                    stopped=trainer.stopped,
                )
            try:
                trainer.run.stops.give_up(run.dims)
            except StopRequested as stop:  # the signal may have cut the texts
                run.log(f"the sample of text is left out because of {stop}")
                return
            for start, text in zip(starts, texts, strict=True):
                run.log(f"a sample of text:\n{start.shown}{text}")
                if run.folder is not None:
                    shown = {"iteration": iteration, "prompt": start.shown, "completion": text}
                    run.folder.append("completions.jsonl", shown)

        return Attached(finish=write_sample)


FEATURE = SampleAtEnd()
