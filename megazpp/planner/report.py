"""Report of --plan: a run's memory, communication and time, and a comparison with other settings, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from megazpp.base.program import GIGA, MEGA, aligned
from megazpp.diloco.config import DilocoPlan
from megazpp.planner.cost import CALIBRATIONS
from megazpp.planner.estimate import EXPOSED, Estimate, Estimator
from megazpp.planner.simulator import Memory
from megazpp.planner.variants import (
    INT8,
    LOSSLESS,
    RECOMPUTE,
    as_one_job,
    for_planning,
    local_steps,
    longest_context,
    schemes,
    search,
    with_context,
    with_recompute,
)
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan, plan_run
from megazpp.topology.cluster import Cluster, nested_sizes
from megazpp.topology.layout import DOWNLOAD, UPLOAD, WIRE_NAMES, WIRES

# The report says that ZeRO++ pays if --zeropp is at least PAYS times as fast as the fastest other sharding scheme.
PAYS = 1.02
SHOWN = 10  # number of candidates of the search for the fastest flags that the report lists
COLUMNS = ("MB between nodes", "GB", "s per step", "tokens/s", "TFLOP/s per GPU", "MFU", "to ZeRO-3", "Gbit/s*")


def print_report(parts: Iterator[str]) -> None:
    """Print each part of the report of --plan as soon as it is computed, because the search for flags takes minutes."""
    for index, part in enumerate(parts):
        print("\n" * (index > 0) + part, flush=True)


def report_parts(
    config: RunConfig, cluster: Cluster, *, device_type: str, expert_load: float | None = None
) -> Iterator[str]:
    """Return an iterator over the parts of the report of --plan, each a text of several lines.

    No worker is started and no tensor is allocated. The function itself estimates the user's run, so errors of the
    flags are raised before anything is printed. The iterator computes each part only when `print_report` takes the
    part from it.

    Args:
        config: flags of the run.
        cluster: nodes and ranks, with the device and links of the cluster file if there is one.
        device_type: "cuda" or "cpu", which selects the checks of the flags.
        expert_load: load of the busiest expert, relative to the mean. The report adds the memory at this load, and the
            search for faster flags estimates ranks whose experts all have this load. None: only the mean load.

    Raises:
        ValueError: the flags conflict, do not fit the cluster, or lack --vocab-size.
    """
    config, elastic = for_planning(config, "--plan"), config.jobs > 1
    if elastic:
        # `as_one_job` removes the flags of elastic DiLoCo, so call `plan_run` before it, to raise their errors.
        plan_run(config, cluster, device_type=device_type)
        config, cluster = as_one_job(config, cluster)
    estimator = Estimator(cluster, device_type=device_type, elastic=elastic)
    own = estimator.estimate(config)
    loaded = estimator
    if expert_load:
        loaded = Estimator(cluster, device_type=device_type, expert_load=expert_load, elastic=elastic)
    parts = (
        describe_plan(own.plan, own.micro_batches),
        _memory(estimator, own),
        *([_memory_by_load(estimator, loaded, own)] if own.plan.layout.ep > 1 else []),
        _this_run(own, estimator),
        *([_contexts(estimator, own)] if own.plan.layout.cp > 1 else []),
        _side_by_side(estimator, config),
        _best(loaded, config),
    )
    return ("\n".join(part) for part in parts)


def describe_plan(plan: RunPlan, micro_batches: int) -> Iterator[str]:
    """Yield the report's lines about the plan of a run: layout, wire formats, features, notes and batch sizes.

    Args:
        plan: plan of the run.
        micro_batches: number of micro-batches per optimizer step.
    """
    yield f"{plan.layout.describe()}; {plan.wire.describe()}"
    for feature in plan.features:
        yield feature.describe()
    yield from (f"note: {notice}" for notice in plan.notices)
    yield (
        f"{plan.batches.global_batch_size} samples per optimizer step; each data rank computes {micro_batches} "
        f"micro-batch(es) of {plan.batches.micro_batch_size} samples"
    )


def memory_rows(title: str, columns: Mapping[str, Counter[Memory]]) -> list[tuple[str, ...]]:
    """Return a table of memory in GB: a header row, a row for each kind of memory in use, and a row of totals.

    Args:
        title: title of the first column, which has the names of the kinds.
        columns: bytes by kind of memory for each further column, by the column's title.
    """
    found = list(columns.values())
    rows = [(title, *columns)]
    rows += [(kind, *(f"{c[kind] / GIGA:.3f}" for c in found)) for kind in Memory if any(c[kind] for c in found)]
    return [*rows, ("total", *(f"{c.total() / GIGA:.3f}" for c in found))]


def _memory(estimator: Estimator, own: Estimate) -> Iterator[str]:
    """Yield the lines of the report's table of memory by kind, with a column for each granularity of recomputation."""
    estimates = {f"recompute {r or 'none'}": estimator.estimate(with_recompute(own.config, r)) for r in RECOMPUTE}
    rows = memory_rows("GB on rank 0 at the memory peak", {name: e.memory for name, e in estimates.items()})
    if estimator.cluster.device is not None:
        usable = f"usable: {own.usable_gigabytes:.1f} GB"
        rows.append((usable, *("fits" if e.fits else "does not fit" for e in estimates.values())))
    yield from aligned(rows)
    if not own.fits and own.plan.wire.reduce is not None:
        yield "flags that save memory: --no-zero-error-feedback, --zero-accumulate-in-bf16, --no-overlap-grad-reduce"


def _memory_by_load(even: Estimator, loaded: Estimator, own: Estimate) -> Iterator[str]:
    """Yield the lines of the report's table of memory by the load of the busiest experts of a mixture of experts.

    Args:
        even: estimator that assumes equally many tokens for all experts.
        loaded: estimator that assumes the load of --plan-expert-load; `even` without this flag.
        own: estimate of the user's run.
    """
    loads = (even, *([loaded] if loaded.expert_load > even.expert_load else []))
    rows = [("GB at a load of the busiest experts of", *(f"recompute {r or 'none'}" for r in RECOMPUTE))]
    for estimator in loads:
        found = [estimator.estimate(with_recompute(own.config, recompute)) for recompute in RECOMPUTE]
        sizes = (f"{each.gigabytes:.3f}" + ("" if each.fits else " (does not fit)") for each in found)
        rows.append((f"{estimator.expert_load:g} times the mean", *sizes))
    yield from aligned(rows)
    if len(loads) == 1:
        yield (
            "experts are not limited to a number of tokens, so uneven loads need more memory: pass --plan-expert-load "
            "with the largest max_expert_load in metrics.jsonl of a similar run"
        )


def _this_run(own: Estimate, estimator: Estimator) -> Iterator[str]:
    """Yield the report's lines about the user's run: bytes and seconds per step, exposed communication, and days."""
    # ---- yield the lines about the bytes that are sent per optimizer step
    sent = ", ".join(f"{WIRE_NAMES[wire]} {own.wires[wire] / MEGA:.3f} MB" for wire in WIRES)
    yield f"rank 0 sends per optimizer step: {sent}; a node sends {own.node_cross_bytes / MEGA:.3f} MB to other nodes"
    if own.host_bytes:
        up, down = (own.copied[way] / MEGA for way in (UPLOAD, DOWNLOAD))
        yield (
            f"states in host memory: {own.host_bytes / GIGA:.1f} GB per rank, {own.host_gigabytes:.1f} GB per node; "
            f"rank 0 copies {up:.1f} MB to the device and {down:.1f} MB from it per optimizer step"
        )
    if own.muon:
        yield own.muon
    diloco, device, gpus = own.plan.of(DilocoPlan), estimator.cluster.device, estimator.cluster.world_size
    if diloco is not None:
        yield (
            "these are means per step, synchronizations included; a node sends to other replica groups: "
            f"{own.node_replica_group_bytes / MEGA:.3f} MB every {diloco.steps} steps, "
            f"{own.node_replica_group_bytes / diloco.steps / MEGA:.3f} MB per step"
        )
    if estimator.elastic:
        groups, ranks = own.plan.layout.replica_group, gpus // own.plan.layout.replica_group
        messages = own.node_replica_group_bytes / estimator.cluster.ranks_per_node * groups / (groups - 1)
        snapshot = ranks * (own.memory[Memory.COMMON] + own.memory[Memory.OUTER])
        yield (
            f"{groups} jobs of {ranks} rank(s), each of which computes the whole outer step: a group that joins "
            f"fetches {snapshot / GIGA:.3f} GB, and a rank keeps {messages / MEGA:.3f} MB in host memory for each "
            "version that other groups may still fetch"
        )
    # ---- yield the lines about the calibration of the times, and about the seconds per optimizer step
    if own.seconds is None or device is None:
        yield "no times: they need a --cluster-file that describes the device and the links that the run uses"
        return
    calibration = estimator.calibration
    yield f"calibration of times: {calibration.rests_on}"
    tokens = own.tokens / own.micro_batches / gpus
    if device.calibration is None:
        yield (
            f"warning: the planner was compared with no run on {device.name}, so take the times as lower bounds; if "
            f"one of the calibrations {', '.join(CALIBRATIONS)} is for this device, name it in the cluster file's "
            "device.calibration"
        )
    elif tokens < calibration.tokens:
        yield (
            f"warning: a rank's micro-batch has {tokens:.0f} tokens, and the planner was compared only with runs of at "
            f"least {calibration.tokens:.0f}, so take the times as lower bounds; a larger --micro-batch-size has more "
            "tokens"
        )
    if own.config.model.fp8_format is not None:
        yield (
            f"--fp8-format {own.config.model.fp8_format}: matrix products are estimated at the device's 16-bit peak, "
            "and casts are left out, because neither was measured"
        )
    yield (
        f"a step takes {own.seconds:.3f} s, of which {own.busy.get('compute', 0.0):.3f} s are compute; meanwhile the "
        f"host needs {own.busy.get('host', 0.0):.3f} s to launch kernels and collectives"
    )
    if diloco is not None:
        yield (
            f"of these, {own.held_up / diloco.steps:.3f} s are the step's share of a synchronization, "
            f"which every {diloco.steps} steps delays training by {own.held_up:.3f} s; its bytes "
            f"{_takes(diloco)} with at least {own.sufficient_gigabits:.3g} Gbit/s of network bandwidth per node"
        )
    # ---- yield the table of exposed communication by axis
    rows = [("axis", "busy", "hidden", "exposed")]
    for axis, exposed in estimator.exposed(own).items():
        busy = own.busy.get(axis, 0.0)
        rows.append((axis, f"{busy:.3f} s", f"{max(busy - exposed, 0.0):.3f} s", f"{max(exposed, 0.0):.3f} s"))
    yield from aligned(rows)
    # ---- yield the line about the days and the price of the complete run
    price = device.price_per_hour
    cost = "" if price is None else f", {24 * price * gpus * own.days:,.0f} at {price:g} a GPU-hour"
    yield (
        f"{own.plan.batches.total_samples:,} samples take {own.days:.1f} days on {gpus} GPU(s)"
        f"{cost}; evaluations, checkpoints and restarts are not included"
    )


def _contexts(estimator: Estimator, own: Estimate) -> Iterator[str]:
    """Yield the report's table of context-parallel sizes: bytes, memory, speed and longest context of each."""
    titles = (
        "--context-parallel-size",
        "MB exchanged by a rank",
        "GB",
        "GB of activations",
        "tokens/s",
        "longest context",
    )
    rows: list[tuple[str, ...]] = [titles]
    # ---- make a row of the table for each context-parallel size that fits into a local domain, and for the run's
    # own size
    cluster, size, length = estimator.cluster, own.plan.batches.micro_batch_size, own.config.data.seq_length or 0
    inside = max(cluster.local_domain_size // own.plan.layout.tp, 1)
    for cp in sorted({*nested_sizes(inside, inside), own.plan.layout.cp}):
        try:
            found = estimator.estimate(with_context(own.config, cluster, cp, length, size))
            longest = "-" if cluster.device is None else f"{longest_context(estimator, own.config, cp, size)}"
        except ValueError as error:
            rows.append((str(cp), str(error), *[""] * (len(titles) - 2)))
            continue
        activations = found.memory[Memory.ACTIVATIONS] / GIGA
        sizes = (f"{found.exchanged / MEGA:.1f}", f"{found.gigabytes:.1f}", f"{activations:.1f}")
        rows.append((str(cp), *sizes, f"{found.tokens_per_second:.0f}" if found.seconds else "-", longest))
    yield from aligned(rows)
    yield (
        f"samples of {length} tokens, {size} in a micro-batch; the longest context is this length doubled as often as "
        "it fits into memory, and 0 if it does not fit"
    )


def _takes(diloco: DilocoPlan) -> str:
    """Return what the report says about the bytes of a synchronization of DiLoCo on a network that is fast enough.

    The report names the smallest bandwidth that is fast enough, for example 10 Gbit/s. The returned words fill the gap
    in "a synchronization's bytes ... with at least 10 Gbit/s". With a delay between sending and merging they are
    "overlap with the steps of its delay". Without delay they are "take at most 5 % of the time".
    """
    return "overlap with the steps of its delay" if diloco.delay else f"take at most {100 * EXPOSED:g} % of the time"


def _side_by_side(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    """Yield the lines of the report's table of sharding schemes, and a sentence that says whether ZeRO++ pays.

    All schemes have the run's global batch size. On several nodes the table has a row for local steps (DiLoCo) as well.
    """
    # ---- make a row of the table for each sharding scheme
    rows: list[tuple[str, ...]] = [("scheme", *COLUMNS)]
    named, diloco = schemes(config), local_steps(config, estimator.cluster)
    device, found = estimator.cluster.device, dict[str, Estimate]()
    for name, other in (named | diloco).items():
        try:
            found[name] = estimate = estimator.estimate(other)
        except ValueError as error:
            rows.append((name, str(error), *[""] * (len(COLUMNS) - 1)))
            continue
        times = ["-"] * 6
        if estimate.seconds is not None and device is not None:
            times = [
                f"{estimate.seconds:.3f}",
                f"{estimate.tokens_per_second:.0f}",
                f"{estimate.teraflops:.1f}" if device.teraflops >= 1 else f"{estimate.teraflops:.2g}",
                f"{100 * estimate.teraflops / device.teraflops:.1f} %",
                f"{estimate.tokens_per_second / found['ZeRO-3'].tokens_per_second:.2f}" if "ZeRO-3" in found else "-",
                f"{estimate.sufficient_gigabits:.3g}",
            ]
        size = f"{estimate.gigabytes:.1f}" + ("" if estimate.fits else " (does not fit)")
        gather, label = estimate.plan.wire.gather, name
        # Append the format that --zero-weight-delta auto has chosen for the row, to compare it with INT8 and LOSSLESS
        if INT8 in named and other.zero.chooses_weight_delta and gather is not None:
            label += " (auto: lossless)" if gather.differences else " (auto: int8)"
        rows.append((label, f"{estimate.node_cross_bytes / MEGA:.1f}", size, *times))
    yield from aligned(rows)
    # ---- yield the notes below the table of schemes, and the sentence that says whether ZeRO++ pays
    note = "* per-node bandwidth, each way, above which the network is no longer the bottleneck"
    for name in diloco:
        if name in found and (plan := found[name].plan.of(DilocoPlan)) is not None:
            note += f" ({name}: a synchronization's bytes {_takes(plan)})"
            yield (
                f"{name} is another algorithm, not the same training faster: between synchronizations every replica "
                "group trains its own copy of the model; bytes and seconds are means per step, with synchronizations"
            )
    if device is not None and any(estimate.seconds for estimate in found.values()):
        yield note
        yield (
            "TFLOP/s and MFU count only operations that the model needs: one forward and one backward, half of the "
            f"attention matrix, no recomputation; MFU is their share of {device.teraflops:g} TFLOP/s, the "
            "device's dense 16-bit peak"
        )
        compared = [name for name in named if name in found and found[name].fits and name not in (INT8, LOSSLESS)]
        yield _verdict({name: found[name].tokens_per_second for name in compared})


def _verdict(speeds: dict[str, float]) -> str:
    """Return the report's sentence that compares the speed of --zeropp with the fastest other scheme.

    Args:
        speeds: tokens per second of the schemes that fit into memory, by the scheme's name.
    """
    if "--zeropp" not in speeds:
        others = f"{', '.join(speeds)} would fit" if speeds else "nor does any other scheme"
        return f"--zeropp does not fit into memory with these flags; {others}"
    if len(speeds) == 1:
        return "--zeropp is the only scheme that fits into memory"
    zeropp = speeds.pop("--zeropp")
    rival = max(speeds, key=lambda name: speeds[name])
    ratio = zeropp / speeds[rival]
    if ratio >= PAYS:
        return f"ZeRO++ pays: {ratio:.2f} times as fast as the fastest other scheme that fits, {rival}"
    if ratio > 1 / PAYS:
        return f"ZeRO++ makes no difference here: it is {ratio:.2f} times as fast as {rival}, the next scheme that fits"
    return f"ZeRO++ does not pay here: {rival} is {1 / ratio:.2f} times as fast as --zeropp"


def _best(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    """Search for the fastest flags of the run, and yield the report's lines about the SHOWN best candidates."""
    choices = search(estimator, config)
    best = choices[0]
    if not best.fits:
        yield "no candidate fits into memory; the smallest need these flags after the given ones:"
        if estimator.cluster.device is not None and estimator.cluster.host is None:
            yield "(with `host` in the cluster file, --optimizer-cpu-offload is also tried)"
    elif best.on_host and not config.zero.optimizer_cpu_offload:
        yield (
            "nothing fits into device memory alone, so these candidates keep training states in host memory; the "
            "fastest, by the flags to append to the given ones:"
        )
    elif not best.speed:
        yield (
            "candidates, by the flags to append to the given ones; their speed is unknown without a "
            "--cluster-file that describes both links and device:"
        )
    else:
        yield "fastest candidates, by the flags to append to the given ones:"
    for choice in choices[:SHOWN]:
        verdict = choice.problem or "fits"
        if choice.estimate is not None and not choice.fits:
            verdict = f"needs {choice.estimate.gigabytes:.1f} GB, a rank has {choice.estimate.usable_gigabytes:.1f}"
            if choice.estimate.host_bytes:
                verdict += f"; {choice.estimate.host_gigabytes:.1f} GB of host memory per node"
        elif choice.speed:
            slower = f", {100 * (1 - choice.speed / best.speed):.1f} % slower" if choice is not best else ""
            verdict = f"{choice.speed:.0f} tokens/s{slower}"
        yield f"  {choice.flags or 'the given flags alone'}: {verdict}"
    if len(choices) > SHOWN:
        yield f"  and {len(choices) - SHOWN} more that are slower, too large or cannot run"
