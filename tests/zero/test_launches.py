"""Count the kernels that ZeRO++ launches per layer and optimizer step, which limit the speed of small batches.

One rank runs as if it were among 2 or 16 nodes x 8 ranks. The count includes every torch operation that would launch a
kernel on CUDA, and every launch of a Triton kernel. ZeRO-3's count for the same model is subtracted.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.dry_run import fake_ranks
from helpers.stream_races import simulated_streams
from helpers.tiers import slow
from helpers.training import GPT2_STYLE, Case, build_step
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megazpp.kernels import block_quant, weight_delta
from megazpp.model.config import GPTConfig
from megazpp.parallel.axis import MeshAxis
from megazpp.zero.config import PrecisionConfig, ZeroConfig

RANKS_PER_NODE = 8
BF16 = PrecisionConfig(bf16=True)
ZERO_3 = ZeroConfig(overlap_param_gather=False, overlap_grad_reduce=False)
ZEROPP, LOSSLESS = ZeroConfig(zeropp=True), ZeroConfig(zeropp=True, zero_weight_delta="lossless")


class PretendedAxis(MeshAxis):
    """A mesh axis whose other ranks do not exist: their data counts as zeros, and the collectives launch no kernels."""

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        with _disable_current_modes():
            return x.new_zeros((self.size * x.shape[0], *x.shape[1:])) if out is None else out.zero_()

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None, of: str = "") -> torch.Tensor:
        with _disable_current_modes():
            return x.new_zeros((x.shape[0] // self.size, *x.shape[1:])) if out is None else out.zero_()

    def all_to_all(self, x: torch.Tensor, *, of: str = "") -> torch.Tensor:
        with _disable_current_modes():
            return torch.zeros_like(x)

    def _all_reduce_(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        return x


class Launches(TorchDispatchMode):
    """Dispatch mode that counts kernel launches by the name of the torch operation or Triton kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        result = func(*args, **(kwargs or {}))
        if not is_view and "empty" not in func.__name__ and "detach" not in func.__name__:
            self.found[f"{func.__name__} {getattr(result, 'dtype', None)}"] += 1
        return result

    def kernel(self, name: str) -> Any:
        """Return a fake Triton kernel: `kernel[grid](...)` counts a launch and computes nothing."""

        def launched(grid: object) -> Any:
            return lambda *args, **constants: self.found.update([name])

        return type("Kernel", (), {"__getitem__": lambda kernel, grid: launched(grid)})()


def launches_of_a_step(nodes: int, model: GPTConfig, zero: ZeroConfig, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of kernel launches in the third training step, by kernel.

    The first two steps also launch kernels that run only once, so they do not count.
    """
    triton, native = block_quant.TRITON, block_quant.native
    assert triton is not None

    def both(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            getattr(triton, name)(*args, **kwargs)  # launches fake kernels, which only count
            getattr(native, name)(*args, **kwargs)  # computes the result in C

        return call

    counted, differences = SimpleNamespace(pack=both("pack"), unpack_sum=both("unpack_sum")), weight_delta.TRITON
    assert differences is not None
    launches = Launches()
    with monkeypatch.context() as patch, fake_ranks(0, nodes * RANKS_PER_NODE), simulated_streams():
        patch.setattr(block_quant, "_implementation", lambda tensor: counted)
        # counts the launches, and computes nothing
        patch.setattr(weight_delta, "_implementation", lambda tensor: differences)
        for name in ("_pack_kernel", "_unpack_sum_kernel"):
            patch.setattr(triton, name, launches.kernel(name))
        for name in ("_measure_kernel", "_start_kernel", "_place_kernel", "_find_kernel", "_decode_kernel"):
            patch.setattr(differences, name, launches.kernel(name))
        case = Case(nodes=nodes, model=model, zero=zero, global_batch=nodes * RANKS_PER_NODE, precision=BF16)
        step, dims = build_step(case)
        for axis in (dims.cross, dims.local, dims.shard):
            axis.__class__ = PretendedAxis
        batch = [case.batch(0, 0, 1)]
        for _ in range(2):
            step(batch, learning_rate=1e-3, weight_decay=0.0)
        launches.found.clear()
        with launches:
            step(batch, learning_rate=1e-3, weight_decay=0.0)
    return launches.found


def launches_per_layer(nodes: int, style: GPTConfig, zero: ZeroConfig, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of kernel launches, by kernel, that one more layer adds to a step, minus ZeRO-3's."""

    def of_a_layer(zero: ZeroConfig) -> Counter[str]:
        many, few = (
            launches_of_a_step(nodes, GPTConfig(**{**style.__dict__, "num_layers": layers}), zero, monkeypatch)
            for layers in (3, 2)
        )
        many.subtract(few)
        return many

    added = of_a_layer(zero)
    added.subtract(of_a_layer(ZERO_3))
    return +added


@pytest.mark.parametrize(("nodes", "zero"), [slow(2, ZEROPP), slow(4, LOSSLESS)])
def test_layer_of_12_parameters_launches_at_most_25_kernels(nodes, zero, monkeypatch):
    launches = launches_per_layer(nodes, GPT2_STYLE, zero, monkeypatch)
    assert launches["_pack_kernel"] == (3 if zero is ZEROPP else 2)
    assert launches["_unpack_sum_kernel"] == 4
    assert launches["_decode_kernel"] == (0 if zero is ZEROPP else 1)
    assert sum(launches.values()) <= 25, launches
