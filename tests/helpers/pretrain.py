"""Run pretrain_gpt.py like a user, and read the records in the run folder."""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from helpers.program import ROOT, run_forked

TOY = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 --micro-batch-size 2 --log-interval 1 --eval-iters 1"
)


class Run(NamedTuple):
    """A finished run of pretrain_gpt.py: the printed output and the run folder."""

    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def values(self, key: str = "lm_loss") -> list[float]:
        return [row[key] for row in self.metrics]


class Home:
    """A folder for several runs of pretrain_gpt.py, which share a data cache in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pretrain(
        self,
        *flags: str,
        run: str,
        launcher: tuple[str, ...] = (str(ROOT / "pretrain_gpt.py"),),
        nproc: int | None = 2,
        cwd: Path = ROOT,
    ) -> Run:
        """Run pretrain_gpt.py to its end, assert that it succeeds, and return the run.

        Args:
            flags: flags of the program.
            run: name of the run folder.
            launcher: arguments of Python that come before the flags.
            nproc: --nproc; None leaves the flag out.
            cwd: working directory.
        """
        ranks = [] if nproc is None else ["--nproc", str(nproc)]
        code, output = run_forked(*launcher, *flags, *self.places(run), *ranks, folder=self.path, cwd=cwd)
        assert code == 0, output
        return Run(output, self.path / run)

    def places(self, run: str) -> tuple[str, ...]:
        return ("--run-dir", str(self.path / run), "--data-cache-path", str(self.path / "cache"))
