"""The same run with other flags: another scheme, tensor parallelism, batch or recomputation; and which is fastest.

Schemes compute the same steps and differ in what they send. Local steps of islands are another algorithm, so the
search keeps the run's own and never adds or drops them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from megazpp.diloco.config import DilocoConfig, islands_every
from megazpp.planner.estimate import Estimate, Estimator
from megazpp.run.arguments import RunConfig
from megazpp.topology.cluster import Cluster, nested_sizes

LOSSLESS = "--zeropp, lossless"
PLAIN = {
    "zero_stage": 3,
    "use_distributed_optimizer": False,
    "zeropp": False,
    "zero_quantized_weights": None,
    "zero_hpz_partition_size": None,
    "zero_quantized_gradients": None,
    "zero_weight_delta": None,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "HSDP": {},
    "qwZ": {"zero_quantized_weights": True},
    "hpZ": {"zero_hpz_partition_size": "auto"},
    "qgZ": {"zero_quantized_gradients": True},
    "--zeropp": {"zeropp": True},
    LOSSLESS: {"zeropp": True, "zero_weight_delta": "lossless"},  # where the weights have 16 bits
}
SEARCHED = ("ZeRO-3", "HSDP", "--zeropp")
MICRO_BATCHES = (1, 2, 4, 8, 16)
USUAL_STEPS = 30  # from one synchronization of islands to the next, to compare where a run has none
Recompute = Literal["selective", "full"] | None
RECOMPUTE: tuple[Recompute, ...] = (None, "selective", "full")  # what keeps less and less, and computes more and more


def changed(config: RunConfig, **parts: dict[str, Any]) -> RunConfig:
    """The run with other values in some of its parts: `changed(config, zero={"zeropp": True})`."""
    values = {part: dataclasses.replace(getattr(config, part), **fields) for part, fields in parts.items()}
    return dataclasses.replace(config, **values)


def for_planning(config: RunConfig, asked_by: str) -> RunConfig:
    """The run with mock data if it names none, because a plan needs none.

    Raises:
        ValueError: the tokenizer's size is not given, naming the flag that needs it.
    """
    if config.tokenizer.vocab_size is None:
        raise ValueError(f"{asked_by} needs --vocab-size: it opens no tokenizer")
    data = config.data
    named = data.mock_data or data.data_path or data.text_path or data.train_data_path
    return config if named else changed(config, data={"mock_data": True})


def schemes(config: RunConfig) -> dict[str, RunConfig]:
    """The run, without local steps, with every way to shard and send beside each other, by flags."""
    bits = 8 * config.precision.param_dtype.itemsize
    alone = config.with_section(DilocoConfig())
    return {
        name: changed(
            alone,
            zero=PLAIN | fields,
            parallel={"hsdp": name == "HSDP", "num_distributed_optimizer_instances": 1},
        )
        for name, fields in SCHEMES.items()
        if bits == 16 or "zero_weight_delta" not in fields
    }


def local_steps(config: RunConfig, cluster: Cluster) -> dict[str, RunConfig]:
    """The run with local steps, its own or USUAL_STEPS; {} where there are no islands.

    Inside islands of several nodes with --zeropp if the run asks for it, otherwise ZeRO-3.
    """
    if cluster.num_local_domains == 1:
        return {}
    own = config.section(DilocoConfig)
    islands = own if own.asked else islands_every(USUAL_STEPS)
    inside = "--zeropp" if config.zero.zeropp and _has_wide_islands(islands, cluster) else "ZeRO-3"
    run = schemes(config)[inside].with_section(islands)
    return {islands.asked: run}


def with_recompute(config: RunConfig, granularity: Recompute) -> RunConfig:
    """The same run with another --recompute-granularity; method and modules stay where they mean something."""
    fields: dict[str, Any] = {"recompute_granularity": granularity, "recompute_activations": False}
    if granularity != "full":
        fields |= {"recompute_method": None, "recompute_num_layers": None}
    if granularity != "selective":
        fields["recompute_modules"] = None
    return changed(config, model=fields)


def with_batch(config: RunConfig, cluster: Cluster, micro_batch_size: int) -> RunConfig:
    """The same run with this micro-batch, or a smaller one, and the nearest batch of whole ones on every rank."""
    batches, data = config.batches, cluster.world_size // _ranks_of_a_sample(config)
    total = batches.global_batch_size or micro_batch_size * data
    size = min(micro_batch_size, max(total // data, 1))
    nearest = max(round(total / (size * data)), 1) * size * data
    fields = {"micro_batch_size": size, "global_batch_size": nearest, "rampup_batch_size": None}
    return changed(config, batches=fields)


def with_context(config: RunConfig, cluster: Cluster, cp: int, seq_length: int, micro_batch_size: int) -> RunConfig:
    """The same run on samples of this length, split among `cp` ranks, with the nearest batch."""
    longest = config.model.max_position_embeddings
    sized = changed(
        config,
        parallel={"context_parallel_size": cp},
        data={"seq_length": seq_length},
        model={"max_position_embeddings": longest and max(longest, seq_length)},
    )
    return with_batch(sized, cluster, micro_batch_size)


def longest_context(estimator: Estimator, config: RunConfig, cp: int, micro_batch_size: int) -> int:
    """The most tokens of a sample, of the run's own length and its doubles, that fit on `cp` ranks; 0 for none."""
    found, length = 0, config.data.seq_length or 0
    while estimator.estimate(with_context(config, estimator.cluster, cp, length, micro_batch_size)).fits:
        found, length = length, 2 * length
    return found


def _ranks_of_a_sample(config: RunConfig) -> int:
    return config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size


class Choice(NamedTuple):
    """One candidate of the search; `estimate` is None and `problem` says why where it cannot run."""

    name: str
    estimate: Estimate | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits

    @property
    def speed(self) -> float:
        return self.estimate.tokens_per_second if self.estimate else 0.0

    @property
    def order(self) -> tuple[bool, float]:
        """First what fits, the fastest first; then what does not, the smallest first."""
        size = self.estimate.gigabytes if self.estimate else math.inf
        return not self.fits, -self.speed if self.fits else size


def search(estimator: Estimator, config: RunConfig) -> list[Choice]:
    """Every scheme, tensor parallelism and micro-batch, with as little recomputation as fits; the best first.

    The local domain follows: the local axis has the ranks of a node or NVLink domain that tensor parallelism leaves.
    """
    domain, choices = estimator.cluster.ranks_per_domain, []
    for tp in nested_sizes(domain, domain):
        sized = changed(config, parallel={"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1})
        for scheme, run in _searched(sized, estimator.cluster).items():
            for size in MICRO_BATCHES:
                choices += _recomputations(estimator, run, scheme, size)
    return sorted(choices, key=lambda choice: choice.order)


def _searched(config: RunConfig, cluster: Cluster) -> dict[str, RunConfig]:
    """The run, and schemes that differ from it on its islands, each of which has one copy of the model."""
    named = schemes(config)
    zero = dataclasses.replace(config.zero, zero_stage=3) if config.zero.stage == 3 else config.zero
    own = next((n for n, other in named.items() if (other.zero, other.parallel) == (zero, config.parallel)), "as given")
    others: tuple[str, ...] = SEARCHED
    islands = config.section(DilocoConfig)
    if islands.asked:
        others = ("ZeRO-3", "--zeropp") if _has_wide_islands(islands, cluster) else ()
    runs = {name: named[name].with_section(islands) for name in others}
    return runs | {own: config}


def _has_wide_islands(islands: DilocoConfig, cluster: Cluster) -> bool:
    """True where an island has several nodes."""
    return islands.number(cluster) != cluster.num_local_domains


def _recomputations(estimator: Estimator, config: RunConfig, scheme: str, size: int) -> list[Choice]:
    """Candidates without recomputation, and with more and more of it while that does not fit."""
    tp, asked = config.parallel.tensor_model_parallel_size, config.batches.global_batch_size
    if size > 1 and asked is not None and size * estimator.cluster.world_size > asked * _ranks_of_a_sample(config):
        return []
    sized, islands = with_batch(config, estimator.cluster, size), config.section(DilocoConfig).asked
    samples, local = sized.batches.global_batch_size, max(estimator.cluster.local_domain_size // tp, 1)
    name = scheme + (islands and f", {islands}") + f", tp {tp}, local domain {local}"
    name += f", micro-batch {size}" + (f" of batch {samples}" if samples != asked else "")
    choices = []
    for recompute in RECOMPUTE:
        label = f"{name}, recompute {recompute or 'none'}"
        try:
            choices.append(Choice(label, estimator.estimate(with_recompute(sized, recompute))))
        except ValueError as error:
            choices.append(Choice(label, None, str(error)))
        if choices[-1].estimate is None or choices[-1].fits:
            break
    return choices
