"""`--plan`: what a run will need and how fast it will be, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from megazpp.base.program import GIGA, MEGA, aligned
from megazpp.diloco.config import DilocoPlan
from megazpp.planner.estimate import EXPOSED, Estimate, Estimator
from megazpp.planner.simulator import Memory
from megazpp.planner.variants import (
    LOSSLESS,
    RECOMPUTE,
    Choice,
    for_planning,
    local_steps,
    longest_context,
    schemes,
    search,
    with_context,
    with_recompute,
)
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import RunPlan
from megazpp.topology.cluster import Cluster, nested_sizes
from megazpp.topology.layout import WIRES

PAYS = 1.02  # ZeRO++ is said to pay from this much faster than the next scheme on
SHOWN = 10  # candidates of the search
COLUMNS = ("MB between nodes", "GB", "s per step", "tokens/s", "TFLOP/s per GPU", "MFU", "to ZeRO-3", "Gbit/s*")


def plan_report(config: RunConfig, cluster: Cluster, *, device_type: str) -> str:
    """Tables for the run on `cluster`: nothing is started or allocated.

    Raises:
        ValueError: flags that do not fit each other or the cluster, or no --vocab-size.
    """
    config, estimator = for_planning(config, "--plan"), Estimator(cluster, device_type=device_type)
    own = estimator.estimate(config, exposed=True)
    parts = (
        describe_plan(own.plan, own.micro_batches),
        _memory(estimator, own),
        _this_run(own, estimator),
        *([_contexts(estimator, own)] if own.plan.layout.cp > 1 else []),
        _side_by_side(estimator, config),
        _best(search(estimator, config)),
    )
    return "\n\n".join("\n".join(part) for part in parts)


def describe_plan(plan: RunPlan, micro_batches: int) -> Iterator[str]:
    """Layout, notes and batches of a run."""
    yield f"{plan.layout.describe()}; {plan.wire.describe()}"
    for feature in plan.features:
        yield feature.describe()
    yield from (f"note: {notice}" for notice in plan.notices)
    yield (
        f"{plan.batches.global_batch_size} samples per optimizer step, per data rank in {micro_batches} "
        f"micro-batch(es) of {plan.batches.micro_batch_size}"
    )


def memory_rows(title: str, columns: Mapping[str, Counter[Memory]]) -> list[tuple[str, ...]]:
    """GB by kind, and their sums; kinds of which no column has any are left out."""
    found = list(columns.values())
    rows = [(title, *columns)]
    rows += [(kind, *(f"{c[kind] / GIGA:.3f}" for c in found)) for kind in Memory if any(c[kind] for c in found)]
    return [*rows, ("total", *(f"{c.total() / GIGA:.3f}" for c in found))]


def _memory(estimator: Estimator, own: Estimate) -> Iterator[str]:
    estimates = {f"recompute {r or 'none'}": estimator.estimate(with_recompute(own.config, r)) for r in RECOMPUTE}
    rows = memory_rows("GB on rank 0 at the fullest moment", {name: e.memory for name, e in estimates.items()})
    if estimator.cluster.device is not None:
        usable = f"into {own.usable_gigabytes:.1f} GB"
        rows.append((usable, *("fits" if e.fits else "does not fit" for e in estimates.values())))
    yield from aligned(rows)
    if not own.fits and own.plan.wire.reduce is not None:
        yield "less memory: --no-zero-error-feedback, --zero-accumulate-in-bf16, --no-overlap-grad-reduce"


def _this_run(own: Estimate, estimator: Estimator) -> Iterator[str]:
    sent = ", ".join(f"{wire} {own.wires[wire] / MEGA:.3f} MB" for wire in WIRES)
    yield f"a rank sends per optimizer step: {sent}; a node to others {own.node_cross_bytes / MEGA:.3f} MB"
    if own.muon:
        yield own.muon
    islands, device, gpus = own.plan.of(DilocoPlan), estimator.cluster.device, estimator.cluster.world_size
    if islands is not None:
        yield (
            "these are means that include what a node sends to other islands: "
            f"{own.node_island_bytes / MEGA:.3f} MB every {islands.steps} steps, "
            f"{own.node_island_bytes / islands.steps / MEGA:.3f} MB per step"
        )
    if own.seconds is None or device is None:
        yield "no times: the cluster file names no links or no device"
        return
    calibration = estimator.calibration
    yield f"times rest on {calibration.rests_on}"
    if own.tokens / own.micro_batches / gpus < calibration.tokens:
        yield (
            "warning: that was not checked for this device or so few tokens per rank and micro-batch; a run of 2048 "
            "on H800 was 2.2 to 4.4 times slower than shares of A100 say"
        )
    if own.config.model.fp8_format is not None:
        yield (
            f"--fp8-format {own.config.model.fp8_format}: products are counted at the device's 16-bit peak and casts "
            "not at all, for nothing of either was measured"
        )
    yield f"a step takes {own.seconds:.3f} s, of which {own.busy.get('compute', 0.0):.3f} s compute"
    if islands is not None:
        yield (
            f"of these, {own.held_up / islands.steps:.3f} s are the mean of a synchronization, "
            f"which holds every {islands.steps} steps up by {own.held_up:.3f} s; its bytes "
            f"{_takes(islands)} from {own.sufficient_gigabits:.3g} Gbit/s of a node's links on"
        )
    rows = [("axis", "busy", "hidden", "exposed")]
    for axis, exposed in own.exposed.items():
        busy = own.busy.get(axis, 0.0)
        rows.append((axis, f"{busy:.3f} s", f"{max(busy - exposed, 0.0):.3f} s", f"{max(exposed, 0.0):.3f} s"))
    yield from aligned(rows)
    price = device.price_per_hour
    cost = "" if price is None else f", {24 * price * gpus * own.days:,.0f} at {price:g} a GPU-hour"
    yield (
        f"{own.plan.batches.total_samples:,} samples take {own.days:.1f} days on {gpus} GPU(s)"
        f"{cost}; evaluations, checkpoints and restarts come on top"
    )


def _contexts(estimator: Estimator, own: Estimate) -> Iterator[str]:
    """The run with its samples split among more and more ranks of a node."""
    titles = (
        "--context-parallel-size",
        "MB exchanged by a rank",
        "GB",
        "of activations",
        "tokens/s",
        "longest context",
    )
    rows: list[tuple[str, ...]] = [titles]
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
    yield f"samples of {length} tokens, {size} in a micro-batch; the longest is of these and their doubles what fits"


def _takes(islands: DilocoPlan) -> str:
    return "hide under the steps of its delay" if islands.delay else f"take at most {100 * EXPOSED:g} % of the time"


def _side_by_side(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    """Every scheme with the same batch, whether ZeRO++ pays, and local steps beside them."""
    rows: list[tuple[str, ...]] = [("scheme", *COLUMNS)]
    named, islands = schemes(config), local_steps(config, estimator.cluster)
    device, found = estimator.cluster.device, dict[str, Estimate]()
    for name, other in (named | islands).items():
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
                f"{estimate.teraflops:.1f}",
                f"{100 * estimate.teraflops / device.teraflops:.1f} %",
                f"{estimate.tokens_per_second / found['ZeRO-3'].tokens_per_second:.2f}" if "ZeRO-3" in found else "-",
                f"{estimate.sufficient_gigabits:.3g}",
            ]
        size = f"{estimate.gigabytes:.1f}" + ("" if estimate.fits else " (too much)")
        rows.append((name, f"{estimate.node_cross_bytes / MEGA:.1f}", size, *times))
    yield from aligned(rows)
    note = "* per-node bandwidth, each way, above which the network is no longer the bottleneck"
    for name in islands:
        if name in found and (plan := found[name].plan.of(DilocoPlan)) is not None:
            note += f" ({name}: a synchronization's bytes {_takes(plan)})"
            yield (
                f"{name} is another algorithm, not the same training faster: between synchronizations every island "
                "trains a model of its own; bytes and seconds are means that include them"
            )
    if device is not None and any(estimate.seconds for estimate in found.values()):
        yield note
        yield (
            "TFLOP/s and MFU count what the model needs: forward and backward once, half of the attention matrix, no "
            f"recomputation; MFU is their share of {device.teraflops:g} TFLOP/s, the device's dense 16-bit peak"
        )
        fitting = {name: each for name, each in found.items() if name in named and each.fits and name != LOSSLESS}
        yield _verdict({name: each.tokens_per_second for name, each in fitting.items()})


def _verdict(speeds: dict[str, float]) -> str:
    """Say whether ZeRO++ pays, of the schemes that fit."""
    if "--zeropp" not in speeds:
        others = f"{', '.join(speeds)} would" if speeds else "no scheme does"
        return f"--zeropp does not fit into memory as it is; {others}"
    if len(speeds) == 1:
        return "--zeropp is the only scheme that fits into memory"
    zeropp = speeds.pop("--zeropp")
    rival = max(speeds, key=lambda name: speeds[name])
    ratio = zeropp / speeds[rival]
    if ratio >= PAYS:
        return f"ZeRO++ pays: {ratio:.2f} times as fast as the next that fits, {rival}"
    return f"ZeRO++ does not pay here: {rival} is {1 / ratio:.2f} times as fast as --zeropp"


def _best(choices: list[Choice]) -> Iterator[str]:
    best = choices[0]
    if not best.fits:
        yield "nothing that was tried fits; the smallest:"
    elif not best.speed:
        yield "without links and a device nothing says what is fastest:"
    else:
        yield f"best with these flags otherwise: {best.name}, {best.speed:.0f} tokens/s"
    for choice in choices[:SHOWN]:
        verdict = choice.problem or "taken"
        if choice.estimate is not None and not choice.fits:
            verdict = f"needs {choice.estimate.gigabytes:.1f} GB, a rank has {choice.estimate.usable_gigabytes:.1f}"
        elif choice.estimate is not None and choice is not best:
            share = 1 - choice.speed / best.speed if best.speed else 0.0
            verdict = f"fits, {100 * share:.1f} % slower than the best" if best.speed else "fits"
        yield f"  {choice.name}: {verdict}"
    if len(choices) > SHOWN:
        yield f"  and {len(choices) - SHOWN} more that are slower, too large or cannot run"
