"""`--plan`: what a run will need and how fast it will be, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megazpp.arguments import RunConfig
from megazpp.checks import RunPlan
from megazpp.formatting import GIGA, MEGA, aligned
from megazpp.planner.estimate import EXPOSED, Estimate, Estimator
from megazpp.planner.memory import Memory
from megazpp.planner.search import memory_switches, search
from megazpp.planner.variants import (
    RECOMPUTE,
    for_planning,
    local_steps,
    nearest_run,
    schemes,
    weight_formats,
    with_recompute,
)
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import WIRES
from megazpp.topology.shares import CALIBRATIONS, LEAST
from megazpp.zero.diloco_config import DilocoPlan

PAYS = 1.02  # ZeRO++ is said to pay from this much faster than the next scheme on
SHOWN = 10  # candidates of the search


def plan_report(config: RunConfig, cluster: Cluster, *, device_type: str, price: float | None = None) -> str:
    """Tables for the run on `cluster`, or the nearest for which it has room: nothing is started or allocated.

    Args:
        price: of a GPU for an hour.
    Raises:
        ValueError: flags that do not fit each other or any size of the cluster, or no --vocab-size.
    """
    config, changes = nearest_run(for_planning(config, "--plan"), cluster, device_type=device_type)
    estimator = Estimator(cluster, device_type=device_type)
    own = estimator.estimate(config, exposed=True)
    return "\n".join(
        [
            *(f"note: {change}" for change in changes),
            *describe_plan(own.plan, own.micro_batches),
            "",
            *_memory(estimator, config),
            "",
            *_this_run(own, estimator, price),
            "",
            *_side_by_side(estimator, config),
            "",
            *_best(estimator, config),
        ]
    )


def describe_plan(plan: RunPlan, micro_batches: int) -> Iterator[str]:
    """Layout, notes and batches of a run."""
    yield f"{plan.layout.describe()}; {plan.wire.describe()}"
    if plan.diloco is not None:
        yield plan.diloco.describe()
    yield from (f"note: {notice}" for notice in plan.notices)
    yield (
        f"{plan.batches.global_batch_size} samples per optimizer step, per data rank in {micro_batches} "
        f"micro-batch(es) of {plan.batches.micro_batch_size}"
    )


def _memory(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    estimates = [estimator.estimate(with_recompute(config, recompute)) for recompute in RECOMPUTE]
    rows = [("GB on rank 0 at the fullest moment", *(f"recompute {r or 'none'}" for r in RECOMPUTE))]
    for kind in Memory:
        if any(e.memory[kind] for e in estimates):
            rows.append((kind, *(f"{e.memory[kind] / GIGA:.3f}" for e in estimates)))
    rows.append(("total", *(f"{estimate.gigabytes:.3f}" for estimate in estimates)))
    if estimator.cluster.device is not None:
        usable = f"into {estimates[0].usable_gigabytes:.1f} GB"
        rows.append((usable, *("fits" if e.fits else "does not fit" for e in estimates)))
    yield from aligned(rows)
    if not estimator.estimate(config).fits and (found := memory_switches(estimator, config)) is not None:
        flags, changed = found
        yield f"with {flags}: {changed.gigabytes:.1f} GB, which {'fits' if changed.fits else 'does not fit either'}"


def _this_run(own: Estimate, estimator: Estimator, price: float | None) -> Iterator[str]:
    sent = ", ".join(f"{wire} {own.wires[wire] / MEGA:.3f} MB" for wire in WIRES)
    yield f"a rank sends per optimizer step: {sent}; a node to others {own.node_cross_bytes / MEGA:.3f} MB"
    diloco = own.plan.diloco
    if diloco is not None:
        yield (
            "these are means that include what a node sends to other islands: "
            f"{own.node_island_bytes / MEGA:.3f} MB every {diloco.steps} steps, "
            f"{own.node_island_bytes / diloco.steps / MEGA:.3f} MB per step"
        )
    if own.seconds is None:
        yield "no times: the cluster file names no links or no device"
        return
    ends, gpus = estimator.estimates(own.config), estimator.cluster.world_size
    yield f"times rest on {estimator.calibration.rests_on}"
    if len(ends) > 1:
        yield (
            "which was not checked for this device or so few tokens per rank and micro-batch: times are a range, whose "
            f"slower end is {CALIBRATIONS[LEAST].rests_on}"
        )
    if own.config.model.fp8_format is not None:
        yield (
            f"--fp8-format {own.config.model.fp8_format}: products are counted at the device's 16-bit peak and casts "
            "not at all, for nothing of either was measured"
        )
    yield (
        f"a step takes {_range([e.seconds or 0.0 for e in ends], '.3f')} s, of which "
        f"{_range([e.busy.get('compute', 0.0) for e in ends], '.3f')} s compute"
    )
    if diloco is not None:
        yield (
            f"of these, {_range([e.held_up / diloco.steps for e in ends], '.3f')} s are the mean of a synchronization, "
            f"which holds every {diloco.steps} steps up by {_range([e.held_up for e in ends], '.3f')} s; its bytes "
            f"{_takes(diloco)} from {_range([e.sufficient_gigabits for e in ends], '.3g')} Gbit/s of a node's links on"
        )
    rows = [("axis", "busy", "hidden", "exposed")]
    for axis, exposed in own.exposed.items():
        busy = own.busy.get(axis, 0.0)
        rows.append((axis, f"{busy:.3f} s", f"{max(busy - exposed, 0.0):.3f} s", f"{max(exposed, 0.0):.3f} s"))
    yield from aligned(rows)
    cost = ""
    if price is not None:
        cost = f", {_range([24 * price * gpus * e.days for e in ends], ',.0f')} at {price:g} a GPU-hour"
    yield (
        f"{own.plan.batches.total_samples:,} samples take {_range([e.days for e in ends], '.1f')} days on {gpus} GPU(s)"
        f"{cost}; evaluations, checkpoints and restarts come on top"
    )


def _takes(diloco: DilocoPlan) -> str:
    """What the bytes of a synchronization do where links have `sufficient_gigabits`."""
    return "hide under the steps of its delay" if diloco.delay else f"take at most {100 * EXPOSED:g} % of the time"


def _range(values: Sequence[float], form: str) -> str:
    """One figure, or the least and the most."""
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least} to {most}"


def _side_by_side(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    """Every scheme with the same batch, whether ZeRO++ pays, and local steps beside them."""
    rows = [
        ("scheme", "MB between nodes", "GB", "s per step", "tokens/s", "TFLOP/s per GPU", "MFU", "to ZeRO-3", "Gbit/s*")
    ]
    named = schemes(config)
    weights = {f"  weights {bits}": run for bits, run in weight_formats(named["--zeropp"]).items()}
    device, speeds, fitting = estimator.cluster.device, dict[str, list[float]](), dict[str, list[float]]()
    islands, plans = local_steps(config, estimator.cluster), dict[str, DilocoPlan]()
    for name, other in (named | weights | islands).items():
        try:
            ends = estimator.estimates(other)
        except ValueError as error:
            rows.append((name, str(error), "", "", "", "", "", "", ""))
            continue
        estimate, times = ends[0], ("-",) * 6
        if estimate.plan.diloco is not None:
            plans[name] = estimate.plan.diloco
        if estimate.seconds is not None and device is not None:
            speeds[name] = [end.tokens_per_second for end in ends]
            if estimate.fits and name in named:
                fitting[name] = speeds[name]
            times = (
                _range([end.seconds or 0.0 for end in ends], ".3f"),
                _range(speeds[name], ".0f"),
                _range([end.teraflops for end in ends], ".1f"),
                _range([100 * end.teraflops / device.teraflops for end in ends], ".1f") + " %",
                _range(_ratios(speeds[name], speeds["ZeRO-3"]), ".2f") if "ZeRO-3" in speeds else "-",
                _range([end.sufficient_gigabits for end in ends], ".3g"),
            )
        size = f"{estimate.gigabytes:.1f}" + ("" if estimate.fits else " (too much)")
        rows.append((name, f"{estimate.node_cross_bytes / MEGA:.1f}", size, *times))
    yield from aligned(rows)
    for name in plans:
        yield (
            f"{name} is another algorithm, not the same training faster: between synchronizations every island trains "
            "a model of its own; bytes and seconds are means that include them"
        )
    if speeds and device is not None:
        yield (
            "* of a node's links to others, each way: from there on they are not what a step waits for most"
            + "".join(f" ({name}: a synchronization's bytes {_takes(plan)})" for name, plan in plans.items())
        )
        yield (
            "TFLOP/s and MFU count what the model needs: forward and backward once, half of the attention matrix, no "
            f"recomputation; MFU is their share of {device.teraflops:g} TFLOP/s, the device's dense 16-bit peak"
        )
        yield _verdict(fitting)


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def _verdict(speeds: dict[str, list[float]]) -> str:
    """Whether ZeRO++ pays, of the schemes that fit."""
    if "--zeropp" not in speeds:
        others = f"{', '.join(speeds)} would" if speeds else "no scheme does"
        return f"--zeropp does not fit into memory as it is; {others}"
    if len(speeds) == 1:
        return "--zeropp is the only scheme that fits into memory"
    rivals = {name: _ratios(speeds["--zeropp"], speed) for name, speed in speeds.items() if name != "--zeropp"}
    rival = min(rivals, key=lambda name: min(rivals[name]))
    ratios = rivals[rival]
    if min(ratios) >= PAYS:
        return f"ZeRO++ pays: {_range(ratios, '.2f')} times as fast as the next that fits, {rival}"
    if max(ratios) < PAYS:
        return (
            f"ZeRO++ does not pay here: {rival} is {_range([1 / r for r in ratios], '.2f')} times as fast as --zeropp"
        )
    return f"ZeRO++ may pay: {_range(ratios, '.2f')} times as fast as {rival}"


def _best(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    choices = search(estimator, config)
    first = choices[0]
    if first.verdict or first.estimate is None:
        yield "nothing that was tried fits; the smallest:"
    elif first.estimate.seconds is None:
        yield "without links and a device nothing says what is fastest:"
    else:
        speeds = [end.tokens_per_second for end in estimator.estimates(first.estimate.config)]
        yield f"best with these flags otherwise: {first.name}, {_range(speeds, '.0f')} tokens/s"
    yield from (f"  {choice.name}: {choice.verdict or 'taken'}" for choice in choices[:SHOWN])
    if len(choices) > SHOWN:
        yield f"  and {len(choices) - SHOWN} more that are slower, too large or cannot run"
