"""Test training states in host memory.

Training is bit-identical to training with states on the device. Copies are counted. Unsupported flags, and too little
host memory, raise errors before any allocation.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.host_states import train, train_with_events
from helpers.ranks import ranks
from helpers.tiers import chosen
from helpers.training import LLAMA_STYLE, MIXTURE_STYLE, Case

from megazpp.base.memory import MemoryBytes
from megazpp.host_states import memory
from megazpp.host_states.memory import HostMemory
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import PrecisionConfig, ZeroConfig
from megazpp.zero.plan import plan_comm

ROOT = Path(__file__).parents[2]
LOSSLESS = ZeroConfig(zeropp=True, zero_weight_delta="lossless")
INT8 = ZeroConfig(zeropp=True, zero_weight_delta="none")
BF16 = PrecisionConfig(bf16=True)
FP16 = PrecisionConfig(fp16=True, accumulate_allreduce_grads_in_fp32=True)
SUMS = {"zero_offload_partial_sums": True}
TP = {"tp": 2, "sequence_parallel": True, "ranks": 4}
CASES: dict[str, dict[str, Any]] = {
    "lossless": {},
    "ZeRO-3": {"zero": ZeroConfig(), "nodes": 1, "micro_batches": 2},
    "ZeRO-3, fp32": {"zero": ZeroConfig(), "precision": PrecisionConfig()},
    "ZeRO-3, bf16 sums": {"zero": ZeroConfig(), "precision": PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)},
    "4 ranks": {"ranks": 4},
    "int8, fp16": {"zero": INT8, "precision": FP16, "micro_batches": 4},
    "no overlap": {"zero": dataclasses.replace(LOSSLESS, overlap_param_gather=False, overlap_grad_reduce=False)},
    "no hpZ": {"zero": ZeroConfig(zeropp=True, zero_hpz_partition_size="1")},
    "every micro-batch": {"zero": dataclasses.replace(INT8, zero_cross_every_microbatch=True)},
    "bf16 sums": {"zero": INT8, "precision": PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)},
    "sums": {"flags": SUMS, "micro_batches": 4},
    "sums in bf16": {"flags": SUMS, "zero": dataclasses.replace(INT8, zero_accumulate_in_bf16=True)},
    "tp, lossless": TP,
    "tp, ZeRO-3": {"zero": ZeroConfig(), **TP},
    "one rank": {"zero": ZeroConfig(), "nodes": 1, "ranks": 1},
    "one rank, fp32": {
        "zero": ZeroConfig(),
        "nodes": 1,
        "ranks": 1,
        "precision": PrecisionConfig(),
        "micro_batches": 1,
    },
    "experts": {"model": MIXTURE_STYLE, "ep": 2, "ranks": 4},
}


def both(function: Any, case: Case, world: int, **flags: bool) -> tuple[list[Any], list[Any]]:
    """Run a function on ranks twice; return (results with device states, results with states in host memory).

    `flags` are further fields of ZeroConfig for the second run.
    """
    assert case.zero is not None
    offloaded = dataclasses.replace(case, zero=dataclasses.replace(case.zero, optimizer_cpu_offload=True, **flags))
    return ranks(world).run(function, case), ranks(world).run(function, offloaded)


SLOW = (
    *("ZeRO-3, fp32", "ZeRO-3, bf16 sums", "4 ranks", "int8, fp16", "no overlap", "no hpZ", "every micro-batch"),
    *("sums", "sums in bf16", "tp, lossless", "experts"),
)


@pytest.mark.parametrize("setting", chosen(CASES, "lossless", "one rank", slow=SLOW))
def test_training_with_states_in_host_memory_is_bit_identical(setting):
    given = {"model": LLAMA_STYLE, "nodes": 2, "micro_batches": 2, "precision": BF16, "zero": LOSSLESS, **setting}
    world, flags = given.pop("ranks", 2), given.pop("flags", {})
    for plain, offloaded in zip(*both(train, Case(steps=3, **given), world, **flags), strict=True):
        for what in ("steps", "states", "sent"):
            assert offloaded[what] == plain[what], what


def test_skipped_steps_and_evaluations_are_bit_identical_and_copies_are_counted():
    """Train with a second update that the device skips, and an evaluation after each step, with both places of states.

    Results must be bit-identical, and the bytes over PCIe equal the documented copies.
    """
    case = Case(model=LLAMA_STYLE, nodes=2, micro_batches=2, steps=3, precision=BF16, zero=LOSSLESS)
    for plain, offloaded in zip(*both(train_with_events, case, 2), strict=True):
        copied = offloaded.pop("copied")
        assert plain.pop("copied") == {}
        assert offloaded == plain
        # Per step, a rank copies gradients to the host, then weights, gradients and both moments to the device, then
        # weights and moments back. It copies weights to the device for their first use and after each step as well.
        element, steps = 4 * offloaded["elements"], 3
        assert copied == {"upload": (4 * steps + 1 + steps) * element, "download": (1 + 3) * steps * element}


# ---- rejections before anything is allocated ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "parallel", "message"),
    [
        ({"zero_stage": 2}, {}, "--zero-stage 3, the default, not 2"),
        ({"use_distributed_optimizer": True}, {}, "not 1"),
        ({}, {"hsdp": True}, "2 replicas"),
    ],
)
def test_unsupported_layouts_are_refused_by_flag(zero, parallel, message):
    config = ZeroConfig(optimizer_cpu_offload=True, **zero)
    layout = plan_dims(
        ParallelConfig(allow_cp_across_nodes=True, **parallel),
        Cluster(num_nodes=2, ranks_per_node=2) if "hsdp" in parallel else Cluster(num_nodes=1, ranks_per_node=4),
        zero_stage=config.stage,
    )
    with pytest.raises(ValueError, match=f"--optimizer-cpu-offload .*{message}"):
        plan_comm(config, layout, torch.bfloat16)


def test_too_little_host_memory_is_an_error_with_its_numbers_before_any_allocation():
    with (
        mock.patch.object(HostMemory, "num_bytes", 73 * 10**9),
        mock.patch.object(memory, "host_memory", return_value=MemoryBytes(10**12, 512 * 10**9)),
        mock.patch.object(HostMemory, "_new_queue") as allocates,
        pytest.raises(ValueError, match=r"--optimizer-cpu-offload needs 584.0 GB .* 8 ranks .* 512.0 GB are available"),
    ):
        HostMemory().allocate_states(torch.device("cpu"), num_local=8)
    assert not allocates.called


def test_the_device_is_not_taken_from_a_parameter():
    """Check that only the files in `allowed` take the compute device from a parameter.

    With training states in host memory, parameters are on the CPU, although the GPU computes. Code for `megazpp.zeropp`
    is allowed to do so, because models of other programs are on their compute device.
    """
    allowed = {"megazpp/zero/sharding.py", "megazpp/drop_in/wrap.py", "megazpp/model/gpt.py"}
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "megazpp").rglob("*.py")
        if re.search(r"next\([^)]*parameters\(\)\)\.device|weight\.device\b|parameters\(\)\)\.is_c", path.read_text())
    }
    assert found <= allowed
