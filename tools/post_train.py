"""Post-train a checkpoint's model: supervised fine-tuning, a reward model, DPO, GRPO, PPO.

python tools/post_train.py --objective sft --load base/ --save sft/ --train-data-path chats.jsonl --train-iters 500
python tools/post_train.py --objective dpo --load sft/ --save dpo/ --train-data-path pairs.jsonl --train-iters 200
python tools/post_train.py --objective grpo --load sft/ --save grpo/ --train-data-path prompts.jsonl --train-iters 300 \
    --reward-funcs my_rewards.py:correct
python tools/post_train.py --objective grpo --load grpo/ --save grpo/ ...       goes on where it has stopped

Model, tokenizer and precision are the checkpoint's, layout and ZeRO++ are flags as for pretrain_gpt.py, and TRL's names
say the rest. Denominators span the whole optimizer step and whitening the whole rollout, over all ranks, where TRL has
those of a process or a micro-batch in places.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from megazpp.arguments import ParsedRun
from megazpp.checks import check_run_config
from megazpp.parallel.launch import RESTART_COUNT, device_type, find_place
from megazpp.planner.report import plan_report
from megazpp.post_training.dry_run import dry_run_lora
from megazpp.post_training.start import check_post_training, find_start, parse_post_training, post_configs
from megazpp.post_training.trainer import PostTrainer
from megazpp.program import program
from megazpp.run import Job, announced_cluster, planned_cluster, run_on_ranks
from megazpp.trainer import run_training

ROOT = Path(__file__).resolve().parents[1]


@program
def main(argv: list[str]) -> int:
    """Parse, check, and become a worker or start the workers."""
    return run_on_ranks(functools.partial(prepare, argv))


def prepare(argv: list[str]) -> Job | int:
    """Everything that can be known before workers start.

    Raises:
        ValueError: what cannot be, by flag and value.
    """
    first_line = (__doc__ or "").partition("\n")[0]
    parsed = parse_post_training(argv, ROOT, first_line)
    if parsed.show.dry_run:  # as pretraining's, without a checkpoint
        return show_dry_run(parsed)
    start = find_start(parsed, restarted=int(os.environ.get(RESTART_COUNT, "0")) > 0)
    parsed, show = start.parsed, start.parsed.show
    if show.print_config:
        print(parsed.report())
        return 0
    config, place = parsed.config, find_place(parsed.config.launch)
    plan = check_run_config(config, announced_cluster(config, place), device_type=device_type())
    check_post_training(config, post_configs(parsed), plan.batches)
    if show.plan:
        print("the policy's training steps, without models beside it and without the keys and values of a generation:")
        print(plan_report(config, planned_cluster(config), device_type=device_type(), price=show.price_per_gpu_hour))
        return 0
    work = functools.partial(run_training, PostTrainer, parsed, plan, start.source, start.earlier)
    return Job(place, config.launch, work)


def show_dry_run(parsed: ParsedRun) -> int:
    """Print what a step of --lora-r sends and holds, beside one that trains all weights."""
    lora = post_configs(parsed).lora
    if lora.lora_r is None:
        raise ValueError("--dry-run: without --lora-r a step is that of pretrain_gpt.py --dry-run")
    cluster, rank = planned_cluster(parsed.config), parsed.show.dry_run_rank
    print(dry_run_lora(parsed.config, lora, cluster, rank=rank).describe())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
