"""Compare this project's defaults with every default of TRL's configs, or give the reason for a difference.

write_trl_goldens.py has stored TRL's defaults.
"""

import dataclasses
import fnmatch
from typing import Any

import pytest
from post_training.test_losses import FILES

from megazpp.features import FEATURES
from megazpp.post_training.config import DEFAULT_RATE, DEFAULTS, EXTRA, PostTrainingConfig
from megazpp.run.arguments import run_configs, section_configs

# name of TRL's config -> our flags for it, and names of flags whose defaults must be equal
OBJECTIVES: dict[str, tuple[dict[str, Any], str]] = {
    "SFTConfig": ({"objective": "sft"}, "max_length packing"),
    "RewardConfig": ({"objective": "reward"}, "center_rewards_coefficient"),
    "DPOConfig": ({"objective": "dpo"}, "beta loss_type precompute_ref_log_probs"),
    "GRPOConfig": ({"objective": "grpo"}, "use_bias_correction_kl max_completion_length delta min_p"),
    "RLOOConfig": ({"objective": "grpo", "advantage_estimator": "rloo"}, "top_k"),
    "PPOConfig": ({"objective": "ppo"}, "lam kl_coef"),
}
TRL = {name: defaults for file in FILES.values() for name, defaults in file["defaults"].items()}

RENAMED = {  # TRL's name of a flag -> this project's name of it, for names that differ
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_decay_style",
    "warmup_steps": "lr_warmup_iters",
    "adam_epsilon": "adam_eps",
    "max_grad_norm": "clip_grad",
    "gradient_checkpointing": "recompute_granularity",
    "logging_steps": "log_interval",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "per_device_train_batch_size": "micro_batch_size",
    "max_steps": "train_iters",
    "dataloader_num_workers": "num_workers",
    "chat_template_path": "chat_template",
    "response_length": "max_completion_length",
    **{name: f"sample_{name}" for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
}

# (TRL's config, or "" for all; TRL's name) -> our default, TRL's default, and the reason for the difference
DIFFERENT: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("", "gradient_checkpointing"): (None, True, "recomputation changes no result; it is chosen by memory (--plan)"),
    ("", "bf16"): (False, None, "the checkpoint decides the precision"),
    ("", "logging_steps"): (100, 10, "Megatron's; changes no result"),
    ("", "save_steps"): (None, 500, "Megatron's; a checkpoint is always saved at the end"),
    ("", "eval_steps"): (1000, None, "Megatron's; evaluation is on if there is held-out data"),
    ("", "per_device_train_batch_size"): (None, 8, "one of the batch sizes has to be given"),
    ("", "max_steps"): (None, -1, "the run's length has to be given; in TRL it is three epochs"),
    ("", "seed"): (1234, 42, "Megatron's"),
    ("", "dataloader_num_workers"): (2, 0, "threads; the order of the data does not depend on them"),
    ("SFTConfig", "completion_only_loss"): (True, None, "None is True where data has prompt and completion"),
    ("GRPOConfig", "steps_per_generation"): (1, None, "ours counts optimizer steps; TRL's None means one"),
    ("RLOOConfig", "steps_per_generation"): (1, None, "as for GRPOConfig"),
    ("GRPOConfig", "log_completions"): (2, False, "a number of completions; changes no result"),
    ("RLOOConfig", "log_completions"): (2, False, "as for GRPOConfig"),
    ("RLOOConfig", "num_generations"): (8, 2, "RLOO is an advantage estimator here, and uses GRPO's settings"),
    ("RLOOConfig", "beta"): (0.0, 0.05, "as num_generations; the divergence is in the loss and not in the reward"),
    ("PPOConfig", "response_length"): (512, 53, "one limit for all completions; 53 cuts most answers"),
    ("PPOConfig", "temperature"): (1.0, 0.7, "completions are sampled from the policy as it will be used, as in GRPO"),
}

# TRL's flags whose default value is fixed behavior in this project
FIXED: dict[str, Any] = {
    "optim": "adamw_torch_fused",
    "average_tokens_across_devices": True,
    "train_sampling_strategy": "random",
    "dataset_text_field": "text",
    "truncation_mode": "keep_start",
    "packing_strategy": "bfd",
    "f_divergence_type": "reverse_kl",
    "multi_objective_aggregation": "sum_then_normalize",
    "top_entropy_quantile": 1.0,
    "kl_estimator": "k1",
    ("SFTConfig", "loss_type"): "nll",
    ("RewardConfig", "disable_dropout"): True,
    ("DPOConfig", "disable_dropout"): True,
    ("GRPOConfig", "shuffle_dataset"): True,
    ("RLOOConfig", "shuffle_dataset"): True,
}

# TRL's flags of features that this project does not have, and that TRL turns off by default
OFF = """
    lr_scheduler_kwargs optim_args optim_target_modules label_smoothing_factor neftune_noise_alpha auto_find_batch_size
    router_aux_loss_coef dataset_kwargs ld_alpha use_weighting cast_lm_head_to_fp32 num_generations_eval
    generation_kwargs chat_template_kwargs entropy_coef use_adaptive_entropy off_policy_mask_threshold
    reward_clip_range normalize_advantages use_vllm max_tool_calling_iterations eos_token pad_token stop_token
    stop_token_id padding_free eval_packing bf16_full_eval fp16_full_eval use_liger_kernel data_seed
    dataloader_drop_last tf32 activation_offloading trust_remote_code model_init_kwargs load_best_model_at_end
    ignore_data_skip generation_batch_size sync_ref_model
"""

# TRL's flags that this project does not have, by the reason why their defaults need no counterpart
UNMATCHED = {
    "part of a feature that is off (OFF)": """
        f_alpha_divergence_coef discopop_tau ref_model_* sapo_* vespo_* entropy_coef_* entropy_target vllm_*
        liger_kernel_config
    """,
    "GPT-2's dropout is always off here, whatever the objective": "disable_dropout",
    "epochs are shuffled for every objective; SFT's sampler shuffles in TRL": "shuffle_dataset",
    "the number of micro-batches follows from the global batch size": "gradient_accumulation_steps",
    "the run's length is --train-iters": "num_train_epochs total_episodes num_total_batches",
    "changes how results are computed, ranks are started or data is loaded, but no result": """
        activation_checkpointing* gradient_checkpointing_kwargs torch_* use_cache pad_to_multiple_of
        precompute_ref_batch_size ds3_gather_for_generation cache_implementation use_transformers_*
        transformers_continuous_batching_config local_rollout_forward_batch_size dataset_num_proc full_determinism
        use_cpu accelerator_config parallelism_config ddp_* fsdp* deepspeed world_size
        dataloader_* remove_unused_columns label_names length_column_name
    """,
    "about files, the Hub, the log or held-out data, on which no result depends": """
        output_dir logging_* log_* include_num_input_tokens_seen disable_tqdm report_to run_name project trackio_*
        save_* enable_jit_checkpoint push_to_hub hub_* metric_for_best_model greater_is_better debug
        skip_memory_metrics restore_callback_states_from_checkpoint resume_from_checkpoint num_completions_to_print
        num_sample_generations eval_* per_device_eval_batch_size prediction_loss_only include_for_metrics
        batch_eval_metrics do_*
    """,
    "names of models on the command line of an example": "sft_model_path reward_model_path *_adapter_name",
    "TRL's trainer computes it": "batch_size local_batch_size mini_batch_size local_mini_batch_size",
}
# Flags that have the same name in this project and in TRL, but different meanings: the reason why TRL's default does
# not apply.
OTHER_THING = {
    "micro_batch_size": "TRL's trainer computes it",
    "local_rank": "torchrun sets it",
}


def ours(post: PostTrainingConfig) -> dict[str, Any]:
    """Return this project's default of every flag under the objective of `post`, by name of the flag."""
    assert post.objective is not None
    parts = [*run_configs().values(), *section_configs(FEATURES), *EXTRA]
    found = {field.name: field.default for part in parts for field in dataclasses.fields(part)}
    found |= DEFAULTS | {"lr": DEFAULT_RATE[post.objective], "beta": post.beta_or_default}
    losses = post.losses[0] if post.objective == "grpo" else [*post.losses]
    return found | {"loss_type": losses, "scale_rewards": post.reward_scale}


def reason(config: str, name: str, theirs: Any, own: dict[str, Any]) -> str | None:
    """Return the reason why our default of TRL's flag `name` is right.

    The result is None if no reason is recorded, or if the recorded reason does not hold.
    """
    fixed = FIXED.get((config, name), FIXED.get(name, ...))  # type: ignore[call-overload]
    if fixed is not ...:
        return "always so" if fixed == theirs else None
    if name in OTHER_THING:
        return OTHER_THING[name]
    flag = RENAMED.get(name, name)
    if flag in own:
        different = DIFFERENT.get((config, name), DIFFERENT.get(("", name)))
        if different is not None:
            value, trl, why = different
            return why if (own[flag], theirs) == (value, trl) and value != trl else None
        return "the same" if own[flag] == theirs else None
    if name in OFF.split():
        return "off" if not theirs else None
    return next((why for why, names in UNMATCHED.items() if any(fnmatch.fnmatch(name, x) for x in names.split())), None)


def test_every_trl_default_is_ours_or_has_a_reason():
    for config, (settings, same) in OBJECTIVES.items():
        own = ours(PostTrainingConfig(**settings))
        reasons = {name: reason(config, name, theirs, own) for name, theirs in TRL[config].items()}
        assert {name: TRL[config][name] for name, why in reasons.items() if why is None} == {}, config
        found = {name for name, why in reasons.items() if why == "the same"}
        assert {"learning_rate", "weight_decay", "adam_beta2", *same.split()} <= found, config
    assert {*OBJECTIVES} == {*TRL}


@pytest.mark.slow  # the import of TRL takes seconds
def test_stored_defaults_match_the_installed_trl():
    trl = pytest.importorskip("trl")
    # TRL's configs inherit from transformers' TrainingArguments, so its version matters too
    transformers = pytest.importorskip("transformers")
    if FILES.get(trl.__version__, {}).get("transformers") != transformers.__version__:
        versions = f"TRL {trl.__version__} with transformers {transformers.__version__}"
        pytest.skip(f"{versions} has not been compared: write_trl_goldens.py")
    from helpers.write_trl_goldens import config_defaults

    assert config_defaults() == FILES[trl.__version__]["defaults"]
