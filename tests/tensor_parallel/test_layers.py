"""Compare tensor-parallel layers with torch's unsharded layers: outputs, gradients and documented collectives."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import compare_slices, counted, draw, part, saved_tensors, tp_axis

from megazpp.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
)

S, B, NARROW, WIDE = 8, 3, 7, 12  # S and WIDE are multiples of 2 ranks; B and NARROW are not
ENTER = {False: ({}, {"all_reduce": 1}), True: ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1})}
LEAVE = {False: ({"all_reduce": 1}, {}), True: ({"reduce_scatter": 1}, {"all_gather": 1})}


def linear(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(x, weights["weight"], weights.get("bias"))


def check_linear() -> None:
    for bias, split in itertools.product((False, True), (False, True)):
        row, how = (bias, split), {"std": 1.0, "bias": bias, "sequence_parallel": split}
        sequence = 0 if split else None
        column = functools.partial(ColumnParallelLinear, NARROW, WIDE, **how)
        compare_slices(row, column, linear, draw(0, S, B, NARROW), x_dim=sequence, y_dim=-1, calls=ENTER[split])
        rows = functools.partial(RowParallelLinear, WIDE, NARROW, **how)
        compare_slices(row, rows, linear, draw(0, S, B, WIDE), x_dim=-1, y_dim=sequence, calls=LEAVE[split])


@pytest.mark.parametrize("size", [1, 2])
def test_column_and_row_parallel_layers_match_full_layers(size):
    ranks(size).run(check_linear)


def check_what_columns_keep() -> None:
    tp = tp_axis()
    for split, widths, freeze in itertools.product((False, True), ([WIDE], [WIDE, 2 * WIDE]), (False, True)):
        how = {"tp": tp, "std": 1.0, "bias": False, "sequence_parallel": split}
        layers = [ColumnParallelLinear(NARROW, width, **how).requires_grad_(not freeze) for width in widths]
        for layer in layers:
            layer.weight.data.fill_(1.0)
        x = torch.ones(S // tp.size if split else S, B, NARROW, requires_grad=True)
        with saved_tensors() as saved:
            outputs, forward = counted(tp, column_parallel, x, layers)
        _, backward = counted(tp, sum(y.sum() for y in outputs).backward)
        assert torch.equal(x.grad, torch.full_like(x, sum(widths)))
        if tp.size > 1:
            kept = {tensor.data_ptr(): tensor.nbytes for tensor in saved}
            assert sum(kept.values()) == x.nbytes + sum(layer.weight.nbytes for layer in layers)
            assert forward == ENTER[split][0]
            assert backward == ({"reduce_scatter": 1} if split and freeze else ENTER[split][1])


@pytest.mark.parametrize("size", [1, 2])
def test_columns_sharing_an_input_communicate_once_and_save_its_slice(size):
    """Check collectives and saved tensors of one, and of two column-parallel layers on the same input.

    With sequence parallelism, the layers save a rank's slice of the input, and the backward gathers the input again. It
    must not do so if all weights are frozen, because only gradients of weights need the whole input.
    """
    ranks(size).run(check_what_columns_keep)


def check_embedding() -> None:
    """Compare the embedding with torch's, with and without sequence parallelism.

    Row 0 of the table is infinite, so that a lookup of row 0 for a token of another rank would show.
    """
    rows, vocab_size = 16, 11  # 4 ranks have 4 + 4 + 3 tokens, and one rank has only padding
    # Some tokens occur several times, so that the gradients of their rows are sums
    tokens = torch.cat([torch.arange(vocab_size), torch.tensor([10, 10, 3, 3, 7])]).view(8, 2)
    tp, table, y_grad = tp_axis(), draw(5, rows, NARROW), draw(6, 8, 2, NARROW)
    table[0] = float("inf")
    whole = F.embedding(tokens, table.requires_grad_())
    whole.backward(y_grad)
    for split in (False, True):
        how = {"vocab_size": vocab_size, "std": 1.0, "sequence_parallel": split}
        layer, sequence = VocabParallelEmbedding(rows, NARROW, tp=tp, **how), 0 if split else None
        layer.weight.data = part(table.detach(), 0, tp)
        y, forward = counted(tp, layer, tokens)
        _, backward = counted(tp, y.backward, part(y_grad, sequence, tp))
        # bit-identical, because only one of the summed terms is nonzero
        assert torch.equal(y, part(whole.detach(), sequence, tp))
        torch.testing.assert_close(layer.weight.grad, part(table.grad, 0, tp), rtol=1e-12, atol=1e-12)
        assert (forward, backward) == (LEAVE[split] if tp.size > 1 else ({}, {}))


@pytest.mark.parametrize("size", [1, 4])
def test_vocab_parallel_embedding_matches_full_table(size):
    ranks(size).run(check_embedding)
