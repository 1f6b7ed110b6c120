"""How fast checkpoints are written and read, against torch.distributed.checkpoint called plainly on the same state.

    python tools/benchmarks/benchmark_checkpoint.py --hidden-size 512 --num-layers 8 --nproc 4 --samples 7

Ours is what a run does: all of --save or --load, with checksums, fsync of files and folders, renames and the tracker.
Plain is `dcp.save` and `dcp.load` of the same tensors, which fsyncs its files too. Both are called in turn in the same
processes; figures are the median of the ratios of neighbours, and the ratio of the fastest calls, which other jobs on
the machine have disturbed least. Reads are shown from the disk and from the page cache, where checksums show most
because nothing else takes time. Also shown: how long training waits with --async-save.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megazpp.checkpoint.checkpoints import Checkpoints
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.checkpoint.read import choose_source
from megazpp.checkpoint.record import RunRecord, TrainingProgress
from megazpp.checkpoint.state import TrainState
from megazpp.checkpoint.together import open_axis
from megazpp.formatting import GIGA
from megazpp.model.config import GPTConfig
from megazpp.optim.loss_scale import LossScaler
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer
from megazpp.optim.schedule import ScheduleConfig, build_schedule
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.worker import Worker
from megazpp.program import flags_of, program
from megazpp.run import Job, run_on_ranks
from megazpp.topology.cluster import Cluster
from megazpp.training.setup import ModelSpec, build_model

VOCAB = 8192


@program
def main(argv: list[str]) -> int:
    parser = flags_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--dir", default=None, help="where to write; default: a folder in the system's temporary one")
    args = parser.parse_args(argv)
    launch = LaunchConfig(nproc=args.nproc)
    return run_on_ranks(lambda: Job(find_place(launch), launch, functools.partial(measure, args)))


def measure(args: argparse.Namespace, worker: Worker) -> None:
    """One rank's part; rank 0 reports."""
    dims = ParallelDims(
        plan_dims(ParallelConfig(), Cluster(num_nodes=1, ranks_per_node=worker.world_size), zero_stage=3),
        device_type=worker.device.type,
    )
    state = build_state(args, dims, worker.device)
    folder = Path(dims.world.share_object(tempfile.mkdtemp(dir=args.dir) if worker.rank == 0 else None))
    try:
        compare(folder, state, dims, samples=args.samples)
    finally:
        dist.barrier()
        if worker.rank == 0:
            shutil.rmtree(folder)


def build_state(args: argparse.Namespace, dims: ParallelDims, device: torch.device) -> TrainState:
    """A model and moments after one step with made-up gradients."""
    sizes = {"num_layers": args.num_layers, "hidden_size": args.hidden_size}
    shape = GPTConfig(**sizes, num_attention_heads=8, max_position_embeddings=1024)
    built = build_model(ModelSpec(config=shape, vocab_size=VOCAB, seed=1), dims, device)
    optimizer = build_optimizer(list(built.model.named_parameters()), OptimizerConfig(), device)
    for parameter in built.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainState(*built, optimizer, LossScaler(1.0), dims, seed=1)


def compare(folder: Path, state: TrainState, dims: ParallelDims, *, samples: int) -> None:
    schedule = build_schedule(
        ScheduleConfig(lr=1e-3), weight_decay=0.0, train_iters=1, train_samples=None, global_batch_size=1
    )
    record = RunRecord(
        progress=TrainingProgress(),
        scaler={},
        groups=[],
        schedule=schedule.state_dict(),
        flags=vars(state.model.config) | {"optimizer": "adam", "optimizer_backend": "torch"},
        vocab_size=VOCAB,
        layout={},
    )
    axis, lines = open_axis(dims), list[str]()
    make = functools.partial(Checkpoints, state=state, record=record, axis=axis, say=lines.append)
    ours = make(CheckpointConfig(save=str(folder / "ours"), load=str(folder / "ours"), keep_last=1))
    ours.open()
    iterations, plain_saves = iter(range(1, 1000)), iter(range(1, 1000))
    plain: list[Path] = []  # the newest last

    def save_ours() -> None:
        ours.after_step(TrainingProgress(iteration=next(iterations)), last=True)

    def save_plain() -> None:
        tensors = state.tensors(optimizer=True, rng=True)
        plain.append(folder / f"plain-{next(plain_saves)}")
        dcp.save(tensors, checkpoint_id=plain[-1], process_group=axis.group)
        if dims.world.rank == 0 and len(plain) > 1:
            shutil.rmtree(plain[-2])  # ours deletes its old one too

    def load_ours() -> None:
        source = choose_source(CheckpointConfig(load=str(folder / "ours")), restarted=False)
        assert source is not None
        ours.load(source, schedule)

    def load_plain() -> None:
        tensors = state.tensors(optimizer=True, rng=True)
        dcp.load(tensors, checkpoint_id=plain[-1], process_group=axis.group)

    saves = pairs(save_ours, save_plain, samples)
    files = [path for path in folder.rglob("*") if path.is_file()]
    cold = pairs(load_ours, load_plain, samples, before=functools.partial(forget, files))
    warm = pairs(load_ours, load_plain, samples)
    ours.finish()
    waiting = make(CheckpointConfig(save=str(folder / "async"), async_save=True, keep_last=1))
    waiting.open()
    stalls = []
    for iteration in range(1, samples + 1):
        stalls.append(seconds(functools.partial(waiting.after_step, TrainingProgress(iteration=iteration), last=True)))
        waiting._finish_writing()
    waiting.finish()
    if dims.world.rank == 0:
        size = sum(path.stat().st_size for path in plain[-1].iterdir()) / GIGA
        print(f"{size:.3f} GB, {dims.world.size} ranks, torch {torch.__version__}, {samples} samples")
        for name, found in (("save", saves), ("load from disk", cold), ("load from the page cache", warm)):
            ratio = statistics.median(theirs / own for own, theirs in found)
            a, b = (min(times) for times in zip(*found, strict=True))
            print(
                f"{name}: throughput of ours / plain {ratio:.3f} (median of pairs), {b / a:.3f} (the fastest of each: "
                f"{a:.3f} s, {size / a:.3f} GB/s; plain {b:.3f} s, {size / b:.3f} GB/s)"
            )
        print(f"--async-save: training waits {statistics.median(stalls):.3f} s per save")


def forget(files: Sequence[Path]) -> None:
    """Have the next read of these files come from the disk."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pairs(
    ours: Callable[[], None], plain: Callable[[], None], samples: int, before: Callable[[], None] = lambda: None
) -> list[tuple[float, float]]:
    """Seconds of ours and of plain, in turn, after one of each that does not count; the order changes each time."""
    ours()
    plain()
    found = []
    for index in range(samples):
        if index % 2:
            second = seconds(plain, before)
            found.append((seconds(ours, before), second))
        else:
            found.append((seconds(ours, before), seconds(plain, before)))
    return found


def seconds(call: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Of a call, after `before`, that all ranks begin together and end together."""
    before()
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
