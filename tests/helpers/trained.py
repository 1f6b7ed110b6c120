"""A checkpoint that the real program has written, for the tools that use one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from helpers.program import run_forked

# fmt: off
FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "32", "--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer",
    "--train-iters", "12", "--lr", "1e-2", "--micro-batch-size", "4", "--eval-iters", "2", "--split", "60,20,20",
    "--log-interval", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--seed", "77",
    "--eod-mask-loss", "--nproc", "2",
]
# fmt: on


class Trained(NamedTuple):
    """A finished run: its folder of checkpoints, its home, its text, and what it printed."""

    load: Path
    home: Path
    text: Path
    output: str


def train(home: Path) -> Trained:
    """Train a tiny model with the program."""
    documents = [f"Document {i}: {'the cat sat on the mat. ' * (5 + i)}" for i in range(30)]
    text = home / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    places = [
        "--text-path",
        text,
        "--save",
        home / "save",
        "--data-cache-path",
        home / "cache",
        "--run-dir",
        home / "run",
    ]
    code, output = run_forked("pretrain_gpt.py", *map(str, [*FLAGS, *places]), folder=home)
    assert code == 0, output
    return Trained(home / "save", home, text, output)
