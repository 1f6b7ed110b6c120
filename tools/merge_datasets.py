"""Join several .bin/.idx pairs into one.

python tools/merge_datasets.py --input parts/ --output-prefix all_text_document

--input is a folder, whose pairs are taken in the order of their names, or prefixes in the order given.
"""

from __future__ import annotations

import sys

from entry import leave_with, run_tool, say

from megazpp.data.merge import MergeConfig, merge_datasets


def main(argv: list[str]) -> int:
    return run_tool(
        "merge_datasets.py", __doc__, [MergeConfig], lambda config: print(merge_datasets(config, say)), argv
    )


if __name__ == "__main__":
    leave_with(lambda: main(sys.argv[1:]))
