"""Test how much host memory a process may use, with limits of cgroups."""

import pytest

from megazpp.base.memory import MemoryBytes, host_memory


@pytest.mark.parametrize(
    ("line", "mounted", "names"),
    [
        ("0::/slurm/job7/step0", "cgroup", ("memory.max", "memory.current", "inactive_file")),
        (
            "9:memory:/slurm/job7/step0",
            "cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
@pytest.mark.parametrize("inside", ["slurm/job7/step0", "slurm/job7", "."])
def test_memory_is_the_least_of_the_cgroups_that_contain_the_process(tmp_path, line, mounted, names, inside):
    limit, usage, cache = names
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"4:cpu,cpuacct:/other\n{line}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n")
    own = tmp_path / "sys/fs" / mounted / inside
    own.mkdir(parents=True)
    (own / limit).write_text("5000000\n")
    (own / usage).write_text("3000000\n")
    (own / "memory.stat").write_text(f"anon 7\n{cache} 1000000\n")
    assert host_memory(tmp_path) == (5_000_000, 3_000_000)
    (own / limit).write_text("max\n" if limit == "memory.max" else "9223372036854771712\n")
    assert host_memory(tmp_path) == MemoryBytes(9000 * 1024, 8000 * 1024)
