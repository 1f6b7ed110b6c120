"""Compile the Triton kernels for sm_90, which needs no GPU, and print as JSON how often each SASS instruction occurs.

Run as a script in a process of its own: under TRITON_INTERPRET=1 there is nothing to compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton as triton_package
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.block_quant import triton

DISASSEMBLER = Path(triton_package.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
DATA = ("x", "base", "out")
BYTES = ("payload", "error")
SCALES = ("scales", "error_scales")
FLOATS = ("beta", "rest")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)")


def instructions(kernel: Any, dtype: str, **constants: int) -> dict[str, int]:
    """Instructions of `kernel` compiled for data of `dtype` on aligned segments."""
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys(DATA, f"*{dtype}") | dict.fromkeys(BYTES, "*u8") | dict.fromkeys(SCALES, "*bf16")
    types |= dict.fromkeys(FLOATS, "fp32")
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if name not in (*constants, *FLOATS, "n") and not name.startswith(SCALES)]
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        constexprs={name: value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": triton.NUM_WARPS, "enable_fp_fusion": False}
    compiled = triton_package.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run([DISASSEMBLER, file.name], capture_output=True, text=True, check=True).stdout
    return Counter(INSTRUCTION.findall(listing))


def main() -> None:
    quantize, dequantize_sum = triton._quantize_kernel, triton._dequantize_sum_kernel
    plain = {"BLOCK": 128, "BASE": 0, "FEEDBACK": 0, "AVERAGE": 0}
    found = {
        "quantize": instructions(quantize, "bf16", **plain, BITS=8),
        "quantize_difference": instructions(quantize, "bf16", **{**plain, "BASE": 1}, BITS=4),
        "dequantize": instructions(dequantize_sum, "bf16", BITS=8, BLOCK=128, K=1, ACCUMULATE=0),
        "quantize_feedback": instructions(quantize, "bf16", **{**plain, "FEEDBACK": 1}, BITS=4),
        "quantize_averaged": instructions(quantize, "bf16", **{**plain, "FEEDBACK": 1, "AVERAGE": 1}, BITS=4),
        "dequantize_sum": instructions(dequantize_sum, "fp32", BITS=8, BLOCK=128, K=8, ACCUMULATE=0),
        "add_difference": instructions(dequantize_sum, "bf16", BITS=4, BLOCK=128, K=1, ACCUMULATE=1),
        "quantize_to_int2": instructions(quantize, "bf16", **{**plain, "BASE": 1}, BITS=2),
        "add_int2": instructions(dequantize_sum, "bf16", BITS=2, BLOCK=128, K=1, ACCUMULATE=1),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
