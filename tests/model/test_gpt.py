"""Test the GPT model: causality, documents, positions, shapes of outputs, and communication."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import SEQ, STYLES, VOCAB, build_gpt, counted, packed, sample
from helpers.training import GPT2_STYLE

from megazpp.model.config import GPTConfig

BATCH = 3


@torch.no_grad()
def change_a_token() -> None:
    """Replace token 9 of row 1, and check that exactly the logits from that token of that row on change."""
    tokens, _ = sample()
    changed = tokens.clone()
    changed[1, 9] = (changed[1, 9] + 1) % VOCAB
    for style, sequence_parallel in itertools.product(STYLES.values(), (False, True)):
        gpt = build_gpt(style, sequence_parallel=sequence_parallel)
        same = (gpt(tokens) == gpt(changed)).all(dim=-1)
        assert same[[0, 2]].all()
        assert same[1].tolist() == [True] * 9 + [False] * (SEQ - 9)


@pytest.mark.parametrize("size", [1, 2])
def test_token_changes_no_earlier_logits_and_no_other_row(size):
    ranks(size).run(change_a_token)


@torch.no_grad()
def logits_of_packed(model: GPTConfig, masked: bool) -> torch.Tensor:
    batch = packed()
    starts = batch.document_starts if masked else None
    return build_gpt(model)(batch.tokens, position_ids=batch.position_ids, document_starts=starts)


@pytest.mark.parametrize(("style", "size"), [("gpt2", 1), ("llama", 2)])
@torch.no_grad()
def test_packed_documents_equal_separate_documents(style, size):
    """Compare documents packed into rows, with a document mask, with each document alone.

    The tolerance of 1e-6 allows fp32 sums of other lengths; logits are about 0.1.
    """
    alone, batch = build_gpt(STYLES[style]), packed()
    logits, unmasked = (
        torch.cat(ranks(size).run(logits_of_packed, STYLES[style], masked), dim=-1)[..., :VOCAB].flatten(0, 1)
        for masked in (True, False)
    )
    for first, last in itertools.pairwise(batch.document_starts.tolist()):
        expected = alone(batch.tokens.flatten()[None, first:last])[0, :, :VOCAB]
        torch.testing.assert_close(logits[first:last], expected, rtol=0, atol=1e-6)
        # a document that begins inside a row has other logits without the mask, because it attends to the document
        # before it
        if first % SEQ:
            assert float((unmasked[first:last] - expected).abs().max()) > 1e-4


def test_positions_count_from_zero_by_default():
    tokens, _ = sample()
    for model in STYLES.values():
        gpt = build_gpt(model)
        counting = torch.arange(SEQ).expand(BATCH, SEQ)
        assert torch.equal(gpt(tokens), gpt(tokens, position_ids=counting))
        assert not torch.allclose(gpt(tokens), gpt(tokens, position_ids=counting.flip(1)))


def test_order_of_earlier_tokens_is_irrelevant_without_positions():
    """Swap the first two tokens.

    One attention layer without position embeddings depends only on the set of earlier tokens.
    """
    model = dataclasses.replace(GPT2_STYLE, num_layers=1, position_embedding_type="none", max_position_embeddings=None)
    gpt = build_gpt(model)
    assert not [name for name, _ in gpt.named_parameters() if "position" in name]
    tokens, _ = sample()
    swapped = tokens[:, [1, 0, *range(2, SEQ)]]
    torch.testing.assert_close(gpt(tokens)[:, 2:], gpt(swapped)[:, 2:], rtol=0, atol=1e-6)


def outputs_and_calls(model: GPTConfig, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Return logits, losses, and the number of calls of each collective on tp.

    The calls are a list with one dict for forward and one for backward of the losses.
    """
    gpt, (tokens, labels) = build_gpt(model, sequence_parallel=sequence_parallel), sample()
    logits = gpt(tokens)
    losses, forward = counted(gpt.tp, gpt, tokens, labels)
    _, backward = counted(gpt.tp, losses.mean().backward)
    assert logits.is_contiguous()
    assert losses.is_contiguous()
    return logits.detach(), losses.detach(), [forward, backward]


@pytest.mark.parametrize(("style", "size", "layers"), [("gpt2", 1, 1), ("llama", 2, 3)])
def test_forward_has_documented_shapes_and_communication(style, size, layers):
    """Check shapes, losses and the number of collectives. Logits are [B, S, V/T], and losses are [B, S] in fp32.

    B counts samples, S tokens of a sample, V rows of the padded vocabulary, and T tensor-parallel ranks.
    Losses equal the losses from gathered logits, up to the fp32 rounding of numbers of about 4.6. There are 2
    collectives per layer in forward and in backward, one at each end of the model, and two small ones in the loss. With
    sequence parallelism, column-parallel layers gather their inputs again in backward.
    """
    model, padded = dataclasses.replace(STYLES[style], num_layers=layers), STYLES[style].padded_vocab_size(VOCAB, size)
    count = 2 * layers + 1
    plain = [{"all_reduce": count + 2}, {"all_reduce": count}]
    both = {"all_gather": count, "reduce_scatter": count}
    split = [both | {"all_reduce": 2}, both | {"all_gather": 4 * layers + 1}]
    for sequence_parallel, calls in ((False, plain), (True, split)):
        results = ranks(size).run(outputs_and_calls, model, sequence_parallel)
        logits = torch.cat([part for part, _, _ in results], dim=-1)
        assert logits.shape == (BATCH, SEQ, padded)
        expected = F.cross_entropy(logits[..., :VOCAB].flatten(0, 1), sample()[1].flatten(), reduction="none")
        for part, losses, found in results:
            assert part.shape == (BATCH, SEQ, padded // size)
            assert losses.dtype == torch.float32
            torch.testing.assert_close(losses, expected.view(BATCH, SEQ), rtol=1e-6, atol=1e-6)
            assert found == (calls if size > 1 else [{}, {}])


def test_scalar_head_computes_in_fp32():
    """Check that the scalar head computes in fp32, although its inputs and the model are bf16.

    fp32 sums in another order differ by 1e-6; matrix products in bf16 would differ by 1e-3.
    """
    gpt, seen = build_gpt(GPT2_STYLE, scalar_head=True).bfloat16(), list[torch.Tensor]()
    gpt.final_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        values = gpt(sample()[0], head=lambda model, x, router_loss: model.values(x))
    assert values.dtype == torch.float32
    expected = seen[0].double() @ gpt.scalar_head.weight[0].double()
    torch.testing.assert_close(values.double(), expected.t(), rtol=0, atol=1e-6)
