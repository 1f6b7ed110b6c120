"""Command-line flags of post-training, with TRL's names and TRL's defaults for each objective.

A generation is the set of completions that all ranks sample at once, for one or several optimizer steps. The old policy
is the policy with the weights that sampled a generation. Losses are averaged over all micro-batches and ranks of an
optimizer step. PPO's advantages and rewards are whitened over all completions of a generation. TRL averages or whitens
some of these over one process or one micro-batch only.
tests/post_training/test_trl_defaults.py lists each default that differs from TRL's default, and the reason.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from megazpp.base.flags import Config, as_words, as_written, flag, shown
from megazpp.base.program import in_words
from megazpp.lora.config import LoraConfig
from megazpp.packed_weights.config import WeightsConfig
from megazpp.run.arguments import ParsedRun

PairLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sft"
]
TokenLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
RewardScale = Literal["group", "batch", "none"]
ROLLOUTS = ("grpo", "ppo")  # objectives that train on sampled completions of the policy
# Values of the argument `needs` of `flag`: the objectives with which a flag may be used. DRAWN has the objectives that
# train on sampled completions, REFERENCE the objectives that may have a reference model, and CHOSEN_LOSS the objectives
# with --loss-type.
GRPO, PPO, DRAWN = (f"--objective {names}" for names in (*ROLLOUTS, " ".join(ROLLOUTS)))
REFERENCE, CHOSEN_LOSS = f"{DRAWN} dpo", f"{GRPO} dpo"
# By objective: the allowed values of --loss-type, and the defaults of --loss-type, --beta and --lr
LOSS_TYPES: dict[str | None, tuple[str, ...]] = {"dpo": get_args(PairLoss), "grpo": get_args(TokenLoss)}
DEFAULT_LOSS: dict[str | None, tuple[str, ...]] = {"dpo": ("sigmoid",), "grpo": ("dapo",)}
DEFAULT_BETA: dict[str | None, float] = {"dpo": 0.1}
DEFAULT_RATE = {"sft": 2e-5, "reward": 1e-4, "dpo": 1e-6, "grpo": 1e-6, "ppo": 3e-6}
# Defaults of post-training for fields of other configs. With these values of the sample_* fields, completions are
# sampled from the policy's own distribution, which the losses of GRPO and PPO assume.
DEFAULTS = {
    "weight_decay": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "sample_temperature": 1.0,
    "sample_top_k": 0,
    "sample_top_p": 1.0,
}
TAKEN = ("model", "tokenizer", "precision")  # configs whose flags are taken from the checkpoint of --load


@dataclass(frozen=True, kw_only=True)
class PostTrainingConfig(Config):
    """Post-training.

    Flags for the objective and the constants of its loss.

    Attributes:
        objective: training objective: sft, imitate examples; reward, train a scalar head to prefer the better answer;
            dpo, prefer the better answer directly; grpo, compare rewards of sampled completions within groups; ppo,
            compare these rewards with the estimates of a value head.
        ref_load: folder of the reference model's checkpoints (default: the model that this training began with,
            --load).
        ref_ckpt_step: iteration of the reference model's checkpoint (default: the latest).
        ref_checksum: required checksum of the frozen base weights with --lora-r (default: the checksum at the first
            start).
        reward_load: folder of a trained reward model's checkpoints; its score is added to the rewards of
            --reward-funcs.
        beta: weight of the divergence from the reference model (default: dpo 0.1, grpo 0).
        loss_type: loss functions, which are added for dpo: some of sigmoid, hinge, ipo, robust, nca_pair, bco_pair,
            sppo_hard, apo_zero, apo_down, sft (default: sigmoid); for grpo, one of grpo, bnpo, dr_grpo, dapo, cispo
            (default: dapo). bnpo and dapo are equal here, because both count the tokens of the whole step. cispo
            truncates the ratio at --epsilon-high (often 5).
        loss_weights: weight in the sum of each loss function of --loss-type (default: 1 each).
        label_smoothing: assumed fraction of wrong preferences, for --loss-type robust.
        center_rewards_coefficient: weight of the squared sum of both scores of a pair in the loss, which keeps the mean
            score at 0.
        precompute_ref_log_probs: compute the reference model's log-probabilities of all pairs before training, and then
            free the reference model.
        num_generations: number of completions of each prompt, on one or several ranks.
        max_completion_length: largest number of tokens of a completion.
        rollouts_at_once: number of completions that a data-parallel rank samples in one batch, whose keys and values
            are in memory together (default: all of its completions).
        steps_per_generation: optimizer steps of one pass over a generation of completions; TRL counts micro-batches.
        num_iterations: number of passes over each generation of completions.
        epsilon: clip range of the ratio to the old policy, 1 - epsilon to 1 + epsilon.
        epsilon_high: upper clip range, 1 + epsilon_high (default: --epsilon).
        delta: largest ratio to the old policy where advantages are negative (default: unlimited).
        importance_sampling_level: level of the ratio to the old policy: each token, or the whole completion (GSPO).
        use_bias_correction_kl: multiply the divergence from the reference by the ratio, for an unbiased gradient.
        scale_rewards: divisor of advantages: the standard deviation of the rewards of a prompt's completions (group),
            of all completions (batch), or 1 (none) (default: group; none with rloo).
        advantage_estimator: baseline of a reward: the mean reward of all completions of the prompt (grpo), or of its
            other completions (rloo).
        mask_truncated_completions: no loss on completions that reached the token limit.
        kl_coef: weight of the divergence from the reference model in the rewards of tokens.
        cliprange: clip range of the ratio to the old policy, 1 - cliprange to 1 + cliprange.
        cliprange_value: largest change of the value head's output from its old output.
        vf_coef: weight of the value head's loss.
        gamma: discount of later rewards.
        lam: lambda of the generalized advantage estimation.
        num_ppo_epochs: number of passes over each generation of completions.
        num_mini_batches: optimizer steps of one pass, each with --global-batch-size completions.
        missing_eos_penalty: amount subtracted from the reward of completions that reached the token limit.
        whiten_rewards: scale the rewards of tokens to variance 1 over a generation.
        eval_on_start: also evaluate held-out data before the first step.
        log_completions: prompts of a generation whose completions go to the log and to completions.jsonl; 0 for none.
    """

    objective: Literal["sft", "reward", "dpo", "grpo", "ppo"] | None = flag(None)
    ref_load: str | None = flag(None, needs=REFERENCE, must_exist=True)
    ref_ckpt_step: int | None = flag(None, must_be="not negative")
    ref_checksum: str | None = flag(None)
    reward_load: str | None = flag(None, needs=DRAWN, must_exist=True)
    beta: float | None = flag(None, needs=CHOSEN_LOSS, must_be="not negative")
    loss_type: tuple[str, ...] | None = flag(None, nargs="+", needs=CHOSEN_LOSS)
    loss_weights: tuple[float, ...] | None = flag(None, nargs="+", needs="--objective dpo", must_be="positive")
    label_smoothing: float = flag(0.0, needs="--objective dpo")
    center_rewards_coefficient: float | None = flag(None, needs="--objective reward", must_be="positive")
    precompute_ref_log_probs: bool = flag(False, needs="--objective dpo")
    num_generations: int = flag(8, needs=GRPO, must_be="positive")
    max_completion_length: int = flag(512, needs=DRAWN, must_be="positive")
    rollouts_at_once: int | None = flag(None, needs=DRAWN, must_be="positive")
    steps_per_generation: int = flag(1, needs=GRPO, must_be="positive")
    num_iterations: int = flag(1, needs=GRPO, must_be="positive")
    epsilon: float = flag(0.2, needs=GRPO, must_be="positive")
    epsilon_high: float | None = flag(None, needs=GRPO, must_be="positive")
    delta: float | None = flag(None, needs=GRPO, must_be="positive")
    importance_sampling_level: Literal["token", "sequence"] = flag("token", needs=GRPO)
    use_bias_correction_kl: bool = flag(True, needs=GRPO)
    scale_rewards: Literal["group", "batch", "none"] | None = flag(None, needs=GRPO)
    advantage_estimator: Literal["grpo", "rloo"] = flag("grpo", needs=GRPO)
    mask_truncated_completions: bool = flag(False, needs=GRPO)
    kl_coef: float = flag(0.05, needs=PPO, must_be="not negative")
    cliprange: float = flag(0.2, needs=PPO, must_be="positive")
    cliprange_value: float = flag(0.2, needs=PPO, must_be="positive")
    vf_coef: float = flag(0.1, needs=PPO, must_be="not negative")
    gamma: float = flag(1.0, needs=PPO, must_be="a share")
    lam: float = flag(0.95, needs=PPO, must_be="a share")
    num_ppo_epochs: int = flag(4, needs=PPO, must_be="positive")
    num_mini_batches: int = flag(1, needs=PPO, must_be="positive")
    missing_eos_penalty: float | None = flag(None, needs=PPO, must_be="not negative")
    whiten_rewards: bool = flag(False, needs=PPO)
    eval_on_start: bool = flag(False)
    log_completions: int = flag(2, needs=DRAWN, must_be="not negative")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ref_checksum is not None and not re.fullmatch(r"[0-9a-f]{16}", self.ref_checksum):
            raise ValueError(f"--ref-checksum {self.ref_checksum} is not 16 hexadecimal digits (0-9, a-f)")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label-smoothing {self.label_smoothing} is not in [0, 0.5): give a fraction below half")
        if self.objective not in LOSS_TYPES:
            return
        for name in self.losses:
            if name not in (allowed := LOSS_TYPES[self.objective]):
                raise ValueError(
                    f"--loss-type {name} is not one of {', '.join(allowed)} with --objective {self.objective}: "
                    "give one of these"
                )
        if self.objective == "grpo" and len(self.losses) > 1:
            raise ValueError(f"--loss-type {' '.join(self.losses)}: --objective grpo takes one loss, not a sum")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.losses):
            raise ValueError(
                f"--loss-weights {as_words(self.loss_weights)} has {len(self.loss_weights)} weights for the "
                f"{len(self.losses)} of --loss-type {' '.join(self.losses)}: give one weight for each loss"
            )
        if self.objective == "dpo" and self.beta_or_default == 0.0:
            raise ValueError("--beta 0.0 must be above 0: with --objective dpo the loss would not depend on the policy")
        if self.objective == "grpo" and self.num_generations == 1:
            raise ValueError(
                "--num-generations 1: --objective grpo compares the completions of a prompt with one another; give at "
                "least 2"
            )
        for names, off, needed in (
            ("label_smoothing", "robust" not in self.losses, "needs --loss-type robust"),
            ("delta", self.loss == "cispo", "is for a loss that clips, not --loss-type cispo"),
            ("epsilon", self.loss == "cispo" and bool(self.epsilon_high), "is not used by --loss-type cispo"),
            ("use_bias_correction_kl", not self.needs_reference, "needs --beta above 0"),
        ):
            for field in dataclasses.fields(self) if off else ():
                if field.name in names.split() and getattr(self, field.name) != field.default:
                    raise ValueError(f"{as_written(self, field)} {needed}: leave the flag out, or change the other one")

    @property
    def losses(self) -> tuple[Any, ...]:
        """The loss functions whose sum is the loss: --loss-type or its default; () for objectives without the flag."""
        return self.loss_type or DEFAULT_LOSS.get(self.objective, ())

    @property
    def loss(self) -> Any:
        """The name of the first loss function of `losses`, for grpo the only one; None if there are none."""
        return next(iter(self.losses), None)

    @property
    def reward_scale(self) -> RewardScale:
        """The kind of divisor of advantages: --scale-rewards, or by default "none" with rloo and "group" with grpo."""
        return self.scale_rewards or ("none" if self.advantage_estimator == "rloo" else "group")

    @property
    def beta_or_default(self) -> float:
        """The weight of the divergence from the reference model: the value of --beta, or the objective's default."""
        return DEFAULT_BETA.get(self.objective, 0.0) if self.beta is None else self.beta

    @property
    def draws(self) -> bool:
        """True for grpo and ppo, which train the policy on completions that the policy itself has sampled."""
        return self.objective in ROLLOUTS

    @property
    def needs_reference(self) -> bool:
        """True if the loss depends on a reference model.

        This is so for dpo, for grpo with --beta above 0, and for ppo with --kl-coef above 0.
        """
        weight = self.kl_coef if self.objective == "ppo" else self.beta_or_default
        return self.objective in ("dpo", *ROLLOUTS) and weight > 0.0

    @property
    def group_size(self) -> int:
        """The number of completions that are sampled for each prompt; 1 for ppo."""
        return self.num_generations if self.objective == "grpo" else 1

    @property
    def slices(self) -> int:
        """The number of optimizer steps into which one pass over a generation's completions is divided."""
        return self.num_mini_batches if self.objective == "ppo" else self.steps_per_generation

    @property
    def passes(self) -> int:
        """The number of times that training uses each completion of a generation."""
        return self.num_ppo_epochs if self.objective == "ppo" else self.num_iterations


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Config):
    """Conversations.

    Flags for the conversion of conversations (lists of messages) to text.

    Attributes:
        chat_template: file of a Jinja chat template, or the name of one of the tokenizer's templates (default: the
            tokenizer's; ChatML in plain text if it has none).
        chat_template_kwargs: JSON object with further variables of the chat template, such as '{"enable_thinking":
            false}'.
        system_prompt: system message to put before conversations that have none.
    """

    chat_template: str | None = flag(None)
    chat_template_kwargs: str | None = flag(None)
    system_prompt: str | None = flag(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_object(self.chat_template_kwargs, "--chat-template-kwargs")


def parse_json(value: Any, name: str) -> Any:
    """Parse a text as JSON, and return the value.

    Args:
        value: text to parse; a value that is not a string is returned unchanged.
        name: description of the text for error messages, such as the name of a flag.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {shown(value)} is not JSON: {in_words(error)}") from error


def parse_object(value: Any, name: str) -> dict[str, Any]:
    """Parse a text as a JSON object, and return the object as a dictionary.

    Args:
        value: text to parse, or an object that is parsed already. None gives an empty object.
        name: description of the text for error messages, such as the name of a flag.

    Raises:
        ValueError: the text is not JSON, or the value is not an object.
    """
    found = parse_json(value, name)
    if not isinstance(found, dict | None):
        raise ValueError(f"{name} {value!r:.80} is not a JSON object: give names with values in braces")
    return found or {}


@dataclass(frozen=True, kw_only=True)
class DataFormatConfig(ChatConfig):
    """Data format.

    Flags for the conversion of lines of data to token sequences and loss masks.

    Attributes:
        max_length: most tokens of an example, prompt and answer together; longer examples are cut.
        assistant_only_loss: compute the loss on the assistant's words only; needs conversations.
        completion_only_loss: loss on the completion only, for data with prompt and completion.
        packing: put several examples into each row of --max-length, isolated from each other.
    """

    max_length: int = flag(1024, must_be="positive")
    assistant_only_loss: bool = flag(False)
    completion_only_loss: bool = flag(True)
    packing: bool = flag(False, needs="--objective sft")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 2:
            raise ValueError(f"--max-length {self.max_length} leaves no token to predict: give at least 2")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Config):
    """Rewards.

    Flags for the reward functions of sampled completions, and their weights.

    Attributes:
        reward_funcs: functions f(prompts, completions, **columns) -> list of numbers: module:function or
            file.py:function.
        reward_weights: weight of each of --reward-funcs in the reward (default: 1 each).
    """

    reward_funcs: tuple[str, ...] = flag((), nargs="*", needs=DRAWN, per_host=True)
    reward_weights: tuple[float, ...] | None = flag(None, nargs="+", needs=DRAWN)

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.reward_funcs:
            module, _, name = value.rpartition(":")
            if not module or not name.isidentifier():
                raise ValueError(
                    f"--reward-funcs {value} is not module:function or file.py:function: give the "
                    "module or the file, a colon, and the name of the function"
                )
        if len(set(self.reward_funcs)) < len(self.reward_funcs):
            raise ValueError(f"--reward-funcs {' '.join(self.reward_funcs)} names a function twice: give it once")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"--reward-weights {' '.join(map(str, self.reward_weights))} has {len(self.reward_weights)} weights for"
                f" the {len(self.reward_funcs)} of --reward-funcs: give one weight for each function"
            )


class PostConfigs(NamedTuple):
    """The configs that post-training has in addition to the configs of every run (`RunConfig`)."""

    training: PostTrainingConfig
    form: DataFormatConfig
    rewards: RewardConfig
    lora: LoraConfig
    weights: WeightsConfig


EXTRA: tuple[type, ...] = (PostTrainingConfig, DataFormatConfig, RewardConfig, LoraConfig, WeightsConfig)


def post_configs(parsed: ParsedRun) -> PostConfigs:
    """Return the configs that post-training has in addition to the configs of every run."""
    return PostConfigs(*parsed.extra)
