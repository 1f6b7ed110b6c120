"""Compile the Triton kernels for sm_90, which needs no GPU, and print as JSON how often each SASS instruction occurs.

Run as a script in a process of its own: under TRITON_INTERPRET=1 there is nothing to compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton as triton_package
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import weight_delta
from kernels.block_quant import triton

DISASSEMBLER = Path(triton_package.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
DATA = ("x", "base", "out")
BYTES = ("messages", "errors")
TABLES = ("table", "error_table")
FLOATS = ("beta", "rest")
OF_DIFFERENCES = {"*i16": ("new", "old", "weights"), "*i32": ("plan", "words", "starts"), "*i64": ("numbers",)}
OF_DIFFERENCES["*u8"] = ("kinds", "halves", "body")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)")


def instructions(kernel: Any, dtype: str, **constants: Any) -> dict[str, int]:
    """Instructions of `kernel` compiled for data of `dtype` on aligned segments."""
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32")
    types |= dict.fromkeys(DATA, f"*{dtype}") | dict.fromkeys(BYTES, "*u8") | dict.fromkeys(TABLES, "*i64")
    types |= dict.fromkeys(FLOATS, "fp32")
    types |= {name: each for each, which in OF_DIFFERENCES.items() for name in which}
    constants = {name: value for name, value in constants.items() if name in names}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if name not in (*constants, *FLOATS)]
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        constexprs=constants,
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
    def pack(bits: int, base: int = 0, feedback: int = 0, average: int = 0) -> dict[str, int]:
        switches = {"BASE": base, "FEEDBACK": feedback, "AVERAGE": average}
        return instructions(triton._pack_kernel, "bf16", BITS=bits, BLOCK=128, EXACT=tl.bfloat16, **switches)

    def unpack(bits: int, dtype: str, num_messages: int = 1, onto: int = 0) -> dict[str, int]:
        switches = {"K": num_messages, "ONTO_QUANTIZED": onto, "ONTO_EXACT": 0}
        exact = tl.float32 if dtype == "fp32" else tl.bfloat16
        return instructions(triton._unpack_sum_kernel, dtype, BITS=bits, BLOCK=128, EXACT=exact, **switches)

    found = {
        "exact": pack(0),
        "exact_sum": unpack(0, "fp32", 8),
        "quantize": pack(8),
        "quantize_difference": pack(4, base=1),
        "dequantize": unpack(8, "bf16"),
        "quantize_feedback": pack(4, feedback=1),
        "quantize_averaged": pack(4, feedback=1, average=1),
        "dequantize_sum": unpack(8, "fp32", 8),
        "add_difference": unpack(4, "bf16", onto=1),
    }
    for name in ("measure", "start", "place", "find", "decode"):
        kernel = getattr(weight_delta.TRITON, f"_{name}_kernel")
        found[name] = instructions(kernel, "bf16", **dict(zip(("SHIFT", "MASK", "ABOVE"), (7, 255, 0), strict=True)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
