"""Test all flags of a run together: parsing, precedence of their sources, and defaults equal to Megatron's."""

import dataclasses
import re
import typing
from typing import Any

from helpers.refusals import not_refused, table
from helpers.small_run import ROOT, SMALL, parse
from train_tokenizer import TrainTokenizerConfig

from megazpp.base.command_line import FlagParser
from megazpp.base.flag_tables import read_megatron_flags, read_other_flags
from megazpp.base.flags import flag_name
from megazpp.convert.config import ConvertConfig
from megazpp.data.preprocess import PreprocessConfig
from megazpp.features import FEATURES
from megazpp.post_training.config import EXTRA
from megazpp.run.arguments import parse_run_config, run_configs, section_configs
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster

CLASSES = (*run_configs().values(), *section_configs(FEATURES))

# flags whose default differs from Megatron-LM's, and the reason for the difference
OTHER_DEFAULTS = {
    "--distributed-backend": "nccl needs GPUs; without the flag the device decides",
    **{f"--{use}data-path": "an empty list instead of None" for use in ("", "train-", "valid-", "test-")},
    "--local-rank": "None instead of the environment's",
    "--zero-stage": "Megatron-DeepSpeed's; None leaves it to --use-distributed-optimizer",
    "--overlap-grad-reduce": "None: on with --zeropp",
    "--overlap-param-gather": "None: on with --zeropp",
}


# Megatron-LM's most common flags and their defaults, from a stored file
MEGATRON = dict(
    line.split(maxsplit=1)
    for line in (ROOT / "tests/helpers/megatron_defaults.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("--")
)


# ---- names and defaults of flags --------------------------------------------------------------------------------


def test_invalid_literal_is_rejected_when_a_config_is_built_in_python():
    rows = []
    for config in (*CLASSES, *EXTRA, PreprocessConfig, TrainTokenizerConfig, ConvertConfig):
        for field in dataclasses.fields(config):
            hint = str(typing.get_type_hints(config)[field.name])
            if "Literal" in hint:
                value = ("mlp",) if "tuple" in hint else "mlp"
                rows.append((config, {field.name: value}, f"{flag_name(field)} mlp is not one of "))
    assert len(rows) > 30
    assert not not_refused(rows, lambda config, values: config(**values))


def test_every_common_megatron_flag_is_ours_or_listed_but_not_both():
    ours, others = FlagParser(CLASSES, program="x").spellings, read_megatron_flags().keys()
    assert not ours & others
    assert not MEGATRON.keys() - ours - others


OTHERS = """
--tp 2 | --tp is not a flag: use --tensor-model-parallel-size
--Learning_Rate 1 | --Learning_Rate is not a flag: use --lr
--bs 8 | use --micro-batch-size (samples per rank and pass) and --global-batch-size (samples per step)
--dp 2 | use --nproc (the data-parallel size is the number of ranks / --tensor-model-parallel-size /
--pp 2 | use --tensor-model-parallel-size and --zero-stage 3 (pipeline parallelism is not supported)
--epochs 3 | use --train-iters or --train-samples (the length of a run is a number of steps or samples)
--gradient-accumulation-steps 4 | use --global-batch-size (one step accumulates --global-batch-size / (
--no-lr | --no-lr is not a flag: --lr takes a value and cannot be switched off; give another value
--no-qqq | --no-qqq is not a flag
"""


def test_flag_of_another_project_is_refused_with_the_flags_to_use_here():
    assert not not_refused(table(OTHERS), parse)


def test_table_of_other_projects_names_only_flags_that_exist_here():
    ours = FlagParser(CLASSES, program="x").spellings
    everywhere = ours | {flag_name(field) for config in EXTRA for field in dataclasses.fields(config)}
    unknown = {name: {*re.findall(r"--[\w-]+", remedy)} - everywhere for name, remedy in read_other_flags().items()}
    assert {name: flags for name, flags in unknown.items() if flags} == {}
    assert not read_other_flags().keys() & (ours | read_megatron_flags().keys())


def test_defaults_equal_megatrons():
    fields, compared = [field for config in CLASSES for field in dataclasses.fields(config)], 0
    ours = {name: field.default for field in fields for name in (flag_name(field), *field.metadata["flag"].aliases)}
    for name, megatron in MEGATRON.items():
        if name.startswith("--no-") and (switch := name.replace("--no-", "--")) in ours:
            # Megatron-LM has --no-FLAG as a switch, so the default of our FLAG must be True
            assert (megatron.removesuffix("(off)"), ours[switch]) == ("flag", True)
        elif name in ours and name not in OTHER_DEFAULTS:
            compared += 1
            assert same_default(ours[name], megatron), (name, ours[name], megatron)
    assert compared > 90


def same_default(ours: Any, megatron: str) -> bool:
    if isinstance(ours, bool):
        return megatron in ("flag", "flag(off)") and not ours
    if isinstance(ours, float):
        return ours == float(megatron)
    return megatron == (str(list(ours)) if isinstance(ours, tuple) else str(ours) or "None")


# ---- parsing of command lines and flag files --------------------------------------------------------------------


def test_last_place_that_gives_a_flag_sets_value_and_origin():
    """Check which place sets each flag: the last one on the command line or in a file wins.

    Without a flag file and flags of a model, the config gpt_tiny is used.
    """
    parsed = parse("@configs/gpt_125m.args --lr 1e-4")
    config, origins, values = parsed.config, parsed.origins, parsed.values()
    assert (config.schedule.lr, config.model.num_layers, config.data.seq_length) == (1e-4, 12, 2048)
    assert origins["lr"] == "command line"
    assert origins["num_layers"].split(":")[0].endswith("configs/gpt_125m.args")
    assert "configs/common/gpt3.args:" in origins["seq_length"]
    assert ("sgd_momentum" in origins, values["lr"], values["sgd_momentum"]) == (False, 1e-4, 0.9)
    tiny, small = parse("--train-iters 7"), parse(SMALL)
    assert (tiny.config.batches.train_iters, tiny.config.model.num_layers) == (7, 2)
    assert (parsed.name, tiny.name, small.name) == ("gpt_125m", "gpt_tiny", "run")
    assert small.config.data.text_path == ()


def test_report_parses_back_to_the_same_config_without_print_config(tmp_path):
    # flags that do not contradict --zero-weight-delta auto, which is in the file
    zero = "--zeropp --zero-quantized-weights"
    parsed = parse(f"@configs/llama_8b.args --print-config --data-path 0.3 a 0.7 'b c' --no-bf16 {zero}")
    (tmp_path / "flags.args").write_text(parsed.report())
    again = parse(f"@{tmp_path}/flags.args")
    assert (parsed.show.print_config, again.show.print_config) == (True, False)
    assert again.config == parsed.config


def test_megatron_script_flags_work_in_a_flag_file(tmp_path):
    (tmp_path / "pasted.args").write_text(
        """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel \\
        --use-distributed-optimizer --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
        --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 64 \\
        --rampup-batch-size 32 32 1000 --lr 0.00015 --train-samples 500000 --lr-decay-samples 320000 \\
        --min-lr 1.0e-5 --lr-warmup-fraction .01 --DDP-impl local --use-mcore-models \\
        --attention-backend auto --fp16 --loss-scale-window 500 --data-impl mmap --split 949,50,1 \\
        --data-path 0.5 my-gpt2_text_document 0.5 "other corpus" --distributed-backend gloo \\
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer
        """
    )
    parsed = parse(f"@{tmp_path}/pasted.args")
    plan = plan_run(parsed.config, Cluster(num_nodes=1, ranks_per_node=8), device_type="cpu")
    assert (plan.layout.tp, plan.layout.data, parsed.config.zero.stage) == (2, 4, 1)
    assert parsed.config.data.data_path == ("0.5", "my-gpt2_text_document", "0.5", "other corpus")
    assert (parsed.config.launch.distributed_backend, parsed.config.loss_scale.loss_scale_window) == ("gloo", 500.0)
    assert len(parsed.notices) == 4


EXCLUDED = [  # each entry: flags in a file, and flags on the command line that exclude and so replace them
    ("--lr-warmup-fraction 0.06", "--lr-warmup-iters 0"),
    ("--train-samples 640 --lr-decay-samples 64 --rampup-batch-size 2 2 8", "--train-iters 10"),
    ("--lr-decay-iters 10 --lr-warmup-iters 3", "--lr-decay-samples 64 --train-samples 640"),
    ("--lr-wsd-decay-iters 3", "--lr-wsd-decay-samples 64 --lr-decay-style WSD --train-samples 640"),
    ("--data-path a", "--mock-data"),
    ("--text-path a.txt", "--train-data-path b --valid-data-path c"),
    ("--train-data-path b --test-data-path c", "--data-path a"),
    ("--swiglu", "--squared-relu"),
    ("--squared-relu", "--openai-gelu"),
    ("--use-rotary-position-embeddings", "--position-embedding-type none"),
    ("--recompute-granularity full", "--recompute-activations"),
    ("--bf16 --grad-reduce-in-bf16", "--fp16"),
    ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32 --bf16"),
    ("--zero-stage 3", "--use-distributed-optimizer"),
    ("--num-distributed-optimizer-instances 2", "--hsdp"),
    ("--vocab-file a --merge-file b", "--tokenizer-model c"),
    ("--override-lr-scheduler", "--use-checkpoint-lr-scheduler"),
]


def test_command_line_flag_replaces_file_flags_that_it_excludes(tmp_path):
    base = SMALL.replace("--mock-data", "").replace("--train-iters 10", "")
    for file, hand in EXCLUDED:
        (tmp_path / "a.args").write_text(f"{base}\n{file}\n")
        # A flag file's flags replace flags of a file that it includes, as the command line does.
        (tmp_path / "b.args").write_text(f"@a.args\n{hand}\n")
        wanted = parse(f"{base} {hand}")
        for text in (f"@{tmp_path}/a.args {hand}", f"{hand} @{tmp_path}/a.args", f"@{tmp_path}/b.args"):
            found = parse(text)
            assert found.config == wanted.config, (file, text)
            assert found.origins.keys() == wanted.origins.keys()
            assert f"a.args:2: {file.split(' --')[0]} gives way to {hand.split(' --')[0]}" in found.notices[0]


def test_flag_set_to_off_replaces_no_flag_of_a_file(tmp_path):
    (tmp_path / "a.args").write_text(f"{SMALL} --bf16 --swiglu --lr-warmup-fraction 0.1")
    found = parse(f"@{tmp_path}/a.args --no-fp16 --no-squared-relu --data-path --lr-warmup-fraction none")
    assert (found.config.precision.bf16, found.config.model.swiglu, found.notices) == (True, True, ())


def test_finetuning_without_a_flag_file_names_the_implied_file():
    def notices(*words: str) -> str:
        return "\n".join(parse_run_config([*words], ROOT, features=FEATURES).notices)

    said = notices("--load", "x", "--finetune", "--lr", "1e-2")
    assert "--finetune without a flag file: flags that are not set have the values of configs/gpt_tiny.args" in said
    for words in ((), ("--load", "x"), ("@configs/gpt_tiny.args", "--load", "x", "--finetune")):
        assert "without a flag file" not in notices(*words)
