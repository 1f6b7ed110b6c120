"""Test scores (loss and bits per byte) of a text or dataset against a plain loop."""

import json
import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.training import CPU, Case, build_on_ranks

from megazpp.data.config import DataConfig
from megazpp.data.text import check_input, write_indexed_dataset
from megazpp.data.tokenizer import ByteTokenizer
from megazpp.inference.scoring import Score, count_labels, score_whole
from megazpp.inference.whole_text import PADDING
from megazpp.training.setup import ShardedModel

BYTES = ByteTokenizer()
DOCUMENTS = ["Call me Ishmael.", "Some years ago — never mind", "how long", "precisely, having little or no money"]
IDS = [token for text in DOCUMENTS for token in (*BYTES.encode(text), BYTES.eod)]
NUM_BYTES = sum(len(text.encode()) for text in DOCUMENTS)
SUMS = 1e-5  # relative tolerance for losses, because fp32 numbers are added in another order


@pytest.fixture
def paths(tmp_path) -> list[str]:
    """Write DOCUMENTS as a JSON lines file and as a .bin/.idx pair. Return both paths."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    write_indexed_dataset(iter(DOCUMENTS), BYTES, tmp_path / "pair")
    return [str(text), str(tmp_path / "pair")]


def score_on_ranks(case: Case, path: str, cache: str, micro_batch_size: int) -> tuple[Score, float]:
    """Score a file on all ranks; return the score, and the mean loss of a plain loop over the same windows.

    The score and the plain loop use the same model.
    """
    model, sharding, dims = build_on_ranks(case)
    data = DataConfig(seq_length=16, data_cache_path=cache, num_workers=0)
    built = ShardedModel(model, sharding)
    options = {"micro_batch_size": micro_batch_size, "device": CPU, "say": lambda line: None}
    score = score_whole(built, dims, BYTES, path, data, **options)
    assert model.training
    model.eval()
    line, total = torch.tensor([BYTES.eod, *IDS]), 0.0
    with torch.no_grad():
        for start in range(0, len(IDS), 16):
            window = line[start : start + 17]
            padded = torch.cat((window, window.new_zeros(17 - len(window)))).unsqueeze(0)
            total += model(padded[:, :-1], padded[:, 1:])[0, : len(window) - 1].sum(dtype=torch.float64).item()
    return score, total / len(IDS)


@pytest.mark.parametrize(("world_size", "tp", "micro_batch_size"), [(1, 1, 3), (1, 1, 10**9), slow(4, 2, 1)])
def test_every_token_of_a_text_or_dataset_is_scored_once(paths, tmp_path, world_size, tp, micro_batch_size):
    case = Case(vocab_size=257, tp=tp, sequence_parallel=tp > 1)
    for path in paths:
        for score, loss in ranks(world_size).run(score_on_ranks, case, path, str(tmp_path), micro_batch_size):
            assert score.loss == pytest.approx(loss, rel=SUMS)
            assert score[1:] == (len(IDS), NUM_BYTES)
            assert score.bits_per_byte == pytest.approx(loss * len(IDS) / NUM_BYTES / math.log(2), rel=SUMS)


def count_on_ranks(data: DataConfig, *samples: list[int]) -> tuple[int, int, int]:
    *_, dims = build_on_ranks(Case())
    return count_labels([np.array(sample) for sample in samples], len(samples), BYTES, data, dims)


def test_sample_bytes_count_only_labels_with_a_loss():
    """Count the text bytes of samples: only bytes of labels with a loss count.

    A sample that cuts a character has only some of the character's bytes. Only these may count, and not the three bytes
    of U+FFFD, to which the cut character is decoded.
    """
    document_end, padded = [*BYTES.encode("xy"), BYTES.eod, ord("z")], [*BYTES.encode("ab"), PADDING, PADDING]
    for masks, sample, expected in (
        (False, BYTES.encode("a—"), (3, 3, 0)),
        # the first byte of the dash is no label; labels are its other two bytes and "a"
        (False, BYTES.encode("—a"), (3, 3, 0)),
        (False, BYTES.encode("ab—")[:-2], (2, 2, 0)),  # the labels are "b" and one byte of the dash
        (False, document_end, (3, 2, 0)),  # labels are "y", the end of the document, which has no bytes, and "z"
        (True, document_end, (2, 1, 1)),  # --eod-mask-loss masks the label after the end of a document, here "z"
        (True, padded, (1, 1, 0)),
    ):
        assert ranks(1).run(count_on_ranks, DataConfig(eod_mask_loss=masks), sample) == [expected], sample
    many = [BYTES.encode("a—"), document_end, padded]
    for world_size in (1, 4):
        assert set(ranks(world_size).run(count_on_ranks, DataConfig(eod_mask_loss=True), *many)) == {(6, 5, 1)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_masked_labels_count_in_neither_tokens_nor_bytes(paths, tmp_path, world_size):
    """Score with --eod-mask-loss, which masks the first byte of each document, for a text and for a dataset.

    Masked labels count neither as tokens nor as bytes.
    """
    for path in paths:
        for score in ranks(world_size).run(score_with_masks, path, str(tmp_path)):
            assert score[1:] == (len(IDS) - len(DOCUMENTS), NUM_BYTES - len(DOCUMENTS))
            expected = score.loss / math.log(2) * score.tokens / score.text_bytes
            assert score.bits_per_byte == pytest.approx(expected)


def score_with_masks(path: str, cache: str) -> Score:
    model, sharding, dims = build_on_ranks(Case(vocab_size=257))
    data = DataConfig(seq_length=16, data_cache_path=cache, num_workers=0, eod_mask_loss=True)
    options = {"micro_batch_size": 2, "device": CPU, "say": lambda line: None}
    return score_whole(ShardedModel(model, sharding), dims, BYTES, path, data, **options)


def score_own_text(paths: list[str], cache: str) -> str:
    """Let each rank score a different text of the same name, and return the error that all ranks must raise."""
    os.chdir(paths[dist.get_rank()])
    with pytest.raises(ValueError, match=r"between .* \(rank 0\), .* \(rank 1\)") as caught:
        score_with_masks("text.txt", cache)
    return str(caught.value)


def test_text_that_differs_between_hosts_is_rejected(tmp_path):
    for name, text in (("a", "Call me Ishmael."), ("b", "Call me Ishmaal.")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    for error in ranks(2).run(score_own_text, [str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path)):
        assert error.startswith("--input text.txt must have the same content on all ranks")


def test_score_lines_match_megatron_with_one_added_line():
    """Check the printed lines: Megatron-LM's lines, and one more line with the bits per byte."""
    rule, line, more, last = Score(2.0, 300, 1000).lines("iteration 7")
    assert line == " validation loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert more == " bits per byte: 0.865617 | 300 tokens, 1,000 bytes of text"
    assert rule == last == "-" * (len(line) + 1)
    assert math.isnan(Score(2.0, 3, 0).bits_per_byte)


def test_input_that_is_neither_text_nor_dataset_raises_an_error(paths, tmp_path):
    for path in paths:
        check_input(path)
    with pytest.raises(ValueError, match="nowhere is neither a text nor the prefix"):
        check_input("nowhere")
    (tmp_path / "half.bin").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"half\.idx does not exist"):
        check_input(str(tmp_path / "half"))
