"""The whole GPT: causality, documents, padding, output shapes, and what it communicates."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import SEQ, STYLES, VOCAB, build_gpt, counted, packed, sample, tp_axis
from helpers.training import GPT2_STYLE, LLAMA_STYLE

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_, local

BATCH = 3
TIED = dataclasses.replace(GPT2_STYLE, make_vocab_size_divisible_by=64)  # 27 rows of padding
UNTIED = dataclasses.replace(LLAMA_STYLE, make_vocab_size_divisible_by=64)


def change_a_token(sequence_parallel: bool) -> None:
    """Compare the logits of a batch with those of the same batch with token 9 of row 1 replaced, bitwise."""
    tokens, _ = sample()
    changed = tokens.clone()
    changed[1, 9] = (changed[1, 9] + 1) % VOCAB
    for style in STYLES.values():
        gpt = build_gpt(style, tp_axis(), vocab_size=VOCAB, sequence_parallel=sequence_parallel)
        with torch.no_grad():
            same = (gpt(tokens) == gpt(changed)).all(dim=-1)
        assert same[[0, 2]].all()
        assert same[1].tolist() == [True] * 9 + [False] * (SEQ - 9)


@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_a_token_changes_no_earlier_logit_and_no_other_row(size, sequence_parallel):
    ranks(size).run(change_a_token, sequence_parallel)


def logits_of_packed(model: GPTConfig, masked: bool) -> torch.Tensor:
    gpt, batch = build_gpt(model, tp_axis(), vocab_size=VOCAB), packed()
    starts = batch.document_starts if masked else None
    with torch.no_grad():
        return gpt(batch.tokens, position_ids=batch.position_ids, document_starts=starts)


@pytest.mark.parametrize(("style", "size"), [("gpt2", 1), ("llama", 2)])
def test_packed_documents_are_each_as_if_alone(style, size):
    """1e-6 absolute: fp32 sums of other lengths, logits of about 0.1."""
    alone, batch = build_gpt(STYLES[style], MeshAxis("tp"), vocab_size=VOCAB), packed()
    assert batch.document_starts is not None
    logits, unmasked = (
        torch.cat(ranks(size).run(logits_of_packed, STYLES[style], masked), dim=-1)[..., :VOCAB].flatten(0, 1)
        for masked in (True, False)
    )
    for first, last in itertools.pairwise(batch.document_starts.tolist()):
        with torch.no_grad():
            expected = alone(batch.tokens.flatten()[None, first:last])[0, :, :VOCAB]
        torch.testing.assert_close(logits[first:last], expected, rtol=0, atol=1e-6)
        if first % SEQ:  # attention to the documents before it would have shown
            assert float((unmasked[first:last] - expected).abs().max()) > 1e-4


def test_positions_count_from_zero_unless_they_are_given():
    tokens, _ = sample()
    for model in STYLES.values():
        gpt = build_gpt(model, MeshAxis("tp"), vocab_size=VOCAB)
        counting = torch.arange(SEQ).expand(BATCH, SEQ)
        assert torch.equal(gpt(tokens), gpt(tokens, position_ids=counting))
        assert not torch.allclose(gpt(tokens), gpt(tokens, position_ids=counting.flip(1)))


def test_without_positions_the_order_of_earlier_tokens_does_not_matter():
    """One layer of attention without positions is a set operation on what came before."""
    model = dataclasses.replace(GPT2_STYLE, num_layers=1, position_embedding_type="none", max_position_embeddings=None)
    gpt = build_gpt(model, MeshAxis("tp"), vocab_size=VOCAB)
    assert not [name for name, _ in gpt.named_parameters() if "position" in name]
    tokens, _ = sample()
    swapped = tokens[:, [1, 0, *range(2, SEQ)]]
    torch.testing.assert_close(gpt(tokens)[:, 2:], gpt(swapped)[:, 2:], rtol=0, atol=1e-6)


def ignores_padding(model: GPTConfig) -> int:
    """Compare losses and gradients with zero padding rows and with huge ones; returns this rank's real rows."""
    tp, (tokens, labels), results = tp_axis(), sample(), []
    for value in (0.0, 100.0):
        gpt = build_gpt(model, tp, vocab_size=VOCAB)
        output = gpt.embedding.word.weight if gpt.output is None else gpt.output.weight
        rows = local(output.detach())
        real = max(0, min(VOCAB - tp.rank * rows.shape[0], rows.shape[0]))
        assert not rows[real:].any()
        rows[real:] = value
        losses = gpt(tokens, labels)
        losses.mean().backward()
        results.append((losses.detach(), local(output.grad)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert not results[0][1][real:].any()
    return real


@pytest.mark.parametrize(("size", "model"), [(1, TIED), (2, UNTIED), (4, TIED)], ids=["1", "2, untied", "4"])
def test_padding_gets_no_probability_and_no_gradient(size, model):
    assert sum(ranks(size).run(ignores_padding, model)) == VOCAB


def outputs_and_calls(model: GPTConfig, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Logits, losses, and the collectives of the losses' step, forward and backward."""
    tp, (tokens, labels) = tp_axis(), sample()
    gpt = build_gpt(model, tp, vocab_size=VOCAB, sequence_parallel=sequence_parallel)
    logits = gpt(tokens)
    losses, forward = counted(tp, lambda: gpt(tokens, labels))
    _, backward = counted(tp, lambda: losses.mean().backward())
    assert logits.is_contiguous()
    assert losses.is_contiguous()
    return logits.detach(), losses.detach(), [forward, backward]


@pytest.mark.parametrize(("style", "size", "layers"), [("gpt2", 1, 1), ("llama", 2, 3), ("gpt2", 4, 1)])
def test_logits_are_split_losses_are_whole_and_a_step_communicates_what_the_docstrings_say(style, size, layers):
    """[B, S, V/T] and [B, S] in fp32; losses are those of the gathered logits, to fp32 rounding of 4.6 nats.

    2 collectives per layer each way, one at each end, two small ones in the loss; column layers gather again.
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


def test_the_scalar_head_multiplies_in_fp32():
    """Of activations in bf16: fp32 sums in another order, 1e-6, where products in bf16 would be 1e-3 away."""
    gpt = GPTModel(GPT2_STYLE, vocab_size=VOCAB, tp=MeshAxis("tp"), scalar_head=True)
    initialize_parameters_(gpt, seed=7, draw_device=torch.device("cpu"))
    gpt, seen = gpt.bfloat16().eval(), list[torch.Tensor]()
    gpt.final_norm.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        values = gpt(sample()[0], with_values=True).values
    assert values.dtype == torch.float32
    expected = seen[0].double() @ gpt.scalar_head.weight[0].double()
    torch.testing.assert_close(values.double(), expected.t(), rtol=0, atol=1e-6)
