"""`--plan`: what a run will need and how fast it will be, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megazpp.arguments import RunConfig
from megazpp.checks import RunPlan
from megazpp.planner.estimate import WIRES, Estimate, Estimator, schemes
from megazpp.planner.memory import KINDS, usable_gigabytes
from megazpp.planner.search import RECOMPUTE, search, with_recompute
from megazpp.topology.cluster import Cluster
from megazpp.topology.table import aligned

GIGA, MEGA = 1e9, 1e6
PAYS = 1.02  # ZeRO++ is said to pay from this much faster than ZeRO-3 on


def plan_report(config: RunConfig, cluster: Cluster, *, device_type: str) -> str:
    """Tables for the run on `cluster`: nothing is started, nothing is allocated.

    Raises:
        ValueError: flags that do not fit each other or the cluster, or no --vocab-size.
    """
    config, vocab_size = with_data(config), needed_vocab_size(config, "--plan")
    estimator = Estimator(cluster, vocab_size=vocab_size, device_type=device_type)
    own = estimator.estimate(config, exposed=True)
    return "\n".join(
        [
            *describe_plan(own.plan, own.micro_batches),
            "",
            *_memory(estimator, config),
            "",
            *_this_run(own),
            "",
            *_side_by_side(estimator, config),
            "",
            *_best(estimator, config),
        ]
    )


def with_data(config: RunConfig) -> RunConfig:
    """A plan needs no data."""
    data = config.data
    if data.mock_data or data.data_path or data.text_path or data.train_data_path:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(data, mock_data=True))


def needed_vocab_size(config: RunConfig, asked_by: str) -> int:
    """The tokenizer's size, from the flag.

    Raises:
        ValueError: it is not given, naming the flag that needs it.
    """
    if config.tokenizer.vocab_size is None:
        raise ValueError(f"{asked_by} needs --vocab-size: it opens no tokenizer")
    return config.tokenizer.vocab_size


def describe_plan(plan: RunPlan, micro_batches: int) -> Iterator[str]:
    """Layout, notes and batches of a run."""
    yield f"{plan.layout.describe()}; {plan.wire.describe()}"
    yield from (f"note: {notice}" for notice in plan.notices)
    yield (
        f"{plan.batches.global_batch_size} samples per optimizer step, per data rank in {micro_batches} "
        f"micro-batch(es) of {plan.batches.micro_batch_size}"
    )


def _memory(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    estimates = [estimator.estimate(with_recompute(config, recompute)) for recompute in RECOMPUTE]
    rows = [("GB on rank 0 at the fullest moment", *(f"recompute {r or 'none'}" for r in RECOMPUTE))]
    for kind in KINDS:
        sizes = [estimate.memory.kinds.get(kind, 0) for estimate in estimates]
        if any(sizes):
            rows.append((kind, *(f"{size / GIGA:.3f}" for size in sizes)))
        if kind == "activations":
            rows.append(("  of them logits", *(f"{e.logits_bytes / GIGA:.3f}" for e in estimates)))
    rows.append(("total", *(f"{estimate.gigabytes:.3f}" for estimate in estimates)))
    usable = usable_gigabytes(estimator.cluster.device)
    if usable is not None:
        rows.append((f"into {usable:.1f} GB", *("fits" if e.fits else "does not fit" for e in estimates)))
    yield from aligned(rows)


def _this_run(own: Estimate) -> Iterator[str]:
    sent = ", ".join(f"{wire} {own.wires[wire] / MEGA:.3f} MB" for wire in WIRES)
    yield f"a rank sends per optimizer step: {sent}; a node to others {own.node_cross_bytes / MEGA:.3f} MB"
    if own.seconds is None:
        yield "no times: the cluster file names no links or no device"
        return
    yield f"a step takes {own.seconds:.3f} s, of which {own.busy.get('compute', 0.0):.3f} s compute"
    rows = [("axis", "busy", "hidden", "exposed")]
    for axis, exposed in own.exposed.items():
        busy = own.busy.get(axis, 0.0)
        rows.append((axis, f"{busy:.3f} s", f"{max(busy - exposed, 0.0):.3f} s", f"{max(exposed, 0.0):.3f} s"))
    yield from aligned(rows)


def _side_by_side(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    """Every scheme with the same batch, and whether ZeRO++ pays."""
    rows = [("scheme", "MB between nodes", "GB", "s per step", "tokens/s", "TFLOP/s per GPU", "MFU", "to ZeRO-3")]
    speeds: dict[str, float] = {}
    for name, other in schemes(config).items():
        try:
            estimate = estimator.estimate(other)
        except ValueError as error:
            rows.append((name, str(error), "", "", "", "", "", ""))
            continue
        size = f"{estimate.gigabytes:.1f}" + ("" if estimate.fits else " (too much)")
        times = ("-",) * 5
        if estimate.seconds is not None:
            speeds[name] = estimate.tokens_per_second
            device = estimator.cluster.device
            times = (
                f"{estimate.seconds:.3f}",
                f"{estimate.tokens_per_second:.0f}",
                f"{estimate.teraflops:.1f}",
                f"{100 * estimate.teraflops / device.teraflops:.1f} %" if device else "-",
                f"{speeds[name] / speeds['ZeRO-3']:.2f}" if "ZeRO-3" in speeds else "-",
            )
        rows.append((name, f"{estimate.node_cross_bytes / MEGA:.1f}", size, *times))
    yield from aligned(rows)
    if "ZeRO-3" in speeds and "--zeropp" in speeds:
        rest = {name: speed for name, speed in speeds.items() if name != "--zeropp"}
        rival, ratio = max(rest, key=rest.__getitem__), speeds["--zeropp"] / max(rest.values())
        if ratio >= PAYS:
            yield f"ZeRO++ pays: {ratio:.2f} times as fast as the next, {rival}"
        else:
            yield f"ZeRO++ does not pay here: {rival} is {1 / ratio:.2f} times as fast as --zeropp"


def _best(estimator: Estimator, config: RunConfig) -> Iterator[str]:
    choices = search(estimator, config)
    first = choices[0]
    if first.verdict or first.estimate is None:
        yield "nothing that was tried fits:"
    elif first.estimate.seconds is None:
        yield "without links and a device nothing says what is fastest:"
    else:
        yield f"best with these flags otherwise: {first.name}, {first.estimate.tokens_per_second:.0f} tokens/s"
    yield from (f"  {choice.name}: {choice.verdict or 'taken'}" for choice in choices)
