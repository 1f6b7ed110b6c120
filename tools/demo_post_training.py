"""Demonstrate post-training on two CPU cores in minutes: reinforcement learning improves a model with noisy labels.

python tools/demo_post_training.py --folder demo/                       supervised training, then GRPO
python tools/demo_post_training.py --folder demo/ --seed 2
python tools/demo_post_training.py --folder demo/ --objective ppo       a reward model, then PPO with it; or dpo
python tools/demo_post_training.py --folder demo/ -- --nproc 4 --tensor-model-parallel-size 2 --emulate-nodes 2 --zeropp

A small model learns to add numbers below 50, but half of its labels are wrong. Completions sampled from it are
therefore rarely correct for sums that it has not seen. GRPO then rewards the completions that a verifier finds correct.
DPO and the reward model learn from pairs of a correct and a wrong answer.

Flags after -- are passed to every program. The folder receives the data, the checkpoints, the run folders and a report.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import JobError, flags_of, program, say

ROOT = Path(__file__).resolve().parents[1]
LARGEST, HELD_OUT, COPIES = 50, 512, 8  # summands are below 50; held-out sums; labels per training sum


def correct(completions: list[str], a: list[int], b: list[int]) -> list[float]:
    """Return the verifier's reward of each completion: 1 for the correct sum with two digits, 0 for anything else.

    Args:
        completions: texts that the model has generated.
        a: first number of each prompt.
        b: second number of each prompt.
    """
    return [float(text == f"{x + y:02d}") for text, x, y in zip(completions, a, b, strict=True)]


@program
def main(argv: list[str]) -> int:
    """Write the data, run all programs of the demonstration, and print the result. Return the exit code."""
    # Flags and data.
    parser = flags_of(__doc__)
    parser.add_argument("--folder", required=True, help="folder for all output; it must be empty or not exist")
    parser.add_argument(
        "--objective", choices=("grpo", "dpo", "ppo"), default="grpo", help="post-training objective (default: grpo)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed for labels, weights and sampling (default: 1)")
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    flags = parser.parse_args(own)
    folder, objective = Path(flags.folder).resolve(), flags.objective
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--folder {folder} is not empty; give a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, flags.seed)
    common = ["--seed", str(flags.seed), *(rest or ["--nproc", "2"])]
    data = {name: str(folder / f"{name}.jsonl") for name in ("labels", "sums", "held_out", "pairs", "held_out_pairs")}

    def run(name: str, *more: str) -> None:
        """Run one training with the flags of its file in configs/post_training, `more`, and the common flags."""
        script = "pretrain_gpt.py" if name == "base" else "tools/post_train.py"
        places = ["--save", str(folder / name), "--run-dir", str(folder / "runs" / name)]
        places += ["--data-cache-path", str(folder / "cache")]
        command = [sys.executable, script, f"@configs/post_training/additions_{name}.args", *more, *places, *common]
        say(f"$ {' '.join(command)}")
        _run(command)

    # Supervised training with wrong labels, then post-training.
    pairs = ["--train-data-path", data["pairs"], "--valid-data-path", data["held_out_pairs"]]
    drawn = ["--train-data-path", data["sums"], "--valid-data-path", data["held_out"]]
    run("base", "--text-path", data["labels"])
    run("sft", "--load", str(folder / "base"), "--train-data-path", data["labels"])
    start = ["--load", str(folder / "sft")]
    if objective == "ppo":
        run("reward", *start, *pairs)
        run("ppo", *start, *drawn, "--reward-load", str(folder / "reward"))
    elif objective == "dpo":
        run("dpo", *start, *pairs)
    else:
        run("grpo", *start, *drawn, "--reward-funcs", f"{Path(__file__).resolve()}:correct")

    # The report, and the validation before and after post-training.
    runs = sorted((folder / "runs").iterdir())
    report = [sys.executable, "tools/report.py", *map(str, runs), "--output", str(folder / "report.html")]
    _run(report)
    lines = (folder / "runs" / objective / "validation.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    what = "loss of pairs" if objective == "dpo" else "mean reward of sampled completions"
    name = "lm_loss" if objective == "dpo" else "reward"
    print(f"held-out sums, {what}: {first[name]:.3f} before, {last[name]:.3f} after {objective.upper()}")
    return 0


def write_data(folder: Path, seed: int) -> None:
    """Write the data files of the demonstration to `folder`.

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


def _run(command: Sequence[str]) -> None:
    """Run a program in the root of the checkout, and raise a JobError if it fails."""
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        raise JobError(f"{command[1]} ended with status {status}")


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
