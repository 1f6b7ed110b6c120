"""Fit what programs reach of data sheets to the published rows for calibration, and show the errors on all rows.

python tools/calibrate.py           fit (minutes), then the table
python tools/calibrate.py --table   the table with the recorded shares
"""

from __future__ import annotations

import argparse

from entry import leave_with

from megazpp.planner.published import ROWS, Study, errors, fit, median_errors, predict
from megazpp.topology.cost import DGX2_SHARES, H800_SHARES, Shares

RECORDED: dict[Study, Shares] = {"ZeRO++": DGX2_SHARES, "SDP4Bit": H800_SHARES}
STUDIES: tuple[Study, ...] = ("ZeRO++", "SDP4Bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="do not fit: use the recorded shares")
    shares = RECORDED if parser.parse_args().table else {study: fit(study, print) for study in STUDIES}
    for study in STUDIES:
        print(f"{study}: {shares[study]}")
    print("study    model  tp  Gbit/s  tokens  measured        planned         error           ratio        error")
    for row in ROWS:
        predicted = predict(row, shares[row.study])
        before, after, ratio = errors(row, predicted)
        print(
            f"{row.study:7}  {row.model:5}  {row.tp:2}  {row.gigabits:6}  {row.tokens:6}  "
            f"{row.before:5.1f} -> {row.after:5.1f}  {predicted.before:5.1f} -> {predicted.after:5.1f}  "
            f"{before:+6.1%} {after:+6.1%}  {row.after / row.before:4.2f} -> {predicted.after / predicted.before:4.2f} "
            f"{ratio:+6.1%}  {'calibration' if row.calibrates else ''}"
        )
    ratio, figures = median_errors(shares)
    print(f"median error on the rows that were not fitted: ratio {ratio:.1%}, TFLOP/s {figures:.1%}")


if __name__ == "__main__":
    leave_with(main)
