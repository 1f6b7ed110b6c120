"""Where scalars go besides the run folder: Weights & Biases and TensorBoard.

Both packages are imported only when their flag is given: TensorBoard is optional, and wandb takes its time.
"""

from __future__ import annotations

import importlib
import importlib.util
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import urlparse


class Table(NamedTuple):
    """Rows of cells below the columns' names."""

    columns: tuple[str, ...]
    rows: list[tuple[str | int | float, ...]]


class Sink(Protocol):
    """A place for named scalars. Its methods may raise whatever its package does."""

    name: str

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Record values under Megatron's names at an iteration."""

    def summarize(self, values: Mapping[str, Any], tables: Mapping[str, Table], *, iteration: int) -> None:
        """Record what the run came to at its last iteration."""

    def close(self, *, exit_code: int) -> None:
        """Flush; 0 marks a run that ended well."""


class WandbSink:
    """A wandb run; the same id continues the same run.

    Never prompts: without credentials the run is recorded offline (`wandb sync` sends it later), and so it is when
    the server cannot be reached.

    Args:
        project, entity, name: of the run; an empty entity is wandb's default.
        folder: wandb makes its own folder `wandb` in it.
        run_id: names the run over restarts.
        config: the resolved flags.
        tags: of the run, beside those of WANDB_TAGS.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        project: str,
        entity: str,
        name: str,
        folder: Path,
        run_id: str,
        config: Mapping[str, Any],
        tags: Sequence[str],
    ) -> None:
        wandb = importlib.import_module("wandb")
        own_tags = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]
        settings = {
            "project": project,
            "entity": entity or None,
            "name": name,
            "dir": str(folder),
            "id": run_id,
            "resume": "allow",
            "config": dict(config),
            "tags": [*dict.fromkeys([*tags, *own_tags])],
        }
        try:
            self._run = wandb.init(**settings, mode=wandb_mode(os.environ))
        except wandb.errors.Error as error:
            print(f"wandb: recording offline, the server did not take the run: {error}", flush=True)
            wandb.teardown(exit_code=1)
            self._run = wandb.init(**settings, mode="offline")
        self._table = wandb.Table

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        self._run.log({**scalars, "samples vs steps": consumed_samples}, step=iteration)

    def summarize(self, values: Mapping[str, Any], tables: Mapping[str, Table], *, iteration: int) -> None:
        logged = {name: self._table(columns=list(table.columns), data=table.rows) for name, table in tables.items()}
        self._run.log(logged, step=iteration)
        self._run.summary.update(dict(values))

    def close(self, *, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoardSink:
    """TensorBoard events: every scalar against the iteration, and as "<name> vs samples" against the samples."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, queue_size: int) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(log_dir=str(folder), max_queue=queue_size)

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            self._writer.add_scalar(f"{name} vs samples", value, consumed_samples)

    def summarize(self, values: Mapping[str, Any], tables: Mapping[str, Table], *, iteration: int) -> None:
        tables = {"summary": Table(("", "value"), list(values.items())), **tables}
        for name, table in tables.items():
            lines = [table.columns, ("---",) * len(table.columns), *table.rows]
            text = "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
            self._writer.add_text(name, text, iteration)

    def close(self, *, exit_code: int) -> None:
        self._writer.close()


def wandb_mode(env: Mapping[str, str]) -> Literal["online", "offline", "disabled"]:
    """Online only with credentials, so that wandb has nothing to ask for.

    Args:
        env: WANDB_MODE is obeyed if it says offline or disabled; credentials are WANDB_API_KEY,
            WANDB_IDENTITY_TOKEN_FILE, or an entry for the server (WANDB_BASE_URL) in the netrc file.
    """
    wanted = env.get("WANDB_MODE", "online")
    if wanted == "disabled":
        return "disabled"
    if wanted in ("offline", "dryrun"):
        return "offline"
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE") or _netrc_has_server(env):
        return "online"
    return "offline"


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported; does not import it."""
    return importlib.util.find_spec(package) is not None


def _netrc_has_server(env: Mapping[str, str]) -> bool:
    server = urlparse(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = Path(env.get("HOME") or Path.home())
    files = [Path(env["NETRC"])] if env.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(file).authenticators(server):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
