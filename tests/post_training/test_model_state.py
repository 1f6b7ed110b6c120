"""Test that buffers of a model, such as the biases of experts, are loaded and copied wherever weights are.

Also test when the biases may change.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.checkpoints import frozen_place, run
from helpers.ranks import ranks
from helpers.training import BIASED_STYLE, Case, build_on_ranks, build_step, spec_of
from lora.test_policy import adapt, train

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.convert.model import held, same, split_all
from megazpp.convert.native import open_checkpoint
from megazpp.lora.config import LoraConfig
from megazpp.lora.peft import checksum_of
from megazpp.model.gpt import GPTModel
from megazpp.model.router import biased_routers
from megazpp.packed_weights.load import load_frozen_model
from megazpp.tensor_parallel.parameters import model_state

CASE = Case(
    model=dataclasses.replace(BIASED_STYLE, moe_aux_loss_coeff=0.0, moe_router_bias_update_rate=0.25), vocab_size=101
)
ATTENTION = LoraConfig(lora_r=3, lora_alpha=6.0, lora_target_modules=("q_proj", "v_proj"))
BIAS, SHIFT = "layers.0.mlp.router.expert_bias", "final_norm.shift"


@contextlib.contextmanager
def one_more_buffer() -> Iterator[None]:
    """Give each model built inside the block a buffer [3, 5], whose mean is added to the output of the final norm."""
    before = GPTModel.__init__

    def init(self: GPTModel, *args: Any, **options: Any) -> None:
        before(self, *args, **options)
        self.final_norm.register_buffer("shift", torch.zeros(3, 5))
        self.final_norm.register_forward_hook(lambda module, args, output: output + module.shift.mean())

    with mock.patch.object(GPTModel, "__init__", init):
        yield


def save(folder: str) -> dict[str, torch.Tensor]:
    """Save a checkpoint whose buffers are not zero. Return the two buffers by their names in the model."""
    with one_more_buffer():
        before = GPTModel.train

        def train_mode(self: GPTModel, mode: bool = True) -> GPTModel:
            self.final_norm.shift.copy_(torch.arange(15.0).view(3, 5))
            return before(self, mode)

        with mock.patch.object(GPTModel, "train", train_mode):
            run(CASE, 1, save=folder)
        return {BIAS: torch.full((4,), 0.25), SHIFT: torch.arange(15.0).view(3, 5)}


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("checkpoints") / "save")
    ranks(1).run(save, folder)
    return folder


def found(load: str) -> Any:
    return find_weights(CheckpointFolder(load, "--load"), None)


def losses_of(model: GPTModel, case: Case) -> torch.Tensor:
    batch = case.batch(0, 0, 4)
    with torch.no_grad():
        return model.eval()(batch.tokens, batch.labels)


def loaded_everywhere(case: Case, load: str) -> dict[str, list[torch.Tensor]]:
    """Load the checkpoint as a trained model, as a frozen model and as the base of adapters.

    Return both buffers and the losses of a batch, by the way of loading.
    """
    results = {}
    with one_more_buffer():
        model, sharding, dims = build_on_ranks(case)
        load_weights(model, sharding, dims, *found(load), vocab_size=101, say=lambda line: None)
        frozen, _, checksum = load_frozen_model(spec_of(case), frozen_place(dims), *found(load))
        adapted = adapt(case, ATTENTION, load)[0]
        models = {"loaded": model, "frozen": frozen, "base of adapters": adapted.built.model}
        for way, each in models.items():
            buffers = [each.layers[0].mlp.router.expert_bias, each.final_norm.shift]
            results[way] = [*(buffer.detach().clone() for buffer in buffers), losses_of(each, case)]
        converted = open_checkpoint(Path(load), None)[0]
        assert checksum_of(converted) == checksum == adapted.settings.checksum
        changed = converted.tensors | {SHIFT: converted.tensors[SHIFT]._replace(read=lambda: torch.ones(3, 5))}
        assert checksum_of(converted._replace(tensors=changed)) != checksum
    return results


@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_buffers_arrive_wherever_weights_are_loaded_or_copied(load, layout):
    """Load a checkpoint in three ways. All models must have the same buffers, and equal losses up to fp32 rounding.

    Layouts add fp32 numbers in different orders. The checksums of frozen models include the buffers.
    """
    for results in ranks(2).run(loaded_everywhere, dataclasses.replace(CASE, **layout), load):
        expected = results["loaded"]
        assert expected[0].abs().max() == 0.25
        assert torch.equal(expected[1], torch.arange(15.0).view(3, 5))
        for way, (bias, shift, losses) in results.items():
            assert torch.equal(bias, expected[0]), way
            assert torch.equal(shift, expected[1]), way
            torch.testing.assert_close(losses, expected[2], rtol=1e-5, atol=1e-5, msg=way)


def test_export_refuses_a_buffer_that_the_other_format_cannot_hold():
    tensors = {name: held(torch.zeros(1)) for name in ("a", "b")}
    with pytest.raises(ValueError, match="the target format has no tensors that correspond to b"):
        split_all({"a": same("x")}, tensors)


def biases_after_training(case: Case, load: str, adapters: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Load and train a mixture of experts; return the router's bias in the first layer before and after training.

    If `adapters` is True, only adapters on a frozen base are trained, otherwise all weights.
    """
    with one_more_buffer():
        if adapters:
            policy, dims = adapt(case, ATTENTION, load)
            bias = policy.built.model.layers[0].mlp.router.expert_bias
            before = bias.clone()
            train(policy, dims, case)
            assert biased_routers(policy.built.model) == []
            # checkpoints of adapters do not have the buffers of the frozen base
            assert not any(name in (BIAS, SHIFT) for name in model_state(policy.built.model))
            return before, bias
        step, dims = build_step(case)
        load_weights(step.model, step.sharding, dims, *found(load), vocab_size=101, say=lambda line: None)
        bias = step.model.layers[0].mlp.router.expert_bias
        before = bias.clone()
        for index in range(4):
            step(case.batches(index, dims), learning_rate=case.learning_rate, weight_decay=0.01)
        return before, bias


def test_biases_of_frozen_models_and_of_rate_zero_stay_constant(load):
    constant = dataclasses.replace(CASE, model=dataclasses.replace(CASE.model, moe_router_bias_update_rate=0.0))
    for case, adapters, moves in ((CASE, True, False), (constant, False, False), (CASE, False, True)):
        for before, after in ranks(2).run(biases_after_training, case, load, adapters):
            assert before.abs().max() == 0.25
            assert torch.equal(before, after) != moves, (adapters, moves)
