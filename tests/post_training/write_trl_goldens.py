"""Writes what TRL's trainers make of small random logits, losses and gradients, and the defaults of TRL's configs.

    pip install trl==1.16.0   # of another environment than this project's; torch for CPU is enough
    python tests/post_training/write_trl_goldens.py
    pip install trl==1.12.0   # the last that has PPO
    python tests/post_training/write_trl_goldens.py

Each trainer's own code runs, in fp64 where it does not cast, on a stub of the trainer whose model gives the logits;
test_trl_goldens.py and test_trl_defaults.py read the files, JSON beside this one.

Legend: B rows, P tokens of a prompt, C of a completion, V of the vocabulary.
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
import trl
import trl.trainer.utils

B, P, C, V = 4, 2, 4, 6
PAD, EOS = 0, 1
LENGTHS = (3, 4, 1, 4)  # of the completions: ended, cut, ended at once, ended with the last token


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    cases = ppo_cases() if trl.__version__ == "1.12.0" else all_cases()
    path = Path(__file__).parent / f"trl_{trl.__version__}.json"
    written = {"trl": trl.__version__, "torch": torch.__version__, "defaults": config_defaults(), "cases": cases}
    path.write_text(json.dumps(written, default=lambda tensor: as_numbers(tensor.tolist())) + "\n")
    print(f"{path}: {len(cases)} cases")


def all_cases() -> list[dict[str, Any]]:
    return [*sft_cases(), *reward_cases(), *dpo_cases(), *grpo_cases(), *sync_cases()]


def config_defaults() -> dict[str, dict[str, Any]]:
    """Of each config class: field -> its default, as JSON has it."""
    if trl.__version__ == "1.12.0":
        from trl.experimental.ppo import PPOConfig

        classes: list[Any] = [PPOConfig]
    else:
        classes = [trl.SFTConfig, trl.RewardConfig, trl.DPOConfig, trl.GRPOConfig, trl.RLOOConfig]
    return {
        each.__name__: {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(each)
        }
        for each in classes
    }


def as_numbers(value: Any) -> Any:
    """Lists of numbers, to 10 decimals."""
    return [*map(as_numbers, value)] if isinstance(value, list) else round(value, 10)


def rows() -> torch.Tensor:
    """[B, P + C] prompts, the first token of each its own, and completions that end with EOS but for the second."""
    tokens = torch.randint(2, V, (B, P + C))
    tokens[:, 0] = torch.arange(2, 2 + B)
    for row, length in enumerate(LENGTHS):
        if row != 1:
            tokens[row, P + length - 1] = EOS
        tokens[row, P + length :] = PAD
    return tokens


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape)).round(decimals=3)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes, process_index = 1, 0
    parallelism_config = None
    is_main_process = sync_gradients = True

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        loss.backward()

    def accumulate(self, *_: object) -> nullcontext[None]:
        return nullcontext()

    def unwrap_model(self, model: Any, **_: object) -> Any:
        return model

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather

    def print(self, *_: object) -> None:
        pass

    def reduce(self, tensor: torch.Tensor, **_: object) -> torch.Tensor:
        return tensor

    def autocast(self) -> nullcontext[None]:
        return nullcontext()


class GivenLogits(torch.nn.Module):
    """A language model whose last hidden states are the logits, below a head that changes nothing."""

    is_gradient_checkpointing = False
    config = SimpleNamespace(get_text_config=SimpleNamespace)

    def __init__(self, logits: torch.Tensor, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.logits = logits
        self.head = torch.nn.Linear(V, V, bias=False)
        self.head.weight.requires_grad_(False).copy_(torch.eye(V))
        fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        trl.trainer.utils.add_fused_lm_head(self, temperature=temperature, outputs=fields)

    def base_model(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.logits)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, **_: object) -> None:
        raise NotImplementedError


def sync_cases() -> list[dict[str, Any]]:
    from trl.trainer.callbacks import SyncRefModelCallback

    policy, reference = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in reference.parameters()]
    SyncRefModelCallback._sync_target_model(policy, reference, 0.6)
    tensors = {"policy": policy.parameters(), "reference": before, "mixed": reference.parameters()}
    return [{"kind": "sync", "alpha": 0.6, **{name: [*each] for name, each in tensors.items()}}]


def sft_cases() -> list[dict[str, Any]]:
    from trl.trainer.sft_trainer import SFTTrainer

    tokens, logits = rows(), leaf(random(B, P + C, V))
    mask = completion_mask(tokens)
    model = GivenLogits(logits)
    trainer = stub(SFTTrainer, model, label_smoother=None, compute_loss_func=None)
    trainer.args.loss_type, trainer.args.average_tokens_across_devices = "nll", False
    inputs = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": tokens != PAD}
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return [
        {"kind": "sft", "tokens": tokens, "mask": mask, "logits": logits.detach(), "loss": loss, "grad": logits.grad}
    ]


def reward_cases() -> list[dict[str, Any]]:
    return [reward_case(None), reward_case(0.3)]


def reward_case(center_coefficient: float | None) -> dict[str, Any]:
    from trl.trainer.reward_trainer import RewardTrainer

    scores = leaf(random(2 * B))
    model = torch.nn.Module()
    model.forward = lambda **_: SimpleNamespace(logits=scores.unsqueeze(-1))  # type: ignore[method-assign]
    trainer = stub(RewardTrainer, model)
    trainer.args.center_rewards_coefficient = center_coefficient
    loss = trainer.compute_loss(model, {"attention_mask": torch.ones(2 * B, P)})
    loss.backward()
    settings = {"center": center_coefficient}
    return {"kind": "reward", "settings": settings, "scores": scores.detach(), "loss": loss, "grad": scores.grad}


def dpo_cases() -> list[dict[str, Any]]:
    from trl.trainer.dpo_trainer import DPOTrainer

    cases = []
    types = ["sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft"]
    several = ((["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]), (["robust", "ipo"], None))
    for loss_types, loss_weights in (*(([each], None) for each in types), *several):
        settings = {"beta": 0.5, "label_smoothing": 0.1, "loss_types": loss_types, "loss_weights": loss_weights}
        tokens = rows()
        mask = completion_mask(tokens)
        ref = random(B, P + C, V)
        logits = leaf(ref + random(B, P + C, V, scale=0.2))
        model = GivenLogits(logits)
        trainer = stub(DPOTrainer, model, ref_model=GivenLogits(ref), ld_alpha=None, precompute_ref_logps=False)
        trainer.beta, trainer.label_smoothing, trainer.f_divergence_type = 0.5, 0.1, "reverse_kl"
        trainer.loss_types, trainer.use_weighting = loss_types, False
        trainer.loss_weights = loss_weights or [1.0] * len(loss_types)
        inputs = {"input_ids": tokens, "attention_mask": tokens != PAD, "completion_mask": mask}
        loss = trainer._compute_loss(model, inputs, False)
        loss.backward()
        names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
        cases.append(
            {
                "kind": "dpo",
                "settings": settings,
                "tokens": tokens,
                "mask": mask,
                "ref_logits": ref,
                "logits": logits.detach(),
                "loss": loss,
                "metrics": {name: trainer._metrics["train"][name][0] for name in names},
                "grad": logits.grad,
            }
        )
    return cases


def grpo_cases() -> list[dict[str, Any]]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    cases = [
        grpo_case(GRPOTrainer, loss_type=loss_type, scale=scale, beta=beta, off_policy=off_policy)
        for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo")
        for scale, beta, off_policy in (("group", 0.0, False), ("batch", 0.1, True), ("none", 0.1, True))
    ]
    variants: list[dict[str, Any]] = [
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "cispo", "level": "sequence"},
        {"loss_type": "grpo", "level": "sequence"},
        {"loss_type": "dapo", "level": "sequence", "delta": 1.1},
        {"loss_type": "dapo", "delta": 1.1},
        {"loss_type": "dapo", "bias_correction": False},
    ]
    cases += [grpo_case(GRPOTrainer, scale="group", beta=0.1, off_policy=True, **each) for each in variants]
    return [*cases, *rloo_cases()]


def rloo_cases() -> list[dict[str, Any]]:
    from trl.trainer.rloo_trainer import RLOOTrainer

    return [
        advantages_case(RLOOTrainer, scale="none", normalize_advantages=False),
        advantages_case(RLOOTrainer, scale="batch", normalize_advantages=True),
    ]


def grpo_case(
    trainer_class: Any,
    *,
    loss_type: str,
    scale: str,
    beta: float,
    off_policy: bool,
    epsilon_high: float = 0.3,
    delta: float | None = None,
    level: str = "token",
    bias_correction: bool = True,
) -> dict[str, Any]:
    """Rewards to advantages, and the loss of the batch that comes of it, by GRPOTrainer."""
    settings = {
        "loss_type": loss_type,
        "beta": beta,
        "epsilon": 0.2,
        "epsilon_high": epsilon_high,
        "delta": delta,
        "level": level,
        "bias_correction": bias_correction,
        "temperature": 0.7,
        "max_completion_length": C + 3,
    }
    tokens, rewards = rows(), torch.tensor([[1.0, 0.5], [0.0, torch.nan], [2.0, -1.0], [torch.nan, torch.nan]])
    old = random(B, P + C, V)
    ref, logits = old + random(B, P + C, V, scale=0.3), leaf(old + random(B, P + C, V, scale=0.3))
    model, before = GivenLogits(logits, temperature=0.7), GivenLogits(old, temperature=0.7)
    trainer = stub(trainer_class, model, beta=beta, loss_type=loss_type, scale_rewards=scale)
    trainer.ref_model = GivenLogits(ref, temperature=0.7)
    trainer.epsilon_low, trainer.epsilon_high, trainer.max_completion_length = 0.2, epsilon_high, C + 3
    trainer.importance_sampling_level = level
    trainer.args.delta, trainer.args.use_bias_correction_kl = delta, bias_correction
    inputs = generated(trainer, tokens, rewards)
    if off_policy:
        old_logps, *_ = trainer._get_per_token_logps_and_entropies(before, tokens, tokens != PAD, C)
        inputs["old_per_token_logps"] = old_logps
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    metrics = trainer._metrics["train"]
    return {
        "kind": "grpo",
        "settings": {**settings, "scale": scale, "estimator": "grpo"},
        "tokens": tokens,
        "mask": completion_mask(tokens),
        "rewards": nan_to_none(rewards),
        "weights": [1.0, 0.5],
        "old_logits": old if off_policy else None,
        "ref_logits": ref,
        "logits": logits.detach(),
        "advantages": inputs["advantages"],
        "loss": loss,
        "clip_ratio": metrics["cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"][0],
        "kl": metrics["kl"][-1] if beta else None,
        "entropy": metrics["entropy"][-1],
        "grad": logits.grad,
    }


def advantages_case(trainer_class: Any, *, scale: str, **settings: Any) -> dict[str, Any]:
    """Rewards to advantages by RLOOTrainer, whose loss is another one."""
    tokens, rewards = rows(), torch.tensor([[1.0, 0.5], [0.0, torch.nan], [2.0, -1.0], [0.5, 0.0]])
    trainer = stub(trainer_class, GivenLogits(random(B, P + C, V)), beta=0.0, **settings)
    advantages = generated(trainer, tokens, rewards)["advantages"]
    return {
        "kind": "rloo",
        "settings": {"scale": scale, "estimator": "rloo"},
        "rewards": nan_to_none(rewards),
        "weights": [1.0, 0.5],
        "advantages": advantages,
    }


def generated(trainer: Any, tokens: torch.Tensor, rewards: torch.Tensor) -> dict[str, Any]:
    """What the trainer makes of completions and their [B, functions] rewards, two completions to a prompt."""
    prompts = tokens[:, :P].tolist()
    completions = [tokens[row, P : P + length].tolist() for row, length in enumerate(LENGTHS)]
    extra = () if "RLOO" in type(trainer).__name__ else (None,)
    trainer._generate = lambda _: (prompts, completions, *extra, ["text"] * B, *(extra and (None, {}, None, None)))
    trainer._calculate_rewards = lambda *_: rewards
    trainer.num_generations, trainer.reward_weights = 2, torch.tensor([1.0, 0.5])
    trainer.reward_funcs, trainer.reward_func_names = [None, None], ["first", "second"]
    return trainer._generate_and_score_completions([{"prompt": "text"}] * B)


def stub(trainer_class: Any, model: torch.nn.Module, **attributes: Any) -> Any:
    """A trainer that was not initialised, with what its losses look at."""
    trainer = type(f"Stub{trainer_class.__name__}", (trainer_class,), {"current_gradient_accumulation_steps": 1})
    made = trainer.__new__(trainer)
    args = SimpleNamespace(
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        per_device_train_batch_size=B,
        gradient_checkpointing_kwargs=None,
        report_to=[],
    )
    logs = {"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": defaultdict(list)}
    falsy = (
        "aux_loss_enabled tools environments environment_factories use_vllm mask_truncated_completions "
        "multi_environment pad_to_multiple_of use_adaptive_entropy _entropy_bonus_enabled reward_clip_range "
        "log_multimodal off_policy_mask_threshold vllm_importance_sampling_correction"
    )
    values = {
        **dict.fromkeys(falsy.split()),
        "args": args,
        "model": model,
        "accelerator": Accelerator(),
        "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize",
        "top_entropy_quantile": 1.0,
        "num_iterations": 1,
        "_tokenizer": SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        "_metrics": {"train": defaultdict(list)},
        "_logs": logs,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        **attributes,
    }
    for name, value in values.items():
        setattr(made, name, value)
    return made


def completion_mask(tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(LENGTHS):
        mask[row, P : P + length] = 1
    return mask


def nan_to_none(rewards: torch.Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(reward) else reward for reward in row] for row in rewards.tolist()]


def ppo_cases() -> list[dict[str, Any]]:
    return [
        ppo_case(gamma=1.0, lam=0.95),
        ppo_case(gamma=0.9, lam=0.8),
        ppo_case(gamma=1.0, lam=0.95, kl_coef=0.0),
        ppo_case(gamma=0.9, lam=0.95, whiten_rewards=True),
    ]


def ppo_case(*, gamma: float, lam: float, kl_coef: float = 0.05, whiten_rewards: bool = False) -> dict[str, Any]:
    """One update of PPOTrainer.train on a rollout that was given."""
    from trl.experimental.ppo import ppo_trainer

    tokens = rows()
    old, ref, new = random(B, P + C, V), random(B, P + C, V), None
    new = leaf(old + random(B, P + C, V, scale=0.5))
    old_values, scores = random(B, P + C), random(B)
    new_values = leaf(old_values + random(B, P + C, scale=0.5))
    whitened: list[tuple[torch.Tensor, torch.Tensor]] = []
    whiten = ppo_trainer.masked_whiten

    def masked_whiten(values: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
        whitened.append((values.clone(), whiten(values, mask, **options)))
        return whitened[-1][1]

    def forward(model: Any, query_responses: torch.Tensor, *_: object) -> Any:
        picked = (query_responses[:, 0] - 2).tolist()
        if model == "ref":
            return SimpleNamespace(logits=ref[picked].clone())
        return SimpleNamespace(logits=new[picked]), new_values[picked].unsqueeze(-1)

    def get_reward(model: Any, *_: object) -> tuple[Any, Any, None]:
        return (old_values.unsqueeze(-1), None, None) if model == "value" else (None, scores.clone(), None)

    ppo_trainer.masked_whiten, ppo_trainer.forward, ppo_trainer.get_reward = masked_whiten, forward, get_reward
    ppo_trainer.batch_generation = lambda *_: (tokens, old[:, P - 1 : -1].clone())
    ppo_trainer.unwrap_model_for_generation = lambda model, *_, **__: nullcontext(model)
    settings = {
        "gamma": gamma,
        "lam": lam,
        "kl_coef": kl_coef,
        "whiten_rewards": whiten_rewards,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
    }
    ones = "num_ppo_epochs num_mini_batches gradient_accumulation_steps num_total_batches temperature"
    sizes = (
        "batch_size local_batch_size local_mini_batch_size per_device_train_batch_size "
        "local_rollout_forward_batch_size total_episodes"
    )
    args = SimpleNamespace(
        **settings,
        **dict.fromkeys(ones.split(), 1),
        **dict.fromkeys(sizes.split(), B),
        **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "missing_eos_penalty")),
        response_length=C,
        num_sample_generations=0,
        ds3_gather_for_generation=False,
        kl_estimator="k1",
    )
    control = SimpleNamespace(should_save=False)
    callbacks = dict.fromkeys(("on_train_begin", "on_step_end", "on_train_end"), lambda *_: control)
    accelerator, logged = Accelerator(), []
    trainer = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        optimizer=SimpleNamespace(step=lambda: None, zero_grad=lambda: None),
        model=SimpleNamespace(policy="policy", value_model="value", train=lambda: None),
        ref_model="ref",
        reward_model="reward",
        processing_class=SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS),
        dataloader=[{"input_ids": tokens[:, :P]}],
        state=SimpleNamespace(),
        control=control,
        callback_handler=SimpleNamespace(**callbacks),
        lr_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0], step=lambda: None),
        is_deepspeed_enabled=False,
        train_dataset_len=B,
        stop_token_id=EOS,
        log=logged.append,
    )
    ppo_trainer.PPOTrainer.train(trainer)
    ppo_trainer.masked_whiten = whiten
    advantages, whitened_advantages = whitened[-1]
    return {
        "kind": "ppo",
        "settings": {**settings, "max_completion_length": C},
        "tokens": tokens,
        "mask": completion_mask(tokens),
        "old_logits": old,
        "ref_logits": ref,
        "logits": new.detach(),
        "old_values": old_values,
        "values": new_values.detach(),
        "scores": scores,
        "advantages": advantages,
        "whitened": whitened_advantages,
        "loss": accelerator.losses[0],
        "policy_loss": logged[0]["loss/policy_avg"],
        "value_loss": logged[0]["loss/value_avg"],
        "clip_ratio": logged[0]["policy/clipfrac_avg"],
        "value_clip_ratio": logged[0]["val/clipfrac_avg"],
        "grad": new.grad,
        "value_grad": new_values.grad,
    }


if __name__ == "__main__":
    main()
