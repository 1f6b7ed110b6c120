"""Check LoRA's flags against the model and the layout, and complete them with the settings of loaded adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megazpp.base.files import errors_as
from megazpp.base.flags import as_words, in_use, spelling
from megazpp.lora.config import LoraConfig
from megazpp.lora.peft import ALL_LINEAR, SETTINGS, AdapterSettings, default_targets, find_branches, read_adapter
from megazpp.model.config import GPTConfig
from megazpp.packed_weights.format import at_rest, plan_rows
from megazpp.run.arguments import ParsedRun, RunConfig


def adapter_settings(lora: LoraConfig, config: GPTConfig) -> AdapterSettings:
    """Return the settings of a run's adapters, from the flags of LoRA.

    The settings' `base` and `checksum` are None, because the base weights are not loaded yet.

    Args:
        lora: flags of LoRA, with --lora-r given.
        config: architecture of the model.

    Raises:
        ValueError: --lora-target-modules names a layer that is not a linear layer of the model, or that cannot have
            adapters in a mixture of experts.
    """
    assert lora.lora_r is not None
    targets = lora.lora_target_modules or default_targets(config)
    if config.num_experts is not None:
        _check_mixture(config, targets)
    find_branches(config, targets)
    return AdapterSettings(lora.lora_r, lora.lora_alpha, lora.lora_dropout, targets)


def check_adapters(lora: LoraConfig, config: RunConfig) -> None:
    """Check LoRA's flags against the run's model and layout; without --lora-r, do nothing.

    Tensor parallelism must not split a quantization block of the frozen base weights, because the rounding of the base
    would then depend on the tensor-parallel size.

    Raises:
        ValueError: a target layer cannot have adapters, the layout splits quantization blocks, or experts are
            distributed over ranks.
    """
    if lora.lora_r is None:
        return
    model, bits, tp = config.model, lora.base_weight_bits, config.parallel.tensor_model_parallel_size
    if (ep := config.parallel.expert_model_parallel_size) > 1 and model.num_experts is not None:
        raise ValueError(
            f"--expert-model-parallel-size {ep} with --lora-r {lora.lora_r}: every rank uses all experts of the "
            "frozen base; use --expert-model-parallel-size 1"
        )
    adapter_settings(lora, model)
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
                f"--base-weight-bits {bits}: {name} / --tensor-model-parallel-size {tp} is not a multiple "
                f"of {fmt.block_size}, the number of elements that share a scale: use fewer tensor-parallel ranks or "
                "16 bits"
            )


def _check_mixture(config: GPTConfig, targets: Sequence[str]) -> None:
    """Raise a ValueError for values of --lora-target-modules that a mixture of experts does not support.

    Only attention and experts can have adapters. transformers 5 stores the gate and up matrices of an expert as one
    matrix, so PEFT loads adapters only for both of them together.
    """
    asked, branches = "--lora-target-modules", find_branches(config, (ALL_LINEAR,))
    known = [x for x in branches if ".attention." in x.linear or x.is_experts]
    chosen = set[str]()
    for target in targets:
        found = [x for x in known if f".{x.module}".endswith(f".{target}")]
        if not found:
            names = sorted({x.module.rpartition(".")[2] for x in known})
            raise ValueError(
                f"{asked} {target} with --num-experts {config.num_experts}: only attention and experts take adapters; "
                f"name some of {', '.join(names)}"
            )
        chosen |= {x.part for x in found if x.is_experts}
    if chosen and config.moe_shared_expert_intermediate_size is not None:
        raise ValueError(
            f"{asked} {' '.join(targets)} with --moe-shared-expert-intermediate-size "
            f"{config.moe_shared_expert_intermediate_size}: PEFT would adapt the shared expert too, which is not "
            "supported; name layers of attention"
        )
    if len(chosen & {"gate", "fc1"}) == 1:
        both = sorted({x.module.rpartition(".")[2] for x in known if x.is_experts and x.part in ("gate", "fc1")})
        raise ValueError(f"{asked} {' '.join(targets)}: adapters on experts need both {' and '.join(both)}, or neither")


def with_adapters(lora: LoraConfig, parsed: ParsedRun, earlier: Mapping[str, Any] | None, where: str) -> LoraConfig:
    """Return LoRA's flags, completed with the settings of the adapters whose training is continued.

    A resumed run continues the adapters in its checkpoint. Any other run continues the adapters of --lora-load, and
    without this flag `lora` is returned unchanged.

    Args:
        lora: flags of LoRA.
        parsed: all flags, and where their values came from.
        earlier: flags that the resumed checkpoint has recorded; None if no run is resumed.
        where: description of the resumed checkpoint, for error messages.
    Raises:
        ValueError: flags contradict the adapters, or the adapters of --lora-load cannot be used.
    """
    if earlier is not None:
        theirs = {f.name: earlier.get(f.name, f.default) for f in dataclasses.fields(LoraConfig)}
        theirs["lora_target_modules"] = theirs["lora_target_modules"] and tuple(theirs["lora_target_modules"])
    elif lora.lora_load is not None:
        path = Path(lora.lora_load).expanduser().resolve()
        where = f"--lora-load {path}"
        with errors_as(where):
            found = read_adapter(path, parsed.config.model)[0]
        theirs = dict(zip(SETTINGS, found, strict=False)) | {"lora_load": str(path)}
        # PEFT's files do not record the bits in which the base was packed, so accept any --base-weight-bits
        theirs["base_weight_bits"] = lora.base_weight_bits
    else:
        return lora
    for name in ("lora_r", "lora_alpha", "lora_target_modules", "base_weight_bits"):
        asked, there = (sorted(x) if isinstance(x, tuple) else x for x in (getattr(lora, name), theirs[name]))
        if name in parsed.origins and asked != there:
            raise ValueError(
                f"{spelling(lora, name)} is {as_words(getattr(lora, name))}, but {where} has {as_words(theirs[name])}: "
                "leave the flag out"
            )
    if "lora_dropout" in parsed.origins:
        theirs.pop("lora_dropout")
    return dataclasses.replace(lora, **theirs)
