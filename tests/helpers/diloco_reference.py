"""Simulate DiLoCo's replica groups in one process, as the unquantized reference for runs on several ranks.

This is DiLoCo (arXiv 2311.08105) by fragments of the model, which may be sent while later steps run (Streaming
DiLoCo, arXiv 2501.18512). Legend: H iterations between two sends of a fragment, F fragments, R the outer weights that
all groups have in common, x the weights of one group. After the optimizer step of iteration t, counted from 1, for
each fragment:

    merge   if the fragment was sent `delay` iterations ago:   x = alpha x + (1 - alpha) R
    send    if t % H == ((fragment + 1) * H // F) % H:    sum over groups of fraction * (R - x) -> difference
                momentum = outer_momentum * momentum + difference
                R = R - outer_lr * (difference + outer_momentum * momentum)                 (Nesterov)
    merge   in the same iteration if the delay is 0

The fraction of a group is its number of tokens since the last send of the fragment, divided by all groups' tokens.
After the last iteration every fragment is sent, and x = R on all groups.
"""

from collections.abc import Sequence

import torch
from torch import nn

from megazpp.diloco.config import DilocoPlan


class ReplicaGroups:
    """The models of DiLoCo's replica groups in one process; `after_step` averages their weights.

    The test trains the models, each with its own optimizer. The models have equal initial weights.

    Args:
        models: one model per replica group.
        fragments: parameter names of each fragment; every parameter is in one fragment.
        plan: synchronization interval, delay and outer optimizer of DiLoCo.

    Attributes:
        common: outer weights, which all groups have in common, by parameter name.
        momentum: momentum of the outer optimizer, by parameter name.
    """

    def __init__(self, models: Sequence[nn.Module], fragments: Sequence[Sequence[str]], plan: DilocoPlan) -> None:
        self.plan, self.fragments = plan, fragments
        self._weights = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
        assert sorted(name for fragment in fragments for name in fragment) == sorted(self._weights[0])
        self.common = {name: weight.clone() for name, weight in self._weights[0].items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.common.items()}
        # for each fragment: number of tokens of each group since the fragment was last sent
        self._tokens = [[0.0] * len(models) for _ in fragments]
        self._merge_at: list[int | None] = [None for _ in fragments]

    def after_step(self, iteration: int, tokens: Sequence[float], *, last: bool = False) -> None:
        """Merge and send the fragments that are due after the optimizer step of `iteration`.

        Args:
            iteration: number of the step, counted from 1.
            tokens: number of tokens on which each group has trained in this step.
            last: True after the last step of the run, when every fragment is sent and merged.
        """
        plan, count = self.plan, len(self.fragments)
        for index, counted in enumerate(self._tokens):
            self._tokens[index] = [before + new for before, new in zip(counted, tokens, strict=True)]
            due = self._merge_at[index]
            if due is not None and (last or due == iteration):
                self._merge(index, plan.merge_alpha)
            if last or iteration % plan.steps == (index + 1) * plan.steps // count % plan.steps:
                self._send(index)
                self._merge_at[index] = iteration + plan.delay
                if last or plan.delay == 0:
                    self._merge(index, 0.0 if last else plan.merge_alpha)

    def _merge(self, fragment: int, alpha: float) -> None:
        for name in self.fragments[fragment]:
            for weights in self._weights:
                weights[name].copy_(alpha * weights[name] + (1 - alpha) * self.common[name])
        self._merge_at[fragment] = None

    def _send(self, fragment: int) -> None:
        eta, mu, tokens = self.plan.outer_lr, self.plan.outer_momentum, self._tokens[fragment]
        for name in self.fragments[fragment]:
            difference = torch.zeros_like(self.common[name])
            for weights, seen in zip(self._weights, tokens, strict=True):
                difference += seen / sum(tokens) * (self.common[name] - weights[name])
            self.momentum[name] = mu * self.momentum[name] + difference
            self.common[name] -= eta * (difference + mu * self.momentum[name])
        self._tokens[fragment] = [0.0] * len(tokens)
