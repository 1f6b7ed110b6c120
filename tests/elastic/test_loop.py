"""Test the training loop of an elastic group with a substitute for its connections, without other groups."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megazpp.elastic import loop as loop_module
from megazpp.elastic.loop import ElasticLoop
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.timeline import Timeline
from megazpp.training.objective import LanguageModelLoss


def test_wait_for_samples_is_no_time_of_a_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    loop = object.__new__(ElasticLoop)
    loop._agent, loop._axis = SimpleNamespace(seconds=None, leaves=False), mock.Mock(share_object=lambda value: value)
    loop._objective, loop._stopped = SimpleNamespace(tokens=torch.ones(())), lambda: False
    loop._tokens, loop._steps, loop._published = torch.zeros(1), 0, None
    loop._cell, loop._last_step_at = [0, 0, 4], now[0]
    loop._progress = lambda progress: progress

    def decide() -> tuple[bool, bool, int, list[int]]:
        now[0] += 30.0  # the group waits for a cell
        return True, False, 1, [0, 1, 4]

    loop._decide = decide
    for _ in range(2):
        now[0] += 1.0  # a step
        loop.after_step(mock.Mock(), TrainingProgress(), last=False)
    assert loop._agent.steps == 2
    assert loop._agent.seconds == 1.0


def test_report_about_a_nan_finds_the_samples_that_a_group_has_leased(monkeypatch):
    batches = mock.Mock(micro_batch_size=2, data_parallel_size=4, global_batch_size=16)
    run = mock.Mock(plan=mock.Mock(batches=batches))
    trainer = mock.Mock(run=run, parts=mock.Mock(objective=mock.Mock(spec=LanguageModelLoss)))
    outer = mock.Mock(plan=mock.Mock(fragments=1), sharding=mock.Mock(device="cpu"))
    monkeypatch.setattr(loop_module, "WholeOuter", lambda *_, **__: outer)
    monkeypatch.setattr(loop_module, "open_axis", mock.Mock())
    loop = ElasticLoop(trainer)
    loop._rules, loop._cell = mock.Mock(groups=2), [1, 5, 7]
    inner = mock.Mock(wait_seconds=0.0)
    loop.loader(inner).step(16, 16)
    inner.step.assert_called_once_with(5 * 16 + 2 * 2, 16)
    assert trainer.guard.first_sample(16) == 84


@pytest.mark.parametrize(
    # Groups that save the version that group a has merged last (None if it has merged none); True if the run is over;
    # the coordinator's answers whether group a saves last, one after another (None while this is undecided); iterations
    # of the saved checkpoints; and True if group a must save the outer weights
    ("writers", "done", "answers", "saved", "must_save"),
    [
        (["b"], True, [None, True], [5], True),  # group b has died in the run's last save
        (["b"], True, [None, True], [5, 9], False),  # the last version, with 18 steps of two groups, is iteration 9
        ([], False, [False], [5], False),  # another group continues, or leaves later
        ([], False, [True], [5], True),  # all groups have got a signal
        (["a"], True, [], [5], False),  # this group has saved
        (None, True, [], [], False),  # nothing was trained since the loaded checkpoint
    ],
)
def test_leaving_group_saves_if_no_other_group_does(writers, done, answers, saved, must_save):
    loop, states = object.__new__(ElasticLoop), [{"done": done, "leaves": True, "saves_last": x} for x in answers]
    loop._agent = mock.Mock(group="a", wait=lambda ready, *limit: ready(states.pop(0)) or None)
    loop._axis = mock.Mock(rank=0, share_object=lambda value: value, timeline=Timeline())
    loop._trainer = mock.Mock(run=mock.Mock(save=mock.Mock(iterations=lambda: saved)))
    loop._writers, loop._rules, loop.merged = writers, mock.Mock(groups=2), 18
    assert loop._must_save() is must_save
    assert states == []
