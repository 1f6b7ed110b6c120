"""Write the data of the flag files additions_*.args: sums of two numbers; half of the labels are wrong.

python configs/post_training/additions.py sums/               writes five .jsonl files to the folder

A model that trains on the labels rarely completes a sum correctly that it has not seen. GRPO then rewards the
completions that `correct` accepts. DPO and the reward model learn from pairs of a correct and a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

LARGEST, HELD_OUT, COPIES = 50, 512, 8  # summands are below 50; held-out sums; labels per training sum


def correct(completions: list[str], a: list[int], b: list[int]) -> list[float]:
    """Return the reward of each completion for GRPO: 1 for the correct sum with two digits, 0 for anything else.

    Args:
        completions: texts that the model has generated.
        a: first number of each prompt.
        b: second number of each prompt.
    """
    return [float(text == f"{x + y:02d}") for text, x, y in zip(completions, a, b, strict=True)]


def write_data(folder: Path, seed: int) -> None:
    """Write the data files to `folder`.

    labels.jsonl has prompts with completions, half of them wrong. sums.jsonl and held_out.jsonl have the prompts for
    training and for validation. pairs.jsonl and held_out_pairs.jsonl have a correct and a wrong answer to each prompt.

    Args:
        folder: existing folder.
        seed: seed for the labels and the division of the sums.
    """
    # Noisy labels.
    chance = random.Random(seed)
    sums = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    chance.shuffle(sums)
    held_out, trained = sums[:HELD_OUT], sums[HELD_OUT:]
    labels = []
    for a, b in trained * COPIES:
        label = a + b if chance.random() < 0.5 else chance.randrange(2 * LARGEST - 1)
        prompt, completion = f"{a:02d}+{b:02d}=", f"{label:02d}"
        labels.append({"prompt": prompt, "completion": completion, "text": prompt + completion})
    _write(folder / "labels.jsonl", labels)

    # Prompts and pairs, for training and held out.
    for name, pairs, part in (("sums", "pairs", trained), ("held_out", "held_out_pairs", held_out)):
        _write(folder / f"{name}.jsonl", [{"prompt": f"{a:02d}+{b:02d}=", "a": a, "b": b} for a, b in part])
        wrong = [(a + b + chance.randrange(1, 2 * LARGEST - 1)) % (2 * LARGEST - 1) for a, b in part]
        rows = zip(part, wrong, strict=True)
        answers = [
            {"prompt": f"{a:02d}+{b:02d}=", "chosen": f"{a + b:02d}", "rejected": f"{w:02d}"} for (a, b), w in rows
        ]
        _write(folder / f"{pairs}.jsonl", answers)


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the files; it is created")
    parser.add_argument("--seed", type=int, default=1, help="seed for the labels and the held-out sums (default: 1)")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_data(given.folder, given.seed)
