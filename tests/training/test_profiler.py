"""torch's profiler around the steps that were asked for, on the ranks that were asked for, with the hops' names."""

import gzip
import json
from pathlib import Path
from typing import Any

from helpers.context import context
from helpers.ranks import ranks
from helpers.training import Case, build_step

from megazpp.training.profiler import Profiler, ProfilerConfig
from megazpp.zero.config import ZeroConfig

CONFIG = ProfilerConfig(profile=True, profile_step_start=1, profile_step_end=3, profile_ranks=(0, 3))


def train_profiled(config: ProfilerConfig, folder: str, iterations: range) -> tuple[list[str], list[float], int]:
    """ZeRO++ on two nodes of two: what rank 0 said, the losses, and in how many steps somebody listened."""
    case = Case(nodes=2, zero=ZeroConfig(zeropp=True))
    step, dims = build_step(case)
    run, said = context(dims, folder)
    profiler = Profiler(config, run)
    losses, heard = [], 0
    with profiler:
        for iteration in iterations:
            with profiler.step(iteration):
                heard += bool(dims.timeline._listeners)
                losses.append(step(case.batches(iteration, dims), learning_rate=1e-2, weight_decay=0.01).loss)
    return said, losses, heard


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_profiled_ranks_leave_a_trace_with_the_hops_by_name_and_train_the_same(tmp_path):
    plain = ranks(4).run(train_profiled, ProfilerConfig(), str(tmp_path), range(1, 5))
    results = ranks(4).run(train_profiled, CONFIG, str(tmp_path), range(1, 5))
    assert [losses for _, losses, _ in results] == [losses for _, losses, _ in plain]
    assert [heard for *_, heard in plain] == [0, 0, 0, 0]
    assert [heard for *_, heard in results] == [2, 0, 0, 2]
    assert results[0][0] == [f"profile of iterations 2 to 3, rank 0 3: {tmp_path}"]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"profile-rank{rank}-iterations2-3.json.gz" for rank in (0, 3)]
    for file in files:
        names = [event["name"] for event in read(file) if event["ph"] == "X"]
        for hop in ("cross all_gather", "local all_gather", "local all_to_all", "cross all_to_all"):
            for unit in ("layers.0", "layers.1", "the rest"):  # cross hops once a step, from the queues' own threads
                assert names.count(f"{hop} {unit}") == (4 if hop == "local all_gather" else 2)
        assert names.count("compute forward") == names.count("compute optimizer") == 2
        assert any(name.startswith("aten::") for name in names)


def test_a_run_that_ends_early_or_continues_another_records_what_there_is_and_replaces_no_trace(tmp_path):
    config = ProfilerConfig(profile=True, profile_step_start=1, profile_step_end=3)
    for iteration in (3, 3, 4):
        (said, *_), _ = ranks(2).run(train_profiled, config, str(tmp_path), range(iteration, iteration + 1))
    assert said == ["--profile: iteration 2 was not reached here, nothing was recorded"]
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["profile-rank0-iterations3-3-2.json.gz", "profile-rank0-iterations3-3.json.gz"]
