"""Frozen models beside the policy say the same, bit for bit, wherever their weights lie."""

import dataclasses

import pytest
import torch
from helpers.checkpoints import frozen_place, run
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, Case, dims_on_ranks, spec_of

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.post_training.reference import load_frozen
from megazpp.stored.load import WeightsConfig

CASE = Case(model=dataclasses.replace(GPT2_STYLE, init_method_std=0.5), scalar_head=True)
RESIDENT = WeightsConfig()


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> str:
    """A checkpoint of a model with a scalar head."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(2).run(run, dataclasses.replace(CASE, tp=2), 1, save=folder)
    return folder


def asked(case: Case, load: str, configs: list[WeightsConfig]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probabilities and scores of a batch, of the model with its weights in each of these places."""
    dims, found = dims_on_ranks(case), []
    place, batch = frozen_place(dims), case.batch(0, 0, 4)
    models = [load_frozen(spec_of(case), place, c, CheckpointFolder(load, "--reward-load"), None) for c in configs]
    for _ in range(2):  # in turn, as a reference and a reward model are asked
        found += [(model.logps(batch), model.scores(batch)) for model in models]
    return found


@pytest.mark.parametrize(
    ("world", "layout", "bits"),
    [
        (2, {"tp": 2, "sequence_parallel": True}, 8),
        slow(2, {}, 4),
        slow(1, {}, 8),
        slow(4, {"nodes": 2, "tp": 2}, 16),
        slow(4, {"nodes": 2, "tp": 2}, 4),
    ],
)
def test_streamed_models_say_what_resident_ones_do_in_the_same_bits(load, tmp_path, world, layout, bits):
    places = [
        WeightsConfig(weight_bits=bits),
        WeightsConfig(weight_bits=bits, weights_on="host", prefetch_layers=0),
        WeightsConfig(weight_bits=bits, weights_on="disk", weight_store=str(tmp_path / "store")),
        RESIDENT,
    ]
    case = dataclasses.replace(CASE, **layout)
    for found in ranks(world).run(asked, case, load, places):
        (logps, scores), *others, (exact_logps, exact_scores) = found[:4]
        for one, other in zip(found[:4], found[4:], strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
        for other in others:
            assert torch.equal(logps, other[0])
            assert torch.equal(scores, other[1])
        # weights of std 0.5 in two layers, rounded: not the same, and not another model's
        assert not torch.equal(logps, exact_logps)
        assert (logps - exact_logps).abs().mean() < exact_logps.std() / 2
        assert (scores - exact_scores).abs().mean() < exact_scores.std()
