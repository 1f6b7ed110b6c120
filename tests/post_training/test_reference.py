"""Test frozen models.

Outputs do not depend on where weights are stored, nor on the number of ranks.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import frozen_place, run
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, LLAMA_STYLE, Case, dims_on_ranks, spec_of

from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.packed_weights.config import WeightsConfig
from megazpp.parallel.config import ParallelConfig
from megazpp.post_training import reference
from megazpp.post_training.data import PreferenceDataset
from megazpp.post_training.formatting import Examples
from megazpp.post_training.setup import check_reward_model
from megazpp.zero.config import PrecisionConfig

CASE = Case(model=dataclasses.replace(GPT2_STYLE, init_method_std=0.5), scalar_head=True)
PAIRS, LENGTH = 11, 8


def asked_on_ranks(case: Case, load: str, configs: list[WeightsConfig]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Load a frozen model with each of `configs` (places and bits of its weights).

    Return the log-probabilities and scores of a batch for each model, and then for each model a second time.
    """
    dims = dims_on_ranks(case)
    place, folder, batch = frozen_place(dims), CheckpointFolder(load, "--reward-load"), case.batch(0, 0, 4)
    models = [reference.load_frozen(spec_of(case), place, config, folder, None) for config in configs]
    return [(model.logps(batch), model.scores(batch)) for model in models * 2]


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> str:
    """Save a checkpoint of a model with a scalar head. Return the folder."""
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(2).run(run, dataclasses.replace(CASE, tp=2), 1, save=folder)
    return folder


@pytest.mark.parametrize(
    ("world", "layout", "bits"),
    [
        slow(2, {"tp": 2, "sequence_parallel": True}, 8),
        slow(4, {"nodes": 2, "tp": 2}, 4),
    ],
)
def test_streamed_models_match_resident_ones_of_the_same_bits(load, tmp_path, world, layout, bits):
    places = [
        WeightsConfig(weight_bits=bits),
        WeightsConfig(weight_bits=bits, weights_device="host", prefetch_layers=0),
        WeightsConfig(weight_bits=bits, weights_device="disk", weight_store=str(tmp_path / "store")),
        WeightsConfig(),
    ]
    for found in ranks(world).run(asked_on_ranks, dataclasses.replace(CASE, **layout), load, places):
        torch.testing.assert_close(found[:4], found[4:], rtol=0, atol=0)
        (logps, scores), *others, (exact_logps, exact_scores) = found[:4]
        torch.testing.assert_close(others, [(logps, scores)] * 2, rtol=0, atol=0)
        # The reference model's weights of two layers are rounded to fewer bits. So its log-probabilities differ, but
        # far less than another model's.
        assert not torch.equal(logps, exact_logps)
        assert (logps - exact_logps).abs().mean() < exact_logps.std() / 2
        assert (scores - exact_scores).abs().mean() < exact_scores.std()


def scored_on_ranks(case: Case, load: str) -> torch.Tensor:
    place, folder = frozen_place(dims_on_ranks(case)), CheckpointFolder(load, "--reward-load")
    batch = case.batch(0, 0, 4)
    return reference.load_frozen(spec_of(case), place, WeightsConfig(), folder, None).scores(batch)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 64, "num_layers": 3}, {"untie_embeddings_and_output_weights": True}]
)
def test_reward_model_keeps_its_own_shape_next_to_any_policy(load, changes):
    """Score a batch with a reward model of another shape than the policy, on one and on two ranks.

    fp32 sums in another order differ by up to 1e-5.
    """
    own = ranks(1).run(scored_on_ranks, CASE, load)[0]
    policy = dataclasses.replace(CASE, tp=2, model=dataclasses.replace(LLAMA_STYLE, **changes))
    for found in ranks(2).run(scored_on_ranks, policy, load):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-5)


def test_reward_model_that_does_not_fit_the_policy_is_rejected(load):
    def check(tokens: int, tp: int, seq_length: int) -> None:
        parallel, checkpoint = ParallelConfig(tensor_model_parallel_size=tp), CheckpointConfig()
        data, precision = SimpleNamespace(seq_length=seq_length), PrecisionConfig()
        parts = {"parallel": parallel, "checkpoint": checkpoint, "data": data, "precision": precision}
        tokenizer: Any = SimpleNamespace(vocab_size=tokens, identity="ids")
        config: Any = SimpleNamespace(model=LLAMA_STYLE, sections=(), **parts)
        check_reward_model(config, load, tokenizer)

    rows = [
        (102, 1, 8, f"--reward-load {load}: the reward model has 101 tokens, but the policy's tokenizer has 102"),
        (101, 3, 8, "is not divisible by --tensor-model-parallel-size 3"),
        (101, 1, 99, "--seq-length 99 is longer than --max-position-embeddings"),
    ]
    assert not_refused(rows, check) == []
    check(101, 2, 8)


def examples(seed: int) -> Examples:
    generator = np.random.default_rng(seed)
    starts = np.cumsum([0, *generator.integers(2, LENGTH + 1, 2 * PAIRS)])
    tokens, mask = (generator.integers(0, end, starts[-1]) for end in (50, 2))
    mask[starts[:-1]] = 0
    return Examples(tokens.astype(np.int32), mask.astype(np.uint8), starts, np.zeros(7, dtype=np.int64))


def expected() -> torch.Tensor:
    """Return the expected log-probabilities [PAIRS, 2], one for each of a pair's two rows.

    A row's number is minus the sum of its labels with a loss, divided by 16, which is exact in fp32.
    """
    rows = map(examples(1).row, range(2 * PAIRS))
    return -torch.tensor([float((tokens * mask).sum()) for tokens, mask in rows]).view(PAIRS, 2) / 16


def computed_on_ranks() -> tuple[torch.Tensor, int]:
    """Compute a reference's log-probabilities of all pairs. Return them, and the number of reference forwards."""
    place, forwards = frozen_place(dims_on_ranks(Case())), list[Any]()

    def logps(batch: Any) -> torch.Tensor:
        forwards.append(batch)
        return -batch.labels.float() / 16

    dataset = PreferenceDataset(examples(1), num_samples=None, seed=3, max_length=LENGTH, pad=0)
    return reference.logps_of_pairs(logps, dataset, place, 2), len(forwards)


@pytest.mark.parametrize("world", [1, 2])
def test_reference_values_of_all_pairs_are_computed_once(world):
    """With two pairs per forward, the eleven pairs need 6 forwards on one rank, and 3 on each of two ranks."""
    for found, forwards in ranks(world).run(computed_on_ranks):
        assert torch.equal(found, expected())
        assert forwards == 6 // world
