"""The flags of post-training: TRL's names and, for each objective, TRL's defaults.

Denominators and whitening span the optimizer step, or the whole rollout, over all ranks; TRL's span a process or a
micro-batch in places. Every default that differs is listed with its reason in tests/post_training/test_trl_defaults.py.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megazpp.base.flags import as_words, as_written, check_not_negative, check_positive, check_words, flag, spelling
from megazpp.post_training.losses import PairLoss, RewardScale, TokenLoss

ROLLOUTS = ("grpo", "ppo")
GRPO, PPO, DRAWN = (f"--objective {names}" for names in (*ROLLOUTS, " ".join(ROLLOUTS)))  # what flags need
REFERENCE, CHOSEN_LOSS = f"{DRAWN} dpo", f"{GRPO} dpo"
LOSS_TYPES: dict[str | None, tuple[str, ...]] = {"dpo": get_args(PairLoss), "grpo": get_args(TokenLoss)}
DEFAULT_LOSS: dict[str | None, tuple[str, ...]] = {"dpo": ("sigmoid",), "grpo": ("dapo",)}
DEFAULT_BETA: dict[str | None, float] = {"dpo": 0.1}
DEFAULT_RATE = {"sft": 2e-5, "reward": 1e-4, "dpo": 1e-6, "grpo": 1e-6, "ppo": 3e-6}
# of other configs; tokens are drawn as the policy has them
DEFAULTS = {"weight_decay": 0.0, "sample_temperature": 1.0, "sample_top_k": 0, "sample_top_p": 1.0}


@dataclass(frozen=True, kw_only=True)
class PostTrainingConfig:
    """Post-training.

    The objective and its constants.
    """

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
        None, "weight of the divergence from the reference (default dpo 0.1, grpo 0)", needs=CHOSEN_LOSS
    )
    loss_type: tuple[str, ...] | None = flag(
        None,
        "dpo: some of sigmoid, hinge, ipo, robust, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, sft, which are "
        "added (default sigmoid); grpo: grpo, bnpo, dr_grpo, dapo or cispo (default dapo). bnpo and dapo are the same "
        "here, where both count the tokens of the whole step; cispo truncates the ratio at --epsilon-high (5 is usual)",
        nargs="+",
        needs=CHOSEN_LOSS,
    )
    loss_weights: tuple[float, ...] | None = flag(
        None, "weight of each of --loss-type in the sum (default: 1 each)", nargs="+", needs="--objective dpo"
    )
    label_smoothing: float = flag(
        0.0, "share of preferences that are taken to be wrong (with the loss robust)", needs="--objective dpo"
    )
    center_rewards_coefficient: float | None = flag(
        None,
        "weight of the squared sum of a pair's scores, which keeps their mean at 0",
        needs="--objective reward",
    )
    sync_ref_model: bool = flag(
        False,
        "mix the policy into the reference from time to time; the reference is then sharded like the policy, in fp32, "
        "and gathered across nodes",
        needs=CHOSEN_LOSS,
    )
    ref_model_mixup_alpha: float = flag(0.6, "share of the policy in the mixture", needs="--sync-ref-model")
    ref_model_sync_steps: int = flag(512, "optimizer steps between two mixtures", needs="--sync-ref-model")
    precompute_ref_log_probs: bool = flag(
        False,
        "have the reference's log-probabilities of all pairs before training begins, and then drop it; they are "
        "kept in --data-cache-path for other runs",
        needs="--objective dpo",
    )
    num_generations: int = flag(8, "completions of each prompt; they may lie on several ranks", needs=GRPO)
    max_completion_length: int = flag(512, "tokens of a completion at most", needs=DRAWN)
    rollouts_at_once: int | None = flag(
        None,
        "completions that a data-parallel rank draws together, whose keys and values it keeps (default: all)",
        needs=DRAWN,
    )
    rollout_graphs: bool = flag(
        False,
        "replay CUDA graphs of decoding steps, so that each token costs the host one launch; needs one tensor-parallel "
        "and one context-parallel rank; not validated on a GPU yet",
        needs=DRAWN,
    )
    steps_per_generation: int = flag(
        1, "optimizer steps that one generation of completions is enough for; TRL counts micro-batches", needs=GRPO
    )
    num_iterations: int = flag(1, "times that these steps are taken", needs=GRPO)
    epsilon: float = flag(0.2, "the ratio to the old policy is clipped at 1 - this, and at 1 + this above", needs=GRPO)
    epsilon_high: float | None = flag(None, "clip above at 1 + this instead", needs=GRPO)
    delta: float | None = flag(
        None, "the ratio never counts as more than this, where advantages are negative", needs=GRPO
    )
    importance_sampling_level: Literal["token", "sequence"] = flag(
        "token", "the ratio to the old policy is of each token, or of a completion as a whole: GSPO", needs=GRPO
    )
    use_bias_correction_kl: bool = flag(
        True, "multiply the divergence from the reference by that ratio: its gradient is without bias then", needs=GRPO
    )
    scale_rewards: Literal["group", "batch", "none"] | None = flag(
        None,
        "divide advantages by the standard deviation of a group's rewards, of the batch's, or not (default: group; "
        "none with rloo)",
        needs=GRPO,
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
    log_completions: int = flag(
        2, "completions that a log line comes with; completions.jsonl has all of these prompts; 0: none", needs=DRAWN
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "num_generations", "max_completion_length", "rollouts_at_once", "steps_per_generation")
        check_positive(self, "num_iterations", "num_ppo_epochs", "num_mini_batches", "ref_model_sync_steps", "delta")
        check_positive(self, "epsilon", "epsilon_high", "cliprange", "cliprange_value", "center_rewards_coefficient")
        check_not_negative(
            self, "beta", "kl_coef", "vf_coef", "missing_eos_penalty", "ref_ckpt_step", "log_completions"
        )
        for name in ("gamma", "lam", "ref_model_mixup_alpha"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{spelling(self, name)} {getattr(self, name)} is not in (0, 1]")
        if self.ref_checksum is not None and not re.fullmatch(r"[0-9a-f]{16}", self.ref_checksum):
            raise ValueError(f"--ref-checksum {self.ref_checksum} is no checksum of weights: 16 digits of 0-9 and a-f")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label-smoothing {self.label_smoothing} is not in [0, 0.5)")
        if not all(weight > 0.0 for weight in self.loss_weights or ()):
            raise ValueError(f"--loss-weights {as_words(self.loss_weights)}: a weight is not positive")
        if self.objective not in LOSS_TYPES:
            return
        for name in self.losses:
            if name not in (allowed := LOSS_TYPES[self.objective]):
                which = f"one of {', '.join(allowed)}"
                raise ValueError(f"--loss-type {name} is not {which} with --objective {self.objective}")
        if self.objective == "grpo" and len(self.losses) > 1:
            raise ValueError(f"--loss-type {' '.join(self.losses)}: --objective grpo has one")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.losses):
            raise ValueError(
                f"--loss-weights {as_words(self.loss_weights)} has {len(self.loss_weights)} weights for the "
                f"{len(self.losses)} of --loss-type {' '.join(self.losses)}"
            )
        if self.objective == "dpo" and self.beta_or_default == 0.0:
            raise ValueError("--beta 0.0: with --objective dpo the loss would not depend on the policy")
        if self.objective == "grpo" and self.num_generations == 1:
            raise ValueError("--num-generations 1: a completion has nothing to be compared with (--objective grpo)")
        for names, off, needed in (
            ("label_smoothing", "robust" not in self.losses, "needs --loss-type robust"),
            ("delta", self.loss == "cispo", "is for a loss that clips, not --loss-type cispo"),
            ("epsilon", self.loss == "cispo" and bool(self.epsilon_high), "is not used by --loss-type cispo"),
            ("use_bias_correction_kl sync_ref_model", not self.needs_reference, "needs --beta above 0"),
            ("precompute_ref_log_probs", self.sync_ref_model, "is for a reference without --sync-ref-model"),
        ):
            for field in dataclasses.fields(self) if off else ():
                if field.name in names.split() and getattr(self, field.name) != field.default:
                    raise ValueError(f"{as_written(self, field)} {needed}")

    @property
    def losses(self) -> tuple[Any, ...]:
        """The types of the losses that are added, given or the objective's default; () where there is no choice."""
        return self.loss_type or DEFAULT_LOSS.get(self.objective, ())

    @property
    def loss(self) -> Any:
        """The first of them."""
        return next(iter(self.losses), None)

    @property
    def reward_scale(self) -> RewardScale:
        return self.scale_rewards or ("none" if self.advantage_estimator == "rloo" else "group")

    @property
    def beta_or_default(self) -> float:
        return DEFAULT_BETA.get(self.objective, 0.0) if self.beta is None else self.beta

    @property
    def draws(self) -> bool:
        """True if the policy is trained on what it draws."""
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
        """The passes through a buffer of completions."""
        return self.num_ppo_epochs if self.objective == "ppo" else self.num_iterations
