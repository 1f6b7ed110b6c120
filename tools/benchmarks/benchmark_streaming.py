"""Tokens per second of weights that stream from disk, beside transformers with accelerate's disk offload.

python tools/benchmarks/benchmark_streaming.py --folder big/ --rounds 0           models and stores only; then, as root,
sh -c 'cd /sys/fs/cgroup/memory; mkdir two; echo 2G > two/memory.limit_in_bytes; echo $$ > two/cgroup.procs; cd - &&
    exec python tools/benchmarks/benchmark_streaming.py --folder big/'            everything within 2 GB

A GPT-2 of gpt_1b3's shape gets random weights in bf16, and is converted to our checkpoint. Both programs then continue
the same number of prompts of 4 tokens in fp32, in turn, each with a page cache that was dropped before (by root) and
that the cgroup keeps small: else only the first pass reads from the disk. Loading is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazpp.errors import JobError
from megazpp.formatting import GIGA
from megazpp.program import flags_of, program, say

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS, VOCABULARY = 4, 50257
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument(
        "--folder", required=True, type=Path, help="where models and stores are; kept for the next time"
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences at once")
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 8, 4], help="of our weights at rest")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--theirs", type=int, metavar="BATCH", help="run transformers once; what this calls itself with"
    )
    args = parser.parse_args(argv)
    if args.theirs:
        continue_with_offload(args)
        return
    args.folder = args.folder.resolve()
    build_models(args)
    rates: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)

    def note(batch: int, name: str, run: tuple[float, float]) -> None:
        rates[batch, name].append(run)
        say(f"{batch} sequences, {name}: {run[0]:.3f} tokens/s, {run[1]:.3f} GB")

    for batch in args.batches:
        for _ in range(args.rounds):
            note(batch, "transformers", measure_theirs(args, batch))
            for bits in args.bits:
                note(batch, f"{bits} bits", measure_ours(args, batch, bits))
    print("| sequences | program | tokens/s, median | of transformers | peak memory, GB |")
    print("|---|---|---|---|---|")
    for (batch, name), runs in rates.items():
        theirs = rates[batch, "transformers"]
        rate, peak = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
        ratio = statistics.median(mine[0] / their[0] for mine, their in zip(runs, theirs, strict=True))
        print(f"| {batch} | {name} | {rate:.2f} | {ratio:.2f} | {peak:.2f} |")


def build_models(args: argparse.Namespace) -> None:
    """What is not in the folder yet."""
    if not (args.folder / "hf").exists():
        import torch
        import transformers

        size = {"n_layer": args.layers, "n_embd": args.hidden_size, "n_head": args.hidden_size // 128}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=2048, **size)
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).bfloat16().save_pretrained(args.folder / "hf")
    if not (args.folder / "checkpoint").exists():
        places = ["--input", str(args.folder / "hf"), "--output", str(args.folder / "checkpoint")]
        kind = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)]
        subprocess.run([sys.executable, "tools/convert_checkpoint.py", *places, *kind], check=True, cwd=ROOT)
    for bits in args.bits:
        if not (args.folder / f"store{bits}").exists():
            measure_ours(args, 1, bits)


def measure_ours(args: argparse.Namespace, batch: int, bits: int) -> tuple[float, float]:
    """Tokens/s, and the program's peak memory in GB."""
    prompts = [f"{row:0{PROMPT_TOKENS}d}" for row in range(batch)]
    where = ["--weights-on", "disk", "--weight-bits", str(bits), "--weight-store", str(args.folder / f"store{bits}")]
    how = ["--nproc", "1", "--no-bf16", "--temperature", "0", "--sample-tokens", str(args.new_tokens)]
    asked = ["--load", str(args.folder / "checkpoint"), "--prompts-at-once", str(batch), "--prompt", *prompts]
    command = [sys.executable, "tools/generate.py", *where, *how, *asked]
    text, peak = _run(command)
    return _tokens_per_second(text), peak


def measure_theirs(args: argparse.Namespace, batch: int) -> tuple[float, float]:
    sizes = ["--folder", str(args.folder), "--new-tokens", str(args.new_tokens), "--theirs", str(batch)]
    text, peak = _run([sys.executable, __file__, *sizes])
    return _tokens_per_second(text), peak


def continue_with_offload(args: argparse.Namespace) -> None:
    """transformers with all weights on disk: accelerate reads a module's bf16 weights before its forward."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder / "hf", dtype=torch.float32, device_map={"": "disk"}, offload_folder=args.folder / "offload"
    )
    prompts = torch.arange(args.theirs * PROMPT_TOKENS).view(args.theirs, -1)
    started = time.perf_counter()
    count = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens}
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=0, **count)
    new = out.numel() - prompts.numel()
    print(f"{new} tokens in {time.perf_counter() - started:.3f} s; weights {next(model.parameters()).dtype}")


def _run(command: Sequence[str]) -> tuple[str, float]:
    """Everything that a program printed, and its peak memory in GB; the page cache is dropped before, by root."""
    os.sync()
    if os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("3")
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise JobError(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}:\n{text}")
    return text, usage.ru_maxrss * 1024 / GIGA


def _tokens_per_second(text: str) -> float:
    ((count, seconds),) = re.findall(r"(\d+) tokens in ([\d.]+) s", text)
    return int(count) / float(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
