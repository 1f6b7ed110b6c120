"""Test how much host memory a process sees as available, with limits of cgroups."""

from unittest import mock

from megazpp.base import memory
from megazpp.base.memory import available_bytes


def test_available_memory_is_the_cgroup_s_if_that_is_less(tmp_path):
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 1000000\n")
    with mock.patch.object(memory, "CGROUPS", [(tmp_path, "memory.max", "memory.current", "inactive_file")]):
        assert available_bytes() == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    with mock.patch.object(memory, "CGROUPS", [(tmp_path, "memory.max", "memory.current", "inactive_file")]):
        assert available_bytes() > 3_000_000
