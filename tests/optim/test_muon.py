"""Test Muon on shards against torch.optim.Muon on unsharded matrices, or on the blocks of rows that each node holds."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.sharded import full_state
from helpers.tiers import chosen
from helpers.training import (
    CPU,
    GPT2_STYLE,
    LLAMA_STYLE,
    MIXTURE_STYLE,
    Case,
    build_on_ranks,
    build_step,
    train_on_ranks,
)
from torch.distributed.tensor import distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from megazpp.kernels.formats import BlockFormat
from megazpp.optim.build import build_optimizer
from megazpp.optim.config import OptimizerConfig
from megazpp.optim.muon import newton_schulz
from megazpp.optim.muon_plan import LayerMatrix, plan_blocks, products
from megazpp.optim.optimizer import set_rates_, update_
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig
from megazpp.zero.wire import Codec, plan_message, plan_segments

STEPS, RATE, DECAY = 4, 1e-2, 0.1
MUON = OptimizerConfig(optimizer="muon")
Weights = dict[str, torch.Tensor]


def is_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.endswith("weight") and "norm" not in name


def is_split(name: str) -> bool:
    """Return True if tensor-parallel ranks split the rows of the parameter `name`."""
    return name.rpartition(".")[0].endswith(("qkv", "fc1", "gate"))


def blocks(name: str, num_rows: int, case: Case, nodes: int) -> list[torch.Tensor]:
    """Return the row indices of each block of an unsharded parameter that Muon orthogonalizes by itself on four ranks.

    Queries, keys and values are separate blocks, and so are the rows of different nodes.
    """
    rows = torch.arange(num_rows)
    if not is_matrix(name):
        return [rows]
    model, shards = case.model, 4 // case.tp // case.replicas
    own = num_rows // case.tp if is_split(name) else num_rows
    node = rows % own // -(-own // shards) * nodes // shards
    kinds = torch.tensor(([0] * (model.heads // model.query_groups) + [1, 2]) * model.query_groups)
    kind = kinds[rows // model.head_size] if "qkv" in name else 0
    return [rows[kind * nodes + node == block] for block in (kind * nodes + node).unique()]


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """Return a random gradient of an unsharded parameter.

    It depends on the name and the step, so all ranks get the same.
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 1000 + sum(map(ord, name))))


def by_torch(
    weights: Weights, case: Case, nodes: int, steps: int = STEPS, gradient: Callable[..., torch.Tensor] = gradient
) -> Weights:
    """Update every block by torch.optim.Muon in fp32, and all other parameters by AdamW; return the weights by name."""
    parts = {
        name: [(rows, torch.nn.Parameter(weight[rows])) for rows in blocks(name, len(weight), case, nodes)]
        for name, weight in weights.items()
    }
    matrices, rest = (
        [p for name in parts if is_matrix(name) == kind for _, p in parts[name]] for kind in (True, False)
    )
    config = case.optimizer
    muon = torch.optim.Muon(
        matrices,
        lr=RATE,
        weight_decay=DECAY,
        momentum=config.muon_momentum,
        nesterov=config.muon_use_nesterov,
        ns_steps=config.muon_num_ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
    groups = [{"params": [p], "weight_decay": DECAY * (p.ndim > 1)} for p in rest]
    adam = torch.optim.AdamW(groups, lr=RATE * config.muon_adam_lr_multiple, betas=(0.9, 0.999))
    for step in range(1, steps + 1):
        for name, found in parts.items():
            whole = gradient(name, weights[name].shape, step)
            for rows, p in found:
                p.grad = whole[rows]
        with pytest.MonkeyPatch.context() as patch:
            # torch.optim.Muon casts to bf16 by this method up to torch 2.14; the test turns the cast off, so that Muon
            # computes in fp32
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            # torch 2.15 and later cast to bf16 by this method, which the test turns off as well
            patch.setattr(torch.Tensor, "to", lambda tensor, **_: tensor.clone())
            muon.step()
        adam.step()
    order = {name: torch.cat([rows for rows, _ in found]).argsort() for name, found in parts.items()}
    return {name: torch.cat([p.detach() for _, p in found])[order[name]] for name, found in parts.items()}


def build(case: Case) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _, dims = build_on_ranks(case)
    return model, build_optimizer(model, case.optimizer, dims=dims, dtype=case.precision.param_dtype)


@torch.no_grad()
def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, *, bad: float | None = None) -> None:
    """Take an optimizer step with gradients that are three times too large, and that `update_` divides by 3.

    With `bad`, each gradient is multiplied by this NaN or Inf, and the step must be skipped.
    """
    for name, p in model.named_parameters():
        whole = gradient(name, p.shape, step) * (3.0 if bad is None else bad)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
    set_rates_(optimizer, learning_rate=RATE, weight_decay=DECAY)
    update_(optimizer, torch.tensor(3.0), torch.tensor(0.0 if bad is None else 1.0), iteration=step)


def train(case: Case, steps: int = STEPS) -> tuple[Weights, Weights]:
    """Train `steps` steps, and return the unsharded weights before and after, by name."""
    model, optimizer = build(case)
    first = full_state(model, optimizer)
    for step in range(1, steps + 1):
        take_step(model, optimizer, step)
    last = full_state(model, optimizer)
    return first, {name: last[name] for name in first}


# the fused query-key-value projection has 45 rows: 12 on each of three ranks and 9 on the last
FIVE_HEADS = dataclasses.replace(GPT2_STYLE, num_attention_heads=5, kv_channels=3)
SETTINGS = OptimizerConfig(
    optimizer="muon", muon_momentum=0.8, muon_use_nesterov=False, muon_num_ns_steps=3, muon_adam_lr_multiple=0.5
)
CASES = {
    "shards": Case(optimizer=MUON),
    "tp": Case(model=LLAMA_STYLE, tp=4, optimizer=MUON),
    "tp, copies": Case(model=LLAMA_STYLE, tp=2, replicas=2, optimizer=MUON),
    "tp, every setting": Case(tp=2, optimizer=SETTINGS),
    "2 nodes, llama, tp": Case(model=LLAMA_STYLE, nodes=2, tp=2, optimizer=MUON),
    "2 nodes, a copy on each": Case(nodes=2, replicas=2, optimizer=MUON),
    "shards that end inside heads": Case(model=FIVE_HEADS, nodes=2, optimizer=MUON),
    "nodes of one rank": Case(model=FIVE_HEADS, nodes=4, optimizer=MUON),
}


SLOW = ("2 nodes, llama, tp", "2 nodes, a copy on each", "shards that end inside heads")


@pytest.mark.parametrize("case", chosen(CASES, "tp, every setting", slow=SLOW))
def test_muon_equals_torch_on_whole_matrices_or_rows_of_nodes(case):
    first, last = ranks(4).run(train, case)[0]
    expected = by_torch(first, case, max(1, case.nodes // case.replicas))
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ep", [1, 2])
def test_each_expert_is_orthogonalized_whole_whatever_the_layout(ep):
    """Check one Muon step of the three matrices of each expert, for any layout.

    F is the hidden size of an expert, and H the hidden size of the model. Gate and up are [F, H]. Down is stored as
    [F, H], and scaled like the matrix [H, F] as which it is used.
    """
    config = OptimizerConfig(optimizer="muon", muon_scale_mode="shape_scaling")
    case = Case(model=MIXTURE_STYLE, nodes=2, ep=ep, optimizer=config)
    first, last = ranks(4).run(train, case, 1)[0]
    for name in ("gate", "fc1", "fc2"):
        key = f"layers.0.mlp.experts.{name}"
        experts = gradient(key, first[key].shape, 1).chunk(4)
        found = torch.cat([newton_schulz(g.unsqueeze(0), config.muon_num_ns_steps)[0] for g in experts])
        rows, columns = reversed(experts[0].shape) if name == "fc2" else experts[0].shape
        expected = first[key] * (1.0 - RATE * DECAY) - RATE * config.scale(rows, columns) * found
        torch.testing.assert_close(last[key], expected, rtol=0, atol=1e-6)


def test_update_scales_equal_megatrons():
    modes = {"spectral": math.sqrt(8), "unit_rms_norm": math.sqrt(2), "shape_scaling": math.sqrt(2)}
    for mode, expected in modes.items():
        config = OptimizerConfig(optimizer="muon", muon_scale_mode=mode, muon_extra_scale_factor=3.0)
        assert config.scale(8, 4) == pytest.approx(3.0 * expected)
    assert dataclasses.replace(config, muon_scale_mode="shape_scaling").scale(4, 8) == 3.0


def in_8_bits(whole: torch.Tensor, dim: int, tp: int, shards: int) -> torch.Tensor:
    """Quantize each shard of an unsharded parameter to 8 bits, and return the parameter after dequantization."""
    found = []
    for of_tp in whole.chunk(tp, dim):
        segments = plan_segments([("", tuple(of_tp.shape))], shards)
        codec = Codec(plan_message(segments, BlockFormat(8, 256), exact_itemsize=4), torch.float32)
        flat = torch.zeros(1, shards, segments[0].size)
        flat.view(-1)[: of_tp.numel()] = of_tp.flatten()
        messages, result = codec.empty(1, shards, device=CPU), torch.empty_like(flat)
        codec.pack(flat, messages)
        codec.unpack(messages, result)
        found.append(result.view(-1)[: of_tp.numel()].view_as(of_tp))
    return torch.cat(found, dim)


@pytest.mark.slow
def test_full_steps_use_whole_matrices_gathered_in_8_bits():
    for tp in (1, 2):
        case = Case(model=LLAMA_STYLE, nodes=2, tp=tp, optimizer=dataclasses.replace(MUON, muon_full_interval=1))

        def sent(name, shape, step, tp=tp):
            update = gradient(name, shape, step)
            if not is_matrix(name):
                return update
            return in_8_bits(update.lerp(0.05 * update, 0.95), 0 if is_split(name) else 1, tp, 4 // tp)

        first, last = ranks(4).run(train, case, 1)[0]
        without_momentum = dataclasses.replace(case, optimizer=dataclasses.replace(MUON, muon_momentum=0.0))
        expected = by_torch(first, without_momentum, nodes=1, steps=1, gradient=sent)
        torch.testing.assert_close(last, expected, rtol=0, atol=1e-6)


def crossed(case: Case, optimizer: OptimizerConfig) -> list[int]:
    """Train two steps; return the bytes that this rank sends to other nodes in each step."""
    step, dims = build_step(dataclasses.replace(case, optimizer=optimizer))
    found = [dims.counter.sent_bytes("cross")]
    for iteration in (1, 2):
        step(case.batches(iteration, dims), learning_rate=RATE, weight_decay=DECAY, iteration=iteration)
        found.append(dims.counter.sent_bytes("cross"))
    return [after - before for before, after in itertools.pairwise(found)]


@pytest.mark.slow
def test_muon_crosses_nodes_only_at_intervals_by_a_byte_per_element():
    model = dataclasses.replace(GPT2_STYLE, hidden_size=64, ffn_hidden_size=256)
    case = Case(model=model, nodes=2, zero=ZeroConfig(zeropp=True), seq_length=4)
    every_second = dataclasses.replace(MUON, muon_full_interval=2)
    adam, never, at_times = (ranks(4).run(crossed, case, each)[0] for each in (OptimizerConfig(), MUON, every_second))
    assert never == adam
    matrices = model.layers * model.hidden * (4 * model.hidden + 2 * model.ffn_size)
    for index, (more, without) in enumerate(zip(at_times, never, strict=True), 1):
        # `sent` is the number of bytes that a full step sends per matrix element of this rank, in addition to a run
        # without full steps: one byte, and a share of the scales. Every second step is a full step.
        sent = (more - without) / (matrices / 4)
        assert sent == 0 if index % 2 else 1.0 < sent < 1.02


def skip(case: Case) -> None:
    """Check that a step with NaN or Inf gradients changes no bit of weights and optimizer state.

    The next step must be the same as if the skipped step had not taken place.
    """
    ends = []
    for bad in (None, math.nan, math.inf):
        model, optimizer = build(case)
        take_step(model, optimizer, 1)
        before = full_state(model, optimizer)
        if bad is not None:
            take_step(model, optimizer, 2, bad=bad)
            torch.testing.assert_close(full_state(model, optimizer), before, rtol=0, atol=0)
        take_step(model, optimizer, 2)
        ends.append(full_state(model, optimizer))
    torch.testing.assert_close(ends[1:], ends[:1] * 2, rtol=0, atol=0)
    moments = {name for state in optimizer.state.values() for name in state}
    assert moments == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.slow
def test_skipped_step_leaves_weights_and_momentum_unchanged():
    ranks(2).run(skip, Case(nodes=2, optimizer=MUON))


TRAININGS = {
    "stage 0, tp": Case(stage=0, tp=4, micro_batches=2),
    "stage 1, micro-batches": Case(stage=1, micro_batches=4),
    "stage 2, tp, sequence": Case(model=LLAMA_STYLE, stage=2, tp=2, sequence_parallel=True, micro_batches=2),
    "stage 3, context": Case(model=LLAMA_STYLE, stage=3, cp=2),
}


@pytest.mark.parametrize("case", chosen(TRAININGS, slow=("stage 0, tp", "stage 3, context")))
def test_muon_training_matches_one_rank(case):
    case = dataclasses.replace(case, optimizer=MUON, steps=STEPS)
    (expected,) = ranks(1).run(train_on_ranks, Case(model=case.model, optimizer=MUON, steps=STEPS))
    for result in ranks(4).run(train_on_ranks, case):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert expected["loss"][-1] < 0.95 * expected["loss"][0]


def multiplications(case: Case) -> int:
    """Return the number of scalar multiplications in this rank's matrix products of one optimizer step."""
    model, optimizer = build(case)
    with FlopCounterMode(display=False) as counter:
        take_step(model, optimizer, 1)
    return counter.get_total_flops() // 2


@pytest.mark.slow
def test_each_of_four_ranks_does_about_a_quarter_of_the_work():
    alone, shared = (ranks(4).run(multiplications, Case(stage=stage, optimizer=MUON)) for stage in (0, 2))
    assert set(alone) == {sum(shared)}
    assert max(shared) < 0.35 * sum(shared)


def test_newton_schulz_gives_singular_values_near_one_or_zeros():
    x = torch.randn(3, 7, 31, generator=torch.Generator().manual_seed(0))
    x[1] = 0.0
    for each in (x, x.mT):
        values = torch.linalg.svdvals(newton_schulz(each, 5))
        assert ((values[[0, 2]] - 0.95).abs() < 0.35).all()
        assert (values[1] == 0).all()


def test_owners_share_a_nodes_work_and_cover_every_row():
    """In a node, no rank has more than 1.1 times the mean work. All nodes together orthogonalize each row once."""
    shapes = {
        "qkv": ((120, 64), 0, (16, 8, 8)),
        "proj": ((64, 32), 1, (64,)),
        "fc1": ((128, 64), 0, (128,)),
        "fc2": ((64, 128), 1, (64,)),
    }
    matrices = [LayerMatrix(f"layers.{index}.{name}", *shapes[name]) for index in range(6) for name in shapes]
    config, cluster = ParallelConfig(tensor_model_parallel_size=2), Cluster(num_nodes=2, ranks_per_node=8)
    layout = plan_dims(config, cluster, zero_stage=3)
    for nodes in ([0], [1], [0, 1]):
        work, rows = [0] * 8, [0] * len(matrices)
        for block in itertools.chain(*plan_blocks(matrices, layout, nodes)):
            work[block.owner] += sum(m * n * k for m, n, k in products(*block.shape))
            rows[block.parameter] += sum(map(sum, block.counts))
        assert max(work) < 1.1 * sum(work) / 8
        if len(nodes) == 2:
            assert rows == [matrix.shape[0] for matrix in matrices]


def test_invalid_muon_flags_are_refused():
    rows = [
        ({"muon_momentum": 1.0}, "--muon-momentum 1.0 is not in [0, 1)"),
        ({"muon_num_ns_steps": 0}, "--muon-num-ns-steps 0 is not positive"),
        ({"muon_full_interval": -1}, "--muon-full-interval -1 is negative"),
        ({"optimizer_backend": "apex"}, "--optimizer-backend apex supports only --optimizer adam, not muon"),
    ]
    assert not not_refused(rows, lambda config: OptimizerConfig(**{"optimizer": "muon"} | config))
