"""What the Triton kernels become on sm_90: compiled here without a GPU, read as instructions."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Kernel name -> SASS instruction -> count."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    paths = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | paths
    command = [sys.executable, "-m", "helpers.kernel_sass"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "nvdisasm" in done.stderr:
        pytest.skip("this Triton carries no disassembler")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def count(instructions: dict[str, int], *prefixes: str) -> int:
    return sum(number for name, number in instructions.items() if name.startswith(prefixes))


def test_integers_are_converted_without_the_slow_pipe_and_nothing_spills(kernels):
    for name, instructions in kernels.items():
        assert count(instructions, "I2F", "F2I") == 0, name
        assert count(instructions, "STL", "LDL") == 0, name


def test_whole_tiles_move_sixteen_bytes_per_access(kernels):
    """4096 elements by 128 threads: 32 elements per thread, so 4 accesses of bf16, 2 of int8, 1 of int4."""
    wide = {name: (count(found, "LDG.E.128"), count(found, "STG.E.128")) for name, found in kernels.items()}
    assert wide["exact"] == (4, 4)
    assert wide["exact_sum"] == (8 * 8, 8), "8 messages of fp32"
    # every kernel moves what travels as it is too; of quantized segments bf16 is masked element by element in a tile
    # that is not whole or starts anywhere, and payloads are masked by blocks, so both of their branches are wide
    assert wide["quantize"] == (4 + 4, 4 + 2 * 2)
    assert wide["quantize_difference"] == (4 + 4 + 4, 4 + 2 * 1), "x and base, once each"
    assert wide["dequantize"] == (4 + 2 * 2, 4 + 4)
    assert wide["quantize_feedback"] == (4 + 4 + 2 * 2, 4 + 2 * (1 + 2)), "to int4; the error is int8"
    assert wide["quantize_averaged"] == wide["quantize_feedback"], "the error that was read is averaged in registers"
    assert wide["dequantize_sum"][0] >= 8 * 8 + 2 * 2 * (1 + 4), "first segment, unrolled segments"
    assert wide["dequantize_sum"][1] == 8 + 8, "fp32"
    assert wide["add_difference"] == (4 + 4 + 2 * 1, 4 + 4), "what was there is read once and written once"


def test_nothing_is_contracted_outside_the_divisions(kernels):
    assert count(kernels["dequantize"], "FFMA") == count(kernels["dequantize_sum"], "FFMA") == 0
    assert count(kernels["quantize"], "FFMA") < 32, "Newton steps of two divisions, nothing per element"
