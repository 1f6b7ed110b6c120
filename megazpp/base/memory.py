"""Memory of the host that this process may use, with the limits of the cgroups that contain the process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# An entry for version 2 of cgroups, and one for version 1: the controller in /proc/self/cgroup, the folder, the name of
# the file with the limit of memory, the name of the file with the used memory, and the key of the file cache in
# memory.stat. The file cache counts as used memory, although the kernel can free it.
CGROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class MemoryBytes(NamedTuple):
    """Memory of the host or of a cgroup in bytes: the limit, and the bytes that processes can still allocate."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> MemoryBytes:
    """Return the total memory that this process may use, and the memory that it can still allocate.

    Each of the two numbers is the smallest one among the machine and all cgroups that contain this process and have a
    limit.

    Args:
        root: parent folder of `proc` and `sys`; tests pass a substitute.
    """
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    machine = MemoryBytes(*(1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable")))
    return MemoryBytes(*map(min, zip(machine, *_limits(root), strict=True)))


def _limits(root: Path) -> Iterator[MemoryBytes]:
    """Yield the memory of each cgroup with a limit: this process's cgroup and the groups that contain it.

    In a container, the folder at which the cgroups are mounted may be this process's cgroup itself. The path of the
    cgroup in /proc/self/cgroup then does not exist below this folder, and only the limit of the folder itself is found.
    """
    lines = (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").exists() else []
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    for controller, mounted, limit, usage, cache in CGROUPS:
        own = root / mounted / paths.get(controller, "").strip("/")
        for folder in (own, *own.parents):
            file = folder / limit
            if folder.is_relative_to(root / mounted) and file.exists() and (most := file.read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield MemoryBytes(int(most), int(most) - int((folder / usage).read_text()) + int(stat[cache]))
