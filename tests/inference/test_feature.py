"""Test the sample of text at the end of training."""

import contextlib
from unittest import mock

import pytest

from megazpp.inference import text
from megazpp.inference.config import SampleConfig
from megazpp.inference.feature import SampleAtEnd
from megazpp.training.config import StopConfig
from megazpp.training.loop import StopConditions


@pytest.mark.parametrize("signal", [0, 15])
def test_sample_that_a_stop_signal_may_have_cut_is_left_out(monkeypatch, signal):
    trainer, said, stops = mock.MagicMock(), [], StopConditions(StopConfig())
    trainer.run.stops, trainer.run.context.log, trainer.run.context.dims.world.size = stops, said.append, 1
    trainer.run.config.section.return_value = SampleConfig(sample_tokens=5)
    monkeypatch.setattr(text, "start_of", lambda prompt, tokenizer: mock.Mock(shown="Call"))
    monkeypatch.setattr(text, "check_start", lambda start, *_: start)

    def continue_texts(*_, **__):
        stops.caught = signal  # the signal arrives while the text grows
        return [" me"], None

    monkeypatch.setattr(text, "continue_texts", continue_texts)
    SampleAtEnd().attach(trainer).finish(contextlib.nullcontext, 7)
    assert said == ["the sample of text is left out because of SIGTERM" if signal else "a sample of text:\nCall me"]
    assert trainer.run.context.folder.append.called == (not signal)
