"""Compile the Triton kernels for sm_90, which needs no GPU, and print the number of each SASS instruction as JSON.

The tests run this program in a separate process, because their own processes have set TRITON_INTERPRET=1, under which
Triton compiles nothing.
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

from megazpp.kernels import weight_delta
from megazpp.kernels.block_quant import triton

DISASSEMBLER = Path(triton_package.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)")
TYPES = {  # types of the kernels' arguments by name; all other arguments are i32
    **dict.fromkeys(("messages", "errors", "kinds", "halves", "body"), "*u8"),
    **dict.fromkeys(("table", "error_table", "numbers"), "*i64"),
    **dict.fromkeys(("plan", "words", "starts"), "*i32"),
    **dict.fromkeys(("new", "old", "weights"), "*i16"),
    **dict.fromkeys(("beta", "rest"), "fp32"),
}


def instructions(kernel: Any, dtype: str, **constants: Any) -> dict[str, int]:
    """Compile a Triton kernel for sm_90, and return the number of each SASS instruction by its name.

    Args:
        kernel: Triton kernel.
        dtype: Triton's name of the data's dtype, such as "bf16".
        constants: values of compile-time constants; those that the kernel does not have are ignored.
    """
    names = kernel.arg_names
    given = {name: value for name, value in constants.items() if name in names}
    types = TYPES | dict.fromkeys(("x", "base", "out"), f"*{dtype}") | dict.fromkeys(given, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    aligned = [index for index, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")]
    attrs = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, signature, constexprs=given, attrs=attrs)
    compiled = triton_package.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(triton.OPTIONS))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run([DISASSEMBLER, file.name], capture_output=True, text=True, check=True).stdout
    return Counter(INSTRUCTION.findall(listing))


def pack(bits: int, base: int = 0, feedback: int = 0, average: int = 0) -> dict[str, int]:
    switches = {"BASE": base, "FEEDBACK": feedback, "AVERAGE": average}
    return instructions(triton._pack_kernel, "bf16", BITS=bits, BLOCK=128, EXACT=tl.bfloat16, **switches)


def unpack(bits: int, dtype: str, num_messages: int = 1, onto: int = 0) -> dict[str, int]:
    switches = {"K": num_messages, "ONTO_QUANTIZED": onto, "ONTO_EXACT": 0}
    exact = tl.float32 if dtype == "fp32" else tl.bfloat16
    return instructions(triton._unpack_sum_kernel, dtype, BITS=bits, BLOCK=128, EXACT=exact, **switches)


if __name__ == "__main__":
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
        found[name] = instructions(kernel, "bf16", SHIFT=7, MASK=255, ABOVE=0)
    json.dump(found, sys.stdout)
