"""What several tools' tests begin with."""

from pathlib import Path

import convert_checkpoint
import pytest
import tokenizers
from helpers.hf_models import make_llama, save
from helpers.pairs import TEXT
from helpers.trained import Trained, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    """theirs/: a Llama with its tokenizer; ours/: what the tool makes of it; text.txt."""
    home = tmp_path_factory.mktemp("converted")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    save(make_llama(vocab_size=300, bos_token_id=0, eos_token_id=0, max_position_embeddings=64), home / "theirs")
    tokenizer.save(str(home / "theirs/tokenizer.json"))
    (home / "text.txt").write_text(TEXT)
    assert convert_checkpoint.main(["--input", str(home / "theirs"), "--output", str(home / "ours")]) == 0
    return home
