"""One rank of the part "streams": trains without overlap, and with overlap while delays and NaN fall on it.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_parts.steps import build_step, make_batches, read_config
from gpu_parts.streams import NODES, RANKS_PER_NODE, StreamSettings
from megazpp.parallel.comm_queue import CommQueue, Work
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker, run_worker, seed_everything
from megazpp.topology.cluster import Cluster
from megazpp.training.step import TrainStep

SEED, VOCAB, MICRO_BATCHES, LEARNING_RATE = 1234, 512, 2, 1e-3
DIFFERENT_STEPS = 8  # the same words again and again, so that there is something to learn
TIMEOUT_MINUTES = 3
MOST_SECONDS = 1e-3  # of a delay
CYCLES_PER_SECOND = 1.5e9
POISON_ELEMENTS = (1 << 8, 1 << 12, 1 << 18, 3 << 18, 1 << 20, 3 << 20)  # torch keeps blocks above 1 MB apart


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

        def disturbed(task: Callable[[], Any], *, after: Sequence[Work[Any]] = ()) -> Work[Any]:
            self.poison()
            self.pause()
            return submit(functools.partial(self._around, task), after=after)

        queue.submit = disturbed  # type: ignore[method-assign]

    def _around(self, task: Callable[[], Any]) -> Any:
        self.pause()
        self.poison()
        result = task()
        self.pause()
        return result

    def before_layer(self, *args: object) -> None:
        """A hook for the compute."""
        self.pause()
        self.poison()


def serve(settings: StreamSettings, worker: Worker) -> None:
    """Train, compare after every step, and let rank 0 write what came of it."""
    device = worker.device
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's backward adds in any order otherwise
    config = read_config(*settings.flags, "--tensor-model-parallel-size", str(settings.tp), use_cpu_initialization=True)
    layout = plan_dims(config.parallel, Cluster(num_nodes=NODES, ranks_per_node=RANKS_PER_NODE), zero_stage=3)
    dims = ParallelDims(layout, device_type=device.type, timeout=worker.timeout)

    def build(overlap: bool) -> TrainStep:
        seed_everything(SEED, data_rank=dims.data_rank, tp_rank=dims.tp.rank)
        zero = dataclasses.replace(config.zero, overlap_param_gather=overlap, overlap_grad_reduce=overlap)
        return build_step(config, dims, vocab_size=VOCAB, device=device, zero=zero)

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
            results[name] = step(data, learning_rate=LEARNING_RATE, weight_decay=0.01)
            if device.type == "cuda":
                torch.cuda.synchronize()
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
    settings = StreamSettings(**json.loads(sys.argv[1]))
    config = LaunchConfig(
        distributed_backend=settings.backend,  # type: ignore[arg-type]
        distributed_timeout_minutes=TIMEOUT_MINUTES,
        seed=SEED,
    )
    run_worker(find_place(config), config, functools.partial(serve, settings))


if __name__ == "__main__":
    main()
