"""Test post-training of mixtures of experts: losses equal TRL's, and some adapters are refused."""

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.frameworks import texts, tokenizer
from helpers.hf_models import SIZES, make_model, our_model, randomized, save
from helpers.refusals import not_refused
from helpers.training import MIXTURE_STYLE

from megazpp.convert.huggingface import open_model
from megazpp.data.loader import MicroBatch
from megazpp.lora.checks import adapter_settings
from megazpp.lora.config import LoraConfig
from megazpp.model.gpt import GPTModel
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.data import PairBatch
from megazpp.post_training.objectives import PreferenceLoss
from megazpp.post_training.reference import FrozenModel
from megazpp.training.objective import LanguageModelLoss

KINDS = ("mixtral", "qwen3_moe")
SMALL = {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 1}
ONE_RANK: Any = SimpleNamespace(data_size=1, replica_group=SimpleNamespace(size=1), sum_over_data_=lambda x: x)
MIXTURE = dataclasses.replace(MIXTURE_STYLE, num_layers=2, moe_aux_loss_coeff=0.0)
ATTENTION = LoraConfig(lora_r=3, lora_alpha=6.0, lora_target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))


# ---- losses, compared with TRL's ----


def loss_of_trl(objective: str, model: Any, folder: Path, **how: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return TRL's loss of the first batch, and the batch. Afterwards `model` has the gradients of this loss."""
    trl = pytest.importorskip("trl")
    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}[objective]
    columns = {"completion": " {1}"} if objective == "sft" else {"chosen": " {1}", "rejected": " no{0}"}
    # TRL's trainer of reward models has no load-balancing loss
    without_aux = {} if objective == "reward" else {"router_aux_loss_coef": 0.0}
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        args=getattr(trl, f"{name}Config")(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            **without_aux,
        ),
        train_dataset=texts(prompt="{} plus 1 is", **columns),
        processing_class=tokenizer(),
        **how,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.detach(), batch


def ours(folder: Path, model: Any) -> GPTModel:
    """Convert a transformers model to this project's model, in training mode."""
    return our_model(open_model(save(model, folder)), 32).train()


def norm_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def compare(model: GPTModel, objective: Any, batch: Any, theirs: Any, expected: torch.Tensor) -> None:
    """Compare the loss and the gradient norm of our model with TRL's, up to fp32 sums in another order."""
    objective.begin_step([batch])
    loss = objective.loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm_of(model), norm_of(theirs), rtol=1e-4, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_supervised_loss_of_experts_equals_trl(kind, tmp_path):
    theirs = make_model(kind, **SMALL)
    model = ours(tmp_path / "ours", theirs)
    expected, batch = loss_of_trl("sft", theirs, tmp_path)
    tokens, mask = batch["input_ids"], (batch["labels"] != -100).float()
    assert 0.0 < mask.mean() < 1.0
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    own = MicroBatch(inputs, labels, mask[:, 1:].contiguous(), positions, None)
    compare(model, LanguageModelLoss(ONE_RANK, pads=True), own, theirs, expected)


def pairs(tokens: torch.Tensor, mask: torch.Tensor) -> PairBatch:
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return PairBatch(inputs, labels, mask[:, 1:].float().contiguous(), torch.arange(inputs.shape[1]).expand_as(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_dpo_loss_of_experts_equals_trl(kind, tmp_path):
    theirs = make_model(kind, **SMALL)
    reference = copy.deepcopy(theirs)
    with torch.no_grad():
        for index, parameter in enumerate(reference.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model, frozen = ours(tmp_path / "ours", theirs), ours(tmp_path / "reference", reference)
    expected, batch = loss_of_trl("dpo", theirs, tmp_path, ref_model=reference)
    config = PostTrainingConfig(objective="dpo", beta=0.1)
    objective = PreferenceLoss(config, ONE_RANK, FrozenModel(frozen).logps)
    compare(model, objective, pairs(batch["input_ids"], batch["completion_mask"]), theirs, expected)
    assert abs(expected - 0.693147) > 1e-3  # the loss is not ln 2, so the reference model differs from the policy


@pytest.mark.slow
def test_reward_loss_of_experts_equals_trl(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("mixtral", **SIZES["mixtral"] | SMALL, num_labels=1)
    theirs = randomized(transformers.AutoModelForSequenceClassification.from_config(config))
    model = ours(tmp_path / "ours", theirs)
    expected, batch = loss_of_trl("reward", theirs, tmp_path)
    tokens, mask = batch["input_ids"], torch.nn.functional.pad(batch["attention_mask"], (0, 1))
    own = pairs(torch.nn.functional.pad(tokens, (0, 1)), mask)
    compare(model, PreferenceLoss(PostTrainingConfig(objective="reward"), ONE_RANK), own, theirs, expected)


def test_adapters_outside_of_attention_and_experts_are_refused_in_models_with_experts():
    only = "with --num-experts 4: only attention and experts take adapters; name some of"
    rows = [
        (target, f"--lora-target-modules {target} {only}")
        for target in ("all-linear", "up_proj", "gate", "experts", "experts.0.w1")
    ]

    def settings(target: str) -> object:
        return adapter_settings(dataclasses.replace(ATTENTION, lora_target_modules=("q_proj", target)), MIXTURE)

    assert not_refused(rows, settings) == []
    assert adapter_settings(ATTENTION, MIXTURE).targets == ATTENTION.lora_target_modules
    assert adapter_settings(LoraConfig(lora_r=2), MIXTURE).targets == ("q_proj", "v_proj")
