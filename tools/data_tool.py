"""What the tools for data have in common: flags of frozen configs, and one line and an exit status for an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megazpp.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from megazpp.flag_files import expand_flag_files
from megazpp.flags import FlagParser, split_into_flags
from megazpp.megatron_flags import MegatronFlag, sift_flags


def run_tool(
    program: str,
    description: str,
    configs: Sequence[type],
    work: Callable[..., None],
    argv: Sequence[str],
    *,
    megatron_flags: Mapping[str, MegatronFlag] | None = None,
) -> int:
    """Read the command line, work, and return the exit status.

    Args:
        configs: config classes whose fields are the flags.
        work: called with one config of each.
        megatron_flags: further flags of Megatron's tool of that name, which have no effect or are refused.
    """
    parser = FlagParser(configs, program=program, description=description)
    try:
        given = list(split_into_flags(expand_flag_files(argv, Path.cwd())))
        sifted = sift_flags(given, parser.spellings, megatron_flags or {})
        values, _ = parser.parse(sifted.flags)
        for notice in sifted.notices:
            say(notice)
        work(*parser.build(values))
    except BrokenPipeError:
        raise  # entry.py's
    except (OSError, ValueError) as error:
        say(f"{program}: error: {error}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        say(f"{program}: interrupted; nothing was written")
        return EXIT_INTERRUPTED
    return 0


def say(line: Any) -> None:
    """Print a line of progress, where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)
