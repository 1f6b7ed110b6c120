"""Record the losses and gradients that TRL's trainers compute for small random logits, and TRL's default settings.

    pip install trl==1.16.0   # in a separate environment; torch for CPU is enough
    PYTHONPATH=. python tests/helpers/write_trl_goldens.py

The trainers' own code runs, in fp64 unless it casts, on an uninitialized trainer whose model returns fixed logits. The
results are JSON files in tests/post_training/, which test_losses.py and test_trl_defaults.py compare with this
project. TRL 1.12 is the last version with PPO. Its file trl_1.12.0.json is never written again; commit 8ef29203 has the
version of this program that wrote it. This file is longer than others because all cases share code.

Letters: B rows, P tokens of a prompt, C tokens of a completion, V tokens in the vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
import trl.trainer.utils

from megazpp.base.program import program

Values = dict[str, Any]
B, P, C, V = 4, 2, 4, 6
PAD, EOS = 0, 1
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
LENGTHS = (3, 4, 1, 4)  # tokens of each completion: ended early, cut off, ended at once, ended with the last token
FOLDER = Path(__file__).resolve().parents[1] / "post_training"


@program
def main(argv: list[str]) -> None:
    """Record all cases with the installed TRL version, and write them to trl_VERSION.json.

    The first word of the command line is the output folder; the default is the folder of the tests that read the file.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    cases = [*sft(), *reward(), *dpo_cases(), *grpo_cases()]
    path = Path(argv[0] if argv else FOLDER) / f"trl_{trl.__version__}.json"
    versions = {package.__name__: package.__version__ for package in (trl, transformers, torch)}
    written = {**versions, "defaults": config_defaults(), "cases": cases}
    path.write_text(json.dumps(written, default=lambda tensor: as_numbers(tensor.tolist())) + "\n")
    print(f"{path}: {len(cases)} cases")


def config_defaults() -> dict[str, Values]:
    """Return the default values of all fields of TRL's config classes, by class name and field name."""
    classes: list[Any] = [trl.SFTConfig, trl.RewardConfig, trl.DPOConfig, trl.GRPOConfig, trl.RLOOConfig]
    return {
        each.__name__: {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(each)
        }
        for each in classes
    }


def as_numbers(value: Any) -> Any:
    """Return a number, or nested lists of numbers, rounded to 10 decimals, which keeps the JSON file small."""
    return [*map(as_numbers, value)] if isinstance(value, list) else round(value, 10)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random token IDs [B, P + C], and the mask [B, P + C] that is 1 on completions and 0 elsewhere.

    Each row begins with another token. Every completion but the second ends with EOS.
    """
    tokens = torch.randint(2, V, (B, P + C))
    tokens[:, 0] = torch.arange(2, 2 + B)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(LENGTHS):
        if row != 1:
            tokens[row, P + length - 1] = EOS
        tokens[row, P + length :] = PAD
        mask[row, P : P + length] = 1
    return tokens, mask


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal random numbers of this shape with standard deviation `scale`, rounded to 3 decimals."""
    return (scale * torch.randn(*shape)).round(decimals=3)


def random_logits(scale: float = 1.0) -> torch.Tensor:
    """Return random logits [B, P + C, V] with standard deviation `scale`."""
    return random(B, P + C, V, scale=scale)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor that requires a gradient, so that the gradient can be recorded."""
    return tensor.clone().requires_grad_()


def accelerator() -> SimpleNamespace:
    """Return a fake of Accelerate's `Accelerator` in a job with one process, as TRL's loss functions use it."""

    def same(value: Any, **_: object) -> Any:
        return value

    one: Values = {"device": torch.device("cpu"), "num_processes": 1, "process_index": 0, "parallelism_config": None}
    flags: Values = {"is_main_process": True, "sync_gradients": True, "autocast": nullcontext}
    calls: Values = dict.fromkeys(("unwrap_model", "gather", "gather_for_metrics", "reduce"), same)
    return SimpleNamespace(**one, **flags, **calls)


class GivenLogits(torch.nn.Module):
    """Language model that returns the given logits: they are its last hidden states, and its head is the identity.

    TRL computes log-probabilities from hidden states and the head, so a trainer gets exactly these logits.
    """

    is_gradient_checkpointing = False
    config = SimpleNamespace(get_text_config=SimpleNamespace)

    def __init__(self, logits: torch.Tensor, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.head = torch.nn.Linear(V, V, bias=False)
        self.head.weight.requires_grad_(False).copy_(torch.eye(V))
        self.base_model = lambda **_: SimpleNamespace(last_hidden_state=logits)
        self.get_output_embeddings = lambda: self.head
        utils: Any = trl.trainer.utils
        fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        utils.add_fused_lm_head(self, temperature=temperature, outputs=fields)

    def forward(self, **_: object) -> None:
        raise NotImplementedError


def sft() -> list[Values]:
    """Record the loss of SFTTrainer and its gradient with respect to the logits."""
    (tokens, mask), logits = rows(), leaf(random_logits())
    model = GivenLogits(logits)
    trainer = stub("SFTTrainer", model, label_smoother=None, compute_loss_func=None)
    trainer.args.loss_type, trainer.args.average_tokens_across_devices = "nll", False
    inputs = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": tokens != PAD}
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    known: Values = {"tokens": tokens, "mask": mask, "logits": logits.detach()}
    return [{"kind": "sft", **known, "loss": loss, "grad": logits.grad}]


def reward() -> list[Values]:
    """Record the loss of RewardTrainer and its gradient, with and without the term that centers rewards at zero."""
    cases = []
    for center in (None, 0.3):
        scores = leaf(random(2 * B))
        model = torch.nn.Module()
        model.forward = lambda scores=scores, **_: SimpleNamespace(logits=scores.unsqueeze(-1))
        trainer = stub("RewardTrainer", model)
        trainer.args.center_rewards_coefficient = center
        loss = trainer.compute_loss(model, {"attention_mask": torch.ones(2 * B, P)})
        loss.backward()
        known = {"settings": {"center": center}, "scores": scores.detach()}
        cases.append({"kind": "reward", **known, "loss": loss, "grad": scores.grad})
    return cases


def dpo_cases() -> list[Values]:
    """Record loss and gradient of DPOTrainer for each type of loss, and for two weighted sums of losses."""
    types = ["sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft"]
    return [
        *(dpo([each]) for each in types),
        dpo(["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]),
        dpo(["robust", "ipo"]),
    ]


def dpo(loss_types: list[str], loss_weights: list[float] | None = None) -> Values:
    """Record loss, metrics and gradient of DPOTrainer.

    Args:
        loss_types: losses that are added.
        loss_weights: weight of each loss; None for 1.
    """
    (tokens, mask), ref = rows(), random_logits()
    logits = leaf(ref + random_logits(0.2))
    model = GivenLogits(logits)
    trainer = stub("DPOTrainer", model, ref_model=GivenLogits(ref), ld_alpha=None, precompute_ref_logps=False)
    trainer.beta, trainer.label_smoothing, trainer.f_divergence_type = 0.5, 0.1, "reverse_kl"
    trainer.loss_types, trainer.use_weighting = loss_types, False
    trainer.loss_weights = loss_weights or [1.0] * len(loss_types)
    inputs = {"input_ids": tokens, "attention_mask": tokens != PAD, "completion_mask": mask}
    loss = trainer._compute_loss(model, inputs, False)
    loss.backward()
    settings: Values = {"beta": 0.5, "label_smoothing": 0.1, "loss_types": loss_types, "loss_weights": loss_weights}
    given: Values = {"tokens": tokens, "mask": mask, "ref_logits": ref, "logits": logits.detach()}
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    metrics = {name: trainer._metrics["train"][name][0] for name in names}
    return {"kind": "dpo", "settings": settings, **given, "loss": loss, "metrics": metrics, "grad": logits.grad}


def grpo_cases() -> list[Values]:
    """Record GRPOTrainer with each type of loss and with its options, and RLOOTrainer with and without scaling."""
    scaled = ({"off_policy": False}, {"scale": "batch", "beta": 0.1}, {"scale": "none", "beta": 0.1})
    variants: list[Values] = [
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "cispo", "level": "sequence"},
        {"loss_type": "grpo", "level": "sequence"},
        {"loss_type": "dapo", "level": "sequence", "delta": 1.1},
        {"loss_type": "dapo", "delta": 1.1},
        {"loss_type": "dapo", "bias_correction": False},
    ]
    found = [grpo(loss_type=name, **each) for name in ("grpo", "bnpo", "dr_grpo", "dapo") for each in scaled]
    return [*found, *(grpo(beta=0.1, **each) for each in variants), rloo("none"), rloo("batch")]


def grpo(*, off_policy: bool = True, **changed: Any) -> Values:
    """Record the advantages that GRPOTrainer computes from rewards, and its loss and gradient for that batch.

    Args:
        off_policy: True to give the trainer the log-probabilities of an older policy.
        changed: settings of this record that replace the values in the first lines of the function.
    """
    # ---- choose settings and inputs
    settings: Values = {
        "loss_type": "",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.3,
        "delta": None,
        "level": "token",
    }
    settings |= {"bias_correction": True, "temperature": 0.7, "max_completion_length": C + 3, "scale": "group"}
    settings |= {"estimator": "grpo", **changed}
    loss_type, beta = settings["loss_type"], settings["beta"]
    (tokens, mask), old = rows(), random_logits()
    rewards = torch.tensor([[1.0, 0.5], [0.0, torch.nan], [2.0, -1.0], [torch.nan, torch.nan]])
    ref, logits = old + random_logits(0.3), leaf(old + random_logits(0.3))
    # ---- make the stub of a GRPOTrainer, and its models with fixed logits
    model, before = GivenLogits(logits, temperature=0.7), GivenLogits(old, temperature=0.7)
    trainer = stub("GRPOTrainer", model, beta=beta, loss_type=loss_type, scale_rewards=settings["scale"])
    trainer.ref_model = GivenLogits(ref, temperature=0.7)
    trainer.epsilon_low, trainer.epsilon_high, trainer.max_completion_length = 0.2, settings["epsilon_high"], C + 3
    trainer.importance_sampling_level = settings["level"]
    trainer.args.delta, trainer.args.use_bias_correction_kl = settings["delta"], settings["bias_correction"]
    # ---- compute advantages and loss
    inputs = generated(trainer, tokens, rewards, None, None, {}, None, None)
    if off_policy:
        old_logps, *_ = trainer._get_per_token_logps_and_entropies(before, tokens, tokens != PAD, C)
        inputs["old_per_token_logps"] = old_logps
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    # ---- collect inputs and results in one record
    given: Values = {"tokens": tokens, "mask": mask, "rewards": nan_to_none(rewards), "weights": [1.0, 0.5]}
    given |= {"old_logits": old if off_policy else None, "ref_logits": ref, "logits": logits.detach()}
    metrics = trainer._metrics["train"]
    clipped = metrics["cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"][0]
    found: Values = {"advantages": inputs["advantages"], "loss": loss, "clip_ratio": clipped}
    found |= {"kl": metrics["kl"][-1] if beta else None, "entropy": metrics["entropy"][-1], "grad": logits.grad}
    return {"kind": "grpo", "settings": settings, **given, **found}


def rloo(scale: str) -> Values:
    """Record the advantages that RLOOTrainer computes from rewards; its loss is not recorded.

    `scale` is "batch" if the trainer divides advantages by their standard deviation over the batch, and "none" if not.
    """
    (tokens, _), rewards = rows(), torch.tensor([[1.0, 0.5], [0.0, torch.nan], [2.0, -1.0], [0.5, 0.0]])
    trainer = stub("RLOOTrainer", GivenLogits(random_logits()), beta=0.0, normalize_advantages=scale == "batch")
    known: Values = {"rewards": nan_to_none(rewards), "weights": [1.0, 0.5]}
    settings: Values = {"scale": scale, "estimator": "rloo"}
    advantages = generated(trainer, tokens, rewards)["advantages"]
    return {"kind": "rloo", "settings": settings, **known, "advantages": advantages}


def generated(trainer: Any, tokens: torch.Tensor, rewards: torch.Tensor, *more: Any) -> Values:
    """Return the batch that a TRL trainer makes of sampled completions and their rewards, two completions per prompt.

    Args:
        trainer: uninitialized GRPOTrainer or RLOOTrainer, as `stub` returns it.
        tokens: [B, P + C] token IDs of prompts and completions.
        rewards: [B, 2] reward of each completion by each of two reward functions.
        more: further results of the trainer's `_generate`: the first precedes the texts, the others follow them.
    """
    completions = [tokens[row, P : P + length].tolist() for row, length in enumerate(LENGTHS)]
    drawn = (tokens[:, :P].tolist(), completions, *more[:1], ["text"] * B, *more[1:])
    trainer._generate, trainer._calculate_rewards = lambda _: drawn, lambda *_: rewards
    trainer.num_generations, trainer.reward_weights = 2, torch.tensor([1.0, 0.5])
    trainer.reward_funcs, trainer.reward_func_names = [None, None], ["first", "second"]
    return trainer._generate_and_score_completions([{"prompt": "text"}] * B)


def stub(name: str, model: torch.nn.Module, **attributes: Any) -> Any:
    """Return an uninitialized trainer of TRL's class `name`, with only the attributes that its loss functions read.

    Args:
        name: name of the trainer's class.
        model: model of the trainer.
        attributes: attributes that replace or extend the usual ones.
    """
    trainer_class: Any = type("Stub", (getattr(trl, name),), {"current_gradient_accumulation_steps": 1})
    made = trainer_class.__new__(trainer_class)
    args: Values = dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation"), 1)
    args |= {"per_device_train_batch_size": B, "gradient_checkpointing_kwargs": None, "report_to": []}
    logs: Values = {"prompt": [], "completion": [], "advantages": []}
    logs |= {name: defaultdict(list) for name in ("rewards", "extra")}
    falsy = (
        "aux_loss_enabled tools environments environment_factories use_vllm mask_truncated_completions "
        "multi_environment pad_to_multiple_of use_adaptive_entropy _entropy_bonus_enabled reward_clip_range "
        "log_multimodal off_policy_mask_threshold vllm_importance_sampling_correction"
    )
    known: Values = {**dict.fromkeys(falsy.split()), "args": SimpleNamespace(**args), "model": model}
    known |= {"importance_sampling_level": "token", "multi_objective_aggregation": "sum_then_normalize"}
    known |= {"top_entropy_quantile": 1.0, "num_iterations": 1, "_total_train_tokens": 0, "_tp_size": 1}
    known |= {"_metrics": {"train": defaultdict(list)}, "_logs": logs, "_pending_extra_logs": {}}
    known |= {"_pending_metrics": {}, "accelerator": accelerator(), "_tokenizer": TOKENIZER}
    made.__dict__ |= known | attributes
    return made


def nan_to_none(rewards: torch.Tensor) -> list[list[float | None]]:
    """Return the rewards as nested lists, with None in place of NaN, which JSON does not have."""
    return [[None if math.isnan(reward) else reward for reward in row] for row in rewards.tolist()]


if __name__ == "__main__":
    raise SystemExit(main())
