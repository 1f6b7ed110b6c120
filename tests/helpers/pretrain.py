"""pretrain_gpt.py as a user runs it, and the records that its runs leave."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.program import ROOT, run_forked

import pretrain_gpt

TOY = shlex.split(
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 256 --lr 1e-3 --micro-batch-size 2 --log-interval 1"
)


class Run(NamedTuple):
    """A finished run."""

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
    """A folder with a cache that several runs share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pretrain(
        self,
        *flags: str,
        run: str,
        launcher: tuple[str, ...] = (str(ROOT / "pretrain_gpt.py"),),
        nproc: int | None = 2,
        cwd: Path = ROOT,
        start: Callable[..., tuple[int, str]] = run_forked,
    ) -> Run:
        """Run to the end, which must be a good one."""
        ranks = [] if nproc is None else ["--nproc", str(nproc)]
        code, output = start(*launcher, *flags, *self.places(run), *ranks, folder=self.path, cwd=cwd)
        assert code == 0, output
        return Run(output, self.path / run)

    def places(self, run: str) -> tuple[str, ...]:
        return ("--run-dir", str(self.path / run), "--data-cache-path", str(self.path / "cache"))


class Main:
    """Calls main() here, which must not come as far as starting workers; (exit status, stdout, stderr)."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture
        for start in ("launch_workers", "run_worker"):
            patch.setattr(f"megazpp.base.run.{start}", lambda *_, **__: pytest.fail("started workers"))

    def __call__(self, *flags: str) -> tuple[int, str, str]:
        self._patch.setattr("sys.argv", ["pretrain_gpt.py", *flags])
        code = pretrain_gpt.main()
        return code, *self._capture.readouterr()

    def refusal(self, *flags: str) -> list[str]:
        """The lines of a refusal, less what each begins with."""
        code, out, err = self(*flags)
        assert (code, out) == (2, ""), flags
        lines = err.splitlines()
        assert all(line.startswith("pretrain_gpt.py: error: ") for line in lines), err
        return [line.removeprefix("pretrain_gpt.py: error: ") for line in lines]
