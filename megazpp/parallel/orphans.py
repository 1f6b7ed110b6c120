"""No orphans: a process ends with the one that started it. Needs no torch: what only starts programs uses it too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from megazpp.errors import EXIT_ERROR

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def end_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher dies, `kill -9` included; elsewhere than on Linux nothing."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_ERROR)
