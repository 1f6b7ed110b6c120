"""Variants of a run that --plan compares, and the search for the fastest flags.

Variants differ in the sharding scheme, in tensor and expert parallelism, in the micro-batch size and in recomputation.
Sharding schemes compute the same optimizer steps and differ in communication and memory. Local steps (DiLoCo) are
another algorithm. The search therefore keeps the run's local steps, and never adds or removes them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from megazpp.base.flags import as_written
from megazpp.diloco.config import DilocoConfig
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.run.arguments import RunConfig
from megazpp.topology.cluster import Cluster, nested_sizes

# Names of two schemes: --zeropp with each of the two formats of weights between which --zero-weight-delta auto chooses
INT8, LOSSLESS = "--zeropp, int8", "--zeropp, lossless"
# Values of ZeRO-3 for the fields of `ZeroConfig` in which the schemes differ
PLAIN = {
    "zero_stage": 3,
    "use_distributed_optimizer": False,
    "zeropp": False,
    "zero_quantized_weights": None,
    "zero_hpz_partition_size": None,
    "zero_quantized_gradients": None,
    "zero_weight_delta": "auto",
}
# Sharding schemes of the report, by name: the fields of `ZeroConfig` that differ from PLAIN
SCHEMES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "ZeRO-1": {"zero_stage": 1},
    "HSDP": {},
    "qwZ": {"zero_quantized_weights": True},
    "hpZ": {"zero_hpz_partition_size": "auto"},
    "qgZ": {"zero_quantized_gradients": True},
    "--zeropp": {"zeropp": True},
    # INT8 and LOSSLESS are --zeropp with each of the two formats of weights between nodes. The report compares them
    # only for runs that compute in 16 bits, because lossless deltas exist only for 16-bit weights. INT8 ignores the
    # run's --zero-weight-bits, which may be 16.
    INT8: {"zeropp": True, "zero_weight_bits": None, "zero_weight_delta": "none"},
    LOSSLESS: {"zeropp": True, "zero_weight_delta": "lossless"},
}
SEARCHED = ("ZeRO-3", "HSDP", "--zeropp")  # schemes that the search for the fastest flags tries besides the user's own
MICRO_BATCHES = (1, 2, 4, 8, 16)  # micro-batch sizes that the search for the fastest flags tries
USUAL_STEPS = 30  # value of --diloco-steps in the report's table of schemes if the user's run has no local steps
Recompute = Literal["selective", "full"] | None
# Values of --recompute-granularity, sorted by falling memory and rising computation
RECOMPUTE: tuple[Recompute, ...] = (None, "selective", "full")


def changed(config: RunConfig, **parts: dict[str, Any]) -> RunConfig:
    """Return the flags of a run with other values, as in `changed(config, zero={"zeropp": True})`.

    Args:
        config: flags of the run.
        **parts: new values by field name, for each field of `RunConfig` whose config changes.
    """
    values = {part: dataclasses.replace(getattr(config, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(config, **values)


def for_planning(config: RunConfig, asked_by: str) -> RunConfig:
    """Return a run's flags for an estimate, which reads neither data nor tokenizer.

    The result has --mock-data if the flags name no data, and its --vocab-size is the size of the model's vocabulary.

    Args:
        config: flags of the run.
        asked_by: flag or program that asks for the estimate, for the error message.

    Raises:
        ValueError: --vocab-size is missing.
    """
    size = config.tokenizer.known_vocab_size
    if size is None:
        raise ValueError(f"{asked_by} needs --vocab-size, because it does not read the tokenizer: add the flag")
    data = config.data
    named = data.mock_data or data.data_path or data.text_path or data.train_data_path
    return changed(config, data={} if named else {"mock_data": True}, tokenizer={"vocab_size": size})


def as_one_job(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, Cluster]:
    """Return the flags of one job that trains like all jobs of an elastic DiLoCo run together, and this job's cluster.

    The planner estimates a single job, whose cluster has the nodes of all jobs of the run.

    Args:
        config: flags of one job of the run.
        cluster: nodes and ranks of one job.
    """
    jobs, size, order = config.jobs, cluster.world_size, cluster.order
    if order is not None:
        order = tuple(job * size + rank for job in range(jobs) for rank in order)
    for feature in config.features:
        config = feature.as_one_job(config)
    return config, dataclasses.replace(cluster, num_nodes=jobs * cluster.num_nodes, order=order)


def schemes(config: RunConfig) -> dict[str, RunConfig]:
    """Return the flags of a run with each sharding scheme and without local steps (DiLoCo), by the scheme's name.

    INT8 and LOSSLESS, which compare formats of weights, are left out if the run does not compute in 16 bits.
    """
    bits = 8 * config.precision.param_dtype.itemsize
    alone = config.with_section(DilocoConfig())
    return {
        name: changed(
            alone, zero=PLAIN | fields, parallel={"hsdp": name == "HSDP", "num_distributed_optimizer_instances": 1}
        )
        for name, fields in SCHEMES.items()
        if bits == 16 or "zero_weight_delta" not in fields
    }


def local_steps(config: RunConfig, cluster: Cluster) -> dict[str, RunConfig]:
    """Return the run with local steps (DiLoCo), for the report's table of schemes; {} on a single node.

    The only key is the text of the DiLoCo flags, such as "--diloco-steps 30", and the value has all flags. The DiLoCo
    flags are the run's own; without them replica groups synchronize every USUAL_STEPS steps. Replica groups of several
    nodes use --zeropp inside if it is set, and otherwise ZeRO-3.
    """
    if cluster.num_local_domains == 1:
        return {}
    own = config.section(DilocoConfig)
    diloco = own if own.asked else DilocoConfig(diloco_steps=USUAL_STEPS)
    inside = "--zeropp" if config.zero.zeropp and _has_wide_replica_groups(diloco, cluster) else "ZeRO-3"
    run = schemes(config)[inside].with_section(diloco)
    return {diloco.asked: run}


def with_recompute(config: RunConfig, granularity: Recompute) -> RunConfig:
    """Return the flags of a run with another --recompute-granularity, without recomputation flags that it excludes."""
    fields: dict[str, Any] = {"recompute_granularity": granularity, "recompute_activations": False}
    if granularity != "full":
        fields |= {"recompute_method": None, "recompute_num_layers": None}
    if granularity != "selective":
        fields["recompute_modules"] = None
    return changed(config, model=fields)


def with_batch(config: RunConfig, cluster: Cluster, micro_batch_size: int) -> RunConfig:
    """Return the flags of a run with another micro-batch size, and a global batch size near the run's own.

    The global batch size is the multiple of the micro-batch size times the number of data ranks that is nearest to the
    run's global batch size. If the run's global batch has fewer than `micro_batch_size` samples per data rank, the
    micro-batch has all samples of its data rank.
    """
    batches, data = config.batches, cluster.world_size // _ranks_of_a_sample(config)
    total = batches.global_batch_size or micro_batch_size * data
    size = min(micro_batch_size, max(total // data, 1))
    nearest = max(round(total / (size * data)), 1) * size * data
    fields = {"micro_batch_size": size, "global_batch_size": nearest, "rampup_batch_size": None}
    return changed(config, batches=fields)


def with_context(config: RunConfig, cluster: Cluster, cp: int, seq_length: int, micro_batch_size: int) -> RunConfig:
    """Return the flags of a run with `cp` context-parallel ranks, and samples of `seq_length` tokens.

    The micro-batch has `micro_batch_size` samples, or all samples of its data rank if the global batch has fewer per
    data rank; see `with_batch`.
    """
    longest = config.model.max_position_embeddings
    sized = changed(
        config,
        parallel={"context_parallel_size": cp},
        data={"seq_length": seq_length},
        model={"max_position_embeddings": longest and max(longest, seq_length)},
    )
    return with_batch(sized, cluster, micro_batch_size)


def longest_context(estimator: Estimator, config: RunConfig, cp: int, micro_batch_size: int) -> int:
    """Return the longest sample, in tokens, that fits into memory with `cp` context-parallel ranks.

    The tried lengths are the run's --seq-length, its double, and so on. The result is 0 if the run's length does not
    fit. The cluster must have a device: without the device's memory size, every length would fit.
    """
    found, length = 0, config.data.seq_length or 0
    while estimator.estimate(with_context(config, estimator.cluster, cp, length, micro_batch_size)).fits:
        found, length = length, 2 * length
    return found


def _ranks_of_a_sample(config: RunConfig) -> int:
    """Return the number of ranks that compute the same sample: tensor-parallel times context-parallel ranks."""
    return config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size


class Choice(NamedTuple):
    """Candidate of the search for the fastest flags: a variant of the user's run, with its estimate.

    Attributes:
        flags: flags to append to the user's command line to get the candidate; "" if the candidate is the user's run.
        estimate: estimate of the candidate; None if its flags conflict or do not fit the cluster.
        problem: message about flags that conflict or do not fit the cluster; "" for a candidate with an estimate.
    """

    flags: str
    estimate: Estimate | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        """True if the candidate's flags are valid, and the estimated memory fits into device and host memory."""
        return self.estimate is not None and self.estimate.fits

    @property
    def on_host(self) -> bool:
        """True if the candidate keeps training states in host memory (--optimizer-cpu-offload)."""
        return self.estimate is not None and self.estimate.host_bytes > 0

    @property
    def speed(self) -> float:
        """Estimated tokens per second; 0 if there is no estimate, or if it has no times."""
        return self.estimate.tokens_per_second if self.estimate else 0.0

    @property
    def order(self) -> tuple[bool, float]:
        """Sorting key: first candidates that fit into memory, by falling speed; then the others, by rising memory."""
        size = self.estimate.gigabytes if self.estimate else math.inf
        return not self.fits, -self.speed if self.fits else size


def search(estimator: Estimator, config: RunConfig) -> list[Choice]:
    """Estimate the user's run with other flags, and return the candidates, the fastest that fits into memory first.

    The candidates combine sharding schemes, tensor-parallel sizes, micro-batch sizes and recomputation. If the model
    has experts, the best candidate of each scheme and tensor-parallel size is also estimated with every other
    expert-parallel size. More recomputation is tried only while a candidate does not fit into memory. The size of the
    local axis is not varied, because it always has all data-parallel ranks of a node or NVLink domain. Training states
    in host memory are tried only if no other candidate fits into memory.
    """
    choices = _candidates(estimator, config, config)
    if not any(choice.fits for choice in choices) and estimator.cluster.host is not None:
        hosted = changed(config, zero={"optimizer_cpu_offload": True})
        choices += _candidates(estimator, config, hosted)
        with_sums = _candidates(estimator, config, changed(hosted, zero={"zero_offload_partial_sums": True}))
        choices += [choice for choice in with_sums if choice.estimate and choice.estimate.plan.wire.reduce]
    return sorted(choices, key=lambda choice: choice.order)


def _candidates(estimator: Estimator, given: RunConfig, config: RunConfig) -> list[Choice]:
    """Return the candidates of the search: all schemes, parallel sizes and micro-batch sizes.

    Args:
        estimator: estimator of the candidates.
        given: flags of the user's run. `Choice.flags` has the changes to these flags.
        config: flags that the candidates vary: either `given`, or `given` with states in host memory.
    """
    domain, choices = estimator.cluster.ranks_per_domain, list[Choice]()
    for tp in nested_sizes(domain, domain):
        sized = changed(config, parallel={"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1})
        for run in _searched(sized, estimator.cluster):
            of_scheme = _batch_sizes(estimator, given, run)
            choices += of_scheme + _other_expert_sizes(estimator, given, run, of_scheme)
    return choices


def flags_between(given: RunConfig, other: RunConfig) -> str:
    """Return the flags to append to the command line of the run `given` so that it becomes the run `other`."""
    flags = []
    for part in ("zero", "parallel", "batches", "model"):
        before, after = getattr(given, part), getattr(other, part)
        for field in dataclasses.fields(after):
            if getattr(before, field.name) != getattr(after, field.name):
                flags.append(as_written(after, field))
    return " ".join(flags)


def _batch_sizes(estimator: Estimator, given: RunConfig, config: RunConfig) -> list[Choice]:
    """Return candidates with every micro-batch size, and with as much recomputation as a size needs to fit into memory.

    A larger micro-batch needs more memory, so the search does not try less recomputation than the previous size needed.
    There is one exception: if the previous size had two micro-batches per step, the next size has one, which needs no
    memory for sums of gradients over micro-batches.

    Args:
        estimator: estimator of the candidates.
        given: flags of the user's run, relative to which `Choice.flags` is given.
        config: flags of the candidates except for micro-batch size and recomputation.
    """
    choices, granularities = list[Choice](), RECOMPUTE
    for size in MICRO_BATCHES:
        found = _recomputations(estimator, given, config, size, granularities)
        choices += found
        last = found[-1].estimate if found else None
        several = last is not None and last.micro_batches > 2
        granularities = granularities[len(found) - 1 :] if several else RECOMPUTE
        if several and last is not None and not last.fits:
            break
    return choices


def _other_expert_sizes(
    estimator: Estimator, given: RunConfig, config: RunConfig, choices: list[Choice]
) -> list[Choice]:
    """Return candidates with the flags of the best of `choices`, but with other expert-parallel sizes.

    The list is empty for a model without experts, and with local steps, which support only size 1.

    Args:
        estimator: estimator of the candidates.
        given: flags of the user's run, relative to which `Choice.flags` is given.
        config: flags of `choices` except for micro-batch size and recomputation.
        choices: candidates that differ in micro-batch size and recomputation.
    """
    best, experts = min(choices, key=lambda choice: choice.order), config.model.num_experts
    if best.estimate is None or experts is None or config.section(DilocoConfig).asked:
        return []
    found, domain = list[Choice](), estimator.cluster.ranks_per_domain
    size, recompute = best.estimate.plan.batches.micro_batch_size, best.estimate.config.model.recompute_granularity
    for ep in nested_sizes(domain, domain):
        if experts % ep == 0 and ep != config.parallel.expert_model_parallel_size:
            other = changed(config, parallel={"expert_model_parallel_size": ep})
            found += _recomputations(estimator, given, other, size, (recompute,))
    return found


def _searched(config: RunConfig, cluster: Cluster) -> list[RunConfig]:
    """Return the flags of a run with each sharding scheme that the search tries, and at the end the unchanged flags.

    A scheme that equals the unchanged flags is left out.

    With local steps (DiLoCo) each replica group shards one copy of the model. The schemes then differ only if a group
    has several nodes, and HSDP is left out.
    """
    names: tuple[str, ...] = SEARCHED
    diloco = config.section(DilocoConfig)
    if diloco.asked:
        names = ("ZeRO-3", "--zeropp") if _has_wide_replica_groups(diloco, cluster) else ()
    named = schemes(config)
    # Write the run's own ZeRO flags as the schemes do, with the stage in zero_stage, so that equal flags compare equal
    zero = dataclasses.replace(config.zero, zero_stage=config.zero.stage, use_distributed_optimizer=False)
    others = [named[name].with_section(diloco) for name in names]
    return [*(run for run in others if (run.zero, run.parallel) != (zero, config.parallel)), config]


def _has_wide_replica_groups(diloco: DilocoConfig, cluster: Cluster) -> bool:
    """Return True if a replica group of DiLoCo has several local domains: nodes, or NVLink racks of several nodes."""
    return diloco.number(cluster) != cluster.num_local_domains


def _recomputations(
    estimator: Estimator, given: RunConfig, config: RunConfig, size: int, granularities: tuple[Recompute, ...]
) -> list[Choice]:
    """Return candidates with more and more recomputation, up to the first that fits into memory or has invalid flags.

    Args:
        estimator: estimator of the candidates.
        given: flags of the user's run, relative to which `Choice.flags` is given.
        config: flags of the candidates except for micro-batch size and recomputation.
        size: micro-batch size. If the run's global batch is too small for this size, the result is [].
        granularities: values of --recompute-granularity to try, in this order.
    """
    asked = config.batches.global_batch_size
    if size > 1 and asked is not None and size * estimator.cluster.world_size > asked * _ranks_of_a_sample(config):
        return []
    sized, choices = with_batch(config, estimator.cluster, size), list[Choice]()
    for recompute in granularities:
        candidate = with_recompute(sized, recompute)
        flags = flags_between(given, candidate)
        try:
            choices.append(Choice(flags, estimator.estimate(candidate)))
        except ValueError as error:
            choices.append(Choice(flags, None, str(error)))
        if choices[-1].estimate is None or choices[-1].fits:
            break
    return choices
