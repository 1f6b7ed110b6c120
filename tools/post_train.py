"""Post-train the model of a checkpoint: supervised fine-tuning, reward models, DPO, GRPO or PPO.

python tools/post_train.py --objective sft --load base/ --save sft/ --train-data-path chats.jsonl --train-iters 500
python tools/post_train.py --objective dpo --load sft/ --save dpo/ --train-data-path pairs.jsonl --train-iters 200
python tools/post_train.py --objective grpo --load sft/ --save grpo/ --train-data-path prompts.jsonl --train-iters 300 \
    --reward-funcs my_rewards.py:correct
python tools/post_train.py --objective grpo --load grpo/ --save grpo/ ...       resumes an interrupted run

The checkpoint determines the model, the tokenizer and the precision. Flags for the layout and ZeRO++ are the same as
for pretrain_gpt.py. Other flags have the names of TRL's options.

Averages and normalizations cover all ranks: a loss is divided by the count of the whole optimizer step, and advantages
are whitened over the whole rollout. In some places TRL instead uses one process or one micro-batch.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import LAUNCHER_PID, announce, launched_rank

announce("post_train.py", "megazpp-post-train")  # before the imports below, because importing torch takes seconds

from megazpp.base.program import program, say_notices
from megazpp.checkpoint.read import start_of
from megazpp.features import FEATURES
from megazpp.model.backends import check_device
from megazpp.parallel.launch import RESTART_COUNT, detect_rank_info, device_type
from megazpp.planner.feature import PlanConfig
from megazpp.planner.report import print_report, report_parts
from megazpp.planner.variants import changed
from megazpp.post_training.plan import describe_phases, plan_models
from megazpp.post_training.setup import (
    EXTRA,
    check_files,
    check_post_training,
    find_start,
    post_configs,
)
from megazpp.post_training.trainer import post_training
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checks import check_run_config
from megazpp.run.ranks import Job, announced_cluster, hold_run_dir, planned_cluster, run_on_ranks
from megazpp.run.training import run_training

ROOT = Path(__file__).resolve().parents[1]


@program
def main(argv: list[str]) -> int:
    """Check the flags, then run as a worker or launch the workers. Return the exit code."""
    return run_on_ranks(functools.partial(prepare, argv))


def prepare(argv: list[str]) -> Job | int:
    """Parse and check the flags as far as possible before workers start.

    Returns:
        The work for each rank, or the exit code if --print-config or --plan replaces training.
    Raises:
        ValueError: flags are wrong. The message names each flag and its value.
    """
    # Flags.
    first_line = (__doc__ or "").partition("\n")[0]
    name = {"program": "post_train.py", "description": first_line}
    parsed = parse_run_config(argv, ROOT, **name, features=FEATURES, extra=EXTRA, default_file=None)

    # The checkpoint to start from.
    parsed, source, earlier = find_start(parsed, restarted=int(os.environ.get(RESTART_COUNT, "0")) > 0)
    if parsed.show.print_config:
        say_notices(parsed.notices)
        print(parsed.report())
        return 0

    # Checks of all flags together, of this machine and of the data.
    config, place = parsed.config, detect_rank_info(parsed.config.launch)
    start = start_of(source, earlier)
    plan = check_run_config(config, announced_cluster(config, place), device_type=device_type(), start=start)
    check_post_training(config, post_configs(parsed), plan.batches)
    if config.section(PlanConfig).plan:
        show_plan(parsed, earlier.vocab_size)
        return 0
    check_device(config.model, device_type())
    if launched_rank() == 0 and LAUNCHER_PID not in os.environ:  # our launcher has checked the files for its workers
        check_files(parsed, earlier)
    hold_run_dir(parsed)
    work = functools.partial(run_training, post_training, parsed, plan, source, earlier)
    return Job(place, config.launch, work)


def show_plan(parsed: ParsedRun, vocab_size: int) -> None:
    """Print the estimated memory of all models, and without LoRA also the estimate of the policy's training steps.

    Args:
        parsed: the flags.
        vocab_size: size of the checkpoint's vocabulary, used if no flag gives one.
    """
    config, configs, cluster = parsed.config, post_configs(parsed), planned_cluster(parsed.config)
    config = changed(config, tokenizer={"vocab_size": config.tokenizer.vocab_size or vocab_size})
    plan = check_run_config(config, cluster, device_type=device_type())
    on_cpu = cluster.device is None and device_type() == "cpu"
    print(parsed.notes() + "\n".join(describe_phases(plan_models(config, configs, plan, on_cpu=on_cpu))))
    if configs.training.draws:
        print("sampling: the activations of the prompts are not included")
    if configs.lora.lora_r is None:
        print("\nonly the policy's training steps, with the loss of a language model:")
        print_report(report_parts(config, cluster, device_type=device_type()))


if __name__ == "__main__":
    raise SystemExit(main())
