"""Muon on shards steps like torch.optim.Muon on whole matrices, and by blocks like a rule of twenty lines."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.ranks import ranks
from helpers.tiers import pairwise
from helpers.training import CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_on_ranks
from torch.distributed.tensor import distribute_tensor

from megazpp.model.config import GPTConfig
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer, build_orthogonalizer, set_rates_, update_

STEPS, RATE, DECAY = 20, 1e-2, 0.1
MUON = OptimizerConfig(optimizer="muon")
STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}


def polar(x: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's iteration (torch/optim/_muon.py), in the format of x."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def parts_of(name: str, model: GPTConfig) -> list[list[int]]:
    """The rows, or groups of rows, of a parameter that are matrices of their own: queries, keys, values."""
    if "qkv" not in name:
        return [[]]
    per_group, size = model.heads // model.query_groups, model.head_size
    kinds = ([0] * per_group + [1, 2]) * model.query_groups
    return [[row for row in range(len(kinds) * size) if kinds[row // size] == kind] for kind in range(3)]


def block_of(row: int, rows: int, case: Case, world: int, split: bool) -> int:
    """The node that has a row of a whole matrix, whose dim 0 tp has split or not."""
    shards = world // case.tp // case.replicas
    own = rows // case.tp if split else rows
    return row % own // -(-own // shards) * case.nodes // shards


def reference(weights: dict[str, torch.Tensor], case: Case, *, world: int = 1, blocks: int = 1) -> None:
    """Train whole weights in place."""
    momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    others = [torch.nn.Parameter(weights[name]) for name in weights if not is_matrix(name)]
    adam = torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY, eps=1e-8)
    for group in (adam.param_groups,):
        group[:] = [{**group[0], "params": [p], "weight_decay": DECAY * (p.ndim > 1)} for p in others]
    for step in range(1, STEPS + 1):
        grads = {name: gradient(name, weights[name], step) for name in weights}
        for parameter, name in zip(others, (n for n in weights if not is_matrix(n)), strict=True):
            parameter.grad = grads[name]
        adam.step()
        for name in filter(is_matrix, weights):
            momentum[name].lerp_(grads[name], 0.05)
            update, weight = grads[name].lerp(momentum[name], 0.95), weights[name]
            split = name.rpartition(".")[0].endswith(("qkv", "fc1", "gate"))
            nodes = torch.tensor([block_of(row, len(weight), case, world, split) for row in range(len(weight))])
            weight.mul_(1.0 - RATE * DECAY)
            for part in parts_of(name, case.model):
                for node in range(blocks):
                    rows = [r for r in part or range(len(weight)) if blocks == 1 or nodes[r] == node]
                    if rows:
                        x = polar(update[rows])
                        weight[rows] -= RATE * 0.2 * math.sqrt(max(x.shape)) * x


def is_matrix(name: str) -> bool:
    return name.startswith("layers.") and name.endswith("weight") and "norm" not in name


def gradient(name: str, like: torch.Tensor, step: int) -> torch.Tensor:
    """A gradient of the whole parameter, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(step * 1000 + len(name) + sum(map(ord, name)))
    return torch.randn(like.shape, generator=generator) + 0.3 * like


@torch.no_grad()
def train(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The whole weights before and after."""
    model, _, dims = build_on_ranks(case)
    named = dict(model.named_parameters())
    matrices = build_orthogonalizer(model, case.optimizer, dims, case.precision.param_dtype)
    optimizer = build_optimizer(list(named.items()), case.optimizer, CPU, orthogonalizer=matrices)
    first = {name: p.full_tensor().clone() for name, p in named.items()}
    for step in range(1, STEPS + 1):
        for name, p in named.items():
            whole = gradient(name, p.full_tensor(), step)
            p.grad = distribute_tensor(3.0 * whole, p.device_mesh, p.placements, src_data_rank=None)
        set_rates_(optimizer, learning_rate=RATE, weight_decay=DECAY)
        update_(optimizer, torch.tensor(3.0), iteration=step)
    return first, {name: p.full_tensor() for name, p in named.items()}


def check(case: Case, *, world: int = 4, blocks: int = 1, atol: float = 1e-6) -> None:
    first, last = ranks(world).run(train, case)[0]
    reference(first, case, world=world, blocks=blocks)
    for name, expected in first.items():
        torch.testing.assert_close(last[name], expected, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


LAYOUTS = [(tp, replicas, style) for tp in (1, 2, 4) for replicas in (1, 2) if tp * replicas <= 4 for style in STYLES]


@pytest.mark.parametrize(("tp", "replicas", "style"), pairwise(LAYOUTS))
def test_on_one_node_twenty_steps_are_torch_s_on_whole_matrices(tp: int, replicas: int, style: str):
    check(Case(model=STYLES[style], tp=tp, replicas=replicas, optimizer=MUON))
