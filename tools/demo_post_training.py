"""A verifier repairs what wrong labels broke: a demonstration of post-training on two cores, in minutes.

python tools/demo_post_training.py --folder demo/                       supervised training, then GRPO
python tools/demo_post_training.py --folder demo/ --seed 2
python tools/demo_post_training.py --folder demo/ -- --nproc 4 --tensor-model-parallel-size 2 --emulate-nodes 2 --zeropp

A small model learns additions of numbers below 50 from labels of which half are wrong, so that it answers a fifth of
the sums that it has not seen, if tokens are drawn from it. GRPO then rewards what a verifier finds correct. Flags
after -- go to every program; what was done is in the folder, with the runs' records and a report.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megazpp.program import flags_of, program, say

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = "configs/post_training"
LARGEST, HELD_OUT, COPIES = 50, 512, 8  # numbers below; sums that are not trained on; labels of each other sum


def correct(completions: list[str], a: list[int], b: list[int]) -> list[float]:
    """The verifier: 1 for the sum in two digits, 0 for all else."""
    return [float(text == f"{x + y:02d}") for text, x, y in zip(completions, a, b, strict=True)]


@program
def main(argv: list[str]) -> int:
    parser = flags_of(__doc__)
    parser.add_argument("--folder", required=True, help="where everything goes")
    parser.add_argument("--seed", type=int, default=1, help="of labels, weights and draws")
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    flags = parser.parse_args(own)
    folder = Path(flags.folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--folder {folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, flags.seed)
    common = ["--seed", str(flags.seed), *(rest or ["--nproc", "2"])]

    def run(name: str, script: str, *more: str) -> None:
        places = ["--save", str(folder / name), "--run-dir", str(folder / "runs" / name)]
        command = [sys.executable, str(ROOT / script), f"@{CONFIGS}/additions_{name}.args", *more, *places, *common]
        say(f"$ {' '.join(command)}")
        subprocess.run(command, check=True)

    data = {name: str(folder / f"{name}.jsonl") for name in ("labels", "sums", "held_out")}
    run("base", "pretrain_gpt.py", "--text-path", data["labels"], "--data-cache-path", str(folder / "cache"))
    verifier = f"{Path(__file__).resolve()}:correct"
    run("sft", "tools/post_train.py", "--load", str(folder / "base"), "--train-data-path", data["labels"])
    drawn = ["--train-data-path", data["sums"], "--valid-data-path", data["held_out"], "--reward-funcs", verifier]
    run("grpo", "tools/post_train.py", "--load", str(folder / "sft"), *drawn)
    rows = [json.loads(line) for line in (folder / "runs" / "grpo" / "validation.jsonl").read_text().splitlines()]
    runs = [str(folder / "runs" / name) for name in ("grpo", "sft")]
    subprocess.run(
        [sys.executable, str(ROOT / "tools/report.py"), *runs, "--output", str(folder / "report.html")], check=True
    )
    first, last = rows[0], rows[-1]
    print(
        f"sums that were not trained on, drawn at temperature 1: {first['reward']:.3f} correct after supervised "
        f"training, {last['reward']:.3f} after {last['iteration']} steps of GRPO"
    )
    return 0


def write_data(folder: Path, seed: int) -> None:
    """labels.jsonl: prompts and completions, half of them wrong; sums.jsonl and held_out.jsonl: prompts alone."""
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
    for name, part in (("sums", trained), ("held_out", held_out)):
        _write(folder / f"{name}.jsonl", [{"prompt": f"{a:02d}+{b:02d}=", "a": a, "b": b} for a, b in part])


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
