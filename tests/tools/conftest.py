"""Fixtures that the tests of several tools share: a trained run and a converted model."""

import shlex
from pathlib import Path

import convert_checkpoint
import pytest
import tokenizers
from helpers.hf_models import make_llama, save
from helpers.pairs import TEXT, write_jsonl
from helpers.pretrain import Home, Run

TRAINED = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --train-iters 12 --lr 1e-2 --micro-batch-size 4 "
    "--eval-iters 2 --split 60,20,20 --tensor-model-parallel-size 2 --sequence-parallel --seed 77 --eod-mask-loss"
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Run:
    """Train a tiny model. Return the run; its checkpoints are in save/ in the run folder."""
    home = tmp_path_factory.mktemp("trained")
    documents = [f"Document {i}: {'the cat sat on the mat. ' * (5 + i)}" for i in range(30)]
    text = write_jsonl(home / "text.jsonl", *documents)
    return Home(home).pretrain(*TRAINED, "--text-path", str(text), "--save", str(home / "run/save"), run="run")


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    """Write text.txt, a Hugging Face Llama with its tokenizer in theirs/, and its converted checkpoint in ours/.

    Return their folder.
    """
    home = tmp_path_factory.mktemp("converted")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    save(make_llama(vocab_size=300, bos_token_id=0, eos_token_id=0, max_position_embeddings=64), home / "theirs")
    tokenizer.save(str(home / "theirs/tokenizer.json"))
    (home / "text.txt").write_text(TEXT)
    assert convert_checkpoint.main(["--input", str(home / "theirs"), "--output", str(home / "ours")]) == 0
    return home
