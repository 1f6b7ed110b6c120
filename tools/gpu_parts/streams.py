"""Part "streams" of tools/gpu_check.py: does what runs on side streams wait for what it needs, and keep what it uses?

Four ranks share the GPU over NCCL as two nodes of two. The same training runs twice, step by step in turn: without
overlap and undisturbed; and with overlap, under delays and an allocator that hands freed memory out at once, full of
NaN (`serve`, of which every rank is a process). The bits must be the same. Other jobs, on the CPU's gloo, say what
NCCL's numbers should be, to the rounding of bf16; they run beside the first.

What is done to the overlapped training, on every queue (parallel/comm_queue.py) and on the streams that submit to it:

- random waits before and after a task: what reads its result too early, reads what was there before;
- random waits of the compute before layers: what overwrites memory that the compute still reads, is early now;
- memory of random sizes is allocated, filled with NaN and freed, so that a buffer which was freed while another stream
  still used it is NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_parts.part import Report, Task
from gpu_parts.ranks import ON_ONE_GPU, ON_THE_CPU, running, side_by_side, wait_for
from gpu_parts.steps import build_step, make_batches, read_config, wait
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker, run_worker, seed_everything
from megazpp.topology.cluster import Cluster
from megazpp.training.step import TrainStep

CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)
BF16_ROUNDING = 2e-2  # of a loss: products rounded to 8 bits, and int4 gradients on the other side of a step
LAST_STEP_SECONDS = 12.0  # of a job: a step that has begun, and the end
SHAPE = "--num-layers 4 --hidden-size 512 --seq-length 256"
TOY = "--num-layers 2 --hidden-size 64 --seq-length 16"
COMMON = (
    "--num-attention-heads 4 --max-position-embeddings 256 --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 2 --bf16 --zeropp"
)
SEED, VOCAB, MICRO_BATCHES = 1234, 512, 2
DIFFERENT_STEPS = 8  # the same words again and again, so that there is something to learn
MOST_SECONDS = 1e-3  # of a delay
CYCLES_PER_SECOND = 1.5e9
POISON_ELEMENTS = (1 << 8, 1 << 12, 1 << 18, 3 << 18, 1 << 20, 3 << 20)  # torch keeps blocks above 1 MB apart


class StreamSettings(NamedTuple):
    """What the ranks of one job do.

    Attributes:
        backend: nccl or gloo.
        tp: tensor-parallel degree.
        flags: of the model.
        steps: at most.
        until: the time of day (Unix) after which no further step begins; the first one does.
        disturbed: run the overlapped, disturbed training too, and compare.
        result: file that rank 0 writes.
    """

    backend: str
    tp: int
    flags: str
    steps: int
    until: float
    disturbed: bool
    result: str

    def command(self) -> list[str]:
        return [sys.executable, "-m", "gpu_parts.streams", json.dumps(self._asdict())]


def measure(task: Task, report: Report) -> None:
    """One row per tensor-parallel degree."""
    with ExitStack() as stack:
        mps = stack.enter_context(side_by_side())
        if not task.rehearse:
            report.note(f"ranks share the GPU {'through MPS' if mps else 'by turns (no MPS)'}")
        env = ON_THE_CPU if task.rehearse else {**ON_ONE_GPU, **mps, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        end = time.monotonic() + task.seconds - report.elapsed()
        references = {}
        degrees = task.size((1, 2), (2,))
        for tp in degrees:
            settings = plan(task, "gloo", tp, end, disturbed=False)
            job = running(settings.command(), CLUSTER.world_size, ON_THE_CPU)
            references[tp] = settings, stack.enter_context(job)
        for index, tp in enumerate(degrees):
            last = time.monotonic() + (end - time.monotonic()) / (len(degrees) - index)
            settings = plan(task, task.size("nccl", "gloo"), tp, last, disturbed=True)
            with running(settings.command(), CLUSTER.world_size, env) as ranks:
                found = result_of(settings, wait_for(ranks, last), report)
            reference, ranks = references[tp]
            expected = result_of(reference, wait_for(ranks, last), report)
            if found and expected:
                compare(settings, found, expected["losses"], report)


def plan(task: Task, backend: str, tp: int, end: float, *, disturbed: bool) -> StreamSettings:
    """A job that is to be over at `end`, by the monotonic clock."""
    until = time.time() + end - time.monotonic() - LAST_STEP_SECONDS
    flags = f"{task.size(SHAPE, TOY)} {COMMON}{' --sequence-parallel' * (tp > 1)}"
    result = task.folder / f"{backend}-tp{tp}-{'disturbed' if disturbed else 'calm'}.json"
    steps = task.size(50, 3) if disturbed else task.size(4, 3)
    return StreamSettings(backend, tp, flags, steps, until, disturbed, str(result))


def result_of(settings: StreamSettings, code: int | None, report: Report) -> Mapping[str, Any]:
    """What the job has written; {} if that is nothing."""
    if code != 0:
        reason = f"ended with exit code {code}" if code is not None else "was not done in time"
        report.fail(f"TP {settings.tp}, {settings.backend}: the job {reason}")
    file = Path(settings.result)
    return json.loads(file.read_text()) if file.exists() else {}


def compare(settings: StreamSettings, found: Mapping[str, Any], expected: list[float], report: Report) -> None:
    """The row of one degree, and what is wrong."""
    tp, losses, unequal = settings.tp, found["losses"], found["unequal"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False))
    report.row(
        TP=tp,
        steps_compared=len(losses),
        of=settings.steps,
        delays=found["delays"],
        overlap_on_equals_off="every bit" if not unequal else f"not in steps {unequal[:5]}",
        loss_beside_gloo=f"{apart:.1e} apart (most {BF16_ROUNDING})",
        seconds_per_step_off=round(found["seconds"][0], 3),
        seconds_per_step_on_disturbed=round(found["seconds"][1], 3),
    )
    if unequal:
        report.fail(f"TP {tp}: with overlap other bits than without in steps {unequal[:20]}")
    if not apart <= BF16_ROUNDING:
        report.fail(f"TP {tp}: losses {losses[:4]} beside gloo's {expected[:4]}")


class Disturbance:
    """Delays and NaN, from a generator of its own."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._random = device, random.Random(seed)
        self.delays = 0

    def pause(self) -> None:
        """Now and then keep the current stream (on the CPU: the thread) waiting."""
        if self._random.random() < 0.5:
            return
        self.delays += 1
        seconds = self._random.random() * MOST_SECONDS
        if self._device.type == "cuda":
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
        else:
            time.sleep(seconds)

    def poison(self) -> None:
        """Take freed memory of the current stream, fill it with NaN, free it again."""
        torch.full((self._random.choice(POISON_ELEMENTS),), float("nan"), device=self._device)

    def fall_on(self, queue: CommQueue) -> None:
        """Disturb everything that is submitted to `queue` from now on."""
        submit = queue.submit

        def disturbed(task: Callable[[], Any], **when: Any) -> Work[Any]:
            def around() -> Any:
                self.pause()
                self.poison()
                result = task()
                self.pause()
                return result

            self.poison()
            self.pause()
            return submit(around, **when)

        queue.submit = disturbed  # type: ignore[method-assign]

    def before_layer(self, *args: object) -> None:
        """A hook for the compute."""
        self.pause()
        self.poison()


def serve(settings: StreamSettings, worker: Worker) -> None:
    """Be one rank: train, compare after every step, and let rank 0 write what came of it."""
    device = worker.device
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward adds in any order otherwise
    flags = f"{settings.flags} --tensor-model-parallel-size {settings.tp}"
    config = read_config(flags, use_cpu_initialization=True)
    layout = plan_dims(config.parallel, CLUSTER, zero_stage=3)
    dims = ParallelDims(layout, device_type=device.type, timeout=worker.timeout)

    def build(overlap: bool) -> TrainStep:
        seed_everything(SEED, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
        zero = dataclasses.replace(config.zero, overlap_param_gather=overlap, overlap_grad_reduce=overlap)
        return build_step(dataclasses.replace(config, zero=zero), dims, vocab_size=VOCAB, device=device)

    trainings = {"off": build(overlap=False)}
    disturbance = Disturbance(device, SEED + worker.rank)
    if settings.disturbed:
        trainings["on"] = build(overlap=True)
        for queue in {id(axis.queue): axis.queue for axis in (dims.cross, dims.local, dims.shard)}.values():
            disturbance.fall_on(queue)
        for layer in trainings["on"].model.layers:
            layer.register_forward_pre_hook(disturbance.before_layer)

    losses: list[float] = []
    unequal: list[int] = []
    seconds = dict.fromkeys(("off", "on"), 0.0)
    for index in range(settings.steps):
        seed = SEED + 1000 * (index % DIFFERENT_STEPS) + dims.data_rank
        data = make_batches(config, VOCAB, MICRO_BATCHES, device, seed=seed)
        results = {}
        for name, step in trainings.items():
            started = time.monotonic()
            results[name] = step(data, learning_rate=1e-3, weight_decay=0.01)
            wait(device)
            seconds[name] += time.monotonic() - started
        losses.append(results["off"].loss)
        differs = "on" in trainings and not (results["on"] == results["off"] and same_weights(**trainings))
        word = torch.tensor([differs, time.time() > settings.until], dtype=torch.int32, device=device)
        some_differ, over = dims.world.max_(word).tolist()
        if some_differ:
            unequal.append(index + 1)
        if worker.rank == 0:
            means = [total / len(losses) for total in seconds.values()]
            found = {"losses": losses, "unequal": unequal, "delays": disturbance.delays, "seconds": means}
            Path(settings.result).write_text(json.dumps(found))
        if over:
            return


def same_weights(off: TrainStep, on: TrainStep) -> bool:
    """Whether this rank's shards are equal, bit for bit."""
    pairs = zip(off.model.parameters(), on.model.parameters(), strict=True)
    return all(torch.equal(a._local_tensor, b._local_tensor) for a, b in pairs)  # type: ignore[attr-defined]


def main() -> None:
    """One rank; its settings, as JSON, stand on the command line."""
    settings = StreamSettings(**json.loads(sys.argv[1]))
    backend: Any = settings.backend
    config = LaunchConfig(distributed_backend=backend, distributed_timeout_minutes=3, seed=SEED)
    run_worker(find_place(config), config, functools.partial(serve, settings))


if __name__ == "__main__":
    main()
