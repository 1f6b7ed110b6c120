"""Merge several .bin/.idx pairs into one.

python tools/merge_datasets.py --input parts/ --output-prefix all_text_document

--input takes prefixes, whose pairs are merged in the given order, and folders, whose pairs are merged in the order of
their names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.files import check_prefix, errors_as
from megazpp.base.flags import Config, flag
from megazpp.base.program import program_of, say
from megazpp.data.indexed_builder import IndexedDatasetBuilder, check_output
from megazpp.data.indexed_dataset import IndexedDataset


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """Datasets.

    The datasets to merge.

    Attributes:
        input: prefixes of the .bin/.idx pairs, in order; a folder means all its pairs, sorted by name.
        output_prefix: prefix of the .bin/.idx pair to write.
        overwrite: replace an existing pair with the output's prefix.
    """

    input: tuple[str, ...] = flag(None, nargs="+", required=True)
    output_prefix: str = flag(None, metavar="PREFIX", required=True)
    overwrite: bool = flag(False)


@program_of(MergeConfig)
def main(config: MergeConfig) -> None:
    """Merge the given .bin/.idx pairs, and print the prefix of the merged pair."""
    # Check all inputs before anything is written.
    check_prefix(config.output_prefix, "--output-prefix")
    output = Path(config.output_prefix).expanduser()
    prefixes = _find_pairs(config.input)
    check_output(output, overwrite=config.overwrite)
    for prefix in prefixes:
        if prefix.resolve() == output.resolve():
            raise ValueError(f"--output-prefix {output} is one of the inputs; choose another prefix")
    datasets = list[IndexedDataset]()
    for prefix in prefixes:
        with errors_as(f"--input {prefix}"):
            datasets.append(IndexedDataset(prefix))
        first, dataset = datasets[0], datasets[-1]
        if dataset.has_modes:
            raise ValueError(
                f"--input {prefix} is multimodal, which is not supported: its sequence modes would be lost; omit it"
            )
        if dataset.dtype != first.dtype:
            raise ValueError(
                f"--input: {first.prefix} holds {first.dtype} ids, but {dataset.prefix} holds {dataset.dtype}; all "
                "inputs need the same type"
            )

    # Write the merged pair.
    with IndexedDatasetBuilder(output, first.dtype) as builder:
        for i, dataset in enumerate(datasets, start=1):
            builder.extend(dataset.tokens, dataset.lengths, dataset.document_indices[1:])
            say(f"{i} of {len(datasets)}: {dataset.prefix}, {len(dataset.tokens):,} tokens")
        builder.finalize()
    print(output)


def _find_pairs(values: Sequence[str]) -> list[Path]:
    """Return the .bin/.idx pairs that --input names, each as its path without suffix.

    A value of --input is such a path, or a folder. A folder means all pairs in it.
    """
    prefixes: list[Path] = []
    for value in values:
        path = Path(value).expanduser()
        if path.is_dir():
            found = sorted({file.with_suffix("") for file in path.iterdir() if file.suffix in (".bin", ".idx")})
            if not found:
                raise ValueError(f"--input {value}: the folder has no .bin or .idx files; give the folder of the pairs")
            prefixes += found
        else:
            prefixes.append(path)
    return prefixes


if __name__ == "__main__":
    raise SystemExit(main())
