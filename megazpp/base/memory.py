"""Available memory of the host, which generation and --optimizer-cpu-offload check before they allocate memory."""

from __future__ import annotations

from pathlib import Path

# An entry for version 2 of cgroups, and one for version 1: the folder, the name of the file with the limit of memory,
# the name of the file with the used memory, and the key of the file cache in memory.stat. The file cache counts as used
# memory, although the kernel can free it.
CGROUPS = [
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


def available_bytes() -> int:
    """Return the bytes of memory that processes can still allocate on this machine and in this process's cgroup."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = [1024 * int(fields["MemAvailable"].split()[0])]
    for folder, limit, usage, cache in CGROUPS:
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(int(most) - int((folder / usage).read_text()) + int(stat[cache]))
    return min(found)
