"""The same run with other flags: another scheme, tensor parallelism, batch or recomputation, or what a cluster fits.

Schemes compute the same steps and differ in what they send. Local steps (--diloco-steps) are none of them: another
algorithm, which keeps to itself in what is compared.

Only plans take another batch than asked for. A run is refused instead, for its batch is part of what it computes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from megazpp.arguments import RunConfig
from megazpp.checks import check_run_config
from megazpp.topology.cluster import Cluster, nested_sizes
from megazpp.zero.diloco_config import DilocoConfig

PLAIN = {
    "zero_stage": 3,
    "use_distributed_optimizer": False,
    "zeropp": False,
    "zero_quantized_weights": None,
    "zero_hpz_partition_size": None,
    "zero_quantized_gradients": None,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "HSDP": {},
    "qwZ": {"zero_quantized_weights": True},
    "hpZ": {"zero_hpz_partition_size": "auto"},
    "qgZ": {"zero_quantized_gradients": True},
    "--zeropp": {"zeropp": True},
}
USUAL_STEPS = 30  # of --diloco-steps, to compare where a run has none
Recompute = Literal["selective", "full"] | None
RECOMPUTE: tuple[Recompute, ...] = (None, "selective", "full")  # what keeps less and less, and computes more and more
TRIED_WEIGHT_BITS = ((8, 8), (8, 4), (16, 4))  # those that are no experiment, and quantize what crosses
NEAREST = (
    ("parallel", "tensor_model_parallel_size"),
    ("batches", "micro_batch_size"),
    ("batches", "global_batch_size"),
    ("batches", "rampup_batch_size"),
)


def changed(config: RunConfig, **parts: dict[str, Any]) -> RunConfig:
    """The run with other values in some of its parts: `changed(config, zero={"zeropp": True})`."""
    values = {part: dataclasses.replace(getattr(config, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(config, **values)


def for_planning(config: RunConfig, asked_by: str) -> RunConfig:
    """The run with mock data where it names none, because a plan needs none.

    Raises:
        ValueError: the tokenizer's size is not given, naming the flag that needs it.
    """
    if config.tokenizer.vocab_size is None:
        raise ValueError(f"{asked_by} needs --vocab-size: it opens no tokenizer")
    data = config.data
    named = data.mock_data or data.data_path or data.text_path or data.train_data_path
    return config if named else changed(config, data={"mock_data": True})


def weight_formats(config: RunConfig) -> dict[str, RunConfig]:
    """The run with every --zero-weight-bits for weights that nodes keep, but its own; {} where they keep none."""
    others = [bits for bits in TRIED_WEIGHT_BITS if bits != config.zero.weight_bits]
    named = {" ".join(map(str, bits)): changed(config, zero={"zero_weight_bits": bits}) for bits in others}
    kept = config.zero.hpz_partition_size != "1"  # from which differences can be taken
    return named if kept and config.zero.quantizes_weights else {}


def schemes(config: RunConfig) -> dict[str, RunConfig]:
    """The run, without local steps, with every way to shard and send beside each other: names as the flags have them.

    qwZ alone keeps no weights from which differences could be taken: it sends 8 bits where the run sends those.
    """
    whole = {"qwZ": {"zero_weight_bits": 8}} if config.zero.weight_bits[1] < 8 else {}
    return {
        name: changed(
            config,
            zero=PLAIN | fields | whole.get(name, {}),
            parallel={"hsdp": name == "HSDP", "num_distributed_optimizer_instances": 1},
            diloco={"diloco_steps": None},
        )
        for name, fields in SCHEMES.items()
    }


def local_steps(config: RunConfig, cluster: Cluster) -> dict[str, RunConfig]:
    """The run with local steps, its own or USUAL_STEPS; {} where there are no islands.

    Inside islands of several nodes with --zeropp if the run asks for it, otherwise ZeRO-3.
    """
    if cluster.num_local_domains == 1:
        return {}
    diloco, domains = config.diloco, cluster.num_local_domains
    if diloco.diloco_steps is None:
        diloco = DilocoConfig(diloco_steps=USUAL_STEPS)
    inside = "--zeropp" if config.zero.zeropp and diloco.diloco_islands not in (None, domains) else "ZeRO-3"
    run = dataclasses.replace(schemes(config)[inside], diloco=diloco)
    return {f"--diloco-steps {diloco.diloco_steps}": run}


def scheme_name(config: RunConfig) -> str:
    """The run's own scheme by its name in `schemes`; "as given" where it is none of these."""
    own = (dataclasses.replace(config.zero, zero_stage=3) if config.zero.stage == 3 else config.zero, config.parallel)
    return next((name for name, other in schemes(config).items() if (other.zero, other.parallel) == own), "as given")


def with_tp(config: RunConfig, tp: int) -> RunConfig:
    """The same run with another tensor parallelism, and sequence parallelism where there is any."""
    return changed(config, parallel={"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1})


def with_recompute(config: RunConfig, granularity: Recompute) -> RunConfig:
    """The same run with another --recompute-granularity; method and modules stay where they mean something."""
    fields: dict[str, Any] = {"recompute_granularity": granularity, "recompute_activations": False}
    if granularity != "full":
        fields |= {"recompute_method": None, "recompute_num_layers": None}
    if granularity != "selective":
        fields["recompute_modules"] = None
    return changed(config, model=fields)


def with_batch(config: RunConfig, cluster: Cluster) -> RunConfig:
    """The same run with the nearest batch of whole micro-batches on every rank, smaller ones where it has too few."""
    batches, data = config.batches, cluster.world_size // config.parallel.tensor_model_parallel_size
    size, total = batches.micro_batch_size, batches.global_batch_size
    if total is None or data < 1:
        return config
    size = min(size or total, max(total // data, 1))
    nearest = max(round(total / (size * data)), 1) * size * data
    ramp = batches.rampup_batch_size
    if ramp is not None and (nearest != total or any(part % (size * data) for part in ramp[:2])):
        ramp = None
    fields = {"micro_batch_size": size, "global_batch_size": nearest, "rampup_batch_size": ramp}
    return changed(config, batches=fields)


def nearest_run(config: RunConfig, cluster: Cluster, *, device_type: str) -> tuple[RunConfig, tuple[str, ...]]:
    """The run itself, or the nearest one that `cluster` can do, and a line for each flag that is another.

    Raises:
        ValueError: what is wrong with the run as it is, where no other size would help.
    """
    asked = config.parallel.tensor_model_parallel_size
    sizes = {asked, *nested_sizes(cluster.local_domain_size, cluster.world_size)} if asked > 0 else set()
    nearest = sorted(sizes, key=lambda size: (abs(math.log(size / asked)), size))
    problem: ValueError | None = None
    for run in (config, *(with_batch(config if tp == asked else with_tp(config, tp), cluster) for tp in nearest)):
        try:
            check_run_config(run, cluster, device_type=device_type)
        except ValueError as error:
            problem = problem or error
            continue
        values = [(name, *(getattr(getattr(one, part), name) for one in (config, run))) for part, name in NEAREST]
        return run, tuple(
            f"--{name.replace('_', '-')} {before} does not fit this cluster: planned with {after}"
            for name, before, after in values
            if before not in (after, None)
        )
    assert problem is not None
    raise problem
