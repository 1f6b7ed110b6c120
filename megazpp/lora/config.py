"""The flags of LoRA, which post-training adds to its own, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megazpp.base.flags import as_words, check_below_one, check_positive, check_words, flag, in_use, spelling
from megazpp.lora.peft import ALL_LINEAR, SETTINGS, AdapterSettings, default_targets, find_branches, read_adapter
from megazpp.model.config import GPTConfig
from megazpp.packed_weights.format import at_rest, plan_rows
from megazpp.run.arguments import ParsedRun, RunConfig


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA.

    Train low-rank adapters instead of all weights.
    """

    lora_r: int | None = flag(None, "rank of the adapters; trains adapters only (default: all weights are trained)")
    lora_alpha: float = flag(8.0, "numerator of an adapter's scale, alpha / rank", needs="--lora-r")
    lora_dropout: float = flag(0.0, "dropout of an adapter's input, for --objective sft", needs="--lora-r")
    lora_target_modules: tuple[str, ...] | None = flag(
        None,
        "layers with an adapter, by transformers' names (q_proj ... down_proj; c_attn, c_fc, c_proj of a GPT-2), or "
        "all-linear (default: q_proj v_proj, or c_attn)",
        nargs="+",
        needs="--lora-r",
    )
    lora_load: str | None = flag(
        None,
        "folder of adapters to train further, from PEFT or from a LoRA run (adapter/), on the base of --load; the "
        "reference is the base with these adapters",
    )
    base_weight_bits: Literal[16, 8, 4] | None = flag(
        None,
        "bits per element of the frozen base's matrices; 8 and 4 round the base and the reference, equally on every "
        "layout (default: the compute dtype, without rounding)",
        needs="--lora-r",
    )

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "lora_r", "lora_alpha")
        check_below_one(self, "lora_dropout")

    def settings(self, config: GPTConfig) -> AdapterSettings:
        """Return the settings of adapter_config.json for a model, without those of its base.

        Raises:
            ValueError: a target is no linear layer of the model; or no layer of attention, if the model has experts.
        """
        assert self.lora_r is not None
        targets = self.lora_target_modules or default_targets(config)
        if config.num_experts is not None:
            _check_attention(config, targets)
        find_branches(config, targets)
        return AdapterSettings(self.lora_r, self.lora_alpha, self.lora_dropout, targets)

    def check(self, config: RunConfig) -> None:
        """Check the flags against the run's model and layout.

        Tensor parallelism must not split quantization blocks of the base's weights, because their rounding would depend
        on the tensor-parallel size.

        Raises:
            ValueError: a target has no adapter, the layout splits blocks, or experts are distributed over ranks.
        """
        if self.lora_r is None:
            return
        model, bits, tp = config.model, self.base_weight_bits, config.parallel.tensor_model_parallel_size
        if (ep := config.parallel.expert_model_parallel_size) > 1 and model.num_experts is not None:
            raise ValueError(
                f"--expert-model-parallel-size {ep} with --lora-r {self.lora_r}: every rank uses all experts of the "
                "frozen base; use --expert-model-parallel-size 1"
            )
        self.settings(model)
        sizes = {
            in_use(model, "ffn_hidden_size", model.dense_ffn_size): model.dense_ffn_size,
            f"--moe-shared-expert-intermediate-size {model.moe_shared_expert_intermediate_size}": (
                model.moe_shared_expert_intermediate_size
            ),
            f"--num-attention-heads {model.heads} x {in_use(model, 'kv_channels', model.head_size)}": (
                model.heads * model.head_size
            ),
        }
        for name, columns in ((name, size) for name, size in sizes.items() if size is not None):
            fmt = plan_rows(columns, *at_rest(bits, config.precision.param_dtype)).fmt
            if tp > 1 and fmt is not None and columns % (tp * fmt.block_size):
                raise ValueError(
                    f"--base-weight-bits {bits}: {name} / --tensor-model-parallel-size {tp} is no multiple "
                    f"of {fmt.block_size}, the number of elements that share a scale"
                )


def _check_attention(config: GPTConfig, targets: Sequence[str]) -> None:
    """Raise ValueError for a target outside of attention, because experts take no adapters."""
    modules = [x.module for x in find_branches(config, (ALL_LINEAR,)) if ".attention." in x.linear]
    for target in targets:
        if not any(f".{module}".endswith(f".{target}") for module in modules):
            names = sorted({module.rpartition(".")[2] for module in modules})
            raise ValueError(
                f"--lora-target-modules {target} with --num-experts {config.num_experts}: only attention takes "
                f"adapters; name some of {', '.join(names)}"
            )


def with_adapters(lora: LoraConfig, parsed: ParsedRun, earlier: Mapping[str, Any] | None, where: str) -> LoraConfig:
    """Complete `lora` with the settings of existing adapters, from the resumed run or --lora-load.

    Args:
        lora: flags of the adapters.
        parsed: all flags.
        earlier: flags of the resumed run; None if none is resumed.
        where: description of its checkpoint, for messages.
    Raises:
        ValueError: flags contradict the adapters, or --lora-load cannot be used.
    """
    if earlier is not None:
        theirs = {f.name: earlier.get(f.name, f.default) for f in dataclasses.fields(LoraConfig)}
        theirs["lora_target_modules"] = theirs["lora_target_modules"] and tuple(theirs["lora_target_modules"])
    elif lora.lora_load is not None:
        path = Path(lora.lora_load).expanduser().resolve()
        found, where = read_adapter(path, parsed.config.model)[0], f"--lora-load {path}"
        theirs = dict(zip(SETTINGS, found, strict=False)) | {"lora_load": str(path)}
        theirs["base_weight_bits"] = lora.base_weight_bits  # the base may be rounded differently than before
    else:
        return lora
    for name in ("lora_r", "lora_alpha", "lora_target_modules", "base_weight_bits"):
        asked, there = (sorted(x) if isinstance(x, tuple) else x for x in (getattr(lora, name), theirs[name]))
        if name in parsed.origins and asked != there:
            raise ValueError(
                f"{spelling(lora, name)} is {as_words(getattr(lora, name))}, but {where} has {as_words(theirs[name])}"
            )
    if "lora_dropout" in parsed.origins:
        theirs.pop("lora_dropout")
    return dataclasses.replace(lora, **theirs)
