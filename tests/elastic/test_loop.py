"""Test the training loop of an elastic group with a substitute for its connections, without other groups."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megazpp.elastic.loop import ElasticLoop
from megazpp.optim.schedule import TrainingProgress
from megazpp.parallel.timeline import Timeline


def test_wait_for_samples_is_no_time_of_a_step():
    loop = object.__new__(ElasticLoop)
    loop._agent, loop._axis = SimpleNamespace(seconds=None, leaves=False), mock.Mock(share_object=lambda value: value)
    loop._objective, loop._stopped = SimpleNamespace(tokens=torch.ones(())), lambda: False
    loop._tokens, loop._steps, loop._cells, loop._published = torch.zeros(1), 0, [], None
    loop._cell, loop._last_step_at = [0, 0, 0, 4], time.monotonic()
    loop._progress = lambda progress: progress

    def decide() -> tuple[bool, bool, int, list[int]]:
        time.sleep(0.3)  # the group waits for a cell
        return True, False, 1, [0, 0, 1, 4]

    loop._decide = decide
    for _ in range(2):
        loop.after_step(mock.Mock(), TrainingProgress(), last=False)
    assert loop._agent.steps == 2
    assert loop._agent.seconds < 0.05


@pytest.mark.parametrize(
    ("writers", "done", "saved", "must_save"),
    [
        (["b"], True, [5], True),  # group b has died in the run's last save
        (["b"], True, [5, 9], False),  # the last version, with 18 steps of two groups, is saved as iteration 9
        (["b"], False, [5], False),  # group b has saved this version, or will save a later one
        (["a"], True, [5], False),  # this group has saved
        (None, True, [], False),  # nothing was trained since the loaded checkpoint
    ],
)
def test_group_saves_the_last_version_if_its_writer_has_died(writers, done, saved, must_save):
    loop, states = object.__new__(ElasticLoop), iter([{"done": done, "peers": {"b": {}}}])
    last = {"done": done, "peers": {}}
    loop._agent = mock.Mock(group="a", wait=lambda ready, *limit: ready(next(states, last)))
    loop._axis = mock.Mock(rank=0, share_object=lambda value: value, timeline=Timeline())
    loop._trainer = mock.Mock(run=mock.Mock(save=mock.Mock(iterations=lambda: saved)))
    loop._writers, loop._rules, loop.merged = writers, mock.Mock(groups=2), 18
    assert loop._must_save() is must_save
    assert writers != ["b"] or not done or next(states, None) is None  # group b was waited for
