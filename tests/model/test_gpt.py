"""The whole GPT: causality, documents, padding, output shapes, and what it communicates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import ranks
from helpers.tensor_parallel import build_gpt, counted, tp_axis
from helpers.training import GPT2_STYLE, LLAMA_STYLE, packed_documents

from megazpp.data.loader import MicroBatch
from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.tensor_parallel.parameters import initialize_parameters_, local

VOCAB, SEQ, BATCH = 101, 16, 3
STYLES = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE}
TIED = dataclasses.replace(GPT2_STYLE, make_vocab_size_divisible_by=64)  # 27 rows of padding
UNTIED = dataclasses.replace(LLAMA_STYLE, make_vocab_size_divisible_by=64)


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


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
def test_a_token_changes_no_earlier_logit_and_no_other_row(size: int, sequence_parallel: bool):
    ranks(size).run(change_a_token, sequence_parallel)


def packed() -> MicroBatch:
    """Rows of documents of 1 to 16 tokens; the last document of a row may be cut, documents never span rows."""
    return packed_documents(VOCAB, SEQ, [(0, 0), (0, 5), (0, 6), (0, 13), (1, 15), (2, 3), (2, 9)])


def logits_of_packed(model: GPTConfig, masked: bool) -> torch.Tensor:
    gpt, batch = build_gpt(model, tp_axis(), vocab_size=VOCAB), packed()
    starts = batch.document_starts if masked else None
    with torch.no_grad():
        return gpt(batch.tokens, position_ids=batch.position_ids, document_starts=starts)


@pytest.mark.parametrize(("style", "size"), [("gpt2", 1), ("llama", 2)])
def test_packed_documents_are_each_as_if_alone(style: str, size: int):
    """1e-6 absolute: fp32 sums of other lengths, logits of about 0.1."""
    alone, batch = build_gpt(STYLES[style], MeshAxis("tp"), vocab_size=VOCAB), packed()
    assert batch.document_starts is not None
    starts = batch.document_starts.tolist()
    assert len(starts) == 1 + 5 + 1 + 3
    results = ranks(size).run(logits_of_packed, STYLES[style], True)
    logits = torch.cat(results, dim=-1)[..., :VOCAB].flatten(0, 1)
    unmasked = torch.cat(ranks(size).run(logits_of_packed, STYLES[style], False), dim=-1)[..., :VOCAB].flatten(0, 1)
    tokens = batch.tokens.flatten()
    for first, last in itertools.pairwise(starts):
        with torch.no_grad():
            expected = alone(tokens[None, first:last])[0, :, :VOCAB]
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
def test_padding_gets_no_probability_and_no_gradient(size: int, model: GPTConfig):
    assert sum(ranks(size).run(ignores_padding, model)) == VOCAB


def shapes(model: GPTConfig, sequence_parallel: bool) -> list[Any]:
    gpt = build_gpt(model, tp_axis(), vocab_size=VOCAB, sequence_parallel=sequence_parallel)
    tokens, labels = sample()
    logits, losses = gpt(tokens), gpt(tokens, labels)
    return [logits.detach(), losses.detach(), logits.is_contiguous() and losses.is_contiguous()]


@pytest.mark.parametrize(
    ("style", "size", "sequence_parallel"), [("gpt2", 1, False), ("llama", 2, True), ("gpt2", 4, False)]
)
def test_logits_are_split_over_the_vocabulary_and_losses_are_whole(style: str, size: int, sequence_parallel: bool):
    """[B, S, V/T] and [B, S] in fp32; losses are those of the gathered logits, to fp32 rounding of 4.6 nats."""
    results = ranks(size).run(shapes, STYLES[style], sequence_parallel)
    padded = STYLES[style].padded_vocab_size(VOCAB, size)
    logits = torch.cat([result[0] for result in results], dim=-1)
    assert logits.shape == (BATCH, SEQ, padded)
    expected = F.cross_entropy(logits[..., :VOCAB].flatten(0, 1), sample()[1].flatten(), reduction="none")
    for part, losses, contiguous in results:
        assert part.shape == (BATCH, SEQ, padded // size)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, expected.view(BATCH, SEQ), rtol=1e-6, atol=1e-6)
        assert contiguous


def calls_of_a_step(model: GPTConfig, sequence_parallel: bool) -> list[dict[str, int]]:
    tp = tp_axis()
    gpt = build_gpt(model, tp, vocab_size=VOCAB, sequence_parallel=sequence_parallel)
    losses, forward = counted(tp, lambda: gpt(*sample()))
    _, backward = counted(tp, lambda: losses.mean().backward())
    return [forward, backward]


@pytest.mark.parametrize(("style", "layers"), [("gpt2", 1), ("llama", 3)])
def test_a_step_communicates_what_the_docstrings_say(style: str, layers: int):
    """2 per layer each way, one at each end, two small ones in the loss; column layers gather again."""
    model = dataclasses.replace(STYLES[style], num_layers=layers)
    plain, split = (ranks(2).run(calls_of_a_step, model, sequence_parallel)[0] for sequence_parallel in (False, True))
    assert plain == [{"all_reduce": 2 * layers + 1 + 2}, {"all_reduce": 2 * layers + 1}]
    both = {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers + 1}
    assert split == [both | {"all_reduce": 2}, both | {"all_gather": 4 * layers + 1}]
    assert ranks(1).run(calls_of_a_step, model, False) == [[{}, {}]]


def test_a_fresh_model_knows_nothing():
    """Every token is about as likely as any other: log(101) nats, within the spread of small random logits."""
    gpt = build_gpt(GPT2_STYLE, MeshAxis("tp"), vocab_size=VOCAB)
    assert gpt(*sample()).mean().item() == pytest.approx(math.log(VOCAB), abs=0.05)
    stds = [float(part.weight.detach().std()) for part in (gpt.layers[0].mlp.fc1, gpt.layers[0].mlp.fc2)]
    assert stds == pytest.approx([0.02, 0.02 / math.sqrt(2 * GPT2_STYLE.layers)], rel=0.1)  # Megatron's scaled init


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
