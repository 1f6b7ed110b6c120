"""Join several .bin/.idx pairs into one.

python tools/merge_datasets.py --input parts/ --output-prefix all_text_document

--input is a folder, whose pairs are taken in the order of their names, or prefixes in the order given.
"""

from __future__ import annotations

from megazpp.data.merge import MergeConfig, merge_datasets
from megazpp.program import program_of, say


@program_of(MergeConfig)
def main(config: MergeConfig) -> None:
    print(merge_datasets(config, say))


if __name__ == "__main__":
    raise SystemExit(main())
