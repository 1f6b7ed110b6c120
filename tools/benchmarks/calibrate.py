"""Fit what programs reach of data sheets to the published rows for calibration, and show the errors on all rows.

python tools/benchmarks/calibrate.py           fit (minutes), then the tables
python tools/benchmarks/calibrate.py --table   the tables with the recorded shares
"""

from __future__ import annotations

import argparse

import tools_path  # noqa: F401
from entry import leave_with

from megazpp.planner import published
from megazpp.planner.published import Study
from megazpp.topology.shares import ASSUMED_SHARES, DGX2_SHARES, H100_SHARES, H800_SHARES, Shares

RECORDED: dict[Study, Shares] = {"ZeRO++": DGX2_SHARES, "SDP4Bit": H800_SHARES}
STUDIES: tuple[Study, ...] = ("ZeRO++", "SDP4Bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="do not fit: use the recorded shares")
    table = parser.parse_args().table
    show_schemes(RECORDED if table else {study: published.fit(study, print) for study in STUDIES})
    show_speeds(fitted=not table)


def show_schemes(shares: dict[Study, Shares]) -> None:
    """Schemes against each other, on V100 and H800."""
    for study in STUDIES:
        print(f"{study}: {shares[study]}")
    print("study    model  tp  Gbit/s  tokens  measured        planned         error           ratio        error")
    for row in published.ROWS:
        one, other = published.predict(row, shares[row.study])
        before, after, ratio = published.errors(row, (one, other))
        print(
            f"{row.study:7}  {row.model:5}  {row.tp:2}  {row.gigabits:6}  {row.tokens:6}  "
            f"{row.before:5.1f} -> {row.after:5.1f}  {one:5.1f} -> {other:5.1f}  "
            f"{before:+6.1%} {after:+6.1%}  {row.after / row.before:4.2f} -> {other / one:4.2f} "
            f"{ratio:+6.1%}  {'calibration' if row.calibrates else ''}"
        )
    ratio, figures = published.median_errors(shares)
    print(f"median error on the rows that were not fitted: ratio {ratio:.1%}, TFLOP/s {figures:.1%}")


def show_speeds(*, fitted: bool) -> None:
    """FSDP2 on A100 and H100."""
    h100 = H100_SHARES
    if fitted:
        h100 = published.fit_matrix(next(row for row in published.SPEED_ROWS if row.calibrates), ASSUMED_SHARES)
    print(f"H100: {h100}")
    print("GPU              model        GPUs  tokens  recomputed  measured  planned tokens/s per GPU  error")
    for row in published.SPEED_ROWS:
        planned = published.planned_speed(row, h100 if row.device.shares == "h100" else ASSUMED_SHARES)
        print(
            f"{row.device.name:15}  {row.name:11}  {8 * row.nodes:4}  {row.seq * row.samples:6}  "
            f"{row.recomputed:10.0%}  {row.measured:8.0f}  {planned:24.0f}  {planned / row.measured - 1:+6.1%}"
            f"{'  calibration' if row.calibrates else ''}"
        )


if __name__ == "__main__":
    leave_with(main)
