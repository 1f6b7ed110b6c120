"""The flags of post-training: TRL's names and, for each objective, TRL's defaults.

Two things differ. Denominators and whitening span the optimizer step, or the whole rollout, over all ranks; TRL's span
a process or a micro-batch in places. And tokens are drawn at temperature 1 without top-k and top-p unless flags say
otherwise, so that what is drawn is the policy that is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from megazpp.flags import check_not_negative, check_positive, flag, spelling
from megazpp.post_training.losses import PairLoss, TokenLoss

ROLLOUTS = ("grpo", "ppo")
GRPO, PPO, DRAWN = (f"--objective {names}" for names in (*ROLLOUTS, " ".join(ROLLOUTS)))  # what flags need
REFERENCE = f"{DRAWN} dpo"
LOSS_TYPES: dict[str, tuple[str, ...]] = {"dpo": get_args(PairLoss), "grpo": get_args(TokenLoss)}  # the default is not
DEFAULT_LOSS = {"dpo": "sigmoid", "grpo": "dapo"}
DEFAULT_BETA = {"dpo": 0.1, "grpo": 0.0}
DEFAULT_RATE = {"sft": 2e-5, "reward": 1e-4, "dpo": 1e-6, "grpo": 1e-6, "ppo": 3e-6}


@dataclass(frozen=True, kw_only=True)
class PostTrainingConfig:
    """Post-training: what the model is trained towards."""

    objective: Literal["sft", "reward", "dpo", "grpo", "ppo"] | None = flag(
        None,
        "sft: examples; reward: a scalar head that prefers the better answer; dpo: the better answer directly; "
        "grpo: rewards of drawn completions against those of their group; ppo: the same against a value head",
    )
    ref_load: str | None = flag(
        None, "checkpoints of the reference model (default: what this training began with, --load)", needs=REFERENCE
    )
    ref_ckpt_step: int | None = flag(None, "iteration of the reference model's checkpoint (default: the latest)")
    ref_checksum: str | None = flag(
        None, "checksum that the weights of --lora-r's base must have (default: those of the first start)"
    )
    reward_load: str | None = flag(
        None, "checkpoints of a trained reward model; its score is a reward like those of --reward-funcs", needs=DRAWN
    )
    beta: float | None = flag(
        None, "weight of the divergence from the reference (default dpo 0.1, grpo 0)", needs="--objective grpo dpo"
    )
    loss_type: str | None = flag(
        None,
        "dpo: sigmoid, hinge, ipo, robust, nca_pair, bco_pair, sppo_hard, apo_zero or apo_down (default sigmoid); "
        "grpo: grpo, bnpo, dr_grpo or dapo (default dapo). bnpo and dapo are the same here, where both count the "
        "tokens of the whole step",
    )
    label_smoothing: float = flag(0.0, "share of preferences that are taken to be wrong (dpo with the loss robust)")
    precompute_ref_log_probs: bool = flag(
        False,
        "have the reference's log-probabilities of all pairs before training begins, and then drop it; they are "
        "kept in --data-cache-path for other runs",
        needs="--objective dpo",
    )
    num_generations: int = flag(8, "completions of each prompt; they may lie on several ranks", needs=GRPO)
    max_completion_length: int = flag(256, "tokens of a completion at most", needs=DRAWN)
    rollouts_at_once: int | None = flag(
        None, "completions that a data-parallel rank draws together, whose keys and values it keeps (default: all)"
    )
    steps_per_generation: int = flag(
        1, "optimizer steps that one generation of completions is enough for; TRL counts micro-batches", needs=GRPO
    )
    num_iterations: int = flag(1, "times that these steps are taken", needs=GRPO)
    epsilon: float = flag(0.2, "the ratio to the old policy is clipped at 1 - this, and at 1 + this above", needs=GRPO)
    epsilon_high: float | None = flag(None, "clip above at 1 + this instead", needs=GRPO)
    scale_rewards: Literal["group", "batch", "none"] = flag(
        "group", "divide advantages by the standard deviation of a group's rewards, of the batch's, or not", needs=GRPO
    )
    advantage_estimator: Literal["grpo", "rloo"] = flag(
        "grpo", "what a reward is compared with: grpo, its group's mean; rloo, the mean of the others", needs=GRPO
    )
    mask_truncated_completions: bool = flag(False, "no loss on completions that reached the limit", needs=GRPO)
    kl_coef: float = flag(0.05, "weight of the divergence from the reference in the rewards of tokens", needs=PPO)
    cliprange: float = flag(0.2, "the ratio to the old policy is clipped at 1 - this and 1 + this", needs=PPO)
    cliprange_value: float = flag(0.2, "values may move so far from the old ones", needs=PPO)
    vf_coef: float = flag(0.1, "weight of the values' loss", needs=PPO)
    gamma: float = flag(1.0, "discount of later rewards", needs=PPO)
    lam: float = flag(0.95, "lambda of the generalized advantage estimation", needs=PPO)
    num_ppo_epochs: int = flag(4, "times that each generation of completions is gone through", needs=PPO)
    num_mini_batches: int = flag(1, "optimizer steps of one time through; each takes --global-batch-size", needs=PPO)
    missing_eos_penalty: float | None = flag(None, "taken off the reward of what reached the limit", needs=PPO)
    whiten_rewards: bool = flag(False, "scale the rewards of tokens to variance 1 over the whole rollout", needs=PPO)
    eval_on_start: bool = flag(False, "also evaluate before the first step")
    log_completions: int = flag(2, "completions that a log line comes with; completions.jsonl has as many; 0: none")

    def __post_init__(self) -> None:
        check_positive(self, "num_generations", "max_completion_length", "rollouts_at_once", "steps_per_generation")
        check_positive(self, "num_iterations", "num_ppo_epochs", "num_mini_batches")
        check_positive(self, "epsilon", "epsilon_high", "cliprange", "cliprange_value")
        check_not_negative(
            self, "beta", "kl_coef", "vf_coef", "missing_eos_penalty", "ref_ckpt_step", "log_completions"
        )
        for name in ("gamma", "lam"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{spelling(self, name)} {getattr(self, name)} is not in (0, 1]")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label-smoothing {self.label_smoothing} is not in [0, 0.5)")
        if self.objective is None:
            return
        allowed = LOSS_TYPES.get(self.objective, ())
        if self.loss_type is not None and self.loss_type not in allowed:
            what = f"one of {', '.join(allowed)}" if allowed else "a choice that there is"
            raise ValueError(f"--loss-type {self.loss_type} is not {what} with --objective {self.objective}")
        if self.label_smoothing and self.loss != "robust":
            raise ValueError(f"--label-smoothing {self.label_smoothing} needs --objective dpo --loss-type robust")
        if self.objective == "dpo" and self.beta_or_default == 0.0:
            raise ValueError("--beta 0.0: with --objective dpo the loss would not depend on the policy")
        if self.objective == "grpo" and self.num_generations == 1:
            raise ValueError("--num-generations 1: a completion has nothing to be compared with (--objective grpo)")

    @property
    def loss(self) -> Any:
        """The loss's type, given or the objective's default."""
        return self.loss_type or DEFAULT_LOSS.get(self.objective or "")

    @property
    def beta_or_default(self) -> float:
        return DEFAULT_BETA.get(self.objective or "", 0.0) if self.beta is None else self.beta

    @property
    def draws(self) -> bool:
        """Whether the policy is trained on what it draws."""
        return self.objective in ROLLOUTS

    @property
    def needs_reference(self) -> bool:
        weight = self.kl_coef if self.objective == "ppo" else self.beta_or_default
        return self.objective in ("dpo", *ROLLOUTS) and weight > 0.0

    @property
    def group_size(self) -> int:
        """Completions of each prompt."""
        return self.num_generations if self.objective == "grpo" else 1

    @property
    def slices(self) -> int:
        """Optimizer steps that go once through a buffer of completions."""
        return self.num_mini_batches if self.objective == "ppo" else self.steps_per_generation

    @property
    def passes(self) -> int:
        """How often a buffer of completions is gone through."""
        return self.num_ppo_epochs if self.objective == "ppo" else self.num_iterations
