"""Memory of the host that processes can still take."""

from __future__ import annotations

from pathlib import Path

# folder, limit, use, and the part of the use that is cache of files, of version 2 and of version 1 of cgroups
CGROUPS = [
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


def available_bytes() -> int:
    """Return the bytes of memory that this machine, or the cgroup of this process, can still give to processes."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = [1024 * int(fields["MemAvailable"].split()[0])]
    for folder, limit, usage, cache in CGROUPS:
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(int(most) - int((folder / usage).read_text()) + int(stat[cache]))  # the cache can be freed
    return min(found)
