"""Run the parts of gpu_check.py: each part runs programs, and reads results from their logs.

The parts stay in one file of more than 300 lines, because all of them share `Check`, `train` and the tables of flags at
the top.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import additions
import torch
from emulate_cluster import start_on_this_machine

from megazpp.base.program import EXIT_USER_ERROR, GIGA, MEGA, TERA, end_with
from megazpp.features import FEATURES
from megazpp.run.arguments import parse_run_config
from megazpp.training.flops import device_name, model_flops_per_token, peak_flops
from megazpp.zero.plan import GRADIENT_BLOCK, WEIGHT_BLOCK

T = TypeVar("T")
# NCCL rejects two ranks of one host on the same GPU. These variables make NCCL treat each rank as a separate host. The
# ranks take turns on the GPU, or use it at the same time if MPS is active.
ON_ONE_GPU = ["NCCL_NET=Socket", "NCCL_DEBUG=WARN", "CUBLAS_WORKSPACE_CONFIG=:4096:8"]
ON_ONE_GPU += [f"NCCL_{name}_DISABLE=1" for name in ("IB", "P2P", "SHM")]
ON_ONE_GPU += [f"NCCL_{name}_ENABLE=0" for name in ("NVLS", "MNNVL", "RAS", "CUMEM", "CUMEM_HOST")]
TO_A_LOG = 'NCCL_HOSTID=rank$RANK NCCL_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME exec "$@" >>"$LOG" 2>&1 </dev/null'

TOY = "--num-layers 2 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 16 --seq-length 32 --vocab-size 300"
TOY += " --max-position-embeddings 32 --micro-batch-size 1"
# MIXTURE has the flags without which a GPT-2-style config cannot have experts. FEW_EXPERTS and MANY_EXPERTS are two
# mixtures whose experts compute as much per token as the MLP of llama_1b.
MIXTURE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
FEW_EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 4096"
MANY_EXPERTS = "--num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 1024"
FLOAT8, LEAN = "--fp8-format e4m3", "--recompute-granularity selective"
HOPS_OF_16_BITS = "pretended --zeropp --zero-weight-bits 16 --zero-gradient-bits 16 16"
# A case is a config, and the programs to compare on it (its "sides"), of which the first is the reference. Budgets of
# 8 minutes measure only the first SHORT_CASES cases.
CASES = (
    ("gpt_125m", "baseline", "ours"),
    ("llama_1b", "baseline", "ours"),
    ("gpt_1b3", "baseline", "ours"),
    ("llama_1b --num-layers 8", "ours", f"ours {FEW_EXPERTS}", f"ours {MANY_EXPERTS}"),
    ("gpt_1b3 --num-layers 6 --vocab-size 512", HOPS_OF_16_BITS, "pretended --zeropp", "pretended"),
    ("llama_1b", "baseline", f"ours {FLOAT8}", f"baseline {FLOAT8}", f"ours {LEAN}", "ours --no-compile"),
    ("gpt_1b3", "ours", f"ours {LEAN}", "ours --optimizer muon"),
    ("gpt_6b7 --num-layers 3 --vocab-size 512", HOPS_OF_16_BITS, "pretended --zeropp", "pretended"),
)
SHORT_CASES = 5  # number of cases that the 8-minute budget measures
ADDITIONS = "configs/post_training/additions"
SAMPLES = {"llama_1b": 4, "gpt_1b3": 8}  # samples per step of the large models; other models take 32
STEPS, WARM_UP_STEPS, LOG_INTERVAL = 30, 10, 5
TEXT = "--text-path builtin:moby_dick --split 100,0,0 --vocab-size 256 --seq-length 1024 --micro-batch-size 4 "
TEXT += "--no-compile --emulate-nodes 2"  # compiling the layers on four ranks would take most of the time
# with --zero-weight-delta none, weights cross nodes in int8; the default would send lossless deltas
INT8 = "--zeropp --zero-weight-delta none"
OVERLAP_OFF = f"{INT8} --no-overlap-param-gather --no-overlap-grad-reduce"
ON_HOST = f"{INT8} --optimizer-cpu-offload --zero-offload-partial-sums --disturbed"
MORE_WAYS = (
    "--zeropp --zero-weight-delta lossless --disturbed",
    f"{INT8} --tensor-model-parallel-size 2 --sequence-parallel",
    f"{INT8} --context-parallel-size 2",
    f"{INT8} --diloco-steps 4",
    f"{INT8} --optimizer muon --muon-full-interval 2",
    f"{INT8} {FLOAT8}",
)
# Parallelism that the part "streams" adds to ZeRO: none, expert parallelism, tensor parallelism.
SPLITS = (
    "",
    f"{MIXTURE} --num-experts 4 --moe-ffn-hidden-size 1536 --expert-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
)
# the losses of these runs may differ from the losses of AdamW with ZeRO-3
OTHER_ALGORITHMS = ("--optimizer", "--diloco-steps")
NATS_APART = 0.02  # largest accepted difference of mean losses: several times the difference between two seeds
# runs with fewer steps are not compared: losses fall so fast at first that rounding moves them by more than NATS_APART
LEAST_STEPS = 15
GRACE_SECONDS = 5.0
ELEMENTS = (2**28, 2**30)
# speed that int8 kernels and weight deltas should reach, as a fraction of the speed at which the GPU copies memory
GOALS = {"quantize": "90%", "dequantize": "90%", "sum": "80%", "encode": "60%", "decode": "60%"}
# a line of benchmark_kernels.py: kernel, ms, ms of the first call, GB/s, fraction of the copy's rate
TIMED = re.compile(r"^(\w.{31}) +([\d.]+) +([\d.]+) +[\d.]+ +([\d.]+) +(\d+%)$", re.MULTILINE)
SAVED = re.compile(r"saved checkpoint at iteration .* \| ([\d.]+) GB in ([\d.]+) s")
WAITED, SPEED = re.compile(r"training waited ([\d.]+) s"), re.compile(r"then ([\d.]+) tokens/s")


class Check:
    """The settings and the results of one part of the GPU check.

    Args:
        folder: folder for the part's logs; the constructor creates it.
        title: title of the part in the results.
        device: "cuda", or "cpu" for a rehearsal at toy size.
        seconds: time limit of the part.
        long: True if the budget allows all cases.
        save: function that saves the results of all parts; it is called after each new result.
    Attributes:
        found: the part's results as JSON: name, title, status, seconds, table rows (cells by heading), notes and
            failures.
    """

    def __init__(self, folder: Path, title: str, device: str, seconds: float, long: bool, save: Callable[[], None]):
        self.folder, self.device, self.long, self._save = folder, device, long, save
        self.found: dict[str, Any] = {"name": folder.name, "title": title, "status": "running", "seconds": 0}
        self.found |= {"rows": [], "notes": [], "failures": []}
        self._began, self._seconds = time.monotonic(), seconds
        folder.mkdir(exist_ok=True)

    def left(self) -> float:
        """Return the seconds that are left until the part's time limit."""
        return self._began + self._seconds - time.monotonic()

    def size(self, on_gpu: T, toy: T) -> T:
        """Return `on_gpu` for a check on a GPU, and `toy` for a rehearsal on the CPU."""
        return toy if self.device == "cpu" else on_gpu

    def row(self, **cells: str | int | float) -> None:
        """Add a row to the part's table; the cells are given by heading, in which underscores become spaces."""
        self._add("rows", {name.replace("_", " "): cell for name, cell in cells.items()})

    def note(self, text: str) -> None:
        """Add a note below the part's table."""
        self._add("notes", text)

    def fail(self, text: str) -> None:
        """Add a failure, which makes the part fail.

        Use this for wrong results only. A missed speed goal belongs in a row of the table.
        """
        self._add("failures", text)

    def _add(self, kind: str, item: object) -> None:
        """Add an item to the rows, notes or failures, print it, and save the results of all parts."""
        self.found[kind].append(item)
        self.found["seconds"] = round(time.monotonic() - self._began)
        print(item, flush=True)
        self._save()

    def run(self, words: str, log: Path, seconds: float, *, on_ranks: bool = False) -> int | None:
        """Run a Python program to its end, and stop it and its child processes at the time limit.

        At the limit a program gets SIGINT, after which pytest can still report its failures so far. SIGKILL follows a
        few seconds later.

        Args:
            words: arguments of the interpreter, separated by blanks.
            log: file to which the output of the program is appended.
            seconds: time limit of the program.
            on_ranks: True to run four ranks of the program on the same GPU; False to run one process.
        Returns:
            The exit code, or None if the program reached the time limit.
        """
        launcher, until = os.getpid(), time.monotonic() + seconds
        command = ["env", f"LOG={log}", "sh", "-c", TO_A_LOG, "sh", sys.executable, *words.split()]
        log.touch()
        if not on_ranks:
            process = subprocess.Popen(command, preexec_fn=lambda: end_with(launcher), start_new_session=True)
            poll, stop = process.poll, partial(interrupt, process)
        else:
            command[1:1] = ON_ONE_GPU if self.device == "cuda" else ["CUDA_VISIBLE_DEVICES="]
            ranks = start_on_this_machine(command, nodes=2, ranks_per_node=2)
            poll, stop = ranks.poll, partial(ranks.stop)
        try:
            while (code := poll()) is None and time.monotonic() < until:
                time.sleep(0.2)
            return code
        finally:
            with contextlib.suppress(ProcessLookupError):
                stop()  # also kills the processes that the program has started


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to the leader of a process group, wait up to GRACE_SECONDS for its end, and kill the whole group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    os.killpg(process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, or "" if there is none."""
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")


def files_with_gpu_tests() -> list[str]:
    """Return the paths of the test files that have tests marked `gpu`, the most important file first."""
    # this file tests kernels at large offsets, which no other part runs
    first = ["tests/kernels/test_implementations.py"]
    found = [str(path) for path in Path("tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    return sorted(found, key=lambda path: (path not in first, path))


def correct(check: Check) -> None:
    """Run the tests marked `gpu`, in parallel if pytest-xdist is installed."""
    files = files_with_gpu_tests()
    words = f"-m pytest -m gpu -vv -rN --continue-on-collection-errors -p no:cacheprovider {' '.join(files)}"
    if find_spec("xdist") and check.device == "cuda":
        words += f" -n {min(8, os.cpu_count() or 1)} --dist worksteal"
    log = check.folder / "log.txt"
    code, text = check.run(words, log, check.left()), log.read_text(errors="replace")
    counts = {status.lower(): text.count(f" {status}") for status in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    check.row(**counts)
    if code is None:
        check.note("the time was over before all tests had run")
    if code or counts["failed"] or counts["error"] or not counts[check.size("passed", "skipped")]:
        check.fail(f"see {log}: {last_line(log)}")


def programs(check: Check) -> None:
    """Run programs at toy size: asynchronous saves, a resumed run, generation, and each post-training objective.

    The programs of one stage run in parallel, so each takes longer than it would alone.
    """
    # Write the data, and name the flags that several programs have in common.
    folder, nproc = check.folder, "--nproc 1 --log-interval 1"
    additions.write_data(folder, seed=1)
    base = f"@{ADDITIONS}_base.args --text-path {folder}/labels.jsonl --bf16 --micro-batch-size 8 {nproc}"
    base += " --lr-decay-iters 12"
    experts = f"{base} {MIXTURE} --num-experts 4 --moe-ffn-hidden-size 64 --save {folder}/experts"
    base += f" --save {folder}/base"
    common = f"--bf16 --lr-warmup-iters 2 --train-iters 8 --eval-interval 8 {nproc}"
    pairs = f"--train-data-path {folder}/pairs.jsonl --valid-data-path {folder}/held_out_pairs.jsonl"
    sums = f"--train-data-path {folder}/sums.jsonl --valid-data-path {folder}/held_out.jsonl"
    trained, saved = f"--load {folder}/sft", f"--save {folder}"
    few = "--global-batch-size 64 --micro-batch-size 32"
    generate = f"tools/generate.py --nproc 1 --prompt 1 2 3 --sample-tokens 8 --load {folder}"

    def post(objective: str, flags: str) -> str:
        """Return the command that post-trains at toy size with an objective and further flags."""
        return f"tools/post_train.py @{ADDITIONS}_{objective}.args {common} {flags}"

    # The stages run one after another. The programs of a stage load checkpoints that earlier stages have written.
    stages: list[dict[str, str]] = [
        {
            "async-save": f"pretrain_gpt.py {base} --train-iters 12 --exit-interval 8 --save-interval 2 --async-save",
            "experts": f"pretrain_gpt.py {experts} --train-iters 8",
        },
        {
            "sft": post("sft", f"--load {folder}/base {saved}/sft --train-data-path {folder}/labels.jsonl"),
            "resume": f"pretrain_gpt.py {base} --train-iters 12 --load {folder}/base {saved}/resumed --async-save",
            "sft-lora-8bit": post(
                "sft",
                f"--load {folder}/base --train-data-path {folder}/labels.jsonl --lora-r 4 "
                "--lora-target-modules all-linear --base-weight-bits 8 --compile",
            ),
            "sft-experts": post("sft", f"--load {folder}/experts --train-data-path {folder}/labels.jsonl"),
            "generate": f"{generate}/base",
            "generate-experts": f"{generate}/experts",
            "generate-4bit": f"{generate}/base --weights-device host --weight-bits 4 --kv-cache-device host",
            "evaluate": f"tools/evaluate.py --load {folder}/base --nproc 1 --input {folder}/labels.jsonl",
        },
        {
            "reward": post("reward", f"{trained} {saved}/reward {pairs}"),
            "dpo": post("dpo", f"{trained} {pairs}"),
            "dpo-compiled": post("dpo", f"{trained} {pairs} --compile"),
            "grpo": post(
                "grpo",
                f"{trained} {sums} {few} --num-generations 8 --reward-funcs {ADDITIONS}.py:correct",
            ),
        },
        {"ppo": post("ppo", f"{trained} {sums} {few} --reward-load {folder}/reward")},
    ]

    # Run the stages. Each program must exit with 0 and log only finite losses.
    for stage in stages:
        with ThreadPoolExecutor(len(stage)) as threads:
            results = list(threads.map(partial(_run_program, check, check.left()), stage.items()))
        for name, code, seconds in results:
            metrics, log = folder / name / "metrics.jsonl", folder / f"{name}.txt"
            lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            losses = [line["lm_loss"] for line in lines if "lm_loss" in line]
            check.row(
                program=name, exit_code=str(code), seconds=seconds, last_loss=f"{losses[-1]:.4f}" if losses else "-"
            )
            if code != 0 or not all(map(math.isfinite, losses)):
                check.fail(f"{name}: exit code {code}, {len(losses)} losses, {last_line(log)}")


def _run_program(check: Check, seconds: float, item: tuple[str, str]) -> tuple[str, int | None, float]:
    """Run one of the toy programs, and return its name, exit code and wall time in seconds.

    Args:
        check: the part of the GPU check that the program belongs to. This function adds no result to it.
        seconds: time limit of the program.
        item: (name, command) of the program.
    """
    name, words = item
    trains = words.startswith(("pretrain_gpt.py", "tools/post_train.py"))
    words += f" --run-dir {check.folder}/{name}" if trains else ""
    began = time.monotonic()
    return name, check.run(words, check.folder / f"{name}.txt", seconds), round(time.monotonic() - began, 1)


def optimizers(check: Check) -> None:
    """Compare three steps on the device with the same steps on the CPU, for each optimizer and precision."""
    log, out = check.folder / "log.txt", check.folder / "steps.json"
    words = f"-m gpu_check_workers optimizers @configs/gpt_125m.args {TOY} --tokenizer-type NullTokenizer --mock-data"
    words += f" --global-batch-size 2 --train-samples 64 --run-dir {out}"
    if code := check.run(words, log, check.left()):
        check.fail(f"exit code {code}, {last_line(log)}")
    for row in json.loads(out.read_text()) if out.exists() else []:
        check.row(**row)
        if not row["largest_relative_difference"] <= row["allowed"]:
            check.fail(f"{row['flags']}: steps on the device differ from those on the CPU: {row}")


def kernels(check: Check) -> None:
    """Run benchmark_kernels.py for several tensor sizes and block sizes, and add a row for each kernel."""
    for elements, block in itertools.product(check.size(ELEMENTS, (2**12,)), (GRADIENT_BLOCK, WEIGHT_BLOCK)):
        log = check.folder / f"{elements}-{block}.txt"
        words = f"--elements {elements} --block-size {block} --device {check.device} --rounds {check.size(20, 1)}"
        if code := check.run(f"tools/benchmarks/benchmark_kernels.py {words}", log, check.left()):
            check.fail(f"{elements} elements in blocks of {block}: exit code {code}, {last_line(log)}")
        for name, ms, first_ms, rate, of_copy in TIMED.findall(log.read_text()):
            has_goal = ("int8" in name and "," not in name) or "delta" in name
            cells = {"kernel": name.strip(), "block": block, "elements": elements, "ms": float(ms)}
            cells |= {"first_ms": float(first_ms), "GB_per_s": float(rate), "of_copy": of_copy}
            check.row(**cells, goal=GOALS.get(name.split()[0], "") if has_goal else "")


def training(check: Check) -> None:
    """Train with each side (program and flags) of each case in `CASES`, and add a row with its speed for each.

    MFU counts only the FLOPs of the model, without the FLOPs of recomputation.
    """
    peak, longest = peak_flops(device_name(torch.device(check.device)), torch.bfloat16), 0.0
    for name, *sides in CASES if check.long else CASES[: check.size(SHORT_CASES, 2)]:
        reference = None
        for side in sides:
            # Skip this side if the time left is shorter than the longest run so far.
            began, (kind, _, flags), (config, _, shape) = check.left(), side.partition(" "), name.partition(" ")
            if began < longest:
                check.note(f"no time for {name}, {side}")
                continue

            # Train with this side.
            program = "pretrain_gpt.py" if kind == "ours" else f"-m gpu_check_workers {kind}"
            words = f"@configs/{config}.args {shape} --mock-data {flags}"
            lines = train(check, f"{name} {side}", f"{program} {words}", began)
            longest = max(longest, began - check.left())
            if not lines:
                continue

            # Compute the FLOPs per token of the model, the speed, and the utilization of the device.
            found = parse_run_config(f"{words} {check.size('', TOY)}".split(), Path(), features=FEATURES).config
            rows = found.model.padded_vocab_size((found.tokenizer.vocab_size or 1) + 1, 1)
            flops = model_flops_per_token(found.model, padded_vocab_size=rows, seq_length=found.data.seq_length or 1)
            seconds = step_seconds(lines)
            rate = lines[-1]["consumed_tokens"] / lines[-1]["iteration"] / seconds
            reference = seconds if side == sides[0] else reference
            check.row(
                config=name,
                side=side,
                ms_of_a_step=round(seconds * 1e3, 2),
                tokens_per_s=round(rate),
                TFLOP_per_s=round(flops * rate / TERA, 1),
                MFU=f"{flops * rate / peak:.1%}" if peak else "",
                GB=round(lines[-1]["peak_memory_bytes"] / GIGA, 1),
                speedup=f"{reference / seconds:.3f} x" if reference else "",
            )


def streams(check: Check) -> None:
    """Train with several sharding configurations on four ranks of one GPU.

    Two kinds of steps must be bit-identical to undisturbed steps without overlap: steps with overlap, random delays and
    NaN-filled freed memory on the communication streams, and steps with training states in host memory. Among runs with
    the same optimizer, each loss must be close to ZeRO-3's.
    """
    splits = SPLITS[: 2 + check.long]
    for index, split in enumerate(splits):
        more = MORE_WAYS[: check.size(len(MORE_WAYS) if check.long else 1, 1)] if not split else ()
        # the losses of the other configurations are compared with ZeRO-3
        compared = ["--zero-stage 3"] if check.long or not split else []
        # the steps of these configurations must be bit-identical
        identical = [OVERLAP_OFF, f"{INT8} --disturbed", *([ON_HOST] if check.long and not split else [])]
        ways = [" ".join(filter(None, (way, split, "--num-layers 4"))) for way in (*compared, *identical, *more)]
        later = (2 + check.long) * (len(splits) - index - 1)
        found = on_two_nodes(check, "-m gpu_check_workers streams", ways, later=later)
        off, *others = found[len(compared) : len(compared) + len(identical)]
        for way, on in zip(identical[1:], others, strict=True):
            pairs, numbers = list(zip(off, on, strict=False)), ("iteration", "lm_loss", "grad_norm")
            unequal = [calm["iteration"] for calm, held in pairs if any(calm[name] != held[name] for name in numbers)]
            shape = split or "no split"
            check.note(
                f"{shape}: {len(pairs)} steps with {way} compared with steps without overlap, {len(unequal)} differ"
            )
            if unequal:
                check.fail(f"{shape}: {way} changes loss or gradient norm in steps {unequal[:20]}")


def on_two_nodes(check: Check, program: str, ways: Sequence[str], *, later: int = 0) -> list[list[dict[str, Any]]]:
    """Train with several configurations on 2 emulated nodes x 2 ranks of one GPU, and add a row for each.

    Args:
        check: the part, which gets the rows and failures.
        program: module or script that trains, as arguments of Python.
        ways: flags of each configuration. The first one is the reference for the losses of the others.
        later: number of configurations that follow this call, for which time must be left.
    Returns:
        The lines of metrics.jsonl of each configuration; [] for a configuration whose training failed.
    """
    found = list[list[dict[str, Any]]]()
    for index, way in enumerate(ways):
        share = check.left() / (len(ways) - index + later)
        # the first run that uses a kernel compiles it, which takes longer
        share *= 1.5 if OVERLAP_OFF in way or "lossless" in way else 1.0
        lines = train(check, f"way {way}", f"{program} @configs/gpt_125m.args {TEXT} {way}", share, on_ranks=True)
        found.append(lines)
        if not lines:
            continue
        pairs = list(zip(found[0], lines, strict=False))
        apart = statistics.mean(b["lm_loss"] - a["lm_loss"] for a, b in pairs[-(len(pairs) // 5 + 1) :])
        check.row(
            way=way,
            steps=len(lines),
            ms_of_a_step=round(1e3 * step_seconds(lines), 1),
            MB_between_nodes=round(lines[-1]["cross_bytes"] / MEGA, 2),
            last_loss=round(lines[-1]["lm_loss"], 4),
            nats_from_the_first=f"{apart:+.4f}",
        )
        if len(pairs) < check.size(LEAST_STEPS, 1):
            check.note(f"{way}: only {len(pairs)} steps, too few to compare losses")
        elif not abs(apart) <= NATS_APART and not any(flag in way for flag in OTHER_ALGORITHMS):
            check.fail(f"{way}: the loss differs by {apart:+.4f} nats from the first run's, more than {NATS_APART}")
    return found


def checkpoint(check: Check) -> None:
    """Measure synchronous and asynchronous saves, then generation with weights on the device and in host memory."""
    # Save checkpoints during training, first synchronously and then asynchronously.
    model, texts = check.folder / "model", list[str]()
    for side in ("--save", "--async-save"):
        shutil.rmtree(model, ignore_errors=True)
        saves = f"--save {model} --save-interval {check.size(20, 2)} --keep-last 1 {side.replace('--save', '')}"
        words = f"pretrain_gpt.py @configs/gpt_350m.args --mock-data --no-compile {saves}"
        lines, log = train(check, side, words, check.left() / 3), check.folder / side.strip("-") / "log.txt"
        if lines and (saved := SAVED.search(log.read_text())):
            check.row(
                save=side,
                GB=float(saved[1]),
                seconds_until_on_disk=float(saved[2]),
                seconds_that_training_waited=float((WAITED.search(log.read_text()) or ("", saved[2]))[1]),
                ms_of_a_step=round(1e3 * step_seconds(lines), 1),
            )

    # Generate from the last checkpoint.
    for place in ("device", "host", "host --weight-bits 8", "host --weight-bits 4"):
        words = f"tools/generate.py --load {model} --nproc 1 --temperature 0 --sample-tokens {check.size(64, 4)}"
        words, left = f"{words} --weights-device {place} --prompt {' '.join(map(str, range(11, 19)))}", check.left()
        log = check.folder / f"generate-{place.replace(' ', '')}.txt"
        code = check.run(words, log, left)
        if code != 0 or not (speed := SPEED.search(log.read_text())):
            check.fail(f"generation with --weights-device {place}: exit code {code}, {last_line(log)}")
            continue
        texts.append("".join(re.findall(r"^1\d .*", log.read_text(), re.MULTILINE)))
        same = "yes" if texts[-1] == texts[0] else "no"
        check.row(
            weights_device=place,
            tokens_per_s=float(speed[1]),
            seconds_with_loading=round(left - check.left(), 1),
            same_text=same,
        )


def train(check: Check, name: str, words: str, seconds: float, *, on_ranks: bool = False) -> list[dict[str, Any]]:
    """Run a training program within a time limit, and return the lines of its metrics.jsonl as dictionaries.

    Args:
        check: the part; if the program fails, a failure is added to it.
        name: name of the run, from which the name of its folder follows.
        words: program and flags, separated by blanks.
        seconds: time limit of the program.
        on_ranks: True to run four ranks on the same GPU and return the lines of all steps. False to run one process and
            leave out the lines of the warm-up.
    Returns:
        The lines with a step time; [] if the program failed. If it reaches the time limit, the lines so far.
    """
    steps, warm_up, every = (2000, 0, 1) if on_ranks else (STEPS, WARM_UP_STEPS, LOG_INTERVAL)
    steps, warm_up, every = check.size((steps, warm_up, every), (4, min(warm_up, 1), 1))
    folder = check.folder / re.sub(r"\W+", "-", name).strip("-")[:200]  # file systems limit names to 255 bytes
    samples = next((count for config, count in SAMPLES.items() if config in words), check.size(32, 8))
    length = f"--train-samples {samples * steps} --lr-decay-samples {samples * steps} --lr-warmup-samples {2 * samples}"
    if "llama" in words:
        length = f"--train-iters {steps} --lr-warmup-iters 2"
    words += f" {check.size('', TOY)} --global-batch-size {samples} {length} --lr-decay-style constant --eval-iters 0"
    words += f" --tokenizer-type NullTokenizer --log-interval {every} --run-dir {folder}/run"
    folder.mkdir()
    log, metrics, lines = folder / "log.txt", folder / "run" / "metrics.jsonl", list[dict[str, Any]]()
    code = check.run(words if on_ranks else f"{words} --nproc 1", log, seconds, on_ranks=on_ranks)
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        with contextlib.suppress(ValueError):  # a program that was killed may leave an incomplete last line
            lines.append(json.loads(line))
    lines = [line for line in lines if "step_seconds" in line and line["iteration"] > warm_up]
    if code == EXIT_USER_ERROR and FLOAT8 in words:
        check.note(f"{name}: skipped, {last_line(log)}")
    elif code or not lines:
        check.fail(f"{name}: {'no step was logged' if not code else f'exit code {code}'}, {last_line(log)}")
    return [] if code else lines


def step_seconds(lines: list[dict[str, Any]]) -> float:
    """Return the median of `step_seconds` over the lines of a metrics.jsonl."""
    return statistics.median(line["step_seconds"] for line in lines)
