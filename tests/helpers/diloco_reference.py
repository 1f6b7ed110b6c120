"""Local steps of islands in one process: the reference that ranks have to agree with.

An island is ordinary data parallel on its share of every global batch; islands send each other differences of weights
from time to time (DiLoCo, arXiv 2311.08105), one fragment of the model after the other and, if wanted, while the next
steps run (Streaming DiLoCo, arXiv 2501.18512). `Islands` is the rule in plain torch on one model per island, without
communication: what a program on ranks has to agree with. Legend: H iterations between two sends of a fragment, F
fragments, R the islands' common copy of the outer weights, x an island's own weights.

After the optimizer step of iteration t, counted from 1, for each fragment:

    merge   if it was sent `delay` iterations ago:        x = alpha x + (1 - alpha) R
    send    if t % H == ((fragment + 1) * H // F) % H:    sum over islands of share * Q(R - x + error) -> difference
                momentum = outer_momentum * momentum + difference
                outer = outer - outer_lr * (difference + outer_momentum * momentum)        (Nesterov)
                R = R + Q'(outer - R)
    merge   at once if the delay is 0

An island's share is that of the tokens since the fragment was sent last. Q and Q' are block quantization or nothing;
one-dimensional parameters always travel whole. After the last iteration all is sent, and x = R everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kernels.block_quant import Feedback, RangeTable, pack, range_table, unpack, unpack_onto
from kernels.formats import BlockFormat, plan_row
from megazpp.model.gpt import GPTModel

Bits = Literal[4, 8, 16]
BLOCK = 128  # elements of a block of quantization


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """How islands exchange their weights.

    Attributes:
        steps: H, iterations between two sends of a fragment; a multiple of the fragments.
        delay: iterations between a send and its merge, less than `steps`.
        merge_alpha: share of its own weights that an island keeps at a merge.
        outer_lr, outer_momentum: of the outer optimizer, SGD with Nesterov momentum; 1 and 0 average the islands.
        gradient_bits: 4 or 8 for what islands send; 16 does not quantize.
        weight_bits: 4 or 8 for what R receives; 16 does not quantize.
        feedback_beta: share of its earlier error that an island keeps where the rest is the newest (0: the newest, and
            all of it); None does not feed errors back.
    """

    steps: int = 10
    delay: int = 0
    merge_alpha: float = 0.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    gradient_bits: Bits = 16
    weight_bits: Bits = 16
    feedback_beta: float | None = 0.0

    def sends(self, fragment: int, fragments: int, iteration: int) -> bool:
        return iteration % self.steps == (fragment + 1) * self.steps // fragments % self.steps


class Islands:
    """Models that train by themselves and meet in `after_step`; loops and optimizers stay outside.

    Args:
        models: one per island, with equal weights; `after_step` writes into their parameters.
        fragments: the names of all parameters, each in one fragment.
        settings: when and how fragments are sent.

    Attributes:
        common: R by the parameter's name: the weights to evaluate.
        outer, momentum: what the outer optimizer holds, by the parameter's name.
    """

    def __init__(self, models: Sequence[nn.Module], fragments: Sequence[Sequence[str]], settings: OuterRule) -> None:
        if settings.steps % len(fragments) or not 0 <= settings.delay < settings.steps:
            raise ValueError(f"{len(fragments)} fragments do not fit {settings}")
        self.settings, self.fragments = settings, fragments
        self._weights = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
        first = self._weights[0]
        if sorted(name for fragment in fragments for name in fragment) != sorted(first):
            raise ValueError("the fragments do not have every parameter once")
        if not all(torch.equal(weights[name], first[name]) for weights in self._weights for name in first):
            raise ValueError("islands begin with different weights")
        self.common = {name: weight.clone() for name, weight in first.items()}
        self.outer = {name: weight.clone() for name, weight in first.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in first.items()}
        self._errors: list[dict[str, Feedback]] = [{} for _ in models]
        self._tokens = [[0.0] * len(models) for _ in fragments]  # since the fragment was sent
        self._merge_at: list[int | None] = [None for _ in fragments]

    def after_step(self, iteration: int, tokens: Sequence[float], *, last: bool = False) -> list[int]:
        """Do what is due after an optimizer step.

        Args:
            iteration: of that step, from 1.
            tokens: that each island has trained on in it.
            last: of the training.
        Returns:
            The fragments that were sent.
        """
        settings, sent = self.settings, []
        for index, counted in enumerate(self._tokens):
            self._tokens[index] = [before + new for before, new in zip(counted, tokens, strict=True)]
            due = self._merge_at[index]
            if due is not None and (last or due == iteration):
                self._merge(index, settings.merge_alpha)
            if last or settings.sends(index, len(self.fragments), iteration):
                self._send(index)
                sent.append(index)
                self._merge_at[index] = iteration + settings.delay
                if last or settings.delay == 0:
                    self._merge(index, 0.0 if last else settings.merge_alpha)
        return sent

    def continued_by(self, models: Sequence[nn.Module]) -> Islands:
        """Another number of islands from a checkpoint: the outer optimizer goes on, the models begin at R."""
        for model in models:
            for name, p in model.named_parameters():
                p.detach().copy_(self.common[name])
        islands = Islands(models, self.fragments, self.settings)
        islands.outer, islands.momentum = self.outer, self.momentum
        return islands

    def _merge(self, fragment: int, alpha: float) -> None:
        for name in self.fragments[fragment]:
            for weights in self._weights:
                weights[name].copy_(alpha * weights[name] + (1 - alpha) * self.common[name])
        self._merge_at[fragment] = None

    def _send(self, fragment: int) -> None:
        eta, mu = self.settings.outer_lr, self.settings.outer_momentum
        total = sum(self._tokens[fragment])
        shares = [tokens / total for tokens in self._tokens[fragment]]
        for name in self.fragments[fragment]:
            difference = torch.zeros_like(self.common[name])
            for island, share in enumerate(shares):
                difference += share * self._difference(island, name)
            self.momentum[name] = mu * self.momentum[name] + difference
            self.outer[name] -= eta * (difference + mu * self.momentum[name])
            self._receive(name)
        self._tokens[fragment] = [0.0] * len(shares)

    def _difference(self, island: int, name: str) -> Tensor:
        """R - x of an island, as the others receive it."""
        difference = self.common[name] - self._weights[island][name]
        table, beta = _table(difference, self.settings.gradient_bits), self.settings.feedback_beta
        if table is None:
            return difference
        errors = None
        if beta is not None:
            errors = self._errors[island].setdefault(name, Feedback.zeros((), table))
        messages = _message(table)
        pack(difference.view(-1), table, messages=messages, errors=errors, beta=beta or 0.0)
        unpack(messages, table, out=difference.view(-1))
        return difference

    def _receive(self, name: str) -> None:
        common, outer = self.common[name], self.outer[name]
        table = _table(outer, self.settings.weight_bits)
        if table is None:
            common.copy_(outer)
            return
        messages = _message(table)
        pack(outer.view(-1), table, messages=messages, base=common.view(-1))
        unpack_onto(messages, table, out=common.view(-1))


def strided_fragments(model: GPTModel, count: int) -> list[list[str]]:
    """Names of the parameters of `count` fragments; sharding unit u, in the order of use, belongs to u % count."""
    units = [[p for module in unit for p in module.parameters()] for unit in model.sharding_units()]
    unit_of = {p: index for index, unit in enumerate(units) for p in unit}
    fragments: list[list[str]] = [[] for _ in range(count)]
    for name, p in model.named_parameters():
        fragments[unit_of.get(p, len(units)) % count].append(name)
    return fragments


def _table(x: Tensor, bits: Bits) -> RangeTable | None:
    """How `x` is quantized; None: not at all."""
    return None if bits == 16 or x.ndim == 1 else range_table(plan_row(x.numel(), BlockFormat(bits, BLOCK)), x.dtype)


def _message(table: RangeTable) -> Tensor:
    return torch.empty(table.layout.message_bytes, dtype=torch.uint8)
