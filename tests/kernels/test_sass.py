"""Check the instructions of the Triton kernels for sm_90 (H100). The kernels are compiled without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Compile the Triton kernels for sm_90 in a process of their own.

    Return, by kernel name, the count of each SASS instruction.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    paths = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | paths
    command = [sys.executable, "-m", "helpers.kernel_sass"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "nvdisasm" in done.stderr:
        pytest.skip("the installed Triton has no disassembler (nvdisasm)")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def count(instructions: dict[str, int], *prefixes: str) -> int:
    return sum(number for name, number in instructions.items() if name.startswith(prefixes))


def test_no_kernel_spills_or_uses_slow_conversion_instructions(kernels):
    for name, instructions in kernels.items():
        assert count(instructions, "I2F", "F2I") == 0, name
        assert count(instructions, "STL", "LDL") == 0, name


def test_full_tiles_load_and_store_16_bytes_per_access(kernels):
    """Count the 16-byte loads and stores of each kernel.

    A tile has 4096 elements for 128 threads: 4 accesses per thread in bf16, 2 in int8, 1 in int4.
    """
    wide = {name: (count(found, "LDG.E.128"), count(found, "STG.E.128")) for name, found in kernels.items()}
    assert wide["exact"] == (4, 4)
    assert wide["exact_sum"] == (8 * 8, 8), "8 loads for each of 8 fp32 messages, and 8 stores of their sum"
    # Every kernel also copies exact (unquantized) segments, which the first term counts. In quantized segments, tiles
    # that are partial or unaligned access bf16 elements one by one under a mask. Payloads are masked by block, so both
    # branches for them have wide accesses.
    assert wide["quantize"] == (4 + 4, 4 + 2 * 2)
    assert wide["quantize_difference"] == (4 + 4 + 4, 4 + 2 * 1), "the kernel must read x and base once each"
    assert wide["dequantize"] == (4 + 2 * 2, 4 + 4)
    assert wide["quantize_feedback"] == (4 + 4 + 2 * 2, 4 + 2 * (1 + 2)), (
        "the kernel writes int4 payloads, and reads and writes int8 errors"
    )
    assert wide["quantize_averaged"] == wide["quantize_feedback"], (
        "averaging must add no memory access, because the old error is in registers"
    )
    assert wide["dequantize_sum"][0] >= 8 * 8 + 2 * 2 * (1 + 4), (
        "the loads are those of the first segment, and of the unrolled loop over further segments"
    )
    assert wide["dequantize_sum"][1] == 8 + 8, "the kernel must store its fp32 sums with 16 bytes per access"
    assert wide["add_difference"] == (4 + 4 + 2 * 1, 4 + 4), "the kernel must read the row once and write it once"


def test_kernels_fuse_no_multiply_add_outside_divisions(kernels):
    assert count(kernels["dequantize"], "FFMA") == count(kernels["dequantize_sum"], "FFMA") == 0
    assert count(kernels["quantize"], "FFMA") < 32, (
        "FFMA may occur only in the Newton steps of two divisions, and not per element"
    )
