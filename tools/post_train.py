"""Post-train the model of a checkpoint: supervised fine-tuning, reward models, DPO, GRPO or PPO.

python tools/post_train.py --objective sft --load base/ --save sft/ --train-data-path chats.jsonl --train-iters 500
python tools/post_train.py --objective dpo --load sft/ --save dpo/ --train-data-path pairs.jsonl --train-iters 200
python tools/post_train.py --objective grpo --load sft/ --save grpo/ --train-data-path prompts.jsonl \\
    --train-iters 300 --reward-funcs my_rewards.py:correct
python tools/post_train.py --objective grpo --load grpo/ --save grpo/ ...       resumes an interrupted run

The checkpoint determines the model, the tokenizer and the precision. Flags for the layout and ZeRO++ are the same as
for pretrain_gpt.py. Other flags have the names of TRL's options.

Averages and normalizations cover all ranks. A sum of losses is divided by the number of tokens, pairs or completions of
the whole optimizer step. PPO's advantages are whitened over all completions that were sampled together. In some places
TRL instead averages over one process or one micro-batch.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

from megazpp.base.program import LAUNCHER_PID, Problems, announce, answer_flags
from megazpp.features import FEATURES
from megazpp.post_training.config import DEFAULTS, EXTRA, TAKEN, post_configs
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.flag_checks import check_paths

ROOT = Path(__file__).resolve().parents[1]


def parse(argv: list[str]) -> ParsedRun:
    """Return the flags of the command line, and check that --objective and --load are given.

    Flags of the model, tokenizer and precision, and the seed, may be left out: `find_start` later reads them from the
    checkpoint. Other flags that are left out have post-training's defaults.

    Raises:
        ValueError: --objective or --load is missing.
    """
    options: dict[str, Any] = {"features": FEATURES, "extra": EXTRA, "defaults": DEFAULTS, "taken": TAKEN}
    description = (__doc__ or "").partition("\n")[0]
    parsed = parse_run_config(
        argv, ROOT, program="post_train.py", description=description, default_file=None, **options
    )
    problems = Problems()
    with problems:
        if post_configs(parsed).training.objective is None:
            raise ValueError("--objective is missing: give sft, reward, dpo, grpo or ppo")
    with problems:
        if parsed.config.checkpoint.load is None:
            raise ValueError("--load is missing: give the folder of checkpoints that post-training begins with")
    problems.raise_all()
    return parsed


# answers --help and rejects most wrong flags before the imports below, which take seconds
check_inputs_exist = functools.partial(check_paths, needs_load=True, pairs=False)
answer_flags(__name__, parse, check_inputs_exist)
announce(__name__)  # says on a terminal that the program imports torch, which takes seconds

from megazpp.parallel.failure import report_tracebacks

report_tracebacks()  # tells the other hosts if one of the imports below fails on this host

from megazpp.base.program import launched_rank, leave, user_errors
from megazpp.checkpoint.read import start_of
from megazpp.model.backends import check_device
from megazpp.parallel.launch import detect_rank_info, device_type
from megazpp.parallel.store import RESTART_COUNT
from megazpp.parallel.worker import worker_process
from megazpp.planner.config import PlanConfig
from megazpp.planner.report import print_report, report_parts
from megazpp.planner.variants import changed
from megazpp.post_training.plan import describe_phases, plan_models
from megazpp.post_training.setup import (
    check_files,
    check_post_training,
    find_start,
)
from megazpp.post_training.trainer import PostTraining
from megazpp.run.checks import plan_run
from megazpp.run.start import (
    announced_cluster,
    distributed_program,
    facts_of,
    hold_run_dir,
    planned_cluster,
    start_workers,
)
from megazpp.run.trainer import Trainer, open_run


@distributed_program
def main(argv: list[str]) -> int:
    """Post-train a model as a worker, or check the flags and start the workers. Return the exit code."""
    # ---- read the flags
    parsed = parse(argv)
    check_inputs_exist(parsed)  # again, because ranks that torchrun or srun has started skip `answer_flags`

    # ---- find the checkpoint from which the run starts or resumes, and complete the flags from it
    parsed, source, earlier = find_start(parsed, restarted=int(os.environ.get(RESTART_COUNT, "0")) > 0)
    if parsed.answers():
        return 0

    # ---- check the flags before anything is allocated or written. The run's plan made here only serves these checks:
    # workers make it again, because they may discover a different cluster.
    config, place = parsed.config, detect_rank_info(parsed.config.launch)
    problems, plans = Problems(), config.section(PlanConfig).plan
    with problems:
        announced = announced_cluster(config, place)
        plan = plan_run(config, announced, device_type=device_type(), start=start_of(source, earlier))
        check_post_training(config, post_configs(parsed), plan.batches)
    if plans and not problems:
        show_plan(parsed, earlier.vocab_size)
        return 0
    with problems:
        check_device(config.model, device_type())
    with problems:
        # Rank 0 checks the files, unless MegaZ++'s launcher has started it and has thus checked them already.
        if launched_rank() == 0 and LAUNCHER_PID not in os.environ and not plans:
            check_files(parsed, earlier)
    problems.raise_all()
    hold_run_dir(parsed)

    # ---- start the workers, or train if this process is a worker
    if not place.started:
        return start_workers(place, config.launch, main)
    facts = facts_of(parsed, earlier)  # facts that must be equal on all ranks
    with worker_process(place, config.launch, facts) as worker, open_run(worker, parsed, announced, source) as run:
        # ---- build the models, the objective and the data of the run
        with user_errors():
            post = PostTraining(run)
            parts = post.parts()
        trainer = Trainer(run, parts)
        # ---- train and evaluate
        start = trainer.load()
        progress = trainer.train(start)
        post.save_adapter()
        trainer.finish(progress)
    return leave(0)


def show_plan(parsed: ParsedRun, vocab_size: int) -> None:
    """Print the estimated memory of each phase of a post-training run, with all its models.

    Without LoRA, also print the report of --plan for the policy's training steps alone, with the loss of a language
    model.

    Args:
        parsed: the flags.
        vocab_size: size of the checkpoint's vocabulary, used if no flag gives one.
    """
    config, configs, cluster = parsed.config, post_configs(parsed), planned_cluster(parsed.config)
    config = changed(config, tokenizer={"vocab_size": config.tokenizer.known_vocab_size or vocab_size})
    plan = plan_run(config, cluster, device_type=device_type())
    on_cpu = cluster.device is None and device_type() == "cpu"
    print(parsed.notes() + "\n".join(describe_phases(plan_models(config, configs, plan, on_cpu=on_cpu))))
    if configs.training.draws:
        print("sampling: the activations of the prompts are not included")
    if configs.lora.lora_r is None:
        print("\nonly the policy's training steps, with the loss of a language model:")
        print_report(report_parts(config, cluster, device_type=device_type()))


if __name__ == "__main__":
    raise SystemExit(main())
