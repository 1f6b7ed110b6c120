"""Compare `megazpp.zeropp` with plain FSDP2 on mixtures of experts.

The experts are sharded over another mesh than the other layers.
"""

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from drop_in.test_like_fsdp2 import Adapted
from helpers.ranks import ranks
from helpers.tiers import nightly, slow
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

import megazpp
from megazpp.drop_in.units import find_program_units

VOCAB, WIDTH, HIDDEN, EXPERTS, RANKS = 61, 32, 24, 8, 4
EXACT = {"zero_weight_bits": 16, "zero_gradient_bits": (16, 16), "zero_error_feedback": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "exact": EXACT,
    "default": {"zero_error_feedback": False},
    "feedback": {"zero_error_feedback": True},
    "lossless": {"zero_weight_delta": "lossless", "zero_gradient_bits": (16, 16), "zero_error_feedback": False},
}


class GatherTokens(torch.autograd.Function):
    """Gather the tokens of all expert-parallel ranks; the main thread calls the collectives in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(gradient := gradient.clone(), group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class SumTokens(torch.autograd.Function):
    """Sum the experts' outputs over all expert-parallel ranks, and return the sums of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        dist.all_reduce(x := x.clone(), group=group)
        return x.chunk(group.size())[group.rank()].clone()  # FSDP2 warns if a module returns a view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """Experts that are split over expert-parallel ranks; a rank skips its experts without tokens."""

    mesh: DeviceMesh  # mesh of one dim over the expert-parallel ranks

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 6)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor, choice: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        group = self.mesh.get_group()
        x, weight = GatherTokens.apply(x, group), GatherTokens.apply(weight, group)
        parts = [torch.empty_like(choice) for _ in range(group.size())]
        dist.all_gather(parts, choice, group=group)
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        # The zeros give all ranks the same autograd graph with the same collectives, even without tokens for a rank's
        # experts
        total, choice = 0.0 * (x + weight), torch.cat(parts)
        for number in range(len(up)):
            mine = choice == group.rank() * len(up) + number
            if mine.any():
                y = torch.relu(x[mine] @ up[number]) @ down[number]
                total = total.index_put((mine.nonzero()[:, 0],), weight[mine] * y)
        return SumTokens.apply(total, group)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.dense(self.norm(x)))
        flat = x.flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        return x + self.experts(flat, choice, weight.unsqueeze(-1)).view_as(x)


class Mixture(nn.Module):
    checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.output(x)


def use_local(module: nn.Module) -> None:
    """Let a module compute with its local tensors, as in torchtitan's modules with DTensors on all mesh dims."""
    forward = module.forward

    def call(*args: Any) -> Any:
        """Run the module's own forward with local tensors as parameters; FSDP2 sums their gradients over data ranks."""
        own = dict(module.named_parameters(recurse=False))
        parts = {name: [Partial(), *own[name].placements[1:]] for name in own}  # all tp ranks have the same gradient
        whole = {name: own[name].to_local(grad_placements=parts[name]) for name in own}
        with _reparametrize_module(module, whole):
            return forward(*args)

    module.forward = call  # type: ignore[method-assign]


@functools.cache
def mesh_of(**dims: int) -> DeviceMesh:
    """Return the mesh of all ranks with these dims and sizes, made once per process.

    `fully_shard` compares meshes by identity.
    """
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def wrap(model: Mixture, recipe: str, ep: int, tp: int = 1, **fsdp: Any) -> None:
    """Shard the mixture as a framework shards its models.

    Args:
        model: unsharded mixture.
        recipe: "apart" for transformers, which calls `fully_shard` for the experts; "together" for torchtitan with
            `partial_dtensor`; "spmd" for torchtitan's default, `spmd_types`, where all parameters are DTensors on all
            mesh dims.
        ep: number of expert-parallel ranks.
        tp: number of tensor-parallel ranks, which split the dense layers of the blocks.
        fsdp: further arguments of `fully_shard`.
    """
    size = dist.get_world_size()
    whole, sparse = mesh_of(fsdp=size // tp, **({"tp": tp} if tp > 1 else {})), mesh_of(efsdp=size // ep, ep=ep)
    dense = whole["fsdp"] if tp > 1 and recipe != "spmd" else whole
    if recipe == "spmd":
        from torch.distributed.fsdp import DataParallelMeshDims

        fsdp["dp_mesh_dims"] = DataParallelMeshDims(shard="fsdp")
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                mesh, placed = (
                    (sparse, [Replicate(), Shard(0)])
                    if isinstance(module, Experts)
                    else (dense, [Replicate()] * dense.ndim)
                )
                split = distribute_tensor(parameter.detach(), mesh, placed)
                setattr(module, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
            if next(module.parameters(recurse=False), None) is not None:
                use_local(module)
    for block in model.blocks:
        experts = block.experts
        if dense is not whole:
            parallelize_module(block, whole["tp"], {"dense": ColwiseParallel(output_layouts=Replicate())})
        experts.mesh = sparse["ep"]
        for name, parameter in list(experts.named_parameters()) if recipe != "spmd" else ():
            split = distribute_tensor(parameter.detach(), sparse["ep"], [Shard(0)])
            setattr(experts, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        if recipe == "apart":
            fully_shard(experts, mesh=sparse["efsdp"], **fsdp)
            fully_shard(block, mesh=dense, **fsdp)
        else:
            from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

            of_experts = set(experts.parameters())
            info = {True: FSDPMeshInfo(sparse["efsdp"], shard_mesh_dim=0), False: FSDPMeshInfo(dense, shard_mesh_dim=0)}
            if recipe == "spmd":
                from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

                info = {True: _get_mesh_info(sparse, DataParallelMeshDims(shard="efsdp"))}
                info[False] = _get_mesh_info(dense, fsdp["dp_mesh_dims"])

            def place(parameter: nn.Parameter, of: Any = of_experts, info: Any = info) -> Any:
                return ShardPlacementResult(Shard(0), info[parameter in of])

            fully_shard(block, mesh=dense, shard_placement_fn=place, **fsdp)
    fully_shard(model, mesh=dense, **fsdp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            several = recipe != "apart" or not isinstance(module, Experts) or ep < RANKS
            # Do not force sums for units on one rank, because FSDP2 would then divide their gradients twice
            module.set_force_sum_reduction_for_comms(several)


def clip(model: nn.Module) -> None:
    """Clip the gradients by the norm of all of them; torch's `clip_grad_norm_` cannot span two meshes."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [get_total_norm([p.grad for p in some]).full_tensor() for some in by_mesh.values()]
    for some in by_mesh.values():
        clip_grads_with_norm_(some, 0.5, torch.linalg.vector_norm(torch.stack(norms)))


def build(kind: str | None, case: dict[str, Any]) -> tuple[Any, Any, torch.optim.Optimizer]:
    model: Any = Mixture()
    model.checkpointing = case.get("checkpointing", False)
    if case.get("lora"):  # LoRA freezes all weights but its adapters
        model.requires_grad_(False)
        for block in model.blocks:
            block.dense, block.router = Adapted(block.dense), Adapted(block.router)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not any(part in name for part in case.get("frozen", ())))
    fsdp = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if case.get("bf16") else {}
    wrap(model, case.get("recipe", "apart"), case.get("ep", 2), case.get("tp", 1), **fsdp)
    handle = None
    if kind is not None:
        zero = megazpp.ZeroConfig(zeropp=True, **CONFIGS[kind])
        handle = megazpp.zeropp(model, ranks_per_node=case.get("ranks_per_node", 2), config=zero)
    return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def steps(model: Any, handle: Any, optimizer: torch.optim.Optimizer, case: dict[str, Any], count: range) -> list[float]:
    """Train the steps whose numbers are in `count`, and return the loss of each micro-batch.

    Random tokens follow from the numbers of the step, the micro-batch and the data rank. `handle` is None for plain
    FSDP2. Entries of `case` that matter here:
        accumulate: micro-batches per step.
        signal: "sync" or "accumulate": the way to announce a step's last backward.
        compile: True to compile the model.
        idle: True if all tokens are equal, so that some experts get no tokens.
        tp: ranks that get the same data.
    """
    losses, accumulate = [], case.get("accumulate", 1)
    call = torch.compile(model, backend="eager") if case.get("compile") else model
    for step in count:
        for number in range(accumulate):
            last = number == accumulate - 1
            if case.get("signal") == "sync":
                model.set_requires_gradient_sync(last)
            data_rank = dist.get_rank() // case.get("tp", 1)
            generator = torch.Generator().manual_seed(RANKS * (accumulate * step + number) + data_rank)
            ids = torch.randint(VOCAB, (2, 17), generator=generator)
            ids = torch.full_like(ids, 7) if case.get("idle") else ids
            waits = case.get("signal") == "accumulate" and handle is not None and not last
            with handle.accumulate() if waits else nullcontext():
                logits = call(ids[:, :-1]).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) / RANKS / accumulate
                loss.backward()
            losses.append(loss.item())
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def like_fsdp2(case: dict[str, Any], tolerance: float) -> None:
    results = []
    for kind in (None, "exact"):
        model, handle, optimizer = build(kind, case)
        losses = torch.tensor(steps(model, handle, optimizer, case, range(2)))
        results.append({"losses": losses, **whole(model)})
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
    assert handle.counter.sent_bytes("cross") > 0 or case.get("ranks_per_node") == dist.get_world_size()


# Only torch 2.13 and newer can have parameters on several meshes in one unit
RECIPES = ("apart", "together") if hasattr(torch.distributed.fsdp, "DataParallelMeshDims") else ("apart",)


@pytest.mark.parametrize("recipe", [*map(nightly, RECIPES[:-1]), RECIPES[-1]])
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ({"accumulate": 2, "signal": "sync"}, 1e-5),
        nightly({"accumulate": 2, "signal": "accumulate"}, 1e-5),
        nightly({"frozen": ("experts",)}, 1e-5),
        nightly({"compile": True}, 1e-5),
        nightly({"ranks_per_node": 4}, 1e-5),
        slow({"ranks_per_node": 4, "ep": 4}, 1e-5),
        nightly({"tp": 2, "ep": 1}, 1e-5),
        nightly({"ranks": 8, "ranks_per_node": 4, "tp": 4, "ep": 2}, 1e-5),
    ],
    ids=str,
)
def test_experts_train_as_in_plain_fsdp2(case, tolerance, recipe):
    """ZeRO++ sums gradients in another order than plain FSDP2, which the tolerance covers."""
    ranks(case.get("ranks", RANKS)).run(like_fsdp2, {**case, "recipe": recipe}, tolerance)


@pytest.mark.slow
@pytest.mark.skipif(len(RECIPES) == 1, reason="needs torch 2.13")
@pytest.mark.parametrize(
    "case",
    [
        {"accumulate": 2, "signal": "accumulate", "checkpointing": True, "lora": True},
        {"accumulate": 2, "idle": True, "frozen": ("experts.up", "router", "words", "norm")},
        {"tp": 2, "ep": 1, "frozen": ("experts",)},
        nightly({"compile": True}),
    ],
    ids=str,
)
def test_experts_train_as_in_plain_fsdp2_with_parameters_on_all_mesh_dims(case):
    """Compare with plain FSDP2 if all parameters are DTensors on all mesh dims, as in torchtitan's `spmd_types`."""
    ranks(RANKS).run(like_fsdp2, {**case, "recipe": "spmd"}, 1e-5)


def states_of_units(recipe: str) -> None:
    model = build(None, {"recipe": recipe})[0]
    units = find_program_units(model)
    for gather in (False, True, False):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard() if gather else module.reshard()
        assert [(unit.is_sharded, unit.is_gathered) for unit in units] == [(not gather, gather)] * len(units)


@pytest.mark.parametrize("recipe", [*RECIPES, *(["spmd"] if len(RECIPES) > 1 else [])])
def test_units_of_dtensors_on_all_mesh_dims_know_if_they_are_gathered(recipe):
    """Check `is_sharded` and `is_gathered` of units before and after `unshard` and `reshard`.

    In the recipe "spmd", gathered and sharded parameters are DTensors on the same mesh. So neither types nor meshes
    tell whether a unit is gathered.
    """
    ranks(RANKS).run(states_of_units, recipe)


def crossed_bytes(kind: str, case: dict[str, Any]) -> tuple[int, list[str]]:
    model, handle, optimizer = build(kind, case)
    losses = steps(model, handle, optimizer, case, range(2))
    assert all(loss < 1.2 for loss in losses)
    return handle.counter.sent_bytes("cross"), sorted({axis for _, axis, _ in handle.counter.table()})


def test_shards_of_experts_cross_nodes_once_per_step():
    """Each rank sends its quarter of the parameters to the other node twice per step: as weights and as gradients."""
    micro_batches = ranks(RANKS).run(crossed_bytes, "exact", {"accumulate": 3, "signal": "accumulate"})
    default = ranks(RANKS).run(crossed_bytes, "default", {})
    parameters = sum(parameter.numel() for parameter in Mixture().parameters())
    for (sent, axes), (quantized, _) in zip(micro_batches, default, strict=True):
        # Each rank sends weights and gradients in fp32 in 2 steps. The tolerance covers padding, and 16 bytes of flags
        # in each message with gradients. A flag says whether a parameter has a gradient.
        assert sent == pytest.approx(2 * 2 * 4 * parameters / RANKS, rel=0.03)
        assert quantized < sent / 4
        assert not any("experts" in axis for axis in axes)


def resume(folder: str, kind: str, recipe: str) -> None:
    """Check that a new run repeats the losses of a run whose checkpoint and state of ZeRO++ of step 2 it has loaded."""
    case = {"recipe": recipe, "bf16": True}
    run = build(kind, case)
    steps(*run, case, range(2))
    dcp.save(dict(enumerate(get_state_dict(run[0], run[2]))), checkpoint_id=folder)
    run[1].save(folder)
    expected, again = steps(*run, case, range(2, 4)), build(kind, case)
    again[1].load(folder)
    state = dict(enumerate(get_state_dict(again[0], again[2])))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(again[0], again[2], model_state_dict=state[0], optim_state_dict=state[1])
    assert steps(*again, case, range(2, 4)) == expected


@pytest.mark.slow
def test_training_of_experts_resumes_bit_for_bit(tmp_path):
    ranks(RANKS).run(resume, str(tmp_path), "lossless", RECIPES[-1])


def resumed(kind: str | None, case: dict[str, Any], folder: str, *, trained: bool = False) -> dict[str, torch.Tensor]:
    """Resume from a checkpoint, train two steps, and return their losses and the weights after them.

    If `trained` is True, the model has trained on other data before, so all of its states differ from the checkpoint's.
    It then also loads the saved state of ZeRO++, which belongs to another expert-parallel degree. If `trained` is
    False, the model and the state of ZeRO++ are new.
    """
    model, handle, optimizer = build(kind, case)
    if trained:
        steps(model, handle, optimizer, case, range(7, 9))
        handle.load(folder)
    state = dict(enumerate(get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    losses = torch.tensor(steps(model, handle, optimizer, case, range(2, 4)))
    return {"losses": losses, **whole(model)}


def resume_with_another_degree(
    folder: str, kind: str, recipe: str, saved_ep: int, ep: int, ranks_per_node: int
) -> None:
    case = {"bf16": kind != "exact", "recipe": recipe}
    model, handle, optimizer = build(kind, {**case, "ep": saved_ep})
    steps(model, handle, optimizer, {**case, "ep": saved_ep}, range(2))
    dcp.save(dict(enumerate(get_state_dict(model, optimizer))), checkpoint_id=folder)
    handle.save(folder)
    case |= {"ep": ep, "ranks_per_node": ranks_per_node}
    fresh = resumed(kind, case, folder)
    torch.testing.assert_close(resumed(kind, case, folder, trained=True), fresh, rtol=0, atol=0)
    if kind == "exact":  # the tolerance is for ZeRO++'s sums, which have another order than plain FSDP2's
        torch.testing.assert_close(fresh, resumed(None, case, folder), rtol=1e-5, atol=1e-5)
    if kind == "lossless":
        torch.testing.assert_close(fresh, resumed("exact", case, folder), rtol=0, atol=0)


SPMD = "spmd" if len(RECIPES) > 1 else "apart"


@pytest.mark.parametrize(
    ("kind", "recipe", "saved_ep", "ep", "ranks_per_node"),
    [
        *(nightly("exact", *change) for change in (("apart", 2, 1, 2), (SPMD, 2, 4, 4))),
        slow("lossless", "apart", 1, 2, 2),
        slow("feedback", SPMD, 2, 4, 4),
    ],
)
def test_training_of_experts_resumes_with_another_degree(kind, recipe, saved_ep, ep, ranks_per_node, tmp_path):
    """Lossless deltas and error feedback start anew, while weights and moments come from the checkpoint."""
    ranks(RANKS).run(resume_with_another_degree, str(tmp_path), kind, recipe, saved_ep, ep, ranks_per_node)


def on_three_meshes(model: Mixture) -> None:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    fully_shard(model.blocks[0], mesh=pairs["a"])
    fully_shard(model.blocks[1], mesh=pairs["b"])
    fully_shard(model)


def across_nodes(model: Mixture) -> None:
    wrap(model, "apart", ep=4)


def with_ep_outermost(model: Mixture) -> None:
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    order = DeviceMesh("cpu", sparse.mesh.T.contiguous(), mesh_dim_names=("efsdp", "ep"))
    for block in model.blocks:
        for name, parameter in list(block.experts.named_parameters()):
            setattr(block.experts, name, nn.Parameter(distribute_tensor(parameter.detach(), order["ep"], [Shard(0)])))
        fully_shard(block.experts, mesh=order["efsdp"])
    fully_shard(model)


def refuse() -> None:
    refused: dict[str, Callable[[Mixture], None]] = {
        "expert parallelism across nodes is not supported: experts are split over 4 ranks": across_nodes,
        "allows one more mesh of all ranks for experts": on_three_meshes,
        "expert-parallel dim last": with_ep_outermost,
    }
    for message, make in refused.items():
        make(model := Mixture())
        with pytest.raises(ValueError, match=re.escape(message)):
            megazpp.zeropp(model, ranks_per_node=2)


def test_unsupported_meshes_of_experts_are_rejected():
    ranks(RANKS).run(refuse)
